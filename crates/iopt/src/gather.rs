//! Several unmaps, one invalidation.

use alloc::vec::Vec;
use core::mem;

use dmalane_addr::{Address, Span};

use crate::{FlushList, Format, PageTable, Tables};

/// Results of several unmaps, invalidated together: as Linux's `iommu_iotlb_gather` for a few calls in a row, or, in a
/// `Mutex`, as its flush queue for threads that unmap all the time.
///
/// Ranges that touch or overlap are one. Beyond [`MOST_RANGES`](Self::MOST_RANGES) the two with the smallest hole
/// between them become one too, which invalidates more than was unmapped and does no harm. Until the flush a device may
/// still reach what was unmapped: neither the memory behind it nor its input addresses may serve anything else. The
/// gather keeps what stands for them (`K`: a lease of addresses, a buffer) and gives it back after the flush.
///
/// ```
/// use dmalane_addr::{Access, Iova, PhysAddr, Span};
/// use dmalane_iopt::{Gather, HeapTables, PageTable, X86_64_4Level};
///
/// let mut table = PageTable::<X86_64_4Level, Iova, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(0x1000)))?;
/// table.map(Iova::new(0x8000), PhysAddr::new(0), 0x4000, Access::RW)?;
/// let mut gather = Gather::new();
/// for at in [0x8000, 0xa000, 0x9000] {
///     let list = table.unmap(Span::new(Iova::new(at), 0x1000).unwrap())?;
///     gather.add(list).expect("memory");
/// }
/// let mut calls = 0;
/// table.flush(&mut gather, |ranges| {
///     assert_eq!(ranges, [Span::new(Iova::new(0x8000), 0x3000).unwrap()]);
///     calls += 1; // the device forgets them, and has said so
/// });
/// assert_eq!((calls, gather.is_empty()), (1, true));
/// # Ok::<(), dmalane_iopt::Error>(())
/// ```
///
/// As a flush queue of threads: a thread whose unmap fills the queue takes all that waits and flushes it, without the
/// lock, while others begin to fill it again; so no more than `MOST` unmaps for each thread ever wait. A timer does the
/// same with `take_from(1)`.
///
/// ```
/// use std::sync::{Mutex, atomic::{AtomicU64, AtomicUsize, Ordering}};
/// use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, Span};
/// use dmalane_iopt::{Gather, PageTable, TablePool, X86_64_4Level};
///
/// type Table<'p> = PageTable<X86_64_4Level, Iova, PhysAddr, &'p TablePool<'p, PhysAddr>>;
/// const MOST: usize = 64;
///
/// let memory: Vec<AtomicU64> = (0..64 * 512).map(|_| AtomicU64::new(0)).collect();
/// let pool = TablePool::new::<X86_64_4Level>(PhysAddr::new(0x10_0000), &memory);
/// let root = Table::new(&pool)?.root();
/// let space = Span::new(Iova::new(0), 1 << 30).unwrap();
/// let iovas = Mutex::new(RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K)));
/// let queue: Mutex<Gather<Iova, PhysAddr, Lease<Iova>>> = Mutex::default();
/// let invalidations = AtomicUsize::new(0);
/// let flush = |table: &mut Table, mut batch: Gather<_, _, _>| {
///     let leases = table.flush(&mut batch, |_ranges| {
///         invalidations.fetch_add(1, Ordering::Relaxed); // the device forgets them, and has said so
///     });
///     leases.into_iter().for_each(|lease| iovas.lock().unwrap().free(lease));
/// };
/// std::thread::scope(|threads| {
///     for _ in 0..4 {
///         threads.spawn(|| {
///             let mut table = Table::attach(&pool, root);
///             for _ in 0..1000 {
///                 let lease = iovas.lock().unwrap().allocate(0x1000, PageSize::SIZE_4K).unwrap();
///                 table.map(lease.span().first(), PhysAddr::new(0), 0x1000, Access::RW).unwrap();
///                 let list = table.unmap(lease.span()).unwrap();
///                 let full = {
///                     let mut queue = queue.lock().unwrap();
///                     queue.add_keeping(list, lease).expect("memory");
///                     queue.take_from(MOST)
///                 };
///                 full.into_iter().for_each(|batch| flush(&mut table, batch));
///             }
///         });
///     }
/// });
/// let rest = queue.lock().unwrap().take_from(1);
/// rest.into_iter().for_each(|batch| flush(&mut Table::attach(&pool, root), batch));
/// assert_eq!(invalidations.into_inner(), 4000_usize.div_ceil(MOST));
/// # Ok::<(), dmalane_iopt::Error>(())
/// ```
#[must_use = "hand it to PageTable::flush; tables in a gather that is dropped are leaked"]
#[derive(Debug)]
pub struct Gather<I: Address, A, K = ()> {
    /// In ascending order; none touches the next.
    ranges: Vec<Span<I>>,
    tables: Vec<A>,
    bytes: u64,
    /// One for each unmap.
    kept: Vec<K>,
}

