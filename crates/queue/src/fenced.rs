//! A queue whose operations signal fences.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use dmalane_addr::Promise;

use crate::{Abilities, Cancelled, Completion, Limits, Operation, Queue, Refused, Stats, StopReason, Ticket};

/// A queue that signals a fence when an operation has ended: kept when every byte was moved, failed otherwise. Fences
/// are those of [`dmalane_addr::Timeline`], so a bind queue may wait for a transfer.
///
/// Fences are signalled by [`Queue::poll`] and [`Queue::wait`]. Dropped with operations in flight, it fails the fences
/// of those that it has not seen end; so does a cancellation that takes an operation back.
pub struct Fenced<Q> {
    queue: Q,
    promises: HashMap<Ticket, Promise>,
}

impl<Q: Queue> Fenced<Q> {
    /// Signals fences for this queue.
    pub fn new(queue: Q) -> Self {
        Self { queue, promises: HashMap::new() }
    }

    /// As [`Queue::submit`], and keeps `promise` when the operation has moved every byte.
    ///
    /// # Errors
    /// [`Refused`] gives the operation back, and the promise comes with it.
    #[allow(clippy::result_large_err)] // as that of `submit`, and a promise
    pub fn submit_with(
        &mut self,
        operation: Operation<Q::Addr>,
        promise: Promise,
    ) -> Result<Ticket, (Refused<Q::Addr>, Promise)> {
        match self.queue.submit(operation) {
            Ok(ticket) => {
                self.promises.insert(ticket, promise);
                Ok(ticket)
            }
            Err(refused) => Err((refused, promise)),
        }
    }

    fn signal(&mut self, ended: &[Completion<Q::Addr>]) {
        for completion in ended {
            let promise = self.promises.remove(&completion.ticket);
            if let (Some(promise), Ok(())) = (promise, &completion.result) {
                promise.keep();
            }
        }
    }
}

impl<Q: Queue> Queue for Fenced<Q> {
    type Addr = Q::Addr;

    fn limits(&self) -> Limits {
        self.queue.limits()
    }

    fn abilities(&self) -> Abilities {
        self.queue.abilities()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn submit(&mut self, operation: Operation<Q::Addr>) -> Result<Ticket, Refused<Q::Addr>> {
        self.queue.submit(operation)
    }

    fn flush(&mut self) {
        self.queue.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        let ended = self.queue.poll(done);
        self.signal(&done[done.len() - ended..]);
        ended
    }

    fn wait(&mut self, done: &mut Vec<Completion<Q::Addr>>, timeout: Duration) -> usize {
        let ended = self.queue.wait(done, timeout);
        self.signal(&done[done.len() - ended..]);
        ended
    }

    fn halted(&self) -> Option<StopReason> {
        self.queue.halted()
    }

    fn stop(&mut self, reason: StopReason) {
        self.queue.stop(reason);
    }

    fn restart(&mut self) -> bool {
        self.queue.restart()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<Q::Addr> {
        let cancelled = self.queue.cancel(ticket);
        if let Cancelled::TakenBack(_) = &cancelled {
            self.promises.remove(&ticket);
        }
        cancelled
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> bool {
        self.queue.set_timeout(timeout)
    }

    fn stats(&self) -> Option<Stats> {
        self.queue.stats()
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        self.queue.event()
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
    }
}

impl<Q: std::fmt::Debug> std::fmt::Debug for Fenced<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fenced").field("queue", &self.queue).field("promises", &self.promises.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::fake::Fake;

    #[test]
    fn the_queue_within_is_stopped_and_says_why_it_halted() {
        let mut fenced = Fenced::new(Fake::default());
        assert_eq!(fenced.halted(), None);
        let reason = Some(StopReason::Requested("enough".into()));
        fenced.stop(StopReason::Requested("enough".into()));
        assert_eq!((fenced.halted(), &fenced.queue.halted), (reason.clone(), &reason));
    }
}
