//! One suite for every format: random calls against a slow, obvious model. A format joins with its line in
//! `src/formats/list.rs`; scripts/nightly takes each, scripts/check one of a kind where entries do not matter.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::formats::{Failing, Geometry, MapList, Sizes, all_accesses, geometry, leaf_levels, shift, sizes};
use dmalane_addr::{Access, Address, Iova, PageSize, PhysAddr, Segment, Span};
use dmalane_iopt::{
    Armv7, Entry, Error, FaultKind, Foreign, Format, FormatId, HeapTables, NamedAddr, PageTable, TableImage, TablePool,
    TableShape, Tables, walk, walk_privileged,
};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

type Table<F, T> = PageTable<F, Iova, PhysAddr, T>;

#[derive(Clone, Debug)]
enum Op {
    Map { at: u64, segments: Vec<(u64, u64)>, access: Access },
    Unmap { at: u64, len: u64 },
    Clear { at: u64, len: u64 },
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct ModelLeaf {
    out: u64,
    size: u64,
    access: Access,
}

/// Leaves by address, and which tables are linked.
#[derive(Clone, Default)]
struct Model {
    leaves: BTreeMap<u64, ModelLeaf>,
    /// All but the root: the bytes that the table translates, and the multiple of them where it starts.
    linked: BTreeSet<(u64, u64)>,
}

impl Model {
    fn holding(&self, at: u64) -> Option<(u64, ModelLeaf)> {
        self.leaves.range(..=at).next_back().map(|(&a, &l)| (a, l)).filter(|(a, l)| at < a + l.size)
    }

    fn first_taken(&self, range: Range<u64>) -> Option<u64> {
        if range.is_empty() {
            return None; // a request that starts beyond the input range
        }
        let inside = self.leaves.range(range.clone()).next().map(|(&a, _)| a);
        if self.holding(range.start).is_some() { Some(range.start) } else { inside }
    }

    /// The tables that translate some of the range and nothing else.
    fn linked_within(&self, range: &Range<u64>) -> Vec<(u64, u64)> {
        let within = |&&(covers, n): &&(u64, u64)| n * covers >= range.start && (n + 1) * covers <= range.end;
        self.linked.iter().filter(within).copied().collect()
    }

    /// True for a table below which there is nothing.
    fn is_empty(&self, (covers, n): (u64, u64)) -> bool {
        let range = n * covers..(n + 1) * covers;
        self.leaves.range(range.clone()).next().is_none() && self.linked_within(&range) == [(covers, n)]
    }

    /// Adds the tables that the leaves need.
    fn link<F: Format>(&mut self) {
        for (at, leaf) in &self.leaves {
            for level in 1..F::LEVELS {
                let covers = 1 << shift::<F>(level - 1); // bytes that a table of this level translates
                if covers > leaf.size {
                    self.linked.insert((covers, at / covers));
                }
            }
        }
    }

    /// Joins segments that continue each other, then takes the largest page that fits, over and over. A table, empty or
    /// not, that translates a part of a page or all of it takes its place.
    fn map<F: Format>(&mut self, mut at: u64, segments: &[(u64, u64)], access: Access) {
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for &(out, len) in segments {
            match joined.last_mut() {
                Some(last) if last.0 + last.1 == out => last.1 += len,
                _ => joined.push((out, len)),
            }
        }
        for (mut out, mut len) in joined {
            while len > 0 {
                let fits = |s: &u64| {
                    let free = || self.linked_within(&(at..at + s)).is_empty();
                    at.is_multiple_of(*s) && out.is_multiple_of(*s) && len >= *s && free()
                };
                let size = F::PAGE_SIZES.iter().rev().map(|p| p.bytes()).find(fits).unwrap();
                self.leaves.insert(at, ModelLeaf { out, size, access });
                (at, out, len) = (at + size, out + size, len - size);
            }
        }
        self.link::<F>();
    }

    /// Splits what is in the way one size at a time. Gives bytes removed and the span to flush. Tables within the span
    /// go, and those that become empty unless they are to `stay`.
    fn unmap<F: Format>(&mut self, at: u64, len: u64, stay: bool) -> (u64, Range<u64>) {
        let sizes: Vec<u64> = F::PAGE_SIZES.iter().map(|p| p.bytes()).collect();
        let mut flush = at..at + len;
        for cut in [at, at + len] {
            while let Some((first, leaf)) = self.holding(cut).filter(|(first, _)| *first != cut) {
                flush = flush.start.min(first)..flush.end.max(first + leaf.size);
                let size = sizes[sizes.iter().position(|&s| s == leaf.size).unwrap() - 1];
                for part in (0..leaf.size).step_by(size as usize) {
                    self.leaves.insert(first + part, ModelLeaf { out: leaf.out + part, size, access: leaf.access });
                }
            }
        }
        self.link::<F>();
        let gone: Vec<u64> = self.leaves.range(at..at + len).map(|(&a, _)| a).collect();
        let bytes = gone.iter().map(|a| self.leaves.remove(a).unwrap().size).sum();
        let covered = self.linked_within(&(at..at + len));
        self.linked.retain(|table| !covered.contains(table));
        // Tables that lost a leaf or a table, from the lowest level up.
        let mut lost: BTreeSet<u64> = gone.into_iter().chain(covered.iter().map(|(covers, n)| covers * n)).collect();
        for table in self.linked.clone().into_iter().filter(|_| !stay) {
            let range = table.0 * table.1..table.0 * (table.1 + 1);
            if lost.range(range).next().is_some() && self.is_empty(table) {
                self.linked.remove(&table);
                lost.insert(table.0 * table.1);
            }
        }
        (bytes, flush)
    }

