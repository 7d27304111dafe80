//! How many threads of a job hash, and how much they leave to workers.

use std::sync::Condvar;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::hash::Hasher;
use super::options::FillOptions;
use super::order::LANE;
use super::sink::ToDevice;

/// The threads that hash beside the workers, if there are any. The lock of their conditions is that of the job's
/// progress.
pub(super) struct HashThreads {
    /// How many there are to be: workers hash only what these leave to them.
    count: AtomicUsize,
    /// Bytes of a lane that are ready to be hashed and that they leave to a worker with nothing else to do. They hash
    /// when there are more. 0: they leave none.
    pub leaves: usize,
    /// There is something to hash and the device has room for it, or nothing will come any more.
    pub hashable: Condvar,
    /// A fragment was hashed and handed on.
    pub handed_on: Condvar,
    /// Fragments that were; changed with the lock alone.
    pub handed: AtomicU64,
}

/// Fewer bytes than this are hashed sooner than a thread has started.
const JOB: u64 = 32 << 20;

/// Pieces of fewer bytes than this are hashed sooner than they are handed to another thread and back.
const PIECE: u64 = 256 << 10;

/// Threads, at most: they hash faster than one processor copies.
const MOST: usize = 16;

/// Bytes of a buffer that may wait for a worker to hash them. Reads end out of order: mostly, less than this waits for
/// one that ends late.
const LEAVES: usize = 32 << 20;

impl HashThreads {
    /// Decides for a job of `bytes`, which are hashed in pieces of `piece`. `copies`: reads are copies out of the page
    /// cache.
    pub fn new(
        options: &FillOptions,
        device: Option<&ToDevice<'_>>,
        (bytes, piece): (u64, u64),
        workers: usize,
        copies: bool,
    ) -> Self {
        let busy = workers + device.map_or(0, |to| to.processors);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        // A worker that only waits for the disk has a processor to spare.
        let waits = workers == 1 && !copies && device.is_none();
        // To a device, bytes go in order: a file is hashed by one thread.
        let many = options.takes_sha256() && device.is_none();
        let most = if many { (processors.saturating_sub(busy) + usize::from(waits)).min(MOST) } else { 1 };
        let is_worth_it = bytes >= JOB && piece >= PIECE && processors > busy;
        let count = match options.hash_thread {
            _ if !Hasher::is_wanted(options) => 0,
            None if is_worth_it => most.min((bytes / LANE).max(1) as usize),
            wanted => usize::from(wanted == Some(true)),
        };
        // Only a worker that waits for the disk has time to hash: several copy, and SHA-256 takes longer than the disk.
        // A device waits for what is hashed.
        let leaves = if waits && !options.takes_sha256() && options.hash_thread.is_none() { LEAVES } else { 0 };
        Self {
            count: AtomicUsize::new(count),
            leaves,
            hashable: Condvar::new(),
            handed_on: Condvar::new(),
            handed: AtomicU64::new(0),
        }
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// True unless workers hash everything.
    pub fn runs(&self) -> bool {
        self.count() > 0
    }

    /// There are none, before any worker has begun.
    pub fn leave_out(&self) {
        self.count.store(0, Ordering::Relaxed);
    }
}
