//! A range of addresses that may reach the top of its space.

use core::fmt;

use crate::{Address, PageSize};

/// A non-empty range of addresses, stored as its first and its *last* address.
///
/// With an inclusive last address a span can end at the top of the space and can never wrap. The one range that is
/// refused is all 2^64 addresses at once, so that [`Span::len`] fits 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span<A> {
    first: A,
    last: A,
}

impl<A: Address> Span<A> {
    /// The span of `len` bytes from `first`, or `None` when it is empty or would wrap.
    pub fn new(first: A, len: u64) -> Option<Self> {
        let last = first.checked_add(len.checked_sub(1)?)?;
        Some(Self { first, last })
    }

    /// The span from `first` to `last`, both included; `None` when `last` lies below `first`, and for the whole
    /// space.
    pub fn inclusive(first: A, last: A) -> Option<Self> {
        let distance = last.offset_from(first)?;
        distance.checked_add(1)?;
        Some(Self { first, last })
    }

    /// The first address.
    pub fn first(&self) -> A {
        self.first
    }

    /// The last address (inclusive).
    pub fn last(&self) -> A {
        self.last
    }

    /// Bytes, at least one.
    #[allow(clippy::len_without_is_empty)] // a span is never empty
    pub fn len(&self) -> u64 {
        self.last.bits() - self.first.bits() + 1
    }

    /// True when `addr` lies within.
    pub fn contains(&self, addr: A) -> bool {
        self.first <= addr && addr <= self.last
    }

    /// True when every address of `other` lies within.
    pub fn covers(&self, other: &Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// The addresses in both spans.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        Self::inclusive(self.first.max(other.first), self.last.min(other.last))
    }

    /// The sub-span of `len` bytes at `offset`; `None` unless it is non-empty and within the span.
    pub fn sub(&self, offset: u64, len: u64) -> Option<Self> {
        let sub = Self::new(self.first.checked_add(offset)?, len)?;
        self.covers(&sub).then_some(sub)
    }

    /// True when both ends are page boundaries.
    pub fn is_aligned(&self, page: PageSize) -> bool {
        self.first.is_aligned(page) && self.len() & (page.bytes() - 1) == 0
    }
}

impl<A: Address> fmt::Display for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x}..={:#x}", A::SPACE, self.first, self.last)
    }
}

impl<A: Address> fmt::Debug for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Iova;

    #[test]
    fn edges() {
        let at = Iova::new;
        assert_eq!(Span::new(at(0), 0), None);
        assert_eq!(Span::new(at(u64::MAX), 2), None);
        assert_eq!(Span::inclusive(at(0), at(u64::MAX)), None, "the whole space");
        assert_eq!(Span::inclusive(at(1), at(0)), None);
        let top = Span::new(at(u64::MAX), 1).unwrap();
        assert_eq!((top.len(), top.last()), (1, at(u64::MAX)));
        let s = Span::new(at(0x1000), 0x3000).unwrap();
        assert!(s.is_aligned(PageSize::SIZE_4K) && !s.is_aligned(PageSize::SIZE_2M));
        assert_eq!(s.sub(0x1000, 0x1000), Span::new(at(0x2000), 0x1000));
        assert_eq!(s.sub(0x2000, 0x1001), None);
        assert_eq!(s.sub(u64::MAX, 1), None);
        assert_eq!(s.intersect(&Span::new(at(0x3fff), 9).unwrap()), Span::new(at(0x3fff), 1));
        assert_eq!(s.intersect(&top), None);
    }
}
