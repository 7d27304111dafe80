//! Waiting for operations.

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::{Completion, OpError, Operation, Queue, Refusal, Refused, StopReason};

/// Why [`run`] did not move the bytes.
#[derive(Debug, Error)]
#[error("the operation was not done")]
pub struct RunError<A: std::fmt::Debug = crate::DeviceAddr> {
    /// The operation, unless the queue still owns its buffers: it did not end in time, or the queue has halted and its
    /// device has not let go of them.
    pub operation: Option<Operation<A>>,
    /// The failure: [`OpError::Refused`] for an operation that the queue did not take, [`OpError::Stopped`] for one
    /// that it has not given back.
    #[source]
    pub error: OpError,
}

impl<A: std::fmt::Debug> From<Refused<A>> for RunError<A> {
    fn from(Refused { operation, reason }: Refused<A>) -> Self {
        Self { operation: Some(operation), error: reason.into() }
    }
}

/// Timeout within which a halted or stopped queue must end its operations. A device that still answers needs far less.
pub const RELEASE_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 2000 });
/// The longest wait without checking whether the queue has halted.
const CHECK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 200 });
/// At most this much of the time between two checks of a [`StallWatch`] counts.
const COUNTS_AT_MOST: Duration = Duration::from_secs(1);

/// Detects that a queue has halted and does not end its operations: its device is gone, or does not respond.
#[derive(Debug, Default)]
pub struct HaltWatch(Option<Instant>);

impl HaltWatch {
    /// Why the queue has halted, once it has been halted for two seconds with operations still in flight. To be called
    /// regularly.
    pub fn lost<Q: Queue + ?Sized>(&mut self, queue: &Q) -> Option<StopReason> {
        let why = queue.halted().filter(|_| queue.in_flight() > 0);
        if why.is_none() {
            self.0 = None;
        }
        why.filter(|_| self.0.get_or_insert_with(Instant::now).elapsed() >= RELEASE_TIMEOUT)
    }
}

/// Detects that a queue has ended nothing for too long although operations are in flight, whether or not it has halted.
/// Of the time between two checks at most a second counts: the device is not to blame for the time in which this
/// process did not run.
#[derive(Debug, Default)]
pub struct StallWatch {
    last: Option<Instant>,
    quiet: Duration,
}

impl StallWatch {
    /// An operation has ended, or nothing is in flight: starts over.
    pub fn moved(&mut self) {
        *self = Self::default();
    }

    /// The reason, once nothing has ended for `timeout`. To be called after every poll that collected nothing.
    pub fn lost(&mut self, timeout: Duration) -> Option<StopReason> {
        self.check(Instant::now(), timeout)
    }

    fn check(&mut self, now: Instant, timeout: Duration) -> Option<StopReason> {
        let before = self.last.replace(now).unwrap_or(now);
        self.quiet += now.saturating_duration_since(before).min(COUNTS_AT_MOST);
        (self.quiet >= timeout).then_some(StopReason::Timeout(timeout))
    }
}

/// Runs one operation to its end on a queue that has no other in flight (else it is [full](Refusal::Full)), and gives
/// it back.
///
/// # Errors
/// [`RunError`].
pub fn run<Q: Queue + ?Sized>(
    queue: &mut Q,
    operation: Operation<Q::Addr>,
    timeout: Duration,
) -> Result<Operation<Q::Addr>, RunError<Q::Addr>> {
    if queue.in_flight() > 0 {
        return Err(Refused { operation, reason: Refusal::Full }.into());
    }
    let _only = queue.submit(operation)?;
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while done.is_empty() {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if queue.wait(&mut done, left.min(CHECK_EVERY)) > 0 {
            break;
        }
        let late = left.is_zero().then_some(StopReason::Timeout(timeout));
        if let Some(why) = watch.lost(queue).or(late) {
            return Err(RunError { operation: None, error: OpError::Stopped(why) });
        }
    }
    let Completion { operation, result, .. } = done.remove(0);
    match result {
        Ok(()) => Ok(operation),
        Err(error) => Err(RunError { operation: Some(operation), error }),
    }
}

