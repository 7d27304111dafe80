//! Reasons why a model cannot be opened or read.

use std::path::PathBuf;

use thiserror::Error;

use crate::error::Error;
use crate::read::ReadError;

/// Reason why a model cannot be opened, read or loaded. Nothing is left allocated or in flight.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file is not what it should be, or a load or a comparison failed.
    #[error(transparent)]
    Load(#[from] Error),
    /// Reading into memory failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file cannot be opened for a load.
    #[error(transparent)]
    Open(#[from] dmalane_file::Error),
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] dmalane_dma::Error),
    /// Two files have a tensor of one name.
    #[error("{}: {} has tensor {tensor:?} too", path.display(), first.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// The file before it that has the tensor.
        first: PathBuf,
        /// The name.
        tensor: String,
    },
    /// Another file is in the place of the one whose header was parsed.
    #[error("{}: it was changed or replaced since it was opened", path.display())]
    Replaced {
        /// The file.
        path: PathBuf,
        /// Its bytes when it was opened.
        before: u64,
        /// Its bytes now.
        now: u64,
    },
    /// No tensor has this name.
    #[error("no tensor is called {0:?}")]
    NoTensor(String),
    /// The memory limit does not allow an allocation.
    #[error("{}", beyond(*wanted, *used, *limit))]
    Limit {
        /// Bytes of the allocation.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// The limit.
        limit: u64,
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
    /// The slice or part does not exist, or begins or ends within a byte.
    #[error("{0}")]
    BadSlice(String),
    /// The watch stopped the work.
    #[error("cancelled")]
    Cancelled,
    /// The model was closed.
    #[error("it is closed")]
    Closed,
}

fn beyond(wanted: u64, used: u64, limit: u64) -> String {
    match wanted > limit {
        true => format!(
            "{wanted} bytes are more than the memory limit of {limit}: read tensors one by one (a stream; in Python \
             safe_open(...).tensors()), or a large one in slices"
        ),
        false => format!(
            "{wanted} bytes are wanted, but {used} of the memory limit of {limit} are in use: release tensors, or \
             raise it"
        ),
    }
}
