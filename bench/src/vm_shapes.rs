//! Shapes of binds that hurt: pages alone and far apart, few pages among many, large binds that replace others.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use dmalane::addr::{Access, Address, CardAddr, DeviceVa, PageSize, Segment, Span};
use dmalane::card::Card;
use dmalane::dma::Registrar;
use dmalane::iopt::{AgxUat, Entry, Format, HeapTables, PageTable, TablePool, Tables, X86_64_4Level};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};
use dmalane::vm::{BindRequest, Bo, Vm};

use crate::binders::{BASE, BTREE, Binder, OURS, make};
use crate::buffers::{Layout, PAGE, of_pages};
use crate::clock::cpu_time;
use crate::mt19937::Mt19937;
use crate::report::{Details, Report};

type Error = Box<dyn std::error::Error>;

/// Pages that one table maps.
const TABLE: u64 = 2048;
const PAGES: u64 = 1000;
const TABLE_ALONE: &str = "the page table alone";
const STORES: &str = "plain stores of the entries";

fn new_vm() -> Result<Vm<AgxUat, HeapTables<CardAddr>>, Error> {
    let range = Span::new(DeviceVa::new(0), 1 << AgxUat::INPUT_BITS).ok_or("no range")?;
    Ok(Vm::new(range, HeapTables::new(CardAddr::new(1 << 40)))?)
}

/// The page table without any bookkeeping, its empty tables freed.
struct Alone(PageTable<AgxUat, DeviceVa, CardAddr, HeapTables<CardAddr>>);

impl Alone {
    fn bind(&mut self, page: u64) {
        self.0.map(DeviceVa::new(page * PAGE), CardAddr::new(page * PAGE), PAGE, Access::RW).expect("free");
    }
    fn unbind(&mut self, page: u64) {
        let gone = self.0.unmap(Span::new(DeviceVa::new(page * PAGE), PAGE).expect("a page")).expect("mapped");
        self.0.free_tables(gone);
    }
}

pub fn run(report: &mut Report, rounds: usize) -> Result<(), Error> {
    let segments = of_pages(Layout::Single, 1 << 18);
    let tables = HeapTables::new(CardAddr::new(1 << 40));
    let mut alone = Alone(PageTable::new(tables)?);
    let mut binders: Vec<Box<dyn Binder>> = Vec::new();
    for name in [OURS, BTREE] {
        binders.push(make(name, &segments, 1).ok_or("cannot be made")?);
    }
    // One page where nothing else is.
    let mut samples = vec![Vec::new(); 3];
    for _ in 0..rounds {
        for (binder, samples) in binders.iter_mut().zip(&mut samples) {
            samples.push(cpu_time(|| {
                for _ in 0..PAGES {
                    binder.bind(&[(1 << 32, 0)]);
                    binder.unbind(&[(1 << 32, 0)]);
                }
            }));
        }
        samples[2].push(cpu_time(|| {
            for _ in 0..PAGES {
                alone.bind(1 << 18);
                alone.unbind(1 << 18);
            }
        }));
    }
    let [ours, btree, table] = rows(report, "one page alone, bind and unbind", PAGES, &samples);
    report.at_most("one page alone: ours / BTreeMap and the page table alone", 1.0, ours / (btree + table));
    // One page in each table.
    let jobs: Vec<_> = (0..PAGES).map(|n| (((n + 1) * TABLE + n % 64) * PAGE, n * PAGE)).collect();
    let mut both = vec![vec![Vec::new(); 3]; 2];
    for _ in 0..rounds {
        for (k, binder) in binders.iter_mut().enumerate() {
            both[0][k].push(cpu_time(|| binder.bind(&jobs)));
            both[1][k].push(cpu_time(|| binder.unbind(&jobs)));
        }
        both[0][2].push(cpu_time(|| jobs.iter().for_each(|&(va, _)| alone.bind(va / PAGE))));
        both[1][2].push(cpu_time(|| jobs.iter().for_each(|&(va, _)| alone.unbind(va / PAGE))));
    }
    for (what, samples) in ["bind", "unbind"].into_iter().zip(&both) {
        let [ours, btree, table] = rows(report, &format!("one page in each 32 MiB, {what}"), PAGES, samples);
        let name = format!("one page in each 32 MiB, {what}: ours / BTreeMap and the page table alone");
        report.at_most(&name, 1.0, ours / (btree + table));
    }
    small(report, rounds)?;
    few_among_many(report, rounds)?;
    replaced(report, rounds)?;
    walked(report, rounds)?;
    memory(report)
}

