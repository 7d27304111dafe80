//! Page sizes, and sets of them.

use core::fmt;

/// A page size: a power of two, stored as its logarithm.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(u8);

impl PageSize {
    /// 4 KiB.
    pub const SIZE_4K: Self = Self(12);
    /// 16 KiB.
    pub const SIZE_16K: Self = Self(14);
    /// 64 KiB.
    pub const SIZE_64K: Self = Self(16);
    /// 2 MiB.
    pub const SIZE_2M: Self = Self(21);
    /// 1 GiB.
    pub const SIZE_1G: Self = Self(30);

    /// The page size of `bytes`, or `None` unless that is a power of two.
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes.trailing_zeros() as u8)) } else { None }
    }

    /// The page size of 2^`log2` bytes, or `None` from 64 up.
    pub const fn from_log2(log2: u8) -> Option<Self> {
        if log2 < 64 { Some(Self(log2)) } else { None }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// The logarithm of the size.
    pub const fn log2(self) -> u8 {
        self.0
    }

    /// `bytes` rounded up to whole pages, or `None` when that exceeds 64 bits.
    pub const fn round_up(self, bytes: u64) -> Option<u64> {
        let mask = self.bytes() - 1;
        match bytes.checked_add(mask) {
            Some(b) => Some(b & !mask),
            None => None,
        }
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, shift) = match self.0 {
            0..10 => ("B", 0),
            10..20 => ("KiB", 10),
            20..30 => ("MiB", 20),
            30..40 => ("GiB", 30),
            _ => ("TiB", 40),
        };
        write!(f, "{} {unit}", 1u64 << (self.0 - shift))
    }
}

impl fmt::Debug for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSize({self})")
    }
}

/// A set of page sizes, as the bitmap that IOMMU drivers use (bit n stands for 2^n bytes).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageSizes(u64);

impl PageSizes {
    /// The set with these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bitmap.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The set with `page` added.
    pub const fn with(self, page: PageSize) -> Self {
        Self(self.0 | page.bytes())
    }

    /// True when `page` is in the set.
    pub const fn contains(self, page: PageSize) -> bool {
        self.0 & page.bytes() != 0
    }

    /// The smallest size of the set.
    pub const fn smallest(self) -> Option<PageSize> {
        if self.0 == 0 { None } else { Some(PageSize(self.0.trailing_zeros() as u8)) }
    }

    /// The largest size of which a whole, aligned page lies in the `len` bytes from `start` on.
    ///
    /// ```
    /// use dmalane_addr::{PageSize, PageSizes};
    /// let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    /// assert_eq!(sizes.largest_within(4096, 2 << 30), Some(PageSize::SIZE_1G));
    /// assert_eq!(sizes.largest_within(4096, 1 << 30), Some(PageSize::SIZE_2M));
    /// ```
    pub fn largest_within(self, start: u64, len: u64) -> Option<PageSize> {
        let holds_one = |page: &PageSize| {
            let first = page.round_up(start)?.checked_sub(start)?;
            first.checked_add(page.bytes()).filter(|end| *end <= len)
        };
        self.iter().rev().find(|page| holds_one(page).is_some())
    }

    /// The sizes, smallest first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PageSize> {
        (0..64u8).filter(move |n| self.0 >> n & 1 == 1).map(PageSize)
    }
}

impl fmt::Debug for PageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    const X86: PageSizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);

    #[test]
    fn names() {
        assert_eq!(PageSize::SIZE_4K.to_string(), "4 KiB");
        assert_eq!(PageSize::SIZE_2M.to_string(), "2 MiB");
        assert_eq!(PageSize::new(3), None);
        assert_eq!(PageSize::from_log2(64), None);
        assert_eq!(PageSize::SIZE_4K.round_up(u64::MAX), None);
        assert_eq!(PageSize::SIZE_4K.round_up(1), Some(4096));
    }

    proptest! {
        #[test]
        fn largest_within_agrees_with_trying_each(start in 0u64..1 << 40, len: u64, shift in 0u32..64) {
            let len = len >> shift;
            let slow = X86.iter().rev().find(|p| {
                let first = start.div_ceil(p.bytes()) * p.bytes();
                u128::from(first) + u128::from(p.bytes()) <= u128::from(start) + u128::from(len)
            });
            prop_assert_eq!(X86.largest_within(start, len), slow);
        }
    }
}
