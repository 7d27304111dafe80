//! Who binds pages of a buffer: the driver before and after the posted patch, maps, ours, and the least that will do.
//!
//! All write tables of Apple's AGX GPU (16 KiB pages), entries made by the same function. Ours writes
//! through `iopt`. The others write plain words: a directory says which leaf table, and there is no table in between,
//! so that they pay for their bookkeeping and next to nothing for the table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use dmalane::addr::{Access, Address, CardAddr, DeviceVa, PageSize, Segment, SgIndex, Span};
use dmalane::iopt::{AgxUat, Entry, Format, HeapTables};
use dmalane::vm::array::ArrayOperation;
use dmalane::vm::{BindRequest, Bo, Handles, Vm};
use rangemap::RangeMap;
use zerocopy::IntoBytes;

use crate::buffers::PAGE;
use crate::gpuvm::GpuVm;
use crate::sg_index::{BinarySearch, Found, Linear};

/// Where the first page is bound.
pub const BASE: u64 = 1 << 32;
/// Tables lie here, as far as their addresses matter.
const TABLES_AT: u64 = 1 << 40;
const ENTRIES: u64 = 1 << AgxUat::INDEX_BITS;
const PTES: u32 = AgxUat::LEVELS - 1;

/// A page to bind: device VA and offset in the buffer.
pub type Job = (u64, u64);

/// One way to bind, as the bench uses it.
pub trait Binder {
    fn name(&self) -> &'static str;
    /// Writes the array, for binders that take one. Not timed.
    fn prepare(&mut self, jobs: &[Job]) {
        let _ = jobs;
    }
    fn bind(&mut self, jobs: &[Job]);
    fn unbind(&mut self, jobs: &[Job]);
    /// One unbind of `pages` pages from [`BASE`] on.
    fn unbind_range(&mut self, pages: u64);
    /// Where the table leads, by walking it.
    fn translate(&self, va: u64) -> Option<u64>;
    /// Bindings, and what else can be said to be in order.
    fn bindings(&self) -> Result<usize, String>;
}

/// The work of each binder for one page.
trait Pages {
    fn name(&self) -> &'static str;
    fn bind(&mut self, va: u64, offset: u64);
    fn unbind(&mut self, va: u64);
    fn unbind_range(&mut self, pages: u64);
    fn translate(&self, va: u64) -> Option<u64>;
    fn bindings(&self) -> Result<usize, String>;
}

/// The loops that are timed and counted.
#[inline(never)]
fn timed_binds<P: Pages>(pages: &mut P, jobs: &[Job]) {
    for &(va, offset) in jobs {
        pages.bind(va, offset);
    }
}

#[inline(never)]
fn timed_unbinds<P: Pages>(pages: &mut P, jobs: &[Job]) {
    for &(va, _) in jobs {
        pages.unbind(va);
    }
}

#[inline(never)]
fn timed_range<P: Pages>(pages: &mut P, count: u64) {
    pages.unbind_range(std::hint::black_box(count));
}

struct EachPage<P>(P);

impl<P: Pages> Binder for EachPage<P> {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn bind(&mut self, jobs: &[Job]) {
        timed_binds(&mut self.0, jobs);
    }
    fn unbind(&mut self, jobs: &[Job]) {
        timed_unbinds(&mut self.0, jobs);
    }
    fn unbind_range(&mut self, pages: u64) {
        timed_range(&mut self.0, pages);
    }
    fn translate(&self, va: u64) -> Option<u64> {
        self.0.translate(va)
    }
    fn bindings(&self) -> Result<usize, String> {
        self.0.bindings()
    }
}

pub const BEFORE: &str = "before: list walk, gpuvm-like";
pub const PATCH: &str = "the posted patch: binary search, gpuvm-like";
pub const LEAN: &str = "the posted patch, nothing allocated in advance";
pub const BTREE: &str = "SgIndex, BTreeMap";
pub const RANGEMAP: &str = "SgIndex, rangemap";
pub const OURS: &str = "ours";
pub const BATCH: &str = "ours, one batch";
pub const RESERVED: &str = "ours, reserved part";
pub const TWO: &str = "ours, 2 buffers";
pub const SIXTEEN: &str = "ours, 16 buffers";
pub const ARRAY: &str = "ours, plan_array";
pub const LIMIT: &str = "limit: SgIndex, one store";
pub const ALL: [&str; 12] = [BEFORE, PATCH, LEAN, BTREE, RANGEMAP, OURS, RESERVED, TWO, SIXTEEN, BATCH, ARRAY, LIMIT];
/// The shapes of ours, each with goals of its own.
pub const SHAPES: [&str; 6] = [OURS, RESERVED, TWO, SIXTEEN, BATCH, ARRAY];

