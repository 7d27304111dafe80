//! `dmalane verify`: files against their manifest.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use dmalane::load::{ModelSet, hash_in_name};
use serde_json::json;

use crate::failure::Failure;
use crate::layout::{count, good, plain};
use crate::model::{self, ReadMode};
use crate::output;
use crate::progress::Progress;
use crate::size::{binary, duration, rate};
use crate::source::{self, Copied};

const EXAMPLES: &str = "\
Examples:
  dmalane verify model.safetensors --manifest model.manifest
  dmalane verify models/minilm --manifest model.manifest --json     all shards of a model
  dmalane verify org/name                         files of Hugging Face's cache, by their names

`dmalane manifest` makes the manifest. `dmalane load --manifest` and `dmalane read --manifest` check while they read.
Files that the manifest has and that are not named are only missing if a directory or an index is named.

Exit status: 0 no difference, 1 a difference or an error, 2 usage error.";

/// Compare files with their manifest, or with the hashes by which they are named.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Verify {
    /// Files to compare, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// The manifest, as `dmalane manifest` writes it [default: names that are hashes]
    ///
    /// Without it, files are compared with the SHA-256 by which they are named, as in the cache of Hugging Face's
    /// libraries.
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,

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
        source::check(self.files.iter().chain(&self.manifest))?;
        let manifest = model::manifest(self.manifest.as_deref())?;
        let mut copied = Copied::default();
        let mut inputs = self.mode.open(ModelSet::there(&self.files)?, &self.files, &mut copied)?;
        if self.manifest.is_none() {
            let unnamed = inputs.files.iter().find(|input| hash_in_name(&input.source.path).is_none());
            if let Some(input) = unnamed {
                let message = format!("nothing to compare {} with", plain(&input.source.path.to_string_lossy()));
                return Err(Failure::usage(message).hint(
                    "--manifest names a manifest; without one, files are compared with their names in the cache of \
                     Hugging Face's libraries",
                ));
            }
        }
        let bar = Progress::new("verify", !(self.quiet || self.json));
        let bytes = inputs.bytes();
        bar.set_length(bytes);
        let start = Instant::now();
        let mut progress = |n| {
            bar.advance(n);
            ControlFlow::Continue(())
        };
        let found = inputs.verify(self.manifest.is_some().then_some(&manifest), &mut progress);
        let differences = found.map_err(|e| Failure::because("the verification failed", &e))?;
        bar.finish();
        let (files, wall) = (inputs.files.len(), start.elapsed());
        let unchecked = inputs.unchecked(&manifest);
        let rest = format!("Not checked: {} of the manifest not named", count(unchecked, "file"));
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
            let from = if self.manifest.is_some() { "the manifest" } else { "the names" };
            let failure = format!("{} from {from}", count(differences.len(), "difference"));
            let failure = differences.iter().map(ToString::to_string).fold(Failure::new(failure), Failure::cause);
            return Err(if unchecked > 0 { failure.hint(rest) } else { failure });
        }
        let (files, took, rate) = (count(files, "file"), duration(wall), rate(bytes, wall));
        let verified = good(if unchecked > 0 { "Verified in part" } else { "Verified" });
        let mut text = format!("{verified}: {files}, {} in {took} ({rate})\n", binary(bytes));
        text += &copied.text();
        if unchecked > 0 {
            text += &format!("{rest}\n");
        }
        output::print_text(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}
