//! The engine against the obvious loop: one `pread` of a whole file, and one blocking write for each tensor.

mod script;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dmalane_addr::{CardAddr, FileOffset};
use dmalane_card::{CardDevice, CardUse};
use dmalane_device::{Device, RamDevice};
use dmalane_dma::{AnonHeap, PageKind};
use dmalane_load::fill::{BufferMemory, Event, FillOptions, Job, Sink, Staging, ToDevice, fill};
use dmalane_load::{DriveOptions, Input, OpenDevice, OpenFile, Placement, Stage};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, Limits, Operation, Queue, QueueChoice, Refusal, Refused, Ticket,
};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use script::{Places, Random, Script, noise};
use twox_hash::XxHash3_64;

/// A safetensors file with tensors of random sizes, some of them empty.
fn model(random: &mut Random) -> Vec<u8> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for i in 0..1 + random.below(12) {
        let start = end;
        end += match random.below(5) {
            0 => 0,
            1 => random.below(64),
            2 => 4096 * (1 + random.below(8)),
            3 => random.below(30_000),
            _ => random.below(300_000),
        };
        let len = end - start;
        entries.push(format!(r#""t{i}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{start},{end}]}}"#));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&noise(random.0, end as usize));
    file
}

/// A device of a random kind, with one or several queues, and memory in one or several segments.
fn device(random: &mut Random) -> Box<dyn Device> {
    if random.below(4) == 0 {
        return Box::new(RamDevice::new(64 << 20).unwrap());
    }
    let workers = [Workers::Inline, Workers::One, Workers::PerChannel][random.below(3) as usize];
    let fragmentation = random.below(11) as f64 / 10.0;
    let host: SoftHost = SoftHost::new(HostConfig { fragmentation, ..HostConfig::default() }).unwrap();
    let channels = 1 + random.below(3) as u32;
    let card = CardConfig { ddr: 32 << 20, hbm: 32 << 20, channels, workers };
    let bus: SoftBus = SoftBus::new(host, card).unwrap();
    let bus = Arc::new(bus);
    let concurrent = workers == Workers::PerChannel;
    Box::new(CardDevice::open(bus, CardUse { concurrent, ..CardUse::default() }).unwrap())
}

/// How a device of this name is driven, and where files go on it.
fn settings(random: &mut Random, device: &dyn Device) -> (DriveOptions, Placement) {
    let placement = match device.regions().len() {
        1 => Placement::Default,
        _ => [Placement::DDR, Placement::HBM, Placement::HBM_HALF][random.below(3) as usize].clone(),
    };
    let queues = if random.below(2) == 0 { QueueChoice::default() } else { QueueChoice::only(0) };
    let chunk = [1, 10_000, 65_536, 100_000, 1 << 20, 16 << 20][random.below(6) as usize];
    let hash_thread = [None, Some(false), Some(true)][random.below(3) as usize];
    let fill = FillOptions { chunk, hash_thread, ..DriveOptions::default().fill };
    (DriveOptions { queues, fill, ..DriveOptions::default() }, placement)
}

fn pread(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn loads_are_what_the_obvious_loop_does() {
    let folder = tempfile::tempdir().unwrap();
    let mut bound = 0;
    for seed in 0..120 {
        let random = &mut Random(seed);
        let files = 1 + random.below(3);
        let mut inputs = Vec::new();
        for i in 0..files {
            let path = folder.path().join(format!("{i}.safetensors"));
            let bytes = model(random);
            File::create(&path).unwrap().write_all(&bytes).unwrap();
            let file = File::open(&path).unwrap();
            let capacity = 1 + random.below(6) as usize;
            let queue = Script::new(Arc::new(bytes), capacity, random.0, Vec::new());
            inputs.push(Input::new(OpenFile::new(path, file), queue));
        }
        let inner = device(random);
        let (drive, placement) = settings(random, &*inner);
        let mut device = OpenDevice::new(inner, drive).unwrap();
        let mut progress = 0;
        let loaded = device.load(&mut inputs, &placement, &mut |n| progress += n).unwrap();

        let mut plain = OpenDevice::new(Box::new(RamDevice::new(64 << 20).unwrap()), DriveOptions::default()).unwrap();
        let mut total = 0;
        for (file, input) in loaded.files.iter().zip(&inputs) {
            let bytes = pread(&input.source.file().unwrap());
            total += bytes.len() as u64;
            assert_eq!(file.checksum, Some(XxHash3_64::oneshot(&bytes)), "seed {seed}");
            for loaded in file.tensors() {
                let (at, len) = (loaded.tensor.at.bits() as usize, loaded.tensor.len as usize);
                assert_eq!(loaded.va.is_some(), len > 0);
                let Some(va) = loaded.va else { continue };
                let place = plain.memory_mut().reserve(len as u64).unwrap().first();
                plain.write(place, &bytes[at..at + len]).unwrap();
                let (mut want, mut have) = (vec![0; len], vec![1; len]);
                plain.read(place, &mut want).unwrap();
                let at = device.address_space().at(va.first());
                device.read(at, &mut have).unwrap();
                assert!(have == want, "seed {seed}: {}", loaded.tensor.name);
                bound += 1;
            }
        }
        assert_eq!((loaded.report.bytes, progress), (total, total));
        device.unload(loaded).unwrap();
    }
    assert!(bound > 500, "{bound} tensors");
}

#[test]
fn reads_are_what_the_obvious_loop_does_with_either_sink() {
    for seed in 0..160 {
        let random = &mut Random(seed);
        let sources: Vec<_> =
            (0..1 + random.below(3)).map(|i| noise(seed + i, random.below(200_000) as usize)).collect();
        let capacity = 1 + random.below(6) as usize;
        let worker = |n: u64| sources.iter().map(move |s| Script::new(s.clone(), capacity, seed ^ n, Vec::new()));
        let mut workers: Vec<Vec<Script>> = (0..1 + random.below(3)).map(|n| worker(n).collect()).collect();
        let job = Job::whole(&sources.iter().map(|s| s.len() as u64).collect::<Vec<_>>());
        let options = FillOptions {
            chunk: random.below(100_000),
            block: random.below(40_000),
            checksum: random.below(2) == 0,
            hash_thread: Some(random.below(2) == 0),
            ..FillOptions::default()
        };
        let heap = AnonHeap::starting_at(PageKind::Base);
        let inner = device(random);
        let mut device = OpenDevice::new(inner, DriveOptions::default()).unwrap();
        let place = |s: &Arc<Vec<u8>>| device.memory_mut().reserve((s.len() as u64).max(1)).unwrap().first();
        let to = Places(sources.iter().map(place).map(DeviceAddr::Card).collect());
        let (registrar, on_device) = (device.registrar().clone(), random.below(2) == 0);
        let (polled, processors) = (device.info().polled, device.info().processors);
        let mut go = |_| ControlFlow::Continue(());
        let mut staging = Staging::new(Arc::new(AnonHeap::new()), registrar, 1 + random.below(100_000));
        let sink = match on_device {
            true => Sink::Staging(
                &mut staging,
                Some(ToDevice { queue: device.queue_mut(), polled, processors, targets: &to }),
            ),
            false => Sink::Memory(BufferMemory::of(&heap)),
        };
        let filled = fill(sink, &job, &mut workers, &options, &mut go).unwrap();
        assert_eq!(filled.buffers.len(), if on_device { 0 } else { sources.len() });
        for (source, buffer) in sources.iter().zip(&filled.buffers) {
            let mut have = vec![1; source.len()];
            buffer.as_volatile_slice().read(&mut have);
            assert!(have == **source, "seed {seed}: in memory");
            assert_eq!(buffer.checksum(), options.checksum.then(|| XxHash3_64::oneshot(source)));
        }
        for (source, to) in sources.iter().zip(to.0).filter(|(source, _)| on_device && !source.is_empty()) {
            let mut have = vec![1; source.len()];
            device.read(to, &mut have).unwrap();
            assert!(have == **source, "seed {seed}: on the device");
        }
    }
}

/// The track that hashed, of a job that goes to a device through staging buffers of `buffer` bytes.
fn hashed_by(len: usize, buffer: u64, processors: usize, hash_thread: Option<bool>) -> String {
    let source = Arc::new(vec![7; len]);
    let mut workers = [vec![Script::new(source.clone(), 3, 1, Vec::new())]];
    let mut device = OpenDevice::new(Box::new(RamDevice::new(64 << 20).unwrap()), DriveOptions::default()).unwrap();
    let targets = &Places(vec![DeviceAddr::Card(CardAddr::new(0))]);
    let mut staging = Staging::new(Arc::new(AnonHeap::new()), device.registrar().clone(), buffer);
    let to = ToDevice { queue: device.queue_mut(), polled: true, processors, targets };
    let options = FillOptions { checksum: true, hash_thread, timeline: true, ..FillOptions::default() };
    let (sink, job) = (Sink::Staging(&mut staging, Some(to)), Job::whole(&[len as u64]));
    let filled = fill(sink, &job, &mut workers, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let timeline = filled.report.timeline.unwrap();
    let hashes = |track: &&dmalane_load::Track| track.work.iter().any(|span| span.stage == Stage::Checksum);
    timeline.tracks.iter().find(hashes).unwrap().name.clone()
}

#[test]
fn a_thread_hashes_for_a_device_where_a_processor_is_spare() {
    let (large, block, all) = (32 << 20, 2 << 20, std::thread::available_parallelism().unwrap().get());
    assert_eq!(hashed_by(100_000, block, 0, Some(true)), "hashing");
    assert_eq!(hashed_by(large, block, 0, Some(false)), "worker 0");
    if all > 1 {
        assert_eq!(hashed_by(large, block, 0, None), "hashing");
    }
    assert_eq!(hashed_by(large, block, all - 1, None), "worker 0", "the device needs the others");
    assert_eq!(hashed_by(large, 64 << 10, 0, None), "worker 0", "pieces that are sooner hashed than handed over");
    assert_eq!(hashed_by(1 << 20, block, 0, None), "worker 0");
}

#[test]
fn a_thread_hashes_what_a_worker_does_not_get_to() {
    let len = 48 << 20;
    let (source, job) = (Arc::new(vec![7; len]), Job::whole(&[len as u64]));
    let one = std::thread::available_parallelism().unwrap().get() == 1;
    let expected = &["hashing", "worker 0"][usize::from(one)..];
    let mut by = BTreeSet::new();
    // Longer on machines where other threads have to wait.
    for pause in [1, 10, 100, 1000, 10_000, 30_000].map(Duration::from_millis) {
        let mut workers = [vec![Script::new(source.clone(), 3, 1, Vec::new())]];
        let heap = AnonHeap::new();
        let options = FillOptions { checksum: true, timeline: true, ..FillOptions::default() };
        let held_up =
            |event: &Event| matches!(event, Event::Arrived { offset, len: n, .. } if offset + n == len as u64);
        let mut watch = |event: Event| {
            std::thread::sleep(if held_up(&event) { pause } else { Duration::ZERO });
            ControlFlow::Continue(())
        };
        let filled = fill(Sink::Memory(BufferMemory::of(&heap)), &job, &mut workers, &options, &mut watch).unwrap();
        assert_eq!(filled.buffers[0].checksum(), Some(XxHash3_64::oneshot(&source)));
        let tracks = filled.report.timeline.unwrap().tracks;
        let hashes = |track: &dmalane_load::Track| track.work.iter().any(|span| span.stage == Stage::Checksum);
        by.extend(tracks.into_iter().filter(hashes).map(|track| track.name));
        if by.len() == expected.len() {
            break;
        }
    }
    assert!(by.iter().map(String::as_str).eq(expected.iter().copied()), "{by:?}");
}

#[test]
fn a_place_that_does_not_exist_is_an_error() {
    let source = noise(1, 100_000);
    let mut workers = [vec![Script::new(source, 3, 1, Vec::new())]];
    let mut device = OpenDevice::new(Box::new(RamDevice::new(1 << 20).unwrap()), DriveOptions::default()).unwrap();
    let targets = &Places(vec![DeviceAddr::Card(CardAddr::new((1 << 20) - 5000))]);
    let mut staging = Staging::new(Arc::new(AnonHeap::new()), device.registrar().clone(), 2 << 20);
    let to = ToDevice { queue: device.queue_mut(), polled: true, processors: 0, targets };
    let (sink, job) = (Sink::Staging(&mut staging, Some(to)), Job::whole(&[100_000]));
    let failed = fill(sink, &job, &mut workers, &FillOptions::default(), &mut |_| ControlFlow::Continue(()));
    assert!(failed.unwrap_err().to_string().contains("on its way to the device"));
}

/// A disk that ends all of its reads at the same time, and says when it had fewer than it takes.
struct Bursts {
    waiting: Vec<(Ticket, Operation<FileOffset>)>,
    submitted: u64,
    len: u64,
    /// Polls since the last reads ended.
    polls: u32,
    starved: Arc<AtomicUsize>,
}

const AT_ONCE: usize = 4;

impl Queue for Bursts {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        Limits { capacity: AT_ONCE, max_len: u64::MAX, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        if self.waiting.len() == AT_ONCE {
            return Err(Refused { operation, reason: Refusal::Full });
        }
        let ticket = Ticket::new(self.submitted);
        self.submitted += operation.bytes();
        self.waiting.push((ticket, operation));
        Ok(ticket)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, _: &mut Vec<Completion<FileOffset>>) -> usize {
        self.polls += 1;
        if self.polls == 2 && self.submitted < self.len && self.waiting.len() < AT_ONCE {
            self.starved.fetch_add(1, Ordering::Relaxed);
        }
        0
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, _: Duration) -> usize {
        let ended = |(ticket, operation): (Ticket, Operation<FileOffset>)| {
            let bytes = operation.bytes();
            Completion { ticket, operation, result: Ok(()), bytes }
        };
        self.polls = 0;
        let before = done.len();
        done.extend(self.waiting.drain(..).map(ended));
        done.len() - before
    }
}

#[test]
fn a_disk_that_ends_its_reads_in_bursts_is_full_again_at_once() {
    let (len, starved) = (40 << 20, Arc::new(AtomicUsize::new(0)));
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    let queue = Bursts { waiting: Vec::new(), submitted: 0, len, polls: 0, starved: starved.clone() };
    let (path, file) = (file.path().to_owned(), file.reopen().unwrap());
    let mut inputs = [Input::new(OpenFile::new(path, file), queue)];
    // One thread, so that nothing is late where others run.
    let mut drive = DriveOptions::default();
    drive.fill.hash_thread = Some(false);
    let mut device = OpenDevice::new(Box::new(RamDevice::new(64 << 20).unwrap()), drive).unwrap();
    let loaded = device.load(&mut inputs, &Placement::Default, &mut |_| {}).unwrap();
    assert!(loaded.files[0].checksum.is_some() && loaded.report.bytes == len);
    assert_eq!(starved.load(Ordering::Relaxed), 0, "times that it had less than {AT_ONCE} reads");
}
