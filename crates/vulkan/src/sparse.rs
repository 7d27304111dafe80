//! The address space of a GPU with sparse binding: a sparse buffer for each range that is reserved, whose address is
//! the GPU's, over memory that is bound to it page by page.
//!
//! A VM of a format with the same page size checks each bind and knows what is bound. `vkQueueBindSparse` mirrors its
//! bindings.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, Observer, SpaceError};
use dmalane_iopt::{FormatId, HeapTables};
use dmalane_vm::{AnyVm, BindRequest, Bo, any_vm};

use crate::error::{CallError, Error};
use crate::gpu::{Buffer, Gpu, SparseBind, Timeline};
use crate::memory::{Area, Areas, GpuMemory};

/// Timeout of a bind by the driver.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Ranges start at multiples of this.
const LARGE: PageSize = PageSize::SIZE_2M;
/// Addresses that all formats of the VM have.
const ADDRESSES: u64 = 1 << 47;

/// Sparse buffers and their bindings.
pub(crate) struct SparseMap {
    granule: PageSize,
    /// The upper bits of all addresses of sparse buffers, which drivers take from one half of the address space. What
    /// is below them, all of the state here, is without; see [`SparseMap::turn`].
    high: u64,
    timeline: Arc<Timeline>,
    state: Mutex<State>,
    /// Read while commands are written down and sent that use what is bound, written while that changes; locked before
    /// `state`.
    stays: RwLock<()>,
    /// Submissions that use bound memory: the timeline of their queue, and the value that says that they have ended.
    uses: Mutex<Vec<(Arc<Timeline>, u64)>>,
    /// Held with those of other devices; `None` for a driver without a limit.
    held: Option<Arc<Held>>,
    gpu: Arc<Gpu>,
}

struct State {
    vm: Box<dyn AnyVm + Send>,
    /// The reserved ranges, by first address. No two are adjacent.
    windows: BTreeMap<u64, Window>,
    /// The value of the last bind.
    last: u64,
    /// The ranges that the driver has bound or, after a call that failed, may have: no fewer than it has.
    bound: Ranges<Behind>,
    /// Ranges of `bound` that the process-wide number has, where the driver's are limited.
    counted: u64,
}

/// Memory that is bound, which nothing frees while it is.
#[derive(Clone)]
struct Behind {
    area: Arc<Area>,
    /// Memory that may be bound instead: that of binds that failed.
    or: Vec<Arc<Area>>,
}

/// Ranges that the drivers of this process hold bound, for all its GPUs in software: these bind with an `mmap` each and
/// do not notice when the process may have no more.
#[derive(Debug)]
pub(crate) struct Held {
    now: AtomicU64,
    limit: u64,
}

impl Held {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { now: AtomicU64::new(0), limit })
    }

    /// The number of this process.
    fn by_process() -> Arc<Self> {
        static HELD: LazyLock<Arc<Held>> = LazyLock::new(|| Held::new(binds_left()));
        HELD.clone()
    }

    /// Adds some, or gives the number that there would be if that is too many.
    pub fn add(&self, more: u64) -> Result<(), u64> {
        let add = |now| Some(now + more).filter(|all| *all <= self.limit);
        self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map(drop).map_err(|now| now + more)
    }

    /// Counts `to` in place of `from`. More than the limit where calls failed and the driver may have more.
    fn replace(&self, from: u64, to: u64) {
        match to.checked_sub(from) {
            Some(more) => self.now.fetch_add(more, Ordering::Relaxed),
            None => self.now.fetch_sub(from - to, Ordering::Relaxed),
        };
    }
}

/// A reserved range.
struct Window {
    range: Span<DeviceVa>,
    buffer: Arc<Buffer>,
    /// The offset of the range in its buffer.
    offset: u64,
}

impl Window {
    fn contains(&self, at: u64) -> bool {
        (self.range.first().bits()..=self.range.last().bits()).contains(&at)
    }
}

