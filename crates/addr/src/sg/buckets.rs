//! The bucket form of an index: segments of any lengths, most of which are much longer than a granule.
//!
//! The buffer is cut into buckets of one size, about one for each segment. A bucket knows the segment of its first byte
//! and where that ends. A byte behind that end lies in the segment of the next bucket's first byte, unless several
//! segments begin in the bucket: then the bucket leads to a list of them, which is searched. So a look-up costs one
//! load in most buckets where lengths are alike, whatever the odd ones among them are.

use alloc::vec::Vec;
use core::hint::select_unpredictable;

use super::SgTable;
use super::rank::Delta;
use crate::Address;

/// The most buckets for each four segments: fewer than two for each, so that segments of a power of two get one each,
/// also with some odd ones among them.
const BUCKETS_FOR_FOUR: u64 = 7;

/// Segments of a crowded bucket up to which all of them are compared, so that there is nothing to predict.
const FEW: usize = 8;

/// The form itself.
///
/// A record is a segment: its delta and the page behind it, never 0. That of a crowded bucket is the position of its
/// list and 0, and the list is the number of its segments and 0, then the segments from the one of the bucket's first
/// byte on.
#[derive(Clone, Debug)]
pub(super) struct Buckets<D: Delta> {
    /// The buckets, one more for the last segment, and the lists of crowded ones.
    records: Vec<D::Pair>,
    base: u64,
    /// Logarithm of the bytes of a bucket.
    log2: u32,
}

impl<D: Delta> Buckets<D> {
    /// The index of a table's segments, of which there is at least one; `None` without memory.
    pub(super) fn new<A: Address>(table: &SgTable<A>, base: u64, shift: u32) -> Option<Self> {
        let (count, last) = (table.segment_count(), table.len() - 1);
        let log2 = (shift..63).find(|log2| last >> log2 < BUCKETS_FOR_FOUR * count as u64 / 4).unwrap_or(63);
        let buckets = (last >> log2) as usize + 1;
        let begins_by = |n, at| n < count && table.start_of(n) <= at;
        let record = |n| {
            let behind = ((table.end_of(n) - 1) >> shift) + 1;
            let delta = D::of(table.start_of(n), table.segment(n).addr.bits(), base, shift);
            Some(delta.pair(D::try_from(behind).ok()?))
        };
        let number = |n: usize| Some(D::try_from(n as u64).ok()?.pair(D::try_from(0).ok()?));
        let (mut records, mut lists) = (Vec::new(), Vec::new());
        records.try_reserve_exact(buckets + 1).ok()?;
        let mut first = 0;
        for bucket in 0..buckets as u64 {
            // The segments of the bucket's first and last byte, and of the next bucket's first.
            let end = (bucket << log2) | ((1 << log2) - 1);
            let mut of_last = first;
            while begins_by(of_last + 1, end) {
                of_last += 1;
            }
            let next = of_last + usize::from(begins_by(of_last + 1, end.saturating_add(1)));
            if of_last == first || of_last == first + 1 && next == of_last {
                records.push(record(first)?);
            } else {
                let segments = of_last + 1 - first;
                records.push(number(buckets + 1 + lists.len())?);
                lists.try_reserve(segments + 1).ok()?;
                lists.push(number(segments)?);
                for n in first..=of_last {
                    lists.push(record(n)?);
                }
            }
            first = next;
        }
        records.push(record(count - 1)?);
        records.try_reserve_exact(lists.len()).ok()?;
        records.append(&mut lists);
        Some(Self { records, base, log2 })
    }

    /// The address of the byte at `offset`, and the page behind its segment; `None` beyond the end.
    #[inline]
    pub(super) fn segment(&self, offset: u64, shift: u32) -> Option<(u64, u64)> {
        let bucket = (offset >> self.log2) as usize;
        let (&here, &next) = (self.records.get(bucket)?, self.records.get(bucket + 1)?);
        let page = offset >> shift;
        // Where in a bucket a segment ends is as good as random. (Of a crowded one this is the highest number.)
        let here_behind: u64 = D::unpair(here).1.into();
        let (mut delta, mut behind) = D::unpair(select_unpredictable(page <= here_behind.wrapping_sub(1), here, next));
        if behind.into() == 0 {
            (delta, behind) = self.search(delta, page)?;
        }
        Some((delta.address(offset, self.base, shift), behind.into()))
    }

    /// The segment of a page, out of the list of a crowded bucket.
    #[inline(never)]
    fn search(&self, list: D, page: u64) -> Option<(D, D)> {
        let list = self.records.get(usize::try_from(list.into()).ok()?..)?;
        let (&count, segments) = list.split_first()?;
        let segments = segments.get(..usize::try_from(D::unpair(count).0.into()).ok()?)?;
        let before = |segment: &D::Pair| D::unpair(*segment).1.into() <= page;
        let at = match segments.len() {
            ..=FEW => segments.iter().map(|segment| usize::from(before(segment))).sum(),
            _ => segments.partition_point(before),
        };
        segments.get(at).map(|&segment| D::unpair(segment))
    }

    /// Bytes of memory that it has allocated.
    pub(super) fn heap_bytes(&self) -> usize {
        self.records.capacity() * size_of::<D::Pair>()
    }
}
