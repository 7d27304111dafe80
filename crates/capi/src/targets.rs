//! Open devices, their memory, host memory registered with them, and loads, behind the numbers that C holds.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dmalane::device::AddressSpaceKind;
use dmalane::dma::{BufferSlice, OfProcess, SharedBuf};
use dmalane::load::kept::{KeeperClient, socket_path};
use dmalane::load::{Error as LoadError, Loaded, LoadedTensor, TensorAlign};
use dmalane::queue::{
    Cancelled, Capabilities, Completion, Direction, HaltWatch, HostSlice, OpError, Operation, Queue,
    Refused as NotAccepted, Registered, Shape, StopReason, Ticket,
};
use dmalane::{HostModel, LoadOptions, ModelOptions, OpenDevice, Placement, error_chain};
use dmalane_addr::{Access, DeviceVa, SgIndex, Span};
use dmalane_vm::{BindRequest, Bo, Errno, Handles, array};

use crate::buffers;
use crate::models;
use crate::numbers::{EALREADY, ENODEV, number_of, number_of_refusal};
use crate::objects::{EBUSY, Number, Numbered, Refused, lock, none, remove};
use crate::stretches::Stretches;
use crate::types::{DmlCompletion, DmlModelTensor, DmlTargetInfo, DmlTargetOp, DmlTensor};

static TARGETS: Mutex<Numbered<Target>> = Mutex::new(Numbered::new());
static MEMORIES: Mutex<Numbered<HostMemory>> = Mutex::new(Numbered::new());
static LOADS: Mutex<Numbered<OneLoad>> = Mutex::new(Numbered::new());

/// How long a call that waits keeps other threads from the target.
const TURN: Duration = Duration::from_millis(5);

/// An open device. What belongs to a process is known before its lock is taken, which may be held for ever in a child
/// of `fork`.
struct Target(OfProcess<Mutex<Opened>>);

struct Opened {
    device: OpenDevice,
    /// From then on only loads use the device, which keep it.
    closed: bool,
    /// Its memory, by handle.
    memory: Handles,
    /// Reserved ranges: where each begins, its length, the handle that it was reserved for.
    ranges: BTreeMap<u64, (Span<DeviceVa>, u32)>,
    /// Operations in flight, by ticket.
    flying: BTreeMap<u64, Flying>,
    /// The host memory of those that have ended for C, but that a lost device has not let go of.
    lost: BTreeMap<u64, Vec<Arc<HostMemory>>>,
    watch: HaltWatch,
    /// Completions that were polled and are not yet given to C.
    done: Vec<Completion>,
}

struct Flying {
    user: u64,
    /// The host memory of each slice of the operation.
    memories: Vec<Arc<HostMemory>>,
}

/// Host memory that a target reaches.
struct HostMemory {
    via: Registered,
    /// All of it. Operations have duplicates.
    whole: BufferSlice,
    /// The bytes that operations in flight use.
    busy: Mutex<Stretches>,
    /// Operations of a lost device that keep slices.
    lost: AtomicUsize,
}

/// Files on a target. `None` once they were unloaded.
struct OneLoad {
    target: Arc<Target>,
    loaded: Mutex<Option<Loaded>>,
}

impl Target {
    fn of(number: u64) -> Result<Arc<Self>, Refused> {
        lock(&TARGETS).get(number, "target")
    }

    /// Locks the device, which may be closed; an error when a panic may have left it inconsistent.
    fn lock_even_closed(&self) -> Result<MutexGuard<'_, Opened>, Refused> {
        self.0.check()?;
        let broken = |_| Refused::new(Errno::Canceled, "an earlier call on this target failed because of a bug");
        self.0.lock().map_err(broken)
    }

    /// Locks the device; an error, too, when another thread has closed it meanwhile.
    fn lock(&self) -> Result<MutexGuard<'_, Opened>, Refused> {
        let opened = self.lock_even_closed()?;
        if opened.closed { Err(Refused::new(Errno::NoEnt, "the target was closed")) } else { Ok(opened) }
    }

    /// As [`Target::lock`], for what needs the queues alone.
    fn lock_idle(&self) -> Result<MutexGuard<'_, Opened>, Refused> {
        let opened = self.lock()?;
        opened.idle()?;
        Ok(opened)
    }
}

