//! Marks that a device sets while the tables change: none is lost.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::formats::{Sizes, sizes};
use dmalane_addr::{Access, Iova, PhysAddr, Segment, Span};
use dmalane_iopt::{Error, Format, HeapTables, Leaf, PageTable, TableShape, Tables, walk};

/// Heap tables with a device that writes through them before every step of the owner.
struct Busy<F>(Rc<Device<F>>);

/// What the device knows and did.
struct Device<F> {
    heap: RefCell<HeapTables<PhysAddr>>,
    root: Cell<Option<PhysAddr>>,
    random: Cell<u64>,
    /// Pages to choose from for a write.
    targets: RefCell<Vec<u64>>,
    /// Leaves that it knows to be marked, so that it marks nothing on a write: start, length and where they lead.
    cached: RefCell<BTreeMap<u64, (u64, u64)>>,
    /// Pages it has written to that nobody was told of, by what it asked for and where that led, and whether it has
    /// looked at the tables for the last write.
    written: RefCell<BTreeMap<(u64, u64), bool>>,
    steps: Cell<u64>,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Device<F> {
    fn random(&self, below: u64) -> u64 {
        let next = self.random.get().wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.random.set(next);
        (next >> 33) % below
    }

    /// Sometimes writes to a page, through a leaf that it has cached or by a walk; marks a clean one atomically.
    fn step(&self) {
        let Some(root) = self.root.get().filter(|_| self.random(4) == 0) else { return };
        let targets = self.targets.borrow();
        let at = targets[self.random(targets.len() as u64) as usize];
        self.steps.set(self.steps.get() + 1);
        let cached = self.cached.borrow().range(..=at).next_back().map(|(first, leaf)| (at - first, *leaf));
        if let Some((offset, (_, to))) = cached.filter(|(offset, (len, _))| offset < len) {
            self.written.borrow_mut().entry((at, to + offset)).or_insert(false);
            return;
        }
        let mut heap = self.heap.borrow_mut();
        let mut entry = 0;
        let walked = walk::<F>(root.bits(), at, |word| {
            entry = word;
            heap.read(word)
        });
        let Ok(walked) = walked else { return };
        if !walked.access.contains(Access::WRITE) {
            return;
        }
        let word = heap.read(entry).unwrap();
        heap.store(PhysAddr::new(entry), 0, if F::DIRTY_IS_CLEAR { word & !F::DIRTY } else { word | F::DIRTY });
        self.written.borrow_mut().insert((at, walked.to), true);
        if self.random(2) == 0 {
            let offset = at & (walked.size.bytes() - 1);
            self.cached.borrow_mut().insert(at - offset, (walked.size.bytes(), walked.to - offset));
        }
    }

    /// Forgets leaves that meet the span.
    fn invalidate(&self, span: Span<Iova>) {
        let (first, last) = (span.first().bits(), span.last().bits());
        self.cached.borrow_mut().retain(|at, (len, _)| *at > last || *at + *len <= first);
    }

    /// Takes pages of a leaf off the list.
    fn tell(&self, leaf: Leaf<Iova, PhysAddr>, which: impl Fn(bool) -> bool) {
        self.written.borrow_mut().retain(|written, walked| !is_of(leaf, *written) || !which(*walked));
    }

    /// Nobody asks for what was written there.
    fn drop_all(&self, span: Span<Iova>) {
        self.written.borrow_mut().retain(|(at, _), _| !span.contains(Iova::new(*at)));
    }

    fn untold(&self, span: Span<Iova>) -> Option<(u64, u64)> {
        let written = self.written.borrow();
        written.range((span.first().bits(), 0)..=(span.last().bits(), u64::MAX)).next().map(|(page, _)| *page)
    }
}

/// True for a page that the leaf leads to just there.
fn is_of(leaf: Leaf<Iova, PhysAddr>, (at, to): (u64, u64)) -> bool {
    leaf.translate(Iova::new(at)) == Some(PhysAddr::new(to))
}

impl<F: Format> Tables for Busy<F> {
    type Addr = PhysAddr;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.0.heap.borrow_mut().prepare(shape)
    }
    fn allocate_root(&mut self) -> Option<PhysAddr> {
        self.0.heap.borrow_mut().allocate_root()
    }
    fn free_root(&mut self, root: PhysAddr) {
        self.0.heap.borrow_mut().free_root(root);
    }
    fn allocate(&mut self) -> Option<PhysAddr> {
        self.0.heap.borrow_mut().allocate()
    }
    fn free(&mut self, table: PhysAddr) {
        self.0.heap.borrow_mut().free(table);
    }
    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        self.0.step();
        self.0.heap.borrow().load(table, index)
    }
    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        self.0.step();
        self.0.heap.borrow_mut().store(table, index, entry);
    }
    fn clear_bits(&mut self, table: PhysAddr, index: usize, bits: u64) -> u64 {
        self.0.step();
        self.0.heap.borrow_mut().clear_bits(table, index, bits)
    }
    fn exchange(&mut self, table: PhysAddr, index: usize, entry: u64) -> u64 {
        self.0.step();
        self.0.heap.borrow_mut().exchange(table, index, entry)
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.0.heap.borrow_mut().reserve(tables)
    }
}

