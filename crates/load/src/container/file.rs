//! Files whose headers are parsed.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format_error::FormatError;
use crate::error::Error;

/// Bytes by which a kind may be recognized.
pub const HEAD: usize = 16;

/// Bytes that are read at once, so that a small header takes one read.
const FIRST: u64 = 4096;

/// A file to parse.
pub(crate) struct ContainerFile<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    /// Bytes in it.
    pub len: u64,
    first: OnceCell<Vec<u8>>,
}

impl<'a> ContainerFile<'a> {
    pub fn new(path: &'a Path, file: &'a File, len: u64) -> Self {
        Self { path, file, len, first: OnceCell::new() }
    }

    /// Reads bytes that lie within the file.
    pub fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
        if at.saturating_add(len) > FIRST.min(self.len) {
            return self.read_now(at, len);
        }
        if self.first.get().is_none() {
            let _ = self.first.set(self.read_now(0, FIRST.min(self.len))?);
        }
        let first = self.first.get().expect("it was set");
        Ok(first[at as usize..(at + len) as usize].to_vec())
    }

    fn read_now(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
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
