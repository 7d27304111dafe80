//! Requests to the kernel: filling or writing out memory, by a ring or by `pread` and `pwrite`, and asking what it has
//! cached. The only file here with `unsafe`.
//!
//! Invariant of [`Ring`]: from the moment that the kernel may know of a request until its completion was seen, the
//! [`Request`] lies in `slots` under the number that the kernel will name, and with it the [`BufferSlice`] that keeps
//! the memory mapped. Begins in [`Ring::push`]; ended only by [`Ring::reap`] (the completion was seen),
//! [`Ring::take_back`] (the kernel never saw the request) or [`Ring::quarantine`] (the memory is never freed).
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_dma::{BufferSlice, VolatileSlice, quarantine};
use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};
use rustix::io::Errno;

use crate::Fallback;
use crate::error::errno;

/// Time that a dropped ring waits for the kernel before it quarantines its memory.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    /// Fill the memory.
    Read,
    /// Fill the memory from the page cache, by `pread`: never put into a ring.
    ReadCached,
    /// Write it out, by `pwrite`: never put into a ring.
    Write,
}

/// One kernel read or write: `slice` is to be filled or written out from `at` on, and its first `done` bytes are.
pub(crate) struct Request {
    /// Which of both.
    pub ask: Ask,
    /// The number of the queue, where several share a ring.
    pub queue: u64,
    /// The number of the operation that it is a fragment of.
    pub op: u64,
    /// Which of its fragments.
    pub index: usize,
    /// Whether `file` is the descriptor for direct I/O.
    pub direct: bool,
    pub file: Arc<File>,
    pub slice: BufferSlice,
    pub at: u64,
    pub done: usize,
}

impl Request {
    /// The memory that is still to be moved.
    pub fn rest(&self) -> VolatileSlice<'_> {
        self.slice
            .len()
            .checked_sub(self.done)
            .and_then(|n| self.slice.as_volatile_slice().sub(self.done, n))
            .expect("done <= len")
    }

    /// The file offset of the first byte that is still to be moved.
    pub fn next(&self) -> u64 {
        self.at + self.done as u64
    }
}

/// Reads with `pread`, once. The result is as in a completion: bytes, or a negative error number.
pub(crate) fn pread(read: &mut Request) -> i32 {
    pread_into(&read.file, read.rest(), read.next())
}

/// Reads into a view with `pread`, once. The result is as in a completion.
pub(crate) fn pread_into(file: &File, into: VolatileSlice<'_>, at: u64) -> i32 {
    let len = into.len().min(i32::MAX as usize);
    let Ok(at) = i64::try_from(at) else { return -libc::EINVAL };
    // SAFETY: a view is that many writable bytes, mapped for as long as it lives, and made for being changed by others;
    // the kernel is done with them when it returns.
    let n = unsafe { libc::pread64(file.as_raw_fd(), into.as_ptr().cast(), len, at) };
    match i32::try_from(n) {
        Ok(n) if n >= 0 => n,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Writes a view with `pwrite`, once. The result is as in a completion.
pub(crate) fn pwrite_from(file: &File, from: VolatileSlice<'_>, at: u64) -> i32 {
    let len = from.len().min(i32::MAX as usize);
    let Ok(at) = i64::try_from(at) else { return -libc::EINVAL };
    // SAFETY: a view is that many readable bytes, mapped for as long as it lives, and made for being changed by others;
    // the kernel is done with them when it returns.
    let n = unsafe { libc::pwrite64(file.as_raw_fd(), from.as_ptr().cast(), len, at) };
    match i32::try_from(n) {
        Ok(n) if n >= 0 => n,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Pages of a file in the page cache, as `cachestat` counts them (linux/mman.h).
#[repr(C)]
#[derive(Default)]
pub(crate) struct Cached {
    pub pages: u64,
    pub dirty: u64,
    pub writeback: u64,
    pub evicted: u64,
    pub recently_evicted: u64,
}

/// Counts what of a range of a file is cached. Linux 6.5 or later.
pub(crate) fn cachestat(file: &File, offset: u64, len: u64) -> io::Result<Cached> {
    // The same on every architecture; libc has no name for it everywhere.
    const CACHESTAT: libc::c_long = 451;
    let range = [offset, len];
    let mut cached = Cached::default();
    // SAFETY: the kernel reads the two words of the range and writes the five of the result; both live through the
    // call.
    let done = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), &raw mut cached, 0) };
    if done == 0 { Ok(cached) } else { Err(io::Error::last_os_error()) }
}

/// The cause of a refusal to make a ring, as far as it is known.
fn why_refused(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").as_deref().map(str::trim) {
                Ok("2") => "; kernel.io_uring_disabled = 2 forbids it",
                Ok("1") => "; kernel.io_uring_disabled = 1 forbids it to this user, or a seccomp profile does",
                _ => "; a seccomp profile forbids it",
            }
        }
        Some(libc::ENOSYS) => "; this kernel has none, or a seccomp profile hides it",
        Some(libc::ENOMEM) => "; see ulimit -l",
        _ => "",
    }
}

