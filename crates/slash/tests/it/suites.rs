//! The suites of devices and queues over the model of the driver, and which versions of it are opened.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_device::conformance::suite;
use dmalane_dma::{AnonHeap, Heap, Registrar, error_chain};
use dmalane_queue::conformance::Fixture;
use dmalane_queue::{DeviceAddr, DeviceQueue, HostSlice, Operation, Registered, run};
use dmalane_slash::model::{DriverModel, Fault, Version};
use dmalane_slash::{DDR, Error, HBM, Request, SlashDevice, SlashOptions};

pub const LONG: std::time::Duration = std::time::Duration::from_secs(60);

pub fn open(model: &DriverModel) -> Result<SlashDevice, Error> {
    SlashDevice::with(model.kernel(), model.node().unwrap(), SlashOptions::default())
}

/// The driver without and with io_uring commands.
pub const VERSIONS: [Version; 2] = [Version::KNOWN, Version { commands: 4, ..Version::KNOWN }];

#[test]
fn a_card_takes_the_suite_of_devices() {
    for version in VERSIONS {
        let model = DriverModel::new(version).unwrap();
        suite(|| Box::new(open(&model).unwrap()));
        assert_eq!((model.violations(), model.pairs(), model.counts().buffers.0), (Vec::new(), 0, 0));
    }
}

/// A queue to the border of the HBM's halves, so that copies cross it.
struct Border {
    model: DriverModel,
    registrar: Arc<dyn Registrar>,
    // Queues of one device, with the device that they keep open.
    devices: Vec<SlashDevice>,
}

const LEN: u64 = 1 << 20;
/// Such that the target ends with the HBM.
const START: u64 = HBM.0 + HBM.1 - LEN;

impl Fixture for Border {
    type Queue = Box<DeviceQueue>;

    fn queue(&mut self) -> Box<DeviceQueue> {
        let mut device = open(&self.model).unwrap();
        let queue = device.take_queues().remove(1);
        self.registrar = device.registrar();
        self.devices.push(device);
        queue
    }

    fn target_len(&self) -> u64 {
        LEN
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(START + offset))
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let buf = self.registrar.heap(None).allocate(len).unwrap().share();
        let via = Registered::new(&*self.registrar, &buf, Access::RW).unwrap();
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        self.model.peek(START, &mut bytes);
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.model.poke(START, bytes);
    }
}

#[test]
fn a_queue_takes_the_suite_of_queues() {
    for version in VERSIONS {
        let model = DriverModel::new(version).unwrap();
        let registrar = open(&model).unwrap().registrar();
        let mut border = Border { model: model.clone(), registrar, devices: Vec::new() };
        dmalane_queue::conformance::suite(&mut border);
        drop(border);
        assert_eq!((model.violations(), model.pairs(), model.counts().buffers.0), (Vec::new(), 0, 0));
    }
}

#[test]
fn known_versions_are_opened_and_others_refused_with_what_is_known() {
    let with = |version| open(&DriverModel::new(version).unwrap());
    let card = with(Version::KNOWN).unwrap();
    assert!(card.info().notes[0].starts_with("PCI 0000:61:00.1, INFO of 52 bytes, "), "{card:?}");
    let mut older = with(Version { info: 20, ..Version::KNOWN }).unwrap();
    assert!(older.info().notes[0].starts_with("PCI address unknown, INFO of 20 bytes, "), "{older:?}");
    assert_eq!(older.take_queues().len(), 2);
    let mut single = with(Version { hint: 1, ..Version::KNOWN }).unwrap();
    assert_eq!(single.take_queues().len(), 1, "the driver prefers one");
    for (version, says) in [
        (Version { info: 56, ..Version::KNOWN }, "INFO has 56 bytes, caps 0x0. This program knows INFO of 20 bytes"),
        (Version { caps: 4, ..Version::KNOWN }, "unknown caps 0x4"),
        (Version { hint: 3, ..Version::KNOWN }, "unknown hint 3"),
        (Version { granule: 1 << 21, ..Version::KNOWN }, "BUF_CREATE answered with pages of 2097152"),
        (Version { pair_add: 32, ..Version::KNOWN }, "the module is older than July 2026"),
        (Version { buffers: false, ..Version::KNOWN }, "the module is older than June 2026"),
    ] {
        let model = DriverModel::new(version).unwrap();
        let error = error_chain(&open(&model).unwrap_err());
        assert!(error.contains(says), "{error}");
        assert_eq!((model.pairs(), model.counts().buffers.0), (0, 0), "nothing stays");
    }
    let ring = SlashDevice::with(
        DriverModel::new(Version::KNOWN).unwrap().kernel(),
        DriverModel::new(Version::KNOWN).unwrap().node().unwrap(),
        SlashOptions { ring: 16 },
    );
    assert!(matches!(ring, Err(Error::Ring(16))));
}

