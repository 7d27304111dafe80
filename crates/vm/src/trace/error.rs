//! Why a trace, or one line of it, was refused.

use std::prelude::v1::*;

use dmalane_addr::{CardAddr, SgError};
use thiserror::Error;

use super::{MAX_BATCH, MAX_BOS, MAX_LINE, MAX_SCATTERED, MAX_SEGMENTS, VERSION};
use crate::Errno;

/// Why a trace cannot be replayed at all.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// It could not be read.
    #[error("the trace cannot be read")]
    Io(#[from] std::io::Error),
    /// Its first line does not say that it is a trace.
    #[error("line 1 is not the first line of a trace: {0}")]
    NoHeader(String),
    /// A version that this program does not know.
    #[error("the trace has version {0}; only {VERSION} is known")]
    Version(u64),
    /// It says a range that cannot be.
    #[error("the trace says a VM of {len:#x} bytes from {va:#x} on, which cannot be")]
    Range {
        /// The first address.
        va: u64,
        /// Bytes.
        len: u64,
    },
    /// The VM that it asks for cannot be made.
    #[error("the VM that the trace asks for cannot be made")]
    Vm(#[from] crate::Error),
}

/// Why a line was refused. The VM is as it was before the line.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum TraceRefusal {
    /// A line longer than [`MAX_LINE`] bytes.
    #[error("a line of more than {MAX_LINE} bytes")]
    LineTooLong,
    /// Not JSON, or not an operation: a field missing, misspelt or of another type.
    #[error("{0}")]
    BadLine(String),
    /// A field that this operation does not have.
    #[error("{op} has no field {field}")]
    UnexpectedField {
        /// The operation.
        op: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A field that this operation needs.
    #[error("{op} needs a field {field}")]
    MissingField {
        /// The operation.
        op: &'static str,
        /// The field.
        field: &'static str,
    },
    /// An operation that is not allowed in a batch.
    #[error("{op} cannot stand in a batch")]
    NotInBatch {
        /// The operation.
        op: &'static str,
    },
    /// A batch of more than [`MAX_BATCH`] operations.
    #[error("a batch of {count} operations; there may be {MAX_BATCH}")]
    BatchTooLong {
        /// Operations.
        count: usize,
    },
    /// No such buffer object, or not any more, or not whole yet.
    #[error("there is no buffer object {bo}")]
    NoBo {
        /// Its id.
        bo: u64,
    },
    /// The id is taken.
    #[error("there is a buffer object {bo} already")]
    DuplicateBo {
        /// The id.
        bo: u64,
    },
    /// More than [`MAX_BOS`] buffer objects at once.
    #[error("more than {MAX_BOS} buffer objects at once")]
    TooManyBos,
    /// More than [`MAX_SEGMENTS`] segments at once.
    #[error("more than {MAX_SEGMENTS} segments at once")]
    TooManySegments,
    /// Buffer objects of many segments that are longer than [`MAX_SCATTERED`] bytes in all.
    #[error("more than {MAX_SCATTERED} bytes in scattered buffer objects")]
    TooScattered,
    /// A segment that is empty or wraps, or with which the buffer would be longer than 64 bits can say.
    #[error("segment {index} of buffer {bo}: {len:#x} bytes from {pa:#x} on cannot be")]
    BadSegment {
        /// The buffer's id.
        bo: u64,
        /// Which segment of the line, from 0.
        index: usize,
        /// Where it begins.
        pa: u64,
        /// Bytes.
        len: u64,
    },
    /// No memory for the index of a buffer's segments.
    #[error("buffer {bo}: {source}")]
    NoMemory {
        /// The buffer's id.
        bo: u64,
        /// The error of the index, with its size.
        source: SgError<CardAddr>,
    },
    /// The VM refused.
    #[error(transparent)]
    Vm(#[from] crate::Error),
}

crate::errno::named!(TraceRefusal);

impl TraceRefusal {
    fn name_and_number(&self) -> (&'static str, Errno) {
        match self {
            Self::LineTooLong => ("line_too_long", Errno::TooBig),
            Self::BadLine(_) => ("bad_line", Errno::Inval),
            Self::UnexpectedField { .. } => ("unexpected_field", Errno::Inval),
            Self::MissingField { .. } => ("missing_field", Errno::Inval),
            Self::NotInBatch { .. } => ("not_in_batch", Errno::Inval),
            Self::BatchTooLong { .. } => ("batch_too_long", Errno::TooBig),
            Self::NoBo { .. } => ("no_bo", Errno::NoEnt),
            Self::DuplicateBo { .. } => ("duplicate_bo", Errno::Exist),
            Self::TooManyBos => ("too_many_bos", Errno::NoMem),
            Self::TooManySegments => ("too_many_segments", Errno::NoMem),
            Self::TooScattered => ("too_scattered", Errno::NoMem),
            Self::BadSegment { .. } => ("bad_segment", Errno::Inval),
            Self::NoMemory { .. } => ("no_memory", Errno::NoMem),
            Self::Vm(error) => (error.name(), error.errno()),
        }
    }
}