impl<I: Address, A, K> Default for Gather<I, A, K> {
    fn default() -> Self {
        Self { ranges: Vec::new(), tables: Vec::new(), bytes: 0, kept: Vec::new() }
    }
}

impl<I: Address, A> Gather<I, A> {
    /// Adds what an unmap took away. An empty list changes nothing.
    ///
    /// # Errors
    /// The list, when there is no memory for it: flush, and treat it alone.
    pub fn add(&mut self, list: FlushList<I, A>) -> Result<(), FlushList<I, A>> {
        if list.is_empty() {
            return Ok(());
        }
        self.add_keeping(list, ()).map_err(|(list, ())| list)
    }
}

impl<I: Address, A, K> Gather<I, A, K> {
    /// The most ranges of one flush.
    pub const MOST_RANGES: usize = 16;

    /// An empty gather.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what an unmap took away, and keeps `keep` until the flush.
    ///
    /// # Errors
    /// Both, when there is no memory for them: flush, and treat the list alone.
    pub fn add_keeping(&mut self, list: FlushList<I, A>, keep: K) -> Result<(), (FlushList<I, A>, K)> {
        if self.tables.try_reserve(list.tables.len()).is_err()
            || self.ranges.try_reserve(1).is_err()
            || self.kept.try_reserve(1).is_err()
        {
            return Err((list, keep));
        }
        self.kept.push(keep);
        if list.is_empty() {
            return Ok(());
        }
        self.bytes = self.bytes.saturating_add(list.bytes);
        self.tables.extend(list.tables);
        let (first, last) = (list.span.first(), list.span.last());
        // The ranges that touch or overlap the new one.
        let start = self.ranges.partition_point(|range| range.last().bits() < first.bits().saturating_sub(1));
        let end = self.ranges.partition_point(|range| range.first().bits() <= last.bits().saturating_add(1));
        let among = &self.ranges[start..end];
        let first = among.first().map_or(first, |range| range.first().min(first));
        let last = among.last().map_or(last, |range| range.last().max(last));
        // No unmap covers all of 64 bits, but several together might: then all but the last byte, which no format has.
        let last = if last.bits() - first.bits() == u64::MAX { I::new(u64::MAX - 1) } else { last };
        self.ranges.splice(start..end, Span::inclusive(first, last));
        if self.ranges.len() > Self::MOST_RANGES {
            self.join_nearest();
        }
        Ok(())
    }

    /// Makes one range of the two with the smallest hole between them.
    fn join_nearest(&mut self) {
        let hole = |k: &usize| self.ranges[k + 1].first().bits() - self.ranges[*k].last().bits();
        if let Some(k) = (0..self.ranges.len() - 1).min_by_key(hole) {
            let joined = Span::inclusive(self.ranges[k].first(), self.ranges[k + 1].last());
            self.ranges.splice(k..k + 2, joined);
        }
    }

    /// Ranges to invalidate, in ascending order.
    pub fn ranges(&self) -> &[Span<I>] {
        &self.ranges
    }