#[test]
fn whatever_call_fails_while_a_card_is_opened_nothing_stays() {
    for failing in 0.. {
        let (model, mut left) = (DriverModel::new(Version::KNOWN).unwrap(), failing);
        model.fail(move |_| {
            left -= 1;
            (left == -1).then_some(Fault::Fails(libc::ENOMEM))
        });
        let opened = open(&model);
        let opens = opened.is_ok();
        drop(opened);
        model.fail(|_| None);
        assert_eq!((model.violations(), model.counts().buffers.0), (Vec::new(), 0), "call {failing}");
        assert_eq!(model.pairs(), 0, "call {failing}");
        if opens {
            // The calls that close it fail, too: the pair stays, which is all that can be done.
            assert!(failing >= 7, "INFO, BUF_CREATE, two times QPAIR_ADD and START, QPAIR_GET_FD: {failing}");
            return;
        }
    }
}

#[test]
fn an_allocation_that_fails_names_the_call_and_the_fix() {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let device = open(&model).unwrap();
    model.fail(|_| Some(Fault::Fails(libc::ENODEV)));
    let error = error_chain(&device.registrar().heap(None).allocate(4096).unwrap_err());
    assert!(
        error.contains("BUF_CREATE failed")
            && error.contains("No such device")
            && error.contains("removing or resetting"),
        "{error}"
    );
}

#[test]
fn memory_of_another_heap_is_refused() {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let device = open(&model).unwrap();
    let foreign = AnonHeap::new().allocate(4096).unwrap().share();
    let error = Registered::new(&*device.registrar(), &foreign, Access::RW).unwrap_err();
    assert!(error_chain(&error).contains("only buffers that its driver allocates"), "{error}");
}

#[test]
fn operations_that_touch_are_one_transfer_and_aligned_ones_are_not_copied() {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let mut device = open(&model).unwrap();
    let (registrar, mut queues) = (device.registrar(), device.take_queues());
    let heap = registrar.heap(None);
    let buf = heap.allocate(8 << 20).unwrap().share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    let mut rest = Some(buf.into_slice());
    let queue = &mut queues[0];
    for i in 0..8 {
        let (part, after) = rest.take().unwrap().split_at(1 << 20).unwrap();
        rest = Some(after);
        let at = DeviceAddr::Card(CardAddr::new(DDR.0 + (i << 20)));
        let _ticket = queue.submit(Operation::write((part, via.clone()), at)).unwrap();
    }
    assert_eq!(dmalane_queue::drain(&mut **queue, LONG).iter().filter(|c| c.result.is_ok()).count(), 8);
    let counts = || (model.counts().calls[Request::Transfer.name()], model.counts().small);
    assert_eq!(counts(), (1, 0));
    // One byte into a page: what lies before the next page is copied, and both go in one call.
    let buf = heap.allocate(1 << 20).unwrap().share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    let (_, part) = buf.into_slice().split_at(1).unwrap();
    run(&mut **queue, Operation::write((part, via), DeviceAddr::Card(CardAddr::new(DDR.0))), LONG).unwrap();
    assert_eq!(counts(), (2, 4095));
}
