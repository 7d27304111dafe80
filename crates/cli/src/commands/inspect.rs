//! `dmalane inspect`: the cached part of files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dmalane::file::residency;
use serde::Serialize;

use crate::failure::Failure;
use crate::layout::plain;
use crate::model;
use crate::output;
use crate::size::binary;
use crate::source::SourceFile;

const EXAMPLES: &str = "\
Examples:
  dmalane inspect model.safetensors    how much of the file is in the page cache
  dmalane inspect models/minilm        the same of each file of a model
  dmalane inspect - < model.bin        the file behind standard input

The tensors of a model are listed by dmalane load --dry-run --list, and by `inspect` of the Python package.

Exit status: 0 inspected, 1 no such file, 2 usage error.";

/// Show how much of a file or a model is in the page cache.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Inspect {
    /// A file, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE")]
    what: PathBuf,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    /// Inspects and prints.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let files = model::files(std::slice::from_ref(&self.what))?;
        let files = files.iter().map(|path| file(path)).collect::<Result<Vec<_>, _>>()?;
        let sum = |count: fn(&Cached) -> u64| files.iter().map(count).fold(0, u64::saturating_add);
        let whole = Cached {
            path: self.what.to_string_lossy().into_owned(),
            bytes: sum(|file| file.bytes),
            cached_bytes: sum(|file| file.cached_bytes),
            dirty_bytes: sum(|file| file.dirty_bytes),
            map: Vec::new(),
        };
        let report = Report { schema: 2, command: "inspect", whole, files };
        output::tell(self.json, || &report, || report.text())
    }
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    #[serde(flatten)]
    whole: Cached,
    files: Vec<Cached>,
}

impl Report {
    fn text(&self) -> String {
        let mut out = if self.files.len() > 1 { self.whole.text() + "\n" } else { String::new() };
        self.files.iter().for_each(|file| out += &file.text());
        if self.whole.bytes > 0 {
            out += "# cached, + partly, . not\n";
        }
        out
    }
}

/// The cached part of a file or a model.
#[derive(Serialize)]
struct Cached {
    path: String,
    bytes: u64,
    cached_bytes: u64,
    dirty_bytes: u64,
    /// The cached share of each bin of a file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    map: Vec<f64>,
}

impl Cached {
    fn text(&self) -> String {
        let dirty = match self.dirty_bytes {
            0 => String::new(),
            dirty => format!(", {} not on the disk yet", binary(dirty)),
        };
        let percent = self.cached_bytes as f64 / self.bytes.max(1) as f64 * 100.0;
        let (cached, bytes) = (binary(self.cached_bytes), binary(self.bytes));
        let mut out = format!("{percent:.1} % in the page cache: {cached} of {bytes}, {}{dirty}\n", plain(&self.path));
        let mark = |share: &f64| match share {
            s if *s <= 0.0 => '.',
            s if *s >= 1.0 => '#',
            _ => '+',
        };
        if !self.map.is_empty() {
            out += &format!("[{}]\n", self.map.iter().map(mark).collect::<String>());
        }
        out
    }
}

/// Bins of the cache map of a file.
const BINS: u64 = 64;

fn file(path: &Path) -> Result<Cached, Failure> {
    let source = SourceFile::open(path)?;
    if !source.is_stdin() {
        model::refuse_lfs_pointer(path, &source.file)?;
    }
    let SourceFile { file, path, .. } = source;
    let name = path.display();
    let meta = file.metadata().map_err(|e| Failure::because(format!("cannot inspect {name}"), &e))?;
    if !meta.is_file() {
        return Err(Failure::new(format!("cannot inspect {name}: it is not a regular file")));
    }
    let bytes = meta.len();
    let ask = |offset, len| {
        residency(&file, offset, len).map_err(|e| {
            let failure = Failure::because(format!("the kernel does not report which part of {name} is cached"), &e);
            if e.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) {
                return failure.hint("this needs Linux 6.5 or later (cachestat)");
            }
            failure
        })
    };
    let whole = ask(0, bytes)?;
    let bin = bytes.div_ceil(BINS).next_multiple_of(4096);
    let mut map = Vec::new();
    let mut at = 0;
    while at < bytes {
        let len = bin.min(bytes - at);
        map.push(ask(at, len)?.share());
        at += len;
    }
    let (cached_bytes, dirty_bytes) = (whole.cached.min(bytes), whole.dirty.min(bytes));
    Ok(Cached { path: path.to_string_lossy().into_owned(), bytes, cached_bytes, dirty_bytes, map })
}
