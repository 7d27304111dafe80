//! Scatter-gather: a buffer described as physically contiguous segments.
//!
//! [`SgTable`] is a list that grows; a lookup is a binary search. [`SgIndex`] is built once from all segments and finds
//! any page in two loads. Use the table while a buffer is built, and the index to look up pages in random order.

mod buckets;
mod index;
mod plain;
mod rank;
mod segment;
mod table;
#[cfg(test)]
mod tests;

pub use index::{SgIndex, SgKind, SgPages, SgRuns};
pub use segment::{Segment, SegmentAt, SgError};
pub use table::SgTable;
