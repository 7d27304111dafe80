//! x86-64 tables.

use dmalane_addr::{Access, PageSize, PageSizes};

use crate::{Entry, Format, Register, Registers};

/// x86-64 paging with 4 or 5 levels: 48 or 57-bit input, up to 52-bit output, leaves of 1 GiB, 2 MiB and 4 KiB.
///
/// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A (order number 253668), chapter
/// "Paging" (its number differs between revisions), section "4-Level Paging and 5-Level Paging" and its tables of entry
/// formats; the same entries serve the first stage of VT-d (Intel VT-d specification, chapter "DMA Remapping",
/// "First-Stage Translation") and AMD's IOMMU guest tables.
///
/// | bits | field | written as |
/// |---|---|---|
/// | 0 | P | 1 |
/// | 1 | R/W | 1 with [`Access::WRITE`]; 1 in table entries |
/// | 2 | U/S | 0 with [`Access::PRIVILEGED`]; else 1: requests of a device are user requests by default |
/// | 3, 4 | PWT, PCD | `0b11` (UC) with [`Access::MMIO`], PCD alone (UC-) with [`Access::UNCACHED`], else 0 |
/// | 5 | A | 1, so that the walker need not write it |
/// | 6 | D | 1 in a writable leaf, for the same reason |
/// | 7 | PS | 1 in a 1 GiB or 2 MiB leaf (at 4 KiB and, as bit 12, above: PAT, 0) |
/// | 8 | G | 0 |
/// | 51:12 | address | low bits of a large leaf are zero |
/// | 63 | XD | 1 in a leaf without [`Access::EXEC`] |
///
/// Limits that a table entry may put on everything below it (R/W, U/S, XD) are never written; [`walk`](crate::walk())
/// applies them. The memory type of an entry is read by the PAT as it is after reset.
///
/// Input addresses are device addresses, zero-extended. A walker that demands *canonical* addresses, as a processor and
/// the first stage of VT-d do, reaches the lower half with them as they are, and the upper half after extending their
/// sign.
///
/// Registers beside it: `CR3`, or the first-stage pointer (FSPTPTR) of a VT-d PASID entry (FSPM = 0 for 4 levels,
/// 1 for 5), = the root; on a processor `CR4.PAE = 1`, `CR4.LA57 = 1` for 5 levels, `IA32_EFER.LME = 1` and
/// `IA32_EFER.NXE = 1`, else bit 63 is reserved, `CR0.PG = CR0.PE = 1`; the PAT as after reset. An
/// implementation has MAXPHYADDR bits of output, which may be below 52.
///
/// A present entry is readable: an access without [`Access::READ`] is not supported.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types)] // two numbers side by side
pub struct X86_64<const LEVELS: u32>;

/// x86-64 4-level paging, 48 bits.
#[allow(non_camel_case_types)]
pub type X86_64_4Level = X86_64<4>;
/// x86-64 5-level paging, 57 bits.
#[allow(non_camel_case_types)]
pub type X86_64_5Level = X86_64<5>;

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PCD: not cached, UC- with the PAT as after reset.
const PCD: u64 = 1 << 4;
/// PCD and PWT: UC, for registers.
const UC: u64 = 0b11 << 3;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const PAT_LARGE: u64 = 1 << 12;
const XD: u64 = 1 << 63;
const ADDRESS: u64 = (1 << 52) - (1 << 12);

