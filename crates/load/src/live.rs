//! Counters of jobs that are under way, for other threads to read.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Stage, StageReport};

/// Time and bytes of each stage so far, of every job that was given this
/// ([`FillOptions::live`](crate::fill::FillOptions::live)).
///
/// Jobs add to it about forty times a second, not with each operation.
#[derive(Debug)]
pub struct Live(Mutex<[LiveStage; Stage::ALL.len()]>);

/// A stage of jobs that are under way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LiveStage {
    /// Time and bytes so far.
    pub report: StageReport,
    /// Operations in flight.
    pub in_flight: usize,
}

impl Default for Live {
    fn default() -> Self {
        let none = |stage| StageReport { stage, busy: Duration::ZERO, wall: Duration::ZERO, bytes: 0 };
        Self(Mutex::new(Stage::ALL.map(|stage| LiveStage { report: none(stage), in_flight: 0 })))
    }
}

impl Live {
    /// All stages in the order of the path.
    pub fn stages(&self) -> [LiveStage; Stage::ALL.len()] {
        *self.lock()
    }

    /// Adds bytes that a job without clocks has moved.
    pub fn add(&self, stage: Stage, bytes: u64) {
        self.lock()[stage as usize].report.bytes += bytes;
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, [LiveStage; Stage::ALL.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
