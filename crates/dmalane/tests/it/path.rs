//! The whole path on the software card: every byte where it belongs, and nothing left behind when something fails.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane::addr::FileOffset;
use dmalane::card::CardTables;
use dmalane::dma::{AnonHeap, Heap, MemfdHeap, PageKind};
use dmalane::file::{FileQueue, Mode};
use dmalane::iopt::X86_64_4Level;
use dmalane::load::{Device, DeviceParts, Error, Input, Placement, write_sample};
use dmalane::queue::QueueChoice;
use dmalane::queue::{Abilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, Refusal, Refused, Ticket};
use dmalane::sim::{CardConfig, HostConfig, SoftBus};
use dmalane::{FileOptions, SoftChannel, SoftConfig, SoftDevice, SoftParts, open_file};

const MIB: u64 = 1 << 20;

fn sample(folder: &Path, name: &str, size: u64) -> PathBuf {
    let path = folder.join(name);
    write_sample(&mut File::create(&path).unwrap(), size, 1).unwrap();
    path
}

fn config(gather: u64) -> SoftConfig {
    SoftConfig { gather, ..SoftConfig::default() }
}

fn open(path: &Path) -> Input<FileQueue> {
    open_file(path, FileOptions::default()).unwrap()
}

/// What a device has that must come back when a load fails.
fn resources(soft: &SoftDevice) -> (u64, usize, usize) {
    let bound = soft.device.vm().bindings().count();
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
    let path = sample(folder.path(), "model.safetensors", 23 * MIB + 12345);
    let original = std::fs::read(&path).unwrap();
    let mut checksums = Vec::new();
    for placement in [Placement::Ddr, Placement::HbmHalf, Placement::Hbm] {
        for fragmentation in [0.0, 0.5, 1.0] {
            for (mm_channel, mode, workers, gather) in [
                (QueueChoice::Auto, Mode::Auto, false, 4 * MIB),
                (QueueChoice::Only(1), Mode::Buffered, true, MIB + 4096),
                (QueueChoice::Only(0), Mode::Auto, false, 64 << 10),
            ] {
                let mut soft = SoftDevice::open(SoftConfig {
                    card: CardConfig { workers: workers.into(), ..CardConfig::default() },
                    host: HostConfig { fragmentation, ..HostConfig::default() },
                    mm_channel,
                    ..config(gather)
                })
                .unwrap();
                let before = resources(&soft);
                let mut inputs = [open_file(&path, FileOptions::for_mode(mode)).unwrap()];
                let mut progress = 0;
                let (loaded, report) = soft.device.load(&mut inputs, placement, &mut |n| progress += n).unwrap();
                assert_eq!((report.bytes, progress), (original.len() as u64, original.len() as u64));
                soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
                checksums.push(loaded.files[0].checksum);

                let copy = folder.path().join("copy.safetensors");
                soft.device.save(&loaded.files[0], &copy).unwrap();
                let copied = std::fs::read(&copy).unwrap();
                let (a, b) = (&loaded.files[0].model.tensors, open(&copy).model().unwrap().tensors);
                assert_eq!(a.len(), b.len());
                for (a, b) in a.iter().zip(&b) {
                    assert_eq!((&a.name, &a.dtype, &a.shape, a.len), (&b.name, &b.dtype, &b.shape, b.len));
                    let range = |at: FileOffset| at.bits() as usize..(at.bits() + a.len) as usize;
                    assert!(original[range(a.at)] == copied[range(b.at)], "{}", a.name);
                }

                // Host memory: three buffers up, one down, whatever the size of the file; the rest is a card's rings.
                let rings = before.2 as u64;
                assert!(soft.device.heap().stats().peak as u64 - rings <= 4 * gather);
                assert_eq!(soft.bus.host().stats().faults, 0);
                soft.device.unload(loaded).unwrap();
                let (free, bound, _) = resources(&soft);
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
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let mut inputs = [open(&path)];
    let (loaded, _) = soft.device.load(&mut inputs, Placement::HbmHalf, &mut |_| {}).unwrap();
    let t = loaded.files[0].tensors().max_by_key(|t| t.tensor.len).unwrap();
    let (name, offset) = (t.tensor.name.clone(), t.tensor.len - 5);
    let place = soft.device.runs(t.va.unwrap().sub(offset, 1).unwrap()).next().unwrap();
    let mut byte = [0];
    soft.bus.memory().read(place.first(), &mut byte).unwrap();
    soft.bus.memory().write(place.first(), &[byte[0] ^ 1]).unwrap();
    match soft.device.verify(&loaded, &inputs, &mut |_| {}) {
        Err(Error::Mismatch { tensor, offset: at, .. }) => assert_eq!((tensor, at), (name, offset)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_bound_apart_and_read_only() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (sample(folder.path(), "a.safetensors", 9 * MIB), sample(folder.path(), "b.safetensors", 9 * MIB));
    let raw = write(folder.path(), "raw.bin", &bytes(12_345, 1));
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let mut inputs = [open(&a), open(&b), open(&raw)];
    let (loaded, report) = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
    let mut spans: Vec<_> = loaded.files.iter().flat_map(|f| f.tensors()).filter_map(|t| t.va).collect();
    spans.sort_by_key(|s| s.first());
    assert!(spans.windows(2).all(|w| w[1].first().bits() - w[0].last().bits() > 16384 - 4096));
    assert!(spans.iter().all(|s| s.first().bits().is_multiple_of(16384)));
    let large = report.device_leaves.iter().find(|(size, _)| size.bytes() == 2 * MIB).unwrap().1;
    assert!(large > 0, "large tensors take large leaves: {:?}", report.device_leaves);
    let leaf = soft.device.vm().lookup(spans[0].first()).unwrap();
    assert_eq!(leaf.access.to_string(), "r--");
    // The same bytes twice have the same checksum; the blob is one tensor with its file's name.
    assert_eq!(loaded.files[0].checksum, loaded.files[1].checksum);
    assert_eq!(loaded.files[2].model.tensors[0].name, "raw.bin");
    // A second load beside the first, larger than it, reuses or replaces the staging buffers.
    let big = sample(folder.path(), "big.safetensors", 20 * MIB);
    let mut more = [open(&big)];
    let (second, _) = soft.device.load(&mut more, Placement::Hbm, &mut |_| {}).unwrap();
    soft.device.verify(&second, &more, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
}

#[test]
fn odd_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut soft = SoftDevice::open(config(64 << 10)).unwrap();
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
        let (loaded, report) = soft.device.load(&mut inputs, Placement::Hbm, &mut |_| {}).unwrap();
        assert_eq!(report.bytes, bytes.len() as u64, "{name}");
        soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
        soft.device.unload(loaded).unwrap();
    }
}

#[test]
fn bad_files_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let before = resources(&soft);
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
        let error = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(expect) && error.contains(name), "{error}");
        assert_eq!(resources(&soft), before, "{name}");
    }
}

#[test]
fn a_card_that_is_too_small() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 20 * MIB);
    let card = CardConfig { ddr: 8 * MIB, hbm: 8 * MIB, ..CardConfig::default() };
    let mut soft = SoftDevice::open(SoftConfig { card, ..config(MIB) }).unwrap();
    let before = resources(&soft);
    for placement in [Placement::Ddr, Placement::HbmHalf, Placement::Hbm] {
        let error = soft.device.load(&mut [open(&path)], placement, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::CardFull { .. }), "{error}");
        assert_eq!(resources(&soft), before);
    }
}

