//! Filling buffers from files while they are still being allocated.
//!
//! A buffer is reserved as a whole and becomes present gather by gather. Each gather is cut into pieces, and each piece
//! is read as soon as its memory is there, while the next gather is being allocated. What has arrived is hashed, if it
//! shall be, in the order of the buffer while it is in the processor's cache, and in the end the pieces are rejoined.
//! With a device to go on to ([`Onward`]), it gets each piece before that.
//!
//! Lanes do this, each with channels of its own to all files: one lane where the kernel or the disk does the work, more
//! where the processor copies out of the page cache. One lane runs on the thread of the caller and needs no other.

mod job;
mod lane;
mod onward;
mod state;

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{BufferRef, Heap, PageBacking, SharedBuf, VolatileSlice};
use dmalane_queue::{OpError, Queue, Refusal};
use thiserror::Error;

pub use job::{BadJob, Extent, Job};
pub use onward::Onward;

use crate::StageReport;
use crate::clock::Clocks;
use crate::fill::lane::Lane;
use crate::fill::state::{Done, State};

/// How to fill.
#[derive(Clone, Debug)]
pub struct FillOptions {
    /// Bytes allocated together before reading into them starts (`--gather`); rounded up to 4 KiB.
    pub gather: u64,
    /// Bytes per read operation, at most; rounded up to 4 KiB.
    pub block: u64,
    /// Hash each buffer (XXH3-64 over its bytes in order).
    pub checksum: bool,
    /// Give up when this moment comes.
    pub deadline: Option<Instant>,
    /// How long to wait for reads in flight after a failure, and how long a device may end nothing before it is
    /// stopped, which is a [`FillError::Transfer`]. What has not ended by then stays with its channel.
    pub patience: Duration,
}

impl Default for FillOptions {
    /// Gathers of 2 MiB, reads of 2 MiB, no checksum, no deadline, 30 seconds of patience.
    fn default() -> Self {
        Self { gather: 2 << 20, block: 2 << 20, checksum: false, deadline: None, patience: Duration::from_secs(30) }
    }
}

