//! A queue that does its work inside `poll`, by calling a function.

use std::time::Duration;

use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, HostSlice, Limits, OpError, Operation, Queue, QueueState, Refusal, Refused,
    StopReason, Ticket, Waiting, Work,
};

/// A queue whose operations are calls of a function, one after the other, on the thread that polls: for devices whose
/// work is done by the processor, or by a call that returns when it is done.
///
/// The function gets checked operations ([`Operation::admit`]); a registration, where there is one, holds the host
/// memory. Where it returns [`OpError::Stopped`], the queue stops. With [`StopReason::Lost`] the device may still use
/// the memory of the operation, which the queue keeps for good.
pub struct PolledQueue<F> {
    capabilities: Capabilities,
    limits: Limits,
    execute: F,
    waiting: Waiting,
    /// Operations whose memory the device may still use: never given back or freed.
    quarantined: Vec<Operation>,
    state: QueueState,
}

/// Bytes that a poll moves before it returns, when there is more to do.
const TURN: u64 = 4 << 20;

impl<F: FnMut(&Operation) -> Result<(), OpError> + Send> PolledQueue<F> {
    /// A queue that takes operations within `limits` that need these capabilities, and calls `execute` with each.
    pub fn new(capabilities: Capabilities, limits: Limits, execute: F) -> Self {
        let capabilities = capabilities | Capabilities::FENCE | Capabilities::ORDERED | Capabilities::STOP;
        let (waiting, quarantined) = (Waiting::new(), Vec::new());
        Self { capabilities, limits, execute, waiting, quarantined, state: QueueState::default() }
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
        self.waiting.len() + self.quarantined.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let lies_elsewhere = |h: &HostSlice| h.via.as_ref().is_some_and(|via| via.iova_of(&h.slice).is_none());
        let registered = |operation: &Operation| match operation.hosts().iter().any(lies_elsewhere) {
            true => Err(Refusal::NotRegistered),
            false => Ok(()),
        };
        self.state.submit(operation, self.capabilities, self.limits, registered, &mut self.waiting)
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
            if let (None, Err(OpError::Stopped(reason))) = (self.state.stopped(), &result) {
                self.state.stop(reason.clone());
                if matches!(reason, StopReason::Lost(_)) {
                    self.quarantined.push(operation);
                    continue;
                }
            }
            let bytes = if result.is_ok() { operation.bytes() } else { 0 };
            let completion = Completion { ticket, operation, result, bytes };
            self.state.ended(&completion);
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
        self.quarantined.is_empty() && self.state.restart()
    }
}

impl<F> Drop for PolledQueue<F> {
    fn drop(&mut self) {
        std::mem::take(&mut self.quarantined).into_iter().for_each(std::mem::forget);
    }
}
