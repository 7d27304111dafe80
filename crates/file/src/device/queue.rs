//! A queue of a node: operations cut into requests, done in any order where they do not touch the same bytes, ended in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, FileOffset};
use dmalane_dma::{BufferSlice, Registrar};
use dmalane_queue::{
    Abilities, CacheHint, Cancelled, DeviceAddr, Direction, Ended, HostPart, Limits, OpError, Operation, Queue,
    Refusal, Registered, Rejected, Sampler, Stats, Ticket, Work,
};
use rustix::io::Errno;

use super::backend::{IoBackend, Mover};
use super::probe::Count;
use super::{FileDeviceHow, Opened};
use crate::ring::{Ask, Request};

/// The longest sleep in a wait: a time-out is looked for in between.
const NAP: Duration = Duration::from_millis(100);

/// A queue of a [`FileDevice`](super::FileDevice): copies both ways and fences, and refuses the rest.
///
/// Its `doorbell` and `poll` make system calls. Operations may be done at the same time unless they touch the same bytes of the
/// device and one of them writes; they end in order. One that the kernel has not been given is taken back by
/// [`Queue::cancel`], one that it has runs to its end. After a time-out what the kernel has not begun is given back at once, the rest
/// when the kernel lets go of it. What it does not let go of within some seconds of the queue being dropped stays allocated for
/// good and is counted by [`quarantined_bytes`](crate::quarantined_bytes).
pub struct FileDeviceQueue {
    node: Arc<Opened>,
    mover: Mover,
    /// Movers that failed, until what the kernel has of theirs has come back.
    retired: Vec<Mover>,
    how: FileDeviceHow,
    ops: VecDeque<Op>,
    /// Requests to be made again, of operations that have begun.
    again: VecDeque<Request>,
    /// The number of the next operation, and of the first that the device was not told of.
    next: u64,
    told: u64,
    state: State,
    timeout: Option<Duration>,
    /// Since when nothing has come back.
    stalled: Option<Instant>,
    stats: Stats,
    sampler: Sampler,
}

#[derive(PartialEq)]
enum State {
    Running,
    Stopping(String),
    Stopped(String),
}

struct Op {
    number: u64,
    work: Kind,
    cache: CacheHint,
    /// What is not cut off yet.
    rest: Option<BufferSlice>,
    /// What was cut off, in order.
    pieces: Vec<Piece>,
    out: usize,
    begun: bool,
    /// The failure that lies first, and where.
    failed: Option<(u64, OpError)>,
    /// It has ended, and waits for those before it.
    over: bool,
}

enum Kind {
    Copy { direction: Direction, via: Registered, at: DeviceAddr, first: u64, end: u64 },
    Fence,
}

struct Piece {
    /// `None` while a request has it.
    part: Option<BufferSlice>,
    len: usize,
    done: usize,
}

impl Op {
    /// True when the one may not begin before the other has ended.
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
        for piece in &self.pieces {
            bytes += piece.done as u64;
            if piece.done < piece.len {
                break;
            }
        }
        bytes
    }

    fn into_ended(self, result: Result<(), OpError>) -> Ended {
        let bytes = self.bytes();
        let ticket = Ticket::new(self.number);
        Ended { ticket, operation: self.into_operation(), result, bytes }
    }

    fn into_operation(self) -> Operation {
        let work = match self.work {
            Kind::Fence => Work::Fence,
            Kind::Copy { direction, via, at, .. } => {
                let parts = self.pieces.into_iter().filter_map(|piece| piece.part).chain(self.rest);
                let part = parts.reduce(|a, b| a.join(b).expect("pieces of one part, in order"));
                Work::Copy { direction, host: HostPart { part: part.expect("at least one piece"), via }, at }
            }
        };
        Operation { work, shape: None, cache: self.cache }
    }
}

impl FileDeviceQueue {
    pub(super) fn new(node: Arc<Opened>, mover: Mover) -> Self {
        Self {
            how: node.how.clone(),
            node,
            mover,
            retired: Vec::new(),
            ops: VecDeque::new(),
            again: VecDeque::new(),
            next: 0,
            told: 0,
            state: State::Running,
            timeout: None,
            stalled: None,
            stats: Stats::default(),
            sampler: Sampler::default(),
        }
    }

    /// Which way it goes now, and why: the kernel may refuse later what it took at first.
    pub fn how(&self) -> FileDeviceHow {
        let mut how = self.how.clone();
        how.reasons.extend(self.mover.complaint().map(str::to_owned));
        how
    }

