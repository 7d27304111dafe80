//! A device as the sink: everything gets there while the rest is read, whatever order operations end in, and nothing is
//! left under way when anything fails.

mod script;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dmalane_addr::CardAddr;
use dmalane_dma::{AnonHeap, DeviceMem, Heap, HeldMem, MemfdHeap, PageKind, Pool};
use dmalane_load::Stage;
use dmalane_load::fill::{Event, Extent, FillError, FillOptions, Filled, Job, Sink, Staging, ToDevice, Watch, fill};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, Refusal, Refused, StopReason, Ticket, Work,
};
use dmalane_sim::{DevicePort, HostConfig, SoftHost};
use script::{Fault, Places, Random, Script, naive, noise, random_job};

/// The fault when a byte of the device's memory is written.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Broken {
    /// The device fails the transfer.
    Fails,
    /// It refuses everything from then on.
    Refuses,
    /// The transfer never ends.
    Hangs,
}

/// A device's queue that reads host memory by IOVA, reorders, and fails by script.
struct Card {
    port: DevicePort,
    memory: Vec<u8>,
    capacity: usize,
    max_len: u64,
    random: Random,
    waiting: Vec<(Ticket, Operation)>,
    hung: Vec<(Ticket, Operation)>,
    next: u64,
    broken: Option<(u64, Broken)>,
    dead: bool,
    ended: usize,
    stopped: Option<StopReason>,
    /// Operations that hang end when the queue is stopped.
    lets_go: bool,
}

impl Card {
    fn new(host: &SoftHost, len: usize, seed: u64, broken: Option<(u64, Broken)>) -> Self {
        let mut random = Random(seed);
        let (capacity, max_len) = (1 + random.below(5) as usize, 1 + random.below(30_000));
        let (waiting, hung) = (Vec::new(), Vec::new());
        let memory = vec![0xee; len];
        Self {
            port: host.port(),
            memory,
            capacity,
            max_len,
            random,
            waiting,
            hung,
            next: 0,
            broken,
            dead: false,
            ended: 0,
            stopped: None,
            lets_go: false,
        }
    }

    fn end_one(&mut self, done: &mut Vec<Completion>) {
        let (ticket, operation) = self.waiting.swap_remove(self.random.below(self.waiting.len() as u64) as usize);
        let Work::Copy { at: DeviceAddr::Card(at), host, .. } = &operation.work else { panic!("not by VA") };
        let (at, len) = (at.bits(), operation.bytes());
        let hit = self.broken.filter(|(place, _)| (at..at + len).contains(place)).map(|(_, how)| how);
        if hit == Some(Broken::Hangs) {
            return self.hung.push((ticket, operation));
        }
        let mut result = Ok(());
        if hit.is_some() {
            self.dead |= hit == Some(Broken::Refuses);
            result = Err(OpError::Device { status: 7 });
        } else {
            let seen = host.iova().expect("the part lies in its registration");
            self.port.hold().read_bytes(seen.first(), &mut self.memory[at as usize..(at + len) as usize]).unwrap();
        }
        self.ended += 1;
        let bytes = if result.is_ok() { len } else { 0 };
        done.push(Completion { ticket, operation, result, bytes });
    }
}

impl Queue for Card {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: self.max_len, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.hung.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let len = operation.bytes();
        assert_eq!(operation.needs(), Capabilities::FROM_HOST);
        assert!(len > 0 && len <= self.max_len);
        let reason = match () {
            () if self.dead => Refusal::Stopped(StopReason::Requested("by script".into())),
            () if self.in_flight() >= self.capacity => Refusal::Full,
            () => {
                self.next += 1;
                self.waiting.push((Ticket::new(self.next), operation));
                return Ok(Ticket::new(self.next));
            }
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        while !self.waiting.is_empty() && self.random.below(3) > 0 {
            self.end_one(done);
        }
        if let (true, Some(why)) = (self.lets_go, &self.stopped) {
            let stopped = |(ticket, operation)| {
                let result = Err(OpError::Stopped(why.clone()));
                Completion { ticket, operation, result, bytes: 0 }
            };
            done.extend(self.hung.drain(..).map(stopped));
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let before = done.len();
        if !self.waiting.is_empty() {
            self.end_one(done);
        } else if self.lets_go && self.stopped.is_some() {
            return self.poll(done);
        } else if !self.hung.is_empty() {
            std::thread::sleep(timeout.min(Duration::from_millis(5)));
        }
        done.len() - before
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped = Some(reason);
    }
}

type Sources = Vec<Arc<Vec<u8>>>;

/// A job with a card behind it, and where on the card its buffers go.
struct Case<'a> {
    host: &'a SoftHost,
    /// Bytes of a staging buffer.
    staging: u64,
    card: Card,
    to: Places,
    first: Vec<u64>,
    inline: bool,
}

