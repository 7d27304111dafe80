//! The two shapes of the posted patch: every page through core, driver and format, or the whole list in one call.
//!
//! Modelled on Linux 5.11, where the patches start from: `iommu_map` (the core) checks and picks a page size,
//! `arm_smmu_map` (the driver) holds the device's power, `arm_lpae_map` (the format) walks from the root and ends with
//! `wmb()`. Each layer is generic over the next, so the same code runs behind `Box<dyn ..>` and inlined. The
//! geometry of the format is data, as it is there. The parts that the model leaves out (accounting, retpolines,
//! tracing) would only add to `before`.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use dmalane::addr::{Access, Iova, PhysAddr, Segment, Span};
use dmalane::dma::stream_fence;
use dmalane::iopt::{Arm64S1_4k, HeapTables, PageTable};

use crate::job::{Call, Job};
use crate::subject::{Subject, TABLES_AT};

/// How often each thing happened.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Calls from one layer into the next, the caller's into the core included.
    pub crossings: u64,
    /// Walks from the root.
    pub walks: u64,
    /// Power get and put pairs.
    pub power: u64,
    /// Invalidations sent to the device.
    pub invalidations: u64,
}

impl Counts {
    fn and(self, other: Self) -> Self {
        Self {
            crossings: self.crossings + other.crossings,
            walks: self.walks + other.walks,
            power: self.power + other.power,
            invalidations: self.invalidations + other.invalidations,
        }
    }
}

type List<'a> = &'a [Segment<PhysAddr>];

/// The core's interface for drivers of devices.
pub trait Core {
    fn map(&mut self, at: u64, to: u64, len: u64);
    fn map_sg(&mut self, at: u64, list: List);
    fn unmap(&mut self, at: u64, len: u64);
    fn find(&self, at: u64) -> Option<u64>;
    fn reset(&mut self);
    fn counts(&self) -> Counts;
}

/// The interface of an IOMMU's driver for the core.
pub trait Driver {
    fn map(&mut self, at: u64, to: u64, size: u64);
    fn map_sg(&mut self, at: u64, list: List);
    fn unmap(&mut self, at: u64, len: u64);
    /// True when the driver takes a whole range, so that the core need not cut it into pages.
    fn whole_ranges(&self) -> bool;
    fn sync(&mut self);
    fn find(&self, at: u64) -> Option<u64>;
    fn reset(&mut self);
    fn counts(&self) -> Counts;
}

/// The interface of a page-table format for drivers.
pub trait Pages {
    fn map(&mut self, at: u64, to: u64, size: u64);
    fn map_sg(&mut self, at: u64, list: List);
    fn unmap(&mut self, at: u64, len: u64);
    fn whole_ranges(&self) -> bool;
    fn find(&self, at: u64) -> Option<u64>;
    fn reset(&mut self);
    fn counts(&self) -> Counts;
}

macro_rules! boxed {
    ($($layer:ident),*) => {$(
        impl<T: $layer + ?Sized> $layer for Box<T> {
            fn map(&mut self, at: u64, to: u64, len: u64) {
                (**self).map(at, to, len)
            }
            fn map_sg(&mut self, at: u64, list: List) {
                (**self).map_sg(at, list)
            }
            fn unmap(&mut self, at: u64, len: u64) {
                (**self).unmap(at, len)
            }
            fn find(&self, at: u64) -> Option<u64> {
                (**self).find(at)
            }
            fn reset(&mut self) {
                (**self).reset()
            }
            fn counts(&self) -> Counts {
                (**self).counts()
            }
            boxed!(@rest $layer);
        }
    )*};
    (@rest Core) => {};
    (@rest Driver) => {
        fn whole_ranges(&self) -> bool {
            (**self).whole_ranges()
        }
        fn sync(&mut self) {
            (**self).sync()
        }
    };
    (@rest Pages) => {
        fn whole_ranges(&self) -> bool {
            (**self).whole_ranges()
        }
    };
}
boxed!(Core, Driver, Pages);

/// The core: checks, page sizes, one driver call for each page of a range. `COUNT` turns the counters on; timed runs
/// have them off.
struct IommuCore<D, const COUNT: bool> {
    driver: D,
    /// The page sizes, one bit each.
    sizes: u64,
    counts: Counts,
}

