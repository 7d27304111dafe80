//! Scatter-gather: a buffer described as physically contiguous segments.
//!
//! [`SgTable`] is a list that grows; a lookup is a binary search. [`SgIndex`] is built once from all segments and finds
//! any page in two loads. Use the table while a buffer is built, and the index to look up pages in random order.

mod buckets;
mod index;
mod plain;
mod rank;
mod table;
#[cfg(test)]
mod tests;

pub use index::{SgError, SgIndex, SgKind, SgPages, SgRuns};
pub use table::SgTable;

/// One physically contiguous run of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment<A> {
    /// Address of the first byte.
    pub addr: A,
    /// Bytes, at least one.
    pub len: u64,
}

/// Result of [`SgTable::segment_at`] and [`SgIndex::segment_at`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentAt<A> {
    /// Address of the byte at the offset.
    pub addr: A,
    /// Bytes from there to the end of the segment, at least one.
    pub left: u64,
}