fn busy(what: impl std::fmt::Display) -> Refused {
    Refused::new(Number(EBUSY), what)
}

pub(crate) fn open(name: &str) -> Result<u64, Refused> {
    let device = dmalane::open(name)?;
    let opened = Opened {
        device,
        closed: false,
        memory: Handles::default(),
        ranges: BTreeMap::new(),
        flying: BTreeMap::new(),
        lost: BTreeMap::new(),
        watch: HaltWatch::default(),
        done: Vec::new(),
    };
    Ok(lock(&TARGETS).add(Target(OfProcess::new(Mutex::new(opened)))))
}

/// `DML_TARGET_FLAT`.
const FLAT: u32 = 1;

/// The flags of capabilities: `DML_TARGET_WITHIN` and its like.
const FLAGS: [(Capabilities, u32); 6] = [
    (Capabilities::WITHIN, 1 << 1),
    (Capabilities::FILL, 1 << 2),
    (Capabilities::COMPARE, 1 << 3),
    (Capabilities::SHAPE, 1 << 4),
    (Capabilities::GATHER, 1 << 5),
    (Capabilities::CANCEL, 1 << 6),
];

pub(crate) fn info(target: u64) -> Result<DmlTargetInfo, Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let queue = opened.device.queue_mut();
    let (limits, capabilities) = (queue.limits(), queue.capabilities());
    let able = FLAGS.iter().filter(|(capability, _)| capabilities.contains(*capability)).map(|(_, flag)| flag);
    let space = opened.device.address_space();
    let flat = if space.kind() == AddressSpaceKind::Flat { FLAT } else { 0 };
    let (page, flags) = (space.page().bytes(), able.fold(flat, |all, flag| all | flag));
    let free = opened.device.memory().free_bytes();
    let (max_len, capacity, max_parts) = (limits.max_len, limits.capacity as u64, limits.max_parts as u64);
    Ok(DmlTargetInfo { free, page, max_len, capacity, max_parts, flags, zero: 0 })
}

pub(crate) fn close(target: u64) -> Result<(), Refused> {
    // It closes with the last reference, of this call or of one that waits for it: without a lock.
    let found = Target::of(target)?;
    found.lock_idle()?.closed = true;
    remove(&TARGETS, target, "target")
}

/// Keeps a registered buffer, and says where its bytes are.
fn keep(via: Registered, buffer: SharedBuf) -> (u64, *mut c_void) {
    let at = buffer.as_volatile_slice().as_ptr().cast();
    let memory = HostMemory { via, whole: buffer.into_slice(), busy: Mutex::default(), lost: AtomicUsize::new(0) };
    (lock(&MEMORIES).add(memory), at)
}

pub(crate) fn create_memory(target: u64, len: u64) -> Result<(u64, *mut c_void), Refused> {
    let len = usize::try_from(len).map_err(|_| Refused::new(Errno::NoMem, format_args!("{len} bytes")))?;
    let registrar = Target::of(target)?.lock()?.device.registrar().clone();
    let buffer = registrar.heap(None).allocate(len)?.share();
    Ok(keep(Registered::new(&*registrar, &buffer, Access::RW)?, buffer))
}

/// Registers a filled buffer, whose number then names nothing any more.
pub(crate) fn register_buffer(target: u64, buffer: u64) -> Result<(u64, *mut c_void), Refused> {
    let registrar = Target::of(target)?.lock()?.device.registrar().clone();
    let filled = buffers::get(buffer)?;
    let via = Registered::new(&*registrar, filled.shared(), Access::RW)?;
    drop(filled);
    Ok(keep(via, buffers::take(buffer)?.into_shared()))
}

pub(crate) fn destroy_memory(memory: u64) -> Result<(), Refused> {
    let found = lock(&MEMORIES).get(memory, "host memory")?;
    if found.lost.load(Ordering::Relaxed) == 0 && !lock(&found.busy).is_empty() {
        return Err(busy("an operation in flight uses the host memory"));
    }
    remove(&MEMORIES, memory, "host memory")
}

