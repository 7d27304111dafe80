//! Binds and unbinds of single pages of a large buffer, as the original program does them, by everything that can.

use std::collections::HashMap;

use dmalane::addr::{CardAddr, Segment};

use crate::binders::{
    ALL, ARRAY, BASE, BATCH, BEFORE, Binder, Job, LEAN, LIMIT, OURS, PATCH, RESERVED, SHAPES, TWO, make,
};
use crate::buffers::{Layout, PAGE, of_pages};
use crate::clock::{cpu_time, pin};
use crate::instructions;
use crate::memory;
use crate::mt19937::{self, Mt19937};
use crate::report::{Details, Report};
use crate::vm_shapes;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the buffer object
    #[arg(default_value_t = 4 << 30)]
    bo_size: u64,

    /// Pages to bind
    #[arg(default_value_t = 100_000)]
    binds: usize,

    /// Rounds of each case; the median counts. The list walk is timed once
    #[arg(long, default_value_t = 11)]
    rounds: usize,

    /// Also count instructions: run every variant once more under valgrind
    #[arg(long)]
    instructions: bool,
}

#[derive(clap::Args)]
pub struct One {
    /// U, B or S
    layout: String,
    /// "in order" or "random"
    order: String,
    /// Who binds
    variant: String,
    /// Operation: bind, unbind, range, bytes
    what: String,
    bo_size: u64,
    binds: usize,
}

/// Binds that are counted under valgrind.
const COUNTED: usize = 20_000;
/// Bindings that memory is measured with.
const WEIGHED: usize = 1_000_000;
/// Mappings that live while a few come and go, and how many do.
const LIVE: [usize; 3] = [10_000, 100_000, 1_000_000];
const FEW: usize = 1000;
/// How often, one after the other.
const TIMES: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Order {
    InOrder,
    Random,
}

impl Order {
    const fn name(self) -> &'static str {
        match self {
            Self::InOrder => "in order",
            Self::Random => "random",
        }
    }
}

/// A buffer, and where each of its pages is: what the results are checked with.
struct Buffer {
    segments: Vec<Segment<CardAddr>>,
    pages: Vec<u64>,
}

impl Buffer {
    fn new(layout: Layout, bytes: u64) -> Self {
        let segments = of_pages(layout, bytes / PAGE);
        let page = |s: &Segment<CardAddr>| (s.addr.bits()..).step_by(PAGE as usize).take((s.len / PAGE) as usize);
        let pages = segments.iter().flat_map(page).collect();
        Self { segments, pages }
    }

    /// The original program's binds: offsets as it draws them, addresses one after the other, or those in no order.
    fn jobs(&self, order: Order, binds: usize) -> Vec<Job> {
        let mut random = Mt19937::new(42);
        let offsets: Vec<u64> = (0..binds).map(|_| PAGE * random.below(self.pages.len() as u64)).collect();
        let mut places: Vec<u64> = (0..binds as u64).map(|i| BASE + i * PAGE).collect();
        if order == Order::Random {
            random.shuffle(&mut places);
        }
        places.into_iter().zip(offsets).collect()
    }

    fn make(&self, name: &str, binds: usize) -> Result<Box<dyn Binder>, String> {
        make(name, &self.segments, binds as u64).ok_or_else(|| format!("{name} cannot be made"))
    }

    /// Every page is bound to what it should be, and nothing else is.
    fn check_bound(&self, binder: &dyn Binder, jobs: &[Job]) -> Result<(), String> {
        for &(va, offset) in jobs {
            let (want, found) = (self.pages[(offset / PAGE) as usize], binder.translate(va));
            if found != Some(want) {
                return Err(format!("{}: {va:#x} leads to {found:x?}, not {want:#x}", binder.name()));
            }
        }
        match binder.bindings()? {
            n if n == jobs.len() => Ok(()),
            n => Err(format!("{}: {n} pages are bound, not {}", binder.name(), jobs.len())),
        }
    }
}

/// Nothing is bound.
fn check_unbound(binder: &dyn Binder, jobs: &[Job]) -> Result<(), String> {
    let stale = jobs.iter().find(|(va, _)| binder.translate(*va).is_some());
    match (stale, binder.bindings()?) {
        (None, 0) => Ok(()),
        (stale, n) => Err(format!("{}: {n} pages are still bound, {stale:x?} in the table", binder.name())),
    }
}

