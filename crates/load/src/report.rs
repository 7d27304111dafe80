//! The report of a load: bytes, and the time of each stage.

use std::time::Duration;

use dmalane_addr::PageSize;

use crate::stage::StageReport;
use crate::timeline::StageTimeline;

/// Times and bytes of a load.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Bytes of all files.
    pub bytes: u64,
    /// From the first header to the last bind.
    pub wall: Duration,
    /// The time of the verification that found every tensor equal to its file, if there was one.
    pub verified: Option<Duration>,
    /// Stages in the order of the path. Times are summed over the workers.
    pub stages: Vec<StageReport>,
    /// The most workers at once.
    pub workers: usize,
    /// Physically contiguous segments of the staging buffers.
    pub segments: u64,
    /// Staging buffers: how many, and bytes of each.
    pub staging: (usize, u64),
    /// Leaves of the device's page table by size, after the load.
    pub device_leaves: Vec<(PageSize, u64)>,
    /// Operations on the device's queue.
    pub transfers: u64,
    /// The most that the heap had handed out at once, in bytes.
    pub heap_peak: u64,
    /// The timeline of the load, if [`FillOptions::timeline`](crate::fill::FillOptions::timeline) asked for it.
    pub timeline: Option<StageTimeline>,
}
