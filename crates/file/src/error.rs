//! Errors of opening a file.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a file cannot be read as a queue. Later errors are each an [`OpError`](dmalane_queue::OpError).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be opened: it is not there, or may not be read.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    #[error("cannot read {}: it is a {kind}, not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// The kind of file ("directory").
        kind: &'static str,
    },
    /// [`Mode::Direct`](crate::Mode::Direct) was asked for, and there is no direct I/O on this file.
    #[error("no direct I/O on {}: {reason}", path.display())]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The file was opened with `O_DIRECT` by somebody else, and this user may not open it again.
    #[error("{} was opened with O_DIRECT and cannot be opened again; pass a descriptor without it", path.display())]
    OnlyDirect {
        /// The file.
        path: PathBuf,
    },
    /// [`Io::Uring`](crate::Io::Uring) was asked for, and the kernel refuses a ring.
    #[error("no io_uring for {}: {reason}", path.display())]
    NoUring {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}
