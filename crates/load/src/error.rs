//! What can go wrong on the path.

use std::path::PathBuf;

use dmalane_addr::{CardAddr, FileOffset, PageSize, RangeError, SgError};
use dmalane_queue::OpError;
use thiserror::Error;

use crate::{FormatError, Placement};

/// Why a load, a verification or a save failed. Nothing of a failed load stays on the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file is not what it should be.
    #[error("{}: {source}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A system call on a file failed.
    #[error("{}: cannot {what}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What was tried ("read its size").
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
        /// What the channel said.
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
        /// What the channel said.
        source: OpError,
    },
    /// A channel did not accept a transfer that it should have, or did not finish it.
    #[error("{}: the channel of the {end} stopped working: {reason}", path.display())]
    Channel {
        /// The file that was being moved.
        path: PathBuf,
        /// Which end ("file", "device").
        end: &'static str,
        /// What it said.
        reason: String,
    },
    /// The card has no room.
    #[error(
        "{}: needs {needed} bytes of {placement} memory in one piece at {align} alignment; the largest free piece \
         has {largest}", path.display()
    )]
    CardFull {
        /// The file that did not fit.
        path: PathBuf,
        /// Bytes asked for.
        needed: u64,
        /// Where.
        placement: Placement,
        /// Alignment asked for.
        align: PageSize,
        /// The longest free range there, in bytes.
        largest: u64,
    },
    /// The card lacks the kind of memory that was asked for.
    #[error("the card has no {0} memory")]
    NoSuchMemory(Placement),
    /// Device memory was given back wrongly: a bug.
    #[error(transparent)]
    CardMemory(#[from] RangeError<CardAddr>),
    /// The segments of the card memory for a file could not be indexed.
    #[error("{}: {source}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: SgError<CardAddr>,
    },
    /// No room is left in the device's virtual address space.
    #[error("{}: no {needed} bytes are left in the device's virtual address space", path.display())]
    NoDeviceVa {
        /// The file that did not fit.
        path: PathBuf,
        /// Bytes asked for.
        needed: u64,
    },
    /// A tensor could not be bound.
    #[error("{}: cannot bind tensor {tensor:?}: {source}", path.display())]
    Bind {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the VM said.
        source: dmalane_vm::Error,
    },
    /// The device could not be made to forget translations. What was unbound is not used again.
    #[error("cannot invalidate the device's translations: {0}")]
    Invalidate(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    /// What the card holds differs from the file.
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
}

fn in_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or_else(String::new, |t| format!(" in tensor {t:?}"))
}
