//! Files to load.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::PathBuf;

use crate::{Error, Model};

/// A file to load.
pub struct Input<S> {
    /// What to call it, and how to tell a safetensors file: by its extension.
    pub path: PathBuf,
    /// For its header, its size, and comparisons.
    pub file: File,
    /// For its bytes.
    pub channel: S,
}

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

    /// What is in the file: tensors for `*.safetensors`, else one blob with the file's name.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::File`].
    pub fn model(&self) -> Result<Model, Error> {
        let format = |source| Error::Format { path: self.path.clone(), source };
        let len = self.len()?;
        if self.path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("safetensors")) {
            let name = self.path.file_name().unwrap_or_default().to_string_lossy();
            return Model::blob(&name, len).map_err(format);
        }
        if len == 0 {
            return Err(format(crate::FormatError::Empty));
        }
        let mut prefix = [0; 8];
        let have = prefix.len().min(usize::try_from(len).unwrap_or(usize::MAX));
        self.file.read_exact_at(&mut prefix[..have], 0).map_err(|e| self.error("read its header", e))?;
        let mut header = vec![0; Model::header_len(prefix, len).map_err(format)? as usize];
        self.file.read_exact_at(&mut header, 8).map_err(|e| self.error("read its header", e))?;
        Model::parse(&header, len).map_err(format)
    }
}
