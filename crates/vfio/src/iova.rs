//! The IOVAs of an IOMMU: which there are, and which are free.

use dmalane_addr::{Address, Iova, Lease, PageSize, PageSizes, RangeAllocator, RangeCache, Span};

use crate::{Error, sys};

/// The IOVAs of an IOMMU; unknown before its first group is attached.
#[derive(Default)]
pub(crate) struct Iovas(Option<Space>);

struct Space {
    iovas: RangeCache<Iova>,
    ranges: Vec<Span<Iova>>,
    /// The IOMMU's smallest page.
    page: PageSize,
}

impl Iovas {
    /// The IOMMU's smallest page.
    pub(crate) fn page(&self) -> PageSize {
        self.0.as_ref().map_or(PageSize::SIZE_4K, |space| space.page)
    }

    /// The IOVAs to which memory can be mapped, lowest first.
    pub(crate) fn ranges(&self) -> Vec<Span<Iova>> {
        self.0.as_ref().map_or(Vec::new(), |space| space.ranges.clone())
    }

    /// True until the first update.
    pub(crate) fn is_unknown(&self) -> bool {
        self.0.is_none()
    }

    /// Updates the IOVAs and the page size of the IOMMU, which another group may have reduced.
    pub(crate) fn update(&mut self, info: sys::IommuInfo) {
        let page = PageSize::new(info.page).unwrap_or(PageSize::SIZE_4K);
        let ranges = match info.ranges.is_empty() {
            // Kernels before 5.4 do not report ranges. Every machine has the first 4 GiB without the window of the
            // interrupts.
            true => [(page.bytes(), 0xfedf_ffff), (0xfef0_0000, 0xffff_ffff)]
                .iter()
                .filter_map(|(first, last)| Span::inclusive(Iova::new(*first), Iova::new(*last)))
                .collect(),
            false => info.ranges,
        };
        let iovas = match self.0.take() {
            Some(space) => {
                let mut iovas = space.iovas;
                for hole in space.ranges.iter().flat_map(|old| holes(*old, &ranges)) {
                    // Fails where something is mapped; then the kernel would have refused the group.
                    let _reserved_permanently = iovas.reserve(hole);
                }
                iovas
            }
            None => {
                // Without the page at 0: drivers and devices use 0 as "no address".
                let first = ranges.iter().map(|r| r.first().bits()).min().unwrap_or(0).max(page.bytes());
                let last = ranges.iter().map(|r| r.last().bits()).max().unwrap_or(u64::MAX);
                let space = Span::inclusive(Iova::new(first), Iova::new(last.max(first)));
                let space = space.expect("the first is not behind the last");
                let mut iovas = RangeAllocator::new(space, page);
                for hole in holes(space, &ranges) {
                    let _reserved_permanently = iovas.reserve(widen(hole, page));
                }
                RangeCache::new(iovas)
            }
        };
        self.0 = Some(Space { iovas, ranges, page });
    }

    /// Allocates IOVAs for `len` bytes of memory or of a BAR at `place`, congruent with it up to the largest page of
    /// which one fits, so that the IOMMU can use pages as large as those of the memory.
    pub(crate) fn allocate(&mut self, place: u64, len: u64) -> Result<Lease<Iova>, Error> {
        let space = self.0.as_mut().ok_or(Error::NoType1)?;
        let page = space.page;
        // IOMMUs have page sizes of their own, so any power of two is one here.
        let align = PageSizes::from_bits(u64::MAX >> 33).largest_within(place, len).map_or(page, |fits| fits.max(page));
        let phase = place & (align.bytes() - 1) & !(page.bytes() - 1);
        // Not congruent rather than not at all.
        Ok(space.iovas.allocate_at(len, align, phase).or_else(|_| space.iovas.allocate(len, page))?)
    }

    #[cfg(test)]
    pub(crate) fn reserve(&mut self, span: Span<Iova>) -> Result<Lease<Iova>, Error> {
        let space = self.0.as_mut().ok_or(Error::NoType1)?;
        Ok(space.iovas.reserve(span)?)
    }

    pub(crate) fn free(&mut self, lease: Lease<Iova>) {
        if let Some(space) = &mut self.0 {
            space.iovas.free(lease);
        }
    }
}

/// The parts of `span` that no range covers.
fn holes(span: Span<Iova>, ranges: &[Span<Iova>]) -> Vec<Span<Iova>> {
    let mut ranges: Vec<_> = ranges.iter().filter_map(|range| range.intersect(&span)).collect();
    ranges.sort_by_key(Span::first);
    let (mut holes, mut next) = (Vec::new(), Some(span.first()));
    for range in ranges {
        let Some(at) = next else { break };
        if let Some(before) = range.first().bits().checked_sub(1).filter(|before| *before >= at.bits()) {
            holes.extend(Span::inclusive(at, Iova::new(before)));
        }
        next = range.last().checked_add(1).map(|after| after.max(at));
    }
    holes.extend(next.filter(|at| *at <= span.last()).and_then(|at| Span::inclusive(at, span.last())));
    holes
}

/// A span extended to whole pages.
fn widen(span: Span<Iova>, page: PageSize) -> Span<Iova> {
    let last = Iova::new(span.last().bits() | (page.bytes() - 1));
    Span::inclusive(span.first().align_down(page), last).unwrap_or(span)
}

