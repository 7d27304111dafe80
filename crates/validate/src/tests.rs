//! Validations of devices whose truth is known: right ones and wrong ones.

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::{CardAddr, Span};
use dmalane_card::{CardDevice, CardUse};
use dmalane_device::contents::LockError;
use dmalane_device::{AddressSpace, Device, DeviceInfo, DeviceMemory, MemoryDriver, RamDevice, Region};
use dmalane_dma::{Registrar, error_chain};
use dmalane_file::{FileDevice, FileDeviceError, FileDeviceOptions, FileDevicePaths};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, DeviceQueue, Direction, Limits, OpError, Operation, Queue, QueueChoice,
    Refusal, Refused, StopReason, Ticket, Work,
};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

use super::*;
use crate::place::Memories;
use crate::target::share;

const MIB: u64 = 1 << 20;

fn quick() -> ValidateSettings {
    ValidateSettings { threads: 2, buffers: vec![256 << 10], iterations: Some(3), ..ValidateSettings::default() }
}

fn run(
    target: &TestedDevice,
    settings: &ValidateSettings,
    watch: &mut dyn FnMut(ValidateEvent),
) -> Result<ValidateReport, ValidateError> {
    let mut report = ValidateReport::default();
    super::run(target, settings, &mut report, watch).map(|()| report)
}

/// A software card with 64 MiB of each memory.
fn card(config: CardConfig, how: CardUse) -> Box<dyn Device> {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let bus: Arc<SoftBus> =
        Arc::new(SoftBus::new(host, CardConfig { ddr: 64 * MIB, hbm: 64 * MIB, ..config }).unwrap());
    Box::new(CardDevice::open(bus, CardUse { flat: true, ..how }).unwrap())
}

fn soft(config: CardConfig) -> TestedDevice {
    let device = card(config, CardUse { concurrent: config.workers == Workers::PerChannel, ..CardUse::default() });
    TestedDevice::new(device, false).unwrap()
}

fn file(paths: FileDevicePaths, options: FileDeviceOptions) -> Result<TestedDevice, FileDeviceError> {
    let options = FileDeviceOptions { overwrite: true, ..options };
    Ok(TestedDevice::new(Box::new(FileDevice::open(paths, options)?), true).unwrap())
}

fn check(target: &TestedDevice, settings: &ValidateSettings) -> ValidateReport {
    let (mut steps, mut said) = (0, 0);
    let report = run(target, settings, &mut |event| match event {
        ValidateEvent::Steps(n) => steps = n,
        ValidateEvent::Step(_) => said += 1,
    });
    let report = report.unwrap();
    assert!(report.passed(), "{report:?}");
    assert!(said <= steps && said > 0, "{said} of {steps}");
    for figure in &report.figures {
        let Figure { directions, read, write, reference, .. } = figure;
        assert_eq!(
            (read.is_some(), write.is_some()),
            (*directions != Directions::Write, *directions != Directions::Read),
            "{figure:?}"
        );
        assert!(reference.is_some_and(|c| c > 0.0) && figure.total() > 0.0, "{figure:?}");
        for rate in read.iter().chain(write) {
            assert!(rate.p50 <= rate.p99 && rate.bytes_per_s.is_finite() && rate.buffers > 0, "{figure:?}");
        }
    }
    report
}

#[test]
fn the_software_card_passes_in_every_way() {
    for workers in [Workers::Inline, Workers::One, Workers::PerChannel] {
        let target = soft(CardConfig { workers, ..CardConfig::default() });
        let report = check(&target, &quick());
        let cases = report.integrity.len();
        assert!((3..=6).contains(&cases), "three phases, one or two kinds of pages");
        assert_eq!(report.figures.len(), 3 * cases);
        assert!(report.figures.iter().all(|f| f.read.iter().chain(&f.write).all(|r| r.buffers == 6)));
    }
    let target = soft(CardConfig::default());
    for (raw, allocation, channels, threads) in [
        (true, Allocation::Auto, "auto", 3),
        (false, Allocation::Paired, "auto", 5),
        (true, Allocation::Paired, "1", 1),
        (false, Allocation::Auto, "0,1,0,auto", 2),
        (false, Allocation::Auto, "0", 1),
    ] {
        let buffers = vec![4096, 132 << 10];
        let pages = vec![Pages::Small];
        let settings = ValidateSettings {
            raw,
            allocation,
            channels: channels.parse().unwrap(),
            threads,
            buffers,
            pages,
            starting_offset: Some(8192),
            ..quick()
        };
        let report = check(&target, &settings);
        // One thread cannot have one page in two memories.
        let left_out = usize::from(threads == 1 && !settings.is_positional());
        assert_eq!((report.figures.len(), report.left_out.len()), (3 * (6 - left_out), left_out), "{settings:?}");
    }
    let timed =
        ValidateSettings { iterations: None, duration: Duration::from_millis(5), phases: vec![Phase::Ddr], ..quick() };
    assert!(check(&target, &timed).figures.iter().all(|f| f.total() > 0.0));
}

