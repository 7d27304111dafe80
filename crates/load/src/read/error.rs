//! Reasons why a read has no filled buffer.

use std::path::PathBuf;

use dmalane_queue::OpError;
use thiserror::Error as ThisError;

use crate::error::Error;
use crate::fill::FillError;
use crate::open_file::OpenFile;

/// Reason why there is no filled buffer. Nothing is left in flight or allocated.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be opened, or its properties cannot be determined.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file cannot be read in the requested mode.
    #[error(transparent)]
    File(#[from] dmalane_file::Error),
    /// The file is shorter than the range.
    #[error("{} ends at {size}, before the end of the range at {end}", path.display())]
    PastEnd {
        /// The file.
        path: PathBuf,
        /// End of the range.
        end: u64,
        /// End of the file.
        size: u64,
    },
    /// The buffers would be larger than [`ReadOptions::limit`](crate::ReadOptions::limit).
    #[error("{wanted} bytes are more than the limit of {limit}")]
    Limit {
        /// Bytes of the buffers.
        wanted: u64,
        /// The limit.
        limit: u64,
    },
    /// The file was read to its end, and it grew or shrank meanwhile.
    #[error("{} changed while it was read: it had {before} bytes and now has {now}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes before.
        before: u64,
        /// Bytes after.
        now: u64,
    },
    /// A read of this file failed.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error, with the offset.
        error: OpError,
    },
    /// Anything else that stopped the job.
    #[error(transparent)]
    Fill(FillError),
}

/// The failure to open a file, or to learn its size.
impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        match error {
            Error::File { path, source, .. } => Self::Open { path, source },
            other => Self::Open { path: PathBuf::new(), source: std::io::Error::other(other) },
        }
    }
}

/// An error of the engine with the name of the file that it is about.
pub(super) fn named(error: FillError, sources: &[OpenFile]) -> ReadError {
    match error {
        FillError::Read { source_index, error, .. } if source_index < sources.len() => {
            ReadError::Read { path: sources[source_index].path.clone(), error }
        }
        other => ReadError::Fill(other),
    }
}