/// Medians in nanoseconds a page, by (layout, order, variant): bind, unbind.
type Medians = HashMap<(Layout, Order, &'static str), (f64, f64)>;

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    mt19937::check()?;
    let pages = options.bo_size / PAGE;
    if !options.bo_size.is_multiple_of(PAGE)
        || pages == 0
        || pages > 1 << 24
        || options.binds < 2
        || options.binds > 1 << 24
    {
        return Err("a buffer of 1 to 2^24 whole pages of 16 KiB, and 2 to 2^24 binds".into());
    }
    let mut report = Report::new("vm-bind");
    pin();
    let mut medians = Medians::new();
    for layout in [Layout::Single, Layout::Long, Layout::Buddy] {
        let buffer = Buffer::new(layout, options.bo_size);
        report.say(format!(
            "{}: BO size {} ({pages} pages in {} runs) with {} binds",
            layout.name(),
            options.bo_size,
            buffer.segments.len(),
            options.binds
        ));
        for order in [Order::InOrder, Order::Random] {
            case(&mut report, &mut medians, &buffer, layout, order, options)?;
        }
    }
    vm_shapes::run(&mut report, options.rounds)?;
    let range = range_unbind(&mut report, options)?;
    let live = live(&mut report, options)?;
    bytes(&mut report, options)?;
    goals(&mut report, &medians, range, live);
    Ok(report)
}

/// All variants in turn.
fn case(
    report: &mut Report,
    medians: &mut Medians,
    buffer: &Buffer,
    layout: Layout,
    order: Order,
    options: &Options,
) -> Result<(), Box<dyn std::error::Error>> {
    let (n, jobs) = (options.binds, buffer.jobs(order, options.binds));
    let mut binders = Vec::new();
    let mut samples = vec![[const { Vec::new() }; 2]; ALL.len()];
    let mut firsts = Vec::new();
    for (name, samples) in ALL.into_iter().zip(&mut samples) {
        // The first bind pays for the array or the index.
        let mut binder = None;
        let first = cpu_time(|| {
            binder = buffer.make(name, n).ok();
            if let Some(binder) = &mut binder {
                binder.prepare(&jobs[..1]);
                binder.bind(&jobs[..1]);
            }
        });
        let mut binder = binder.ok_or("a variant cannot be made")?;
        binder.prepare(&jobs[1..]);
        let bind = cpu_time(|| binder.bind(&jobs[1..])) / (n - 1) as f64 * n as f64;
        buffer.check_bound(binder.as_ref(), &jobs)?;
        binder.prepare(&jobs);
        let unbind = cpu_time(|| binder.unbind(&jobs));
        check_unbound(binder.as_ref(), &jobs)?;
        if name == BEFORE {
            samples[0].push(bind);
            samples[1].push(unbind);
        }
        binders.push(binder);
        firsts.push(first);
    }
    for round in 0..options.rounds {
        for turn in 0..binders.len() {
            let k = (round + turn) % binders.len();
            let binder = binders[k].as_mut();
            if binder.name() != BEFORE {
                samples[k][0].push(cpu_time(|| binder.bind(&jobs)));
                samples[k][1].push(cpu_time(|| binder.unbind(&jobs)));
            }
        }
    }
    for (binder, samples) in binders.iter().zip(&samples) {
        check_unbound(binder.as_ref(), &jobs)?;
        let name = binder.name();
        let mut both = [0.0; 2];
        for (k, what) in ["bind", "unbind"].into_iter().enumerate() {
            let mut details = Details { items: Some(n as u64), ..Details::default() };
            if options.instructions && name != BEFORE && layout != Layout::Buddy {
                let (size, counted) = (options.bo_size.to_string(), COUNTED.to_string());
                let arguments = ["one-vm-bind", layout.name(), order.name(), name, what, &size, &counted];
                let count = instructions::count(&format!("*timed_{what}s*"), &arguments)?;
                details.instructions_per_item = Some(count as f64 / COUNTED as f64);
            }
            let row = format!("{}, {}, {what}", layout.name(), order.name());
            both[k] = report.detailed_row(&row, name, n as u64 * PAGE, &samples[k], details) / n as f64;
        }
        medians.insert((layout, order, name), (both[0], both[1]));
    }
    // As the original program prints it.
    let mop = |seconds: f64| format!("per op: {:.1}ns {:.6}Mop/s", seconds * 1e9, 1e-6 / seconds);
    for (binder, first) in binders.iter().zip(firsts) {
        let (bind, unbind) = medians[&(layout, order, binder.name())];
        report.say(format!(" {}, VAs {}", binder.name(), order.name()));
        report.say(format!("  first bind: {:.0}ns", first * 1e9));
        report.say(format!("  other binds: {:.0}ns {}", bind * 1e9 * (n - 1) as f64, mop(bind)));
        report.say(format!("  unbinds: {:.0}ns {}", unbind * 1e9 * n as f64, mop(unbind)));
    }
    Ok(())
}

