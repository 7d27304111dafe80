//! Input addresses: what finding a free range costs beside mapping it.
//!
//! The space is in use: a thousand live ranges of the original report's sizes with holes between them, from frees in
//! no order. In each step a range is taken, mapped, unmapped and given back; the steps are timed apart.

use dmalane::addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, Segment, Span};
use dmalane::iopt::{Arm64S1_4k, HeapTables, PageTable};

use crate::clock::{pin, time};
use crate::job::{Job, PAGE, Random, discrete};
use crate::layers;
use crate::report::{Details, Report};
use crate::subject::{TABLES_AT, check_mapped, timed_map};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 51)]
    rounds: usize,
}

const SIZES: [(&str, u64); 6] =
    [("4K", 4 << 10), ("64K", 64 << 10), ("1M", 1 << 20), ("2M", 2 << 20), ("12M", 12 << 20), ("32M", 32 << 20)];
const SPACE: u64 = 64 << 30;
const START: u64 = 4 << 30;
/// Ranges that stay in use.
const LIVE: usize = 1000;
/// Steps of one sample.
const STEPS: usize = 64;

type Table = PageTable<Arm64S1_4k, Iova, PhysAddr, HeapTables<PhysAddr>>;

/// The alignment that lets a buffer of this length have the largest pages.
fn align(len: u64) -> PageSize {
    if len >= PageSize::SIZE_2M.bytes() { PageSize::SIZE_2M } else { PageSize::SIZE_4K }
}

/// A space with ranges in use and holes between them.
fn used() -> Result<RangeAllocator<Iova>, Box<dyn std::error::Error>> {
    let space = Span::new(Iova::new(START), SPACE).ok_or("a space")?;
    let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
    let (mut random, mut live) = (Random(9), Vec::new());
    for step in 0..20 * LIVE {
        if live.len() >= LIVE + LIVE / 2 || step % 3 == 2 {
            let k = random.below(live.len() as u64) as usize;
            iovas.free(live.swap_remove(k))?;
        } else {
            let (_, len) = SIZES[random.below(SIZES.len() as u64) as usize];
            // One in four is of odd length, so that the holes are too.
            let len = if random.below(4) == 0 { PAGE * (1 + random.below(len / PAGE)) } else { len };
            live.push(iovas.allocate(len, align(len))?);
        }
    }
    while live.len() > LIVE {
        let k = random.below(live.len() as u64) as usize;
        iovas.free(live.swap_remove(k))?;
    }
    Ok(iovas)
}

/// The floor of an allocator: a stack of ranges for one size.
struct Stack {
    free: Vec<Span<Iova>>,
}

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("iova");
    pin();
    for (name, len) in SIZES {
        let mut iovas = used()?;
        let mut cache = RangeCache::new(used()?);
        let holes = iovas.free_ranges().count();
        let mut stack = Stack { free: Vec::new() };
        for k in 0..STEPS as u64 {
            stack.free.push(Span::new(Iova::new(START + k * len), len).ok_or("a span")?);
        }
        let mut table = Table::new(HeapTables::new(TABLES_AT))?;
        let list = discrete((len / PAGE) as usize, PAGE);
        let job = Job::new(name, &list, STEPS, PAGE);
        let mut old = [layers::before(), layers::before_static()];
        for subject in &mut old {
            subject.map(&job);
            check_mapped(subject.as_ref(), &job)?;
        }
        let mut samples: [Vec<f64>; 8] = Default::default();
        for _ in 0..options.rounds {
            let (mut taken, mut popped) = (Vec::with_capacity(STEPS), Vec::with_capacity(STEPS));
            let take = time(|| taken.extend((0..STEPS).map(|_| iovas.allocate(len, align(len)))));
            let taken: Vec<Span<Iova>> = taken.into_iter().collect::<Result<_, _>>()?;
            let map = time(|| taken.iter().for_each(|&span| map(&mut table, span, &list)));
            for &span in &taken {
                check(&table, span, &list)?;
            }
            let unmap = time(|| taken.iter().for_each(|&span| unmap(&mut table, span)));
            let give = time(|| taken.iter().rev().for_each(|&span| iovas.free(span).expect("taken before")));
            let mut leases: Vec<Result<Lease<Iova>, _>> = Vec::with_capacity(STEPS);
            let take_cached = time(|| leases.extend((0..STEPS).map(|_| cache.allocate(len, align(len)))));
            let leases: Vec<Lease<Iova>> = leases.into_iter().collect::<Result<_, _>>()?;
            disjoint(&leases)?;
            let give_cached = time(|| leases.into_iter().for_each(|lease| cache.free(lease)));
            let floor = time(|| {
                popped.extend((0..STEPS).map(|_| stack.free.pop().expect("as many as steps")));
                stack.free.extend(popped.drain(..).rev());
            });
            let [dynamic, fixed] = old.each_mut().map(|subject| {
                subject.reset();
                time(|| timed_map(subject.as_mut(), &job))
            });
            let all = [take, give, map + unmap, floor, dynamic, fixed, take_cached, give_cached];
            for (samples, seconds) in samples.iter_mut().zip(all) {
                samples.push(seconds / STEPS as f64);
            }
        }
        let details = Details { items: Some(1), ..Details::default() };
        let with_holes = Details { steps: Some(holes as u64), ..details };
        let take =
            report.detailed_row(name, "ours: RangeAllocator, allocate (steps: holes)", len, &samples[0], with_holes);
        let give = report.detailed_row(name, "ours: RangeAllocator, free", len, &samples[1], details);
        let take_cached = report.detailed_row(name, "ours: RangeCache, allocate", len, &samples[6], details);
        let give_cached = report.detailed_row(name, "ours: RangeCache, free", len, &samples[7], details);
        let mapped = report.detailed_row(name, "ours: map_sg and unmap", len, &samples[2], details);
        report.detailed_row(name, "floor: a stack of ranges of this size", len, &samples[3], details);
        let dynamic = report.detailed_row(name, "before: map, three dynamic layers", len, &samples[4], details);
        let fixed = report.detailed_row(name, "before: map, three static layers", len, &samples[5], details);
        report.note(name, "allocate and free / map and unmap", (take + give) / mapped);
        report.note(name, "allocate and free / what dynamic dispatch costs", (take + give) / (dynamic - fixed));
        report.note(name, "cached allocate and free / map and unmap", (take_cached + give_cached) / mapped);
    }
    unaligned_holes(&mut report, options.rounds)?;
    phases(&mut report, options.rounds)?;
    many_lengths(&mut report, options.rounds)?;
    Ok(report)
}

