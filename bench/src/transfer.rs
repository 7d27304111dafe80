//! Copies by the software card beside plain and streaming copies of the same bytes, hot and cold, inline and with a
//! worker.
//!
//! Variants take turns. A walk goes over a region again and again: small enough for the cache (hot), or far too large
//! for it (cold). The reference is the fastest plain or streaming copy of the same walk in the same round's turn. Bytes
//! are compared after each case.

use std::collections::VecDeque;
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmalane::addr::{Access, CardAddr, Span};
use dmalane::card::{Card, CardQueue};
use dmalane::dma::{AnonHeap, BufferSlice, CopyHint, CpuBuf, Heap, SharedBuf};
use dmalane::queue::{CacheHint, Completion, DeviceAddr, Direction, Operation, Queue, Registered};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

use crate::clock::{pin, time};
use crate::report::{Details, Report};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 9)]
    rounds: usize,

    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,

    /// Bytes of the region of cold walks; by default twice the processor's last cache, 256 MiB at least
    #[arg(long, default_value_t = crate::memory::past_the_caches(), hide_default_value = true)]
    cold: usize,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Bytes per copy, whether the region stays in the cache, and its bytes.
#[derive(Clone, Copy)]
struct Case {
    size: usize,
    hot: bool,
    region: usize,
}

impl Case {
    fn name(&self) -> String {
        let size = if self.size < MIB { format!("{}K", self.size >> 10) } else { format!("{}M", self.size >> 20) };
        format!("{size} {}", if self.hot { "hot" } else { "cold" })
    }

    /// Bytes of one sample.
    fn total(&self) -> usize {
        if self.hot { 64 * MIB } else { self.region }
    }

    /// The least share of the reference.
    fn goal(&self) -> f64 {
        match self.size {
            s if s <= 4 * KIB && self.hot => 0.75,
            s if s <= 4 * KIB => 0.85,
            s if s <= 64 * KIB => 0.95,
            _ => 0.97,
        }
    }
}

fn cases(cold: usize) -> Vec<Case> {
    vec![
        Case { size: 4 * KIB, hot: true, region: 128 * KIB },
        Case { size: 64 * KIB, hot: true, region: 256 * KIB },
        Case { size: MIB, hot: true, region: 2 * MIB },
        Case { size: 4 * KIB, hot: false, region: cold },
        Case { size: 64 * KIB, hot: false, region: cold },
        Case { size: MIB, hot: false, region: cold },
        Case { size: 64 * MIB, hot: false, region: cold },
    ]
}

/// A card, opened, with its memory touched.
pub struct Bench {
    pub bus: Arc<SoftBus>,
    pub card: Card<SoftBus>,
    heap: AnonHeap,
}

impl Bench {
    pub fn new(workers: Workers, fragmentation: f64, ddr: usize) -> Result<Self> {
        let host = SoftHost::new(HostConfig { fragmentation, ..HostConfig::default() })?;
        let config = CardConfig { workers, ddr: ddr as u64, hbm: 4 << 20, ..CardConfig::default() };
        let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, config)?);
        let heap = AnonHeap::new();
        let card = Card::open(bus.clone(), &heap)?;
        bus.memory().populate(Span::new(CardAddr::new(0), ddr as u64).ok_or("no memory")?)?;
        Ok(Self { bus, card, heap })
    }

    pub fn buffer(&self, len: usize) -> Result<(SharedBuf, Registered)> {
        let mut buf = self.heap.allocate(len)?;
        for (i, word) in buf.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        }
        let buf = buf.share();
        let via = Registered::new(&*self.bus, &buf, Access::RW)?;
        Ok((buf, via))
    }
}

/// A walk by a queue: its operations in the order of their addresses.
pub struct Walk<Q> {
    queue: Q,
    pub ready: VecDeque<Operation>,
    ended: Vec<Completion>,
}

/// Operations in flight at most.
const DEPTH: usize = 32;