    /// What keeps an operation from being accepted.
    fn check(&self, operation: &Operation) -> Result<(), Refusal> {
        if let State::Stopping(why) | State::Stopped(why) = &self.state {
            return Err(Refusal::Stopped(why.clone()));
        }
        let missing = operation.needs() - self.abilities();
        if !missing.is_empty() {
            return Err(Refusal::Unable(missing));
        }
        operation.check()?;
        if let Work::Copy { direction, host: HostPart { part, via }, at } = &operation.work {
            let wanted = match direction {
                Direction::ToHost => Access::WRITE,
                Direction::FromHost => Access::READ,
            };
            if via.iova_of(part).is_none() || !self.node.bus.owns(via.mapping()) {
                return Err(Refusal::NotRegistered);
            }
            if !via.mapping().access().contains(wanted) {
                return Err(Refusal::NotPermitted);
            }
            let first = bits(*at);
            // The kernel counts file offsets with a sign.
            if first.checked_add(part.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
                return Err(Refusal::PastTheTop);
            }
            if let Some(align) = self.node.align
                && !align.allows(part.view().as_ptr().addr(), first, part.len())
            {
                return Err(Refusal::Misaligned { align: align.memory.max(align.offset) as u64 });
            }
        }
        if self.ops.len() >= self.node.options.depth {
            return Err(Refusal::Full);
        }
        Ok(())
    }

    /// Gives the kernel what may begin, as far as it takes it.
    fn feed(&mut self) {
        // What was pushed is entered when stopping too, or it would never come back.
        let running = self.state == State::Running;
        while running
            && !self.mover.is_full()
            && let Some(request) = self.again.pop_front()
        {
            self.push(request);
        }
        for i in 0..self.ops.len() {
            if !running || self.mover.is_full() || self.ops[i].number >= self.told {
                break;
            }
            self.begin(i);
        }
        if let Err(why) = self.mover.enter(None) {
            self.fall(&why);
        }
    }

    /// Begins with an operation, or goes on cutting it.
    fn begin(&mut self, i: usize) {
        let op = &self.ops[i];
        if op.over || op.failed.is_some() || op.begun && op.rest.is_none() {
            return;
        }
        if !op.begun && self.ops.range(..i).any(|before| !before.over && op.conflicts(before)) {
            return;
        }
        let (node, op) = (&self.node, &mut self.ops[i]);
        let Kind::Copy { direction, at, first, end, .. } = &op.work else {
            (op.begun, op.over) = (true, true);
            return;
        };
        if !op.begun {
            op.begun = true;
            // Never grows a file, and says where a device ends instead of moving half.
            let error = match (at, node.len) {
                (DeviceAddr::Va(va), _) => Some(OpError::MmuFault(*va)),
                (_, Some(len)) if *end > len => {
                    let at = len.max(*first);
                    Some(OpError::EndOfFile { at: FileOffset::new(at), missing: end - at })
                }
                _ => None,
            };
            if let Some(error) = error {
                (op.failed, op.over) = (Some((*first, error)), true);
                return;
            }
        }
        let (direction, end) = (*direction, *end);
        while !self.mover.is_full() {
            let op = &mut self.ops[i];
            let Some(mut rest) = op.rest.take() else { return };
            let (at, len) = (end - rest.len() as u64, rest.len().min(node.options.block));
            let part = rest.split_off_front(len).expect("no more than there is");
            op.rest = Some(rest).filter(|rest| !rest.is_empty());
            op.pieces.push(Piece { part: None, len, done: 0 });
            op.out += 1;
            let (ask, file) = match direction {
                Direction::ToHost => (Ask::Read, &node.c2h),
                Direction::FromHost => (Ask::Write, &node.h2c),
            };
            let (op, index) = (op.number, op.pieces.len() - 1);
            let file = file.clone();
            let request = Request { ask, op, index, direct: node.options.direct, file, part, at, done: 0 };
            let via = self.ops[i].via();
            let pushed = self.mover.push(request, via.map(|via| (via, &node.bus)));
            self.again.extend(pushed.err());
        }
    }

    fn push(&mut self, request: Request) {
        let via = self.find(request.op).and_then(|i| self.ops[i].via());
        if let Err(request) = self.mover.push(request, via.map(|via| (via, &self.node.bus))) {
            self.again.push_front(request);
        }
    }

