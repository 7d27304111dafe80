//! Arm VMSAv8-64 stage 1 tables with a 4 KiB granule.

use dmalane_addr::{Access, PageSize, PageSizes};

use crate::{Entry, Format};

/// VMSAv8-64 stage 1, 4 KiB granule, 48-bit input and output: four levels from level 0, blocks of 1 GiB and 2 MiB.
///
/// Source: Arm Architecture Reference Manual for A-profile (DDI 0487), chapter D8 "The AArch64 Virtual Memory System
/// Architecture", sections "Translation table descriptor formats", "Memory access control" and "Memory region
/// attributes"; Arm SMMUv3 (IHI 0070), section "Context Descriptor".
///
/// | bits | field | written as |
/// |---|---|---|
/// | 1:0 | type | `0b11` table or page, `0b01` block |
/// | 4:2 | AttrIndx | 0 |
/// | 5 | NS | 0 |
/// | 6 | AP\[1\] | 1: unprivileged access allowed (transactions of a device are unprivileged by default) |
/// | 7 | AP\[2\] | 1 without [`Access::WRITE`] |
/// | 9:8 | SH | `0b11` inner shareable |
/// | 10 | AF | 1, so that the first access does not fault |
/// | 11 | nG | 1: the TLB entry belongs to the ASID of the context |
/// | 47:12 | address | low bits of a block are zero |
/// | 53, 54 | PXN, UXN | 1 without [`Access::EXEC`] |
///
/// Table descriptors carry none of the hierarchical limits (bits 63:59), and these are not looked at either.
///
/// What to program beside it: `TTBR0` = the root; TCR (SMMU: the context descriptor) `TG0 = 0b00` (4 KiB), `T0SZ = 16`,
/// `IPS = 0b101` (48 bits), `SH0 = 0b11`, `IRGN0 = ORGN0 = 0b01` (write-back tables), `EPD1 = 1`, `HPD0 = 1`, `HA = HD =
/// 0`, `DS = 0`; `MAIR` attribute 0 = `0xff` (normal memory, write-back). Without `IDR3.BBML` of 1 or more the device
/// must be quiet on a block while an unmap splits it.
///
/// Stage 1 has no write-only and no execute-only entry for this use: an access without [`Access::READ`] is not
/// supported.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types)] // "Arm64S14k" would read as stage 14
pub struct Arm64S1_4k;

const VALID: u64 = 1;
/// With `VALID`: a table at levels 0 to 2, a page at level 3. Without it: a block.
const TABLE_OR_PAGE: u64 = 1 << 1;
const TABLE: u64 = VALID | TABLE_OR_PAGE;
const AP_UNPRIVILEGED: u64 = 1 << 6;
const AP_READ_ONLY: u64 = 1 << 7;
const SH_INNER: u64 = 0b11 << 8;
const AF: u64 = 1 << 10;
const NG: u64 = 1 << 11;
const XN: u64 = 0b11 << 53;
const ADDRESS: u64 = (1 << 48) - (1 << 12);
const LAST: u32 = Arm64S1_4k::LEVELS - 1;

impl Format for Arm64S1_4k {
    const NAME: &'static str = "arm64-s1-4k";
    const LEVELS: u32 = 4;
    const INDEX_BITS: u32 = 9;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 48;
    const OUTPUT_BITS: u32 = 48;
    const PAGE_SIZES: PageSizes =
        PageSizes::from_bits(0).with(PageSize::SIZE_4K).with(PageSize::SIZE_2M).with(PageSize::SIZE_1G);

    fn supports(access: Access) -> bool {
        access.contains(Access::READ)
    }

    #[inline]
    fn encode_table(next: u64) -> u64 {
        next & ADDRESS | TABLE
    }

    #[inline]
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64 {
        let mut entry = out & ADDRESS | VALID | AP_UNPRIVILEGED | SH_INNER | AF | NG;
        if level == LAST {
            entry |= TABLE_OR_PAGE;
        }
        if !access.contains(Access::WRITE) {
            entry |= AP_READ_ONLY;
        }
        if !access.contains(Access::EXEC) {
            entry |= XN;
        }
        entry
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        // A leaf without the access flag, or for privileged software only, would fault.
        const USABLE: u64 = VALID | AF | AP_UNPRIVILEGED;
        if level < LAST {
            match entry & (VALID | TABLE_OR_PAGE) {
                TABLE => return Entry::Table(entry & ADDRESS),
                // Level 0 has no blocks.
                VALID if level > 0 && entry & USABLE == USABLE => {}
                _ => return Entry::Invalid,
            }
        } else if level > LAST || entry & (USABLE | TABLE_OR_PAGE) != USABLE | TABLE_OR_PAGE {
            return Entry::Invalid; // type 0b01 is reserved at the last level
        }
        let mut access = Access::READ;
        if entry & AP_READ_ONLY == 0 {
            access |= Access::WRITE;
        }
        if entry & XN == 0 {
            access |= Access::EXEC;
        }
        let page = 1u64 << (12 + 9 * (LAST - level));
        Entry::Leaf { out: entry & ADDRESS & !(page - 1), access }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the descriptor figures of DDI 0487, chapter D8.
    #[test]
    fn golden_entries() {
        type F = Arm64S1_4k;
        assert_eq!(F::encode_table(0x8000_1000), 0x0000_0000_8000_1003);
        // page: 0x3 | AP[1] 0x40 | SH 0x300 | AF 0x400 | nG 0x800, then read-only 0x80, PXN and UXN 0x60 << 48
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::EXEC), 0x0000_0000_1234_5f43);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x0060_0000_1234_5f43);
        assert_eq!(F::encode_leaf(3, 0xffff_ffff_f000, Access::READ), 0x0060_ffff_ffff_ffc3);
        // blocks: type 0b01
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::READ | Access::EXEC), 0x0000_0000_4020_0fc1);
        assert_eq!(F::encode_leaf(1, 0x40_4000_0000, Access::RW), 0x0060_0040_4000_0f41);
    }

    #[test]
    fn reserved_and_faulting_entries() {
        type F = Arm64S1_4k;
        let page = F::encode_leaf(3, 0x1000, Access::RW);
        let block = F::encode_leaf(1, 0x4000_0000, Access::RW);
        assert_eq!(F::decode(0, block), Entry::Invalid, "no block at level 0");
        assert_eq!(F::decode(3, block), Entry::Invalid, "type 0b01 at level 3");
        assert_eq!(F::decode(3, page & !1), Entry::Invalid);
        assert_eq!(F::decode(3, page & !(1 << 10)), Entry::Invalid, "access flag");
        assert_eq!(F::decode(3, page & !(1 << 6)), Entry::Invalid, "privileged only");
        assert_eq!(F::decode(9, page), Entry::Invalid, "no such level");
    }
}
