//! The whole path on the software card: every byte where it belongs, and nothing left behind when something fails.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane::addr::{CardAddr, DeviceVa, FileOffset, PageSize, SgTable, Span};
use dmalane::card::{CardDevice, CardUse};
use dmalane::device::{AddressSpace, Device, DeviceInfo, MemoryError, Region, SpaceError};
use dmalane::dma::{AnonHeap, Heap, MemfdHeap, PageKind, Registrar, VolatileSlice};
use dmalane::file::{Fallback, FileQueue, Mode};
use dmalane::load::fill::FillOptions;
use dmalane::load::{DriveOptions, Error, Input, Manifest, OpenDevice, Placement, Select, write_sample};
use dmalane::queue::{
    AddressPolicy, Capabilities, Completion, DeviceAddr, DeviceQueue, Limits, OpError, Operation, Queue, QueueChoice,
    Refusal, Refused, Split, StopReason, Ticket,
};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use dmalane::vm::BindRequest;
use dmalane::{FileOptions, HostModel, ModelOptions, error_chain, open_file};

const MIB: u64 = 1 << 20;

fn sample(folder: &Path, name: &str, size: u64) -> PathBuf {
    let path = folder.join(name);
    write_sample(&mut File::create(&path).unwrap(), size, 1).unwrap();
    path
}

/// How a software card is made and driven.
#[derive(Default)]
struct Config {
    card: CardConfig,
    host: HostConfig,
    drive: DriveOptions,
}

fn drive(chunk: u64) -> DriveOptions {
    let fill = FillOptions { chunk, ..DriveOptions::default().fill };
    DriveOptions { fill, ..DriveOptions::default() }
}

fn config(chunk: u64) -> Config {
    Config { drive: drive(chunk), ..Config::default() }
}

/// A software card, and what only a test may look at.
struct Soft {
    device: OpenDevice,
    bus: Arc<SoftBus>,
}

impl Soft {
    fn open(config: Config) -> Self {
        let (device, bus) = card(&config);
        Self { device: OpenDevice::new(device, config.drive).unwrap(), bus }
    }
}

fn card(config: &Config) -> (Box<dyn Device>, Arc<SoftBus>) {
    let host: SoftHost = SoftHost::new(config.host).unwrap();
    let bus = Arc::new(SoftBus::new(host, config.card).unwrap());
    let concurrent = config.card.workers == Workers::PerChannel;
    (Box::new(CardDevice::open(bus.clone(), CardUse { concurrent, ..CardUse::default() }).unwrap()), bus)
}

fn open(path: &Path) -> Input<FileQueue> {
    open_file(path, FileOptions::default()).unwrap()
}

/// Resources of a device that a failed load must release.
fn resources(soft: &mut Soft) -> (u64, usize, usize) {
    let bound = soft.device.address_space().vm().unwrap().binding_count();
    (soft.device.memory().free_bytes(), bound, soft.device.heap().stats().live)
}

/// Safetensors bytes with these tensors of type U8.
fn file_of(tensors: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for (name, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        entries.push(format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, bytes.len()));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    file
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

#[test]
fn every_setting_delivers_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 9 * MIB + 12345);
    let original = std::fs::read(&path).unwrap();
    let mut checksums = Vec::new();
    for placement in [&Placement::DDR, &Placement::HBM_HALF, &Placement::HBM] {
        for fragmentation in [0.0, 0.5, 1.0] {
            for (queues, mode, workers, chunk) in [
                (QueueChoice::default(), Mode::Auto, Workers::Inline, 2 * MIB),
                (QueueChoice::only(1), Mode::Buffered, Workers::PerChannel, MIB + 4096),
                (QueueChoice::only(0), Mode::Auto, Workers::One, 64 << 10),
            ] {
                let mut soft = Soft::open(Config {
                    card: CardConfig { workers, ..CardConfig::default() },
                    host: HostConfig { fragmentation, ..HostConfig::default() },
                    drive: DriveOptions { queues, ..drive(chunk) },
                });
                let before = resources(&mut soft);
                let mut inputs = [open_file(&path, FileOptions::for_mode(mode)).unwrap()];
                let mut progress = 0;
                let loaded = soft.device.load(&mut inputs, placement, &mut |n| progress += n).unwrap();
                assert_eq!((loaded.report.bytes, progress), (original.len() as u64, original.len() as u64));
                soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
                checksums.push(loaded.files[0].checksum);

                for (index, tensor) in loaded.files[0].model.tensors.iter().enumerate() {
                    let mut copied = Vec::new();
                    let mut take = |offset: u64, view: VolatileSlice<'_>| {
                        assert_eq!(offset, copied.len() as u64);
                        view.for_each_block(|block| copied.extend_from_slice(block));
                    };
                    soft.device.read_back(&loaded.files[0], index, &mut take).unwrap();
                    assert!(original[tensor.at.bits() as usize..][..tensor.len as usize] == copied, "{}", tensor.name);
                }

                // Host memory: nine buffers up, one down, whatever the size of the file.
                assert!(soft.device.heap().stats().peak as u64 <= 10 * chunk.next_multiple_of(4096));
                assert_eq!(soft.bus.host().stats().faults, 0);
                soft.device.unload(loaded).unwrap();
                let (free, bound, _) = resources(&mut soft);
                assert_eq!((free, bound), (before.0, before.1));
            }
        }
    }
    assert!(checksums.windows(2).all(|w| w[0] == w[1]), "one file, one checksum");
}

