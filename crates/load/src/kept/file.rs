//! A file of a kept model.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use dmalane_dma::SharedBuf;
use dmalane_file::FileHandle;

use super::error::KeepError;
use crate::model::Block;

/// A file in memory that nobody can change: its bytes, from the first byte of the memory on.
pub struct KeptFile {
    /// Its bytes.
    pub len: u64,
    /// The memory.
    pub block: Arc<Block>,
    pub(crate) handle: FileHandle,
}

impl KeptFile {
    /// Maps a memfd that holds a file of `len` bytes; `path` is its name in messages.
    ///
    /// # Errors
    /// [`KeepError::Bad`] for a memfd that somebody may change, or that is shorter.
    pub fn new(path: impl Into<PathBuf>, fd: OwnedFd, len: u64) -> Result<Self, KeepError> {
        let path = path.into();
        let bad = |why: String| KeepError::Bad { what: path.display().to_string(), why };
        let buf = SharedBuf::import_sealed(fd.as_fd()).map_err(|e| bad(e.to_string()))?;
        if len > buf.len() as u64 {
            return Err(bad(format!("it has {} bytes, and not {len}", buf.len())));
        }
        let handle = FileHandle::new(File::from(fd), path);
        Ok(Self { len, block: Block::kept(buf), handle })
    }
}

impl std::fmt::Debug for KeptFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptFile").field("path", &self.handle.path()).field("len", &self.len).finish()
    }
}
