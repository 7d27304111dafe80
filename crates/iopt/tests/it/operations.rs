//! The operations beyond mapping and unmapping, for every format.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use crate::formats::{Failing, MapList, Sizes, leaf_levels, shift, sizes};
use dmalane_addr::{Access, Address, Iova, PageSize, PhysAddr, Segment, Span};
use dmalane_iopt::{
    AmdV1, Arm64S1, Arm64S1_4k, Arm64S1_16k, Entry, Error, Format, FormatId, HeapTables, NamedAddr, PageTable, RiscvSv,
    StandIn, TableShape, Tables, VtdSecond48, WalkFault, Walked, X86_64, X86_64_4Level, walk,
};

type Table<F, T> = PageTable<F, Iova, PhysAddr, T>;

/// Words of a cache line.
const LINE: usize = 8;

/// Table memory that a device reads without snooping: it sees a word once its cache line was cleaned.
#[derive(Clone)]
struct Stale(Rc<Inner>);

struct Inner {
    heap: RefCell<HeapTables<PhysAddr>>,
    /// The bytes that the device sees, by address.
    seen: RefCell<BTreeMap<u64, u64>>,
    shape: Cell<TableShape>,
    lines: Cell<usize>,
}

impl Stale {
    fn new() -> Self {
        Self(Rc::new(Inner {
            heap: RefCell::new(HeapTables::new(PhysAddr::new(0x1234_0000))),
            seen: RefCell::default(),
            shape: Cell::new(TableShape::ALL_4K),
            lines: Cell::new(0),
        }))
    }

    fn zeroed(&self, table: Option<PhysAddr>, size: PageSize) -> Option<PhysAddr> {
        let at = table?.bits();
        let mut seen = self.0.seen.borrow_mut();
        (at..at + size.bytes()).step_by(8).for_each(|word| _ = seen.insert(word, 0));
        table
    }

    /// The device's walk.
    fn walk<F: Format>(&self, root: PhysAddr, at: u64) -> Result<Walked, WalkFault> {
        walk::<F>(root.bits(), at, |word| self.0.seen.borrow().get(&word).copied())
    }

    /// True when the device sees what was stored, everywhere.
    fn is_clean(&self) -> bool {
        let heap = self.0.heap.borrow();
        self.0.seen.borrow().iter().all(|(&at, &word)| heap.read(at) == Some(word))
    }
}

impl Tables for Stale {
    type Addr = PhysAddr;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.0.shape.set(shape);
        self.0.heap.borrow_mut().prepare(shape)
    }
    fn allocate_root(&mut self) -> Option<PhysAddr> {
        let root = self.0.heap.borrow_mut().allocate_root();
        self.zeroed(root, self.0.shape.get().root)
    }
    fn free_root(&mut self, root: PhysAddr) {
        self.0.heap.borrow_mut().free_root(root);
    }
    fn allocate(&mut self) -> Option<PhysAddr> {
        let table = self.0.heap.borrow_mut().allocate();
        self.zeroed(table, self.0.shape.get().table)
    }
    fn free(&mut self, table: PhysAddr) {
        self.0.heap.borrow_mut().free(table);
    }
    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        self.0.heap.borrow().load(table, index)
    }
    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        self.0.heap.borrow_mut().store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.0.heap.borrow_mut().reserve(tables)
    }
    fn clean(&mut self, table: PhysAddr, range: Range<usize>) {
        for line in range.start / LINE..range.end.div_ceil(LINE) {
            self.0.lines.set(self.0.lines.get() + 1);
            for word in line * LINE..(line + 1) * LINE {
                let at = table.bits() + 8 * word as u64;
                self.0.seen.borrow_mut().insert(at, self.0.heap.borrow().load(table, word));
            }
        }
    }
}

fn span(at: u64, len: u64) -> Span<Iova> {
    Span::new(Iova::new(at), len).unwrap()
}

/// All leaves: start, output, size.
fn leaves<F: Format, T: Tables>(table: &Table<F, T>) -> Vec<(u64, u64, u64)> {
    let runs = table.runs(span(0, sizes::<F>().top));
    runs.map(|r| (r.at.bits(), r.to.bits(), r.size.bytes())).collect()
}

/// The mappings, whatever the leaves.
fn extents<F: Format, T: Tables>(table: &Table<F, T>) -> Vec<(u64, u64, u64)> {
    let mut all: Vec<(u64, u64, u64)> = Vec::new();
    for (at, to, len) in leaves(table) {
        match all.last_mut() {
            Some(last) if last.0 + last.2 == at && last.1 + last.2 == to => last.2 += len,
            _ => all.push((at, to, len)),
        }
    }
    all
}

/// Sizes of a table of the last level in bytes, as the number of cache lines.
fn lines_of_a_table<F: Format>() -> usize {
    (TableShape::of::<F>().table.bytes() / 64) as usize
}

/// From `G` to `F`: 64 KiB is a whole number of pages in every format.
fn map_through<F: Format, G: Format>() {
    const UNIT: u64 = 1 << 16;
    let block = sizes::<F>().block.max(sizes::<G>().block);
    let mut source = Table::<G, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    let list = [
        Segment { addr: PhysAddr::new(5 * UNIT), len: UNIT },
        Segment { addr: PhysAddr::new(9 * UNIT), len: 3 * UNIT },
        Segment { addr: PhysAddr::new(2 * block), len: block },
    ];
    let first = 2 * block - 4 * UNIT;
    source.map_list(Iova::new(first), list, Access::READ).unwrap();
    source.map(Iova::new(3 * block + UNIT), PhysAddr::new(0), UNIT, Access::READ).unwrap();

    let len = 4 * UNIT + block;
    for start in [first, first + UNIT] {
        let mut table = Table::<F, _>::new(Failing::new()).unwrap();
        let cut = start - first;
        let mapped = table.map_through(Iova::new(start), &source, span(start, len - cut), Access::READ);
        assert_eq!(mapped, Ok(len - cut));
        let expected: Vec<_> = extents(&source).into_iter().filter(|e| e.0 >= start && e.0 < 3 * block).collect();
        assert_eq!(extents(&table), expected);
        // The largest leaves that this format has, whatever the source has.
        let largest = F::PAGE_SIZES.largest_within(block, block).unwrap();
        assert_eq!(table.lookup(Iova::new(2 * block)).unwrap().size, largest);
    }

    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    let hole = |at| Error::NotMapped { at: NamedAddr::of(Iova::new(at)) };
    let e = table.map_through(Iova::new(0), &source, span(first, len + UNIT), Access::READ).unwrap_err();
    assert_eq!(e, hole(3 * block), "at the end");
    let e = table.map_through(Iova::new(0), &source, span(first, len + 2 * UNIT), Access::READ).unwrap_err();
    assert_eq!(e, hole(3 * block), "in the middle");
    let e = table.map_through(Iova::new(0), &source, span(0, len), Access::READ).unwrap_err();
    assert_eq!(e, hole(0), "at the start");
    if F::supports(Access::RW) {
        let e = table.map_through(Iova::new(0), &source, span(first, len), Access::RW).unwrap_err();
        let at = NamedAddr::of(Iova::new(first));
        assert_eq!(e, Error::Denied { at, access: Access::RW, permitted: Access::READ });
    }
    table.map(Iova::new(block), PhysAddr::new(0), UNIT, Access::READ).unwrap();
    let e = table.map_through(Iova::new(block - 2 * UNIT), &source, span(first, len), Access::READ).unwrap_err();
    assert_eq!(e, Error::Overlap { at: NamedAddr::of(Iova::new(block)) });
    assert_eq!(extents(&table), [(block, 0, UNIT)]);
}