#[test]
fn a_wrong_byte_on_the_card_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 3 * MIB);
    let mut soft = Soft::open(config(MIB));
    let mut inputs = [open(&path)];
    let loaded = soft.device.load(&mut inputs, &Placement::HBM_HALF, &mut |_| {}).unwrap();
    let t = loaded.files[0].tensors().max_by_key(|t| t.tensor.len).unwrap();
    let (name, offset) = (t.tensor.name.clone(), t.tensor.len - 5);
    let va = t.va.unwrap().sub(offset, 1).unwrap().first();
    let place = soft.device.address_space().vm().unwrap().lookup(va).and_then(|leaf| leaf.translate(va)).unwrap();
    let mut byte = [0];
    soft.bus.memory().read(place, &mut byte).unwrap();
    soft.bus.memory().write(place, &[byte[0] ^ 1]).unwrap();
    match soft.device.verify(&loaded, &mut inputs, &mut |_| {}) {
        Err(Error::Mismatch { tensor, offset: at, .. }) => assert_eq!((tensor, at), (name, offset)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_bound_apart_and_read_only() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (sample(folder.path(), "a.safetensors", 9 * MIB), sample(folder.path(), "b.safetensors", 9 * MIB));
    let raw = write(folder.path(), "raw.bin", &bytes(12_345, 1));
    let mut soft = Soft::open(config(MIB));
    let mut inputs = [open(&a), open(&b), open(&raw)];
    let loaded = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
    let mut spans: Vec<_> = loaded.files.iter().flat_map(|f| f.tensors()).filter_map(|t| t.va).collect();
    spans.sort_by_key(|s| s.first());
    assert!(spans.windows(2).all(|w| w[1].first().bits() - w[0].last().bits() > 16384 - 4096));
    assert!(spans.iter().all(|s| s.first().bits().is_multiple_of(16384)));
    let large = loaded.report.device_leaves.iter().find(|(size, _)| size.bytes() == 2 * MIB).unwrap().1;
    assert!(large > 0, "large tensors take large leaves: {:?}", loaded.report.device_leaves);
    let leaf = soft.device.address_space().vm().unwrap().lookup(spans[0].first()).unwrap();
    assert_eq!(leaf.access.to_string(), "r--");
    // The same bytes twice have the same checksum; the blob is one tensor with its file's name.
    assert_eq!(loaded.files[0].checksum, loaded.files[1].checksum);
    assert_eq!(loaded.files[2].model.tensors[0].name, "raw.bin");
    // A second load beside the first, larger than it, reuses or replaces the staging buffers.
    let big = sample(folder.path(), "big.safetensors", 20 * MIB);
    let mut more = [open(&big)];
    let second = soft.device.load(&mut more, &Placement::HBM, &mut |_| {}).unwrap();
    soft.device.verify(&second, &mut more, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
}

#[test]
fn odd_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut soft = Soft::open(config(64 << 10));
    let many: Vec<_> = (0..5000).map(|i| (format!("t{i}"), bytes(i % 7, i as u64))).collect();
    let many: Vec<_> = many.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    for (name, bytes) in [
        ("one.bin", vec![7]),
        ("none.safetensors", file_of(&[])),
        ("empty.safetensors", file_of(&[("a", vec![]), ("b", vec![])])),
        ("tiny.safetensors", file_of(&[("a", vec![1]), ("gone", vec![]), ("b", vec![2, 3])])),
        ("many.safetensors", file_of(&many)),
        ("long.safetensors", file_of(&[("x", bytes(200_000, 3)), ("y", vec![9]), ("z", bytes(70_000, 4))])),
    ] {
        let path = write(folder.path(), name, &bytes);
        let mut inputs = [open(&path)];
        let loaded = soft.device.load(&mut inputs, &Placement::HBM, &mut |_| {}).unwrap();
        assert_eq!(loaded.report.bytes, bytes.len() as u64, "{name}");
        soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        soft.device.unload(loaded).unwrap();
    }
}

#[test]
fn bad_files_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut soft = Soft::open(config(MIB));
    let before = resources(&mut soft);
    let good = sample(folder.path(), "good.safetensors", MIB);
    let mut trailing = file_of(&[("a", vec![1; 8])]);
    trailing.push(0);
    let mut short = file_of(&[("a", vec![1; 8])]);
    short.pop();
    for (name, bytes, expect) in [
        ("empty.safetensors", vec![], "the file is empty"),
        ("empty.bin", vec![], "the file is empty"),
        ("one.safetensors", vec![1], "has 1 bytes"),
        ("beyond.safetensors", 100u64.to_le_bytes().to_vec(), "says 100 bytes, but only 0"),
        ("huge.safetensors", (1u64 << 63).to_le_bytes().to_vec(), "says 9223372036854775808 bytes"),
        ("trailing.safetensors", trailing, "1 bytes follow the last tensor"),
        ("short.safetensors", short, "tensor \"a\" ends at"),
    ] {
        let path = write(folder.path(), name, &bytes);
        // The good file in front has been placed when the bad one is found.
        let mut inputs = [open(&good), open(&path)];
        let error = error_chain(&soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap_err());
        assert!(error.contains(expect) && error.contains(name), "{error}");
        assert_eq!(resources(&mut soft), before, "{name}");
    }
}

