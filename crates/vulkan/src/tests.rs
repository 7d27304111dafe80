//! Tests that make calls fail, and count what is left.

mod dma_buf;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ash::vk;
use dmalane_addr::{Access, SgIndex, SgTable, Span};
use dmalane_device::{AddressSpaceKind, Bind, Device, DriverCopy, Placement, SpaceError};
use dmalane_dma::{Heap, Registrar, SharedBuf};
use dmalane_queue::{
    Completion, DeviceAddr, DeviceQueue, Direction, HostSlice, OpError, Operation, Registered, Shape, StopReason, drain,
};
use dmalane_vm::{BindRequest, Bo};

use crate::fault::Faults;
use crate::gpu::Live;
use crate::sparse::Held;
use crate::{Error, Messages, VulkanDevice, VulkanOptions};

const LONG: Duration = Duration::from_secs(60);
const LEN: usize = 64 << 10;

/// The GPU that `DMALANE_TEST_GPU` names, or the first; `None`, and why on stdout, where there is none.
fn open(options: &VulkanOptions, faults: &Arc<Faults>, live: &Arc<Live>) -> Option<Result<VulkanDevice, Error>> {
    let name = std::env::var("DMALANE_TEST_GPU").unwrap_or_else(|_| "0".to_owned());
    match VulkanDevice::open_with(&name, options, faults.clone(), live.clone()) {
        Err(e @ (Error::NoLoader(_) | Error::NoDriver)) => {
            skip(e);
            None
        }
        opened => Some(opened),
    }
}

/// Says why a test is skipped, which is a failure where `DMALANE_NEED_GPU` is set.
fn skip(why: impl std::fmt::Display) {
    assert!(std::env::var_os("DMALANE_NEED_GPU").is_none(), "DMALANE_NEED_GPU is set: {why}");
    println!("SKIPPED: {why}");
}

fn left(live: &Live) -> [u64; 6] {
    let Live { memories, imports, buffers, semaphores, pools, programs, .. } = live;
    [memories, imports, buffers, semaphores, pools, programs].map(|count| count.load(Ordering::Relaxed))
}

fn checked(messages: &Messages) {
    let messages = messages.take();
    assert!(messages.is_empty(), "{} messages:\n{}", messages.len(), messages.join("\n"));
}

fn register(registrar: &dyn Registrar, heap: &dyn Heap, bytes: &[u8]) -> Result<(SharedBuf, Registered), String> {
    let mut buf = heap.allocate(bytes.len()).map_err(|e| e.to_string())?;
    buf.copy_from_slice(bytes);
    let buf = buf.share();
    let via = Registered::new(registrar, &buf, Access::RW).map_err(|e| e.to_string())?;
    Ok((buf, via))
}

fn run(queue: &mut DeviceQueue, operations: Vec<Operation>) -> Result<Vec<Completion>, String> {
    for operation in operations {
        let _ticket = queue.submit(operation).map_err(|e| e.to_string())?;
    }
    let done = drain(queue, LONG);
    match done.iter().find_map(|c| c.result.as_ref().err()) {
        Some(e) => {
            assert!(!matches!(e, OpError::Stopped(_)) || queue.halted().is_some(), "{e}, and the queue goes on");
            Err(e.to_string())
        }
        None => Ok(done),
    }
}

/// Uses all that a device has.
fn use_all(device: &mut VulkanDevice) -> Result<(), String> {
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let mut programs = device.program_queue().map_err(|e| e.to_string())?;
    let result = (|| {
        let table = memory.allocate(4 << 20, &Placement::Default).map_err(|e| e.to_string())?;
        let first = table.segments().next().expect("memory").addr;
        let at = |offset: u64| DeviceAddr::Card(dmalane_addr::CardAddr::new(first.bits() + offset));
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 31 % 251) as u8).collect();
        let queue = &mut *queues[0];
        let (buf, via) = register(&*registrar, &*heap, &bytes)?;
        let write = Operation::write(HostSlice::from((buf.into_slice(), via)), at(0));
        // Each depends on the one before.
        let moved = [
            write,
            Operation::within(at(0), at(1 << 20), LEN as u64),
            Operation::fill(at(LEN as u64), 1001, 0x0807_0605_0403_0201),
            Operation::fill(at(2 << 20), 1 << 20, 0x0101_0101_0101_0101),
            Operation::fence(),
        ];
        drop(run(queue, moved.into())?);
        let (buf, via) = register(&*registrar, &*heap, &vec![0; LEN])?;
        let back = run(queue, vec![Operation::read(HostSlice::from((buf.into_slice(), via)), at(1 << 20))])?;
        let mut got = vec![0; LEN];
        back.into_iter().next().unwrap().operation.into_slice().unwrap().read(0, &mut got).unwrap();
        assert!(got == bytes, "what was copied within the GPU");
        let mut driver = device.driver_copies().map_err(|e| e.to_string())?.expect("a driver copies");
        let (buf, host) = register(&*registrar, &*heap, &vec![0; LEN])?;
        let copy = DriverCopy { direction: Direction::ToHost, host, offset: 0, at: first, len: LEN as u64 };
        driver.copy(&[copy], 2).map_err(|e| e.to_string())?;
        buf.into_slice().read(0, &mut got).unwrap();
        assert!(got == bytes, "what the driver copied");
        drop(driver);
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
        let page = device.address_space().page().bytes();
        let space = device.address_space();
        let range = space.reserve(&table, 4 << 20).map_err(|e| e.to_string())?;
        let bound = space
            .bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: page.max(1 << 20), access: Access::RW })
            .map_err(|e| e.to_string());
        let seen = bound.and_then(|()| {
            let at = space.at(range.first());
            let (buf, via) = register(&*registrar, &*heap, &vec![0; LEN])?;
            let copied = run(queue, vec![Operation::read(HostSlice::from((buf.into_slice(), via)), at)])?;
            let (buf, via) = register(&*registrar, &*heap, &vec![0; LEN])?;
            let read = run(&mut *programs, vec![Operation::read(HostSlice::from((buf.into_slice(), via)), at)])?;
            Ok([copied, read])
        });
        space.unbind(range).map_err(|e| e.to_string())?;
        for seen in seen? {
            let mut got = vec![0; LEN];
            seen.into_iter().next().unwrap().operation.into_slice().unwrap().read(0, &mut got).unwrap();
            assert!(got == bytes, "what was bound");
        }
        memory.free(table.segments()).map_err(|e| e.to_string())
    })();
    if device.shared().check().is_err() {
        let refused = refusals(device, &mut memory, &mut *queues[0], &mut *programs);
        assert!(refused.iter().all(|e| e.contains("is lost")), "{refused:?}, {result:?}");
    }
    drop((queues, programs));
    assert_eq!(heap.stats().live, 0, "host memory is released: {result:?}");
    result
}

