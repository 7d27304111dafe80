//! Look-ups at random addresses of mapped tables.

use dmalane::iopt::{Arm64S1_4k, X86_64_4Level};

use crate::clock::{pin, time};
use crate::instructions::{self, Operation};
use crate::job::{Job, PAGE, Random, contiguous};
use crate::layers;
use crate::peers;
use crate::report::{Details, Report};
use crate::subject::{Floor, Ours, Shape, Subject, check_mapped, timed_find};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 51)]
    rounds: usize,

    /// Also count instructions of the first case: run every variant once more under valgrind
    #[arg(long)]
    instructions: bool,
}

const DISCRETE: &str = "32M of discrete pages";

/// Tables that devices walk.
const WALKED: [&str; 3] = ["ours, pool", "ours, shared pool", "ours, card"];

/// Look-ups in one sample.
const LOOKUPS: usize = 8192;

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("lookup");
    pin();
    let jobs = [
        Job::discrete(DISCRETE, 8192),
        Job::new("1G by 4K pages", &contiguous(1 << 30, PAGE), 1, PAGE),
        Job::new("64G by 1G leaves", &contiguous(64 << 30, 1 << 30), 1, 1 << 30),
    ];
    for job in jobs {
        let mut subjects: Vec<Box<dyn Subject>> = vec![
            layers::before(),
            Box::new(Ours::<Arm64S1_4k>::new("ours", Shape::List)),
            Box::new(Ours::<X86_64_4Level>::new("ours, x86-64", Shape::List)),
            Box::new(Ours::in_pool(WALKED[0], Shape::List)),
            Box::new(Ours::in_shared_pool(WALKED[1], Shape::List)),
            Box::new(Ours::on_card(WALKED[2], Shape::List)?),
        ];
        subjects.extend(peers::all().into_iter().filter(|s| !s.name().contains("modify_range")));
        subjects.push(Box::new(Floor::new(&job)));
        let mut random = Random(11);
        let places: Vec<(u64, u64)> = job.places().collect();
        let picks: Vec<(u64, u64)> = (0..LOOKUPS).map(|_| places[random.below(places.len() as u64) as usize]).collect();
        let at: Vec<u64> = picks.iter().map(|&(at, _)| at).collect();
        let want = picks.iter().fold(0u64, |sum, &(_, to)| sum.wrapping_add(to));
        for subject in &mut subjects {
            subject.map(&job);
            check_mapped(subject.as_ref(), &job)?;
        }
        let mut samples = vec![Vec::new(); subjects.len()];
        for round in 0..options.rounds {
            for turn in 0..subjects.len() {
                let s = (round + turn) % subjects.len();
                for go in 0..2 {
                    let mut found = 0;
                    let seconds = time(|| found = timed_find(subjects[s].as_ref(), &at));
                    if found != want {
                        return Err(format!("{}, {}: a look-up went astray", job.name, subjects[s].name()).into());
                    }
                    if go == 1 {
                        samples[s].push(seconds);
                    }
                }
            }
        }
        let (mut ours, mut peer) = (Vec::new(), f64::INFINITY);
        for (subject, samples) in subjects.iter().zip(&samples) {
            let mut details = Details { items: Some(LOOKUPS as u64), ..Details::default() };
            if options.instructions && job.name == DISCRETE && !WALKED[1..].contains(&subject.name()) {
                let count = instructions::of("32M", subject.name(), Operation::Find)?;
                details.instructions_per_item = Some(count as f64 / 8192.0);
            }
            let median = report.detailed_row(&job.name, subject.name(), 8 * LOOKUPS as u64, samples, details);
            match subject.name() {
                name if name == "ours" || WALKED.contains(&name) => ours.push((name, median)),
                name if name.starts_with("peer:") => peer = peer.min(median),
                _ => {}
            }
        }
        for (name, median) in ours {
            report.at_most(&format!("{}: {name} / fastest peer", job.name), 1.2, median / peer);
        }
    }
    Ok(report)
}