/// What happens while buffers are being filled.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Memory is present: it can be pinned, mapped or registered while it is being filled.
    Allocated {
        /// Which buffer.
        buffer: usize,
        /// From where on in it.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// A reference to the buffer.
        reference: BufferRef,
    },
    /// Bytes have arrived.
    Arrived {
        /// Which buffer.
        buffer: usize,
        /// From where on in it.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// The device has bytes that had arrived: those of an extent, or zeroes that belong to none. Only with an
    /// [`Onward`].
    OnDevice {
        /// Which buffer.
        buffer: usize,
        /// From where on in it.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// All bytes of an extent have arrived, and with an [`Onward`] the device has them.
    Complete {
        /// Its place in [`Job::extents`].
        extent: usize,
    },
}

/// Is told of every [`Event`], in the order in which they happen, and may stop the job. Runs on whichever lane has
/// something to tell, one at a time; must not panic.
pub type Watch<'a> = dyn FnMut(Event) -> ControlFlow<()> + Send + 'a;

/// Why buffers were not filled. Of several failures it is the one that lies first in the job's buffers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FillError {
    /// The job contradicts itself.
    #[error(transparent)]
    Job(#[from] BadJob),
    /// There is no memory for a buffer, or for a part of it.
    #[error("buffer {buffer}: {source}")]
    Memory {
        /// Which buffer.
        buffer: usize,
        /// What the heap said.
        source: dmalane_dma::Error,
    },
    /// There is less memory than the buffers need. Nothing was taken.
    #[error("the buffers need {wanted} bytes, and {limited_by} has {left} left")]
    NoRoom {
        /// Bytes of the buffers.
        wanted: u64,
        /// Bytes that can be had.
        left: u64,
        /// What sets the limit.
        limited_by: String,
    },
    /// A read failed.
    #[error("source {source_index}: {error}")]
    Read {
        /// Which source.
        source_index: usize,
        /// Where the read began that failed.
        at: FileOffset,
        /// How it failed.
        error: OpError,
    },
    /// A channel refused or lost an operation.
    #[error("source {source_index}: {reason}")]
    Channel {
        /// Which source.
        source_index: usize,
        /// What it said.
        reason: String,
    },
    /// The device failed to take bytes that had arrived.
    #[error("buffer {buffer} from {offset} on, on its way to the device: {error}")]
    Transfer {
        /// Which buffer.
        buffer: usize,
        /// Where in it the transfer began.
        offset: u64,
        /// How it failed.
        error: OpError,
    },
    /// The device's channel refused to take bytes that had arrived.
    #[error("buffer {buffer} from {offset} on cannot go to the device: {reason}")]
    Refused {
        /// Which buffer.
        buffer: usize,
        /// Where in it the transfer would begin.
        offset: u64,
        /// What the channel said.
        reason: Refusal,
    },
    /// The watcher stopped the job.
    #[error("cancelled after {done} of {of} bytes")]
    Cancelled {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes of the job.
        of: u64,
    },
    /// Time was up.
    #[error("not done in time: {done} of {of} bytes had arrived")]
    Deadline {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes of the job.
        of: u64,
    },
}

/// A buffer that was filled.
#[derive(Debug)]
pub struct FilledBuf {
    buf: SharedBuf,
    len: usize,
    checksum: Option<u64>,
}

impl FilledBuf {
    /// A buffer that was filled in another way; `None` when it is shorter than `len`.
    pub fn new(buf: SharedBuf, len: usize, checksum: Option<u64>) -> Option<Self> {
        (len <= buf.len()).then_some(Self { buf, len, checksum })
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
    pub fn view(&self) -> VolatileSlice<'_> {
        self.buf.view().sub(0, self.len).expect("a buffer is at least as long as was asked for")
    }

    /// XXH3-64 of the bytes, if that was asked for.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
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

/// What filling did and how long it took.
#[derive(Clone, Debug)]
pub struct FillReport {
    /// Bytes read.
    pub bytes: u64,
    /// From the reservation to the last byte.
    pub wall: Duration,
    /// Until the first read could begin: the memory of the first gather was there.
    pub first_gather: Duration,
    /// Allocation, reading, hashing and the transfer to the device, where they were done. Times are added up over the
    /// lanes.
    pub stages: Vec<StageReport>,
    /// How many lanes there were.
    pub lanes: usize,
    /// The pages behind the first buffer, and why not better ones.
    pub backing: Option<PageBacking>,
    /// The memory was recycled: the pages of at least one buffer were there already.
    pub recycled: bool,
}

/// Buffers that were filled, in the order of [`Job::buffers`].
#[derive(Debug)]
pub struct Filled {
    /// The buffers.
    pub buffers: Vec<FilledBuf>,
    /// How it went.
    pub report: FillReport,
}

/// Fills buffers of `heap` as `job` says. `lanes` has a set of channels for each lane, each with one channel per
/// source. With `onward` a device gets what has arrived while the rest is being allocated and read.
///
/// # Errors
/// [`FillError`]. Every read and transfer in flight has ended by then, or stays with its channel; the memory is freed
/// as soon as that is the case.
///
/// # Panics
/// When there is no lane.
pub fn fill<S: Queue<Addr = FileOffset>>(
    heap: &dyn Heap,
    job: &Job,
    lanes: &mut [Vec<S>],
    onward: Option<Onward<'_>>,
    options: &FillOptions,
    watch: &mut Watch<'_>,
) -> Result<Filled, FillError> {
    let start = Instant::now();
    let sources = lanes.iter().map(Vec::len).min().expect("at least one lane");
    let state = State::new(heap, job, sources, onward, options, watch)?;
    let mut clocks = Clocks::default();
    let (first, others) = lanes.split_first_mut().expect("at least one lane");
    let lanes = 1 + others.len();
    if others.is_empty() {
        clocks.add(Lane::new(&state, first).run());
    } else {
        std::thread::scope(|scope| {
            let state = &state;
            let threads: Vec<_> =
                others.iter_mut().map(|channels| scope.spawn(|| Lane::new(state, channels).run())).collect();
            clocks.add(Lane::new(state, first).run());
            for thread in threads {
                match thread.join() {
                    Ok(other) => clocks.add(other),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
    }
    let Done { buffers, first_read, recycled } = state.finish(&mut clocks)?;
    let report = FillReport {
        bytes: job.bytes(),
        wall: start.elapsed(),
        first_gather: first_read.map_or(Duration::ZERO, |at| at - start),
        stages: clocks.filled(),
        lanes,
        backing: buffers.first().map(|b| b.buf.backing().clone()),
        recycled,
    };
    Ok(Filled { buffers, report })
}

impl fmt::Display for FillReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.bytes as f64 / self.wall.as_secs_f64() / 1e9;
        write!(
            f,
            "{} bytes in {:.2?}, {rate:.2} GB/s; first gather after {:.2?}",
            self.bytes, self.wall, self.first_gather
        )?;
        for stage in &self.stages {
            write!(f, ", {} {:.2?}", stage.stage, stage.busy)?;
        }
        write!(f, "; {} lane{}", self.lanes, if self.lanes == 1 { "" } else { "s" })
    }
}
