//! Scatter-gather: a buffer described as physically contiguous segments.
//!
//! [`SgTable`] is a list that grows. [`SgIndex`] is built once from all segments and finds any page in two loads. Use
//! the table while a buffer is built, and the index to look up pages.

#[cfg(feature = "alloc")]
mod buckets;
#[cfg(feature = "alloc")]
mod index;
#[cfg(feature = "alloc")]
mod plain;
#[cfg(feature = "alloc")]
mod rank;
mod segment;
#[cfg(feature = "alloc")]
mod table;
#[cfg(test)]
mod tests;

#[cfg(feature = "alloc")]
pub use index::{SgIndex, SgPages, SgRuns};
pub use segment::{Segment, SegmentAt, SgError};
#[cfg(feature = "alloc")]
pub use table::SgTable;