/// Why each part of a device that is lost does nothing any more.
fn refusals(
    device: &mut VulkanDevice,
    memory: &mut dmalane_device::DeviceMemory,
    queue: &mut DeviceQueue,
    programs: &mut DeviceQueue,
) -> Vec<String> {
    let table = memory.allocate(1 << 20, &Placement::Default).unwrap();
    let first = table.segments().next().expect("memory").addr;
    let at = DeviceAddr::Card(first);
    let registrar = device.registrar();
    let host = || register(&*registrar, &*registrar.heap(None), &[0; 4096]).unwrap();
    queue.poll(&mut Vec::new());
    assert!(matches!(queue.halted(), Some(StopReason::Lost(_))), "{:?}", queue.halted());
    assert!(!queue.restart(), "a queue of a lost device");
    let mut whys = vec![run(queue, vec![Operation::fill(at, 4096, 0)]).unwrap_err()];
    let (buf, via) = host();
    let read = Operation::read(HostSlice::from((buf.into_slice(), via)), at);
    // It notices when it is used.
    if programs.halted().is_none() {
        whys.push(run(programs, vec![read]).unwrap_err());
    }
    assert!(matches!(programs.halted(), Some(StopReason::Lost(_))), "{:?}", programs.halted());
    assert!(!programs.restart(), "the queue for programs of a lost device");
    let (_buf, host) = host();
    let copy = DriverCopy { direction: Direction::ToHost, host, offset: 0, at: first, len: 4096 };
    let mut driver = device.driver_copies().unwrap().expect("a driver copies");
    whys.push(driver.copy(&[copy], 1).unwrap_err().to_string());
    if device.sparse_pages().is_some() {
        let bo = Arc::new(Bo::new(2, SgIndex::from_table(&table).unwrap()));
        let space = device.address_space();
        let va = space.reserve(&table, 1 << 20).unwrap().first();
        let bound = space.bind(&Bind { va, bo: &bo, offset: 0, len: 1 << 20, access: Access::RW });
        whys.extend([bound, space.settle()].map(|done| done.unwrap_err().to_string()));
    }
    whys
}

#[test]
fn every_call_that_fails_is_named_and_leaks_nothing() {
    make_every_call_fail(true);
}

#[test]
fn every_call_for_memory_of_the_driver_that_fails_is_named_and_leaks_nothing() {
    make_every_call_fail(false);
}

fn make_every_call_fail(host_import: bool) {
    let (faults, live, messages) = (Arc::<Faults>::default(), Arc::<Live>::default(), Messages::new());
    let options =
        VulkanOptions { sparse: true, host_import, validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &faults, &live) else { return };
    let mut opened = opened.unwrap();
    let (validated, binds) = (opened.shared().is_validated(), opened.sparse_pages().is_some());
    use_all(&mut opened).unwrap();
    drop(opened);
    assert_eq!(left(&live), [0; 6], "nothing is left when nothing fails");
    let mut named = std::collections::BTreeMap::<&str, u32>::new();
    for result in [vk::Result::ERROR_OUT_OF_DEVICE_MEMORY, vk::Result::ERROR_DEVICE_LOST] {
        for number in 1.. {
            faults.fail(number, result);
            let lost = result == vk::Result::ERROR_DEVICE_LOST;
            // `used`: the call failed before the device was dropped.
            let (outcome, notes, used) = match open(&options, &faults, &live).expect("it was there before") {
                Ok(mut device) => {
                    let outcome = use_all(&mut device);
                    (outcome, device.info().notes.join("\n"), faults.failed().is_some())
                }
                Err(e) => (Err(e.to_string()), String::new(), true),
            };
            let Some(call) = faults.failed() else {
                outcome.unwrap();
                break;
            };
            *named.entry(call).or_default() += 1;
            match outcome {
                Err(e) => {
                    let says = e.contains(call) && e.contains("is lost") == lost;
                    assert!(says, "{call} (call {number}) failed, and the error is {e:?}");
                }
                // The drop of a device waits for what was sent and not waited for. Nobody is told how that ended, and
                // where it failed, the driver is asked in another way before anything is freed.
                Ok(()) if !used => assert_eq!(call, "vkWaitSemaphores", "call {number}, of the drop"),
                // Only a look at whether a bind has happened already, for which the GPU waits else, or a device that
                // does without and says so.
                Ok(()) => {
                    let noticed = call == "vkGetSemaphoreCounterValue" || notes.contains(call);
                    assert!(noticed && !lost, "{call} (call {number}) failed with {result:?}, which went unnoticed");
                }
            }
            assert_eq!(left(&live), [0; 6], "left when {call} (call {number}) failed with {result:?}");
        }
    }
    println!("{named:?}");
    let called = [
        "vkAllocateCommandBuffers",
        "vkAllocateMemory",
        "vkBeginCommandBuffer",
        "vkBindBufferMemory",
        "vkCreateBuffer",
        "vkCreateCommandPool",
        "vkCreateComputePipelines",
        "vkCreateDevice",
        "vkCreateInstance",
        "vkCreatePipelineLayout",
        "vkCreateSemaphore",
        "vkCreateShaderModule",
        "vkEndCommandBuffer",
        "vkEnumerateDeviceExtensionProperties",
        "vkEnumerateInstanceExtensionProperties",
        "vkEnumerateInstanceLayerProperties",
        "vkEnumeratePhysicalDevices",
        "vkGetSemaphoreCounterValue",
        "vkQueueSubmit",
        "vkWaitSemaphores",
    ];
    let of_this = if host_import { "vkGetMemoryHostPointerPropertiesEXT" } else { "vkMapMemory" };
    let more = [(true, of_this), (validated, "vkCreateDebugUtilsMessengerEXT"), (binds, "vkQueueBindSparse")];
    let called = called.into_iter().chain(more.into_iter().filter(|(made, _)| *made).map(|(_, call)| call));
    for call in called {
        assert!(named.contains_key(call), "{call} was never made to fail: {named:?}");
    }
    checked(&messages);
}

/// An opened GPU, its parts, and a buffer of device memory.
struct Opened {
    queues: Vec<Box<DeviceQueue>>,
    memory: dmalane_device::DeviceMemory,
    registrar: Arc<dyn Registrar>,
    device: VulkanDevice,
    faults: Arc<Faults>,
    live: Arc<Live>,
    messages: Messages,
}

impl Opened {
    /// `None` where there is no GPU, or none that binds sparse buffers and that was asked for.
    fn new(sparse: bool) -> Option<Self> {
        Self::with(&VulkanOptions { sparse, ..VulkanOptions::default() })
    }

    fn with(options: &VulkanOptions) -> Option<Self> {
        Self::limited(options, Arc::default())
    }

    fn limited(options: &VulkanOptions, live: Arc<Live>) -> Option<Self> {
        let (faults, messages) = (Arc::<Faults>::default(), Messages::new());
        let sparse = options.sparse;
        let options = VulkanOptions { direct: 0, validation: Some(messages.clone()), ..options.clone() };
        let mut device = open(&options, &faults, &live)?.unwrap();
        if sparse && device.sparse_pages().is_none() {
            println!("SKIPPED: the driver cannot bind sparse buffers");
            return None;
        }
        let (registrar, memory, queues) = (device.registrar(), device.memory(), device.take_queues());
        Some(Self { queues, memory, registrar, device, faults, live, messages })
    }

    fn allocate(&mut self, len: u64) -> (Arc<Bo>, DeviceAddr, SgTable<dmalane_addr::CardAddr>) {
        let table = self.memory.allocate(len, &Placement::Default).unwrap();
        let first = table.segments().next().unwrap().addr;
        (Arc::new(Bo::new(first.bits(), SgIndex::from_table(&table).unwrap())), DeviceAddr::Card(first), table)
    }

    fn host(&self, bytes: &[u8]) -> HostSlice {
        let (buf, via) = register(&*self.registrar, &*self.registrar.heap(None), bytes).unwrap();
        (buf.into_slice(), via).into()
    }

    /// Drops everything, which must leave nothing, and no message.
    fn end(self) {
        let Self { queues, memory, registrar, device, live, messages, .. } = self;
        drop((queues, memory, registrar, device));
        assert_eq!(left(&live), [0; 6]);
        checked(&messages);
    }
}

