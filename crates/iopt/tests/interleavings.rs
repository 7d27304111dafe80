//! Every interleaving of threads that share a small page table, tried one after another by `loom`.
//!
//! `loom` runs a closure again and again, each time with another order of the atomic operations of its threads and
//! another value, of those that their orderings allow, for each load. So a mistake in an ordering shows on x86-64 too.
//! `tests/shared.rs` is the same with real threads and real formats.
//!
//! The source of [`TablePool`] is compiled once more here, with loom's atomics; the walkers are those of the crate.
//! Tests named `caught_...` break something on purpose, and pass when loom finds it. More was broken by hand, and each
//! time two or more of these tests failed (with the stack's number, one): `install`, `push`, `pop`, `load` and `read`
//! with `Relaxed`, the stack's number left as it is, tables not zeroed, the table of who comes late not freed.

#![cfg(target_has_atomic = "64")]

extern crate alloc; // as `pool.rs` has it

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use dmalane_addr::{Access, Iova, PageSize, PageSizes, PhysAddr, Segment, Span};
use dmalane_iopt::{Entry, Error, FaultKind, Format, Leaf, PageTable, Register, Registers, TableShape, Tables, walk};
use loom::sync::atomic;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

#[path = "../src/pool.rs"]
mod pool;
#[path = "../src/words.rs"]
mod words;

use pool::{LocalPool, TablePool};

/// Set by a device in a leaf that it uses, and in one that it writes through.
const ACCESSED: u64 = 1 << 4;
const DIRTY: u64 = 1 << 5;

/// Tables of two entries, so that a thread has few steps: bit 0 valid, bit 1 in a leaf.
#[derive(Clone, Copy, Debug)]
struct Tiny<const LEVELS: u32>;

impl<const L: u32> Format for Tiny<L> {
    const NAME: &'static str = "tiny";
    const LEVELS: u32 = L;
    const INDEX_BITS: u32 = 1;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 12 + L;
    const OUTPUT_BITS: u32 = 32;
    const PAGE_SIZES: PageSizes = PageSizes::from_bits(1 << 12);
    const DIRTY: u64 = DIRTY;

    fn supports(access: Access) -> bool {
        access == Access::RW
    }
    fn encode_table(_: u32, next: u64) -> u64 {
        next | 0b01
    }
    fn encode_leaf(_: u32, out: u64, _: Access) -> u64 {
        out | 0b11
    }
    fn decode(level: u32, entry: u64) -> Entry {
        match (entry & 0b11, level + 1 < L) {
            (0b01, true) => Entry::Table(entry & !0xf),
            (0b11, false) => Entry::Leaf { out: entry & !0xfff, access: Access::RW },
            _ => Entry::Invalid,
        }
    }
    fn registers(_: u64) -> Registers {
        Register::list([])
    }
}

/// A leaf wherever it is read: what a table holds that was not zeroed.
const RUBBISH: u64 = 0x6666_6003;
const BASE: u64 = 0x1_0000;
const PAGE: u64 = 4096;

type Shared = &'static TablePool<'static, PhysAddr>;
type Table<F, T> = PageTable<F, Iova, PhysAddr, T>;
type Walking = loom::sync::Arc<loom::sync::Mutex<()>>;

/// A pool of `tables` tables, and its memory. Loom's threads want `'static`, so every run leaks some hundred bytes.
fn pool<F: Format>(tables: usize) -> (Shared, &'static [AtomicU64]) {
    assert_eq!(TableShape::of::<F>().table.bytes(), 16);
    let memory: Vec<AtomicU64> = (0..2 * tables).map(|_| AtomicU64::new(RUBBISH)).collect();
    let memory: &'static [AtomicU64] = Box::leak(memory.into_boxed_slice());
    (Box::leak(Box::new(TablePool::new::<F>(PhysAddr::new(BASE), memory))), memory)
}

/// Runs the model in every order; with `most`, only those with at most that number of changes of thread where none is
/// needed. `LOOM_MAX_PREEMPTIONS=1000` in the environment takes all limits away.
fn explore(name: &str, most: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(most);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{name}: {} interleavings", runs.load(Ordering::Relaxed));
}

fn page(n: u64) -> Span<Iova> {
    Span::new(Iova::new(n * PAGE), PAGE).unwrap()
}

/// Where page `n` is mapped to.
fn place(n: u64) -> PhysAddr {
    PhysAddr::new((0x100 + n) * PAGE)
}

