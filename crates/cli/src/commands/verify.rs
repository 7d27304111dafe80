//! `dmalane verify`: files against their manifest.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use crate::failure::Failure;
use crate::layout::{count, good};
use crate::model::{self, ReadMode};
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

impl Verify {
    /// Compares the files.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(self.files.iter().chain([&self.manifest]))?;
        let manifest = model::manifest(Some(&self.manifest))?;
        let mut copied = Copied::default();
        let mut inputs = self.mode.open(&self.files, &mut copied)?;
        let whole = inputs.whole;
        let bar = Progress::new("verify", !(self.quiet || self.json));
        let bytes = inputs.bytes();
        bar.set_length(bytes);
        let start = Instant::now();
        let found = manifest.verify(&mut inputs.files, whole, &mut |n| {
            bar.advance(n);
            ControlFlow::Continue(())
        });
        let differences = found.map_err(|e| Failure::because("the verification failed", &e))?;
        bar.finish();
        let (files, wall) = (inputs.files.len(), start.elapsed());
        let unchecked = if whole { 0 } else { manifest.files.len().saturating_sub(files) };
        if self.json {
            output::print_json(&json!({
                "schema": 1,
                "command": "verify",
                "verified": differences.is_empty(),
                "bytes": bytes,
                "wall_s": wall.as_secs_f64(),
                "bytes_per_s": bytes as f64 / wall.as_secs_f64().max(1e-9),
                "copied_first_bytes": copied.bytes,
                "copied_first_s": copied.time.as_secs_f64(),
                "unchecked_files": unchecked,
                "differences": differences,
            }))?;
            return Ok(ExitCode::from(u8::from(!differences.is_empty())));
        }
        if !differences.is_empty() {
            let failure = format!("{} from the manifest", count(differences.len(), "difference"));
            return Err(differences.iter().map(ToString::to_string).fold(Failure::new(failure), Failure::cause));
        }
        let (files, took, rate) = (count(files, "file"), duration(wall), rate(bytes, wall));
        let mut text = format!("{}: {files}, {} in {took} ({rate})\n", good("Verified"), binary(bytes));
        text += &copied.text();
        if unchecked > 0 {
            text += &format!("Not checked: {} of the manifest not named\n", count(unchecked, "file"));
        }
        output::print_text(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}
