//! One type per address space.

use core::fmt::{Debug, Display, LowerHex};
use core::hash::Hash;

use crate::PageSize;

mod sealed {
    pub trait Sealed {}
}

/// A 64-bit address in one particular space.
///
/// Sealed: a new space is a new type in this crate, so that every crate agrees on the set.
pub trait Address:
    Copy + Eq + Ord + Hash + Debug + Display + LowerHex + Send + Sync + 'static + sealed::Sealed
{
    /// The name of the space in messages ("IOVA").
    const SPACE: &'static str;

    /// The address with these bits.
    fn new(bits: u64) -> Self;

    /// The address as a number.
    fn bits(self) -> u64;

    /// The address plus `bytes`, or `None` past the top of the space.
    fn checked_add(self, bytes: u64) -> Option<Self> {
        self.bits().checked_add(bytes).map(Self::new)
    }

    /// The distance in bytes from `base` up to `self`, or `None` when `self` lies below it.
    fn offset_from(self, base: Self) -> Option<u64> {
        self.bits().checked_sub(base.bits())
    }

    /// True when the address is a multiple of the page size.
    fn is_aligned(self, page: PageSize) -> bool {
        self.bits() & (page.bytes() - 1) == 0
    }

    /// The start of the page that holds the address.
    fn align_down(self, page: PageSize) -> Self {
        Self::new(self.bits() & !(page.bytes() - 1))
    }

    /// The address itself when aligned, else the start of the next page; `None` past the top of the space.
    fn align_up(self, page: PageSize) -> Option<Self> {
        let mask = page.bytes() - 1;
        self.bits().checked_add(mask).map(|b| Self::new(b & !mask))
    }
}

macro_rules! address {
    ($(#[doc = $doc:literal])* $name:ident, $space:literal, $shown:literal) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address with these bits.
            pub const fn new(bits: u64) -> Self {
                Self(bits)
            }

            /// The address as a number.
            pub const fn bits(self) -> u64 {
                self.0
            }
        }

        impl sealed::Sealed for $name {}

        impl Address for $name {
            const SPACE: &'static str = $space;
            fn new(bits: u64) -> Self {
                Self(bits)
            }
            fn bits(self) -> u64 {
                self.0
            }
        }

        impl Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{}({:#x})", stringify!($name), self.0)
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, $shown, $space, self.0)
            }
        }

        impl LowerHex for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                LowerHex::fmt(&self.0, f)
            }
        }
    };
}

address! {
    /// An address of host memory as the memory controller sees it.
    PhysAddr, "physical address", "{} {:#x}"
}
address! {
    /// An IO virtual address: what a device puts on the bus, translated by the IOMMU.
    Iova, "IOVA", "{} {:#x}"
}
address! {
    /// A device virtual address: what a program on the device uses, translated by the device's own MMU.
    DeviceVa, "device VA", "{} {:#x}"
}
address! {
    /// An address of the card's own memory (DDR or HBM).
    CardAddr, "card address", "{} {:#x}"
}
address! {
    /// A byte position in a file.
    FileOffset, "file offset", "{} {}"
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn arithmetic_stops_at_the_top_of_the_space() {
        let top = Iova::new(u64::MAX);
        assert_eq!(top.checked_add(1), None);
        assert_eq!(top.checked_add(0), Some(top));
        assert_eq!(top.align_up(PageSize::SIZE_4K), None);
        assert_eq!(top.align_down(PageSize::SIZE_4K), Iova::new(!0xfff));
        assert_eq!(Iova::new(1).offset_from(Iova::new(2)), None);
    }

    #[test]
    fn messages_name_the_space() {
        assert_eq!(Iova::new(0x1000).to_string(), "IOVA 0x1000");
        assert_eq!(alloc::format!("{:?}", CardAddr::new(16)), "CardAddr(0x10)");
    }
}
