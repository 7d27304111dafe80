//! Threads on disjoint ranges of one tree: what two do in the time of one.
//!
//! Two processors seldom do twice as much as one (they share caches, a power budget, often a core), so the same is
//! asked of loops of arithmetic that share nothing. Each thread is tied to a processor of its own; the clock runs from
//! when the first starts to when the last ends. Rounds take all variants in turn, each by one thread and by two.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use dmalane::addr::{Access, Iova, PhysAddr, Segment, Span};
use dmalane::iopt::{Arm64S1_4k, HeapTables, PageTable, TablePool, Tables};

use crate::clock::{cpu_seconds, pin_to};
use crate::job::{BASE, PAGE, discrete};
use crate::report::{Details, Report};
use crate::subject::TABLES_AT;

#[derive(clap::Args)]
pub struct Options {
    /// Rounds; the median counts
    #[arg(long, default_value_t = 101)]
    rounds: usize,
}

type Table<T> = PageTable<Arm64S1_4k, Iova, PhysAddr, T>;

const THREADS: usize = 2;
/// Pages that each thread maps in a sample.
const PAGES: usize = 8192;
/// Memory for a shared tree: more tables than any case takes.
const TABLES: usize = 160;

/// How the threads' ranges lie.
struct Case {
    name: &'static str,
    /// Pages of one call.
    list: usize,
    /// Where a thread's call goes, in pages from the start.
    place: fn(thread: usize, call: usize) -> usize,
    /// How often a thread takes its lists away and maps them again in a sample.
    goes: usize,
}

const CASES: [Case; 3] = [
    Case { name: "lists of 2M", list: 512, place: |thread, call| PAGES * thread + 512 * call, goes: 16 },
    Case { name: "pages", list: 1, place: |thread, call| PAGES * thread + call, goes: 2 },
    // Both are in the same tables all the time, two cache lines of entries each.
    Case { name: "lists of 64K in turn", list: 16, place: |thread, call| 16 * (THREADS * call + thread), goes: 8 },
];

/// The calls of one thread.
struct Share {
    pages: Vec<Segment<PhysAddr>>,
    /// Where each goes.
    calls: Vec<Iova>,
    list: usize,
}

impl Share {
    fn calls(&self) -> impl Iterator<Item = (Iova, &[Segment<PhysAddr>])> {
        self.calls.iter().copied().zip(self.pages.chunks(self.list))
    }
}

impl Case {
    fn share(&self, thread: usize) -> Share {
        let pages = discrete(THREADS * PAGES, PAGE)[thread * PAGES..][..PAGES].to_vec();
        let at = |call| Iova::new(BASE + (self.place)(thread, call) as u64 * PAGE);
        Share { pages, calls: (0..PAGES / self.list).map(at).collect(), list: self.list }
    }
}

/// How a thread reaches the tree.
trait Handle {
    /// Calls `job` with the tree, once for each call of the job that is measured.
    fn with<R>(&mut self, job: impl FnOnce(&mut Table<Self::Memory>) -> R) -> R;
    type Memory: Tables;
}

impl<T: Tables> Handle for Table<T> {
    type Memory = T;
    fn with<R>(&mut self, job: impl FnOnce(&mut Self) -> R) -> R {
        job(self)
    }
}