/// Medians of three variants.
fn rows(report: &mut Report, case: &str, items: u64, samples: &[Vec<f64>]) -> [f64; 3] {
    let details = || Details { items: Some(items), ..Details::default() };
    let row = |(name, samples): (&str, &Vec<f64>)| report.detailed_row(case, name, items * PAGE, samples, details());
    let found: Vec<f64> = [OURS, BTREE, TABLE_ALONE].into_iter().zip(samples).map(row).collect();
    [found[0], found[1], found[2]]
}

/// The first hundred pages of new VMs.
fn small(report: &mut Report, rounds: usize) -> Result<(), Error> {
    const SMALL: u64 = 100;
    const VMS: u64 = 32;
    let segments = of_pages(Layout::Single, SMALL);
    let mut random = Mt19937::new(5);
    let in_order: Vec<_> = (0..SMALL).map(|n| ((BASE / PAGE + n) * PAGE, n * PAGE)).collect();
    // Each page somewhere in its part of the range.
    let mut scattered = |part: u64| {
        let mut jobs = in_order.clone();
        jobs.iter_mut().zip(0..).for_each(|((va, _), n)| *va = BASE + (n * part + random.below(part)) * PAGE);
        (0..SMALL as usize).for_each(|n| jobs.swap(n, random.below(SMALL) as usize));
        jobs
    };
    let [one_table, many] = [TABLE / SMALL, 1 << 9].map(&mut scattered);
    for (what, jobs) in [("in order", in_order), ("random in 32 MiB", one_table), ("random in 800 MiB", many)] {
        let mut samples = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (name, samples) in [OURS, BTREE].into_iter().zip(&mut samples) {
                let new = |_| make(name, &segments, 1 << 16).ok_or("cannot be made");
                let mut binders = (0..VMS).map(new).collect::<Result<Vec<_>, _>>()?;
                samples.push(cpu_time(|| binders.iter_mut().for_each(|binder| binder.bind(&jobs))));
                for binder in &binders {
                    if binder.bindings()? != jobs.len() || jobs.iter().any(|(va, _)| binder.translate(*va).is_none()) {
                        return Err(format!("{name}: a page of a small VM leads nowhere").into());
                    }
                }
            }
            let new = |_| Ok(Alone(PageTable::new(HeapTables::new(CardAddr::new(1 << 40)))?));
            let mut tables = (0..VMS).map(new).collect::<Result<Vec<_>, Error>>()?;
            let bind = |table: &mut Alone| jobs.iter().for_each(|&(va, _)| table.bind(va / PAGE));
            samples[2].push(cpu_time(|| tables.iter_mut().for_each(bind)));
        }
        let case = format!("100 pages of new VMs, {what}");
        let [ours, btree, table] = rows(report, &case, VMS * jobs.len() as u64, &samples);
        report.at_most(&format!("{case}: ours / BTreeMap"), 1.0, ours / btree);
        report.note(&case, "ours / BTreeMap and the page table alone", ours / (btree + table));
    }
    Ok(())
}

/// All bindings of a buffer of 16 pages, among few and among many pages of another one.
fn few_among_many(report: &mut Report, rounds: usize) -> Result<(), Error> {
    const FEW: u64 = 16;
    let mut medians = Vec::new();
    for others in [1000, 100_000, 1_000_000] {
        let bo = |id, pages| Bo::of_segments(id, of_pages(Layout::Single, pages)).map(Arc::new);
        let (many, few) = (bo(1, others)?, bo(2, FEW)?);
        let mut vm = new_vm()?;
        let all =
            [BindRequest::Bind { va: DeviceVa::new(0), bo: many, offset: 0, len: others * PAGE, access: Access::RW }];
        let done = vm.plan(all)?.commit();
        vm.invalidated(done);
        let mut random = Mt19937::new(3);
        let mut samples = Vec::new();
        for _ in 0..rounds * 10 {
            for n in 0..FEW {
                let va = DeviceVa::new(random.below(others) * PAGE);
                let done = vm.bind(va, &few, n * PAGE, PAGE, Access::RW)?;
                vm.invalidated(done);
            }
            let request = [BindRequest::UnbindBo(few.clone())];
            samples.push(cpu_time(|| {
                let done = vm.plan(request).expect("an unbind").commit();
                vm.invalidated(done);
            }));
        }
        let details = Details { items: Some(1), ..Details::default() };
        let case = format!("unbind a buffer of {FEW} pages among {others}");
        medians.push(report.detailed_row(&case, OURS, FEW * PAGE, &samples, details));
    }
    report.at_most("unbind of a buffer of 16 pages: among 10^6 others / among 10^3", 3.0, medians[2] / medians[0]);
    Ok(())
}

