//! Measuring what tells the limits of a card apart: sets of streams at once, whose bytes are compared.

use std::error::Error;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use dmalane::addr::{Access, CardAddr, Span};
use dmalane::device::{AddressSpace, Device, DeviceInfo, Region};
use dmalane::dma::{BufferSlice, Registrar};
use dmalane::queue::{
    DeviceAddr, DeviceQueue, Direction, Operation, Queue, Refusal, Registered, SharedOptions, SharedQueue, Work,
};

use super::assumptions::{all, v80};
use super::fit::{Fit, Measured, fit, plan};
use super::{Half, Limit, Link, Slow, Stream};

/// Bytes of a transfer, and transfers that each stream keeps in flight.
const CHUNK: usize = 128 << 10;
const DEPTH: usize = 4;
/// Operations that end earlier do not count: they use up credit saved while nothing moved.
const WARM: Duration = Duration::from_millis(25);
/// Longest time without a completion, and time that a dropped queue waits for its operations.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A modelled link is this many times slower than what it stands for: its rates must be far below what the machine
/// copies.
pub const SLOWER: f64 = 50.0;

type Failed = Box<dyn Error + Send + Sync>;

/// The links that can be emulated, by name: `half-egress-14` and so on.
pub fn emulations() -> Vec<(String, Link)> {
    all().into_iter().chain(v80()).map(|a| (a.name.replace(' ', "-"), slower(&a.link))).collect()
}

/// The same link with each of its rates divided by [`SLOWER`].
fn slower(link: &Link) -> Link {
    let limit = |l: &Limit| Limit { capacity: l.capacity.iter().map(|(t, c)| (*t, c / SLOWER)).collect(), ..l.clone() };
    let limits = link.limits().iter().map(limit).collect();
    Link::new(link.channels(), limits, link.latency()).expect("positive rates stay positive")
}

/// Where the halves of a card's memories begin, and their bytes.
#[derive(Clone, Copy)]
struct Halves {
    ddr: Span<CardAddr>,
    hbm: [Span<CardAddr>; 2],
}

impl Halves {
    fn of(regions: &[Region]) -> Result<Self, Failed> {
        let named = |name: &str| regions.iter().find(|r| r.name == name).map(|r| r.span);
        match (named("ddr"), named("hbm0"), named("hbm1")) {
            (Some(ddr), Some(low), Some(high)) => Ok(Self { ddr, hbm: [low, high] }),
            _ => Err("the device is not a card with DDR and HBM, so there are no limits to find".into()),
        }
    }

    fn half(&self, at: CardAddr) -> Half {
        let upper = at.bits().wrapping_sub(self.ddr.first().bits()) >= self.ddr.len() / 2;
        match () {
            () if self.ddr.contains(at) => [Half::Ddr0, Half::Ddr1][usize::from(upper)],
            () => [Half::Hbm0, Half::Hbm1][usize::from(self.hbm[1].contains(at))],
        }
    }

    fn span(&self, half: Half) -> (CardAddr, u64) {
        let ddr = self.ddr.len() / 2;
        match half {
            Half::Ddr0 => (self.ddr.first(), ddr),
            Half::Ddr1 => (self.ddr.first() + ddr, ddr),
            Half::Hbm0 => (self.hbm[0].first(), self.hbm[0].len()),
            Half::Hbm1 => (self.hbm[1].first(), self.hbm[1].len()),
        }
    }
}

/// A card that seems to hang off a modelled link.
pub struct SlowCard {
    inner: Box<dyn Device>,
    link: Link,
    burst: Duration,
    halves: Halves,
}

impl SlowCard {
    /// `catch_up`: time for which the link catches up when its threads did not get to run. It moves as much more after
    /// idle time.
    ///
    /// # Errors
    /// The device is no card with DDR and HBM.
    pub fn new(inner: Box<dyn Device>, link: Link, catch_up: Duration) -> Result<Self, Failed> {
        let halves = Halves::of(inner.regions())?;
        Ok(Self { inner, link, burst: catch_up, halves })
    }
}

impl Device for SlowCard {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { concurrent: true, ..self.inner.info() }
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        self.inner.registrar()
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        let halves = self.halves;
        let half = move |at: DeviceAddr| match at {
            DeviceAddr::Card(at) => halves.half(at),
            DeviceAddr::Va(_) => Half::Ddr0,
        };
        let slow = Slow::new(self.inner.take_queues(), self.link.clone(), self.burst, half);
        slow.into_iter().map(|queue| Box::new(queue) as Box<DeviceQueue>).collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        self.inner.address_space()
    }
}