#[test]
fn files_pass_and_are_written_nowhere_else() {
    let memory = tempfile::NamedTempFile::new().unwrap();
    let before: Vec<u8> = (0..4 * MIB).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(memory.path(), &before).unwrap();
    let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
    let target = file(paths, FileDeviceOptions::default()).unwrap();
    let report = check(&target, &ValidateSettings { starting_offset: Some(4096), ..quick() });
    assert!(report.integrity.iter().all(|i| i.phase == Phase::Device));
    let (now, end) = (std::fs::read(memory.path()).unwrap(), 4096 + 4 * (256 << 10));
    assert!(now[..4096] == before[..4096] && now[end..] == before[end..], "four buffers behind the offset");
    let small = ValidateSettings { buffers: vec![MIB], ..quick() };
    let Err(ValidateError::TooSmall { needed, have, .. }) =
        run(&target, &ValidateSettings { starting_offset: Some(4096), ..small }, &mut |_| {})
    else {
        panic!("it does not fit")
    };
    assert_eq!((needed, have), (4 * MIB + 4096, 4 * MIB));
    assert!(matches!(
        run(&target, &ValidateSettings { channels: QueueChoice::only(1), ..quick() }, &mut |_| {}),
        Err(ValidateError::NoChannel { wanted: 1, has: 1 })
    ));
    let hbm = run(&target, &ValidateSettings { phases: vec![Phase::Hbm], ..quick() }, &mut |_| {});
    assert!(matches!(hbm, Err(ValidateError::NoMemory(Phase::Hbm))));
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let target = soft(CardConfig::default());
    let refused = |settings: ValidateSettings| error_chain(&run(&target, &settings, &mut |_| {}).unwrap_err());
    for (settings, why) in [
        (ValidateSettings { threads: 0, ..quick() }, "threads: 0 is not from 1 to 64"),
        (ValidateSettings { threads: 65, ..quick() }, "not from 1 to 64"),
        (ValidateSettings { iodepth: 0, ..quick() }, "iodepth: 0 is not from 1 to 64"),
        (ValidateSettings { iodepth: 65, ..quick() }, "not from 1 to 64"),
        (ValidateSettings { iodepth: 64, buffers: vec![MIB], ..quick() }, "HBM has 64 MiB"),
        (ValidateSettings { buffers: vec![0], ..quick() }, "not from 4 KiB to 1 GiB"),
        (ValidateSettings { buffers: vec![4096, 4097], ..quick() }, "buffer-size: 4097 is not a multiple of 4 KiB"),
        (ValidateSettings { buffers: vec![2 << 30], ..quick() }, "not from 4 KiB to 1 GiB"),
        (ValidateSettings { starting_offset: Some(1), ..quick() }, "starting-offset: 1 is not a multiple of 4 KiB"),
        (ValidateSettings { starting_offset: Some(1 << 40), ..quick() }, "HBM has 64 MiB"),
        (ValidateSettings { buffers: vec![32 * MIB], ..quick() }, "the starting offset included"),
        (ValidateSettings { iterations: Some(0), ..quick() }, "iterations: 0"),
        (ValidateSettings { iterations: None, duration: Duration::ZERO, ..quick() }, "no time"),
        (ValidateSettings { channels: QueueChoice::only(2), ..quick() }, "no channel 2, it has 2"),
        (ValidateSettings { channels: "0,1".parse().unwrap(), ..quick() }, "2 channels for 4 buffer positions"),
        (ValidateSettings { channels: "0,1,0,2".parse().unwrap(), ..quick() }, "no channel 2, it has 2"),
        (ValidateSettings { stride: Some(4097), ..quick() }, "offset: 4097 is not a multiple of 4 KiB"),
        (ValidateSettings { stride: Some(4096), ..quick() }, "offset: 4096 is less than a buffer"),
        (ValidateSettings { stride: Some(32 * MIB), ..quick() }, "HBM has 64 MiB"),
        (ValidateSettings { region_stride: Some(0), ..quick() }, "channel-region-stride: 0 is not"),
        (ValidateSettings { phases: vec![Phase::Device], ..quick() }, "the device has no device"),
    ] {
        let said = refused(settings);
        assert!(said.contains(why), "{said}");
    }
}