#[test]
fn a_card_that_is_too_small() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 20 * MIB);
    let card = CardConfig { ddr: 8 * MIB, hbm: 8 * MIB, ..CardConfig::default() };
    let mut soft = Soft::open(Config { card, ..config(MIB) });
    let before = resources(&mut soft);
    for placement in [&Placement::DDR, &Placement::HBM_HALF, &Placement::HBM] {
        let error = soft.device.load(&mut [open(&path)], placement, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::DeviceMemory { source: MemoryError::Full { .. }, .. }), "{error}");
        assert_eq!(resources(&mut soft), before);
    }
}

/// A file's queue that changes how operations end.
struct Meddling<F> {
    inner: FileQueue,
    count: usize,
    meddle: F,
}

impl<F: FnMut(usize) -> Option<OpError> + Send> Queue for Meddling<F> {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        self.inner.submit(operation)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        let from = done.len();
        let n = self.inner.poll(done);
        self.spoil(&mut done[from..]);
        n
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        let from = done.len();
        let n = self.inner.wait(done, timeout);
        self.spoil(&mut done[from..]);
        n
    }
}

impl<F: FnMut(usize) -> Option<OpError>> Meddling<F> {
    fn spoil(&mut self, done: &mut [Completion<FileOffset>]) {
        for c in done {
            self.count += 1;
            if let Some(error) = (self.meddle)(self.count) {
                c.result = Err(error);
            }
        }
    }
}

fn meddling<F: FnMut(usize) -> Option<OpError> + Send>(path: &Path, meddle: F) -> [Input<Meddling<F>>; 1] {
    let Input { source, queue, .. } = open(path);
    [Input::new(source, Meddling { inner: queue, count: 0, meddle })]
}

