//! What is possible, measured next to a figure.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use dmalane_engine::Direction;
use dmalane_link::{Demand, Half, best_rate};
use dmalane_mem::{AnonHeap, CopyHint, CpuBuf, Heap, SharedBuf};
use dmalane_uring::Node;

use super::lanes::Lane;
use super::target::{Ceiling, Target};
use super::walk::Walk;
use super::{Stop, ValidateError, Way};

/// A ceiling is not measured for longer.
const MOST: Duration = Duration::from_millis(500);

impl Ceiling {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Copies => "the faster of plain and streaming copies of as many buffers by as many threads, in memory",
            Self::Files(_) => "plain pwrite and pread of as many buffers, by a thread for each, on the same files",
            Self::Optimum { .. } => "the optimum of the modelled link, which no policy can exceed",
        }
    }
}

impl Target {
    /// What is possible at best of what `lanes` (with the walks up and down) have just done, in bytes per second.
    pub(super) fn ceiling(
        &self,
        lanes: &[Lane],
        way: Way,
        buffer: u64,
        stop: Stop,
        channels: &[usize],
    ) -> Result<f64, ValidateError> {
        let time = match stop {
            Stop::For(time) => time.min(MOST),
            Stop::After(_) => MOST / 5,
        };
        match &self.ceiling {
            Ceiling::Optimum { link, halves } => {
                let mut bytes: HashMap<(Half, bool), u64> = HashMap::new();
                for (i, walk) in lanes.iter().flat_map(|lane| lane.walks.iter().enumerate()) {
                    let up = i == 0;
                    if (way != Way::Read && up) || (way != Way::Write && !up) {
                        for (at, len) in walk.places() {
                            *bytes.entry((halves.of(at), up)).or_default() += len;
                        }
                    }
                }
                let demand = |((half, up), bytes)| {
                    let direction = if up { Direction::FromHost } else { Direction::ToHost };
                    Demand { half, direction, bytes }
                };
                let demands: Vec<Demand> = bytes.into_iter().map(demand).collect();
                Ok(best_rate(link, &demands, channels)?)
            }
            Ceiling::Copies => copies(lanes.len(), way, buffer as usize, time),
            Ceiling::Files(node) => files(node, lanes, way, buffer as usize, time),
        }
    }
}

/// Copies between memory like the host's and memory like the card's.
fn copies(threads: usize, way: Way, len: usize, time: Duration) -> Result<f64, ValidateError> {
    let heap = AnonHeap::new();
    let pair = |_| -> Result<(SharedBuf, SharedBuf), dmalane_mem::Error> {
        let card = SharedBuf::sparse("dmalane-ceiling", len)?;
        let full = |source| dmalane_mem::Error::Allocate { len, kind: "sparse memfd memory", source };
        card.populate(0, len).map_err(full)?;
        let mut host = heap.allocate(len)?;
        host.fill(1);
        Ok((host.share(), card))
    };
    let pairs = (0..threads).map(pair).collect::<Result<Vec<_>, _>>().map_err(ValidateError::Memory)?;
    let rate = |hint| {
        let start = Instant::now();
        let copied: Vec<(u64, Duration)> = std::thread::scope(|scope| {
            let walk = |(host, card): &(SharedBuf, SharedBuf)| {
                let mut bytes = 0;
                loop {
                    if way != Way::Read {
                        card.view().copy_from(part_of(host, len), hint);
                        bytes += len as u64;
                    }
                    if way != Way::Write {
                        host.view().copy_from(part_of(card, len), hint);
                        bytes += len as u64;
                    }
                    if start.elapsed() >= time / 2 {
                        return (bytes, start.elapsed());
                    }
                }
            };
            let threads: Vec<_> = pairs.iter().map(|pair| scope.spawn(move || walk(pair))).collect();
            threads.into_iter().filter_map(|t| t.join().ok()).collect()
        });
        together(&copied)
    };
    Ok(rate(CopyHint::Keep).max(rate(CopyHint::Stream)))
}

fn part_of(buf: &SharedBuf, len: usize) -> dmalane_mem::View<'_> {
    buf.view().sub(0, len).expect("buffers of at least this length")
}

/// Plain calls on the places of the lanes.
fn files(node: &Node, lanes: &[Lane], way: Way, len: usize, time: Duration) -> Result<f64, ValidateError> {
    let heap = AnonHeap::new();
    let buffer = |_| heap.allocate(len);
    // Of both ways each has a thread and a buffer: as the device, they need not wait for each other.
    let wanted = |up: bool| way == Way::Both || up == (way == Way::Write);
    let place = |(i, walk): (usize, &Walk)| walk.places().next().map(|(at, _)| (i == 0, at.bits()));
    let places = lanes.iter().flat_map(|lane| lane.walks.iter().enumerate().filter_map(place));
    let places: Vec<(bool, u64)> = places.filter(|(up, _)| wanted(*up)).collect();
    let buffers = (0..places.len()).map(buffer).collect::<Result<Vec<_>, _>>().map_err(ValidateError::Memory)?;
    let start = Instant::now();
    let moved: Vec<std::io::Result<(u64, Duration)>> = std::thread::scope(|scope| {
        let walk = |((up, at), mut buffer): ((bool, u64), CpuBuf)| {
            let (h2c, c2h) = node.files();
            let mut bytes = 0;
            loop {
                match up {
                    true => h2c.write_all_at(&buffer[..len], at)?,
                    false => c2h.read_exact_at(&mut buffer[..len], at)?,
                }
                bytes += len as u64;
                if start.elapsed() >= time {
                    return Ok((bytes, start.elapsed()));
                }
            }
        };
        let mut threads = Vec::new();
        for (i, work) in places.into_iter().zip(buffers).enumerate() {
            let name = format!("dmalane-ceiling-{i}");
            match std::thread::Builder::new().name(name).spawn_scoped(scope, move || walk(work)) {
                Ok(thread) => threads.push(thread),
                Err(e) => return vec![Err(e)],
            }
        }
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    let moved = moved.into_iter().collect::<std::io::Result<Vec<_>>>().map_err(ValidateError::Ceiling)?;
    Ok(together(&moved))
}

fn together(moved: &[(u64, Duration)]) -> f64 {
    let bytes: u64 = moved.iter().map(|m| m.0).sum();
    let took = moved.iter().map(|m| m.1).max().unwrap_or_default();
    bytes as f64 / took.as_secs_f64().max(1e-9)
}