impl<const L: u32> Format for X86_64<L> {
    const NAME: &'static str = match L {
        4 => "x86-64-4level",
        5 => "x86-64-5level",
        _ => panic!("paging has 4 or 5 levels"),
    };
    const LEVELS: u32 = L;
    const INDEX_BITS: u32 = 9;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 12 + 9 * L;
    const OUTPUT_BITS: u32 = 52;
    const VALID: u64 = 1;
    const TABLE_BITS: u64 = LARGE;
    const PAGE_SIZES: PageSizes =
        PageSizes::from_bits(0).with(PageSize::SIZE_4K).with(PageSize::SIZE_2M).with(PageSize::SIZE_1G);
    const DIRTY: u64 = DIRTY;

    fn supports(access: Access) -> bool {
        access.contains(Access::READ) && access.is_consistent()
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        next & ADDRESS | PRESENT | WRITE | USER | ACCESSED
    }

    #[inline]
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64 {
        let mut entry = out & ADDRESS | PRESENT | ACCESSED;
        if !access.contains(Access::PRIVILEGED) {
            entry |= USER;
        }
        if access.contains(Access::MMIO) {
            entry |= UC;
        } else if access.contains(Access::UNCACHED) {
            entry |= PCD;
        }
        if level + 1 != L {
            entry |= LARGE;
        }
        if access.contains(Access::WRITE) {
            entry |= WRITE | DIRTY;
        }
        if !access.contains(Access::EXEC) {
            entry |= XD;
        }
        entry
    }

    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        leaf & (table | !(WRITE | USER)) | table & XD
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        if level + 1 < L {
            if entry & (PRESENT | LARGE) == PRESENT {
                return Entry::Table(entry & ADDRESS);
            }
            // PS above the 1 GiB level is reserved.
            if level + 3 < L || entry & PRESENT == 0 {
                return Entry::Invalid;
            }
        } else if level >= L || entry & PRESENT == 0 {
            return Entry::Invalid;
        }
        let page = 1u64 << (12 + 9 * (L - 1 - level));
        // So are the address bits of a large leaf below its size, but for PAT.
        if entry & ADDRESS & (page - 1) & !PAT_LARGE != 0 {
            return Entry::Invalid;
        }
        let mut access = Access::READ;
        if entry & WRITE != 0 {
            access |= Access::WRITE;
        }
        if entry & XD == 0 {
            access |= Access::EXEC;
        }
        if entry & USER == 0 {
            access |= Access::PRIVILEGED;
        }
        if entry & UC == UC {
            access |= Access::MMIO;
        } else if entry & PCD != 0 {
            access |= Access::UNCACHED;
        }
        Entry::Leaf { out: entry & ADDRESS & !(page - 1), access }
    }

    fn registers(root: u64) -> Registers {
        let la57 = if L == 5 { 1 << 12 } else { 0 };
        Register::list([
            Register::new("CR3", root),
            Register::new("CR4", 1 << 5 | la57),
            Register::new("IA32_EFER", 1 << 8 | 1 << 11),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the entry-format tables of the Intel SDM, volume 3A, chapter "Paging".
    #[test]
    fn golden_entries() {
        type F = X86_64_4Level;
        assert_eq!(F::encode_table(0, 0x8000_1000), 0x0000_0000_8000_1027); // P, R/W, U/S, A
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::EXEC), 0x0000_0000_1234_5067); // and D
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x8000_0000_1234_5067);
        assert_eq!(F::encode_leaf(3, 0xf_ffff_ffff_f000, Access::READ), 0x800f_ffff_ffff_f025);
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::READ | Access::EXEC), 0x0000_0000_4020_00a5); // and PS
        assert_eq!(F::encode_leaf(1, 0x40_4000_0000, Access::RW), 0x8000_0040_4000_00e7);
        // without U/S; PCD and PWT; PCD
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::PRIVILEGED), 0x8000_0000_1234_5063);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::MMIO), 0x8000_0000_1234_507f);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::READ | Access::UNCACHED), 0x8000_0000_1234_5035);
    }

    #[test]
    fn reserved_and_faulting_entries() {
        type F = X86_64_4Level;
        let page = F::encode_leaf(3, 0x1000, Access::RW);
        let block = F::encode_leaf(2, 0x4020_0000, Access::RW);
        assert_eq!(F::decode(0, block), Entry::Invalid, "PS in the top level");
        assert_eq!(F::decode(0, PRESENT | USER | LARGE), Entry::Invalid, "PS in the top level");
        assert_eq!(X86_64_5Level::decode(1, PRESENT | USER | LARGE), Entry::Invalid, "PS in the second level of five");
        assert_eq!(X86_64_5Level::decode(4, page), F::decode(3, page), "the same page a level further down");
        assert_eq!(F::decode(9, page), Entry::Invalid, "no such level");
        assert_eq!(F::decode(1, block), Entry::Invalid, "2 MiB alignment in a 1 GiB leaf");
        assert_eq!(F::decode(2, block | 1 << 13), Entry::Invalid, "reserved address bit");
        let whole = Entry::Leaf { out: 0x4020_0000, access: Access::RW };
        assert_eq!(F::decode(2, block | 1 << 12), whole, "PAT of a large leaf");
        assert_eq!(F::decode(3, page | 1 << 7), Entry::Leaf { out: 0x1000, access: Access::RW }, "PAT of a page");
        assert_eq!(F::decode(3, page & !1), Entry::Invalid);
        let supervisor = Entry::Leaf { out: 0x1000, access: Access::RW | Access::PRIVILEGED };
        assert_eq!(F::decode(3, page & !(1 << 2)), supervisor);
        // The boot tables of many kernels: P, R/W, PS and nothing else.
        let boot = Access::RW | Access::EXEC | Access::PRIVILEGED;
        assert_eq!(F::decode(2, 0x83), Entry::Leaf { out: 0, access: boot });
    }

    #[test]
    fn limits_of_tables() {
        type F = X86_64_4Level;
        let page = F::encode_leaf(3, 0x1000, Access::RW | Access::EXEC);
        let below = |table| match F::decode(3, F::inherit(table, page)) {
            Entry::Leaf { access, .. } => access,
            entry => panic!("{entry:?}"),
        };
        assert_eq!(below(F::encode_table(0, 0)), Access::RW | Access::EXEC);
        assert_eq!(below(PRESENT | USER), Access::READ | Access::EXEC);
        assert_eq!(below(PRESENT | USER | WRITE | XD), Access::RW);
        assert_eq!(below(PRESENT | WRITE), Access::RW | Access::EXEC | Access::PRIVILEGED);
    }
}
