//! Buffer objects.

use dmalane_addr::{CardAddr, PageSize, Segment, SgError, SgIndex};

/// A buffer object: card memory that a device program sees through bindings. Bindings hold it by `Arc`, so it lives as
/// long as it is bound anywhere, and every VM that binds it uses the same index of its segments.
#[derive(Debug)]
pub struct Bo {
    id: u64,
    sg: SgIndex<CardAddr>,
    /// The highest address.
    top: u64,
}

impl Bo {
    /// The buffer made of these segments. The id is the caller's and appears in messages.
    ///
    /// Segments need not be whole pages here; a bind that would use one that is not is refused.
    pub fn new(id: u64, sg: SgIndex<CardAddr>) -> Self {
        let last = |s: Segment<CardAddr>| s.addr.bits() + (s.len - 1); // a segment of an index does not wrap
        let top = sg.segments().map(last).max().unwrap_or(0);
        Self { id, sg, top }
    }

    /// The same, with the index made of a list of segments.
    ///
    /// # Errors
    /// Any of [`SgError`].
    pub fn of_segments(
        id: u64,
        segments: impl IntoIterator<Item = Segment<CardAddr>>,
    ) -> Result<Self, SgError<CardAddr>> {
        Ok(Self::new(id, SgIndex::try_new(segments)?))
    }

    /// The id it was made with.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where its bytes are.
    #[inline]
    pub fn sg(&self) -> &SgIndex<CardAddr> {
        &self.sg
    }

    /// Bytes in all.
    #[allow(clippy::len_without_is_empty)] // an empty one is of no use, but nothing depends on it
    #[inline]
    pub fn len(&self) -> u64 {
        self.sg.len()
    }

    /// True when all of it is made of whole pages of this size, fewer than `pages`, at addresses of so many bits.
    #[inline]
    pub(crate) fn is_mappable(&self, granule: PageSize, bits: u32, pages: u64) -> bool {
        let whole = self.sg.granule() >= granule && self.len() & (granule.bytes() - 1) == 0;
        whole && self.top >> bits == 0 && self.len() >> granule.log2() < pages
    }
}