impl HostMemory {
    /// Takes a range for an operation. Others may read it while it does so too.
    fn take(&self, offset: u64, len: u64, writes: bool) -> Result<BufferSlice, Refused> {
        let out_of_range =
            || Refused::new(Errno::Range, format_args!("{len} bytes from {offset} of {}", self.whole.len()));
        let end = offset.checked_add(len).filter(|end| *end <= self.whole.len() as u64).ok_or_else(out_of_range)?;
        let (first, end) = (offset as usize, end as usize);
        let slice = self.whole.duplicate(first..end)?;
        let taken = lock(&self.busy).take(first, end, writes);
        let in_use = || busy(format_args!("an operation in flight uses some of the {len} bytes from {first} on"));
        taken.then_some(slice).ok_or_else(in_use)
    }

    fn give_back(&self, part: &BufferSlice) {
        lock(&self.busy).give_back(part.offset(), part.offset() + part.len());
    }
}

/// The placement of this name; the default without one.
fn placement(text: Option<&str>) -> Result<Placement, Refused> {
    let bad = |text| move |e| Refused::new(Errno::Inval, format_args!("{text:?} is {e}"));
    text.map_or(Ok(Placement::Default), |text| text.parse().map_err(bad(text)))
}

pub(crate) fn allocate(target: u64, len: u64, placement: Option<&str>) -> Result<u32, Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let placement = self::placement(placement)?;
    let Opened { device, memory, .. } = &mut *opened;
    if len == 0 {
        return Err(Refused::new(Errno::Inval, "no bytes"));
    }
    let table = device.memory_mut().allocate(len, &placement)?;
    let handle = SgIndex::from_table(&table).map_err(|e| Refused::new(Errno::NoMem, e)).and_then(|index| {
        let handle = memory.insert_with(|handle| Arc::new(Bo::new(handle.into(), index)));
        handle.ok_or_else(|| Refused::new(Errno::NoMem, "no more handles"))
    });
    if handle.is_err() {
        device.memory_mut().free(table.segments())?;
    }
    handle
}

pub(crate) fn free(target: u64, handle: u32) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock_idle()?;
    let Opened { device, memory, ranges, .. } = &mut *opened;
    let bo = memory.get(handle).ok_or_else(|| none(handle.into(), "device memory"))?;
    if bo.bound_vms() > 0 || ranges.values().any(|(_, of)| *of == handle) {
        return Err(busy("the device memory is bound, or a range is reserved for it"));
    }
    device.memory_mut().free(bo.sg().segments())?;
    memory.remove(handle);
    Ok(())
}

/// Where the range begins, and its length.
pub(crate) fn reserve(target: u64, handle: u32, len: u64) -> Result<(u64, u64), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let Opened { device, memory, ranges, .. } = &mut *opened;
    let bo = memory.get(handle).ok_or_else(|| none(handle.into(), "device memory"))?;
    let table = bo.sg().segments().try_fold(dmalane_addr::SgTable::new(), |mut table, segment| {
        table.push(segment.addr, segment.len)?;
        Some(table)
    });
    let table = table.ok_or_else(|| Refused::new(Errno::Overflow, "the device memory goes beyond 64 bits"))?;
    let len = if len == 0 { bo.len() } else { len };
    let range = device.address_space().reserve(&table, len)?;
    ranges.insert(range.first().bits(), (range, handle));
    Ok((range.first().bits(), range.len()))
}

/// Unbinds all that is bound in a range, and gives the range back.
pub(crate) fn release(target: u64, va: u64) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock_idle()?;
    let missing = || Refused::new(Errno::NoEnt, format_args!("no range was reserved at {va:#x}"));
    let (range, _) = *opened.ranges.get(&va).ok_or_else(missing)?;
    opened.device.address_space().release(range)?;
    opened.ranges.remove(&va);
    Ok(())
}

