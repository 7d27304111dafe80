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
use rustix::io::Errno;

use super::backend::Mover;
use super::opened::Opened;
use super::probe::Count;
use super::{FileDeviceError, FileDeviceOptions};
use crate::Fallback;
use crate::op::{self, Op};
use crate::ring::{Ask, Request};

/// A queue of a [`FileDevice`](super::FileDevice): copies in both directions and fences.
///
/// It needs no registrations. `flush` and `poll` make system calls. Operations may be done at the same time unless they
/// touch the same bytes of the device and one of them writes; they end in order. [`Queue::cancel`] takes back an
/// operation that the kernel has not got; one that it has runs to its end. After a timeout the operations that the
/// kernel has not begun end at once, the rest when the kernel releases them. Memory that it does not release within
/// some seconds after the queue was dropped stays allocated and is counted by
/// [`quarantined_bytes`](crate::quarantined_bytes).
pub struct FileDeviceQueue {
    device: Arc<Opened>,
    mover: Mover,
    /// Movers that failed, until the kernel has returned their requests.
    retired: Vec<Mover>,
    ops: VecDeque<Op<DeviceAddr>>,
    /// Requests to be made again, of operations that have begun.
    again: VecDeque<Request>,
    /// The number of the first operation that was not flushed.
    flushed: u64,
    state: QueueState,
}