/// The range that an address lies in.
fn window_at(windows: &BTreeMap<u64, Window>, at: u64) -> Option<&Window> {
    windows.range(..=at).next_back().map(|(_, window)| window).filter(|window| window.contains(at))
}

/// True when the driver has bound something in a range.
fn is_bound(bound: &Ranges<Behind>, at: u64, len: u64) -> bool {
    let before = bound.range(..at + len).next_back();
    before.is_some_and(|(first, (bound, _))| first + bound > at)
}

impl State {
    /// True when all of the span lies in one range that is reserved.
    fn holds(&self, span: &Span<DeviceVa>) -> bool {
        window_at(&self.windows, span.first().bits()).is_some_and(|window| window.range.covers(span))
    }

    /// Ranges that the driver would have bound, at most, after these changes of `touched`: each a range of addresses,
    /// and whether it is bound.
    fn count_after(&self, touched: &[Span<DeviceVa>], changes: impl FnOnce(&mut dyn FnMut(u64, u64, bool))) -> u64 {
        let mut here = BTreeMap::new();
        for span in touched {
            let (first, end) = (span.first().bits(), span.last().bits() + 1);
            here.extend(overlapping(&self.bound, first, end).map(|(at, (len, _))| (*at, (*len, ()))));
        }
        let others = self.bound.len() - here.len();
        changes(&mut |at, len, bound| {
            forget(&mut here, at, at + len);
            if bound {
                here.insert(at, (len, ()));
            }
        });
        (others + here.len()) as u64
    }
}

/// Ranges, by first address: the bytes of each, and what belongs to it.
type Ranges<T> = BTreeMap<u64, (u64, T)>;

/// Those that overlap another range.
fn overlapping<T>(ranges: &Ranges<T>, first: u64, end: u64) -> impl Iterator<Item = (&u64, &(u64, T))> {
    let before = ranges.range(..first).next_back().filter(|(at, (len, _))| *at + len > first);
    before.into_iter().chain(ranges.range(first..end))
}

/// Takes what lies in a range out; what reaches out of it is cut.
fn forget<T: Clone>(ranges: &mut Ranges<T>, first: u64, end: u64) {
    let starts: Vec<u64> = overlapping(ranges, first, end).map(|(at, _)| *at).collect();
    for at in starts {
        let Some((len, of)) = ranges.remove(&at) else { continue };
        if at < first {
            ranges.insert(at, (first - at, of.clone()));
        }
        if at + len > end {
            ranges.insert(end, (at + len - end, of));
        }
    }
}

/// Notes that a range may have been unbound or, with an area, bound to that, or left as it was. Ranges are cut at its
/// ends, so that there are no fewer than in any of these cases.
fn doubt(bound: &mut Ranges<Behind>, first: u64, end: u64, area: Option<&Arc<Area>>) {
    let there: Vec<(u64, u64)> = overlapping(bound, first, end).map(|(at, (len, _))| (*at, at + len)).collect();
    let mut next = first;
    for (start, stop) in there {
        let Some((_, behind)) = bound.remove(&start) else { continue };
        let (from, to) = (start.max(first), stop.min(end));
        if start < from {
            bound.insert(start, (from - start, behind.clone()));
        }
        if to < stop {
            bound.insert(to, (stop - to, behind.clone()));
        }
        let mut behind = behind;
        if let Some(area) = area {
            if !Arc::ptr_eq(&behind.area, area) && !behind.or.iter().any(|or| Arc::ptr_eq(or, area)) {
                behind.or.push(area.clone());
            }
            if next < from {
                bound.insert(next, (from - next, Behind { area: area.clone(), or: Vec::new() }));
            }
        }
        bound.insert(from, (to - from, behind));
        next = to;
    }
    if let Some(area) = area.filter(|_| next < end) {
        bound.insert(next, (end - next, Behind { area: area.clone(), or: Vec::new() }));
    }
}

/// Changes that the driver is given at a time: it makes them while the next ones are looked up. Few of them under test,
/// so that batches of the tests take several calls.
const PART: usize = if cfg!(test) { 16 } else { 512 };

