//! Apple AGX unified address translation.

use dmalane_addr::{Access, PageSize, PageSizes};

use super::arm64::*;
use crate::{Entry, Format, Register, Registers};

/// The tables of Apple's AGX GPU (UAT), for memory that the GPU alone reaches: geometry and descriptors of VMSAv8-64
/// with 16 KiB granules and 39 bits, three levels, and rules of its own for permissions.
///
/// Source: Apple publishes nothing. The Asahi Linux project describes the format: m1n1's `hw/uat.py` (geometry, fields)
/// and "iommu/io-pgtable: Add the Apple UAT variant" on the Linux IOMMU list (permissions).
///
/// | bits | field | written as |
/// |---|---|---|
/// | 1:0 | type | `0b11` table or page |
/// | 4:2 | AttrIndx | 2: shared, coherent |
/// | 7:6 | AP | `0b10`: the GPU has access, its firmware has none |
/// | 10 | AF | 1 |
/// | 11 | nG | 1 |
/// | 47:14 | address | |
/// | 53 | PXN | 1 without [`Access::READ`] |
/// | 54 | UXN | 1 with both read and write |
/// | 55 | GPU access | 1: the permission rules of the GPU hold |
///
/// PXN and UXN are no permissions to execute here: (UXN, PXN) = (0, 0) is read-only, (1, 0) read and write, (0, 1)
/// write-only, (1, 1) none. [`Access::EXEC`] and kinds of memory are not supported. Only pages are known to be used, so
/// there are no blocks.
///
/// Settings beside it: the words of the context in the table that the firmware loads from: `TTBR` = the root | 1
/// (valid), with the address-space number in bits 63:48 to be added. For an MMU of Arm: `T0SZ = 25`, 16 KiB granule.
#[derive(Clone, Copy, Debug)]
pub struct AgxUat;

const GRANULE: u32 = 14;
const ATTR_SHARED: u64 = 2 << 2;
const AP: u64 = 0b11 << 6;
const AP_GPU: u64 = 0b10 << 6;
const NG: u64 = 1 << 11;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
const GPU_ACCESS: u64 = 1 << 55;

impl Format for AgxUat {
    const NAME: &'static str = "agx-uat";
    const LEVELS: u32 = 3;
    const INDEX_BITS: u32 = index_bits(GRANULE);
    const GRANULE: PageSize = PageSize::SIZE_16K;
    const INPUT_BITS: u32 = 39;
    const OUTPUT_BITS: u32 = 48;
    const VALID: u64 = 1;
    const TABLE_BITS: u64 = TABLE_OR_PAGE;
    const PAGE_SIZES: PageSizes = PageSizes::from_bits(0).with(PageSize::SIZE_16K);

    fn supports(access: Access) -> bool {
        !access.is_empty() && Access::RW.contains(access)
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        put_address(GRANULE, 48, next) | VALID | TABLE_OR_PAGE
    }

    #[inline]
    fn encode_leaf(_level: u32, out: u64, access: Access) -> u64 {
        let mut entry =
            put_address(GRANULE, 48, out) | VALID | TABLE_OR_PAGE | ATTR_SHARED | AP_GPU | AF | NG | GPU_ACCESS;
        if !access.contains(Access::READ) {
            entry |= PXN;
        } else if access.contains(Access::WRITE) {
            entry |= UXN;
        }
        entry
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        const TYPE: u64 = VALID | TABLE_OR_PAGE;
        if level >= Self::LEVELS || entry & TYPE != TYPE {
            return Entry::Invalid;
        }
        if level + 1 < Self::LEVELS {
            return Entry::Table(get_address(GRANULE, 48, entry));
        }
        if entry & (AF | GPU_ACCESS | AP) != AF | GPU_ACCESS | AP_GPU {
            return Entry::Invalid; // not for the GPU, or not for it alone
        }
        let access = match (entry & UXN != 0, entry & PXN != 0) {
            (false, false) => Access::READ,
            (true, false) => Access::RW,
            (false, true) => Access::WRITE,
            (true, true) => return Entry::Invalid,
        };
        Entry::Leaf { out: get_address(GRANULE, 48, entry), access }
    }

    fn registers(root: u64) -> Registers {
        Register::list([Register::new("TTBR", root | 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the fields above.
    #[test]
    fn golden_entries() {
        type F = AgxUat;
        assert_eq!(F::encode_table(0, 0x8_0000_4000), 0x0000_0008_0000_4003);
        // 0x3 | AttrIndx 0x8 | AP 0x80 | AF 0x400 | nG 0x800, GPU access 0x80 << 48
        assert_eq!(F::encode_leaf(2, 0x8_1234_4000, Access::READ), 0x0080_0008_1234_4c8b);
        assert_eq!(F::encode_leaf(2, 0x8_1234_4000, Access::RW), 0x00c0_0008_1234_4c8b);
        assert_eq!(F::encode_leaf(2, 0x8_1234_4000, Access::WRITE), 0x00a0_0008_1234_4c8b);
    }

    #[test]
    fn faulting_entries() {
        type F = AgxUat;
        let page = F::encode_leaf(2, 0x4000, Access::RW);
        assert_eq!(F::decode(2, page | PXN), Entry::Invalid, "no access");
        assert_eq!(F::decode(2, page & !GPU_ACCESS), Entry::Invalid, "firmware only");
        assert_eq!(F::decode(1, page & !0b10), Entry::Invalid, "no blocks");
    }
}
