//! Files go on to the software card while they are read: everything gets there, and whatever fails in the middle leaves
//! nothing under way.

use std::ops::ControlFlow;
use std::sync::Arc;

use dmalane::addr::{CardAddr, FileOffset};
use dmalane::card::{CardDevice, CardUse};
use dmalane::dma::{AnonHeap, Heap, Pool};
use dmalane::load::Error as LoadError;
use dmalane::load::fill::{Event, Extent, FillError, FillOptions, Job};
use dmalane::load::{DriveOptions, OpenDevice, Stage, StageReport};
use dmalane::queue::{DeviceAddr, OpError, Queue};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use dmalane::{Read, ReadFiles, ReadOptions};
use tempfile::NamedTempFile;

const LEN: usize = 3_000_001;
const CHUNK: u64 = 256 << 10;
/// Of the card; it begins at a multiple of this.
const DDR: u64 = 64 << 20;

fn file(seed: u64) -> (NamedTempFile, Vec<u8>) {
    let data: Vec<u8> = (0..LEN as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let file = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), &data).unwrap();
    file.as_file().sync_all().unwrap();
    let _ = rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed);
    (file, data)
}

/// A card, and what it had pinned before anything was read.
struct Card {
    device: OpenDevice,
    bus: Arc<SoftBus>,
    pinned: u64,
}

impl Card {
    fn new(workers: Workers) -> Self {
        let config = CardConfig { ddr: DDR, hbm: 4 << 20, workers, ..CardConfig::default() };
        let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
        let bus = Arc::new(SoftBus::new(host, config).unwrap());
        let concurrent = workers == Workers::PerChannel;
        let device = CardDevice::open(bus.clone(), CardUse { concurrent, ..CardUse::default() }).unwrap();
        let device = OpenDevice::new(Box::new(device), DriveOptions::default()).unwrap();
        let pinned = bus.host().stats().pinned_frames;
        Self { device, bus, pinned }
    }

    fn place(&mut self, len: u64) -> DeviceAddr {
        DeviceAddr::Card(self.device.memory_mut().reserve(len).unwrap().first())
    }

    fn read(
        &mut self,
        heap: &dyn Heap,
        to: &[DeviceAddr],
        files: &[&NamedTempFile],
        job: &Job,
        options: &ReadOptions,
        watch: &mut (dyn FnMut(Event) -> ControlFlow<()> + Send),
    ) -> Result<ReadFiles, LoadError> {
        let read = Read::files(files.iter().map(|file| file.path())).job(job.clone()).options(options.clone());
        read.watch(watch).copy_to_device(&mut self.device, to).into_memory(heap)
    }

    /// The bytes of the card, read behind its back.
    fn back(&mut self, at: DeviceAddr, len: usize) -> Vec<u8> {
        let DeviceAddr::Card(at) = at else { unreachable!() };
        let mut bytes = vec![0; len];
        self.bus.memory().read(at, &mut bytes).unwrap();
        bytes
    }

    /// Nothing is in flight, mapped or pinned.
    fn is_idle(&mut self) -> bool {
        self.device.queue_mut().in_flight() == 0 && self.bus.host().stats().pinned_frames == self.pinned
    }
}

fn options(threads: usize, checksum: bool) -> ReadOptions {
    let fill = FillOptions { chunk: CHUNK, block: 64 << 10, depth: Some(4), checksum, ..FillOptions::default() };
    ReadOptions { threads: Some(threads), fill, ..ReadOptions::default() }
}

