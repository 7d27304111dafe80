//! A queue of a file device: operations are cut into requests, done at the same time unless they touch the same bytes,
//! and ended in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue, QueueAddr,
    QueueState, Refusal, Refused, StopReason, Ticket, Work, wait_with,
};

use super::FileDeviceError;
use super::opened::Opened;
use crate::op::{self, Op};
use crate::ring::{Ask, Request};
use crate::workers::{Short, Workers};

/// A queue of a [`FileDevice`](super::FileDevice): copies in both directions and fences.
///
/// It needs no registrations. Threads make the calls. Operations may be done at the same time unless they touch the
/// same bytes of the device and one of them writes; they end in order. [`Queue::cancel`] takes back an operation that
/// the threads have not got; one that they have runs to its end. After a timeout the operations that no thread has
/// begun end at once, the rest when the kernel releases them. Memory that it does not release within two seconds after
/// the queue was dropped stays allocated and is counted by [`quarantined_bytes`](dmalane_dma::quarantined_bytes).
pub struct FileDeviceQueue {
    device: Arc<Opened>,
    workers: Workers,
    /// Requests that the threads have.
    busy: usize,
    ops: VecDeque<Op<DeviceAddr>>,
    /// The number of the first operation that was not flushed.
    flushed: u64,
    state: QueueState,
}

/// True when one may not begin before the other has ended.
fn conflict(a: &Op<DeviceAddr>, b: &Op<DeviceAddr>) -> bool {
    let both = [a, b].map(|op| match &op.operation().work {
        Work::Copy { direction, at, .. } => Some((*direction == Direction::FromHost, at.bits(), op.end)),
        _ => None, // a fence
    });
    let [Some((a_writes, a_first, a_end)), Some((b_writes, b_first, b_end))] = both else { return true };
    (a_writes || b_writes) && a_first < b_end && b_first < a_end
}

impl FileDeviceQueue {
    pub(super) fn open(device: Arc<Opened>) -> Result<Self, FileDeviceError> {
        let workers = Workers::new(device.options.threads, Short::GoesOn).map_err(FileDeviceError::NoQueue)?;
        Ok(Self { device, workers, busy: 0, ops: VecDeque::new(), flushed: 0, state: QueueState::default() })
    }

    /// Checks what is special to files: registration, range, alignment.
    fn check(&self, operation: &Operation) -> Result<(), Refusal> {
        op::check_end(operation)?;
        let Work::Copy { direction, host, at } = &operation.work else { return Ok(()) };
        if host.via.is_some() {
            host.check(&self.device.registrar, direction.host_access())?;
        }
        match self.device.align {
            Some(align)
                if !align.allows(host.slice.as_volatile_slice().as_ptr().addr(), at.bits(), host.slice.len()) =>
            {
                Err(Refusal::Misaligned { align: align.memory.max(align.offset) as u64 })
            }
            _ => Ok(()),
        }
    }

    /// Gives the threads as much as fits of what may begin.
    fn feed(&mut self) {
        for i in 0..self.ops.len() {
            let full = self.busy >= self.device.options.depth;
            if full || !self.state.is_running() || self.ops[i].ticket.number() >= self.flushed {
                break;
            }
            self.begin(i);
        }
    }

    /// Begins an operation, or goes on cutting it into requests.
    fn begin(&mut self, i: usize) {
        let op = &self.ops[i];
        if op.begun && op.rest().is_none() {
            return;
        }
        if !op.begun && self.ops.range(..i).any(|before| !before.has_ended() && conflict(op, before)) {
            return;
        }
        let (device, op) = (&self.device, &mut self.ops[i]);
        let Work::Copy { direction, at, .. } = op.operation().work else {
            op.begun = true; // a fence
            return;
        };
        if !op.begun {
            op.begun = true;
            // A file never grows, and an operation past the end of the device moves nothing.
            let first = at.bits();
            let error = match (at, device.len) {
                (DeviceAddr::Va(va), _) => Some(OpError::MmuFault(va)),
                (_, Some(len)) if op.end > len => {
                    let at = len.max(first);
                    Some(OpError::EndOfFile { at: FileOffset::new(at), missing: op.end - at })
                }
                _ => None,
            };
            if let Some(error) = error {
                op.failed = Some((first, error));
                return;
            }
        }
        let (ask, file) = match direction {
            Direction::ToHost => (Ask::Read, &device.c2h),
            Direction::FromHost => (Ask::Write, &device.h2c),
        };
        let options = &device.options;
        while self.busy < options.depth
            && let Some((rest, _)) = op.rest()
        {
            let len = rest.len().min(options.block);
            self.workers.push(op.cut(len, ask, file.clone(), options.direct).expect("no more than there is"));
            self.busy += 1;
        }
    }