/// The changes of a batch, on their way to the driver.
struct Parts<'a> {
    map: &'a SparseMap,
    windows: &'a BTreeMap<u64, Window>,
    /// The value of the last bind.
    last: &'a mut u64,
    /// Those that wait are of ranges that are apart from each other: the driver may make them in any order.
    changes: Vec<Change>,
    /// Those that the driver was given, also by a call that failed.
    sent: usize,
}

/// A range to bind, or to unbind where it goes nowhere.
struct Change {
    at: u64,
    len: u64,
    to: Option<To>,
}

/// A part of memory.
struct To {
    area: Arc<Area>,
    buffer: Arc<Buffer>,
    offset: u64,
}

impl SparseMap {
    /// Finds out in which pages a GPU binds, and where.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>, Error> {
        let unsuitable = |missing: String| Error::Unsuitable { name: gpu.info().name.clone(), missing };
        let (buffer, granule) = gpu.sparse_buffer(LARGE.bytes())?;
        let size = [PageSize::SIZE_4K, PageSize::SIZE_16K, PageSize::SIZE_64K]
            .into_iter()
            .find(|size| size.bytes() >= granule)
            .ok_or_else(|| unsuitable("it binds in pages of more than 64 KiB".to_owned()))?;
        let high = address_of(gpu, &buffer) & !(ADDRESSES - 1);
        let all = Span::new(DeviceVa::new(size.bytes()), ADDRESSES - size.bytes()).expect("a constant span");
        let tables = HeapTables::new(CardAddr::new(0));
        let format = match size {
            PageSize::SIZE_4K => FormatId::x86_64_4level,
            PageSize::SIZE_16K => FormatId::arm64_s1_16k,
            _ => FormatId::arm64_s1_64k,
        };
        let vm = any_vm(format, all, None, tables).map_err(|e| unsuitable(e.to_string()))?;
        let held = (gpu.info().kind == "software GPU").then(Held::by_process);
        #[cfg(test)]
        let held = gpu.live().held.get().cloned().or(held);
        let (windows, bound) = (BTreeMap::new(), BTreeMap::new());
        let state = State { vm, windows, last: 0, bound, counted: 0 };
        let timeline = Arc::new(Timeline::new(gpu)?);
        let (state, stays, uses) = (Mutex::new(state), RwLock::new(()), Mutex::default());
        Ok(Arc::new(Self { granule: size, high, timeline, state, stays, uses, held, gpu: gpu.clone() }))
    }

    /// Bytes of the longest range: a buffer of the driver that its addresses for sparse buffers have room for, less
    /// what is cut off to begin at a large page.
    fn longest(&self) -> u64 {
        let info = self.gpu.info();
        let most = info.max_buffer.min(info.sparse.unwrap_or(0));
        (most / LARGE.bytes()).saturating_sub(1) * LARGE.bytes()
    }

    /// Bytes of addresses for sparse buffers that no range has taken, the gaps behind them included.
    fn free(&self, state: &State) -> u64 {
        let taken = state.windows.values().map(|window| window.range.len() + LARGE.bytes()).sum();
        self.gpu.info().sparse.unwrap_or(0).saturating_sub(taken)
    }

    /// Reserves a range that starts at a multiple of 2 MiB: a sparse buffer.
    fn reserve(&self, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        let whole = LARGE.round_up(len.max(1)).ok_or(SpaceError::Exhausted(len))?;
        // Longer by one large page, to be cut where it starts; so a gap is left behind each range.
        let asked = whole.checked_add(LARGE.bytes()).ok_or(SpaceError::Exhausted(len))?;
        if whole > self.longest() {
            return Err(refused(Error::LongRange { len, most: self.longest() }));
        }
        let mut state = self.lock();
        let free = self.free(&state);
        if asked > free {
            return Err(refused(Error::NoAddresses { len, free, most: self.gpu.info().sparse.unwrap_or(0) }));
        }
        let (buffer, _) = self.gpu.sparse_buffer(asked).map_err(driver)?;
        let base = address_of(&self.gpu, &buffer) ^ self.high;
        let range = LARGE.round_up(base).and_then(|first| Span::new(DeviceVa::new(first), whole));
        let range = range.filter(|range| state.vm.range().covers(range)).ok_or(SpaceError::Exhausted(len))?;
        let offset = range.first().bits() - base;
        state.windows.insert(range.first().bits(), Window { range, buffer, offset });
        self.turn(range).ok_or(SpaceError::Exhausted(len))
    }

    /// The addresses of the device without their upper bits, or those with them.
    fn turn(&self, span: Span<DeviceVa>) -> Option<Span<DeviceVa>> {
        let turn = |va: DeviceVa| DeviceVa::new(va.bits() ^ self.high);
        Span::inclusive(turn(span.first()), turn(span.last()))
    }

    /// The VM's error with addresses of the device.
    fn turn_error(&self, mut error: dmalane_vm::Error) -> dmalane_vm::Error {
        use dmalane_vm::Error::{BeyondBo, Misaligned, MisalignedOffset, Segment, Unsupported};
        match &mut error {
            Misaligned { span, .. } => *span = self.turn(*span).unwrap_or(*span),
            MisalignedOffset { va, .. } | BeyondBo { va, .. } | Segment { va, .. } | Unsupported { va, .. } => {
                *va = DeviceVa::new(va.bits() ^ self.high)
            }
            _ => {} // the others cannot happen in a range that is reserved, or name no address
        }
        error
    }

    /// Addresses of the device that lie in one reserved range, without their upper bits.
    fn inside(&self, span: Span<DeviceVa>) -> Result<Span<DeviceVa>, SpaceError> {
        self.turn(span).filter(|span| self.lock().holds(span)).ok_or(SpaceError::NotReserved(span))
    }

    #[cfg(test)]
    pub fn shares_limit_with(&self, other: &Self) -> bool {
        self.held.as_ref().zip(other.held.as_ref()).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// Has the process-wide number follow what is bound.
    fn recount(&self, state: &mut State) {
        if let Some(held) = &self.held {
            let now = state.bound.len() as u64;
            held.replace(state.counted, now);
            state.counted = now;
        }
    }

    /// The pages in which it is bound.
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is unbound while this is held.
    pub fn stays(&self) -> RwLockReadGuard<'_, ()> {
        self.stays.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a submission, which ends when its timeline reaches `value`, uses what is bound.
    pub fn used_until(&self, timeline: &Arc<Timeline>, value: u64) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        // A queue that is gone has ended all that it was given, or keeps its timeline for ever. A foreign buffer may
        // keep a timeline longer: then the entry stays until that buffer is used again.
        uses.retain(|(other, _)| !Arc::ptr_eq(other, timeline) && Arc::strong_count(other) > 1);
        uses.push((timeline.clone(), value));
    }

    /// Waits until no submission uses what is bound.
    fn unused(&self) -> Result<(), Error> {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        for (timeline, value) in &*uses {
            if !timeline.wait(*value, TIMEOUT)? {
                return Err(CallError { call: "vkWaitSemaphores", result: ash::vk::Result::TIMEOUT }.into());
            }
        }
        uses.clear();
        Ok(())
    }

    /// The last bind, if it may not have happened yet.
    pub fn pending(&self) -> Option<(Arc<Timeline>, u64)> {
        let last = self.lock().last;
        let reached = self.timeline.value().is_ok_and(|value| value >= last);
        (!reached).then(|| (self.timeline.clone(), last))
    }

    /// Calls `each` with what is bound in a range: sparse buffer, offset in it, the card address behind it, bytes.
    ///
    /// # Errors
    /// The first address where nothing is bound, or not for writing; `each` was called for what lies before it.
    pub fn resolve(
        &self,
        va: DeviceVa,
        len: u64,
        writes: bool,
        mut each: impl FnMut(&Arc<Buffer>, u64, CardAddr, u64),
    ) -> Result<(), DeviceVa> {
        let span = Span::new(va, len).and_then(|span| self.turn(span));
        let state = self.lock();
        let Some(span) = span.filter(|span| state.holds(span)) else { return Err(va) };
        let window = window_at(&state.windows, span.first().bits()).ok_or(va)?;
        let mut next = Some(span.first());
        state.vm.mapping(span, &mut |mapped| {
            let here = mapped.span;
            let permitted = mapped.access.contains(if writes { Access::WRITE } else { Access::READ });
            if next != Some(here.first()) || !permitted {
                return ControlFlow::Break(());
            }
            let within = here.first().bits() - window.range.first().bits();
            each(&window.buffer, window.offset + within, mapped.to, here.len());
            next = here.last().checked_add(1);
            ControlFlow::Continue(())
        });
        match next {
            Some(at) if at <= span.last() => Err(DeviceVa::new(at.bits() ^ self.high)),
            _ => Ok(()),
        }
    }

    fn wait(&self, value: u64) -> Result<(), Error> {
        let waited = self.gpu.check().and_then(|()| self.timeline.wait(value, TIMEOUT));
        match waited? {
            true => Ok(()),
            false => Err(CallError { call: "vkQueueBindSparse", result: ash::vk::Result::TIMEOUT }.into()),
        }
    }
}