/// One unbind of all pages, which were bound one by one. Gives nanoseconds a page for ours, for the stores, and for
/// ours with two buffers.
fn range_unbind(report: &mut Report, options: &Options) -> Result<[f64; 3], Box<dyn std::error::Error>> {
    let buffer = Buffer::new(Layout::Single, options.bo_size);
    let (n, jobs) = (options.binds, buffer.jobs(Order::InOrder, options.binds));
    let names: Vec<&str> = ALL.into_iter().filter(|&name| ![BEFORE, BATCH, ARRAY].contains(&name)).collect();
    let mut binders = names.iter().map(|name| buffer.make(name, n)).collect::<Result<Vec<_>, _>>()?;
    let mut samples = vec![Vec::new(); binders.len()];
    for round in 0..=options.rounds {
        for turn in 0..binders.len() {
            let k = (round + turn) % binders.len();
            let binder = binders[k].as_mut();
            binder.bind(&jobs);
            if round == 0 {
                buffer.check_bound(binder, &jobs)?;
            }
            let seconds = cpu_time(|| binder.unbind_range(n as u64));
            if round == 0 {
                check_unbound(binder, &jobs)?;
            } else {
                samples[k].push(seconds);
            }
        }
    }
    let mut found = [f64::NAN; 3];
    for (name, samples) in names.iter().zip(&samples) {
        let mut details = Details { items: Some(n as u64), ..Details::default() };
        if options.instructions {
            let (size, counted) = (options.bo_size.to_string(), COUNTED.to_string());
            let arguments = ["one-vm-bind", "U", Order::InOrder.name(), name, "range", &size, &counted];
            let count = instructions::count("*timed_range*", &arguments)?;
            details.instructions_per_item = Some(count as f64 / COUNTED as f64);
        }
        let median = report.detailed_row("U, unbind of the range", name, n as u64 * PAGE, samples, details) / n as f64;
        match *name {
            OURS => found[0] = median * 1e9,
            LIMIT => found[1] = median * 1e9,
            TWO => found[2] = median * 1e9,
            _ => {}
        }
    }
    Ok(found)
}

/// A few random pages of many are unbound and bound anew. Gives the bind of ours at each number of live mappings.
fn live(report: &mut Report, options: &Options) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
    let buffer = Buffer::new(Layout::Single, options.bo_size);
    let names: Vec<&str> = ALL.into_iter().filter(|&name| ![BEFORE, BATCH, ARRAY].contains(&name)).collect();
    let mut found = Vec::new();
    for live in LIVE {
        let mut jobs = buffer.jobs(Order::InOrder, live);
        let mut binders = names.iter().map(|name| buffer.make(name, live)).collect::<Result<Vec<_>, _>>()?;
        for binder in &mut binders {
            binder.bind(&jobs);
        }
        let mut random = Mt19937::new(7);
        let mut samples = vec![[const { Vec::new() }; 2]; binders.len()];
        for round in 0..=options.rounds {
            // Others each time, with other pages of the buffer. Many times in a row, the first ones not timed: who had
            // its turn before has left its own memory in the caches.
            let times: Vec<Vec<Job>> = (0..TIMES)
                .map(|_| {
                    for i in 0..FEW {
                        jobs.swap(i, i + random.below((live - i) as u64) as usize);
                        jobs[i].1 = PAGE * random.below(buffer.pages.len() as u64);
                    }
                    jobs[..FEW].to_vec()
                })
                .collect();
            for turn in 0..binders.len() {
                let k = (round + turn) % binders.len();
                let binder = binders[k].as_mut();
                for (time, jobs) in times.iter().enumerate() {
                    let unbind = cpu_time(|| binder.unbind(jobs));
                    let bind = cpu_time(|| binder.bind(jobs));
                    if round > 0 && time >= TIMES / 4 {
                        samples[k][0].push(bind);
                        samples[k][1].push(unbind);
                    }
                }
            }
        }
        for (binder, samples) in binders.iter().zip(&samples) {
            buffer.check_bound(binder.as_ref(), &jobs)?;
            for (what, samples) in ["bind", "unbind"].into_iter().zip(samples) {
                let details = Details { items: Some(FEW as u64), ..Details::default() };
                let row = format!("{live} live, {what}");
                let median = report.detailed_row(&row, binder.name(), FEW as u64 * PAGE, samples, details);
                if binder.name() == OURS && what == "bind" {
                    found.push(median);
                }
            }
        }
    }
    Ok(found)
}

