//! Reasons why buffers were not filled.

use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_device::IoError;
use dmalane_queue::{OpError, Refusal, StopReason, Ticket};
use thiserror::Error;

/// Reason why buffers were not filled. Of several failures it is the one that lies first in the job's buffers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FillError {
    /// The job contradicts itself.
    #[error("{0}")]
    Job(String),
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
    /// There is less memory than is needed. Nothing was taken.
    #[error("{what} need {wanted} bytes, and {limited_by} has {left} left")]
    NoRoom {
        /// The memory that is needed ("the buffers").
        what: &'static str,
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

impl FillError {
    /// A buffer of this many bytes.
    pub(super) fn too_large(len: u64) -> Self {
        Self::Job(format!("a buffer of {len} bytes does not fit the address space"))
    }
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

/// Where a job failed, as a buffer and an offset in it, and how.
pub(super) type Failed = ((usize, usize), FillError);
