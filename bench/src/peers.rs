//! The peers' page tables on the same jobs, each through the interface of its own that suits the job best.
//!
//! Unsafe because they ask for it: `x86_64` makes mapping an unsafe call, `aarch64-paging` and `x86_64` have unsafe
//! traits for table memory. No table made here is ever given to a processor, so the duties that come with those
//! interfaces (what the mapping means to running code, TLB maintenance) are empty; what is left is that table memory is
//! valid, aligned and owned, which [`Frames`] sees to.
//!
//! All of them take their tables from [`Frames`]: a warm stack of 4 KiB frames whose addresses are also their physical
//! ones. That is the cheapest table memory they can have, so it flatters none of ours.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{El1Attributes, PhysicalAddress, UpdatableDescriptor};
use aarch64_paging::paging::{Constraints, El1And0, MemoryRegion, PageTable as ArmTable, Translation, VaRange};
use dmalane::addr::{Access, PhysAddr, Segment};
use dmalane::iopt::{Arm64S1_4k, Format, X86_64_4Level, walk};
use page_table_generic as generic;
use page_table_multiarch as multiarch;
use page_table_multiarch::PagingHandler;
use x86_64::structures::paging as x86;
use x86_64::structures::paging::mapper::Mapper;
use x86_64::structures::paging::{PageTableFlags, PhysFrame, Size1GiB, Size2MiB, Size4KiB, Translate};

use crate::job::{BLOCK, Job, PAGE};
use crate::subject::Subject;

/// Every peer, fresh.
pub fn all() -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(Aarch64Paging::new("peer:aarch64-paging", false)),
        Box::new(Aarch64Paging::new("peer:aarch64-paging, one range, then modify_range", true)),
        Box::new(Multiarch::new()),
        Box::new(X86::new()),
        Box::new(Generic::new()),
    ]
}

#[derive(Clone)]
#[repr(align(4096))]
struct Frame([u64; 512]);

thread_local! {
    /// Free frames, by address.
    static FREE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Frames for tables. Their contents are left from their last use: all four peers clear a table themselves, or have it
/// done in their own interface.
struct Frames;

impl Frames {
    fn take() -> usize {
        FREE.with_borrow_mut(|free| {
            if free.is_empty() {
                // Leaked: the frames are shared by all tables of this thread until the process ends.
                let more = Box::leak(vec![Frame([0; 512]); 64].into_boxed_slice());
                free.extend(more.iter_mut().map(|f| (f as *mut Frame).expose_provenance()));
            }
            free.pop().expect("just filled")
        })
    }

    fn give(frame: usize) {
        FREE.with_borrow_mut(|free| free.push(frame));
    }
}

/// Where an address leads, for reading and writing, as a walker of ours reads a peer's tables.
fn walked<F: Format>(root: usize, at: u64) -> Option<Option<u64>> {
    // SAFETY: the root and the tables below are frames of `Frames`, which are never freed; words of them are aligned.
    let load = |word: u64| Some(unsafe { with_exposed_provenance::<u64>(word as usize).read() });
    Some(walk::<F>(root as u64, at, load).ok().filter(|leaf| leaf.access.contains(Access::RW)).map(|leaf| leaf.to))
}

const GIB: u64 = 1 << 30;

/// The largest of the three page sizes for these addresses and length.
fn largest(at: u64, to: u64, len: u64) -> u64 {
    [GIB, BLOCK].into_iter().find(|size| (at | to) & (size - 1) == 0 && len >= *size).unwrap_or(PAGE)
}

/// The pages of a list one after the other, for interfaces that ask for each page's address in ascending order.
struct Pages<'a> {
    list: &'a [Segment<PhysAddr>],
    next: Cell<usize>,
    left: Cell<u64>,
    to: Cell<u64>,
}

impl<'a> Pages<'a> {
    fn new(list: &'a [Segment<PhysAddr>]) -> Self {
        Self { list, next: Cell::new(0), left: Cell::new(0), to: Cell::new(0) }
    }

    #[inline]
    fn next(&self) -> u64 {
        if self.left.get() == 0 {
            let s = self.list[self.next.get()];
            self.next.set(self.next.get() + 1);
            self.left.set(s.len);
            self.to.set(s.addr.bits());
        }
        let to = self.to.get();
        self.to.set(to + PAGE);
        self.left.set(self.left.get() - PAGE);
        to
    }
}

