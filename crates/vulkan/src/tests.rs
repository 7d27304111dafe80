//! Tests that make calls fail, and count what is left.

mod binds;
mod conformance;
mod dma_buf;
pub(crate) mod layers;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ash::vk;
use dmalane_addr::{Access, SgIndex, SgTable, Span};
use dmalane_device::{AddressSpaceKind, Device, DriverCopy, Placement};
use dmalane_dma::{Heap, Registrar, SharedBuf, error_chain};
use dmalane_queue::{
    Completion, DeviceAddr, DeviceQueue, Direction, HostSlice, OpError, Operation, Registered, Shape, StopReason, drain,
};
use dmalane_vm::{BindRequest, Bo};

use crate::fault::Faults;
use crate::gpu::Live;
use crate::tests::layers::Messages;
use crate::{Error, VulkanDevice, VulkanOptions};

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

fn left(live: &Live) -> [u64; 5] {
    let Live { memories, imports, buffers, semaphores, pools, .. } = live;
    [memories, imports, buffers, semaphores, pools].map(|count| count.load(Ordering::Relaxed))
}

fn checked(messages: &Messages) {
    let messages = messages.take();
    assert!(messages.is_empty(), "{} messages:\n{}", messages.len(), messages.join("\n"));
}

fn register(registrar: &dyn Registrar, heap: &dyn Heap, bytes: &[u8]) -> Result<(SharedBuf, Registered), String> {
    let mut buf = heap.allocate(bytes.len()).map_err(|e| error_chain(&e))?;
    buf.copy_from_slice(bytes);
    let buf = buf.share();
    let via = Registered::new(registrar, &buf, Access::RW).map_err(|e| error_chain(&e))?;
    Ok((buf, via))
}

fn run(queue: &mut DeviceQueue, operations: Vec<Operation>) -> Result<Vec<Completion>, String> {
    for operation in operations {
        let _ticket = queue.submit(operation).map_err(|e| error_chain(&e))?;
    }
    let done = drain(queue, LONG);
    match done.iter().find_map(|c| c.result.as_ref().err()) {
        Some(e) => {
            assert!(!matches!(e, OpError::Stopped(_)) || queue.halted().is_some(), "{e}, and the queue goes on");
            Err(error_chain(&e))
        }
        None => Ok(done),
    }
}

/// Uses all that a device has.
fn use_all(device: &mut VulkanDevice) -> Result<(), String> {
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let result = (|| {
        let table = memory.allocate(4 << 20, &Placement::Default).map_err(|e| error_chain(&e))?;
        let first = table.segments().next().expect("memory").addr;
        let at = |offset: u64| DeviceAddr::Card(first + offset);
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
        let mut driver = device.driver_copies().map_err(|e| error_chain(&*e))?.expect("a driver copies");
        let (buf, host) = register(&*registrar, &*heap, &vec![0; LEN])?;
        let copy = DriverCopy { direction: Direction::ToHost, host, offset: 0, at: first, len: LEN as u64 };
        driver.copy(&[copy], 2).map_err(|e| error_chain(&*e))?;
        buf.into_slice().read(0, &mut got).unwrap();
        assert!(got == bytes, "what the driver copied");
        drop(driver);
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
        let page = device.address_space().page().bytes();
        let space = device.address_space();
        let range = space.reserve(&table, 4 << 20).map_err(|e| error_chain(&e))?;
        let bound = space
            .apply(&[BindRequest::Bind {
                va: range.first(),
                bo: bo.clone(),
                offset: 0,
                len: page.max(1 << 20),
                access: Access::RW,
            }])
            .map_err(|e| error_chain(&e));
        let seen = bound.and_then(|()| {
            let at = space.at(range.first());
            let (buf, via) = register(&*registrar, &*heap, &vec![0; LEN])?;
            run(queue, vec![Operation::read(HostSlice::from((buf.into_slice(), via)), at)])
        });
        space.release(range).map_err(|e| error_chain(&e))?;
        seen?.into_iter().next().unwrap().operation.into_slice().unwrap().read(0, &mut got).unwrap();
        assert!(got == bytes, "what was bound");
        memory.free(table.segments()).map_err(|e| error_chain(&e))
    })();
    if device.shared().check().is_err() {
        let refused = refusals(device, &mut memory, &mut *queues[0]);
        assert!(refused.iter().all(|e| e.contains("is lost")), "{refused:?}, {result:?}");
    }
    drop(queues);
    assert_eq!(heap.stats().live, 0, "host memory is released: {result:?}");
    result
}

