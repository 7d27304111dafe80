//! A storm of faults in one process: loads onto software cards whose files, memory, registrations, registers and
//! doorbells fail at random. A job either puts the right bytes there or says why not, it fails only where something was
//! injected, and nothing stays behind. Alone in its process, since it counts what the process has.
//!
//! `DMALANE_STORM_SECONDS` makes it longer and `DMALANE_STORM_SEED` another one; it prints its counts as JSON.

mod script;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_addr::Access;
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_card::{CardDevice, CardUse};
use dmalane_dma::{
    AnonHeap, BufferRef, CpuBuf, Error, Heap, HeapCapabilities, HeapStats, Mapping, MemfdHeap, Mmio, PageKind, Pinned,
    Registrar, Reserved,
};
use dmalane_load::fill::FillOptions;
use dmalane_load::{DriveOptions, Input, Loaded, OpenDevice, OpenFile, Placement};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use script::{Fault, HELD, Random, Script, kib, noise};

/// Loads onto one card before it is opened anew.
const LOADS: usize = 8;
/// Timeouts of a device: longer than a busy machine takes, and that of one that loses doorbells.
const TIMEOUTS: [Duration; 2] = [Duration::from_secs(60), Duration::from_millis(40)];

/// Calls of a kind left until one fails.
struct Countdown {
    name: &'static str,
    left: AtomicI64,
}

impl Countdown {
    const fn new(name: &'static str) -> Self {
        Self { name, left: AtomicI64::new(i64::MAX) }
    }

    fn arm(&self, calls: u64) {
        self.left.store(calls as i64, Ordering::SeqCst);
    }

    fn disarm(&self) {
        self.left.store(i64::MAX, Ordering::SeqCst);
    }

    /// True for the call that fails.
    fn fires(&self) -> bool {
        let fires = self.left.fetch_sub(1, Ordering::SeqCst) == 0;
        if fires {
            injected(self.name);
        }
        fires
    }
}

/// Faults of the device and of memory.
struct Faults {
    /// A heap has no memory.
    allocate: Countdown,
    /// The pin limit is reached.
    pin: Countdown,
    /// There are no IOVAs.
    map: Countdown,
    /// The card is reset, instead of the doorbell.
    reset: Countdown,
    /// The doorbell gets lost.
    doorbell: Countdown,
    /// A register reads as ones, as those of a device that is gone.
    ones: Countdown,
    /// A register cannot be read.
    register: Countdown,
}

static FAULTS: Faults = Faults {
    allocate: Countdown::new("no memory"),
    pin: Countdown::new("pin limit"),
    map: Countdown::new("no IOVAs"),
    reset: Countdown::new("device reset"),
    doorbell: Countdown::new("doorbell lost, time-out"),
    ones: Countdown::new("register reads as ones"),
    register: Countdown::new("register cannot be read"),
};

impl Faults {
    fn all(&self) -> [&Countdown; 7] {
        [&self.allocate, &self.pin, &self.map, &self.reset, &self.doorbell, &self.ones, &self.register]
    }
}

static INJECTED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

fn injected(name: &'static str) {
    *INJECTED.lock().unwrap().entry(name).or_default() += 1;
}

fn injections() -> u64 {
    INJECTED.lock().unwrap().values().sum()
}

struct FailingHeap(Box<dyn Heap>);

impl FailingHeap {
    fn fails(&self, len: usize) -> Result<(), Error> {
        let source = || std::io::Error::from_raw_os_error(12);
        if FAULTS.allocate.fires() { Err(Error::Allocate { len, kind: "storm", source: source() }) } else { Ok(()) }
    }
}

impl Heap for FailingHeap {
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
        self.fails(len).and_then(|()| self.0.allocate(len))
    }

    fn reserve(&self, len: usize) -> Result<Reserved, Error> {
        self.fails(len).and_then(|()| self.0.reserve(len))
    }

    fn capabilities(&self) -> HeapCapabilities {
        self.0.capabilities()
    }

    fn stats(&self) -> HeapStats {
        self.0.stats()
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }
}

struct FailingBus(SoftBus);

impl Registrar for FailingBus {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        match FAULTS.pin.fires() {
            true => Err(Error::OutOfFrames { wanted: range.len() as u64, limit: 0 }),
            false => self.0.pin_range(buffer, range),
        }
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        match FAULTS.map.fires() {
            true => Err(Error::OutOfFrames { wanted: 1, limit: 0 }),
            false => self.0.map_list(pinned, access),
        }
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.0.owns(mapping)
    }
}