/// A file channel whose operations do something else first.
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

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
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
    let Input { path, file, channel } = open(path);
    [Input { path, file, channel: Meddling { inner: channel, count: 0, meddle } }]
}

#[test]
fn a_file_that_is_truncated_while_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 20 * MIB);
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let before = resources(&soft);
    let file = File::options().write(true).open(&path).unwrap();
    let mut inputs = meddling(&path, |n| {
        if n == 5 {
            file.set_len(12 * MIB + 17).unwrap();
        }
        None
    });
    let error = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap_err();
    match &error {
        Error::Read { at, tensor: Some(_), source: OpError::EndOfFile { .. }, .. } => {
            assert_eq!(at.bits(), 12 * MIB + 17, "{error}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(resources(&soft), before, "staging buffers are given up after a failure");
}

#[test]
fn a_file_that_grows_while_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let mut file = File::options().append(true).open(&path).unwrap();
    let mut inputs = meddling(&path, |n| {
        if n == 2 {
            file.write_all(b"more").unwrap();
        }
        None
    });
    let error = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Changed { now, .. } if now == 5 * MIB + 4), "{error}");
}

#[test]
fn a_disk_error_anywhere_names_the_place_and_leaks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 10 * MIB);
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let before = resources(&soft);
    for fail in 1..=10 {
        let at = FileOffset::new(fail as u64 * 1000 + 9 * MIB);
        let mut inputs = meddling(&path, move |n| (n == fail).then_some(OpError::Io { at, errno: 5 }));
        let error = soft.device.load(&mut inputs, Placement::Hbm, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("in tensor"), "{error}");
        assert!(error.contains(&format!("{at}")) && error.contains("Input/output error"), "{error}");
        assert_eq!(resources(&soft), before, "read {fail}");
        assert_eq!(soft.bus.host().stats().pinned_frames * 4096, before.2 as u64, "nothing stays pinned but the rings");
    }
    // The device still works.
    let mut inputs = [open(&path)];
    let (loaded, _) = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
}

