//! A file as a queue: operations are cut into kernel reads, and end when all of theirs have.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::lock;
use dmalane_queue::{Capabilities, Completion, Limits, OpError, Operation, Queue, QueueState, Refused, Ticket};
use rustix::io::Errno;

use crate::cache::PAGE;
use crate::error::errno;
use crate::handle::FileHandle;
use crate::op::{self, Op};
use crate::reads::{SharedReads, Via};
use crate::ring::{self, Ask, Request};
use crate::source::{Held, Source, is_fuse};
use crate::{Error, Fallback, FileOptions, How, Io, Mode, cut};

/// Bytes that a queue has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Past the page cache.
    pub direct: u64,
    /// Through the page cache.
    pub buffered: u64,
}

/// A file, opened for reading, as a [`Queue`].
///
/// It only reads, and needs no registrations. An operation may lie anywhere in the file and in memory, but direct I/O
/// needs both aligned: an operation bypasses the page cache, but for less than [`FileQueue::alignment`] bytes at each
/// end, when its file offset and its memory address are equal modulo that alignment. Reading past the end of the file
/// is [`OpError::EndOfFile`], not a refusal.
///
/// Dropped with operations in flight, it cancels what the kernel has not begun and waits for the rest; memory that the
/// kernel has not let go of after 10 seconds (threads: 2) is never freed, and counted by
/// [`quarantined_bytes`](dmalane_dma::quarantined_bytes).
///
/// While operations are in flight it has two file descriptors, and from the first one on a third, and some 60 us, for
/// the ring, unless it [shares](FileQueue::sharing) one. A file that was opened by name may be closed in between
/// ([`FileHandle`]).
pub struct FileQueue {
    source: Source,
    /// Its descriptors, while operations are in flight.
    held: Option<Held>,
    /// Some of them have failed, since their file could not be opened again.
    lost: bool,
    options: FileOptions,
    how: How,
    moved: Moved,
    reads: SharedReads,
    /// Its number there.
    number: u64,
    /// The ring or the threads there that it uses; `None` before the first operation, and where this thread reads.
    via: Option<Via>,
    /// Reads that it has given them.
    out: usize,
    ops: VecDeque<Op<FileOffset>>,
    /// The number of the first operation that may not be cut to its end yet.
    uncut: u64,
    /// Reads that stopped short, to be issued again.
    again: VecDeque<Request>,
    state: QueueState,
    /// Blocks that are cached are copied from the page cache; asked for each, until the kernel does not say.
    ask_cache: bool,
}