/// From `G` to `F`: registers of a device stay what they are, unless the caller says otherwise.
fn map_through_registers<F: Format, G: Format>() {
    const UNIT: u64 = 1 << 16;
    let (mmio, uncached) = (Access::READ | Access::MMIO, Access::READ | Access::UNCACHED);
    if !G::supports(mmio) {
        return;
    }
    let mut source = Table::<G, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    source.map(Iova::new(0), PhysAddr::new(UNIT), UNIT, mmio).unwrap();
    source.map(Iova::new(UNIT), PhysAddr::new(4 * UNIT), UNIT, Access::READ).unwrap();
    let map = |first: u64, len: u64, access: Access| {
        let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
        let mapped = table.map_through(Iova::new(first), &source, span(first, len), access);
        mapped.map(|_| table.lookup(Iova::new(first)).unwrap().access)
    };
    let as_source = F::supports(mmio);
    assert_eq!(map(0, UNIT, Access::READ), Ok(if as_source { mmio } else { Access::READ }));
    assert_eq!(map(UNIT, UNIT, Access::READ), Ok(Access::READ));
    if F::supports(uncached) {
        assert_eq!(map(0, 2 * UNIT, uncached), Ok(uncached), "as the caller says");
    }
    if as_source {
        let at = NamedAddr::of(Iova::new(UNIT));
        assert_eq!(map(0, 2 * UNIT, Access::READ), Err(Error::Denied { at, access: mmio, permitted: Access::READ }));
    }
}

/// A large leaf is cut everywhere and merged again; the device sees the old leaf, a fault, or the new ones.
fn cut_and_merge<F: Format>() {
    let Sizes { page, block, large, top, .. } = sizes::<F>();
    let memory = Stale::new();
    let mut table = Table::<F, _>::new(memory.clone()).unwrap();
    let root = table.root();
    table.map(Iova::new(large), PhysAddr::new(2 * large), large + block, Access::READ).unwrap();
    let (before, tables) = (leaves(&table), memory.0.heap.borrow().in_use());
    for at in [large, large + page, large + block, large + large / 2, 2 * large, 2 * large - page, top] {
        let largest = table.lookup(Iova::new(at)).map(|l| (l.at.bits(), l.size.bytes()));
        let mut invalidated: Vec<Span<Iova>> = Vec::new();
        let forget = |span: Span<Iova>| {
            assert!(memory.is_clean());
            for probe in [span.first().bits(), span.last().bits()] {
                assert!(memory.walk::<F>(root, probe).is_err(), "clear while the device forgets");
            }
            invalidated.push(span);
        };
        table.cut(Iova::new(at), forget).unwrap();
        assert_eq!(invalidated.is_empty(), largest.is_none_or(|(first, _)| first == at));
        if let Some((first, size)) = largest.filter(|(first, _)| *first != at) {
            assert_eq!(invalidated[0], span(first, size));
            assert!(invalidated.windows(2).all(|w| w[0].covers(&w[1])));
        }
        assert!(table.lookup(Iova::new(at)).is_none_or(|l| l.at.bits() == at));
        assert_eq!(extents(&table), [(large, 2 * large, large + block)]);
        assert!(memory.is_clean());
    }
    // A page that differs, by where it leads or what it permits, stays as it is.
    let flush = table.unmap(span(large + page, page)).unwrap();
    table.free_tables(flush);
    table.map(Iova::new(large + page), PhysAddr::new(3 * page), page, Access::READ).unwrap();
    table.merge(span(large, large + block), |_| ()).unwrap();
    assert_eq!(extents(&table).len(), 3);
    let flush = table.unmap(span(large + page, page)).unwrap();
    table.free_tables(flush);
    table.map(Iova::new(large + page), PhysAddr::new(2 * large + page), page, Access::READ).unwrap();

    // Only whole tables within the span are merged.
    assert_eq!(table.merge(span(large, block - page), |_| ()), Ok(0));
    let freed = table.merge(span(large, large + block), |span| {
        assert!(memory.walk::<F>(root, span.first().bits()).is_err() && memory.is_clean());
    });
    assert_eq!(freed.unwrap() > 0, leaf_levels::<F>() > 1);
    assert_eq!((leaves(&table), memory.0.heap.borrow().in_use()), (before, tables));
    for (at, to) in [(large, 2 * large), (2 * large - 1, 3 * large - 1)] {
        assert_eq!(memory.walk::<F>(root, at).map(|w| w.to), Ok(to));
    }
    assert_eq!(table.mapped_bytes(), large + block);
    assert!(matches!(table.cut(Iova::new(1), |_| ()), Err(Error::Misaligned { .. })));
    assert!(matches!(table.cut(Iova::new(top + page), |_| ()), Err(Error::InputRange { .. })));
}