impl<Q: Queue<Addr = DeviceAddr>> Walk<Q> {
    /// Cuts the first `region` bytes of a buffer into operations, against card memory from `at` on.
    pub fn new(
        queue: Q,
        slice: BufferSlice,
        via: &Registered,
        direction: Direction,
        size: usize,
        at: u64,
        hint: CacheHint,
    ) -> Result<Self> {
        let mut rest = slice;
        let mut ready = VecDeque::new();
        for place in (0..rest.len()).step_by(size) {
            let (slice, more) = rest.split_at(size).map_err(|_| "a region of whole copies")?;
            rest = more;
            let at = DeviceAddr::Card(CardAddr::new(at + place as u64));
            ready.push_back(Operation::copy(direction, (slice, via.clone()), at).hint(hint));
        }
        Ok(Self { queue, ready, ended: Vec::new() })
    }

    fn hint(&mut self, hint: CacheHint) {
        for operation in &mut self.ready {
            operation.cache = hint;
        }
    }

    /// So many times over the region, at most [`DEPTH`] operations in flight. Each that ends makes room for the next,
    /// which is itself where the region has no more of them.
    pub fn walk(&mut self, times: usize) {
        let Self { queue, ready, ended } = self;
        let mut left = times * ready.len();
        let depth = DEPTH.min(ready.len());
        while queue.in_flight() < depth
            && let Some(operation) = ready.pop_front()
        {
            let _ticket = queue.submit(operation).expect("room");
        }
        while left > 0 {
            queue.wait(ended, LONG);
            for Completion { operation, result, .. } in ended.drain(..) {
                assert!(result.is_ok());
                left -= 1;
                if left < depth {
                    ready.push_back(operation);
                    continue;
                }
                let next = match ready.pop_front() {
                    Some(next) => {
                        ready.push_back(operation);
                        next
                    }
                    None => operation,
                };
                let _ticket = queue.submit(next).expect("room");
            }
        }
    }
}

/// The two memories of the reference: like the buffer and like the card's memory.
struct Plain {
    buffer: SharedBuf,
    card: SharedBuf,
    slices: [CpuBuf; 2],
}

impl Plain {
    fn new(len: usize) -> Result<Self> {
        let heap = AnonHeap::new();
        let card = SharedBuf::sparse("dmalane-bench", len)?;
        card.populate(0, len)?;
        card.as_volatile_slice().fill(4);
        let mut slices = [heap.allocate(len)?, heap.allocate(len)?];
        slices[0].fill(1);
        slices[1].fill(2);
        let mut buffer = heap.allocate(len)?;
        buffer.fill(3);
        Ok(Self { buffer: buffer.share(), card, slices })
    }

    fn walk(&mut self, case: &Case, direction: Direction, how: Option<CopyHint>) {
        let (a, b) = match direction {
            Direction::FromHost => (self.buffer.as_volatile_slice(), self.card.as_volatile_slice()),
            Direction::ToHost => (self.card.as_volatile_slice(), self.buffer.as_volatile_slice()),
        };
        let [from, to] = &mut self.slices;
        for _ in 0..case.total() / case.region {
            for at in (0..case.region).step_by(case.size) {
                match how {
                    None => to[at..at + case.size].copy_from_slice(black_box(&from[at..at + case.size])),
                    Some(hint) => {
                        if let (Some(from), Some(to)) = (a.sub(at, case.size), b.sub(at, case.size)) {
                            to.copy_from(from, hint);
                        }
                    }
                }
            }
        }
        black_box(to);
    }
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("transfer");
    // One of these words, or the name of one case.
    let chosen = |name: &str| name.contains(&options.only) || options.only.starts_with(name);
    // Before this thread is tied to a processor: a worker inherits that.
    if chosen("worker") {
        worker(options, &mut report)?;
    }
    pin();
    for direction in [Direction::FromHost, Direction::ToHost] {
        let name = if direction == Direction::FromHost { "h2c" } else { "c2h" };
        if chosen(name) {
            inline(options, direction, name, &mut report)?;
        }
    }
    if chosen("doorbell") {
        doorbell(options, &mut report)?;
    }
    if chosen("gather") {
        gather(options, &mut report)?;
    }
    if chosen("registered") {
        registered(options, &mut report)?;
    }
    Ok(report)
}

