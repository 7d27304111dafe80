//! Scatter lists into page tables: sizes of the original report, mixed lists, contiguous memory, large pages, one page.

use std::collections::HashMap;

use dmalane::iopt::{Arm64S1, Arm64S1_4k, X86_64_4Level};

use crate::clock::{pin, time};
use crate::instructions::{self, Operation};
use crate::job::{BLOCK, Job, PAGE, contiguous, discrete, joined, mixed, runs_of};
use crate::layers::{self, Entry, Switches};
use crate::peers;
use crate::report::{Details, Report};
use crate::subject::{
    Floor, Ours, Pool, Shape, Subject, VectorFloor, check_mapped, check_unmapped, timed_map, timed_unmap,
};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 51)]
    rounds: usize,

    /// Also count instructions: run every variant once more under valgrind
    #[arg(long)]
    instructions: bool,

    /// Only the cases whose name contains this; no goals then
    #[arg(long)]
    only: Option<String>,
}

/// A job, and who does it.
pub struct Case {
    pub job: Job,
    pub subjects: Vec<Box<dyn Subject>>,
    /// Rounds are divided by this.
    slow: usize,
    counted: bool,
}

const SIZES: [(&str, usize); 7] =
    [("4K", 1), ("64K", 16), ("1M", 256), ("2M", 512), ("12M", 3072), ("24M", 6144), ("32M", 8192)];

/// The largest size of the original report, which most goals are about.
const SCATTER: &str = "32M";

/// Ours with a format that writes the contiguous hint wherever 16 entries allow it.
const GROUPS: &str = "ours, with groups";

fn ours() -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(Ours::<Arm64S1_4k>::new("ours", Shape::List)),
        Box::new(Ours::<Arm64S1_4k>::new("ours, per entry", Shape::Entry)),
        Box::new(Ours::<Arm64S1_4k, Pool>::in_pool(POOL, Shape::List)),
        Box::new(Ours::<Arm64S1_4k, Pool>::in_pool("ours, pool, per entry", Shape::Entry)),
    ]
}

/// The usual company: before, ours, the peers, the floor.
fn company(job: &Job) -> Vec<Box<dyn Subject>> {
    let mut subjects = vec![layers::before(), layers::ours_in_layers(Entry::Batched, Switches::default())];
    subjects.extend(ours());
    subjects.push(Box::new(Ours::<X86_64_4Level>::new("ours, x86-64", Shape::List)));
    subjects.push(Box::new(Ours::<Arm64S1<12, 48, true>>::new(GROUPS, Shape::List)));
    subjects.extend(peers::all());
    subjects.push(Box::new(Floor::new(job)));
    subjects
}

/// Lengths in pages of the lists on which one call is compared with a call for each entry.
const LENGTHS: [(&str, &[u64]); 8] = [
    ("lengths 1", &[1]),
    ("lengths 2", &[2]),
    ("lengths 3", &[3]),
    ("lengths 8", &[8]),
    ("lengths 1 and 64", &[1, 64]),
    ("lengths 100", &[100]),
    ("lengths 1 and 512", &[1, 512]),
    ("lengths 513", &[513]),
];

/// Ours, with tables in memory that devices walk and threads share.
const POOL: &str = "ours, pool";

/// Pages that continue each other, each an entry: one call makes 2 MiB leaves of them.
const JOINED: &str = "pages in a row";

