//! The engine of all reading: bytes of files arrive in buffers, chunk by chunk, and go on to a sink.
//!
//! A job ([`Job`]) names buffers and the ranges of files that are read into them. Buffers that stay ([`BufferMemory`])
//! are reserved as wholes and made present chunk by chunk, so that reads into one chunk are in flight while the next
//! one is being allocated and registered; small pages behind a memfd are filled from landing places instead. A load
//! onto a device uses the slots of a few staging buffers instead. Bytes that have arrived are hashed, if checksums are
//! on, in the order of their buffer while they are in the processor's cache; large jobs have a thread for that where
//! there is a processor that neither workers nor the device need. With a device as the [`Sink`] they are transferred
//! right after that; a buffer that stays is rejoined in the end.
//!
//! Workers do this, each with queues of its own to all files: one worker where the kernel or the disk does the work,
//! several where the processor copies out of the page cache. One worker runs on the thread of the caller and needs no
//! other.

mod hash;
mod job;
mod landing;
mod memory;
mod sink;
mod state;
mod worker;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_device::IoError;
use dmalane_dma::{BufferRef, PageBacking, SharedBuf, VolatileSlice};
use dmalane_queue::{OpError, Queue, Refusal, Registered, StopReason, Ticket};
use thiserror::Error;

pub(crate) use hash::Hashes;
pub use hash::{Digest, HashRegions};
pub use job::{BadJob, Extent, Job};
pub use memory::{BufferMemory, FillCached};
pub(crate) use memory::{Memory, Staging};
pub use sink::{Sink, Target, Targets};
pub(crate) use state::Done;

use crate::clock::Clocks;
use crate::{StageReport, StageTimeline};
use state::State;
use worker::Worker;

/// Settings of a job. `dmalane::ReadOptions` and [`DriveOptions`](crate::DriveOptions) embed them.
#[derive(Clone, Debug)]
pub struct FillOptions {
    /// Bytes of memory that are allocated together, before reading into them starts: of a chunk, or of a staging buffer
    /// in a load; rounded up to 4 KiB.
    pub chunk: u64,
    /// Bytes per read operation, at most; rounded up to 4 KiB.
    pub block: u64,
    /// Hash each buffer (XXH3-64 over its bytes in order).
    pub checksum: bool,
    /// Hash the regions of each buffer too; needs [`HashRegions::ends`] for every buffer. A load takes those of its
    /// [manifest](crate::Manifest) instead.
    pub hash_regions: Option<Arc<HashRegions>>,
    /// Hash on a thread of its own. By default jobs of 32 MiB and more have one, where the workers and the device leave
    /// a processor. A single worker that reads from the disk into memory hashes while it waits, unless SHA-256 is
    /// wanted; the thread takes what it does not get to.
    pub hash_thread: Option<bool>,
    /// Give up this long after the beginning of the job: [`FillError::Deadline`].
    pub time_limit: Option<Duration>,
    /// Time to wait for reads in flight after a failure. Also the time in which a device may end nothing while a worker
    /// waits for it, before it is stopped, which is a [`FillError::Transfer`]. Operations that have not ended by then
    /// stay with their queue.
    pub timeout: Duration,
    /// Record a timeline ([`FillReport::timeline`]), in at most about 1 MiB for each worker, and for each channel of a
    /// device that was opened with this set.
    pub timeline: bool,
}

