//! Mapped buffers by their address in this process.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use dmalane_dma::lock;

use crate::kernel::Handle;

/// Buffers by their address in this process: bytes, and the number of the file.
#[derive(Default)]
pub(crate) struct Live(pub(crate) Mutex<BTreeMap<usize, (usize, RawFd)>>);

/// The entry of a mapped buffer in the list, and its file.
pub(crate) struct Place {
    live: Arc<Live>,
    address: usize,
    _file: Handle,
}

impl Place {
    /// Lists a buffer of `len` bytes that was mapped at `address`.
    pub(crate) fn list(live: &Arc<Live>, address: usize, len: usize, file: Handle) -> Self {
        lock(&live.0).insert(address, (len, file.as_fd().as_raw_fd()));
        Self { live: live.clone(), address, _file: file }
    }

    /// The address is no longer the buffer's.
    pub(crate) fn unlist(&self) {
        lock(&self.live.0).remove(&self.address);
    }
}
