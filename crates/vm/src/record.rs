//! One word that says what a page, or a larger part of the address space, is bound to.

use dmalane_addr::Access;

/// Target of the pages of one entry of the tree: the slot of a buffer object, the page of it that the first of them
/// shows, and the rights of the device.
///
/// Bits 0 to 31: page of the buffer; 32 to 55: slot; 56 to 61: access; 62: fixed; 63: set. So a word of a tree can also
/// be 0 for nothing, or a number below 2^63 for a node one level down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record(u64);

impl Record {
    /// Slots that fit.
    pub(crate) const MAX_SLOTS: usize = 1 << 24;
    /// Pages of a buffer that fit: one less than the bits hold, so that the page after the last one is a number too.
    pub(crate) const MAX_PAGES: u64 = u32::MAX as u64;

    const FIXED: u64 = 1 << 62;
    const SET: u64 = 1 << 63;

    /// `slot` is below [`MAX_SLOTS`](Self::MAX_SLOTS) and `page` below [`MAX_PAGES`](Self::MAX_PAGES). `fixed` for what
    /// repeats: every page of the entry carries the same record.
    pub(crate) const fn new(slot: u32, page: u64, access: Access, fixed: bool) -> Self {
        debug_assert!((slot as usize) < Self::MAX_SLOTS && page < Self::MAX_PAGES);
        let fixed = if fixed { Self::FIXED } else { 0 };
        Self(Self::SET | fixed | (access.bits() as u64) << 56 | (slot as u64) << 32 | page)
    }

    /// The record in a word of the tree, if it is one.
    #[inline]
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        (word & Self::SET != 0).then_some(Self(word))
    }

    #[inline]
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn slot(self) -> u32 {
        (self.0 >> 32) as u32 & (Self::MAX_SLOTS - 1) as u32
    }

    #[inline]
    pub(crate) fn page(self) -> u64 {
        self.0 & u64::from(u32::MAX)
    }

    #[inline]
    pub(crate) fn access(self) -> Access {
        Access::from_bits_truncate((self.0 >> 56) as u8 & 0x3f)
    }

    #[inline]
    pub(crate) fn is_fixed(self) -> bool {
        self.0 & Self::FIXED != 0
    }

    /// True when records, whose words were compared by "exclusive or", are all of one slot with the same access.
    #[inline]
    pub(crate) fn is_of_one_slot(differs: u64) -> bool {
        differs >> 32 == 0
    }

    /// Increment of the word from a page to the next.
    #[inline]
    pub(crate) fn step(self) -> u64 {
        u64::from(!self.is_fixed())
    }

    /// The same for another page of the buffer.
    #[inline]
    pub(crate) fn at(self, page: u64) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | page)
    }

    /// The record some pages further up in the same binding.
    #[inline]
    pub(crate) fn advance(self, pages: u64) -> Self {
        Self(self.0 + pages * self.step())
    }
}
