//! An allocator of address ranges.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::fmt;

use crate::phases::Phases;
use crate::{Address, PageSize, Span};

/// Why a range could not be allocated or freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RangeError<A: Address> {
    /// No free range is long enough at this alignment.
    Exhausted {
        /// Bytes requested.
        len: u64,
        /// Alignment requested.
        align: PageSize,
        /// Free bytes in total.
        free: u64,
    },
    /// A length of zero, or one that is not a whole number of pages of the allocator.
    BadLength {
        /// Bytes asked for.
        len: u64,
        /// The allocator's page size.
        page: PageSize,
    },
    /// Part of the span is allocated, or lies outside the allocator.
    NotFree(Span<A>),
    /// Part of the span is free already, or lies outside the allocator.
    NotAllocated(Span<A>),
}

impl<A: Address> fmt::Display for RangeError<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted { len, align, free } => {
                write!(f, "no free range of {len} bytes aligned to {align} ({free} bytes are free in all)")
            }
            Self::BadLength { len, page } => {
                write!(f, "a range of {len} bytes is not a whole, non-zero number of {page} pages")
            }
            Self::NotFree(span) => write!(f, "{span} is not completely free"),
            Self::NotAllocated(span) => write!(f, "{span} is not completely allocated"),
        }
    }
}

impl<A: Address> core::error::Error for RangeError<A> {}

/// Allocates ranges of an address space: IOVAs, card memory, device VAs.
///
/// Best fit by the length that is left once the start is aligned, lowest address among equals; freed neighbours merge.
/// Allocating and freeing take O(log n) time in the number n of free ranges, for each of the alignments in use; the
/// first allocation at an alignment takes O(n). From the ninth alignment on it is O(n) too, and for
/// [`allocate_at`](Self::allocate_at) at alignments above 2^18 pages where no range is longer than need be.
///
/// ```
/// use dmalane_addr::{Iova, PageSize, RangeAllocator, Span};
/// let space = Span::new(Iova::new(0x1000), 0x10_0000).unwrap();
/// let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
/// let span = iovas.allocate(0x3000, PageSize::SIZE_4K)?;
/// iovas.free(span)?;
/// # Ok::<(), dmalane_addr::RangeError<Iova>>(())
/// ```
#[derive(Clone, Debug)]
pub struct RangeAllocator<A: Address> {
    space: Span<A>,
    page: PageSize,
    /// First address -> last address of each free range; no two touch.
    free: BTreeMap<A, A>,
    /// The same ranges as (length, first), for best fit.
    by_len: BTreeSet<(u64, A)>,
    /// The same again for alignments that were asked for, with the length that is left behind an aligned start.
    by_aligned: Vec<(PageSize, BTreeSet<(u64, A)>)>,
    /// The same again for alignments at which none was long enough behind an aligned start.
    by_phase: Vec<Phases<A>>,
    free_bytes: u64,
}

/// Alignments for which the ranges are kept in another order.
const ORDERS: usize = 8;

impl<A: Address> RangeAllocator<A> {
    /// An allocator over the whole pages of `space`, all free. It is empty when `space` contains no whole page.
    pub fn new(space: Span<A>, page: PageSize) -> Self {
        let (free, by_len, by_aligned, by_phase) = (BTreeMap::new(), BTreeSet::new(), Vec::new(), Vec::new());
        let mut this = Self { space, page, free, by_len, by_aligned, by_phase, free_bytes: 0 };
        let whole = space.first().align_up(page).and_then(|first| {
            // One past the last may be 2^64; work with the page that holds the last byte instead.
            let tail = space.last().align_down(page);
            let last = match space.last().bits() - tail.bits() == page.bytes() - 1 {
                true => space.last(),
                false => A::new(tail.bits().checked_sub(1)?),
            };
            Span::inclusive(first, last)
        });
        if let Some(span) = whole {
            this.insert(span);
        }
        this
    }

