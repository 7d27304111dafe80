//! Threads that move their buffers, all at once.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmalane_queue::{Completion, DeviceAddr, DeviceQueue, Direction, HaltWatch, StopReason, Work};

use crate::error::ValidateError;
use crate::report::Rate;
use crate::settings::{Phase, Stop};
use crate::walk::{Walk, histogram};

/// Bytes per second that a device moves at least, unless it is stuck.
const SLOWEST: u64 = 4_000_000;

/// Time that a thread waits for a queue that it has stopped to release its buffers.
const SETTLE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// A thread: its queue, and the walks that it keeps in flight, all at once.
pub(crate) struct Worker {
    pub queue: Box<DeviceQueue>,
    pub walks: Vec<Walk>,
}

/// The job of all threads.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    /// For messages.
    pub phase: Phase,
    pub stop: Stop,
    /// Longest time in which no operation ends, besides the time that a buffer takes.
    pub timeout: Duration,
    /// Ends it early when true.
    pub cancelled: &'a AtomicBool,
}

/// State that the threads of a job share.
struct Common {
    start: Instant,
    /// Microseconds after `start` at which an operation last ended, of any thread.
    progress: AtomicU64,
    failed: AtomicBool,
    timeout: Duration,
    /// Locked until all threads are there.
    gate: RwLock<()>,
}

