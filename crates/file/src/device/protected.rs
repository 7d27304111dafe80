//! Memory of a file that holds somebody's data is not given out.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;

use dmalane_addr::{CardAddr, Span};
use dmalane_device::{MemoryDriver, contents};
use thiserror::Error;

/// The file of a file device holds data where memory was to be allocated.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{} holds data there, which would be overwritten", path.display())]
pub struct HoldsData {
    /// The file.
    pub path: PathBuf,
}

/// Lets memory be allocated only where the file holds no data.
pub(super) struct Protected {
    file: File,
    path: PathBuf,
    /// Ranges that were allocated before, and so hold nobody else's data: the end of each by its start.
    given: BTreeMap<u64, u64>,
}

impl Protected {
    pub(super) fn new(file: File, path: PathBuf) -> Self {
        Self { file, path, given: BTreeMap::new() }
    }
}

impl MemoryDriver for Protected {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let (first, end) = (range.first().bits(), range.last().bits() + 1);
        // The gaps between ranges that were given before; none of them overlap.
        let mut at = first;
        let before = self.given.range(..first).next_back().filter(|(_, until)| **until > first);
        let inside: Vec<(u64, u64)> =
            before.into_iter().chain(self.given.range(first..end)).map(|(a, b)| (*a, *b)).collect();
        for (given, until) in inside.iter().copied().chain([(end, end)]) {
            if given > at && contents::holds_data(&self.file, at, given - at)? {
                return Err(Box::new(HoldsData { path: self.path.clone() }));
            }
            at = at.max(until);
        }
        for (given, _) in &inside {
            self.given.remove(given);
        }
        let start = inside.first().map_or(first, |(given, _)| first.min(*given));
        let stop = inside.last().map_or(end, |(_, until)| end.max(*until));
        self.given.insert(start, stop);
        Ok(())
    }

    fn free(&mut self, _range: Span<CardAddr>) {}
}