fn go(_: Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn the_card_has_what_the_files_have() {
    let ((a, a_bytes), (b, b_bytes)) = (file(1), file(2));
    for (workers, threads, checksum) in [
        (Workers::Inline, 1, true),
        (Workers::Inline, 3, false),
        (Workers::PerChannel, 1, false),
        (Workers::PerChannel, 3, true),
    ] {
        let mut card = Card::new(workers);
        let heap = AnonHeap::new();
        let to = [card.place(LEN as u64), card.place(LEN as u64)];
        let job = Job::whole(&[LEN as u64; 2]);
        let read = card.read(&heap, &to, &[&a, &b], &job, &options(threads, checksum), &mut go).unwrap();
        for ((at, bytes), buffer) in to.into_iter().zip([&a_bytes, &b_bytes]).zip(&read.filled.buffers) {
            assert!(card.back(at, LEN) == *bytes);
            assert_eq!(buffer.checksum(), checksum.then(|| twox_hash::XxHash3_64::oneshot(bytes)));
            let mut here = vec![0; LEN];
            buffer.as_volatile_slice().read(&mut here);
            assert!(here == *bytes, "and it is in memory too");
        }
        let stage = |stage| read.filled.report.stages.iter().find(|s: &&StageReport| s.stage == stage).unwrap().bytes;
        assert_eq!(stage(Stage::Transfer), 2 * LEN as u64);
        assert!(stage(Stage::Register) >= 2 * LEN as u64 && stage(Stage::Map) >= 2 * LEN as u64);
        assert!(read.filled.mappings.iter().all(|chunks| chunks.len() > LEN / CHUNK as usize), "mapped chunk by chunk");
        drop(read);
        assert!(card.is_idle() && heap.stats().live == 0);
    }
}

#[test]
fn pieces_of_files_go_to_the_places_that_they_have_in_the_buffer() {
    let (a, bytes) = file(3);
    let mut card = Card::new(Workers::Inline);
    // Two extents of one file, in the other order, with gaps; in recycled memory, which is not zero.
    let pool = Pool::new(AnonHeap::new(), 8 << 20);
    pool.allocate(2 << 20).unwrap().fill(0xff);
    let extent = |at, len, to| Extent { source: 0, at: FileOffset::new(at), len, buffer: 0, to };
    let job =
        Job { buffers: vec![2_000_000], extents: vec![extent(1_000_003, 900_000, 1_000_000), extent(5, 700_001, 100)] };
    let at = card.place(2 << 20);
    let mut seen = Vec::new();
    let mut watch = |event: Event| {
        match event {
            Event::OnDevice { offset, len, .. } => seen.push(("there", offset, offset + len)),
            Event::Complete { extent } => seen.push(("complete", extent as u64, 0)),
            _ => {}
        }
        ControlFlow::Continue(())
    };
    card.read(&pool, &[at], &[&a], &job, &options(1, true), &mut watch).unwrap();
    let mut wanted = vec![0; 2_000_000];
    wanted[100..700_101].copy_from_slice(&bytes[5..700_006]);
    wanted[1_000_000..1_900_000].copy_from_slice(&bytes[1_000_003..1_900_003]);
    assert!(card.back(at, 2_000_000) == wanted);
    // An extent is complete when the card has its last byte.
    for (extent, span) in [(0, 1_000_000..1_900_000), (1, 100..700_101)] {
        let last = seen.iter().rposition(|(what, from, to)| *what == "there" && *from < span.end && *to > span.start);
        let told = seen.iter().position(|what| *what == ("complete", extent, 0));
        assert!(last.unwrap() < told.unwrap(), "{extent}: {seen:?}");
    }
}

#[test]
fn the_card_has_the_first_bytes_before_the_last_ones_have_memory() {
    let (a, _) = file(4);
    let mut card = Card::new(Workers::Inline);
    let at = card.place(LEN as u64);
    let (mut allocated, mut first) = (0, None);
    let mut watch = |event: Event| {
        match event {
            Event::Allocated { len, .. } => allocated += len,
            Event::OnDevice { .. } => drop(first.get_or_insert(allocated)),
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let job = Job::whole(&[LEN as u64]);
    card.read(&AnonHeap::new(), &[at], &[&a], &job, &options(1, false), &mut watch).unwrap();
    assert!(first.unwrap() < LEN as u64, "{first:?} of {LEN} were allocated");
}

#[test]
fn what_fails_in_the_middle_is_waited_for() {
    for workers in [Workers::Inline, Workers::PerChannel] {
        let (a, bytes) = file(5);
        let mut card = Card::new(workers);
        let heap = AnonHeap::new();
        let job = Job::whole(&[LEN as u64]);
        let at = card.place(LEN as u64);
        // The card has no memory behind its end, and what comes before it is there.
        let DeviceAddr::Card(first) = at else { unreachable!() };
        let end = (first.bits() / DDR + 1) * DDR;
        let late = DeviceAddr::Card(CardAddr::new(end - 1_000_000));
        let error = card.read(&heap, &[late], &[&a], &job, &options(1, true), &mut go).unwrap_err();
        match &error {
            LoadError::Fill(FillError::Transfer { buffer: 0, offset, error: OpError::NoCardMemory(_) }) => {
                assert!(*offset < LEN as u64 && *offset + (2 << 20) > 1_000_000, "{offset}");
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("on its way to the device"), "{error}");
        assert!(card.is_idle() && heap.stats().live == 0);
        // The top of the address space.
        let top = DeviceAddr::Card(CardAddr::new(u64::MAX - 1_000_000));
        let error = card.read(&heap, &[top], &[&a], &job, &options(2, false), &mut go).unwrap_err();
        assert!(matches!(error, LoadError::Fill(FillError::Transfer { .. })), "{error}");
        assert!(card.is_idle() && heap.stats().live == 0);
        // The file is cut off while its first bytes are on the card already.
        let mut there = 0;
        let mut cut = |event: Event| {
            if let Event::OnDevice { len, .. } = event {
                there += len;
                a.as_file().set_len(1_000_000).unwrap();
            }
            ControlFlow::Continue(())
        };
        let mut few = options(1, false);
        few.fill.depth = Some(1);
        let error = card.read(&heap, &[at], &[&a], &job, &few, &mut cut).unwrap_err();
        let LoadError::Read { source: OpError::EndOfFile { at: end, .. }, .. } = &error else { panic!("{error}") };
        assert!(end.bits() >= 1_000_000 && there > 0, "{end}, {there}");
        assert!(card.is_idle() && heap.stats().live == 0);
        std::fs::write(a.path(), &bytes).unwrap();
        // The caller has enough, with transfers in flight.
        let mut seen = 0;
        let mut stop = |event: Event| match event {
            Event::OnDevice { len, .. } => {
                seen += len;
                if seen > 1_000_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            _ => ControlFlow::Continue(()),
        };
        let error = card.read(&heap, &[at], &[&a], &job, &options(1, true), &mut stop).unwrap_err();
        assert!(matches!(error, LoadError::Fill(FillError::Cancelled { .. })), "{error}");
        assert!(card.is_idle() && heap.stats().live == 0);
        // The IOMMU has no more memory for the card.
        card.bus.host().set_pin_limit(card.pinned * 4096 + (1 << 20));
        let error = card.read(&heap, &[at], &[&a], &job, &options(1, true), &mut go).unwrap_err();
        assert!(matches!(error, LoadError::Fill(FillError::Map { .. })), "{error}");
        assert!(card.is_idle() && heap.stats().live == 0);
        card.bus.host().set_pin_limit(u64::MAX);
        // And after all that, it works.
        drop(card.read(&heap, &[at], &[&a], &job, &options(1, true), &mut go).unwrap());
        assert!(card.back(at, LEN) == bytes && card.is_idle());
    }
}