/// aarch64-paging: `map_range` for each segment; or, where a list has many, one `map_range` over the whole span that
/// makes the tables, and one `modify_range` that puts every page's own address in.
struct Aarch64Paging {
    name: &'static str,
    modify: bool,
    mapping: Option<Mapping<FrameTables, El1And0>>,
}

struct FrameTables;

impl Translation<El1Attributes> for FrameTables {
    fn allocate_table(&mut self) -> (NonNull<ArmTable<El1Attributes>>, PhysicalAddress) {
        let frame = Frames::take();
        let table = with_exposed_provenance_mut::<Frame>(frame);
        // SAFETY: a frame from `Frames` is 4 KiB of its own memory, aligned, and no one else's until it is given back.
        unsafe { (*table).0.fill(0) };
        (NonNull::new(table.cast()).expect("memory is not at 0"), PhysicalAddress(frame))
    }

    // SAFETY: no more is asked for than by the trait: that the table came from `allocate_table` and is not in use.
    unsafe fn deallocate_table(&mut self, table: NonNull<ArmTable<El1Attributes>>) {
        Frames::give(table.as_ptr().expose_provenance());
    }

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<ArmTable<El1Attributes>> {
        NonNull::new(with_exposed_provenance_mut(pa.0)).expect("memory is not at 0")
    }
}

const ARM_RW: El1Attributes = El1Attributes::VALID
    .union(El1Attributes::USER)
    .union(El1Attributes::INNER_SHAREABLE)
    .union(El1Attributes::ACCESSED)
    .union(El1Attributes::NON_GLOBAL)
    .union(El1Attributes::UXN)
    .union(El1Attributes::PXN);

fn region(at: u64, len: u64) -> MemoryRegion {
    MemoryRegion::new(at as usize, (at + len) as usize)
}

impl Aarch64Paging {
    fn new(name: &'static str, modify: bool) -> Self {
        Self { name, modify, mapping: Some(Self::fresh()) }
    }

    fn fresh() -> Mapping<FrameTables, El1And0> {
        Mapping::with_asid_and_va_range(FrameTables, 1, 0, El1And0, VaRange::Lower)
    }
}

impl Subject for Aarch64Paging {
    fn name(&self) -> &str {
        self.name
    }

    fn reset(&mut self) {
        self.mapping = None; // gives its tables back
        self.mapping = Some(Self::fresh());
    }

    fn map(&mut self, job: &Job) {
        let mapping = self.mapping.as_mut().expect("always there");
        for &call in &job.calls {
            let list = job.list(call);
            if self.modify && list.len() > 1 && job.leaf == PAGE {
                let first = PhysicalAddress(list[0].addr.bits() as usize);
                let pages = Constraints::NO_BLOCK_MAPPINGS | Constraints::NO_CONTIGUOUS_HINT;
                mapping.map_range(&region(call.at, call.len), first, ARM_RW, pages).expect("free");
                let source = Pages::new(list);
                let update = |_: &MemoryRegion, d: &mut UpdatableDescriptor<El1Attributes>| {
                    if d.level() == 3 { d.set(PhysicalAddress(source.next() as usize), d.flags()) } else { Ok(()) }
                };
                mapping.modify_range(&region(call.at, call.len), &update).expect("not live");
                continue;
            }
            let mut at = call.at;
            for s in list {
                let to = PhysicalAddress(s.addr.bits() as usize);
                mapping.map_range(&region(at, s.len), to, ARM_RW, Constraints::empty()).expect("free");
                at += s.len;
            }
        }
    }