    /// Tables in use, the root included.
    fn tables(&self) -> usize {
        self.linked.len() + 1
    }

    fn runs(&self, range: Range<u64>) -> Vec<(u64, u64, u64, u64, Access)> {
        let from = self.holding(range.start).map_or(range.start, |(a, _)| a);
        self.leaves
            .range(from..range.end)
            .map(|(&a, l)| {
                let (start, end) = (a.max(range.start), (a + l.size).min(range.end));
                (start, l.out + (start - a), end - start, l.size, l.access)
            })
            .collect()
    }
}

fn span(at: u64, len: u64) -> Span<Iova> {
    Span::new(Iova::new(at), len).unwrap()
}

fn whole<F: Format>() -> Span<Iova> {
    span(0, 1 << F::INPUT_BITS)
}

fn list(segments: &[(u64, u64)]) -> impl Iterator<Item = Segment<PhysAddr>> + Clone {
    segments.iter().map(|&(out, len)| Segment { addr: PhysAddr::new(out), len })
}

fn runs<F: Format, T: Tables>(table: &Table<F, T>, within: Span<Iova>) -> Vec<(u64, u64, u64, u64, Access)> {
    table.runs(within).map(|r| (r.at.bits(), r.to.bits(), r.len, r.size.bytes(), r.access)).collect()
}

/// Everything that can be seen of the table agrees with the model.
fn agree<F: Format>(table: &Table<F, Failing>, model: &Model) -> Result<(), TestCaseError> {
    let all = whole::<F>();
    prop_assert!(runs(table, all) == model.runs(0..1 << F::INPUT_BITS), "leaves differ");
    for (size, count) in table.leaf_counts() {
        let expected = model.leaves.values().filter(|l| l.size == size.bytes()).count();
        prop_assert_eq!(count, expected as u64, "count of {} leaves", size);
    }
    prop_assert_eq!(table.mapped_bytes(), model.leaves.values().map(|l| l.size).sum::<u64>());
    prop_assert_eq!(table.tables().heap.in_use(), model.tables(), "tables in use");
    Ok(())
}

/// Lookup, the device's walk and the model say the same of one address.
fn translate<F: Format>(table: &Table<F, Failing>, model: &Model, at: u64) -> Result<(), TestCaseError> {
    let found = table.lookup(Iova::new(at));
    let expected = model.holding(at);
    prop_assert_eq!(
        found.map(|l| (l.at.bits(), l.to.bits(), l.size.bytes(), l.access)),
        expected.map(|(a, l)| (a, l.out, l.size, l.access))
    );
    prop_assert_eq!(table.translate(Iova::new(at)), found.and_then(|leaf| leaf.translate(Iova::new(at))));
    let walked = walk_privileged::<F>(table.root().bits(), at, |entry| table.tables().heap.read(entry));
    match (found, walked) {
        (Some(leaf), Ok(w)) => {
            prop_assert_eq!(leaf.translate(Iova::new(at)), Some(PhysAddr::new(w.to)));
            prop_assert_eq!((leaf.size, leaf.access), (w.size, w.access));
        }
        (None, Err(fault)) => prop_assert_eq!(fault.kind, FaultKind::NotPresent),
        (found, walked) => prop_assert!(false, "lookup {found:?}, walk {walked:?}"),
    }
    Ok(())
}

/// Runs one call with its allocations failing one after another until it gets through. After each failure nothing has
/// changed. Gives the result and the number of tables it took.
fn insist<F: Format, R>(
    table: &mut Table<F, Failing>,
    model: &Model,
    mut call: impl FnMut(&mut Table<F, Failing>) -> Result<R, Error>,
) -> Result<(Result<R, Error>, usize), TestCaseError> {
    for n in 0.. {
        let tables = table.tables_mut();
        tables.calls = 0;
        tables.fail_at = Some(n);
        let result = call(table);
        let calls = table.tables().calls;
        if !matches!(result, Err(Error::NoTables { .. })) {
            prop_assert!(calls <= n, "an allocation failed and the call went on");
            return Ok((result, calls));
        }
        prop_assert_eq!(calls, n + 1);
        agree(table, model)?;
    }
    unreachable!("some call succeeds")
}

fn apply<F: Format>(table: &mut Table<F, Failing>, model: &mut Model, op: &Op) -> Result<(), TestCaseError> {
    match op {
        Op::Map { at, segments, access } => {
            let len: u64 = segments.iter().map(|s| s.1).sum();
            let (result, tables) = insist(table, model, |t| match segments[..] {
                [(out, len)] => t.map(Iova::new(*at), PhysAddr::new(out), len, *access).map(|()| len),
                // Here by its own name, with an iterator that makes segments as they are asked for.
                _ => t.map_sg(Iova::new(*at), list(segments), *access),
            })?;
            let limit = 1 << F::INPUT_BITS;
            let taken = model.first_taken(*at..(at + len).min(limit));
            match result {
                Ok(bytes) => {
                    prop_assert!(taken.is_none() && at + len <= limit);
                    prop_assert_eq!(bytes, len);
                    prop_assert!(tables <= Table::<F, Failing>::max_tables_for(span(*at, len)));
                    model.map::<F>(*at, segments, *access);
                }
                Err(Error::Overlap { at: place }) => {
                    prop_assert_eq!(Some(place), taken.map(|t| NamedAddr::of(Iova::new(t))));
                }
                Err(Error::InputRange { .. }) => {
                    prop_assert!(at + len > limit);
                }
                Err(e) => prop_assert!(false, "{e}"),
            }
        }
        Op::Unmap { at, len } | Op::Clear { at, len } => {
            let stay = matches!(op, Op::Clear { .. });
            let before = runs(table, span(*at, *len));
            let (result, tables) = insist(table, model, |t| match stay {
                true => t.clear(span(*at, *len)),
                false => t.unmap(span(*at, *len)),
            })?;
            if at + len > 1 << F::INPUT_BITS {
                prop_assert!(matches!(result, Err(Error::InputRange { .. })), "{result:?}");
                return Ok(());
            }
            let flush = result.unwrap();
            let (bytes, flushed) = model.unmap::<F>(*at, *len, stay);
            prop_assert_eq!(flush.bytes(), bytes);
            prop_assert_eq!(bytes, before.iter().map(|r| r.2).sum::<u64>());
            prop_assert_eq!(flush.span(), span(flushed.start, flushed.end - flushed.start));
            prop_assert_eq!(flush.is_empty(), bytes == 0 && flush.tables().is_empty());
            prop_assert!(tables <= Table::<F, Failing>::max_tables_for(span(*at, *len)));
            prop_assert_eq!(table.tables().heap.in_use(), model.tables() + flush.tables().len());
            table.free_tables(flush);
        }
    }
    agree(table, model)
}

/// Addresses where things meet: around the ends of the space and of tables of every level.
fn input(g: &Geometry) -> BoxedStrategy<u64> {
    let Sizes { page, block, top, .. } = g.sizes;
    let boundary = |shift: &u32| (1u64 << shift).saturating_sub(2 * block);
    let bases: Vec<u64> = g.shifts.iter().map(boundary).chain([0, 0, top - 3 * block]).collect();
    (prop::sample::select(bases), 0u64..4, edge(g))
        .prop_map(move |(base, blocks, pages)| base + blocks * block + pages * page)
        .boxed()
}

/// Pages near the start or end of a table.
fn edge(g: &Geometry) -> BoxedStrategy<u64> {
    let entries = g.sizes.entries;
    prop_oneof![3 => Just(0), 2 => 0u64..5, 2 => entries - 4..entries].boxed()
}

fn length(g: &Geometry) -> BoxedStrategy<u64> {
    let Sizes { page, entries: n, .. } = g.sizes;
    prop_oneof![4 => 1u64..6, 2 => n - 4..n + 4, 2 => Just(n), 1 => Just(2 * n), 1 => 2 * n - 4..2 * n + 6]
        .prop_map(move |p| p * page)
        .boxed()
}

fn access(g: &Geometry) -> BoxedStrategy<Access> {
    prop::sample::select(g.accesses.clone()).boxed()
}

fn op(g: &Geometry) -> BoxedStrategy<Op> {
    let Sizes { page, entries, block, large, .. } = g.sizes;
    let segment = (0u64..8, edge(g), length(g)).prop_map(move |(b, p, len)| (b * block + p * page, len));
    let pages = (0u64..64).prop_map(move |frame| (frame * page, page));
    let short = (0u64..1 << 12, prop_oneof![3 => Just(1), 2 => 2u64..9, 1 => 9u64..20])
        .prop_map(move |(frame, pages)| (frame * page, pages * page));
    // Consecutive halves, so that merging decides about the leaf.
    let halves = (0u64..8, 1..entries - 1).prop_map(move |(b, cut)| {
        let out = b * block;
        vec![(out, cut * page), (out + cut * page, block - cut * page)]
    });
    let segments = prop_oneof![
        2 => prop::collection::vec(segment, 1..5),
        2 => prop::collection::vec(pages, 1..600),
        2 => prop::collection::vec(short, 1..100),
        1 => halves,
    ];
    prop_oneof![
        4 => (input(g), segments, access(g))
            .prop_map(|(at, segments, access)| Op::Map { at, segments, access }),
        // Output congruent to input in a block: large leaves wherever the length allows.
        3 => (input(g), 0u64..4, length(g), access(g))
            .prop_map(move |(at, b, len, access)| {
                Op::Map { at, segments: vec![(at % block + b * block, len)], access }
            }),
        // A leaf of the largest size with something on either side.
        1 => (1u64..3, 0u64..3, 0u64..3, access(g)).prop_map(move |(n, below, above, access)| {
            let (below, above) = (below * page, above * block);
            Op::Map { at: n * large - below, segments: vec![(4 * large - below, large + below + above)], access }
        }),
        4 => (input(g), length(g)).prop_map(|(at, len)| Op::Unmap { at, len }),
        1 => (input(g), 1u64..600).prop_map(move |(at, blocks)| Op::Unmap { at, len: blocks * block }),
        3 => (input(g), length(g)).prop_map(|(at, len)| Op::Clear { at, len }),
        1 => (input(g), 1u64..600).prop_map(move |(at, blocks)| Op::Clear { at, len: blocks * block - page }),
    ]
    .boxed()
}

/// Calls, and addresses to look at after them.
fn calls(g: &Geometry) -> BoxedStrategy<(Vec<Op>, Vec<u64>)> {
    let block = g.sizes.block;
    let probes = prop::collection::vec(input(g).prop_flat_map(move |at| at..at + block), 3);
    (prop::collection::vec(op(g), 1..24), probes).boxed()
}

/// Seeds of memory, bits that its entries often have, roots, and addresses, half of them below `top`.
fn noise(top: u64) -> BoxedStrategy<(u64, u64, u64, u64)> {
    let likely = prop_oneof![Just(0), Just(1), Just(3), Just(0x405), Just(0x447), Just(0x51)];
    (any::<u64>(), likely, any::<u64>(), prop_oneof![0u64..top, any::<u64>()]).boxed()
}

fn random_calls<F: Format>(ops: &[Op], probes: &[u64]) -> Result<(), TestCaseError> {
    let mut table = Table::<F, Failing>::new(Failing::new()).unwrap();
    let mut model = Model::default();
    let Sizes { page, block, top, .. } = sizes::<F>();
    for op in ops {
        apply(&mut table, &mut model, op)?;
        let at = match op {
            Op::Map { at, .. } | Op::Unmap { at, .. } | Op::Clear { at, .. } => *at,
        };
        for at in probes.iter().copied().chain([at, at.saturating_sub(1), at + page]) {
            if at >> F::INPUT_BITS == 0 {
                translate(&table, &model, at)?;
                let clipped = at..(at + block + block / 2 + 5).min(top);
                prop_assert_eq!(runs(&table, span(clipped.start, clipped.end - clipped.start)), model.runs(clipped));
            }
        }
    }
    let flush = table.unmap(whole::<F>()).unwrap();
    prop_assert_eq!(flush.bytes(), model.leaves.values().map(|l| l.size).sum::<u64>());
    table.free_tables(flush);
    agree(&table, &Model::default())?;
    prop_assert_eq!(table.into_tables().heap.in_use(), 0);
    Ok(())
}

/// The same calls on plain heap tables (with their own `edit`) give the same table.
fn heap_tables_agree<F: Format>(ops: &[Op]) -> Result<(), TestCaseError> {
    let mut slow = Table::<F, Failing>::new(Failing::new()).unwrap();
    let mut fast = Table::<F, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    for op in ops {
        match op {
            Op::Map { at, segments, access } => {
                let a = slow.map_list(Iova::new(*at), list(segments), *access);
                prop_assert_eq!(a, fast.map_list(Iova::new(*at), list(segments), *access));
            }
            Op::Clear { at, len } => match (slow.clear(span(*at, *len)), fast.clear(span(*at, *len))) {
                (Ok(a), Ok(b)) => {
                    prop_assert_eq!((a.bytes(), a.span()), (b.bytes(), b.span()));
                    slow.free_tables(a);
                    fast.free_tables(b);
                }
                (a, b) => prop_assert_eq!(a.err(), b.err()),
            },
            Op::Unmap { at, len } => match (slow.unmap(span(*at, *len)), fast.unmap(span(*at, *len))) {
                (Ok(a), Ok(b)) => {
                    prop_assert_eq!((a.bytes(), a.span()), (b.bytes(), b.span()));
                    slow.free_tables(a);
                    fast.free_tables(b);
                }
                (a, b) => prop_assert_eq!(a.err(), b.err()),
            },
        }
        prop_assert_eq!(runs(&slow, whole::<F>()), runs(&fast, whole::<F>()));
        prop_assert_eq!(slow.tables().heap.in_use(), fast.tables().in_use());
    }
    Ok(())
}

/// A table image has the bytes, the leaves and the registers of a page table in a pool, or its error.
fn table_images_agree<F: Format>(format: FormatId, ops: &[Op], pages: u64, base: u64) -> Result<(), TestCaseError> {
    let (shape, base) = (TableShape::of::<F>(), PhysAddr::new(base));
    let words: Vec<_> = (0..pages * shape.table.bytes() / 8).map(|_| AtomicU64::new(!0)).collect();
    let mut pool = TablePool::new::<F>(base, &words);
    let image = TableImage::new(format, base, words.len() as u64 * 8);
    let (mut table, mut image) = match (Table::<F, _>::new(&mut pool), image) {
        (Ok(table), Ok(image)) => (table, image),
        (table, image) => {
            prop_assert_eq!(table.err(), image.err());
            return Ok(());
        }
    };
    for op in ops {
        let Op::Map { at, segments, access } = op else { continue };
        let mut at = *at;
        for (to, len) in segments {
            let (iova, out) = (Iova::new(at), PhysAddr::new(*to));
            let mapped = table.map(iova, out, *len, *access);
            prop_assert_eq!(&image.map(iova, out, *len, *access), &mapped);
            if mapped.is_err() {
                return Ok(());
            }
            at += len;
        }
        let (slots, roots) = (table.tables().in_use(), (shape.root.bytes() / shape.table.bytes()) as usize);
        let used = &words[..slots * shape.table.bytes() as usize / 8];
        let bytes: Vec<_> = used.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        prop_assert!(image.bytes() == bytes, "the bytes differ");
        prop_assert_eq!(image.tables(), slots - roots + 1);
        prop_assert_eq!(image.leaf_counts().collect::<Vec<_>>(), table.leaf_counts().collect::<Vec<_>>());
        prop_assert!(image.registers().eq(table.registers()));
    }
    Ok(())
}

/// Calls, tables that there is room for, and where they are: a good address four times in five.
fn images(g: &Geometry, shape: TableShape) -> BoxedStrategy<(Vec<Op>, u64, u64)> {
    let (root, last) = (shape.root.bytes(), shape.last);
    let base = prop_oneof![4 => Just(root), 4 => Just(0), 1 => Just(last + 1 - root), 1 => Just(root / 2)];
    let base = prop_oneof![9 => base, 1 => Just(last + 1)];
    // Single calls that fit mostly, and those that bring errors.
    let ops = prop_oneof![3 => prop::collection::vec(op(g), 1..5), 1 => prop::collection::vec(op(g), 1..24)];
    (ops, prop_oneof![4 => Just(64u64), 1 => 0u64..32], base).boxed()
}

/// A bad call, its error, and an unchanged table.
fn refusals<F: Format>() {
    let Sizes { page, block, top, out_top, .. } = sizes::<F>();
    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    let mut model = Model::default();
    table.map(Iova::new(4 * block), PhysAddr::new(0), block, Access::READ).unwrap();
    model.map::<F>(4 * block, &[(0, block)], Access::READ);
    type Check = fn(&Error) -> bool;
    let misaligned: Check = |e| matches!(e, Error::Misaligned { .. });
    let input: Check = |e| matches!(e, Error::InputRange { .. });
    let output: Check = |e| matches!(e, Error::OutputRange { .. });
    let overlap: Check = |e| matches!(e, Error::Overlap { at } if at.bits == 4 * sizes::<F>().block);
    let high = !(page - 1);
    // Each list starts with a good segment, so that there is something to undo.
    let cases: &[(u64, (u64, u64), Check)] = &[
        (1, (0, page), misaligned),
        (page - 1, (0, page), misaligned),
        (0, (1, page), misaligned),
        (0, (0, page + 1), misaligned),
        (0, (0, u64::MAX), misaligned),
        (top - page, (0, page), input),
        (top, (0, page), input),
        (top + page, (0, page), input),
        (high, (0, page), input),
        (0, (page, out_top - page), if F::OUTPUT_BITS > F::INPUT_BITS { input } else { overlap }),
        (0, (out_top - page, 2 * page), output),
        (0, (out_top, page), output),
        (0, (high, page), output),
        (0, (page, high), output),
        (4 * block - page, (0, page), overlap),
        (4 * block - 2 * page, (7 * page, 600 * page), overlap),
    ];
    for &(at, bad, expected) in cases {
        let list = [(16 * page, page), bad];
        let e = table.map_list(Iova::new(at), self::list(&list), Access::READ).unwrap_err();
        assert!(expected(&e), "{at:#x} {bad:x?}: {e}");
        agree(&table, &model).unwrap();
    }
    for access in all_accesses().filter(|a| !F::supports(*a)) {
        let e = table.map(Iova::new(0), PhysAddr::new(0), page, access).unwrap_err();
        assert_eq!(e, Error::Unsupported { access, format: F::NAME });
    }
    for (at, len) in [(1, page), (0, 1), (0, page - 1)] {
        assert!(misaligned(&table.unmap(span(at, len)).unwrap_err()));
    }
    for (at, len) in [(top, page), (top - page, 2 * page), (0, top + page), (high, page)] {
        assert!(input(&table.unmap(span(at, len)).unwrap_err()));
    }
    assert_eq!(table.map_list(Iova::new(0), [], Access::READ), Ok(0));
    assert_eq!(table.map_list(Iova::new(top), [], Access::READ), Ok(0));
    for at in [top, u64::MAX] {
        assert_eq!((table.lookup(Iova::new(at)), table.translate(Iova::new(at))), (None, None));
        assert_eq!(table.runs(span(at, 1)).count(), 0);
        if F::WALK_BITS > F::INPUT_BITS {
            continue;
        }
        let fault = walk::<F>(table.root().bits(), at, |_| panic!("nothing to fetch")).unwrap_err();
        assert_eq!((fault.level, fault.kind), (0, FaultKind::OutOfRange));
    }
    let leaves = block / F::PAGE_SIZES.largest_within(block, block).unwrap().bytes();
    assert_eq!(table.runs(Span::inclusive(Iova::new(1), Iova::new(u64::MAX)).unwrap()).count() as u64, leaves);
    agree(&table, &model).unwrap();
}

/// The first and last page of the space, the last page of the output space.
fn edges<F: Format>() {
    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    let Sizes { page, top, out_top, .. } = sizes::<F>();
    table.map(Iova::new(top - page), PhysAddr::new(out_top - page), page, Access::READ).unwrap();
    table.map(Iova::new(0), PhysAddr::new(0), page, Access::READ).unwrap();
    let last = table.lookup(Iova::new(top - 1)).unwrap();
    assert_eq!(last.translate(Iova::new(top - 1)), Some(PhysAddr::new(out_top - 1)));
    assert_eq!(last.translate(Iova::new(top)), None);
    assert_eq!(last.translate(Iova::new(top - page - 1)), None);
    assert_eq!(table.runs(whole::<F>()).count(), 2);
    let flush = table.unmap(whole::<F>()).unwrap();
    assert_eq!((flush.bytes(), flush.tables().len() as u32), (2 * page, 2 * (F::LEVELS - 1)));
    table.free_tables(flush);
    agree(&table, &Model::default()).unwrap();
    // As much as there is, or a quarter of a million, in the largest pages.
    let largest = F::PAGE_SIZES.iter().next_back().unwrap();
    let len = top.min(out_top).min(largest.bytes().saturating_mul(1 << 18));
    table.map(Iova::new(0), PhysAddr::new(0), len, Access::READ).unwrap();
    assert_eq!(table.leaf_counts().last(), Some((largest, len / largest.bytes())));
    assert_eq!(table.mapped_bytes(), len);
}

/// The issue that started it: a BAR of 32 large leaves is 32 steps.
fn strides<F: Format>() {
    let mut table = Table::<F, _>::new(Failing::new()).unwrap();
    let leaf = F::PAGE_SIZES.iter().next_back().unwrap().bytes();
    let leaves = (sizes::<F>().top / leaf).min(32); // 32 bits of input are four leaves of 1 GiB
    table.map(Iova::new(0), PhysAddr::new(32 * leaf), leaves * leaf, Access::READ).unwrap();
    assert_eq!(table.runs(whole::<F>()).count() as u64, leaves);
    assert_eq!(table.tables().heap.in_use() as u32, 1 + F::LEVELS - leaf_levels::<F>());
}

/// A table whose address no entry can hold is refused and given back.
fn table_addresses<F: Format>() {
    let Sizes { page, out_top, .. } = sizes::<F>();
    let shape = TableShape::of::<F>();
    for base in [0x1008, shape.root.bytes() / 2, out_top] {
        let base = PhysAddr::new(base);
        let e = Table::<F, _>::new(HeapTables::new(base)).unwrap_err();
        assert_eq!(e, Error::TableAddress { at: NamedAddr::of(base) });
    }
    let base = PhysAddr::new(out_top - shape.root.bytes());
    let mut table = Table::<F, _>::new(HeapTables::new(base)).unwrap();
    let e = table.map(Iova::new(0), PhysAddr::new(0), page, Access::READ).unwrap_err();
    assert!(matches!(e, Error::NoTables { .. }) && !table.reserve(1));
    assert_eq!(table.tables().in_use(), 1);
    assert_eq!(table.runs(whole::<F>()).count(), 0);
}

/// Memory that has no tables of the right size is refused; a root that cannot be had is an error.
fn table_memory<F: Format>() {
    /// Knows 4 KiB and nothing else.
    struct Plain(HeapTables<PhysAddr>);
    impl Tables for Plain {
        type Addr = PhysAddr;
        fn allocate(&mut self) -> Option<PhysAddr> {
            self.0.allocate()
        }
        fn free(&mut self, table: PhysAddr) {
            self.0.free(table);
        }
        fn load(&self, table: PhysAddr, index: usize) -> u64 {
            self.0.load(table, index)
        }
        fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
            self.0.store(table, index, entry);
        }
        fn reserve(&mut self, tables: usize) -> bool {
            self.0.reserve(tables)
        }
    }
    let plain = |limit| Table::<F, _>::new(Plain(HeapTables::with_limit(PhysAddr::new(0), limit)));
    let shape = TableShape::of::<F>();
    match plain(0).err().unwrap() {
        Error::TableSize { table, root } => assert_eq!((table, root), (shape.table, shape.root)),
        e => assert!(matches!(e, Error::NoTables { .. })),
    }
    if (shape.root, shape.table) == (PageSize::SIZE_4K, PageSize::SIZE_4K) {
        assert_eq!(plain(1).unwrap().into_tables().0.in_use(), 0);
    }
    assert!(F::registers(1 << 16).len() > 0);
    // The memory of one format serves another after it was given back.
    let table = Table::<Armv7, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
    let table = Table::<F, _>::new(table.into_tables()).unwrap();
    assert_eq!((table.root().bits(), table.tables().in_use()), (0, 1));
}

