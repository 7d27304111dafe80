//! Asks the kernel how much of a file is in the page cache.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;

use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};

use crate::{Residency, ring};

/// The kernel counts in these; larger folios are counted as several.
pub(crate) const PAGE: u64 = 4096;

/// Asks what of `len` bytes from `offset` on is cached.
///
/// By `cachestat`; where that is not known (before Linux 6.5) or forbidden (by a seccomp profile, or to anybody but the
/// file's owner), by reading a byte of up to 64 evenly spaced pages with `RWF_NOWAIT`: an estimate without dirty pages,
/// for which the kernel may read the pages that were missing.
///
/// # Errors
/// The kernel's: `EOPNOTSUPP` for hugetlbfs and for file systems where no method works, `EBADF` or `ENODEV` for
/// anything but a file.
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
        Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NOSYS | Errno::PERM)) => by_probes(file, offset, len),
        Err(e) => Err(e),
    }
}

/// Pages that are probed at most.
const PROBES: u64 = 64;

/// Estimates from reads that do not wait. The kernel starts to read a page that is missing before it says so: where the
/// disk answers within the call, the page counts as cached, and the estimate is too high.
fn by_probes(file: &File, offset: u64, len: u64) -> io::Result<Residency> {
    let size = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    // A description of its own, so that the hint below is nobody else's; where it cannot be had, the hint is left out.
    let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
    if let Some(again) = &again {
        // A missing page is then read alone, without those behind it.
        let _ = rustix::fs::fadvise(again, 0, None, Advice::Random);
    }
    let probed = again.as_ref().unwrap_or(file);
    let (first, end) = (offset / PAGE, offset.saturating_add(len).min(size).div_ceil(PAGE));
    let pages = end.saturating_sub(first);
    let probes = pages.min(PROBES);
    let mut hits = 0;
    for probe in 0..probes {
        // The middle of each of as many equal stretches.
        let page = first + (u128::from(pages) * u128::from(2 * probe + 1) / u128::from(2 * probes)) as u64;
        let mut byte = [0];
        match rustix::io::preadv2(probed, &mut [IoSliceMut::new(&mut byte)], page * PAGE, ReadWriteFlags::NOWAIT) {
            Ok(n) => hits += n as u64,
            Err(Errno::AGAIN) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let cached =
        if probes == 0 { 0 } else { (u128::from(pages * PAGE) * u128::from(hits) / u128::from(probes)) as u64 };
    Ok(Residency { bytes: len, cached, dirty: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_estimate_what_is_cached() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (len, page) = (16u64 << 20, PAGE as usize);
        std::fs::write(file.path(), vec![1; len as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        let opened = File::open(file.path()).unwrap();
        let probe = |at, n| match by_probes(&opened, at, n) {
            Ok(seen) => Some(seen),
            Err(e) => {
                println!("SKIPPED: reads that do not wait: {e}");
                None
            }
        };
        let Some(whole) = probe(0, len) else { return };
        assert_eq!((whole.bytes, whole.cached), (len, len), "just written");
        assert_eq!(probe(len, 5), Some(Residency { bytes: 5, cached: 0, dirty: 0 }), "behind the end");
        assert_eq!(probe(len - 1, 5).map(|r| r.cached), Some(PAGE), "one page");
        rustix::fs::fadvise(&opened, 0, None, Advice::DontNeed).unwrap();
        if ring::cachestat(&opened, 0, len).map_or(true, |c| c.pages > 0) {
            return println!("SKIPPED: the file system keeps its pages, or does not say");
        }
        rustix::fs::fadvise(&opened, 0, None, Advice::Random).unwrap();
        // A fast disk may answer all probes in time, but not always.
        let tries = (0..50).map(|_| {
            rustix::fs::fadvise(&opened, 0, None, Advice::DontNeed).unwrap();
            // One half of it, in pages that no read-ahead follows.
            for at in (0..len / 2).step_by(page) {
                std::os::unix::fs::FileExt::read_exact_at(&opened, &mut [0], at).unwrap();
            }
            probe(0, len).unwrap()
        });
        let mut seen = Vec::new();
        for half in tries {
            assert!(half.share() >= 0.4, "what was read is seen: {half}");
            seen.push(half);
            if half.share() <= 0.6 {
                break;
            }
        }
        assert!(seen.last().is_some_and(|half| half.share() <= 0.6), "what was not read is never missed: {seen:?}");
        let now = ring::cachestat(&opened, 0, len).unwrap().pages * PAGE;
        assert!(now <= len / 2 + PROBES * PAGE, "at most the probed pages were read: {now}");
    }

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
        rustix::fs::fadvise(&opened, 0, None, Advice::DontNeed).unwrap();
        let seen = residency(&opened, 0, 100_000).unwrap();
        if seen.cached == 0 {
            assert_eq!((seen.share(), seen.dirty), (0.0, 0));
        } else {
            println!("SKIPPED: the file system keeps its pages: {seen}");
        }
    }
}
