//! Settings of a job.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Settings of a job. [`ReadOptions`](crate::ReadOptions) and [`DriveOptions`](crate::DriveOptions) embed them.
#[derive(Clone, Debug)]
pub struct FillOptions {
    /// Bytes of memory that are allocated together, before reading into them starts: of a chunk, or of a staging buffer
    /// in a load; rounded up to 4 KiB.
    pub chunk: u64,
    /// Bytes per read operation, at most; rounded up to 4 KiB.
    pub block: u64,
    /// Reads that each worker has in flight, at most as many as its queues take. By default as many as make the bytes
    /// come faster, found by measuring as they come, but no more than 128 MiB of all workers, or 4 of each.
    pub depth: Option<usize>,
    /// Hash each buffer (XXH3-64 over its bytes in order).
    pub checksum: bool,
    /// Hash the regions of each buffer too; needs [`HashRegions::ends`] for every buffer. A load takes those of its
    /// [manifest](crate::Manifest) instead.
    pub hash_regions: Option<Arc<HashRegions>>,
    /// Hash on a thread of its own. By default jobs of 32 MiB and more have one, where the workers and the device leave
    /// a processor. A single worker that reads from the disk into memory hashes while it waits, unless SHA-256 is
    /// wanted; the thread then hashes the rest. For SHA-256 of what does not go to a device there
    /// are as many threads as processors are left, 16 at most, and each takes regions of 16 MiB and more together.
    pub hash_thread: Option<bool>,
    /// Give up this long after the beginning of the job: [`FillError::Deadline`](super::FillError::Deadline).
    pub time_limit: Option<Duration>,
    /// Time to wait for reads in flight after a failure. Also the time in which a device may end nothing while a worker
    /// waits for it, before it is stopped, which is a [`FillError::Transfer`](super::FillError::Transfer). Operations
    /// that have not ended by then stay with their queue.
    pub timeout: Duration,
    /// Record a timeline ([`FillReport::timeline`](super::FillReport::timeline)), in at most about 1 MiB for each
    /// worker, and for each channel of a device that was opened with this set.
    pub timeline: bool,
}

impl Default for FillOptions {
    /// Chunks and reads of 2 MiB, as many reads as help, no checksum, no time limit, a timeout of 30 s, no timeline.
    fn default() -> Self {
        Self {
            chunk: 2 << 20,
            block: 2 << 20,
            depth: None,
            checksum: false,
            hash_regions: None,
            hash_thread: None,
            time_limit: None,
            timeout: Duration::from_secs(30),
            timeline: false,
        }
    }
}

impl FillOptions {
    /// Whether regions are hashed with SHA-256.
    pub(super) fn takes_sha256(&self) -> bool {
        self.hash_regions.as_ref().is_some_and(|regions| regions.sha256)
    }

    /// The beginning of the timeline of a job that began at `start`, if one is recorded.
    pub(crate) fn epoch(&self, start: Instant) -> Option<Instant> {
        self.timeline.then_some(start)
    }
}

/// Regions to hash: each buffer is cut into consecutive ones, which may be empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HashRegions {
    /// For each buffer the offsets at which its regions end, in ascending order. Bytes behind the last one belong to no
    /// region.
    pub ends: Vec<Vec<u64>>,
    /// Take SHA-256 as well, which costs several times as much.
    pub sha256: bool,
}
