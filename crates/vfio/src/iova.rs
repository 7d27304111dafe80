//! The IOVAs of an IOMMU: which there are, and which are free.

use dmalane_addr::{Address, Iova, Lease, PageSize, PageSizes, RangeAllocator, RangeCache, RangeError, Span};

use crate::{Error, sys};

/// The IOVAs of an IOMMU; unknown before its first group is attached.
#[derive(Default)]
pub(crate) struct Iovas(Option<Space>);

struct Space {
    iovas: RangeCache<Iova>,
    /// Pages outside of the ranges.
    holes: Vec<Lease<Iova>>,
    ranges: Vec<Span<Iova>>,
    /// The IOMMU's smallest page.
    page: PageSize,
}

impl Space {
    /// Takes the page at 0 out, which is mapped only where that is asked for.
    fn exclude_first(&mut self) {
        if let Some(first) = Span::new(Iova::new(0), self.page.bytes()) {
            self.holes.extend(self.iovas.exclude(first));
        }
    }

    /// Takes the pages out that have no whole place in the ranges.
    fn exclude_holes(&mut self, span: Span<Iova>) {
        for hole in holes(span, &self.ranges) {
            self.holes.extend(self.iovas.exclude(widen(hole, self.page)));
        }
    }
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

    /// Updates the IOVAs and the page size of the IOMMU: groups that come reduce them, groups that go give them back.
    /// What is allocated stays so.
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
        // Without the page at 0, below: drivers and devices use 0 as "no address". Without the last one of 64 bits,
        // so that the length has 64 bits.
        let all = Span::inclusive(Iova::new(0), Iova::new(!0xfff - 1)).expect("a constant span");
        let (mut iovas, holes) = match self.0.take() {
            Some(space) => (space.iovas, space.holes),
            None => (RangeCache::new(RangeAllocator::new(all, PageSize::SIZE_4K)), Vec::new()),
        };
        holes.into_iter().for_each(|hole| iovas.free(hole));
        let mut space = Space { iovas, holes: Vec::new(), ranges, page };
        space.exclude_first();
        space.exclude_holes(all);
        self.0 = Some(space);
    }

    /// Allocates IOVAs for `len` bytes of memory or of a BAR at `place`, congruent with it up to the largest page of
    /// which one fits, so that the IOMMU can use pages as large as those of the memory.
    pub(crate) fn allocate(&mut self, place: u64, len: u64) -> Result<Lease<Iova>, Error> {
        let space = self.0.as_mut().ok_or(Error::Unopened)?;
        let page = space.page;
        if !len.is_multiple_of(page.bytes()) {
            return Err(RangeError::BadLength { len, page }.into());
        }
        // IOMMUs have page sizes of their own, so any power of two is one here.
        let align = PageSizes::from_bits(u64::MAX >> 33).largest_within(place, len).map_or(page, |fits| fits.max(page));
        let phase = place & (align.bytes() - 1) & !(page.bytes() - 1);
        // Not congruent rather than not at all.
        Ok(space.iovas.allocate_at(len, align, phase).or_else(|_| space.iovas.allocate(len, page))?)
    }

    /// Takes exactly these IOVAs, be it with the page at 0.
    pub(crate) fn reserve(&mut self, span: Span<Iova>) -> Result<Lease<Iova>, Error> {
        let space = self.0.as_mut().ok_or(Error::Unopened)?;
        if !span.is_aligned(space.page) {
            return Err(RangeError::BadLength { len: span.len(), page: space.page }.into());
        }
        if span.first().bits() == 0 && space.ranges.iter().any(|range| range.covers(&span)) {
            // More than one where leases of smaller pages lay in it.
            for hole in space.holes.extract_if(.., |hole| hole.span().first().bits() < space.page.bytes()) {
                space.iovas.free(hole);
            }
        }
        let taken = space.iovas.reserve(span);
        space.exclude_first(); // where that failed
        Ok(taken?)
    }

    pub(crate) fn free(&mut self, lease: Lease<Iova>) {
        let Some(space) = &mut self.0 else { return };
        let span = lease.span();
        space.iovas.free(lease);
        if span.first().bits() == 0 {
            space.exclude_first();
        }
        if !space.ranges.iter().any(|range| range.covers(&span)) {
            space.exclude_holes(span); // a group that came has taken them meanwhile
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
    fn the_page_at_0_is_mapped_where_that_is_asked_for() {
        let mut iovas = Iovas::default();
        iovas.update(sys::IommuInfo {
            page: 4096,
            ranges: vec![span(0, 0xffff), span(0x2_0000, 0x2_ffff)],
            left: None,
        });
        let guest = iovas.reserve(span(0, 0x3fff)).unwrap();
        assert!(iovas.reserve(span(0, 0xfff)).is_err(), "it is taken");
        assert!(iovas.reserve(span(0x3000, 0x4fff)).is_err(), "part of it is taken");
        let rest = iovas.reserve(span(0x4000, 0xffff)).unwrap();
        assert_eq!(iovas.allocate(0, 0x1_0000).unwrap().span(), span(0x2_0000, 0x2_ffff));
        iovas.free(guest);
        assert_eq!(iovas.allocate(0, 0x3000).unwrap().span(), span(0x1000, 0x3fff), "not without being asked for");
        assert!(iovas.reserve(span(0, 0x1fff)).is_err(), "the second page is taken");
        iovas.free(rest);
        let first = iovas.reserve(span(0, 0xfff)).unwrap();
        iovas.free(first);
        // Not where the IOMMU translates nothing.
        iovas.update(sys::IommuInfo { page: 4096, ranges: vec![span(0x2_0000, 0x2_ffff)], left: None });
        assert!(iovas.reserve(span(0, 0xfff)).is_err());
        assert!(matches!(iovas.reserve(span(0x2_0800, 0x2_17ff)), Err(Error::Iova(RangeError::BadLength { .. }))));
    }

    /// An IOMMU with larger pages comes while some of the first one are taken: later all of it can be had.
    #[test]
    fn the_page_at_0_is_taken_in_pieces() {
        let info = |page| sys::IommuInfo { page, ranges: vec![span(0, 0xf_ffff)], left: None };
        let mut iovas = Iovas::default();
        iovas.update(info(0x1000));
        let [first, third] = [0, 0x2000].map(|at| iovas.reserve(span(at, at | 0xfff)).unwrap());
        iovas.update(info(0x1_0000));
        iovas.free(third);
        iovas.free(first);
        assert_eq!(iovas.reserve(span(0, 0xffff)).unwrap().span(), span(0, 0xffff));
    }

    #[test]
    fn an_iommu_that_reports_nothing() {
        let mut iovas = Iovas::default();
        assert!(iovas.is_unknown() && iovas.ranges().is_empty() && iovas.page() == PageSize::SIZE_4K);
        assert!(matches!(iovas.allocate(0, 4096), Err(Error::Unopened)));
        assert!(matches!(iovas.reserve(span(0, 4095)), Err(Error::Unopened)));
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

    /// Groups come and go while IOVAs are allocated and freed. `DMALANE_IOVA_OPERATIONS` says how often.
    #[test]
    fn random_operations_agree_with_a_model() {
        let operations = std::env::var("DMALANE_IOVA_OPERATIONS").map_or(24_000, |n| n.parse().expect("a number"));
        for (seed, top) in [(1 << 32) - 1, (1 << 39) - 1, (1 << 48) - 1, !0xfff - 1].into_iter().enumerate() {
            Model::new(seed as u64 + 1, top).run(operations / 4);
        }
    }

    /// IOVAs in some windows of the space, and which 4 KiB pages of them may be used.
    struct Model {
        random: u64,
        top: u64,
        iovas: Iovas,
        ranges: Vec<Span<Iova>>,
        page: u64,
        held: Vec<Lease<Iova>>,
        /// How often memory was refused and given.
        results: [usize; 2],
        /// How often what was asked for was.
        reserved: [usize; 2],
    }

    impl Model {
        fn new(seed: u64, top: u64) -> Self {
            let (iovas, ranges) = (Iovas::default(), Vec::new());
            Self { random: seed, top, iovas, ranges, page: 4096, held: Vec::new(), results: [0; 2], reserved: [0; 2] }
        }

        fn random(&mut self, below: u64) -> u64 {
            self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (self.random >> 33) % below
        }

        fn run(&mut self, operations: usize) {
            self.update();
            for _ in 0..operations {
                match self.random(40) {
                    0 => self.update(),
                    20..28 => self.reserve(),
                    1..20 if !self.held.is_empty() => {
                        let at = self.random(self.held.len() as u64) as usize;
                        let lease = self.held.swap_remove(at);
                        self.iovas.free(lease);
                    }
                    _ => self.allocate(),
                }
            }
            let all = self.results.iter().chain(&self.reserved);
            let often = all.clone().all(|n| *n > operations / 50);
            assert!(operations < 1000 || often, "{:?}", all.collect::<Vec<_>>());
        }

        /// Some ranges within three windows of 64 pages, whose ends may lie within pages.
        fn update(&mut self) {
            self.page = 4096 << (2 * (self.random(8) / 3));
            self.ranges.clear();
            for window in self.windows() {
                for _ in 0..1 + self.random(3) {
                    let ends = [(); 2].map(|()| match self.random(3) {
                        0 => self.random(64 << 12),
                        1 => self.random(64) << 12,
                        _ => (64 << 12) - 1,
                    });
                    self.ranges
                        .push(span(window + ends[0].min(ends[1]), (window + ends[0].max(ends[1])).min(self.top)));
                }
            }
            self.iovas.update(sys::IommuInfo { page: self.page, ranges: self.ranges.clone(), left: None });
        }

        /// Where windows of 64 pages start.
        fn windows(&self) -> [u64; 3] {
            [0, 0xfee0_0000 - (32 << 12), self.top - (64 << 12) + 1]
        }

        /// True for IOVAs that ranges cover, and nobody has.
        fn is_free(&self, span: Span<Iova>) -> bool {
            holes(span, &self.ranges).is_empty() && self.held.iter().all(|held| held.span().intersect(&span).is_none())
        }

        /// True for a page of the IOMMU that may be allocated.
        fn is_free_page(&self, page: u64) -> bool {
            page > 0 && Span::new(Iova::new(page), self.page).is_some_and(|page| self.is_free(page))
        }

        /// Of IOVAs that are asked for, all that are free are given, with the page at 0 too if one range has them.
        fn reserve(&mut self) {
            let (window, unaligned) = (self.windows()[self.random(3) as usize], self.random(8) == 0);
            let first = window + (self.random(64) << if unaligned { 11 } else { 12 });
            let first = if unaligned { first } else { first & !(self.page - 1) };
            let Some(span) = Span::new(Iova::new(first), self.page * (1 + self.random(4))) else { return };
            let aligned = first.is_multiple_of(self.page);
            let one = first > 0 || self.ranges.iter().any(|range| range.covers(&span));
            let got = self.iovas.reserve(span);
            self.reserved[usize::from(got.is_ok())] += 1;
            assert_eq!(got.is_ok(), aligned && one && self.is_free(span), "{span} in {:?}: {got:?}", self.ranges);
            if let Ok(lease) = got {
                assert_eq!(lease.span(), span);
                self.held.push(lease);
            }
        }

        fn allocate(&mut self) {
            let (page, place) = (self.page, self.random(64) << 12);
            let len = page * (1 + self.random(6));
            let pages = |at: u64| (0..len / page).map(move |n| at.wrapping_add(n * page));
            let got = self.iovas.allocate(place, len);
            self.results[usize::from(got.is_ok())] += 1;
            match got {
                Ok(lease) => {
                    assert!(lease.span().len() == len && lease.span().first().bits().is_multiple_of(page));
                    assert!(pages(lease.span().first().bits()).all(|page| self.is_free_page(page)), "{}", lease.span());
                    self.held.push(lease);
                }
                Err(_) => {
                    let mut starts = self.ranges.iter().flat_map(|range| {
                        let first = range.first().bits() & !(page - 1);
                        (first..=range.last().bits()).step_by(page as usize)
                    });
                    let fits = starts.find(|at| pages(*at).all(|page| self.is_free_page(page)));
                    assert_eq!(fits, None, "{len:#x} bytes are free in {:?}", self.ranges);
                }
            }
        }
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