    /// Allocates `len` bytes aligned to `align` (and to the allocator's page).
    ///
    /// # Errors
    /// [`RangeError::BadLength`] unless `len` is a non-zero number of pages; [`RangeError::Exhausted`].
    pub fn allocate(&mut self, len: u64, align: PageSize) -> Result<Span<A>, RangeError<A>> {
        self.allocate_at(len, align, 0)
    }

    /// Allocates `len` bytes at an address that is `phase` bytes behind a multiple of `align` (or of the allocator's
    /// page, if that is larger): congruent with what is mapped there, so that large leaves fit both.
    ///
    /// ```
    /// use dmalane_addr::{Iova, PageSize, RangeAllocator, Span};
    /// let space = Span::new(Iova::new(0), 1 << 40).unwrap();
    /// let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
    /// // A BAR from its second page on: all but the first 2 MiB can be leaves of 2 MiB.
    /// let span = iovas.allocate_at(32 << 30, PageSize::SIZE_2M, 4096)?;
    /// assert_eq!(span.first().bits() % (2 << 20), 4096);
    /// # Ok::<(), dmalane_addr::RangeError<Iova>>(())
    /// ```
    ///
    /// # Errors
    /// [`RangeError::BadLength`] unless `len` is a non-zero number of pages and `phase` one of pages;
    /// [`RangeError::Exhausted`].
    pub fn allocate_at(&mut self, len: u64, align: PageSize, phase: u64) -> Result<Span<A>, RangeError<A>> {
        if len == 0 || !(len | phase).is_multiple_of(self.page.bytes()) {
            return Err(RangeError::BadLength { len, page: self.page });
        }
        let align = align.max(self.page);
        let Some((hole, span)) = self.find(len, align, phase & (align.bytes() - 1)) else {
            return Err(RangeError::Exhausted { len, align, free: self.free_bytes });
        };
        self.carve(hole, span);
        Ok(span)
    }

    /// Where such a range goes: the start of a free range, and the part of it.
    fn find(&mut self, len: u64, align: PageSize, phase: u64) -> Option<(A, Span<A>)> {
        // A range that is long enough from an aligned start on is so from the phase on.
        let need = len.checked_add(phase)?;
        let at = |first: A| first.align_up(align)?.checked_add(phase);
        if align == self.page {
            let &(_, first) = self.by_len.range((need, A::new(0))..).next()?;
            return Some((first, Span::new(at(first)?, len)?));
        }
        if let Some(ranges) = self.ranges_at(align) {
            if let Some(&(_, first)) = ranges.range((need, A::new(0))..).next() {
                return Some((first, Span::new(at(first)?, len)?));
            }
            if phase == 0 {
                return None;
            }
            // The phase may also come before the first aligned address.
            if let Some(phases) = self.phases_at(align) {
                let first = phases.find(phase, len)?;
                return Some((first, Span::new(first.align_down(align).checked_add(phase)?, len)?));
            }
        }
        self.by_len.range((len, A::new(0))..).find_map(|&(_, first)| {
            let ahead = phase.wrapping_sub(first.bits()) & (align.bytes() - 1);
            let span = Span::new(first.checked_add(ahead)?, len)?;
            (span.last() <= self.free[&first]).then_some((first, span))
        })
    }

    /// The free ranges by what is left of them behind an aligned start, unless there are too many such orders.
    fn ranges_at(&mut self, align: PageSize) -> Option<&BTreeSet<(u64, A)>> {
        let known = self.by_aligned.iter().position(|(known, _)| *known == align);
        let at = match known {
            Some(at) => at,
            None if self.by_aligned.len() < ORDERS => {
                let usable = |(&first, &last)| Some((usable(first, last, align)?, first));
                self.by_aligned.push((align, self.free.iter().filter_map(usable).collect()));
                self.by_aligned.len() - 1
            }
            None => return None,
        };
        self.by_aligned.get(at).map(|(_, ranges)| ranges)
    }

