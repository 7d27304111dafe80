//! Page tables of every format against a list of extents: map, unmap, lookup, runs, and the walk that a device does.

use std::collections::BTreeMap;

use dmalane_addr::{Access, Address, Iova, PageSize, PhysAddr, Segment, Span};
use dmalane_iopt::{Arm64S1_4k, Error, FaultKind, Format, HeapTables, PageTable, X86_64_4Level, walk};
use arbitrary::Arbitrary;

use crate::structured;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Map { at: Place, to: u32, pieces: [Option<Piece>; 3], access: u8 },
    Unmap { at: Place, len: Length },
    Lookup { at: Place, offset: u16 },
    Runs { at: Place, len: Length },
}

/// A page in one of four windows of 4 GiB; small numbers of a large unit come up as often as those of a small one.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Place {
    window: u8,
    unit: u8,
    count: u16,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Length {
    unit: u8,
    count: u8,
}

/// One segment: it continues the one before where `gap` is 0.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Piece {
    gap: u8,
    len: Length,
}

#[derive(Arbitrary, Debug)]
struct Input {
    /// Table memory runs out at this many tables.
    limit: u8,
    ops: Vec<Op>,
}

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    let Some(input) = structured::<Input>(bytes) else { return };
    run::<Arm64S1_4k>(&input);
    run::<X86_64_4Level>(&input);
}

const PAGE: u64 = 4096;
/// Pages in a leaf of each size.
const UNITS: [u64; 3] = [1, 512, 512 * 512];
const ACCESS: [Access; 4] =
    [Access::READ, Access::RW, Access::READ.union(Access::EXEC), Access::RW.union(Access::EXEC)];

impl Place {
    fn page<F: Format>(self) -> u64 {
        let window_pages = 1 << 20;
        let last_window = (1 << (F::INPUT_BITS - 12)) - window_pages;
        let base = [0, window_pages, 1 << 30, last_window][self.window as usize % 4];
        let unit = UNITS[self.unit as usize % 3];
        base + (u64::from(self.count) * unit) % window_pages
    }
}

impl Length {
    fn pages(self) -> u64 {
        u64::from(self.count % 8) * UNITS[self.unit as usize % 3]
    }
}

/// A run of pages that continue each other on both sides.
#[derive(Clone, Copy, Debug)]
struct Extent {
    pages: u64,
    to: u64,
    access: Access,
}

/// The obvious version: extents by first page.
#[derive(Default)]
struct Model(BTreeMap<u64, Extent>);

impl Model {
    /// Makes `page` the start of an extent where it is in the middle of one.
    fn cut(&mut self, page: u64) {
        let Some((&first, &whole)) = self.0.range(..page).next_back() else { return };
        let head = page - first;
        if head < whole.pages {
            self.0.insert(first, Extent { pages: head, ..whole });
            self.0.insert(page, Extent { pages: whole.pages - head, to: whole.to + head, ..whole });
        }
    }

    fn within(&mut self, first: u64, pages: u64) -> Vec<(u64, Extent)> {
        self.cut(first);
        self.cut(first + pages);
        self.0.range(first..first + pages).map(|(&f, &e)| (f, e)).collect()
    }

    fn remove(&mut self, first: u64, pages: u64) -> u64 {
        let gone = self.within(first, pages);
        gone.iter().for_each(|(first, _)| assert!(self.0.remove(first).is_some()));
        gone.iter().map(|(_, e)| e.pages).sum()
    }

    fn get(&self, page: u64) -> Option<(u64, Access)> {
        let (&first, e) = self.0.range(..=page).next_back()?;
        (page - first < e.pages).then(|| (e.to + page - first, e.access))
    }

    fn pages(&self) -> u64 {
        self.0.values().map(|e| e.pages).sum()
    }
}

fn run<F: Format>(input: &Input) {
    let limit = 1 + input.limit as usize;
    let Ok(mut table) = PageTable::<F, Iova, PhysAddr, _>::new(HeapTables::with_limit(PhysAddr::new(1 << 40), limit))
    else {
        return;
    };
    let mut model = Model::default();
    for op in input.ops.iter().take(64) {
        match *op {
            Op::Map { at, to, pieces, access } => map::<F>(&mut table, &mut model, at.page::<F>(), to, pieces, access),
            Op::Unmap { at, len } => unmap::<F>(&mut table, &mut model, at.page::<F>(), len.pages()),
            Op::Lookup { at, offset } => lookup::<F>(&table, &model, at.page::<F>(), offset),
            Op::Runs { at, len } => runs::<F>(&table, &mut model, at.page::<F>(), len.pages()),
        }
        assert_eq!(table.mapped_bytes(), model.pages() * PAGE);
    }
    // Table memory may be short for splitting a leaf, never for taking everything away.
    let whole = Span::new(Iova::new(0), 1 << F::INPUT_BITS).unwrap();
    let flush = table.unmap(whole).unwrap();
    assert_eq!(flush.bytes(), model.pages() * PAGE);
    table.free_tables(flush);
    assert_eq!(table.tables().in_use(), 1, "tables other than the root are left");
    assert_eq!(table.into_tables().in_use(), 0);
}

type Table<F> = PageTable<F, Iova, PhysAddr, HeapTables<PhysAddr>>;

