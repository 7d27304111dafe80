//! Reference rates, measured next to a figure.

use std::os::unix::fs::FileExt;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use dmalane_device::{BackingFiles, DriverCopies};
use dmalane_dma::{AnonHeap, CopyHint, CpuBuf, Heap, SharedBuf};
use dmalane_queue::Direction;

use crate::error::ValidateError;
use crate::settings::{Directions, Stop};
use crate::target::{Reference, TestedDevice};
use crate::workers::Worker;

/// A reference is not measured for longer.
const MOST: Duration = Duration::from_millis(500);
/// A pass takes this many times as long as the wait for the end of a driver's copies, which counts little then.
const SHARES: u32 = 16;

impl Reference {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Copies => {
                "the faster of plain and streaming copies of as many buffers by as many threads, the device's own \
                 included, in host memory (not the device's link), both ways in turns"
            }
            Self::Files(_) => {
                "plain pwrite and pread of as many buffers on the same files; several buffers of a thread one after \
                 the other, or by a thread for each, whichever is faster"
            }
            Self::Driver(_) => "the same copies by the device's driver alone, all submitted together",
        }
    }
}

impl TestedDevice {
    /// The best rate possible for the work that `workers` have just done, in bytes per second.
    pub(crate) fn reference(
        &self,
        workers: &[Worker],
        directions: Directions,
        buffer: u64,
        stop: Stop,
    ) -> Result<f64, ValidateError> {
        let time = match stop {
            Stop::For(time) => time.min(MOST),
            Stop::After(_) => MOST / 5,
        };
        match &self.reference {
            Reference::Copies => {
                // A thread of the reference does both ways in turns, also where each way has a worker of its own.
                let counts = [Direction::FromHost, Direction::ToHost].map(|of| {
                    let walks = |worker: &Worker| worker.walks.iter().filter(|walk| walk.measured == of).count();
                    workers.iter().map(walks).filter(|n| *n > 0).collect::<Vec<_>>()
                });
                let mut busiest = counts.into_iter().max_by_key(Vec::len).unwrap_or_default();
                busiest.extend(busiest.first().copied().filter(|_| self.helped));
                copies(&busiest, directions, buffer as usize, time)
            }
            Reference::Driver(driver) => {
                let mut driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
                by_driver(&mut **driver, workers, directions, time)
            }
            Reference::Files(backing) => files(backing, workers, directions, buffer as usize, time),
        }
    }
}

/// Copies by the driver of the bytes that the workers moved last. Those were compared, and all buffers are filled
/// anew before the next figure.
fn by_driver(
    driver: &mut dyn DriverCopies,
    workers: &[Worker],
    directions: Directions,
    time: Duration,
) -> Result<f64, ValidateError> {
    let mut copies = Vec::new();
    for walk in workers.iter().flat_map(|worker| &worker.walks).filter(|walk| directions.include(walk.measured)) {
        copies.extend(walk.driver_copies(walk.measured));
    }
    let bytes: u64 = copies.iter().map(|copy| copy.len).sum();
    let (start, mut times) = (Instant::now(), 1);
    let (mut moved, mut spent) = (0, Duration::ZERO);
    while spent.is_zero() || start.elapsed() < time {
        let begun = Instant::now();
        driver.copy(&copies, times).map_err(ValidateError::DriverCopies)?;
        let took = begun.elapsed();
        match took < time / SHARES {
            true => times *= 2,
            false => (moved, spent) = (moved + bytes * times, spent + took),
        }
    }
    Ok(moved as f64 / spent.as_secs_f64())
}