/// Entries decode to what was encoded, at every level that has leaves.
fn round_trip<F: Format>(out: u64, access: Access) -> Result<(), TestCaseError> {
    for level in 0..F::LEVELS {
        prop_assert_eq!(F::decode(level, 0), Entry::Invalid);
        let size = PageSize::from_log2(shift::<F>(level) as u8).unwrap();
        let out = PhysAddr::new(out & ((1 << F::OUTPUT_BITS) - 1)).align_down(size).bits();
        if F::PAGE_SIZES.contains(size) {
            prop_assert_eq!(F::decode(level, F::encode_leaf(level, out, access)), Entry::Leaf { out, access });
            prop_assert!(!F::is_member(level, F::encode_leaf(level, out, access)));
            // Address and access do not meet: what the walkers' template and output bits rely on.
            let address = F::encode_leaf(level, out, Access::RW) & !F::encode_leaf(level, 0, Access::RW);
            prop_assert_eq!(F::encode_leaf(level, out, access), F::encode_leaf(level, 0, access) | address);
        }
        let bits = F::GROUP_BITS[level as usize];
        if bits > 0 {
            let size = PageSize::from_log2(size.log2() + bits as u8).unwrap();
            let member = F::encode_member(level, out, access);
            let start = PhysAddr::new(out).align_down(size).bits();
            prop_assert_eq!(F::decode(level, member), Entry::Leaf { out: start, access });
            prop_assert!(F::is_member(level, member));
            let address = F::encode_member(level, out, Access::RW) & !F::encode_member(level, 0, Access::RW);
            prop_assert_eq!(member, F::encode_member(level, 0, access) | address);
        }
        if level + 1 < F::LEVELS {
            let next = out & !(TableShape::of::<F>().table.bytes() - 1);
            let entry = F::encode_table(level, next);
            prop_assert_eq!(F::decode(level, entry), Entry::Table(next));
            if F::TABLE_BITS != 0 && F::OUTPUT_BITS <= 52 {
                prop_assert!(F::TABLE_BITS < TableShape::of::<F>().table.bytes());
                let base = F::encode_table(level, 0);
                let differs = |entry: u64| entry.wrapping_sub(base) & (F::TABLE_BITS | 7) != 0;
                prop_assert!(!differs(entry) || entry.wrapping_sub(base) != next, "{}", F::NAME);
                prop_assert!(differs(0));
                let leaf = F::PAGE_SIZES.contains(size).then(|| F::encode_leaf(level, out, access));
                let member = (bits > 0).then(|| F::encode_member(level, out, access));
                for leaf in [leaf, member].into_iter().flatten() {
                    prop_assert!(differs(leaf | F::DIRTY) && differs(leaf & !F::DIRTY), "{} {leaf:#x}", F::NAME);
                }
            }
        }
    }
    Ok(())
}

