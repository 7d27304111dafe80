//! A queue that does what the input of a fuzz target says, and memory for its operations.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dmalane_addr::CardAddr;
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{AnonHeap, BufferSlice, Heap};
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Direction, HostSlice, Limits, OpError, Operation, Queue, Refusal,
    Refused, StopReason, Ticket,
};

/// Bytes of the target.
pub const TARGET: usize = 1 << 16;

/// State that the queues of one run share: their target, and the decisions that are left.
pub struct Script {
    /// Bytes that operations reach.
    pub target: Vec<u8>,
    decisions: Vec<u8>,
    at: usize,
}

impl Script {
    /// A target of zeros, and these decisions; then 0.
    pub fn new(decisions: &[u8]) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { target: vec![0; TARGET], decisions: decisions.to_vec(), at: 0 }))
    }

    fn next(&mut self) -> u8 {
        self.at += 1;
        self.decisions.get(self.at - 1).copied().unwrap_or(0)
    }
}

/// A queue whose operations end in an order, with results, and after refusals that a [`Script`] chooses.
pub struct ScriptQueue {
    script: Arc<Mutex<Script>>,
    waiting: Vec<(Ticket, Operation)>,
    capacity: usize,
    next: u64,
    stopped: Option<StopReason>,
}

impl ScriptQueue {
    /// A queue for at most `capacity` operations.
    pub fn new(script: &Arc<Mutex<Script>>, capacity: usize) -> Self {
        Self { script: script.clone(), waiting: Vec::new(), capacity, next: 0, stopped: None }
    }

    fn execute(operation: &Operation, target: &mut [u8]) -> Result<(), OpError> {
        let (Some(direction), [host]) = (operation.direction(), operation.hosts()) else { return Ok(()) };
        let dmalane_queue::Work::Copy { at: DeviceAddr::Card(at), .. } = &operation.work else { return Ok(()) };
        let start = usize::try_from(at.bits()).unwrap_or(usize::MAX);
        let bytes = start.checked_add(host.slice.len()).and_then(|end| target.get_mut(start..end));
        let bytes = bytes.ok_or(OpError::NoCardMemory(*at))?;
        match direction {
            Direction::FromHost => host.slice.as_volatile_slice().read(bytes),
            Direction::ToHost => host.slice.as_volatile_slice().write(bytes),
        }
        Ok(())
    }
}

impl Queue for ScriptQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: 1 << 20, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::FENCE | Capabilities::STOP
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let reason = match (&self.stopped, operation.admit(self.capabilities(), self.limits())) {
            (Some(why), _) => Refusal::Stopped(why.clone()),
            (None, Err(reason)) => reason,
            (None, Ok(())) if self.waiting.len() >= self.capacity => Refusal::Full,
            (None, Ok(())) => match self.script.lock().unwrap_or_else(PoisonError::into_inner).next() {
                0xff => Refusal::NotRegistered,
                0xfe if !self.waiting.is_empty() => Refusal::Full,
                _ => {
                    self.next += 1;
                    self.waiting.push((Ticket::new(self.next), operation));
                    return Ok(Ticket::new(self.next));
                }
            },
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let script = &mut *self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let before = done.len();
        let decision = script.next();
        if decision == 0xff && self.stopped.is_none() {
            self.stopped = Some(StopReason::Device("the script says so".into()));
        }
        // At least one, so that a waiter gets its operation.
        for _ in 0..=decision % 4 {
            if self.waiting.is_empty() {
                break;
            }
            let (ticket, operation) = self.waiting.swap_remove(usize::from(decision) / 4 % self.waiting.len());
            let result = match &self.stopped {
                Some(why) => Err(OpError::Stopped(why.clone())),
                None if script.next() == 0xff => Err(OpError::NoCardMemory(CardAddr::new(0))),
                None => Self::execute(&operation, &mut script.target),
            };
            let bytes = if result.is_ok() { operation.bytes() } else { 0 };
            done.push(Completion { ticket, operation, result, bytes });
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, _: Duration) -> usize {
        self.poll(done)
    }

    fn halted(&self) -> Option<StopReason> {
        self.stopped.clone()
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped.get_or_insert(reason);
    }

    fn restart(&mut self) -> bool {
        self.waiting.is_empty() && self.stopped.take().is_some()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        let Some(at) = self.waiting.iter().position(|(of, _)| *of == ticket) else { return Cancelled::Unknown };
        match self.script.lock().unwrap_or_else(PoisonError::into_inner).next() & 1 {
            0 => Cancelled::Removed(self.waiting.remove(at).1),
            _ => Cancelled::TooLate,
        }
    }
}

/// A buffer slice of `len` bytes, all of them `byte`.
pub fn slice(len: usize, byte: u8) -> BufferSlice {
    let (slice, _) =
        AnonHeap::new().allocate(len.max(1)).expect("memory").share().into_slice().split_at(len).expect("fits");
    slice.as_volatile_slice().fill(byte);
    slice
}

/// A copy of up to `most` bytes whose direction, place and length the input chooses; some end past the target.
pub fn copy(input: &mut FuzzInput<'_>, most: usize, byte: u8) -> Operation {
    let direction = if input.u8() & 1 == 0 { Direction::FromHost } else { Direction::ToHost };
    let (at, len) = (u64::from(input.u16()), usize::from(input.u16()) % most + 1);
    let host = HostSlice { slice: slice(len, byte), via: None };
    Operation::copy(direction, host, DeviceAddr::Card(CardAddr::new(at)))
}
