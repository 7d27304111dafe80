//! One type per address space.

use core::fmt::{Debug, Display, LowerHex};
use core::hash::Hash;

use crate::PageSize;

/// A 64-bit address in one particular space.
///
/// A space of one's own, such as a kernel's virtual addresses, is one line of [`address!`](crate::address!). Types of
/// one's own are ordered as their [`bits`](Self::bits), and [`new`](Self::new) of these gives the same address.
pub trait Address: Copy + Eq + Ord + Hash + Debug + Display + LowerHex + Send + Sync + 'static {
    /// The name of the space in messages ("IOVA").
    const SPACE: &'static str;

    /// The address with these bits.
    fn new(bits: u64) -> Self;

    /// The address as a number.
    fn bits(self) -> u64;

    /// The address as people write it, where that is not [`bits`](Self::bits).
    fn shown(self) -> u64 {
        self.bits()
    }

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

/// Makes a type for addresses of one space: its documentation, visibility, name, and the name of the space in messages.
///
/// With a number of bits, addresses are sign-extended from it as processors want them (*canonical*): page tables get
/// the lower bits, people see all 64. The lower bits alone are the same address: `0x8000_0000_1000` below. Any other
/// address stays as it is, and page tables refuse it. No range reaches across the hole in the middle.
///
/// ```
/// use dmalane_addr::{Address, address};
/// address! {
///     /// A virtual address of the kernel.
///     pub KernelVa, "kernel VA", 48
/// }
/// let va = KernelVa::new(0xffff_8000_0000_1000);
/// assert_eq!((va.bits(), va.to_string()), (0x8000_0000_1000, "kernel VA 0xffff800000001000".into()));
/// assert_eq!(va, KernelVa::new(0x8000_0000_1000));
/// ```
#[macro_export]
macro_rules! address {
    ($(#[$doc:meta])* $vis:vis $name:ident, $space:literal) => {
        $crate::address! { $(#[$doc])* $vis $name, $space, 64 }
    };
    ($(#[$doc:meta])* $vis:vis $name:ident, $space:literal, $bits:literal) => {
        $crate::address! { $(#[$doc])* $vis $name, $space, $bits, "{} {:#x}" }
    };
    ($(#[$doc:meta])* $vis:vis $name:ident, $space:literal, $bits:literal, $format:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        $vis struct $name(u64);

        #[allow(dead_code)]
        impl $name {
            /// The address with these bits.
            pub const fn new(bits: u64) -> Self {
                let own = bits & u64::MAX >> (64 - $bits);
                Self(if Self::extended(own) == bits { own } else { bits })
            }

            /// The address as a number.
            pub const fn bits(self) -> u64 {
                self.0
            }

            const fn extended(bits: u64) -> u64 {
                let above = 64 - $bits;
                if bits << above >> above == bits { ((bits << above) as i64 >> above) as u64 } else { bits }
            }
        }

        impl $crate::Address for $name {
            const SPACE: &'static str = $space;
            fn new(bits: u64) -> Self {
                Self::new(bits)
            }
            fn bits(self) -> u64 {
                self.0
            }
            fn shown(self) -> u64 {
                Self::extended(self.0)
            }
            fn checked_add(self, bytes: u64) -> Option<Self> {
                let sum = Self(self.0.checked_add(bytes)?);
                // Addresses that are sign-extended have a hole in the middle.
                (Some(Self::extended(sum.0)) == Self::extended(self.0).checked_add(bytes)).then_some(sum)
            }
        }

        /// # Panics
        /// Past the top of 64 bits, in every build; [`checked_add`]($crate::Address::checked_add) gives `None` there.
        impl core::ops::Add<u64> for $name {
            type Output = Self;
            #[inline]
            #[track_caller]
            fn add(self, bytes: u64) -> Self {
                let sum = $crate::Address::checked_add(self, bytes);
                sum.unwrap_or_else(|| panic!("{self} has no {bytes} bytes behind it"))
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{}({:#x})", stringify!($name), $crate::Address::shown(*self))
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, $format, $space, $crate::Address::shown(*self))
            }
        }

        impl core::fmt::LowerHex for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::LowerHex::fmt(&$crate::Address::shown(*self), f)
            }
        }
    };
}

address! {
    /// An address of host memory as the memory controller sees it.
    pub PhysAddr, "physical address"
}
address! {
    /// An IO virtual address: what a device puts on the bus, translated by the IOMMU.
    pub Iova, "IOVA"
}
address! {
    /// A device virtual address: what a program on the device uses, translated by the device's own MMU.
    pub DeviceVa, "device VA"
}
address! {
    /// An address of the card's own memory (DDR or HBM).
    pub CardAddr, "card address"
}
address! {
    /// A byte position in a file.
    pub FileOffset, "file offset", 64, "{} {}"
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn arithmetic_stops_at_the_top_of_the_space() {
        let top = Iova::new(u64::MAX);
        assert_eq!(top.checked_add(1), None);
        assert_eq!((top.checked_add(0), top + 0, Iova::new(1) + 2), (Some(top), top, Iova::new(3)));
        assert_eq!(top.align_up(PageSize::SIZE_4K), None);
        assert_eq!(top.align_down(PageSize::SIZE_4K), Iova::new(!0xfff));
        assert_eq!(Iova::new(1).offset_from(Iova::new(2)), None);
    }

    #[test]
    #[should_panic = "IOVA 0xffffffffffffffff has no 1 bytes behind it"]
    fn a_sum_never_wraps() {
        let _ = Iova::new(u64::MAX) + 1;
    }

    #[test]
    fn messages_name_the_space() {
        assert_eq!(Iova::new(0x1000).to_string(), "IOVA 0x1000");
        assert_eq!(alloc::format!("{:?}", CardAddr::new(16)), "CardAddr(0x10)");
        assert_eq!(alloc::format!("{} {:x}", FileOffset::new(16), CardAddr::new(16)), "file offset 16 10");
    }

    address! { Kernel, "kernel VA", 48 }

    #[test]
    fn canonical_addresses_are_those_that_a_table_translates() {
        for (given, bits) in [
            (0xffff_8000_0000_1000, 0x8000_0000_1000),
            (u64::MAX, 0xffff_ffff_ffff),
            (0x7fff_ffff_f000, 0x7fff_ffff_f000),
            // Not canonical: no table takes them for another address.
            (0x1_0000_0000_0000, 0x1_0000_0000_0000),
            (0xfffe_8000_0000_0000, 0xfffe_8000_0000_0000),
        ] {
            let va = Kernel::new(given);
            assert_eq!((va.bits(), va.shown(), Kernel::new(va.bits())), (bits, given, va), "{given:#x}");
        }
        // In the hole between the halves: taken as 48 bits of an address.
        assert_eq!(Kernel::new(0x8000_0000_0000), Kernel::new(0xffff_8000_0000_0000));
        assert_eq!(Kernel::new(u64::MAX).to_string(), "kernel VA 0xffffffffffffffff");
        assert!(Kernel::new(0xffff_8000_0000_0000) > Kernel::new(0x7fff_ffff_ffff));
        let last_of_half = Kernel::new(0x7fff_ffff_f000);
        assert!(last_of_half.checked_add(0xfff).is_some() && last_of_half.checked_add(0x1000).is_none());
        assert!(crate::Span::new(last_of_half, 0x1000).is_some() && crate::Span::new(last_of_half, 0x1001).is_none());
        assert!(crate::Span::new(Kernel::new(u64::MAX - 0xfff), 0x1000).is_some());
    }
}
