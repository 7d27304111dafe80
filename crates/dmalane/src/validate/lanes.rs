//! Threads that move their buffers, all at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dmalane_engine::{Channel, Completion, DeviceAddr, DeviceFar, Direction};
use dmalane_mem::HostBus;

use super::target::PATIENCE;
use super::walk::Walk;
use super::{Phase, Rate, Stop, ValidateError};

/// What a thread works with.
pub(super) struct Lane {
    pub channel: Box<dyn Channel<Far = DeviceFar>>,
    pub walks: Vec<Walk>,
}

/// What all threads do.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// For messages.
    pub phase: Phase,
    pub stop: Stop,
    pub registered: bool,
    /// Only what ends between this time and the end of a [`Stop::For`] counts: for rates of streams that share something as long as
    /// all of them run.
    pub after: Option<Duration>,
}

/// Lets each lane move those of its walks that `active` names (by their place in the lane).
///
/// # Errors
/// The first failure of any; what the others move then still ends.
pub(super) fn go(
    lanes: &mut [Lane],
    bus: &dyn HostBus,
    job: Job,
    active: impl Fn(usize) -> bool + Sync,
) -> Result<(), ValidateError> {
    let (barrier, failed) = (Barrier::new(lanes.len()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let run = |(thread, lane): (usize, &mut Lane)| {
            let (barrier, failed, active) = (&barrier, &failed, &active);
            let result = lane.run(thread, bus, job, active, barrier, failed);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            result
        };
        let mut lanes = lanes.iter_mut().enumerate();
        let first = lanes.next();
        let threads: Vec<_> = lanes.map(|lane| scope.spawn(move || run(lane))).collect();
        // This thread is one of them.
        let mut result = first.map_or(Ok(()), run);
        for thread in threads {
            let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(other);
        }
        result
    })
}

impl Lane {
    fn run(
        &mut self,
        thread: usize,
        bus: &dyn HostBus,
        job: Job,
        active: &(impl Fn(usize) -> bool + Sync),
        barrier: &Barrier,
        failed: &AtomicBool,
    ) -> Result<(), ValidateError> {
        let Self { channel, walks } = self;
        walks.iter_mut().for_each(Walk::reset);
        barrier.wait();
        let start = Instant::now();
        let (mut progress, mut done) = (start, Vec::new());
        let goes_on = |walk: &Walk| match job.stop {
            Stop::After(passes) => walk.moved.passes < passes,
            Stop::For(time) => start.elapsed() < time || walk.moved.passes == 0 && job.after.is_none(),
        };
        let mut first_error = None;
        loop {
            let mut busy = false;
            for (_, walk) in walks.iter_mut().enumerate().filter(|(i, _)| active(*i)) {
                let stopped = first_error.is_some() || failed.load(Ordering::Relaxed);
                if walk.is_idle() && !stopped && goes_on(walk) {
                    walk.begin(bus)?;
                }
                if stopped {
                    walk.give_up();
                }
                busy |= !walk.is_idle();
                if walk.feed(&mut **channel)? {
                    progress = Instant::now();
                }
            }
            if !busy {
                return first_error.map_or(Ok(()), Err);
            }
            channel.wait(&mut done, Duration::from_millis(10));
            if !done.is_empty() {
                progress = Instant::now();
            } else if progress.elapsed() > PATIENCE {
                return Err(ValidateError::Stuck { phase: job.phase, thread, after: PATIENCE });
            }
            for Completion { ticket, transfer, result } in done.drain(..) {
                let (direction, at) = (transfer.direction, transfer.far.at);
                let counts = match (job.stop, job.after) {
                    (Stop::For(time), Some(after)) => (after..time).contains(&start.elapsed()),
                    _ => true,
                };
                let mut part = Some(transfer.part);
                for walk in walks.iter_mut() {
                    let Some(this) = part.take() else { break };
                    part = walk.take(ticket, this, (start, counts), job.registered).err();
                }
                if let (Err(error), DeviceAddr::Card(at)) = (result, at) {
                    let what = if direction == Direction::ToHost { "reading" } else { "writing" };
                    first_error.get_or_insert(ValidateError::Failed { phase: job.phase, thread, what, at, error });
                }
            }
        }
    }
}

/// What the walks at this place of all lanes have moved together.
pub(super) fn rate(lanes: &[Lane], place: usize) -> Option<Rate> {
    let mut latency = dmalane_engine::Latency::default();
    let (mut bytes, mut took, mut buffers) = (0, Duration::ZERO, 0);
    for walk in lanes.iter().filter_map(|lane| lane.walks.get(place)) {
        latency.add(&walk.moved.latency);
        bytes += walk.moved.bytes;
        took = took.max(walk.moved.took);
        buffers += walk.moved.passes;
    }
    let bytes_per_s = bytes as f64 / took.as_secs_f64();
    Some(Rate { bytes_per_s, p50: latency.p50()?, p99: latency.p99()?, buffers }).filter(|r| r.bytes_per_s.is_finite())
}
