//! A clock on each stage of the path.

use std::fmt;
use std::time::{Duration, Instant};

use crate::StageReport;

/// A stage of the path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// Taking memory from the heap, pages faulted in.
    Allocate,
    /// Reads in flight.
    Read,
    /// Pinning: giving buffers frames and a scatter-gather table.
    Register,
    /// Entering buffers into the IOMMU's page tables.
    Map,
    /// Hashing the bytes as they arrive.
    Checksum,
    /// Moving bytes to the card.
    Transfer,
    /// Binding tensors in the device's page tables.
    Bind,
    /// Reading back through the card's MMU, and comparing.
    Verify,
}

impl Stage {
    /// All stages in the order of the path.
    pub const ALL: [Self; 8] = [
        Self::Allocate,
        Self::Read,
        Self::Register,
        Self::Map,
        Self::Checksum,
        Self::Transfer,
        Self::Bind,
        Self::Verify,
    ];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allocate => "allocate",
            Self::Read => "read",
            Self::Register => "register",
            Self::Map => "map",
            Self::Checksum => "checksum",
            Self::Transfer => "transfer",
            Self::Bind => "bind",
            Self::Verify => "verify",
        })
    }
}

/// Time and bytes of each stage.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clocks([Clock; 8]);

#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    busy: Duration,
    held: Duration,
    bytes: u64,
    since: Option<Instant>,
}

impl Clocks {
    /// Runs `f`, during which the stage is busy and the pipeline does nothing else.
    pub(crate) fn time<T>(&mut self, stage: Stage, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        self.0[stage as usize].busy += start.elapsed();
        self.0[stage as usize].held += start.elapsed();
        result
    }

    /// Runs `f`, in which the pipeline waits for a stage or does its work, but which does not measure how long the
    /// stage was busy: [`Clocks::in_flight`] does.
    pub(crate) fn hold<T>(&mut self, stage: Stage, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        self.0[stage as usize].held += start.elapsed();
        result
    }

    pub(crate) fn bytes(&mut self, stage: Stage, bytes: u64) {
        self.0[stage as usize].bytes += bytes;
    }

    /// Notes whether an asynchronous stage has anything in flight; the time in between counts as busy.
    pub(crate) fn in_flight(&mut self, stage: Stage, any: bool) {
        let clock = &mut self.0[stage as usize];
        match (clock.since, any) {
            (None, true) => clock.since = Some(Instant::now()),
            (Some(since), false) => {
                clock.busy += since.elapsed();
                clock.since = None;
            }
            _ => {}
        }
    }

    /// Adds times and bytes of others.
    pub(crate) fn add(&mut self, other: Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            mine.busy += theirs.busy;
            mine.held += theirs.held;
            mine.bytes += theirs.bytes;
        }
    }

    /// All stages in the order of the path.
    pub(crate) fn stages(&self) -> impl Iterator<Item = StageReport> {
        Stage::ALL.into_iter().map(|stage| self.get(stage))
    }

    fn get(&self, stage: Stage) -> StageReport {
        let clock = &self.0[stage as usize];
        StageReport { stage, busy: clock.busy, held: clock.held, bytes: clock.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_operations_count_once() {
        let mut c = Clocks::default();
        let start = Instant::now();
        for any in [true, true, false, false, true, false] {
            c.in_flight(Stage::Read, any);
            std::thread::sleep(Duration::from_millis(2));
        }
        let busy = c.get(Stage::Read).busy;
        assert!(busy >= Duration::from_millis(6) && busy < start.elapsed(), "{busy:?}");
        assert_eq!(Stage::ALL.map(|s| s as usize), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