pub(crate) fn bind(target: u64, bytes: &[u8], stride: usize, count: usize) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let Opened { device, memory, ranges, .. } = &mut *opened;
    let space = device.address_space();
    let requests = array::requests(bytes, stride, count, space.page(), memory)?;
    // A tensor's range is a load's, which unbinds it.
    let spans = requests.iter().filter_map(|request| match request {
        BindRequest::Bind { va, len, .. } | BindRequest::Repeat { va, len, .. } | BindRequest::Null { va, len } => {
            Some(Span::new(*va, *len).ok_or(*va))
        }
        BindRequest::Unbind(span) | BindRequest::Prefetch(span) => Some(Ok(*span)),
        _ => None,
    });
    for span in spans {
        let va = span.map_or_else(|va| va, |span| span.first());
        let range = ranges.range(..=va.bits()).next_back().map(|(_, (range, _))| range);
        if !span.is_ok_and(|span| range.is_some_and(|range| range.covers(&span))) {
            return Err(Refused::new(Errno::NoEnt, format_args!("{va} is not in a range that was reserved")));
        }
    }
    Ok(space.apply(&requests)?)
}

const TO_DEVICE: u32 = 0;
const TO_HOST: u32 = 1;
const WITHIN: u32 = 2;
const FILL: u32 = 3;
const COMPARE: u32 = 4;
const FENCE: u32 = 5;
/// `DML_MORE`.
const MORE: u32 = 1 << 31;

/// Submits operations until one is refused, and says how many were accepted.
pub(crate) fn submit(
    target: u64,
    requests: impl Iterator<Item = Result<DmlTargetOp, Refused>>,
) -> (usize, Result<(), Refused>) {
    let mut accepted = 0;
    let each = || {
        let target = Target::of(target)?;
        let mut opened = target.lock()?;
        let result = opened.submit_all(requests, &mut accepted);
        opened.device.queue_mut().flush();
        result
    };
    let result = each();
    (accepted, result)
}

/// Cancels the oldest operation with this number of C's that has not ended.
pub(crate) fn cancel(target: u64, user: u64) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let Opened { device, flying, done, .. } = &mut *opened;
    for (number, _) in flying.iter().filter(|(_, flying)| flying.user == user) {
        let ticket = Ticket::new(*number);
        match device.queue_mut().cancel(ticket) {
            Cancelled::Removed(operation) => {
                done.push(Completion { ticket, operation, result: Err(OpError::Cancelled), bytes: 0 });
                return Ok(());
            }
            Cancelled::Requested => return Ok(()),
            Cancelled::TooLate => {
                return Err(Refused::new(Number(EALREADY), "the device has begun and does all of it"));
            }
            Cancelled::Unknown => {} // it waits in `done`
        }
    }
    Err(none(user, "operation in flight with the number"))
}

impl DmlTargetOp {
    /// Checks the kind of the operation, and that fields that it does not use are 0.
    fn check(&self) -> Result<(), Refused> {
        let inval = |what: std::fmt::Arguments<'_>| Err(Refused::new(Errno::Inval, what));
        let kind = self.kind & !MORE;
        let (host, value) = match kind {
            TO_DEVICE | TO_HOST | COMPARE => (true, false),
            WITHIN | FILL => (false, true),
            FENCE => (false, false),
            other => return inval(format_args!("no kind of operation is {other}")),
        };
        let more = self.kind & MORE != 0;
        if more && (kind > TO_HOST || self.rows > 0) {
            return inval(format_args!("a gather list of other operations than copies, or with rows"));
        }
        let unused = (!host && (self.memory, self.offset) != (0, 0))
            || (!value && self.value != 0)
            || (self.rows == 0 && (self.memory_pitch, self.pitch) != (0, 0))
            || (kind == FILL && self.memory_pitch != 0)
            || (kind == FENCE && (self.rows, self.len, self.at) != (0, 0, 0));
        if unused { inval(format_args!("a field that this kind of operation does not use is not 0")) } else { Ok(()) }
    }

    fn shape(&self) -> Option<Shape> {
        let Self { rows, len: row, memory_pitch: host_pitch, pitch: device_pitch, .. } = *self;
        (rows > 0).then_some(Shape { row, rows, host_pitch, device_pitch })
    }