fn map<F: Format>(table: &mut Table<F>, model: &mut Model, at: u64, to: u32, pieces: [Option<Piece>; 3], access: u8) {
    let access = ACCESS[access as usize % ACCESS.len()];
    let mut to = u64::from(to) % (1 << 24);
    let mut list: Vec<(u64, u64)> = Vec::new();
    for piece in pieces.into_iter().flatten() {
        to += u64::from(piece.gap);
        list.push((to, piece.len.pages()));
        to += piece.len.pages();
    }
    let pages: u64 = list.iter().map(|(_, n)| n).sum();
    // Empty segments are skipped.
    let taken = !model.within(at, pages).is_empty();
    let segments = || list.iter().map(|&(to, n)| Segment { addr: PhysAddr::new(to * PAGE), len: n * PAGE });

    let in_use = table.tables().in_use();
    let iova = Iova::new(at * PAGE);
    match table.map_sg(iova, segments(), access) {
        Ok(bytes) => {
            assert!(!taken && (at + pages) * PAGE <= 1 << F::INPUT_BITS);
            assert_eq!(bytes, pages * PAGE);
            let most = Span::new(iova, bytes).map_or(0, Table::<F>::max_tables_for);
            assert!(table.tables().in_use() - in_use <= most, "more tables than can be needed");
            let mut page = at;
            for (to, pages) in list.into_iter().filter(|(_, pages)| *pages > 0) {
                model.0.insert(page, Extent { pages, to, access });
                page += pages;
            }
        }
        Err(e) => {
            match e {
                Error::Overlap { at } => assert!(taken && model.get(at.bits / PAGE).is_some(), "{at} is free"),
                Error::InputRange { .. } => assert!((at + pages) * PAGE > 1 << F::INPUT_BITS),
                Error::NoTables { .. } => {}
                other => panic!("{other}"),
            }
            assert_eq!(table.tables().in_use(), in_use, "a refused map kept tables");
        }
    }
}

fn unmap<F: Format>(table: &mut Table<F>, model: &mut Model, at: u64, pages: u64) {
    let Some(span) = Span::new(Iova::new(at * PAGE), pages * PAGE) else { return };
    let mapped: u64 = model.within(at, pages).iter().map(|(_, e)| e.pages).sum();
    let in_use = table.tables().in_use();
    match table.unmap(span) {
        Ok(flush) => {
            assert_eq!(flush.bytes(), mapped * PAGE);
            assert!(flush.span().covers(&span) && (mapped > 0 || flush.is_empty()));
            let most = Table::<F>::max_tables_for(span);
            assert!(table.tables().in_use() <= in_use + most, "more tables than can be needed");
            table.free_tables(flush);
            assert_eq!(model.remove(at, pages), mapped);
        }
        Err(Error::NoTables { .. }) => assert_eq!(table.tables().in_use(), in_use, "a refused unmap kept tables"),
        Err(Error::InputRange { .. }) => assert!((at + pages) * PAGE > 1 << F::INPUT_BITS),
        Err(other) => panic!("{other}"),
    }
}

fn lookup<F: Format>(table: &Table<F>, model: &Model, page: u64, offset: u16) {
    let at = Iova::new(page * PAGE + u64::from(offset) % PAGE);
    let walked = walk::<F>(table.root().bits(), at.bits(), |entry| table.tables().read(entry));
    let Some(leaf) = table.lookup(at) else {
        assert_eq!(model.get(page), None);
        assert_eq!(walked.unwrap_err().kind, FaultKind::NotPresent);
        return;
    };
    let to = leaf.translate(at).unwrap();
    let walked = walked.unwrap();
    assert_eq!((walked.to, walked.size, walked.access), (to.bits(), leaf.size, leaf.access));
    assert_eq!(model.get(page), Some((to.bits() / PAGE, leaf.access)));
    assert!(leaf.at.is_aligned(leaf.size) && leaf.to.is_aligned(leaf.size) && F::PAGE_SIZES.contains(leaf.size));
    // The leaf claims its last page too.
    let pages = leaf.size.bytes() / PAGE;
    let last = leaf.at.bits() / PAGE + pages - 1;
    assert_eq!(model.get(last), Some((leaf.to.bits() / PAGE + pages - 1, leaf.access)));
}

fn runs<F: Format>(table: &Table<F>, model: &mut Model, at: u64, pages: u64) {
    let Some(span) = Span::new(Iova::new(at * PAGE), pages * PAGE) else { return };
    let expected = model.within(at, pages);
    let mut bytes = 0;
    let mut next = span.first();
    // Eight windows of 4 KiB leaves would be long; what matters shows in the first ones.
    for run in table.runs(span).take(4096) {
        assert!(run.at >= next && run.len > 0 && run.len <= run.size.bytes());
        for offset in [0, run.len - PageSize::SIZE_4K.bytes()] {
            let to = (run.to.bits() + offset) / PAGE;
            assert_eq!(model.get((run.at.bits() + offset) / PAGE), Some((to, run.access)));
        }
        bytes += run.len;
        next = run.at.checked_add(run.len).unwrap();
    }
    let mapped = expected.iter().map(|(_, e)| e.pages).sum::<u64>() * PAGE;
    assert!(bytes == mapped || table.runs(span).nth(4096).is_some() && bytes < mapped);
}
