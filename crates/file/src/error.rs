//! Errors of opening a file, and the reasons why a faster way is not taken.

use std::io;
use std::path::PathBuf;

use dmalane_addr::FileOffset;
use thiserror::Error;

use crate::Residency;

/// Why a file cannot be read as a queue. Later errors are each an [`OpError`](dmalane_queue::OpError).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be opened: it is not there, or may not be read.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    #[error("cannot read {}: it is a {kind}, not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// The kind of file ("directory").
        kind: &'static str,
    },
    /// [`Mode::Direct`](crate::Mode::Direct) was asked for, and there is no direct I/O on this file.
    #[error("no direct I/O on {}", path.display())]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Fallback,
    },
    /// The file was opened with `O_DIRECT` by somebody else, and this user may not open it again.
    #[error("{} was opened with O_DIRECT and cannot be opened again; pass a descriptor without it", path.display())]
    OnlyDirect {
        /// The file.
        path: PathBuf,
    },
    /// [`Io::Uring`](crate::Io::Uring) was asked for, and the kernel refuses a ring.
    #[error("no io_uring for {}", path.display())]
    NoUring {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Fallback,
    },
}

/// Why a file is not read or written in a faster way: past the page cache, through io_uring.
///
/// Numbers of errors are the kernel's.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Fallback {
    /// Most of what is wanted is in the page cache.
    #[error("{0}: copied from there")]
    Cached(Residency),
    /// Some of what is wanted is in the page cache.
    #[error("{0}: copied from there, the rest read past it")]
    PartlyCached(Residency),
    /// Bytes that the kernel copied from the page cache to a memfd.
    #[error("{0} bytes copied to the memfd")]
    ToMemfd(u64),
    /// Fewer bytes are wanted than the kernel fetches at once anyway.
    #[error("{0} bytes are too few for direct I/O to pay")]
    Few(u64),
    /// A file system without a disk; its name.
    #[error("{0} keeps its files in memory: there is no disk to read directly")]
    InMemory(&'static str),
    /// The file system says that it does no direct I/O on the file.
    #[error("the file system does no direct I/O on this file (statx)")]
    NoDirect,
    /// The file system asks for an alignment that is not supported here.
    #[error(
        "its direct I/O needs offsets in multiples of {offset} bytes and memory aligned to {memory}, which is not \
         supported"
    )]
    Alignment {
        /// Of memory, in bytes.
        memory: u32,
        /// Of file offsets and lengths, in bytes.
        offset: u32,
    },
    /// The kernel refused to open the file with `O_DIRECT`.
    #[error("O_DIRECT refused at open: {}", os(*.0))]
    DirectOpen(i32),
    /// The kernel refused a direct read.
    #[error("O_DIRECT refused at {at}: {}", os(*errno))]
    DirectRead {
        /// Where it began.
        at: FileOffset,
        /// The kernel's answer.
        errno: i32,
    },
    /// Linux (6.18 at least) completes an asynchronous direct read on FUSE as if it were whole when the server answered
    /// with fewer bytes, as it does where the file was truncated meanwhile: what is missing would be silent zeroes. A
    /// synchronous read says how far it came.
    #[error("on FUSE, Linux can report a short asynchronous direct read as whole")]
    Fuse,
    /// Reads of such a descriptor by io_uring fail where they would wait.
    #[error("the descriptor is non-blocking, and the file cannot be opened again")]
    NonBlocking,
    /// The kernel refused a ring.
    #[error("io_uring refused: {}{cause}", os(*errno))]
    Ring {
        /// The kernel's answer.
        errno: i32,
        /// The likely cause, for people.
        cause: &'static str,
    },
    /// The kernel's rings are too old.
    #[error("io_uring of a kernel before 5.11 cannot wait with a timeout")]
    OldRing,
    /// The kernel refused to enter a ring that it had made.
    #[error("io_uring failed: {}", os(*.0))]
    RingFailed(i32),
}

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// The number of an error of the kernel.
pub(crate) fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