    /// Takes its host memory.
    fn take(&self) -> Result<(Arc<HostMemory>, HostSlice), Refused> {
        let memory = lock(&MEMORIES).get(self.memory, "host memory")?;
        let len = self.shape().map_or(Some(self.len), |shape| shape.extent(shape.host_pitch));
        let len = len.ok_or_else(|| Refused::new(Errno::Overflow, "rows of no bytes, or beyond 64 bits"))?;
        let writes = self.kind & !MORE == TO_HOST;
        let host = HostSlice { slice: memory.take(self.offset, len, writes)?, via: Some(memory.via.clone()) };
        Ok((memory, host))
    }
}

/// Gives slices back to the memory that they are of.
fn give_back(memories: &[Arc<HostMemory>], hosts: Vec<HostSlice>) {
    memories.iter().zip(hosts).for_each(|(memory, host)| memory.give_back(&host.slice));
}

impl Opened {
    fn idle(&self) -> Result<(), Refused> {
        match self.flying.len() {
            0 => Ok(()),
            n => Err(busy(format_args!("{n} operations have not been polled"))),
        }
    }

    fn submit_all(
        &mut self,
        requests: impl Iterator<Item = Result<DmlTargetOp, Refused>>,
        accepted: &mut usize,
    ) -> Result<(), Refused> {
        let mut list = Vec::new();
        for request in requests {
            let request = request?;
            request.check()?;
            let more = request.kind & MORE != 0;
            list.push(request);
            if !more {
                self.submit(&list)?;
                *accepted += list.len();
                list.clear();
            }
        }
        if list.is_empty() { Ok(()) } else { Err(Refused::new(Errno::Inval, "the array ends within a gather list")) }
    }

    /// Submits an operation, or a gather list.
    fn submit(&mut self, list: &[DmlTargetOp]) -> Result<(), Refused> {
        let Some((last, before)) = list.split_last() else { return Ok(()) };
        if before.iter().any(|part| part.kind != last.kind | MORE) || !before.is_empty() && last.rows > 0 {
            return Err(Refused::new(Errno::Inval, "a gather list of different kinds, or with rows"));
        }
        if !self.lost.is_empty() {
            return Err(Refused::new(Number(ENODEV), "the device was lost with operations in flight"));
        }
        let (mut memories, mut hosts) = (Vec::new(), Vec::new());
        if matches!(last.kind, TO_DEVICE | TO_HOST | COMPARE) {
            for part in list {
                match part.take() {
                    Ok((memory, host)) => {
                        memories.push(memory);
                        hosts.push(host);
                    }
                    Err(error) => {
                        give_back(&memories, hosts);
                        return Err(error);
                    }
                }
            }
        }
        let space = self.device.address_space();
        let place = |va: u64| space.at(DeviceVa::new(va));
        let at = place(last.at);
        let shape = last.shape();
        let len = shape.map_or(Some(last.len), |shape| shape.bytes()).unwrap_or(u64::MAX); // which is too long
        let direction = if last.kind == TO_DEVICE { Direction::FromHost } else { Direction::ToHost };
        let operation = match (last.kind, hosts.pop()) {
            (COMPARE, Some(host)) => Operation::compare(host, at),
            (_, Some(host)) if before.is_empty() => Operation::copy(direction, host, at),
            (_, Some(host)) => {
                hosts.push(host);
                let device = list.iter().map(|part| (place(part.at), part.len)).collect();
                Operation::gather(direction, hosts, device)
            }
            (WITHIN, None) => Operation::within(place(last.value), at, len),
            (FILL, None) => Operation::fill(at, len, last.value),
            _ => Operation::fence(),
        };
        let operation = match shape {
            Some(shape) => operation.shaped(shape),
            None => operation,
        };
        match self.device.queue_mut().submit(operation) {
            Ok(ticket) => {
                self.flying.insert(ticket.number(), Flying { user: last.user, memories });
                Ok(())
            }
            Err(NotAccepted { operation, reason }) => {
                give_back(&memories, operation.into_host());
                Err(Refused::new(number_of_refusal(&reason), reason))
            }
        }
    }