    /// The free ranges by where they begin, unless there are too many such orders or phases.
    fn phases_at(&mut self, align: PageSize) -> Option<&Phases<A>> {
        let known = self.by_phase.iter().position(|phases| phases.align == align);
        if known.is_none() && self.by_phase.len() < ORDERS {
            let mut phases = Phases::new(align, self.page)?;
            self.free.iter().for_each(|(first, last)| phases.insert(*first, *last));
            self.by_phase.push(phases);
        }
        self.by_phase.get(known.unwrap_or(self.by_phase.len() - 1)).filter(|phases| phases.align == align)
    }

    /// Allocates exactly this span.
    ///
    /// # Errors
    /// [`RangeError::BadLength`] unless both ends are page boundaries; [`RangeError::NotFree`].
    pub fn reserve(&mut self, span: Span<A>) -> Result<(), RangeError<A>> {
        self.check(span)?;
        match self.free.range(..=span.first()).next_back() {
            Some((&first, &last)) if span.last() <= last => {
                self.carve(first, span);
                Ok(())
            }
            _ => Err(RangeError::NotFree(span)),
        }
    }

    /// Allocates what is free of the pages that the span touches, and gives it: for a reserved range that may lie
    /// partly outside, start or end within a page, or overlap another one.
    pub fn exclude(&mut self, span: Span<A>) -> Vec<Span<A>> {
        let (first, last) = (span.first().align_down(self.page), span.last().bits() | (self.page.bytes() - 1));
        let mut excluded = Vec::new();
        while let Some((&hole, &end)) = self.free.range(..=A::new(last)).next_back()
            && end >= first
            && let Some(part) = Span::inclusive(hole.max(first), end.min(A::new(last)))
        {
            self.carve(hole, part);
            excluded.push(part);
        }
        excluded
    }

    /// Frees a span, which may be part of an allocation or cover several.
    ///
    /// # Errors
    /// [`RangeError::BadLength`] unless both ends are page boundaries; [`RangeError::NotAllocated`] when any of it
    /// is free already or outside: a double free changes nothing.
    pub fn free(&mut self, span: Span<A>) -> Result<(), RangeError<A>> {
        self.check(span)?;
        let below = self.free.range(..=span.last()).next_back().map(|(&f, &l)| (f, l));
        if !self.space.covers(&span) || below.is_some_and(|(_, last)| last >= span.first()) {
            return Err(RangeError::NotAllocated(span));
        }
        let (mut first, mut last) = (span.first(), span.last());
        if let Some((f, l)) = below
            && l.checked_add(1) == Some(first)
        {
            self.remove(f, l);
            first = f;
        }
        if let Some(next) = last.checked_add(1)
            && let Some(&l) = self.free.get(&next)
        {
            self.remove(next, l);
            last = l;
        }
        // Cannot be the whole 64-bit space: `space` is a Span and so are its parts.
        let merged = Span::inclusive(first, last).ok_or(RangeError::NotAllocated(span))?;
        self.insert(merged);
        Ok(())
    }

    /// The whole space, free or not.
    pub fn space(&self) -> Span<A> {
        self.space
    }