fn bytes_of(end: Completion) -> Vec<u8> {
    let slice = end.operation.into_slice().unwrap();
    let mut bytes = vec![0; slice.len()];
    slice.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_read_by_a_program_that_failed_has_ended_when_its_memory_is_given_back() {
    const LEN: usize = 64 << 20;
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(LEN as u64);
    drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, LEN as u64, 0x0707_0707_0707_0707)]).unwrap());
    let mut programs = gpu.device.program_queue().unwrap();
    let host = gpu.host(&vec![0; LEN]);
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let _ticket = programs.submit(Operation::read(host, at)).unwrap();
    let mut done = drain(&mut *programs, LONG);
    assert!(matches!(done[0].result, Err(OpError::Stopped(StopReason::Driver(_)))), "{:?}", done[0].result);
    assert!(gpu.faults.called("vkWaitSemaphores") && !gpu.faults.called("vkQueueWaitIdle"), "it waits for ever");
    let mut last = [0];
    done.remove(0).operation.into_slice().unwrap().read(LEN - 1, &mut last).unwrap();
    assert_eq!(last, [7], "the GPU writes no more");
    drop((done, programs));
    gpu.end();
}

#[test]
fn shapes_of_too_many_rows_are_refused() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(1 << 20);
    let shape = Shape { row: 1, rows: u32::MAX, host_pitch: 0, device_pitch: 0 };
    let fill = Operation::fill(at, shape.bytes().unwrap(), 1).shaped(shape);
    let error = run(&mut *gpu.queues[0], vec![fill]).unwrap_err();
    assert!(error.contains("4294967295"), "{error}");
    gpu.end();
}

#[test]
fn a_bind_stays_known_to_the_copies_that_wait_for_it() {
    const LEN: u64 = 128 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(LEN);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    let fill = |at| Operation::fill(at, LEN, 0x0102_0304_0506_0708);
    // The bind waits for this one on the same queue of the driver, and the next for the bind.
    let _first = gpu.queues[0].submit(fill(at)).unwrap();
    gpu.queues[0].flush();
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let at = space.at(range.first());
    let _second = gpu.queues[0].submit(fill(at)).unwrap();
    gpu.queues[0].flush();
    // The space goes first, and the queue has the last reference to the bind.
    let Opened { queues, memory, registrar, device, live, messages, .. } = gpu;
    drop((memory, registrar, device));
    drop(queues);
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn a_bind_that_failed_keeps_only_its_own_memory() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, _, table) = gpu.allocate(1 << 20);
    let (other, _, other_table) = gpu.allocate(1 << 20);
    let held = left(&gpu.live)[0];
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 1 << 20).unwrap();
    let bind = |bo, access| Bind { va: range.first(), bo, offset: 0, len: 1 << 20, access };
    gpu.faults.fail_call("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    assert!(matches!(space.bind(&bind(&bo, Access::RW)), Err(SpaceError::Driver(_))));
    gpu.faults.heal();
    space.bind(&bind(&other, Access::RW)).unwrap();
    space.unbind(range).unwrap();
    gpu.memory.free(table.segments()).unwrap();
    gpu.memory.free(other_table.segments()).unwrap();
    assert_eq!(left(&gpu.live)[0], held - 2, "that of the bind that the driver did not get is its own again too");
    gpu.end();
}

#[test]
fn a_batch_that_is_refused_leaves_old_binds() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(1 << 20);
    let (gone, _, gone_table) = gpu.allocate(1 << 20);
    drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, 1 << 20, 0x0505_0505_0505_0505)]).unwrap());
    gpu.memory.free(gone_table.segments()).unwrap();
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 1 << 20).unwrap();
    let request = |bo: &Arc<Bo>| BindRequest::Bind {
        va: range.first(),
        bo: bo.clone(),
        offset: 0,
        len: 1 << 20,
        access: Access::RW,
    };
    space.apply(&[request(&bo)]).unwrap();
    let refused = space.apply(&[BindRequest::Unbind(range), request(&gone)]);
    assert!(matches!(refused, Err(SpaceError::Refused(_))), "{refused:?}");
    let at = space.at(range.first());
    let read = Operation::read(gpu.host(&[0; 4096]), at);
    assert_eq!(bytes_of(run(&mut *gpu.queues[0], vec![read]).unwrap().remove(0)), [5; 4096]);
    gpu.device.address_space().unbind(range).unwrap();
    gpu.end();
}

#[test]
fn unbinding_waits_for_copies_that_use_what_is_bound() {
    const LEN: u64 = 128 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, _, table) = gpu.allocate(LEN);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let at = space.at(range.first());
    let _ticket = gpu.queues[0].submit(Operation::fill(at, LEN, 0x0102_0304_0506_0708)).unwrap();
    gpu.queues[0].flush();
    // The driver's own order would hide it: the space asks before it gives the driver anything.
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let refused = gpu.device.address_space().unbind(range);
    let Err(SpaceError::Invalidate(error)) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("vkWaitSemaphores"), "{error}");
    drop(drain(&mut *gpu.queues[0], LONG));
    gpu.end();
}

#[test]
fn memory_of_several_buffers_of_the_driver_is_one_to_queues_and_programs() {
    const LEN: usize = 10 << 20;
    let options = VulkanOptions { sparse: false, largest: Some(4 << 20), ..VulkanOptions::default() };
    let Some(mut gpu) = Opened::with(&options) else { return };
    let before = left(&gpu.live);
    let (_, at, _table) = gpu.allocate(LEN as u64);
    assert_eq!(left(&gpu.live)[0], before[0] + 3, "4, 4 and 2 MiB");
    let bytes: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    let host = gpu.host(&bytes);
    assert_eq!(left(&gpu.live)[1], before[1] + 3, "and three imports");
    drop(run(&mut *gpu.queues[0], vec![Operation::write(host, at)]).unwrap());
    let to_all = || gpu.host(&vec![0; LEN]);
    let mut programs = gpu.device.program_queue().unwrap();
    let read = bytes_of(run(&mut *programs, vec![Operation::read(to_all(), at)]).unwrap().remove(0));
    assert!(read == bytes, "by a program");
    // Parts on both sides of each cut, into two pieces of host memory.
    let DeviceAddr::Card(first) = at else { panic!("a card address") };
    let part = |offset: u64| DeviceAddr::Card(dmalane_addr::CardAddr::new(first.bits() + offset));
    let cuts = [4u64 << 20, 8 << 20].map(|cut| (part(cut - 3000), 6144));
    let hosts = vec![gpu.host(&[0; 4096]), gpu.host(&[0; 8192])];
    let mut done = run(&mut *gpu.queues[0], vec![Operation::gather(Direction::ToHost, hosts, cuts.to_vec())]).unwrap();
    let mut got = Vec::new();
    for host in done.remove(0).operation.into_host() {
        let mut piece = vec![0; host.slice.len()];
        host.slice.read(0, &mut piece).unwrap();
        got.extend(piece);
    }
    let wanted: Vec<u8> =
        [4 << 20, 8 << 20].iter().flat_map(|cut: &usize| &bytes[cut - 3000..cut + 3144]).copied().collect();
    assert!(got == wanted, "over both cuts");
    drop((done, programs));
    gpu.end();
}

