//! Every allocation of every kind of call fails once, in every format: the words of all tables are as they were.
//!
//! The random calls of `conformance.rs` do the same without counting. Here the scenarios are fixed, so that it can be
//! said how many failures there were, and every word is compared instead of what can be seen through the interface.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::conformance::more;
use crate::formats::{Failing, MapList, Sizes, sizes, stand_ins};
use dmalane_addr::{Access, Iova, PhysAddr, Segment, Span};
use dmalane_iopt::{Entry, Error, Format, HeapTables, PageTable, TableShape, X86_64_4Level};

type Table<F> = PageTable<F, Iova, PhysAddr, Failing>;

/// A scenario: what is there before, and the call in which allocations fail.
struct Scenario<F: Format> {
    name: &'static str,
    before: fn(&mut Table<F>),
    call: fn(&mut Table<F>) -> Result<(), Error>,
}

const RW: Access = Access::READ.union(Access::WRITE);

fn span(at: u64, len: u64) -> Span<Iova> {
    Span::new(Iova::new(at), len).unwrap()
}

fn map<F: Format>(table: &mut Table<F>, at: u64, to: u64, len: u64) -> Result<(), Error> {
    table.map(Iova::new(at), PhysAddr::new(to), len, RW)
}

fn unmap<F: Format>(table: &mut Table<F>, at: u64, len: u64) -> Result<(), Error> {
    let flush = table.unmap(span(at, len))?;
    table.free_tables(flush);
    Ok(())
}

/// So many pages, none of which continues another.
fn discrete<F: Format>(pages: u64) -> impl Iterator<Item = Segment<PhysAddr>> {
    let page = sizes::<F>().page;
    (0..pages).map(move |n| Segment { addr: PhysAddr::new(2 * n * page), len: page })
}

/// A leaf of the largest size, or a full table of the last level where that is larger.
fn large<F: Format>(table: &mut Table<F>) {
    let large = sizes::<F>().large;
    map(table, large, 2 * large, large).unwrap();
}

/// Some single pages, near and far.
fn scattered<F: Format>(table: &mut Table<F>) {
    let Sizes { page, block, large, top, .. } = sizes::<F>();
    for (n, at) in (0..).zip([3 * page, block - page, block, 5 * block, 3 * large - page, top / 2, top - page]) {
        map(table, at, n * page, page).unwrap();
    }
}

/// Tables of the last level: fewer where they are larger.
fn many<F: Format>() -> u64 {
    let most = u64::from(more(10));
    (most * 512 / sizes::<F>().entries).clamp(4, most)
}