/// Ranges of 2 MiB at multiples of that, beside holes as long that begin elsewhere.
fn unaligned_holes(report: &mut Report, rounds: usize) -> Result<(), Box<dyn std::error::Error>> {
    const LEN: u64 = 2 << 20;
    for holes in [1_000, 10_000, 100_000] {
        let space = Span::new(Iova::new(0), LEN * (2 * holes + STEPS as u64 + 2)).ok_or("a space")?;
        let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
        iovas.allocate(PAGE, PageSize::SIZE_4K)?; // so that all behind it begins beside a multiple of 2 MiB
        let mut taken = Vec::new();
        for _ in 0..2 * holes {
            taken.push(iovas.allocate(LEN, PageSize::SIZE_4K)?);
        }
        for &span in taken.iter().step_by(2) {
            iovas.free(span)?;
        }
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let mut taken = Vec::with_capacity(STEPS);
            let take = time(|| taken.extend((0..STEPS).map(|_| iovas.allocate(LEN, PageSize::SIZE_2M))));
            let taken: Vec<Span<Iova>> = taken.into_iter().collect::<Result<_, _>>()?;
            let give = time(|| taken.iter().for_each(|&span| iovas.free(span).expect("taken before")));
            for (samples, seconds) in samples.iter_mut().zip([take, give]) {
                samples.push(seconds / STEPS as f64);
            }
        }
        let found = iovas.free_ranges().count() as u64;
        let case = format!("2M at 2M, {holes} unaligned holes");
        let details = Details { items: Some(1), steps: Some(found), ..Details::default() };
        let take =
            report.detailed_row(&case, "ours: RangeAllocator, allocate (steps: holes)", LEN, &samples[0], details);
        let give = report.detailed_row(&case, "ours: RangeAllocator, free", LEN, &samples[1], details);
        for (what, seconds) in [("allocate", take), ("free", give)] {
            report.at_most_in(&format!("{case}: {what}"), 2.0, 1e6 * seconds, "us, at most");
        }
    }
    Ok(())
}

