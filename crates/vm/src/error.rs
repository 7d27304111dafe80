//! Why a VM refused.

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, Span};

/// Why a VM refused. It is as it was before the call.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A bind of no bytes.
    #[error("a bind of no bytes at {va}")]
    Empty {
        /// Where.
        va: DeviceVa,
    },
    /// A bind that would wrap around the address space.
    #[error("{len} bytes at {va} reach beyond the address space")]
    Wraps {
        /// Where it was to start.
        va: DeviceVa,
        /// Bytes.
        len: u64,
    },
    /// A span that is not made of whole pages.
    #[error("{span} is not made of whole {granule} pages")]
    Misaligned {
        /// The span, of a request or of the VM itself.
        span: Span<DeviceVa>,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// An offset into a buffer object that is not on a page boundary.
    #[error("offset {offset:#x} of buffer {bo}, to be bound at {va}, is not a multiple of {granule}")]
    MisalignedOffset {
        /// Where it was to be bound.
        va: DeviceVa,
        /// Id of the buffer object.
        bo: u64,
        /// The offset.
        offset: u64,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// A span that reaches out of the VM.
    #[error("{span} is not within the VM's {vm}")]
    OutsideVm {
        /// The span asked for.
        span: Span<DeviceVa>,
        /// Address range of the VM.
        vm: Span<DeviceVa>,
    },
    /// A span within the part of the VM that is reserved for the driver itself, or, where the driver asked, one
    /// outside.
    #[error("{span} is not on its side of the reserved {reserved}")]
    Reserved {
        /// The span asked for.
        span: Span<DeviceVa>,
        /// The reserved part.
        reserved: Span<DeviceVa>,
    },
    /// A request of the driver in a VM that keeps nothing for it.
    #[error("the VM of {vm} has no reserved part")]
    NoReserved {
        /// Address range of the VM.
        vm: Span<DeviceVa>,
    },
    /// A null range in a VM that has no null page.
    #[error("no null page for the null range at {va}: set one first")]
    NoNullPage {
        /// Where.
        va: DeviceVa,
    },
    /// Memory that cannot be a null page: its length is not a power of two of whole pages, it is not aligned to its
    /// length, or it lies beyond the format's output addresses.
    #[error("{len} bytes at {addr} cannot be the null page of a VM with {granule} pages")]
    NullPage {
        /// Where it is.
        addr: CardAddr,
        /// Bytes.
        len: u64,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// A repetition whose size is not a power of two of whole pages, or that does not begin and end at a multiple of
    /// it.
    #[error(
        "{page} bytes cannot repeat over {span}: it takes a power of two of {granule} pages that divides both ends"
    )]
    RepeatPage {
        /// Bytes to repeat.
        page: u64,
        /// Over which addresses.
        span: Span<DeviceVa>,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// A buffer object of more than 2^32 - 2 pages.
    #[error("buffer {bo} of {len} bytes is too large to be bound in {granule} pages")]
    BoTooLarge {
        /// Id of the buffer object.
        bo: u64,
        /// Bytes that it has.
        len: u64,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// A part of a buffer object that does not exist.
    #[error("{len} bytes from offset {offset:#x} of buffer {bo}, to be bound at {va}, reach beyond its {bo_len} bytes")]
    BeyondBo {
        /// Where it was to be bound.
        va: DeviceVa,
        /// Id of the buffer object.
        bo: u64,
        /// The offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes that the buffer has.
        bo_len: u64,
    },
    /// A segment of the buffer object that cannot be mapped: not whole pages, or beyond the format's output addresses.
    #[error("buffer {bo} cannot be bound at {va}")]
    Segment {
        /// Where it was to be bound.
        va: DeviceVa,
        /// Id of the buffer object.
        bo: u64,
        /// The error, and its segment.
        source: dmalane_iopt::Error,
    },
    /// The format has no entry with exactly these rights.
    #[error("{format} cannot express access {access}, asked for at {va}")]
    Unsupported {
        /// Where it was to be bound.
        va: DeviceVa,
        /// The rights asked for.
        access: Access,
        /// Name of the format.
        format: &'static str,
    },
    /// The memory for the tables that the batch may need in the worst case cannot be had.
    #[error("no memory for {tables} page table{} that the batch may need in {vm}", if *tables == 1 { "" } else { "s" })]
    NoTables {
        /// Tables asked for.
        tables: usize,
        /// The VM.
        vm: Span<DeviceVa>,
    },
    /// The memory for noting what is bound cannot be had, or the VM has bindings of 2^24 - 1 buffers.
    #[error("no memory to note the bindings of the batch in {vm}")]
    NoMemory {
        /// The VM.
        vm: Span<DeviceVa>,
    },
    /// The VM cannot be made: its range does not fit the format, or there is no memory for the root table.
    #[error("a VM of {vm} cannot be made")]
    New {
        /// The range asked for.
        vm: Span<DeviceVa>,
        /// Why not.
        source: dmalane_iopt::Error,
    },
}
