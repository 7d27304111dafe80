//! Files to load.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::container::ContainerFile;
use crate::{Container, Error, Model, Tensor};

/// A file to load.
pub struct Input<S> {
    /// Its name in messages; the extension may tell its kind.
    pub path: PathBuf,
    /// For its header, its size, and comparisons.
    pub file: File,
    /// For its bytes.
    pub queue: S,
    /// Queues of further workers: each file is read by as many workers as every file has queues. Empty for a file
    /// that the disk reads; where the processor copies out of the page cache, several do so, and hash, at a time.
    pub more: Vec<S>,
    /// Which of its tensors count, by their names; `None` for all. The others are not loaded.
    pub select: Option<Select>,
}

/// Chooses tensors by name.
pub type Select = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl<S> Input<S> {
    /// The file's size now.
    pub(crate) fn len(&self) -> Result<u64, Error> {
        let size = self.file.metadata().and_then(|meta| match meta.file_type().is_block_device() {
            // A block device has no length of its own; all reads here name their offset, so the position does not
            // matter.
            true => (&self.file).seek(SeekFrom::End(0)),
            false => Ok(meta.len()),
        });
        size.map_err(|source| self.error("read its size", source))
    }

    pub(crate) fn error(&self, what: &'static str, source: std::io::Error) -> Error {
        Error::File { path: self.path.clone(), what, source }
    }

    /// The length of a file of these contents, and the tensors that are read of it; `None` where all of it is, as where
    /// it is hashed.
    pub(crate) fn wanted<'a>(&self, model: &'a Model, hashed: bool) -> (u64, Option<&'a [Arc<Tensor>]>) {
        (model.len, Some(&*model.tensors).filter(|_| self.select.is_some() && !hashed))
    }

    /// The kind of the file.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn container(&self) -> Result<Container, Error> {
        ContainerFile { path: &self.path, file: &self.file, len: self.len()? }.kind()
    }

    /// The selected tensors of the file, as its [`Container`](crate::Container) has them.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::File`].
    pub fn model(&self) -> Result<Model, Error> {
        let mut model = ContainerFile { path: &self.path, file: &self.file, len: self.len()? }.model()?;
        if let Some(select) = &self.select {
            model.tensors.retain(|tensor| select(&tensor.name));
        }
        Ok(model)
    }
}