/// Ranges at a phase behind a multiple of 2 MiB, among holes of which some, or none, have room there.
fn phases(report: &mut Report, rounds: usize) -> Result<(), Box<dyn std::error::Error>> {
    const BLOCK: u64 = 2 << 20;
    for holes in [100_000u64, 1_000_000] {
        let mut iovas =
            RangeAllocator::new(Span::new(Iova::new(0), BLOCK * holes).ok_or("a space")?, PageSize::SIZE_4K);
        // One page in use of every 2 MiB, in its first half, which leaves holes of 352 and of 608 pages.
        let place = |n: u64| n * BLOCK + (n * 97 % 256 + 1) * PAGE;
        for n in 0..holes {
            iovas.reserve(Span::new(Iova::new(place(n)), PAGE).ok_or("a page")?)?;
        }
        let (mut take, mut give, mut refuse) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            let mut found = Vec::with_capacity(STEPS);
            let phase = |n: usize| (place(n as u64 * holes / STEPS as u64) + PAGE) % BLOCK;
            let taken = time(|| {
                found.extend((0..STEPS).map(|n| iovas.allocate_at(BLOCK / 2, PageSize::SIZE_2M, phase(n))));
            });
            let found: Vec<Span<Iova>> = found.into_iter().collect::<Result<_, _>>()?;
            if (0..STEPS).any(|n| found[n].first().bits() % BLOCK != phase(n) || found[n].len() != BLOCK / 2) {
                return Err("a range at another phase, or of another length".into());
            }
            let given = time(|| found.iter().for_each(|&span| iovas.free(span).expect("taken before, by nobody else")));
            let mut refused = 0;
            let none = time(|| {
                for n in 0..STEPS as u64 {
                    let got = iovas.allocate_at(600 * PAGE, PageSize::SIZE_2M, (300 + n) * PAGE);
                    refused += usize::from(got.is_err());
                }
            });
            if refused != STEPS {
                return Err("a range where there is none".into());
            }
            // The first round brings the ranges into the order that this needs.
            if round > 0 {
                for (samples, seconds) in [(&mut take, taken), (&mut give, given), (&mut refuse, none)] {
                    samples.push(seconds / STEPS as f64);
                }
            }
        }
        let case = format!("1M at a phase, {holes} holes");
        let details = Details { items: Some(1), ..Details::default() };
        for (what, samples) in [("allocate_at", take), ("free", give), ("allocate_at, refused", refuse)] {
            let seconds =
                report.detailed_row(&case, &format!("ours: RangeAllocator, {what}"), BLOCK, &samples, details);
            report.at_most_in(&format!("{case}: {what}"), 5.0, 1e6 * seconds, "us, at most");
        }
    }
    Ok(())
}

/// Ranges of many lengths in turn, from a cache.
fn many_lengths(report: &mut Report, rounds: usize) -> Result<(), Box<dyn std::error::Error>> {
    const CALLS: u64 = 4096;
    let mut medians = Vec::new();
    for lengths in [16, 64] {
        let mut cache = RangeCache::new(used()?);
        let mut samples = Vec::new();
        for _ in 0..rounds {
            let mut failed = 0;
            let seconds = time(|| {
                for n in 0..CALLS {
                    match cache.allocate(PAGE * (1 + n % lengths), PageSize::SIZE_4K) {
                        Ok(lease) => cache.free(lease),
                        Err(_) => failed += 1,
                    }
                }
            });
            if failed > 0 {
                return Err(format!("{failed} allocations failed").into());
            }
            samples.push(seconds / CALLS as f64);
        }
        let details = Details { items: Some(1), ..Details::default() };
        let case = format!("{lengths} lengths in turn");
        medians.push(report.detailed_row(&case, "ours: RangeCache, allocate and free", PAGE, &samples, details));
    }
    report.at_most("RangeCache: 64 lengths in turn / 16", 2.0, medians[1] / medians[0]);
    Ok(())
}

/// No two ranges share an address.
fn disjoint(leases: &[Lease<Iova>]) -> Result<(), String> {
    let mut spans: Vec<Span<Iova>> = leases.iter().map(Lease::span).collect();
    spans.sort_by_key(|span| span.first());
    match spans.windows(2).find(|pair| pair[0].last() >= pair[1].first()) {
        None => Ok(()),
        Some(pair) => Err(format!("{} and {} overlap", pair[0], pair[1])),
    }
}

fn map(table: &mut Table, span: Span<Iova>, list: &[Segment<PhysAddr>]) {
    table.map_sg(span.first(), list.iter().copied(), Access::RW).expect("free");
}

fn unmap(table: &mut Table, span: Span<Iova>) {
    let flush = table.unmap(span).expect("no cuts");
    assert_eq!(flush.bytes(), span.len());
    table.free_tables(flush);
}

fn check(table: &Table, span: Span<Iova>, list: &[Segment<PhysAddr>]) -> Result<(), String> {
    for (at, s) in (span.first().bits()..).step_by(PAGE as usize).zip(list) {
        let found = table.lookup(Iova::new(at)).map(|leaf| leaf.to);
        if found != Some(s.addr) {
            return Err(format!("{at:#x} leads to {found:x?}"));
        }
    }
    Ok(())
}
