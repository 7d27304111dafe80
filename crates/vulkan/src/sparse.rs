//! The address space of a GPU with sparse binding: a sparse buffer, whose address is the GPU's, over memory that is
//! bound to it page by page.
//!
//! A VM of a format with the same page size checks each bind and knows what is bound. What it says is mirrored by
//! `vkQueueBindSparse`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, RangeAllocator, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, Bind, Observer, SpaceError};
use dmalane_iopt::{Arm64S1, HeapTables, X86_64_4Level};
use dmalane_queue::DeviceAddr;
use dmalane_vm::{AnyVm, BindRequest, PlanError, Vm};

use crate::error::{CallError, Error};
use crate::gpu::{Buffer, Gpu, SparseBind, Timeline};
use crate::memory::{Area, GpuMemory};

/// How long the driver may take for a bind.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Ranges start at multiples of this.
const LARGE: PageSize = PageSize::SIZE_2M;
/// The longest sparse buffer that is asked for; drivers prepare page tables for all of it.
const LONGEST: u64 = 1 << 38;

/// What is bound.
pub(crate) struct SparseMap {
    buffer: Arc<Buffer>,
    range: Span<DeviceVa>,
    granule: PageSize,
    timeline: Arc<Timeline>,
    state: Mutex<State>,
    gpu: Arc<Gpu>,
}

struct State {
    vm: Box<dyn AnyVm + Send>,
    /// The value of the last bind.
    last: u64,
    /// The memory behind each bind, by address: nothing frees it while it is bound.
    bound: BTreeMap<DeviceVa, Bound>,
    /// Ranges of memory that are bound.
    live: u64,
    /// How many there may be.
    limit: u64,
}

struct Bound {
    _areas: Vec<Arc<Area>>,
    binds: u64,
}

/// The page size with which a GPU binds, and a sparse buffer of it.
pub(crate) struct Granule {
    buffer: Arc<Buffer>,
    pub size: PageSize,
}

impl Granule {
    /// Creates the sparse buffer of a GPU.
    pub fn of(gpu: &Arc<Gpu>) -> Result<Self, Error> {
        let info = gpu.info();
        let memory: u64 = info.heaps.iter().filter(|h| h.device_local).map(|h| h.bytes).sum();
        // Twice the memory, so that there is room between buffers; half of what the driver has, for other users.
        let most = (info.sparse.unwrap_or(0) / 2).min(info.max_buffer).min(LONGEST);
        let len = memory.saturating_mul(2).min(most) / LARGE.bytes() * LARGE.bytes();
        let lacks = |missing: &str| Error::Unsuitable { name: info.name.clone(), missing: missing.to_owned() };
        if len == 0 {
            return Err(lacks("no address space for sparse buffers"));
        }
        let (buffer, granule) = gpu.sparse_buffer(len)?;
        let size = [PageSize::SIZE_4K, PageSize::SIZE_16K, PageSize::SIZE_64K]
            .into_iter()
            .find(|size| size.bytes() >= granule)
            .ok_or_else(|| lacks("it binds in pages of more than 64 KiB"))?;
        Ok(Self { buffer, size })
    }
}

#[cfg(test)]
impl Granule {
    pub fn into_buffer(self) -> (Arc<Buffer>, PageSize) {
        (self.buffer, self.size)
    }
}

impl SparseMap {
    pub fn new(gpu: &Arc<Gpu>, Granule { buffer, size }: Granule) -> Result<Arc<Self>, Error> {
        let lacks = |missing: String| Error::Unsuitable { name: gpu.info().name.clone(), missing };
        let base = buffer.device_address().unwrap_or_default();
        let range = Span::new(DeviceVa::new(base), buffer.len()).filter(|range| range.is_aligned(size) && base > 0);
        let range = range.ok_or_else(|| lacks(format!("its sparse buffer lies at {base:#x}")))?;
        let tables = HeapTables::new(CardAddr::new(0));
        let vm: Result<Box<dyn AnyVm + Send>, _> = match size {
            PageSize::SIZE_4K => Vm::<X86_64_4Level, _>::new(range, tables).map(|vm| Box::new(vm) as Box<_>),
            PageSize::SIZE_16K => Vm::<Arm64S1<14>, _>::new(range, tables).map(|vm| Box::new(vm) as Box<_>),
            _ => Vm::<Arm64S1<16>, _>::new(range, tables).map(|vm| Box::new(vm) as Box<_>),
        };
        let vm = vm.map_err(|e| lacks(e.to_string()))?;
        let limit = if gpu.info().kind == "software GPU" { maps_left() } else { u64::MAX };
        let state = State { vm, last: 0, bound: BTreeMap::new(), live: 0, limit };
        let timeline = Arc::new(Timeline::new(gpu)?);
        let state = Mutex::new(state);
        Ok(Arc::new(Self { buffer, range, granule: size, timeline, state, gpu: gpu.clone() }))
    }

    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// The pages in which it is bound.
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last bind, if it may not have happened yet.
    pub fn pending(&self) -> Option<(Arc<Timeline>, u64)> {
        let last = self.lock().last;
        let reached = self.timeline.value().is_ok_and(|value| value >= last);
        (!reached).then(|| (self.timeline.clone(), last))
    }