/// A queue with a fault.
struct Wrong {
    inner: Box<DeviceQueue>,
    fault: Fault,
    done: u64,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    /// A bit of every read, from this operation on.
    Flip(u64),
    /// Writes that do nothing, from this operation on.
    Deaf(u64),
    /// Reads that do nothing.
    Blind(u64),
    /// An error.
    Fails(u64),
}

impl Queue for Wrong {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn submit(&mut self, mut operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        self.done += 1;
        let Work::Copy { direction, .. } = &mut operation.work else { panic!("a copy") };
        let (down, done) = (*direction == Direction::ToHost, self.done);
        // The other way: the device's bytes stay, or the buffer's go back to where they should have come from.
        match self.fault {
            Fault::Deaf(from) if !down && done > from => *direction = Direction::ToHost,
            Fault::Blind(from) if down && done > from => *direction = Direction::FromHost,
            _ => {}
        }
        self.inner.submit(operation)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.inner.poll(done);
        for completion in &mut done[before..] {
            self.done += 1;
            let Work::Copy { direction, host, .. } = &mut completion.operation.work else { panic!("a copy") };
            match self.fault {
                Fault::Flip(from) if *direction == Direction::ToHost && self.done > from => {
                    let mut byte = [0];
                    host.slice.read(100, &mut byte).unwrap();
                    host.slice.write(100, &[byte[0] ^ 4]).unwrap();
                }
                Fault::Fails(from) if self.done > from => completion.result = Err(OpError::Device { status: 9 }),
                _ => {}
            }
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        self.inner.wait(done, timeout)
    }
}

/// The software card with both channels wrong.
fn wrong(fault: Fault) -> TestedDevice {
    let mut target = soft(CardConfig::default());
    for queue in &mut target.queues {
        *queue = share(Wrong { inner: Box::new(queue.handle()), fault, done: 0 });
    }
    target
}

/// Copies as (channel, is a read, card address).
type Seen = Arc<Mutex<std::collections::BTreeSet<(usize, bool, u64)>>>;

/// A queue that notes where its copies go, and how many were in flight at most.
struct Notes {
    inner: Box<DeviceQueue>,
    channel: usize,
    seen: Seen,
    most: Arc<AtomicUsize>,
}

impl Queue for Notes {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let Work::Copy { direction, at: DeviceAddr::Card(at), .. } = &operation.work else { panic!("a copy") };
        self.seen.lock().unwrap().insert((self.channel, *direction == Direction::ToHost, at.bits()));
        self.most.fetch_max(self.inner.in_flight() + 1, Ordering::Relaxed);
        self.inner.submit(operation)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.inner.poll(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        self.inner.wait(done, timeout)
    }
}

/// The software card, what its queues note, and how many were in flight on either.
fn noted() -> (TestedDevice, Seen, Arc<AtomicUsize>) {
    let (mut target, seen, most) = (soft(CardConfig::default()), Seen::default(), Arc::default());
    for (channel, queue) in target.queues.iter_mut().enumerate() {
        let inner = Box::new(queue.handle());
        *queue = share(Notes { inner, channel, seen: Arc::clone(&seen), most: Arc::clone(&most) });
    }
    (target, seen, most)
}

#[test]
fn one_thread_keeps_many_transfers_in_flight() {
    let (target, seen, most) = noted();
    let settings = ValidateSettings {
        threads: 1,
        phases: vec![Phase::Ddr],
        pages: vec![Pages::Small],
        channels: QueueChoice::only(0),
        directions: vec![Directions::Write],
        ..quick()
    };
    // All buffers are compared at once: both directions of each.
    for (iodepth, in_flight) in [(1, 2), (16, 32)] {
        seen.lock().unwrap().clear();
        let report = check(&target, &ValidateSettings { iodepth, ..settings.clone() });
        assert_eq!(report.figures[0].write.unwrap().buffers, 3 * iodepth as u64);
        assert_eq!(most.swap(0, Ordering::Relaxed), in_flight);
        assert_eq!(seen.lock().unwrap().len(), 2 * in_flight, "each buffer has a place of its own");
    }
    // Of many threads and many transfers each, a wrong byte is still found.
    let settings = ValidateSettings { threads: 2, iodepth: 4, ..settings };
    let report = run(&wrong(Fault::Flip(20)), &settings, &mut |_| {}).unwrap();
    assert!(!report.passed() && report.figures.is_empty(), "{report:?}");
}

#[test]
fn buffers_and_channels_are_those_of_v80_smi() {
    let (target, seen, _) = noted();
    let Memories::Card { ddr, hbm } = target.memories else { panic!("a card") };
    let [ddr, hbm, upper] = [ddr, hbm[0], hbm[1]].map(|memory| memory.first().bits());
    let base = ValidateSettings {
        threads: 2,
        buffers: vec![64 << 10],
        starting_offset: Some(4096),
        stride: Some(MIB),
        phases: vec![Phase::Ddr],
        pages: vec![Pages::Small],
        ..quick()
    };
    let copies = |settings: ValidateSettings| {
        seen.lock().unwrap().clear();
        check(&target, &settings);
        std::mem::take(&mut *seen.lock().unwrap())
    };
    let at = |position: u64| ddr + 4096 + position * MIB;
    // Each direction compares what it moved: what is written is also read back, and what is read was written.
    let of = |list: &[(usize, u64)]| {
        list.iter().flat_map(|(channel, at)| [(*channel, false, *at), (*channel, true, *at)]).collect()
    };
    let list = ValidateSettings { channels: "0,1,0,1".parse().unwrap(), ..base.clone() };
    for directions in [Directions::Read, Directions::Write] {
        let one = ValidateSettings { directions: vec![directions], ..list.clone() };
        assert_eq!(copies(one), of(&[(0, at(0)), (1, at(1))]), "thread 0 and 1 at positions 0 and 1");
    }
    let both = ValidateSettings { directions: vec![Directions::Both], ..list.clone() };
    assert_eq!(copies(both.clone()), of(&[(0, at(0)), (1, at(1)), (0, at(2)), (1, at(3))]));
    // The second buffer of each thread lies behind the first ones of all, and takes the same channel.
    let deeper = copies(ValidateSettings { iodepth: 2, ..both });
    let places: Vec<_> = (0..8).map(|position| (position as usize % 2, at(position))).collect();
    assert_eq!(deeper, of(&places));
    // Without a list, raw transfers alternate channels in the order of positions.
    let raw = ValidateSettings { raw: true, stride: None, directions: vec![Directions::Both], ..base.clone() };
    let packed = |position: u64| ddr + 4096 + position * (64 << 10);
    assert_eq!(copies(raw), of(&[(0, packed(0)), (1, packed(1)), (0, packed(2)), (1, packed(3))]));
    let paired = ValidateSettings {
        allocation: Allocation::Paired,
        region_stride: Some(8 * MIB),
        phases: vec![Phase::Both],
        directions: vec![Directions::Read],
        ..base.clone()
    };
    let second = 4096 + 8 * MIB;
    assert_eq!(copies(paired.clone()), of(&[(0, ddr + 4096), (1, ddr + second), (0, hbm + 4096), (1, hbm + second)]));
    let halved = ValidateSettings { region_stride: None, phases: vec![Phase::Hbm], ..paired };
    assert_eq!(copies(halved), of(&[(0, hbm + 4096), (1, upper + 4096)]));
}

#[test]
fn reads_and_writes_at_once_read_at_even_positions() {
    // The last pass of a figure reads at even positions alone, and writes at odd ones, before it reads these back.
    let mut target = soft(CardConfig::default());
    let inner = Box::new(target.queue(1));
    target.queues[1] = share(Wrong { inner, fault: Fault::Flip(0), done: 0 });
    let settings = ValidateSettings {
        threads: 1,
        channels: "0,1".parse().unwrap(),
        phases: vec![Phase::Ddr],
        pages: vec![Pages::Small],
        ..quick()
    };
    let report = run(&target, &settings, &mut |_| {}).unwrap();
    assert!(!report.passed());
    // Position 0 alone has channel 0: reading and writing alone are right, both at once are not.
    let directions: Vec<_> = report.figures.iter().map(|f| f.directions).collect();
    assert_eq!(directions, [Directions::Read, Directions::Write]);
    let [only] = &report.integrity[..] else { panic!("{report:?}") };
    assert_eq!((only.ok, only.threads), (1, 2), "the buffer at position 1");
}

#[test]
fn there_is_no_figure_for_bytes_that_are_wrong() {
    let settings = ValidateSettings { phases: vec![Phase::Ddr], pages: vec![Pages::Small], ..quick() };
    // From the first operation on: the comparison finds it, and nothing is measured.
    for fault in [Fault::Flip(0), Fault::Deaf(0), Fault::Blind(0)] {
        let report = run(&wrong(fault), &settings, &mut |_| {}).unwrap();
        assert!(!report.passed() && report.figures.is_empty(), "{fault:?}: {report:?}");
        let Integrity { ok, threads: 2, wrong, .. } = &report.integrity[0] else { panic!("{report:?}") };
        assert!(*ok < 2 && wrong[0].starts_with("thread "), "{fault:?}: {wrong:?}");
    }
    // Later: what was measured with it is not shown.
    for fault in [Fault::Deaf(60), Fault::Blind(60), Fault::Flip(120)] {
        let settings = ValidateSettings { iterations: Some(50), ..settings.clone() };
        let report = run(&wrong(fault), &settings, &mut |_| {}).unwrap();
        assert_eq!((report.integrity[0].ok, report.integrity[0].threads), (2, 2), "{fault:?}");
        assert!(!report.passed() && report.figures.len() < 3, "{fault:?}: {report:?}");
    }
    // From the second pass on (a transfer counts when it begins and when it ends): the first has brought the right
    // bytes, and nothing since has moved any.
    for (fault, directions) in [(Fault::Blind(10), Directions::Read), (Fault::Deaf(10), Directions::Write)] {
        let settings =
            ValidateSettings { threads: 1, iterations: Some(3), directions: vec![directions], ..settings.clone() };
        let report = run(&wrong(fault), &settings, &mut |_| {}).unwrap();
        assert_eq!((report.integrity[0].ok, report.figures.len()), (1, 0), "{fault:?}: {report:?}");
        assert!(!report.passed(), "{fault:?}");
    }
    // An error is an error, with its place, and what was measured before it is there.
    let mut report = ValidateReport::default();
    let late =
        ValidateSettings { threads: 1, directions: vec![Directions::Read, Directions::Write], ..settings.clone() };
    let error = super::run(&wrong(Fault::Fails(16)), &late, &mut report, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ValidateError::Failed { .. }), "{error}");
    assert_eq!((report.integrity.len(), report.figures.len()), (1, 1), "{report:?}");
    let error = run(&wrong(Fault::Fails(20)), &settings, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ValidateError::Failed { phase: Phase::Ddr, .. }), "{error}");
    assert!(error_chain(&error).contains("status 0x9"), "{error}");
}

