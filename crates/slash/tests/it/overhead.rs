//! The time from the submission of an operation to the driver's call, and between two calls; measured by hand. And
//! what must hold besides: a thread that polls goes to sleep, and is woken.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_queue::{Completion, DeviceAddr, DeviceQueue, HostSlice, Operation, Registered, run};
use dmalane_slash::model::{DriverModel, Version};
use dmalane_slash::{Calls, DDR, Handle, Kernel, Request, SlashDevice, SlashOptions, Transfer};

use crate::suites::LONG;

/// A driver whose transfers take a given time, and that notes when it was called, and when it last returned.
struct Instantly {
    driver: Arc<dyn Kernel>,
    begun: Instant,
    called: Arc<AtomicU64>,
    commands: bool,
    takes: Duration,
    returned: AtomicU64,
    /// Nanoseconds from each return to the next call.
    gaps: Mutex<Vec<u64>>,
    /// The folder in `/proc` of the thread that makes the calls.
    thread: OnceLock<PathBuf>,
}

/// The same with commands.
struct Commands {
    begun: Instant,
    called: Arc<AtomicU64>,
    flying: VecDeque<(u64, Transfer)>,
}

/// The low words of both lengths.
fn bytes(argument: &[u32]) -> u64 {
    u64::from(argument[10]) + u64::from(argument[20])
}

impl Calls for Commands {
    fn depth(&self) -> usize {
        4
    }

    fn begin(&mut self, number: u64, argument: Transfer) {
        self.flying.push_back((number, argument));
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.flying.is_empty() {
            self.called.store(self.begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn end(&mut self, _: Option<Duration>) -> io::Result<Option<(u64, io::Result<u64>)>> {
        Ok(self.flying.pop_front().map(|(number, argument)| (number, Ok(bytes(&argument)))))
    }
}

impl Kernel for Instantly {
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64> {
        if request != Request::Transfer {
            return self.driver.call(on, request, argument);
        }
        self.thread.get_or_init(|| Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap()));
        let called = self.begun.elapsed();
        self.called.store(called.as_nanos() as u64, Ordering::Relaxed);
        let returned = self.returned.load(Ordering::Relaxed);
        self.gaps.lock().unwrap().push(called.as_nanos() as u64 - returned);
        while self.begun.elapsed() < called + self.takes {
            std::hint::spin_loop();
        }
        self.returned.store(self.begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(bytes(argument))
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        self.driver.open(on, request, argument)
    }

    fn calls(&self, _: &Arc<Handle>) -> Option<Box<dyn Calls>> {
        let Self { begun, called, .. } = self;
        let commands = || Commands { begun: *begun, called: called.clone(), flying: VecDeque::new() };
        self.commands.then(|| Box::new(commands()) as _)
    }
}

impl Instantly {
    fn new(model: &DriverModel, commands: bool, takes: Duration) -> Arc<Self> {
        let (driver, begun, called) = (model.kernel(), Instant::now(), Arc::default());
        let (returned, gaps) = (AtomicU64::new(0), Mutex::default());
        Arc::new(Self { driver, begun, called, commands, takes, returned, gaps, thread: OnceLock::new() })
    }
}

fn report(what: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!("{what}: {} rounds: least {} ns, median {} ns, p90 {} ns", times.len(), at(0), at(50), at(90));
}

fn rounds() -> usize {
    std::env::var("DMALANE_ROUNDS").map_or(10_000, |n| n.parse().unwrap())
}

#[test]
#[ignore = "a measurement: DMALANE_ROUNDS=N, and valgrind --tool=callgrind for instructions"]
fn from_the_submission_to_the_drivers_call() {
    measure("a call that a thread makes", false, Duration::ZERO);
    measure("the same 1 ms after the last", false, Duration::from_millis(1));
    measure("an io_uring command", true, Duration::ZERO);
}

/// Submits one operation at a time, each `after` the last.
fn measure(what: &str, commands: bool, after: Duration) {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let kernel = Instantly::new(&model, commands, Duration::ZERO);
    let mut device = SlashDevice::with(kernel.clone(), model.node().unwrap(), SlashOptions::default()).unwrap();
    let (registrar, mut queue) = (device.registrar(), device.take_queues().remove(0));
    let buf = registrar.heap(None).allocate(2 << 20).unwrap().share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    let mut host: HostSlice = (buf.into_slice(), via).into();
    let mut times = Vec::new();
    for _ in 0..if after.is_zero() { rounds() } else { rounds() / 10 } {
        std::thread::sleep(after);
        let before = kernel.begun.elapsed().as_nanos() as u64;
        let _ticket = queue.submit(Operation::write(host, DeviceAddr::Card(CardAddr::new(DDR.0)))).unwrap();
        queue.flush();
        while kernel.called.load(Ordering::Relaxed) < before {
            std::hint::spin_loop();
        }
        times.push(kernel.called.load(Ordering::Relaxed) - before);
        let mut done = dmalane_queue::drain(&mut *queue, LONG);
        host = done.remove(0).operation.into_host().remove(0);
    }
    report(what, times);
}

#[test]
#[ignore = "a measurement: DMALANE_ROUNDS=N"]
fn from_the_end_of_a_call_to_the_next() {
    between("from the end of a call to the next, while the submitter polls", |queue, done| {
        while queue.in_flight() > 0 {
            queue.poll(done);
            std::hint::spin_loop();
        }
    });
    between("the same while it waits, and is woken by each end", |queue, done| {
        while queue.in_flight() > 0 {
            queue.wait(done, LONG);
        }
    });
}

/// Submits operations that take a call each, and collects them as given.
fn between(what: &str, collect: impl Fn(&mut DeviceQueue, &mut Vec<Completion>)) {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let kernel = Instantly::new(&model, false, Duration::from_micros(20));
    let mut device = SlashDevice::with(kernel.clone(), model.node().unwrap(), SlashOptions::default()).unwrap();
    let (registrar, mut queue) = (device.registrar(), device.take_queues().remove(0));
    let mut gaps = Vec::new();
    for _ in 0..rounds() / 128 {
        let buf = registrar.heap(None).allocate(128 << 12).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        let mut rest = Some(buf.into_slice());
        // To the same memory of the card, so that each takes a call of its own.
        while let Some((part, after)) = rest.take().and_then(|rest| rest.split_at(1 << 12).ok()) {
            rest = Some(after);
            let at = DeviceAddr::Card(CardAddr::new(DDR.0));
            let _ticket = queue.submit(Operation::write((part, via.clone()), at)).unwrap();
        }
        kernel.gaps.lock().unwrap().clear();
        let mut done = Vec::new();
        collect(&mut *queue, &mut done);
        assert!(done.iter().all(|c| c.result.is_ok()));
        gaps.extend(kernel.gaps.lock().unwrap().drain(..).skip(1));
    }
    report(what, gaps);
}

#[test]
fn a_thread_without_work_sleeps_and_is_woken() {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let kernel = Instantly::new(&model, false, Duration::ZERO);
    let mut device = SlashDevice::with(kernel.clone(), model.node().unwrap(), SlashOptions::default()).unwrap();
    let (registrar, mut queue) = (device.registrar(), device.take_queues().remove(0));
    for _ in 0..3 {
        let buf = registrar.heap(None).allocate(4096).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        let at = DeviceAddr::Card(CardAddr::new(DDR.0));
        run(&mut *queue, Operation::write((buf.into_slice(), via), at), LONG).unwrap();
        let (stat, begun) = (kernel.thread.get().unwrap().join("stat"), Instant::now());
        // PID (name) state ...
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            assert!(begun.elapsed() < LONG, "it polls for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
