//! Reasons why buffers were not filled.

use dmalane_addr::FileOffset;
use dmalane_queue::{OpError, StopCause, StopReason, Ticket};
use thiserror::Error;

/// Reason why buffers were not filled. Of several failures it is the one that lies first in the job's buffers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FillError {
    /// The job contradicts itself.
    #[error("{0}")]
    Job(String),
    /// The heap has no memory for a buffer, or for one of its chunks.
    #[error("no memory for buffer {buffer}")]
    Memory {
        /// Which buffer.
        buffer: usize,
        /// The heap's answer.
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
    /// A read failed, or its queue refused or lost it.
    #[error("cannot read source {source_index} at {at}")]
    Read {
        /// Which source.
        source_index: usize,
        /// File offset at which the read began.
        at: FileOffset,
        /// The error.
        #[source]
        error: OpError,
    },
    /// The device failed or refused to take bytes that had arrived.
    #[error("buffer {buffer} from {offset} on, on its way to the device")]
    Transfer {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// The error.
        #[source]
        error: OpError,
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
    #[error("not done in time: {done} bytes had arrived, of {of}")]
    Deadline {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes of the job.
        of: u64,
    },
}

impl FillError {
    /// A buffer of this many bytes.
    pub(super) fn too_large(len: u64) -> Self {
        Self::Job(format!("a buffer of {len} bytes does not fit the address space"))
    }
}

/// Why an operation of a queue that breaks its rules failed.
pub(crate) fn broken(how: impl Into<StopCause>) -> OpError {
    OpError::Stopped(StopReason::Protocol(how.into()))
}

/// An operation ended that the queue did not have.
pub(super) fn not_submitted(ticket: Ticket) -> OpError {
    broken(format!("an operation ended that was not submitted: {ticket:?}"))
}

/// Where a job failed, as a buffer and an offset in it, and how.
pub(super) type Failed = ((usize, usize), FillError);