#[test]
fn direct_io_and_two_names_are_one_file() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let (path, link) = (folder.path().join("memory"), folder.path().join("link"));
    std::fs::write(&path, vec![7; 2 * MIB as usize]).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let settings = ValidateSettings { pages: vec![Pages::Small], ..quick() };
    for (direct, c2h) in [(false, &link), (true, &path), (true, &link)] {
        let paths = FileDevicePaths { h2c: path.clone(), c2h: c2h.clone() };
        match file(paths, FileDeviceOptions { direct, ..FileDeviceOptions::default() }) {
            Ok(target) => drop(check(&target, &settings)),
            Err(e) if direct => println!("SKIPPED: {e}"),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn what_is_told_to_stop_stops() {
    let memory = tempfile::NamedTempFile::new().unwrap();
    let before: Vec<u8> = (0..2 * MIB).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(memory.path(), &before).unwrap();
    let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
    let mut target = file(paths, FileDeviceOptions::default()).unwrap();
    let cancelled = Arc::new(AtomicBool::new(false));
    target.stop_when(cancelled.clone());
    let settings = ValidateSettings {
        iterations: None,
        duration: Duration::from_secs(3600),
        pages: vec![Pages::Small],
        ..quick()
    };
    let mut written = false;
    let result = run(&target, &settings, &mut |event| {
        if matches!(&event, ValidateEvent::Step(what) if what.ends_with(": reading")) {
            written = std::fs::read(memory.path()).unwrap() != before;
            let cancelled = cancelled.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                cancelled.store(true, Ordering::Relaxed);
            });
        }
    });
    assert!(matches!(result, Err(ValidateError::Interrupted)), "{result:?}");
    assert!(written);
}