    /// Free bytes in total.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The longest free range, in bytes.
    pub fn largest_free(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// The free ranges, lowest first.
    pub fn free_ranges(&self) -> impl Iterator<Item = Span<A>> {
        self.free.iter().filter_map(|(&f, &l)| Span::inclusive(f, l))
    }

    fn check(&self, span: Span<A>) -> Result<(), RangeError<A>> {
        if span.is_aligned(self.page) {
            Ok(())
        } else {
            Err(RangeError::BadLength { len: span.len(), page: self.page })
        }
    }

    /// Cuts `span` out of the free range that starts at `hole`.
    fn carve(&mut self, hole: A, span: Span<A>) {
        let last = self.free[&hole];
        self.remove(hole, last);
        if let Some(left) = span.first().bits().checked_sub(1).map(A::new)
            && let Some(rest) = Span::inclusive(hole, left)
        {
            self.insert(rest);
        }
        if let Some(right) = span.last().checked_add(1)
            && let Some(rest) = Span::inclusive(right, last)
        {
            self.insert(rest);
        }
    }

    fn insert(&mut self, span: Span<A>) {
        self.free.insert(span.first(), span.last());
        self.by_len.insert((span.len(), span.first()));
        for (align, ranges) in &mut self.by_aligned {
            ranges.extend(usable(span.first(), span.last(), *align).map(|len| (len, span.first())));
        }
        self.by_phase.iter_mut().for_each(|phases| phases.insert(span.first(), span.last()));
        self.free_bytes += span.len();
    }

    fn remove(&mut self, first: A, last: A) {
        self.free.remove(&first);
        let len = last.bits() - first.bits() + 1;
        self.by_len.remove(&(len, first));
        for (align, ranges) in &mut self.by_aligned {
            if let Some(len) = usable(first, last, *align) {
                ranges.remove(&(len, first));
            }
        }
        self.by_phase.iter_mut().for_each(|phases| phases.remove(first, last));
        self.free_bytes -= len;
    }
}

/// Bytes of a range from its first aligned address on, if it has one.
fn usable<A: Address>(first: A, last: A, align: PageSize) -> Option<u64> {
    let start = first.align_up(align).filter(|start| *start <= last)?;
    (last.bits() - start.bits()).checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Iova;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    const P: u64 = 4096;
    const PAGES: u64 = 64;

    fn span(page: u64, n: u64) -> Span<Iova> {
        Span::new(Iova::new(page * P), n * P).unwrap()
    }

    fn fresh() -> RangeAllocator<Iova> {
        RangeAllocator::new(span(0, PAGES), PageSize::SIZE_4K)
    }

    #[test]
    fn refuses_invalid_requests() {
        let mut a = fresh();
        assert!(matches!(a.allocate(0, PageSize::SIZE_4K), Err(RangeError::BadLength { .. })));
        assert!(matches!(a.allocate(1, PageSize::SIZE_4K), Err(RangeError::BadLength { .. })));
        assert!(matches!(a.allocate(1 << 40, PageSize::SIZE_4K), Err(RangeError::Exhausted { .. })));
        assert!(matches!(a.free(span(0, 1)), Err(RangeError::NotAllocated(_))));
        assert!(matches!(a.free(span(PAGES, 1)), Err(RangeError::NotAllocated(_))), "outside");
        a.reserve(span(3, 2)).unwrap();
        assert_eq!(a.reserve(span(2, 2)), Err(RangeError::NotFree(span(2, 2))));
        assert_eq!(a.free(span(3, 3)), Err(RangeError::NotAllocated(span(3, 3))));
        assert_eq!(a.free_bytes(), (PAGES - 2) * P);
    }

    #[test]
    fn reaches_the_top_of_the_space() {
        let top = Span::inclusive(Iova::new(0xffff_ffff_ffff_0000), Iova::new(u64::MAX)).unwrap();
        let mut a = RangeAllocator::new(top, PageSize::SIZE_4K);
        assert_eq!(a.allocate(0x1_0000, PageSize::SIZE_64K), Ok(top));
        a.free(top).unwrap();
        assert_eq!(a.largest_free(), 0x1_0000);
        // a space that ends in the middle of a page
        let odd = Span::new(Iova::new(1), 3 * P).unwrap();
        assert_eq!(RangeAllocator::new(odd, PageSize::SIZE_4K).free_bytes(), 2 * P);
        let none = Span::new(Iova::new(1), 17).unwrap();
        assert_eq!(RangeAllocator::new(none, PageSize::SIZE_4K).free_bytes(), 0);
    }

    #[test]
    fn excludes_what_is_free_of_every_page_touched() {
        let mut a = fresh();
        a.reserve(span(3, 2)).unwrap();
        let some = |first, last| Span::inclusive(Iova::new(first), Iova::new(last)).unwrap();
        assert_eq!(a.exclude(some(2 * P + 5, 5 * P)), [span(5, 1), span(2, 1)], "part of a page is a page");
        assert_eq!(a.exclude(some(2 * P, 5 * P)), []);
        assert_eq!(a.exclude(some((PAGES - 1) * P + 1, u64::MAX)), [span(PAGES - 1, 1)], "clipped");
        assert_eq!(a.exclude(some(PAGES * P, u64::MAX)), [], "outside");
        assert_eq!(a.free_bytes(), (PAGES - 5) * P);
        let top = Span::inclusive(Iova::new(P), Iova::new(u64::MAX)).unwrap();
        let mut a = RangeAllocator::new(top, PageSize::SIZE_4K);
        assert_eq!(a.exclude(some(0, u64::MAX - 1)), [top]);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(u64, u8),
        AllocateAt(u64, u8, u64),
        Reserve(u64, u64),
        Free(prop::sample::Index),
        FreeAny(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (1u64..9, 12u8..15).prop_map(|(n, a)| Op::Allocate(n, a)),
            (1u64..9, 12u8..16, 0u64..20).prop_map(|(n, a, p)| Op::AllocateAt(n, a, p)),
            (0u64..PAGES, 1u64..5).prop_map(|(p, n)| Op::Reserve(p, n)),
            any::<prop::sample::Index>().prop_map(Op::Free),
            (0u64..PAGES, 1u64..9).prop_map(|(p, n)| Op::FreeAny(p, n)),
        ]
    }

    /// Holes that are long enough and not aligned are not looked at one by one.
    #[test]
    fn unaligned_holes_do_not_count() {
        const HOLES: u64 = 20_000;
        let block = PageSize::SIZE_2M.bytes();
        let mut a = RangeAllocator::new(Span::new(Iova::new(0), 2 * HOLES * block).unwrap(), PageSize::SIZE_4K);
        // Of every 4 MiB the first page and the last: no hole has 2 MiB behind an aligned start.
        for n in 0..HOLES {
            a.reserve(Span::new(Iova::new(2 * n * block), P).unwrap()).unwrap();
            a.reserve(Span::new(Iova::new(2 * (n + 1) * block - P), P).unwrap()).unwrap();
        }
        // Asked as often as there are holes: linear time for each would take minutes.
        for _ in 0..HOLES {
            assert!(a.allocate(block, PageSize::SIZE_2M).is_err());
        }
        let behind = a.allocate_at(block, PageSize::SIZE_2M, P).unwrap();
        assert_eq!(behind.first().bits() % block, P);
        a.free(Span::new(Iova::new(42 * block), P).unwrap()).unwrap();
        assert_eq!(a.allocate(block, PageSize::SIZE_2M).unwrap().first().bits(), 42 * block);
    }

    /// Nor are those that have no room at a phase, in any order of their starts.
    #[test]
    fn holes_without_the_phase_do_not_count() {
        const HOLES: u64 = 20_000;
        let block = PageSize::SIZE_2M.bytes();
        let mut a = RangeAllocator::new(Span::new(Iova::new(0), HOLES * block).unwrap(), PageSize::SIZE_4K);
        // Of every 2 MiB one page of the first half: between them, 352 or 608 pages are free.
        let place = |n: u64| n * block + (n * 97 % 256 + 1) * P;
        for n in 0..HOLES {
            a.reserve(Span::new(Iova::new(place(n)), P).unwrap()).unwrap();
        }
        for n in 0..HOLES {
            let refused = a.allocate_at(600 * P, PageSize::SIZE_2M, 300 * P);
            assert!(matches!(refused, Err(RangeError::Exhausted { .. })), "{refused:?}");
            // The hole behind that page has exactly this, and no other one begins as near.
            let phase = (place(n) + P) % block;
            let got = a.allocate_at(block / 2, PageSize::SIZE_2M, phase).unwrap();
            assert_eq!(got.first().bits() % block, phase);
            a.free(got).unwrap();
        }
    }

    proptest! {
        /// The reference is one bit per page.
        #[test]
        fn agrees_with_a_bitmap(ops in prop::collection::vec(op(), 1..200)) {
            let mut a = fresh();
            let mut taken = [false; PAGES as usize];
            let mut held: Vec<Span<Iova>> = Vec::new();
            for op in ops {
                match op {
                    Op::Allocate(n, log2) => {
                        let align = PageSize::from_log2(log2).unwrap();
                        let step = (align.bytes() / P) as usize;
                        let fits = (0..PAGES as usize).step_by(step).any(|p| {
                            p + n as usize <= PAGES as usize && !taken[p..p + n as usize].contains(&true)
                        });
                        let got = a.allocate(n * P, align);
                        prop_assert_eq!(got.is_ok(), fits);
                        if let Ok(s) = got {
                            prop_assert!(s.first().is_aligned(align) && s.len() == n * P);
                            let p = (s.first().bits() / P) as usize;
                            for t in &mut taken[p..p + n as usize] {
                                prop_assert!(!*t);
                                *t = true;
                            }
                            held.push(s);
                        }
                    }
                    Op::AllocateAt(n, log2, phase) => {
                        let align = PageSize::from_log2(log2).unwrap();
                        let pages = (align.bytes() / P) as usize;
                        let fits = (phase as usize % pages..PAGES as usize).step_by(pages).any(|p| {
                            p + n as usize <= PAGES as usize && !taken[p..p + n as usize].contains(&true)
                        });
                        let got = a.allocate_at(n * P, align, phase * P);
                        prop_assert_eq!(got.is_ok(), fits);
                        if let Ok(s) = got {
                            prop_assert_eq!((s.first().bits() / P) % pages as u64, phase % pages as u64);
                            let p = (s.first().bits() / P) as usize;
                            for t in &mut taken[p..p + n as usize] {
                                prop_assert!(!*t);
                                *t = true;
                            }
                            held.push(s);
                        }
                    }
                    Op::Reserve(p, n) => {
                        let end = (p + n).min(PAGES);
                        let ok = p + n <= PAGES && !taken[p as usize..end as usize].contains(&true);
                        prop_assert_eq!(a.reserve(span(p, n)).is_ok(), ok);
                        if ok {
                            taken[p as usize..end as usize].fill(true);
                            held.push(span(p, n));
                        }
                    }
                    Op::Free(_) if held.is_empty() => {}
                    Op::Free(i) => {
                        let s = held.swap_remove(i.index(held.len()));
                        let p = (s.first().bits() / P) as usize;
                        let n = (s.len() / P) as usize;
                        let ok = !taken[p..p + n].contains(&false);
                        prop_assert_eq!(a.free(s).is_ok(), ok);
                        if ok { taken[p..p + n].fill(false); }
                    }
                    Op::FreeAny(p, n) => {
                        let end = (p + n).min(PAGES);
                        let ok = p + n <= PAGES && !taken[p as usize..end as usize].contains(&false);
                        prop_assert_eq!(a.free(span(p, n)).is_ok(), ok);
                        if ok { taken[p as usize..end as usize].fill(false); }
                    }
                }
                let free = taken.iter().filter(|t| !**t).count() as u64 * P;
                prop_assert_eq!(a.free_bytes(), free);
                let ranges: Vec<_> = a.free_ranges().collect();
                prop_assert!(ranges.windows(2).all(|w| w[0].last().bits() + 1 < w[1].first().bits()), "merged");
                prop_assert_eq!(a.largest_free(), ranges.iter().map(|r| r.len()).max().unwrap_or(0));
            }
        }
    }
}
