//! Files whose headers are parsed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format_error::FormatError;
use crate::error::Error;

/// Bytes by which a kind may be recognized.
pub const HEAD: usize = 16;

/// A file to parse.
pub(crate) struct ContainerFile<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    /// Bytes in it.
    pub len: u64,
}

impl ContainerFile<'_> {
    /// Reads bytes that lie within the file.
    pub fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; usize::try_from(len).map_err(|_| self.failed(io::ErrorKind::FileTooLarge.into()))?];
        self.file.read_exact_at(&mut bytes, at).map_err(|source| self.failed(source))?;
        Ok(bytes)
    }

    pub fn failed(&self, source: io::Error) -> Error {
        Error::File { path: self.path.to_owned(), what: "read its header", source }
    }

    pub fn bad(&self, source: FormatError) -> Error {
        Error::Format { path: self.path.to_owned(), source }
    }
}