#[test]
fn a_character_device_is_not_overwritten_unasked() {
    let paths = || FileDevicePaths { h2c: "/dev/zero".into(), c2h: "/dev/zero".into() };
    let device = || Box::new(FileDevice::open(paths(), FileDeviceOptions::default()).unwrap());
    let refused = TestedDevice::new(device(), false);
    assert!(matches!(refused, Err(ValidateError::Lost(name)) if name == "file:/dev/zero"));
    let report = run(&TestedDevice::new(device(), true).unwrap(), &quick(), &mut |_| {}).unwrap();
    assert!(!report.passed() && report.figures.is_empty());
}

/// Whether the device still has operations that no thread waits for any more.
fn hangs(target: &TestedDevice) -> bool {
    target.queues.iter().any(|queue| queue.in_flight() > 0)
}

/// Takes all transfers after the first `after`, and ends none of them.
struct Hangs {
    inner: Box<DeviceQueue>,
    after: u64,
    held: Vec<(Ticket, Operation)>,
    /// It can be stopped, and by what it was.
    stops: bool,
    stopped: Option<StopReason>,
    /// It is seen to have halted as soon as it has anything that it does not end, and then takes no more.
    gone: bool,
}

impl Hangs {
    fn new(inner: Box<DeviceQueue>, after: u64, stops: bool) -> Self {
        Self { inner, after, held: Vec::new(), stops, stopped: None, gone: false }
    }
}

