//! How much of a file is in the page cache.

use std::fmt;
use std::fs::File;
use std::io;

use crate::ring;

/// The kernel counts in these; larger folios are counted as several.
const PAGE: u64 = 4096;

/// What of a range of a file is in the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Residency {
    /// Bytes that were asked about, those past the end of the file left out.
    pub bytes: u64,
    /// Bytes in the page cache, in whole pages.
    pub cached: u64,
    /// Bytes that are newer in the cache than on the disk: a direct read makes the kernel write them first.
    pub dirty: u64,
}

impl Residency {
    /// The share that is cached, from 0 to 1; 1 for no bytes at all.
    pub fn share(&self) -> f64 {
        if self.bytes == 0 { 1.0 } else { (self.cached as f64 / self.bytes as f64).min(1.0) }
    }
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} % in the page cache", self.share() * 100.0)
    }
}

/// Asks what of `len` bytes from `offset` on is cached. Reads nothing.
///
/// # Errors
/// The kernel's: `Unsupported` (`ENOSYS`) before Linux 6.5, `EOPNOTSUPP` for hugetlbfs, `EBADF` for what is no file.
pub fn residency(file: &File, offset: u64, len: u64) -> io::Result<Residency> {
    if len == 0 {
        return Ok(Residency::default()); // 0 would be "to the end" for the kernel
    }
    let cached = ring::cachestat(file, offset, len)?;
    let bytes = |pages: u64| pages.saturating_mul(PAGE);
    Ok(Residency {
        bytes: len,
        cached: bytes(cached.pages),
        dirty: bytes(cached.dirty.saturating_add(cached.writeback)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_cached_and_what_was_dropped_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 100_000]).unwrap();
        let opened = File::open(file.path()).unwrap();
        let seen = match residency(&opened, 0, 100_000) {
            Ok(seen) => seen,
            Err(e) => return println!("SKIPPED: cachestat: {e}"),
        };
        assert_eq!(seen.cached, 25 * 4096);
        assert_eq!(residency(&opened, 0, 0).unwrap(), Residency::default());
        assert_eq!(residency(&opened, 1 << 40, 1).unwrap().cached, 0);
        assert_eq!(residency(&opened, 5000, 4096).unwrap().cached, 2 * 4096, "whole pages");
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let seen = residency(&opened, 0, 100_000).unwrap();
        if seen.cached == 0 {
            assert_eq!((seen.share(), seen.dirty), (0.0, 0));
        } else {
            println!("SKIPPED: the file system keeps its pages: {seen}");
        }
    }
}
