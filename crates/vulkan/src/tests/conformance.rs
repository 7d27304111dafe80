//! The suites of all devices and of all queues.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, SgIndex, SgTable};
use dmalane_device::{AddressSpaceKind, Device, DeviceMemory, Placement};
use dmalane_dma::{AnonHeap, Heap, Registrar, error_chain};
use dmalane_queue::conformance::Fixture;
use dmalane_queue::{DeviceAddr, DeviceQueue, HostSlice, Operation, QueueAddr, Registered, run};
use dmalane_vm::{BindRequest, Bo};

use super::layers::Messages;
use super::{Error, LONG, VulkanDevice, VulkanOptions};

/// Runs a test on the GPU that `DMALANE_TEST_GPU` names, or the first. Any message of the validation layers fails it.
fn on_gpu(sparse: bool, host_import: bool, test: impl FnOnce(&str, &VulkanOptions)) {
    let name = std::env::var("DMALANE_TEST_GPU").unwrap_or_else(|_| "0".to_owned());
    let messages = Messages::new();
    let options = VulkanOptions { sparse, host_import, validation: Some(messages.clone()), ..VulkanOptions::default() };
    match VulkanDevice::open(&name, &options) {
        Err(e @ (Error::NoLoader(_) | Error::NoDriver)) if std::env::var_os("DMALANE_NEED_GPU").is_none() => {
            return println!("SKIPPED: {e}");
        }
        Err(e) => panic!("{e}"),
        Ok(device) => println!("{}", device.info().notes.join("\n")),
    }
    test(&name, &options);
    let messages = messages.take();
    assert!(messages.is_empty(), "{} messages:\n{}", messages.len(), messages.join("\n"));
}

#[test]
fn a_flat_gpu_takes_the_suite_of_devices() {
    on_gpu(false, true, |name, options| {
        dmalane_device::conformance::suite(|| Box::new(VulkanDevice::open(name, options).unwrap()));
    });
}

#[test]
fn a_gpu_takes_the_suite_of_devices() {
    on_gpu(true, true, |name, options| {
        dmalane_device::conformance::suite(|| Box::new(VulkanDevice::open(name, options).unwrap()));
    });
}

const TARGET: u64 = 1 << 20;

/// A queue of the GPU, 1 MiB of its memory, and a second queue to look at it.
struct Gpu {
    device: VulkanDevice,
    queue: Option<Box<DeviceQueue>>,
    other: Box<DeviceQueue>,
    registrar: Arc<dyn Registrar>,
    _memory: DeviceMemory,
    table: SgTable<CardAddr>,
    at: DeviceAddr,
}

impl Gpu {
    fn new(name: &str, options: &VulkanOptions) -> Self {
        let device = VulkanDevice::open(name, options).unwrap();
        let (other, registrar, mut memory) = (device.open_queue().unwrap(), device.registrar(), device.memory());
        let table = memory.allocate(TARGET, &Placement::Default).unwrap();
        let at = DeviceAddr::Card(table.segments().next().unwrap().addr);
        Self { device, queue: None, other, registrar, _memory: memory, table, at }
    }

    /// Uses the memory by a bound address from now on. Nothing is bound behind it.
    fn bind(&mut self) {
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&self.table).unwrap()));
        let space = self.device.address_space();
        let range = space.reserve(&self.table, TARGET).unwrap();
        let at = range.first();
        space
            .apply(&[BindRequest::Bind { va: at, bo: bo.clone(), offset: 0, len: TARGET, access: Access::RW }])
            .unwrap();
        self.at = space.at(at);
    }

    fn whole(&mut self, fill: Option<&[u8]>) -> HostSlice {
        let mut host = self.host(fill.map_or(TARGET as usize, <[u8]>::len));
        if let Some(bytes) = fill {
            host.slice.write(0, bytes).unwrap();
        }
        host
    }
}

impl Fixture for Gpu {
    type Queue = Box<DeviceQueue>;

    fn queue(&mut self) -> Self::Queue {
        self.queue.take().unwrap_or_else(|| self.device.open_queue().unwrap())
    }

    fn target_len(&self) -> u64 {
        TARGET
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        self.at.advance(offset).unwrap()
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let buf = self.registrar.heap(None).allocate(len).unwrap().share();
        let via = Registered::new(&*self.registrar, &buf, Access::RW).unwrap();
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let (host, at) = (self.whole(None), self.at(0));
        let slice = run(&mut *self.other, Operation::read(host, at), LONG).unwrap().into_slice().unwrap();
        let mut bytes = vec![0; slice.len()];
        slice.read(0, &mut bytes).unwrap();
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        let (host, at) = (self.whole(Some(bytes)), self.at(0));
        run(&mut *self.other, Operation::write(host, at), LONG).unwrap();
    }
}

#[test]
fn a_queue_takes_the_suite_of_queues() {
    on_gpu(false, true, |name, options| {
        // Small copies by the processor where that can, and all of them by the GPU.
        for direct in [options.direct, 0] {
            let options = VulkanOptions { direct, ..options.clone() };
            dmalane_queue::conformance::suite(&mut Gpu::new(name, &options));
        }
    });
}

#[test]
fn a_gpu_of_small_buffers_takes_the_suites() {
    on_gpu(false, true, |name, options| {
        let options = VulkanOptions { largest: Some(256 << 10), direct: 0, ..options.clone() };
        dmalane_device::conformance::suite(|| Box::new(VulkanDevice::open(name, &options).unwrap()));
        dmalane_queue::conformance::suite(&mut Gpu::new(name, &options));
    });
}

#[test]
fn several_channels_take_the_suite_of_devices() {
    on_gpu(true, true, |name, options| {
        let options = VulkanOptions { channels: Some(2), ..options.clone() };
        dmalane_device::conformance::suite(|| Box::new(VulkanDevice::open(name, &options).unwrap()));
        dmalane_queue::conformance::suite(&mut Gpu::new(name, &options));
    });
}

#[test]
fn a_queue_takes_the_suite_through_bound_addresses() {
    on_gpu(true, true, |name, options| {
        let mut gpu = Gpu::new(name, options);
        match gpu.device.address_space().kind() {
            AddressSpaceKind::Flat => println!("SKIPPED: the driver cannot bind sparse buffers"),
            _ => {
                gpu.bind();
                dmalane_queue::conformance::suite(&mut gpu);
            }
        }
    });
}

#[test]
fn without_host_import_the_drivers_memory_is_registered() {
    on_gpu(true, false, |name, options| {
        dmalane_device::conformance::suite(|| Box::new(VulkanDevice::open(name, options).unwrap()));
        dmalane_queue::conformance::suite(&mut Gpu::new(name, options));
        let device = VulkanDevice::open(name, options).unwrap();
        let foreign = AnonHeap::new().allocate(4096).unwrap().share();
        let refused = Registered::new(&*device.registrar(), &foreign, Access::RW).unwrap_err();
        assert!(error_chain(&refused).contains("the device's own heap"), "{refused}");
    });
}
