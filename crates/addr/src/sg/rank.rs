//! The rank form of an index: a bitmap of breaks, and where each segment lies.
//!
//! The buffer is cut into granules, here called pages, and 64 of them share a block of 16 bytes. A bit of the block
//! says that another segment begins with that page. The segment of a page is the number of breaks up to it: those
//! before the block, which the block knows, plus a population count. Two loads that depend on each other, the block and
//! the segment, whatever the buffer is made of; 0.25 bytes a page and one delta a segment.

use alloc::vec::Vec;

/// 64 pages. A block never crosses a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(16))]
struct Block {
    /// Bit n: a segment other than the first starts at page n of the block.
    breaks: u64,
    /// Breaks in the blocks before.
    before: u32,
    /// The first page with a break behind this block, or the number of all pages.
    next: u32,
}

/// Difference between a segment's address and its offset in the buffer, the same for all of its bytes.
pub(super) trait Delta: Copy + Into<u64> + TryFrom<u64> {
    /// Two numbers in one word.
    type Pair: Copy + core::fmt::Debug;

    /// The second number in the high half.
    fn pair(self, high: Self) -> Self::Pair;

    /// The reverse of [`pair`](Self::pair).
    fn unpair(pair: Self::Pair) -> (Self, Self);

    /// Of the segment at `start` of the buffer that lies at `addr`; `base` is the lowest of all, modulo 2^64.
    fn of(start: u64, addr: u64, base: u64, shift: u32) -> Self;

    /// The address of the byte at `offset` of the buffer.
    fn address(self, offset: u64, base: u64, shift: u32) -> u64;
}

/// In pages above the lowest: enough while all lie within 2^32 pages of each other.
impl Delta for u32 {
    type Pair = u64;

    #[inline]
    fn pair(self, high: Self) -> u64 {
        u64::from(high) << 32 | u64::from(self)
    }

    #[inline]
    fn unpair(pair: u64) -> (Self, Self) {
        (pair as u32, (pair >> 32) as u32)
    }

    fn of(start: u64, addr: u64, base: u64, shift: u32) -> Self {
        (addr.wrapping_sub(start).wrapping_sub(base) >> shift) as u32
    }

    #[inline]
    fn address(self, offset: u64, base: u64, shift: u32) -> u64 {
        base.wrapping_add(u64::from(self) << shift).wrapping_add(offset)
    }
}

/// In bytes: always enough.
impl Delta for u64 {
    type Pair = u128;

    #[inline]
    fn pair(self, high: Self) -> u128 {
        u128::from(high) << 64 | u128::from(self)
    }

    #[inline]
    fn unpair(pair: u128) -> (Self, Self) {
        (pair as u64, (pair >> 64) as u64)
    }

    fn of(start: u64, addr: u64, _: u64, _: u32) -> Self {
        addr.wrapping_sub(start)
    }

    #[inline]
    fn address(self, offset: u64, _: u64, _: u32) -> u64 {
        self.wrapping_add(offset)
    }
}

/// The form itself.
#[derive(Clone, Debug)]
pub(super) struct Rank<D> {
    blocks: Vec<Block>,
    /// One a segment.
    deltas: Vec<D>,
    base: u64,
}

impl<D: Delta> Rank<D> {
    /// The index of segments, each as (start in the buffer, address), over `pages` pages; `None` without memory.
    pub(super) fn new(
        segments: impl ExactSizeIterator<Item = (u64, u64)>,
        base: u64,
        shift: u32,
        pages: u32,
    ) -> Option<Self> {
        let (mut blocks, mut deltas) = (Vec::new(), Vec::new());
        let count = pages.div_ceil(64) as usize;
        blocks.try_reserve_exact(count).ok()?;
        deltas.try_reserve_exact(segments.len()).ok()?;
        blocks.resize(count, Block { breaks: 0, before: 0, next: pages });
        for (start, addr) in segments {
            deltas.push(D::of(start, addr, base, shift));
            let page = start >> shift;
            if page > 0 {
                blocks[(page / 64) as usize].breaks |= 1 << (page % 64);
            }
        }
        let mut before = 0;
        for block in &mut blocks {
            block.before = before;
            before += block.breaks.count_ones();
        }
        let mut next = pages;
        for (i, block) in blocks.iter_mut().enumerate().rev() {
            block.next = next;
            if block.breaks != 0 {
                next = i as u32 * 64 + block.breaks.trailing_zeros();
            }
        }
        Some(Self { blocks, deltas, base })
    }

    /// The address of the byte at `offset`, which lies within the buffer.
    #[inline(always)] // a few instructions for each page that is bound
    pub(super) fn address(&self, offset: u64, shift: u32) -> Option<u64> {
        let page = (offset >> shift) as u32;
        let block = self.blocks.get((page / 64) as usize)?;
        self.delta(block, page).map(|d| d.address(offset, self.base, shift))
    }

    /// The address of the byte at `offset`, and the page behind its segment.
    #[inline]
    pub(super) fn segment(&self, offset: u64, shift: u32) -> Option<(u64, u64)> {
        let page = (offset >> shift) as u32;
        let block = self.blocks.get((page / 64) as usize)?;
        let above = block.breaks >> (page % 64) >> 1;
        let end = if above == 0 { block.next } else { page + 1 + above.trailing_zeros() };
        self.delta(block, page).map(|d| (d.address(offset, self.base, shift), u64::from(end)))
    }

    #[inline]
    fn delta(&self, block: &Block, page: u32) -> Option<D> {
        let up_to = (2u64 << (page % 64)).wrapping_sub(1);
        let segment = block.before + (block.breaks & up_to).count_ones();
        self.deltas.get(segment as usize).copied()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>() + self.deltas.capacity() * size_of::<D>()
    }
}
