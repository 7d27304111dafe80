//! AMD IOMMU version 1 tables, for host translation.

use dmalane_addr::{Access, PageSize, PageSizes};

use super::rights::{bits, rights};
use crate::format::MAX_LEVELS;
use crate::{Entry, Foreign, Format, Register, Registers};

/// AMD I/O page tables for host translations ("v1") with 3 to 6 levels: 39, 48, 57 or 63-bit input, 52-bit output,
/// leaves of 1 GiB, 2 MiB and 4 KiB; with `GROUPS` also of 16 times these: 16 GiB, 32 MiB and 64 KiB.
///
/// Source: AMD I/O Virtualization Technology (IOMMU) Specification (48882), section "I/O Page Tables for Host
/// Translations" with its tables "Page Table Level Parameters", "I/O Page Translation Entry (PTE)", "I/O Page Directory
/// Entry (PDE)", and section "Device Table Entry Format".
///
/// | bits | field | written as |
/// |---|---|---|
/// | 0 | PR | 1 |
/// | 5, 6 | A, D | 0 |
/// | 11:9 | Next Level | 0 in a leaf: it has the default page size of its level; 7 in the entries of a group; else the level of the next table |
/// | 51:12 | address | low bits of a large leaf are zero; in a group, the lowest zero from bit 12 up says half its size |
/// | 59 | U | 0 |
/// | 60 | FC | 1 in a leaf: accesses are coherent whatever the device says |
/// | 61 | IR | [`Access::READ`]; 1 in table entries |
/// | 62 | IW | [`Access::WRITE`]; 1 in table entries |
///
/// All 16 entries of a group are the same. A table of the last level is level 1 in the specification. Three things that
/// it allows are not written, and are read by [`walk`](crate::walk()) alone: entries that skip levels, leaves of all
/// other powers of two (as Linux writes them), and the 64th bit of an input address. A walker combines the rights of
/// all levels; table entries here grant both. Write-only leaves exist; [`Access::EXEC`] is not supported, nor are
/// privileged accesses or kinds of memory.
///
/// Settings beside it, in the device table entry: bits 63:0 = the root | V | TV, Mode (bits 11:9) = levels, IR
/// and IW; the domain number in bits 79:64 to be added.
#[derive(Clone, Copy, Debug)]
pub struct AmdV1<const LEVELS: u32, const GROUPS: bool = false>;

/// AMD v1 with 4 levels, 48 bits.
#[allow(non_camel_case_types)]
pub type AmdV1_4Level = AmdV1<4>;

const PRESENT: u64 = 1;
const NEXT_LEVEL: u64 = 0b111 << 9;
/// Next Level: the address says the page size.
const OTHER_SIZE: u64 = 0b111 << 9;
/// Logarithm of the entries of a group.
const GROUP: u32 = 4;
const ADDRESS: u64 = (1 << 52) - (1 << 12);
const FORCE_COHERENT: u64 = 1 << 60;
const READ: u64 = 1 << 61;
const WRITE: u64 = 1 << 62;

/// Bytes of the leaf that an entry is, or is part of.
#[inline]
const fn leaf_bytes(levels: u32, level: u32, group: bool) -> u64 {
    1 << (12 + 9 * (levels - 1 - level) + if group { GROUP } else { 0 })
}

