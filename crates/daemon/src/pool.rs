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

/// Most jobs that run at a time. Further users take turns.
const JOBS: usize = 8;

/// Sleeps in a job until this returns true, while another job runs in its place. Made by [`Pool::pause`].
pub(crate) type Pause = Arc<dyn Fn(&dyn Fn() -> bool) + Send + Sync>;

/// How often a job that sleeps looks whether it may go on.
const PACE: Duration = Duration::from_micros(50);

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
    /// Jobs that run; those that sleep ([`Pause`]), and of these, those that want to go on.
    running: usize,
    paused: usize,
    returning: usize,
    quit: bool,
    done: Vec<T>,
}

struct Shared<T> {
    jobs: Mutex<Jobs<T>>,
    ready: Condvar,
    /// A job that has slept may go on.
    places: Condvar,
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
            running: 0,
            paused: 0,
            returning: 0,
            quit: false,
            done: Vec::new(),
        };
        let (ready, places) = Default::default();
        let shared = Shared { jobs: Mutex::new(jobs), ready, places, wake, charge: Box::new(charge) };
        let pool = Self(Arc::new(shared));
        // With one thread there is progress, whatever happens later.
        let first = pool.0.spawn()?;
        pool.0.lock().threads.push(first);
        Ok(pool)
    }

    /// For jobs that sleep.
    pub(crate) fn pause(&self) -> Pause {
        let shared = Arc::downgrade(&self.0);
        Arc::new(move |until| {
            if let Some(shared) = shared.upgrade() {
                shared.pause(until);
            }
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
        self.0.find_thread(&mut jobs);
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

    fn spawn(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let shared = self.clone();
        thread::Builder::new().name("dmalaned-pool".to_owned()).spawn(move || {
            yield_to_worker();
            shared.run();
        })
    }

    /// Has a thread take the next job: a new one if the others are busy or sleep in jobs.
    fn find_thread(self: &Arc<Self>, jobs: &mut Jobs<T>) {
        if jobs.idle < jobs.turns.len()
            && jobs.threads.len() < JOBS + jobs.paused
            && let Ok(thread) = self.spawn()
        {
            jobs.threads.push(thread);
        }
        self.ready.notify_one();
    }

    fn pause(self: &Arc<Self>, until: &dyn Fn() -> bool) {
        let mut jobs = self.lock();
        (jobs.running, jobs.paused) = (jobs.running - 1, jobs.paused + 1);
        self.find_thread(&mut jobs);
        self.places.notify_one();
        drop(jobs);
        while !until() {
            thread::sleep(PACE);
        }
        jobs = self.lock();
        jobs.returning += 1;
        while jobs.running >= JOBS {
            jobs = self.places.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        jobs.returning -= 1;
        (jobs.running, jobs.paused) = (jobs.running + 1, jobs.paused - 1);
    }

    fn run(&self) {
        let mut jobs = self.lock();
        loop {
            if jobs.running + jobs.returning >= JOBS {
                // Those that have slept go on first.
                jobs = self.ready.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
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
            jobs.running += 1;
            drop(jobs);
            take_time();
            let result = job();
            (self.charge)(user, take_time());
            jobs = self.lock();
            jobs.running -= 1;
            self.places.notify_one();
            if jobs.quit {
                // Others may have waited for a place.
                self.ready.notify_all();
            }
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
        self.0.lock().quit = true;
        self.0.ready.notify_all();
        // One by one: a job that begins to sleep may have another thread started, which is in the list before the
        // thread of that job ends.
        let next = || self.0.lock().threads.pop();
        while let Some(thread) = next() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
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
        assert!(pool.0.lock().threads.len() <= JOBS);
        drop(go);
        while done.len() < 53 {
            done.extend(pool.take());
            thread::yield_now();
        }
        assert!(pool.0.lock().users.is_empty());
    }

    #[test]
    fn jobs_that_sleep_hold_nobody_back() {
        let pool: Pool<u32> = Pool::new(|_, _| {}).unwrap();
        let (pause, go) = (pool.pause(), Arc::new(AtomicBool::new(false)));
        let most = Arc::new(Mutex::new((0usize, 0usize)));
        for user in 0..20 {
            let (pause, go, most) = (pause.clone(), go.clone(), most.clone());
            pool.put(user, move || {
                pause(&|| go.load(Ordering::Relaxed));
                // The most that run at a time.
                let mut running = most.lock().unwrap();
                *running = (running.0 + 1, running.1.max(running.0 + 1));
                drop(running);
                thread::sleep(Duration::from_millis(1));
                most.lock().unwrap().0 -= 1;
                user
            });
        }
        for user in 20..30 {
            pool.put(user, move || user);
        }
        let mut done = Vec::new();
        let mut wait_for = |count| {
            let start = Instant::now();
            while done.len() < count {
                assert!(start.elapsed() < Duration::from_secs(60), "{done:?}");
                done.extend(pool.take());
                thread::yield_now();
            }
            done.sort();
            done.clone()
        };
        assert_eq!(wait_for(10), (20..30).collect::<Vec<u32>>(), "while the others sleep");
        go.store(true, Ordering::Relaxed);
        assert_eq!(wait_for(30), (0..30).collect::<Vec<u32>>());
        assert!((1..=JOBS).contains(&most.lock().unwrap().1), "{most:?}");
        drop(pool);
    }

    #[test]
    fn no_thread_outlives_the_pool() {
        let pool: Pool<()> = Pool::new(|_, _| {}).unwrap();
        let (pause, shared) = (pool.pause(), Arc::downgrade(&pool.0));
        let [begun, ended] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        for user in 0..JOBS as u32 {
            let (pause, shared, begun) = (pause.clone(), shared.clone(), begun.clone());
            pool.put(user, move || {
                while shared.upgrade().is_some_and(|shared| !shared.lock().quit) {
                    thread::yield_now();
                }
                // Only now is there a thread for the last job: a new one, while the pool waits for those of before.
                pause(&|| begun.load(Ordering::SeqCst));
            });
        }
        let last = ended.clone();
        pool.put(JOBS as u32, move || {
            begun.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(200));
            last.store(true, Ordering::SeqCst);
        });
        drop(pool);
        assert!(ended.load(Ordering::SeqCst));
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
