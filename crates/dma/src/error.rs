//! Errors of heaps, registrars and register access.

use dmalane_addr::{Access, Iova, RangeError};
use thiserror::Error;

/// An error of a heap, a registrar or a register access.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel could not allocate memory.
    #[error("cannot allocate {len} bytes of {kind}")]
    Allocate {
        /// Bytes requested.
        len: usize,
        /// Kind of memory ("anonymous memory").
        kind: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A file that cannot be imported as a buffer.
    #[error("cannot import memory")]
    Import(#[source] std::io::Error),
    /// A length of zero, or one that does not fit the address space once rounded up to whole pages.
    #[error("cannot allocate a buffer of {0} bytes")]
    BadLength(usize),
    /// Memory that exists, and that devices cannot get page by page.
    #[error("memory at {at:#x} of {len} bytes is not whole pages of {page} bytes")]
    NotPages {
        /// Address in this process.
        at: usize,
        /// Bytes.
        len: usize,
        /// Bytes of a page of the kernel.
        page: usize,
    },
    /// No heap of this machine meets the requirements; each with the reason.
    #[error("no heap meets the requirements: {}", list(.0))]
    NoHeap(Vec<(&'static str, String)>),
    /// The physical memory of a software host is full.
    #[error("the host has no {wanted} free frames of 4 KiB ({limit} at most)")]
    OutOfFrames {
        /// Frames requested.
        wanted: u64,
        /// Frames of the host in total.
        limit: u64,
    },
    /// No range of IOVAs is free.
    #[error(transparent)]
    Iova(#[from] RangeError<Iova>),
    /// A range of a buffer that is not whole pages of it, as the registrar pins them.
    #[error("bytes {}..{} of a buffer of {len} are not whole pages of it; the device has pages of {page} bytes",
        range.start, range.end)]
    BadRange {
        /// The invalid range.
        range: std::ops::Range<usize>,
        /// Bytes of the buffer.
        len: usize,
        /// Bytes of a page.
        page: usize,
    },
    /// The memory has no descriptor to export: it is anonymous.
    #[error("the memory has no file descriptor (that of a memfd has one)")]
    NoDescriptor,
    /// The memory cannot be exported while its bytes are lent as a slice.
    #[error("the memory cannot be exported while its bytes are borrowed")]
    Borrowed,
    /// The registrar maps one buffer at a time, or the list of buffers is empty.
    #[error("this device maps whole buffers, one at a time")]
    WholeBuffers,
    /// An error of the crate that implements the registrar; `downcast` gives its type.
    // Not transparent, which would leave the error itself out of the causes.
    #[error("the device's driver failed")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The buffer was pinned by another host.
    #[error("the buffer was pinned by another host")]
    ForeignPin,
    /// A mapping must permit reading or writing.
    #[error("a mapping with access {0} permits nothing")]
    NoAccess(Access),
    /// A register that does not exist, or an access of the wrong size or alignment.
    #[error("no {bytes}-byte register at offset {offset:#x} of BAR {bar}")]
    NoRegister {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, in bytes.
        offset: u64,
        /// Bytes accessed.
        bytes: u64,
    },
}

fn list(heaps: &[(&'static str, String)]) -> String {
    heaps.iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>().join("; ")
}

/// The text of an error and those of its causes, with colons between them. In dmalane, no error repeats its source.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |&e| e.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