    fn find(&self, number: u64) -> Option<usize> {
        self.ops.binary_search_by_key(&number, |op| op.number).ok()
    }

    /// Goes on by threads when the kernel does not want its ring to be entered any more.
    fn fall(&mut self, why: &str) {
        let back = self.mover.cancel_all();
        self.how.reasons.push(why.to_owned());
        if self.state != State::Running {
            return back.into_iter().for_each(|request| self.give_back(request, None));
        }
        self.again.extend(back);
        match Mover::new(IoBackend::Workers, self.node.options.depth, self.node.options.threads) {
            Ok(mover) => {
                self.how.backend = IoBackend::Workers;
                self.retired.push(std::mem::replace(&mut self.mover, mover));
                self.feed();
            }
            Err(e) => self.halt(format!("{why}; {e}")),
        }
    }

    /// Collects what the kernel has done.
    fn reap(&mut self) {
        while let Some((request, result)) = self.retired.iter_mut().find_map(Mover::reap) {
            self.settle(request, result, self.node.how.count);
        }
        // The threads that took over from a ring count bytes, whatever the driver does with a ring's requests.
        let count = if self.how.backend == IoBackend::Workers { Count::Bytes } else { self.node.how.count };
        while let Some((request, result)) = self.mover.reap() {
            self.settle(request, result, count);
        }
        self.retired.retain(|mover| mover.busy() > 0);
        self.mover.tidy(&self.node.bus);
    }

    /// Decides what a result means: the piece is done, goes on, or has failed.
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
                    None if self.state == State::Running => self.again.push_back(request),
                    error => self.give_back(request, error.map(|e| (next, e))),
                };
            }
            n if n as usize == asked => asked,
            // One piece of memory for each request: where those are counted, 1 is all of it, and 0 an error that got lost.
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
        self.stalled = None;
        match request.rest().is_empty() || self.state != State::Running {
            true => self.give_back(request, None),
            false => self.again.push_back(request),
        }
    }

    /// Returns a piece to its operation.
    fn give_back(&mut self, request: Request, failed: Option<(u64, OpError)>) {
        let Some(i) = self.find(request.op) else { return };
        self.stalled = None;
        let op = &mut self.ops[i];
        let piece = &mut op.pieces[request.index];
        (piece.done, piece.part) = (request.done, Some(request.part));
        op.out -= 1;
        if let Some((at, _)) = &failed
            && op.failed.as_ref().is_none_or(|(first, _)| at < first)
        {
            op.failed = failed;
        }
        op.over =
            op.out == 0 && (op.failed.is_some() || op.rest.is_none() && op.pieces.iter().all(|p| p.done == p.len));
    }

    /// Gives out what has ended: in order, but when stopping all that the kernel has let go of.
    fn deliver(&mut self, done: &mut Vec<Ended>) {
        if self.state == State::Running {
            while self.ops.front().is_some_and(|op| op.over)
                && let Some(op) = self.ops.pop_front()
            {
                let result = op.failed.clone().map_or(Ok(()), |(_, error)| Err(error));
                self.end(op, result, done);
            }
            return;
        }
        let (State::Stopping(why) | State::Stopped(why)) = &self.state else { return };
        let why = why.clone();
        let (ended, stay): (Vec<_>, Vec<_>) = self.ops.drain(..).partition(|op| op.out == 0);
        self.ops.extend(stay);
        for op in ended {
            let result = match &op.failed {
                Some((_, error)) => Err(error.clone()),
                None if op.over => Ok(()),
                None => Err(OpError::Stopped(why.clone())),
            };
            self.end(op, result, done);
        }
        if self.ops.is_empty() {
            self.state = State::Stopped(why);
        }
    }

    fn end(&mut self, op: Op, result: Result<(), OpError>, done: &mut Vec<Ended>) {
        match &result {
            Ok(()) => self.stats.ok += 1,
            Err(_) => self.stats.failed += 1,
        }
        self.sampler.ended(op.number, &mut self.stats.latency);
        let ended = op.into_ended(result);
        self.stats.bytes += ended.bytes;
        done.push(ended);
    }

    /// Begins nothing more, and asks the kernel for what it has not begun.
    fn halt(&mut self, why: String) {
        if self.state == State::Running {
            self.stats.stops += 1;
            self.state = State::Stopping(why);
            let back: Vec<Request> = self.again.drain(..).chain(self.mover.cancel_all()).collect();
            back.into_iter().for_each(|request| self.give_back(request, None));
        }
    }

    fn look_at_the_clock(&mut self) {
        if let (State::Running, Some(timeout), false) = (&self.state, self.timeout, self.ops.is_empty()) {
            let since = *self.stalled.get_or_insert_with(Instant::now);
            if since.elapsed() >= timeout {
                self.halt(format!("nothing ended for {timeout:?}"));
            }
        }
    }
}