impl<D: Driver, const COUNT: bool> IommuCore<D, COUNT> {
    /// The largest page size for these addresses (joined by "or") and length.
    fn page_size(&self, addresses: u64, len: u64) -> u64 {
        let mut fits = (2u64 << len.ilog2()) - 1;
        if addresses != 0 {
            fits &= (2u64 << addresses.trailing_zeros()) - 1;
        }
        1 << (fits & self.sizes).ilog2()
    }

    fn check(&self, addresses: u64) {
        assert!(addresses & ((1 << self.sizes.trailing_zeros()) - 1) == 0, "unaligned: {addresses:#x}");
    }
}

impl<D: Driver, const COUNT: bool> Core for IommuCore<D, COUNT> {
    fn map(&mut self, mut at: u64, mut to: u64, mut len: u64) {
        if COUNT {
            self.counts.crossings += 1;
        }
        self.check(at | to | len);
        if self.driver.whole_ranges() {
            self.driver.map(at, to, len);
            return;
        }
        while len != 0 {
            let size = self.page_size(at | to, len);
            self.driver.map(at, to, size);
            at += size;
            to += size;
            len -= size;
        }
    }

    fn map_sg(&mut self, at: u64, list: List) {
        if COUNT {
            self.counts.crossings += 1;
        }
        self.check(at);
        self.driver.map_sg(at, list);
    }

    fn unmap(&mut self, mut at: u64, mut len: u64) {
        if COUNT {
            self.counts.crossings += 1;
        }
        self.check(at | len);
        if self.driver.whole_ranges() {
            self.driver.unmap(at, len);
        } else {
            while len != 0 {
                let size = self.page_size(at, len);
                self.driver.unmap(at, size);
                at += size;
                len -= size;
            }
        }
        self.driver.sync();
    }

    fn find(&self, at: u64) -> Option<u64> {
        self.driver.find(at)
    }

    fn reset(&mut self) {
        self.counts = Counts::default();
        self.driver.reset();
    }

    fn counts(&self) -> Counts {
        self.counts.and(self.driver.counts())
    }
}

/// The driver's work around the call into the format.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Switches {
    /// Power get before, put after.
    pub power: bool,
    /// Invalidation after each call that maps (Linux: `IO_PGTABLE_QUIRK_TLBI_ON_MAP`, `iotlb_sync_map`).
    pub invalidate: bool,
}

struct SmmuDriver<P, const COUNT: bool> {
    pages: P,
    switches: Switches,
    power: Power,
    queue: CommandQueue,
    counts: Counts,
}

impl<P: Pages, const COUNT: bool> SmmuDriver<P, COUNT> {
    #[inline]
    fn around(&mut self, at: u64, call: impl FnOnce(&mut P)) {
        if COUNT {
            self.counts.crossings += 1;
            self.counts.power += u64::from(self.switches.power);
            self.counts.invalidations += u64::from(self.switches.invalidate);
        }
        if self.switches.power {
            self.power.get();
        }
        call(&mut self.pages);
        if self.switches.invalidate {
            self.queue.invalidate(at);
        }
        if self.switches.power {
            self.power.put();
        }
    }
}

impl<P: Pages, const COUNT: bool> Driver for SmmuDriver<P, COUNT> {
    fn map(&mut self, at: u64, to: u64, size: u64) {
        self.around(at, |pages| pages.map(at, to, size));
    }

    fn map_sg(&mut self, at: u64, list: List) {
        self.around(at, |pages| pages.map_sg(at, list));
    }

    fn unmap(&mut self, at: u64, len: u64) {
        self.around(at, |pages| pages.unmap(at, len));
    }

    fn whole_ranges(&self) -> bool {
        self.pages.whole_ranges()
    }

    fn sync(&mut self) {
        if COUNT {
            self.counts.crossings += 1;
            self.counts.invalidations += 1;
        }
        self.queue.invalidate(0);
    }

    fn find(&self, at: u64) -> Option<u64> {
        self.pages.find(at)
    }

    fn reset(&mut self) {
        self.counts = Counts::default();
        self.pages.reset();
    }