fn map<F: Format, T: Tables>(table: &mut Table<F, T>, n: u64) {
    table.map(page(n).first(), place(n), PAGE, Access::RW).unwrap();
}

fn found<F: Format, T: Tables>(table: &Table<F, T>, n: u64) -> Option<PhysAddr> {
    table.lookup(page(n).first()).map(|leaf| leaf.to)
}

fn unmap<F: Format, T: Tables>(table: &mut Table<F, T>, span: Span<Iova>) {
    let flush = table.unmap(span).unwrap();
    assert_eq!(flush.bytes(), PAGE, "exactly what this thread has mapped");
    table.free_tables(flush);
}

/// Two threads need the same tables at the same moment. Both pages are mapped, and no table is lost.
fn one_table_for_both<T: Tables<Addr = PhysAddr> + Copy + Send + 'static>(
    of: impl Fn(Shared, &'static [AtomicU64]) -> T,
) {
    type F = Tiny<3>;
    let (pool, memory) = pool::<F>(5);
    let tables = of(pool, memory);
    let mut table = Table::<F, T>::new(tables).unwrap();
    let root = table.root();
    let other = thread::spawn(move || {
        let mut table = Table::<F, T>::attach(tables, root);
        map(&mut table, 1);
        assert_eq!(found(&table, 1), Some(place(1)));
    });
    map(&mut table, 0);
    assert_eq!(found(&table, 0), Some(place(0)));
    other.join().unwrap();
    assert_eq!([0, 1, 2].map(|n| found(&table, n)), [Some(place(0)), Some(place(1)), None]);
    assert_eq!(pool.in_use(), 3, "the tables of who came late were freed");
}

#[test]
fn two_threads_link_the_same_tables() {
    explore("two_threads_link_the_same_tables", Some(4), || one_table_for_both(|pool, _| pool));
}