impl Op {
    fn via(&self) -> Option<&Registered> {
        match &self.work {
            Kind::Copy { via, .. } => Some(via),
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

fn bits(at: DeviceAddr) -> u64 {
    match at {
        DeviceAddr::Card(a) => a.bits(),
        DeviceAddr::Va(a) => a.bits(),
    }
}

impl Queue for FileDeviceQueue {
    /// Any length, since operations are cut.
    fn limits(&self) -> Limits {
        Limits { capacity: self.node.options.depth, max_len: i64::MAX as u64 }
    }

    fn abilities(&self) -> Abilities {
        Abilities::FROM_HOST | Abilities::TO_HOST | Abilities::FENCE
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn enqueue(&mut self, operation: Operation) -> Result<Ticket, Rejected> {
        if let Err(reason) = self.check(&operation) {
            self.stats.full += u64::from(reason == Refusal::Full);
            return Err(Rejected { operation, reason });
        }
        let (work, rest) = match operation.work {
            Work::Copy { direction, host: HostPart { part, via }, at } => {
                let first = bits(at);
                (Kind::Copy { direction, via, at, first, end: first + part.len() as u64 }, Some(part))
            }
            // `check` lets nothing else pass.
            _ => (Kind::Fence, None),
        };
        let number = self.next;
        self.next += 1;
        if self.ops.is_empty() {
            self.stalled = None;
        }
        let (pieces, cache) = (Vec::new(), operation.cache);
        self.ops.push_back(Op { number, work, cache, rest, pieces, out: 0, begun: false, failed: None, over: false });
        self.stats.submitted += 1;
        self.sampler.begun(number);
        Ok(Ticket::new(number))
    }

    fn doorbell(&mut self) {
        if self.told != self.next && self.state == State::Running {
            self.told = self.next;
            self.stats.doorbells += 1;
            self.feed();
        }
    }

    fn poll(&mut self, done: &mut Vec<Ended>) -> usize {
        let before = done.len();
        self.doorbell();
        self.reap();
        self.feed();
        self.reap();
        self.deliver(done);
        self.look_at_the_clock();
        if done.len() == before && self.state != State::Running {
            self.deliver(done); // what the clock has stopped
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Ended>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ended = self.poll(done);
            let left = deadline.map_or(NAP, |d| d.saturating_duration_since(Instant::now()));
            if ended > 0 || self.ops.is_empty() || left.is_zero() {
                return ended;
            }
            // Until the time-out may strike, no longer.
            let patience = match (self.timeout, self.stalled) {
                (Some(timeout), Some(since)) => timeout.saturating_sub(since.elapsed()).max(Duration::from_millis(1)),
                _ => NAP,
            };
            let nap = left.min(NAP).min(patience);
            // What movers that failed still have is looked for more often.
            let nap = if self.retired.is_empty() { nap } else { nap.min(Duration::from_millis(1)) };
            if self.mover.busy() == 0 {
                std::thread::sleep(nap.min(Duration::from_millis(1)));
            } else if let Err(why) = self.mover.enter(Some(nap)) {
                self.fall(&why);
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
                self.stats.cancelled += 1;
                self.sampler.ended(op.number, &mut self.stats.latency);
                Cancelled::TakenBack(op.into_operation())
            }
            None => Cancelled::Unknown,
        }
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) {
        (self.timeout, self.stalled) = (timeout, None);
    }

    fn stop(&mut self, why: &str) {
        self.halt(why.to_owned());
    }

    fn halted(&self) -> Option<String> {
        match &self.state {
            State::Running => None,
            State::Stopping(why) | State::Stopped(why) => Some(why.clone()),
        }
    }

    fn restart(&mut self) -> bool {
        if self.state == State::Running || !self.ops.is_empty() {
            return false;
        }
        (self.state, self.stalled, self.told) = (State::Running, None, self.next);
        true
    }

    fn stats(&self) -> Stats {
        self.stats.clone()
    }
}

impl std::fmt::Debug for FileDeviceQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileDeviceQueue({}: {}, {} in flight)", self.node.paths.h2c.display(), self.how, self.ops.len())
    }
}