    fn unmap(&mut self, job: &Job) {
        let mapping = self.mapping.as_mut().expect("always there");
        for call in &job.calls {
            let span = region(call.at, call.len);
            mapping
                .map_range(&span, PhysicalAddress(0), El1Attributes::empty(), Constraints::empty())
                .expect("was mapped");
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        let mapping = self.mapping.as_ref().expect("always there");
        let (page, mut found) = (at & !(PAGE - 1), None);
        mapping
            .walk_range(&region(page, PAGE), &mut |_, d, level| {
                if d.is_valid() && (level == 3 || !d.is_table_or_page()) {
                    let mask = (PAGE << (9 * (3 - level))) - 1;
                    found = Some(d.output_address().0 as u64 & !mask | at & mask);
                }
                Ok(())
            })
            .ok()?;
        found
    }

    fn walked(&self, at: u64) -> Option<Option<u64>> {
        walked::<Arm64S1_4k>(self.mapping.as_ref()?.root_address().0, at)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}

/// page_table_multiarch: one cursor for each call and `map_region`, which asks a closure for every page. A list of 4
/// KiB pages is one such call; other lists are a call for each segment, with large pages allowed.
struct Multiarch {
    table: Option<multiarch::x86_64::X64PageTable<MultiarchFrames>>,
}

struct MultiarchFrames;

impl PagingHandler for MultiarchFrames {
    fn alloc_frames(num: usize, _align: usize) -> Option<memory_addr::PhysAddr> {
        assert_eq!(num, 1);
        Some(memory_addr::PhysAddr::from_usize(Frames::take()))
    }

    fn dealloc_frames(frame: memory_addr::PhysAddr, num: usize) {
        assert_eq!(num, 1);
        Frames::give(frame.as_usize());
    }

    fn phys_to_virt(frame: memory_addr::PhysAddr) -> memory_addr::VirtAddr {
        memory_addr::VirtAddr::from_usize(frame.as_usize())
    }
}

impl Multiarch {
    fn new() -> Self {
        Self { table: multiarch::x86_64::X64PageTable::try_new().ok() }
    }
}

impl Subject for Multiarch {
    fn name(&self) -> &str {
        "peer:page_table_multiarch"
    }

    fn reset(&mut self) {
        self.table = None; // gives its tables back
        self.table = multiarch::x86_64::X64PageTable::try_new().ok();
    }

    fn map(&mut self, job: &Job) {
        let flags = multiarch::MappingFlags::READ | multiarch::MappingFlags::WRITE | multiarch::MappingFlags::USER;
        let table = self.table.as_mut().expect("always there");
        for &call in &job.calls {
            let list = job.list(call);
            let mut cursor = table.cursor();
            if job.single && job.leaf == PAGE {
                if let &[s] = list {
                    let (at, to) = (call.at as usize, s.addr.bits() as usize);
                    cursor.map(at.into(), to.into(), multiarch::PageSize::Size4K, flags).expect("free");
                    continue;
                }
                let (start, len) = (call.at as usize, call.len as usize);
                let to = |at: memory_addr::VirtAddr| {
                    memory_addr::PhysAddr::from_usize(list[(at.as_usize() - start) >> 12].addr.bits() as usize)
                };
                cursor.map_region(start.into(), to, len, flags, false).expect("free");
                continue;
            }
            let mut at = call.at as usize;
            for s in list {
                let (start, to, len) = (at, s.addr.bits() as usize, s.len as usize);
                let to = |at: memory_addr::VirtAddr| memory_addr::PhysAddr::from_usize(at.as_usize() - start + to);
                cursor.map_region(at.into(), to, len, flags, true).expect("free");
                at += len;
            }
        }
    }

    fn unmap(&mut self, job: &Job) {
        let table = self.table.as_mut().expect("always there");
        for call in &job.calls {
            table.cursor().unmap_region((call.at as usize).into(), call.len as usize).expect("mapped");
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        let (to, _, _) = self.table.as_ref()?.query((at as usize).into()).ok()?;
        Some(to.as_usize() as u64)
    }

    fn walked(&self, at: u64) -> Option<Option<u64>> {
        walked::<X86_64_4Level>(self.table.as_ref()?.root_paddr().as_usize(), at)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}

/// x86_64: `map_to` of an `OffsetPageTable` for each page. It has no call for a range.
struct X86 {
    /// All tables in use, the root first.
    frames: X86Frames,
    table: Option<x86::OffsetPageTable<'static>>,
}

struct X86Frames(Vec<usize>);

// SAFETY: frames come from `Frames`, which hands each out once until it is given back.
unsafe impl x86::FrameAllocator<Size4KiB> for X86Frames {
    fn allocate_frame(&mut self) -> Option<PhysFrame<Size4KiB>> {
        let frame = Frames::take();
        self.0.push(frame);
        PhysFrame::from_start_address(x86_64::PhysAddr::new(frame as u64)).ok()
    }
}

impl X86 {
    fn new() -> Self {
        let mut this = Self { frames: X86Frames(Vec::new()), table: None };
        this.reset();
        this
    }

    #[inline]
    fn map_page<S: x86::PageSize + std::fmt::Debug>(&mut self, at: u64, to: u64)
    where
        x86::OffsetPageTable<'static>: Mapper<S>,
    {
        let flags = PageTableFlags::PRESENT
            | PageTableFlags::WRITABLE
            | PageTableFlags::USER_ACCESSIBLE
            | PageTableFlags::NO_EXECUTE;
        let page = x86::Page::<S>::from_start_address(x86_64::VirtAddr::new(at)).expect("aligned");
        let frame = PhysFrame::<S>::from_start_address(x86_64::PhysAddr::new(to)).expect("aligned");
        let table = self.table.as_mut().expect("always there");
        // SAFETY: no processor uses these tables, so nothing that runs can notice the mapping.
        unsafe { table.map_to(page, frame, flags, &mut self.frames) }.expect("free").ignore();
    }

    #[inline]
    fn unmap_page<S: x86::PageSize>(&mut self, at: u64) -> bool
    where
        x86::OffsetPageTable<'static>: Mapper<S>,
    {
        let page = x86::Page::<S>::from_start_address(x86_64::VirtAddr::new(at)).expect("aligned");
        let table = self.table.as_mut().expect("always there");
        table.unmap(page).map(|(_, flush)| flush.ignore()).is_ok()
    }
}

impl Subject for X86 {
    fn name(&self) -> &str {
        "peer:x86_64"
    }

    fn reset(&mut self) {
        self.table = None;
        self.frames.0.drain(..).rev().for_each(Frames::give);
        let root = Frames::take();
        self.frames.0.push(root);
        let root = with_exposed_provenance_mut::<x86::PageTable>(root);
        // SAFETY: a frame of `Frames` is ours alone until it is given back (in the next reset, after the table that
        // borrows it is gone), aligned as a table, and any bits make a table. Physical addresses of frames are their
        // virtual ones, so the offset is 0.
        self.table = unsafe {
            (*root).zero();
            Some(x86::OffsetPageTable::new(&mut *root, x86_64::VirtAddr::new(0)))
        };
    }

    fn map(&mut self, job: &Job) {
        for &call in &job.calls {
            let mut at = call.at;
            for s in job.list(call) {
                let (mut to, end) = (s.addr.bits(), at + s.len);
                while at < end {
                    let size = largest(at, to, end - at);
                    match size {
                        PAGE => self.map_page::<Size4KiB>(at, to),
                        BLOCK => self.map_page::<Size2MiB>(at, to),
                        _ => self.map_page::<Size1GiB>(at, to),
                    }
                    at += size;
                    to += size;
                }
            }
        }
    }

    /// Page by page, the caller knowing the sizes. Tables stay (`clean_up` would walk all of them).
    fn unmap(&mut self, job: &Job) {
        for call in &job.calls {
            for at in (call.at..call.at + call.len).step_by(job.leaf as usize) {
                let gone = match job.leaf {
                    PAGE => self.unmap_page::<Size4KiB>(at),
                    BLOCK => self.unmap_page::<Size2MiB>(at),
                    _ => self.unmap_page::<Size1GiB>(at),
                };
                assert!(gone, "was mapped: {at:#x}");
            }
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        let at = x86_64::VirtAddr::new_truncate(at);
        self.table.as_ref()?.translate_addr(at).map(|to| to.as_u64())
    }

    fn walked(&self, at: u64) -> Option<Option<u64>> {
        walked::<X86_64_4Level>(*self.frames.0.first()?, at)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}

/// page-table-generic: `map_region` asks a closure for every page of a discrete list; a list of longer segments is a
/// `map` for each. The entry format is the user's business there; this is x86-64's.
struct Generic {
    table: Option<generic::PageTable<X64Meta, GenericFrames>>,
}

#[derive(Clone, Copy)]
struct X64Meta;

#[derive(Clone, Copy, Debug)]
struct X64Entry(u64);

#[derive(Clone, Copy)]
struct GenericFrames;

impl generic::FrameAllocator for GenericFrames {
    fn alloc_frame(&self) -> Option<generic::PhysAddr> {
        Some(generic::PhysAddr::from_usize(Frames::take()))
    }

    fn dealloc_frame(&self, frame: generic::PhysAddr) {
        Frames::give(frame.as_usize());
    }

    fn phys_to_virt(&self, frame: generic::PhysAddr) -> *mut u8 {
        with_exposed_provenance_mut(frame.as_usize())
    }
}

impl generic::TableMeta for X64Meta {
    type P = X64Entry;
    const PAGE_SIZE: usize = PAGE as usize;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    fn flush(_: Option<generic::VirtAddr>) {}
}

impl X64Entry {
    const ADDRESS: u64 = (1 << 52) - PAGE;
    const HUGE: u64 = 1 << 7;
    /// Present, writable, user.
    const TABLE: u64 = 0b111;
    /// The same, not executable.
    const RW: u64 = 1 << 63 | 0b111;
}

impl generic::PageTableEntry for X64Entry {
    type PteConfig = u64;

    #[inline]
    fn new_page(to: generic::PhysAddr, config: u64, is_huge: bool) -> Self {
        Self(to.as_usize() as u64 | config | if is_huge { Self::HUGE } else { 0 })
    }

    #[inline]
    fn new_table(table: generic::PhysAddr) -> Self {
        Self(table.as_usize() as u64 | Self::TABLE)
    }

    #[inline]
    fn paddr(&self, _is_dir: bool) -> generic::PhysAddr {
        generic::PhysAddr::from_usize((self.0 & Self::ADDRESS) as usize)
    }

    #[inline]
    fn config(&self, _is_dir: bool) -> u64 {
        self.0 & !Self::ADDRESS & !Self::HUGE
    }

    #[inline]
    fn present(&self) -> bool {
        self.0 & 1 != 0
    }

    #[inline]
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & Self::HUGE != 0
    }

    #[inline]
    fn unused(&self) -> bool {
        self.0 == 0
    }

    #[inline]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl Generic {
    fn new() -> Self {
        Self { table: generic::PageTable::new(GenericFrames).ok() }
    }
}

impl Subject for Generic {
    fn name(&self) -> &str {
        "peer:page-table-generic"
    }

    fn reset(&mut self) {
        self.table = None; // gives its tables back
        self.table = generic::PageTable::new(GenericFrames).ok();
    }

    fn map(&mut self, job: &Job) {
        let table = self.table.as_mut().expect("always there");
        for &call in &job.calls {
            let list = job.list(call);
            if job.single && job.leaf == PAGE && list.len() > 1 {
                let (start, len) = (call.at as usize, call.len as usize);
                let to = |at: generic::VirtAddr| {
                    generic::PhysAddr::from_usize(list[(at.as_usize() - start) >> 12].addr.bits() as usize)
                };
                table.map_region(generic::VirtAddr::from_usize(start), to, len, X64Entry::RW).expect("free");
                continue;
            }
            let mut at = call.at as usize;
            for s in list {
                let config = generic::MapConfig {
                    vaddr: generic::VirtAddr::from_usize(at),
                    paddr: generic::PhysAddr::from_usize(s.addr.bits() as usize),
                    size: s.len as usize,
                    pte: X64Entry::RW,
                    allow_huge: true,
                    flush: false,
                };
                table.map(&config).expect("free");
                at += s.len as usize;
            }
        }
    }

    fn unmap(&mut self, job: &Job) {
        let table = self.table.as_mut().expect("always there");
        for call in &job.calls {
            table.unmap(generic::VirtAddr::from_usize(call.at as usize), call.len as usize).expect("mapped");
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        let to = self.table.as_ref()?.translate_phys(generic::VirtAddr::from_usize(at as usize)).ok()?;
        Some(to.as_usize() as u64)
    }

    fn walked(&self, at: u64) -> Option<Option<u64>> {
        walked::<X86_64_4Level>(self.table.as_ref()?.root_paddr().as_usize(), at)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}