/// Any bits at all: the walk ends, and what it gives is in range.
fn garbage<F: Format>(seed: u64, likely: u64, root: u64, at: u64) -> Result<(), TestCaseError> {
    let (mut loads, mut last) = (0, 0);
    let walked = walk::<F>(root, at, |entry| {
        loads += 1;
        // splitmix64 of the address as memory; one fetch in 16 is refused.
        let mut z = (entry ^ seed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        last = z | likely;
        (z >> 60 != 0).then_some(last)
    });
    prop_assert!(loads <= F::LEVELS);
    for level in 0..F::LEVELS {
        let is_last = level + 1 == F::LEVELS;
        match F::decode(level, seed) {
            Entry::Table(next) => {
                let size = TableShape::of::<F>().table.bytes();
                prop_assert!(!is_last && next % size == 0 && next >> F::OUTPUT_BITS == 0)
            }
            Entry::Leaf { out, .. } => prop_assert!(out % F::GRANULE.bytes() == 0 && out >> F::OUTPUT_BITS == 0),
            Entry::Invalid => {}
        }
    }
    if let Ok(w) = walked {
        // Of sizes that are not written, too, where others write them.
        let is_read = |level| matches!(F::foreign(level, last), Some(Foreign::Leaf { size, .. }) if size == w.size);
        prop_assert!(F::PAGE_SIZES.contains(w.size) || (0..F::LEVELS).any(is_read));
        prop_assert_eq!(w.to & (w.size.bytes() - 1), at & (w.size.bytes() - 1));
        prop_assert_eq!(w.to >> F::OUTPUT_BITS, 0);
    }
    Ok(())
}

fn refused_fetch<F: Format>() {
    let fault = walk::<F>(0, 0, |_| None).unwrap_err();
    assert_eq!((fault.level, fault.kind), (0, FaultKind::BadTable));
    // The entry's own address would wrap.
    let at = (1u64 << F::INPUT_BITS) - 1;
    let fault = walk::<F>(u64::MAX, at, |_| panic!("fetched")).unwrap_err();
    assert_eq!(fault.kind, FaultKind::BadTable);
}

/// Runs a test on random values. It is compiled once for each type of value: with strategies and a runner for each
/// format these tests took minutes to build. Failures are not written next to the sources: proptest prints the input,
/// and a fixed one becomes a plain test.
pub(crate) fn check<V: Debug + 'static>(
    cases: u32,
    values: BoxedStrategy<V>,
    test: &dyn Fn(V) -> Result<(), TestCaseError>,
) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    if let Err(e) = runner.run(&values, test) {
        panic!("{e}\n{runner}");
    }
}