/// The named way to bind pages of a buffer made of these segments, its preparation included. `pages` is how
/// far from [`BASE`] on it will be asked to bind.
pub fn make(name: &str, segments: &[Segment<CardAddr>], pages: u64) -> Option<Box<dyn Binder>> {
    let index = || SgIndex::try_new(segments.iter().copied()).ok();
    Some(match name {
        BEFORE => Box::new(EachPage(Driver::new(BEFORE, Linear::new(segments), true))),
        PATCH => Box::new(EachPage(Driver::new(PATCH, BinarySearch::new(segments), true))),
        LEAN => Box::new(EachPage(Driver::new(LEAN, BinarySearch::new(segments), false))),
        BTREE => Box::new(EachPage(Map { sg: index()?, bo: Arc::new(1), map: BTreeMap::new(), table: Plain::new() })),
        RANGEMAP => Box::new(EachPage(Ranges { sg: index()?, map: RangeMap::new(), table: Plain::new() })),
        OURS => Box::new(EachPage(Ours::<1>::new(OURS, index()?)?)),
        RESERVED => Box::new(EachPage(Ours::<1>::new(RESERVED, index()?)?)),
        TWO => Box::new(EachPage(Ours::<2>::new(TWO, index()?)?)),
        SIXTEEN => Box::new(EachPage(Ours::<16>::new(SIXTEEN, index()?)?)),
        BATCH => Box::new(Batch(Ours::new(BATCH, index()?)?)),
        ARRAY => Box::new(Array::new(index()?)?),
        LIMIT => Box::new(EachPage(Limit { sg: index()?, words: (0..pages).map(|_| AtomicU64::new(0)).collect() })),
        _ => return None,
    })
}

/// The entry of a page
fn entry(to: u64) -> u64 {
    AgxUat::encode_leaf(PTES, to, Access::RW)
}

/// Where an entry leads
fn target(entry: u64) -> Option<u64> {
    match AgxUat::decode(PTES, entry) {
        Entry::Leaf { out, access: Access::RW } => Some(out),
        _ => None,
    }
}

/// Leaf tables and a directory of them, by what an entry of it covers.
struct Plain {
    directory: Vec<u32>,
    leaves: Vec<Box<[AtomicU64]>>,
}

impl Plain {
    fn new() -> Self {
        let covered = 1u64 << (AgxUat::INPUT_BITS - AgxUat::GRANULE.log2() as u32 - AgxUat::INDEX_BITS);
        Self { directory: vec![u32::MAX; covered as usize], leaves: Vec::new() }
    }

    #[inline]
    fn store(&mut self, va: u64, entry: u64) {
        let page = va / PAGE;
        let slot = &mut self.directory[(page / ENTRIES) as usize];
        if *slot == u32::MAX {
            *slot = self.leaves.len() as u32;
            self.leaves.push((0..ENTRIES).map(|_| AtomicU64::new(0)).collect());
        }
        self.leaves[*slot as usize][(page % ENTRIES) as usize].store(entry, Relaxed);
    }

    fn clear(&mut self, va: u64, pages: u64) {
        for page in 0..pages {
            self.store(va + page * PAGE, 0);
        }
    }

    fn load(&self, va: u64) -> Option<u64> {
        let page = va / PAGE;
        let leaf = self.leaves.get(self.directory[(page / ENTRIES) as usize] as usize)?;
        target(leaf[(page % ENTRIES) as usize].load(Relaxed))
    }
}

/// How a driver finds the segment.
trait Finds {
    fn find(&self, offset: u64) -> Found;
}

impl Finds for Linear {
    #[inline]
    fn find(&self, offset: u64) -> Found {
        self.look_up(offset)
    }
}

impl Finds for BinarySearch {
    #[inline]
    fn find(&self, offset: u64) -> Found {
        self.look_up(offset)
    }
}

/// The driver: a way to find the segment, the bookkeeping, the table.
struct Driver<L> {
    name: &'static str,
    list: L,
    vm: GpuVm,
    table: Plain,
}

