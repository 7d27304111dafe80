//! A queue of a file device: operations are cut into requests, done at the same time unless they touch the same bytes,
//! and ended in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::BufferSlice;
use dmalane_queue::{
    Abilities, CacheHint, Cancelled, Completion, DeviceAddr, Direction, HostSlice, Limits, OpError, Operation, Queue,
    QueueAddr, QueueState, Refusal, Refused, Registered, Stats, StopReason, Ticket, Work,
};
use rustix::io::Errno;

use super::backend::{IoBackend, Mover};
use super::probe::Count;
use super::{FileDeviceHow, Opened};
use crate::ring::{Ask, Request};

/// The longest sleep in a wait: the timeout is checked in between.
const NAP: Duration = Duration::from_millis(100);

/// A queue of a [`FileDevice`](super::FileDevice): copies in both directions and fences.
///
/// It needs no registrations; with one, io_uring can use fixed buffers. `flush` and `poll` make system calls.
/// Operations may be done at the same time unless they touch the same bytes of the device and one of them writes; they
/// end in order. [`Queue::cancel`] takes back an operation that the kernel has not got; one that it has runs to its
/// end. After a timeout the operations that the kernel has not begun end at once, the rest when the kernel releases
/// them. Memory that it does not release within some seconds after the queue was dropped stays allocated and is counted
/// by [`quarantined_bytes`](crate::quarantined_bytes).
pub struct FileDeviceQueue {
    device: Arc<Opened>,
    mover: Mover,
    /// Movers that failed, until the kernel has returned their requests.
    retired: Vec<Mover>,
    how: FileDeviceHow,
    ops: VecDeque<Op>,
    /// Requests to be made again, of operations that have begun.
    again: VecDeque<Request>,
    /// The number of the next operation, and of the first that was not flushed.
    next: u64,
    flushed: u64,
    state: QueueState,
}

struct Op {
    number: u64,
    work: Kind,
    cache: CacheHint,
    /// The bytes that are not cut into requests yet.
    rest: Option<BufferSlice>,
    /// The others, in order.
    fragments: Vec<Fragment>,
    out: usize,
    begun: bool,
    /// The failure that lies first, and where.
    failed: Option<(u64, OpError)>,
    /// It has ended, and waits for those before it.
    ended: bool,
}

enum Kind {
    Copy { direction: Direction, via: Option<Registered>, at: DeviceAddr, first: u64, end: u64 },
    Fence,
}

struct Fragment {
    /// `None` while a request has it.
    slice: Option<BufferSlice>,
    len: usize,
    done: usize,
}

impl Op {
    /// True when one may not begin before the other has ended.
    fn conflicts(&self, other: &Self) -> bool {
        let (Kind::Copy { direction: a, first, end, .. }, Kind::Copy { direction: b, first: f, end: e, .. }) =
            (&self.work, &other.work)
        else {
            return true; // a fence
        };
        (*a == Direction::FromHost || *b == Direction::FromHost) && first < e && f < end
    }

    /// Bytes, counted from the front, that are known to be done.
    fn bytes(&self) -> u64 {
        let mut bytes = 0;
        for fragment in &self.fragments {
            bytes += fragment.done as u64;
            if fragment.done < fragment.len {
                break;
            }
        }
        bytes
    }

    fn into_completion(self, result: Result<(), OpError>) -> Completion {
        let bytes = self.bytes();
        let ticket = Ticket::new(self.number);
        Completion { ticket, operation: self.into_operation(), result, bytes }
    }

    fn into_operation(self) -> Operation {
        let work = match self.work {
            Kind::Fence => Work::Fence,
            Kind::Copy { direction, via, at, .. } => {
                let slices = self.fragments.into_iter().filter_map(|fragment| fragment.slice).chain(self.rest);
                let slice = slices.reduce(|a, b| a.join(b).expect("fragments in order"));
                Work::Copy { direction, host: HostSlice { slice: slice.expect("at least one fragment"), via }, at }
            }
        };
        Operation { work, shape: None, cache: self.cache }
    }
}

impl FileDeviceQueue {
    pub(super) fn new(device: Arc<Opened>, mover: Mover) -> Self {
        Self {
            how: device.how.clone(),
            device,
            mover,
            retired: Vec::new(),
            ops: VecDeque::new(),
            again: VecDeque::new(),
            next: 0,
            flushed: 0,
            state: QueueState::default(),
        }
    }