    fn counts(&self) -> Counts {
        self.counts.and(self.pages.counts())
    }
}

/// Runtime power management with the device awake: `pm_runtime_get_sync` and `pm_runtime_put_autosuspend` count users,
/// take a lock and look at the state; the last one to put reads the clock.
struct Power {
    users: AtomicU64,
    awake: Mutex<bool>,
    started: Instant,
    last_busy: AtomicU64,
}

impl Power {
    fn new() -> Self {
        let (users, last_busy) = Default::default();
        Self { users, awake: Mutex::new(true), started: Instant::now(), last_busy }
    }

    fn get(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        assert!(*self.awake.lock().expect("not poisoned"));
    }

    fn put(&self) {
        if self.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            assert!(*self.awake.lock().expect("not poisoned"));
            // When to fall asleep: `pm_runtime_autosuspend_expiration`.
            self.last_busy.store(self.started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

/// The processor's work for an invalidation: two commands of 16 bytes, a doorbell, a fence. The device's answer
/// (hundreds of nanoseconds on hardware) is not here, so the cost shown is the least there can be.
struct CommandQueue {
    ring: Vec<AtomicU64>,
    next: usize,
    doorbell: AtomicU64,
}

impl CommandQueue {
    fn new() -> Self {
        Self { ring: (0..1024).map(|_| AtomicU64::new(0)).collect(), next: 0, doorbell: AtomicU64::new(0) }
    }

    fn invalidate(&mut self, at: u64) {
        for word in [0x12 | 1 << 32, at, 0x46, 0] {
            self.ring[self.next % 1024].store(word, Ordering::Relaxed);
            self.next += 1;
        }
        fence(Ordering::SeqCst);
        self.doorbell.store(self.next as u64, Ordering::Release);
        black_box(&self.ring);
    }
}

/// Linux's `wmb()`: on x86-64 the instruction `sfence`. Elsewhere a full fence stands in for it, since no portable
/// operation waits for stores as Arm's `dsb st` does.
fn wmb() {
    if cfg!(target_arch = "x86_64") {
        stream_fence();
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The format of `before`: Arm long descriptors with their geometry as data, each page by a recursive walk from the
/// root.
struct LongDescriptors<const COUNT: bool> {
    tables: Vec<[AtomicU64; 512]>,
    free: Vec<usize>,
    base: u64,
    levels: u32,
    bits_per_level: u32,
    page_shift: u32,
    in_bits: u32,
    out_bits: u32,
    counts: Counts,
}

const VALID: u64 = 1;
const TABLE: u64 = 0b11;
const LPAE_ADDRESS: u64 = (1 << 48) - (1 << 12);

impl<const COUNT: bool> LongDescriptors<COUNT> {
    fn new() -> Self {
        let mut this = Self {
            tables: Vec::new(),
            free: Vec::new(),
            base: TABLES_AT.bits(),
            levels: black_box(4),
            bits_per_level: black_box(9),
            page_shift: black_box(12),
            in_bits: black_box(48),
            out_bits: black_box(48),
            counts: Counts::default(),
        };
        this.allocate();
        this
    }

    fn allocate(&mut self) -> usize {
        if let Some(table) = self.free.pop() {
            self.tables[table].iter_mut().for_each(|e| *e.get_mut() = 0);
            return table;
        }
        self.tables.push([const { AtomicU64::new(0) }; 512]);
        self.tables.len() - 1
    }

    fn shift(&self, level: u32) -> u32 {
        self.page_shift + (self.levels - 1 - level) * self.bits_per_level
    }

    fn index(&self, at: u64, level: u32) -> usize {
        (at >> self.shift(level)) as usize & ((1 << self.bits_per_level) - 1)
    }

    fn child(&self, entry: u64) -> usize {
        ((entry & LPAE_ADDRESS).wrapping_sub(self.base) >> self.page_shift) as usize
    }

    fn is_leaf(&self, entry: u64, level: u32) -> bool {
        entry & TABLE == if level == self.levels - 1 { TABLE } else { VALID }
    }

    fn attributes(&self, access: Access) -> u64 {
        let mut bits = 1 << 11 | 1 << 6 | 0b11 << 8 | 1 << 10;
        if !access.contains(Access::WRITE) {
            bits |= 1 << 7;
        }
        if !access.contains(Access::EXEC) {
            bits |= 0b11 << 53;
        }
        bits
    }

    fn check(&self, at: u64, to: u64) {
        assert!(at >> self.in_bits == 0 && to >> self.out_bits == 0, "out of range: {at:#x} to {to:#x}");
    }

    fn map_level(&mut self, table: usize, level: u32, at: u64, to: u64, size: u64, bits: u64) {
        let index = self.index(at, level);
        let old = self.tables[table][index].load(Ordering::Relaxed);
        if size == 1 << self.shift(level) {
            assert!(old & VALID == 0, "taken: {at:#x}");
            let kind = if level == self.levels - 1 { TABLE } else { VALID };
            self.tables[table][index].store(to | bits | kind, Ordering::Relaxed);
            return;
        }
        let next = if old == 0 {
            let next = self.allocate();
            let entry = (self.base + ((next as u64) << self.page_shift)) | TABLE;
            // As in the kernel: somebody else may have installed one.
            let won = self.tables[table][index].compare_exchange(0, entry, Ordering::Release, Ordering::Relaxed);
            assert!(won.is_ok(), "nobody else is here");
            next
        } else {
            assert!(!self.is_leaf(old, level), "taken: {at:#x}");
            self.child(old)
        };
        self.map_level(next, level + 1, at, to, size, bits)
    }

    fn unmap_level(&mut self, table: usize, level: u32, at: u64, size: u64) {
        let index = self.index(at, level);
        let old = self.tables[table][index].load(Ordering::Relaxed);
        assert!(old & VALID != 0, "not mapped: {at:#x}");
        if size == 1 << self.shift(level) {
            self.tables[table][index].store(0, Ordering::Relaxed);
            if !self.is_leaf(old, level) {
                let gone = self.child(old);
                self.free_below(gone, level + 1);
            }
            return;
        }
        assert!(!self.is_leaf(old, level), "a block would have to be split: {at:#x}");
        self.unmap_level(self.child(old), level + 1, at, size)
    }

    fn free_below(&mut self, table: usize, level: u32) {
        if level < self.levels - 1 {
            for i in 0..1 << self.bits_per_level {
                let entry = self.tables[table][i].load(Ordering::Relaxed);
                if entry & VALID != 0 && !self.is_leaf(entry, level) {
                    self.free_below(self.child(entry), level + 1);
                }
            }
        }
        self.free.push(table);
    }
}

impl<const COUNT: bool> Pages for LongDescriptors<COUNT> {
    fn map(&mut self, at: u64, to: u64, size: u64) {
        if COUNT {
            self.counts.crossings += 1;
            self.counts.walks += 1;
        }
        self.check(at, to);
        let bits = self.attributes(Access::RW);
        self.map_level(0, 0, at, to, size, bits);
        wmb();
    }

    /// The posted patch: one call for the list, still a walk for each page, one barrier at the end.
    fn map_sg(&mut self, mut at: u64, list: List) {
        if COUNT {
            self.counts.crossings += 1;
        }
        let bits = self.attributes(Access::RW);
        for s in list {
            let (mut to, mut len) = (s.addr.bits(), s.len);
            self.check(at, to);
            while len != 0 {
                let mut size = 1 << self.page_shift;
                for level in (1..self.levels - 1).rev() {
                    let larger = 1 << self.shift(level);
                    if (at | to) & (larger - 1) == 0 && len >= larger {
                        size = larger;
                    }
                }
                if COUNT {
                    self.counts.walks += 1;
                }
                self.map_level(0, 0, at, to, size, bits);
                at += size;
                to += size;
                len -= size;
            }
        }
        wmb();
    }

    fn unmap(&mut self, at: u64, len: u64) {
        if COUNT {
            self.counts.crossings += 1;
            self.counts.walks += 1;
        }
        self.check(at, 0);
        self.unmap_level(0, 0, at, len);
    }

    fn whole_ranges(&self) -> bool {
        false
    }

    fn find(&self, at: u64) -> Option<u64> {
        let mut table = 0;
        for level in 0..self.levels {
            let entry = self.tables[table][self.index(at, level)].load(Ordering::Relaxed);
            if entry & VALID == 0 {
                return None;
            }
            if self.is_leaf(entry, level) {
                let mask = (1 << self.shift(level)) - 1;
                return Some(entry & LPAE_ADDRESS & !mask | at & mask);
            }
            table = self.child(entry);
        }
        None
    }

    fn reset(&mut self) {
        self.counts = Counts::default();
        self.free_below(0, 0);
        let root = self.allocate();
        assert_eq!(root, 0, "the last one freed is the first one taken");
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// The format of `ours` in the same place: `dmalane-iopt` behind the same two layers, with the same barrier.
struct Iopt<const COUNT: bool> {
    table: Option<PageTable<Arm64S1_4k, Iova, PhysAddr, HeapTables<PhysAddr>>>,
    counts: Counts,
}

impl<const COUNT: bool> Iopt<COUNT> {
    fn new() -> Self {
        let table = PageTable::new(HeapTables::new(TABLES_AT)).expect("a root table");
        Self { table: Some(table), counts: Counts::default() }
    }
}

impl<const COUNT: bool> Pages for Iopt<COUNT> {
    fn map(&mut self, at: u64, to: u64, size: u64) {
        if COUNT {
            self.counts.crossings += 1;
        }
        let table = self.table.as_mut().expect("always there");
        table.map(Iova::new(at), PhysAddr::new(to), size, Access::RW).expect("free");
        wmb();
    }

    fn map_sg(&mut self, at: u64, list: List) {
        if COUNT {
            self.counts.crossings += 1;
        }
        let table = self.table.as_mut().expect("always there");
        table.map_sg(Iova::new(at), list.iter().copied(), Access::RW).expect("free");
        wmb();
    }

    fn unmap(&mut self, at: u64, len: u64) {
        if COUNT {
            self.counts.crossings += 1;
        }
        let table = self.table.as_mut().expect("always there");
        let flush = table.unmap(Span::new(Iova::new(at), len).expect("a span")).expect("no cuts");
        table.free_tables(flush);
    }

    fn whole_ranges(&self) -> bool {
        true
    }

    fn find(&self, at: u64) -> Option<u64> {
        let at = Iova::new(at);
        let leaf = self.table.as_ref().expect("always there").lookup(at)?;
        leaf.translate(at).map(|to| to.bits())
    }

    fn reset(&mut self) {
        self.counts = Counts::default();
        self.table = self.table.take().map(|t| PageTable::new(t.into_tables()).expect("a root table"));
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// How a list comes in.
#[derive(Clone, Copy, PartialEq)]
pub enum Entry {
    /// A call of the core for each segment.
    PerEntry,
    /// One call for the list.
    Batched,
}

/// A stack of the three layers.
pub struct Stack<C> {
    name: String,
    entry: Entry,
    core: C,
}

fn driver<P: Pages, const COUNT: bool>(pages: P, switches: Switches) -> SmmuDriver<P, COUNT> {
    SmmuDriver { pages, switches, power: Power::new(), queue: CommandQueue::new(), counts: Counts::default() }
}

fn core<D: Driver, const COUNT: bool>(driver: D) -> IommuCore<D, COUNT> {
    IommuCore { driver, sizes: 1 << 12 | 1 << 21 | 1 << 30, counts: Counts::default() }
}

/// The three layers behind `Box<dyn ..>`.
fn dynamic<const COUNT: bool>(pages: Box<dyn Pages>, switches: Switches) -> Box<dyn Core> {
    let driver: Box<dyn Driver> = Box::new(driver::<_, COUNT>(pages, switches));
    Box::new(core::<_, COUNT>(driver))
}

/// Behind `black_box`, so that nobody finds out what is in the box.
fn old_format<const COUNT: bool>() -> Box<dyn Pages> {
    black_box(Box::new(LongDescriptors::<COUNT>::new()))
}

/// The variants of one case that answer the patch's reviewers, `before` and `ours` first.
pub fn stacks() -> Vec<Box<dyn Subject>> {
    let none = Switches::default();
    let power = Switches { power: true, ..none };
    let invalidate = Switches { invalidate: true, ..none };
    let all = Switches { power: true, invalidate: true };
    let mut stacks: Vec<Box<dyn Subject>> = vec![before(), ours_in_layers(Entry::Batched, none)];
    for (name, switches) in [(", power", power), (", invalidation", invalidate), (", power and invalidation", all)] {
        stacks.push(old(&format!("before{name}"), Entry::PerEntry, switches));
    }
    stacks.push(before_static());
    stacks.push(inlined("before, static, power and invalidation", Entry::PerEntry, all));
    stacks.push(old("after: one call, a walk for each page", Entry::Batched, none));
    stacks.push(old("after, power and invalidation", Entry::Batched, all));
    stacks.push(inlined("after, static", Entry::Batched, none));
    stacks.push(ours_in_layers(Entry::Batched, all));
    stacks.push(ours_in_layers(Entry::PerEntry, none));
    stacks
}

/// The path before the patch.
pub fn before() -> Box<dyn Subject> {
    old("before", Entry::PerEntry, Switches::default())
}

/// The same without a dynamic call.
pub fn before_static() -> Box<dyn Subject> {
    inlined("before, static", Entry::PerEntry, Switches::default())
}

fn old(name: &str, entry: Entry, switches: Switches) -> Box<dyn Subject> {
    Box::new(Stack { name: name.to_owned(), entry, core: dynamic::<false>(old_format::<false>(), switches) })
}

fn inlined(name: &str, entry: Entry, switches: Switches) -> Box<dyn Subject> {
    let driver = driver::<_, false>(LongDescriptors::<false>::new(), switches);
    Box::new(Stack { name: name.to_owned(), entry, core: core::<_, false>(driver) })
}

/// Ours behind the same layers.
pub fn ours_in_layers(entry: Entry, switches: Switches) -> Box<dyn Subject> {
    let mut name = "ours, in layers".to_owned();
    if entry == Entry::PerEntry {
        name += ", per entry";
    }
    if switches.power && switches.invalidate {
        name += ", power and invalidation";
    }
    let pages: Box<dyn Pages> = black_box(Box::new(Iopt::<false>::new()));
    Box::new(Stack { name, entry, core: dynamic::<false>(pages, switches) })
}

/// The layers, walks and invalidations of one mapping of the job, by the name of the variant; `None` for one without
/// layers.
pub fn counts(name: &str, job: &Job) -> Option<Counts> {
    let switches = Switches { power: name.contains("power"), invalidate: name.contains("invalidation") };
    let per_entry = name.starts_with("before") || name.contains("per entry");
    let pages: Box<dyn Pages> = match name {
        n if n.starts_with("ours, in layers") => Box::new(Iopt::<true>::new()),
        n if n.starts_with("before") || n.starts_with("after") => old_format::<true>(),
        _ => return None,
    };
    let entry = if per_entry { Entry::PerEntry } else { Entry::Batched };
    let mut stack = Stack { name: name.to_owned(), entry, core: dynamic::<true>(pages, switches) };
    stack.map(job);
    Some(stack.core.counts())
}

impl<C: Core> Stack<C> {
    /// Linux's `iommu_map_sg` before the patch: segments that continue each other as one, each by a call of its own.
    #[inline]
    fn per_entry(core: &mut C, call: Call, list: List) {
        let (mut at, mut start, mut len) = (call.at, 0, 0);
        for s in list {
            if len != 0 && s.addr.bits() != start + len {
                core.map(at, start, len);
                at += len;
                len = 0;
            }
            if len == 0 {
                start = s.addr.bits();
            }
            len += s.len;
        }
        if len != 0 {
            core.map(at, start, len);
        }
    }
}

impl<C: Core> Subject for Stack<C> {
    fn name(&self) -> &str {
        &self.name
    }

    fn reset(&mut self) {
        self.core.reset();
    }

    fn map(&mut self, job: &Job) {
        for &call in &job.calls {
            match self.entry {
                Entry::PerEntry => Self::per_entry(&mut self.core, call, job.list(call)),
                Entry::Batched => self.core.map_sg(call.at, job.list(call)),
            }
        }
    }

    fn unmap(&mut self, job: &Job) {
        for call in &job.calls {
            self.core.unmap(call.at, call.len);
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        self.core.find(at)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}
