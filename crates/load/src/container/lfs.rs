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
/// [`Error::Format`]; [`Error::File`] for a file that cannot be read.
pub fn refuse_lfs_pointer(path: &Path, file: &File) -> Result<(), Error> {
    let refused = |size| Error::Format { path: path.to_owned(), source: FormatError::lfs_pointer(size) };
    lfs_pointer(path, file)?.map_or(Ok(()), |size| Err(refused(size)))
}

/// The bytes of the file that a pointer stands for; `None` for a file that is no pointer.
///
/// # Errors
/// [`Error::File`] for a file that cannot be read.
pub(crate) fn lfs_pointer(path: &Path, file: &File) -> Result<Option<u64>, Error> {
    let failed = |source| Error::File { path: path.to_owned(), what: "read its size", source };
    let len = file.metadata().map_err(failed)?.len();
    if len >= MAX {
        return Ok(None);
    }
    let file = ContainerFile::new(path, file, len);
    size(&file, &file.read(0, len.min(HEAD as u64))?)
}

/// The same; `head` are the first bytes of the file.
pub(super) fn size(file: &ContainerFile<'_>, head: &[u8]) -> Result<Option<u64>, Error> {
    if file.len >= MAX || !START.starts_with(head) {
        return Ok(None);
    }
    let text = file.read(0, file.len)?;
    let text = std::str::from_utf8(&text).ok().filter(|text| text.as_bytes().starts_with(START));
    Ok(text.and_then(|text| text.lines().find_map(|line| line.strip_prefix("size ")?.parse().ok())))
}
