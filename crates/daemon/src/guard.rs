//! Memory of clients that this process only uses where it is there.
//!
//! A client may give pages of its memory back to the kernel, and would have the kernel charge new ones to who touches
//! them next. Registered with userfaultfd(2), missing pages are never made: an access is a SIGBUS, and a system call
//! fails with EFAULT. `unsafe` is for its two ioctls (linux/userfaultfd.h).
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use dmalane_dma::SharedBuf;
use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

const API: u64 = 0xaa;
/// Missing pages are a SIGBUS for who accesses them, also those of memfds.
const FEATURES: u64 = FEATURE_SIGBUS | FEATURE_MISSING_SHMEM;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const MODE_MISSING: u64 = 1;
/// Only for accesses of this process, not of the kernel for it: that needs no privilege (since Linux 5.11).
const USER_MODE_ONLY: u32 = 1;

/// Whether the kernel lets this process watch memory with userfaultfd(2), so that a daemon here makes no pages for its
/// clients.
pub fn can_watch_memory() -> bool {
    Guard::new().is_ok()
}

/// Watches memory of this process.
pub(crate) struct Guard(OwnedFd);

impl Guard {
    /// A guard of this process's memory.
    ///
    /// # Errors
    /// The kernel's: EPERM or ENOSYS where a seccomp profile forbids it, EINVAL before Linux 5.11.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: used for `watch` alone, which changes no memory.
        let fd = unsafe { userfaultfd(flags) }?;
        // struct uffdio_api is three words.
        let mut words = [API, FEATURES, 0];
        // SAFETY: UFFDIO_API reads and writes these words.
        unsafe { ioctl(&fd, Updater::<{ opcode::read_write::<[u64; 3]>(0xaa, 0x3f) }, _>::new(&mut words)) }?;
        Ok(Self(fd))
    }

    /// Has accesses to pages of a buffer that are missing fail, until it is unmapped.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn watch(&self, buf: &SharedBuf) -> Result<(), Errno> {
        let bytes = buf.as_volatile_slice();
        // struct uffdio_register is four words.
        let mut words = [bytes.as_ptr().addr() as u64, bytes.len() as u64, MODE_MISSING, 0];
        // SAFETY: UFFDIO_REGISTER reads and writes these words; the memory is the buffer's, and keeps its contents.
        unsafe { ioctl(&self.0, Updater::<{ opcode::read_write::<[u64; 4]>(0xaa, 0) }, _>::new(&mut words)) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create,
    };

    use super::*;

    /// As a system call sees it: an access would end the process.
    #[test]
    fn missing_pages_are_not_made() {
        let Ok(guard) = Guard::new() else {
            println!("SKIPPED: userfaultfd is not allowed here");
            return;
        };
        let fd = memfd_create("guarded", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 64 << 10).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        let client = SharedBuf::import(fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        client.as_volatile_slice().sub(0, 16 << 10).unwrap().fill(7);
        let daemon = SharedBuf::import(fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        guard.watch(&daemon).unwrap();
        let pages = || fstat(&fd).unwrap().st_blocks / 8;
        daemon.populate(0, 16 << 10).unwrap();
        assert_eq!(daemon.as_volatile_slice().load_u32(4096), Some(0x0707_0707));
        assert_eq!(daemon.populate(12 << 10, 8 << 10).unwrap_err().raw_os_error(), Some(14), "EFAULT");
        assert!(daemon.populate(60 << 10, 4096).is_err(), "the last page");
        assert_eq!(pages(), 4);
        fallocate(&fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096).unwrap();
        assert!(daemon.populate(0, 16 << 10).is_err() && pages() == 3);
        // What the client touches again is there again.
        client.as_volatile_slice().store_u32(4096, 9).unwrap();
        daemon.populate(0, 16 << 10).unwrap();
        assert_eq!((daemon.as_volatile_slice().load_u32(4096), pages()), (Some(9), 4));
    }
}
