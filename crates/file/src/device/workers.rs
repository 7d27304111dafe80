//! Threads that make one `pread` or `pwrite` after the other: the backend that asks least of a driver.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::ring::{self, Request};

/// How long threads that are dropped are waited for before what they hold is given up for lost.
const PATIENCE: Duration = Duration::from_secs(2);

/// Threads and what they were given. A thread that is stuck in a call when this is dropped stays behind, with the memory that the
/// call is about.
pub(crate) struct Workers {
    desk: Arc<Desk>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    /// There is something to do, or nothing ever more.
    work: Condvar,
    /// Something has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    todo: VecDeque<Request>,
    ended: VecDeque<(Request, i32)>,
    /// Calls under way, and the bytes that they are about.
    calls: usize,
    bytes: u64,
    quit: bool,
    /// Nobody waits for the calls under way any more.
    abandoned: bool,
}

impl Workers {
    /// Starts so many threads.
    ///
    /// # Errors
    /// The kernel's, when it starts none of them; fewer than asked for are no error.
    pub fn new(count: usize) -> io::Result<Self> {
        let mut this = Self { desk: Arc::default(), threads: Vec::new() };
        for i in 0..count.max(1) {
            let desk = this.desk.clone();
            match std::thread::Builder::new().name(format!("dmalane-node-{i}")).spawn(move || desk.run()) {
                Ok(thread) => this.threads.push(thread),
                Err(_) if !this.threads.is_empty() => break,
                Err(e) => return Err(e),
            }
        }
        Ok(this)
    }

    /// Takes a request.
    pub fn push(&self, request: Request) {
        self.desk.lock().todo.push_back(request);
        self.desk.work.notify_one();
    }

    /// The next request that has ended: bytes, or a negative error number.
    pub fn reap(&self) -> Option<(Request, i32)> {
        self.desk.lock().ended.pop_front()
    }

    /// Gives back what no thread has begun.
    pub fn take_back(&self) -> Vec<Request> {
        self.desk.lock().todo.drain(..).collect()
    }

    /// Waits until something has ended or the time is over.
    pub fn wait(&self, timeout: Duration) {
        let state = self.desk.lock();
        let idle = |s: &mut State| s.ended.is_empty() && (s.calls > 0 || !s.todo.is_empty());
        // What a panic elsewhere left is consistent; how the wait ended shows in what there is to reap.
        let _ = self.desk.ended.wait_timeout_while(state, timeout, idle);
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            let Some(request) = state.todo.pop_front() else {
                if state.quit {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let bytes = request.part.len() as u64;
            (state.calls, state.bytes) = (state.calls + 1, state.bytes + bytes);
            drop(state);
            let result = match request.ask.is_write() {
                true => ring::pwrite_from(&request.file, request.rest(), request.next()),
                false => ring::pread_into(&request.file, request.rest(), request.next()),
            };
            state = self.lock();
            (state.calls, state.bytes) = (state.calls - 1, state.bytes - bytes);
            match state.abandoned {
                true => ring::keep(request.part),
                false => state.ended.push_back((request, result)),
            }
            self.ended.notify_all();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.desk.lock();
        state.quit = true;
        state.todo.clear();
        self.desk.work.notify_all();
        while state.calls > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.abandoned = true;
                ring::stuck(state.bytes);
                return; // threads without a handle go on by themselves
            }
            (state, _) = self.desk.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
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
    use crate::ring::Ask;

    fn part(heap: &AnonHeap) -> BufferSlice {
        heap.allocate(4096).unwrap().share().into_part()
    }

    fn request(file: &Arc<File>, part: BufferSlice, ask: Ask) -> Request {
        Request { ask, op: 0, index: 0, direct: false, file: file.clone(), part, at: 0, done: 0 }
    }

    #[test]
    fn what_was_begun_ends_and_the_rest_is_taken_back() {
        let heap = AnonHeap::new();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let workers = Workers::new(2).unwrap();
        let mut ours = part(&heap);
        ours.write(0, &[7; 4096]).unwrap();
        workers.push(request(&file, ours, Ask::Write));
        workers.wait(Duration::from_secs(10));
        assert_eq!(workers.reap().unwrap().1, 4096);
        workers.push(request(&file, part(&heap), Ask::Read));
        workers.wait(Duration::from_secs(10));
        let (read, n) = workers.reap().unwrap();
        let mut bytes = [0; 4096];
        read.part.read(0, &mut bytes).unwrap();
        assert_eq!((n, bytes), (4096, [7; 4096]));
        workers.wait(Duration::from_secs(100)); // for nothing, so not at all
        assert!(workers.reap().is_none() && workers.take_back().is_empty());
    }

    #[test]
    fn many_requests_of_a_dropped_pool_leave_nothing_behind() {
        let heap = AnonHeap::new();
        let file = Arc::new(tempfile::tempfile().unwrap());
        for count in [1, 3] {
            let workers = Workers::new(count).unwrap();
            for _ in 0..50 {
                workers.push(request(&file, part(&heap), Ask::Write));
            }
            drop(workers);
            assert_eq!(heap.stats().live, 0);
        }
    }
}
