//! Waiting for operations.

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::{Channel, Completion, OpError, Refused, Transfer};

/// Why [`run`] did not move the bytes.
#[derive(Debug, Error)]
pub enum RunError<F: std::fmt::Debug> {
    /// The channel did not take the operation.
    #[error(transparent)]
    Refused(#[from] Refused<F>),
    /// The operation failed; here it is back.
    #[error("{1}")]
    Failed(Transfer<F>, OpError),
    /// The operation did not end in time. The channel still owns the buffer.
    #[error("the operation did not end within {0:?}")]
    TimedOut(Duration),
    /// The channel has halted, and its device has not let go of the buffer.
    #[error("the channel has halted: {0}")]
    Halted(String),
    /// Other operations were in flight; [`run`] is for a channel of one's own.
    #[error("other operations are in flight")]
    Busy,
}

/// How long a channel that has halted or was stopped may take to end what it has: a device that still answers lets go in far less.
pub const LETS_GO: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 2000 });
/// The longest wait without a look at whether the channel has halted.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 200 });
/// What counts at most of the time between two looks of a [`StallWatch`].
const COUNTS: Duration = Duration::from_secs(1);

/// Notices that a channel has halted and does not end what it has in flight: its device is gone, or deaf.
#[derive(Debug, Default)]
pub struct HaltWatch(Option<Instant>);

impl HaltWatch {
    /// Why the channel has halted, once it has been seen so for two seconds with something still in flight. To be asked now and then.
    pub fn lost<C: Channel + ?Sized>(&mut self, channel: &C) -> Option<String> {
        let why = channel.halted().filter(|_| channel.in_flight() > 0);
        if why.is_none() {
            self.0 = None;
        }
        why.filter(|_| self.0.get_or_insert_with(Instant::now).elapsed() >= LETS_GO)
    }
}

/// Notices that a channel has ended nothing for too long although something is in flight, whether or not it has halted. Of the time between
/// two looks a second counts at most: where this process was stopped or did something else, that is not the device's fault.
#[derive(Debug, Default)]
pub struct StallWatch {
    last: Option<Instant>,
    quiet: Duration,
}

impl StallWatch {
    /// Something has ended, or nothing is in flight: begins anew.
    pub fn moved(&mut self) {
        *self = Self::default();
    }

    /// What is wrong, once nothing has ended for `patience`. To be asked after every look at the channel that found nothing.
    pub fn lost(&mut self, patience: Duration) -> Option<String> {
        self.look(Instant::now(), patience)
    }

    fn look(&mut self, now: Instant, patience: Duration) -> Option<String> {
        let before = self.last.replace(now).unwrap_or(now);
        self.quiet += now.saturating_duration_since(before).min(COUNTS);
        (self.quiet >= patience).then(|| format!("it ended nothing for {patience:?}"))
    }
}

/// Runs one operation to its end on a channel that has no other, and gives the buffer back.
///
/// # Errors
/// [`RunError`].
pub fn run<C: Channel>(
    channel: &mut C,
    transfer: Transfer<C::Far>,
    timeout: Duration,
) -> Result<Transfer<C::Far>, RunError<C::Far>> {
    if channel.in_flight() > 0 {
        return Err(RunError::Busy);
    }
    let _only = channel.submit(transfer)?;
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while done.is_empty() {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left.min(LOOK)) > 0 {
            break;
        }
        if let Some(why) = watch.lost(channel) {
            return Err(RunError::Halted(why));
        }
        if left.is_zero() {
            return Err(RunError::TimedOut(timeout));
        }
    }
    let Completion { transfer, result, .. } = done.remove(0);
    match result {
        Ok(()) => Ok(transfer),
        Err(e) => Err(RunError::Failed(transfer, e)),
    }
}

/// Waits until nothing is in flight, `timeout` has passed, or the channel has halted for good, and returns what ended.
pub fn drain<C: Channel + ?Sized>(channel: &mut C, timeout: Duration) -> Vec<Completion<C::Far>> {
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while channel.in_flight() > 0 {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left.min(LOOK)) == 0 && (left.is_zero() || watch.lost(channel).is_some()) {
            break;
        }
    }
    done
}

/// A channel for tests that ends nothing until told.
#[cfg(test)]
pub(crate) mod fake {
    use dmalane_dma::{AnonHeap, Heap};

    use super::*;
    use crate::{Direction, Far, Limits, Ticket};

    #[derive(Clone, Copy, PartialEq, Debug)]
    pub(crate) struct Anywhere;