/// Binds of 4096 pages at random places, over what was bound there.
fn replaced(report: &mut Report, rounds: usize) -> Result<(), Error> {
    const LEN: u64 = 4096;
    const SPACE: u64 = 1 << 18;
    for layout in [Layout::Single, Layout::Long] {
        let bo = Arc::new(Bo::of_segments(1, of_pages(layout, SPACE))?);
        let mut vm = new_vm()?;
        let mut words = vec![0u64; SPACE as usize];
        let mut random = Mt19937::new(5);
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..rounds * 10 {
            let (at, from) = (random.below(SPACE - LEN), random.below(SPACE - LEN));
            samples[0].push(cpu_time(|| {
                let done = vm.bind(DeviceVa::new(at * PAGE), &bo, from * PAGE, LEN * PAGE, Access::RW);
                vm.invalidated(done.expect("a sound request"));
            }));
            samples[1].push(cpu_time(|| {
                let mut n = at as usize;
                let bytes = from * PAGE..(from + LEN) * PAGE;
                for run in bo.sg().runs(bytes).expect("within the buffer") {
                    for page in 0..run.len / PAGE {
                        words[n] = AgxUat::encode_leaf(AgxUat::LEVELS - 1, run.addr.bits() + page * PAGE, Access::RW);
                        n += 1;
                    }
                }
                black_box(&mut words);
            }));
            for n in [0, LEN / 2, LEN - 1] {
                let va = DeviceVa::new((at + n) * PAGE);
                let found = vm.lookup(va).and_then(|leaf| leaf.translate(va)).map(Address::bits);
                let want = match AgxUat::decode(AgxUat::LEVELS - 1, words[(at + n) as usize]) {
                    Entry::Leaf { out, .. } => Some(out),
                    _ => None,
                };
                let page = bo.sg().page_at((from + n) * PAGE, PageSize::SIZE_16K).map(Address::bits);
                if found != want || found != page {
                    return Err(format!("{va} leads to {found:x?}, not {want:x?}").into());
                }
            }
        }
        let case = format!("{}, 4096 pages replaced", layout.name());
        let details = || Details { items: Some(LEN), ..Details::default() };
        let ours = report.detailed_row(&case, OURS, LEN * PAGE, &samples[0], details());
        let stores = report.detailed_row(&case, STORES, LEN * PAGE, &samples[1], details());
        report.at_most(&format!("{case}: ours / {STORES}"), 1.5, ours / stores);
    }
    Ok(())
}

/// Bytes of bookkeeping, tables apart.
fn memory(report: &mut Report) -> Result<(), Error> {
    let bo = Arc::new(Bo::of_segments(1, of_pages(Layout::Single, 2 * TABLE))?);
    for (case, pages) in [("one page in each 32 MiB", &[17][..]), ("two pages in each 32 MiB", &[0, TABLE - 1])] {
        let mut vm = new_vm()?;
        for page in (0..PAGES).flat_map(|n| pages.iter().map(move |page| n * TABLE + page)) {
            let done = vm.bind(DeviceVa::new(page * PAGE), &bo, page % TABLE * PAGE, PAGE, Access::RW)?;
            vm.invalidated(done);
        }
        let each = vm.bookkeeping_bytes() as f64 / (PAGES * pages.len() as u64) as f64;
        report.at_most_in(&format!("bookkeeping of a binding, {case}"), 512.0, each, "bytes, at most");
    }
    Ok(())
}

/// Binds and unbinds of single pages in the tables of a format that a card walks.
struct Walked<T: Tables<Addr = CardAddr>> {
    vm: Vm<X86_64_4Level, T>,
    bo: Arc<Bo>,
}

const SMALL: u64 = 4096;
const AT: u64 = 1 << 32;

impl<T: Tables<Addr = CardAddr>> Walked<T> {
    fn new(tables: T) -> Result<Self, Error> {
        let range = Span::new(DeviceVa::new(0), 1 << X86_64_4Level::INPUT_BITS).ok_or("no range")?;
        let pages = of_pages(Layout::Single, 1 << 16).into_iter();
        let bo =
            pages.map(|s| Segment { addr: CardAddr::new(s.addr.bits() / PAGE * SMALL), len: s.len / PAGE * SMALL });
        Ok(Self { vm: Vm::new(range, tables)?, bo: Arc::new(Bo::of_segments(1, bo)?) })
    }
}

/// A page and its offset in the buffer, both in pages.
type Pages = [(u64, u64)];

trait Walks {
    fn bind(&mut self, jobs: &Pages);
    fn bind_batch(&mut self, jobs: &Pages);
    fn unbind(&mut self, jobs: &Pages);
    fn look_up(&self, jobs: &Pages) -> u64;
}

