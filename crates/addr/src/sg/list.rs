//! The list form of an index: segments of any lengths, and where in the list to begin.
//!
//! The buffer is cut into buckets of one size, at most two for each segment, and each bucket knows the segment of its
//! first byte. So a look-up compares with the few segments that begin in one bucket, and where their lengths are alike
//! that is one of them, whatever the odd ones among them are.

use alloc::vec::Vec;

use crate::{Address, SegmentAt, SgTable};

/// Segments, and the buckets that lead to them.
#[derive(Clone, Debug)]
pub(super) struct List<A> {
    table: SgTable<A>,
    /// For each bucket the segment of its first byte; then the last segment.
    buckets: Vec<u32>,
    /// Logarithm of the bytes of a bucket.
    shift: u32,
}

impl<A: Address> List<A> {
    /// The index of the segments; `None` without memory. (2^32 segments and more are without memory too.)
    pub(super) fn new(table: SgTable<A>) -> Option<Self> {
        let segments = u32::try_from(table.segment_count()).ok()?;
        let last = table.len().saturating_sub(1);
        // The smallest that makes no more than two buckets for each segment.
        let most = u64::from(segments).max(1) * 2;
        let shift = (0..63).find(|shift| last >> shift < most).unwrap_or(63);
        let mut buckets = Vec::new();
        buckets.try_reserve_exact((last >> shift) as usize + 2).ok()?;
        for (n, start) in (0..segments).zip(table.starts()) {
            // Buckets that begin before this segment does begin in the one before it.
            let begin_before = match start {
                0 => 0,
                start => ((start - 1) >> shift) as usize + 1,
            };
            buckets.resize(begin_before, n.saturating_sub(1));
        }
        buckets.resize((last >> shift) as usize + 2, segments.saturating_sub(1));
        Some(Self { table, buckets, shift })
    }

    /// The segment that holds the byte at `offset`; `None` beyond the end.
    #[inline]
    pub(super) fn segment_at(&self, offset: u64) -> Option<SegmentAt<A>> {
        let bucket = (offset >> self.shift) as usize;
        let (&first, &last) = (self.buckets.get(bucket)?, self.buckets.get(bucket + 1)?);
        self.table.segment_within(offset, first as usize, last as usize)
    }

    /// Bytes of memory that it has allocated.
    pub(super) fn heap_bytes(&self) -> usize {
        self.table.heap_bytes() + self.buckets.capacity() * size_of::<u32>()
    }
}
