//! Descriptors that are lent, and how to tell whether they still are.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FlockOperation, Mode, OFlags, SealFlags, flock};
use rustix::io::Errno;

/// Of linux/magic.h: what memfds of ordinary pages lie on.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Opens a memfd anew, for reading.
fn again(fd: impl AsFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A descriptor of its own for who attaches. The lock that it holds is the kernel's until its last copy is closed and
/// its last mapping gone, in whatever process.
pub(crate) fn lend(fd: impl AsFd) -> io::Result<OwnedFd> {
    let lent = again(fd)?;
    match flock(&lent, FlockOperation::NonBlockingLockShared) {
        // Somebody to whom it was lent has locked it for itself: it stays as long as that one has it.
        Ok(()) | Err(Errno::WOULDBLOCK) => Ok(lent),
        Err(e) => Err(e.into()),
    }
}

/// Whether anybody holds a descriptor or a mapping that was lent. Also when the kernel does not tell.
pub(crate) fn is_lent(fd: impl AsFd) -> bool {
    !again(fd).is_ok_and(|fd| flock(fd, FlockOperation::NonBlockingLockExclusive).is_ok())
}

/// A descriptor for who attaches, of memory of a device: the same one. It can be neither opened anew nor locked, and
/// locks of all its like may be one, so it is not counted by.
pub(crate) fn pass_on(fd: impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}

/// The bytes of memory behind a descriptor, if it is a memfd of ordinary pages that nobody can change. Asks nothing of
/// any other file: whose it is may take for ever to answer.
pub(crate) fn sealed_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    let seals = rustix::fs::fcntl_get_seals(fd).ok()?;
    let is_sealed = seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW);
    let is_plain = || rustix::fs::fstatfs(fd).is_ok_and(|on| on.f_type as u64 == TMPFS_MAGIC);
    let bytes = || u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()?.checked_next_multiple_of(4096);
    (is_sealed && is_plain()).then(bytes)?
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap, SharedBuf};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn what_is_mapped_is_lent() {
        let fd = MemfdHeap::importable(None).allocate(8192).unwrap().share().seal().unwrap();
        assert!(!is_lent(&fd));
        let lent = lend(&fd).unwrap();
        let more = lend(&fd).unwrap();
        assert!(is_lent(&fd));
        let mapped = SharedBuf::import_sealed(lent.as_fd()).unwrap();
        drop((lent, more));
        assert!(is_lent(&fd), "by the mapping alone");
        drop(mapped);
        assert!(!is_lent(&fd));
        assert!(rustix::io::write(lend(&fd).unwrap(), b"x").is_err());
    }

    /// Rather too long than freed under somebody.
    #[test]
    fn what_the_kernel_does_not_tell_is_lent() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(is_lent(&socket), "it cannot be opened anew");
    }

    #[test]
    fn only_sealed_memory_counts() {
        let sealed = MemfdHeap::importable(None).allocate(8192).unwrap().share().seal().unwrap();
        assert_eq!(sealed_bytes(sealed.as_fd()), Some(8192));
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(sealed_bytes(open.as_fd()), None);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(sealed_bytes(pipe.as_fd()), None);
        let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
        let with = |flags, seals| {
            let fd = memfd_create("seals", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags).ok()?;
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            Some(fd)
        };
        let plain = |seals| sealed_bytes(with(MemfdFlags::empty(), seals).unwrap().as_fd());
        assert_eq!(plain(all), Some(0));
        for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
            assert_eq!(plain(all - missing), None, "without {missing:?}");
        }
        if let Some(reserved) = with(MemfdFlags::HUGETLB, all) {
            assert_eq!(sealed_bytes(reserved.as_fd()), None, "reserved huge pages");
        }
    }
}