/// The first address of a sparse buffer.
fn address_of(gpu: &Gpu, buffer: &Buffer) -> u64 {
    let base = buffer.device_address().unwrap_or_default();
    #[cfg(test)]
    let base = base + gpu.live().high.load(std::sync::atomic::Ordering::Relaxed);
    let _ = gpu;
    base
}

/// Binds that this process may still make, with an `mmap` each.
pub(crate) fn binds_left() -> u64 {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let most: u64 = most.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530);
    let used = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count() as u64);
    // Mappings meet only where a bound range begins or ends, because an unbind covers its whole hole (`whole_holes`).
    // So a bound range and the hole behind it take one mapping each at most: alternate pages take two for each bind. A
    // quarter is left for the rest of the process and the first hole of each reserved range.
    most.saturating_sub(used) / 8 * 3
}

/// The address space.
pub(crate) struct SparseSpace {
    map: Arc<SparseMap>,
    memory: Arc<GpuMemory>,
    observer: Observer,
}

fn driver(e: impl Into<Error>) -> SpaceError {
    SpaceError::Driver(Box::new(e.into()))
}

fn refused(e: Error) -> SpaceError {
    SpaceError::Refused(Box::new(e))
}

impl SparseSpace {
    pub fn new(map: &Arc<SparseMap>, memory: &Arc<GpuMemory>) -> Self {
        Self { map: map.clone(), memory: memory.clone(), observer: Observer::default() }
    }
}

