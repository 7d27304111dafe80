//! A queue that does its work inside `poll`, by calling a function.

use std::collections::VecDeque;
use std::time::Duration;

use dmalane_queue::{
    Abilities, Completion, DeviceAddr, HostSlice, Limits, OpError, Operation, Queue, Refusal, Refused, StopReason,
    Ticket, Work,
};

/// A queue whose operations are calls of a function, one after the other, on the thread that polls: for devices whose
/// work is done by the processor, or by a call that returns when it is done.
///
/// The function gets checked operations ([`Operation::admit`]); a registration, where there is one, holds the host
/// memory.
pub struct PolledQueue<F> {
    abilities: Abilities,
    limits: Limits,
    execute: F,
    waiting: VecDeque<(Ticket, Operation)>,
    next: u64,
    stopped: Option<StopReason>,
}

/// Bytes that a poll moves before it returns, when there is more to do.
const TURN: u64 = 4 << 20;

impl<F: FnMut(&Operation) -> Result<(), OpError> + Send> PolledQueue<F> {
    /// A queue that takes operations within `limits` that need these abilities, and calls `execute` with each.
    pub fn new(abilities: Abilities, limits: Limits, execute: F) -> Self {
        let abilities = abilities | Abilities::FENCE | Abilities::ORDERED | Abilities::STOP;
        Self { abilities, limits, execute, waiting: VecDeque::new(), next: 0, stopped: None }
    }
}

impl<F: FnMut(&Operation) -> Result<(), OpError> + Send> Queue for PolledQueue<F> {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let lies_elsewhere = |h: &HostSlice| h.via.as_ref().is_some_and(|via| via.iova_of(&h.slice).is_none());
        let reason = match (&self.stopped, operation.admit(self.abilities, self.limits)) {
            (Some(why), _) => Refusal::Stopped(why.clone()),
            (None, Err(reason)) => reason,
            (None, Ok(())) if operation.hosts().iter().any(lies_elsewhere) => Refusal::NotRegistered,
            (None, Ok(())) if self.waiting.len() >= self.limits.capacity => Refusal::Full,
            (None, Ok(())) => {
                let ticket = Ticket::new(self.next);
                self.next += 1;
                self.waiting.push_back((ticket, operation));
                return Ok(ticket);
            }
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let (mut ended, mut moved) = (0, 0);
        while moved < TURN
            && let Some((ticket, operation)) = self.waiting.pop_front()
        {
            let result = match (&self.stopped, &operation.work) {
                (Some(why), _) => Err(OpError::Stopped(why.clone())),
                (None, Work::Fence) => Ok(()),
                (None, _) => (self.execute)(&operation),
            };
            let bytes = if result.is_ok() { operation.bytes() } else { 0 };
            done.push(Completion { ticket, operation, result, bytes });
            (ended, moved) = (ended + 1, moved + bytes);
        }
        ended
    }

    fn wait(&mut self, done: &mut Vec<Completion>, _: Duration) -> usize {
        self.poll(done)
    }

    fn halted(&self) -> Option<StopReason> {
        self.stopped.clone()
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped = Some(reason);
    }

    fn restart(&mut self) -> bool {
        let restarts = self.stopped.is_some() && self.waiting.is_empty();
        if restarts {
            self.stopped = None;
        }
        restarts
    }
}