#[test]
fn ranges_longer_than_a_buffer_are_refused_with_a_hint() {
    let options = VulkanOptions { largest: Some(8 << 20), ..VulkanOptions::default() };
    let Some(mut gpu) = Opened::with(&options) else { return };
    let (_, _, table) = gpu.allocate(20 << 20);
    let space = gpu.device.address_space();
    let error = space.reserve(&table, 20 << 20).unwrap_err().to_string();
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    // Shorter ones have a buffer each, however many.
    let ranges = [(); 6].map(|()| space.reserve(&table, 4 << 20).unwrap());
    ranges.into_iter().for_each(|range| space.unbind(range).unwrap());
    gpu.end();
}

#[test]
fn where_import_takes_more_than_a_page_the_driver_allocates_host_memory() {
    let live = Arc::<Live>::default();
    live.import_align.store(1 << 20, Ordering::Relaxed);
    let Some(opened) = open(&VulkanOptions::default(), &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.gpu().host_import.is_none() {
        return println!("SKIPPED: the driver imports no host memory");
    }
    use_all(&mut device).unwrap();
    let notes = device.info().notes.join("\n");
    assert!(notes.contains("the driver refuses it (only at multiples of 1048576 bytes"), "{notes}");
    drop(device);
    assert_eq!(left(&live), [0; 6]);
}

#[test]
fn ranges_longer_than_the_addresses_are_refused_with_a_hint() {
    let live = Arc::<Live>::default();
    live.addresses.store(8 << 20, Ordering::Relaxed);
    let Some(opened) = open(&VulkanOptions::default(), &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let table = device.memory().allocate(1 << 20, &Placement::Default).unwrap();
    let space = device.address_space();
    assert_eq!(space.longest(), 6 << 20);
    let error = space.reserve(&table, 8 << 20).unwrap_err().to_string();
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    let range = space.reserve(&table, 6 << 20).unwrap();
    assert!(matches!(space.reserve(&table, 2 << 20), Err(SpaceError::Exhausted(_))));
    // Not a batch too many, but something that sparse buffers do not have.
    let error = space.apply(&[BindRequest::Null { va: range.first(), len: 65536 }]).unwrap_err().to_string();
    assert!(error.contains("no null pages"), "{error}");
    space.unbind(range).unwrap();
}

#[test]
fn a_gpu_without_memory_says_how_much_is_free() {
    let Some(mut gpu) = Opened::new(false) else { return };
    gpu.faults.fail_call("vkAllocateMemory", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    let error = chain(&gpu.memory.allocate(1 << 20, &Placement::Default).unwrap_err());
    let free = error.contains("bytes of the GPU's memory are free") || error.contains("VK_EXT_memory_budget");
    assert!(free && error.contains("no 1048576 bytes") && error.contains("vkAllocateMemory"), "{error}");
    gpu.end();
}

#[test]
fn where_import_is_refused_the_driver_allocates_host_memory() {
    let (faults, live) = (Arc::<Faults>::default(), Arc::<Live>::default());
    faults.fail_call("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
    let Some(opened) = open(&VulkanOptions::default(), &faults, &live) else { return };
    let mut device = opened.unwrap();
    let notes = device.info().notes.join("\n");
    assert!(notes.contains("the driver refuses it (vkGetMemoryHostPointerPropertiesEXT failed"), "{notes}");
    assert!(device.registrar().only_own_heap());
    use_all(&mut device).unwrap();
    drop(device);
    assert_eq!(left(&live), [0; 6]);
}

#[test]
fn binds_up_to_the_limit_are_all_seen() {
    let (options, live) = (VulkanOptions::default(), Arc::<Live>::default());
    // As many as the process may have, and a number of its own, so that tests beside it have some left.
    live.held.set(Held::new(crate::sparse::binds_left())).unwrap();
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() || device.gpu().kind != "software GPU" {
        return println!("SKIPPED: no software GPU that binds sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    const PAGES: u64 = 60_000;
    let table = memory.allocate(PAGES * page, &Placement::Default).unwrap();
    let first = table.segments().next().unwrap().addr.bits();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let range = device.address_space().reserve(&table, PAGES * page).unwrap();
    let fill = |n: u64| Operation::fill(DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page)), 8, n);
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
    // Every second page, so that each bind is one of its own with a hole on each side.
    let (mut bound, mut refused) = (0u64, false);
    while !refused && bound < PAGES / 2 {
        let batch = bound..(bound + 500).min(PAGES / 2);
        let request = |n: u64| {
            let (offset, access) = (2 * n * page, Access::RW);
            BindRequest::Bind { va: va(2 * n), bo: bo.clone(), offset, len: page, access }
        };
        let requests: Vec<_> = batch.clone().map(request).collect();
        match device.address_space().apply(&requests) {
            Ok(()) => bound = batch.end,
            Err(e) => {
                assert!(e.to_string().contains("sparse bindings at most"), "{e}");
                refused = true;
            }
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    println!("{bound} binds, {maps} mappings");
    assert!(refused && bound > 1000, "{bound}");
    let heap = registrar.heap(None);
    for batch in (0..bound).collect::<Vec<_>>().chunks(500) {
        drop(run(&mut *queues[0], batch.iter().map(|n| fill(2 * n)).collect()).unwrap());
        let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
        let mut rest = buf.into_slice();
        let reads = batch.iter().map(|n| {
            let slice = rest.split_off_front(8).unwrap();
            Operation::read(HostSlice::from((slice, via.clone())), DeviceAddr::Va(va(2 * n)))
        });
        let done = run(&mut *queues[0], reads.collect()).unwrap();
        for (n, end) in batch.iter().zip(done) {
            assert_eq!(bytes_of(end), (2 * n).to_le_bytes(), "page {n}");
        }
    }
    device.address_space().unbind(range).unwrap();
}

#[test]
fn unbinds_that_leave_too_many_pieces_are_refused() {
    const PAGES: u64 = 64;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    live.held.set(Held::new(8)).unwrap();
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let table = memory.allocate(PAGES * page, &Placement::Default).unwrap();
    let first = table.segments().next().unwrap().addr.bits();
    let fill = |n| Operation::fill(DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page)), 8, n);
    drop(run(&mut *queues[0], (0..PAGES).map(fill).collect()).unwrap());
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let range = device.address_space().reserve(&table, PAGES * page).unwrap();
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
    let bind = |at, offset: u64, pages: u64| {
        let (offset, len) = (offset * page, pages * page);
        BindRequest::Bind { va: va(at), bo: bo.clone(), offset, len, access: Access::RW }
    };
    let hole = |n| BindRequest::Unbind(Span::new(va(n), page).unwrap());
    let too_many = |device: &mut VulkanDevice, requests: &[BindRequest], wanted: u32| {
        let e = device.address_space().apply(requests).unwrap_err().to_string();
        assert!(e.contains(&format!("holds 8 sparse bindings at most, and there would be {wanted} ")), "{e}");
    };
    device.address_space().apply(&[bind(0, 0, PAGES)]).unwrap();
    // A hole leaves one more, and so does a batch of them.
    too_many(&mut device, &(0..8).map(|n| hole(2 * n + 1)).collect::<Vec<_>>(), 9);
    let mut holes: Vec<u64> = (0..7).map(|n| 2 * n + 1).collect();
    holes.iter().for_each(|n| device.address_space().apply(&[hole(*n)]).unwrap());
    too_many(&mut device, &[hole(31)], 9);
    // A bind in the middle of another leaves two more.
    too_many(&mut device, &[bind(20, 0, 1)], 10);
    // What takes no more pieces is done: shorter ones, and one instead of others.
    holes.push(PAGES - 1);
    device.address_space().apply(&[hole(PAGES - 1)]).unwrap();
    device.address_space().apply(&[hole(0), bind(0, 0, 1)]).unwrap();
    let heap = registrar.heap(None);
    for n in 0..PAGES {
        let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
        let slice = buf.into_slice().split_at(8).unwrap().0;
        let read = Operation::read(HostSlice::from((slice, via)), DeviceAddr::Va(va(n)));
        match (run(&mut *queues[0], vec![read]), holes.contains(&n)) {
            (Ok(mut done), false) => assert_eq!(bytes_of(done.remove(0)), n.to_le_bytes(), "page {n}"),
            (read, hole) => assert!(read.is_err() && hole, "page {n}: {read:?}"),
        }
    }
    device.address_space().unbind(range).unwrap();
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn binds_that_failed_count_until_they_are_taken_away() {
    const PAGES: u64 = 32;
    // The driver may have made all of them, also where its call failed.
    let fails = [
        ("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY),
        ("vkWaitSemaphores", vk::Result::ERROR_OUT_OF_HOST_MEMORY),
        ("vkWaitSemaphores", vk::Result::TIMEOUT),
    ];
    for (call, result) in fails {
        let (live, held) = (Arc::<Live>::default(), Held::new(8));
        live.held.set(held.clone()).unwrap();
        let Some(mut gpu) = Opened::limited(&VulkanOptions::default(), live) else { return };
        let page = gpu.device.address_space().page().bytes();
        let [(old, _, table), (new, _, new_table)] = [(); 2].map(|()| gpu.allocate(PAGES * page));
        let memories = left(&gpu.live)[0];
        let space = gpu.device.address_space();
        let [one, other] = [(); 2].map(|()| space.reserve(&table, PAGES * page).unwrap());
        let bind = |range: Span<dmalane_addr::DeviceVa>, bo: &Arc<Bo>, at: u64, pages: u64| BindRequest::Bind {
            va: dmalane_addr::DeviceVa::new(range.first().bits() + at * page),
            bo: bo.clone(),
            offset: at * page,
            len: pages * page,
            access: Access::RW,
        };
        space.apply(&[bind(one, &old, 0, PAGES)]).unwrap();
        // Three pieces of it replaced, which leaves four others, however much of that the driver does; twice.
        let pieces = [2, 4, 6].map(|at| bind(one, &new, at, 1));
        for _ in 0..2 {
            gpu.faults.fail_call(call, result);
            let failed = space.apply(&pieces);
            assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
            assert!(gpu.faults.failed().is_some());
        }
        gpu.faults.heal();
        let few = |n: u64| (0..n).map(|i| bind(other, &old, 2 * i, 1)).collect::<Vec<_>>();
        let refused = space.apply(&few(2)).unwrap_err().to_string();
        assert!(refused.contains("holds 8 sparse bindings at most, and there would be 9 "), "{call}: {refused}");
        space.apply(&few(1)).unwrap();
        // The memory stays while it may be bound.
        gpu.memory.free(new_table.segments()).unwrap();
        assert_eq!(left(&gpu.live)[0], memories, "{call}");
        let space = gpu.device.address_space();
        space.unbind(one).unwrap();
        assert_eq!(left(&gpu.live)[0], memories - 1, "{call}");
        let space = gpu.device.address_space();
        space.apply(&few(8)).unwrap();
        assert!(held.add(1).is_err());
        space.unbind(other).unwrap();
        gpu.end();
        assert!(held.add(8).is_ok(), "nothing is counted twice");
    }
}

#[test]
fn devices_of_one_process_share_the_limit_of_binds() {
    let Some([one, other]) = Opened::new(true).zip(Opened::new(true)).map(<[_; 2]>::from) else { return };
    if one.device.gpu().kind != "software GPU" {
        return println!("SKIPPED: no software GPU");
    }
    assert!(one.device.shares_limit_with(&other.device), "without a number of their own");
    drop((one, other));
    let shared = Held::new(8);
    let mut gpus = [(); 2].map(|()| {
        let live = Arc::<Live>::default();
        live.held.set(shared.clone()).unwrap();
        open(&VulkanOptions::default(), &Arc::default(), &live).unwrap().unwrap()
    });
    let page = gpus[0].address_space().page().bytes();
    let mut parts = gpus.each_mut().map(|device| {
        let mut memory = device.memory();
        let table = memory.allocate(32 * page, &Placement::Default).unwrap();
        let range = device.address_space().reserve(&table, 32 * page).unwrap();
        (Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap())), range, memory)
    });
    // Every second page, so that none continues another.
    let bind = |(bo, range, _): &(Arc<Bo>, Span<dmalane_addr::DeviceVa>, _), n: u64| BindRequest::Bind {
        va: dmalane_addr::DeviceVa::new(range.first().bits() + 2 * n * page),
        bo: bo.clone(),
        offset: 2 * n * page,
        len: page,
        access: Access::RW,
    };
    let five: [Vec<_>; 2] = parts.each_ref().map(|part| (0..5).map(|n| bind(part, n)).collect());
    gpus[0].address_space().apply(&five[0]).unwrap();
    let e = gpus[1].address_space().apply(&five[1]).unwrap_err().to_string();
    assert!(e.contains("holds 8 sparse bindings at most, and there would be 10 "), "{e}");
    gpus[1].address_space().apply(&five[1][..3]).unwrap();
    assert!(gpus[0].address_space().apply(&[bind(&parts[0], 6)]).is_err());
    // What one gives back the other may have, also when it goes.
    gpus[0].address_space().unbind(parts[0].1).unwrap();
    gpus[1].address_space().apply(&five[1]).unwrap();
    let [mut first, second] = gpus;
    drop(second);
    let table = parts[0].2.allocate(32 * page, &Placement::Default).unwrap();
    parts[0].1 = first.address_space().reserve(&table, 32 * page).unwrap();
    let all: Vec<_> = (0..8).map(|n| bind(&parts[0], n)).collect();
    first.address_space().apply(&all).unwrap();
}

#[test]
fn what_a_driver_that_answers_nothing_may_still_use_is_never_freed() {
    // A driver that has lost the GPU does not say what it still does.
    for answer in [vk::Result::ERROR_OUT_OF_HOST_MEMORY, vk::Result::ERROR_DEVICE_LOST] {
        let Some(mut gpu) = Opened::new(false) else { return };
        let (_, at, _table) = gpu.allocate(64 << 20);
        let host = gpu.host(&vec![7; 64 << 20]);
        let share = host.slice.reference();
        let _ticket = gpu.queues[0].submit(Operation::write(host, at)).unwrap();
        gpu.queues[0].flush();
        let (faults, live) = (gpu.faults.clone(), gpu.live.clone());
        faults.fail_for_good(answer);
        let mut done = Vec::new();
        assert_eq!(gpu.queues[0].poll(&mut done), 0, "nothing says that it has ended");
        assert_eq!(
            matches!(gpu.queues[0].halted(), Some(StopReason::Lost(_))),
            answer == vk::Result::ERROR_DEVICE_LOST
        );
        assert!(gpu.queues[0].halted().is_some());
        let Opened { queues, memory, registrar, device, .. } = gpu;
        drop((queues, memory, registrar, device));
        let [memories, imports, buffers, semaphores, pools, _] = left(&live);
        assert!(memories >= 2 && imports == 1 && buffers >= 2 && semaphores == 1 && pools == 1, "{:?}", left(&live));
        assert!(!share.is_last(), "the GPU may still read it");
    }
}

#[test]
fn an_error_while_waiting_does_not_wait_without_a_limit() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(1 << 20);
    let host = gpu.host(&vec![7; 1 << 20]);
    let _ticket = gpu.queues[0].submit(Operation::write(host, at)).unwrap();
    gpu.queues[0].flush();
    gpu.faults.fail_for_good(vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let (mut done, begun) = (Vec::new(), std::time::Instant::now());
    assert_eq!(gpu.queues[0].wait(&mut done, Duration::from_millis(1)), 0, "nothing says that it has ended");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(gpu.faults.called("vkGetSemaphoreCounterValue") && !gpu.faults.called("vkQueueWaitIdle"), "no limit");
    assert!(gpu.queues[0].halted().is_some());
    // A driver that answers again ends it.
    gpu.faults.heal();
    done.extend(drain(&mut *gpu.queues[0], LONG));
    assert!(matches!(done[0].result, Err(OpError::Stopped(_))), "{:?}", done[0].result);
    drop(done);
    gpu.end();
}

#[test]
fn a_read_by_a_program_of_a_lost_gpu_keeps_its_memory() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(4 << 20);
    let mut programs = gpu.device.program_queue().unwrap();
    let [host, other] = [(); 2].map(|()| gpu.host(&vec![0; 4 << 20]));
    let share = host.slice.reference();
    for host in [host, other] {
        let _ticket = programs.submit(Operation::read(host, at)).unwrap();
    }
    gpu.faults.fail_for_good_from("vkWaitSemaphores", vk::Result::ERROR_DEVICE_LOST);
    let done = drain(&mut *programs, LONG);
    assert!(done.is_empty(), "nothing says that they have ended: {done:?}");
    assert!(matches!(programs.halted(), Some(StopReason::Lost(_))) && programs.in_flight() == 2);
    assert!(!programs.restart());
    drop(programs);
    assert!(!share.is_last(), "the GPU may still write there");
}

#[test]
fn reads_by_a_program_that_a_lost_gpu_has_ended_are_given_back() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(1 << 20);
    let mut programs = gpu.device.program_queue().unwrap();
    let _ticket = programs.submit(Operation::read(gpu.host(&[0; 4096]), at)).unwrap();
    // The driver still says that its queue has nothing to do.
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::ERROR_DEVICE_LOST);
    let done = drain(&mut *programs, LONG);
    assert!(matches!(done[0].result, Err(OpError::Stopped(StopReason::Lost(_)))), "{:?}", done[0].result);
    assert!(matches!(programs.halted(), Some(StopReason::Lost(_))) && programs.in_flight() == 0);
    assert!(!programs.restart(), "a GPU is lost until it is opened again");
    drop((done, programs));
    gpu.end();
}

#[test]
fn copies_that_a_reset_gpu_never_made_are_not_taken_for_made() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, at, _table) = gpu.allocate(1 << 20);
    let host = gpu.host(&vec![7; 1 << 20]);
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::ERROR_DEVICE_LOST);
    let queue = &mut *gpu.queues[0];
    let _ticket = queue.submit(Operation::write(host, at)).unwrap();
    queue.flush();
    let (mut done, begun) = (Vec::new(), std::time::Instant::now());
    while done.is_empty() && begun.elapsed() < LONG {
        queue.poll(&mut done);
    }
    assert!(matches!(done[0].result, Err(OpError::Stopped(_))), "{:?}", done[0].result);
    assert!(matches!(queue.halted(), Some(StopReason::Lost(_))), "{:?}", queue.halted());
    drop(done);
    gpu.end();
}