    /// Calls `each` with what is bound in a range: the offset in the buffer, the card address behind it, bytes.
    ///
    /// # Errors
    /// The first address where nothing is bound, or not for writing; `each` was called for what lies before it.
    pub fn resolve(
        &self,
        va: DeviceVa,
        len: u64,
        writes: bool,
        mut each: impl FnMut(u64, CardAddr, u64),
    ) -> Result<(), DeviceVa> {
        let Some(span) = Span::new(va, len).filter(|span| self.range.covers(span)) else { return Err(va) };
        let mut next = Some(va);
        self.lock().vm.mapping(span, &mut |mapped| {
            let here = mapped.span;
            let permitted = mapped.access.contains(if writes { Access::WRITE } else { Access::READ });
            if next != Some(here.first()) || !permitted {
                return ControlFlow::Break(());
            }
            each(here.first().bits() - self.range.first().bits(), mapped.to, here.len());
            next = here.last().checked_add(1);
            ControlFlow::Continue(())
        });
        match next {
            Some(at) if at <= span.last() => Err(at),
            _ => Ok(()),
        }
    }

    fn wait(&self, value: u64) -> Result<(), Error> {
        match self.timeline.wait(value, TIMEOUT)? {
            true => Ok(()),
            false => Err(CallError { call: "vkQueueBindSparse", result: ash::vk::Result::TIMEOUT }.into()),
        }
    }
}

/// Mappings that this process may still make: a driver that binds with one `mmap` each does not notice when there are
/// no more.
fn maps_left() -> u64 {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let most: u64 = most.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530);
    let used = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count() as u64);
    // The rest of the process needs some too; and each bind in a mapping cuts it in up to three.
    most.saturating_sub(used) / 4 * 3
}

/// The address space.
pub(crate) struct SparseSpace {
    map: Arc<SparseMap>,
    memory: Arc<GpuMemory>,
    free: RangeAllocator<DeviceVa>,
    reserved: BTreeMap<DeviceVa, u64>,
    observer: Option<Observer>,
}

fn driver(e: impl Into<Error>) -> SpaceError {
    SpaceError::Driver(Box::new(e.into()))
}

impl SparseSpace {
    pub fn new(map: &Arc<SparseMap>, memory: &Arc<GpuMemory>) -> Self {
        let free = RangeAllocator::new(map.range, map.granule);
        Self { map: map.clone(), memory: memory.clone(), free, reserved: BTreeMap::new(), observer: None }
    }

    /// True when all of the span lies in one range that is reserved.
    fn holds(&self, span: &Span<DeviceVa>) -> bool {
        let range = self.reserved.range(..=span.first()).next_back();
        range.and_then(|(first, len)| Span::new(*first, *len)).is_some_and(|range| range.covers(span))
    }

    fn observed(&mut self, request: BindRequest) {
        if let Some(observer) = &mut self.observer {
            observer(&[request]);
        }
    }
}

impl AddressSpace for SparseSpace {
    fn kind(&self) -> AddressSpaceKind {
        AddressSpaceKind::Driver { name: "sparse binding" }
    }

    fn page(&self) -> PageSize {
        self.map.granule
    }

    fn reserve(&mut self, _: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        let whole = LARGE.round_up(len.max(1));
        let span = whole.and_then(|whole| self.free.allocate(whole, LARGE).ok()).ok_or(SpaceError::Exhausted(len))?;
        self.reserved.insert(span.first(), span.len());
        Ok(span)
    }