/// The card's channel with a fault of its own: it keeps the first completions for itself, or refuses once, or is slow.
struct Faulty {
    inner: SoftChannel,
    keeps: usize,
    kept: Vec<Completion>,
    refuses: bool,
    /// It gives up what it keeps when it is stopped, and by what it was.
    lets_go: bool,
    stopped: Option<String>,
    /// How long one completion takes; they come while it is waited for, one at a time.
    takes: Duration,
    late: VecDeque<Completion>,
}

impl Queue for Faulty {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.kept.len() + self.late.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if std::mem::take(&mut self.refuses) {
            return Err(Refused { operation, reason: Refusal::Stopped("for once".into()) });
        }
        self.inner.submit(operation)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let from = done.len();
        self.inner.poll(done);
        let keep = self.keeps.min(done.len() - from);
        self.keeps -= keep;
        self.kept.extend(done.drain(from..from + keep));
        if self.takes > Duration::ZERO {
            self.late.extend(done.drain(from..));
        }
        if self.lets_go && self.stopped.is_some() {
            done.append(&mut self.kept);
        }
        done.len() - from
    }

    fn stop(&mut self, why: &str) {
        self.stopped = Some(why.to_owned());
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let n = self.poll(done);
        if let Some(late) = self.late.pop_front() {
            std::thread::sleep(self.takes);
            done.push(late);
            return n + 1;
        }
        if n == 0 {
            std::thread::sleep(timeout.min(Duration::from_millis(1)));
        }
        n
    }
}

type FaultyDevice = Device<Faulty, X86_64_4Level, CardTables<SoftBus>>;

fn faulty(keeps: usize, change: impl FnOnce(&mut SoftParts)) -> FaultyDevice {
    let (mut parts, _bus) = SoftDevice::parts(config(MIB)).unwrap();
    change(&mut parts);
    let DeviceParts { bus, heap, channel, vm, memory, invalidate, inline, gather, .. } = parts;
    let (kept, late, takes) = (Vec::new(), VecDeque::new(), Duration::ZERO);
    let channel = Faulty { inner: channel, keeps, kept, refuses: false, lets_go: false, stopped: None, takes, late };
    let patience = Duration::from_millis(50);
    Device::new(DeviceParts { bus, heap, channel, vm, memory, invalidate, inline, gather, patience })
}

#[test]
fn memory_that_a_late_transfer_may_hit_is_not_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    let mut device = faulty(1, |_| {});
    let free = device.memory().free_bytes();
    // The device keeps one transfer, and the disk fails meanwhile.
    let mut inputs = meddling(&path, |n| (n == 4).then_some(OpError::Io { at: FileOffset::new(0), errno: 5 }));
    assert!(device.load(&mut inputs, Placement::Ddr, &mut |_| {}).is_err());
    assert!(device.abandoned_bytes() > 4 * MIB);
    assert!(device.memory().free_bytes() <= free - device.abandoned_bytes());
}

#[test]
fn a_device_that_ends_nothing_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 5 * MIB);
    for lets_go in [false, true] {
        let mut device = faulty(1, |_| {});
        device.channel_mut().lets_go = lets_go;
        let error = device.load(&mut [open(&path)], Placement::Ddr, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("it ended nothing for 50ms"), "{error}");
        assert_eq!(device.channel_mut().stopped.as_deref(), Some("it ended nothing for 50ms"));
        assert_eq!(device.abandoned_bytes() > 0, !lets_go, "memory that nothing writes to any more is used again");
    }
}