impl AddressSpace for SparseSpace {
    fn kind(&self) -> AddressSpaceKind {
        AddressSpaceKind::Driver { name: "sparse binding" }
    }

    fn page(&self) -> PageSize {
        self.map.granule
    }

    fn longest(&self) -> u64 {
        self.map.longest()
    }

    fn room(&self) -> u64 {
        self.map.free(&self.map.lock()).saturating_sub(LARGE.bytes())
    }

    fn reserve(&mut self, _: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        self.map.reserve(len)
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        let low = self.map.inside(range)?;
        if self.map.lock().windows.get(&low.first().bits()).is_none_or(|window| window.range != low) {
            return Err(SpaceError::NotReserved(range));
        }
        self.apply(&[BindRequest::Unbind(range)])?;
        // A bind that was sent and not seen to end may still use the buffer.
        let last = self.map.lock().last;
        self.map.wait(last).map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        // Commands that use the buffer, and ended with an error since, keep it.
        self.map.lock().windows.remove(&low.first().bits());
        Ok(())
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        let _changes = self.map.stays.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.map.lock();
        let (mut touched, mut more) = (Vec::with_capacity(requests.len()), 0);
        let mut low = Vec::with_capacity(requests.len());
        let areas = self.memory.areas();
        for request in requests {
            let span = match request {
                BindRequest::Bind { va, bo, offset, len, .. } => {
                    let counted = pieces(&areas, bo, *offset, *len, |_| more += 1);
                    counted.map_err(|at| refused(Error::NotAllocated(at)))?;
                    Span::new(*va, *len).ok_or(SpaceError::Elsewhere(*va))?
                }
                BindRequest::Unbind(span) => *span,
                BindRequest::Prefetch(_) => continue,
                _ => return Err(refused(Error::NoSuchBind)),
            };
            more += 1; // what it cuts in two
            let span = self.map.turn(span).filter(|low| state.holds(low)).ok_or(SpaceError::NotReserved(span))?;
            touched.push(span);
            low.push(match request {
                BindRequest::Bind { bo, offset, len, access, .. } => {
                    let (bo, offset, len, access) = (bo.clone(), *offset, *len, *access);
                    BindRequest::Bind { va: span.first(), bo, offset, len, access }
                }
                _ => BindRequest::Unbind(span),
            });
        }
        drop(areas);
        let touched = union(touched);
        let mut tight = false;
        if let Some(held) = &self.map.held {
            let after = state.bound.len() as u64 + more;
            let added = held.add(after.saturating_sub(state.counted)).map(|()| after).or_else(|_| {
                tight = true;
                // Counted exactly now. What takes no more than there is stays possible: the way back from the limit.
                let after = state.count_after(&touched, |each| count(&self.memory.areas(), &low, each));
                held.add(after.saturating_sub(state.counted)).map(|()| after).or_else(|wanted| {
                    let grows = after > state.counted;
                    if grows { Err(Error::TooManyBinds { wanted, limit: held.limit }) } else { Ok(after) }
                })
            });
            state.counted = added.map_err(refused)?.max(state.counted);
        }
        let applied = state.vm.apply(low, false);
        if applied.is_err() {
            self.map.recount(&mut state);
        }
        let committed = applied.map_err(|e| self.map.turn_error(e.error))?;
        // The VM's tables are looked at under the lock only: nothing else has to forget them.
        state.vm.invalidated(committed);
        let mirrored = mirror(&self.map, &self.memory, &mut state, &touched, tight);
        self.map.recount(&mut state);
        if let Err(e) = mirrored {
            // Nothing of it may be used, whatever the driver has done.
            let nothing = touched.iter().map(|span| BindRequest::Unbind(*span)).collect();
            let undone = state.vm.apply(nothing, false).map_err(|e| self.map.turn_error(e.error))?;
            state.vm.invalidated(undone);
            return Err(e);
        }
        drop(state);
        self.observer.see(requests);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), SpaceError> {
        let last = self.map.lock().last;
        self.map.wait(last).map_err(driver)
    }

