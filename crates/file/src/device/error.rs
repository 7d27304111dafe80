//! Why a file is not used as a device.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::Fallback;

/// Why a file is not used as a device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileDeviceError {
    /// It cannot be opened for what it is to do.
    #[error("cannot open {} for {what}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// "reading", "writing", "reading and writing".
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It cannot be read and written at addresses.
    #[error("{} is a {kind}, which has no addresses", path.display())]
    NoAddresses {
        /// The file.
        path: PathBuf,
        /// The kind of file.
        kind: &'static str,
    },
    /// It has less than a page.
    #[error("{} has {len} bytes, and device memory at least 4096", path.display())]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        len: u64,
    },
    /// A block device that a file system or something else uses.
    #[error("{} is in use (mounted, or part of another device)", .0.display())]
    InUse(PathBuf),
    /// [`FileDeviceOptions::direct`](crate::FileDeviceOptions::direct) is not possible.
    #[error("no direct I/O on {}", path.display())]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Fallback,
    },
    /// No thread of a queue could be started.
    #[error("cannot start a thread")]
    NoQueue(#[source] io::Error),
}
