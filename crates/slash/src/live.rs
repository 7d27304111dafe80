//! Mapped buffers by their address in this process.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::kernel::Handle;

/// Buffers by their address in this process: bytes, and the number of the file.
#[derive(Default)]
pub(crate) struct Live(Mutex<BTreeMap<usize, (usize, RawFd)>>);

impl Live {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, (usize, RawFd)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The entry of a mapped buffer in the list, and its file.
pub(crate) struct Place {
    live: Arc<Live>,
    address: usize,
    _file: Handle,
}

impl Place {
    /// Lists a buffer of `len` bytes that was mapped at `address`.
    pub(crate) fn list(live: &Arc<Live>, address: usize, len: usize, file: Handle) -> Self {
        live.lock().insert(address, (len, file.as_fd().as_raw_fd()));
        Self { live: live.clone(), address, _file: file }
    }

    /// The address is no longer the buffer's.
    pub(crate) fn unlist(&self) {
        self.live.lock().remove(&self.address);
    }
}