    fn observer(&mut self) -> Option<&mut Observer> {
        Some(&mut self.observer)
    }
}

/// Calls `each` with the bytes of each piece of a buffer's range that the driver binds on its own.
///
/// # Errors
/// The first address where nothing is allocated.
fn pieces(areas: &Areas, bo: &Bo, offset: u64, len: u64, mut each: impl FnMut(u64)) -> Result<(), CardAddr> {
    let runs = offset.checked_add(len).and_then(|end| bo.sg().runs(offset..end));
    runs.into_iter().flatten().try_for_each(|run| areas.resolve(run.addr, run.len, |_, _, _, _, len| each(len)))
}

/// Calls `each` with the changes that requests make: first address, bytes, and whether they are bound.
fn count(areas: &Areas, requests: &[BindRequest], each: &mut dyn FnMut(u64, u64, bool)) {
    for request in requests {
        match request {
            BindRequest::Bind { va, bo, offset, len, .. } => {
                let mut at = va.bits();
                // Where nothing is allocated, the request was refused before.
                let _ = pieces(areas, bo, *offset, *len, |len| {
                    each(at, len, true);
                    at += len;
                });
            }
            BindRequest::Unbind(span) => each(span.first().bits(), span.len(), false),
            _ => {} // refused before
        }
    }
}

