//! The time from the submission of an operation to the driver's call; measured by hand.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_queue::{DeviceAddr, HostSlice, Operation, Registered, run};
use dmalane_slash::model::{DriverModel, Version};
use dmalane_slash::{Calls, DDR, Handle, Kernel, Request, SlashDevice, SlashOptions, Transfer};

use crate::suites::LONG;

/// A driver whose transfers take no time, and that notes when it was called.
struct Instantly {
    driver: Arc<dyn Kernel>,
    begun: Instant,
    called: Arc<AtomicU64>,
    commands: bool,
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
        self.called.store(self.begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
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

    fn sync(&self, bar: &Handle, flags: u64) -> io::Result<()> {
        self.driver.sync(bar, flags)
    }
}

#[test]
#[ignore = "a measurement: DMALANE_ROUNDS=N, and valgrind --tool=callgrind for instructions"]
fn from_the_submission_to_the_drivers_call() {
    measure("a call that a thread makes", false);
    measure("an io_uring command", true);
}

fn measure(what: &str, commands: bool) {
    let rounds = std::env::var("DMALANE_ROUNDS").map_or(10_000, |n| n.parse().unwrap());
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let kernel = Instantly { driver: model.kernel(), begun: Instant::now(), called: Arc::default(), commands };
    let kernel = Arc::new(kernel);
    let options = SlashOptions::default();
    let mut device = SlashDevice::with(kernel.clone(), model.node().unwrap(), options).unwrap();
    let (registrar, mut queue) = (device.registrar(), device.take_queues().remove(0));
    let buf = registrar.heap(None).allocate(2 << 20).unwrap().share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    let mut host: HostSlice = (buf.into_slice(), via).into();
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let before = kernel.begun.elapsed().as_nanos() as u64;
        let ended = run(&mut *queue, Operation::write(host, DeviceAddr::Card(CardAddr::new(DDR.0))), LONG).unwrap();
        times.push(kernel.called.load(Ordering::Relaxed) - before);
        host = ended.into_host().remove(0);
    }
    times.sort_unstable();
    println!("{what}: {rounds} rounds: median {} ns, least {} ns", times[rounds / 2], times[0]);
}
