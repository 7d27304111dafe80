//! The driver's calls and the mappings of its buffers. The only file here with `unsafe`.
//!
//! Invariant of [`Mapped`]: `address..address + len` is one shared mapping of a whole buffer of the driver, readable
//! and writable, that this value owns and nobody else unmaps. Established by [`Mapped::new`].
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dmalane_dma::DriverMemory;
use io_uring::{IoUring, opcode};
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::kernel::{Calls, Handle, Kernel, Request, Transfer};

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
        debug_assert!(!request.opens());
        ioctl(on, request, argument).map(|n| n.unsigned_abs().into())
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        if !request.opens() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = ioctl(on, request, argument)?;
        // SAFETY: these calls return a file that the driver has just opened for us, and nobody else knows it.
        Ok(Handle::new(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn calls(&self, file: &Arc<Handle>) -> Option<Box<dyn Calls>> {
        Commands::new(file.clone()).ok().map(|commands| Box::new(commands) as _)
    }
}

/// Transfers in flight of a queue pair whose driver takes io_uring commands.
pub(crate) const DEPTH: usize = 4;
/// The number of the driver's command for a transfer (SLASH_QDMA_URING_CMD_TRANSFER).
const COMMAND: u32 = 0x56;

/// Transfers as io_uring commands (`IORING_OP_URING_CMD`).
///
/// Invariant: each argument that the ring's entries or commands name lives in `arguments` until the end of the command
/// was seen, and for ever if it never was (`drop`).
struct Commands {
    ring: IoUring,
    file: Arc<Handle>,
    arguments: BTreeMap<u64, Box<Transfer>>,
}

impl Commands {
    /// Asks the driver with a transfer without parts, which it refuses as invalid; others do not know the command.
    ///
    /// # Errors
    /// When the kernel has no io_uring for this process, or the driver no commands.
    fn new(file: Arc<Handle>) -> io::Result<Self> {
        let ring = IoUring::builder().setup_clamp().build(DEPTH as u32 * 2)?;
        let mut known = io_uring::Probe::new();
        ring.submitter().register_probe(&mut known)?;
        if !known.is_supported(opcode::UringCmd16::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut this = Self { ring, file, arguments: BTreeMap::new() };
        let mut empty = [0; crate::abi::TRANSFER_WORDS];
        empty[0] = size_of_val(&empty) as u32;
        this.begin(0, empty);
        match this.end(Some(Duration::from_secs(10)))? {
            Some((0, Err(e))) if e.raw_os_error() == Some(libc::EINVAL) => Ok(this),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Calls for Commands {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn begin(&mut self, number: u64, argument: Transfer) {
        let argument = Box::new(argument);
        let mut payload = [0; 16];
        payload[..8].copy_from_slice(&(argument.as_ptr().expose_provenance() as u64).to_ne_bytes());
        let file = io_uring::types::Fd(self.file.as_fd().as_raw_fd());
        let entry = opcode::UringCmd16::new(file, COMMAND).cmd(payload).build().user_data(number);
        self.arguments.insert(number, argument);
        // SAFETY: the entry's argument lives as long as the ring may use it (invariant), and the file as long as this
        // value. The driver reads `size_of::<Transfer>()` bytes of it; a file of another driver refuses the command, or
        // takes it for one of its own, as with ioctls. Transfers change memory of buffers only.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(pushed.is_ok(), "the ring has room for twice the depth");
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit() {
            Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Err(e),
            _ => Ok(()),
        }
    }

    fn end(&mut self, timeout: Option<Duration>) -> io::Result<Option<(u64, io::Result<u64>)>> {
        loop {
            if let Some(end) = self.ring.completion().next() {
                self.arguments.remove(&end.user_data());
                let result = match u64::try_from(end.result()) {
                    Ok(moved) => Ok(moved),
                    Err(_) => Err(io::Error::from_raw_os_error(end.result().wrapping_neg())),
                };
                return Ok(Some((end.user_data(), result)));
            }
            let waited = match timeout {
                Some(Duration::ZERO) => return Ok(None), // no system call only to look
                None => self.ring.submit_and_wait(1),
                Some(time) => {
                    let time = io_uring::types::Timespec::from(time);
                    let args = io_uring::types::SubmitArgs::new().timespec(&time);
                    self.ring.submitter().submit_with_args(1, &args)
                }
            };
            match waited {
                Err(e) if e.raw_os_error() == Some(libc::ETIME) => return Ok(None),
                Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => return Err(e),
                _ => {}
            }
        }
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        // The kernel may still read the arguments of commands that have not ended.
        std::mem::take(&mut self.arguments).into_values().for_each(|argument| _ = Box::leak(argument));
    }
}

/// A buffer of the driver, mapped into this process. Dropping it unmaps and closes it, in that order.
pub(crate) struct Mapped {
    address: NonNull<u8>,
    len: NonZeroUsize,
    file: Handle,
    /// The file that the buffer was made by.
    maker: Weak<Handle>,
}

// SAFETY: the mapping is plain memory owned by this value (see the invariant), not tied to a thread.
unsafe impl Send for Mapped {}
// SAFETY: `&Mapped` gives the address only.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps a whole buffer, which was made by a file.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(file: Handle, len: NonZeroUsize, maker: Weak<Handle>) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base = unsafe { mm::mmap(ptr::null_mut(), len.get(), access, MapFlags::SHARED, &file, 0) }?;
        let address = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, len, file, maker })
    }

    /// True for a buffer that was made by this file.
    pub(crate) fn is_of(&self, maker: &Arc<Handle>) -> bool {
        ptr::eq(self.maker.as_ptr(), Arc::as_ptr(maker))
    }

    /// The buffer's file, and the offset there of an address of this process that lies in it.
    pub(crate) fn find(&self, address: usize) -> (RawFd, u64) {
        (self.file.as_fd().as_raw_fd(), (address - self.address.addr().get()) as u64)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
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
