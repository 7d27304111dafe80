//! Writing results to stdout, whose reader may have left, and to files, without losing what is there.

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use dmalane::load::{Error, Output};
use serde::Serialize;

use crate::failure::Failure;

/// Writes `text` to stdout.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Writes `value` to stdout as JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// A reader that has seen enough (`dmalane doctor | head -1`) is not an error; a full disk is.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::because("cannot write to stdout", &e)),
        _ => Ok(()),
    }
}

/// The option of every command that writes files.
#[derive(Args, Clone, Copy)]
pub struct Replace {
    /// Replace output files that exist; without it they are an error
    #[arg(long)]
    force: bool,
}

impl Replace {
    /// The file at `path`, which replaces one that exists only by `--force`.
    pub fn output(self, path: &Path) -> Output {
        Output::new(path).replace(self.force)
    }
}

/// The failure of an output: `what` could not be done because of `error`.
pub fn refused(what: impl Into<String>, error: &Error) -> Failure {
    let failure = Failure::because(what, error);
    match error {
        Error::File { source, .. } if source.kind() == ErrorKind::AlreadyExists => {
            failure.hint("--force replaces it; a name that is free keeps it")
        }
        _ => failure,
    }
}

/// Accepts the path of a file to write, which `-` is not: stdout is for the report.
pub fn not_stdout(path: PathBuf) -> Result<PathBuf, &'static str> {
    match path.as_os_str() == "-" {
        true => Err("stdout is for the report\nhint: name a file, or ./- for a file of that name"),
        false => Ok(path),
    }
}

/// `text` without the control characters with which a file name could drive the terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
