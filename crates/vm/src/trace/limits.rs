//! The version of a trace, and how much one may ask for.

/// The version that is written, and the only one that is read.
pub const VERSION: u64 = 1;
/// Bytes of a line, at most. A longer one is skipped without being stored.
pub const MAX_LINE: usize = 16 << 20;
/// Operations of a batch, at most.
pub const MAX_BATCH: usize = 1 << 18;
/// Buffer objects at once, at most; those that were destroyed count as long as they are bound.
pub const MAX_BOS: usize = 1 << 16;
/// Segments of all of them, at most.
pub const MAX_SEGMENTS: usize = 1 << 22;
/// Bytes of all of them that are scattered, at most. Their indices take up to a quarter of a byte for each 4 KiB.
pub const MAX_SCATTERED: u64 = 1 << 42;