/// The time of the second of two walks, so that each finds in the cache what a walk like it has left there, and not
/// what another variant has left of other memory.
fn second(mut walk: impl FnMut()) -> f64 {
    walk();
    time(walk)
}

fn inline(options: &Options, direction: Direction, name: &str, report: &mut Report) -> Result<()> {
    let bench = Bench::new(Workers::Inline, 0.5, options.cold)?;
    let mut plain = Plain::new(options.cold)?;
    let (mut buf, via) = bench.buffer(options.cold)?;
    if direction == Direction::ToHost {
        let bytes: Vec<u8> = (0..options.cold as u32).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect();
        bench.bus.memory().write(CardAddr::new(0), &bytes)?;
    }
    for case in cases(options.cold).into_iter().filter(|c| format!("{name} {}", c.name()).contains(&options.only)) {
        let (region, rest) = buf.into_slice().split_at(case.region).map_err(|_| "a short buffer")?;
        let mut walk = Walk::new(bench.card.queue(0)?, region, &via, direction, case.size, 0, CacheHint::Auto)?;
        let hint = if case.hot { CacheHint::Hot } else { CacheHint::Cold };
        let mut samples: [Vec<f64>; 5] = Default::default();
        let turns = case.total() / case.region;
        for round in 0..options.rounds + 1 {
            let memcpy = second(|| plain.walk(&case, direction, None));
            let keep = second(|| plain.walk(&case, direction, Some(CopyHint::Keep)));
            let stream = second(|| plain.walk(&case, direction, Some(CopyHint::Stream)));
            walk.hint(hint);
            let hinted = second(|| walk.walk(turns));
            walk.hint(CacheHint::Auto);
            let auto = second(|| walk.walk(turns));
            if round > 0 {
                for (list, sample) in samples.iter_mut().zip([memcpy, keep, stream, hinted, auto]) {
                    list.push(sample);
                }
            }
        }
        let label = format!("{name} {}", case.name());
        let total = case.total() as u64;
        let items = Details { items: Some(total / case.size as u64), ..Details::default() };
        let variants = ["memcpy (anonymous memory)", "plain copy", "streaming copy", "card, hinted", "card, by itself"];
        let medians: Vec<f64> =
            variants.iter().zip(&samples).map(|(v, s)| report.detailed_row(&label, v, total, s, items)).collect();
        // Each round against the best of that round: what disturbs the machine for a while disturbs both.
        let shares = |ours: usize| {
            let mut all: Vec<f64> =
                (0..options.rounds).map(|r| samples[1][r].min(samples[2][r]) / samples[ours][r]).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        report.at_least(&format!("{label}: share of the reference"), case.goal(), shares(3));
        report.note(&label, "share of the reference without a hint", shares(4));
        report.note(&label, "GB/s, hinted", total as f64 / medians[3] / 1e9);
        let plainly = medians[0].min(medians[1]);
        if !case.hot && case.size >= 64 * KIB && direction == Direction::FromHost {
            report.at_least(&format!("{label}: plain memcpy / ours"), 1.8, plainly / medians[3]);
        }
        if case.hot {
            report.at_most(&format!("{label}: ours without a hint / plain copy"), 1.05, medians[4] / plainly);
        }
        buf = check(walk, &bench, rest, direction)?;
    }
    Ok(())
}

/// Joins the slices again, after comparing their bytes with those of the card.
fn check(
    mut walk: Walk<CardQueue<SoftBus>>,
    bench: &Bench,
    rest: BufferSlice,
    direction: Direction,
) -> Result<SharedBuf> {
    let mut whole: Option<BufferSlice> = None;
    for operation in std::mem::take(&mut walk.ready) {
        let Some(slice) = operation.into_slice() else { return Err("an operation without memory".into()) };
        whole = Some(match whole {
            None => slice,
            Some(whole) => whole.join(slice).map_err(|_| "slices out of order")?,
        });
    }
    let whole = whole.ok_or("no slices")?;
    let (mut mine, mut there) = (vec![0; whole.len()], vec![0; whole.len()]);
    whole.read(0, &mut mine).ok_or("a short slice")?;
    bench.bus.memory().read(CardAddr::new(0), &mut there)?;
    if mine != there || mine.iter().all(|b| *b == mine[0]) {
        return Err(format!("{direction:?}: the bytes differ").into());
    }
    whole.join(rest).ok().and_then(|p| p.into_whole().ok()).ok_or_else(|| "a slice is missing".into())
}

/// Two channels, one worker, and this thread helping, against two threads that copy.
fn worker(options: &Options, report: &mut Report) -> Result<()> {
    let bench = Bench::new(Workers::One, 0.5, options.cold)?;
    let half = options.cold / 2;
    for case in cases(half).into_iter().filter(|c| c.size >= MIB) {
        let mut plain = [Plain::new(case.region)?, Plain::new(case.region)?];
        let hint = if case.hot { CacheHint::Hot } else { CacheHint::Cold };
        let mut walks = Vec::new();
        for i in 0..2 {
            let (buf, via) = bench.buffer(case.region)?;
            let at = (i * half) as u64;
            let queue = bench.card.queue(i)?;
            walks.push(Walk::new(queue, buf.into_slice(), &via, Direction::FromHost, case.size, at, hint)?);
        }
        let turns = case.total() / case.region;
        let (mut references, mut ours) = (Vec::new(), Vec::new());
        for round in 0..options.rounds + 1 {
            let best = [CopyHint::Keep, CopyHint::Stream].map(|how| two(&mut plain, &case, how)).into_iter();
            let best = best.fold(f64::INFINITY, f64::min);
            let took = time(|| (0..turns).for_each(|_| both(&mut walks)));
            if round > 0 {
                references.push(best);
                ours.push(took);
            }
        }
        let label = format!("worker {}", case.name());
        let total = 2 * case.total() as u64;
        let items = Details { items: Some(total / case.size as u64), ..Details::default() };
        report.detailed_row(&label, "two threads that copy", total, &references, items);
        let median = report.detailed_row(&label, "one worker and this thread", total, &ours, items);
        let mut shares: Vec<f64> = references.iter().zip(&ours).map(|(c, o)| c / o).collect();
        shares.sort_by(f64::total_cmp);
        report.at_least(&format!("{label}: share of two threads"), 0.85, shares[shares.len() / 2]);
        report.note(&label, "GB/s", total as f64 / median / 1e9);
    }
    Ok(())
}

/// Both walks once, the operations of both in flight at the same time.
fn both(walks: &mut [Walk<CardQueue<SoftBus>>]) {
    let mut waiting: Vec<_> = walks.iter_mut().map(|w| std::mem::take(&mut w.ready).into_iter().peekable()).collect();
    loop {
        let mut busy = false;
        for (walk, waiting) in walks.iter_mut().zip(&mut waiting) {
            while walk.queue.in_flight() < DEPTH
                && let Some(operation) = waiting.next()
            {
                let _ticket = walk.queue.submit(operation).expect("room");
            }
            walk.queue.flush();
        }
        for (walk, waiting) in walks.iter_mut().zip(&mut waiting) {
            walk.queue.poll(&mut walk.ended);
            walk.ready.extend(walk.ended.drain(..).map(|e| e.operation));
            busy |= walk.queue.in_flight() > 0 || waiting.peek().is_some();
        }
        if !busy {
            return;
        }
    }
}

/// How long two threads take for a walk each.
fn two(plain: &mut [Plain; 2], case: &Case, how: CopyHint) -> f64 {
    let go = AtomicBool::new(false);
    let [mine, theirs] = plain;
    std::thread::scope(|s| {
        let other = s.spawn(|| {
            while !go.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            theirs.walk(case, Direction::FromHost, Some(how));
        });
        // The thread is there before the clock starts.
        std::thread::sleep(Duration::from_millis(1));
        time(|| {
            go.store(true, Ordering::Release);
            mine.walk(case, Direction::FromHost, Some(how));
            other.join().expect("a copy");
        })
    })
}

/// The cost of submitting, without that of the copies.
fn doorbell(options: &Options, report: &mut Report) -> Result<()> {
    let bench = Bench::new(Workers::Inline, 0.5, 16 * MIB)?;
    let (buf, via) = bench.buffer(256 * 4 * KIB)?;
    let mut walk =
        Walk::new(bench.card.queue(0)?, buf.into_slice(), &via, Direction::FromHost, 4 * KIB, 0, CacheHint::Auto)?;
    let mut samples: [Vec<f64>; 3] = Default::default();
    for _ in 0..options.rounds * 20 {
        for (how, batch) in [(0, 1), (1, 32)] {
            let mut ready = std::mem::take(&mut walk.ready).into_iter();
            let took = time(|| {
                while ready.len() > 0 {
                    for operation in ready.by_ref().take(batch) {
                        let _ticket = walk.queue.submit(operation).expect("room");
                    }
                    walk.queue.flush();
                }
            });
            samples[how].push(took);
            while walk.queue.in_flight() > 0 {
                walk.queue.poll(&mut walk.ended);
            }
            walk.ready.extend(walk.ended.drain(..).map(|e| e.operation));
        }
    }
    let items = Details { items: Some(256), ..Details::default() };
    let row = |report: &mut Report, name, s: &[f64]| report.detailed_row("doorbell", name, 0, s, items) * 1e9 / 256.0;
    let one = row(report, "submit + flush", &samples[0]);
    let batch = row(report, "submit, a flush for 32", &samples[1]);
    report.at_most_in("submit + flush", 50.0, one, "ns, at most");
    report.at_most_in("submit in a batch of 32", 20.0, batch, "ns, at most");
    Ok(())
}

/// A list of copies as one operation, against as many operations.
fn gather(options: &Options, report: &mut Report) -> Result<()> {
    for case in cases(options.cold).into_iter().filter(|c| c.hot && c.size < MIB) {
        let bench = Bench::new(Workers::Inline, 0.5, 16 * MIB)?;
        let (direction, hint) = (Direction::FromHost, CacheHint::Hot);
        let (buf, via) = bench.buffer(case.region)?;
        let mut walk = Walk::new(bench.card.queue(0)?, buf.into_slice(), &via, direction, case.size, 0, hint)?;
        let (buf, via) = bench.buffer(case.region)?;
        let (mut hosts, mut rest, at) = (Vec::new(), buf.into_slice(), 8 * MIB);
        while !rest.is_empty() {
            let (slice, more) = rest.split_at(case.size).map_err(|_| "a region of whole copies")?;
            hosts.push((slice, via.clone()).into());
            rest = more;
        }
        let place = |n: usize| (DeviceAddr::Card(CardAddr::new((at + n * case.size) as u64)), case.size as u64);
        let parts = hosts.len();
        let mut list = Some(Operation::gather(direction, hosts, (0..parts).map(place).collect()).hint(hint));
        let (mut queue, mut ended) = (bench.card.queue(1)?, Vec::new());
        let mut plain = Plain::new(case.region)?;
        let mut samples: [Vec<f64>; 3] = Default::default();
        let turns = case.total() / case.region;
        for round in 0..options.rounds + 1 {
            let keep = second(|| plain.walk(&case, direction, Some(CopyHint::Keep)));
            let single = second(|| walk.walk(turns));
            let lists = second(|| {
                for _ in 0..turns {
                    let _only = queue.submit(list.take().expect("the list")).expect("room");
                    queue.wait(&mut ended, LONG);
                    let Completion { operation, result, .. } = ended.pop().expect("one");
                    assert!(result.is_ok());
                    list = Some(operation);
                }
            });
            if round > 0 {
                samples.iter_mut().zip([keep, single, lists]).for_each(|(samples, took)| samples.push(took));
            }
        }
        let (mut mine, mut there) = (vec![0; case.size], vec![0; case.size]);
        for (n, host) in list.iter().flat_map(Operation::hosts).enumerate() {
            host.slice.read(0, &mut mine).ok_or("a short slice")?;
            bench.bus.memory().read(CardAddr::new((at + n * case.size) as u64), &mut there)?;
            if mine != there {
                return Err(format!("part {n} of the list differs").into());
            }
        }
        let label = format!("gather {}", case.name());
        let items = Details { items: Some((case.total() / case.size) as u64), ..Details::default() };
        let variants = ["plain copy", "card, an operation each", "card, one list"];
        let medians =
            [0, 1, 2].map(|n| report.detailed_row(&label, variants[n], case.total() as u64, &samples[n], items));
        report.at_most(&format!("{label}: a list / as many operations"), 1.0, medians[2] / medians[1]);
        let goal = if case.size <= 4 * KIB { 0.85 } else { 0.97 };
        report.at_least(&format!("{label}: share of the reference"), goal, medians[0] / medians[2]);
    }
    Ok(())
}

/// One registration for many transfers, against one for each.
fn registered(options: &Options, report: &mut Report) -> Result<()> {
    for (pages, fragmentation) in [("4 KiB leaves", 1.0), ("2 MiB leaves", 0.0)] {
        let bench = Bench::new(Workers::Inline, fragmentation, 64 * MIB)?;
        for size in [4 * KIB, 64 * KIB, MIB, 64 * MIB] {
            let (buf, via) = bench.buffer(size)?;
            let mut queue = bench.card.queue(0)?;
            let mut slice = Some(buf.into_slice());
            let mut copy = |via: Registered| {
                let at = DeviceAddr::Card(CardAddr::new(0));
                let operation = Operation::copy(Direction::FromHost, (slice.take().expect("the slice"), via), at);
                let _ticket = queue.submit(operation).expect("room");
                let mut ended = Vec::new();
                queue.wait(&mut ended, LONG);
                let ended = ended.pop().expect("one");
                assert_eq!(ended.result, Ok(()));
                slice = ended.operation.into_slice();
            };
            let memory = via.mapping().pinned().reference().clone();
            let times = (16 * MIB / size).clamp(2, 256);
            let (mut once, mut each) = (Vec::new(), Vec::new());
            for _ in 0..options.rounds {
                once.push(time(|| (0..times).for_each(|_| copy(via.clone()))));
                each.push(time(|| {
                    (0..times).for_each(|_| {
                        let pinned = dmalane::dma::Registrar::pin(&*bench.bus, &memory).expect("frames");
                        let mapping = dmalane::dma::Registrar::map(&*bench.bus, pinned, Access::RW).expect("a mapping");
                        copy(Registered::from_mapping(mapping));
                    });
                }));
            }
            let label = format!("registered {}", Case { size, hot: true, region: size }.name().replace(" hot", ""));
            let items = Details { items: Some(times as u64), ..Details::default() };
            let bytes = (times * size) as u64;
            let a = report.detailed_row(&label, &format!("once, {pages}"), bytes, &once, items);
            let b = report.detailed_row(&label, &format!("for each, {pages}"), bytes, &each, items);
            report.note(&label, &format!("register for each transfer / once, {pages}"), b / a);
        }
    }
    Ok(())
}
