//! A queue that does its work inside `poll`, by calling a function.

use std::time::Duration;

use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, QueueState, Refused, StopReason, Ticket,
    Waiting, Work,
};

/// A queue whose operations are calls of a function, one after the other, on the thread that polls: for devices whose
/// work is done by the processor, or by a call that returns when it is done.
///
/// The function gets checked operations ([`Operation::admit`]); a registration, where there is one, holds the host
/// memory, which no device may use any more when the function returns. Where it returns [`OpError::Stopped`], the queue
/// stops: for good with [`StopReason::Lost`].
pub struct PolledQueue<F> {
    capabilities: Capabilities,
    limits: Limits,
    execute: F,
    waiting: Waiting,
    state: QueueState,
}

/// Bytes that a poll moves before it returns, when there is more to do.
const TURN: u64 = 4 << 20;

impl<F: FnMut(&Operation) -> Result<(), OpError> + Send> PolledQueue<F> {
    /// A queue that takes operations within `limits` that need these capabilities, and calls `execute` with each.
    pub fn new(capabilities: Capabilities, limits: Limits, execute: F) -> Self {
        let capabilities = capabilities | Capabilities::FENCE | Capabilities::ORDERED | Capabilities::STOP;
        Self { capabilities, limits, execute, waiting: Waiting::new(), state: QueueState::default() }
    }
}

impl<F: FnMut(&Operation) -> Result<(), OpError> + Send> Queue for PolledQueue<F> {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        self.state.submit(operation, self.capabilities, self.limits, |_| Ok(()), &mut self.waiting)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let (before, mut moved) = (done.len(), 0);
        while moved < TURN
            && let Some((ticket, operation)) = self.waiting.pop_front()
        {
            let result = match (self.state.stopped(), &operation.work) {
                (Some(why), _) => Err(OpError::Stopped(why.clone())),
                (None, Work::Fence) => Ok(()),
                (None, _) => (self.execute)(&operation),
            };
            if let Err(OpError::Stopped(reason)) = &result {
                self.state.stop(reason.clone());
            }
            let bytes = if result.is_ok() { operation.bytes() } else { 0 };
            let completion = Completion { ticket, operation, result, bytes };
            self.state.ended();
            done.push(completion);
            moved += bytes;
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, _: Duration) -> usize {
        self.poll(done)
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn stop(&mut self, reason: StopReason) {
        self.state.stop(reason);
    }

    fn restart(&mut self) -> bool {
        !matches!(self.state.stopped(), Some(StopReason::Lost(_))) && self.state.restart()
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::CardAddr;

    use super::*;

    #[test]
    fn only_a_device_that_is_not_lost_is_restarted() {
        let reasons = [StopReason::Driver("a call failed".into()), StopReason::Lost("unplugged".into())];
        for (reason, restarts) in reasons.into_iter().zip([true, false]) {
            let limits = Limits { capacity: 2, max_len: 1, max_parts: usize::MAX };
            let execute = |_: &Operation| Err(OpError::Stopped(reason.clone()));
            let mut queue = PolledQueue::new(Capabilities::FILL, limits, execute);
            for _ in 0..2 {
                let fill = Operation::fill(DeviceAddr::Card(CardAddr::new(0)), 1, 0);
                let _ticket = queue.submit(fill).unwrap();
            }
            let mut done = Vec::new();
            assert_eq!((queue.poll(&mut done), queue.in_flight()), (2, 0), "their memory is given back");
            assert!(done.iter().all(|end| end.result == Err(OpError::Stopped(reason.clone()))), "{done:?}");
            assert_eq!((queue.restart(), queue.halted().is_none()), (restarts, restarts), "{reason}");
        }
    }
}