/// How limits are found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FitSettings {
    /// Time that each set of streams runs.
    pub time: Duration,
    /// Runs of each set, of which the median counts; at least 1.
    pub runs: usize,
    /// Rates that differ by less each way count as equal: 0.05 is 5 %.
    pub noise: f64,
}

/// Measured rates, and the limits that explain them.
#[derive(Clone, Debug)]
pub struct FitReport {
    /// Streams that ran at once, with their rates.
    pub points: Vec<Measured>,
    /// The limits that explain them.
    pub fit: Fit,
}

/// Runs each set of streams of [`plan`], compares the bytes, and fits limits to the rates. Overwrites the beginning of
/// each half of the card's memories.
///
/// # Errors
/// The device is no card with DDR and HBM; a transfer failed, or moved wrong bytes.
pub fn fit_link(mut device: Box<dyn Device>, settings: &FitSettings) -> Result<FitReport, Failed> {
    let halves = Halves::of(device.regions())?;
    let share = |queue: Box<DeviceQueue>| {
        let capacity = queue.limits().capacity;
        SharedQueue::new(queue, SharedOptions { inside: capacity, each: capacity, drop_timeout: TIMEOUT })
    };
    let queues: Vec<_> = device.take_queues().into_iter().map(share).collect();
    let registrar = device.registrar();
    let mut points = Vec::new();
    for set in plan(queues.len()) {
        let flow = |(number, stream): (usize, &Stream)| -> Result<Flow, Failed> {
            let (first, have) = halves.span(stream.half);
            let at = first.bits() + (number * DEPTH * CHUNK) as u64;
            match have < ((number + 1) * DEPTH * CHUNK) as u64 {
                true => Err(format!("{:?} has {have} bytes, which is too small", stream.half).into()),
                false => Flow::new(Box::new(queues[stream.channel].handle()), &*registrar, at, number),
            }
        };
        let mut flows = set.iter().enumerate().map(flow).collect::<Result<Vec<_>, _>>()?;
        let rates = rates(&mut flows, &set, settings).map_err(|e| format!("{}: {e}", names(&set)))?;
        points.push(Measured { flows: set.into_iter().zip(rates).collect() });
    }
    // The queues go before their device.
    let channels = queues.len();
    drop(queues);
    let fit = fit(channels, &points, settings.noise);
    Ok(FitReport { points, fit })
}

/// The streams of a set, for people.
pub fn names(set: &[Stream]) -> String {
    let name = |s: &Stream| {
        let directions = if s.direction == Direction::ToHost { "reading" } else { "writing" };
        format!("channel {} {directions} {:?}", s.channel, s.half)
    };
    set.iter().map(name).collect::<Vec<_>>().join(" + ")
}

/// The buffers of a stream, and where they lie on the card.
struct Flow {
    queue: Box<DeviceQueue>,
    idle: Vec<(CardAddr, BufferSlice, Registered)>,
    seed: u64,
}

/// Bytes per second of each flow when all run at once.
fn rates(flows: &mut [Flow], set: &[Stream], settings: &FitSettings) -> Result<Vec<f64>, Failed> {
    let writes = |stream: &Stream| stream.direction == Direction::FromHost;
    for flow in flows.iter_mut() {
        flow.fill(flow.seed);
        flow.run(Direction::FromHost, None)?;
        // What a stream reads must come from the card.
        flow.fill(!flow.seed);
    }
    for (flow, _) in flows.iter_mut().zip(set).filter(|(_, stream)| writes(stream)) {
        flow.seed ^= 1 << 32;
        flow.fill(flow.seed);
    }
    let mut rates = vec![Vec::new(); flows.len()];
    for _ in 0..settings.runs.max(1) {
        let gate = Barrier::new(flows.len());
        let moved = thread::scope(|scope| {
            let mut threads = Vec::new();
            for (flow, stream) in flows.iter_mut().zip(set) {
                let (gate, direction) = (&gate, stream.direction);
                threads.push(scope.spawn(move || {
                    gate.wait();
                    flow.run(direction, Some(settings.time))
                }));
            }
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().map_err(|_| "a thread panicked".into());
            threads.into_iter().map(|thread| join(thread).and_then(|moved| moved)).collect::<Result<Vec<u64>, Failed>>()
        })?;
        rates.iter_mut().zip(moved).for_each(|(rates, bytes)| rates.push(bytes as f64 / settings.time.as_secs_f64()));
    }
    for (flow, _) in flows.iter_mut().zip(set).filter(|(_, stream)| writes(stream)) {
        flow.fill(!flow.seed);
        flow.run(Direction::ToHost, None)?;
    }
    if let Some(wrong) = flows.iter().position(|flow| !flow.holds(flow.seed)) {
        return Err(format!("stream {wrong} moved wrong bytes, so limits cannot be determined").into());
    }
    let median = |mut rates: Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    Ok(rates.into_iter().map(median).collect())
}

