//! How much of a file is in the page cache.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use crate::ring;

/// The kernel counts in these; larger folios are counted as several.
const PAGE: u64 = 4096;
/// Where a mapping may begin, whatever pages the machine has.
const PAGES: u64 = 64 << 10;

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
/// By `cachestat`; where that is not known (before Linux 6.5) or forbidden (by a seccomp profile), by `mincore`, which
/// knows nothing about dirty pages, takes longer for what is large, and is of use only for a file that this process
/// owns or may write.
///
/// # Errors
/// The kernel's: `Unsupported` (`ENOSYS`) where neither is of use, `EOPNOTSUPP` for hugetlbfs, `EBADF` or `ENODEV` for
/// what is no file.
pub fn residency(file: &File, offset: u64, len: u64) -> io::Result<Residency> {
    if len == 0 {
        return Ok(Residency::default()); // 0 would be "to the end" for the kernel
    }
    match ring::cachestat(file, offset, len) {
        Ok(cached) => {
            let bytes = |pages: u64| pages.saturating_mul(PAGE);
            let dirty = bytes(cached.dirty.saturating_add(cached.writeback));
            Ok(Residency { bytes: len, cached: bytes(cached.pages), dirty })
        }
        Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NOSYS | Errno::PERM)) => by_mincore(file, offset, len),
        Err(e) => Err(e),
    }
}

fn by_mincore(file: &File, offset: u64, len: u64) -> io::Result<Residency> {
    let stat = rustix::fs::fstat(file)?;
    let owned = stat.st_uid == rustix::process::geteuid().as_raw();
    // To others the kernel says that everything is cached: who reads what is a secret.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    if !owned && rustix::fs::access(name, rustix::fs::Access::WRITE_OK).is_err() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "there is no cachestat, and mincore is for a file's owner",
        ));
    }
    let bytes = len;
    // Nothing is cached past the end, and nobody needs a mapping of that.
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.saturating_add(len).min(size);
    let first = offset / PAGES * PAGES;
    let cached = if end > first { ring::mincore(file, first, end - first)? } else { 0 };
    Ok(Residency { bytes, cached: cached.saturating_mul(PAGE), dirty: 0 })
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

    /// Both ways of asking say the same of random ranges of a file that is partly cached.
    #[test]
    fn without_cachestat_the_pages_are_counted() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let len = 3_000_000;
        std::fs::write(file.path(), vec![1; len]).unwrap();
        file.as_file().sync_all().unwrap();
        let opened = File::open(file.path()).unwrap();
        rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::Random).unwrap();
        for at in [5, 1_000_000, 1_004_096, 2_999_999] {
            std::os::unix::fs::FileExt::read_exact_at(&opened, &mut [0], at).unwrap();
        }
        let mut x = 1u64;
        for _ in 0..200 {
            let mut next = || {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % (len as u64 + 100_000)
            };
            // Where a mapping may begin: what is before the range is not asked about by the other way.
            let (at, n) = (next() / PAGES * PAGES, next() + 1);
            let counted = by_mincore(&opened, at, n).unwrap();
            match ring::cachestat(&opened, at, n) {
                Ok(cached) => assert_eq!(counted.cached, cached.pages * PAGE, "{at} {n}"),
                Err(e) => return println!("SKIPPED: cachestat: {e}"),
            }
        }
        assert_eq!(by_mincore(&opened, 1 << 40, 5).unwrap(), Residency { bytes: 5, cached: 0, dirty: 0 });
        assert_eq!(by_mincore(&opened, 1_010_000, 5).unwrap().bytes, 5);
    }
}
