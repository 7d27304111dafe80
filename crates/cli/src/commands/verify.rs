//! `dmalane verify`: files against their manifest.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use dmalane::load::{Difference, RegionKind};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::layout::{count, good};
use crate::model::{self, ReadMode};
use crate::output;
use crate::progress::Progress;
use crate::size::{binary, duration, rate};
use crate::source;

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
    /// Files of the model, or its directory or index; - for standard input
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

impl Verify {
    /// Compares the files.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(self.files.iter().chain([&self.manifest]))?;
        let manifest = model::manifest(Some(&self.manifest))?;
        let (mut inputs, whole) = self.mode.open(&self.files)?;
        let bytes = inputs.iter().filter_map(|i| i.file.metadata().ok()).fold(0u64, |n, m| n.saturating_add(m.len()));
        let bar = Progress::new("verify", !(self.quiet || self.json));
        bar.set_length(bytes);
        let start = Instant::now();
        let differences = manifest.verify(&mut inputs, whole, &mut |n| bar.advance(n));
        let differences = differences.map_err(|e| Failure::because("the verification failed", &e))?;
        let time = start.elapsed();
        bar.finish();
        let unchecked = if whole { 0 } else { manifest.files.len().saturating_sub(inputs.len()) };
        let verified = differences.is_empty();
        if self.json {
            output::print_json(&json!({
                "schema": 1,
                "command": "verify",
                "verified": verified,
                "bytes": bytes,
                "wall_s": time.as_secs_f64(),
                "bytes_per_s": bytes as f64 / time.as_secs_f64().max(1e-9),
                "unchecked_files": unchecked,
                "differences": differences.iter().map(json).collect::<Value>(),
            }))?;
            return Ok(ExitCode::from(u8::from(!verified)));
        }
        if !verified {
            let mut failure = Failure::new(format!("{} from the manifest", count(differences.len(), "difference")));
            for difference in &differences {
                failure = failure.cause(difference.to_string());
            }
            return Err(failure);
        }
        let mut text = format!(
            "{}: {}, {} in {} ({})\n",
            good("Verified"),
            count(inputs.len(), "file"),
            binary(bytes),
            duration(time),
            rate(bytes, time)
        );
        if unchecked > 0 {
            text.push_str(&format!("Not checked: {} of the manifest not named\n", count(unchecked, "file")));
        }
        output::print_text(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}