    /// Collects the requests that have ended; when stopping, also those that are not in a call.
    fn reap(&mut self) {
        while let Some((request, result)) = self.workers.reap() {
            self.settle(request, Some(result));
        }
        if !self.state.is_running() {
            self.workers.take_back().into_iter().for_each(|request| self.settle(request, None));
        }
    }

    /// Returns a fragment to its operation, with the result of its last call.
    fn settle(&mut self, request: Request, result: Option<i32>) {
        let (next, asked) = (request.next(), request.rest().len() as u64);
        self.busy -= 1;
        let Some(op) = op::find(&self.ops, request.op).map(|i| &mut self.ops[i]) else { return };
        let at = FileOffset::new(next);
        let failed = match result {
            Some(0) => Some(OpError::EndOfFile { at, missing: op.end.saturating_sub(next) }),
            Some(n) if n < 0 => Some(OpError::Io { at, errno: -n }),
            Some(n) if asked > 0 => Some(OpError::BadCount { at, asked, got: n as u64 }),
            _ => None,
        };
        op.give_back(request, failed);
    }

    /// Delivers the operations that have ended: in order, but when stopping all that the kernel has released.
    fn deliver(&mut self, done: &mut Vec<Completion>) {
        let Some(reason) = self.state.stopped() else {
            while self.ops.front().is_some_and(Op::has_ended)
                && let Some(op) = self.ops.pop_front()
            {
                self.end(op.into_completion(Ok(())), done);
            }
            return;
        };
        let stopped = OpError::Stopped(reason.clone());
        let (ended, stay): (Vec<_>, Vec<_>) = self.ops.drain(..).partition(|op| op.out == 0);
        self.ops.extend(stay);
        for op in ended {
            let result = if op.has_ended() { Ok(()) } else { Err(stopped.clone()) };
            self.end(op.into_completion(result), done);
        }
    }

    fn end(&mut self, completion: Completion, done: &mut Vec<Completion>) {
        self.state.ended();
        done.push(completion);
    }
}

impl Queue for FileDeviceQueue {
    type Addr = DeviceAddr;

    /// Any length, since operations are cut.
    fn limits(&self) -> Limits {
        Limits { capacity: self.device.options.depth, max_len: i64::MAX as u64, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST
            | Capabilities::TO_HOST
            | Capabilities::FENCE
            | Capabilities::STOP
            | Capabilities::ORDERED
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let check = |operation: &Operation| self.check(operation);
        if let Err(reason) = self.state.check(&operation, self.capabilities(), self.limits(), check) {
            return Err(Refused { operation, reason });
        }
        let ticket = self.state.accept();
        self.ops.push_back(Op::new(ticket, operation));
        Ok(ticket)
    }

    fn flush(&mut self) {
        let next = self.state.accepted();
        if self.flushed != next && self.state.is_running() {
            self.flushed = next;
            self.feed();
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.flush();
        self.reap();
        self.feed();
        self.reap();
        self.deliver(done);
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| this.workers.wait(left))
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        let Some(i) = op::find(&self.ops, ticket.number()) else { return Cancelled::Unknown };
        if self.ops[i].begun {
            return Cancelled::TooLate;
        }
        match self.ops.remove(i) {
            Some(op) => {
                self.state.ended();
                Cancelled::Removed(op.into_operation())
            }
            None => Cancelled::Unknown,
        }
    }

    /// Begins nothing more, and takes back what no thread has begun.
    fn stop(&mut self, reason: StopReason) {
        if self.state.stop(reason) {
            self.reap();
        }
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn restart(&mut self) -> bool {
        let restarts = self.state.restart();
        if restarts {
            self.flushed = self.state.accepted();
        }
        restarts
    }
}

dmalane_dma::debug_as!(
    FileDeviceQueue,
    |it| "FileDeviceQueue({}, {} in flight)",
    it.device.paths.h2c.display(),
    it.ops.len()
);
