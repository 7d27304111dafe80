//! `dmalane compare`: the same load by every loader that is there.

mod loaders;
mod report;
mod worker;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::file::residency;
use rustix::fs::{Advice, fadvise};

use crate::failure::Failure;
use crate::model;
use crate::number::within;
use crate::output;
use crate::progress::Steps;
use crate::source::{self, NamedFiles, SourceFile};
use loaders::{Loader, Sample};

const EXAMPLES: &str = "\
Examples:
  dmalane compare model.safetensors
  dmalane compare model.safetensors --rounds 3 --json
  dmalane compare shard-*.safetensors --python ~/venv/bin/python --rounds 11
  dmalane compare model.safetensors --only dmalane --only plain-read --csv
  dmalane compare model.safetensors --report compared.html
  zcat model.safetensors.gz | dmalane compare -
  dmalane compare model.safetensors --with 'mine=./my-loader --fast'

Each loader runs in a process of its own, in turns, with the files evicted from the page cache (cold) and in it \
(warm). Time is from the first call of the loader until all bytes are in its memory; starting the process and \
importing libraries are not counted. Only memory that a driver can pin is DMA-ready: mappings of the page cache are \
listed as what they are. The bytes of every loader are hashed once and compared.
A loader of --with gets the files as arguments, and prints one line of JSON: see docs/how-to/compare-loaders.md.

Exit status: 0 compared, 1 a loader returned wrong bytes, none could run, or the files cannot be read, 2 usage error.";

/// Compare loaders: the same files, cold and warm, each in its own process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Compare {
    /// Files to load, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Rounds; each runs every loader once cold and once warm
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = within::<u32>(1..=1000))]
    rounds: u32,

    /// Run only this loader; may be given several times
    #[arg(long, value_name = "LOADER")]
    only: Vec<String>,

    /// The Python in which loaders for Python are looked for
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,

    /// Add a loader: a name and a command, which gets the files as further arguments; may be given several times
    #[arg(long, value_name = "NAME=COMMAND", value_parser = loaders::custom)]
    with: Vec<Loader>,

    /// Give up on a loader after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = within::<u64>(1..=86400))]
    timeout: u64,

    /// Write an HTML page that needs no other file
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    report: Option<PathBuf>,

    #[command(flatten)]
    replace: output::Replace,

    /// Print the result as JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// Print the result as CSV
    #[arg(long)]
    csv: bool,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    /// Load by this loader in this process, and print what it took
    #[arg(long, hide = true, value_name = "LOADER")]
    worker: Option<String>,

    /// Hash what the worker loads
    #[arg(long, hide = true, requires = "worker")]
    hash: bool,
}

/// All loaders with their results.
struct Outcome {
    files: Vec<PathBuf>,
    bytes: u64,
    rounds: u32,
    loaders: Vec<Compared>,
    /// The page that was written.
    reported: Option<PathBuf>,
}

/// A loader with its results.
struct Compared {
    name: String,
    /// Its answer when its bytes were hashed, or the reason why it cannot run.
    first: Result<Sample, String>,
    /// Its bytes are those of the files.
    right: bool,
    cold: Vec<Sample>,
    /// Runs of `cold` for which the files could not be evicted.
    not_cold: u32,
    warm: Vec<Sample>,
}

/// A file counts as evicted when no more of it than this is cached, and as cached when no more of it is missing.
const STRAY: f64 = 0.01;

impl Compare {
    /// Compares, and prints the result.
    pub fn run(self) -> Result<ExitCode, Failure> {
        if let Some(name) = &self.worker {
            return worker::run(name, self.hash, &self.files);
        }
        source::check(&self.files)?;
        let mut to = self.report.as_ref().map(|path| self.replace.output(path));
        let (mut named, mut shown, mut bytes) = (NamedFiles::default(), Vec::new(), 0);
        for path in model::files(&self.files)? {
            let source = SourceFile::open(&path)?.with_size()?;
            let meta = source.file.metadata()?;
            model::refuse_lfs_pointer(&source.path, &source.file)?;
            if !meta.is_file() || meta.len() == 0 {
                return Err(Failure::new(format!("{} is not a file with bytes in it", source.path.display())));
            }
            bytes += meta.len();
            to = to.map(|to| to.excluding(&source.path, &meta));
            shown.push(source.path.clone());
            named.add(source)?;
        }
        to = to.map(|to| output::excluding(to, &self.files));
        to.iter().try_for_each(|to| to.check().map_err(|e| output::refused("cannot write the report", &e)))?;
        let outcome = Outcome { files: shown, ..self.compare(&named.paths, bytes)? };
        if let Some(to) = &to {
            let page = report::html(&outcome);
            to.write(page.as_bytes()).map_err(|e| output::refused("cannot write the report", &e))?;
        }
        match (self.json, self.csv) {
            (true, _) => output::print_json(&report::json(&outcome))?,
            (_, true) => output::print(&report::csv(&outcome))?,
            _ => output::print_text(&report::text(&outcome))?,
        }
        let wrong = outcome.loaders.iter().filter(|loader| loader.first.is_ok() && !loader.right);
        let wrong: Vec<&str> = wrong.map(|loader| &*loader.name).collect();
        match wrong.is_empty() {
            true if outcome.loaders.iter().all(|loader| loader.first.is_err()) => {
                Err(Failure::new("no loader could run here"))
            }
            true => Ok(ExitCode::SUCCESS),
            false => Err(Failure::new(format!("not the bytes of the files: {}", wrong.join(", ")))),
        }
    }