impl Queue for Hangs {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if self.after > 0 {
            self.after -= 1;
            return self.inner.submit(operation);
        }
        if let Some(reason) = self.stopped.clone().or_else(|| self.halted()) {
            return Err(Refused { operation, reason: Refusal::Stopped(reason) });
        }
        let ticket = Ticket::new(1 << 40 | self.held.len() as u64);
        self.held.push((ticket, operation));
        Ok(ticket)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let Some(why) = &self.stopped else { return self.inner.poll(done) };
        let result = || Err(OpError::Stopped(why.clone()));
        let before = done.len();
        let held = self.held.drain(..);
        done.extend(held.map(|(ticket, operation)| Completion { ticket, operation, result: result(), bytes: 0 }));
        self.inner.poll(done);
        done.len() - before
    }

    fn halted(&self) -> Option<StopReason> {
        Some(StopReason::Lost("its registers read as ones".into())).filter(|_| self.gone && !self.held.is_empty())
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped = Some(reason).filter(|_| self.stops);
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        self.inner.wait(done, timeout)
    }
}

#[test]
fn a_device_that_hangs_is_left_alone_and_what_was_measured_is_there() {
    let memory = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(memory.path(), vec![7; 2 * MIB as usize]).unwrap();
    let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
    let mut target = file(paths, FileDeviceOptions::default()).unwrap();
    target.timeout = Duration::from_secs(2);
    let inner = Box::new(target.queue(0));
    // The comparison (4 transfers of a thread) and the reading (3 and the one more) end.
    target.queues[0] = share(Hangs::new(inner, 8, false));
    let settings = ValidateSettings {
        threads: 1,
        directions: vec![Directions::Read, Directions::Write],
        pages: vec![Pages::Small],
        ..quick()
    };
    let mut report = ValidateReport::default();
    let begun = std::time::Instant::now();
    let error = super::run(&target, &settings, &mut report, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ValidateError::Stuck { thread: 0, .. }), "{error}");
    assert!(begun.elapsed() > target.timeout);
    assert_eq!((report.integrity.len(), report.figures.len()), (1, 1), "{report:?}");
    let device = || {
        let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
        Box::new(FileDevice::open(paths, FileDeviceOptions::default()).unwrap())
    };
    // Operations under way may still write it.
    for contents in [true, false] {
        assert!(matches!(TestedDevice::new(device(), contents), Err(ValidateError::Lock(LockError::InUse))));
    }
    drop(target);
    TestedDevice::new(device(), true).unwrap();
}

