//! Pointers of Git LFS: small text files in place of large ones that were not downloaded.
//!
//! Format: "Git LFS Specification" in the documentation of <https://github.com/git-lfs/git-lfs>.

use super::{ContainerFile, FormatError};
use crate::Error;

/// The first line of every pointer, without the number of the version.
const START: &[u8] = b"version https://git-lfs.github.com/spec/";
/// A pointer is shorter.
const MAX: u64 = 1024;

/// Refuses a pointer, under whichever name; `head` are the first bytes of the file.
pub(super) fn refuse(file: &ContainerFile<'_>, head: &[u8]) -> Result<(), Error> {
    if file.len >= MAX || !START.starts_with(head) {
        return Ok(());
    }
    let text = file.read(0, file.len)?;
    let size = std::str::from_utf8(&text).ok().filter(|text| text.as_bytes().starts_with(START));
    let size = size.and_then(|text| text.lines().find_map(|line| line.strip_prefix("size ")?.parse().ok()));
    size.map_or(Ok(()), |size| Err(file.bad(FormatError::LfsPointer { size })))
}