impl<'a> Case<'a> {
    fn new(host: &'a SoftHost, job: &Job, seed: u64, broken: Option<(usize, u64, Broken)>) -> Self {
        // Between two buffers there are bytes of nobody.
        let mut next = 100;
        let mut place = |len: &u64| {
            next += len + 77;
            next - len - 77
        };
        let first: Vec<u64> = job.buffers.iter().map(&mut place).collect();
        let broken = broken.map(|(buffer, offset, how)| (first[buffer] + offset, how));
        Self {
            host,
            staging: 64 << 10,
            card: Card::new(host, next as usize, seed, broken),
            to: Places(first.iter().map(|at| DeviceAddr::Card(CardAddr::new(*at))).collect()),
            first,
            inline: seed.is_multiple_of(2),
        }
    }

    /// `saw` is called with every event.
    fn run(
        &mut self,
        heap: Arc<dyn Heap>,
        job: &Job,
        workers: &mut [Vec<Script>],
        options: &FillOptions,
        saw: &mut Watch<'_>,
    ) -> Result<Filled, FillError> {
        let Self { host, staging, card, to, inline, .. } = self;
        let mut staging = Staging::new(heap, Arc::new(host.clone()), *staging);
        let to = ToDevice { queue: card, polled: *inline, processors: 0, targets: to };
        let filled = fill(Sink::Staging(&mut staging, Some(to)), job, workers, options, saw)?;
        assert!(filled.buffers.is_empty(), "nothing stays here");
        Ok(filled)
    }
}

fn workers(random: &mut Random, sources: &Sources, faults: &[(u64, Fault)]) -> Vec<Vec<Script>> {
    let capacity = 1 + random.below(6) as usize;
    (0..=random.below(3))
        .map(|worker| {
            let script = |s: &Arc<Vec<u8>>| Script::new(s.clone(), capacity, random.0 ^ worker, faults.to_vec());
            sources.iter().map(script).collect()
        })
        .collect()
}

fn options(random: &mut Random, checksum: bool) -> FillOptions {
    let (chunk, block) = (random.below(40_000), random.below(20_000));
    FillOptions { chunk, block, checksum, hash_thread: Some(random.below(2) == 0), ..FillOptions::default() }
}

#[test]
fn the_device_gets_every_buffer() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let sources: Sources = (0..3).map(|i| noise(i, 50_000)).collect();
    let heaps: [Arc<dyn Heap>; 3] = [
        Arc::new(AnonHeap::starting_at(PageKind::Base)),
        Arc::new(MemfdHeap::starting_at(PageKind::Base)),
        Arc::new(Pool::new(AnonHeap::new(), 1 << 20)),
    ];
    for seed in 0..400 {
        let mut random = Random(seed);
        let job = random_job(&mut random, 3, 50_000);
        let options = options(&mut random, seed % 2 == 0);
        let mut workers = workers(&mut random, &sources, &[]);
        let there = AtomicUsize::new(0);
        let mut case = Case::new(&host, &job, seed, None);
        case.staging = 4096 * (1 + random.below(16));
        let mut missing: Vec<u64> = job.extents.iter().map(|e| e.len).collect();
        let mut saw = |event: Event| {
            if let Event::OnDevice { buffer, offset, len } = event {
                there.fetch_add(len as usize, Ordering::Relaxed);
                let within = |e: &Extent| e.buffer == buffer && e.to <= offset && offset + len <= e.to + e.len;
                // Zeroes between extents belong to none.
                if let Some(extent) = job.extents.iter().position(within) {
                    missing[extent] -= len;
                }
            }
            ControlFlow::Continue(())
        };
        let filled =
            case.run(heaps[seed as usize % heaps.len()].clone(), &job, &mut workers, &options, &mut saw).unwrap();
        let Case { card, first, .. } = case;
        let wanted = naive(&job, &sources);
        let bytes: u64 = job.buffers.iter().sum();
        assert_eq!(there.into_inner() as u64, bytes, "seed {seed}");
        assert!(missing.iter().all(|bytes| *bytes == 0), "the device has every extent");
        let moved = filled.report.stages.iter().find(|s| s.stage == Stage::Transfer).map_or(0, |s| s.bytes);
        assert_eq!(moved, bytes);
        let mut expected = vec![0xee; card.memory.len()];
        for (first, want) in first.iter().zip(&wanted) {
            expected[*first as usize..][..want.len()].copy_from_slice(want);
        }
        assert!(card.memory == expected, "seed {seed}: the device has the buffers, and nothing else was written");
    }
    assert_eq!(host.stats().pinned_frames, 0);
}