fn scenarios<F: Format>() -> Vec<Scenario<F>> {
    let nothing: fn(&mut Table<F>) = |_| ();
    let of = |name, before, call| Scenario { name, before, call };
    vec![
        of("a page", nothing, |t| map(t, 0, 0, sizes::<F>().page)),
        of("the last page", nothing, |t| map(t, sizes::<F>().top - sizes::<F>().page, 0, sizes::<F>().page)),
        of("a page beside others", scattered::<F>, |t| map(t, sizes::<F>().top / 4, 0, sizes::<F>().page)),
        of("pages across two tables", nothing, |t| {
            let Sizes { page, block, .. } = sizes::<F>();
            t.map_list(Iova::new(block - page), discrete::<F>(2), RW).map(drop)
        }),
        of("pages across the middle of the space", nothing, |t| {
            let Sizes { page, top, .. } = sizes::<F>();
            t.map_list(Iova::new(top / 2 - page), discrete::<F>(2), RW).map(drop)
        }),
        of("pages in many tables", nothing, |t| {
            let Sizes { page, entries, block, .. } = sizes::<F>();
            t.map_list(Iova::new(2 * block - page), discrete::<F>(many::<F>() * entries + 2), RW).map(drop)
        }),
        of("pages in many tables beside others", scattered::<F>, |t| {
            let Sizes { page, entries, block, .. } = sizes::<F>();
            t.map_list(Iova::new(6 * block - page), discrete::<F>(many::<F>() * entries + 2), RW).map(drop)
        }),
        of("one range that no large leaf fits", nothing, |t| {
            let Sizes { page, block, .. } = sizes::<F>();
            map(t, 6 * block + page, 0, many::<F>() * block)
        }),
        of("a large leaf with pages around", nothing, |t| {
            let Sizes { page, large, .. } = sizes::<F>();
            map(t, large - 2 * page, 2 * large - 2 * page, large + 5 * page)
        }),
        of("a list of everything", nothing, |t| {
            let Sizes { page, block, large, .. } = sizes::<F>();
            let list = [(2 * large - page, page), (2 * large, large), (0, block + page), (7 * page, page)];
            let list = list.map(|(addr, len)| Segment { addr: PhysAddr::new(addr), len });
            t.map_list(Iova::new(large - page), list, RW).map(drop)
        }),
        of(
            "a list whose end is taken",
            |t| map(t, (many::<F>() + 1) * sizes::<F>().block, 0, sizes::<F>().page).unwrap(),
            |t| {
                let Sizes { page, entries, block, .. } = sizes::<F>();
                match t.map_list(Iova::new(2 * block - page), discrete::<F>(many::<F>() * entries), RW) {
                    Err(Error::Overlap { .. }) => Ok(()),
                    other => other.map(drop),
                }
            },
        ),
        of("a list whose end is bad", nothing, |t| {
            let Sizes { page, entries, block, .. } = sizes::<F>();
            let bad = Segment { addr: PhysAddr::new(1), len: page };
            match t.map_list(Iova::new(2 * block - page), discrete::<F>(many::<F>() * entries).chain([bad]), RW) {
                Err(Error::Misaligned { .. }) => Ok(()),
                other => other.map(drop),
            }
        }),
        of("what another table translates", nothing, |t| {
            let Sizes { page, block, large, .. } = sizes::<F>();
            let mut source = PageTable::<F, Iova, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(0))).unwrap();
            source.map(Iova::new(large), PhysAddr::new(2 * large), large + page, RW).unwrap();
            t.map_through(Iova::new(block + page), &source, span(large, (3 * block).min(large) + page), RW).map(drop)
        }),
        of("a hole in a large leaf", large::<F>, |t| {
            let Sizes { page, large, block, .. } = sizes::<F>();
            unmap(t, large + (large / 2 / block * block) + 3 * page, page)
        }),
        of("a hole across tables in a large leaf", large::<F>, |t| {
            let Sizes { page, large, block, .. } = sizes::<F>();
            let at = if large > block { large + block - page } else { large + page };
            unmap(t, at, 2 * page)
        }),
        of("the end of a large leaf", large::<F>, |t| {
            let Sizes { page, large, .. } = sizes::<F>();
            unmap(t, 2 * large - page, page)
        }),
        of("all but the ends of a large leaf", large::<F>, |t| {
            let Sizes { page, large, .. } = sizes::<F>();
            unmap(t, large + page, large - 2 * page)
        }),
        of(
            "from one large leaf into the next",
            |t| {
                let large = sizes::<F>().large;
                map(t, large, 2 * large, 2 * large).unwrap();
            },
            |t| {
                let Sizes { page, large, .. } = sizes::<F>();
                unmap(t, 2 * large - 3 * page, 5 * page)
            },
        ),
        of("a cut", large::<F>, |t| {
            let Sizes { page, large, .. } = sizes::<F>();
            let mut told = 0;
            let result = t.cut(Iova::new(large + 5 * page), |_| told += 1);
            assert!(result.is_ok() || told == 0, "the device was told of a leaf that stays");
            result
        }),
        of(
            "a second cut",
            |t| {
                large::<F>(t);
                t.cut(Iova::new(sizes::<F>().large + 5 * sizes::<F>().page), |_| ()).unwrap();
            },
            |t| {
                let Sizes { page, large, .. } = sizes::<F>();
                t.cut(Iova::new(2 * large - 5 * page), |_| ())
            },
        ),
    ]
}

