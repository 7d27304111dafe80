//! Measuring what tells the limits of a card apart, and fitting a model to it.

use std::time::Duration;

use crate::link::Stream;
use crate::link::fit::{Fit, Measured, fit, plan};
use dmalane_addr::CardAddr;
use dmalane_queue::Direction;

use crate::target::TestedDevice;
use crate::walk::Walk;
use crate::workers::{Job, Worker, go};
use crate::{Phase, Stop, ValidateError, ValidateEvent};

/// Bytes of a transfer, and transfers that each stream keeps in flight.
const CHUNK: u64 = 128 << 10;
const DEPTH: u64 = 4;
/// Operations that end earlier do not count: they use up credit saved while nothing moved.
const WARM: Duration = Duration::from_millis(25);

/// How limits are found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FitSettings {
    /// Bytes at the front of each half that are left alone; a multiple of 4 KiB.
    pub offset: u64,
    /// Time that each set of streams runs.
    pub time: Duration,
    /// Runs of each set, of which the median counts; at least 1.
    pub runs: usize,
    /// Rates that differ by less each way count as equal: 0.05 is 5 %.
    pub noise: f64,
}

impl Default for FitSettings {
    /// Three times 100 ms; 5 %.
    fn default() -> Self {
        Self { offset: 0, time: Duration::from_millis(100), runs: 3, noise: 0.05 }
    }
}

/// Measured rates, and the limits that explain them.
#[derive(Clone, Debug)]
pub struct FitReport {
    /// Streams that ran at once, with their rates.
    pub points: Vec<Measured>,
    /// The limits that explain them.
    pub fit: Fit,
}

/// Runs each set of streams of the plan of [`crate::link::fit`], compares the bytes, and fits limits to the rates.
///
/// # Errors
/// [`ValidateError::NothingToFit`] for a device without halves; [`ValidateError::Wrong`], and what else keeps it from
/// measuring.
pub fn fit_link(
    target: &TestedDevice,
    settings: &FitSettings,
    watch: &mut dyn FnMut(ValidateEvent),
) -> Result<FitReport, ValidateError> {
    let channels = target.channels();
    if target.halves().is_none() {
        return Err(ValidateError::NothingToFit);
    }
    let sets = plan(channels);
    watch(ValidateEvent::Steps(sets.len()));
    let mut points = Vec::new();
    for streams in &sets {
        let what = streams.iter().map(name).collect::<Vec<_>>().join(" + ");
        watch(ValidateEvent::Step(what.clone()));
        points.push(point(target, streams, settings, &what)?);
    }
    let fit = fit(channels, &points, settings.noise);
    Ok(FitReport { points, fit })
}

fn name(s: &Stream) -> String {
    let directions = if s.direction == Direction::ToHost { "reading" } else { "writing" };
    format!("channel {} {directions} {:?}", s.channel, s.half)
}

fn seed(worker: usize, walk: usize) -> u64 {
    1 << 40 | (worker as u64) << 8 | walk as u64
}

fn point(
    target: &TestedDevice,
    streams: &[Stream],
    settings: &FitSettings,
    what: &str,
) -> Result<Measured, ValidateError> {
    let halves = target.halves().ok_or(ValidateError::NothingToFit)?;
    let FitSettings { offset, time, runs, .. } = *settings;
    let heap = target.registrar.heap(None);
    let mut workers = Vec::new();
    for (i, stream) in streams.iter().enumerate() {
        let (first, have) = halves.span(stream.half);
        let needed = offset + (i as u64 + 1) * DEPTH * CHUNK;
        if needed > have {
            return Err(ValidateError::TooSmall { memory: "a half", needed, have });
        }
        let mut walks = Vec::new();
        for k in 0..DEPTH {
            let at = CardAddr::new(first.bits() + offset + (i as u64 * DEPTH + k) * CHUNK);
            let buf = heap.allocate(CHUNK as usize).map_err(ValidateError::Memory)?.share();
            let mut walk = Walk::new(buf, &[(at, CHUNK)], &*target.registrar)?;
            walk.fill(seed(i, k as usize));
            walks.push(walk);
        }
        workers.push(Worker { queue: Box::new(target.queue(stream.channel)), walks });
    }
    let all = |workers: &mut [Worker], stop, after| {
        let job = Job {
            phase: Phase::Both,
            stop,
            registered: true,
            after,
            timeout: target.timeout,
            cancelled: &target.cancelled,
        };
        go(workers, &*target.registrar, job, |_| true)
    };
    // Everybody writes; who reads finds that, in a buffer that held something else.
    all(&mut workers, Stop::After(1), None)?;
    for (worker, stream) in workers.iter_mut().zip(streams).filter(|(_, s)| s.direction == Direction::ToHost) {
        turn(worker, stream.direction);
    }
    let rate = |worker: &Worker| worker.walks.iter().map(|w| w.moved.bytes).sum::<u64>() as f64 / time.as_secs_f64();
    let mut rates = vec![Vec::new(); workers.len()];
    for _ in 0..runs.max(1) {
        all(&mut workers, Stop::For(WARM + time), Some(WARM))?;
        rates.iter_mut().zip(&workers).for_each(|(rates, worker)| rates.push(rate(worker)));
    }
    let median = |mut rates: Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let flows = streams.iter().copied().zip(rates.into_iter().map(median)).collect();
    for (worker, _) in workers.iter_mut().zip(streams).filter(|(_, s)| s.direction == Direction::FromHost) {
        turn(worker, Direction::ToHost);
    }
    all(&mut workers, Stop::After(1), None)?;
    for (i, worker) in workers.iter().enumerate() {
        for (k, walk) in worker.walks.iter().enumerate() {
            if let Some(byte) = walk.wrong(seed(i, k)) {
                return Err(ValidateError::Wrong { what: what.to_owned(), at: byte });
            }
        }
    }
    Ok(Measured { flows })
}

/// Makes a worker move the other way, its buffers full of something else.
fn turn(worker: &mut Worker, direction: Direction) {
    for (k, walk) in worker.walks.iter_mut().enumerate() {
        walk.direction = direction;
        walk.fill(!seed(usize::MAX >> 32, k));
    }
}