    /// Waits for completions, for up to `timeout`. A device that has halted and does not let go of the operations in
    /// flight is lost: they end, and what they use stays with the queue.
    fn wait(&mut self, timeout: Duration) {
        let Self { device, flying, lost, watch, done, .. } = self;
        let queue = device.queue_mut();
        queue.wait(done, timeout);
        done.retain_mut(|completion| {
            let Some(memories) = lost.remove(&completion.ticket.number()) else { return true };
            give_back(&memories, std::mem::replace(&mut completion.operation, Operation::fence()).into_host());
            memories.iter().for_each(|memory| _ = memory.lost.fetch_sub(1, Ordering::Relaxed));
            false
        });
        if done.is_empty()
            && let Some(why) = watch.lost(queue)
        {
            let why = match why {
                StopReason::Lost(_) => why,
                why => StopReason::Lost(format!("it does not stop: {}", error_chain(&why)).into()),
            };
            for (number, flying) in flying {
                let memories = std::mem::take(&mut flying.memories);
                memories.iter().for_each(|memory| _ = memory.lost.fetch_add(1, Ordering::Relaxed));
                lost.insert(*number, memories);
                let result = Err(OpError::Stopped(why.clone()));
                done.push(Completion { ticket: Ticket::new(*number), operation: Operation::fence(), result, bytes: 0 });
            }
        }
        done.reverse(); // taken from the end
    }

    /// The next completion, as C gets it, with the text of its error.
    fn ended(&mut self) -> Option<(DmlCompletion, Option<String>)> {
        let completion = self.done.pop()?;
        let flying = self.flying.remove(&completion.ticket.number());
        let user = flying.as_ref().map_or(0, |flying| flying.user);
        if let Some(flying) = flying {
            give_back(&flying.memories, completion.operation.into_host());
        }
        let error = completion.result.err();
        let result = error.as_ref().map_or(0, |e| -number_of(e).0);
        let ended = DmlCompletion { user, bytes: completion.bytes, result, zero: 0 };
        Some((ended, error.map(|e| error_chain(&e))))
    }
}

/// Hands out up to `capacity` completions, and waits up to `timeout` for the first.
pub(crate) fn poll(
    target: u64,
    capacity: usize,
    timeout: Duration,
    each: &mut dyn FnMut(DmlCompletion, Option<String>) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let start = Instant::now();
    loop {
        let mut opened = target.lock()?;
        if capacity == 0 || opened.flying.is_empty() {
            return Ok(());
        }
        let left = timeout.saturating_sub(start.elapsed()).min(TURN);
        if opened.done.is_empty() {
            opened.wait(left);
        }
        if !opened.done.is_empty() {
            for _ in 0..capacity {
                let Some((ended, text)) = opened.ended() else { break };
                each(ended, text)?;
            }
            return Ok(());
        }
        if start.elapsed() >= timeout {
            return Ok(());
        }
        drop(opened);
        std::thread::yield_now();
    }
}

/// Stops the queues. Operations that the device does not end are returned with an error.
pub(crate) fn stop(target: u64) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock()?;
    let queue = opened.device.queue_mut();
    if !queue.capabilities().contains(Capabilities::STOP) {
        return Err(Refused::new(Errno::NotSup, "the queues of the device cannot be stopped"));
    }
    queue.stop(StopReason::Requested("dml_target_stop".into()));
    Ok(())
}

/// Lets stopped queues run again.
pub(crate) fn restart(target: u64) -> Result<(), Refused> {
    let target = Target::of(target)?;
    let mut opened = target.lock_idle()?;
    // A device that was lost may have let go of its operations since.
    opened.wait(Duration::ZERO);
    let queue = opened.device.queue_mut();
    if queue.restart() {
        return Ok(());
    }
    let halted = queue.halted().ok_or_else(|| Refused::new(Errno::Inval, "no queue has stopped"))?;
    Err(Refused::new(Number(ENODEV), format_args!("the device does not answer: {halted}")))
}

/// `DML_LOAD_VERIFY`.
const LOAD_VERIFY: u32 = 1;
/// The bits that `DML_LOAD_ALIGN` fills, and the first of them.
const LOAD_ALIGN: (u32, u32) = (0xff00, 8);