#[test]
fn three_threads_link_the_same_table() {
    type F = Tiny<2>;
    explore("three_threads_link_the_same_table", Some(3), || {
        let (pool, _) = pool::<F>(5);
        let mut table = Table::<F, _>::new(pool).unwrap();
        let root = table.root();
        let others = [1, 2].map(|n| thread::spawn(move || map(&mut Table::<F, _>::attach(pool, root), n)));
        map(&mut table, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!([0, 1, 2, 3].map(|n| found(&table, n)), [Some(place(0)), Some(place(1)), Some(place(2)), None]);
        assert_eq!(pool.in_use(), 3);
    });
}

/// There is memory for one of two tables at a time. Who gets none is told so, has mapped nothing, and may try again.
#[test]
fn no_memory_for_who_comes_late() {
    type F = Tiny<2>;
    explore("no_memory_for_who_comes_late", None, || {
        let (pool, _) = pool::<F>(2);
        let mut table = Table::<F, _>::new(pool).unwrap();
        let root = table.root();
        let attempt = |table: &mut Table<F, Shared>, n| {
            let result = table.map(page(n).first(), place(n), PAGE, Access::RW);
            assert!(matches!(result, Ok(()) | Err(Error::NoTables { .. })), "{result:?}");
            assert_eq!(found(table, n), result.is_ok().then(|| place(n)));
            result.is_ok()
        };
        let other = thread::spawn(move || attempt(&mut Table::<F, _>::attach(pool, root), 1));
        let mapped = [attempt(&mut table, 0), other.join().unwrap()];
        assert_ne!(mapped, [false, false]);
        for n in 0..2 {
            if !mapped[n as usize] {
                map(&mut table, n);
            }
        }
        assert_eq!([0, 1].map(|n| found(&table, n)), [Some(place(0)), Some(place(1))]);
        assert_eq!(pool.in_use(), 2);
    });
}

/// Neighbours in one table map, look up and unmap; the table stays, empty, and serves again.
#[test]
fn neighbours_come_and_go() {
    type F = Tiny<2>;
    explore("neighbours_come_and_go", None, || {
        let (pool, _) = pool::<F>(4);
        let mut table = Table::<F, _>::new(pool).unwrap();
        let root = table.root();
        let come_and_go = |table: &mut Table<F, Shared>, n| {
            map(table, n);
            assert_eq!(found(table, n), Some(place(n)));
            unmap(table, page(n));
            assert_eq!(found(table, n), None);
            table.mapped_bytes()
        };
        let other = thread::spawn(move || come_and_go(&mut Table::<F, _>::attach(pool, root), 1));
        let sum = come_and_go(&mut table, 0).wrapping_add(other.join().unwrap());
        assert_eq!((sum, pool.in_use()), (0, 2));
        map(&mut table, 0);
        assert_eq!(pool.in_use(), 2);
    });
}

/// One thread takes whole tables out of the tree and frees them, while another maps nearby and may get them.
#[test]
fn a_table_leaves_while_another_comes() {
    type F = Tiny<3>;
    explore("a_table_leaves_while_another_comes", Some(3), || {
        let (pool, _) = pool::<F>(6);
        let mut table = Table::<F, _>::new(pool).unwrap();
        let root = table.root();
        let other = thread::spawn(move || {
            let mut table = Table::<F, _>::attach(pool, root);
            map(&mut table, 2);
            assert_eq!(found(&table, 2), Some(place(2)));
        });
        let pair = Span::new(Iova::new(0), 2 * PAGE).unwrap();
        map(&mut table, 0);
        unmap(&mut table, pair); // frees the table below, not the one that pages 2 and 3 share
        assert_eq!(found(&table, 0), None);
        map(&mut table, 1);
        other.join().unwrap();
        assert_eq!([0, 1, 2, 3].map(|n| found(&table, n)), [None, Some(place(1)), Some(place(2)), None]);
        assert_eq!(pool.in_use(), 4);
    });
}

/// The same with a local pool for each: freed tables go from thread to thread by way of the pool.
#[test]
fn stocks_share_a_pool() {
    type F = Tiny<2>;
    explore("stocks_share_a_pool", Some(3), || {
        let (pool, _) = pool::<F>(5);
        let mut table = Table::<F, LocalPool<PhysAddr>>::new(pool.local(0)).unwrap();
        let root = table.root();
        let pair = |n| Span::new(Iova::new(n * PAGE), 2 * PAGE).unwrap();
        let other = thread::spawn(move || {
            let mut table = Table::<F, LocalPool<PhysAddr>>::attach(pool.local(1), root);
            map(&mut table, 2);
            unmap(&mut table, pair(2)); // the table stays in this local pool
            map(&mut table, 3);
            assert_eq!(found(&table, 3), Some(place(3)));
        });
        assert!(table.tables_mut().reserve(2), "no other handle can take these");
        map(&mut table, 0);
        unmap(&mut table, pair(0));
        assert_eq!(found(&table, 0), None);
        other.join().unwrap();
        assert_eq!([2, 3].map(|n| found(&table, n)), [None, Some(place(3))]);
        let flush = table.unmap(pair(2)).unwrap();
        table.free_tables(flush);
        drop(table);
        assert_eq!(pool.in_use(), 1, "the root: the stocks have given back what they held");
    });
}

/// A device walks what a thread is mapping: it finds nothing, or where the page leads, and never what the memory held.
fn watched<T: Tables<Addr = PhysAddr> + Copy + Send + 'static>(of: impl Fn(Shared, &'static [AtomicU64]) -> T) {
    type F = Tiny<3>;
    let (pool, memory) = pool::<F>(4);
    let mut table = Table::<F, T>::new(of(pool, memory)).unwrap();
    let root = table.root().bits();
    let device = thread::spawn(move || {
        let walk = |n| walk::<F>(root, page(n).first().bits(), |word| pool.read(word));
        let seen = walk(0).map(|walked| walked.to).map_err(|fault| fault.kind);
        assert!([Ok(place(0).bits()), Err(FaultKind::NotPresent)].contains(&seen), "{seen:?}");
        let neighbour = walk(1).map_err(|fault| fault.kind);
        assert_eq!(neighbour, Err(FaultKind::NotPresent), "the table was zeroed first");
    });
    map(&mut table, 0);
    device.join().unwrap();
}

#[test]
fn a_device_walks_meanwhile() {
    explore("a_device_walks_meanwhile", None, || watched(|pool, _| pool));
}

/// A device that walks to page 0, and the lock that it holds meanwhile: it finds the page where it was, or nothing.
fn device_that_walks<F: Format>(root: u64, pool: Shared) -> (thread::JoinHandle<()>, Walking) {
    let walking = Walking::new(loom::sync::Mutex::new(()));
    let device = thread::spawn({
        let walking = walking.clone();
        move || {
            let _walk = walking.lock().unwrap();
            let seen = walk::<F>(root, 0, |word| pool.read(word)).map(|walked| walked.to).map_err(|fault| fault.kind);
            assert!([Ok(place(0).bits()), Err(FaultKind::NotPresent)].contains(&seen), "the device saw {seen:?}");
        }
    });
    (device, walking)
}