impl<L> Driver<L> {
    fn new(name: &'static str, list: L, reserves: bool) -> Self {
        Self { name, list, vm: GpuVm::new(reserves), table: Plain::new() }
    }
}

impl<L: Finds> Pages for Driver<L> {
    fn name(&self) -> &'static str {
        self.name
    }

    #[inline]
    fn bind(&mut self, va: u64, offset: u64) {
        let (to, left) = self.list.find(offset).expect("within the buffer");
        assert!(left >= PAGE);
        self.vm.map(va, va + (PAGE - 1), offset, 3);
        self.table.store(va, entry(to));
    }

    #[inline]
    fn unbind(&mut self, va: u64) {
        self.vm.unmap(va, va + (PAGE - 1));
        self.table.store(va, 0);
    }

    fn unbind_range(&mut self, pages: u64) {
        self.vm.unmap(BASE, BASE + pages * PAGE - 1);
        self.table.clear(BASE, pages);
    }

    fn translate(&self, va: u64) -> Option<u64> {
        self.table.load(va)
    }

    fn bindings(&self) -> Result<usize, String> {
        self.vm.check().map(|all| all.len())
    }
}

/// The record of a mapping in a map.
struct Mapping {
    last: u64,
    bo: Arc<u64>,
    offset: u64,
    access: Access,
}

struct Map {
    sg: SgIndex<CardAddr>,
    bo: Arc<u64>,
    map: BTreeMap<u64, Mapping>,
    table: Plain,
}

impl Map {
    /// Removes what overlaps and puts back what sticks out.
    fn evict(&mut self, first: u64, last: u64) {
        while let Some((&at, mapping)) = self.map.range(..=last).next_back()
            && mapping.last >= first
        {
            let Some(old) = self.map.remove(&at) else { return };
            if old.last > last {
                let offset = old.offset + (last + 1 - at);
                let rest = Mapping { last: old.last, bo: old.bo.clone(), offset, access: old.access };
                self.map.insert(last + 1, rest);
            }
            if at < first {
                self.map.insert(at, Mapping { last: first - 1, ..old });
                return;
            }
        }
    }
}

impl Pages for Map {
    fn name(&self) -> &'static str {
        BTREE
    }

    #[inline]
    fn bind(&mut self, va: u64, offset: u64) {
        let to = self.sg.page_at(offset, PageSize::SIZE_16K).expect("within the buffer").bits();
        let last = va + (PAGE - 1);
        self.evict(va, last);
        self.map.insert(va, Mapping { last, bo: self.bo.clone(), offset, access: Access::RW });
        self.table.store(va, entry(to));
    }

    #[inline]
    fn unbind(&mut self, va: u64) {
        self.evict(va, va + (PAGE - 1));
        self.table.store(va, 0);
    }

    fn unbind_range(&mut self, pages: u64) {
        self.evict(BASE, BASE + pages * PAGE - 1);
        self.table.clear(BASE, pages);
    }

    fn translate(&self, va: u64) -> Option<u64> {
        self.table.load(va)
    }

    fn bindings(&self) -> Result<usize, String> {
        Ok(self.map.len())
    }
}

/// A crate that keeps ranges and joins neighbours of equal value: buffer, and offset less VA.
struct Ranges {
    sg: SgIndex<CardAddr>,
    map: RangeMap<u64, (u64, u64, Access)>,
    table: Plain,
}

impl Pages for Ranges {
    fn name(&self) -> &'static str {
        RANGEMAP
    }

    #[inline]
    fn bind(&mut self, va: u64, offset: u64) {
        let to = self.sg.page_at(offset, PageSize::SIZE_16K).expect("within the buffer").bits();
        self.map.insert(va..va + PAGE, (1, offset.wrapping_sub(va), Access::RW));
        self.table.store(va, entry(to));
    }

    #[inline]
    fn unbind(&mut self, va: u64) {
        self.map.remove(va..va + PAGE);
        self.table.store(va, 0);
    }

    fn unbind_range(&mut self, pages: u64) {
        self.map.remove(BASE..BASE + pages * PAGE);
        self.table.clear(BASE, pages);
    }

    fn translate(&self, va: u64) -> Option<u64> {
        self.table.load(va)
    }

    fn bindings(&self) -> Result<usize, String> {
        Ok(self.map.iter().map(|(range, _)| ((range.end - range.start) / PAGE) as usize).sum())
    }
}