impl<T: Tables> Handle for &Mutex<Table<T>> {
    type Memory = T;
    fn with<R>(&mut self, job: impl FnOnce(&mut Table<T>) -> R) -> R {
        job(&mut self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn map(tree: &mut impl Handle, share: &Share) {
    for (at, list) in share.calls() {
        let len = tree.with(|table| table.map_sg(at, list.iter().copied(), Access::RW).expect("free"));
        assert_eq!(len, list.len() as u64 * PAGE);
    }
}

fn unmap(tree: &mut impl Handle, share: &Share) {
    for (at, list) in share.calls() {
        let span = Span::new(at, list.len() as u64 * PAGE).expect("a span");
        tree.with(|table| {
            let flush = table.unmap(span).expect("no cuts");
            assert_eq!(flush.bytes(), span.len());
            table.free_tables(flush);
        });
    }
}

/// Every page leads where its list says, or nowhere.
fn check(tree: &mut impl Handle, shares: &[Share], mapped: bool) -> Result<(), String> {
    for (at, list) in shares.iter().flat_map(Share::calls) {
        for (at, segment) in (at.bits()..).step_by(PAGE as usize).zip(list) {
            let found = tree.with(|table| table.lookup(Iova::new(at)).map(|leaf| leaf.to));
            if found != mapped.then_some(segment.addr) {
                return Err(format!("{at:#x} leads to {found:x?}"));
            }
        }
    }
    Ok(())
}

/// Seconds by the clock, and of all processors together.
#[derive(Clone, Copy)]
struct Took {
    wall: f64,
    cpu: f64,
}

/// Runs the work that `prepare` gives once for each thread, all at the same time.
fn together<W: FnOnce()>(threads: usize, prepare: impl Fn(usize) -> W + Sync) -> Took {
    let (waiting, prepare) = (&AtomicUsize::new(threads), &prepare);
    let one = |thread: usize| {
        pin_to(thread);
        let work = prepare(thread);
        waiting.fetch_sub(1, Ordering::AcqRel);
        while waiting.load(Ordering::Acquire) > 0 {
            spin_loop();
        }
        let (start, cpu) = (Instant::now(), cpu_seconds());
        work();
        (start, Instant::now(), cpu_seconds() - cpu)
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        let times: Vec<_> = running.into_iter().map(|t| t.join().expect("its assertions hold")).collect();
        let start = times.iter().map(|t| t.0).min().expect("a thread");
        let end = times.iter().map(|t| t.1).max().expect("a thread");
        Took { wall: (end - start).as_secs_f64(), cpu: times.iter().map(|t| t.2).sum() }
    })
}

/// One sample: each thread takes its lists away and maps them again, over and over.
fn sample<H: Handle>(
    threads: usize,
    goes: usize,
    shares: &[Share],
    tree: impl Fn() -> H + Sync,
) -> Result<Took, String> {
    let (shares, tree) = (&shares[..threads], &tree);
    let again = |tree: &mut H, thread: usize| {
        unmap(tree, &shares[thread]);
        map(tree, &shares[thread]);
    };
    together(threads, |thread| move || map(&mut tree(), &shares[thread]));
    check(&mut tree(), shares, true)?;
    let took = together(threads, |thread| {
        let mut tree = tree();
        // Checked bytes are in the caches of the thread that checked them.
        again(&mut tree, thread);
        move || (0..goes).for_each(|_| again(&mut tree, thread))
    });
    check(&mut tree(), shares, true)?;
    together(threads, |thread| move || unmap(&mut tree(), &shares[thread]));
    check(&mut tree(), shares, false)?;
    Ok(took)
}

const VARIANTS: [&str; 4] = ["ours", "ours, no local pool", "ours behind a mutex", "arithmetic"];

/// Freed tables that a thread keeps.
const LOCAL: usize = 32;

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    if thread::available_parallelism()?.get() < THREADS {
        return Err("this takes two processors".into());
    }
    let mut report = Report::new("threads");
    let memory: Vec<AtomicU64> = (0..(TABLES + 1) * 512).map(|_| AtomicU64::new(0)).collect();
    // From a page boundary on, as a device would have it: no cache line belongs to two tables.
    let memory = &memory[memory.as_ptr().align_offset(4096)..][..TABLES * 512];
    for case in &CASES {
        let shares: Vec<Share> = (0..THREADS).map(|thread| case.share(thread)).collect();
        // By variant, then by the number of threads less 1.
        let mut samples: [[Vec<Took>; THREADS]; VARIANTS.len()] = Default::default();
        for _ in 0..options.rounds {
            for n in 1..=THREADS {
                let pool = TablePool::new::<Arm64S1_4k>(TABLES_AT, memory);
                let root = Table::new(&pool)?.root();
                let local = sample(n, case.goes, &shares, || Table::attach(pool.local(LOCAL), root))?;
                let plain = sample(n, case.goes, &shares, || Table::attach(&pool, root))?;
                let tree = Mutex::new(Table::new(HeapTables::new(TABLES_AT))?);
                let locked = sample(n, case.goes, &shares, || &tree)?;
                let control = together(n, |_| arithmetic);
                let took = [local, plain, locked, control];
                samples.iter_mut().zip(took).for_each(|(samples, took)| samples[n - 1].push(took));
            }
        }
        let mut scaling = [0.0; VARIANTS.len()];
        for (k, variant) in VARIANTS.iter().enumerate() {
            let mut medians = [0.0; THREADS];
            for n in 1..=THREADS {
                let wall: Vec<f64> = samples[k][n - 1].iter().map(|took| took.wall).collect();
                let pages = (n * case.goes * PAGES) as u64;
                let details = Details { items: Some(pages), ..Details::default() };
                let name = format!("{variant}, {}", ["one thread", "two threads"][n - 1]);
                medians[n - 1] = report.detailed_row(case.name, &name, pages * PAGE, &wall, details);
            }
            scaling[k] = THREADS as f64 * medians[0] / medians[1];
            report.note(case.name, &format!("{variant}: two threads do, as a multiple of one"), scaling[k]);
            // Other programs take the clock's time, but not this.
            let cpu = |n: usize| median(samples[k][n - 1].iter().map(|took| took.cpu / n as f64));
            report.note(case.name, &format!("{variant}: processor time for each page, one / two"), cpu(1) / cpu(2));
        }
        let [ours, .., control] = scaling;
        report.at_least(&format!("{}: scaling, ours / arithmetic", case.name), 0.9, ours / control);
    }
    Ok(report)
}

/// About as long as a thread's share, with its answer checked.
fn arithmetic() {
    let mut x = black_box(1u64);
    for _ in 0..200_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    assert_eq!(black_box(x), 0xc475_63c1_f4a1_b004);
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
