//! Intel VT-d second-stage tables.

use dmalane_addr::{Access, PageSize, PageSizes};

use super::rights::{bits, rights};
use crate::{Entry, Format, Register, Registers};

/// VT-d second-stage translation with 3, 4 or 5 levels: 39, 48 or 57-bit input, up to 52-bit output, leaves of 1 GiB,
/// 2 MiB and 4 KiB.
///
/// Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, chapter "DMA Remapping",
/// section "Second-Stage Translation", and chapter "Translation Structure Formats", sections "Second-Stage Paging
/// Entries", "Context Entry" and "Scalable-Mode PASID Table Entry".
///
/// | bits | field | written as |
/// |---|---|---|
/// | 0 | R | [`Access::READ`]; 1 in table entries |
/// | 1 | W | [`Access::WRITE`]; 1 in table entries |
/// | 2 | X | 0: looked at only for requests with PASID that ask to execute |
/// | 5:3, 6 | EMT, IPAT | 0 |
/// | 7 | PS | 1 in a 1 GiB or 2 MiB leaf |
/// | 8, 9 | A, D | 0: an IOMMU sets them where SSADE is on, and ignores them elsewhere |
/// | 11 | SNP | 0 |
/// | 51:12 | address | low bits of a large leaf are zero |
/// | 62 | TM | 0 |
///
/// An entry with neither R nor W is not present. A walker combines the rights of all levels; table entries here grant
/// both. Write-only leaves exist; [`Access::EXEC`] is not supported, nor are privileged accesses or kinds of memory.
///
/// Settings beside it, in a legacy context entry: low word = the root | P, with TT = `0b00`; high word AW = the
/// levels less 2, the domain number in bits 23:8 to be added. In a PASID entry of scalable mode the same pointer is
/// SSPTPTR, the same AW is in bits 4:2, and PGTT = `0b010`. `CAP.SAGAW` says which numbers of levels an IOMMU has,
/// `CAP.SSLPS` which large pages, `CAP.MGAW` and the host's address width how many bits of address.
#[derive(Clone, Copy, Debug)]
pub struct VtdSecond<const LEVELS: u32>;

/// VT-d second stage, 3 levels.
pub type VtdSecond39 = VtdSecond<3>;
/// VT-d second stage, 4 levels.
pub type VtdSecond48 = VtdSecond<4>;
/// VT-d second stage, 5 levels.
pub type VtdSecond57 = VtdSecond<5>;

const READ: u64 = 1;
const WRITE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = (1 << 52) - (1 << 12);

impl<const L: u32> Format for VtdSecond<L> {
    const NAME: &'static str = match L {
        3 => "vtd-second-39",
        4 => "vtd-second-48",
        5 => "vtd-second-57",
        _ => panic!("second-stage tables have 3 to 5 levels"),
    };
    const LEVELS: u32 = L;
    const INDEX_BITS: u32 = 9;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 12 + 9 * L;
    const OUTPUT_BITS: u32 = 52;
    const PAGE_SIZES: PageSizes =
        PageSizes::from_bits(0).with(PageSize::SIZE_4K).with(PageSize::SIZE_2M).with(PageSize::SIZE_1G);
    const DIRTY: u64 = 1 << 9;
    const TABLE_BITS: u64 = LARGE | 1 << 8; // and A, which a device may set in any entry

    fn supports(access: Access) -> bool {
        !access.is_empty() && Access::RW.contains(access)
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        next & ADDRESS | READ | WRITE
    }

    #[inline]
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64 {
        let mut entry = out & ADDRESS | bits(access, READ, WRITE);
        if level + 1 != L {
            entry |= LARGE;
        }
        entry
    }

    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        leaf & (table | !(READ | WRITE))
    }

    #[inline]
    fn is_present(entry: u64) -> bool {
        entry & (READ | WRITE) != 0
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        if entry & (READ | WRITE) == 0 || level >= L {
            return Entry::Invalid;
        }
        if level + 1 < L {
            if entry & LARGE == 0 {
                return Entry::Table(entry & ADDRESS);
            }
            if level + 3 < L {
                return Entry::Invalid; // PS above the 1 GiB level is reserved
            }
        }
        let page = 1u64 << (12 + 9 * (L - 1 - level));
        if entry & ADDRESS & (page - 1) != 0 {
            return Entry::Invalid; // so are the address bits of a large leaf below its size
        }
        Entry::Leaf { out: entry & ADDRESS, access: rights(entry, READ, WRITE) }
    }

    fn registers(root: u64) -> Registers {
        Register::list([
            Register::new("context entry, bits 63:0", root | 1),
            Register::new("context entry, bits 127:64", u64::from(L - 2)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the figures "Format for Second-Stage Paging Entries".
    #[test]
    fn golden_entries() {
        type F = VtdSecond48;
        assert_eq!(F::encode_table(0, 0x8000_1000), 0x8000_1003);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x1234_5003);
        assert_eq!(F::encode_leaf(3, 0xf_ffff_ffff_f000, Access::READ), 0x000f_ffff_ffff_f001);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::WRITE), 0x1234_5002);
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::RW), 0x4020_0083);
        assert_eq!(F::encode_leaf(1, 0x40_4000_0000, Access::READ), 0x40_4000_0081);
        assert_eq!(VtdSecond39::encode_leaf(0, 0x40_4000_0000, Access::READ), 0x40_4000_0081);
    }

    #[test]
    fn reserved_and_absent_entries() {
        type F = VtdSecond48;
        assert_eq!(F::decode(3, 0x1000 | 1 << 2), Entry::Invalid, "X alone is not present");
        assert_eq!(F::decode(0, 0x83), Entry::Invalid, "PS in the top level");
        assert_eq!(F::decode(1, 0x4020_0083), Entry::Invalid, "2 MiB alignment in a 1 GiB leaf");
        assert_eq!(VtdSecond39::decode(0, 0x4000_0083), Entry::Leaf { out: 0x4000_0000, access: Access::RW });
        assert!(!F::supports(Access::READ | Access::EXEC));
        assert_eq!(F::registers(0x5000).nth(1).unwrap().value, 0b010, "AW of 4 levels");
    }
}
