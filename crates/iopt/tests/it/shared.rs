//! Threads that share a page table without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use dmalane_addr::{Access, Iova, PhysAddr, Segment, Span};
use dmalane_iopt::{
    Arm64S1, Arm64S1_4k, Arm64S2_16k, Armv7, Error, Format, HeapTables, LocalPool, PageTable, TablePool, TableShape,
    Tables, X86_64_4Level, walk,
};

type Table<'p, F> = PageTable<F, Iova, PhysAddr, &'p TablePool<'p, PhysAddr>>;

fn memory<F: Format>(tables: usize) -> Vec<AtomicU64> {
    let words = TableShape::of::<F>().table.bytes() as usize / 8;
    // Not zero: a pool must not rely on it.
    (0..tables * words).map(|_| AtomicU64::new(u64::MAX)).collect()
}

/// A small generator, one for each thread.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % n
    }
}

/// Stripes of an eighth of a table, so that neighbours meet in the same tables, and of whole tables, which come and go.
fn stripes<F: Format>(rounds: u64) {
    let block = F::GRANULE.bytes() << F::INDEX_BITS;
    stripes_of::<F>(block / 8, rounds);
    stripes_of::<F>(block, rounds);
}

/// Each thread owns every fourth stripe of the space; it maps, unmaps and looks up there, and finds nothing but what it
/// put there.
fn stripes_of<F: Format>(stripe: u64, rounds: u64) {
    const THREADS: u64 = 4;
    let page = F::GRANULE.bytes();
    let memory = memory::<F>(400);
    let pool = TablePool::new::<F>(PhysAddr::new(0x1_0000), &memory);
    let first = Table::<F>::new(&pool).unwrap();
    let root = first.root();
    let mapped = AtomicU64::new(0);
    thread::scope(|threads| {
        for t in 0..THREADS {
            let (pool, mapped) = (&pool, &mapped);
            threads.spawn(move || {
                // A local pool that keeps 0, 1, 2 or 3 tables.
                let mut table =
                    PageTable::<F, Iova, PhysAddr, LocalPool<PhysAddr>>::attach(pool.local(t as usize), root);
                let mut random = Random(t);
                let mut live = vec![None; 64];
                for _ in 0..rounds {
                    let n = random.below(live.len() as u64);
                    let at = (n * THREADS + t) * stripe;
                    let whole = Span::new(Iova::new(at), stripe).unwrap();
                    let to = random.below(1 << 10) * page;
                    match &mut live[n as usize] {
                        slot @ None => {
                            let halves = [to, to + 7 * stripe];
                            let list = halves.map(|to| Segment { addr: PhysAddr::new(to), len: stripe / 2 });
                            assert_eq!(table.map_sg(Iova::new(at), list, Access::READ), Ok(stripe));
                            let again = table.map(Iova::new(at), PhysAddr::new(0), page, Access::READ);
                            assert!(matches!(again, Err(Error::Overlap { .. })));
                            *slot = Some(to);
                        }
                        Some(to) => {
                            let last = Iova::new(at + stripe - 1);
                            let expected = PhysAddr::new(*to + 7 * stripe + stripe / 2 - 1);
                            let found = walk::<F>(root.bits(), last.bits(), |word| pool.read(word)).unwrap();
                            assert_eq!(found.to, expected.bits());
                            let flush = table.unmap(whole).unwrap();
                            assert_eq!(flush.bytes(), stripe);
                            table.free_tables(flush);
                            live[n as usize] = None;
                        }
                    }
                    assert_eq!(table.runs(whole).map(|r| r.len).sum::<u64>(), live[n as usize].map_or(0, |_| stripe));
                }
                mapped.fetch_add(table.mapped_bytes(), Ordering::Relaxed);
            });
        }
    });
    let mut first = first;
    let all = Span::new(Iova::new(0), 1 << F::INPUT_BITS).unwrap();
    let total: u64 = first.runs(all).map(|r| r.len).sum();
    assert_eq!(mapped.load(Ordering::Relaxed), total);
    let flush = first.unmap(all).unwrap();
    assert_eq!(flush.bytes(), total);
    first.free_tables(flush);
    first.into_tables();
    assert_eq!(pool.in_use(), 0);
}

/// All threads need the same tables at the same moment, over and over.
#[test]
fn one_table_for_all() {
    type F = X86_64_4Level;
    const THREADS: u64 = 4;
    let memory = memory::<F>(64);
    let pool = TablePool::new::<F>(PhysAddr::new(0), &memory);
    let mut first = Table::<F>::new(&pool).unwrap();
    let root = first.root();
    for round in 0..500u64 {
        let at = |t: u64| ((round % 100) << 39) + t * 4096;
        let start = std::sync::Barrier::new(THREADS as usize);
        thread::scope(|threads| {
            for t in 0..THREADS {
                let (pool, start) = (&pool, &start);
                threads.spawn(move || {
                    let mut table = Table::<F>::attach(pool, root);
                    start.wait();
                    table.map(Iova::new(at(t)), PhysAddr::new(t * 4096), 4096, Access::RW).unwrap();
                });
            }
        });
        for t in 0..THREADS {
            assert_eq!(first.lookup(Iova::new(at(t))).unwrap().to.bits(), t * 4096);
        }
        assert_eq!(pool.in_use(), 4, "the tables of those who came late were freed");
        let flush = first.unmap(Span::new(Iova::new((round % 100) << 39), 1 << 39).unwrap()).unwrap();
        assert_eq!(flush.tables().len(), 3);
        first.free_tables(flush);
        assert_eq!(pool.in_use(), 1);
    }
}