/// Copies between memory like the host's and memory like the card's, of the buffers that `threads` has for each.
fn copies(threads: &[usize], directions: Directions, len: usize, time: Duration) -> Result<f64, ValidateError> {
    let heap = AnonHeap::new();
    let pair = |_| -> Result<(SharedBuf, SharedBuf), dmalane_dma::Error> {
        let card = SharedBuf::sparse("dmalane-reference", len)?;
        let full = |source| dmalane_dma::Error::Allocate { len, kind: "sparse memfd memory", source };
        card.populate(0, len).map_err(full)?;
        let mut host = heap.allocate(len)?;
        host.fill(1);
        Ok((host.share(), card))
    };
    let of_thread = |n: &usize| (0..*n).map(pair).collect::<Result<Vec<_>, _>>();
    let mut works = threads.iter().map(of_thread).collect::<Result<Vec<_>, _>>().map_err(ValidateError::Memory)?;
    let mut rate = |hint| {
        let pass = |pairs: &mut Vec<(SharedBuf, SharedBuf)>| {
            let mut bytes = 0;
            for (host, card) in pairs {
                if directions != Directions::Read {
                    card.as_volatile_slice().copy_from(part_of(host, len), hint);
                    bytes += len as u64;
                }
                if directions != Directions::Write {
                    host.as_volatile_slice().copy_from(part_of(card, len), hint);
                    bytes += len as u64;
                }
            }
            Ok(bytes)
        };
        at_once(&mut works, time / 2, pass)
    };
    Ok(rate(CopyHint::Keep)?.max(rate(CopyHint::Stream)?))
}

/// Bytes per second of threads, one for each of `works`, that repeat `pass` for this time. It says how many bytes it
/// has moved.
fn at_once<W: Send>(
    works: &mut [W],
    time: Duration,
    pass: impl Fn(&mut W) -> std::io::Result<u64> + Sync,
) -> Result<f64, ValidateError> {
    let start = Instant::now();
    let repeat = |work: &mut W| -> std::io::Result<(u64, Duration)> {
        let mut bytes = 0;
        loop {
            bytes += pass(work)?;
            if start.elapsed() >= time {
                return Ok((bytes, start.elapsed()));
            }
        }
    };
    let moved: Vec<std::io::Result<(u64, Duration)>> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (i, work) in works.iter_mut().enumerate() {
            let (name, repeat) = (format!("dmalane-reference-{i}"), &repeat);
            match std::thread::Builder::new().name(name).spawn_scoped(scope, move || repeat(work)) {
                Ok(thread) => threads.push(thread),
                Err(e) => return Err(ValidateError::Thread(e)),
            }
        }
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
        Ok(threads.into_iter().map(join).collect())
    })?;
    let moved = moved.into_iter().collect::<std::io::Result<Vec<_>>>().map_err(ValidateError::Reference)?;
    let bytes: u64 = moved.iter().map(|m| m.0).sum();
    let took = moved.iter().map(|m| m.1).max().unwrap_or_default();
    Ok(bytes as f64 / took.as_secs_f64().max(1e-9))
}

fn part_of(buf: &SharedBuf, len: usize) -> dmalane_dma::VolatileSlice<'_> {
    buf.as_volatile_slice().sub(0, len).expect("buffers of at least this length")
}

/// Plain calls on the places of the workers.
fn files(
    files: &BackingFiles,
    workers: &[Worker],
    directions: Directions,
    len: usize,
    time: Duration,
) -> Result<f64, ValidateError> {
    let heap = AnonHeap::new();
    let pass = |buffers: &mut Vec<(Direction, u64, CpuBuf)>| {
        for (direction, at, buffer) in buffers.iter_mut() {
            match direction {
                Direction::FromHost => files.written.write_all_at(&buffer[..len], *at)?,
                Direction::ToHost => files.read.read_exact_at(&mut buffer[..len], *at)?,
            }
        }
        Ok((buffers.len() * len) as u64)
    };
    let mut works = Vec::new();
    for worker in workers {
        let mut work = Vec::new();
        for walk in worker.walks.iter().filter(|walk| directions.include(walk.measured)) {
            let Some((at, _)) = walk.places().next() else { continue };
            let mut buffer = heap.allocate(len).map_err(ValidateError::Memory)?;
            if walk.measured == Direction::FromHost {
                buffer.fill(1);
            }
            work.push((walk.measured, at.bits(), buffer));
        }
        works.push(work);
    }
    if works.iter().all(|work| work.len() <= 1) {
        return at_once(&mut works, time, pass);
    }
    // A device with many transfers at once has more to give than threads take that do one after the other; where the
    // threads are the limit, more of them are slower.
    let in_turns = at_once(&mut works, time / 2, pass)?;
    let mut apart: Vec<Vec<_>> = works.into_iter().flatten().map(|work| vec![work]).collect();
    Ok(at_once(&mut apart, time / 2, pass)?.max(in_turns))
}
