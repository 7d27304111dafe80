//! Segments, and why a list of them was refused.

use core::fmt;

use crate::Address;

/// One physically contiguous run of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment<A> {
    /// Address of the first byte.
    pub addr: A,
    /// Bytes, at least one.
    pub len: u64,
}

/// Result of [`SgIndex::segment_at`](crate::SgIndex::segment_at).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentAt<A> {
    /// Address of the byte at the offset.
    pub addr: A,
    /// Bytes from there to the end of the segment, at least one.
    pub left: u64,
}

/// Why an index could not be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SgError<A: Address> {
    /// A segment reaches beyond the end of its address space.
    Wraps {
        /// Address of the segment.
        addr: A,
        /// Bytes of the segment.
        len: u64,
    },
    /// The buffer would be longer than 2^64 - 1 bytes.
    TooLong,
    /// The host is out of memory.
    NoMemory {
        /// Segments there are, or there were until then.
        segments: usize,
    },
}

impl<A: Address> fmt::Display for SgError<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wraps { addr, len } => {
                write!(f, "a segment of {len} bytes at {addr} reaches beyond the end of the address space")
            }
            Self::TooLong => f.write_str("the segments are longer than 2^64 - 1 bytes together"),
            Self::NoMemory { segments } => write!(f, "no memory for a scatter-gather list of {segments} segments"),
        }
    }
}

impl<A: Address> core::error::Error for SgError<A> {}