struct Model<F: Format> {
    device: Rc<Device<F>>,
    table: PageTable<F, Iova, PhysAddr, Busy<F>>,
    /// The smallest leaves that are made at first, and what a table of them translates.
    page: u64,
    block: u64,
}

impl<F: Format> Model<F> {
    fn new(seed: u64, page: u64) -> Self {
        let device = Rc::new(Device {
            heap: RefCell::new(HeapTables::new(PhysAddr::new(0x1234_0000))),
            root: Cell::new(None),
            random: Cell::new(seed),
            targets: RefCell::default(),
            cached: RefCell::default(),
            written: RefCell::default(),
            steps: Cell::new(0),
            format: std::marker::PhantomData,
        });
        let table = PageTable::new(Busy(Rc::clone(&device))).unwrap();
        device.root.set(Some(table.root()));
        Self { device, table, page, block: page << F::INDEX_BITS }
    }

    /// A span near the start, that of a whole table, or of the largest leaf; the device writes there meanwhile.
    fn choose(&self) -> Span<Iova> {
        let Self { page, block, .. } = *self;
        let random = |below| self.device.random(below);
        let span = match random(16) {
            0 => (random(2) * block, block),
            1 => (block - 2 * page, 4 * page),
            2..9 => (random(4) * 16 * page, 16 * page),
            _ => (random(2) * (block - 64 * page) + random(64) * page, page * (1 + random(20))),
        };
        let ends = [span.0, span.0 + span.1 - page];
        let between = || span.0 + random(span.1 / page) * page;
        *self.device.targets.borrow_mut() = ends
            .into_iter()
            .chain([between(), between(), between() & !(16 * page - 1), 0, block - page, block])
            .collect();
        Span::new(Iova::new(span.0), span.1).unwrap()
    }