/// The bind manager through its public interface, one call for each request, with `BUFFERS` buffers.
struct Ours<const BUFFERS: u64> {
    name: &'static str,
    vm: Vm<AgxUat, HeapTables<CardAddr>>,
    /// Each has as many bytes of the memory, so that a bind is of any of them.
    bos: Vec<Arc<Bo>>,
    /// Logarithm of the bytes of each.
    shift: u32,
}

impl<const BUFFERS: u64> Ours<BUFFERS> {
    fn new(name: &'static str, sg: SgIndex<CardAddr>) -> Option<Self> {
        let range = Span::new(DeviceVa::new(0), 1 << AgxUat::INPUT_BITS)?;
        let tables = HeapTables::new(CardAddr::new(TABLES_AT));
        // Asahi's driver keeps the last 32 GiB for itself.
        let reserved = Span::new(DeviceVa::new((1 << AgxUat::INPUT_BITS) - (32 << 30)), 32 << 30)?;
        let vm = if name == RESERVED || name == ARRAY {
            Vm::with_reserved(range, reserved, tables)
        } else {
            Vm::new(range, tables)
        };
        let (len, mut bos) = ((sg.len() / BUFFERS).next_power_of_two(), Vec::new());
        for start in (0..sg.len()).step_by(len as usize) {
            let segments = sg.runs(start..sg.len().min(start + len))?;
            bos.push(Arc::new(Bo::of_segments(start / len + 1, segments).ok()?));
        }
        Some(Self { name, vm: vm.ok()?, bos, shift: len.trailing_zeros() })
    }

    fn request((va, offset): Job, bo: &Arc<Bo>) -> BindRequest {
        BindRequest::Bind { va: DeviceVa::new(va), bo: bo.clone(), offset, len: PAGE, access: Access::RW }
    }

    fn unbind_request(va: u64, len: u64) -> BindRequest {
        BindRequest::Unbind(Span::new(DeviceVa::new(va), len).expect("within the VM"))
    }

    #[inline]
    fn commit(&mut self, requests: impl IntoIterator<Item = BindRequest>) {
        let committed = self.vm.plan(requests).expect("a sound request").commit();
        self.vm.invalidated(committed);
    }
}

impl<const BUFFERS: u64> Pages for Ours<BUFFERS> {
    fn name(&self) -> &'static str {
        self.name
    }

    #[inline]
    fn bind(&mut self, va: u64, offset: u64) {
        // A single buffer is at hand, as it is for the limit.
        let bo = &self.bos[if BUFFERS == 1 { 0 } else { (offset >> self.shift) as usize }];
        let offset = if BUFFERS == 1 { offset } else { offset & ((1 << self.shift) - 1) };
        let bound = self.vm.bind(DeviceVa::new(va), bo, offset, PAGE, Access::RW);
        self.vm.invalidated(bound.expect("a sound request"));
    }

    #[inline]
    fn unbind(&mut self, va: u64) {
        let span = Span::new(DeviceVa::new(va), PAGE).expect("within the VM");
        let unbound = self.vm.unbind(span).expect("a sound request");
        self.vm.invalidated(unbound);
    }

    fn unbind_range(&mut self, pages: u64) {
        self.commit([Self::unbind_request(BASE, pages * PAGE)]);
    }

    fn translate(&self, va: u64) -> Option<u64> {
        let leaf = self.vm.page_table().lookup(DeviceVa::new(va))?;
        leaf.translate(DeviceVa::new(va)).filter(|_| leaf.access == Access::RW).map(Address::bits)
    }

    fn bindings(&self) -> Result<usize, String> {
        Ok(self.vm.bindings().map(|b| (b.span.len() / PAGE) as usize).sum())
    }
}

/// The same with all requests in one plan.
struct Batch(Ours<1>);

#[inline(never)]
fn timed_binds_of_a_batch(ours: &mut Ours<1>, jobs: &[Job]) {
    let bo = ours.bos[0].clone();
    ours.commit(jobs.iter().map(|&job| Ours::<1>::request(job, &bo)));
}

#[inline(never)]
fn timed_unbinds_of_a_batch(ours: &mut Ours<1>, jobs: &[Job]) {
    ours.commit(jobs.iter().map(|&(va, _)| Ours::<1>::unbind_request(va, PAGE)));
}

