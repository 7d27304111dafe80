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
    #[error("cannot open {} for {what}: {source}", path.display())]
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
    /// A block device that a file system or something else uses.
    #[error("{} is in use (mounted, or part of another device)", .0.display())]
    InUse(PathBuf),
    /// [`FileDeviceOptions::direct`](crate::FileDeviceOptions::direct) is not possible.
    #[error("no direct I/O on {}: {source}", path.display())]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Fallback,
    },
    /// [`FileDeviceOptions::probe_at`](crate::FileDeviceOptions::probe_at) is not usable.
    #[error("cannot probe at {at:#x}: {why}")]
    ProbeAt {
        /// The address.
        at: u64,
        /// The reason.
        why: String,
    },
    /// A probe did not read back what was written by synchronous calls.
    #[error("{} does not keep what is written to it: {why}", path.display())]
    NotMemory {
        /// The file.
        path: PathBuf,
        /// The observation of the probe.
        why: String,
    },
    /// A probe of io_uring has changed the device, and what was there could not be written back.
    #[error("the probe of io_uring has left {} changed: {why}", path.display())]
    ProbeDamage {
        /// The file.
        path: PathBuf,
        /// The observation of the probe, with the addresses.
        why: String,
    },
    /// No queue could be made.
    #[error(transparent)]
    NoQueue(Fallback),
}
