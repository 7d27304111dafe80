//! Marks that a device sets while the tables change: none is lost.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::formats::{Sizes, sizes};
use dmalane_addr::{Access, Iova, PhysAddr, Span};
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
    /// Leaves that it knows to be marked, so that it marks nothing on a write: start and length.
    cached: RefCell<BTreeMap<u64, u64>>,
    /// Pages it has written to that nobody was told of, and whether it has looked at the tables for the last write.
    written: RefCell<BTreeMap<u64, bool>>,
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
        let cached = self.cached.borrow().range(..=at).next_back().is_some_and(|(first, len)| at - first < *len);
        if cached {
            self.written.borrow_mut().entry(at).or_insert(false);
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
        self.written.borrow_mut().insert(at, true);
        if self.random(2) == 0 {
            self.cached.borrow_mut().insert(at & !(walked.size.bytes() - 1), walked.size.bytes());
        }
    }

    /// Forgets leaves that meet the span.
    fn invalidate(&self, span: Span<Iova>) {
        let (first, last) = (span.first().bits(), span.last().bits());
        self.cached.borrow_mut().retain(|at, len| *at > last || *at + *len <= first);
    }

    /// Takes pages off the list.
    fn tell(&self, (first, len): (u64, u64), which: impl Fn(bool) -> bool) {
        self.written.borrow_mut().retain(|at, walked| *at < first || *at - first >= len || !which(*walked));
    }

    fn untold(&self, span: Span<Iova>) -> Option<u64> {
        self.written.borrow().range(span.first().bits()..=span.last().bits()).next().map(|(at, _)| *at)
    }
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
}

impl<F: Format> Model<F> {
    fn new(seed: u64) -> Self {
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
        Self { device, table }
    }

    /// A span near the start, that of a whole table, or of the largest leaf; the device writes there meanwhile.
    fn choose(&self) -> Span<Iova> {
        let Sizes { page, block, .. } = sizes::<F>();
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
        let block = sizes::<F>().block;
        let (span, random) = (self.choose(), self.device.random(16));
        let device = Rc::clone(&self.device);
        let mut told = Vec::new();
        let mut tell = |leaf: Leaf<Iova, PhysAddr>| {
            let leaf = (leaf.at.bits(), leaf.size.bytes());
            device.tell(leaf, |_| true);
            told.push(leaf);
        };
        let (mut forget, mut gone) = (span, None);
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
            5..9 => {
                let flush = self.table.unmap_dirty(span, &mut tell).unwrap();
                gone = Some(span);
                forget = flush.span();
                self.table.free_tables(flush);
            }
            9 => {
                let flush = self.table.unmap(span).unwrap();
                device.tell((span.first().bits(), span.len()), |_| true);
                forget = flush.span();
                self.table.free_tables(flush);
            }
            10 | 11 => {
                self.table.cut(span.first(), |span| device.invalidate(span)).unwrap();
                return;
            }
            12 => {
                let all = Span::new(Iova::new(0), 2 * block).unwrap();
                self.table.merge(all, |span| device.invalidate(span)).map(drop).unwrap();
                return;
            }
            _ => {
                // What is written while this goes on may be told now or the next time.
                let before = device.written.borrow().clone();
                self.table.take_dirty(span, &mut tell).unwrap();
                let (first, last) = (span.first().bits(), span.last().bits());
                let lost = before
                    .range(first..=last)
                    .find(|(at, _)| !told.iter().any(|(first, len)| **at >= *first && **at - first < *len));
                assert_eq!(lost, None, "{}: written before {span}", F::NAME);
            }
        }
        // What the device wrote through leaves that it had cached is read by who was told of them.
        device.invalidate(forget);
        for leaf in told {
            device.invalidate(Span::new(Iova::new(leaf.0), leaf.1).unwrap());
            device.tell(leaf, |walked| !walked);
        }
        assert_eq!(gone.and_then(|span| device.untold(span)), None, "{}: written before it was unmapped", F::NAME);
    }
}

/// At the end everything that was written is told. `DMALANE_DIRTY_OPERATIONS=115000` makes 10^6 in all.
fn no_mark_is_lost<F: Format>() {
    if F::DIRTY == 0 {
        return;
    }
    let operations = std::env::var("DMALANE_DIRTY_OPERATIONS").map_or(2_500, |n| n.parse().expect("a number"));
    let mut model = Model::<F>::new(F::INPUT_BITS.into());
    (0..operations).for_each(|_| model.operation());
    let Model { device, mut table } = model;
    assert!(device.steps.get() > operations, "the device was busy");
    let all = Span::new(Iova::new(0), sizes::<F>().top).unwrap();
    device.root.set(None);
    let flush = table.unmap_dirty(all, |leaf| device.tell((leaf.at.bits(), leaf.size.bytes()), |_| true)).unwrap();
    table.free_tables(flush);
    assert_eq!(device.untold(all), None);
}

/// A mark on an entry of a group outside of the span that is asked for.
fn groups_are_looked_at_whole<F: Format>() {
    let Sizes { page, .. } = sizes::<F>();
    let group = page << F::GROUP_BITS[F::LEVELS as usize - 1];
    if F::DIRTY == 0 || group == page {
        return;
    }
    let span = |at, len| Span::new(Iova::new(at), len).unwrap();
    let model = Model::<F>::new(1);
    let Model { device, mut table } = model;
    device.targets.borrow_mut().push(group + page);
    table.map(Iova::new(group), PhysAddr::new(group), group, Access::RW).unwrap();
    device.root.set(None);
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
        assert_eq!(table.take_dirty(part, |leaf| found.push(leaf)), Ok(1), "{}", F::NAME);
        assert_eq!(found, [table.lookup(Iova::new(group)).unwrap()]);
        assert_eq!(table.take_dirty(span(0, 4 * group), |_| ()), Ok(0));
        device.written.borrow_mut().clear();
        device.cached.borrow_mut().clear();
    }
}

#[test]
fn marks() {
    macro_rules! each {
        ($($name:ident: $format:ty;)*) => {$(
            no_mark_is_lost::<$format>();
            groups_are_looked_at_whole::<$format>();
        )*};
    }
    #[cfg(not(every_format))]
    crate::formats::stand_ins!(each);
    #[cfg(every_format)]
    dmalane_iopt::formats!(each);
}