#[test]
fn a_device_that_is_slow_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 10 * MIB);
    // All that is read fits into one buffer, so for long nothing but transfers end, each well within the device's
    // patience.
    let mut device = faulty(0, |parts| parts.gather = 16 * MIB);
    device.channel_mut().takes = Duration::from_millis(20);
    let mut inputs = [open(&path)];
    let begun = Instant::now();
    let (loaded, report) = device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    assert!(report.transfers > 5 && begun.elapsed() > Duration::from_millis(100), "{} transfers", report.transfers);
    device.channel_mut().takes = Duration::ZERO;
    device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
}

#[test]
fn one_file_that_cannot_be_unloaded_keeps_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..3).map(|i| sample(folder.path(), &format!("{i}.safetensors"), MIB)).collect();
    let mut calls = 0;
    let mut device = faulty(0, |parts| {
        let mut real = std::mem::replace(&mut parts.invalidate, Box::new(|| Ok(())));
        parts.invalidate = Box::new(move || {
            calls += 1;
            if calls == 1 { Err("the card is gone".into()) } else { real() }
        });
    });
    let free = device.memory().free_bytes();
    let mut inputs: Vec<_> = paths.iter().map(|p| open(p)).collect();
    let (loaded, _) = device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    let taken = free - device.memory().free_bytes();
    let error = device.unload(loaded).unwrap_err().to_string();
    assert!(error.contains("the card is gone"), "{error}");
    assert_eq!(free - device.memory().free_bytes(), taken / 3);
}

#[test]
fn reading_back_recovers_from_a_refusal_and_from_a_transfer_that_never_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", 2 * MIB);
    let mut device = faulty(0, |_| {});
    let mut inputs = [open(&path)];
    let (loaded, _) = device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    device.channel_mut().refuses = true;
    assert!(matches!(device.verify(&loaded, &inputs, &mut |_| {}), Err(Error::Channel { .. })));
    device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
    device.channel_mut().keeps = 1;
    assert!(matches!(device.verify(&loaded, &inputs, &mut |_| {}), Err(Error::Channel { .. })));
    device.channel_mut().kept.clear();
    device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
}

#[test]
fn what_was_not_loaded_here_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path(), "model.safetensors", MIB);
    let (mut a, mut b) = (SoftDevice::open(config(MIB)).unwrap(), SoftDevice::open(config(MIB)).unwrap());
    let mut inputs = [open(&path)];
    let (loaded, _) = a.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    let no_inputs: [Input<FileQueue>; 0] = [];
    assert!(matches!(a.device.verify(&loaded, &no_inputs, &mut |_| {}), Err(Error::OtherInputs { .. })));
    assert!(matches!(b.device.verify(&loaded, &inputs, &mut |_| {}), Err(Error::OtherDevice { .. })));
    assert!(matches!(b.device.unload(loaded), Err(Error::OtherDevice { .. })));
}

#[test]
fn a_hundred_thousand_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..100_000).map(|i| format!("t{i}")).collect();
    let tensors: Vec<_> = names.iter().enumerate().map(|(i, n)| (n.as_str(), vec![i as u8; i % 2])).collect();
    let path = write(folder.path(), "many.safetensors", &file_of(&tensors));
    let mut soft = SoftDevice::open(config(MIB)).unwrap();
    let mut inputs = [open(&path)];
    let (loaded, _) = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
    soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
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
        let mut soft = SoftDevice::open(SoftConfig { heap, ..config(2 * MIB) }).unwrap();
        let mut inputs = [open(&path)];
        let (loaded, _) = soft.device.load(&mut inputs, Placement::Ddr, &mut |_| {}).unwrap();
        soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
        let ceilings = soft.device.ceilings(&mut inputs).unwrap();
        assert!(ceilings.read > 0.0 && ceilings.copy > 0.0 && ceilings.first_touch > 0.0);
        soft.device.verify(&loaded, &inputs, &mut |_| {}).unwrap();
    }
}

#[test]
fn a_channel_that_the_card_lacks() {
    let error =
        SoftDevice::open(SoftConfig { mm_channel: QueueChoice::Only(2), ..SoftConfig::default() }).err().unwrap();
    assert_eq!(error.to_string(), "the card has no channel 2, it has 2");
}