/// Where contiguous addresses must start for the longest of these ranges, (address, length) in their order, to be at
/// its own address.
pub(crate) fn start_of_longest(ranges: impl Iterator<Item = (u64, u64)>) -> u64 {
    let (mut before, mut longest) = (0_u64, (0, 0));
    for (at, len) in ranges {
        if len > longest.1 {
            longest = (at.wrapping_sub(before), len);
        }
        before = before.wrapping_add(len);
    }
    longest.0
}

#[cfg(test)]
mod tests {
    use dmalane_addr::RangeError;

    use super::*;

    fn span(first: u64, last: u64) -> Span<Iova> {
        Span::inclusive(Iova::new(first), Iova::new(last)).unwrap()
    }

    #[test]
    fn holes_between_ranges() {
        let ranges = [span(0, 0xfedf_ffff), span(0xfef0_0000, 0x7f_ffff_ffff)];
        assert_eq!(holes(span(0x1000, 0x7f_ffff_ffff), &ranges), [span(0xfee0_0000, 0xfeef_ffff)]);
        assert_eq!(holes(span(1, u64::MAX), &ranges).len(), 2);
        assert_eq!(holes(span(5, 9), &[]), [span(5, 9)]);
        assert_eq!(holes(span(5, 9), &[span(1, u64::MAX)]), []);
        assert_eq!(holes(span(1, u64::MAX), &[span(9, u64::MAX), span(2, 3), span(3, 5)]), [span(1, 1), span(6, 8)]);
    }

    #[test]
    fn iovas_are_outside_of_holes() {
        let info = |ranges: &[Span<Iova>]| sys::IommuInfo { page: 4096, ranges: ranges.to_vec(), left: None };
        let mut iovas = Iovas::default();
        let ranges = [span(0, 0x7fff), span(0xa000, 0xffff), span(0x10_0800, 0x10_3fff)];
        iovas.update(info(&ranges));
        let mut got = Vec::new();
        while let Ok(lease) = iovas.allocate(0x1000, 0x1000) {
            assert!(ranges.iter().any(|r| r.covers(&lease.span())), "{}", lease.span());
            got.push(lease);
        }
        assert_eq!(got.len(), 7 + 6 + 3, "all but the page at 0 and the partial one");
        assert!(matches!(iovas.reserve(span(0x8000, 0x8fff)), Err(Error::Iova(RangeError::NotFree(_)))));
        // Another group removes a page.
        got.into_iter().for_each(|lease| iovas.free(lease));
        iovas.update(info(&[span(0, 0x7fff), span(0xb000, 0xffff), span(0x10_0800, 0x10_3fff)]));
        let mut count = 0;
        while let Ok(lease) = iovas.allocate(0x1000, 0x1000) {
            assert!(lease.span().first() != Iova::new(0xa000));
            count += 1;
        }
        assert_eq!(count, 7 + 5 + 3);
    }

    #[test]
    fn an_iommu_that_reports_nothing() {
        let mut iovas = Iovas::default();
        assert!(iovas.is_unknown() && iovas.ranges().is_empty() && iovas.page() == PageSize::SIZE_4K);
        assert!(matches!(iovas.allocate(0, 4096), Err(Error::NoType1)));
        assert!(matches!(iovas.reserve(span(0, 4095)), Err(Error::NoType1)));
        // No ranges: the first 4 GiB without the interrupts.
        iovas.update(sys::IommuInfo { page: 4096, ranges: Vec::new(), left: None });
        assert_eq!(iovas.ranges(), [span(0x1000, 0xfedf_ffff), span(0xfef0_0000, 0xffff_ffff)]);
        assert_eq!((iovas.is_unknown(), iovas.page()), (false, PageSize::SIZE_4K));
        assert!(iovas.reserve(span(0xfee0_0000, 0xfee0_0fff)).is_err());
        // Fits, but not where it would be congruent.
        let whole = iovas.allocate(1 << 30, 0xfedf_f000).unwrap();
        assert_eq!(whole.span(), span(0x1000, 0xfedf_ffff));
        iovas.free(whole);
    }

    /// The IOVA and the memory, or the BAR, agree modulo the largest page of which one fits.
    #[test]
    fn iovas_are_congruent_with_what_they_map() {
        let mut iovas = Iovas::default();
        iovas.update(sys::IommuInfo { page: 4096, ranges: vec![span(0, 1 << 39)], left: None });
        for (place, len, log2) in [
            (0x20_0000, 2 << 20, 21),
            (0x4000_0000, 1 << 30, 30),
            (0x4000_0000, 3 << 20, 21),
            (0x1f_f000, (2 << 20) + 0x1000, 21),
            (0x3000, 5 << 20, 21),
            (0x1000, (32 << 30) - 0x1000, 30),
            (0x20_0000, (32 << 30) - (2 << 20), 30),
            (0x5000, 0x1000, 12),
        ] {
            let lease = iovas.allocate(place, len).unwrap();
            let difference = lease.span().first().bits() ^ place;
            assert!(difference.is_multiple_of(1 << log2), "{place:#x} {len:#x}: {}", lease.span());
        }
        // Of a list, the longest range.
        assert_eq!(start_of_longest([(0x5000, 0x1000), (0x40_0000, 0x40_0000), (0, 0x1000)].into_iter()), 0x3f_f000);
    }
}