/// The same addresses as spans that are apart from each other, in order.
fn union(mut spans: Vec<Span<DeviceVa>>) -> Vec<Span<DeviceVa>> {
    spans.sort_by_key(|span| span.first());
    let mut joined: Vec<Span<DeviceVa>> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if last.last().checked_add(1).is_none_or(|next| span.first() <= next) => {
                *last = Span::inclusive(last.first(), last.last().max(span.last())).expect("in order");
            }
            _ => joined.push(span),
        }
    }
    joined
}

/// The holes that the driver gets first where something was bound: where the VM has nothing now, or `all` of the spans,
/// also what is bound anew afterwards. In order, and apart from each other.
fn holes(vm: &dyn AnyVm, bound: &Ranges<Behind>, spans: &[Span<DeviceVa>], all: bool) -> Vec<(u64, u64)> {
    let mut holes = Vec::new();
    for span in spans {
        let (mut next, end) = (span.first().bits(), span.last().bits() + 1);
        if !is_bound(bound, next, end - next) {
            continue;
        }
        if !all {
            vm.mapping(*span, &mut |mapped| {
                holes.push((next, mapped.span.first().bits()));
                next = mapped.span.last().bits() + 1;
                ControlFlow::Continue(())
            });
        }
        holes.push((next, end));
    }
    holes.retain(|(first, end)| first < end && is_bound(bound, *first, end - first));
    holes
}

/// Extends holes that are about to be made up to what stays bound on both sides, or to the ends of the reserved range.
/// A driver that maps gives each unbind a mapping of its own, which it keeps until something else is mapped there.
fn whole_holes(windows: &BTreeMap<u64, Window>, bound: &Ranges<Behind>, holes: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut whole: Vec<(u64, u64)> = Vec::new();
    for &(first, end) in holes {
        let Some(window) = window_at(windows, first) else { continue }; // all were found in one
        let (low, high) = (window.range.first().bits(), window.range.last().bits() + 1);
        let before = bound.range(..first).next_back().map_or(low, |(at, (len, _))| (at + len).clamp(low, first));
        let last = bound.range(..end).next_back().filter(|(at, (len, _))| *at + len > end);
        let after = last.map_or_else(|| bound.range(end..).next().map_or(high, |(at, _)| high.min(*at)), |_| end);
        match whole.last_mut() {
            // Nothing between them stays.
            Some(hole) if hole.1 >= before => hole.1 = after,
            _ => whole.push((before, after)),
        }
    }
    // Those that cut a range in two come last: there are never more ranges meanwhile than before or after all of them.
    whole.sort_by_key(|(first, end)| bound.range(..first).next_back().is_some_and(|(at, (len, _))| at + len > *end));
    whole
}