/// Memory of a million bindings, table included, in a process each.
fn bytes(report: &mut Report, options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let (size, weighed) = (options.bo_size.to_string(), WEIGHED.to_string());
    for order in [Order::InOrder, Order::Random] {
        for name in ALL
            .into_iter()
            .filter(|&name| ![BEFORE, LEAN, LIMIT].contains(&name) && (name == OURS || !SHAPES.contains(&name)))
        {
            let bytes = memory::of(&["one-vm-bind", "U", order.name(), name, "bytes", &size, &weighed])?;
            report.note(&format!("bytes a binding, {}", order.name()), name, bytes / WEIGHED as f64);
        }
    }
    Ok(())
}

fn goals(report: &mut Report, medians: &Medians, range: [f64; 3], live: Vec<f64>) {
    use Layout::{Long, Single};
    use Order::{InOrder, Random};
    let of = |layout, order, name| medians.get(&(layout, order, name)).copied().unwrap_or((f64::NAN, f64::NAN));
    let bind = |layout, order, name| of(layout, order, name).0;
    let unbind = |layout, name| of(layout, InOrder, name).1;
    for shape in SHAPES {
        for (layout, order, goal) in
            [(Long, InOrder, 8.0), (Single, InOrder, 15.0), (Long, Random, 6.0), (Single, Random, 10.0)]
        {
            let name = format!("{}, VAs {}: bind, the posted patch / {shape}", layout.name(), order.name());
            report.at_least(&name, goal, bind(layout, order, PATCH) / bind(layout, order, shape));
        }
        for layout in [Long, Single] {
            let name = format!("{}, VAs in order: unbind, gpuvm-like / {shape}", layout.name());
            report.at_least(&name, 10.0, unbind(layout, PATCH) / unbind(layout, shape));
        }
    }
    report.at_least("S: bind, before / ours", 150.0, bind(Long, InOrder, BEFORE) / bind(Long, InOrder, OURS));
    for (layout, shape) in [(Long, OURS), (Single, OURS), (Long, RESERVED), (Single, RESERVED)] {
        let name = format!("{}, VAs in order: bind, {shape} / limit", layout.name());
        report.at_most(&name, 2.5, bind(layout, InOrder, shape) / bind(layout, InOrder, LIMIT));
    }
    let growth = live.last().copied().unwrap_or(f64::NAN) / live.first().copied().unwrap_or(f64::NAN);
    report.at_most("bind at 10^6 live mappings / at 10^4", 2.5, growth);
    report.at_most_in("unbind of a range, a page", 7.0, range[0], "ns, at most");
    report.at_most("unbind of a range: ours / a loop of plain stores", 3.0, range[0] / range[1]);
    report.at_most("unbind of a range: ours, 2 buffers / a loop of plain stores", 3.0, range[2] / range[1]);
    for (what, goal) in [("bind", 250.0), ("unbind", 150.0)] {
        if let Some(count) = report.instructions(&format!("U, in order, {what}"), OURS) {
            report.at_most_in(&format!("U: instructions of one {what} (stretch)"), goal, count, "at most");
        }
    }
}

/// One thing of one variant: the loop that callgrind counts, or the memory taken by it.
pub fn one(options: &One) -> Result<(), Box<dyn std::error::Error>> {
    let layouts = [Layout::Single, Layout::Buddy, Layout::Long];
    let layout = layouts.into_iter().find(|l| l.name() == options.layout).ok_or("no such layout")?;
    let order =
        [Order::InOrder, Order::Random].into_iter().find(|o| o.name() == options.order).ok_or("no such order")?;
    let buffer = Buffer::new(layout, options.bo_size);
    let jobs = buffer.jobs(order, options.binds);
    let mut binder = buffer.make(&options.variant, options.binds)?;
    binder.prepare(&jobs);
    let before = memory::resident();
    binder.bind(&jobs);
    match options.what.as_str() {
        "bind" => {}
        "unbind" => binder.unbind(&jobs),
        "range" => binder.unbind_range(options.binds as u64),
        "bytes" => println!("{}", memory::resident() - before),
        _ => return Err("no such thing to do".into()),
    }
    Ok(())
}