/// An io_uring with the requests that it was given.
pub(crate) struct Ring {
    uring: IoUring,
    slots: Vec<Option<Request>>,
    free: Vec<usize>,
    /// Slots that were not submitted to the kernel yet, in the order of the submission queue.
    pushed: VecDeque<usize>,
    /// The kernel refused to be entered: nothing is submitted to it any more.
    dead: bool,
    /// How long a drop waits for the kernel.
    timeout: Duration,
    #[cfg(test)]
    pub fail_enter: bool,
}

impl Ring {
    /// A ring for `depth` reads at once.
    pub fn new(depth: usize) -> Result<Self, Fallback> {
        let refused = |e: io::Error| Fallback::Ring { errno: errno(&e), cause: why_refused(&e) };
        let uring = IoUring::new(depth as u32).map_err(refused)?;
        // Reads through the page cache, each on a thread of the kernel: it makes few of them without this (Linux 5.15).
        let _ = uring.submitter().register_iowq_max_workers(&mut [depth as u32, 0]);
        // Waiting with a timeout, and completions that are never lost.
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(Fallback::OldRing);
        }
        Ok(Self {
            uring,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            pushed: VecDeque::with_capacity(depth),
            dead: false,
            timeout: TIMEOUT,
            #[cfg(test)]
            fail_enter: false,
        })
    }

    /// Requests in the ring.
    pub fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// True when no further request fits.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// True once the kernel has refused to be entered.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Takes a request to read; gives it back when the ring is full. [`Ring::enter`] tells the kernel.
    pub fn push(&mut self, request: Request) -> Result<(), Request> {
        let Some(slot) = self.free.pop() else { return Err(request) };
        let rest = request.rest();
        let (fd, ptr, at) = (Fd(request.file.as_raw_fd()), rest.as_ptr(), request.next());
        let len = u32::try_from(rest.len()).unwrap_or(1 << 30);
        let entry = opcode::Read::new(fd, ptr, len).offset(at).build();
        self.slots[slot] = Some(request);
        self.pushed.push_back(slot);
        // SAFETY: the entry names `len` bytes, checked by `VolatileSlice::sub` in `Request::rest`, and a descriptor;
        // both belong to the request that was just put into its slot, where it stays until the kernel is done
        // (invariant above).
        let pushed = unsafe { self.uring.submission().push(&entry.user_data(slot as u64)) };
        pushed.expect("the submission queue has an entry for every slot");
        Ok(())
    }

    /// Submits every request that was pushed, and then waits for a completion for the given time. May
    /// return early.
    ///
    /// # Errors
    /// When the kernel refuses to be entered. The ring is dead from then on: [`Ring::take_back`] what it did not get.
    pub fn enter(&mut self, wait: Option<Duration>) -> io::Result<()> {
        if self.dead {
            // Requests that the kernel does know of still complete, without being asked.
            std::thread::sleep(wait.unwrap_or_default().min(Duration::from_millis(1)));
            return Ok(());
        }
        let entered = match wait {
            #[cfg(test)]
            _ if self.fail_enter => Err(io::Error::from_raw_os_error(libc::ENXIO)),
            None if self.pushed.is_empty() && !self.uring.submission().cq_overflow() => return Ok(()),
            None => self.uring.submit(),
            Some(timeout) => {
                // The kernel's clock would overflow; waiting may end early anyway.
                let timeout = Timespec::from(timeout.min(Duration::from_secs(3600)));
                self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
        };
        // The entries left in the queue show which ones the kernel took, whatever it returned.
        let left = self.uring.submission().len();
        self.pushed.drain(..self.pushed.len().saturating_sub(left));
        match entered.map_err(|e| Errno::from_io_error(&e).ok_or(e)) {
            Ok(_) | Err(Ok(Errno::INTR | Errno::TIME)) => Ok(()),
            Err(Ok(Errno::AGAIN | Errno::BUSY)) => {
                // The kernel is short of memory for requests: let it breathe.
                std::thread::sleep(wait.unwrap_or_default().min(Duration::from_millis(1)));
                Ok(())
            }
            Err(e) => {
                self.dead = true;
                Err(e.map_or_else(|e| e, io::Error::from))
            }
        }
    }

    /// The next request that completed, with its result: bytes, or a negative error number.
    pub fn reap(&mut self) -> Option<(Request, i32)> {
        loop {
            let entry = self.uring.completion().next()?;
            let slot = entry.user_data() as usize;
            if let Some(read) = self.slots.get_mut(slot).and_then(Option::take) {
                self.free.push(slot);
                return Some((read, entry.result()));
            }
        }
    }

    /// A request that was pushed to a dead ring and never submitted to the kernel. It lies in the submission queue
    /// still, but nothing enters a dead ring again.
    pub fn take_back(&mut self) -> Option<Request> {
        if !self.dead {
            return None;
        }
        let slot = self.pushed.pop_front()?;
        self.free.push(slot);
        self.slots[slot].take()
    }

    /// Asks the kernel to give up what it has not begun, and waits until it is done with all reads or time is up.
    fn settle(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let _ = self.enter(None);
        if self.busy() > 0 {
            // Unknown before Linux 6.0; then the requests run to their end.
            let _ = self.uring.submitter().register_sync_cancel(Some(timeout.into()), CancelBuilder::any().all());
        }
        while self.take_back().is_some() || self.reap().is_some() {}
        while self.busy() > 0 && Instant::now() < deadline {
            let _ = self.enter(Some(deadline.saturating_duration_since(Instant::now())));
            while self.take_back().is_some() || self.reap().is_some() {}
        }
    }

    /// Leaks the memory of requests that the kernel has not finished.
    fn quarantine(&mut self) {
        for read in self.slots.iter_mut().filter_map(Option::take) {
            let bytes = read.slice.len() as u64;
            quarantine(read.slice, bytes);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.settle(self.timeout);
        self.quarantine();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use dmalane_dma::{AnonHeap, Heap, HeapStats, quarantined_bytes};

    use super::*;

    const LEN: usize = 8192;

    /// Held by tests that count the bytes of the process.
    static COUNTS: Mutex<()> = Mutex::new(());

    /// A ring with one read of a pipe that nobody writes to, which does not end by itself.
    fn stuck(heap: &AnonHeap) -> Option<(Ring, File)> {
        let (from, to) = rustix::pipe::pipe().unwrap();
        let slice = heap.allocate(LEN).unwrap().share().into_slice();
        let mut ring = Ring::new(4).inspect_err(|reason| eprintln!("skipped: {reason}")).ok()?;
        let file = Arc::new(from.into());
        let read = Request { ask: Ask::Read, queue: 0, op: 0, index: 0, direct: false, file, slice, at: 0, done: 0 };
        assert!(ring.push(read).is_ok());
        ring.enter(None).unwrap();
        ring.enter(Some(Duration::from_millis(5))).unwrap();
        assert!(ring.reap().is_none());
        Some((ring, to.into()))
    }

    #[test]
    fn a_dropped_ring_cancels_what_waits() {
        let heap = AnonHeap::new();
        let Some((ring, _open)) = stuck(&heap) else { return };
        let begin = Instant::now();
        drop(ring);
        assert!(begin.elapsed() < TIMEOUT / 2, "took {:?}", begin.elapsed());
        assert_eq!(heap.stats(), HeapStats { live: 0, peak: LEN, buffers: 1 });
    }

    #[test]
    fn memory_that_the_kernel_keeps_is_not_freed() {
        let _counts = COUNTS.lock();
        let heap = AnonHeap::new();
        let Some((mut ring, open)) = stuck(&heap) else { return };
        let before = quarantined_bytes();
        ring.quarantine();
        assert_eq!((quarantined_bytes() - before, heap.stats().live), (LEN as u64, LEN));
        std::io::Write::write_all(&mut &open, b"late").unwrap();
        ring.enter(Some(Duration::from_secs(5))).unwrap();
        assert!(ring.reap().is_none(), "nobody waits for it any more");
        // The read did end, but the ring counts it as busy and would wait for it.
        ring.free.push(0);
    }

    #[test]
    fn a_dropped_ring_keeps_memory_of_which_the_kernel_says_nothing() {
        let _counts = COUNTS.lock();
        let heap = AnonHeap::new();
        let Some((mut ring, _open)) = stuck(&heap) else { return };
        let before = quarantined_bytes();
        // The kernel speaks of another slot.
        ring.slots[3] = ring.slots[0].take();
        ring.free.retain(|slot| *slot != 3);
        ring.timeout = Duration::from_millis(50);
        drop(ring);
        assert_eq!((quarantined_bytes() - before, heap.stats().live), (LEN as u64, LEN));
    }

    /// The slice is the middle of a buffer: nothing before the part that is still to be moved changes, nor behind it.
    #[test]
    fn after_a_short_read_the_kernel_fills_the_rest_alone() {
        const HALF: usize = LEN / 2;
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &[&[5; HALF][..], &[7; 4 * LEN]].concat()).unwrap();
        let file = Arc::new(file);
        let mut buffer = AnonHeap::new().allocate(3 * LEN).unwrap();
        buffer.fill(1);
        let mut behind = buffer.share().into_slice();
        let before = behind.split_off_front(LEN).unwrap();
        let slice = behind.split_off_front(LEN).unwrap();
        let mut read =
            Request { ask: Ask::Read, queue: 0, op: 0, index: 0, direct: false, file, slice, at: 0, done: HALF };
        let check = |read: &Request, moved: i32, how: &str| {
            assert_eq!(moved, HALF as i32, "{how}");
            let bytes = |slice: &BufferSlice| {
                let mut bytes = vec![0; slice.len()];
                slice.as_volatile_slice().read(&mut bytes);
                bytes
            };
            assert_eq!(bytes(&read.slice), [[1; HALF], [7; HALF]].concat(), "{how}");
            assert_eq!([bytes(&before), bytes(&behind)], [vec![1; LEN], vec![1; LEN]], "{how}");
        };
        let moved = pread(&mut read);
        check(&read, moved, "pread");
        read.slice.as_volatile_slice().fill(1);
        let Ok(mut ring) = Ring::new(4).inspect_err(|reason| eprintln!("skipped: {reason}")) else { return };
        assert!(ring.push(read).is_ok());
        ring.enter(Some(Duration::from_secs(60))).unwrap();
        let (read, moved) = ring.reap().expect("a file is read at once");
        check(&read, moved, "a ring");
    }

    #[test]
    fn a_dropped_dead_ring_frees_what_the_kernel_never_saw() {
        let heap = AnonHeap::new();
        let Ok(mut ring) = Ring::new(4).inspect_err(|reason| eprintln!("skipped: {reason}")) else { return };
        let file = Arc::new(tempfile::tempfile().unwrap());
        let slice = heap.allocate(LEN).unwrap().share().into_slice();
        let read = Request { ask: Ask::Read, queue: 0, op: 0, index: 0, direct: false, file, slice, at: 0, done: 0 };
        assert!(ring.push(read).is_ok());
        ring.fail_enter = true;
        assert!(ring.enter(None).is_err());
        ring.timeout = Duration::from_millis(50);
        drop(ring);
        assert_eq!(heap.stats().live, 0);
    }

    #[test]
    fn a_signal_ends_a_wait_and_no_more() {
        static HEARD: AtomicU64 = AtomicU64::new(0);
        extern "C" fn heard(_signal: libc::c_int) {
            HEARD.fetch_add(1, Ordering::Relaxed);
        }
        let heap = AnonHeap::new();
        let Some((mut ring, open)) = stuck(&heap) else { return };
        let handler = heard as extern "C" fn(libc::c_int);
        // SAFETY: all zeros are such a value; the handler only counts, and no other code here uses this signal.
        let set = unsafe {
            let action = libc::sigaction { sa_sigaction: handler as usize, ..std::mem::zeroed() };
            libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut())
        };
        assert_eq!(set, 0);
        // SAFETY: it has no conditions.
        let waiter = unsafe { libc::pthread_self() };
        let ended = std::sync::atomic::AtomicBool::new(false);
        let waited = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    // SAFETY: the thread lives: it waits for the end of this one.
                    unsafe { libc::pthread_kill(waiter, libc::SIGUSR2) };
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let waited = ring.enter(Some(Duration::from_secs(60)));
            ended.store(true, Ordering::Relaxed);
            waited
        });
        assert!(waited.is_ok() && !ring.is_dead(), "{waited:?}");
        assert!(HEARD.load(Ordering::Relaxed) > 0);
        std::io::Write::write_all(&mut &open, b"late").unwrap();
        let ended = loop {
            ring.enter(Some(Duration::from_secs(60))).unwrap();
            if let Some((_, result)) = ring.reap() {
                break result;
            }
        };
        assert_eq!(ended, 4);
    }

    #[test]
    fn a_dead_ring_gives_back_what_the_kernel_never_saw() {
        let heap = AnonHeap::new();
        let Some((mut ring, open)) = stuck(&heap) else { return };
        let file = Arc::new(open.try_clone().unwrap());
        for index in 1..4 {
            let slice = heap.allocate(LEN).unwrap().share().into_slice();
            let file = file.clone();
            let read = Request { ask: Ask::Read, queue: 0, op: 0, index, direct: false, file, slice, at: 0, done: 0 };
            assert!(ring.push(read).is_ok());
        }
        let slice = heap.allocate(LEN).unwrap().share().into_slice();
        let read = Request { ask: Ask::Read, queue: 0, op: 0, index: 4, direct: false, file, slice, at: 0, done: 0 };
        assert!(ring.push(read).is_err(), "full");
        assert!(ring.take_back().is_none(), "not while it lives");
        ring.fail_enter = true;
        assert!(ring.enter(None).is_err());
        let back: Vec<_> = std::iter::from_fn(|| ring.take_back()).map(|read| read.index).collect();
        assert_eq!((back, ring.busy()), (vec![1, 2, 3], 1));
        // The kernel still completes the one that it knows of.
        std::io::Write::write_all(&mut &open, b"late").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let (read, result) = loop {
            ring.enter(Some(Duration::from_millis(1))).unwrap();
            if let Some(ended) = ring.reap() {
                break ended;
            }
            assert!(Instant::now() < deadline);
        };
        assert_eq!((read.index, result), (0, 4));
    }
}
