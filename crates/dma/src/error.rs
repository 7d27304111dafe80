//! What can go wrong with memory.

use dmalane_addr::{Access, Iova, RangeError};
use thiserror::Error;

/// An error of a heap or a registrar.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused memory.
    #[error("cannot allocate {len} bytes of {kind}: {source}")]
    Allocate {
        /// Bytes asked for.
        len: usize,
        /// What was asked for ("anonymous memory").
        kind: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A file that cannot be memory shared with a device.
    #[error("cannot take memory from another process: {0}")]
    Import(std::io::Error),
    /// A bus of another crate could not do what it was asked.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A length of zero, or one that does not fit the address space once rounded up to whole pages.
    #[error("cannot allocate a buffer of {0} bytes")]
    BadLength(usize),
    /// No heap of this machine gives what is needed; each with what it lacks.
    #[error("no heap gives what is needed: {}", list(.0))]
    NoHeap(Vec<(&'static str, String)>),
    /// The physical memory of a software host is full.
    #[error("the host has no {wanted} free frames of 4 KiB ({limit} at most)")]
    OutOfFrames {
        /// Frames asked for.
        wanted: u64,
        /// Frames that the host may have in all.
        limit: u64,
    },
    /// No range of IOVAs is free.
    #[error(transparent)]
    Iova(#[from] RangeError<Iova>),
    /// A range of a buffer that is not whole 4 KiB pages of it.
    #[error("bytes {}..{} of a buffer of {len} are not whole pages of it", range.start, range.end)]
    BadRange {
        /// The range asked for.
        range: std::ops::Range<usize>,
        /// Bytes of the buffer.
        len: usize,
    },
    /// More would be pinned at one time than is allowed.
    #[error(
        "cannot pin {wanted} bytes: {pinned} are pinned and the limit is {limit} (ulimit -l; raise it in \
         /etc/security/limits.conf or LimitMEMLOCK=, or register smaller pieces)"
    )]
    PinLimit {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes pinned already.
        pinned: u64,
        /// Bytes that may be.
        limit: u64,
    },
    /// The bus cannot map several buffers as one, or not part of one.
    #[error("the bus maps whole buffers, one at a time")]
    WholeBuffers,
    /// An error of the bus, of a kind of its own.
    #[error(transparent)]
    Bus(Box<dyn std::error::Error + Send + Sync>),
    /// The buffer was pinned by another host.
    #[error("the buffer was pinned by another host")]
    ForeignPin,
    /// A mapping must permit something.
    #[error("a mapping with access {0} permits nothing")]
    NoAccess(Access),
    /// A register that does not exist, or an access of the wrong size or alignment.
    #[error("no {bytes}-byte register at offset {offset:#x} of BAR {bar}")]
    NoRegister {
        /// Which base address register.
        bar: u8,
        /// Offset in it, in bytes.
        offset: u64,
        /// Bytes accessed.
        bytes: u64,
    },
}

fn list(heaps: &[(&'static str, String)]) -> String {
    heaps.iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>().join("; ")
}