#[test]
fn a_file_that_holds_data_is_not_overwritten_unasked() {
    let memory = tempfile::NamedTempFile::new().unwrap();
    memory.as_file().set_len(2 * MIB).unwrap();
    let target = |contents| {
        let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
        let device = FileDevice::open(paths, FileDeviceOptions { overwrite: true, ..Default::default() }).unwrap();
        TestedDevice::new(Box::new(device), contents).unwrap()
    };
    // One at a time, whatever becomes of the contents.
    let first = target(true);
    let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
    let second = Box::new(FileDevice::open(paths, FileDeviceOptions::default()).unwrap());
    assert!(matches!(TestedDevice::new(second, false), Err(ValidateError::Lock(LockError::InUse))));
    drop(first);
    // It holds none, until a measurement has written it.
    let first = target(false);
    assert!(run(&first, &quick(), &mut |_| {}).unwrap().passed());
    let beyond = run(&first, &ValidateSettings { starting_offset: Some(4096), ..quick() }, &mut |_| {});
    assert!(matches!(beyond, Err(ValidateError::HoldsData(_))), "{beyond:?}");
    drop(first);
    let before = vec![7; 2 * MIB as usize];
    std::fs::write(memory.path(), &before).unwrap();
    let refused = run(&target(false), &quick(), &mut |_| {});
    assert!(matches!(refused, Err(ValidateError::HoldsData(_))), "{refused:?}");
    assert!(std::fs::read(memory.path()).unwrap() == before);
    assert!(run(&target(true), &quick(), &mut |_| {}).unwrap().passed());
    assert!(std::fs::read(memory.path()).unwrap() != before);
}

#[test]
fn a_device_that_hangs_is_stopped() {
    let memory = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(memory.path(), vec![7; 2 * MIB as usize]).unwrap();
    let paths = FileDevicePaths { h2c: memory.path().into(), c2h: memory.path().into() };
    let mut target = file(paths, FileDeviceOptions::default()).unwrap();
    target.timeout = Duration::from_secs(1);
    let inner = Box::new(target.queue(0));
    target.queues[0] = share(Hangs::new(inner, 9, true));
    let settings = ValidateSettings { threads: 3, pages: vec![Pages::Small], ..quick() };
    let error = run(&target, &settings, &mut |_| {}).unwrap_err();
    // Not one of the errors of the threads whose transfers it ended.
    assert!(matches!(error, ValidateError::Stuck { .. }), "{error}");
    assert!(!hangs(&target));
}

#[test]
fn any_device_can_be_measured() {
    let how = CardUse { name: "a card".to_owned(), ring: Some(16), ..CardUse::default() };
    // Queues may be balanced where they work at the same time.
    assert!(
        TestedDevice::new(card(CardConfig::default(), CardUse { concurrent: true, ..how.clone() }), false)
            .unwrap()
            .concurrent
    );
    let target = TestedDevice::new(card(CardConfig::default(), how), false).unwrap();
    assert!(!target.concurrent);
    assert_eq!((target.name.as_str(), target.notes()[0].as_str()), ("a card", "2 channels, rings of 16"));
    let report = check(&target, &quick());
    assert!(report.figures.iter().any(|f| f.phase == Phase::Both));
    let target = TestedDevice::new(Box::new(dmalane_device::RamDevice::new(4 * MIB).unwrap()), false).unwrap();
    assert!(check(&target, &quick()).figures.iter().all(|f| f.phase == Phase::Device));
}

#[test]
fn a_device_that_is_gone_is_told_of_soon() {
    for (threads, raw) in [(1, true), (4, false)] {
        let mut target = soft(CardConfig::default());
        for queue in &mut target.queues {
            let inner = Box::new(queue.handle());
            *queue = share(Hangs { gone: true, ..Hangs::new(inner, 5, false) });
        }
        let settings = ValidateSettings { threads, raw, pages: vec![Pages::Small], ..quick() };
        let begun = std::time::Instant::now();
        let error = run(&target, &settings, &mut |_| {}).unwrap_err();
        assert!(error_chain(&error).contains("registers read as ones"), "{error}");
        assert!(begun.elapsed() < target.timeout / 2, "{:?}", begun.elapsed());
    }
}

