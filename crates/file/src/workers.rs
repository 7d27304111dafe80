//! Threads that make one `pread` or `pwrite` after the other: what needs least of a driver, and what every driver does
//! right.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dmalane_dma::{lock, quarantine};

use crate::ring::{self, Ask, Request};

/// Time that a drop waits for the threads before it abandons their requests.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);

/// Threads and their requests. A thread that is stuck in a call when this is dropped is left behind, with the memory of
/// the call.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    /// Started when a request comes while all others are in calls.
    threads: Vec<JoinHandle<()>>,
    most: usize,
}

/// The fate of a request whose call moved less than was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Short {
    /// It goes on where it stopped.
    #[default]
    GoesOn,
    /// It comes back, with the result of that call.
    Returns,
}

#[derive(Default)]
struct Shared {
    short: Short,
    state: Mutex<State>,
    /// A request was pushed, or the threads shall exit.
    work: Condvar,
    /// A request has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    todo: VecDeque<Request>,
    ended: VecDeque<(Request, i32)>,
    /// Calls in progress, and their bytes.
    calls: usize,
    bytes: u64,
    quit: bool,
    /// The owner does not wait for the calls in progress any more.
    abandoned: bool,
}

impl Workers {
    /// Starts a thread; there will be this number at most.
    ///
    /// # Errors
    /// The kernel's; that it starts no further one later is no error.
    pub fn new(most: usize, short: Short) -> io::Result<Self> {
        let shared = Arc::new(Shared { short, ..Shared::default() });
        let mut this = Self { shared, threads: Vec::new(), most };
        this.start()?;
        Ok(this)
    }

    fn start(&mut self) -> io::Result<()> {
        let (name, shared) = (format!("dmalane-io-{}", self.threads.len()), self.shared.clone());
        self.threads.push(std::thread::Builder::new().name(name).spawn(move || shared.run())?);
        Ok(())
    }

    /// Takes a request.
    pub fn push(&mut self, request: Request) {
        let mut state = lock(&self.shared.state);
        state.todo.push_back(request);
        let wanted = state.todo.len() + state.calls;
        drop(state);
        self.shared.work.notify_one();
        if self.threads.len() < wanted.min(self.most) && self.start().is_err() {
            self.most = self.threads.len();
        }
    }

    /// Threads started.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Requests that have not been taken back or reaped.
    pub fn busy(&self) -> usize {
        let state = lock(&self.shared.state);
        state.todo.len() + state.calls + state.ended.len()
    }

    /// The next request that has ended, with the result of its last call: bytes, or a negative error number. Where
    /// short ones go on, either nothing is left to be moved, or the result says why something is.
    pub fn reap(&self) -> Option<(Request, i32)> {
        lock(&self.shared.state).ended.pop_front()
    }

    /// Takes back the requests that no thread has in a call.
    pub fn take_back(&self) -> Vec<Request> {
        lock(&self.shared.state).todo.drain(..).collect()
    }

    /// Waits until something has ended or the time is over; not at all when there are no requests.
    pub fn wait(&self, timeout: Duration) {
        let state = lock(&self.shared.state);
        let idle = |s: &mut State| s.ended.is_empty() && (s.calls > 0 || !s.todo.is_empty());
        // A panic elsewhere leaves the state consistent; whether the wait timed out shows in what there is to reap.
        let _ = self.shared.ended.wait_timeout_while(state, timeout, idle);
    }
}

impl Shared {
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.quit {
                return;
            }
            let Some(mut request) = state.todo.pop_front() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let bytes = request.slice.len() as u64;
            (state.calls, state.bytes) = (state.calls + 1, state.bytes + bytes);
            drop(state);
            let result = match request.ask {
                Ask::Write => ring::pwrite_from(&request.file, request.rest(), request.next()),
                Ask::Read | Ask::ReadCached => ring::pread_into(&request.file, request.rest(), request.next()),
            };
            state = lock(&self.state);
            (state.calls, state.bytes) = (state.calls - 1, state.bytes - bytes);
            let left = request.rest().len();
            let moved = usize::try_from(result).unwrap_or(0);
            if state.abandoned {
                // Counted when the queue was dropped.
                quarantine(request.slice, 0);
            } else if self.short == Short::Returns {
                state.ended.push_back((request, result));
            } else if result == -libc::EINTR || (1..left).contains(&moved) {
                request.done += moved;
                state.todo.push_front(request);
            } else {
                request.done += if moved == left { moved } else { 0 };
                state.ended.push_back((request, result));
            }
            self.ended.notify_all();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_TIMEOUT;
        let mut state = lock(&self.shared.state);
        state.quit = true;
        state.todo.clear();
        self.shared.work.notify_all();
        while state.calls > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.abandoned = true;
                quarantine((), state.bytes);
                return; // threads without a handle go on by themselves
            }
            (state, _) = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use dmalane_dma::{AnonHeap, BufferSlice, Heap};

    use super::*;

    fn slice(heap: &AnonHeap) -> BufferSlice {
        heap.allocate(4096).unwrap().share().into_slice()
    }

    fn request(file: &Arc<File>, slice: BufferSlice, ask: Ask) -> Request {
        Request { ask, queue: 0, op: 0, index: 0, direct: false, file: file.clone(), slice, at: 0, done: 0 }
    }

    #[test]
    fn what_was_begun_ends_and_the_rest_is_taken_back() {
        let heap = AnonHeap::new();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut workers = Workers::new(2, Short::GoesOn).unwrap();
        let mut ours = slice(&heap);
        ours.write(0, &[7; 4096]).unwrap();
        workers.push(request(&file, ours, Ask::Write));
        workers.wait(Duration::from_secs(10));
        assert_eq!(workers.reap().unwrap().1, 4096);
        workers.push(request(&file, slice(&heap), Ask::Read));
        workers.wait(Duration::from_secs(10));
        let (read, n) = workers.reap().unwrap();
        let mut bytes = [0; 4096];
        read.slice.read(0, &mut bytes).unwrap();
        assert_eq!((n, bytes), (4096, [7; 4096]));
        workers.wait(Duration::from_secs(100)); // for nothing, so not at all
        assert!(workers.reap().is_none() && workers.take_back().is_empty());
    }

    #[test]
    fn many_requests_of_a_dropped_pool_leave_nothing_behind() {
        let heap = AnonHeap::new();
        let file = Arc::new(tempfile::tempfile().unwrap());
        for count in [1, 3] {
            let mut workers = Workers::new(count, Short::GoesOn).unwrap();
            for _ in 0..50 {
                workers.push(request(&file, slice(&heap), Ask::Write));
            }
            drop(workers);
            assert_eq!(heap.stats().live, 0);
        }
    }
}