impl Mmio for FailingBus {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, Error> {
        match () {
            () if FAULTS.ones.fires() => Ok(u32::MAX),
            () if FAULTS.register.fires() => Err(Error::NoRegister { bar, offset, bytes: 4 }),
            () => self.0.read32(bar, offset),
        }
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), Error> {
        let channel = offset >= regs::CHANNEL_BASE;
        let doorbell = (offset.wrapping_sub(regs::CHANNEL_BASE)) % regs::CHANNEL_STRIDE == regs::CH_DOORBELL;
        match bar == BAR_REGISTERS && channel && doorbell {
            true if FAULTS.reset.fires() => self.0.write32(bar, regs::CONTROL, 1),
            true if FAULTS.doorbell.fires() => Ok(()),
            _ => self.0.write32(bar, offset, value),
        }
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.0.write_bytes(bar, offset, bytes)
    }

    fn progress(&self) -> bool {
        self.0.progress()
    }

    fn works_alone(&self) -> bool {
        self.0.works_alone()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.0.wait(timeout)
    }
}

/// A file, with its path and its bytes.
struct Source {
    path: PathBuf,
    bytes: Arc<Vec<u8>>,
}

/// Safetensors files of some tensors.
fn sources(folder: &std::path::Path) -> Vec<Source> {
    let make = |(i, lens): (usize, &[usize])| {
        let (mut entries, mut end) = (Vec::new(), 0);
        for (n, len) in lens.iter().enumerate() {
            let start = end;
            end += len;
            entries.push(format!(r#""t{n}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{start},{end}]}}"#));
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&noise(i as u64, end));
        let path = folder.join(format!("{i}.safetensors"));
        std::fs::write(&path, &bytes).unwrap();
        Source { path, bytes: Arc::new(bytes) }
    };
    let lens: [&[usize]; 4] = [&[1], &[4096, 0, 30_000], &[70_000, 5, 8192], &[200_000]];
    lens.into_iter().enumerate().map(make).collect()
}

/// Descriptors, mappings of memfds, and KiB of locked memory of this process.
fn held() -> (usize, usize, u64) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (fds, maps.lines().filter(|l| l.contains("memfd:")).count(), kib("VmLck"))
}

/// Jobs that ended well, and by an error.
#[derive(Default)]
struct Ended {
    succeeded: u64,
    failed: u64,
}

/// Opens a card, loads onto it, and closes it.
fn card(seed: u64, sources: &[Source], ended: &mut Ended) {
    let random = &mut Random(seed);
    let anonymous = random.below(2) == 0;
    let heap: Box<dyn Heap> = match anonymous {
        true => Box::new(AnonHeap::starting_at(PageKind::Base)),
        false => Box::new(MemfdHeap::starting_at(PageKind::Base)),
    };
    let heap = Arc::new(FailingHeap(heap));
    let workers = [Workers::Inline, Workers::One, Workers::PerChannel][random.below(3) as usize];
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let config = CardConfig { ddr: 8 << 20, hbm: 8 << 20, channels: 1 + random.below(3) as u32, workers };
    let bus = Arc::new(FailingBus(SoftBus::new(host.clone(), config).unwrap()));
    let how = CardUse { concurrent: workers == Workers::PerChannel, ..CardUse::default() };
    let stalls = random.below(10) == 0;
    let timeout = TIMEOUTS[usize::from(stalls)];
    let chunk = [1, 10_000, 65_536][random.below(3) as usize];
    let hash_thread = Some(random.below(2) == 0);
    let fill = FillOptions { chunk, timeout, hash_thread, ..DriveOptions::default().fill };
    let drive = DriveOptions { heap: Some(heap.clone()), fill, ..DriveOptions::default() };
    let mut device = OpenDevice::new(Box::new(CardDevice::open(bus, how).unwrap()), drive).unwrap();
    let free = device.memory().free_bytes();
    for number in 0..LOADS {
        let before = injections();
        let name = format!("seed {seed}, load {number}");
        let result = load(&mut device, random, stalls, sources, &name);
        assert_eq!(HELD.load(Ordering::SeqCst), 0, "{name}: reads in flight");
        match result {
            Ok(loaded) => {
                ended.succeeded += 1;
                device.unload(loaded).unwrap();
            }
            Err(e) => {
                ended.failed += 1;
                let reason = injections() > before || (stalls && e.contains("nothing ended for"));
                assert!(reason, "{name}: fails without a reason: {e}");
            }
        }
        assert_eq!(device.memory().free_bytes() + device.abandoned_bytes(), free, "{name}: card memory");
        if injections() > before || stalls {
            break; // a queue that has stopped refuses what comes next
        }
    }
    drop(device);
    assert_eq!((host.stats().pinned_frames, heap.stats().live), (0, 0), "seed {seed}: pages stay");
}

/// Loads some of the files onto the device, while something fails or nothing does, and compares what is there.
fn load(
    device: &mut OpenDevice,
    random: &mut Random,
    stalls: bool,
    sources: &[Source],
    name: &str,
) -> Result<Loaded, String> {
    let files: Vec<&Source> =
        (0..1 + random.below(2)).map(|_| &sources[random.below(sources.len() as u64) as usize]).collect();
    let (mut faults, before) = (vec![Vec::new(); files.len()], injections());
    match random.below(10) {
        0..=2 => {
            let file = random.below(files.len() as u64) as usize;
            let fault = match random.below(4) {
                0 => Fault::End,
                1 => Fault::Dead,
                _ => Fault::Errno([5, 61, 110, 116][random.below(4) as usize]),
            };
            faults[file].push((random.below(files[file].bytes.len() as u64), fault));
        }
        3 => FAULTS.allocate.arm(random.below(3)),
        4 => FAULTS.pin.arm(random.below(3)),
        5 => FAULTS.map.arm(random.below(3)),
        6 | 9 if stalls => FAULTS.doorbell.arm(random.below(4)),
        6 => FAULTS.reset.arm(random.below(4)),
        7 => FAULTS.ones.arm(random.below(12)),
        8 => FAULTS.register.arm(random.below(12)),
        _ => {}
    }
    let mut inputs: Vec<Input<Script>> = files
        .iter()
        .zip(&faults)
        .map(|(source, faults)| {
            let queue = Script::new(source.bytes.clone(), 1 + random.below(5) as usize, random.0, faults.clone());
            let (path, file) = (source.path.clone(), File::open(&source.path).unwrap());
            Input::new(OpenFile::new(path, file), queue)
        })
        .collect();
    let placement = [Placement::DDR, Placement::HBM][random.below(2) as usize].clone();
    let mut progress = 0;
    let result = device.load(&mut inputs, &placement, &mut |n| progress += n);
    FAULTS.all().into_iter().for_each(Countdown::disarm);
    // A file is read to its end, or until it fails.
    for (_, fault) in faults.iter().flatten().filter(|_| result.is_err()) {
        injected(match fault {
            Fault::Errno(_) => "error of a read",
            Fault::End => "file cut short",
            Fault::Dead => "file queue stops",
        });
    }
    let loaded = result.map_err(|e| e.to_string())?;
    assert_eq!(progress, files.iter().map(|f| f.bytes.len() as u64).sum::<u64>(), "{name}");
    assert!(faults.iter().all(Vec::is_empty), "{name}: a file that fails was loaded");
    for (file, source) in loaded.files.iter().zip(files) {
        for tensor in file.tensors() {
            let Some(va) = tensor.va else { continue };
            let (first, len) = (tensor.tensor.at.bits() as usize, tensor.tensor.len as usize);
            let at = device.address_space().at(va.first());
            let mut have = vec![1; len];
            match device.read(at, &mut have) {
                // A busy machine takes longer; or the queue has stopped for the fault, after all had arrived.
                Err(_) if stalls || injections() > before => continue,
                read => read.unwrap_or_else(|e| panic!("{name}: {e}")),
            }
            assert!(have == source.bytes[first..first + len], "{name}: other bytes in {}", tensor.tensor.name);
        }
    }
    Ok(loaded)
}

#[test]
fn every_job_ends_once_and_leaves_nothing() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>().expect(name));
    let seconds = Duration::from_secs(number("DMALANE_STORM_SECONDS").unwrap_or(1));
    let first = number("DMALANE_STORM_SEED").unwrap_or(1) << 32;
    let folder = tempfile::tempdir().unwrap();
    let sources = sources(folder.path());
    let (began, mut ended, mut cards, mut checks) = (Instant::now(), Ended::default(), 0, 0);
    // Things that are made once, such as the allocator's arenas and thread stacks, are made first.
    let mut before = None;
    while began.elapsed() < seconds || cards < 400 {
        card(first + cards, &sources, &mut ended);
        cards += 1;
        if cards % 200 == 0 {
            let (shared, anonymous) = (kib("RssShmem"), kib("RssAnon"));
            let (was, had, private) = before.get_or_insert_with(|| (held(), shared, anonymous));
            assert_eq!(held(), *was, "after {cards} cards: descriptors, memfd mappings, locked memory");
            assert_eq!(shared, *had, "after {cards} cards: KiB of memfds");
            assert!(anonymous < *private + (8 << 10), "after {cards} cards: {private} -> {anonymous} KiB");
            checks += 1;
        }
    }
    let faults = INJECTED.lock().unwrap().clone();
    let Ended { succeeded, failed } = ended;
    println!(
        "{{\"jobs\": {}, \"succeeded\": {succeeded}, \"failed\": {failed}, \"cards\": {cards}, \"checks\": {checks}, \
         \"faults\": {{{}}}}}",
        succeeded + failed,
        faults.iter().map(|(name, count)| format!("\"{name}\": {count}")).collect::<Vec<_>>().join(", "),
    );
    assert!(faults.len() >= 10, "{faults:?}");
}
