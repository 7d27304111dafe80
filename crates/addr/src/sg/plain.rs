//! The plain forms of an index: a handful of segments in place, or a delta for every page.

use alloc::vec::Vec;

use super::rank::Delta;

/// Segments that an index holds without a heap.
pub(super) const IN_PLACE: usize = 4;

/// A handful of segments, found by comparing with all of them.
#[derive(Clone, Debug)]
pub(super) struct InPlace {
    /// The offset behind each segment; the highest number where there is no segment.
    ends: [u64; IN_PLACE],
    /// Address less offset, modulo 2^64.
    deltas: [u64; IN_PLACE],
}

impl InPlace {
    /// The index of up to [`IN_PLACE`] segments, each as (start in the buffer, address), of `len` bytes in all.
    pub(super) fn new(segments: impl Iterator<Item = (u64, u64)>, len: u64) -> Self {
        let mut new = Self { ends: [u64::MAX; IN_PLACE], deltas: [0; IN_PLACE] };
        for (i, (start, addr)) in segments.take(IN_PLACE).enumerate() {
            if i > 0 {
                new.ends[i - 1] = start;
            }
            new.ends[i] = len;
            new.deltas[i] = addr.wrapping_sub(start);
        }
        new
    }

    /// The address of the byte at `offset`, which lies within the buffer, and the offset behind its segment.
    #[inline]
    pub(super) fn segment(&self, offset: u64) -> (u64, u64) {
        let at: usize = self.ends[..IN_PLACE - 1].iter().map(|&end| usize::from(end <= offset)).sum();
        (self.deltas[at].wrapping_add(offset), self.ends[at])
    }
}

/// A delta for every page, for buffers made of single pages: one load.
#[derive(Clone, Debug)]
pub(super) struct Flat {
    deltas: Vec<u32>,
    base: u64,
}

impl Flat {
    /// The index of segments, each as (start in the buffer, address, bytes), over `pages` pages; `None` without memory.
    pub(super) fn new(
        segments: impl Iterator<Item = (u64, u64, u64)>,
        base: u64,
        shift: u32,
        pages: u32,
    ) -> Option<Self> {
        let mut deltas = Vec::new();
        deltas.try_reserve_exact(pages as usize).ok()?;
        for (start, addr, len) in segments {
            // The last page of all may be cut short.
            let end = deltas.len() + len.div_ceil(1 << shift) as usize;
            deltas.resize(end, u32::of(start, addr, base, shift));
        }
        Some(Self { deltas, base })
    }

    /// The address of the byte at `offset`, which lies within the buffer.
    #[inline]
    pub(super) fn address(&self, offset: u64, shift: u32) -> Option<u64> {
        self.deltas.get((offset >> shift) as usize).map(|d| d.address(offset, self.base, shift))
    }

    /// The address of the byte at `offset`, and the page behind its segment, which is looked for page by page: this
    /// form is for short segments.
    #[inline]
    pub(super) fn segment(&self, offset: u64, shift: u32) -> Option<(u64, u64)> {
        let page = (offset >> shift) as usize;
        let delta = self.deltas.get(page)?;
        let mut end = page + 1;
        while self.deltas.get(end) == Some(delta) {
            end += 1;
        }
        Some((delta.address(offset, self.base, shift), end as u64))
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.deltas.capacity() * size_of::<u32>()
    }
}
