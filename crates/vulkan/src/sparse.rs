//! The address space of a GPU with sparse binding: a sparse buffer for each range that is reserved, whose address is
//! the GPU's, over memory that is bound to it page by page.
//!
//! One table says what is bound, piece by piece. A batch becomes changes of it, and `vkQueueBindSparse` makes the same
//! changes in the driver.
//!
//! `unsafe` for that one call: [`SparseMap`] keeps what it names until it has happened.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, SpaceError, without_tables};
use dmalane_dma::lock;
use dmalane_vm::BindRequest;

use crate::error::{CallError, Error};
use crate::gpu::{Buffer, Gpu, SparseBind, Timeline};
use crate::memory::{Area, GpuMemory};

/// Timeout of a bind by the driver.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Ranges start at multiples of this.
const LARGE: PageSize = PageSize::SIZE_2M;

/// Sparse buffers and their bindings.
pub(crate) struct SparseMap {
    granule: PageSize,
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
    /// The reserved ranges, by first address. No two are adjacent.
    windows: BTreeMap<u64, Window>,
    /// The value of the last bind.
    last: u64,
    /// The pieces that the driver has bound or, after a call that failed, may have: no fewer than it has.
    bound: Pieces,
    /// Memory that may be bound where a call failed, besides what `bound` says, until the range is released: at which
    /// address.
    doubtful: Vec<(u64, Arc<Area>)>,
}

/// Pieces of the address space, by first address; no two overlap.
type Pieces = BTreeMap<u64, Piece>;

/// A range of addresses.
#[derive(Clone)]
struct Piece {
    len: u64,
    /// What is bound there; of a change, `None` unbinds.
    memory: Option<Behind>,
}

/// Memory that is bound, which nothing frees while it is.
#[derive(Clone)]
struct Behind {
    area: Arc<Area>,
    /// The card address of the first byte.
    at: u64,
    /// None, where the driver may have something else bound.
    access: Access,
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

/// The range that an address lies in.
fn window_at(windows: &BTreeMap<u64, Window>, at: u64) -> Option<&Window> {
    let (_, window) = windows.range(..=at).next_back()?;
    Some(window).filter(|window| window.range.contains(DeviceVa::new(at)))
}

/// The pieces that overlap a range.
fn overlapping(pieces: &Pieces, first: u64, end: u64) -> impl Iterator<Item = (u64, &Piece)> {
    let before = pieces.range(..first).next_back().filter(|(at, piece)| *at + piece.len > first);
    before.into_iter().chain(pieces.range(first..end)).map(|(at, piece)| (*at, piece))
}

/// Makes two of a piece that reaches across an address.
fn cut(pieces: &mut Pieces, at: u64) {
    let Some((first, piece)) = pieces.range_mut(..at).next_back() else { return };
    let before = at - first;
    if before < piece.len {
        let mut rest = piece.clone();
        rest.len -= before;
        if let Some(memory) = &mut rest.memory {
            memory.at += before;
        }
        piece.len = before;
        pieces.insert(at, rest);
    }
}

/// Takes what lies in a range out; what reaches out of it is cut.
fn take(pieces: &mut Pieces, first: u64, end: u64) -> impl Iterator<Item = Piece> {
    cut(pieces, first);
    cut(pieces, end);
    let inside: Vec<u64> = pieces.range(first..end).map(|(at, _)| *at).collect();
    inside.into_iter().filter_map(|at| pieces.remove(&at))
}

/// The same addresses as ranges that are apart from each other: first address, and the one behind the last.
fn union<'a>(pieces: impl Iterator<Item = (&'a u64, &'a Piece)>) -> Vec<(u64, u64)> {
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for (at, piece) in pieces {
        match spans.last_mut() {
            Some(last) if last.1 == *at => last.1 += piece.len,
            _ => spans.push((*at, at + piece.len)),
        }
    }
    spans
}

