//! A cache of ranges in front of the allocator.

use alloc::vec::Vec;

use crate::{Address, PageSize, RangeAllocator, RangeError, Span};

/// Sets of stacks: a length belongs to one of them.
const SETS: usize = 16;
/// Stacks of a set, one for each cached length.
const WAYS: usize = 16;
const STACKS: usize = SETS * WAYS;
/// Most ranges in a stack.
const DEPTH: usize = 64;

/// Ownership of a range that a [`RangeCache`] has allocated. [`RangeCache::free`] consumes it, so a range cannot be
/// freed twice or in part. Dropping it leaks the range.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropping it leaks the range"]
pub struct Lease<A: Address>(Span<A>);

impl<A: Address> Lease<A> {
    /// The range.
    pub fn span(&self) -> Span<A> {
        self.0
    }
}

/// A cache for allocations of the same few lengths, as IO buffers make them: a stack of freed ranges for each length,
/// in front of a [`RangeAllocator`].
///
/// The stacks hold at most 256 lengths (16 of those that share a set, of 16 sets) and 64 ranges of each. They are
/// emptied before an allocation fails, so it fails only where it would without them. The idea is that of the IOVA
/// magazines of Linux (`drivers/iommu/iova.c`), which exist for each processor.
///
/// ```
/// use dmalane_addr::{Iova, PageSize, RangeAllocator, RangeCache, Span};
/// let space = Span::new(Iova::new(0x1000), 0x10_0000).unwrap();
/// let mut iovas = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
/// let lease = iovas.allocate(0x3000, PageSize::SIZE_4K)?;
/// let span = lease.span();
/// iovas.free(lease);
/// assert_eq!(iovas.allocate(0x3000, PageSize::SIZE_4K)?.span(), span);
/// # Ok::<(), dmalane_addr::RangeError<Iova>>(())
/// ```
///
/// A freed lease cannot be used again:
///
/// ```compile_fail,E0382
/// # use dmalane_addr::{Iova, PageSize, RangeCache};
/// # fn example(mut iovas: RangeCache<Iova>) {
/// let lease = iovas.allocate(0x1000, PageSize::SIZE_4K).unwrap();
/// iovas.free(lease);
/// iovas.free(lease);
/// # }
/// ```
#[derive(Debug)]
pub struct RangeCache<A: Address> {
    inner: RangeAllocator<A>,
    /// The range length of each stack; 0 for an unused stack.
    lengths: [u64; STACKS],
    stacks: [Vec<Span<A>>; STACKS],
    /// Of each set, the stack to reuse for its next new length.
    next: [u8; SETS],
    bytes: u64,
}

impl<A: Address> RangeCache<A> {
    /// An empty cache over `inner`. Ranges that are already allocated stay allocated.
    pub fn new(inner: RangeAllocator<A>) -> Self {
        Self { inner, lengths: [0; STACKS], stacks: [const { Vec::new() }; STACKS], next: [0; SETS], bytes: 0 }
    }

    /// Takes `len` bytes aligned to `align` (and to the allocator's page).
    ///
    /// # Errors
    /// As [`RangeAllocator::allocate`].
    #[inline]
    pub fn allocate(&mut self, len: u64, align: PageSize) -> Result<Lease<A>, RangeError<A>> {
        self.allocate_at(len, align, 0)
    }

    /// Takes `len` bytes at an address that is `phase` bytes behind a multiple of `align`.
    ///
    /// # Errors
    /// As [`RangeAllocator::allocate_at`].
    #[inline]
    pub fn allocate_at(&mut self, len: u64, align: PageSize, phase: u64) -> Result<Lease<A>, RangeError<A>> {
        let fits = |span: &Span<A>| (span.first().bits() ^ phase) & (align.bytes() - 1) == 0;
        if let Some(k) = self.stack(len)
            // Nearly always the last one: ranges of one length are mostly of one alignment.
            && let Some(at) = self.stacks[k].iter().rposition(fits)
        {
            self.bytes -= len;
            return Ok(Lease(self.stacks[k].swap_remove(at)));
        }
        self.allocate_anew(len, align, phase)
    }

    #[inline(never)]
    fn allocate_anew(&mut self, len: u64, align: PageSize, phase: u64) -> Result<Lease<A>, RangeError<A>> {
        let result = match self.inner.allocate_at(len, align, phase) {
            Err(RangeError::Exhausted { .. }) if self.bytes > 0 => {
                self.empty();
                self.inner.allocate_at(len, align, phase)
            }
            result => result,
        };
        result.map(Lease)
    }

