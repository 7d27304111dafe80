//! `dmalane iopt`: page tables as memory images, built, walked and dumped.

mod formats;
mod image;
mod number;
mod report;
mod source;
mod spec;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use dmalane::iopt::FormatId;

use crate::failure::Failure;
use crate::output::{self, Outputs};

use number::Number;
pub use source::FORMAT;
use source::ImageSource;

/// Default address of the tables that `build` writes.
const BASE: u64 = 0x8000_0000;

const EXAMPLES: &str = "\
Examples:
  dmalane iopt build boot.json --format arm64-s1-4k -o boot.bin
  dmalane iopt walk boot.bin --format arm64-s1-4k --root 0x80000000 0x80001234
  dmalane iopt dump boot.bin --format arm64-s1-4k --root 0x80000000

Exit status: 0 success, 1 bad specification or image, 2 usage error.";

const FORMATS_EXAMPLES: &str = "\
Examples:
  dmalane iopt formats
  dmalane iopt formats --json | jq -r '.formats[].format'

Exit status: 0 printed, 2 usage error.";

const BUILD_EXAMPLES: &str = "\
Examples:
  dmalane iopt build boot.json --format x86-64-4level -o boot.bin
  dmalane iopt build boot.json --format arm64-s1-4k -o boot.bin --base 0x40080000 --json

A specification, with numbers or \"0x\" texts (docs/formats/iopt-image.md):
  {\"schema\": 1, \"mappings\": [
    {\"va\": \"0x80000000\", \"pa\": \"0x80000000\", \"len\": \"0x40000000\", \"access\": \"rwx\"},
    {\"va\": \"0x09000000\", \"pa\": \"0x09000000\", \"len\": 4096, \"access\": \"rw\"}]}

Exit status: 0 the image is written, 1 bad specification, 2 usage error.";

const WALK_EXAMPLES: &str = "\
Examples:
  dmalane iopt walk boot.bin --format arm64-s1-4k --root 0x80000000 0x80001234 0x9000000
  dmalane iopt walk ram.bin --base 0 --format x86-64-4level --root 0x1a3000 0x401000 --user --json

Exit status: 0 each address was translated or faulted; 1 bad image; 2 usage error.";

const DUMP_EXAMPLES: &str = "\
Examples:
  dmalane iopt dump boot.bin --format arm64-s1-4k --root 0x80000000
  dmalane iopt dump ram.bin --base 0 --format x86-64-4level --root 0x1a3000 --json
  zcat ram.bin.gz | dmalane iopt dump - --base 0 --format x86-64-4level --root 0x1a3000

Exit status: 0 printed, 1 bad image, 2 usage error.";

/// Build page tables as memory images, and read them.
#[derive(Subcommand)]
#[command(after_help = EXAMPLES)]
pub(crate) enum Iopt {
    Formats(Formats),
    Build(Build),
    Walk(Walk),
    Dump(Dump),
}

/// List the page-table formats: input and output bits, page sizes.
#[derive(Args)]
#[command(after_help = FORMATS_EXAMPLES)]
pub(crate) struct Formats {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Write the page tables of a specification as a memory image.
///
/// Prints the root address and the register values to program. Uses larger pages where alignment allows.
#[derive(Args)]
#[command(after_help = BUILD_EXAMPLES)]
pub(crate) struct Build {
    /// The mappings, as JSON; - for standard input
    #[arg(value_name = "SPEC")]
    spec: PathBuf,

    /// The page-table format, as `dmalane iopt formats` names it
    #[arg(short, long, value_parser = FORMAT, hide_possible_values = true)]
    format: FormatId,

    /// The image to write
    #[arg(short, long, value_name = "IMAGE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    output: PathBuf,

    #[command(flatten)]
    replace: output::Replace,

    /// The address at which the device finds the image
    #[arg(long, value_name = "ADDR", default_value_t = Number(BASE))]
    base: Number,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Translate addresses by the tables in an image, as the device would: the rights of all levels are combined.
#[derive(Args)]
#[command(after_help = WALK_EXAMPLES)]
pub(crate) struct Walk {
    #[command(flatten)]
    source: ImageSource,

    /// The addresses to translate
    #[arg(value_name = "VA", required = true)]
    at: Vec<Number>,
}

/// Print the mappings in an image; neighbours with the same page size and access are one run.
#[derive(Args)]
#[command(after_help = DUMP_EXAMPLES)]
pub(crate) struct Dump {
    #[command(flatten)]
    source: ImageSource,
}

impl Iopt {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        match self {
            Self::Formats(formats) => report::formats(formats.json),
            Self::Build(build) => build.run(),
            Self::Walk(walk) => walk.run(),
            Self::Dump(dump) => dump.run(),
        }
    }
}

impl Build {
    /// Writes the tables of the specification to the image.
    fn run(self) -> Result<ExitCode, Failure> {
        let (format, base) = (self.format, self.base.0);
        let outputs = Outputs::new(self.replace, [("--output", Some(&self.output))])?.excluding(&[])?;
        let (mappings, spec) = spec::read(&self.spec)?;
        let outputs = outputs.excluding(&[(self.spec.clone(), spec)])?;
        let built = formats::build(format, &self.spec, &mappings, base)?;
        outputs.write("--output", "", || Ok(built.bytes().to_vec()))?;
        report::built(format, &self.output, base, &built, self.json)
    }
}

impl Walk {
    /// Translates addresses by the tables of an image.
    fn run(self) -> Result<ExitCode, Failure> {
        let Self { source, at } = self;
        let image = source.read()?;
        let walk = |at: &Number| (at.0, formats::walk(source.format, &image, source.root.0, source.user, at.0));
        report::walked(&source, &at.iter().map(walk).collect::<Vec<_>>())
    }
}

impl Dump {
    /// Prints what the tables of an image map.
    fn run(self) -> Result<ExitCode, Failure> {
        let Self { source } = self;
        let image = source.read()?;
        let runs = formats::dump(source.format, &image, source.root.0, source.user).map_err(|endless| {
            Failure::new(format!("{}: {endless}", source.image.display()))
                .hint("tables that lead back to themselves map without end; is this the right format and root?")
        })?;
        report::dumped(&source, &runs)
    }
}
