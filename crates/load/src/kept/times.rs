//! How long it took to keep models.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::stage::{Stage, StageReport};

/// Microseconds that models took to be kept. Stages overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptTimes {
    /// All of it, until they were sealed, or compared in memory of a device.
    pub all: u64,
    /// Reading.
    pub read: u64,
    /// Hashing.
    pub hash: u64,
    /// Moving bytes onto a device.
    pub transfer: u64,
}

impl KeptTimes {
    pub(super) fn of(stages: &[StageReport]) -> Self {
        let of = |stage| stages.iter().filter(|of| of.stage == stage).map(|of| micros(of.busy)).sum();
        let [read, hash, transfer] = [Stage::Read, Stage::Checksum, Stage::Transfer].map(of);
        Self { all: 0, read, hash, transfer }
    }

    /// The sum with those of other models.
    pub fn add(&mut self, Self { all, read, hash, transfer }: Self) {
        let ours = [&mut self.all, &mut self.read, &mut self.hash, &mut self.transfer];
        ours.into_iter().zip([all, read, hash, transfer]).for_each(|(sum, more)| *sum = sum.saturating_add(more));
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