impl<const L: u32, const G: bool> Format for AmdV1<L, G> {
    const NAME: &'static str = match (L, G) {
        (3, false) => "amd-v1-3level",
        (4, false) => "amd-v1-4level",
        (5, false) => "amd-v1-5level",
        (6, false) => "amd-v1-6level",
        (3, true) => "amd-v1-3level-groups",
        (4, true) => "amd-v1-4level-groups",
        (5, true) => "amd-v1-5level-groups",
        (6, true) => "amd-v1-6level-groups",
        _ => panic!("levels from 3 to 6"),
    };
    const LEVELS: u32 = L;
    const INDEX_BITS: u32 = 9;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = if L == 6 { 63 } else { 12 + 9 * L };
    const OUTPUT_BITS: u32 = 52;
    const VALID: u64 = 1;
    const PAGE_SIZES: PageSizes = {
        let one = 1 << 30 | 1 << 21 | 1 << 12;
        PageSizes::from_bits(if G { one | one << GROUP } else { one })
    };
    const GROUP_BITS: [u32; MAX_LEVELS] = {
        let mut bits = [0; MAX_LEVELS];
        let mut level = L as usize - 3;
        while G && level < L as usize {
            bits[level] = GROUP;
            level += 1;
        }
        bits
    };
    const DIRTY: u64 = 1 << 6;
    const TABLE_BITS: u64 = NEXT_LEVEL | 1 << 5; // and A, which a device may set in any entry

    fn supports(access: Access) -> bool {
        !access.is_empty() && Access::RW.contains(access)
    }

    #[inline]
    fn encode_table(level: u32, next: u64) -> u64 {
        next & ADDRESS | PRESENT | u64::from(L - 1 - level) << 9 | READ | WRITE
    }

    #[inline]
    fn encode_leaf(_level: u32, out: u64, access: Access) -> u64 {
        out & ADDRESS | PRESENT | FORCE_COHERENT | bits(access, READ, WRITE)
    }

    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        let size = leaf_bytes(L, level, true);
        Self::encode_leaf(level, out & !(size - 1) | (size / 2 - 1), access) | OTHER_SIZE
    }

    #[inline]
    fn is_member(_level: u32, entry: u64) -> bool {
        G && entry & NEXT_LEVEL == OTHER_SIZE
    }

    const WALK_BITS: u32 = if L == 6 { 64 } else { Self::INPUT_BITS };

    fn foreign(level: u32, entry: u64) -> Option<Foreign> {
        if entry & PRESENT == 0 {
            return None;
        }
        let address = entry & ADDRESS;
        let own = 12 + 9 * (L - 1 - level);
        let log2 = match (entry & NEXT_LEVEL) >> 9 {
            0 => own,
            // The lowest zero bit of the address is the highest within the page.
            7 => (address | 0xfff).trailing_ones() + 1,
            next if next < u64::from(L - 1 - level) => {
                return Some(Foreign::Table { next: address, level: L - next as u32 });
            }
            _ => return None,
        };
        let size = PageSize::from_log2(log2 as u8).filter(|_| (own..own + 9).contains(&log2) && log2 < 52)?;
        let aligned = log2 > own || address & (size.bytes() - 1) == 0;
        let access = rights(entry, READ, WRITE);
        let out = address & !(size.bytes() - 1);
        (aligned && !access.is_empty()).then_some(Foreign::Leaf { out, size, access })
    }

    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        leaf & (table | !(READ | WRITE))
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        if entry & PRESENT == 0 || level >= L {
            return Entry::Invalid;
        }
        let next = (entry & NEXT_LEVEL) >> 9;
        let group = Self::is_member(level, entry);
        if next != 0 && !group {
            let known = next == u64::from(L - 1 - level);
            return if known { Entry::Table(entry & ADDRESS) } else { Entry::Invalid };
        }
        let size = leaf_bytes(L, level, group);
        let size_bits = if group { (size / 2 - 1) & ADDRESS } else { 0 };
        // Larger and other leaves exist in the architecture and are not among the page sizes here.
        if level + 3 < L || entry & ADDRESS & (size - 1) != size_bits || entry & (READ | WRITE) == 0 {
            return Entry::Invalid;
        }
        Entry::Leaf { out: entry & ADDRESS & !(size - 1), access: rights(entry, READ, WRITE) }
    }

    fn registers(root: u64) -> Registers {
        Register::list([Register::new("device table entry, bits 63:0", root | 0b11 | u64::from(L) << 9 | READ | WRITE)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the PDE and PTE tables of the specification.
    #[test]
    fn golden_entries() {
        type F = AmdV1_4Level;
        // PR 1, Next Level 3 in the table of level 4, IR 0x2000.., IW 0x4000..
        assert_eq!(F::encode_table(0, 0x8000_1000), 0x6000_0000_8000_1601);
        assert_eq!(F::encode_table(2, 0x8000_1000), 0x6000_0000_8000_1201);
        assert_eq!(AmdV1::<6>::encode_table(0, 0x8000_1000), 0x6000_0000_8000_1a01);
        // PR, FC 0x1000..
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x7000_0000_1234_5001);
        assert_eq!(F::encode_leaf(3, 0xf_ffff_ffff_f000, Access::READ), 0x300f_ffff_ffff_f001);
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::WRITE), 0x5000_0000_4020_0001);
        assert_eq!(F::encode_leaf(1, 0x40_4000_0000, Access::RW), 0x7000_0040_4000_0001);
    }

    /// "Example Page Size Encodings": of 64 KiB, address bits 15:12 are 0111; of 32 MiB, 24:12 are 0 1111 1111 1111.
    #[test]
    fn groups() {
        type F = AmdV1<4, true>;
        assert_eq!(F::encode_member(3, 0x1234_5000, Access::RW), 0x7000_0000_1234_7e01);
        assert_eq!(F::decode(3, 0x7000_0000_1234_7e01), Entry::Leaf { out: 0x1234_0000, access: Access::RW });
        assert_eq!(F::encode_member(2, 0x4260_0000, Access::READ), 0x3000_0000_42ff_fe01);
        assert_eq!(F::encode_member(1, 0x44_4000_0000, Access::READ), 0x3000_0045_ffff_fe01);
        assert_eq!(F::decode(3, 0x7000_0000_1234_3e01), Entry::Invalid, "32 KiB");
        assert_eq!(F::decode(2, 0x7000_0000_1234_7e01), Entry::Invalid, "64 KiB at the level of 2 MiB");
        assert_eq!(F::decode(0, 0x7000_0000_1234_7e01), Entry::Invalid);
        assert_eq!(AmdV1_4Level::decode(3, 0x7000_0000_1234_7e01), Entry::Invalid, "no groups");
    }

    /// As Linux (`generic_pt/fmt/amdv1.h`) writes them, and the specification's "Example Page Size Encodings".
    #[test]
    fn entries_of_others() {
        type F = AmdV1<4, true>;
        let leaf = |level, entry| match F::foreign(level, entry) {
            Some(Foreign::Leaf { out, size, access }) => Some((out, size.bytes(), access)),
            _ => None,
        };
        assert_eq!(leaf(3, 0x7000_0000_1234_4e01), Some((0x1234_4000, 8 << 10, Access::RW)));
        assert_eq!(leaf(3, 0x3000_0000_1217_fe01), Some((0x1210_0000, 1 << 20, Access::READ)));
        assert_eq!(leaf(3, 0x3000_0000_120f_fe01), None, "2 MiB at the level of 4 KiB");
        assert_eq!(leaf(2, 0x7000_0000_4fff_fe01).map(|l| l.1), Some(512 << 20));
        assert_eq!(leaf(2, 0x7000_0000_5fff_fe01), None, "1 GiB at the level of 2 MiB");
        assert_eq!(leaf(2, 0x7000_0000_403f_fe01).map(|l| l.1), Some(8 << 20));
        assert_eq!(leaf(0, 0x7000_0080_0000_0001), Some((0x80_0000_0000, 512 << 30, Access::RW)));
        assert_eq!(leaf(0, 0x7000_0080_0000_1001), None, "not aligned");
        assert_eq!(leaf(3, 0x1000_0000_1234_4e01), None, "no access");
        // From level 4 to level 1.
        let skips = F::foreign(0, 0x6000_0000_8000_1201);
        assert_eq!(skips, Some(Foreign::Table { next: 0x8000_1000, level: 3 }));
        assert_eq!(F::foreign(0, 0x6000_0000_8000_1a01), None, "upwards");
    }

    #[test]
    fn reserved_and_absent_entries() {
        type F = AmdV1_4Level;
        assert_eq!(F::decode(0, PRESENT | READ | 2 << 9), Entry::Invalid, "skips a level");
        assert_eq!(F::decode(3, PRESENT | READ | 1 << 9), Entry::Invalid, "a table below the last level");
        assert_eq!(F::decode(2, PRESENT | READ | 7 << 9), Entry::Invalid, "other page sizes");
        assert_eq!(F::decode(3, PRESENT | 0x1000), Entry::Invalid, "no access");
        assert_eq!(F::decode(0, PRESENT | READ), Entry::Invalid, "512 GiB");
        assert_eq!(F::registers(0x5000).next().unwrap().value, 0x6000_0000_0000_5803, "Mode 4");
    }
}