#[test]
fn sparse_buffers_may_lie_in_the_upper_half_of_the_addresses() {
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    // Where RADV has them.
    live.high.store(0xffff_8000_0000_0000, Ordering::Relaxed);
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let mut memory = device.memory();
    let table = memory.allocate(4 << 20, &Placement::Default).unwrap();
    let range = device.address_space().reserve(&table, 4 << 20).unwrap();
    assert!(range.first().bits() >= 0xffff_8000_0000_0000, "{range}");
    let half_a_page = Span::new(range.first(), 2048).unwrap();
    match device.address_space().apply(&[BindRequest::Unbind(half_a_page)]) {
        Err(SpaceError::Vm(dmalane_vm::Error::Misaligned { span, .. })) => assert_eq!(span, half_a_page),
        other => panic!("{other:?}"),
    }
    device.address_space().unbind(range).unwrap();
    memory.free(table.segments()).unwrap();
    drop(memory);
    use_all(&mut device).unwrap();
    dmalane_device::conformance::suite(|| Box::new(open(&options, &Arc::default(), &live).unwrap().unwrap()));
    drop(device);
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn binds_are_made_in_order() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let range = gpu.device.address_space().reserve(&table, 1 << 20).unwrap();
    for (bo, ordered) in [(&first, 0), (&second, 1), (&first, 2)] {
        let bind = BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: 1 << 20, access: Access::RW };
        gpu.device.address_space().apply(&[bind]).unwrap();
        assert_eq!(gpu.live.ordered_binds.load(Ordering::Relaxed), ordered, "each waits for the one before");
    }
    gpu.device.address_space().unbind(range).unwrap();
    gpu.end();
}

