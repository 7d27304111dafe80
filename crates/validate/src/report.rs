//! The results of a validation.

use std::time::Duration;

use dmalane_dma::PageKind;

use crate::settings::{Directions, Pages, Phase};

/// The comparison that comes before figures.
#[derive(Clone, PartialEq, Debug)]
pub struct Integrity {
    /// Which memory.
    pub phase: Phase,
    /// Bytes of a buffer.
    pub buffer: u64,
    /// The pages behind it.
    pub pages: Pages,
    /// Threads all of whose buffers came back as they were.
    pub ok: usize,
    /// Threads in all.
    pub threads: usize,
    /// The fault of the others.
    pub wrong: Vec<String>,
}

/// Bytes moved one way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// All threads together.
    pub bytes_per_s: f64,
    /// Median of the times that moving one buffer took, to 1 %.
    pub p50: Duration,
    /// 99 of 100 of these times are at most this, to 1 %.
    pub p99: Duration,
    /// Buffers moved, all threads together.
    pub buffers: u64,
}

impl Integrity {
    /// Both comparisons as one: as many threads as either had, of which those are right that are so in both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        let failed = (self.threads - self.ok).max(other.threads - other.ok);
        self.threads = self.threads.max(other.threads);
        self.ok = self.threads - failed;
        self.wrong.extend(other.wrong);
        self
    }
}

/// A measured rate, of bytes that were compared.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// Which memory.
    pub phase: Phase,
    /// Bytes of a buffer.
    pub buffer: u64,
    /// The pages asked for, and those that there were.
    pub pages: Pages,
    /// See there.
    pub kind: PageKind,
    /// Which directions.
    pub directions: Directions,
    /// From the device.
    pub read: Option<Rate>,
    /// To the device.
    pub write: Option<Rate>,
    /// The reference in bytes per second, both directions together, measured next to it.
    pub reference: Option<f64>,
}

impl Figure {
    /// Bytes per second both ways together.
    pub fn total(&self) -> f64 {
        self.read.iter().chain(&self.write).map(|r| r.bytes_per_s).sum()
    }
}

/// The result of a validation.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ValidateReport {
    /// One for each memory, buffer and kind of pages.
    pub integrity: Vec<Integrity>,
    /// The measurement.
    pub figures: Vec<Figure>,
    /// Measurements that were left out, with the reason.
    pub left_out: Vec<String>,
    /// The kind of reference that [`Figure::reference`] is.
    pub reference: &'static str,
}

impl ValidateReport {
    /// True when all bytes were right.
    pub fn passed(&self) -> bool {
        self.integrity.iter().all(|i| i.ok == i.threads && i.wrong.is_empty())
    }
}

/// Progress of a validation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ValidateEvent {
    /// The number of steps that there will be.
    Steps(usize),
    /// This one has begun.
    Step(String),
}