    fn operation(&mut self) {
        let Self { page, block, .. } = *self;
        let (span, random) = (self.choose(), self.device.random(22));
        let device = Rc::clone(&self.device);
        let before = device.written.borrow().clone();
        let mut told = Vec::new();
        let mut tell = |leaf: Leaf<Iova, PhysAddr>| {
            device.tell(leaf, |_| true);
            told.push(leaf);
        };
        let mut invalidate = |span| device.invalidate(span);
        // Half of the calls that can break do.
        let breaks = device.random(2) == 0;
        let hook = breaks.then_some(&mut invalidate as &mut dyn FnMut(Span<Iova>));
        let elsewhere = 4 * block * (1 + device.random(2));
        // The span to invalidate, and that in which everything written before was to be told, everything at all, and
        // nothing.
        let (mut forget, mut asked, mut gone, mut dropped) = (span, None, None, None);
        match random {
            0..5 => {
                // To the same pages, so that leaves can merge; whole blocks where nothing is mapped. The device is
                // quiet: where a map fails it could write to what is mapped for a moment.
                let whole = Span::new(Iova::new(span.first().bits() & !(block - 1)), block).unwrap();
                let at = if random < 2 { whole } else { span };
                let root = device.root.take();
                let to = PhysAddr::new(at.first().bits() + 4 * block);
                let mapped = self.table.map(at.first(), to, at.len(), Access::RW);
                assert!(matches!(mapped, Ok(()) | Err(Error::Overlap { .. })), "{mapped:?}");
                device.root.set(root);
                return;
            }
            5..8 => {
                let flush = self.table.unmap_dirty(span, &mut tell).unwrap();
                gone = Some(span);
                forget = flush.span();
                self.table.free_tables(flush);
            }
            8 => {
                let flush = self.table.unmap(span).unwrap();
                dropped = Some(span);
                forget = flush.span();
                self.table.free_tables(flush);
            }
            9 | 10 => {
                let mut tables = Vec::new();
                let cleared = if random == 9 {
                    gone = Some(span);
                    self.table.clear_dirty_into(span, &mut tables, hook, &mut tell)
                } else {
                    dropped = Some(span);
                    self.table.clear_into(span, &mut tables, hook)
                };
                forget = cleared.unwrap().0;
                device.invalidate(forget);
                self.table.free_detached(tables);
            }
            11 | 12 => {
                // Over what is mapped to the same pages and to others.
                let to = |at: u64| Segment { addr: PhysAddr::new(at + elsewhere), len: page };
                let list = (0..span.len() / page).map(|n| to(span.first().bits() + n * page));
                let pages = (span.len() / F::GRANULE.bytes()) as usize;
                let (done, _) = self.table.replace_pages_dirty(span.first(), pages, list, Access::RW, &mut tell);
                asked = Span::new(span.first(), done as u64 * F::GRANULE.bytes());
            }
            13 => {
                let flush = self.table.protect(span, Access::RW).unwrap();
                forget = flush.span();
            }
            14 => {
                let flush = self.table.protect(span, Access::READ).unwrap();
                forget = flush.span();
                // Where the mark is the right to write.
                dropped = Some(span).filter(|_| F::NAME.starts_with("arm"));
                assert!(self.table.runs(span).all(|run| run.access == Access::READ), "{}", F::NAME);
            }
            15 | 16 => {
                let access = if random == 15 { Access::READ } else { Access::RW };
                let flush = self.table.protect_with(span, access, hook, Some(&mut tell)).unwrap();
                forget = flush.span();
                (asked, gone) = (Some(span), (random == 15).then_some(span));
            }
            17 | 18 => {
                self.table.cut(span.first(), invalidate).unwrap();
                return;
            }
            19 => {
                let all = Span::new(Iova::new(0), 2 * block).unwrap();
                self.table.merge(all, invalidate).map(drop).unwrap();
                return;
            }
            _ => {
                // What is written while this goes on may be told now or the next time.
                self.table.take_dirty(span, &mut tell).unwrap();
                asked = Some(span);
            }
        }
        let asked = |at: u64| asked.is_some_and(|asked| asked.contains(Iova::new(at)));
        let lost = before.keys().find(|written| asked(written.0) && !told.iter().any(|leaf| is_of(*leaf, **written)));
        assert_eq!(lost, None, "{}: operation {random}, written before {span}", F::NAME);
        // What the device wrote through leaves that it had cached is read by who was told of them.
        device.invalidate(forget);
        dropped.into_iter().for_each(|span| device.drop_all(span));
        for leaf in told {
            device.invalidate(Span::new(leaf.at, leaf.size.bytes()).unwrap());
            device.tell(leaf, |walked| !walked);
        }
        let lost = gone.and_then(|span| device.untold(span));
        assert_eq!(lost, None, "{}: operation {random}, written before it went", F::NAME);
    }
}