#[test]
fn a_file_that_is_truncated_while_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 20 * MIB);
    let mut soft = Soft::open(config(MIB));
    let before = resources(&mut soft);
    let file = File::options().write(true).open(&path).unwrap();
    let mut inputs = meddling(&path, |n| {
        if n == 5 {
            file.set_len(12 * MIB + 17).unwrap();
        }
        None
    });
    let error = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap_err();
    match &error {
        Error::Read { at, tensor: Some(_), source: OpError::EndOfFile { .. }, .. } => {
            assert_eq!(at.bits(), 12 * MIB + 17, "{error}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(resources(&mut soft), before, "staging buffers are given up after a failure");
}

#[test]
fn a_file_that_grows_while_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    let mut soft = Soft::open(config(MIB));
    let mut file = File::options().append(true).open(&path).unwrap();
    let mut inputs = meddling(&path, |n| {
        if n == 2 {
            file.write_all(b"more").unwrap();
        }
        None
    });
    let error = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Changed { now, .. } if now == 5 * MIB + 4), "{error}");
}

#[test]
fn a_disk_error_anywhere_names_the_place_and_leaks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 10 * MIB);
    let mut soft = Soft::open(config(MIB));
    let (before, rings) = (resources(&mut soft), soft.bus.host().stats().pinned_frames);
    for fail in 1..=10 {
        let at = FileOffset::new(fail as u64 * 1000 + 9 * MIB);
        let mut inputs = meddling(&path, move |n| (n == fail).then_some(OpError::Io { at, errno: 5 }));
        let error = error_chain(&soft.device.load(&mut inputs, &Placement::HBM, &mut |_| {}).unwrap_err());
        assert!(error.contains("model.safetensors") && error.contains("in tensor"), "{error}");
        assert!(error.contains(&format!("{at}")) && error.contains("Input/output error"), "{error}");
        assert_eq!(resources(&mut soft), before, "read {fail}");
        assert_eq!(soft.bus.host().stats().pinned_frames, rings, "nothing stays pinned but the rings");
    }
    // The device still works.
    let mut inputs = [open(&path)];
    let loaded = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
}

/// The fault of a [`Faulty`] device.
#[derive(Default)]
struct Faults {
    /// The number of completions that it keeps for itself,
    keeps: usize,
    kept: Vec<Completion>,
    /// and gives them up when it is stopped, or at once.
    lets_go: bool,
    releases: bool,
    stopped: Option<StopReason>,
    /// It refuses once.
    refuses: bool,
    /// How long one completion takes; they come while it is waited for, one at a time.
    takes: Duration,
    late: VecDeque<Completion>,
    /// The device does not forget translations once.
    remembers: bool,
    /// The longest range of addresses that it gives, how many there are, and whether its pages are large.
    longest: Option<u64>,
    ranges: Option<usize>,
    large_pages: bool,
}

/// A card with a fault of its own.
struct Faulty {
    inner: Box<dyn Device>,
    faults: Arc<Mutex<Faults>>,
}

impl Device for Faulty {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        self.inner.registrar()
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        let inner = Split::new(self.inner.take_queues(), Box::new(AddressPolicy::new(Vec::new())));
        vec![Box::new(FaultyQueue { inner, faults: self.faults.clone() })]
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        self
    }
}

impl AddressSpace for Faulty {
    fn kind(&self) -> dmalane::device::AddressSpaceKind {
        dmalane::device::AddressSpaceKind::Driver { name: "a test" }
    }

    fn page(&self) -> PageSize {
        if self.faults.lock().unwrap().large_pages { PageSize::SIZE_64K } else { PageSize::SIZE_4K }
    }

    fn longest(&self) -> u64 {
        self.faults.lock().unwrap().longest.unwrap_or(u64::MAX)
    }

    fn reserve(&mut self, memory: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        if let Some(left) = &mut self.faults.lock().unwrap().ranges {
            *left = left.checked_sub(1).ok_or(SpaceError::Exhausted(len))?;
        }
        self.inner.address_space().reserve(memory, len)
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        self.inner.address_space().apply(requests)
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        match std::mem::take(&mut self.faults.lock().unwrap().remembers) {
            true => Err(SpaceError::Invalidate("the card is gone".into())),
            false => self.inner.address_space().release(range),
        }
    }

    fn at(&self, va: DeviceVa) -> DeviceAddr {
        DeviceAddr::Va(va)
    }
}

struct FaultyQueue {
    inner: Split<Box<DeviceQueue>>,
    faults: Arc<Mutex<Faults>>,
}