    /// Tables that wait for the flush.
    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// Bytes that were mapped and are no more.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True when there is nothing to invalidate and nothing to give back.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Takes everything, if there are at least `unmaps` unmaps; this gather is empty then.
    pub fn take_from(&mut self, unmaps: usize) -> Option<Self> {
        (self.kept.len() >= unmaps.max(1)).then(|| mem::take(self))
    }
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Invalidates the gathered ranges on the device, then frees the tables, and gives back what was kept, in the order
    /// of the unmaps. `invalidate` returns when no walk and no access by one of the ranges is under way any more; it is
    /// not called when no range was gathered. The gather is empty afterwards.
    ///
    /// The lists must come from this page table, or from other handles on the same tree.
    pub fn flush<K>(&mut self, gather: &mut Gather<I, T::Addr, K>, invalidate: impl FnOnce(&[Span<I>])) -> Vec<K> {
        if !gather.ranges.is_empty() {
            invalidate(&gather.ranges);
        }
        gather.ranges.clear();
        gather.bytes = 0;
        self.free_detached(gather.tables.drain(..));
        mem::take(&mut gather.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use dmalane_addr::Iova;

    fn list(first: u64, last: u64) -> FlushList<Iova, u64> {
        let span = Span::inclusive(Iova::new(first), Iova::new(last)).unwrap();
        FlushList { span, bytes: 1, tables: vec![first] }
    }

    fn ranges(gather: &Gather<Iova, u64>) -> Vec<(u64, u64)> {
        gather.ranges().iter().map(|range| (range.first().bits(), range.last().bits())).collect()
    }

    #[test]
    fn ranges_that_touch_are_one() {
        let mut gather = Gather::new();
        for (first, last) in [(0x40, 0x4f), (0x10, 0x1f), (0x20, 0x2f), (0x60, 0x6f), (0, 7)] {
            gather.add(list(first, last)).unwrap();
        }
        assert_eq!(ranges(&gather), [(0, 7), (0x10, 0x2f), (0x40, 0x4f), (0x60, 0x6f)]);
        gather.add(list(0x30, 0x65)).unwrap();
        assert_eq!(ranges(&gather), [(0, 7), (0x10, 0x6f)]);
        gather.add(list(0x68, u64::MAX)).unwrap();
        gather.add(list(u64::MAX, u64::MAX)).unwrap();
        gather.add(list(1, u64::MAX)).unwrap();
        assert_eq!((ranges(&gather), gather.tables(), gather.bytes()), (vec![(0, u64::MAX - 1)], 9, 9));
        let nothing = FlushList { bytes: 0, tables: vec![], ..list(5, 6) };
        gather.add(nothing).unwrap();
        assert_eq!(gather.bytes(), 9);
    }

    #[test]
    fn the_nearest_of_too_many_ranges_are_joined() {
        let mut gather = Gather::new();
        let sixteen: Vec<(u64, u64)> = (0..16).map(|k| (0x100 * k, 0x100 * k + 0xf)).collect();
        sixteen.iter().for_each(|&(first, last)| gather.add(list(first, last)).unwrap());
        assert_eq!(ranges(&gather), sixteen);
        gather.add(list(0x712, 0x720)).unwrap();
        let joined = ranges(&gather);
        assert_eq!((joined.len(), joined[7]), (16, (0x700, 0x720)));
    }

    /// Against a set of addresses: everything that was unmapped is invalidated, and what lies between ranges is not
    /// until there are too many.
    #[test]
    fn as_a_set_says() {
        let mut state = 1u64;
        let mut random = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        for round in 0..200 {
            let mut gather = Gather::new();
            let mut set = [false; 256];
            for _ in 0..1 + round % 40 {
                let first = random(250);
                let last = first + random(6);
                gather.add(list(first, last)).unwrap();
                set[first as usize..=last as usize].fill(true);
            }
            let ranges = ranges(&gather);
            assert!(ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0), "{ranges:?}");
            let within = |at: u64| ranges.iter().any(|range| (range.0..=range.1).contains(&at));
            let exact = (0..256).all(|at| within(at) == set[at as usize]);
            assert!((0..256).all(|at| within(at) || !set[at as usize]));
            assert!(exact || round % 40 >= Gather::<Iova, u64>::MOST_RANGES, "{ranges:?}");
        }
    }
}