/// Every word of every table of the tree, by the address of the table.
fn words<F: Format>(table: &Table<F>) -> BTreeMap<u64, Vec<u64>> {
    fn below<F: Format>(heap: &HeapTables<PhysAddr>, at: u64, level: u32, all: &mut BTreeMap<u64, Vec<u64>>) {
        let shape = TableShape::of::<F>();
        let bytes = if level == 0 { shape.root.bytes() } else { shape.table.bytes() };
        let words: Vec<u64> = (at..at + bytes).step_by(8).map(|word| heap.read(word).unwrap()).collect();
        for &word in &words {
            let entries = if F::ENTRY_BYTES == 8 { vec![word] } else { vec![word & 0xffff_ffff, word >> 32] };
            for entry in entries {
                if let Entry::Table(next) = F::decode(level, entry) {
                    below::<F>(heap, next, level + 1, all);
                }
            }
        }
        all.insert(at, words);
    }
    let mut all = BTreeMap::new();
    below::<F>(&table.tables().heap, table.root().bits(), 0, &mut all);
    all
}

fn counts<F: Format>(table: &Table<F>) -> Vec<u64> {
    table.leaf_counts().map(|(_, count)| count).collect()
}

/// Lets each allocation of the call fail, until it gets through. Gives the number of failures.
fn sweep<F: Format>(scenario: &Scenario<F>) -> usize {
    let mut table = Table::<F>::new(Failing::new()).unwrap();
    (scenario.before)(&mut table);
    let (image, leaves, in_use) = (words(&table), counts(&table), table.tables().heap.in_use());
    for failures in 0.. {
        let tables = table.tables_mut();
        (tables.calls, tables.fail_at) = (0, Some(failures));
        match (scenario.call)(&mut table) {
            Err(Error::NoTables { .. }) => {
                let name = (F::NAME, scenario.name, failures);
                assert_eq!(table.tables().calls, failures + 1, "{name:?}: it went on");
                assert_eq!((counts(&table), table.tables().heap.in_use()), (leaves.clone(), in_use), "{name:?}");
                assert!(words(&table) == image, "{name:?}: a word has changed");
            }
            Err(e) => panic!("{}, {}: {e}", F::NAME, scenario.name),
            Ok(()) => {
                assert_eq!(table.into_tables().heap.in_use(), 0, "{}, {}: leaked", F::NAME, scenario.name);
                return failures;
            }
        }
    }
    unreachable!("some call gets through")
}

static FAILURES: AtomicUsize = AtomicUsize::new(0);

fn sweep_all<F: Format>() {
    let failures = scenarios::<F>().iter().map(sweep).sum();
    FAILURES.fetch_add(failures, Ordering::Relaxed);
}

/// One test for the sake of the sum.
#[test]
fn every_allocation_fails_once() {
    macro_rules! sweeps {
        ($($name:ident: $format:ty;)*) => { [$(sweep_all::<$format>),*] };
    }
    let sweeps = stand_ins!(sweeps);
    sweeps.iter().for_each(|sweep| sweep());
    let formats = sweeps.len();
    let scenarios = scenarios::<dmalane_iopt::Arm64S1_4k>().len();
    let failures = FAILURES.load(Ordering::Relaxed);
    println!("{failures} allocations failed, in {scenarios} scenarios for each of {formats} formats");
    assert!(failures >= 2000, "{failures}");
}

dmalane_addr::address! {
    /// Sign-extended, as processors have them.
    KernelVa, "kernel VA", 48
}

#[test]
fn no_range_reaches_across_the_hole_between_the_halves() {
    let mut table =
        PageTable::<X86_64_4Level, KernelVa, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
    let (last, first) = (KernelVa::new(0x7fff_ffff_f000), KernelVa::new(0xffff_8000_0000_0000));
    let pages = |n: usize| (0..n as u64).map(|n| Segment { addr: PhysAddr::new(n << 20), len: 4096 });
    for refused in [
        table.map(last, PhysAddr::new(0), 8192, Access::RW),
        table.map_sg(last, pages(2), Access::RW).map(drop),
        table.map(KernelVa::new(0), PhysAddr::new(0), 1 << 48, Access::RW),
    ] {
        assert!(matches!(refused, Err(Error::InputRange { .. })), "{refused:?}");
    }
    assert_eq!(table.mapped_bytes(), 0);
    for (at, n) in [(last, 1), (first, 2), (KernelVa::new(u64::MAX - 8191), 2)] {
        assert_eq!(table.map_sg(at, pages(n), Access::RW), Ok(n as u64 * 4096));
    }
    assert_eq!(table.mapped_bytes(), 5 * 4096);
}