    /// The I/O backend in use and why: the kernel may refuse later what it accepted at first.
    pub fn how(&self) -> FileDeviceHow {
        let mut how = self.how.clone();
        how.reasons.extend(self.mover.complaint().map(str::to_owned));
        how
    }

    /// Checks whether an operation can be accepted.
    fn check(&self, operation: &Operation) -> Result<(), Refusal> {
        self.state.check_running()?;
        operation.admit(self.abilities(), self.limits())?;
        if let Work::Copy { direction, host, at } = &operation.work {
            if host.via.is_some() {
                host.check(&self.device.registrar, direction.host_access())?;
            }
            let first = at.bits();
            // The kernel counts file offsets with a sign.
            if first.checked_add(host.slice.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
                return Err(Refusal::PastTheTop);
            }
            if let Some(align) = self.device.align
                && !align.allows(host.slice.view().as_ptr().addr(), first, host.slice.len())
            {
                return Err(Refusal::Misaligned { align: align.memory.max(align.offset) as u64 });
            }
        }
        if self.ops.len() >= self.device.options.depth {
            return Err(Refusal::Full);
        }
        Ok(())
    }

    /// Gives the kernel as much as it takes of what may begin.
    fn feed(&mut self) {
        // Requests that were pushed are entered when stopping too, or they would never end.
        let running = self.state.is_running();
        while running
            && !self.mover.is_full()
            && let Some(request) = self.again.pop_front()
        {
            self.push(request);
        }
        for i in 0..self.ops.len() {
            if !running || self.mover.is_full() || self.ops[i].number >= self.flushed {
                break;
            }
            self.begin(i);
        }
        if let Err(why) = self.mover.enter(None) {
            self.fall_back(&why);
        }
    }

    /// Begins an operation, or goes on cutting it into requests.
    fn begin(&mut self, i: usize) {
        let op = &self.ops[i];
        if op.ended || op.failed.is_some() || op.begun && op.rest.is_none() {
            return;
        }
        if !op.begun && self.ops.range(..i).any(|before| !before.ended && op.conflicts(before)) {
            return;
        }
        let (device, op) = (&self.device, &mut self.ops[i]);
        let Kind::Copy { direction, at, first, end, .. } = &op.work else {
            (op.begun, op.ended) = (true, true);
            return;
        };
        if !op.begun {
            op.begun = true;
            // A file never grows, and an operation past the end of the device moves nothing.
            let error = match (at, device.len) {
                (DeviceAddr::Va(va), _) => Some(OpError::MmuFault(*va)),
                (_, Some(len)) if *end > len => {
                    let at = len.max(*first);
                    Some(OpError::EndOfFile { at: FileOffset::new(at), missing: end - at })
                }
                _ => None,
            };
            if let Some(error) = error {
                (op.failed, op.ended) = (Some((*first, error)), true);
                return;
            }
        }
        let (direction, end) = (*direction, *end);
        while !self.mover.is_full() {
            let op = &mut self.ops[i];
            let Some(mut rest) = op.rest.take() else { return };
            let (at, len) = (end - rest.len() as u64, rest.len().min(device.options.block));
            let slice = rest.split_off_front(len).expect("no more than there is");
            op.rest = Some(rest).filter(|rest| !rest.is_empty());
            op.fragments.push(Fragment { slice: None, len, done: 0 });
            op.out += 1;
            let (ask, file) = match direction {
                Direction::ToHost => (Ask::Read, &device.c2h),
                Direction::FromHost => (Ask::Write, &device.h2c),
            };
            let (op, index) = (op.number, op.fragments.len() - 1);
            let file = file.clone();
            let request = Request { ask, op, index, direct: device.options.direct, file, slice, at, done: 0 };
            let via = self.ops[i].via();
            let pushed = self.mover.push(request, via.map(|via| (via, &device.registrar)));
            self.again.extend(pushed.err());
        }
    }

    fn push(&mut self, request: Request) {
        let via = self.find(request.op).and_then(|i| self.ops[i].via());
        if let Err(request) = self.mover.push(request, via.map(|via| (via, &self.device.registrar))) {
            self.again.push_front(request);
        }
    }

    fn find(&self, number: u64) -> Option<usize> {
        self.ops.binary_search_by_key(&number, |op| op.number).ok()
    }