impl Flow {
    fn new(queue: Box<DeviceQueue>, registrar: &dyn Registrar, at: u64, number: usize) -> Result<Self, Failed> {
        let heap = registrar.heap(None);
        let buffer = |i: usize| -> Result<_, Failed> {
            let buf = heap.allocate(CHUNK)?.share();
            let via = Registered::new(registrar, &buf, Access::RW)?;
            let (slice, _) = buf.into_slice().split_at(CHUNK).map_err(|_| "the heap gave less than was asked for")?;
            Ok((CardAddr::new(at + (i * CHUNK) as u64), slice, via))
        };
        let idle = (0..DEPTH).map(buffer).collect::<Result<_, _>>()?;
        Ok(Self { queue, idle, seed: 0x9e37_79b9_7f4a_7c15 ^ (number as u64) << 8 })
    }

    /// The bytes of a buffer: different for each seed, address and place.
    fn bytes(seed: u64, at: CardAddr) -> Vec<u8> {
        let word = |i: u64| (seed ^ (at.bits() + i * 8)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (0..CHUNK as u64 / 8).flat_map(|i| (word(i) ^ word(i) >> 29).to_le_bytes()).collect()
    }

    fn fill(&mut self, seed: u64) {
        for (at, slice, _) in &mut self.idle {
            slice.write(0, &Self::bytes(seed, *at)).expect("as long as the buffer");
        }
    }

    fn holds(&self, seed: u64) -> bool {
        let mut got = vec![0; CHUNK];
        self.idle.iter().all(|(at, slice, _)| slice.read(0, &mut got).is_some() && got == Self::bytes(seed, *at))
    }

    /// Copies each buffer once, or again and again for a time after [`WARM`], and returns the bytes that were moved in
    /// that time.
    fn run(&mut self, direction: Direction, time: Option<Duration>) -> Result<u64, Failed> {
        let start = Instant::now();
        let goes_on = || time.is_some_and(|time| start.elapsed() < WARM + time);
        let (mut todo, mut done, mut flying) = (std::mem::take(&mut self.idle), Vec::new(), 0);
        let (mut bytes, mut last, mut failed) = (0, Instant::now(), None);
        let mut submitted = Vec::new();
        loop {
            while let Some((at, slice, via)) = todo.pop() {
                let operation = Operation::copy(direction, (slice, via.clone()), DeviceAddr::Card(at));
                match self.queue.submit(operation) {
                    Ok(ticket) => submitted.push((ticket, at, via)),
                    Err(refused) => {
                        let slice = refused.operation.into_slice().expect("a copy has one");
                        todo.push((at, slice, via));
                        if refused.reason != Refusal::Full {
                            failed.get_or_insert(refused.reason.to_string());
                        }
                        break;
                    }
                }
                flying += 1;
            }
            if flying == 0 && (todo.is_empty() || failed.is_some()) {
                self.idle.append(&mut todo);
                return failed.map_or(Ok(bytes), |why| Err(why.into()));
            }
            self.queue.wait(&mut done, Duration::from_millis(10));
            if last.elapsed() > TIMEOUT {
                return Err("nothing has ended for 20 s".into());
            }
            for completion in done.drain(..) {
                (flying, last) = (flying - 1, Instant::now());
                let Work::Copy { host, .. } = completion.operation.work else { continue };
                let index = submitted.iter().position(|s| s.0 == completion.ticket).expect("it was submitted");
                let (_, at, via) = submitted.swap_remove(index);
                match completion.result {
                    Ok(()) if (WARM..WARM + time.unwrap_or_default()).contains(&start.elapsed()) => {
                        bytes += CHUNK as u64;
                    }
                    Ok(()) => {}
                    Err(e) => failed = failed.or(Some(e.to_string())),
                }
                let to = if goes_on() && failed.is_none() { &mut todo } else { &mut self.idle };
                to.push((at, host.slice, via));
            }
        }
    }
}
