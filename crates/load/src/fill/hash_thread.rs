//! Whether a job has a thread that hashes, and how much it leaves to workers.

use std::sync::Condvar;
use std::sync::atomic::{AtomicBool, Ordering};

use super::hash::Hasher;
use super::options::FillOptions;
use super::sink::ToDevice;

/// The thread that hashes beside the workers, if there is one. The lock of its conditions is that of the job's
/// progress.
pub(super) struct HashThread {
    /// There is to be one: workers hash only what it leaves to them.
    runs: AtomicBool,
    /// Bytes of a buffer that are ready to be hashed and that it leaves to a worker with nothing else to do. It hashes
    /// when there are more. 0: it leaves none.
    pub leaves: usize,
    /// There is something to hash and the device has room for it, or nothing will come any more.
    pub hashable: Condvar,
    /// A fragment was hashed and handed on.
    pub handed_on: Condvar,
}

/// Fewer bytes than this are hashed sooner than a thread has started.
const JOB: u64 = 32 << 20;

/// Pieces of fewer bytes than this are hashed sooner than they are handed to another thread and back.
const PIECE: u64 = 256 << 10;

/// Bytes of a buffer that may wait for a worker to hash them. Reads end out of order: mostly, less than this waits for
/// one that ends late.
const LEAVES: usize = 32 << 20;

impl HashThread {
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
        let worth = || bytes >= JOB && piece >= PIECE;
        let spare = || std::thread::available_parallelism().is_ok_and(|n| n.get() > busy);
        let runs = Hasher::is_wanted(options) && options.hash_thread.unwrap_or_else(|| worth() && spare());
        // Only a worker that waits for the disk has time to hash: several copy, and SHA-256 takes longer than the disk.
        // A device waits for what is hashed.
        let sha256 = options.hash_regions.as_ref().is_some_and(|regions| regions.sha256);
        let waits = workers == 1 && !copies && !sha256 && device.is_none();
        let leaves = if waits && options.hash_thread.is_none() { LEAVES } else { 0 };
        Self { runs: AtomicBool::new(runs), leaves, hashable: Condvar::new(), handed_on: Condvar::new() }
    }

    /// True unless workers hash everything.
    pub fn runs(&self) -> bool {
        self.runs.load(Ordering::Relaxed)
    }

    /// There is none, before any worker has begun.
    pub fn leave_out(&self) {
        self.runs.store(false, Ordering::Relaxed);
    }
}