impl Queue for FaultyQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        let faults = self.faults.lock().unwrap();
        self.inner.in_flight() + faults.kept.len() + faults.late.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if std::mem::take(&mut self.faults.lock().unwrap().refuses) {
            return Err(Refused { operation, reason: Refusal::Stopped(StopReason::Requested("for once".into())) });
        }
        self.inner.submit(operation)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let from = done.len();
        self.inner.poll(done);
        let faults = &mut *self.faults.lock().unwrap();
        let keep = faults.keeps.min(done.len() - from);
        faults.keeps -= keep;
        faults.kept.extend(done.drain(from..from + keep));
        if faults.takes > Duration::ZERO {
            faults.late.extend(done.drain(from..));
        }
        if faults.lets_go && faults.stopped.is_some() || std::mem::take(&mut faults.releases) {
            done.append(&mut faults.kept);
        }
        done.len() - from
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let n = self.poll(done);
        let (late, takes) = {
            let mut faults = self.faults.lock().unwrap();
            (faults.late.pop_front(), faults.takes)
        };
        if let Some(late) = late {
            std::thread::sleep(takes);
            done.push(late);
            return n + 1;
        }
        if n == 0 {
            std::thread::sleep(timeout.min(Duration::from_millis(1)));
        }
        n
    }

    fn stop(&mut self, reason: StopReason) {
        self.faults.lock().unwrap().stopped = Some(reason);
    }
}

/// A card with these faults and the handle to change them, which is waited for 50 ms.
fn faulty(chunk: u64, faults: Faults) -> (OpenDevice, Arc<Mutex<Faults>>) {
    let faults = Arc::new(Mutex::new(faults));
    let (inner, _bus) = card(&Config::default());
    let device = Box::new(Faulty { inner, faults: faults.clone() });
    let mut drive = drive(chunk);
    drive.fill.timeout = Duration::from_millis(50);
    (OpenDevice::new(device, drive).unwrap(), faults)
}

#[test]
fn memory_that_a_late_transfer_may_hit_is_not_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    let (mut device, _faults) = faulty(MIB, Faults { keeps: 1, ..Faults::default() });
    let free = device.memory().free_bytes();
    // The device keeps one transfer, and the disk fails meanwhile.
    let mut inputs = meddling(&path, |n| (n == 4).then_some(OpError::Io { at: FileOffset::new(0), errno: 5 }));
    assert!(device.load(&mut inputs, &Placement::DDR, &mut |_| {}).is_err());
    assert!(device.abandoned_bytes() > 4 * MIB);
    assert!(device.memory().free_bytes() <= free - device.abandoned_bytes());
}

#[test]
fn a_device_that_ends_nothing_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    for lets_go in [false, true] {
        let (mut device, faults) = faulty(MIB, Faults { keeps: 1, lets_go, ..Faults::default() });
        let error = error_chain(&device.load(&mut [open(&path)], &Placement::DDR, &mut |_| {}).unwrap_err());
        assert!(error.contains("nothing ended for 50ms"), "{error}");
        assert_eq!(faults.lock().unwrap().stopped, Some(StopReason::Timeout(Duration::from_millis(50))));
        assert_eq!(device.abandoned_bytes() > 0, !lets_go, "memory that nothing writes to any more is used again");
    }
}

#[test]
fn a_device_that_is_slow_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 10 * MIB);
    // All that is read fits into one buffer, so for long nothing but transfers end, each well within the timeout of the
    // device.
    let (mut device, faults) = faulty(16 * MIB, Faults { takes: Duration::from_millis(20), ..Faults::default() });
    let mut inputs = [open(&path)];
    let begun = Instant::now();
    let loaded = device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    let transfers = loaded.report.transfers;
    assert!(transfers > 5 && begun.elapsed() > Duration::from_millis(100), "{transfers} transfers");
    faults.lock().unwrap().takes = Duration::ZERO;
    device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
}