/// Changes that the driver is given at a time: it makes them while the next ones are looked up. Few of them under test,
/// so that batches of the tests take several calls.
const PART: usize = if cfg!(test) { 16 } else { 512 };

impl SparseMap {
    /// Finds out in which pages a GPU binds.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>, Error> {
        let (_, granule) = gpu.sparse_buffer(LARGE.bytes())?;
        let granule = PageSize::new(granule.max(PageSize::SIZE_4K.bytes())).filter(|page| *page <= LARGE);
        let granule = granule.ok_or_else(|| {
            let missing = "it binds in pages of more than 2 MiB".to_owned();
            Error::Unsuitable { name: gpu.info().name.clone(), missing }
        })?;
        let held = (gpu.info().kind == "software GPU").then(Held::by_process);
        #[cfg(test)]
        let held = gpu.live().held.get().cloned().or(held);
        let state = State { windows: BTreeMap::new(), last: 0, bound: Pieces::new(), doubtful: Vec::new() };
        let timeline = Arc::new(Timeline::new(gpu)?);
        let (state, stays, uses) = (Mutex::new(state), RwLock::new(()), Mutex::default());
        Ok(Arc::new(Self { granule, timeline, state, stays, uses, held, gpu: gpu.clone() }))
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
            return Err(refused(Error::Limit(format!(
                "a range of {len} bytes is longer than the driver's longest sparse buffer (room for {}): open the GPU \
                 as vulkan:NAME,flat, where a tensor may lie in several",
                self.longest()
            ))));
        }
        let mut state = lock(&self.state);
        let free = self.free(&state);
        if asked > free {
            return Err(refused(Error::NoAddresses { len, free, most: self.gpu.info().sparse.unwrap_or(0) }));
        }
        let (buffer, _) = self.gpu.sparse_buffer(asked).map_err(driver)?;
        let base = address_of(&self.gpu, &buffer).ok_or(SpaceError::Exhausted(len))?;
        let range = LARGE.round_up(base).and_then(|first| Span::new(DeviceVa::new(first), whole));
        let range = range.filter(|range| range.last().bits() < u64::MAX).ok_or(SpaceError::Exhausted(len))?;
        let offset = range.first().bits() - base;
        state.windows.insert(range.first().bits(), Window { range, buffer, offset });
        Ok(range)
    }

    #[cfg(test)]
    pub fn shares_limit_with(&self, other: &Self) -> bool {
        self.held.as_ref().zip(other.held.as_ref()).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// The pages in which it is bound.
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    /// Nothing is unbound while this is held.
    pub fn stays(&self) -> RwLockReadGuard<'_, ()> {
        self.stays.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a submission, which ends when its timeline reaches `value`, uses what is bound.
    pub fn used_until(&self, timeline: &Arc<Timeline>, value: u64) {
        let mut uses = lock(&self.uses);
        // A queue that is gone has ended all that it was given, or keeps its timeline for ever. A foreign buffer may
        // keep a timeline longer: then the entry stays until that buffer is used again.
        uses.retain(|(other, _)| !Arc::ptr_eq(other, timeline) && Arc::strong_count(other) > 1);
        uses.push((timeline.clone(), value));
    }

    /// Waits until no submission uses what is bound.
    fn unused(&self) -> Result<(), Error> {
        let mut uses = lock(&self.uses);
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
        let last = lock(&self.state).last;
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
        let state = lock(&self.state);
        let (first, span) = (va.bits(), Span::new(va, len).ok_or(va)?);
        let window = window_at(&state.windows, first).filter(|window| window.range.covers(&span)).ok_or(va)?;
        let needs = if writes { Access::WRITE } else { Access::READ };
        let (mut next, end) = (first, first + len);
        for (at, piece) in overlapping(&state.bound, first, end) {
            let memory = piece.memory.as_ref().filter(|memory| at <= next && memory.access.contains(needs));
            let Some(memory) = memory else { break };
            let here = end.min(at + piece.len) - next;
            let offset = window.offset + (next - window.range.first().bits());
            each(&window.buffer, offset, CardAddr::new(memory.at + (next - at)), here);
            next += here;
        }
        if next == end { Ok(()) } else { Err(DeviceVa::new(next)) }
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
fn address_of(gpu: &Gpu, buffer: &Buffer) -> Option<u64> {
    let base = buffer.device_address();
    #[cfg(test)]
    let base = base.map(|base| base + gpu.live().high.load(Ordering::Relaxed));
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
}

fn driver(e: impl Into<Error>) -> SpaceError {
    SpaceError::Driver(Box::new(e.into()))
}

fn refused(e: Error) -> SpaceError {
    SpaceError::Refused(Box::new(e))
}

impl SparseSpace {
    pub fn new(map: &Arc<SparseMap>, memory: &Arc<GpuMemory>) -> Self {
        Self { map: map.clone(), memory: memory.clone() }
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
        self.map.free(&lock(&self.map.state)).saturating_sub(LARGE.bytes())
    }

    fn reserve(&mut self, _: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        self.map.reserve(len)
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        let first = range.first().bits();
        if lock(&self.map.state).windows.get(&first).is_none_or(|window| window.range != range) {
            return Err(SpaceError::NotReserved(range));
        }
        self.apply(&[BindRequest::Unbind(range)])?;
        // A bind that was sent and not seen to end may still use the buffer.
        let last = lock(&self.map.state).last;
        self.map.wait(last).map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        let mut state = lock(&self.map.state);
        state.doubtful.retain(|(at, _)| !range.contains(DeviceVa::new(*at)));
        // Commands that use the buffer, and ended with an error since, keep it.
        state.windows.remove(&first);
        Ok(())
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        let _changes = self.map.stays.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = lock(&self.map.state);
        let changes = self.changes(&state, requests)?;
        let spans = union(changes.iter());
        let before = state.bound.len();
        let more = count_after(&state.bound, &changes, &spans).saturating_sub(before);
        if let Some(held) = self.map.held.as_ref().filter(|_| more > 0) {
            let counted = held.add(more as u64);
            counted.map_err(|wanted| {
                refused(Error::Limit(format!(
                    "the driver holds {} sparse bindings at most, and there would be {wanted} (unbinding the middle of \
                     a range leaves two)",
                    held.limit
                )))
            })?;
        }
        let made = make(&self.map, &mut state, changes, &spans);
        if let Some(held) = &self.map.held {
            held.replace((before + more) as u64, state.bound.len() as u64);
        }
        made?;
        drop(state);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), SpaceError> {
        let last = lock(&self.map.state).last;
        self.map.wait(last).map_err(driver)
    }
}

impl SparseSpace {
    /// The changes that requests make, in the end.
    fn changes(&self, state: &State, requests: &[BindRequest]) -> Result<Pieces, SpaceError> {
        let (page, areas) = (self.map.granule, self.memory.areas());
        let mut changes = Pieces::new();
        for request in requests {
            without_tables(request)?;
            let span = match request {
                BindRequest::Bind { va, len, .. } => Span::new(*va, *len).ok_or(SpaceError::Elsewhere(*va))?,
                BindRequest::Unbind(span) => *span,
                BindRequest::Prefetch(_) => continue,
                _ => return Err(SpaceError::NoTables),
            };
            let (first, last) = (span.first().bits(), span.last().bits());
            if !window_at(&state.windows, first).is_some_and(|window| window.range.covers(&span)) {
                return Err(SpaceError::NotReserved(span));
            }
            let (mut at, end) = (first, last + 1);
            take(&mut changes, at, end).for_each(drop);
            let mut whole = span.is_aligned(page);
            if let BindRequest::Bind { bo, offset, len, access, .. } = request {
                let runs = offset.checked_add(*len).and_then(|end| bo.sg().runs(*offset..end));
                for run in runs.into_iter().flatten() {
                    whole &= (run.addr.bits() | run.len).is_multiple_of(page.bytes());
                    let found = areas.resolve(run.addr, run.len, false, |area, _, _, card, len| {
                        let memory = Some(Behind { area: area.clone(), at: card, access: *access });
                        changes.insert(at, Piece { len, memory });
                        at += len;
                    });
                    found.map_err(|at| refused(Error::NotAllocated(at)))?;
                }
                whole &= at == end;
            } else {
                changes.insert(at, Piece { len: end - at, memory: None });
            }
            if !whole {
                return Err(refused(Error::NotPages { span, page }));
            }
        }
        Ok(changes)
    }
}

/// True when something is bound in a range.
fn is_bound(bound: &Pieces, (first, end): (u64, u64)) -> bool {
    overlapping(bound, first, end).next().is_some()
}

/// Pieces that the driver has bound after changes of these spans.
fn count_after(bound: &Pieces, changes: &Pieces, spans: &[(u64, u64)]) -> usize {
    let mut count = bound.len() + changes.values().filter(|piece| piece.memory.is_some()).count();
    for (first, end) in spans {
        for (at, piece) in overlapping(bound, *first, *end) {
            match (at < *first, at + piece.len > *end) {
                (true, true) => count += 1,
                (false, false) => count -= 1,
                _ => {}
            }
        }
    }
    count
}

/// Extends holes that are about to be made up to what stays bound on both sides, or to the ends of the reserved range.
/// A driver that maps gives each unbind a mapping of its own, which it keeps until something else is mapped there.
fn whole_holes(windows: &BTreeMap<u64, Window>, bound: &Pieces, holes: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut whole: Vec<(u64, u64)> = Vec::new();
    for &(first, end) in holes {
        let Some(window) = window_at(windows, first) else { continue }; // all were found in one
        let (low, high) = (window.range.first().bits(), window.range.last().bits() + 1);
        let before = bound.range(..first).next_back().map_or(low, |(at, piece)| (at + piece.len).clamp(low, first));
        let last = bound.range(..end).next_back().filter(|(at, piece)| *at + piece.len > end);
        let after = last.map_or_else(|| bound.range(end..).next().map_or(high, |(at, _)| high.min(*at)), |_| end);
        match whole.last_mut() {
            // Nothing between them stays.
            Some(hole) if hole.1 >= before => hole.1 = after,
            _ => whole.push((before, after)),
        }
    }
    // Those that cut a piece in two come last: there are never more pieces meanwhile than before or after all of them.
    whole.sort_by_key(|(first, end)| overlapping(bound, *first, *end).next().is_some_and(|(at, _)| at < *first));
    whole
}

/// Makes the driver make changes, those that take something away first, and waits for these.
fn make(map: &SparseMap, state: &mut State, changes: Pieces, spans: &[(u64, u64)]) -> Result<(), SpaceError> {
    let State { windows, last, bound, doubtful } = state;
    let holes: Vec<(u64, u64)> = match &map.held {
        // All of the spans, so that there are never more pieces meanwhile than the limit allows.
        Some(_) => spans.to_vec(),
        // Other drivers take time for each page that they unbind.
        None => union(changes.iter().filter(|(_, piece)| piece.memory.is_none())),
    };
    let mut holes: Vec<_> = holes.into_iter().filter(|hole| is_bound(bound, *hole)).collect();
    let takes_away = spans.iter().any(|span| is_bound(bound, *span));
    if map.held.is_some() {
        holes = whole_holes(windows, bound, &holes);
    }
    let unbind = |(first, end)| (first, Piece { len: end - first, memory: None });
    let unbinds: Vec<_> = holes.into_iter().map(unbind).collect();
    let binds: Vec<_> = changes.into_iter().filter(|(_, piece)| piece.memory.is_some()).collect();
    let mut sent = 0;
    let done = (|| {
        if takes_away {
            map.gpu.check().map_err(Error::from).and_then(|()| map.unused())?;
        }
        // Binds of ranges that are unbound first are in a call of their own, which comes behind that.
        for part in unbinds.chunks(PART).chain(binds.chunks(PART)) {
            sent += part.len();
            map.send(windows, last, part)?;
        }
        if takes_away { map.wait(*last) } else { Ok(()) }
    })();
    let Err(e) = done else {
        // The pages that are taken away were waited for.
        for (at, piece) in unbinds.into_iter().chain(binds) {
            take(bound, at, at + piece.len).for_each(drop);
            if piece.memory.is_some() {
                bound.insert(at, piece);
            }
        }
        return Ok(());
    };
    // The driver may have done all of it, some, or nothing. Whatever it was given, also by a call that failed, is
    // counted and kept until it is unbound or bound over, which is waited for; and nothing of it is used.
    for (at, piece) in unbinds.into_iter().chain(binds).take(sent) {
        let end = at + piece.len;
        if piece.memory.is_some() {
            doubtful.extend(take(bound, at, end).filter_map(|piece| Some((at, piece.memory?.area))));
            bound.insert(at, piece);
        } else {
            cut(bound, at);
            cut(bound, end);
        }
    }
    for &(first, end) in spans {
        cut(bound, first);
        cut(bound, end);
        for memory in bound.range_mut(first..end).filter_map(|(_, piece)| piece.memory.as_mut()) {
            memory.access = Access::empty();
        }
    }
    Err(if takes_away { SpaceError::Invalidate(Box::new(e)) } else { driver(e) })
}

impl SparseMap {
    /// Gives the driver changes of ranges that are apart from each other: it may make them in any order.
    fn send(&self, windows: &BTreeMap<u64, Window>, last: &mut u64, part: &[(u64, Piece)]) -> Result<(), Error> {
        self.gpu.check()?;
        // By sparse buffer; most batches have one.
        let mut all: Vec<(Arc<Buffer>, Vec<SparseBind<'_>>)> = Vec::new();
        for (at, Piece { len, memory }) in part {
            let Some(window) = window_at(windows, *at) else { continue }; // all were found in one
            let memory = memory.as_ref().map(|memory| {
                let (buffer, offset) = memory.area.chunk_at(memory.at);
                (&**buffer.memory().expect("device memory has memory"), offset)
            });
            let bind = SparseBind { at: at - window.range.first().bits() + window.offset, len: *len, memory };
            match all.iter_mut().find(|(buffer, _)| Arc::ptr_eq(buffer, &window.buffer)) {
                Some((_, binds)) => binds.push(bind),
                None => all.push((window.buffer.clone(), vec![bind])),
            }
        }
        let value = *last + 1;
        // SAFETY: windows and what is bound in them stay in the map until an unbind has ended; the drop of the map
        // waits for the last, or leaks them with the timeline. Pieces are whole granules.
        let done = unsafe { self.gpu.bind_sparse(&all, &self.timeline, value) };
        // A call that finds the device lost may have sent it.
        if done.is_ok() || done.is_err_and(|e| e.is_lost()) {
            *last = value;
        }
        Ok(done?)
    }
}

impl Drop for SparseMap {
    fn drop(&mut self) {
        // The buffers and the memory that is bound to them must not go while a bind is under way.
        let last = lock(&self.state).last;
        let ended = self.gpu.check().and_then(|()| self.timeline.wait_despite_errors(last, TIMEOUT));
        // Only a lost device is asked in a way that has no timeout: it answers in finite time.
        if !ended.unwrap_or_else(|_lost| self.gpu.has_bound()) {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            let State { windows, bound, doubtful, .. } = state;
            std::mem::forget((std::mem::take(windows), std::mem::take(bound), std::mem::take(doubtful)));
            std::mem::forget(self.timeline.clone());
            return;
        }
        if let Some(held) = &self.held {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            held.replace(state.bound.len() as u64, 0);
        }
    }
}
