//! Threads that share a queue, beside a queue for each: copies by the software card, whose copying is done by a thread
//! that polls.
//!
//! Each thread copies from a buffer of its own to card memory of its own, at most 32 operations in flight. Rounds take
//! all variants in turn, with as many operations in all. The clock runs from when the first thread starts to when the
//! last ends. Bytes are compared after each variant of the first round.

use std::error::Error;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use dmalane::addr::CardAddr;
use dmalane::card::CardQueue;
use dmalane::dma::BufferSlice;
use dmalane::queue::{
    CacheHint, DeviceAddr, Direction, Operation, Queue, Registered, SharedHandle, SharedOptions, SharedQueue,
};
use dmalane::sim::{SoftBus, Workers};

use crate::clock::pin_to;
use crate::report::{Details, Report};
use crate::transfer::{Bench, Walk};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,

    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

const KIB: usize = 1 << 10;
/// Bytes of an operation, and operations of all threads in a sample.
const CASES: [(&str, usize, usize); 3] =
    [("64 B", 64, 1 << 17), ("4 KiB", 4 * KIB, 1 << 16), ("64 KiB", 64 * KIB, 1 << 12)];
/// Buffers, each with card memory of its own, and the bytes of each.
const THREADS: usize = 4;
const REGION: usize = 256 * KIB;

/// A thread's memory.
struct Part {
    at: u64,
    slice: Option<BufferSlice>,
    via: Registered,
}

impl Part {
    fn new(bench: &Bench, number: usize, size: usize) -> Result<Self> {
        let (buf, via) = bench.buffer(REGION)?;
        let (slice, _) = buf.into_slice().split_at((64 * size).min(REGION)).map_err(|_| "a short buffer")?;
        Ok(Self { at: (number * REGION) as u64, slice: Some(slice), via })
    }

    /// Walks `operations` by this queue, and says from when to when.
    fn walk(
        &mut self,
        queue: impl Queue<Addr = DeviceAddr>,
        size: usize,
        operations: usize,
        gate: &Barrier,
    ) -> [Instant; 2] {
        let slice = self.slice.take().expect("the slice of the walk before");
        let (direction, hint) = (Direction::FromHost, CacheHint::Hot);
        let mut walk = Walk::new(queue, slice, &self.via, direction, size, self.at, hint).expect("whole operations");
        let times = operations / walk.ready.len();
        gate.wait();
        let begun = Instant::now();
        walk.walk(times);
        let ended = Instant::now();
        let slices = std::mem::take(&mut walk.ready).into_iter().filter_map(Operation::into_slice);
        self.slice = slices.reduce(|whole, slice| whole.join(slice).expect("in order"));
        [begun, ended]
    }

    /// Compares what the card has with the buffer, and makes both differ again.
    fn check(&mut self, bench: &Bench) -> Result<()> {
        let slice = self.slice.as_ref().ok_or("no slice")?;
        let (mut mine, mut there) = (vec![0; slice.len()], vec![0; slice.len()]);
        slice.read(0, &mut mine).ok_or("a short slice")?;
        bench.bus.memory().read(CardAddr::new(self.at), &mut there)?;
        bench.bus.memory().write(CardAddr::new(self.at), &vec![0; there.len()])?;
        if mine == there { Ok(()) } else { Err(format!("card address {:#x}: the bytes differ", self.at).into()) }
    }
}

/// How long the threads take, each with its queue.
fn together<Q: Queue<Addr = DeviceAddr>>(parts: &mut [Part], queues: Vec<Q>, size: usize, operations: usize) -> f64 {
    let (threads, gate) = (queues.len(), Barrier::new(queues.len()));
    let times: Vec<[Instant; 2]> = thread::scope(|s| {
        let spawn = |(n, (part, queue)): (usize, (_, Q))| {
            let (part, gate): (&mut Part, _) = (part, &gate);
            s.spawn(move || {
                pin_to(n % 2);
                part.walk(queue, size, operations / threads, gate)
            })
        };
        let threads: Vec<_> = parts.iter_mut().zip(queues).enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a walk")).collect()
    });
    let first = times.iter().map(|[begun, _]| *begun).min();
    let last = times.iter().map(|[_, ended]| *ended).max();
    last.zip(first).map_or(Duration::MAX, |(last, first)| last - first).as_secs_f64()
}

fn handles(bench: &Bench, n: usize) -> Result<Vec<SharedHandle<CardQueue<SoftBus>>>> {
    let shared = SharedQueue::new(bench.card.queue(0)?, SharedOptions::default());
    Ok((0..n).map(|_| shared.handle()).collect())
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("shared");
    for (name, size, operations) in CASES.into_iter().filter(|(name, ..)| name.contains(&options.only)) {
        let bench = Bench::new(Workers::Inline, 0.5, 2 << 20)?;
        let mut parts = (0..THREADS).map(|n| Part::new(&bench, n, size)).collect::<Result<Vec<_>>>()?;
        let mut samples: [Vec<f64>; 5] = Default::default();
        for round in 0..=options.rounds {
            for (variant, samples) in samples.iter_mut().enumerate() {
                let parts = &mut parts[..[1, 2, 1, 2, 4][variant]];
                let took = match variant {
                    0 => together(parts, vec![bench.card.queue(0)?], size, operations),
                    1 => together(parts, vec![bench.card.queue(0)?, bench.card.queue(1)?], size, operations),
                    _ => together(parts, handles(&bench, parts.len())?, size, operations),
                };
                match round {
                    0 => parts.iter_mut().try_for_each(|part| part.check(&bench))?,
                    _ => samples.push(took),
                }
            }
        }
        let variants = [
            "one thread, its own queue",
            "two threads, a queue each",
            "one thread, shared queue",
            "two threads, shared queue",
            "four threads, shared queue",
        ];
        let items = Details { items: Some(operations as u64), ..Details::default() };
        for (variant, samples) in variants.iter().zip(&samples) {
            report.detailed_row(name, variant, (size * operations) as u64, samples, items);
        }
        // Of each round, so that what disturbs the machine for a while disturbs both.
        let ratio = |a: usize, b: usize| {
            let mut all: Vec<f64> = samples[a].iter().zip(&samples[b]).map(|(a, b)| a / b).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        report.at_least(&format!("{name}: shared by one / its own"), 0.9, ratio(0, 2));
        report.at_least(&format!("{name}: shared by two / two of their own"), 0.8, ratio(1, 3));
        // A channel copies in order, on one thread at a time: no sharing does better.
        report.note(name, "the limit: one thread with its own / two of their own", ratio(1, 0));
        report.note(name, "shared by two / one thread with its own", ratio(0, 3));
        report.note(name, "shared by four / one thread with its own", ratio(0, 4));
    }
    Ok(report)
}