/// At the end everything that was written is told: of pages, and of the leaves of a level above where there are groups.
fn no_mark_is_lost<F: Format>(operations: u64) {
    let Sizes { page, block, top, .. } = sizes::<F>();
    if F::DIRTY == 0 {
        return;
    }
    no_mark_of_these_is_lost::<F>(operations, page);
    // Operations reach as far as 16 tables.
    if F::LEVELS > 2 && F::GROUP_BITS[F::LEVELS as usize - 2] > 0 && 16 * (block << F::INDEX_BITS) <= top {
        no_mark_of_these_is_lost::<F>(operations / 4, block);
    }
}

fn no_mark_of_these_is_lost<F: Format>(operations: u64, page: u64) {
    let mut model = Model::<F>::new(F::INPUT_BITS.into(), page);
    (0..operations).for_each(|_| model.operation());
    let Model { device, mut table, .. } = model;
    assert!(device.steps.get() > operations, "the device was busy");
    let all = Span::new(Iova::new(0), sizes::<F>().top).unwrap();
    device.root.set(None);
    let flush = table.unmap_dirty(all, |leaf| device.tell(leaf, |_| true)).unwrap();
    table.free_tables(flush);
    assert_eq!(device.untold(all), None);
}

/// A mark on an entry of a group outside of the span that is asked for, at each level that has groups.
fn groups_are_looked_at_whole<F: Format>() {
    let levels = F::LEVELS as usize;
    for level in (0..levels).filter(|level| F::DIRTY != 0 && F::GROUP_BITS[*level] > 0) {
        let page = F::GRANULE.bytes() << (F::INDEX_BITS as usize * (levels - 1 - level));
        group_is_looked_at_whole::<F>(page, page << F::GROUP_BITS[level]);
    }
}

fn group_is_looked_at_whole<F: Format>(page: u64, group: u64) {
    let span = |at, len| Span::new(Iova::new(at), len).unwrap();
    let Model { device, mut table, .. } = Model::<F>::new(1, page);
    device.targets.borrow_mut().push(group + page);
    device.root.set(None);
    table.map(Iova::new(group), PhysAddr::new(group), group, Access::RW).unwrap();
    table.take_dirty(span(group, group), |_| ()).unwrap();
    for part in
        [span(group + group / 2, group / 2), span(group, page), span(2 * group - page, page), span(0, 2 * group)]
    {
        device.root.set(Some(table.root()));
        while device.written.borrow().is_empty() {
            device.step();
        }
        device.root.set(None);
        let mut found = Vec::new();
        let taken = table.take_dirty(part, |leaf| found.push(leaf));
        assert_eq!(taken, Ok(1), "{}: {part} of groups of {group:#x}", F::NAME);
        assert_eq!(found, [table.lookup(Iova::new(group)).unwrap()]);
        assert_eq!(table.take_dirty(span(0, 4 * group), |_| ()), Ok(0));
        device.written.borrow_mut().clear();
        device.cached.borrow_mut().clear();
    }
}

/// `DMALANE_DIRTY_OPERATIONS` says how many operations there are, over all formats that have marks.
#[test]
fn marks() {
    macro_rules! each {
        ($($name:ident: $format:ty;)*) => {
            let formats = [$(<$format>::DIRTY),*].into_iter().filter(|mark| *mark != 0).count() as u64;
            let operations = std::env::var("DMALANE_DIRTY_OPERATIONS").map_or(25_000, |n| n.parse().expect("a number"));
            $(
                no_mark_is_lost::<$format>(u64::div_ceil(operations, formats));
                groups_are_looked_at_whole::<$format>();
            )*
        };
    }
    #[cfg(not(every_format))]
    crate::formats::stand_ins!(each);
    #[cfg(every_format)]
    dmalane_iopt::formats!(each);
}