/// Loads a file onto a target.
pub(crate) fn load(target: u64, path: &str, placement: Option<&str>, flags: u32) -> Result<u64, Refused> {
    let open = || Ok(HostModel::open([path], ModelOptions::default())?);
    load_model(target, open, placement, flags)
}

/// Loads a model that is open onto a target.
pub(crate) fn load_open(target: u64, model: u64, placement: Option<&str>, flags: u32) -> Result<u64, Refused> {
    load_model(target, || Ok(HostModel::clone(&*models::get(model)?)), placement, flags)
}

/// Opens a model when the target is known to be idle, and loads it.
fn load_model(
    target: u64,
    open: impl FnOnce() -> Result<HostModel, Refused>,
    placement: Option<&str>,
    flags: u32,
) -> Result<u64, Refused> {
    if flags & !(LOAD_VERIFY | LOAD_ALIGN.0) != 0 {
        return Err(Refused::new(Errno::Inval, format_args!("flags {flags:#x}")));
    }
    let align = 1u64.checked_shl((flags & LOAD_ALIGN.0) >> LOAD_ALIGN.1).unwrap_or(0);
    let align = TensorAlign::try_from(align).map_err(|e| Refused::new(Errno::Inval, e))?;
    let options = LoadOptions { placement: self::placement(placement)?, verify: flags & LOAD_VERIFY != 0 };
    let target = Target::of(target)?;
    let mut opened = target.lock_idle()?;
    opened.device.align_tensors(align);
    let loaded = open()?.load_onto(&mut opened.device, &options, |_| {})?;
    drop(opened);
    Ok(lock(&LOADS).add(OneLoad { target, loaded: Mutex::new(Some(loaded)) }))
}

/// Attaches to a model that a keeper has in memory of a target.
pub(crate) fn attach(target: u64, name: &str, flags: u32) -> Result<u64, Refused> {
    if flags & !LOAD_VERIFY != 0 {
        return Err(Refused::new(Errno::Inval, format_args!("flags {flags:#x}")));
    }
    let target = Target::of(target)?;
    let keeper = KeeperClient::connect(&socket_path()).map_err(LoadError::from)?;
    let mut opened = target.lock_idle()?;
    let loaded = keeper.attach_onto(name, &mut opened.device, flags & LOAD_VERIFY != 0)?;
    drop(opened);
    Ok(lock(&LOADS).add(OneLoad { target, loaded: Mutex::new(Some(loaded)) }))
}

/// Finds a tensor, of this name or with this number in the order of the file; returns its name too.
pub(crate) fn tensor(number: u64, name: Option<&str>, index: u64) -> Result<(DmlTensor, String), Refused> {
    let LoadedTensor { tensor, va } = find(number, name, index)?;
    let (name, va) = (tensor.name.clone(), va.map_or(0, |span| span.first().bits()));
    Ok((DmlTensor { va, len: tensor.len, name_len: name.len() as u64 }, name))
}

/// The type and the shape of the tensor with this number, and its name.
pub(crate) fn describe(number: u64, index: u64) -> Result<(DmlModelTensor, String), Refused> {
    models::type_of(&find(number, None, index)?.tensor)
}

fn find(number: u64, name: Option<&str>, index: u64) -> Result<LoadedTensor, Refused> {
    let load = lock(&LOADS).get(number, "load")?;
    let loaded = lock(&load.loaded);
    let loaded = loaded.as_ref().ok_or_else(|| none(number, "load"))?;
    let found = match name {
        Some(name) => loaded.get(name),
        None => loaded.files.iter().flat_map(|file| file.tensors()).nth(usize::try_from(index).unwrap_or(usize::MAX)),
    };
    found.cloned().ok_or_else(|| match name {
        Some(name) => Refused::new(Errno::NoEnt, format_args!("no tensor is called {name:?}")),
        None => none(index, "tensor"),
    })
}

pub(crate) fn unload(number: u64) -> Result<(), Refused> {
    let load = lock(&LOADS).get(number, "load")?;
    let mut opened = load.target.lock_even_closed()?;
    opened.idle()?;
    let loaded = lock(&load.loaded).take();
    remove(&LOADS, number, "load")?;
    Ok(loaded.map_or(Ok(()), |loaded| opened.device.unload(loaded))?)
}