    /// Falls back to threads when the kernel refuses to enter its ring.
    fn fall_back(&mut self, why: &str) {
        let back = self.mover.cancel_all();
        self.how.reasons.push(why.to_owned());
        if !self.state.is_running() {
            return back.into_iter().for_each(|request| self.give_back(request, None));
        }
        self.again.extend(back);
        match Mover::new(IoBackend::Workers, self.device.options.depth, self.device.options.threads) {
            Ok(mover) => {
                self.how.backend = IoBackend::Workers;
                self.retired.push(std::mem::replace(&mut self.mover, mover));
                self.feed();
            }
            Err(e) => self.halt(StopReason::Driver(format!("{why}; {e}").into())),
        }
    }

    /// Collects the requests that the kernel has done.
    fn reap(&mut self) {
        while let Some((request, result)) = self.retired.iter_mut().find_map(Mover::reap) {
            self.settle(request, result, self.device.how.count);
        }
        // Threads count bytes, even where the driver miscounts the requests of a ring.
        let count = if self.how.backend == IoBackend::Workers { Count::Bytes } else { self.device.how.count };
        while let Some((request, result)) = self.mover.reap() {
            self.settle(request, result, count);
        }
        self.retired.retain(|mover| mover.busy() > 0);
        self.mover.tidy(&self.device.registrar);
    }

    /// Interprets a result: the fragment is done, continues, or has failed.
    fn settle(&mut self, mut request: Request, result: i32, count: Count) {
        let (next, asked) = (request.next(), request.rest().len());
        let at = FileOffset::new(next);
        let end = self.find(request.op).map_or(next, |i| self.ops[i].end());
        let moved = match result {
            n if n < 0 => {
                let error = match Errno::from_raw_os_error(-n) {
                    // CANCELED: the thread that made the request has exited.
                    Errno::INTR | Errno::CANCELED => None,
                    errno => Some(OpError::Io { at, errno: errno.raw_os_error() }),
                };
                return match error {
                    None if self.state.is_running() => self.again.push_back(request),
                    error => self.give_back(request, error.map(|e| (next, e))),
                };
            }
            n if n as usize == asked => asked,
            // One range of memory per request: where requests are counted, 1 is all of it, and 0 an error that got
            // lost.
            1 if count == Count::Requests => asked,
            n if count == Count::Requests || n as usize > asked => {
                let error = OpError::BadCount { at, asked: asked as u64, got: n as u64 };
                return self.give_back(request, Some((next, error)));
            }
            0 => {
                let error = OpError::EndOfFile { at, missing: end.saturating_sub(next) };
                return self.give_back(request, Some((next, error)));
            }
            n => n as usize,
        };
        request.done += moved;
        self.state.moved();
        match request.rest().is_empty() || !self.state.is_running() {
            true => self.give_back(request, None),
            false => self.again.push_back(request),
        }
    }

    /// Returns a fragment to its operation.
    fn give_back(&mut self, request: Request, failed: Option<(u64, OpError)>) {
        let Some(i) = self.find(request.op) else { return };
        self.state.moved();
        let op = &mut self.ops[i];
        let fragment = &mut op.fragments[request.index];
        (fragment.done, fragment.slice) = (request.done, Some(request.slice));
        op.out -= 1;
        if let Some((at, _)) = &failed
            && op.failed.as_ref().is_none_or(|(first, _)| at < first)
        {
            op.failed = failed;
        }
        op.ended =
            op.out == 0 && (op.failed.is_some() || op.rest.is_none() && op.fragments.iter().all(|f| f.done == f.len));
    }

    /// Delivers the operations that have ended: in order, but when stopping all that the kernel has released.
    fn deliver(&mut self, done: &mut Vec<Completion>) {
        let Some(reason) = self.state.stopped() else {
            while self.ops.front().is_some_and(|op| op.ended)
                && let Some(op) = self.ops.pop_front()
            {
                let result = op.failed.clone().map_or(Ok(()), |(_, error)| Err(error));
                self.end(op, result, done);
            }
            return;
        };
        let stopped = OpError::Stopped(reason.clone());
        let (ended, stay): (Vec<_>, Vec<_>) = self.ops.drain(..).partition(|op| op.out == 0);
        self.ops.extend(stay);
        for op in ended {
            let result = match &op.failed {
                Some((_, error)) => Err(error.clone()),
                None if op.ended => Ok(()),
                None => Err(stopped.clone()),
            };
            self.end(op, result, done);
        }
    }

