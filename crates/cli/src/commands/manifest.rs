//! `dmalane manifest`: hashes of every tensor of a model.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::load::Manifest as Hashes;

use crate::failure::Failure;
use crate::layout::{count, plain};
use crate::model::{self, ReadMode};
use crate::output::{self, Outputs};
use crate::progress::Progress;
use crate::size::{binary, duration, rate};
use crate::source::{self, Copied};

const EXAMPLES: &str = "\
Examples:
  dmalane manifest model.safetensors -o model.manifest
  dmalane manifest models/minilm --sha256 -o minilm.manifest     all shards of a model
  dmalane manifest model.gguf
  dmalane verify model.safetensors --manifest model.manifest
  dmalane load model.safetensors --manifest model.manifest     check while loading

Every byte of a file belongs to a region: the header, a tensor, or a gap between tensors. Each has its XXH3-64, \
which finds damage. SHA-256 (--sha256) also finds forgery, as long as the manifest comes from somebody you trust.

Exit status: 0 written, 1 bad file, 2 usage error.";

/// Hash every tensor of a model, so that damage can be found and named.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Manifest {
    /// Files to hash, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Write the manifest to this file [default: to stdout]
    #[arg(short, long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    output: Option<PathBuf>,

    /// Take SHA-256 as well
    #[arg(long)]
    sha256: bool,

    #[command(flatten)]
    replace: output::Replace,

    #[command(flatten)]
    mode: ReadMode,

    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

impl Manifest {
    /// Hashes the files, and writes the manifest.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(&self.files)?;
        let mut copied = Copied::default();
        let mut inputs = self.mode.open(model::set(&self.files)?, &self.files, &mut copied)?;
        let opened = inputs.files.iter().map(|input| &input.source.path);
        let read = output::named_files(self.files.iter().chain(opened));
        let outputs = Outputs::new(self.replace, [("--output", self.output.as_ref())])?.excluding(&read)?;
        let bar = Progress::new("manifest", !self.quiet);
        bar.set_length(inputs.bytes());
        let start = Instant::now();
        let hashes = Hashes::of(&mut inputs.files, self.sha256, &mut |n| {
            bar.advance(n);
            ControlFlow::Continue(())
        });
        let hashes = hashes.map_err(|e| Failure::because("cannot make a manifest", &e))?;
        let time = start.elapsed();
        bar.finish();
        let Some(path) = &self.output else {
            output::print(&hashes.to_json())?;
            return Ok(ExitCode::SUCCESS);
        };
        outputs.write("--output", "", || Ok(hashes.to_json().into_bytes()))?;
        let tensors = hashes.files.iter().flat_map(|file| &file.regions).filter(|r| r.part.tensor().is_some()).count();
        let bytes: u64 = hashes.files.iter().map(|file| file.bytes).sum();
        output::print_text(&format!(
            "Wrote {}: {} in {}, {} hashed in {} ({})\n{}",
            plain(&path.to_string_lossy()),
            count(tensors, "tensor"),
            count(hashes.files.len(), "file"),
            binary(bytes),
            duration(time),
            rate(bytes, time),
            copied.text(),
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}
