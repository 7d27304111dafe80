//! How files were read.

use dmalane_file::{How, Moved, Residency};

use crate::fill::{FillReport, Filled, FilledBuf};

/// The method by which a file was read.
#[derive(Clone, Debug)]
pub struct ReadMethod {
    /// The kernel interface, and why not a better one.
    pub how: How,
    /// Why it was read directly or through the page cache.
    pub reason: String,
    /// Bytes read directly and through the page cache.
    pub moved: Moved,
    /// Share of the file that was cached before, where that was determined.
    pub cached: Option<Residency>,
}

impl std::fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.how, self.reason)
    }
}

/// Files that were read.
#[derive(Debug)]
pub struct ReadFiles {
    /// The buffers, their registrations, and the time of each stage.
    pub filled: Filled,
    /// The method for each file.
    pub methods: Vec<ReadMethod>,
}

/// A buffer with the bytes of a file.
#[derive(Debug)]
pub struct AllocRead {
    /// The buffer.
    pub buffer: FilledBuf,
    /// The method by which the file was read.
    pub method: ReadMethod,
    /// Times of the stages.
    pub report: FillReport,
}