impl FileQueue {
    /// Opens a regular file or a block device.
    ///
    /// # Errors
    /// [`Error`]; [`Error::NoDirect`] and [`Error::NoUring`] only where the options demand them.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<Self, Error> {
        Self::of(Source::open(path.as_ref(), options.mode)?, options)
    }

    /// Takes a file that was opened before, so that what was learned from it and what is read are of the same file. The
    /// flags and the position of the open file stay as they are. A file that this user may not open is read through the
    /// page cache.
    ///
    /// # Errors
    /// As [`FileQueue::open`]; [`Error::OnlyDirect`].
    pub fn of_handle(file: FileHandle, options: FileOptions) -> Result<Self, Error> {
        Self::of(Source::adopt(file, options.mode)?, options)
    }

    fn of((source, no_direct): (Source, Option<Fallback>), options: FileOptions) -> Result<Self, Error> {
        let options = options.normal();
        let fuse = options.io != Io::Pread && source.direct.is_some() && is_fuse(&source.handle);
        let refused = |why| Error::NoUring { path: source.handle.path().to_owned(), source: why };
        let reads = SharedReads::default();
        let via = match options.io {
            Io::Uring if source.nonblocking => return Err(refused(Fallback::NonBlocking)),
            Io::Uring if fuse => return Err(refused(Fallback::Fuse)),
            Io::Uring => {
                lock(&reads.0).need_ring(options.depth).map_err(refused)?;
                Some(Via::Ring)
            }
            Io::Auto | Io::Pread => None,
        };
        let how = How {
            direct: source.direct.is_some(),
            uring: options.io != Io::Pread && !fuse && !source.nonblocking,
            threads: 0,
            reasons: no_direct
                .into_iter()
                .chain(fuse.then_some(Fallback::Fuse))
                .chain(source.nonblocking.then_some(Fallback::NonBlocking))
                .collect(),
        };
        let number = lock(&reads.0).number();
        Ok(Self {
            source,
            held: None,
            lost: false,
            options,
            how,
            moved: Moved::default(),
            number,
            reads,
            via,
            out: 0,
            ops: VecDeque::new(),
            uncut: 0,
            again: VecDeque::new(),
            state: QueueState::default(),
            ask_cache: false,
        })
    }

    /// Reads through the ring that these queues share, or their threads. For a queue that has read nothing yet.
    #[must_use]
    pub fn sharing(mut self, reads: &SharedReads) -> Self {
        let has_ring = self.via.is_none() || lock(&reads.0).need_ring(self.options.depth).is_ok();
        if self.state.accepted() == 0 && has_ring {
            lock(&self.reads.0).forget(self.number);
            (self.number, self.reads) = (lock(&reads.0).number(), reads.clone());
        }
        self
    }

    /// Reads blocks that the page cache has as a whole, or that are newer there than on the disk, from there, and only
    /// the others by direct I/O. The kernel is asked about each block by `cachestat`; where it does not answer that,
    /// this changes nothing.
    #[must_use]
    pub fn from_cache_where_cached(mut self) -> Self {
        self.ask_cache = true;
        self
    }

    /// True where a block is better copied from the page cache than read past it.
    fn is_cached(&mut self, at: u64, len: usize) -> bool {
        let Some(Held { buffered, .. }) = self.held.as_ref().filter(|_| self.ask_cache) else { return false };
        let len = len as u64;
        match ring::cachestat(buffered, at, len) {
            Ok(pages) => {
                let all = (at + len).div_ceil(PAGE) - at / PAGE;
                pages.pages >= all || pages.dirty + pages.writeback > 0
            }
            Err(_) => {
                self.ask_cache = false;
                false
            }
        }
    }

    /// Adds a reason to [`FileQueue::how`]: why its opener chose this method.
    #[must_use]
    pub fn because(mut self, reason: Fallback) -> Self {
        self.how.reasons.push(reason);
        self
    }

    /// The file's name, as it was given.
    pub fn path(&self) -> &Path {
        self.source.handle.path()
    }

    /// The file, for asking about it.
    pub fn handle(&self) -> &FileHandle {
        &self.source.handle
    }

    /// How the file is being read, and why not better.
    pub fn how(&self) -> &How {
        &self.how
    }

    /// Bytes read so far, those of failed operations included.
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// The modulus by which file offsets and memory addresses must agree for direct I/O; 1 without direct I/O.
    pub fn alignment(&self) -> usize {
        self.source.direct.map_or(1, |align| align.memory.max(align.offset))
    }

    /// The next kernel read to issue.
    fn next_read(&mut self) -> Option<Request> {
        if let Some(read) = self.again.pop_front() {
            return Some(read);
        }
        loop {
            let i = self.ops.partition_point(|op| op.ticket.number() < self.uncut);
            let op = self.ops.get(i)?;
            // An operation that failed is not read on.
            let Some((rest, at)) = op.rest() else {
                self.uncut = op.ticket.number() + 1;
                continue;
            };
            let addr = rest.as_volatile_slice().as_ptr().addr();
            let (len, mut direct) = cut::first(addr, at, rest.len(), self.options.block, self.source.direct);
            let ask = match direct && self.is_cached(at, len) {
                true => Ask::ReadCached,
                false => Ask::Read,
            };
            direct &= ask == Ask::Read;
            let held = self.held.as_ref()?;
            let file = held.direct.as_ref().filter(|_| direct).unwrap_or(&held.buffered).clone();
            return self.ops[i].cut(len, ask, file, direct).map(|read| Request { queue: self.number, ..read });
        }
    }

    /// Begins reads until there is no room, or until one is for this thread, which is returned: a copy from the page
    /// cache, or, if `direct` says so, any read through it.
    fn push(&mut self, direct: bool) -> Option<Request> {
        let via = self.via?;
        while lock(&self.reads.0).has_room(via, self.options.depth) {
            let read = self.next_read()?;
            if read.ask == Ask::ReadCached || direct && !read.direct {
                return Some(read);
            }
            let mut reads = lock(&self.reads.0);
            match reads.push(via, read) {
                Ok(()) => self.out += 1,
                Err(read) => self.again.push_front(read),
            }
            self.how.threads = if via == Via::Threads { reads.threads() } else { 0 };
        }
        None
    }

    /// Gives the kernel as much to do as it takes; without a ring and threads, or from the page cache, does one read.
    fn feed(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        let cached = self.push(false);
        self.enter(None);
        let read = if cached.is_none() && self.via.is_none() { self.next_read() } else { cached };
        if let Some(mut read) = read {
            let result = ring::pread(&mut read);
            self.settle(read, result, done);
        }
    }

    /// Submits the reads in the ring, and waits for the given time.
    fn enter(&mut self, wait: Option<Duration>) {
        let Some(via) = self.via else { return };
        let entered = lock(&self.reads.0).enter(via, wait);
        if let Err(reason) = entered {
            self.give_up(reason);
        }
    }

    /// Reads without a ring from now on.
    fn give_up(&mut self, reason: Fallback) {
        (self.how.uring, self.via) = (false, None);
        self.how.reasons.push(reason);
    }

    fn reap(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        while self.out > 0 {
            let Some((read, result)) = lock(&self.reads.0).reap(self.number) else { return };
            self.out -= 1;
            self.settle(read, result, done);
        }
    }

    /// Interprets a result: the fragment is done, continues, or failed.
    fn settle(&mut self, mut read: Request, result: i32, done: &mut Vec<Completion<FileOffset>>) {
        let next = read.next();
        if result > 0 {
            let n = (result as usize).min(read.rest().len());
            *(if read.direct { &mut self.moved.direct } else { &mut self.moved.buffered }) += n as u64;
            read.done += n;
            if read.rest().is_empty() {
                return self.give_back(read, None, done);
            }
            // Where a direct read stops short, the rest need not be aligned: at the end of the file it is not.
            let (addr, len) = (read.rest().as_ptr().addr(), read.rest().len());
            if let Some(align) = self.source.direct.filter(|_| read.direct)
                && align.allows(addr, read.next(), len)
            {
                return self.again.push_back(read);
            }
            return self.again_buffered(read);
        }
        if result == 0 {
            let end = op::find(&self.ops, read.op).map_or(next, |i| self.ops[i].end);
            let at = self.source.end_before(next);
            let error = OpError::EndOfFile { at, missing: end - at.bits() };
            return self.give_back(read, Some(error), done);
        }
        match Errno::from_raw_os_error(-result) {
            // ECANCELED: the thread that issued the read has exited.
            Errno::INTR | Errno::AGAIN | Errno::CANCELED => self.again.push_back(read),
            // The file system does no direct I/O after all, not at these alignments, or not into this kind of memory.
            errno @ (Errno::INVAL | Errno::OPNOTSUPP | Errno::FAULT)
                if read.direct && self.options.mode == Mode::Auto =>
            {
                if self.how.direct {
                    self.how.direct = false;
                    let (at, errno) = (FileOffset::new(next), errno.raw_os_error());
                    self.how.reasons.push(Fallback::DirectRead { at, errno });
                    self.source.direct = None;
                }
                self.again_buffered(read);
            }
            errno => {
                let error = OpError::Io { at: FileOffset::new(next), errno: errno.raw_os_error() };
                self.give_back(read, Some(error), done);
            }
        }
    }

    fn again_buffered(&mut self, read: Request) {
        let file = self.held.as_ref().map_or(read.file, |held| held.buffered.clone());
        self.again.push_back(Request { direct: false, file, ..read });
    }

    /// Returns a fragment to its operation, which has ended when it was the last.
    fn give_back(&mut self, read: Request, failed: Option<OpError>, done: &mut Vec<Completion<FileOffset>>) {
        let i = op::find(&self.ops, read.op).expect("an operation outlives its requests");
        self.ops[i].give_back(read, failed);
        if self.ops[i].has_ended()
            && let Some(op) = self.ops.remove(i)
        {
            let completion = op.into_completion(Ok(()));
            self.state.ended();
            done.push(completion);
            // The last one leaves the file to be closed, where many are read.
            self.held.take_if(|_| self.ops.is_empty());
        }
    }

    /// Makes the ring, or threads in its place, when the first operation comes.
    fn make_ring(&mut self) {
        if self.via.is_some() || self.state.accepted() > 0 {
            return;
        }
        if self.how.uring {
            match lock(&self.reads.0).need_ring(self.options.depth) {
                Ok(()) => return self.via = Some(Via::Ring),
                Err(reason) => {
                    self.how.uring = false;
                    self.how.reasons.push(reason);
                }
            }
        }
        // What is cached is copied by this thread, whose processor then has it in its cache.
        if self.options.io == Io::Auto && self.options.mode != Mode::Buffered {
            self.via = lock(&self.reads.0).need_threads(self.options.depth).then_some(Via::Threads);
        }
    }
}

