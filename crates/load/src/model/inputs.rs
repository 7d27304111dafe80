//! Files by name that are read as they are, models or not.

use std::path::Path;

use dmalane_file::{FileOptions, FileQueue};

use super::error::ModelError;
use crate::input::{Input, open_file};
use crate::set::ModelSet;

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
    /// [`ModelError::Load`], [`ModelError::Open`].
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>, options: FileOptions) -> Result<Self, ModelError> {
        let mut inputs = Self::default();
        for path in paths {
            let found = ModelSet::find(path.as_ref())?.files;
            inputs.whole |= found.iter().any(|file| file.path != path.as_ref());
            for file in found {
                inputs.files.push(open_file(file.path, options)?);
            }
        }
        Ok(inputs)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|input| input.source.size().ok()).fold(0, u64::saturating_add)
    }
}