/// Fewer cases where a table, and so a case, is larger.
fn cases<F: Format>() -> u32 {
    more((6 * 512 / sizes::<F>().entries as u32).clamp(2, 6))
}

/// `DMALANE_CASES` times as many: scripts/nightly sets it.
pub(crate) fn more(cases: u32) -> u32 {
    cases * std::env::var("DMALANE_CASES").map_or(1, |n| n.parse::<u32>().expect("a number"))
}

/// Calls on the tables of a format.
macro_rules! conformance {
    ($($module:ident: $format:ty;)*) => {$(
        mod $module {
            use super::*;
            type F = $format;

            #[test]
            fn random_calls() {
                super::check(cases::<F>(), calls(&geometry::<F>()), &|(ops, probes)| {
                    super::random_calls::<F>(&ops, &probes)
                });
            }

            #[test]
            fn heap_tables_agree() {
                let ops = prop::collection::vec(op(&geometry::<F>()), 1..24).boxed();
                super::check(cases::<F>(), ops, &|ops| super::heap_tables_agree::<F>(&ops));
            }

            #[test]
            fn refusals() {
                super::refusals::<F>();
            }

            #[test]
            fn edges() {
                super::edges::<F>();
            }

            #[test]
            fn strides() {
                super::strides::<F>();
            }

            #[test]
            fn table_addresses() {
                super::table_addresses::<F>();
            }

            #[test]
            fn table_memory() {
                super::table_memory::<F>();
            }
        }
    )*};
}

