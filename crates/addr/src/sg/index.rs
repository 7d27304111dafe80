//! The scatter-gather index: any byte of a buffer found in time that does not depend on how many segments there are.

use core::marker::PhantomData;
use core::ops::Range;

use super::buckets::Buckets;
use super::plain::{Flat, IN_PLACE, InPlace};
use super::rank::Rank;
use crate::{Address, PageSize, Segment, SegmentAt, SgError, SgTable};

/// The representation that an [`SgIndex`] chooses for its segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SgKind {
    /// Up to four segments, in the index itself.
    InPlace,
    /// 4 bytes for every granule: for buffers made of single pages.
    Flat,
    /// A bitmap of where segments begin (0.25 bytes a granule), and 4 bytes a segment.
    Rank,
    /// The same with 8 bytes a segment, for segments more than 2^32 granules apart.
    WideRank,
    /// 8 bytes for each of about as many buckets as segments, and at most 16 for each segment that shares a bucket with
    /// several others: for granules below 4 KiB, of which the others would need too many, and for segments of more than
    /// 64 granules on average.
    Buckets,
    /// The same with twice the bytes, for 2^32 granules and more, or segments that are so far apart.
    WideBuckets,
}

/// Single pages up to this mean length are held flat, in sixteenths: there the bitmap costs more than it saves.
const FLAT_MEAN_16THS: u64 = 17;

/// The longest segment, in granules, of a flat index, which finds the end of a segment page by page.
const FLAT_LONGEST: u64 = 16;

/// Segments longer than this on average get no bitmap: it would take more than 16 bytes for each, which is what buckets
/// take, and buckets are faster. (Untrusted segments could demand any amount of memory with it.)
const MOST_PAGES_A_SEGMENT: u64 = 64;

/// The smallest granule that gets a bitmap. From here on it is at most 1/16384 of the buffer.
const RANK_GRANULE: u32 = 12;

/// An immutable list of the segments of a buffer, with an index: finding a byte costs one or two loads, also in a
/// buffer of a million segments.
///
/// Adjacent contiguous segments are merged, as in an [`SgTable`]. Use a table while segments are added or when all of
/// them are walked once; build an index when pages are looked up.
///
/// ```
/// use dmalane_addr::{PageSize, PhysAddr, Segment, SgIndex};
/// let page = |n: u64| Segment { addr: PhysAddr::new(n * 0x4000), len: 0x4000 };
/// let sg = SgIndex::try_new([7, 8, 3, 9].map(page)).unwrap();
/// assert_eq!((sg.len(), sg.segment_count()), (0x10000, 3));
/// let found = sg.segment_at(0x5000).unwrap();
/// assert_eq!((found.addr, found.left), (PhysAddr::new(8 * 0x4000 + 0x1000), 0x3000));
/// assert_eq!(sg.page_at(0xc000, PageSize::SIZE_16K), Some(PhysAddr::new(9 * 0x4000)));
/// assert_eq!(sg.runs(0x4000..0xc000).unwrap().count(), 2);
/// ```
#[derive(Clone, Debug)]
pub struct SgIndex<A> {
    len: u64,
    segments: usize,
    granule: PageSize,
    form: Form,
    space: PhantomData<A>,
}

#[derive(Clone, Debug)]
enum Form {
    InPlace(InPlace),
    Flat(Flat),
    Rank(Rank<u32>),
    WideRank(Rank<u64>),
    Buckets(Buckets<u32>),
    WideBuckets(Buckets<u64>),
}

/// Properties of the segments that decide the representation.
pub(super) struct Survey {
    pub(super) granule: PageSize,
    /// Granules, the last one perhaps cut short.
    pub(super) pages: u64,
    /// Address less start in the buffer: the lowest of all segments, and the highest.
    base: i128,
    highest: i128,
    /// Bytes of the longest segment.
    longest: u64,
}

impl Survey {
    pub(super) fn of<A: Address>(table: &SgTable<A>) -> Self {
        let (mut bits, mut longest) = (0, 0);
        let (mut base, mut highest) = (i128::MAX, i128::MIN);
        for (start, s) in starts(table) {
            let addr = s.addr.bits();
            bits |= start | addr;
            let delta = i128::from(addr) - i128::from(start);
            (base, highest, longest) = (base.min(delta), highest.max(delta), longest.max(s.len));
        }
        // A page size is below 2^64.
        let granule = PageSize::from_log2(bits.trailing_zeros().min(63) as u8).expect("below 64");
        Self { granule, pages: table.len().div_ceil(granule.bytes()), base, highest, longest }
    }

    /// True when the distance of every segment from the lowest, in granules, fits 32 bits.
    pub(super) fn is_near(&self) -> bool {
        let spread = u64::try_from(self.highest - self.base);
        spread.is_ok_and(|bytes| bytes >> self.granule.log2() <= u64::from(u32::MAX))
    }