    /// Takes exactly this span.
    ///
    /// # Errors
    /// As [`RangeAllocator::reserve`].
    pub fn reserve(&mut self, span: Span<A>) -> Result<Lease<A>, RangeError<A>> {
        let result = match self.inner.reserve(span) {
            Err(RangeError::NotFree(_)) if self.bytes > 0 => {
                self.empty();
                self.inner.reserve(span)
            }
            result => result,
        };
        result.map(|()| Lease(span))
    }

    /// Takes what is free of the pages that the span touches.
    ///
    /// As [`RangeAllocator::exclude`].
    pub fn exclude(&mut self, span: Span<A>) -> impl Iterator<Item = Lease<A>> + use<A> {
        self.empty();
        self.inner.exclude(span).into_iter().map(Lease)
    }

    /// Frees a range. The lease must be from this cache.
    #[inline]
    pub fn free(&mut self, lease: Lease<A>) {
        let len = lease.0.len();
        let k = match self.stack(len) {
            Some(k) => k,
            None => self.begin(len),
        };
        if self.stacks[k].len() < DEPTH {
            self.bytes += len;
            self.stacks[k].push(lease.0);
        } else {
            self.give_back(lease.0);
        }
    }

    /// Returns all cached ranges to the allocator, which merges neighbours.
    pub fn empty(&mut self) {
        (0..STACKS).for_each(|k| self.clear(k));
    }

    /// The whole space, free or not.
    pub fn space(&self) -> Span<A> {
        self.inner.space()
    }

    /// Free bytes in total, including cached ranges.
    pub fn free_bytes(&self) -> u64 {
        self.inner.free_bytes() + self.bytes
    }