impl Default for FillOptions {
    /// Chunks of 2 MiB, reads of 2 MiB, no checksum, no time limit, a timeout of 30 seconds, no timeline.
    fn default() -> Self {
        Self {
            chunk: 2 << 20,
            block: 2 << 20,
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
    /// The beginning of the timeline of a job that began at `start`, if one is recorded.
    pub(crate) fn epoch(&self, start: Instant) -> Option<Instant> {
        self.timeline.then_some(start)
    }
}

/// Progress of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A chunk of a buffer that stays is present, and registered if that was asked for; reads into it begin now, unless
    /// its bytes are there already.
    Allocated {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// A reference to the buffer.
        reference: BufferRef,
    },
    /// Bytes have arrived.
    Arrived {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A transfer has ended: the device has bytes of one extent, or zeroes that belong to none. Only with
    /// [`Sink::Device`].
    OnDevice {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// All bytes of an extent have arrived, and the device has those that go to one.
    Complete {
        /// Its place in [`Job::extents`].
        extent: usize,
    },
}

/// Called with every [`Event`] in order; may stop the job. Runs on the worker that an event happens on, one call at a
/// time; must not panic.
pub type Watch<'a> = dyn FnMut(Event) -> ControlFlow<()> + Send + 'a;

/// Reason why buffers were not filled. Of several failures it is the one that lies first in the job's buffers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FillError {
    /// The job contradicts itself.
    #[error(transparent)]
    Job(#[from] BadJob),
    /// The heap has no memory for a buffer, or for one of its chunks.
    #[error("buffer {buffer}: {source}")]
    Memory {
        /// Which buffer.
        buffer: usize,
        /// The heap's answer.
        source: dmalane_dma::Error,
    },
    /// A chunk could not be pinned or mapped for the device.
    #[error("buffer {buffer} from {offset} on: {source}")]
    Map {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the chunk.
        offset: u64,
        /// The registrar's answer.
        source: dmalane_dma::Error,
    },
    /// There is less memory than the buffers need. Nothing was taken.
    #[error("the buffers need {wanted} bytes, and {limited_by} has {left} left")]
    NoRoom {
        /// Bytes of the buffers.
        wanted: u64,
        /// Bytes that can be had.
        left: u64,
        /// The limit that is reached first.
        limited_by: String,
    },
    /// A read failed.
    #[error("source {source_index}: {error}")]
    Read {
        /// Which source.
        source_index: usize,
        /// File offset at which the read began.
        at: FileOffset,
        /// The error.
        error: OpError,
    },
    /// A queue refused or lost a read.
    #[error("source {source_index}: {source}")]
    Queue {
        /// Which source.
        source_index: usize,
        /// How.
        source: QueueFailure,
    },
    /// The device failed to take bytes that had arrived.
    #[error("buffer {buffer} from {offset} on, on its way to the device: {error}")]
    Transfer {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// The error.
        error: OpError,
    },
    /// The device's queue refused to take bytes that had arrived.
    #[error("buffer {buffer} from {offset} on cannot go to the device: {reason}")]
    Refused {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// The queue's answer.
        reason: Refusal,
    },
    /// The watch stopped the job.
    #[error("cancelled after {done} of {of} bytes")]
    Cancelled {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes of the job.
        of: u64,
    },
    /// Time was up.
    #[error("not done in time: {done} bytes had arrived{}", of.map_or(String::new(), |of| format!(", of {of}")))]
    Deadline {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes of the job; `None` for a source whose length nobody knows.
        of: Option<u64>,
    },
}

/// A queue that does not work: nothing more can be moved by it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QueueFailure {
    /// It refused an operation for good.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It stopped.
    #[error(transparent)]
    Stopped(#[from] StopReason),
    /// Reading back from the device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// It ended an operation that it did not have.
    #[error("an operation ended that was not submitted: {0:?}")]
    NotSubmitted(Ticket),
    /// Nothing ended for this long.
    #[error("a read does not end within {0:?}")]
    TimedOut(Duration),
    /// It did not return all of the memory that it was given.
    #[error("it did not return all of its memory")]
    Lost,
}

/// A buffer that was filled.
#[derive(Debug)]
pub struct FilledBuf {
    buf: SharedBuf,
    len: usize,
    checksum: Option<u64>,
    digests: Vec<Digest>,
}

impl FilledBuf {
    /// A buffer that was filled by other means; `None` when it is shorter than `len`.
    pub fn new(buf: SharedBuf, len: usize, checksum: Option<u64>) -> Option<Self> {
        (len <= buf.len()).then_some(Self { buf, len, checksum, digests: Vec::new() })
    }

    /// Bytes that were asked for. The buffer may be a little longer; what follows is zero.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of which no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.buf.as_volatile_slice().sub(0, self.len).expect("a buffer is at least as long as was asked for")
    }

    /// XXH3-64 of the bytes, if that was asked for.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// The hashes of its regions, in order, if [`FillOptions::hash_regions`] asked for them.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }

    /// The buffer, to be pinned, mapped or exported.
    pub fn shared(&self) -> &SharedBuf {
        &self.buf
    }

    /// The buffer. [`SharedBuf::into_cpu`] makes slices of it.
    pub fn into_shared(self) -> SharedBuf {
        self.buf
    }
}

/// Times and bytes of a job.
#[derive(Clone, Debug)]
pub struct FillReport {
    /// Bytes read.
    pub bytes: u64,
    /// From the reservation to the last byte.
    pub wall: Duration,
    /// Until the first read could begin: the memory of the first chunk was there.
    pub first_chunk: Duration,
    /// The stages that moved any bytes, in the order of the path. Times are summed over the workers.
    pub stages: Vec<StageReport>,
    /// Number of workers.
    pub workers: usize,
    /// The pages behind the first buffer, and why not better ones.
    pub backing: Option<PageBacking>,
    /// The memory was recycled: the pages of at least one buffer were there already.
    pub recycled: bool,
    /// The timeline, if [`FillOptions::timeline`] asked for it.
    pub timeline: Option<StageTimeline>,
}

/// Buffers that were filled, in the order of [`Job::buffers`].
#[derive(Debug)]
pub struct Filled {
    /// The buffers.
    pub buffers: Vec<FilledBuf>,
    /// For each buffer the registrations of its chunks, in order, one behind the other: together they are all of it.
    /// Empty where none were asked for. Dropped, they are unmapped and unpinned.
    pub mappings: Vec<Vec<Registered>>,
    /// Times and bytes.
    pub report: FillReport,
}

/// Fills buffers as `job` says and hands them to a sink. `workers` has a set of queues for each worker, each with one
/// queue per source.
///
/// # Errors
/// [`FillError`]. Every read and transfer in flight has ended by then, or stays with its queue; the memory is freed as
/// soon as that is the case.
///
/// # Panics
/// When there is no worker.
pub fn fill<S: Queue<Addr = FileOffset>>(
    memory: BufferMemory<'_>,
    sink: Sink<'_>,
    job: &Job,
    workers: &mut [Vec<S>],
    options: &FillOptions,
    watch: &mut Watch<'_>,
) -> Result<Filled, FillError> {
    fill_since(Instant::now(), memory, sink, job, workers, options, watch)
}

/// As [`fill`], of a job that began at `start`.
pub(crate) fn fill_since<S: Queue<Addr = FileOffset>>(
    start: Instant,
    memory: BufferMemory<'_>,
    sink: Sink<'_>,
    job: &Job,
    workers: &mut [Vec<S>],
    options: &FillOptions,
    watch: &mut Watch<'_>,
) -> Result<Filled, FillError> {
    let mut done = run(start, Memory::Buffers(memory), sink, job, workers, options, watch)?;
    let report = FillReport {
        bytes: job.bytes(),
        wall: start.elapsed(),
        first_chunk: done.first_read.map_or(Duration::ZERO, |at| at - start),
        stages: done.clocks.stages().filter(|s| s.bytes > 0).collect(),
        workers: workers.len(),
        backing: done.whole.first().map(|buf| buf.backing().clone()),
        recycled: done.recycled,
        timeline: done.clocks.timeline(),
    };
    let buffers = done.whole.into_iter().zip(&job.buffers).zip(done.hashes);
    let buffers = buffers.map(|((buf, len), Hashes { checksum, digests })| {
        let len = *len as usize;
        FilledBuf { buf, len, checksum, digests }
    });
    Ok(Filled { buffers: buffers.collect(), mappings: done.mappings, report })
}

/// As [`fill`], of a job that began at `start`, with memory of either kind.
pub(crate) fn run<S: Queue<Addr = FileOffset>>(
    start: Instant,
    memory: Memory<'_>,
    sink: Sink<'_>,
    job: &Job,
    workers: &mut [Vec<S>],
    options: &FillOptions,
    watch: &mut Watch<'_>,
) -> Result<Done, FillError> {
    let sources = workers.iter().map(Vec::len).min().expect("at least one worker");
    let state = State::new(start, memory, sink, job, (workers.len(), sources), options, watch)?;
    let (first, others) = workers.split_first_mut().expect("at least one worker");
    let clocks = |name: String| Clocks::recording(&name, options.epoch(start));
    let clocks = if others.is_empty() && !state.aside {
        let clocks = Worker::new(&state, first, clocks("worker 0".to_owned())).run();
        state.drain(clocks)
    } else {
        std::thread::scope(|scope| {
            let state = &state;
            let hasher =
                state.aside.then(|| scope.spawn(move || state.hash_in_background(clocks("hashing".to_owned()))));
            let done = NothingComes(state);
            let named = |(queues, i)| (queues, clocks(format!("worker {i}")));
            let threads: Vec<_> = others
                .iter_mut()
                .zip(1..)
                .map(named)
                .map(|(queues, clocks)| scope.spawn(move || Worker::new(state, queues, clocks).run()))
                .collect();
            let mut clocks = Worker::new(state, first, clocks("worker 0".to_owned())).run();
            let add = |clocks: &mut Clocks, thread: std::thread::ScopedJoinHandle<'_, Clocks>| match thread.join() {
                Ok(other) => clocks.add(other),
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().for_each(|thread| add(&mut clocks, thread));
            clocks = state.drain(clocks);
            drop(done);
            hasher.into_iter().for_each(|thread| add(&mut clocks, thread));
            clocks
        })
    };
    state.finish(clocks)
}

/// Tells the thread that hashes when workers have ended and the device has everything, or when there was a panic.
struct NothingComes<'s, 'a, 'w>(&'s State<'a, 'w>);

impl Drop for NothingComes<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.nothing_comes();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Display for FillReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.bytes as f64 / self.wall.as_secs_f64() / 1e9;
        write!(
            f,
            "{} bytes in {:.2?}, {rate:.2} GB/s; first chunk after {:.2?}",
            self.bytes, self.wall, self.first_chunk
        )?;
        for stage in &self.stages {
            write!(f, ", {} {:.2?}", stage.stage, stage.busy)?;
        }
        write!(f, "; {} worker{}", self.workers, if self.workers == 1 { "" } else { "s" })
    }
}