#[test]
fn a_buffer_stays_while_a_bind_to_it_may_be_under_way() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let space = gpu.device.address_space();
    let ranges = [(); 2].map(|()| space.reserve(&table, 1 << 20).unwrap());
    let bind = |range: Span<dmalane_addr::DeviceVa>, bo: &Arc<Bo>| BindRequest::Bind {
        va: range.first(),
        bo: bo.clone(),
        offset: 0,
        len: 1 << 20,
        access: Access::RW,
    };
    space.apply(&[bind(ranges[0], &first)]).unwrap();
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let failed = space.apply(&[BindRequest::Unbind(ranges[0]), bind(ranges[1], &second)]);
    assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    assert!(matches!(space.unbind(ranges[1]), Err(SpaceError::Invalidate(_))), "the driver does not say that it ended");
    gpu.faults.heal();
    ranges.into_iter().for_each(|range| space.unbind(range).unwrap());
    gpu.end();
}

#[test]
fn the_drivers_limits_hold_for_host_memory_too() {
    let options =
        VulkanOptions { sparse: false, largest: Some(4 << 20), host_import: false, ..VulkanOptions::default() };
    let Some(gpu) = Opened::with(&options) else { return };
    let heap = gpu.registrar.heap(None);
    let error = chain(&heap.allocate(8 << 20).unwrap_err());
    assert!(error.contains("of 8388608 bytes is larger than the driver's largest (4194304)"), "{error}");
    let most = u64::from(gpu.device.gpu().max_allocations);
    gpu.live.memories.fetch_add(most, Ordering::Relaxed);
    let error = chain(&heap.allocate(1 << 20).unwrap_err());
    gpu.live.memories.fetch_sub(most, Ordering::Relaxed);
    assert!(error.contains(&format!("makes {most} allocations at most")), "{error}");
    drop(heap.allocate(1 << 20).unwrap());
    gpu.end();
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |e| e.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn a_device_has_queues() {
    let options = VulkanOptions { channels: Some(0), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &Arc::default()) else { return };
    assert!(matches!(opened, Err(Error::NoQueues)));
}

#[test]
fn binds_that_a_driver_may_still_make_keep_their_memory() {
    const LEN: u64 = 64 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(LEN);
    // The bind waits for this on the same queue of the driver.
    let _ticket = gpu.queues[0].submit(Operation::fill(at, LEN, 0x0102_0304_0506_0708)).unwrap();
    gpu.queues[0].flush();
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let (faults, live) = (gpu.faults.clone(), gpu.live.clone());
    faults.fail_for_good(vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let Opened { queues, memory, registrar, device, .. } = gpu;
    drop((queues, memory, registrar, device));
    let [memories, _, buffers, semaphores, ..] = left(&live);
    assert!(memories >= 1 && buffers >= 2 && semaphores >= 2, "{:?}", left(&live));
}

#[test]
fn memory_is_freed_when_no_copy_uses_it_any_more() {
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    let options = VulkanOptions { sparse: false, validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    assert_eq!(device.address_space().kind(), AddressSpaceKind::Flat);
    let before = left(&live);
    let table: SgTable<_> = memory.allocate(16 << 20, &Placement::Default).unwrap();
    let only = table.segments().next().unwrap();
    let at = DeviceAddr::Card(Span::new(only.addr, only.len).unwrap().first());
    let (buf, via) = register(&*registrar, &*registrar.heap(None), &vec![7; 16 << 20]).unwrap();
    let held = left(&live);
    assert_eq!([held[0], held[1]], [before[0] + 2, before[1] + 1]);
    let host = HostSlice::from((buf.into_slice(), via));
    let _ticket = queues[0].submit(Operation::copy(Direction::FromHost, host, at)).unwrap();
    queues[0].flush();
    memory.free(table.segments()).unwrap();
    drop((memory, device, registrar));
    assert_eq!(left(&live)[..2], held[..2], "the copy may be under way");
    let done = drain(&mut *queues[0], LONG);
    assert!(done.len() == 1 && done[0].result.is_ok());
    drop(done);
    assert_eq!(left(&live)[..2], before[..2], "it has ended");
    drop(queues);
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn small_copies_on_unified_memory_are_the_processors() {
    let messages = Messages::new();
    for direct in [0, LEN as u64] {
        let (faults, live) = (Arc::<Faults>::default(), Arc::<Live>::default());
        let validation = Some(messages.clone());
        let options = VulkanOptions { sparse: false, direct, validation, ..VulkanOptions::default() };
        let Some(opened) = open(&options, &faults, &live) else { return };
        let mut device = opened.unwrap();
        assert!(direct > 0 || !device.shared().maps_memory(), "not asked for");
        if direct > 0 && !device.shared().maps_memory() {
            return println!("SKIPPED: {} has no unified memory that is coherent", device.gpu());
        }
        let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
        let table = memory.allocate(1 << 20, &Placement::Default).unwrap();
        let at = DeviceAddr::Card(table.segments().next().unwrap().addr);
        let host = |byte: u8| {
            let (buf, via) = register(&*registrar, &*registrar.heap(None), &vec![byte; LEN]).unwrap();
            HostSlice::from((buf.into_slice(), via))
        };
        let queue = &mut *queues[0];
        drop(run(queue, vec![Operation::write(host(7), at)]).unwrap());
        assert_eq!(queue.stats().unwrap().doorbells == 0, direct > 0, "nothing was submitted");
        // Operations in flight on the GPU stay before it.
        let pattern = 0x0101_0101_0101_0101;
        let both = vec![Operation::fill(at, LEN as u64, pattern), Operation::read(host(0), at)];
        let mut got = vec![0; LEN];
        let read = run(queue, both).unwrap().remove(1).operation.into_slice().unwrap();
        read.read(0, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 1));
        // A lost GPU is noticed although no copy asks it for anything.
        let write = Operation::write(host(9), at);
        faults.fail_call("vkWaitSemaphores", vk::Result::ERROR_DEVICE_LOST);
        let _ticket = queue.submit(write).unwrap();
        let done = drain(queue, LONG);
        assert!(matches!(done[0].result, Err(OpError::Stopped(_))), "{:?}", done[0].result);
        assert!(matches!(queue.halted(), Some(StopReason::Lost(_))), "{:?}", queue.halted());
        drop((done, queues, memory, device, registrar));
        assert_eq!(left(&live), [0; 6]);
    }
    checked(&messages);
}

#[test]
#[ignore = "a measurement: small copies by the processor beside those by the GPU"]
fn small_copies_by_the_processor_and_by_the_gpu() {
    const COPIES: usize = 64;
    for direct in [0, u64::MAX] {
        let options = VulkanOptions { sparse: false, direct, ..VulkanOptions::default() };
        let Some(opened) = open(&options, &Arc::default(), &Arc::default()) else { return };
        let mut device = opened.unwrap();
        let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
        let queue = &mut *queues[0];
        for len in [4 << 10, 64 << 10, 1 << 20] {
            let table = memory.allocate((COPIES * len) as u64, &Placement::Default).unwrap();
            let first = table.segments().next().unwrap().addr.bits();
            let directions = [Direction::FromHost, Direction::ToHost];
            for (batch, direction) in [1, COPIES].into_iter().flat_map(|n| directions.map(|direction| (n, direction))) {
                let mut hosts: Vec<HostSlice> = (0..COPIES)
                    .map(|_| register(&*registrar, &*registrar.heap(None), &vec![7; len]).unwrap())
                    .map(|(buf, via)| (buf.into_slice(), via).into())
                    .collect();
                let mut times = Vec::new();
                for _ in 0..30 {
                    let begun = std::time::Instant::now();
                    let mut done = Vec::new();
                    for (i, host) in hosts.drain(..).enumerate() {
                        // None follows the one before it.
                        let place = (i * 37 % COPIES * len) as u64;
                        let at = DeviceAddr::Card(dmalane_addr::CardAddr::new(first + place));
                        let _ticket = queue.submit(Operation::copy(direction, host, at)).unwrap();
                        if (i + 1) % batch == 0 {
                            done.extend(drain(queue, LONG));
                        }
                    }
                    times.push(begun.elapsed().as_secs_f64() * 1e6 / COPIES as f64);
                    hosts = done.into_iter().map(|end| end.operation.into_host().remove(0)).collect();
                }
                times.sort_by(f64::total_cmp);
                let who = if direct == 0 { "GPU" } else { "processor" };
                let (least, median, most) = (times[0], times[15], times[29]);
                println!(
                    "{who}, {len} bytes, {batch} at a time, {direction:?}: {median:.2} us ({least:.2} to {most:.2})"
                );
            }
            memory.free(table.segments()).unwrap();
        }
    }
}

#[test]
fn the_layers_are_heard() {
    let messages = Messages::new();
    let options = VulkanOptions { sparse: false, validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &Arc::default()) else { return };
    let device = opened.unwrap();
    if !device.info().notes.iter().any(|note| note.contains("validation layers")) {
        return skip("the validation layers are not installed");
    }
    checked(&messages);
    device.misuse();
    assert!(messages.take().iter().any(|m| m.contains("VUID")), "a buffer without a use is noticed");
}

#[test]
fn gpus_are_found_by_number_name_and_uuid() {
    let gpus = match crate::gpus() {
        Ok(gpus) => gpus,
        Err(e) => return skip(e),
    };
    let first = &gpus[0];
    let open = |name: &str| VulkanDevice::open(name, &VulkanOptions::default());
    for name in ["0", "0,flat", "0,channels=3,flat", &first.uuid(), &first.uuid().to_uppercase()] {
        assert_eq!(open(name).unwrap().gpu().uuid(), first.uuid(), "{name}");
    }
    let same_name = gpus.iter().filter(|g| g.name == first.name).count();
    match open(&first.name) {
        Ok(device) => assert!(same_name == 1 && device.gpu().name == first.name),
        Err(e) => assert!(same_name > 1 && matches!(e, Error::Ambiguous { .. }), "{e}"),
    }
    let mut three = open("0,channels=3,flat").unwrap();
    assert_eq!(three.address_space().kind(), AddressSpaceKind::Flat);
    assert_eq!(three.take_queues().len(), 3);
    let error = open("no such GPU").unwrap_err();
    assert!(matches!(error, Error::NoSuchGpu { .. }) && error.to_string().contains(&first.name), "{error}");
    assert!(matches!(open("4000000000"), Err(Error::NoSuchGpu { .. })));
}

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

#[test]
fn random_binds_are_seen_as_a_model_says() {
    const RANGES: usize = 24;
    const PAGES: u64 = 16;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    let options = VulkanOptions { sparse: true, validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    // Every page of the buffers says which it is.
    let tables = [(); 3].map(|()| memory.allocate(PAGES * page, &Placement::Default).unwrap());
    let bos: Vec<_> = tables
        .iter()
        .map(|table| {
            Arc::new(Bo::new(table.segments().next().unwrap().addr.bits(), SgIndex::from_table(table).unwrap()))
        })
        .collect();
    let name = |bo: usize, number: u64| 0x1000_0000_0000_0000 * (bo as u64 + 1) + number;
    for (i, table) in tables.iter().enumerate() {
        let first = table.segments().next().unwrap().addr.bits();
        let fill = |n| {
            let at = DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page));
            Operation::fill(at, page, name(i, n))
        };
        drop(run(&mut *queues[0], (0..PAGES).map(fill).collect()).unwrap());
    }
    let mut random = Random(1);
    // The reserved ranges, each with the name that its pages show; 0 where nothing is bound.
    let mut ranges: Vec<(Span<dmalane_addr::DeviceVa>, Vec<u64>)> = Vec::new();
    let rounds = std::env::var("DMALANE_BINDS").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
    for round in 0..rounds {
        let space = device.address_space();
        if ranges.len() < RANGES {
            let range = space.reserve(&tables[0], PAGES * page).unwrap();
            ranges.push((range, vec![0; PAGES as usize]));
        }
        let index = random.below(ranges.len() as u64) as usize;
        let (range, shown) = &mut ranges[index];
        if random.below(6) == 0 {
            space.unbind(*range).unwrap();
            ranges.swap_remove(index);
            continue;
        }
        let (bo, len) = (random.below(3) as usize, random.below(4) + 1);
        let (offset, at) = (random.below(PAGES - len + 1), random.below(PAGES - len + 1));
        let va = dmalane_addr::DeviceVa::new(range.first().bits() + at * page);
        let bind = Bind { va, bo: &bos[bo], offset: offset * page, len: len * page, access: Access::RW };
        let there = &mut shown[at as usize..][..len as usize];
        let bound = space.bind(&bind);
        assert_eq!(bound.is_ok(), there.iter().all(|name| *name == 0), "round {round}: {bound:?}");
        if bound.is_ok() {
            there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        }
        if round % 100 != 99 {
            continue;
        }
        // Every page, through the GPU: what is bound shows its name, what is not is refused.
        let space = device.address_space();
        for (range, shown) in &ranges {
            for (n, name) in shown.iter().enumerate() {
                let at = space.at(dmalane_addr::DeviceVa::new(range.first().bits() + n as u64 * page));
                let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
                let slice = buf.into_slice().split_at(8).unwrap().0;
                let read = run(&mut *queues[0], vec![Operation::read(HostSlice::from((slice, via)), at)]);
                assert_eq!(read.is_ok(), *name != 0, "round {round}, page {n} of {range}");
                if let Ok(done) = read {
                    let mut bytes = [0; 8];
                    done.into_iter().next().unwrap().operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
                    assert_eq!(u64::from_le_bytes(bytes), *name, "round {round}, page {n} of {range}");
                }
            }
        }
    }
    for (range, _) in ranges {
        device.address_space().unbind(range).unwrap();
    }
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn random_batches_are_seen_as_a_model_says() {
    const PAGES: u64 = 512;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    // Recording takes long under the layers.
    let long = std::env::var("DMALANE_BINDS").ok().and_then(|n| n.parse::<u64>().ok());
    let validation = Some(messages.clone()).filter(|_| long.is_none());
    let options = VulkanOptions { sparse: true, validation, ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let tables = [(); 3].map(|()| memory.allocate(PAGES / 4 * page, &Placement::Default).unwrap());
    let bos: Vec<_> = tables
        .iter()
        .map(|t| Arc::new(Bo::new(t.segments().next().unwrap().addr.bits(), SgIndex::from_table(t).unwrap())))
        .collect();
    let name = |bo: u64, number: u64| 0x1000_0000_0000_0000 * (bo + 1) + number;
    for (i, table) in tables.iter().enumerate() {
        let first = table.segments().next().unwrap().addr.bits();
        let fill = |n| {
            let at = DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page));
            Operation::fill(at, page, name(i as u64, n))
        };
        drop(run(&mut *queues[0], (0..PAGES / 4).map(fill).collect()).unwrap());
    }
    let mut random = Random(2);
    let range = device.address_space().reserve(&tables[0], PAGES * page).unwrap();
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
    let mut shown = vec![0; PAGES as usize];
    let (mut done, mut batches) = (0, 0u64);
    while done < long.unwrap_or(3000) {
        let mut requests = Vec::new();
        for _ in 0..random.below(64) + 1 {
            let len = random.below(8) + 1;
            let at = random.below(PAGES - len + 1);
            let there = &mut shown[at as usize..][..len as usize];
            if random.below(4) == 0 {
                requests.push(BindRequest::Unbind(Span::new(va(at), len * page).unwrap()));
                there.fill(0);
                continue;
            }
            let (bo, offset) = (random.below(3), random.below(PAGES / 4 - len + 1));
            requests.push(BindRequest::Bind {
                va: va(at),
                bo: bos[bo as usize].clone(),
                offset: offset * page,
                len: len * page,
                access: Access::RW,
            });
            there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        }
        done += requests.len() as u64;
        device.address_space().apply(&requests).unwrap();
        batches += 1;
        if batches % 16 != 1 && done < long.unwrap_or(3000) {
            continue;
        }
        // The first bytes of all pages, at once; those of holes one by one, because they are refused.
        let space = device.address_space();
        let (buf, via) = register(&*registrar, &*heap, &vec![0; PAGES as usize * 8]).unwrap();
        let mut rest = buf.into_slice();
        let mut reads = Vec::new();
        for (n, name) in (0..).zip(&shown) {
            let slice = rest.split_off_front(8).unwrap();
            let read = Operation::read(HostSlice::from((slice, via.clone())), space.at(va(n)));
            match name {
                0 => assert!(run(&mut *queues[0], vec![read]).is_err(), "page {n} is a hole after {done}"),
                _ => reads.push((n, read)),
            }
        }
        let (numbers, reads): (Vec<u64>, Vec<_>) = reads.into_iter().unzip();
        for (n, end) in numbers.into_iter().zip(run(&mut *queues[0], reads).unwrap()) {
            let mut bytes = [0; 8];
            end.operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), shown[n as usize], "page {n} after {done} requests");
        }
    }
    println!("{done} requests in {batches} batches");
    device.address_space().unbind(range).unwrap();
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}