/// The longest wait in the kernel.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

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
        let FileDeviceOptions { depth, threads, .. } = device.options;
        let uring = device.how().uring;
        let mover = if uring { Mover::ring(depth) } else { Mover::workers(depth, threads) };
        let mover = mover.map_err(FileDeviceError::NoQueue)?;
        Ok(Self {
            device,
            mover,
            retired: Vec::new(),
            ops: VecDeque::new(),
            again: VecDeque::new(),
            flushed: 0,
            state: QueueState::default(),
        })
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

    /// Gives the kernel as much as it takes of what may begin.
    fn feed(&mut self) {
        // Requests that were pushed are entered when stopping too, or they would never end.
        let running = self.state.is_running();
        while running
            && !self.mover.is_full()
            && let Some(request) = self.again.pop_front()
        {
            if let Err(request) = self.mover.push(request) {
                self.again.push_front(request);
            }
        }
        for i in 0..self.ops.len() {
            if !running || self.mover.is_full() || self.ops[i].ticket.number() >= self.flushed {
                break;
            }
            self.begin(i);
        }
        if let Err(why) = self.mover.enter(None) {
            self.fall_back(why);
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
        while !self.mover.is_full() {
            let Some((rest, _)) = op.rest() else { return };
            let len = rest.len().min(options.block);
            let request = op.cut(len, ask, file.clone(), options.direct).expect("no more than there is");
            self.again.extend(self.mover.push(request).err());
        }
    }

    /// Falls back to threads when the kernel refuses to enter its ring.
    fn fall_back(&mut self, why: Fallback) {
        let back = self.mover.cancel_all();
        let mut how = self.device.how();
        // Another queue may have said so before.
        if !how.reasons.contains(&why) {
            how.reasons.push(why);
        }
        drop(how);
        if !self.state.is_running() {
            return back.into_iter().for_each(|request| self.give_back(request, None));
        }
        self.again.extend(back);
        match Mover::workers(self.device.options.depth, self.device.options.threads) {
            Ok(mover) => {
                self.device.how().uring = false;
                self.retired.push(std::mem::replace(&mut self.mover, mover));
                self.feed();
            }
            Err(e) => self.stop(StopReason::Driver(e.into())),
        }
    }

    /// Collects the requests that the kernel has done.
    fn reap(&mut self) {
        while let Some((request, result)) = self.retired.iter_mut().find_map(Mover::reap) {
            self.settle(request, result, self.device.count);
        }
        // Threads count bytes, even where the driver miscounts the requests of a ring.
        let count = if let Mover::Ring(_) = self.mover { self.device.count } else { Count::Bytes };
        while let Some((request, result)) = self.mover.reap() {
            self.settle(request, result, count);
        }
        self.retired.retain(|mover| mover.busy() > 0);
    }

    /// Interprets a result: the fragment is done, continues, or has failed.
    fn settle(&mut self, mut request: Request, result: i32, count: Count) {
        let (next, asked) = (request.next(), request.rest().len());
        let at = FileOffset::new(next);
        let end = op::find(&self.ops, request.op).map_or(next, |i| self.ops[i].end);
        let moved = match result {
            n if n < 0 => {
                let error = match Errno::from_raw_os_error(-n) {
                    // CANCELED: the thread that made the request has exited.
                    Errno::INTR | Errno::CANCELED => None,
                    errno => Some(OpError::Io { at, errno: errno.raw_os_error() }),
                };
                return match error {
                    None if self.state.is_running() => self.again.push_back(request),
                    error => self.give_back(request, error),
                };
            }
            n if n as usize == asked => asked,
            // One range of memory per request: where requests are counted, 1 is all of it, and 0 an error that got
            // lost.
            1 if count == Count::Requests => asked,
            n if count == Count::Requests || n as usize > asked => {
                let error = OpError::BadCount { at, asked: asked as u64, got: n as u64 };
                return self.give_back(request, Some(error));
            }
            0 => {
                let error = OpError::EndOfFile { at, missing: end.saturating_sub(next) };
                return self.give_back(request, Some(error));
            }
            n => n as usize,
        };
        request.done += moved;
        match request.rest().is_empty() || !self.state.is_running() {
            true => self.give_back(request, None),
            false => self.again.push_back(request),
        }
    }

    /// Returns a fragment to its operation.
    fn give_back(&mut self, request: Request, failed: Option<OpError>) {
        let Some(i) = op::find(&self.ops, request.op) else { return };
        self.ops[i].give_back(request, failed);
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
        Limits { capacity: self.device.options.depth, max_len: i64::MAX as u64 }
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
        wait_with(self, done, timeout, |this, left| {
            // Requests of movers that failed are polled for more often.
            let often = Duration::from_millis(1);
            let interval = left.min(if this.retired.is_empty() { POLL_INTERVAL } else { often });
            if this.mover.busy() == 0 {
                std::thread::sleep(interval.min(often));
            } else if let Err(why) = this.mover.enter(Some(interval)) {
                this.fall_back(why);
            }
        })
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

    /// Begins nothing more, and takes back what the kernel has not begun.
    fn stop(&mut self, reason: StopReason) {
        if self.state.stop(reason) {
            let back: Vec<Request> = self.again.drain(..).chain(self.mover.cancel_all()).collect();
            back.into_iter().for_each(|request| self.give_back(request, None));
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

impl std::fmt::Debug for FileDeviceQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileDeviceQueue({}, {} in flight)", self.device.paths.h2c.display(), self.ops.len())
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::CardAddr;
    use dmalane_device::Device;
    use dmalane_dma::{AnonHeap, Heap};
    use dmalane_queue::run;

    use super::super::{FileDevice, FileDeviceOptions, FileDevicePaths};
    use super::*;

    #[test]
    fn the_device_says_what_its_queue_came_to_use() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let paths = FileDevicePaths { h2c: file.path().to_owned(), c2h: file.path().to_owned() };
        let options = FileDeviceOptions { probe_at: Some(1 << 16), ..FileDeviceOptions::default() };
        let device = FileDevice::open(paths, options).unwrap();
        let note = || device.info().notes.remove(0);
        if !device.how().uring {
            return println!("SKIPPED: {}", note());
        }
        let queues = [(); 2].map(|()| device.queue().unwrap());
        assert_eq!(note(), "by buffered I/O, io_uring");
        for mut queue in queues {
            let Mover::Ring(ring) = &mut queue.mover else { panic!("{queue:?}") };
            ring.fail_enter = true;
            let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
            let write = Operation::write(slice, DeviceAddr::Card(CardAddr::new(0)));
            run(&mut queue, write, Duration::from_secs(30)).unwrap();
        }
        assert!(note().starts_with("by buffered I/O, pread and pwrite on threads (io_uring failed"), "{}", note());
        assert_eq!(device.how().reasons.len(), 1, "said once: {}", note());
    }
}