/// A device walks while pages are unmapped and invalidated, and their table serves other pages. The invalidation
/// waits for the walk that is under way, as those of an IOMMU do: so the device finds a page where it was, or nothing,
/// and never what the table maps afterwards. `early` frees the table before.
fn unmapped(early: bool) {
    type F = Tiny<2>;
    let (pool, _) = pool::<F>(2); // the root, and the one table that serves twice
    let mut table = Table::<F, _>::new(pool).unwrap();
    (0..2).for_each(|n| map(&mut table, n));
    let root = table.root().bits();
    let (device, walking) = device_that_walks::<F>(root, pool);
    let list = table.unmap(Span::new(Iova::new(0), 2 * PAGE).unwrap()).unwrap();
    assert_eq!(list.tables().len(), 1);
    if !early {
        drop(walking.lock().unwrap());
    }
    table.free_tables(list);
    map(&mut table, 2);
    drop(walking.lock().unwrap());
    device.join().unwrap();
    assert_eq!([0, 2].map(|n| found(&table, n)), [None, Some(place(2))]);
}

#[test]
fn tables_serve_again_after_the_invalidation() {
    explore("tables_serve_again_after_the_invalidation", None, || unmapped(false));
}

#[test]
#[should_panic(expected = "the device saw Ok(1056768)")] // where page 2 is
fn caught_tables_freed_before_the_invalidation() {
    explore("caught_tables_freed_before_the_invalidation", None, || unmapped(true));
}

/// The stack of freed tables: one thread is about to take the top when another takes two and puts the first one back.
#[test]
fn a_freed_table_is_taken_once() {
    type F = Tiny<2>;
    explore("a_freed_table_is_taken_once", None, || {
        let (pool, _) = pool::<F>(3);
        let mut tables = pool;
        let all = [(); 3].map(|()| tables.allocate().unwrap());
        all.into_iter().rev().for_each(|table| tables.free(table));
        let other = thread::spawn(move || {
            let mut tables = pool;
            let (a, b) = (tables.allocate().unwrap(), tables.allocate().unwrap());
            tables.free(a);
            b
        });
        let a = tables.allocate();
        let b = other.join().unwrap();
        let mut held = [Some(b), a, tables.allocate(), tables.allocate()];
        held.sort();
        assert_eq!(held, [None, Some(all[0]), Some(all[1]), Some(all[2])], "each once, and then no more");
        assert_eq!(pool.in_use(), 3);
    });
}

type Told<'a> = &'a mut dyn FnMut(Leaf<Iova, PhysAddr>);

