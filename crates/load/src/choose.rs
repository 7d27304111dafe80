//! The choice for each file between direct I/O and the page cache.

use std::fs::File;
use std::ops::Range;

use dmalane_file::{Fallback, Mode, Residency, residency};

/// Less than this the kernel fetches in one go, through the page cache too: there is nothing to be gained by going past
/// it.
const DIRECT_FROM: u64 = 64 << 10;
/// From this share of cached bytes on, copying what is cached and reading the rest through the cache is faster than
/// reading everything from the disk.
const MOSTLY: f64 = 7.0 / 8.0;
/// Below this, starting a thread costs more than it saves.
const WORKERS_FROM: u64 = 32 << 20;
/// Each worker of many has as much to do.
const EACH: u64 = 8 << 20;
/// Workers that are tried, at most.
const WORKERS: usize = 32;

/// How a part of a file is read.
pub(crate) struct Choice {
    /// [`Mode::Auto`] for direct I/O of what is not cached when its turn comes.
    pub mode: Mode,
    /// Why not all of it is read directly, unless that was asked for.
    pub fallback: Option<Fallback>,
    /// Its cached parts, where [`Mode::Auto`] was asked for and the kernel says.
    pub cached: Option<Residency>,
}

impl Choice {
    /// Chooses for `bytes` bytes of a file, which lie in `range`.
    pub fn new(file: &File, asked: Mode, range: Range<u64>, bytes: u64) -> Self {
        if asked != Mode::Auto {
            return Self { mode: asked, fallback: None, cached: None };
        }
        // Of no bytes no share is cached.
        let cached = if bytes > 0 { residency(file, range.start, range.end - range.start).ok() } else { None };
        let (mode, fallback) = match cached {
            Some(cached) if cached.share() >= MOSTLY => (Mode::Buffered, Some(Fallback::Cached(cached))),
            _ if bytes < DIRECT_FROM => (Mode::Buffered, Some(Fallback::Few(bytes))),
            Some(cached) if cached.cached > 0 => (Mode::Auto, Some(Fallback::PartlyCached(cached))),
            _ => (Mode::Auto, None),
        };
        Self { mode, fallback, cached }
    }
}

/// Workers that copy `copied` bytes out of the page cache, at most: measuring finds how many help.
pub(crate) fn workers(copied: u64) -> usize {
    match copied >= WORKERS_FROM {
        true => std::thread::available_parallelism().map_or(1, usize::from).min((copied / EACH) as usize).min(WORKERS),
        false => 1,
    }
}