    fn end(&mut self, op: Op, result: Result<(), OpError>, done: &mut Vec<Completion>) {
        let completion = op.into_completion(result);
        self.state.ended(&completion);
        done.push(completion);
    }

    /// Begins nothing more, and takes back what the kernel has not begun.
    fn halt(&mut self, reason: StopReason) {
        if self.state.stop(reason) {
            let back: Vec<Request> = self.again.drain(..).chain(self.mover.cancel_all()).collect();
            back.into_iter().for_each(|request| self.give_back(request, None));
        }
    }
}

impl Op {
    fn via(&self) -> Option<&Registered> {
        match &self.work {
            Kind::Copy { via, .. } => via.as_ref(),
            Kind::Fence => None,
        }
    }

    fn end(&self) -> u64 {
        match &self.work {
            Kind::Copy { end, .. } => *end,
            Kind::Fence => 0,
        }
    }
}

impl Queue for FileDeviceQueue {
    type Addr = DeviceAddr;

    /// Any length, since operations are cut.
    fn limits(&self) -> Limits {
        Limits { capacity: self.device.options.depth, max_len: i64::MAX as u64 }
    }

    fn abilities(&self) -> Abilities {
        Abilities::FROM_HOST | Abilities::TO_HOST | Abilities::FENCE | Abilities::STOP | Abilities::ORDERED
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if let Err(reason) = self.check(&operation) {
            self.state.refused(&reason);
            return Err(Refused { operation, reason });
        }
        let (work, rest) = match operation.work {
            Work::Copy { direction, host: HostSlice { slice, via }, at } => {
                let first = at.bits();
                (Kind::Copy { direction, via, at, first, end: first + slice.len() as u64 }, Some(slice))
            }
            // `check` lets nothing else pass.
            _ => (Kind::Fence, None),
        };
        let number = self.next;
        self.next += 1;
        if self.ops.is_empty() {
            self.state.moved();
        }
        let (fragments, cache) = (Vec::new(), operation.cache);
        let (out, begun, failed, ended) = (0, false, None, false);
        self.ops.push_back(Op { number, work, cache, rest, fragments, out, begun, failed, ended });
        self.state.submitted(number);
        Ok(Ticket::new(number))
    }

    fn flush(&mut self) {
        if self.flushed != self.next && self.state.is_running() {
            self.flushed = self.next;
            self.state.flushed();
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
        if !self.ops.is_empty()
            && let Some(reason) = self.state.timed_out()
        {
            self.halt(reason);
            self.deliver(done);
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ended = self.poll(done);
            let left = deadline.map_or(NAP, |d| d.saturating_duration_since(Instant::now()));
            if ended > 0 || self.ops.is_empty() || left.is_zero() {
                return ended;
            }
            // Not past the moment of the timeout.
            let until_timeout = self.state.until_timeout().map_or(NAP, |time| time.max(Duration::from_millis(1)));
            let nap = left.min(NAP).min(until_timeout);
            // Requests of movers that failed are polled for more often.
            let nap = if self.retired.is_empty() { nap } else { nap.min(Duration::from_millis(1)) };
            if self.mover.busy() == 0 {
                std::thread::sleep(nap.min(Duration::from_millis(1)));
            } else if let Err(why) = self.mover.enter(Some(nap)) {
                self.fall_back(&why);
            }
        }
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        let Some(i) = self.find(ticket.number()) else { return Cancelled::Unknown };
        if self.ops[i].begun {
            return Cancelled::TooLate;
        }
        match self.ops.remove(i) {
            Some(op) => {
                self.state.taken_back(op.number);
                Cancelled::TakenBack(op.into_operation())
            }
            None => Cancelled::Unknown,
        }
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> bool {
        self.state.set_timeout(timeout);
        true
    }

    fn stop(&mut self, reason: StopReason) {
        self.halt(reason);
    }

    fn halted(&self) -> Option<StopReason> {
        self.state.stopped().cloned()
    }

    fn restart(&mut self) -> bool {
        if self.state.is_running() || !self.ops.is_empty() {
            return false;
        }
        self.state.restart();
        self.flushed = self.next;
        true
    }

    fn stats(&self) -> Option<Stats> {
        Some(self.state.stats().clone())
    }
}

impl std::fmt::Debug for FileDeviceQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileDeviceQueue({}: {}, {} in flight)", self.device.paths.h2c.display(), self.how, self.ops.len())
    }
}
