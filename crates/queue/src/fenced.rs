//! A channel whose operations signal fences.

use std::collections::HashMap;
use std::time::Duration;

use dmalane_addr::Promise;

use crate::{Channel, Completion, Limits, Refused, Ticket, Transfer};

/// A channel that signals a fence when an operation has ended: kept when every byte was moved, failed otherwise. Fences are
/// those of [`dmalane_addr::Timeline`], so a bind queue may wait for a transfer.
///
/// Fences are signalled by [`Channel::poll`] and [`Channel::wait`]. Dropped with operations in flight, it fails what it
/// has not seen end.
pub struct Fenced<C> {
    channel: C,
    promises: HashMap<Ticket, Promise>,
}

impl<C: Channel> Fenced<C> {
    /// Signals fences for this channel.
    pub fn new(channel: C) -> Self {
        Self { channel, promises: HashMap::new() }
    }

    /// As [`Channel::submit`], and keeps `promise` when the operation has moved every byte.
    ///
    /// # Errors
    /// [`Refused`] gives the operation back, and the promise comes with it.
    #[allow(clippy::result_large_err)] // as that of `submit`, and a promise
    pub fn submit_with(
        &mut self,
        transfer: Transfer<C::Far>,
        promise: Promise,
    ) -> Result<Ticket, (Refused<C::Far>, Promise)> {
        match self.channel.submit(transfer) {
            Ok(ticket) => {
                self.promises.insert(ticket, promise);
                Ok(ticket)
            }
            Err(refused) => Err((refused, promise)),
        }
    }

    fn signal(&mut self, ended: &[Completion<C::Far>]) {
        for completion in ended {
            let promise = self.promises.remove(&completion.ticket);
            if let (Some(promise), Ok(())) = (promise, &completion.result) {
                promise.keep();
            }
        }
    }
}

impl<C: Channel> Channel for Fenced<C> {
    type Far = C::Far;

    fn limits(&self) -> Limits {
        self.channel.limits()
    }

    fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    fn submit(&mut self, transfer: Transfer<C::Far>) -> Result<Ticket, Refused<C::Far>> {
        self.channel.submit(transfer)
    }

    fn poll(&mut self, done: &mut Vec<Completion<C::Far>>) -> usize {
        let ended = self.channel.poll(done);
        self.signal(&done[done.len() - ended..]);
        ended
    }

    fn wait(&mut self, done: &mut Vec<Completion<C::Far>>, timeout: Duration) -> usize {
        let ended = self.channel.wait(done, timeout);
        self.signal(&done[done.len() - ended..]);
        ended
    }

    fn halted(&self) -> Option<String> {
        self.channel.halted()
    }

    fn stop(&mut self, why: &str) {
        self.channel.stop(why);
    }
}

impl<C: std::fmt::Debug> std::fmt::Debug for Fenced<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fenced").field("channel", &self.channel).field("promises", &self.promises.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::fake::Fake;

    #[test]
    fn the_channel_within_is_stopped_and_says_why_it_halted() {
        let mut fenced = Fenced::new(Fake::default());
        assert_eq!(fenced.halted(), None);
        fenced.stop("enough");
        assert_eq!((fenced.halted().as_deref(), fenced.channel.halted.as_deref()), (Some("enough"), Some("enough")));
    }
}