impl Queue for FileQueue {
    type Addr = FileOffset;

    /// Any length, since operations are cut.
    fn limits(&self) -> Limits {
        Limits { capacity: self.options.depth, max_len: i64::MAX as u64, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        if let Err(reason) = self.state.check(&operation, self.capabilities(), self.limits(), op::check_end) {
            return Err(Refused { operation, reason });
        }
        self.make_ring();
        let ticket = self.state.accept();
        let mut op = Op::new(ticket, operation);
        if self.held.is_none() {
            match self.source.hold() {
                Ok(held) => self.held = Some(held),
                Err(e) => {
                    let at = op.rest().map_or(0, |(_, at)| at);
                    op.failed = Some((at, OpError::Io { at: FileOffset::new(at), errno: errno(&e) }));
                    self.lost = true;
                }
            }
        }
        self.ops.push_back(op);
        Ok(ticket)
    }

    /// Begins direct reads, which are the disk's work: through a ring by one system call, or on threads. Others begin
    /// in [`Queue::poll`].
    fn flush(&mut self) {
        if let Some(read) = self.push(true) {
            self.again.push_front(read);
        }
        self.enter(None);
    }

    /// Through a ring or threads, does not wait for the disk; copies from the page cache happen here all the same. With
    /// `pread`, makes one read of at most a block, however long that takes.
    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        let before = done.len();
        while let Some(i) = self.ops.iter().position(|op| self.lost && !op.begun && op.failed.is_some()) {
            done.extend(self.ops.remove(i).map(|op| op.into_completion(Ok(()))));
            self.state.ended();
        }
        self.lost = false;
        self.reap(done);
        self.feed(done);
        self.reap(done);
        done.len() - before
    }