#[test]
fn an_error_before_a_device_hangs_is_the_one_that_is_told() {
    let mut target = soft(CardConfig::default());
    target.timeout = Duration::from_secs(1);
    // Of the two transfers of a thread the first fails, and the second does not end.
    let inner = Wrong { inner: Box::new(target.queue(0)), fault: Fault::Fails(0), done: 0 };
    target.queues[0] = share(Hangs::new(Box::new(inner), 1, false));
    let (channels, pages) = (QueueChoice::only(0), vec![Pages::Small]);
    let settings = ValidateSettings { threads: 1, phases: vec![Phase::Ddr], channels, pages, ..quick() };
    let error = run(&target, &settings, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ValidateError::Failed { .. }) && hangs(&target), "{error}");
}

#[test]
fn handles_of_a_device_that_hangs_wait_together() {
    let mut target = soft(CardConfig::default());
    target.timeout = Duration::from_millis(100);
    let inner = Box::new(target.queue(0));
    target.queues[0] = share(Hangs::new(inner, 0, false));
    let threads = 16;
    let settings = ValidateSettings {
        threads,
        phases: vec![Phase::Ddr],
        channels: QueueChoice::only(0),
        pages: vec![Pages::Small],
        ..quick()
    };
    let begun = std::time::Instant::now();
    let error = run(&target, &settings, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ValidateError::Stuck { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_millis(threads as u64 * 500), "not one after the other");
}

/// Memory that a driver allocates: at most `most` bytes at a time.
struct Driven {
    ram: RamDevice,
    most: u64,
    /// Live allocations, and the bytes of all that ever were.
    allocated: Arc<Mutex<(Vec<Span<CardAddr>>, u64)>>,
}

/// Allocates memory of [`Driven`].
struct Driver(u64, Arc<Mutex<(Vec<Span<CardAddr>>, u64)>>);

impl MemoryDriver for Driver {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn Error + Send + Sync>> {
        let mut allocated = self.1.lock().unwrap();
        if allocated.0.iter().map(Span::len).sum::<u64>() + range.len() > self.0 {
            return Err("the driver has no more".into());
        }
        allocated.0.push(range);
        allocated.1 += range.len();
        Ok(())
    }

    fn free(&mut self, range: Span<CardAddr>) {
        self.1.lock().unwrap().0.retain(|live| *live != range);
    }
}

/// A queue that refuses memory that is not allocated.
struct Checked(Box<DeviceQueue>, Arc<Mutex<(Vec<Span<CardAddr>>, u64)>>);

impl Queue for Checked {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let Work::Copy { at: DeviceAddr::Card(at), host, .. } = &operation.work else { panic!("a copy") };
        let span = Span::new(*at, host.slice.len() as u64).unwrap();
        assert!(self.1.lock().unwrap().0.iter().any(|live| live.covers(&span)), "{span} was not allocated");
        self.0.submit(operation)
    }

    fn flush(&mut self) {
        self.0.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.0.poll(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        self.0.wait(done, timeout)
    }
}

impl Device for Driven {
    fn info(&self) -> DeviceInfo {
        self.ram.info()
    }

    fn regions(&self) -> &[Region] {
        self.ram.regions()
    }

    fn memory(&self) -> DeviceMemory {
        DeviceMemory::new(self.regions()).driven_by(Driver(self.most, self.allocated.clone()))
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        self.ram.registrar()
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        let checked = |queue| Box::new(Checked(queue, self.allocated.clone())) as Box<DeviceQueue>;
        self.ram.take_queues().into_iter().map(checked).collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        self.ram.address_space()
    }
}

#[test]
fn only_memory_that_the_driver_has_allocated_is_used_and_it_is_freed() {
    let allocated = Arc::default();
    let ram = || RamDevice::new(1 << 40).unwrap();
    let target = |most| {
        let device = Driven { ram: ram(), most, allocated: Arc::clone(&allocated) };
        TestedDevice::new(Box::new(device), false).unwrap()
    };
    let settings = ValidateSettings { starting_offset: Some(4096), ..quick() };
    check(&target(4 * MIB), &settings);
    let (live, in_all) = std::mem::take(&mut *allocated.lock().unwrap());
    assert!(live.is_empty(), "{live:?}");
    assert_eq!(in_all, 4 * (256 << 10) + 4096, "two buffers for each of two threads, behind the offset");
    let refused = run(&target(MIB), &settings, &mut |_| {}).unwrap_err();
    assert!(error_chain(&refused).contains("the driver has no more"), "{refused}");
}
