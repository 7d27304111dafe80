//! Why a file is not used as a device.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::{IoBackend, ProbeError};
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
    #[error("cannot probe at {at:#x}: {source}")]
    ProbeAt {
        /// The address.
        at: u64,
        /// The reason.
        source: BadProbeAddress,
    },
    /// A probe did not read back what was written by synchronous calls.
    #[error("{} does not keep what is written to it: {source}", path.display())]
    NotMemory {
        /// The file.
        path: PathBuf,
        /// The observation of the probe.
        source: ProbeError,
    },
    /// A probe of io_uring has changed the device, and what was there could not be written back.
    #[error("the probe of io_uring has left {} changed: {source}", path.display())]
    ProbeDamage {
        /// The file.
        path: PathBuf,
        /// The observation of the probe, with the addresses.
        source: ProbeError,
    },
    /// The backend of [`FileDeviceOptions::trust`](crate::FileDeviceOptions::trust) is not available.
    #[error("no {backend}: {source}")]
    NoBackend {
        /// Which.
        backend: IoBackend,
        /// Why not.
        source: Fallback,
    },
    /// No queue could be made.
    #[error(transparent)]
    NoQueue(Fallback),
}

/// An address that a probe cannot use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BadProbeAddress {
    /// A probe there would overlap address 0.
    #[error("it must be at least 16 KiB, so that a write that goes to address 0 instead shows")]
    TooLow,
    /// It is not at the beginning of a page.
    #[error("it must be a multiple of 4 KiB")]
    Misaligned,
    /// The device ends, at this byte, before the probe does.
    #[error("the device ends at {0:#x}, and 16 KiB are needed")]
    PastEnd(u64),
    /// No file has such an address.
    #[error("it is past the top of what a file can have")]
    PastTop,
}