/// Each allocation of a cut fails in turn.
fn cut_without_memory<F: Format>() {
    let Sizes { page, large, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    table.map(Iova::new(large), PhysAddr::new(0), large, Access::READ).unwrap();
    let (before, tables) = (leaves(&table), table.tables().heap.in_use());
    let needed = leaf_levels::<F>() as usize - 1;
    for n in 0..needed {
        table.tables_mut().calls = 0;
        table.tables_mut().fail_at = Some(n);
        let e = table.cut(Iova::new(large + page), |_| panic!("nothing has changed")).unwrap_err();
        assert!(matches!(e, Error::NoTables { .. }));
        assert_eq!((leaves(&table), table.tables().heap.in_use()), (before.clone(), tables));
    }
    table.tables_mut().fail_at = None;
    table.cut(Iova::new(large + page), |_| ()).unwrap();
    assert_eq!(table.tables().heap.in_use(), tables + needed);
}

type Call<'a, F> = &'a dyn Fn(&mut Table<F, Failing>) -> Result<(), Error>;

/// Each allocation of a call fails in turn; after each failure the table is as it was and nothing is leaked.
fn without_memory<F: Format>() {
    let Sizes { page, entries, block, large, .. } = sizes::<F>();
    let mut source = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    let scattered = (0..entries + 2).map(|i| Segment { addr: PhysAddr::new((2 * i + 1) * page), len: page });
    let at = Iova::new(large - 2 * page);
    source.map_list(at, scattered, Access::READ).unwrap();
    let through = |t: &mut Table<F, Failing>| {
        let span = Span::new(at, (entries + 2) * page).unwrap();
        t.map_through(at, &source, span, Access::READ).map(drop)
    };
    let list = |t: &mut Table<F, Failing>| {
        let segments = [(page, 3 * page), (0, large), (4 * large, 2 * page)];
        let segments = segments.map(|(to, len)| Segment { addr: PhysAddr::new(to), len });
        t.map_list(Iova::new(large - 3 * page), segments, Access::READ).map(drop)
    };
    let calls: [Call<F>; 2] = [&through, &list];
    for call in calls {
        let mut table = Table::<F, _>::new(Failing::new()).unwrap();
        // Something is there before, in the tables that the call needs too and far away.
        table.map(Iova::new(3 * large + block), PhysAddr::new(0), page, Access::READ).unwrap();
        let (before, tables) = (leaves(&table), table.tables().heap.in_use());
        for n in 0.. {
            assert!(n < 64, "more tables than these calls can take");
            table.tables_mut().calls = 0;
            table.tables_mut().fail_at = Some(n);
            match call(&mut table) {
                Ok(()) => break,
                Err(e) => assert!(matches!(e, Error::NoTables { .. }), "{e}"),
            }
            assert_eq!((leaves(&table), table.tables().heap.in_use()), (before.clone(), tables));
        }
        let flush = table.unmap(span(0, sizes::<F>().top)).unwrap();
        table.free_tables(flush);
        assert_eq!(table.into_tables().heap.in_use(), 0);
    }
}

/// The tables as a device that does not snoop sees them after each call; one clean per cache line.
fn clean<F: Format>() {
    let Sizes { page, entries, block, large, .. } = sizes::<F>();
    let memory = Stale::new();
    let mut table = Table::<F, _>::new(memory.clone()).unwrap();
    let root = table.root();
    // A table full of pages that do not continue each other.
    let list = (0..entries).map(|i| Segment { addr: PhysAddr::new((2 * i + 1) * page), len: page });
    table.map_list(Iova::new(large), list, Access::READ).unwrap();
    assert!(memory.is_clean());
    assert_eq!(memory.0.lines.get(), lines_of_a_table::<F>() + F::LEVELS as usize - 1, "and one for each link");
    assert_eq!(memory.walk::<F>(root, large + 5 * page).map(|w| w.to), Ok(11 * page));

    memory.0.lines.set(0);
    let half = block / 2;
    let flush = table.unmap(span(large, half)).unwrap();
    assert_eq!(memory.0.lines.get(), lines_of_a_table::<F>() / 2);
    table.free_tables(flush);
    assert!(memory.is_clean() && memory.walk::<F>(root, large).is_err());
    // The rest goes with its tables: the links alone are cleared.
    memory.0.lines.set(0);
    let flush = table.unmap(span(large, block)).unwrap();
    assert!(memory.0.lines.get() <= lines_of_a_table::<F>() + F::LEVELS as usize);
    table.free_tables(flush);
    assert!(memory.walk::<F>(root, large + half).is_err());
    // A failure is cleaned too.
    table.map(Iova::new(large + block), PhysAddr::new(0), page, Access::READ).unwrap();
    let e = table.map(Iova::new(large), PhysAddr::new(0), 2 * block, Access::READ).unwrap_err();
    assert!(matches!(e, Error::Overlap { .. }) && memory.walk::<F>(root, large).is_err());
    assert_eq!(memory.walk::<F>(root, large + block).map(|w| w.to), Ok(0));
}

/// Marks set as a device sets them are given once.
fn take_dirty<F: Format>() {
    let Sizes { page, block, large, top, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    let all = span(0, top);
    if F::DIRTY == 0 {
        assert!(matches!(table.take_dirty(all, |_| ()), Err(Error::NoDirtyBit { .. })));
        return;
    }
    table.map(Iova::new(2 * large - 3 * page), PhysAddr::new(large - 3 * page), large + 3 * page, Access::RW).unwrap();
    let before = leaves(&table);
    table.take_dirty(all, |_| ()).unwrap();
    assert_eq!(table.take_dirty(all, |leaf| panic!("{leaf:?} twice")), Ok(0));
    assert_eq!(leaves(&table), before, "what is mapped stays");
    for at in [2 * large - 2 * page, 2 * large + block] {
        write_through(&mut table, at);
        assert_eq!(table.take_dirty(span(0, 2 * large - 2 * page), |_| ()), Ok(0), "elsewhere");
        let mut found = Vec::new();
        assert_eq!(table.take_dirty(all, |leaf| found.push(leaf)), Ok(1));
        assert_eq!(found, [table.lookup(Iova::new(at)).unwrap()]);
        assert_eq!(table.take_dirty(all, |_| ()), Ok(0));
    }
    assert!(matches!(table.take_dirty(span(1, page), |_| ()), Err(Error::Misaligned { .. })));
    dirty_parts(table);
}

/// As a device does it that writes to `at`.
fn write_through<F: Format>(table: &mut Table<F, HeapTables<PhysAddr>>, at: u64) {
    let mut entry = 0;
    walk::<F>(table.root().bits(), at, |word| {
        entry = word;
        table.tables().read(word)
    })
    .unwrap();
    let word = table.tables().read(entry).unwrap();
    let marked = if F::DIRTY_IS_CLEAR { word & !F::DIRTY } else { word | F::DIRTY };
    table.tables_mut().store(PhysAddr::new(entry), 0, marked);
}

/// The parts of a leaf count as written to when it did, by a cut and by an unmap of some of it; a merged leaf when one
/// of its parts did.
fn dirty_parts<F: Format>(mut table: Table<F, HeapTables<PhysAddr>>) {
    let Sizes { page, large, top, .. } = sizes::<F>();
    if F::PAGE_SIZES.bits().count_ones() == 1 {
        return; // no leaf has parts
    }
    let all = span(0, top);
    let dirty = |table: &mut Table<F, _>| {
        let mut bytes = 0;
        table.take_dirty(all, |leaf| bytes += leaf.size.bytes()).unwrap();
        bytes
    };
    let leaf = table.lookup(Iova::new(2 * large)).unwrap();
    assert_eq!(leaf.size.bytes(), large);
    table.cut(Iova::new(2 * large + 5 * page), |_| ()).unwrap();
    assert_eq!(dirty(&mut table), 0, "not written to, so neither were its parts");
    table.merge(all, |_| ()).unwrap();
    assert_eq!((table.lookup(leaf.at), dirty(&mut table)), (Some(leaf), 0));
    write_through(&mut table, 2 * large);
    table.cut(Iova::new(2 * large + 5 * page), |_| ()).unwrap();
    assert_eq!(dirty(&mut table), large);
    write_through(&mut table, 3 * large - page);
    table.merge(all, |_| ()).unwrap();
    assert_eq!((table.lookup(leaf.at), dirty(&mut table)), (Some(leaf), large));
    write_through(&mut table, 2 * large);
    let flush = table.unmap(span(2 * large + 5 * page, page)).unwrap();
    assert_eq!((flush.bytes(), dirty(&mut table)), (page, large - page));
}

/// Two pages bound and unbound again: the table stays for the next, smaller leaves go into it, and an unmap of all that
/// it translates makes room for a large one.
fn clear_and_unmap<F: Format>() {
    let Sizes { page, block, large, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    let tables = |table: &Table<F, Failing>| table.tables().heap.in_use();
    let at = 2 * large;
    let pages = [at, at + block - page].map(|at| span(at, page));
    for page_at in pages {
        table.map(page_at.first(), PhysAddr::new(0), page, Access::READ).unwrap();
    }
    let made = tables(&table);
    for page_at in pages {
        let flush = table.clear(page_at).unwrap();
        assert_eq!((flush.bytes(), flush.tables().len()), (page, 0));
    }
    assert_eq!((table.mapped_bytes(), tables(&table)), (0, made));
    // No leaf where the tables are, and nothing of them is lost when the call fails after all.
    let list = [(at, large), (0, page)].map(|(to, len)| Segment { addr: PhysAddr::new(to), len });
    table.map(Iova::new(at + large), PhysAddr::new(0), page, Access::READ).unwrap();
    let more = tables(&table);
    table.map_list(Iova::new(at), list, Access::READ).unwrap_err();
    assert_eq!((table.mapped_bytes(), tables(&table)), (page, more));
    table.map_list(Iova::new(at), list[..1].to_vec(), Access::READ).unwrap();
    assert_eq!(tables(&table), more);
    let (size, count) = (table.lookup(Iova::new(at)).unwrap().size, table.runs(span(at, large)).count());
    assert!(size.bytes() < block || F::PAGE_SIZES.bits().count_ones() == 1);
    assert!(count as u64 >= block / size.bytes());
    let flush = table.clear(span(at, large - page)).unwrap();
    table.free_tables(flush);
    let flush = table.clear(span(at + large - page, page)).unwrap();
    table.free_tables(flush);
    let flush = table.unmap(span(at, large)).unwrap();
    table.free_tables(flush);
    assert!(table.unmap(span(at, page)).unwrap().is_empty());
    table.map(Iova::new(at), PhysAddr::new(at), large, Access::READ).unwrap();
    if F::PAGE_SIZES.bits() & large != 0 {
        assert_eq!(table.lookup(Iova::new(at)).unwrap().size.bytes(), large);
    }
}

/// Lists of pages, and of pages and short runs, from and to the edges of a table, with something in the way at every
/// place, or a segment that cannot be mapped: the loop takes several to a turn, and must stop at the right one.
fn stops_at_the_right_page<F: Format, T: Tables>(tables: impl Fn() -> T) {
    let Sizes { page, entries, block, out_top, .. } = sizes::<F>();
    let singles: Vec<u64> = vec![1; 20];
    let runs: Vec<u64> = [1, 2, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 8, 1, 9, 2, 17].to_vec();
    for (start, lengths) in [0, 1, entries - 20, entries - 11].into_iter().flat_map(|s| [(s, &singles), (s, &runs)]) {
        let at = 2 * block + start * page;
        // None continues another, all of them odd pages: no leaf is larger than a page.
        let mut to = page;
        let mut list: Vec<Segment<PhysAddr>> = Vec::new();
        for &pages in lengths {
            list.push(Segment { addr: PhysAddr::new(to), len: pages * page });
            to += (pages + 2 - pages % 2) * page;
        }
        let len: u64 = list.iter().map(|s| s.len).sum();
        let mut table = Table::<F, _>::new(tables()).unwrap();
        // Something to either side, so that no table is new.
        table.map(Iova::new(at - page), PhysAddr::new(0), page, Access::READ).unwrap();
        table.map(Iova::new(at + len), PhysAddr::new(0), page, Access::READ).unwrap();
        let near = |table: &Table<F, T>| -> Vec<_> {
            table.runs(span(at - page, len + 2 * page)).map(|r| (r.at.bits(), r.to.bits(), r.len)).collect()
        };
        let before = near(&table);
        for taken in (0..len).step_by(page as usize) {
            table.map(Iova::new(at + taken), PhysAddr::new(0), page, Access::READ).unwrap();
            let e = table.map_list(Iova::new(at), list.iter().copied(), Access::READ).unwrap_err();
            assert_eq!(e, Error::Overlap { at: NamedAddr::of(Iova::new(at + taken)) });
            let flush = table.unmap(span(at + taken, page)).unwrap();
            assert_eq!((flush.bytes(), flush.tables().len()), (page, 0));
            assert_eq!(near(&table), before);
        }
        for bad in 0..list.len() {
            let good = list[bad];
            for (addr, len) in [(good.addr.bits() + 1, good.len), (good.addr.bits(), good.len - 1), (out_top, page)] {
                list[bad] = Segment { addr: PhysAddr::new(addr), len };
                let e = table.map_list(Iova::new(at), list.iter().copied(), Access::READ).unwrap_err();
                let place = NamedAddr::of(PhysAddr::new(addr));
                match e {
                    Error::Misaligned { at, .. } | Error::OutputRange { at, .. } => {
                        assert_eq!(at, place);
                    }
                    e => panic!("{e}"),
                }
                assert_eq!(near(&table), before);
            }
            list[bad] = good;
        }
        assert_eq!(table.map_list(Iova::new(at), list.iter().copied(), Access::READ), Ok(len));
        let mut next = at;
        for s in &list {
            for offset in (0..s.len).step_by(page as usize) {
                let found = table.lookup(Iova::new(next)).unwrap();
                assert_eq!((found.to.bits(), found.size.bytes()), (s.addr.bits() + offset, page));
                next += page;
            }
        }
        // A list that ends here and there, into a table that is new.
        for count in 1..list.len() {
            let mut table = Table::<F, _>::new(tables()).unwrap();
            let part: u64 = list[..count].iter().map(|s| s.len).sum();
            assert_eq!(table.map_list(Iova::new(at), list[..count].iter().copied(), Access::READ), Ok(part));
            assert_eq!(table.mapped_bytes(), part);
            assert_eq!(table.lookup(Iova::new(at + part)), None);
        }
    }
}

/// Single pages go in one order or another: the last one takes its table with it, and those above, and no other does.
fn the_last_page_takes_its_table<F: Format, T: Tables>(tables: impl Fn() -> T) {
    let Sizes { page, entries, block, .. } = sizes::<F>();
    for pages in [0..entries, 0..entries / 4, entries / 3..entries / 2, entries - 2..entries, 5..6] {
        let count = pages.end - pages.start;
        let middle = count / 2;
        let orders: [&dyn Fn(u64) -> u64; 4] = [
            &|n| n,
            &|n| count - 1 - n,
            &|n| if n <= middle { middle - n } else { n }, // down from the middle, then up
            &|n| n * 7919 % count,                         // a prime that divides no count here
        ];
        for order in orders {
            let mut table = Table::<F, _>::new(tables()).unwrap();
            let at = |n: u64| Iova::new(2 * block + (pages.start + order(n)) * page);
            // Odd pages: no leaf is larger than a page.
            let map = |table: &mut Table<F, T>, n: u64| {
                table.map(at(n), PhysAddr::new((2 * order(n) + 1) * page), page, Access::READ).unwrap();
            };
            (0..count).for_each(|n| map(&mut table, n));
            for n in 0..count {
                let last = n + 1 == count;
                for again in [!last, false] {
                    let flush = table.unmap(span(at(n).bits(), page)).unwrap();
                    let gone = if last { F::LEVELS as usize - 1 } else { 0 };
                    assert_eq!((flush.bytes(), flush.tables().len()), (page, gone), "{n} of {count}");
                    if !again {
                        break;
                    }
                    map(&mut table, n);
                }
            }
            assert_eq!(table.mapped_bytes(), 0);
        }
    }
}

/// Pages over others and over holes, up to the end of a table and to a segment that cannot be mapped: by what they lead
/// to, by counts, and as a device sees them.
fn replace_pages<F: Format>() {
    let Sizes { page, entries, block, out_top, .. } = sizes::<F>();
    let segments = |pages: &[u64]| -> Vec<Segment<PhysAddr>> {
        let mut to = 5 * block;
        let segment = |&pages: &u64| {
            to += (pages + 2) * page;
            Segment { addr: PhysAddr::new(to - pages * page), len: pages * page }
        };
        pages.iter().map(segment).collect()
    };
    let list = segments(&[1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 9, 1]);
    let mut bad = list.clone();
    bad[3].addr = PhysAddr::new(out_top);
    for (start, list, len) in [(0, &list, 22), (1, &list, 22), (entries - 4, &list, 4), (1, &bad, 4)] {
        let memory = Stale::new();
        let mut table = Table::<F, _>::new(memory.clone()).unwrap();
        let at = 2 * block + start * page;
        assert_eq!(table.replace_pages(Iova::new(at), 22, list.iter().copied(), Access::READ), (0, 0), "no table");
        let old = (0..entries).map(|n| Segment { addr: PhysAddr::new((2 * n + 1) * page), len: page });
        table.map_list(Iova::new(2 * block), old, Access::READ).unwrap();
        for hole in [at + page, at + 2 * page] {
            assert!(table.clear_leaf(Iova::new(hole)));
        }
        let before = leaves(&table);
        let replaced = table.replace_pages(Iova::new(at), 22, list.iter().copied(), Access::READ);
        if F::GROUP_BITS.iter().any(|&bits| bits > 0) {
            assert_eq!((replaced, leaves(&table)), ((0, 0), before), "groups are not replaced in place");
            return;
        }
        assert_eq!(replaced, (len as usize, len - 2));
        let to = list.iter().flat_map(|s| (0..s.len / page).map(|n| s.addr.bits() + n * page));
        let mut wanted: BTreeMap<u64, u64> = before.into_iter().map(|(at, to, _)| (at, to)).collect();
        wanted.extend((0..len).zip(to).map(|(n, to)| (at + n * page, to)));
        let found: BTreeMap<u64, u64> = leaves(&table).into_iter().map(|(at, to, _)| (at, to)).collect();
        assert_eq!((found, table.mapped_bytes()), (wanted.clone(), wanted.len() as u64 * page));
        assert!(memory.is_clean());
        let seen = |at: u64| memory.walk::<F>(table.root(), at).map(|w| w.to);
        assert!(wanted.iter().all(|(&at, &to)| seen(at) == Ok(to)));
    }
}

fn map_each<F: Format>() {
    let Sizes { page, entries, block, out_top, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    let at = |n: u64| Iova::new(2 * block + n * page);
    let apart = |n: u64| Some((2 * n + 1) * page);
    // From which page on how many, to where, and how many are mapped: up to a mapped page, to one that has no place or
    // no entry can hold, and to the end of the table. Pages that continue each other, as a group might, stay single.
    type Case<'a> = (u64, usize, &'a dyn Fn(u64) -> Option<u64>, u64);
    let cases: [Case<'_>; 6] = [
        (0, 3, &apart, 3),
        (5, 9, &apart, 2),
        (10, 9, &|n| apart(n).filter(|_| n != 4), 4),
        (20, 9, &|n| if n == 2 { Some(out_top) } else { apart(n) }, 2),
        (32, 16, &|n| Some((32 + n) * page), 16),
        (entries - 3, 9, &apart, 3),
    ];
    let each = |table: &mut Table<F, _>, (start, pages, to, _): Case<'_>| {
        table.map_each(at(start), pages, Access::READ, |n| to(n as u64).map(PhysAddr::new))
    };
    assert_eq!(cases.map(|case| each(&mut table, case)), [0; 6], "no table");
    table.map(at(7), PhysAddr::new(0), page, Access::READ).unwrap();
    let mut wanted = vec![(at(7).bits(), 0, page)];
    for case in cases {
        let (start, _, to, done) = case;
        assert_eq!(each(&mut table, case) as u64, done, "from page {start}");
        wanted.extend((0..done).map(|n| (at(start + n).bits(), to(n).unwrap(), page)));
    }
    wanted.sort();
    assert_eq!((leaves(&table), table.mapped_bytes()), (wanted.clone(), wanted.len() as u64 * page));
}

/// A group is one leaf, be it behind another leaf in the same call or in a call for itself.
fn groups<F: Format>() {
    for (level, bits) in (0..F::LEVELS).zip(F::GROUP_BITS).filter(|(_, bits)| *bits > 0) {
        let single = 1 << shift::<F>(level);
        let group = single << bits;
        let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
        for (at, len) in [(group - single, single + group), (2 * group, group)] {
            table.map(Iova::new(at), PhysAddr::new(group + at), len, Access::READ).unwrap();
        }
        let wanted = [(group - single, single), (group, group), (2 * group, group)];
        assert_eq!(leaves(&table), wanted.map(|(at, len)| (at, group + at, len)), "level {level}");
    }
}

/// A leaf of a level takes a table for each range that one of a level below it translates.
fn split_tables<F: Format>() {
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    let mut wanted = 0;
    for above in 0..leaf_levels::<F>() {
        let size = 1 << shift::<F>(F::LEVELS - 1 - above);
        table.map(Iova::new(size), PhysAddr::new(size), size, Access::READ).unwrap();
        wanted += (0..above).map(|below| 1 << (F::INDEX_BITS * below)).sum::<usize>();
        assert_eq!(table.split_tables(), wanted);
    }
}

fn detach_empty<F: Format>() {
    let Sizes { page, block, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    let (at, last, mut tables) = (Iova::new(2 * block), F::LEVELS - 1, Vec::new());
    table.map(at, PhysAddr::new(0), page, Access::READ).unwrap();
    assert!(table.clear_leaf(at));
    let linked = table.linked_tables();
    for (at, level) in [(at, 0), (at, F::LEVELS), (Iova::new(3 * block), last)] {
        assert!(!table.detach_empty(at, level, &mut tables), "no table at {at} and level {level}");
    }
    assert!(table.detach_empty(at, last, &mut tables) && !table.detach_empty(at, last, &mut tables));
    assert_eq!((tables.len(), table.linked_tables()), (1, linked - 1));
    table.free_detached(tables);
    assert_eq!(table.tables().in_use(), linked);
    table.map(at, PhysAddr::new(0), page, Access::READ).unwrap();
    assert_eq!((leaves(&table), table.linked_tables()), (vec![(2 * block, 0, page)], linked));
}

macro_rules! operations {
    ($($module:ident: $format:ty;)*) => {$(
        mod $module {
            type F = $format;

            #[test]
            fn stops_at_the_right_page() {
                super::stops_at_the_right_page::<F, _>(super::Failing::new);
                super::stops_at_the_right_page::<F, _>(|| super::HeapTables::new(super::PhysAddr::new(0x1234_0000)));
            }

            #[test]
            fn the_last_page_takes_its_table() {
                super::the_last_page_takes_its_table::<F, _>(super::Failing::new);
                let heap = || super::HeapTables::new(super::PhysAddr::new(0x1234_0000));
                super::the_last_page_takes_its_table::<F, _>(heap);
            }

            #[test]
            fn replace_pages() {
                super::replace_pages::<F>();
            }

            #[test]
            fn map_each() {
                super::map_each::<F>();
            }

            #[test]
            fn split_tables() {
                super::split_tables::<F>();
            }

            #[test]
            fn detach_empty() {
                super::detach_empty::<F>();
            }

            #[test]
            fn groups() {
                super::groups::<F>();
            }

            #[test]
            fn clear_and_unmap() {
                super::clear_and_unmap::<F>();
            }

            #[test]
            fn map_through() {
                super::map_through::<F, super::X86_64_4Level>();
                super::map_through::<F, super::Arm64S1_16k>();
                super::map_through::<F, F>();
            }

            #[test]
            fn map_through_registers() {
                super::map_through_registers::<F, super::X86_64_4Level>();
                super::map_through_registers::<F, F>();
            }

            #[test]
            fn cut_and_merge() {
                super::cut_and_merge::<F>();
            }

            #[test]
            fn protect() {
                super::protect::<F>();
                super::protect_with::<F>();
            }

            #[test]
            fn cut_without_memory() {
                super::cut_without_memory::<F>();
            }

            #[test]
            fn without_memory() {
                super::without_memory::<F>();
            }

            #[test]
            fn clean() {
                super::clean::<F>();
            }

            #[test]
            fn take_dirty() {
                super::take_dirty::<F>();
            }
        }
    )*};
}

#[cfg(not(every_format))]
crate::formats::stand_ins!(operations);
#[cfg(every_format)]
dmalane_iopt::formats!(operations);

/// Rights change within the span and nowhere else, and translations stay.
fn protect<F: Format>() {
    let Sizes { page, block, large, .. } = sizes::<F>();
    let (len, at) = (large + block + 2 * page, 2 * large);
    let mut table = Table::<F, _>::new(Stale::new()).unwrap();
    table.map(Iova::new(at), PhysAddr::new(0), len, Access::RW).unwrap();
    let before = extents(&table);
    let has = |table: &Table<F, Stale>, from: u64, to: u64, wanted: Access| {
        for n in (from..to).step_by(page as usize) {
            let walked = table.tables().walk::<F>(table.root(), n).unwrap();
            assert_eq!((walked.to, walked.access), (n - at, wanted), "{n:#x}");
        }
    };
    // From within the first large leaf into the pages behind the last, then all of it, holes on both sides included.
    let (first, end) = (at + large - page, at + large + block + page);
    let flush = table.protect(span(first, end - first), Access::READ).unwrap();
    assert_eq!((flush.bytes(), flush.tables().len()), (end - first, 0));
    assert!(flush.span().first().bits() <= first && flush.span().last().bits() >= end - 1);
    table.free_tables(flush);
    has(&table, end - 2 * page, end, Access::READ);
    has(&table, first, first + 2 * page, Access::READ);
    has(&table, first - 2 * page, first, Access::RW);
    has(&table, end, at + len, Access::RW);
    assert_eq!(extents(&table), before);
    let flush = table.protect(span(at - page, len + 3 * page), Access::RW).unwrap();
    assert_eq!((flush.bytes(), extents(&table)), (len, before));
    has(&table, end - 2 * page, at + len, Access::RW);
    assert!(table.tables().is_clean());
    // Nothing changes where it fails, or where nothing is mapped.
    assert_eq!(table.protect(span(0, page), Access::READ).unwrap().bytes(), 0);
    let why = table.protect(span(at, page), Access::MMIO | Access::EXEC).unwrap_err();
    assert!(matches!(why, Error::Unsupported { .. }), "{why}");
    assert!(matches!(table.protect(span(at, page - 1), Access::READ), Err(Error::Misaligned { .. })));
    if F::DIRTY != 0 {
        let count = |table: &mut Table<F, Stale>| table.take_dirty(span(at, len), |_| ()).unwrap();
        count(&mut table);
        let leaf = table.lookup(Iova::new(at)).unwrap();
        // A leaf with its mark, as its device sets it.
        let written = marked_leaves(&mut table, leaf.at);
        let flush = table.protect(span(at, page), Access::RW).unwrap();
        table.free_tables(flush);
        assert!(count(&mut table) >= written, "the mark stays");
        // Where the mark is the right to write, it goes with it.
        marked_leaves(&mut table, leaf.at);
        let flush = table.protect(span(at, page), Access::READ).unwrap();
        table.free_tables(flush);
        has(&table, at, at + page, Access::READ);
    }
}

/// A page that a device has written to is told of when another takes its place, and the new one is not marked.
#[test]
fn replaced_pages_tell_of_their_marks() {
    type F = dmalane_iopt::VtdSecond48;
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    let page = |n: u64| PhysAddr::new(n << 12);
    table.map(Iova::new(0), page(0), 3 << 12, Access::RW).unwrap();
    write_through(&mut table, 1 << 12);
    let written = table.lookup(Iova::new(1 << 12)).unwrap();
    let list = [8, 4, 6].map(|n| Segment { addr: page(n), len: 4096 });
    let mut told = Vec::new();
    let replaced = table.replace_pages_dirty(Iova::new(0), 3, list, Access::RW, |leaf| told.push(leaf));
    assert_eq!((replaced, told), ((3, 3), vec![written]));
    assert_eq!(table.take_dirty(span(0, 3 << 12), |_| ()), Ok(0));
}

/// By break-before-make, the entries of what becomes another kind of memory, of groups and of what is split are clear
/// while the device forgets them; nothing else is broken.
fn protect_with<F: Format>() {
    let Sizes { page, block, large, .. } = sizes::<F>();
    let (at, len) = (2 * large, large + block + 2 * page);
    let memory = Stale::new();
    let mut table = Table::<F, _>::new(memory.clone()).unwrap();
    table.map(Iova::new(at), PhysAddr::new(0), len, Access::RW).unwrap();
    let before = extents(&table);
    let changed = span(at + large - page, block + 2 * page);
    let root = table.root();
    let protect = |table: &mut Table<F, Stale>, access| {
        let mut broken = Vec::new();
        let mut forget = |gone: Span<Iova>| {
            for end in [gone.first(), gone.last()] {
                assert!(memory.walk::<F>(root, end.bits()).is_err(), "{gone} is to be forgotten while it is there");
            }
            broken.push(gone);
        };
        let flush = table.protect_with(changed, access, Some(&mut forget), None).unwrap();
        assert_eq!((flush.bytes(), extents(table)), (changed.len(), before.clone()));
        assert!(table.runs(changed).all(|run| run.access == access) && memory.is_clean());
        broken
    };
    let leaves = |table: &Table<F, Stale>, groups_alone: bool| -> Vec<Span<Iova>> {
        let is_group = |size: PageSize| (0..F::LEVELS).all(|level| shift::<F>(level) != u32::from(size.log2()));
        let some = table.runs(changed).filter(|run| !groups_alone || is_group(run.size));
        some.map(|run| Span::new(run.at, run.len).unwrap()).collect()
    };
    let ends = [changed.first(), changed.last()].map(|at| table.lookup(at).unwrap());
    let mut split = ends.map(|leaf| span(leaf.at.bits(), leaf.size.bytes())).into_iter();
    let broken = protect(&mut table, Access::READ);
    assert!(split.all(|leaf| changed.covers(&leaf) || broken.contains(&leaf)), "{broken:?}");
    assert_eq!(protect(&mut table, Access::RW), leaves(&table, true));
    if F::supports(Access::RW | Access::MMIO) {
        assert_eq!(protect(&mut table, Access::RW | Access::MMIO), leaves(&table, false));
    }
}

/// Marks the leaf at `at` as a device does, and gives 1.
fn marked_leaves<F: Format>(table: &mut Table<F, Stale>, at: Iova) -> usize {
    let root = table.root();
    let mut entry = 0;
    let heap = table.tables().clone();
    walk::<F>(root.bits(), at.bits(), |word| {
        entry = word;
        heap.0.heap.borrow().read(word)
    })
    .unwrap();
    let word = heap.0.heap.borrow().read(entry).unwrap();
    let marked = if F::DIRTY_IS_CLEAR { word & !F::DIRTY } else { word | F::DIRTY };
    heap.0.heap.borrow_mut().store(PhysAddr::new(entry), 0, marked);
    1
}

/// A host with smaller pages than the format: its segments are joined before anything is said of their alignment.
#[test]
fn segments_below_a_granule() {
    type F = Arm64S1_16k;
    const K: u64 = 1024;
    let segment = |addr: u64, len: u64| Segment { addr: PhysAddr::new(addr * K), len: len * K };
    let base = 1 << 20;
    /// Addresses and lengths in KiB.
    type List = &'static [(u64, u64)];
    let good: [(List, u64); 6] = [
        (&[(0, 4), (4, 4), (8, 4), (12, 4)], 16),
        // Behind a whole page, around an empty segment, and 16 pages in pieces that end anywhere.
        (&[(0, 16), (16, 4), (20, 12)], 32),
        (&[(0, 4), (7, 0), (4, 12), (64, 16), (1, 0)], 32),
        (&[(0, 20), (20, 76), (96, 100), (196, 60)], 256),
        (&[(16, 12), (28, 4), (48, 4), (52, 12)], 32),
        (&[(3, 0)], 0),
    ];
    for (list, kib) in good {
        let segments = || list.iter().map(|&(addr, len)| segment(base + addr, len));
        // Into a table that is new, and into one that is there.
        for beside in [false, true] {
            let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
            if beside {
                table.map(Iova::new(1 << 30), PhysAddr::new(0), 16 * K, Access::RW).unwrap();
            }
            let at = Iova::new((1 << 30) + 64 * K);
            assert_eq!(table.map_list(at, segments(), Access::RW), Ok(kib * K), "{list:?}");
            let mut next = at.bits();
            for s in segments() {
                for offset in (0..s.len).step_by(K as usize) {
                    let at = Iova::new(next + offset);
                    let to = table.translate(at).unwrap();
                    assert_eq!(to.bits(), s.addr.bits() + offset, "{list:?}");
                }
                next += s.len;
            }
            assert_eq!(table.lookup(Iova::new(next)), None);
        }
    }
    // Together they are not whole pages either.
    let bad: [(List, u64, u64); 5] = [
        (&[(0, 4), (4, 4)], 0, 8),
        (&[(0, 4), (8, 12)], 0, 4),
        (&[(4, 12)], 4, 12),
        (&[(0, 16), (16, 8), (32, 16)], 16, 8),
        (&[(0, 4), (4, 16)], 0, 20),
    ];
    for (list, at, len) in bad {
        let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
        let e = table.map_list(Iova::new(0), list.iter().map(|&(a, l)| segment(base + a, l)), Access::RW).unwrap_err();
        let at = NamedAddr::of(PhysAddr::new((base + at) * K));
        assert_eq!(e, Error::Misaligned { at, len: len * K, granule: PageSize::SIZE_16K }, "{list:?}");
        assert_eq!((table.mapped_bytes(), table.tables().in_use()), (0, 1));
    }
}

/// Lists of blocks that do not continue each other, with other segments among them, a block in the way, an empty table
/// in the way, and one that cannot be mapped.
#[test]
fn lists_of_single_blocks() {
    const BLOCK: u64 = 2 << 20;
    fn blocks<F: Format>() {
        // The list in order of the segments, in pages: a block, blocks that continue each other, a page, pages that
        // make up a block, and blocks that are aligned to pages only.
        let extents: [(u64, u64); 10] = [
            (0, 512),
            (4096, 512),
            (8192, 1536),
            (2048, 512),
            (1 << 20, 512),
            (513, 512),
            (6144, 1),
            (6146, 511),
            (5120, 512),
            (7168, 512),
        ];
        let list = extents.map(|(at, len)| Segment { addr: PhysAddr::new(at << 12), len: len << 12 });
        let start = Iova::new(1 << 30);
        let len: u64 = list.iter().map(|s| s.len).sum();
        let check = |table: &Table<F, HeapTables<PhysAddr>>| {
            let mut at = start.bits();
            for s in list {
                for offset in (0..s.len).step_by(4096) {
                    let found = table.translate(Iova::new(at + offset));
                    assert_eq!(found, s.addr.checked_add(offset), "{at:#x} + {offset:#x}");
                }
                at += s.len;
            }
            assert_eq!(table.mapped_bytes(), len);
        };
        let new = || Table::<F, _>::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
        let mut table = new();
        assert_eq!(table.map_list(start, list, Access::RW), Ok(len));
        check(&table);
        let large = table.leaf_counts().find(|(size, _)| size.bytes() == BLOCK).unwrap().1;
        assert_eq!(large, 9, "all but the one that is aligned to pages only, and the pages");
        let all = Span::new(start, len).unwrap();

        // An empty table in the way of the fourth: pages instead.
        let flush = table.unmap(all).unwrap();
        table.free_tables(flush);
        let there = start + 5 * BLOCK;
        table.map(there, PhysAddr::new(0), 4096, Access::RW).unwrap();
        let flush = table.clear(Span::new(there, 4096).unwrap()).unwrap();
        assert_eq!(flush.tables().len(), 0);
        assert_eq!(table.map_list(start, list, Access::RW), Ok(len));
        check(&table);

        // A block in the way of the fourth, and a segment that cannot be mapped behind the second.
        let mut table = new();
        table.map(there, PhysAddr::new(0), BLOCK, Access::RW).unwrap();
        let e = table.map_list(start, list, Access::RW).unwrap_err();
        assert_eq!(e, Error::Overlap { at: NamedAddr::of(there) });
        let bad = Segment { addr: PhysAddr::new(1 << 63), len: BLOCK };
        let e = table.map_list(start, [list[0], list[1], bad, list[3]], Access::RW).unwrap_err();
        assert_eq!(e, Error::OutputRange { at: NamedAddr::of(bad.addr), len: BLOCK, bits: F::OUTPUT_BITS });
        assert_eq!(table.mapped_bytes(), BLOCK);
    }
    blocks::<X86_64_4Level>();
    blocks::<Arm64S1_4k>();
    blocks::<Arm64S1<12, 48, true>>();
}

/// A device marks every entry that it walks through, those of tables too.
fn marks_in_table_entries<F: Format>(mark: u64) {
    let (at, to) = (Iova::new(0x12_3456_7000), PhysAddr::new(0x9_8000));
    let mut table = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    table.map(at, to, 4096, Access::RW).unwrap();
    let mut next = table.root();
    for level in 0..F::LEVELS - 1 {
        let shift = 12 + 9 * (F::LEVELS - 1 - level);
        let index = (at.bits() >> shift) as usize & 511;
        let entry = table.tables().load(next, index);
        let Entry::Table(below) = F::decode(level, entry) else { panic!("{entry:#x}") };
        assert_eq!(F::decode(level, entry | mark), Entry::Table(below));
        table.tables_mut().store(next, index, entry | mark);
        next = PhysAddr::new(below);
    }
    assert_eq!(table.translate(at), Some(to));
    let beside = at + 0x20_000; // where entries would be that are off by the mark
    assert_eq!(table.translate(beside), None);
    table.map(beside, to, 4096, Access::RW).unwrap();
    assert_eq!((table.translate(beside), table.linked_tables()), (Some(to), F::LEVELS as usize - 1));
    for page in [at, beside] {
        let flush = table.unmap(span(page.bits(), 4096)).unwrap();
        assert_eq!((flush.bytes(), table.translate(page)), (4096, None));
        table.free_tables(flush);
    }
    assert_eq!(table.tables().in_use(), 1);
}

#[test]
fn marked_tables() {
    marks_in_table_entries::<VtdSecond48>(1 << 8);
    marks_in_table_entries::<AmdV1<4, false>>(1 << 5);
}

/// A stand-in makes the leaves of the format that it stands for, those that only larger formats have not among them.
#[test]
fn a_stand_in_has_the_leaves_of_its_format() {
    fn map_again<F: Format>(table: &mut Table<F, HeapTables<PhysAddr>>, cut: Span<Iova>, at: Iova, to: PhysAddr) {
        let list = table.unmap(cut).unwrap();
        table.free_tables(list);
        table.map(at, to, F::GRANULE.bytes(), Access::RW).unwrap();
    }
    fn agree<F: Format, S: Format>(format: FormatId) {
        // Larger leaves would fit, had the format any.
        let whole = 1u64 << F::INPUT_BITS.min(F::OUTPUT_BITS).min(F::PAGE_SIZES.bits().ilog2() + 12);
        let granule = F::GRANULE.bytes();
        let tables = || HeapTables::with_limit(PhysAddr::new(0), 4096);
        let mut typed = PageTable::<F, Iova, PhysAddr, _>::new(tables()).unwrap();
        let mut other = PageTable::<S, Iova, PhysAddr, _>::standing_for(format, tables()).unwrap();
        let at = |bits: u64| (Iova::new(bits), PhysAddr::new(bits));
        for (bits, len) in [(0, whole / 4), (whole / 4 + granule, whole / 4 - granule), (whole / 2, 76 * granule)] {
            let ((from, to), all) = (at(bits), Access::RW);
            assert_eq!(typed.map(from, to, len, all), other.map(from, to, len, all), "{format}");
            assert!(typed.leaf_counts().eq(other.leaf_counts()), "{format}");
            // Of what was mapped, two pages are cut out, and one comes back.
            let cut = Span::new(Iova::new(bits + len / 2 / granule * granule), 2 * granule).unwrap();
            let (from, to) = at(cut.first().bits());
            map_again(&mut typed, cut, from, to);
            map_again(&mut other, cut, from, to);
            let span = Span::new(Iova::new(0), whole).unwrap();
            assert!(typed.runs(span).eq(other.runs(span)), "{format}");
            assert_eq!(typed.linked_tables(), other.linked_tables(), "{format}");
        }
    }
    agree::<X86_64<4>, StandIn<12, false>>(FormatId::x86_64_4level);
    agree::<RiscvSv<4>, StandIn<12, false>>(FormatId::riscv_sv48);
    agree::<RiscvSv<5, true>, StandIn<12, true>>(FormatId::riscv_sv57_napot);
    agree::<AmdV1<3, true>, StandIn<12, true>>(FormatId::amd_v1_3level_groups);
    agree::<Arm64S1<14, 48, true>, StandIn<14, true>>(FormatId::arm64_s1_16k_contiguous);
    agree::<Arm64S1<16>, StandIn<16, false>>(FormatId::arm64_s1_64k);
}
