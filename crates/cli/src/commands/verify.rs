//! `dmalane verify`: files against their manifest.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::load::Difference;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::layout::{count, good};
use crate::model::{self, Opened, ReadMode};
use crate::output;
use crate::progress::Progress;
use crate::size::{binary, duration, rate};
use crate::source::{self, Copied};

const EXAMPLES: &str = "\
Examples:
  dmalane verify model.safetensors --manifest model.manifest
  dmalane verify models/minilm --manifest model.manifest --json     all shards of a model

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

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// The result of the comparisons.
struct Outcome {
    differences: Vec<Difference>,
    files: usize,
    bytes: u64,
    wall: Duration,
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
            "copied_first_bytes": self.copied.bytes,
            "copied_first_s": self.copied.time.as_secs_f64(),
            "unchecked_files": self.unchecked,
            "differences": self.differences,
        })
    }

    fn text(&self) -> String {
        let mut text = format!(
            "{}: {}, {} in {} ({})\n{}",
            good("Verified"),
            count(self.files, "file"),
            binary(self.bytes),
            duration(self.wall),
            rate(self.bytes, self.wall),
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
        let bar = Progress::new("verify", !(self.quiet || self.json));
        bar.set_length(bytes);
        let start = Instant::now();
        let found = manifest.verify(&mut inputs, whole, &mut |n| {
            bar.advance(n);
            ControlFlow::Continue(())
        });
        let differences = found.map_err(|e| Failure::because("the verification failed", &e))?;
        bar.finish();
        let (files, wall) = (inputs.len(), start.elapsed());
        let unchecked = if whole { 0 } else { manifest.files.len().saturating_sub(files) };
        let outcome = Outcome { differences, files, bytes, wall, unchecked, copied };
        let verified = outcome.differences.is_empty();
        match self.json {
            true => output::print_json(&outcome.json())?,
            false if verified => output::print_text(&outcome.text())?,
            false => {
                let failure = format!("{} from the manifest", count(outcome.differences.len(), "difference"));
                let causes = outcome.differences.iter().map(Difference::to_string);
                return Err(causes.fold(Failure::new(failure), Failure::cause));
            }
        }
        Ok(ExitCode::from(u8::from(!verified)))
    }
}