#[test]
fn transfers_begin_while_later_bytes_are_read() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let sources: Sources = vec![noise(5, 400_000)];
    let job = Job::whole(&[400_000]);
    for checksum in [false, true] {
        let options = FillOptions { chunk: 16384, block: 8192, checksum, ..FillOptions::default() };
        let (arrived, first) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let mut case = Case::new(&host, &job, 3, None);
        let mut saw = |event: Event| {
            match event {
                Event::Arrived { len, .. } => drop(arrived.fetch_add(len as usize, Ordering::Relaxed)),
                Event::OnDevice { .. } if first.load(Ordering::Relaxed) == 0 => {
                    first.store(arrived.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                _ => {}
            }
            ControlFlow::Continue(())
        };
        let mut workers = vec![vec![Script::new(sources[0].clone(), 4, 1, Vec::new())]];
        case.run(Arc::new(AnonHeap::starting_at(PageKind::Base)), &job, &mut workers, &options, &mut saw).unwrap();
        let first = first.into_inner();
        assert!(first > 0 && first < 200_000, "the device had bytes when {first} of 400000 had arrived");
    }
}

/// Faults of files and of the device, cancellations and deadlines, at random places: the right error, and nothing under
/// way, pinned or allocated afterwards.
#[test]
fn faults_in_the_middle() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let sources: Sources = vec![noise(8, 150_000), noise(9, 150_000)];
    let heaps: [Arc<dyn Heap>; 2] =
        [Arc::new(AnonHeap::starting_at(PageKind::Base)), Arc::new(Pool::new(AnonHeap::new(), 1 << 20))];
    let mut in_the_middle = 0;
    for seed in 0..500 {
        let mut random = Random(seed);
        let job = Job::whole(&[150_000, 150_000]);
        let options = options(&mut random, seed % 3 == 0);
        let (buffer, place) = (random.below(2) as usize, random.below(150_000));
        let what = seed % 5;
        let faults = if what == 0 { vec![(place, Fault::Errno(5))] } else { Vec::new() };
        let broken = match what {
            1 => Some((buffer, place, Broken::Fails)),
            2 => Some((buffer, place, Broken::Refuses)),
            _ => None,
        };
        let mut workers = workers(&mut random, &sources, &faults);
        let mut case = Case::new(&host, &job, seed, broken);
        let stop_after = random.below(300_000);
        let mut there = 0;
        let mut saw = |event: Event| {
            if let Event::OnDevice { len, .. } = event {
                there += len;
            }
            if what == 3 && there > stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let options = match what {
            4 => FillOptions { time_limit: Some(Duration::from_micros(stop_after / 200)), ..options },
            _ => options,
        };
        let heap = &heaps[seed as usize % heaps.len()];
        let result = case.run(heap.clone(), &job, &mut workers, &options, &mut saw);
        match (what, &result) {
            (0, Err(FillError::Read { error: OpError::Io { errno: 5, at }, .. })) => assert_eq!(at.bits(), place),
            (1, Err(FillError::Transfer { buffer: b, offset, error: OpError::Device { status: 7 } })) => {
                assert!(*b == buffer && (*offset..offset + case.card.max_len).contains(&place), "seed {seed}");
            }
            // Whichever was noticed first.
            (2, Err(FillError::Transfer { error: OpError::Device { status: 7 }, .. })) => {}
            (2, Err(FillError::Transfer { error: OpError::Stopped(StopReason::Requested(why)), .. })) => {
                assert_eq!(&**why, "by script");
            }
            (3, Err(FillError::Cancelled { of: 300_000, .. })) => {}
            (4, Ok(_) | Err(FillError::Deadline { of: 300_000, .. })) => {}
            other => panic!("seed {seed}: {other:?}"),
        }
        in_the_middle += usize::from(result.is_err() && case.card.ended > 0);
        drop(result);
        assert_eq!((case.card.in_flight(), workers.iter().flatten().map(Queue::in_flight).sum()), (0, 0usize));
        assert_eq!((host.stats().pinned_frames, heap.stats().live), (0, 0), "seed {seed}");
    }
    assert!(in_the_middle > 200, "{in_the_middle} had transfers behind them");
}

#[test]
fn what_hangs_keeps_its_memory() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let sources: Sources = vec![noise(8, 100_000)];
    let job = Job::whole(&[100_000]);
    let heap = Arc::new(AnonHeap::starting_at(PageKind::Base));
    for hash_thread in [None, Some(true)] {
        // Long enough to read 100 kB and to hand them on, and too short for the timeout.
        let (timeout, time_limit) = (Duration::from_secs(2), Some(Duration::from_millis(600)));
        let checksum = hash_thread.is_some();
        let options = FillOptions {
            chunk: 8192,
            block: 8192,
            timeout,
            time_limit,
            checksum,
            hash_thread,
            ..FillOptions::default()
        };
        let mut case = Case::new(&host, &job, 11, Some((0, 60_000, Broken::Hangs)));
        let mut workers = vec![vec![Script::new(sources[0].clone(), 4, 1, Vec::new())]];
        let late =
            case.run(heap.clone(), &job, &mut workers, &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
        // Everything was read, and the device does not have everything.
        assert!(matches!(late, FillError::Deadline { of: 100_000, .. }), "{late:?}");
        assert_eq!(case.card.in_flight(), 1);
        assert!(host.stats().pinned_frames > 0 && heap.stats().live > 0, "the device may still read it");
        drop(case);
        assert_eq!((host.stats().pinned_frames, heap.stats().live), (0, 0));
    }
}

#[test]
fn a_device_that_ends_nothing_is_stopped() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let sources: Sources = vec![noise(8, 100_000)];
    let job = Job::whole(&[100_000]);
    let heap = Arc::new(AnonHeap::starting_at(PageKind::Base));
    for (lets_go, workers, checksum) in
        [(false, 1, false), (true, 1, false), (true, 3, false), (true, 1, true), (false, 3, true)]
    {
        // The limit is there for a job that would wait without end.
        let (timeout, time_limit) = (Duration::from_millis(300), Some(Duration::from_secs(60)));
        let options = FillOptions {
            chunk: 8192,
            block: 8192,
            timeout,
            time_limit,
            checksum,
            hash_thread: Some(true),
            ..FillOptions::default()
        };
        let mut case = Case::new(&host, &job, 11, Some((0, 60_000, Broken::Hangs)));
        case.card.lets_go = lets_go;
        let mut workers: Vec<_> =
            (0..workers).map(|_| vec![Script::new(sources[0].clone(), 4, 1, Vec::new())]).collect();
        let error =
            case.run(heap.clone(), &job, &mut workers, &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
        let FillError::Transfer { buffer: 0, error: OpError::Stopped(reason), .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((reason, &case.card.stopped), (&StopReason::Timeout(timeout), &Some(reason.clone())));
        assert_eq!(case.card.in_flight(), usize::from(!lets_go));
        assert_eq!(host.stats().pinned_frames > 0, !lets_go, "the device may still read what it did not let go of");
        drop(case);
        assert_eq!((host.stats().pinned_frames, heap.stats().live), (0, 0));
    }
}

#[test]
fn a_buffer_without_a_place_is_refused() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let mut workers = vec![vec![Script::new(noise(8, 10_000), 2, 1, Vec::new())]];
    let job = Job::whole(&[10_000]);
    let mut case = Case::new(&host, &job, 1, None);
    case.to = Places(Vec::new());
    let (heap, options) = (Arc::new(AnonHeap::new()), FillOptions::default());
    let refused = case.run(heap, &job, &mut workers, &options, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert_eq!(refused.to_string(), "1 buffers are to go to 0 places on the device");
}