#[cfg(not(every_format))]
crate::formats::stand_ins!(conformance);
#[cfg(every_format)]
dmalane_iopt::formats!(conformance);

/// Entries of a format.
mod entries {
    use super::*;

    macro_rules! entries {
        ($($module:ident: $format:ty;)*) => {$(
            mod $module {
                use super::*;
                type F = $format;

                #[test]
                fn table_images_agree() {
                    let images = images(&geometry::<F>(), TableShape::of::<F>());
                    check(cases::<F>(), images, &|(ops, pages, base)| {
                        super::table_images_agree::<F>(FormatId::$module, &ops, pages, base)
                    });
                }

                #[test]
                fn round_trip() {
                    let leaf = (any::<u64>(), access(&geometry::<F>())).boxed();
                    check(more(500), leaf, &|(out, access)| super::round_trip::<F>(out, access));
                }

                #[test]
                fn garbage() {
                    check(more(500), noise(sizes::<F>().top), &|(seed, likely, root, at)| {
                        super::garbage::<F>(seed, likely, root, at)
                    });
                }

                #[test]
                fn refused_fetch() {
                    super::refused_fetch::<F>();
                }
            }
        )*};
    }

    dmalane_iopt::formats!(entries);
}

/// A leaf of 8 KiB, as Linux writes them and this format does not, was found by `garbage`.
#[test]
fn pages_of_sizes_that_are_not_written_are_read() {
    type Amd = dmalane_iopt::AmdV1<3>;
    garbage::<Amd>(12585413102299011133, 1, 14385288484159266463, 198188638208).unwrap();
}
