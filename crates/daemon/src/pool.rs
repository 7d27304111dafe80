//! Threads for requests that a client can make long: importing, populating, mapping and releasing memory.
//!
//! The control thread hands a connection over together with the request, and gets it back with the answer. Users take
//! turns, and a user has one job under way at a time, so a user with many connections delays only itself. The processor
//! time of jobs is charged to their users: the threads compete with the worker for processors.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

/// Most threads. Further users take turns.
const THREADS: usize = 8;

type Job<T> = Box<dyn FnOnce() -> T + Send>;

struct User<T> {
    waiting: VecDeque<Job<T>>,
    running: bool,
}

struct Jobs<T> {
    /// Users with a job that waits or is under way.
    users: HashMap<u32, User<T>>,
    /// Users with a job that waits and none under way, in their order.
    turns: VecDeque<u32>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    quit: bool,
    done: Vec<T>,
}

struct Shared<T> {
    jobs: Mutex<Jobs<T>>,
    ready: Condvar,
    /// Readable when there are results.
    wake: OwnedFd,
    /// Called with the processor time that a job of a user took.
    charge: Box<dyn Fn(u32, Duration) + Send + Sync>,
}

/// A bounded pool of threads, which users share fairly.
pub(crate) struct Pool<T: Send + 'static>(Arc<Shared<T>>);

impl<T: Send + 'static> Pool<T> {
    /// A pool that calls `charge` with the user and the processor time of each job ([`take_time`]) before its result
    /// can be taken.
    pub(crate) fn new(charge: impl Fn(u32, Duration) + Send + Sync + 'static) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let jobs = Jobs {
            users: HashMap::new(),
            turns: VecDeque::new(),
            threads: Vec::new(),
            idle: 0,
            quit: false,
            done: Vec::new(),
        };
        let shared = Shared { jobs: Mutex::new(jobs), ready: Condvar::new(), wake, charge: Box::new(charge) };
        let pool = Self(Arc::new(shared));
        // With one thread there is progress, whatever happens later.
        let first = pool.spawn()?;
        pool.0.lock().threads.push(first);
        Ok(pool)
    }

    fn spawn(&self) -> io::Result<JoinHandle<()>> {
        let shared = self.0.clone();
        thread::Builder::new().name("dmalaned-pool".to_owned()).spawn(move || {
            yield_to_worker();
            shared.run();
        })
    }

    /// Queues a job of a user.
    pub(crate) fn put(&self, user: u32, job: impl FnOnce() -> T + Send + 'static) {
        let mut jobs = self.0.lock();
        let found = jobs.users.entry(user).or_insert_with(|| User { waiting: VecDeque::new(), running: false });
        found.waiting.push_back(Box::new(job));
        if !found.running && found.waiting.len() == 1 {
            jobs.turns.push_back(user);
        }
        if jobs.idle < jobs.turns.len()
            && jobs.threads.len() < THREADS
            && let Ok(thread) = self.spawn()
        {
            jobs.threads.push(thread);
        }
        drop(jobs);
        self.0.ready.notify_one();
    }

    /// Becomes readable when there are results.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// The results of jobs that have ended.
    pub(crate) fn take(&self) -> Vec<T> {
        let _ = rustix::io::read(&self.0.wake, &mut [0u8; 8]);
        std::mem::take(&mut self.0.lock().done)
    }
}

impl<T: Send + 'static> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Jobs<T>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut jobs = self.lock();
        loop {
            let Some(user) = jobs.turns.pop_front() else {
                if jobs.quit {
                    return;
                }
                jobs.idle += 1;
                jobs = self.ready.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
                continue;
            };
            let Some(job) = jobs.users.get_mut(&user).and_then(|found| {
                found.running = true;
                found.waiting.pop_front()
            }) else {
                continue;
            };
            drop(jobs);
            take_time();
            let result = job();
            (self.charge)(user, take_time());
            jobs = self.lock();
            jobs.done.push(result);
            // The write fails only when the counter is full, and then the eventfd is readable anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            if let Some(found) = jobs.users.get_mut(&user) {
                found.running = false;
                if found.waiting.is_empty() {
                    jobs.users.remove(&user);
                } else {
                    jobs.turns.push_back(user);
                }
            }
        }
    }
}

/// Lowers the priority of this thread (nice 10) below the worker's, whose time is what users share. `dmalane.slice`
/// weighs ten times as much as `user.slice`: at full priority, a user could have this thread take processors from other
/// users' processes.
pub(crate) fn yield_to_worker() {
    // It may always get less.
    let _ = rustix::process::setpriority_process(None, 10);
}

/// Processor time of this thread so far.
pub(crate) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Processor time of this thread since the last call.
pub(crate) fn take_time() -> Duration {
    thread_local!(static TAKEN: Cell<Duration> = const { Cell::new(Duration::ZERO) });
    let now = thread_time();
    now.saturating_sub(TAKEN.replace(now))
}

impl<T: Send + 'static> Drop for Pool<T> {
    /// Waits until all jobs are done.
    fn drop(&mut self) {
        let threads = {
            let mut jobs = self.0.lock();
            jobs.quit = true;
            std::mem::take(&mut jobs.threads)
        };
        self.0.ready.notify_all();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_user_with_many_jobs_delays_only_itself() {
        let pool: Pool<u32> = Pool::new(|_, _| {}).unwrap();
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..47 {
            let wait = wait.clone();
            pool.put(1, move || {
                let _ = wait.lock().unwrap().recv();
                1
            });
        }
        for user in 2..=7 {
            pool.put(user, move || user);
        }
        let mut done = Vec::new();
        while done.len() < 6 {
            done.extend(pool.take());
            thread::yield_now();
        }
        done.sort();
        assert_eq!(done, [2, 3, 4, 5, 6, 7], "while the first user's job waits");
        assert!(pool.0.lock().threads.len() <= THREADS);
        drop(go);
        while done.len() < 53 {
            done.extend(pool.take());
            thread::yield_now();
        }
        assert!(pool.0.lock().users.is_empty());
    }

    #[test]
    fn users_are_charged_for_the_processor_time_of_their_jobs() {
        let charged = Arc::new(Mutex::new(HashMap::<u32, Duration>::new()));
        let charges = charged.clone();
        let add = move |user, took| *charges.lock().unwrap().entry(user).or_default() += took;
        let pool: Pool<()> = Pool::new(add).unwrap();
        let (busy, asleep) = (Duration::from_millis(20), Duration::from_secs(1));
        pool.put(1, move || thread::sleep(asleep));
        pool.put(2, move || {
            let (from, give_up) = (thread_time(), Instant::now() + Duration::from_secs(60));
            while thread_time() - from < busy && Instant::now() < give_up {}
        });
        let mut done = 0;
        while done < 2 {
            done += pool.take().len();
            thread::yield_now();
        }
        let charged = charged.lock().unwrap();
        assert!(charged[&2] >= busy && charged[&1] < asleep / 2, "{charged:?}");
    }
}