#[test]
fn a_file_that_is_longer_than_the_longest_range_gets_several() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 20 * MIB);
    for large_pages in [false, true] {
        let faults = Faults { longest: Some(14 * MIB), large_pages, ..Faults::default() };
        let (mut device, faults) = faulty(MIB, faults);
        let free = device.memory().free_bytes();
        let mut inputs = [open(&path)];
        let loaded = device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
        device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        let file = &loaded.files[0];
        assert_eq!(file.ranges.len(), 2, "large pages: {large_pages}");
        for va in file.tensors().filter_map(|tensor| tensor.va) {
            assert!(file.ranges.iter().any(|range| range.covers(&va)), "each tensor lies in one of them");
        }
        device.unload(loaded).unwrap();
        assert_eq!(device.memory().free_bytes(), free);
        // The second is refused: nothing is left of the first.
        faults.lock().unwrap().ranges = Some(1);
        let error = device.load(&mut [open(&path)], &Placement::DDR, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::Bind { source: SpaceError::Exhausted(_), .. }), "{error}");
        assert_eq!(device.memory().free_bytes(), free);
        faults.lock().unwrap().ranges = Some(2);
        let loaded = device.load(&mut [open(&path)], &Placement::DDR, &mut |_| {}).unwrap();
        device.unload(loaded).unwrap();
    }
}

#[test]
fn one_file_that_cannot_be_unloaded_keeps_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..3).map(|i| sample(folder.path(), &format!("{i}.safetensors"), MIB)).collect();
    let (mut device, _faults) = faulty(MIB, Faults { remembers: true, ..Faults::default() });
    let free = device.memory().free_bytes();
    let mut inputs: Vec<_> = paths.iter().map(|p| open(p)).collect();
    let loaded = device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    let taken = free - device.memory().free_bytes();
    let error = error_chain(&device.unload(loaded).unwrap_err());
    assert!(error.contains("the card is gone"), "{error}");
    assert_eq!(free - device.memory().free_bytes(), taken / 3);
}

#[test]
fn reading_back_recovers_from_a_refusal_and_from_a_transfer_that_never_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 2 * MIB);
    let (mut device, faults) = faulty(MIB, Faults::default());
    let mut inputs = [open(&path)];
    let loaded = device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    faults.lock().unwrap().refuses = true;
    assert!(matches!(device.verify(&loaded, &mut inputs, &mut |_| {}), Err(Error::Transfer { .. })));
    device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
    faults.lock().unwrap().keeps = 1;
    assert!(matches!(device.verify(&loaded, &mut inputs, &mut |_| {}), Err(Error::Transfer { .. })));
    faults.lock().unwrap().releases = true;
    device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
}

#[test]
fn what_was_not_loaded_here_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", MIB);
    let (mut a, mut b) = (Soft::open(config(MIB)), Soft::open(config(MIB)));
    let mut inputs = [open(&path)];
    let loaded = a.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    let mut no_inputs: [Input<FileQueue>; 0] = [];
    assert!(matches!(a.device.verify(&loaded, &mut no_inputs, &mut |_| {}), Err(Error::OtherInputs { .. })));
    assert!(matches!(b.device.verify(&loaded, &mut inputs, &mut |_| {}), Err(Error::OtherDevice { .. })));
    assert!(matches!(b.device.unload(loaded), Err(Error::OtherDevice { .. })));
}

#[test]
fn a_hundred_thousand_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..100_000).map(|i| format!("t{i}")).collect();
    let tensors: Vec<_> = names.iter().enumerate().map(|(i, n)| (n.as_str(), vec![i as u8; i % 2])).collect();
    let path = write(folder.path(), "many.safetensors", &file_of(&tensors));
    let mut soft = Soft::open(config(MIB));
    let mut inputs = [open(&path)];
    let loaded = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
    assert_eq!(loaded.files[0].tensors().filter(|t| t.va.is_some()).count(), 50_000);
}

#[test]
fn any_heap_will_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 6 * MIB);
    let heaps: [Arc<dyn Heap>; 4] = [
        Arc::new(AnonHeap::starting_at(PageKind::Base)),
        Arc::new(AnonHeap::starting_at(PageKind::Transparent)),
        Arc::new(MemfdHeap::new()),
        Arc::new(MemfdHeap::starting_at(PageKind::Base)),
    ];
    for heap in heaps {
        let drive = DriveOptions { heap: Some(heap), ..drive(2 * MIB) };
        let mut soft = Soft::open(Config { drive, ..Config::default() });
        let mut inputs = [open(&path)];
        let loaded = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
        soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        let rates = soft.device.reference_rates(&mut inputs, &Manifest::default()).unwrap();
        assert!(rates.read > 0.0 && rates.copy > 0.0 && rates.first_touch > 0.0);
        soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
    }
}

