//! Scatter-gather: a buffer described as physically contiguous segments.
//!
//! [`SgTable`] is the list: it grows, and a look-up is a binary search. [`SgIndex`] is made once, of all segments, and
//! finds any page in two loads. Who fills a buffer uses the first, who binds pages of it at random the second.

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
    /// Where the run starts.
    pub addr: A,
    /// Bytes, at least one.
    pub len: u64,
}

/// What [`SgTable::segment_at`] and [`SgIndex::segment_at`] find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentAt<A> {
    /// The address of the byte asked for.
    pub addr: A,
    /// Bytes from there to the end of the segment, at least one.
    pub left: u64,
}
