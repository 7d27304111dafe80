//! Files by name that are read as they are, models or not.

use std::path::{Path, PathBuf};

use dmalane_file::{FileOptions, FileQueue};

use crate::error::Error;
use crate::input::{Input, open_inputs};
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;
use crate::set::{ModelSet, SetFile};

/// The files of models, as [`ModelSet::find`] finds them, with the queues that read them.
#[derive(Default)]
pub struct Inputs {
    /// The files.
    pub files: Vec<Input<FileQueue>>,
    /// A directory or an index stands for some of them.
    pub whole: bool,
}

impl Inputs {
    /// Opens files that need not be models.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Format`], [`Error::Open`].
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>, options: FileOptions) -> Result<Self, Error> {
        let named: Vec<PathBuf> = paths.into_iter().map(|path| path.as_ref().to_owned()).collect();
        let found = ModelSet::of(&named)?.files;
        let whole = !found.iter().map(|file| &file.path).eq(&named);
        let open = |file: SetFile| if file.kept.is_some() { OpenFile::of(&file) } else { OpenFile::regular(file.path) };
        let files = open_inputs(in_parallel(found, open)?, options)?;
        Ok(Self { files, whole })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|input| input.source.size().ok()).fold(0, u64::saturating_add)
    }
}
