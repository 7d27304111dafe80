//! A scatter list of many GiB into page tables whose memory nobody has used: as of a program that maps its memory once.
//!
//! Each sample is a process, which maps the list one time. Rows take turns, round by round; in the first round, all
//! leaves are looked up.

use std::error::Error;
use std::io::Read;
use std::process::{Command, Stdio};

use dmalane::iopt::Arm64S1_4k;
use zerocopy::FromZeros;

use crate::clock::{pin, time};
use crate::job::{Job, PAGE, discrete};
use crate::memory;
use crate::peers;
use crate::report::{Details, Report};
use crate::subject::{Floor, Ours, Pool, Shape, Subject, check_mapped, pool_of, timed_map};

#[derive(clap::Args)]
pub struct Options {
    /// GiB of discrete pages
    #[arg(long, default_value_t = 64)]
    gib: u64,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,

    /// Table memory of all variants in transparent huge pages, as the C library has it
    #[arg(long)]
    huge: bool,
}

#[derive(clap::Args)]
pub struct One {
    gib: u64,
    variant: String,
    /// Look up all leaves
    #[arg(long)]
    check: bool,
}

const OURS: &str = "ours";
const POOL: &str = "ours, pool";
const FLOOR: &str = "floor";

pub fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::new("large");
    let mut names = vec![OURS.to_owned(), POOL.to_owned(), FLOOR.to_owned()];
    names.extend(peers::all().iter().map(|peer| peer.name().to_owned()));
    let mut samples = vec![Vec::new(); names.len()];
    for round in 0..=options.rounds {
        for turn in 0..names.len() {
            let row = (round + turn) % names.len();
            let took = child(options, &names[row], round == 0)?;
            if round > 0 {
                samples[row].push(took);
            }
        }
    }
    let (bytes, leaves) = (options.gib << 30, options.gib << 18);
    let case = format!("{} GiB, {}", options.gib, if options.huge { "new huge pages" } else { "new memory" });
    let mut medians = Vec::new();
    for (name, samples) in names.iter().zip(&samples) {
        let details = Details { items: Some(leaves), ..Details::default() };
        medians.push(report.detailed_row(&case, name, bytes, samples, details));
    }
    let peer = medians[3..].iter().copied().fold(f64::INFINITY, f64::min);
    for (name, ours) in [OURS, POOL].iter().zip(&medians) {
        report.of_rounds(options.rounds).at_most(&format!("{case}: {name} / floor"), 2.0, ours / medians[2]);
        report.of_rounds(options.rounds).at_least(&format!("{case}: fastest peer / {name}"), 2.0, peer / ours);
    }
    Ok(report)
}

/// The seconds that a process of this program takes to map.
fn child(options: &Options, variant: &str, check: bool) -> Result<f64, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["one-large", &options.gib.to_string(), variant]).args(check.then_some("--check"));
    command.env("GLIBC_TUNABLES", format!("glibc.malloc.hugetlb={}", u8::from(options.huge)));
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut text = String::new();
    child.stdout.take().ok_or("no output")?.read_to_string(&mut text)?;
    if !child.wait()?.success() {
        return Err(format!("{variant} failed").into());
    }
    Ok(text.trim().parse().map_err(|_| format!("{variant} printed {text:?}"))?)
}

pub fn one(options: &One) -> Result<(), Box<dyn Error>> {
    pin();
    let job = Job::new("large", &discrete((options.gib << 18) as usize, PAGE), 1, PAGE);
    let mut subject: Box<dyn Subject> = match options.variant.as_str() {
        OURS => Box::new(Ours::<Arm64S1_4k>::new(OURS, Shape::List)),
        POOL => {
            let words = <[_]>::new_box_zeroed_with_elems((job.least_tables() + 8) * 512).map_err(|_| "no memory")?;
            Box::new(Ours::<Arm64S1_4k, Pool>::in_memory(POOL, Shape::List, pool_of(Box::leak(words))))
        }
        FLOOR => Box::new(Floor::new(&job)),
        name => peers::all().into_iter().find(|peer| peer.name() == name).ok_or("no such variant")?,
    };
    memory::find(job.leaves() as usize * 24);
    println!("{}", time(|| timed_map(subject.as_mut(), &job)));
    if options.check { check_mapped(subject.as_ref(), &job).map_err(Into::into) } else { Ok(()) }
}