/// Every case, the jobs made but nothing mapped yet.
pub fn cases(only: &dyn Fn(&str) -> bool) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |job: Job, more: &dyn Fn(&Job) -> Vec<Box<dyn Subject>>, slow, counted| {
        if only(&job.name) {
            let subjects = more(&job);
            cases.push(Case { job, subjects, slow, counted });
        }
    };
    for (name, pages) in SIZES {
        let all = |job: &Job| {
            let mut subjects = company(job);
            if name == SCATTER {
                subjects.push(Box::new(VectorFloor::new(job)));
                subjects.splice(..2, layers::stacks());
            }
            subjects
        };
        add(Job::discrete(name, pages), &all, 1, matches!(name, "4K" | "64K" | SCATTER));
    }
    add(Job::anywhere("4K anywhere", 8192), &company, 1, true);
    add(Job::new("mixed", &mixed(), 1, PAGE), &company, 1, true);
    add(Job::new("1G by 4K", &contiguous(1 << 30, PAGE), 1, PAGE), &company, 4, true);
    add(Job::new("2M blocks", &contiguous(8 << 30, BLOCK), 1, BLOCK), &company, 1, true);
    add(Job::new("2M blocks, discrete", &discrete(4096, BLOCK), 1, BLOCK), &company, 1, true);
    for (name, lengths) in LENGTHS {
        let sum: u64 = lengths.iter().sum();
        let repeat = lengths.len() * (8192 / sum) as usize;
        let list: Vec<u64> = lengths.iter().copied().cycle().take(repeat).collect();
        add(Job::new(name, &runs_of(&list), 1, PAGE), &|_| ours(), 1, true);
    }
    add(Job::new(JOINED, &joined(8192), 1, PAGE), &|_| ours(), 1, true);
    cases
}

/// Medians by (case, operation, variant).
type Medians = HashMap<(String, &'static str, String), f64>;

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("map-sg");
    pin();
    let mut medians = Medians::new();
    let mut memory = None;
    for mut case in cases(&|name| options.only.as_ref().is_none_or(|o| name.contains(o.as_str()))) {
        let tables = check(&mut case)?;
        let rounds = (options.rounds / case.slow).max(3);
        let samples = measure(&mut case, rounds);
        let (bytes, leaves) = (case.job.bytes(), case.job.leaves());
        for (s, (subject, [map, unmap])) in case.subjects.iter().zip(samples).enumerate() {
            let (name, variant) = (&case.job.name, subject.name());
            let counts = layers::counts(variant, &case.job);
            let details = Details {
                items: Some(leaves),
                tables: tables[s],
                crossings: counts.map(|c| c.crossings),
                walks: counts.map(|c| c.walks),
                power_pairs: counts.map(|c| c.power),
                invalidations: counts.map(|c| c.invalidations),
                ..Details::default()
            };
            let calls = case.job.calls.len() as f64;
            let few = Details { items: Some(leaves), ..Details::default() };
            for (operation, samples, details) in [(Operation::Map, map, details), (Operation::Unmap, unmap, few)] {
                // Of one list, as in the original report.
                let each: Vec<f64> = samples.iter().map(|t| t / calls).collect();
                let mut details = Details { items: Some(leaves / case.job.calls.len() as u64), ..details };
                if options.instructions && case.counted {
                    let count = instructions::of(name, variant, operation)?;
                    details.instructions_per_item = Some(count as f64 / leaves as f64);
                }
                let (row, operation) = (format!("{name} {}", operation.name()), operation.name());
                let median = report.detailed_row(&row, variant, bytes / case.job.calls.len() as u64, &each, details);
                medians.insert((name.clone(), operation, variant.to_owned()), median);
            }
            if variant == "ours" && case.job.name == SCATTER {
                memory = tables[s].map(|n| n as f64 / case.job.least_tables() as f64);
            }
        }
    }
    if options.only.is_none() {
        goals(&mut report, &medians, memory.unwrap_or(f64::NAN));
    }
    Ok(report)
}

