//! Writing results to stdout, whose reader may have left, and to files, without losing what is there.

use std::collections::HashSet;
use std::fs::Metadata;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dmalane::device::BackingFiles;
use dmalane::load::is_index;
use dmalane::load::{Error, Output};
use serde::Serialize;

use crate::failure::Failure;
use crate::layout::{drives, fit, spaced};
use crate::source::{is_stdin, stdin_metadata};

/// Writes `text` to stdout, without its colours where no terminal shows them or `NO_COLOR` is set.
pub fn print(text: &str) -> Result<(), Failure> {
    print_or_closed(text).map(drop)
}

/// As [`print()`]; false when nobody reads it any more.
pub fn print_or_closed(text: &str) -> Result<bool, Failure> {
    let mut out = anstream::AutoStream::auto(io::stdout().lock());
    let result = out.write_all(spaced(text).as_bytes()).and_then(|()| out.flush());
    let closed = matches!(&result, Err(e) if e.kind() == ErrorKind::BrokenPipe);
    written(result).map(|()| !closed)
}

/// As [`print()`], for people: lines that do not fit the terminal are wrapped.
pub fn print_text(text: &str) -> Result<(), Failure> {
    print(&fit(text))
}

/// Writes `text` to stderr, as [`print()`] writes it to stdout. A closed stderr is no error.
pub fn print_beside(text: &str) {
    let _ = anstream::AutoStream::auto(io::stderr().lock()).write_all(spaced(text).as_bytes());
}

/// `value` as JSON, as [`print_json`] writes it.
pub fn json(value: &impl Serialize) -> Result<String, Failure> {
    let mut text = Vec::new();
    serde_json::to_writer_pretty(Escaped(&mut text), value)?;
    Ok(String::from_utf8_lossy(&text).into_owned() + "\n")
}

/// Writes `value` to stdout as JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    let done = serde_json::to_writer_pretty(Escaped(&mut out), value).map_err(io::Error::from);
    written(done.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
}

/// Prints a result: as JSON, or as text for people.
pub fn tell<T: Serialize>(
    json: bool,
    value: impl FnOnce() -> T,
    text: impl FnOnce() -> String,
) -> Result<ExitCode, Failure> {
    if json { print_json(&value()) } else { print_text(&text()) }.map(|()| ExitCode::SUCCESS)
}

/// Escapes what JSON leaves as it is and a terminal obeys. Each call writes whole characters.
struct Escaped<W>(W);

impl<W: Write> Write for Escaped<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let obeyed = |c: char| c != '\n' && drives(c);
        match std::str::from_utf8(bytes) {
            Ok(text) if text.contains(obeyed) => {
                // All of these have one unit of UTF-16.
                let escape = |c: char| if obeyed(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
                self.0.write_all(text.chars().map(escape).collect::<String>().as_bytes())?;
            }
            _ => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A reader that has seen enough (`dmalane doctor | head -1`) is not an error; a full disk is.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::because("cannot write to stdout", &e)),
        _ => Ok(()),
    }
}

/// How the result of a measurement is printed.
#[derive(Args, Clone, Copy)]
pub struct OutputFormat {
    /// Show details: how and why, and reference rates measured beside the stages
    #[arg(short, long)]
    pub verbose: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    /// Show no progress bar
    #[arg(short, long)]
    pub quiet: bool,
}

impl OutputFormat {
    /// Whether progress is shown.
    pub fn shows_progress(self) -> bool {
        !(self.quiet || self.json)
    }
}

/// The option of every command that writes files.
#[derive(Args, Clone, Copy)]
#[command(next_help_heading = "Outputs")]
pub struct Replace {
    /// Replace output files that exist; without it they are an error
    #[arg(long)]
    force: bool,
}

/// The files that a command writes, each with its option.
#[derive(Clone, Debug)]
pub struct Outputs(Vec<(&'static str, Output)>);

impl Outputs {
    /// Files at these paths, which replace those that exist only by `--force`. Refuses two options that name one file.
    pub fn new<'a>(
        replace: Replace,
        paths: impl IntoIterator<Item = (&'static str, Option<&'a PathBuf>)>,
    ) -> Result<Self, Failure> {
        let mut this = Self(Vec::new());
        for (option, path) in paths {
            let Some(path) = path else { continue };
            let to = Output::new(path).replace(replace.force);
            if let Some((other, _)) = this.0.iter().find(|(_, other)| other.is_same_place(&to)) {
                return Err(Failure::usage(format!("{other} and {option} both write {}", path.display())));
            }
            this.0.push((option, to));
        }
        Ok(this)
    }

    /// Never in place of these files, which are read; refuses what cannot be written.
    pub fn excluding(mut self, read: &[(PathBuf, Metadata)]) -> Result<Self, Failure> {
        for (_, to) in &mut self.0 {
            *to = read.iter().fold(to.clone(), |to, (path, meta)| to.excluding(path, meta));
            to.check().map_err(|e| refused(to, "", &e))?;
        }
        Ok(self)
    }

    /// Writes the file of an option, if there is one. `done` says what was done before, should that fail.
    pub fn write(
        &self,
        option: &str,
        done: &str,
        bytes: impl FnOnce() -> Result<Vec<u8>, Failure>,
    ) -> Result<(), Failure> {
        let Some((_, to)) = self.0.iter().find(|(of, _)| *of == option) else { return Ok(()) };
        to.write(&bytes()?).map_err(|e| refused(to, done, &e))
    }
}

/// The files that are read because a user named them, as far as they are there: besides those of models the index that
/// stands for them, or that of a folder, and a manifest, which may be standard input.
pub fn named_files<'a>(named: impl IntoIterator<Item = &'a PathBuf>) -> Vec<(PathBuf, Metadata)> {
    let found = |path: &Path| match is_stdin(path) {
        true => Some((PathBuf::from("stdin"), stdin_metadata().ok()?)),
        false => std::fs::metadata(path).ok().map(|meta| (path.to_owned(), meta)),
    };
    let (mut all, mut seen) = (Vec::new(), HashSet::new());
    for path in named.into_iter().filter(|path| seen.insert(*path)) {
        match found(path) {
            Some((_, meta)) if meta.is_dir() && !is_stdin(path) => {
                let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
                all.extend(entries.filter(|path| is_index(path)).filter_map(|path| found(&path)));
            }
            file => all.extend(file),
        }
    }
    all
}

/// The files behind a device.
pub fn device_files(device: Option<BackingFiles>) -> io::Result<Vec<(PathBuf, Metadata)>> {
    let files = device.iter().flat_map(|files| [&files.written, &files.read]);
    files.map(|file| Ok((PathBuf::from("device memory"), file.metadata()?))).collect()
}

/// The failure to write a file, because of `error`.
fn refused(to: &Output, done: &str, error: &Error) -> Failure {
    let failure = Failure::because(format!("cannot write {}{done}", to.path().display()), error);
    match error {
        Error::File { source, .. } if source.kind() == ErrorKind::AlreadyExists => failure.hint("--force replaces it"),
        Error::File { source, .. } if source.to_string().contains("is a symbolic link") => {
            failure.hint("name the file that it stands for")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_nothing_that_a_terminal_obeys() {
        let name = "a\u{1b}]0;t\u{7}\u{9b}2J\u{202e}b\u{e9}\u{7f}";
        let text = json(&[name]).unwrap_or_else(|e| panic!("{}", e.text("json")));
        assert_eq!(text, "[\n  \"a\\u001b]0;t\\u0007\\u009b2J\\u202eb\u{e9}\\u007f\"\n]\n");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name], "exactly that");
    }
}
