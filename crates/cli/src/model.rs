//! The files of a model, by name, and how they are read.

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use dmalane::file::{Error as FileError, Mode};
use dmalane::load::container;
use dmalane::load::{Error, Inputs, Manifest, ModelSet, SetFile, in_parallel};
use dmalane::{FileOptions, OpenFile};

use crate::failure::Failure;
use crate::room::no_room;
use crate::source::{Copied, SourceFile};

/// How files are read.
#[derive(Args, Clone, Copy)]
#[command(next_help_heading = "Reading")]
pub struct ReadMode {
    /// Read through the page cache [default: only files that are cached]
    #[arg(long, conflicts_with = "direct")]
    buffered: bool,

    /// Read with direct I/O, or fail
    #[arg(long)]
    direct: bool,
}

impl ReadMode {
    /// The mode that was chosen.
    pub fn mode(self) -> Mode {
        match (self.buffered, self.direct) {
            (true, _) => Mode::Buffered,
            (_, true) => Mode::Direct,
            _ => Mode::Auto,
        }
    }

    /// How files are opened.
    pub fn options(self) -> FileOptions {
        FileOptions::for_mode(self.mode())
    }

    /// Opens the files of models, for which these paths stand. Adds what had to be copied first.
    pub fn open(self, set: ModelSet, paths: &[PathBuf], copied: &mut Copied) -> Result<Inputs, Failure> {
        let files = open_all(&set.files, copied)?;
        Inputs::of_files(files, set, paths, self.options()).map_err(failure)
    }
}

/// The files of models: a directory and an index stand for those of theirs.
pub fn set(paths: &[PathBuf]) -> Result<ModelSet, Failure> {
    Ok(ModelSet::of(paths)?)
}

/// The same, where all bytes of the files count.
pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    Ok(set(paths)?.files.into_iter().map(|file| file.path).collect())
}

/// Refuses a Git LFS pointer in place of a file that is read as it is.
pub fn refuse_lfs_pointer(path: &Path, file: &File) -> Result<(), Failure> {
    Ok(container::refuse_lfs_pointer(path, file)?)
}

/// Opens files, or `-`, and adds what had to be copied first.
pub fn open_all(files: &[SetFile], all: &mut Copied) -> Result<Vec<OpenFile>, Failure> {
    let opened = in_parallel(files.iter().collect(), open_one)?;
    opened.iter().for_each(|(_, copied)| all.add(*copied));
    Ok(opened.into_iter().map(|(file, _)| file).collect())
}

fn open_one(file: &SetFile) -> Result<(OpenFile, Copied), Failure> {
    if file.kept.is_some() {
        return Ok((OpenFile::of(file).map_err(failure)?, Copied::default()));
    }
    let source = SourceFile::open(&file.path)?;
    let (mut opened, copied) = match source.is_stdin() || !source.has_size() {
        true => {
            let SourceFile { file, path, copied, .. } = source.with_size()?;
            (OpenFile::new(path, file), copied)
        }
        false => (OpenFile::named(&file.path, source.file).map_err(failure)?, Copied::default()),
    };
    opened.listed.clone_from(&file.listed);
    Ok((opened, copied))
}

/// The failure to open or to read a file, with its path in the first line, once.
pub fn failure(error: Error) -> Failure {
    match &error {
        Error::File { path, what: "open it", source } | Error::Open(FileError::Open { path, source }) => {
            Failure::because(format!("cannot open {}", path.display()), source)
        }
        Error::Open(FileError::NoDirect { .. }) => {
            Failure::from(error).hint("without --direct it is read through the page cache")
        }
        Error::Fill(fill) => match no_room(fill) {
            Some(failure) => failure.hint("read less at a time with --range"),
            None => error.into(),
        },
        _ => error.into(),
    }
}

/// The failure to open a model.
pub fn cannot_use(error: Error) -> Failure {
    match error {
        Error::Open(_) => failure(error),
        error => Failure::because("nothing was loaded", &error),
    }
}

/// Reads the manifest of `--manifest`, which may be `-`; without one it is empty.
pub fn manifest(path: Option<&Path>) -> Result<Manifest, Failure> {
    let Some(path) = path else { return Ok(Manifest::default()) };
    let source = SourceFile::open(path)?;
    let name = source.path.clone();
    Ok(Manifest::read_from(source.reader()?, &name)?)
}

/// Differences that are listed in a message.
const LISTED: usize = 20;

/// The failure of files that differ from their manifest; `None` for another error.
pub fn differs(what: &str, error: &Error) -> Option<Failure> {
    let Error::Differs { differences } = error else { return None };
    let mut failure = Failure::new(format!("{what}: the files differ from the manifest"));
    for difference in differences.iter().take(LISTED) {
        failure = failure.cause(difference.to_string());
    }
    if differences.len() > LISTED {
        failure = failure.cause(format!("{} more differences", differences.len() - LISTED));
    }
    Some(failure.hint("dmalane verify FILE --manifest FILE lists them all"))
}
