//! A 32 GiB BAR into an IO page table, page by page and by the leaves of the table that maps it for the processor.

use dmalane::addr::{Access, Address, DeviceVa, Iova, PageSize, PhysAddr, RangeAllocator, Span};
use dmalane::iopt::{Arm64S1_4k, HeapTables, PageTable, X86_64_4Level};

use crate::clock::{pin, time};
use crate::job::{BASE, BLOCK, Job, PAGE, contiguous};
use crate::peers;
use crate::report::{Details, Report};
use crate::subject::{Floor, Subject, TABLES_AT, check_mapped, check_unmapped, timed_map, timed_unmap};

#[derive(clap::Args)]
pub struct Options {
    /// Map and unmap rounds in a row
    #[arg(long, default_value_t = 100)]
    rounds: usize,

    /// Rounds page by page
    #[arg(long, default_value_t = 5)]
    slow_rounds: usize,
}

const BAR: u64 = 32 << 30;
const GIB: u64 = 1 << 30;
/// Where the BAR lies in memory, and where the processor has it.
const MEMORY: PhysAddr = PhysAddr::new(64 << 30);
const CPU: DeviceVa = DeviceVa::new(1 << 40);

/// The processor's table (its virtual addresses are a space of their own, so any type of address that is not the
/// device's will do).
type Source = PageTable<X86_64_4Level, DeviceVa, PhysAddr, HeapTables<PhysAddr>>;
type Target = PageTable<Arm64S1_4k, Iova, PhysAddr, HeapTables<PhysAddr>>;

/// The BAR in the processor's table by leaves of one size.
fn source(leaf: u64) -> Result<Source, dmalane::iopt::Error> {
    let mut table = Source::new(HeapTables::new(TABLES_AT))?;
    // A whole leaf at a time: a call of this length cannot use a larger one.
    for at in (0..BAR).step_by(leaf as usize) {
        let (va, to) = (CPU.checked_add(at), MEMORY.checked_add(at));
        table.map(va.expect("in range"), to.expect("in range"), leaf, Access::RW)?;
    }
    Ok(table)
}

/// The translations of the source, by its leaves, in one call. Its steps are counted apart: see [`leaves`].
fn through(target: &mut Target, source: &Source) -> Result<(), dmalane::iopt::Error> {
    let span = Span::new(CPU, BAR).expect("in range");
    target.map_through(Iova::new(BASE), source, span, Access::RW).map(|bytes| assert_eq!(bytes, BAR))
}

/// The steps of `map_through`: it goes from run to run of the source.
fn leaves(source: &Source) -> u64 {
    source.runs(Span::new(CPU, BAR).expect("in range")).count() as u64
}

/// Part of the BAR, at an IOVA that is congruent with it: the times of each round, and the leaves.
fn part(count: usize, source: &Source, skip: u64) -> Result<(Vec<f64>, u64), Box<dyn std::error::Error>> {
    let mut target = Target::new(HeapTables::new(TABLES_AT))?;
    let space = Span::new(Iova::new(BASE), 4 * BAR).expect("in range");
    let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
    let (mut times, mut leaves) = (Vec::new(), 0);
    for _ in 0..count {
        let from = Span::new(CPU.checked_add(skip).expect("in range"), BAR - skip).expect("in range");
        let mut span = None;
        let mut mapped = Ok(0);
        times.push(time(|| {
            let at = iovas.allocate_at(from.len(), PageSize::SIZE_1G, skip).expect("the space is large enough");
            mapped = target.map_through(at.first(), source, from, Access::RW);
            span = Some(at);
        }));
        let span = span.expect("set above");
        assert_eq!(mapped?, from.len());
        let last = target.lookup(span.last()).and_then(|leaf| leaf.translate(span.last()));
        if last != MEMORY.checked_add(BAR - 1) {
            return Err(format!("{} leads to {last:?}", span.last()).into());
        }
        leaves = target.leaf_counts().map(|(_, n)| n).sum();
        let flush = target.unmap(span)?;
        target.free_tables(flush);
        iovas.free(span)?;
    }
    Ok((times, leaves))
}

/// The path before: a look-up for every page (`follow_pfnmap`), pages that continue each other joined, what came
/// together mapped by one call. As many steps as pages.
fn page_by_page(target: &mut Target, source: &Source) -> Result<(), dmalane::iopt::Error> {
    let (mut at, mut start, mut len) = (BASE, 0, 0);
    for offset in (0..BAR).step_by(PAGE as usize) {
        let va = CPU.checked_add(offset).expect("in range");
        let to = source.lookup(va).and_then(|leaf| leaf.translate(va)).expect("the whole BAR is mapped").bits();
        if len != 0 && to != start + len {
            target.map(Iova::new(at), PhysAddr::new(start), len, Access::RW)?;
            at += len;
            len = 0;
        }
        if len == 0 {
            start = to;
        }
        len += PAGE;
    }
    target.map(Iova::new(at), PhysAddr::new(start), len, Access::RW)
}

fn check(target: &Target) -> Result<(), String> {
    for offset in (0..BAR).step_by(BLOCK as usize).map(|o| o + 0x128) {
        let at = Iova::new(BASE + offset);
        let found = target.lookup(at).and_then(|leaf| leaf.translate(at)).map(|to| to.bits());
        if found != Some(MEMORY.bits() + offset) {
            return Err(format!("{at} leads to {found:x?}"));
        }
    }
    Ok(())
}

