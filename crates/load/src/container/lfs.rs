//! Pointers of Git LFS: small text files in place of large ones that were not downloaded.
//!
//! Format: "Git LFS Specification" in the documentation of <https://github.com/git-lfs/git-lfs>.

use std::fs::File;
use std::path::Path;

use super::file::{ContainerFile, HEAD};
use super::format_error::FormatError;
use crate::error::Error;

/// The first line of every pointer, without the number of the version.
const START: &[u8] = b"version https://git-lfs.github.com/spec/";
/// A pointer is shorter.
const MAX: u64 = 1024;

/// Refuses a pointer, under whichever name.
///
/// # Errors
/// [`Error::Format`] with [`FormatError::LfsPointer`]; [`Error::File`] for a file that cannot be read.
pub fn refuse_lfs_pointer(path: &Path, file: &File) -> Result<(), Error> {
    let failed = |source| Error::File { path: path.to_owned(), what: "read its size", source };
    let len = file.metadata().map_err(failed)?.len();
    if len >= MAX {
        return Ok(());
    }
    let file = ContainerFile { path, file, len };
    refuse(&file, &file.read(0, len.min(HEAD as u64))?)
}

/// The same; `head` are the first bytes of the file.
pub(super) fn refuse(file: &ContainerFile<'_>, head: &[u8]) -> Result<(), Error> {
    if file.len >= MAX || !START.starts_with(head) {
        return Ok(());
    }
    let text = file.read(0, file.len)?;
    let size = std::str::from_utf8(&text).ok().filter(|text| text.as_bytes().starts_with(START));
    let size = size.and_then(|text| text.lines().find_map(|line| line.strip_prefix("size ")?.parse().ok()));
    size.map_or(Ok(()), |size| Err(file.bad(FormatError::LfsPointer { size })))
}

/// The bytes of the file that a pointer stands for; `None` for a file that is no pointer.
///
/// # Errors
/// [`Error::File`] for a file that cannot be read.
pub(crate) fn lfs_pointer(path: &Path, file: &File) -> Result<Option<u64>, Error> {
    match refuse_lfs_pointer(path, file) {
        Ok(()) => Ok(None),
        Err(Error::Format { source: FormatError::LfsPointer { size }, .. }) => Ok(Some(size)),
        Err(error) => Err(error),
    }
}