/// Why each part of a device that is lost does nothing any more.
fn refusals(
    device: &mut VulkanDevice,
    memory: &mut dmalane_device::DeviceMemory,
    queue: &mut DeviceQueue,
) -> Vec<String> {
    let table = memory.allocate(1 << 20, &Placement::Default).unwrap();
    let first = table.segments().next().expect("memory").addr;
    let at = DeviceAddr::Card(first);
    let registrar = device.registrar();
    queue.poll(&mut Vec::new());
    assert!(matches!(queue.halted(), Some(StopReason::Lost(_))), "{:?}", queue.halted());
    assert!(!queue.restart(), "a queue of a lost device");
    let mut whys = vec![run(queue, vec![Operation::fill(at, 4096, 0)]).unwrap_err()];
    let (_buf, host) = register(&*registrar, &*registrar.heap(None), &[0; 4096]).unwrap();
    let copy = DriverCopy { direction: Direction::ToHost, host, offset: 0, at: first, len: 4096 };
    let mut driver = device.driver_copies().unwrap().expect("a driver copies");
    whys.push(error_chain(&*driver.copy(&[copy], 1).unwrap_err()));
    if device.sparse_pages().is_some() {
        let bo = Arc::new(Bo::new(2, SgIndex::from_table(&table).unwrap()));
        let space = device.address_space();
        let va = space.reserve(&table, 1 << 20).unwrap().first();
        let bound =
            space.apply(&[BindRequest::Bind { va, bo: bo.clone(), offset: 0, len: 1 << 20, access: Access::RW }]);
        whys.extend([bound, space.settle()].map(|done| error_chain(&done.unwrap_err())));
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
    let binds = opened.sparse_pages().is_some();
    use_all(&mut opened).unwrap();
    drop(opened);
    assert_eq!(left(&live), [0; 5], "nothing is left when nothing fails");
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
                Err(e) => (Err(error_chain(&e)), String::new(), true),
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
            assert_eq!(left(&live), [0; 5], "left when {call} (call {number}) failed with {result:?}");
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
        "vkCreateDevice",
        "vkCreateInstance",
        "vkCreateSemaphore",
        "vkEndCommandBuffer",
        "vkEnumerateDeviceExtensionProperties",
        "vkEnumeratePhysicalDevices",
        "vkGetSemaphoreCounterValue",
        "vkQueueSubmit",
        "vkWaitSemaphores",
    ];
    let of_this = if host_import { "vkGetMemoryHostPointerPropertiesEXT" } else { "vkMapMemory" };
    let more = [(true, of_this), (binds, "vkQueueBindSparse")];
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
        Self::as_given(&VulkanOptions { direct: 0, validation: Some(Messages::new()), ..options.clone() }, live)
    }

    /// With these options and no others.
    fn as_given(options: &VulkanOptions, live: Arc<Live>) -> Option<Self> {
        let faults = Arc::<Faults>::default();
        let mut device = open(options, &faults, &live)?.unwrap();
        if options.sparse && device.sparse_pages().is_none() {
            println!("SKIPPED: the driver cannot bind sparse buffers");
            return None;
        }
        let messages = options.validation.clone().unwrap_or_default();
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
        assert_eq!(left(&live), [0; 5]);
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
fn memory_of_several_buffers_of_the_driver_is_one_to_queues() {
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
    // Parts on both sides of each cut, into two pieces of host memory.
    let DeviceAddr::Card(first) = at else { panic!("a card address") };
    let part = |offset: u64| DeviceAddr::Card(first + offset);
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
    drop(done);
    gpu.end();
}

#[test]
fn where_import_takes_more_than_a_page_the_driver_allocates_host_memory() {
    let live = Arc::<Live>::default();
    live.import_align.store(1 << 20, Ordering::Relaxed);
    let messages = Messages::new();
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.gpu().host_import.is_none() {
        return println!("SKIPPED: the driver imports no host memory");
    }
    use_all(&mut device).unwrap();
    let notes = device.info().notes.join("\n");
    assert!(notes.contains("the driver refuses it (only at multiples of 1048576 bytes"), "{notes}");
    drop(device);
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
}

#[test]
fn a_gpu_without_memory_says_how_much_is_free() {
    let Some(mut gpu) = Opened::new(false) else { return };
    gpu.faults.fail_call("vkAllocateMemory", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    let error = error_chain(&gpu.memory.allocate(1 << 20, &Placement::Default).unwrap_err());
    let free = error.contains("bytes of the GPU's memory are free") || error.contains("VK_EXT_memory_budget");
    assert!(free && error.contains("no 1048576 bytes") && error.contains("vkAllocateMemory"), "{error}");
    gpu.end();
}

#[test]
fn where_import_is_refused_the_driver_allocates_host_memory() {
    let (faults, live) = (Arc::<Faults>::default(), Arc::<Live>::default());
    faults.fail_call("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
    let messages = Messages::new();
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &faults, &live) else { return };
    let mut device = opened.unwrap();
    let notes = device.info().notes.join("\n");
    assert!(notes.contains("the driver refuses it (vkGetMemoryHostPointerPropertiesEXT failed"), "{notes}");
    use_all(&mut device).unwrap();
    drop(device);
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
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
        let [memories, imports, buffers, semaphores, pools] = left(&live);
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
fn the_drivers_limits_hold_for_host_memory_too() {
    let options =
        VulkanOptions { sparse: false, largest: Some(4 << 20), host_import: false, ..VulkanOptions::default() };
    let Some(gpu) = Opened::with(&options) else { return };
    let heap = gpu.registrar.heap(None);
    let error = error_chain(&heap.allocate(8 << 20).unwrap_err());
    assert!(error.contains("of 8388608 bytes is larger than the driver's largest (4194304)"), "{error}");
    let most = u64::from(gpu.device.gpu().max_allocations);
    let left = most - gpu.live.memories.load(Ordering::Relaxed);
    gpu.live.memories.fetch_add(left, Ordering::Relaxed);
    let error = error_chain(&heap.allocate(1 << 20).unwrap_err());
    gpu.live.memories.fetch_sub(left, Ordering::Relaxed);
    assert!(error.contains(&format!("makes {most} allocations at most")), "{error}");
    drop(heap.allocate(1 << 20).unwrap());
    gpu.end();
}

/// An error and its causes.

#[test]
fn a_device_has_queues() {
    let options = VulkanOptions { channels: Some(0), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &Arc::default()) else { return };
    assert!(matches!(opened, Err(Error::NoQueues)));
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
    assert_eq!(left(&live), [0; 5]);
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
        faults.heal();
        drop(run(queue, vec![Operation::write(host(7), at)]).unwrap());
        assert_eq!(faults.called("vkQueueSubmit"), direct == 0, "nothing was submitted");
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
        assert_eq!(left(&live), [0; 5]);
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
    if !device.shared().is_validated() {
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
    for name in ["0", &first.uuid(), &first.uuid().to_uppercase()] {
        assert_eq!(open(name).unwrap().gpu().uuid(), first.uuid(), "{name}");
    }
    let same_name = gpus.iter().filter(|g| g.name == first.name).count();
    match open(&first.name) {
        Ok(device) => assert!(same_name == 1 && device.gpu().name == first.name),
        Err(e) => assert!(same_name > 1 && matches!(e, Error::Ambiguous { .. }), "{e}"),
    }
    let options = VulkanOptions { sparse: false, channels: Some(3), ..VulkanOptions::default() };
    let mut three = VulkanDevice::open("0", &options).unwrap();
    assert_eq!(three.address_space().kind(), AddressSpaceKind::Flat);
    assert_eq!(three.take_queues().len(), 3);
    let error = open("no such GPU").unwrap_err();
    assert!(matches!(error, Error::NoSuchGpu { .. }) && error_chain(&error).contains(&first.name), "{error}");
    assert!(matches!(open("4000000000"), Err(Error::NoSuchGpu { .. })));
}