#[test]
fn stripes_x86_64() {
    stripes::<X86_64_4Level>(2000);
}

#[test]
fn stripes_arm64() {
    stripes::<Arm64S1_4k>(2000);
}

#[test]
fn stripes_with_groups() {
    stripes::<Arm64S1<12, 48, true>>(1000);
}

#[test]
fn stripes_with_a_large_root() {
    stripes::<Arm64S2_16k>(200);
}

/// The same calls on a heap, a pool that is shared and a pool with one owner give the same leaves, and a device that
/// walks finds nothing of what the memory held before.
fn one_owner<F: Format>() {
    let page = F::GRANULE.bytes();
    let block = page << F::INDEX_BITS;
    let (one, two) = (memory::<F>(60), memory::<F>(60));
    let base = PhysAddr::new(1 << 20);
    let (mut owned, shared) = (TablePool::new::<F>(base, &one), TablePool::new::<F>(base, &two));
    let mut heap = PageTable::<F, Iova, PhysAddr, _>::new(HeapTables::new(base)).unwrap();
    let mut owned = PageTable::<F, Iova, PhysAddr, _>::new(&mut owned).unwrap();
    let mut shared = PageTable::<F, Iova, PhysAddr, _>::new(&shared).unwrap();
    // A pool counts a large root as several tables.
    let root = owned.tables().in_use() - heap.tables().in_use();
    let mut random = Random(7);
    let all = Span::new(Iova::new(0), 1 << F::INPUT_BITS).unwrap();
    for _ in 0..2000 {
        let at = Iova::new(random.below(4) * block + random.below(1 << F::INDEX_BITS) * page);
        let pages = [1, 1, 3, 1 + random.below(2 << F::INDEX_BITS)][random.below(4) as usize];
        if random.below(2) == 0 {
            let to = random.below(1 << 9) * page;
            let list: Vec<_> = match random.below(2) {
                0 => vec![Segment { addr: PhysAddr::new(to), len: pages * page }],
                _ => (0..pages).map(|n| Segment { addr: PhysAddr::new(to + 2 * n * page), len: page }).collect(),
            };
            let map = heap.map_sg(at, list.iter().copied(), Access::READ);
            assert_eq!(owned.map_sg(at, list.iter().copied(), Access::READ), map);
            assert_eq!(shared.map_sg(at, list, Access::READ), map);
        } else {
            let span = Span::new(at, pages * page).unwrap();
            let list = heap.unmap(span).unwrap();
            let flush = owned.unmap(span).unwrap();
            assert_eq!((flush.bytes(), flush.tables().len()), (list.bytes(), list.tables().len()));
            heap.free_tables(list);
            owned.free_tables(flush);
            let flush = shared.unmap(span).unwrap();
            shared.free_tables(flush);
        }
        assert_eq!(owned.tables().in_use(), root + heap.tables().in_use());
        let walked = walk::<F>(owned.root().bits(), at.bits(), |word| owned.tables().read(word));
        assert_eq!(walked.map(|w| w.to).ok(), heap.translate(at).map(|to| to.bits()));
    }
    // Where an empty table was left behind, the leaves of the pool that is shared are smaller.
    assert!(owned.runs(all).eq(heap.runs(all)));
    assert_eq!(shared.mapped_bytes(), heap.mapped_bytes());
    let tables = owned.into_tables();
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn a_pool_with_one_owner() {
    one_owner::<X86_64_4Level>();
    one_owner::<Arm64S1<12, 48, true>>();
    one_owner::<Arm64S2_16k>();
    one_owner::<Armv7>();
}

/// One handle unmaps, splits and maps again what another has mapped: each counts its own doing, and the sum is right.
#[test]
fn counts_add_up() {
    type F = X86_64_4Level;
    let memory = memory::<F>(16);
    let pool = TablePool::new::<F>(PhysAddr::new(0), &memory);
    let mut first = Table::<F>::new(&pool).unwrap();
    let mut second = Table::<F>::attach(&pool, first.root());
    first.map(Iova::new(0), PhysAddr::new(0), 4 << 20, Access::RW).unwrap();
    first.map(Iova::new(8 << 20), PhysAddr::new(0), 8192, Access::RW).unwrap();
    second.cut(Iova::new(4096), |_| ()).unwrap();
    for at in [2 << 20, 8 << 20, (8 << 20) + 4096] {
        let len = if at == 2 << 20 { 2 << 20 } else { 4096 };
        let flush = second.unmap(Span::new(Iova::new(at), len).unwrap()).unwrap();
        assert_eq!(flush.bytes(), len);
        second.free_tables(flush);
    }
    second.map(Iova::new(2 << 20), PhysAddr::new(0), 2 << 20, Access::RW).unwrap();
    second.map(Iova::new(8 << 20), PhysAddr::new(0), 4096, Access::RW).unwrap();
    let counts = |table: &Table<'_, F>| table.leaf_counts().map(|(_, n)| n).collect::<Vec<_>>();
    let sum: Vec<u64> = counts(&first).into_iter().zip(counts(&second)).map(|(a, b)| a.wrapping_add(b)).collect();
    assert_eq!(sum, [513, 1, 0]);
    assert_eq!(first.mapped_bytes().wrapping_add(second.mapped_bytes()), (4 << 20) + 4096);
}

/// A table that was left behind empty is filled with smaller leaves when a larger one would fit there.
#[test]
fn an_empty_table_in_the_way() {
    type F = X86_64_4Level;
    let memory = memory::<F>(16);
    let pool = TablePool::new::<F>(PhysAddr::new(0), &memory);
    let mut table = Table::<F>::new(&pool).unwrap();
    let page = Span::new(Iova::new((4 << 20) + 4096), 4096).unwrap();
    table.map(page.first(), PhysAddr::new(0), 4096, Access::RW).unwrap();
    let flush = table.unmap(page).unwrap();
    assert_eq!(flush.tables(), [], "it does not belong to the caller alone");
    table.free_tables(flush);
    assert_eq!(pool.in_use(), 4);
    table.map(Iova::new(2 << 20), PhysAddr::new(0), 6 << 20, Access::RW).unwrap();
    let counts: Vec<u64> = table.leaf_counts().map(|(_, n)| n).collect();
    assert_eq!(counts, [512, 2, 0]);
    // No table for the next call: of those that it made, the two that it did not fill stay.
    let before = pool.in_use();
    let e = table.map(Iova::new(1 << 45), PhysAddr::new(4096), 1 << 30, Access::RW).unwrap_err();
    assert!(matches!(e, Error::NoTables { .. }));
    assert_eq!((table.mapped_bytes(), pool.in_use()), (6 << 20, before + 2));
}

/// A segment that cannot be mapped ends a call, whatever comes behind it; a leaf is split into all of its pages.
#[test]
fn bad_segments_and_cuts() {
    type F = X86_64_4Level;
    let memory = memory::<F>(16);
    let pool = TablePool::new::<F>(PhysAddr::new(0), &memory);
    let mut table = Table::<F>::new(&pool).unwrap();
    let at = Iova::new(2 << 20);
    let segment = |n: u64| Segment { addr: PhysAddr::new(if n == 5 { 1 << 60 } else { n << 13 }), len: 4096 };
    let list: Vec<_> = (0..300).map(segment).collect();
    let e = table.map_sg(at, list, Access::RW).unwrap_err();
    assert!(matches!(e, Error::OutputRange { .. }) && table.mapped_bytes() == 0, "{e}");
    // Elsewhere: the call has left an empty table there.
    let at = Iova::new(4 << 20);
    table.map(at, PhysAddr::new(4 << 20), 2 << 20, Access::RW).unwrap();
    let mut gone = 0;
    table.cut(Iova::new(5 << 20), |_| gone += 1).unwrap();
    assert_eq!(gone, 1);
    let runs: Vec<_> = table.runs(Span::new(at, 2 << 20).unwrap()).map(|run| (run.at.bits(), run.to.bits())).collect();
    let pages = (0..512).map(|n| (4 << 20) + (n << 12));
    assert_eq!(runs, pages.map(|page| (page, page)).collect::<Vec<_>>());
}

/// Others cannot have the tables of a local pool; it has those that it was told to reserve; in the end it has none.
#[test]
fn a_stock_keeps_reserves_and_gives_back() {
    let memory = memory::<X86_64_4Level>(12);
    let pool = TablePool::new::<X86_64_4Level>(PhysAddr::new(0x1_0000), &memory);
    let (mut a, mut b) = (pool.local(4), pool.local(0));
    let first = a.allocate().unwrap();
    assert_eq!((first.bits(), pool.in_use()), (0x1_0000, 2), "and its neighbour");
    assert!(a.reserve(6) && !a.reserve(12) && !b.reserve(6));
    assert_eq!(pool.in_use(), 7);
    let others: Vec<_> = std::iter::from_fn(|| b.allocate()).collect();
    assert_eq!((others.len(), pool.in_use()), (5, 12));
    let mine: Vec<_> = (0..6).map(|_| a.allocate().expect("reserved")).collect();
    assert_eq!((a.allocate(), b.allocate()), (None, None));
    for &table in &mine {
        a.store(table, 511, 7);
        a.free(table);
    }
    assert_eq!(pool.in_use(), 12 - 3, "of five, two stayed");
    assert!(b.allocate().is_some_and(|table| (0..512).all(|i| b.load(table, i) == 0)));
    others.into_iter().for_each(|table| b.free(table));
    a.free(first);
    drop((a, b));
    assert_eq!(pool.in_use(), 1, "what was never freed");
}