    fn kind(&self, segments: usize) -> SgKind {
        let shift = u32::from(self.granule.log2());
        let many = self.pages > u64::from(u32::MAX);
        if segments <= IN_PLACE {
            SgKind::InPlace
        } else if shift < RANK_GRANULE || many || self.pages / MOST_PAGES_A_SEGMENT > segments as u64 {
            if many || !self.is_near() { SgKind::WideBuckets } else { SgKind::Buckets }
        } else if !self.is_near() {
            SgKind::WideRank
        } else if 16 * self.pages <= FLAT_MEAN_16THS * segments as u64 && self.longest >> shift <= FLAT_LONGEST {
            SgKind::Flat
        } else {
            SgKind::Rank
        }
    }
}

/// The segments, each with its start in the buffer.
fn starts<A: Address>(table: &SgTable<A>) -> impl ExactSizeIterator<Item = (u64, Segment<A>)> {
    let mut start = 0;
    table.segments().map(move |s| {
        start += s.len;
        (start - s.len, s)
    })
}

impl<A: Address> SgIndex<A> {
    /// Builds the index in one pass over the segments; empty ones are skipped. Needs 16 bytes of temporary memory for
    /// each segment.
    ///
    /// # Errors
    /// Any of [`SgError`].
    pub fn try_new(segments: impl IntoIterator<Item = Segment<A>>) -> Result<Self, SgError<A>> {
        let mut table = SgTable::new();
        for s in segments {
            table.try_push(s.addr, s.len)?;
        }
        Self::from_table(&table)
    }

    /// Builds the index of all segments of a table.
    ///
    /// # Errors
    /// [`SgError::NoMemory`].
    pub fn from_table(table: &SgTable<A>) -> Result<Self, SgError<A>> {
        let survey = Survey::of(table);
        Self::build(table, &survey, survey.kind(table.segment_count()))
    }

    /// Builds the index in the given representation, which must be suitable.
    pub(super) fn build(table: &SgTable<A>, survey: &Survey, kind: SgKind) -> Result<Self, SgError<A>> {
        let shift = u32::from(survey.granule.log2());
        let places = starts(table).map(|(start, s)| (start, s.addr.bits()));
        // Cut to 64 and 32 bits; the forms that use them are chosen where they fit, modulo 2^64.
        let (base, pages) = (survey.base as u64, survey.pages as u32);
        let form = match kind {
            SgKind::InPlace => Some(Form::InPlace(InPlace::new(places, table.len()))),
            SgKind::Flat => {
                let segments = starts(table).map(|(start, s)| (start, s.addr.bits(), s.len));
                Flat::new(segments, base, shift, pages).map(Form::Flat)
            }
            SgKind::Rank => Rank::new(places, base, shift, pages).map(Form::Rank),
            SgKind::WideRank => Rank::new(places, base, shift, pages).map(Form::WideRank),
            SgKind::Buckets => Buckets::new(table, base, shift).map(Form::Buckets),
            SgKind::WideBuckets => Buckets::new(table, base, shift).map(Form::WideBuckets),
        };
        let segments = table.segment_count();
        let form = form.ok_or(SgError::NoMemory { segments })?;
        Ok(Self { len: table.len(), segments, granule: survey.granule, form, space: PhantomData })
    }

    /// Total bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of segments.
    #[inline]
    pub fn segment_count(&self) -> usize {
        self.segments
    }

    /// The largest page size to which all segments are aligned, both in the buffer and in memory. (The last segment may
    /// end anywhere.) An aligned page of this size or smaller never crosses a segment boundary.
    #[inline]
    pub fn granule(&self) -> PageSize {
        self.granule
    }