    impl Far for Anywhere {
        fn advance(&self, _: u64) -> Option<Self> {
            Some(Self)
        }
    }

    #[derive(Default)]
    pub(crate) struct Fake {
        pub flying: Vec<(Ticket, Transfer<Anywhere>)>,
        pub halted: Option<String>,
        /// What it has ends at the next look.
        pub ends: bool,
    }

    impl Channel for Fake {
        type Far = Anywhere;

        fn limits(&self) -> Limits {
            Limits { capacity: 4, max_len: 1 << 20 }
        }

        fn in_flight(&self) -> usize {
            self.flying.len()
        }

        fn submit(&mut self, transfer: Transfer<Anywhere>) -> Result<Ticket, Refused<Anywhere>> {
            let ticket = Ticket::new(self.flying.len() as u64);
            self.flying.push((ticket, transfer));
            Ok(ticket)
        }

        fn poll(&mut self, done: &mut Vec<Completion<Anywhere>>) -> usize {
            let before = done.len();
            if self.ends {
                let ended = self.flying.drain(..);
                done.extend(ended.map(|(ticket, transfer)| Completion { ticket, transfer, result: Ok(()) }));
            }
            done.len() - before
        }

        fn wait(&mut self, done: &mut Vec<Completion<Anywhere>>, timeout: Duration) -> usize {
            let ended = self.poll(done);
            if ended == 0 && !self.flying.is_empty() {
                std::thread::sleep(timeout.min(Duration::from_millis(5)));
            }
            ended
        }

        fn halted(&self) -> Option<String> {
            self.halted.clone()
        }

        fn stop(&mut self, why: &str) {
            self.halted = Some(why.to_owned());
        }
    }

    pub(crate) fn transfer() -> Transfer<Anywhere> {
        let part = AnonHeap::new().allocate(8192).unwrap().share().into_part();
        Transfer { part, direction: Direction::ToHost, far: Anywhere }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::{Fake, transfer};
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn only_a_channel_that_lets_go_of_nothing_is_lost() {
        let (mut watch, mut channel) = (HaltWatch::default(), Fake::default());
        let mut lost_after = |channel: &Fake, time| {
            let begun = Instant::now();
            while begun.elapsed() < time {
                if let Some(why) = watch.lost(channel) {
                    return Some((why, begun.elapsed()));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        };
        channel.stop("the card is gone");
        assert!(lost_after(&channel, 2 * LETS_GO).is_none(), "it has nothing to let go of");
        let _only = channel.submit(transfer()).unwrap();
        let (why, after) = lost_after(&channel, LONG).unwrap();
        assert!(why == "the card is gone" && after >= LETS_GO, "{why} after {after:?}");
        channel.halted = None;
        assert!(lost_after(&channel, 2 * LETS_GO).is_none(), "it runs");
        // From the moment on at which it was seen so, not from an earlier one.
        channel.stop("again");
        assert!(lost_after(&channel, LONG).unwrap().1 >= LETS_GO);
    }

    #[test]
    fn nobody_waits_for_a_channel_that_is_lost() {
        let begun = Instant::now();
        let mut channel = Fake { halted: Some("gone".into()), ..Fake::default() };
        assert!(matches!(run(&mut channel, transfer(), LONG), Err(RunError::Halted(why)) if why == "gone"));
        assert!(drain(&mut channel, LONG).is_empty() && channel.in_flight() == 1);
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        // One that runs has all of its time, and what ends is given back.
        let begun = Instant::now();
        channel.halted = None;
        assert!(drain(&mut channel, 2 * LETS_GO).is_empty() && begun.elapsed() >= 2 * LETS_GO);
        channel.ends = true;
        assert_eq!(drain(&mut channel, LONG).len(), 1);
    }

    #[test]
    fn time_in_which_nobody_looked_is_not_the_devices_fault() {
        let (mut watch, start) = (StallWatch::default(), Instant::now());
        let at = |s: f64| start + Duration::from_secs_f64(s);
        let patience = Duration::from_secs(3);
        assert_eq!(watch.look(at(0.0), patience), None);
        assert_eq!(watch.look(at(0.9), patience), None);
        // Stopped by the user for a minute, which counts as a second.
        assert_eq!(watch.look(at(60.0), patience), None);
        assert_eq!(watch.look(at(61.0), patience), None);
        assert_eq!(watch.look(at(61.2), patience).as_deref(), Some("it ended nothing for 3s"));
        watch.moved();
        assert_eq!(watch.look(at(70.0), patience), None);
    }
}
