//! What our side adds between the submission of an operation and the driver's call; a measurement, run by hand.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_queue::{DeviceAddr, HostSlice, Operation, Registered, run};
use dmalane_slash::model::{DriverModel, Version};
use dmalane_slash::{DDR, Handle, Kernel, Request, SlashDevice, SlashOptions};

use crate::suites::LONG;

/// A driver whose transfers take no time, and that notes when it was called.
struct Instantly {
    driver: Arc<dyn Kernel>,
    begun: Instant,
    called: AtomicU64,
}

impl Kernel for Instantly {
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64> {
        if request != Request::Transfer {
            return self.driver.call(on, request, argument);
        }
        self.called.store(self.begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        // The low words of both lengths.
        Ok(u64::from(argument[10]) + u64::from(argument[20]))
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        self.driver.open(on, request, argument)
    }

    fn sync(&self, bar: &Handle, flags: u64) -> io::Result<()> {
        self.driver.sync(bar, flags)
    }
}

#[test]
#[ignore = "a measurement: DMALANE_ROUNDS=N, and valgrind --tool=callgrind for instructions"]
fn from_the_submission_to_the_drivers_call() {
    let rounds = std::env::var("DMALANE_ROUNDS").map_or(10_000, |n| n.parse().unwrap());
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let kernel = Instantly { driver: model.kernel(), begun: Instant::now(), called: AtomicU64::new(0) };
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
    println!("{rounds} rounds: median {} ns, least {} ns", times[rounds / 2], times[0]);
}