    fn compare(&self, files: &[PathBuf], bytes: u64) -> Result<Outcome, Failure> {
        let mut all = loaders::ours()?;
        all.extend(loaders::of_python(&self.python));
        all.extend(self.with.iter().cloned());
        if let Some(unknown) = self.only.iter().find(|name| all.iter().all(|loader| loader.name != **name)) {
            let names: Vec<&str> = all.iter().map(|loader| &*loader.name).collect();
            return Err(Failure::usage(format!("no loader is called {unknown}"))
                .hint(format!("there are {}", names.join(", "))));
        }
        all.retain(|loader| self.only.is_empty() || self.only.contains(&loader.name));
        let timeout = Duration::from_secs(self.timeout);
        // The memory that a loader needs, including its page cache; or half of the memory that is there.
        let touch = dmalane::dma::room().map_or(0, |room| room.bytes / 2).min(bytes.saturating_mul(2));
        let steps = Steps::new("compare", !(self.quiet || self.json || self.csv));
        steps.more(all.len() * (1 + 2 * self.rounds as usize));
        let want = worker::digest(files).map_err(|e| Failure::because("cannot read the files", &e))?;
        let mut loaders: Vec<Compared> = Vec::new();
        for loader in &all {
            steps.step(format!("{}: hash", loader.name));
            let first = loader.run(files, true, 0, timeout);
            let right = first.as_ref().is_ok_and(|sample| sample.sha256.as_deref() == Some(&*want));
            let name = loader.name.clone();
            loaders.push(Compared { name, first, right, cold: Vec::new(), not_cold: 0, warm: Vec::new() });
        }
        for round in 0..self.rounds as usize {
            for cold in [true, false] {
                for i in 0..all.len() {
                    // Nobody always follows the same one.
                    let i = (i + round) % all.len();
                    steps.step(format!("{}: {} {round}", all[i].name, if cold { "cold" } else { "warm" }));
                    if loaders[i].first.is_err() {
                        continue;
                    }
                    let mut stray = false;
                    for path in files {
                        stray |= !prepare(path, cold)?;
                    }
                    match (all[i].run(files, false, touch, timeout), cold) {
                        (Ok(sample), true) => {
                            loaders[i].cold.push(sample);
                            loaders[i].not_cold += u32::from(stray);
                        }
                        (Ok(sample), false) => loaders[i].warm.push(sample),
                        (Err(why), _) => loaders[i].first = Err(why),
                    }
                }
            }
        }
        steps.finish();
        Ok(Outcome { files: files.to_vec(), bytes, rounds: self.rounds, loaders, reported: self.report.clone() })
    }
}

/// Evicts a file from the page cache, or reads it into it. True when it is so then.
fn prepare(path: &PathBuf, cold: bool) -> Result<bool, Failure> {
    let trouble = |e: std::io::Error| Failure::because(format!("cannot prepare {}", path.display()), &e);
    let mut file = File::open(path).map_err(trouble)?;
    let len = file.metadata().map_err(trouble)?.len();
    match cold {
        true => {
            // Pages that are not on the disk yet cannot be evicted. A file that may not be written has none of ours.
            let _ = file.sync_data();
            fadvise(&file, 0, None, Advice::DontNeed).map_err(|e| trouble(e.into()))?;
        }
        false => {
            std::io::copy(&mut file, &mut std::io::sink()).map_err(trouble)?;
        }
    }
    let share = residency(&file, 0, len).map_or(f64::from(u8::from(!cold)), |cached| cached.share());
    Ok(if cold { share <= STRAY } else { share >= 1.0 - STRAY })
}
