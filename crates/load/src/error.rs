//! Errors of loads, verifications and outputs.

use std::path::PathBuf;

use dmalane_addr::{CardAddr, FileOffset, SgError};
use dmalane_device::{MemoryError, SpaceError};
use dmalane_queue::OpError;
use thiserror::Error;

use crate::container::FormatError;
use crate::difference::Difference;
use crate::fill::{FillError, QueueFailure};

/// Reason why a load, a verification or the writing of an output failed. Nothing of a failed load stays on the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file is not what it should be.
    #[error("{}: {source}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// The reason.
        source: FormatError,
    },
    /// A system call on a file failed.
    #[error("{}: cannot {what}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The attempt ("read its size").
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Bytes of a file could not be read.
    #[error("{}: cannot read at {at}{}: {source}", path.display(), in_tensor(tensor))]
    Read {
        /// Which file.
        path: PathBuf,
        /// Where the failed read starts.
        at: FileOffset,
        /// The tensor there.
        tensor: Option<String>,
        /// The queue's answer.
        source: OpError,
    },
    /// A file changed its length while it was being loaded.
    #[error("{}: the file was {before} bytes long and is now {now}: it was changed while being loaded", path.display())]
    Changed {
        /// Which file.
        path: PathBuf,
        /// Bytes at the beginning.
        before: u64,
        /// Bytes at the end.
        now: u64,
    },
    /// Bytes could not be moved to or from the device.
    #[error("{}: cannot transfer the bytes at {at}{}: {source}", path.display(), in_tensor(tensor))]
    Transfer {
        /// The file that the bytes belong to.
        path: PathBuf,
        /// Where they are in it.
        at: FileOffset,
        /// The tensor there.
        tensor: Option<String>,
        /// The queue's answer.
        source: OpError,
    },
    /// A queue refused an operation for good, or stopped working.
    #[error("{}: the queue of the {end} stopped working: {source}", path.display())]
    Queue {
        /// The file that was being moved.
        path: PathBuf,
        /// Which end ("file", "device").
        end: &'static str,
        /// How.
        source: QueueFailure,
    },
    /// The device has no room for a file, or not the region that was asked for.
    #[error("{}: {source}", path.display())]
    DeviceMemory {
        /// The file that did not fit.
        path: PathBuf,
        /// Why not.
        source: MemoryError,
    },
    /// Device memory was given back wrongly: a bug.
    #[error(transparent)]
    Free(MemoryError),
    /// The device has no such queue.
    #[error("the device has no queue {wanted}, it has {has}")]
    NoQueue {
        /// Which was asked for, from 0.
        wanted: usize,
        /// Number of queues.
        has: usize,
    },
    /// The segments of the card memory for a file could not be indexed.
    #[error("{}: {source}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: SgError<CardAddr>,
    },
    /// The device's address space: no range for a file, a tensor that cannot be bound, or a range that cannot be
    /// unbound.
    #[error("{}: {}{source}", path.display(), tensor.as_ref().map_or(String::new(), |t| format!("cannot bind tensor \
        {t:?}: ")))]
    Bind {
        /// The file.
        path: PathBuf,
        /// The tensor, when it is about one.
        tensor: Option<String>,
        /// Why not.
        source: SpaceError,
    },
    /// A file that was loaded onto another device.
    #[error("{}: is not on this device", path.display())]
    OtherDevice {
        /// Which file.
        path: PathBuf,
    },
    /// The inputs are not those that were loaded.
    #[error("{} files were loaded, but these are others: {inputs:?}", loaded.len())]
    OtherInputs {
        /// The files on the device.
        loaded: Vec<PathBuf>,
        /// The files given to compare with.
        inputs: Vec<PathBuf>,
    },
    /// Host memory or its mapping for the device failed.
    #[error(transparent)]
    Memory(#[from] dmalane_dma::Error),
    /// Anything else that stopped the transfer of the files.
    #[error(transparent)]
    Fill(FillError),
    /// A tensor on the device differs from the file.
    #[error("{}: tensor {tensor:?} differs from the file at byte {offset} of the tensor ({at})", path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first differing byte, from the start of the tensor.
        offset: u64,
        /// The same place in the file.
        at: FileOffset,
    },
    /// Files differ from their manifest.
    #[error("{}", differs(differences))]
    Differs {
        /// Where, in the order of the files and their bytes; at least one.
        differences: Vec<Difference>,
    },
}

fn differs(differences: &[Difference]) -> String {
    let first = differences.first().map_or_else(String::new, Difference::to_string);
    match differences.len() {
        0 | 1 => first,
        n => format!("{first}, and {} more differences", n - 1),
    }
}

fn in_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or_else(String::new, |t| format!(" in tensor {t:?}"))
}