fn goals(report: &mut Report, medians: &Medians, memory: f64) {
    let of = |case: &str, variant: &str| {
        medians.get(&(case.to_owned(), "map", variant.to_owned())).copied().unwrap_or(f64::NAN)
    };
    let peer = |case: &str| {
        let peers = medians.iter().filter(|((c, o, v), _)| c == case && *o == "map" && v.starts_with("peer:"));
        peers.map(|(_, &t)| t).fold(f64::INFINITY, f64::min)
    };
    let layered = "ours, in layers";
    report.at_least("32M discrete: before / ours, both in layers", 15.0, of(SCATTER, "before") / of(SCATTER, layered));
    report.at_least("32M discrete: fastest peer / ours", 4.0, peer(SCATTER) / of(SCATTER, "ours"));
    report.at_most("32M discrete: ours / no-check floor", 3.0, of(SCATTER, "ours") / of(SCATTER, "floor"));
    report.at_least("mixed: before / ours, both in layers", 5.0, of("mixed", "before") / of("mixed", layered));
    let sizes = SIZES.iter().map(|(name, _)| *name);
    let lists = LENGTHS.iter().map(|(name, _)| *name).chain(sizes).chain(["mixed", "2M blocks, discrete", JOINED]);
    let worst = lists.map(|case| of(case, "ours") / of(case, "ours, per entry")).fold(0.0, f64::max);
    report.at_most("any lengths: ours, one call / a call for each entry, the worst", 1.0, worst);
    report.at_least("1G by 4K: best peer / ours", 2.0, peer("1G by 4K") / of("1G by 4K", "ours"));
    report.at_least("2M blocks: best peer / ours", 1.5, peer("2M blocks") / of("2M blocks", "ours"));
    let groups = peer("2M blocks") / of("2M blocks", GROUPS);
    report.at_least("2M blocks, the format has groups of entries: best peer / ours", 1.5, groups);
    // One page is a call of `map`, here as with the peers.
    for (name, case) in [("next to the last", "4K"), ("anywhere", "4K anywhere")] {
        let name = format!("one page, {name}: ours / fastest peer");
        report.at_most(&name, 1.0, of(case, "ours, per entry") / peer(case));
    }
    report.at_least("32M discrete: before / ours, pool", 15.0, of(SCATTER, "before") / of(SCATTER, POOL));
    report.at_least("32M discrete: fastest peer / ours, pool", 4.0, peer(SCATTER) / of(SCATTER, POOL));
    report.at_most("32M discrete: ours, pool / no-check floor", 3.0, of(SCATTER, POOL) / of(SCATTER, "floor"));
    for (case, goal) in [("mixed", 2.0), ("1G by 4K", 2.0), ("2M blocks", 1.5)] {
        report.at_least(&format!("{case}: best peer / ours, pool"), goal, peer(case) / of(case, POOL));
    }
    for (name, case) in [("next to the last", "4K"), ("anywhere", "4K anywhere")] {
        let name = format!("one page, {name}: ours, pool / fastest peer");
        report.at_most(&name, 1.0, of(case, "ours, pool, per entry") / peer(case));
    }
    report.at_most("32M discrete: tables / the least that will do", 1.01, memory);
}

/// One round of everything with look-ups of every leaf. Gives the tables in use.
fn check(case: &mut Case) -> Result<Vec<Option<usize>>, String> {
    let mut tables = Vec::new();
    for subject in &mut case.subjects {
        subject.reset();
        timed_map(subject.as_mut(), &case.job);
        check_mapped(subject.as_ref(), &case.job)?;
        tables.push(subject.tables());
        timed_unmap(subject.as_mut(), &case.job);
        check_unmapped(subject.as_ref(), &case.job)?;
    }
    Ok(tables)
}

/// Samples of map and unmap of each subject. They take turns, each round begins with another one, and of two goes in a
/// row the second counts: what a variant finds in the caches is its own.
fn measure(case: &mut Case, rounds: usize) -> Vec<[Vec<f64>; 2]> {
    let count = case.subjects.len();
    let mut samples = vec![[const { Vec::new() }; 2]; count];
    for round in 0..rounds {
        for turn in 0..count {
            let s = (round + turn) % count;
            let subject = case.subjects[s].as_mut();
            for go in 0..2 {
                subject.reset();
                let map = time(|| timed_map(subject, &case.job));
                let unmap = time(|| timed_unmap(subject, &case.job));
                if go == 1 {
                    samples[s][0].push(map);
                    samples[s][1].push(unmap);
                }
            }
        }
    }
    samples
}