/// Makes the driver bind in these spans what the VM has there, and unbind the rest first. Waits if it takes something
/// away. `tight`: the limit allows as many binds as there are before and after, and no more meanwhile.
fn mirror(
    map: &SparseMap,
    memory: &GpuMemory,
    state: &mut State,
    touched: &[Span<DeviceVa>],
    tight: bool,
) -> Result<(), SpaceError> {
    let State { vm, windows, bound, last, .. } = state;
    let takes_away = touched.iter().any(|span| is_bound(bound, span.first().bits(), span.len()));
    let mut parts = Parts { map, windows, last, changes: Vec::new(), sent: 0 };
    let done = (|| {
        map.gpu.check()?;
        if takes_away {
            map.unused()?;
            let holes = holes(&**vm, bound, touched, tight);
            // Only where it is needed: other drivers take time for each page that they unbind.
            let holes = if map.held.is_some() { whole_holes(windows, bound, &holes) } else { holes };
            for (at, end) in holes {
                parts.changes.push(Change { at, len: end - at, to: None });
                parts.send_whole()?;
            }
            // Binds of the same ranges may follow, which a call of their own puts behind these.
            parts.send()?;
        }
        for span in touched {
            let mut failed = None;
            vm.mapping(*span, &mut |mapped| {
                let (at, len) = (mapped.span.first().bits(), mapped.span.len());
                let found = memory.areas().resolve(mapped.to, len, |area, buffer, offset, address, len| {
                    let to = Some(To { area: area.clone(), buffer: buffer.clone(), offset });
                    parts.changes.push(Change { at: at + (address - mapped.to.bits()), len, to });
                });
                let sent = found.map_err(Error::NotAllocated).and_then(|()| parts.send_whole());
                failed = sent.err();
                if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            failed.map_or(Ok(()), Err)?;
        }
        parts.send()?;
        if takes_away { map.wait(*parts.last) } else { Ok(()) }
    })();
    let Parts { mut changes, sent, .. } = parts;
    if let Err(e) = done {
        // The driver may have done all of it, some, or nothing. Whatever it was given, also by a call that failed, is
        // counted and kept until it is unbound or bound over, which is waited for.
        changes.truncate(sent);
        for Change { at, len, to } in changes {
            doubt(bound, at, at + len, to.as_ref().map(|to| &to.area));
        }
        return Err(match takes_away {
            true => SpaceError::Invalidate(Box::new(e)),
            false => driver(e),
        });
    }
    for Change { at, len, to } in changes {
        // The pages that are taken away were waited for.
        forget(bound, at, at + len);
        if let Some(To { area, .. }) = to {
            bound.insert(at, (len, Behind { area, or: Vec::new() }));
        }
    }
    Ok(())
}

impl Parts<'_> {
    /// Gives the driver what is waiting, if it is a whole part.
    fn send_whole(&mut self) -> Result<(), Error> {
        if self.changes.len() - self.sent >= PART { self.send() } else { Ok(()) }
    }

    /// Gives the driver what is waiting.
    fn send(&mut self) -> Result<(), Error> {
        let Self { map, windows, .. } = *self;
        map.gpu.check()?;
        let part = &self.changes[self.sent..];
        if part.is_empty() {
            return Ok(());
        }
        // By sparse buffer; most batches have one.
        let mut all: Vec<(Arc<Buffer>, Vec<SparseBind<'_>>)> = Vec::new();
        let mut window: Option<&Window> = None;
        for Change { at, len, to } in part {
            if window.is_none_or(|window| !window.contains(*at)) {
                window = window_at(windows, *at);
            }
            let Some(window) = window else { continue }; // all were found in one
            let at = at - window.range.first().bits() + window.offset;
            let memory = to.as_ref().map(|to| (&**to.buffer.memory().expect("device memory has memory"), to.offset));
            let bind = SparseBind { at, len: *len, memory };
            match all.iter_mut().find(|(buffer, _)| Arc::ptr_eq(buffer, &window.buffer)) {
                Some((_, binds)) => binds.push(bind),
                None => all.push((window.buffer.clone(), vec![bind])),
            }
        }
        let value = *self.last + 1;
        let done = map.gpu.bind_sparse(&all, &map.timeline, value);
        drop(all);
        self.sent = self.changes.len();
        // A call that finds the device lost may have sent it.
        if done.is_ok() || done.is_err_and(|e| e.is_lost()) {
            *self.last = value;
        }
        Ok(done?)
    }
}

impl Drop for SparseMap {
    fn drop(&mut self) {
        // The buffers and the memory that is bound to them must not go while a bind is under way.
        let last = self.lock().last;
        let ended = self.gpu.check().and_then(|()| self.timeline.wait_despite_errors(last, TIMEOUT));
        // Only a lost device is asked in a way that has no timeout: it answers in finite time.
        if !ended.unwrap_or_else(|_lost| self.gpu.has_bound()) {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            let bound = (std::mem::take(&mut state.windows), std::mem::take(&mut state.bound));
            std::mem::forget((bound, self.timeline.clone()));
            return;
        }
        if let Some(held) = &self.held {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            held.replace(state.counted, 0);
        }
    }
}