/// Maps and unmaps in a row; the tables of the target are taken down and made again each time, as for a guest that
/// boots.
struct Rounds {
    map: Vec<f64>,
    unmap: Vec<f64>,
    tables: usize,
}

fn rounds(
    count: usize,
    source: &Source,
    map: fn(&mut Target, &Source) -> Result<(), dmalane::iopt::Error>,
) -> Result<Rounds, Box<dyn std::error::Error>> {
    let mut target = Target::new(HeapTables::new(TABLES_AT))?;
    let mut rounds = Rounds { map: Vec::new(), unmap: Vec::new(), tables: 0 };
    let span = Span::new(Iova::new(BASE), BAR).expect("in range");
    for round in 0..count {
        let mut mapped = Ok(());
        rounds.map.push(time(|| mapped = map(&mut target, source)));
        mapped?;
        rounds.tables = target.tables().in_use();
        if round == 0 || round + 1 == count {
            check(&target)?;
        }
        let mut bytes = 0;
        let unmap = time(|| {
            let flush = target.unmap(span);
            if let Ok(flush) = flush {
                bytes = flush.bytes();
                target.free_tables(flush);
            }
        });
        rounds.unmap.push(unmap);
        if bytes != BAR || target.mapped_bytes() != 0 || target.tables().in_use() != 1 {
            return Err("something of the BAR is left".into());
        }
    }
    Ok(rounds)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("bar-map");
    pin();
    for (name, leaf) in [("1 GiB leaves", GIB), ("2 MiB leaves", BLOCK)] {
        let source = source(leaf)?;
        let ours = rounds(options.rounds, &source, through)?;
        let before = rounds(options.slow_rounds, &source, page_by_page)?;
        let steps = [BAR / PAGE, leaves(&source)];
        let variants = [("before: a look-up for every page", &before), ("ours: map_through", &ours)];
        for ((variant, r), steps) in variants.into_iter().zip(steps) {
            let details =
                Details { items: Some(steps), steps: Some(steps), tables: Some(r.tables), ..Details::default() };
            report.detailed_row(&format!("{name}, map"), variant, BAR, &r.map, details);
            let details = Details { items: Some(BAR / GIB), ..Details::default() };
            report.detailed_row(&format!("{name}, unmap"), variant, BAR, &r.unmap, details);
        }
        let (map, unmap) = (median(&ours.map), median(&ours.unmap));
        let worst = ours.map.iter().copied().fold(0.0, f64::max);
        if leaf == GIB {
            let rounds = options.rounds;
            let unit = "us, at most";
            report.at_most_in(&format!("{rounds} rounds in a row, map, the median"), 20.0, map * 1e6, unit);
            report.at_most_in(&format!("{rounds} rounds in a row, map, the slowest"), 20.0, worst * 1e6, unit);
            let steps = steps[0] as f64 / steps[1] as f64;
            report.at_least("steps page by page / steps by leaf, counted", 10_000.0, steps);
            report.at_least("time page by page / time by leaf", 10_000.0, median(&before.map) / map);
            report.at_most("unmap / map, medians", 1.0, unmap / map);
            // Rounds do not get slower: the last tenth against the first.
            let tenth = (rounds / 10).max(1);
            let (first, last) = (median(&ours.map[..tenth]), median(&ours.map[rounds - tenth..]));
            report.at_most("the last tenth of the rounds / the first", 1.5, last / first);
        }
    }
    let whole = source(GIB)?;
    for (name, skip) in [("from 4 KiB on", PAGE), ("from 2 MiB on", BLOCK)] {
        let (times, leaves) = part(options.rounds, &whole, skip)?;
        let case = format!("1 GiB leaves, {name}, map");
        let details = Details { items: Some(leaves), ..Details::default() };
        report.detailed_row(&case, "ours: map_through, congruent", BAR - skip, &times, details);
        report.at_most_in(&format!("{case}, the median"), 20.0, median(&times) * 1e6, "us, at most");
        let fewest = (BAR - skip) / GIB + (GIB - skip) / BLOCK + (BLOCK - skip.min(BLOCK)) / PAGE;
        report.at_most(&format!("{case}, leaves / the fewest"), 1.0, leaves as f64 / fewest as f64);
    }
    // The peers cannot read one table into another; this is their mapping alone, told the one segment.
    let job = Job::new("1 GiB leaves, told where", &contiguous(BAR, GIB), 1, GIB);
    let mut subjects: Vec<Box<dyn Subject>> = peers::all();
    subjects.retain(|s| !s.name().contains("modify_range"));
    subjects.push(Box::new(Floor::new(&job)));
    for subject in &mut subjects {
        let (mut map, mut unmap) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            map.push(time(|| timed_map(subject.as_mut(), &job)));
            check_mapped(subject.as_ref(), &job)?;
            unmap.push(time(|| timed_unmap(subject.as_mut(), &job)));
            check_unmapped(subject.as_ref(), &job)?;
        }
        let details = Details { items: Some(job.leaves()), ..Details::default() };
        report.detailed_row(&format!("{}, map", job.name), subject.name(), BAR, &map, details);
        report.detailed_row(&format!("{}, unmap", job.name), subject.name(), BAR, &unmap, details);
    }
    Ok(report)
}