impl Common {
    fn moved(&self) {
        self.progress.fetch_max(self.start.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    fn is_stuck(&self) -> bool {
        let last = Duration::from_micros(self.progress.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last) > self.timeout
    }
}

/// Lets each worker move those of its walks that `active` names, by the direction that they are measured in.
///
/// # Errors
/// The first failure of any; what the others move then still ends.
pub(crate) fn go(
    workers: &mut [Worker],
    job: Job<'_>,
    active: impl Fn(Direction) -> bool + Sync,
) -> Result<(), ValidateError> {
    // A buffer counts when all of it has moved, which takes a slow device a while.
    let longest = workers.iter().flat_map(|worker| &worker.walks).map(Walk::len).max().unwrap_or(0);
    let common = Common {
        start: Instant::now(),
        progress: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        timeout: job.timeout + Duration::from_secs(longest / SLOWEST),
        gate: RwLock::new(()),
    };
    std::thread::scope(|scope| {
        let run = |(thread, worker): (usize, &mut Worker)| {
            let (common, active) = (&common, &active);
            let result = worker.run(thread, job, active, common);
            if result.is_err() {
                common.failed.store(true, Ordering::Relaxed);
            }
            result
        };
        let gate = common.gate.write();
        let mut workers = workers.iter_mut().enumerate();
        let first = workers.next();
        let mut threads = Vec::new();
        for worker in workers {
            let name = format!("dmalane-worker-{}", worker.0);
            match std::thread::Builder::new().name(name).spawn_scoped(scope, move || run(worker)) {
                Ok(thread) => threads.push(thread),
                Err(e) => {
                    common.failed.store(true, Ordering::Relaxed);
                    return Err(ValidateError::Thread(e));
                }
            }
        }
        drop(gate);
        // This thread is one of them.
        let mut result = first.map_or(Ok(()), run);
        for thread in threads {
            let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // Who finds that nothing moves stops the queue, and others only see that it was stopped.
            result = match (result, other) {
                (
                    Err(ValidateError::Failed { .. } | ValidateError::Refused { .. } | ValidateError::Halted { .. }),
                    Err(stuck @ ValidateError::Stuck { .. }),
                ) => Err(stuck),
                (result, other) => result.and(other),
            };
        }
        result
    })
}

impl Worker {
    fn run(
        &mut self,
        thread: usize,
        job: Job<'_>,
        active: &(impl Fn(Direction) -> bool + Sync),
        common: &Common,
    ) -> Result<(), ValidateError> {
        let Self { queue, walks } = self;
        walks.iter_mut().for_each(Walk::reset);
        drop(common.gate.read());
        if common.failed.load(Ordering::Relaxed) {
            return Ok(()); // another thread's error is reported
        }
        let start = Instant::now();
        common.moved();
        let mut done = Vec::new();
        let goes_on = |walk: &Walk| match job.stop {
            Stop::After(passes) => walk.moved.passes < passes,
            Stop::For(time) => start.elapsed() < time || walk.moved.passes == 0,
        };
        let mut first_error = None;
        let mut watch = HaltWatch::default();
        loop {
            let (mut busy, mut fed) = (false, false);
            for walk in walks.iter_mut().filter(|walk| active(walk.measured)) {
                let stopped = first_error.is_some()
                    || common.failed.load(Ordering::Relaxed)
                    || job.cancelled.load(Ordering::Relaxed);
                if walk.is_idle() && !stopped && goes_on(walk) {
                    walk.begin();
                }
                if stopped {
                    walk.give_up();
                }
                busy |= !walk.is_idle();
                fed |= walk.feed(&mut **queue)?;
            }
            if !busy {
                return match first_error {
                    Some(error) => Err(error),
                    None if job.cancelled.load(Ordering::Relaxed) => Err(ValidateError::Interrupted),
                    None => Ok(()),
                };
            }
            queue.wait(&mut done, Duration::from_millis(10));
            if !done.is_empty() {
                common.moved();
            } else if let Some(why) = watch.lost(&**queue) {
                return Err(first_error.unwrap_or(ValidateError::Halted { phase: job.phase, thread, why }));
            } else if common.is_stuck() {
                let stuck = ValidateError::Stuck { phase: job.phase, thread, after: common.timeout };
                // So that buffers come back where the device can be made to let go of them.
                queue.stop(StopReason::Requested(stuck.to_string().into()));
                let until = Instant::now() + SETTLE;
                while queue.in_flight() > 0 && Instant::now() < until {
                    queue.wait(&mut done, Duration::from_millis(100));
                    done.clear();
                }
                return Err(first_error.unwrap_or(stuck));
            } else if !fed && queue.in_flight() == 0 {
                // The queue is full of what other threads move, and there was nothing to wait for.
                std::thread::sleep(Duration::from_micros(50));
            }
            for Completion { ticket, operation, result, .. } in done.drain(..) {
                let Work::Copy { direction, host, at } = operation.work else { continue };
                let mut unclaimed = Some(host.slice);
                for walk in walks.iter_mut() {
                    let Some(slice) = unclaimed.take() else { break };
                    unclaimed = walk.take(ticket, slice, start).err();
                }
                if let (Err(error), DeviceAddr::Card(at)) = (result, at) {
                    let what = if direction == Direction::ToHost { "reading" } else { "writing" };
                    first_error.get_or_insert(ValidateError::Failed { phase: job.phase, thread, what, at, error });
                }
            }
        }
    }
}

/// The rate of a direction, all workers together. Both directions are divided by the same time, until the last walk of
/// either had ended: ways that run at once do not count as faster for ending earlier.
pub(crate) fn rate(workers: &[Worker], direction: Direction) -> Option<Rate> {
    let took = workers.iter().flat_map(|worker| &worker.walks).map(|walk| walk.moved.took).max()?;
    let mut times = histogram();
    let (mut bytes, mut buffers) = (0, 0);
    for walk in workers.iter().flat_map(|worker| &worker.walks).filter(|walk| walk.measured == direction) {
        // Both have the same bounds.
        let added = times.add(&walk.moved.times);
        debug_assert!(added.is_ok(), "{added:?}");
        bytes += walk.moved.bytes;
        buffers += walk.moved.passes;
    }
    let bytes_per_s = bytes as f64 / took.as_secs_f64();
    let quantile = |share| Duration::from_nanos(times.value_at_quantile(share));
    let rate = Rate { bytes_per_s, p50: quantile(0.5), p99: quantile(0.99), buffers };
    (!times.is_empty() && bytes_per_s.is_finite()).then_some(rate)
}