    /// The set of a length.
    #[inline]
    fn set(len: u64) -> usize {
        (len.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SETS.trailing_zeros())) as usize
    }

    #[inline]
    fn stack(&self, len: u64) -> Option<usize> {
        let first = Self::set(len) * WAYS;
        let found = self.lengths[first..first + WAYS].iter().position(|&l| l == len && len != 0);
        found.map(|way| first + way)
    }

    /// Assigns a stack to a new length, and empties it first.
    #[inline(never)]
    fn begin(&mut self, len: u64) -> usize {
        let set = Self::set(len);
        let way = usize::from(self.next[set]);
        self.next[set] = ((way + 1) % WAYS) as u8;
        let k = set * WAYS + way;
        self.clear(k);
        self.lengths[k] = len;
        k
    }

    fn clear(&mut self, k: usize) {
        while let Some(span) = self.stacks[k].pop() {
            self.bytes -= span.len();
            self.give_back(span);
        }
    }

    fn give_back(&mut self, span: Span<A>) {
        let freed = self.inner.free(span);
        debug_assert!(freed.is_ok(), "a lease of another cache: {freed:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Iova;
    use proptest::prelude::*;

    const P: u64 = 4096;
    const PAGES: u64 = 96;

    fn span(page: u64, n: u64) -> Span<Iova> {
        Span::new(Iova::new(page * P), n * P).unwrap()
    }

    fn fresh() -> RangeCache<Iova> {
        RangeCache::new(RangeAllocator::new(span(0, PAGES), PageSize::SIZE_4K))
    }

    #[test]
    fn refuses_the_same_requests_as_the_allocator() {
        let mut a = fresh();
        assert!(matches!(a.allocate(0, PageSize::SIZE_4K), Err(RangeError::BadLength { .. })));
        assert!(matches!(a.allocate(17, PageSize::SIZE_4K), Err(RangeError::BadLength { .. })));
        assert!(matches!(a.allocate_at(P, PageSize::SIZE_2M, 17), Err(RangeError::BadLength { .. })));
        assert!(matches!(a.allocate(1 << 40, PageSize::SIZE_4K), Err(RangeError::Exhausted { .. })));
        assert!(matches!(a.reserve(span(PAGES, 1)), Err(RangeError::NotFree(_))));
    }

    #[test]
    fn reuses_the_last_range_and_respects_alignment() {
        let mut a = fresh();
        let leases: Vec<_> = (0..3).map(|_| a.allocate(2 * P, PageSize::SIZE_4K).unwrap()).collect();
        leases.into_iter().for_each(|lease| a.free(lease));
        assert_eq!(a.allocate(2 * P, PageSize::SIZE_4K).unwrap().span(), span(4, 2));
        let odd = a.allocate(2 * P, PageSize::SIZE_16K).unwrap(); // pages 2 and 3 do not begin at a multiple of 4
        assert_eq!((odd.span(), a.free_bytes()), (span(0, 2), (PAGES - 4) * P));
    }

    #[test]
    fn cached_ranges_have_the_right_phase() {
        let mut a = fresh();
        let block = PageSize::SIZE_64K;
        for phase in [3, 5, 3] {
            let lease = a.allocate_at(4 * P, block, phase * P).unwrap();
            assert_eq!(lease.span().first().bits() & (block.bytes() - 1), phase * P);
            a.free(lease);
        }
        assert_eq!(a.stacks.iter().map(Vec::len).sum::<usize>(), 2);
    }

    #[test]
    fn cached_ranges_serve_other_lengths() {
        let mut a = fresh();
        let leases: Vec<_> = (0..PAGES).map(|_| a.allocate(P, PageSize::SIZE_4K).unwrap()).collect();
        leases.into_iter().for_each(|lease| a.free(lease));
        assert_eq!((a.bytes, a.free_bytes()), (DEPTH as u64 * P, PAGES * P));
        let all = a.allocate(PAGES * P, PageSize::SIZE_4K).unwrap();
        assert_eq!((all.span(), a.free_bytes()), (span(0, PAGES), 0));
        a.free(all);
        assert!(a.reserve(span(5, 1)).is_ok());
    }

    /// With more lengths than stacks, the oldest stacks are emptied.
    #[test]
    fn new_lengths_replace_old_ones() {
        let space = Span::new(Iova::new(0), 1 << 30).unwrap();
        let mut a = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
        for _ in 0..3 {
            let leases: Vec<_> = (1..600).map(|n| a.allocate(n * P, PageSize::SIZE_4K).unwrap()).collect();
            leases.into_iter().for_each(|lease| a.free(lease));
            assert!(a.stacks.iter().all(|s| s.len() == 1));
        }
        assert_eq!(a.free_bytes(), 1 << 30);
        // 64 lengths have a stack each.
        a.empty();
        for _ in 0..2 {
            let leases: Vec<_> = (1..=64).map(|n| a.allocate(n * P, PageSize::SIZE_4K).unwrap()).collect();
            leases.into_iter().for_each(|lease| a.free(lease));
        }
        assert_eq!(a.stacks.iter().filter(|s| s.len() == 1).count(), 64);
        a.empty();
        assert_eq!(a.inner.largest_free(), 1 << 30);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(u64, u8),
        Reserve(u64, u64),
        Free(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (1u64..5, 12u8..15).prop_map(|(n, a)| Op::Allocate(n, a)),
            1 => (5u64..24, 12u8..15).prop_map(|(n, a)| Op::Allocate(n, a)),
            1 => (0u64..PAGES, 1u64..5).prop_map(|(p, n)| Op::Reserve(p, n)),
            4 => any::<prop::sample::Index>().prop_map(Op::Free),
        ]
    }

    proptest! {
        /// The reference is one bit per page; a request fails exactly where the bitmap has no suitable pages.
        #[test]
        fn agrees_with_a_bitmap(ops in prop::collection::vec(op(), 1..300)) {
            let mut a = fresh();
            let mut taken = [false; PAGES as usize];
            let mut held: Vec<Lease<Iova>> = Vec::new();
            let pages = |span: Span<Iova>| {
                let first = (span.first().bits() / P) as usize;
                first..first + (span.len() / P) as usize
            };
            for op in ops {
                match op {
                    Op::Allocate(n, log2) => {
                        let align = PageSize::from_log2(log2).unwrap();
                        let free = |p: usize| !taken[p..p + n as usize].contains(&true);
                        let fits = (0..=(PAGES - n) as usize).step_by((align.bytes() / P) as usize).any(free);
                        let got = a.allocate(n * P, align);
                        prop_assert_eq!(got.is_ok(), fits);
                        if let Ok(lease) = got {
                            prop_assert!(lease.span().first().is_aligned(align) && lease.span().len() == n * P);
                            prop_assert!(!taken[pages(lease.span())].contains(&true));
                            taken[pages(lease.span())].fill(true);
                            held.push(lease);
                        }
                    }
                    Op::Reserve(p, n) => {
                        let free = p + n <= PAGES && !taken[p as usize..(p + n) as usize].contains(&true);
                        let got = a.reserve(span(p, n));
                        prop_assert_eq!(got.is_ok(), free);
                        if let Ok(lease) = got {
                            taken[pages(lease.span())].fill(true);
                            held.push(lease);
                        }
                    }
                    Op::Free(_) if held.is_empty() => {}
                    Op::Free(i) => {
                        let lease = held.swap_remove(i.index(held.len()));
                        taken[pages(lease.span())].fill(false);
                        a.free(lease);
                    }
                }
                prop_assert_eq!(a.free_bytes(), taken.iter().filter(|t| !**t).count() as u64 * P);
            }
        }
    }
}