#[test]
fn the_reference_of_a_part_reads_what_the_load_reads() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 6 * MIB);
    for checksum in [true, false] {
        let mut drive = drive(2 * MIB);
        drive.fill.checksum = checksum;
        let mut soft = Soft::open(Config { drive, ..Config::default() });
        let first = open(&path).source.model().unwrap().tensors[0].name.clone();
        let select: Select = Arc::new(move |name| name == first);
        let model = HostModel::open([&path], ModelOptions { select: Some(select), ..ModelOptions::default() }).unwrap();
        let file = model.files()[0].open().unwrap();
        let mut inputs = [file.into_input(FileOptions::default()).unwrap()];
        let read = |inputs: &[Input<FileQueue>]| -> u64 {
            let moved = inputs[0].more.iter().chain([&inputs[0].queue]).map(FileQueue::moved);
            moved.map(|moved| moved.buffered + moved.direct).sum()
        };
        let loaded = soft.device.load(&mut inputs, &Placement::DDR, &mut |_| {}).unwrap();
        let by_load = read(&inputs);
        assert_eq!(by_load < 5 * MIB, !checksum, "hashing takes all bytes: {by_load}");
        soft.device.reference_rates(&mut inputs, &Manifest::default()).unwrap();
        assert_eq!(read(&inputs), 2 * by_load);
        soft.device.unload(loaded).unwrap();
    }
}

#[test]
fn cached_files_have_several_workers_and_need_not_be_hashed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = sample(folder.path(), "model.safetensors", 40 << 20);
    let want = twox_hash::XxHash3_64::oneshot(&std::fs::read(&path).unwrap());
    let processors = std::thread::available_parallelism().unwrap().get();
    for checksum in [true, false] {
        let mut drive = drive(4 * MIB);
        drive.fill.checksum = checksum;
        let mut soft = Soft::open(Config { drive, ..Config::default() });
        let mut inputs = [dmalane::open_file(&path, FileOptions::default()).unwrap()];
        if inputs[0].more.is_empty() && processors > 1 {
            return println!("SKIPPED: not cached, or nobody says: {}", inputs[0].queue.how());
        }
        // 8 MiB for each.
        assert_eq!(inputs[0].more.len() + 1, processors.min(5));
        let loaded = soft.device.load(&mut inputs, &Placement::Default, &mut |_| {}).unwrap();
        assert_eq!(loaded.files[0].checksum, checksum.then_some(want));
        let read = |inputs: &[Input<FileQueue>]| -> u64 {
            inputs[0].more.iter().chain([&inputs[0].queue]).map(|queue| queue.moved().buffered).sum()
        };
        assert_eq!(read(&inputs), loaded.report.bytes);
        soft.device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        assert_eq!(read(&inputs), 2 * loaded.report.bytes, "verified as it was loaded");
        let hashed = loaded.report.stages.iter().any(|s| s.stage == dmalane::load::Stage::Checksum && s.bytes > 0);
        assert_eq!(hashed, checksum);
    }
}

#[test]
fn a_cached_file_is_read_from_the_cache() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("model.bin");
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let open = || dmalane::open_file(&path, FileOptions::default()).unwrap().queue.how().clone();
    let direct = dmalane::file::FileQueue::open(&path, FileOptions::default()).unwrap().how().direct;
    let written = open();
    file.sync_all().unwrap();
    let cached = open();
    if !direct || dmalane::file::residency(&file, 0, 8 << 20).is_err() {
        return println!("SKIPPED: no direct I/O here, or nobody says what is cached");
    }
    for how in [written, cached] {
        assert!(!how.direct && how.reasons.iter().any(|r| matches!(r, Fallback::Cached(_))), "{how}");
    }
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    match dmalane::file::residency(&file, 0, 8 << 20).unwrap().cached {
        0 => assert!(open().direct, "what is not cached is read from the disk"),
        _ => println!("SKIPPED: the file system keeps its pages"),
    }
    let wanted = FileOptions::for_mode(dmalane::file::Mode::Direct);
    std::fs::read(&path).unwrap();
    assert!(dmalane::open_file(&path, wanted).unwrap().queue.how().direct, "direct I/O was asked for");
    // Short ones are read through the cache, too, cached or not.
    file.set_len(5000).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let how = open();
    let short = |r: &Fallback| matches!(r, Fallback::Few(5000) | Fallback::Cached(_));
    assert!(!how.direct && how.reasons.iter().any(short), "{how}");
}