    fn bind(&mut self, bind: &Bind<'_>) -> Result<(), SpaceError> {
        let Bind { va, bo, offset, len, access } = *bind;
        let span = Span::new(va, len).ok_or(SpaceError::Elsewhere(va))?;
        if !self.holds(&span) {
            return Err(SpaceError::NotReserved(span));
        }
        let mut state = self.map.lock();
        let mut there = None;
        state.vm.mapping(span, &mut |mapped| {
            there = Some(mapped.span.first());
            ControlFlow::Break(())
        });
        if let Some(va) = there {
            return Err(driver(Error::Bound(va)));
        }
        let request = BindRequest::Bind { va, bo: bo.clone(), offset, len, access };
        let committed = state.vm.apply(vec![request.clone()]).map_err(|PlanError { error, .. }| error)?;
        debug_assert!(committed.is_empty(), "nothing was bound there");
        state.vm.invalidated(committed);
        let bound = mirror(&self.map, &self.memory, &mut state, span);
        if let Err(e) = bound {
            // Back to what it was: nothing.
            let undone = state.vm.apply(vec![BindRequest::Unbind(span)]);
            undone.map(|committed| state.vm.invalidated(committed)).map_err(|PlanError { error, .. }| error)?;
            return Err(driver(e));
        }
        drop(state);
        self.observed(request);
        Ok(())
    }

    fn unbind(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        if self.reserved.get(&range.first()) != Some(&range.len()) {
            return Err(SpaceError::NotReserved(range));
        }
        let mut state = self.map.lock();
        let committed = state.vm.apply(vec![BindRequest::Unbind(range)]).map_err(|PlanError { error, .. }| error)?;
        let forgotten = unmirror(&self.map, &mut state, range);
        drop(state);
        // From here on the queue refuses the range. Its memory is kept until the driver has unbound it.
        forgotten.map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        let mut state = self.map.lock();
        state.vm.invalidated(committed);
        let inside: Vec<_> = state.bound.range(range.first()..=range.last()).map(|(va, _)| *va).collect();
        for va in inside {
            let bound = state.bound.remove(&va);
            state.live -= bound.map_or(0, |b| b.binds);
        }
        drop(state);
        self.observed(BindRequest::Unbind(range));
        self.reserved.remove(&range.first());
        self.free.free(range).map_err(|_| SpaceError::NotReserved(range))
    }

    fn at(&self, va: DeviceVa) -> DeviceAddr {
        DeviceAddr::Va(va)
    }

    fn observe(&mut self, observer: Observer) -> bool {
        self.observer = Some(observer);
        true
    }
}

/// Binds what the VM has in a span that was empty.
fn mirror(map: &SparseMap, memory: &GpuMemory, state: &mut State, span: Span<DeviceVa>) -> Result<(), Error> {
    let base = map.range.first().bits();
    let mut pieces: Vec<(u64, Arc<Buffer>, u64, u64)> = Vec::new();
    let (mut areas, mut missing): (Vec<Arc<Area>>, _) = (Vec::new(), None);
    state.vm.mapping(span, &mut |mapped| {
        let at = mapped.span.first().bits() - base;
        let found = memory.areas().resolve(mapped.to, mapped.span.len(), |area, buffer, offset, address, len| {
            pieces.push((at + (address - mapped.to.bits()), buffer.clone(), offset, len));
            if !areas.iter().any(|a| Arc::ptr_eq(a, area)) {
                areas.push(area.clone());
            }
        });
        missing = missing.or(found.err());
        ControlFlow::Continue(())
    });
    if let Some(at) = missing {
        return Err(Error::NotAllocated(at));
    }
    let wanted = state.live + pieces.len() as u64;
    if wanted > state.limit {
        return Err(Error::TooManyBinds { wanted, limit: state.limit });
    }
    let binds: Vec<SparseBind<'_>> = pieces
        .iter()
        .map(|(at, buffer, offset, len)| {
            let memory = buffer.memory().expect("device memory has memory");
            SparseBind { at: *at, len: *len, memory: Some((memory, *offset)) }
        })
        .collect();
    let value = state.last + 1;
    map.gpu.bind_sparse(&map.buffer, &binds, &map.timeline, value)?;
    state.last = value;
    state.live = wanted;
    state.bound.insert(span.first(), Bound { _areas: areas, binds: pieces.len() as u64 });
    Ok(())
}

/// Unbinds a range, and waits until the driver has done that.
fn unmirror(map: &SparseMap, state: &mut State, range: Span<DeviceVa>) -> Result<(), Error> {
    let base = map.range.first().bits();
    let value = state.last + 1;
    let bind = SparseBind { at: range.first().bits() - base, len: range.len(), memory: None };
    map.gpu.bind_sparse(&map.buffer, &[bind], &map.timeline, value)?;
    state.last = value;
    map.wait(value)
}

impl Drop for SparseMap {
    fn drop(&mut self) {
        // The buffer and the memory that is bound to it must not go while a bind is under way.
        let last = self.lock().last;
        if self.wait(last).is_err() && !self.gpu.has_bound() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget((self.buffer.clone(), std::mem::take(&mut state.bound), self.timeline.clone()));
        }
    }
}
