//! `dmalane verify`: files against their manifest.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::load::{Difference, RegionKind};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::layout::{count, good};
use crate::model::{self, Opened, ReadMode};
use crate::number::within;
use crate::output;
use crate::progress::Progress;
use crate::size::{binary, duration, rate};
use crate::source::{self, Copied};

const EXAMPLES: &str = "\
Examples:
  dmalane verify model.safetensors --manifest model.manifest
  dmalane verify models/minilm --manifest model.manifest --json     all shards of a model
  dmalane verify model.safetensors --manifest model.manifest --repeat 5 --csv

`dmalane manifest` makes the manifest. `dmalane load --manifest` and `dmalane read --manifest` check while they read.
Files that the manifest has and that are not named are only missing if a directory or an index is named.

Exit status: 0 no difference, 1 a difference or an error, 2 usage error.";

/// Compare files with their manifest, and name the tensors that differ.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Verify {
    /// Files to compare, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// The manifest, as `dmalane manifest` writes it
    #[arg(long, value_name = "FILE")]
    manifest: PathBuf,

    #[command(flatten)]
    mode: ReadMode,

    /// Compare N times, and report the run with the median time; a run that finds a difference is the last
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<u32>(1..=1000))]
    repeat: u32,

    /// Print the result as JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// Print the result as CSV: a row for each difference, and one for all files
    #[arg(long)]
    csv: bool,

    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// The cells of a difference in CSV, by their names in JSON.
const CELLS: [&str; 8] = ["file", "problem", "part", "tensor", "start", "end", "expected_bytes", "found_bytes"];

/// A difference in the output of `--json`, which `docs/formats/json.md` describes.
fn json(difference: &Difference) -> Value {
    let (mut part, mut place, mut lengths, mut problem): (Option<&RegionKind>, _, _, _) = (None, None, None, "other");
    match difference {
        Difference::Changed { part: of, start, end, .. } => {
            (problem, part, place) = ("changed", Some(of), Some((*start, *end)));
        }
        Difference::Short { expected, found, part: of, .. } => {
            (problem, part, lengths) = ("short", Some(of), Some((*expected, *found)));
        }
        Difference::Long { expected, found, .. } => (problem, lengths) = ("long", Some((*expected, *found))),
        Difference::LfsPointer { .. } => problem = "lfs_pointer",
        Difference::Missing { .. } => problem = "missing",
        Difference::Unlisted { .. } => problem = "unlisted",
        _ => {}
    }
    json!({
        "file": difference.file(),
        "problem": problem,
        "part": part.map(RegionKind::kind),
        "tensor": part.and_then(RegionKind::tensor).map(|tensor| &tensor.name),
        "start": place.map(|(start, _)| start),
        "end": place.map(|(_, end)| end),
        "expected_bytes": lengths.map(|(expected, _)| expected),
        "found_bytes": lengths.map(|(_, found)| found),
    })
}

/// The result of the comparisons.
struct Outcome {
    differences: Vec<Difference>,
    files: usize,
    bytes: u64,
    /// The time of the median run.
    wall: Duration,
    /// The times of all runs.
    runs: output::WallTimes,
    /// Files of the manifest that were not named.
    unchecked: usize,
    /// The copies that were made before the first run.
    copied: Copied,
}

impl Outcome {
    fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    fn json(&self) -> Value {
        json!({
            "schema": 1,
            "command": "verify",
            "verified": self.differences.is_empty(),
            "bytes": self.bytes,
            "wall_s": self.wall.as_secs_f64(),
            "bytes_per_s": self.bytes_per_s(),
            "runs_s": self.runs.runs_s,
            "median_s": self.runs.median_s,
            "fastest_s": self.runs.fastest_s,
            "slowest_s": self.runs.slowest_s,
            "copied_first_bytes": self.copied.bytes,
            "copied_first_s": self.copied.time.as_secs_f64(),
            "unchecked_files": self.unchecked,
            "differences": self.differences.iter().map(json).collect::<Value>(),
        })
    }

    fn csv(&self) -> String {
        let of_all = ["bytes", "wall_s", "bytes_per_s"];
        let head = CELLS.iter().chain(&of_all).chain(&output::WallTimes::CSV_HEAD);
        let mut out = output::csv_line(head.map(|name| (*name).to_owned()));
        for difference in &self.differences {
            let value = json(difference);
            let cells = CELLS.map(|name| match &value[name] {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            });
            out += &output::csv_line(cells.into_iter().chain([const { String::new() }; 6]));
        }
        let mut all = [const { String::new() }; CELLS.len()];
        let verdict = if self.differences.is_empty() { "none" } else { "differs" };
        (all[0], all[1]) = ("(all)".to_owned(), verdict.to_owned());
        let figures = [self.bytes.to_string(), self.wall.as_secs_f64().to_string(), self.bytes_per_s().to_string()];
        out + &output::csv_line(all.into_iter().chain(figures).chain(self.runs.csv()))
    }

    fn text(&self) -> String {
        let mut text = format!(
            "{}: {}, {} in {} ({})\n{}{}",
            good("Verified"),
            count(self.files, "file"),
            binary(self.bytes),
            duration(self.wall),
            rate(self.bytes, self.wall),
            self.runs.text(),
            self.copied.text(),
        );
        if self.unchecked > 0 {
            text.push_str(&format!("Not checked: {} of the manifest not named\n", count(self.unchecked, "file")));
        }
        text
    }
}

impl Verify {
    /// Compares the files.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(self.files.iter().chain([&self.manifest]))?;
        let manifest = model::manifest(Some(&self.manifest))?;
        let Opened { mut inputs, whole, copied } = self.mode.open(&self.files)?;
        let bytes =
            inputs.iter().filter_map(|i| i.source.file.metadata().ok()).fold(0u64, |n, m| n.saturating_add(m.len()));
        let (mut walls, mut differences) = (Vec::new(), Vec::new());
        for _ in 0..self.repeat {
            let bar = Progress::new("verify", !(self.quiet || self.json || self.csv));
            bar.set_length(bytes);
            let start = Instant::now();
            let found = manifest.verify(&mut inputs, whole, &mut |n| {
                bar.advance(n);
                ControlFlow::Continue(())
            });
            differences = found.map_err(|e| Failure::because("the verification failed", &e))?;
            walls.push(start.elapsed());
            bar.finish();
            if !differences.is_empty() {
                break;
            }
        }
        let (runs, median) = output::WallTimes::of(&walls);
        let unchecked = if whole { 0 } else { manifest.files.len().saturating_sub(inputs.len()) };
        let (files, wall) = (inputs.len(), walls[median]);
        let outcome = Outcome { differences, files, bytes, wall, runs, unchecked, copied };
        let verified = outcome.differences.is_empty();
        match (self.json, self.csv) {
            (true, _) => output::print_json(&outcome.json())?,
            (_, true) => output::print(&outcome.csv())?,
            _ if verified => output::print_text(&outcome.text())?,
            _ => {
                let failure = format!("{} from the manifest", count(outcome.differences.len(), "difference"));
                let causes = outcome.differences.iter().map(Difference::to_string);
                return Err(causes.fold(Failure::new(failure), Failure::cause));
            }
        }
        Ok(ExitCode::from(u8::from(!verified)))
    }
}
