//! The error of everything that is done with files: opening, reading, loading, verifying and writing them.

use std::path::PathBuf;

use dmalane_addr::{CardAddr, FileOffset, SgError};
use dmalane_device::{MemoryError, SpaceError};
use dmalane_dma::Forked;
use dmalane_queue::OpError;
use thiserror::Error;

use crate::container::FormatError;
use crate::difference::Difference;
use crate::fill::FillError;
use crate::kept::KeepError;

/// Reason why files cannot be opened, read, loaded, verified or written. Nothing is left in flight or allocated, and
/// nothing of a failed load stays on the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The device was opened by the parent of this process.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// A kept model cannot be had, or a model not be kept.
    #[error(transparent)]
    Kept(#[from] KeepError),
    /// A file is not what it should be.
    #[error("{}: cannot be used", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// The reason.
        source: FormatError,
    },
    /// A system call on a file failed.
    #[error("{}: cannot {what}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The attempt ("read its size").
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A file cannot be opened, or not be read in the mode that was asked for.
    #[error(transparent)]
    Open(#[from] dmalane_file::Error),
    /// Bytes of a file could not be read.
    #[error("{}: cannot read at {at}{}", path.display(), in_tensor(tensor))]
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
    /// A file ends before the range that was to be read of it.
    #[error("{} ends at {size}, before the end of the range at {end}", path.display())]
    PastEnd {
        /// Which file.
        path: PathBuf,
        /// End of the range.
        end: u64,
        /// End of the file.
        size: u64,
    },
    /// A file was changed or replaced since it was opened, or while it was read.
    #[error("{}: it was changed or replaced meanwhile{}", path.display(), lengths(*before, *now))]
    Changed {
        /// Which file.
        path: PathBuf,
        /// Bytes at the beginning.
        before: u64,
        /// Bytes at the end.
        now: u64,
    },
    /// A limit of memory does not allow an allocation: that of a read, or of a model.
    #[error("{}", beyond(tensor, *wanted, *used, *limit))]
    Limit {
        /// The tensor, or the first of several, if it is about any.
        tensor: Option<String>,
        /// Bytes of the allocation.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// Bytes could not be moved to or from the device.
    #[error("{}: cannot transfer the bytes at {at}{}", path.display(), in_tensor(tensor))]
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
    /// The device has no room for a file, or not the region that was asked for. Or its memory was given back wrongly: a
    /// bug.
    #[error("{}: there is no device memory for it", path.display())]
    DeviceMemory {
        /// The file that did not fit.
        path: PathBuf,
        /// Why not.
        source: MemoryError,
    },
    /// Some queues are chosen by number, and some are not.
    #[error("queues are chosen by `auto` or by numbers, not by both")]
    MixedQueues,
    /// The device has no such queue.
    #[error("the device has no queue {wanted}, it has {has}")]
    NoQueue {
        /// Which was asked for, from 0.
        wanted: usize,
        /// Number of queues.
        has: usize,
    },
    /// The segments of the card memory for a file could not be indexed.
    #[error("{}: its device memory cannot be indexed", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: SgError<CardAddr>,
    },
    /// The device's address space: no range for a file, a tensor that cannot be bound, or a range that cannot be
    /// unbound.
    #[error("{}: cannot bind {}", path.display(), tensor.as_ref().map_or("it".into(), |t| format!("tensor {t:?}")))]
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
    /// A file that is the memory of the device.
    #[error("{} is the memory of the device, and would be overwritten while it is read", path.display())]
    OwnMemory {
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
    /// Anything else that stopped the engine.
    #[error(transparent)]
    Fill(#[from] FillError),
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
    /// The manifest lacks a tensor of a file.
    #[error("{}: tensor {tensor:?} is not in the manifest", path.display())]
    Unlisted {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A part of a tensor was asked for, and only whole tensors can be compared with the manifest.
    #[error("a part of a tensor cannot be compared with the manifest: get_tensor reads all of it")]
    Unchecked,
    /// No tensor has this name.
    #[error("no tensor is called {0:?}")]
    NoTensor(String),
    /// The slice or part does not exist, or begins or ends within a byte.
    #[error("{0}")]
    BadSlice(String),
    /// The model was closed.
    #[error("it is closed")]
    Closed,
}

fn lengths(before: u64, now: u64) -> String {
    if before == now { String::new() } else { format!(": it had {before} bytes and now has {now}") }
}

fn beyond(tensor: &Option<String>, wanted: u64, used: u64, limit: u64) -> String {
    let to_read = tensor.as_ref().map_or_else(String::new, |t| format!(" to read tensor {t:?}"));
    let enough = wanted.saturating_add(used);
    match wanted > limit {
        true => format!(
            "{wanted} bytes{to_read} are more than the memory limit of {limit}: raise it to {enough}, or read less at \
             a time, tensors one by one (a stream; in Python safe_open(...).tensors()), or a large one in slices"
        ),
        false => format!(
            "{wanted} bytes{to_read} are wanted, but {used} of the memory limit of {limit} are in use: release \
             tensors, or raise it to {enough}"
        ),
    }
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
