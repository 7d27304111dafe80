//! How much of a file is in the page cache.

use std::fmt;

/// The part of a file's range that is in the page cache.
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
