//! The state that every queue keeps besides its operations.

use std::time::{Duration, Instant};

use crate::stats::Sampler;
use crate::{Completion, OpError, Refusal, Stats, StopReason};

/// For implementations of [`Queue`](crate::Queue): counters, the timeout, and why the queue has stopped.
#[derive(Debug, Default)]
pub struct QueueState {
    stats: Stats,
    sampler: Sampler,
    stopped: Option<StopReason>,
    timeout: Option<Duration>,
    /// Since when nothing has ended; `None` until somebody asks.
    quiet_since: Option<Instant>,
}

impl QueueState {
    /// True until the queue stops.
    #[inline]
    pub fn is_running(&self) -> bool {
        self.stopped.is_none()
    }

    /// Why the queue has stopped.
    pub fn stopped(&self) -> Option<&StopReason> {
        self.stopped.as_ref()
    }

    /// Refuses an operation for a queue that has stopped.
    ///
    /// # Errors
    /// [`Refusal::Stopped`].
    pub fn check_running(&self) -> Result<(), Refusal> {
        self.stopped.clone().map_or(Ok(()), |reason| Err(Refusal::Stopped(reason)))
    }

    /// Stops the queue. False when it had stopped before; the first reason stays.
    pub fn stop(&mut self, reason: StopReason) -> bool {
        let running = self.is_running();
        if running {
            self.stats.stops += 1;
            self.stopped = Some(reason);
        }
        running
    }

    /// The queue runs again.
    pub fn restart(&mut self) {
        (self.stopped, self.quiet_since) = (None, None);
    }

    /// [`Queue::set_timeout`](crate::Queue::set_timeout).
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        (self.timeout, self.quiet_since) = (timeout, None);
    }

    /// An operation has moved on, or the first one was submitted: the timeout starts over.
    #[inline]
    pub fn moved(&mut self) {
        self.quiet_since = None;
    }

    /// The reason to stop once nothing has moved for the timeout. For a queue with operations in flight.
    pub fn timed_out(&mut self) -> Option<StopReason> {
        let timeout = self.timeout.filter(|_| self.stopped.is_none())?;
        let since = *self.quiet_since.get_or_insert_with(Instant::now);
        (since.elapsed() >= timeout).then_some(StopReason::Timeout(timeout))
    }

    /// The time until [`QueueState::timed_out`]; `None` where it is not known.
    pub fn until_timeout(&self) -> Option<Duration> {
        Some(self.timeout?.saturating_sub(self.quiet_since?.elapsed()))
    }

    /// Counts an operation that was accepted.
    #[inline]
    pub fn submitted(&mut self, number: u64) {
        self.stats.submitted += 1;
        self.sampler.begun(number);
    }

    /// Counts an operation that was refused.
    pub fn refused(&mut self, reason: &Refusal) {
        self.stats.full += u64::from(*reason == Refusal::Full);
    }

    /// Counts a flush with something to submit.
    #[inline]
    pub fn flushed(&mut self) {
        self.stats.doorbells += 1;
    }

    /// Counts an operation that has ended.
    #[inline]
    pub fn ended<A>(&mut self, completion: &Completion<A>) {
        match &completion.result {
            Ok(()) => self.stats.ok += 1,
            Err(error) => {
                self.stats.failed += 1;
                self.stats.cancelled += u64::from(*error == OpError::Cancelled);
            }
        }
        self.stats.bytes += completion.bytes;
        self.sampler.ended(completion.ticket.number(), &mut self.stats.latency);
    }

    /// Counts an operation that was taken back.
    pub fn taken_back(&mut self, number: u64) {
        self.stats.cancelled += 1;
        self.sampler.ended(number, &mut self.stats.latency);
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_until_a_restart() {
        let mut state = QueueState::default();
        assert!(state.is_running() && state.check_running().is_ok());
        let reason = StopReason::Lost("unplugged".into());
        assert!(state.stop(reason.clone()) && !state.stop(StopReason::Requested("later".into())));
        assert_eq!((state.stopped(), state.check_running()), (Some(&reason), Err(Refusal::Stopped(reason.clone()))));
        assert_eq!(state.stats().stops, 1);
        state.restart();
        assert!(state.is_running());
    }

    #[test]
    fn time_counts_from_the_first_question_after_a_move() {
        let mut state = QueueState::default();
        assert_eq!(state.timed_out(), None, "no timeout");
        let timeout = Duration::from_millis(2);
        state.set_timeout(Some(timeout));
        assert_eq!((state.until_timeout(), state.timed_out()), (None, None));
        std::thread::sleep(2 * timeout);
        assert_eq!(state.until_timeout(), Some(Duration::ZERO));
        assert_eq!(state.timed_out(), Some(StopReason::Timeout(timeout)));
        state.moved();
        assert_eq!(state.timed_out(), None);
        std::thread::sleep(2 * timeout);
        state.stop(StopReason::Requested("enough".into()));
        assert_eq!(state.timed_out(), None, "it has stopped");
    }
}