    /// Ends early where something has ended for another queue that shares its ring.
    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ended = self.poll(done);
            let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if ended > 0 || self.in_flight() == 0 || left.is_zero() {
                return ended;
            }
            // Sleep only when the kernel has all that it can be given.
            let fed = self.again.is_empty() && self.ops.iter().all(|op| op.rest().is_none());
            let mut reads = lock(&self.reads.0);
            let entered = match (reads.has_ended(self.number), self.via) {
                (Some(true), _) => Ok(()),
                (Some(false), _) => return 0,
                (None, Some(via)) if fed || !reads.has_room(via, self.options.depth) => reads.enter(via, Some(left)),
                (None, Some(_)) => Ok(()),
                (None, None) => {
                    drop(reads);
                    // Requests that a dead ring knows of still complete, without being asked.
                    std::thread::sleep(if self.out > 0 { left.min(Duration::from_millis(1)) } else { Duration::ZERO });
                    continue;
                }
            };
            drop(reads);
            entered.unwrap_or_else(|reason| self.give_up(reason));
        }
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        lock(&self.reads.0).forget(self.number);
    }
}

dmalane_dma::debug_as!(FileQueue, |it| "FileQueue({}: {}, {} in flight)", it.path().display(), it.how, it.ops.len());

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dmalane_dma::{AnonHeap, Heap};
    use dmalane_queue::{RunError, drain, run};

    use super::*;
    use crate::cut::Align;

    const LONG: Duration = Duration::from_secs(30);
    const LEN: usize = 300_000;

    fn file() -> (tempfile::NamedTempFile, Vec<u8>) {
        let data: Vec<u8> = (0..LEN as u32).map(|i| (i ^ i >> 8) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &data).unwrap();
        (file, data)
    }

    fn read_of(at: u64, len: usize) -> Operation<FileOffset> {
        let whole = AnonHeap::new().allocate(len).unwrap().share().into_slice();
        let (slice, _) = whole.split_at(len).unwrap();
        Operation::read(slice, FileOffset::new(at))
    }

    fn bytes(operation: Operation<FileOffset>) -> Vec<u8> {
        let slice = operation.into_slice().unwrap();
        let mut bytes = vec![0; slice.len()];
        slice.read(0, &mut bytes).unwrap();
        bytes
    }

    /// A queue that expects direct I/O at any address and offset, which the file system will refuse.
    fn deceived(path: &Path, mode: Mode, io: Io) -> Option<FileQueue> {
        let mut queue = FileQueue::open(path, FileOptions { io, ..FileOptions::default() }).unwrap();
        let Some(align) = &mut queue.source.direct else {
            eprintln!("skipped: {}", queue.how());
            return None;
        };
        *align = Align { memory: 1, offset: 1 };
        queue.options.mode = mode;
        Some(queue)
    }

    #[test]
    fn direct_io_refused_at_a_read_is_given_up() {
        let (file, data) = file();
        for io in [Io::Auto, Io::Pread] {
            let Some(mut queue) = deceived(file.path(), Mode::Auto, io) else { return };
            assert!(queue.how().direct);
            let read = run(&mut queue, read_of(1, LEN - 1), LONG).unwrap();
            assert!(bytes(read) == data[1..]);
            assert!(!queue.how().direct && queue.alignment() == 1);
            let said =
                queue.how().reasons.iter().filter(|r| matches!(r, Fallback::DirectRead { at, .. } if at.bits() == 1));
            assert_eq!(said.count(), 1, "{}", queue.how());
            assert_eq!(queue.moved(), Moved { direct: 0, buffered: LEN as u64 - 1 });
        }
    }

    #[test]
    fn direct_io_refused_at_a_read_fails_where_it_was_demanded() {
        let (file, _) = file();
        let Some(mut queue) = deceived(file.path(), Mode::Direct, Io::Auto) else { return };
        let failed = run(&mut queue, read_of(1, LEN - 1), LONG).unwrap_err();
        let RunError { error: OpError::Io { at, errno }, .. } = failed else { panic!("{failed}") };
        assert_eq!((at.bits(), errno), (1, Errno::INVAL.raw_os_error()));
    }

    #[test]
    fn a_flush_begins_direct_reads_and_no_others() {
        let (file, data) = file();
        for mode in [Mode::Auto, Mode::Buffered] {
            let options = FileOptions { mode, io: Io::Uring, depth: 4, block: 65536 };
            let mut queue = match FileQueue::open(file.path(), options) {
                Err(e @ Error::NoUring { .. }) => return eprintln!("skipped: {e}"),
                opened => opened.unwrap(),
            };
            let _ticket = queue.submit(read_of(0, LEN)).unwrap();
            queue.flush();
            let begun = queue.out > 0;
            assert_eq!(begun, queue.how().direct, "{mode:?}: {}", queue.how());
            let done = drain(&mut queue, LONG);
            assert!(bytes(done.into_iter().next().unwrap().operation) == data, "{mode:?}");
        }
    }

    #[test]
    fn a_ring_that_dies_is_replaced_by_pread() {
        let (file, data) = file();
        let options = FileOptions { io: Io::Uring, depth: 4, block: 65536, ..FileOptions::default() };
        let mut queue = match FileQueue::open(file.path(), options) {
            Err(e @ Error::NoUring { .. }) => return eprintln!("skipped: {e}"),
            opened => opened.unwrap(),
        };
        let mut done = Vec::new();
        for _ in 0..3 {
            let _ticket = queue.submit(read_of(0, LEN)).unwrap();
        }
        queue.poll(&mut done);
        lock(&queue.reads.0).ring().unwrap().fail_enter = true;
        done.extend(drain(&mut queue, LONG));
        assert_eq!(done.len(), 3);
        for c in done {
            assert_eq!(c.result, Ok(()));
            assert!(bytes(c.operation) == data);
        }
        assert!(!queue.how().uring && matches!(queue.how().reasons[0], Fallback::RingFailed(_)), "{}", queue.how());
        let read = run(&mut queue, read_of(5, 100), LONG).unwrap();
        assert!(bytes(read) == data[5..105]);
    }

    #[test]
    fn a_cancelled_read_is_issued_again() {
        let (file, data) = file();
        let mut queue = FileQueue::open(file.path(), FileOptions { io: Io::Pread, ..FileOptions::default() }).unwrap();
        let mut done = Vec::new();
        let _ticket = queue.submit(read_of(0, 1000)).unwrap();
        for errno in [Errno::CANCELED, Errno::INTR, Errno::AGAIN] {
            let read = queue.next_read().unwrap();
            queue.settle(read, -errno.raw_os_error(), &mut done);
            assert!(done.is_empty());
        }
        done.extend(drain(&mut queue, LONG));
        assert!(bytes(done.remove(0).operation) == data[..1000]);
    }

    #[test]
    fn the_failure_that_lies_first_in_the_file_is_reported() {
        let (file, _) = file();
        let options = FileOptions { io: Io::Pread, mode: Mode::Buffered, block: 65536, ..FileOptions::default() };
        let mut queue = FileQueue::open(file.path(), options).unwrap();
        let _ticket = queue.submit(read_of(0, LEN)).unwrap();
        let reads: Vec<_> = (0..3).map(|_| queue.next_read().unwrap()).collect();
        assert!(queue.source.direct.is_none() && Arc::ptr_eq(&reads[0].file, &queue.held.as_ref().unwrap().buffered));
        let mut done = Vec::new();
        for (read, errno) in reads.into_iter().zip([None, Some(Errno::IO), Some(Errno::NXIO)]).rev() {
            assert!(done.is_empty(), "waits for all fragments");
            queue.settle(read, errno.map_or(65536, |e| -e.raw_os_error()), &mut done);
        }
        let [Completion { operation, bytes: 65536, result: Err(OpError::Io { at, errno }), .. }] = &done[..] else {
            panic!("{done:?}")
        };
        assert_eq!((at.bits(), *errno, operation.bytes()), (65536, Errno::IO.raw_os_error(), LEN as u64));
        assert_eq!(queue.poll(&mut done), 0, "the rest is not read");
        assert_eq!(queue.in_flight(), 0);
    }
}