impl<T: Tables<Addr = CardAddr>> Walks for Walked<T> {
    fn bind(&mut self, jobs: &Pages) {
        for &(page, offset) in jobs {
            let va = DeviceVa::new(AT + page * SMALL);
            let done = self.vm.bind(va, &self.bo, offset * SMALL, SMALL, Access::RW).expect("a sound request");
            self.vm.invalidated(done);
        }
    }
    fn bind_batch(&mut self, jobs: &Pages) {
        let request = |&(page, offset): &(u64, u64)| BindRequest::Bind {
            va: DeviceVa::new(AT + page * SMALL),
            bo: self.bo.clone(),
            offset: offset * SMALL,
            len: SMALL,
            access: Access::RW,
        };
        let done = self.vm.plan(jobs.iter().map(request)).expect("sound requests").commit();
        self.vm.invalidated(done);
    }
    fn unbind(&mut self, jobs: &Pages) {
        for &(page, _) in jobs {
            let span = Span::new(DeviceVa::new(AT + page * SMALL), SMALL).expect("a page");
            let done = self.vm.unbind(span).expect("a sound request");
            self.vm.invalidated(done);
        }
    }
    fn look_up(&self, jobs: &Pages) -> u64 {
        let to = |&(page, _): &(u64, u64)| self.vm.lookup(DeviceVa::new(AT + page * SMALL)).map_or(0, |l| l.to.bits());
        jobs.iter().map(to).fold(0, u64::wrapping_add)
    }
}

/// Tables that a device walks, beside those that none does.
fn walked(report: &mut Report, rounds: usize) -> Result<(), Error> {
    const BINDS: u64 = 50_000;
    const NAMES: [&str; 3] = ["HeapTables", "pool", "CardTables"];
    let host: SoftHost = SoftHost::new(HostConfig::default())?;
    let bus: Arc<SoftBus> =
        Arc::new(SoftBus::new(host, CardConfig { ddr: 64 << 20, hbm: 64 << 20, ..CardConfig::default() })?);
    let card = Card::open(bus.clone(), &*bus.heap(None))?;
    let tables = card.tables(Span::new(CardAddr::new(0), 32 << 20).ok_or("no span")?)?;
    static POOL: OnceLock<TablePool<'static, CardAddr>> = OnceLock::new();
    let pool = POOL.get_or_init(|| {
        let words = Vec::leak((0..1024 * 512).map(|_| AtomicU64::new(0)).collect());
        TablePool::new::<X86_64_4Level>(CardAddr::new(1 << 30), words)
    });
    let mut all: [Box<dyn Walks>; 3] = [
        Box::new(Walked::new(HeapTables::new(CardAddr::new(1 << 30)))?),
        Box::new(Walked::new(pool)?),
        Box::new(Walked::new(tables)?),
    ];
    let mut random = Mt19937::new(42);
    let jobs: Vec<_> = (0..BINDS).map(|page| (page, random.below(1 << 16))).collect();
    const CASES: [&str; 4] = ["bind", "unbind", "one batch, bind", "look-up"];
    let mut samples = vec![vec![Vec::new(); 3]; 4];
    for _ in 0..=rounds {
        let mut found = Vec::new();
        for (k, walks) in all.iter_mut().enumerate() {
            samples[0][k].push(cpu_time(|| walks.bind(&jobs)));
            samples[3][k].push(cpu_time(|| found.push(walks.look_up(&jobs))));
            samples[1][k].push(cpu_time(|| walks.unbind(&jobs)));
            samples[2][k].push(cpu_time(|| walks.bind_batch(&jobs)));
            found.push(walks.look_up(&jobs));
            walks.unbind(&jobs);
        }
        if found.iter().any(|sum| *sum != found[0]) {
            return Err("tables lead elsewhere".into());
        }
    }
    for (case, samples) in CASES.into_iter().zip(&samples) {
        let mut medians = Vec::new();
        for (name, samples) in NAMES.into_iter().zip(samples) {
            let details = Details { items: Some(BINDS), ..Details::default() };
            let row = format!("x86-64, 4 KiB pages, {case}");
            medians.push(report.detailed_row(&row, name, BINDS * SMALL, &samples[1..], details));
        }
        let (name, ratio) = (format!("{case}: CardTables / HeapTables"), medians[2] / medians[0]);
        if case.ends_with(" bind") || case == "bind" {
            report.at_most(&name, 1.5, ratio);
        } else {
            report.note("x86-64, 4 KiB pages", &name, ratio);
        }
    }
    Ok(())
}