/// Waits until nothing is in flight, `timeout` has passed, or the queue has halted for good, and returns what ended.
pub fn drain<Q: Queue + ?Sized>(queue: &mut Q, timeout: Duration) -> Vec<Completion<Q::Addr>> {
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while queue.in_flight() > 0 {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if queue.wait(&mut done, left.min(CHECK_EVERY)) == 0 && (left.is_zero() || watch.lost(queue).is_some()) {
            break;
        }
    }
    done
}

/// For implementations of [`Queue::wait`]: polls until an operation has ended, none is in flight, or `timeout` has
/// passed. In between `sleep` waits, at most the time that it is given.
pub fn wait_with<Q: Queue + ?Sized>(
    queue: &mut Q,
    done: &mut Vec<Completion<Q::Addr>>,
    timeout: Duration,
    mut sleep: impl FnMut(&mut Q, Duration),
) -> usize {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let ended = queue.poll(done);
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if ended > 0 || queue.in_flight() == 0 || left.is_zero() {
            return ended;
        }
        sleep(queue, left);
    }
}

/// A queue for tests that ends operations only on request.
#[cfg(test)]
pub(crate) mod fake {
    use dmalane_dma::{AnonHeap, Heap};

    use super::*;
    use crate::{Capabilities, DeviceAddr, Limits, Ticket};

    #[derive(Default)]
    pub(crate) struct Fake {
        pub flying: Vec<(Ticket, Operation)>,
        pub halted: Option<StopReason>,
        /// Its operations end at the next poll.
        pub ends: bool,
    }

    impl Queue for Fake {
        type Addr = DeviceAddr;

        fn limits(&self) -> Limits {
            Limits { capacity: 4, max_len: 1 << 20, max_parts: usize::MAX }
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::STOP
        }

        fn in_flight(&self) -> usize {
            self.flying.len()
        }

        fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
            let ticket = Ticket::new(self.flying.len() as u64);
            self.flying.push((ticket, operation));
            Ok(ticket)
        }

        fn flush(&mut self) {}

        fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
            let before = done.len();
            if self.ends {
                let ended = self.flying.drain(..);
                done.extend(ended.map(|(ticket, operation)| {
                    let bytes = operation.bytes();
                    Completion { ticket, operation, result: Ok(()), bytes }
                }));
            }
            done.len() - before
        }

        fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
            let ended = self.poll(done);
            if ended == 0 && !self.flying.is_empty() {
                std::thread::sleep(timeout.min(Duration::from_millis(5)));
            }
            ended
        }

        fn halted(&self) -> Option<StopReason> {
            self.halted.clone()
        }

        fn stop(&mut self, reason: StopReason) {
            self.halted = Some(reason);
        }
    }

    pub(crate) fn operation() -> Operation {
        let slice = AnonHeap::new().allocate(8192).unwrap().share().into_slice();
        Operation::read(slice, DeviceAddr::Card(dmalane_addr::CardAddr::new(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::fake::{Fake, operation};
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn only_a_halted_queue_with_operations_is_lost() {
        let (mut watch, mut queue) = (HaltWatch::default(), Fake::default());
        let mut lost_after = |queue: &Fake, time| {
            let begun = Instant::now();
            while begun.elapsed() < time {
                if let Some(why) = watch.lost(queue) {
                    return Some((why, begun.elapsed()));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        };
        queue.stop(StopReason::Lost("the card is gone".into()));
        assert!(lost_after(&queue, 2 * RELEASE_TIMEOUT).is_none(), "nothing is in flight");
        let _only = queue.submit(operation()).unwrap();
        let (why, after) = lost_after(&queue, LONG).unwrap();
        assert!(
            why == StopReason::Lost("the card is gone".into()) && after >= RELEASE_TIMEOUT,
            "{why} after {after:?}"
        );
        queue.halted = None;
        assert!(lost_after(&queue, 2 * RELEASE_TIMEOUT).is_none(), "it runs");
        // Counted from the first check that sees it halted again.
        queue.stop(StopReason::Requested("again".into()));
        assert!(lost_after(&queue, LONG).unwrap().1 >= RELEASE_TIMEOUT);
    }

    #[test]
    fn a_lost_queue_is_not_waited_for() {
        let begun = Instant::now();
        let mut queue = Fake { halted: Some(StopReason::Lost("gone".into())), ..Fake::default() };
        let RunError { operation: kept, error } = run(&mut queue, operation(), LONG).unwrap_err();
        assert!(kept.is_none() && matches!(error, OpError::Stopped(StopReason::Lost(_))));
        assert!(drain(&mut queue, LONG).is_empty() && queue.in_flight() == 1);
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        // One that runs is waited for as long as it takes, and its completions are returned.
        let begun = Instant::now();
        queue.halted = None;
        assert!(drain(&mut queue, 2 * RELEASE_TIMEOUT).is_empty() && begun.elapsed() >= 2 * RELEASE_TIMEOUT);
        queue.ends = true;
        assert_eq!(drain(&mut queue, LONG).len(), 1);
    }

    #[test]
    fn an_operation_is_run_on_a_queue_of_its_own() {
        let mut queue = Fake { ends: true, ..Fake::default() };
        // Operations that ended at the last moment are not lost.
        assert_eq!(run(&mut queue, operation(), Duration::ZERO).unwrap().bytes(), 8192);
        queue.ends = false;
        let timeout = Duration::from_millis(1);
        let late = run(&mut queue, operation(), timeout).unwrap_err().error;
        assert_eq!(late, OpError::Stopped(StopReason::Timeout(timeout)));
        assert_eq!(run(&mut queue, operation(), LONG).unwrap_err().error, OpError::Refused(Refusal::Full));
        assert_eq!(queue.in_flight(), 1);
        assert!(drain(&mut queue, timeout).is_empty(), "it does not end");
    }

    #[test]
    fn a_wait_sleeps_until_something_has_ended() {
        let mut queue = Fake::default();
        let mut done = Vec::new();
        assert_eq!(wait_with(&mut queue, &mut done, LONG, |_, _| panic!("nothing is in flight")), 0);
        let _only = queue.submit(operation()).unwrap();
        assert_eq!(wait_with(&mut queue, &mut done, Duration::ZERO, |_, _| panic!("no time is left")), 0);
        let mut naps = 0;
        let ended = wait_with(&mut queue, &mut done, LONG, |queue, left| {
            assert!(left <= LONG && !left.is_zero());
            naps += 1;
            queue.ends = naps == 2;
        });
        assert_eq!((ended, naps, done.len()), (1, 2, 1));
    }

    #[test]
    fn a_stall_is_noticed_by_the_clock() {
        let mut watch = StallWatch::default();
        assert_eq!(watch.lost(LONG), None);
        assert_eq!(watch.lost(Duration::ZERO), Some(StopReason::Timeout(Duration::ZERO)));
    }

    #[test]
    fn time_without_checks_does_not_count() {
        let (mut watch, start) = (StallWatch::default(), Instant::now());
        let at = |s: f64| start + Duration::from_secs_f64(s);
        let timeout = Duration::from_secs(3);
        assert_eq!(watch.check(at(0.0), timeout), None);
        assert_eq!(watch.check(at(0.9), timeout), None);
        // Stopped by the user for a minute, which counts as a second.
        assert_eq!(watch.check(at(60.0), timeout), None);
        assert_eq!(watch.check(at(61.0), timeout), None);
        assert_eq!(watch.check(at(61.2), timeout), Some(StopReason::Timeout(timeout)));
        watch.moved();
        assert_eq!(watch.check(at(70.0), timeout), None);
    }
}
