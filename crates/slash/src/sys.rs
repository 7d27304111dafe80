//! The driver's calls and the mappings of its buffers. The only file here with `unsafe`.
//!
//! Invariant of [`Mapped`]: `address..address + len` is one shared mapping of a whole buffer of the driver, readable
//! and writable, that this value owns and nobody else unmaps. Established by [`Mapped::new`].
#![allow(unsafe_code)]

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use dmalane_dma::DriverMemory;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::buffers::Place;
use crate::kernel::{Handle, Kernel, Request};

/// The running kernel.
#[derive(Debug)]
pub(crate) struct Linux;

/// Makes a call.
fn ioctl(on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<libc::c_int> {
    let bytes = size_of_val(argument);
    let len = u32::try_from(bytes).ok().filter(|_| bytes >= request.bytes() && !argument.is_empty());
    argument[0] = len.ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: the driver reads and writes as many bytes of the argument as its first word says, or, for TRANSFER, at
    // most `request.bytes()`; both were checked. The argument has no pointers. A file of another driver refuses the
    // number, which also says how many bytes belong to it. A transfer changes memory of buffers only, which is never
    // referenced but through volatile accesses.
    let result = unsafe { libc::ioctl(on.as_fd().as_raw_fd(), request.number() as _, argument.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Kernel for Linux {
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64> {
        debug_assert!(!matches!(request, Request::PairFile | Request::BufferCreate));
        ioctl(on, request, argument).map(|n| n.unsigned_abs().into())
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        if !matches!(request, Request::PairFile | Request::BufferCreate) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = ioctl(on, request, argument)?;
        // SAFETY: these calls return a file that the driver has just opened for us, and nobody else knows it.
        Ok(Handle::new(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

/// A buffer of the driver, mapped into this process. Dropping it unmaps and closes it, in that order.
pub(crate) struct Mapped {
    address: NonNull<u8>,
    len: NonZeroUsize,
    /// Where the buffer is listed, with its file.
    place: Place,
}

// SAFETY: the mapping is plain memory owned by this value (see the invariant), not tied to a thread.
unsafe impl Send for Mapped {}
// SAFETY: `&Mapped` gives the address only.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps a whole buffer. `list` is told the address, and its result is kept as long as the mapping.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(
        buffer: Handle,
        len: NonZeroUsize,
        list: impl FnOnce(usize, Handle) -> Place,
    ) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base = unsafe { mm::mmap(ptr::null_mut(), len.get(), access, MapFlags::SHARED, &buffer, 0) }?;
        let address = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, len, place: list(address.addr().get(), buffer) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Before the kernel can give the address to another mapping.
        self.place.unlist();
        // SAFETY: the range is this value's own mapping, and its owner, the buffer made of it, is gone.
        let _ = unsafe { mm::munmap(self.address.as_ptr().cast(), self.len.get()) };
    }
}

// SAFETY: the mapping exists until the value is dropped, and is readable and writable (invariant); the driver gives
// zeroed pages; the kernel maps whole pages at a page, and `len` was accepted by the driver, which takes whole pages
// only. Nobody has the address but the buffer, and devices through registrations of that.
unsafe impl DriverMemory for Mapped {
    fn span(&self) -> (NonNull<u8>, NonZeroUsize) {
        (self.address, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_arguments_are_refused_before_and_by_the_kernel() {
        let file = Handle::new(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let short = Linux.call(&file, Request::Transfer, &mut [0; 3]).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::InvalidInput);
        let empty = Linux.call(&file, Request::Info, &mut []).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::InvalidInput);
        let wrong = Linux.open(&file, Request::Transfer, &mut [0; 22]).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::InvalidInput);
        let foreign = Linux.call(&file, Request::Info, &mut [0; 32]).unwrap_err();
        assert_eq!(foreign.raw_os_error(), Some(libc::ENOTTY));
        let foreign = Linux.open(&file, Request::BufferCreate, &mut [0; 6]).unwrap_err();
        assert_eq!(foreign.raw_os_error(), Some(libc::ENOTTY));
    }
}