impl Binder for Batch {
    fn name(&self) -> &'static str {
        BATCH
    }
    fn bind(&mut self, jobs: &[Job]) {
        timed_binds_of_a_batch(&mut self.0, jobs);
    }
    fn unbind(&mut self, jobs: &[Job]) {
        timed_unbinds_of_a_batch(&mut self.0, jobs);
    }
    fn unbind_range(&mut self, pages: u64) {
        Pages::unbind_range(&mut self.0, pages);
    }
    fn translate(&self, va: u64) -> Option<u64> {
        Pages::translate(&self.0, va)
    }
    fn bindings(&self) -> Result<usize, String> {
        Pages::bindings(&self.0)
    }
}

/// The same as one array of bytes, as the original program gives it to the kernel, which writes it before it looks at
/// the clock.
struct Array {
    ours: Ours<1>,
    handles: Handles,
    handle: u32,
    binds: Vec<ArrayOperation>,
    unbinds: Vec<ArrayOperation>,
}

impl Array {
    fn new(sg: SgIndex<CardAddr>) -> Option<Self> {
        let ours = Ours::new(ARRAY, sg)?;
        let mut handles = Handles::new();
        let handle = handles.insert(ours.bos[0].clone())?;
        Some(Self { ours, handles, handle, binds: Vec::new(), unbinds: Vec::new() })
    }
}

#[inline(never)]
fn timed_binds_of_an_array(array: &mut Array) {
    plan_array(&mut array.ours.vm, &array.binds, &array.handles);
}

#[inline(never)]
fn timed_unbinds_of_an_array(array: &mut Array) {
    plan_array(&mut array.ours.vm, &array.unbinds, &array.handles);
}

fn plan_array(vm: &mut Vm<AgxUat, HeapTables<CardAddr>>, operations: &[ArrayOperation], handles: &Handles) {
    let plan = vm.plan_array(operations.as_bytes(), ArrayOperation::BYTES, operations.len(), handles);
    let committed = plan.expect("sound operations").commit();
    vm.invalidated(committed);
}

impl Binder for Array {
    fn name(&self) -> &'static str {
        ARRAY
    }
    fn prepare(&mut self, jobs: &[Job]) {
        let bind = |&(va, offset): &Job| ArrayOperation {
            flags: (ArrayOperation::BIND | ArrayOperation::READ | ArrayOperation::WRITE).into(),
            handle: self.handle.into(),
            offset: offset.into(),
            range: PAGE.into(),
            addr: va.into(),
        };
        let unbind = |&(va, _): &Job| ArrayOperation {
            flags: ArrayOperation::UNBIND.into(),
            range: PAGE.into(),
            addr: va.into(),
            ..ArrayOperation::default()
        };
        self.binds.clear();
        self.binds.extend(jobs.iter().map(bind));
        self.unbinds.clear();
        self.unbinds.extend(jobs.iter().map(unbind));
    }
    fn bind(&mut self, _: &[Job]) {
        timed_binds_of_an_array(self);
    }
    fn unbind(&mut self, _: &[Job]) {
        timed_unbinds_of_an_array(self);
    }
    fn unbind_range(&mut self, pages: u64) {
        Pages::unbind_range(&mut self.ours, pages);
    }
    fn translate(&self, va: u64) -> Option<u64> {
        Pages::translate(&self.ours, va)
    }
    fn bindings(&self) -> Result<usize, String> {
        Pages::bindings(&self.ours)
    }
}

/// The least: where the page is, and its entry in a table as long as the address space in use.
struct Limit {
    sg: SgIndex<CardAddr>,
    words: Vec<AtomicU64>,
}

impl Pages for Limit {
    fn name(&self) -> &'static str {
        LIMIT
    }

    #[inline]
    fn bind(&mut self, va: u64, offset: u64) {
        let to = self.sg.page_at(offset, PageSize::SIZE_16K).expect("within the buffer").bits();
        self.words[((va - BASE) / PAGE) as usize].store(entry(to), Relaxed);
    }

    #[inline]
    fn unbind(&mut self, va: u64) {
        self.words[((va - BASE) / PAGE) as usize].store(0, Relaxed);
    }

    fn unbind_range(&mut self, pages: u64) {
        // One by one: stores to atomics are not joined.
        for word in &self.words[..pages as usize] {
            word.store(0, Relaxed);
        }
    }

    fn translate(&self, va: u64) -> Option<u64> {
        target(self.words.get(((va - BASE) / PAGE) as usize)?.load(Relaxed))
    }

    fn bindings(&self) -> Result<usize, String> {
        Ok(self.words.iter().filter(|w| w.load(Relaxed) != 0).count())
    }
}