/// A device writes through a page, which is marked `before`, while marks are taken: it is told of, then or the next
/// time, and no bit is lost that nobody has cleared.
fn written<T: Tables<Addr = PhysAddr>>(
    of: impl Fn(Shared, &'static [AtomicU64]) -> T,
    before: u64,
    take: impl Fn(&mut Table<Tiny<2>, T>, Told<'_>),
) {
    type F = Tiny<2>;
    let (pool, memory) = pool::<F>(2);
    let mut table = Table::<F, T>::new(of(pool, memory)).unwrap();
    map(&mut table, 0);
    let mut at = 0;
    let walked = walk::<F>(table.root().bits(), 0, |word| {
        at = word;
        pool.read(word)
    });
    assert_eq!(walked.map(|walked| walked.to), Ok(place(0).bits()));
    let entry = &memory[(at - BASE) as usize / 8];
    entry.fetch_or(before, Ordering::Relaxed);
    let device = thread::spawn(move || {
        let mut seen = entry.load(Ordering::Acquire);
        // As hardware does it: again when the entry has changed, until it is not valid or has both bits.
        while seen & 1 != 0 && seen & (ACCESSED | DIRTY) != ACCESSED | DIRTY {
            match entry.compare_exchange(seen, seen | ACCESSED | DIRTY, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    });
    let mut told = 0;
    take(&mut table, &mut |_| told += 1);
    let wrote = device.join().unwrap();
    if before != 0 {
        assert_eq!(entry.load(Ordering::Acquire) & ACCESSED != 0, wrote, "the device's own bit is lost");
    }
    told += table.take_dirty(page(0), |_| ()).unwrap();
    assert_eq!(told > 0, wrote || before != 0, "the device's mark is lost");
}

/// Every way to take a mark.
fn marks_taken<T: Tables<Addr = PhysAddr> + 'static>(
    name: &str,
    of: impl Fn(Shared, &'static [AtomicU64]) -> T + Copy + Send + Sync + 'static,
) {
    let explore = |what: &str, model: fn(&mut Table<Tiny<2>, T>, Told<'_>)| {
        explore(&format!("{name}: {what}"), None, move || written(of, 0, model));
    };
    explore("unmap_dirty", |table, tell| {
        let flush = table.unmap_dirty(page(0), tell).unwrap();
        table.free_tables(flush);
    });
    explore("clear_dirty_into", |table, tell| {
        table.clear_dirty_into(page(0), &mut Vec::new(), None, tell).unwrap();
    });
    explore("replace_pages_dirty", |table, tell| {
        let segment = Segment { addr: place(1), len: PAGE };
        assert_eq!(table.replace_pages_dirty(page(0).first(), 1, [segment], Access::RW, tell), (1, 1));
    });
    explore("protect_with", |table, tell| {
        let flush = table.protect_with(page(0), Access::RW, None, Some(tell)).unwrap();
        table.free_tables(flush);
    });
}

fn mark_cleared<T: Tables<Addr = PhysAddr> + 'static>(
    name: &str,
    of: impl Fn(Shared, &'static [AtomicU64]) -> T + Send + Sync + 'static,
) {
    explore(name, None, move || {
        written(&of, DIRTY, |table, tell| assert_eq!(table.take_dirty(page(0), tell), Ok(1)));
    });
}

#[test]
fn a_device_marks_meanwhile() {
    marks_taken("a_device_marks_meanwhile", |pool, _| pool);
    marks_taken("a_device_marks_meanwhile, a local pool", |pool, _| pool.local(0));
    mark_cleared("a_device_marks_meanwhile: take_dirty", |pool, _| pool);
    mark_cleared("a_device_marks_meanwhile: take_dirty, a local pool", |pool, _| pool.local(0));
}

/// [`Linking`] has `exchange` and `clear_bits` of the trait: a load and a store.
#[test]
#[should_panic(expected = "the device's mark is lost")]
fn caught_a_mark_taken_by_a_load_and_a_store() {
    marks_taken("caught_a_mark_taken_by_a_load_and_a_store", Linking::by(Link::Right));
}

#[test]
#[should_panic(expected = "the device's own bit is lost")]
fn caught_a_mark_cleared_by_a_load_and_a_store() {
    mark_cleared("caught_a_mark_cleared_by_a_load_and_a_store", Linking::by(Link::Right));
}

/// How a table is linked.
#[derive(Clone, Copy)]
enum Link {
    /// As the pool does it.
    Right,
    /// By a plain store: who comes late overwrites what is there.
    Store,
    /// Nothing orders the zeroing of the table before the link to it.
    Relaxed,
}

/// A pool that links like that.
#[derive(Clone, Copy)]
struct Linking {
    pool: Shared,
    memory: &'static [AtomicU64],
    link: Link,
}

impl Linking {
    fn by(link: Link) -> impl Fn(Shared, &'static [AtomicU64]) -> Self + Copy {
        move |pool, memory| Self { pool, memory, link }
    }
}

impl Tables for Linking {
    type Addr = PhysAddr;
    const SHARED: bool = true;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.pool.prepare(shape)
    }
    fn allocate(&mut self) -> Option<PhysAddr> {
        self.pool.allocate()
    }
    fn free(&mut self, table: PhysAddr) {
        self.pool.free(table);
    }
    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        self.pool.load(table, index)
    }
    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        self.pool.store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.pool.reserve(tables)
    }
    fn install(&mut self, table: PhysAddr, index: usize, entry: u64) -> Result<(), u64> {
        let word = &self.memory[(table.bits() - BASE) as usize / 8 + index];
        match self.link {
            Link::Right => word.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Acquire).map(drop),
            Link::Relaxed => word.compare_exchange(0, entry, Ordering::Relaxed, Ordering::Acquire).map(drop),
            Link::Store => {
                word.store(entry, Ordering::Release);
                Ok(())
            }
        }
    }
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn caught_a_link_by_a_plain_store() {
    explore("caught_a_link_by_a_plain_store", None, || one_table_for_both(Linking::by(Link::Store)));
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn caught_a_link_that_orders_nothing() {
    explore("caught_a_link_that_orders_nothing", None, || watched(Linking::by(Link::Relaxed)));
}

/// So it was the links that were caught, not this stand-in.
#[test]
fn the_right_link_is_not_caught() {
    explore("the_right_link_is_not_caught", Some(3), || one_table_for_both(Linking::by(Link::Right)));
    explore("the_right_link_is_not_caught either", None, || watched(Linking::by(Link::Right)));
}