    /// Bytes of memory used, those of this object included.
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + match &self.form {
                Form::InPlace(_) => 0,
                Form::Flat(f) => f.heap_bytes(),
                Form::Rank(f) => f.heap_bytes(),
                Form::WideRank(f) => f.heap_bytes(),
                Form::Buckets(f) => f.heap_bytes(),
                Form::WideBuckets(f) => f.heap_bytes(),
            }
    }

    /// The representation of the segments.
    #[cfg(test)]
    pub(super) fn kind(&self) -> SgKind {
        match self.form {
            Form::InPlace(_) => SgKind::InPlace,
            Form::Flat(_) => SgKind::Flat,
            Form::Rank(_) => SgKind::Rank,
            Form::WideRank(_) => SgKind::WideRank,
            Form::Buckets(_) => SgKind::Buckets,
            Form::WideBuckets(_) => SgKind::WideBuckets,
        }
    }

    /// The address of the byte at `offset`; `None` beyond the end.
    #[inline]
    pub fn segment_at(&self, offset: u64) -> Option<SegmentAt<A>> {
        if offset >= self.len {
            return None;
        }
        // The forms that matter, to be inlined.
        let (addr, end) = match &self.form {
            Form::Flat(f) => f.segment(offset, self.shift())?,
            Form::Rank(f) => f.segment(offset, self.shift())?,
            Form::Buckets(f) => f.segment(offset, self.shift())?,
            _ => return self.segment_elsewhere(offset),
        };
        Some(SegmentAt { addr: A::new(addr), left: self.bytes_to(end, offset) })
    }

    /// [`segment_at`](Self::segment_at) in the other forms.
    #[inline(never)]
    fn segment_elsewhere(&self, offset: u64) -> Option<SegmentAt<A>> {
        let (addr, page) = match &self.form {
            Form::InPlace(f) => {
                let (addr, end) = f.segment(offset);
                return Some(SegmentAt { addr: A::new(addr), left: end - offset });
            }
            Form::WideRank(f) => f.segment(offset, self.shift())?,
            Form::WideBuckets(f) => f.segment(offset, self.shift())?,
            Form::Flat(_) | Form::Rank(_) | Form::Buckets(_) => return None, // handled by the caller
        };
        Some(SegmentAt { addr: A::new(addr), left: self.bytes_to(page, offset) })
    }

    /// The address of the whole page at `offset`; `None` where it reaches beyond the end or is not contiguous.
    ///
    /// Faster than [`segment_at`](Self::segment_at) for aligned pages up to the [granule](Self::granule), since the end
    /// of the segment is not needed.
    #[inline]
    pub fn page_at(&self, offset: u64, page: PageSize) -> Option<A> {
        if self.len.checked_sub(offset)? < page.bytes() {
            return None;
        }
        if page <= self.granule && offset & (page.bytes() - 1) == 0 {
            // Inlined where a page is bound.
            match &self.form {
                Form::Flat(f) => return f.address(offset, self.shift()).map(A::new),
                Form::Rank(f) => return f.address(offset, self.shift()).map(A::new),
                _ => {}
            }
        }
        self.page_across(offset, page)
    }

    /// As [`page_at`](Self::page_at), for a page that may cross granules or another representation.
    #[inline(never)]
    fn page_across(&self, offset: u64, page: PageSize) -> Option<A> {
        self.segment_at(offset).filter(|s| s.left >= page.bytes()).map(|s| s.addr)
    }

    /// The segments of a sub-range, the first and last cut to fit; `None` when the range is not within the buffer.
    /// An empty range has no runs.
    pub fn runs(&self, range: Range<u64>) -> Option<SgRuns<'_, A>> {
        (range.start <= range.end && range.end <= self.len).then_some(SgRuns { index: self, range })
    }

    /// All segments in order.
    pub fn segments(&self) -> SgRuns<'_, A> {
        SgRuns { index: self, range: 0..self.len }
    }

    /// The address of each page of a sub-range; `None` when the range is not within the buffer, is no multiple of the
    /// page size, or holds a page that is not contiguous. An empty range has no pages.
    ///
    /// When the page is larger than the [granule](Self::granule), this first walks all runs of the range.
    pub fn pages(&self, range: Range<u64>, page: PageSize) -> Option<SgPages<'_, A>> {
        let mask = page.bytes() - 1;
        let mut runs = self.runs(range.clone())?;
        let whole = (range.end - range.start) & mask == 0;
        let within = page <= self.granule && range.start & mask == 0;
        let all = whole && (within || runs.all(|run| run.len & mask == 0));
        all.then_some(SgPages { runs: SgRuns { index: self, range }, run: None, page })
    }

    #[inline]
    fn shift(&self) -> u32 {
        u32::from(self.granule.log2())
    }

    /// Bytes from `offset` to the start of a later page, or to the end of the buffer. (That page may start at 2^64.)
    #[inline]
    fn bytes_to(&self, page: u64, offset: u64) -> u64 {
        (page << self.shift()).wrapping_sub(offset).min(self.len - offset)
    }
}

/// Iterator over the segments of a sub-range, made by [`SgIndex::runs`].
#[derive(Clone, Debug)]
pub struct SgRuns<'a, A> {
    index: &'a SgIndex<A>,
    /// Offsets that are still to come.
    range: Range<u64>,
}

impl<A: Address> Iterator for SgRuns<'_, A> {
    type Item = Segment<A>;

    #[inline]
    fn next(&mut self) -> Option<Segment<A>> {
        if self.range.is_empty() {
            return None;
        }
        let at = self.index.segment_at(self.range.start)?;
        let len = at.left.min(self.range.end - self.range.start);
        self.range.start += len;
        Some(Segment { addr: at.addr, len })
    }
}

/// Iterator over the pages of a sub-range, made by [`SgIndex::pages`].
#[derive(Clone, Debug)]
pub struct SgPages<'a, A> {
    runs: SgRuns<'a, A>,
    /// The rest of the current run, if any.
    run: Option<Segment<A>>,
    page: PageSize,
}

impl<A: Address> Iterator for SgPages<'_, A> {
    type Item = A;

    #[inline]
    fn next(&mut self) -> Option<A> {
        let run = self.run.take().or_else(|| self.runs.next())?;
        let left = run.len.saturating_sub(self.page.bytes());
        // A page follows in the same run, so its address exists.
        let rest = run.addr.checked_add(self.page.bytes()).filter(|_| left > 0);
        self.run = rest.map(|addr| Segment { addr, len: left });
        Some(run.addr)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let bytes = (self.runs.range.end - self.runs.range.start) + self.run.map_or(0, |r| r.len);
        let pages = usize::try_from(bytes / self.page.bytes()).ok();
        (pages.unwrap_or(usize::MAX), pages)
    }
}
