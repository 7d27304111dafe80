//! RISC-V tables.

use dmalane_addr::{Access, PageSize, PageSizes};

use super::rights::bits;
use crate::format::MAX_LEVELS;
use crate::{Entry, Format, Register, Registers};

/// RISC-V Sv39, Sv48 and Sv57: 3, 4 or 5 levels, 56-bit output, a leaf at every level (4 KiB, 2 MiB, 1 GiB, 512 GiB,
/// 256 TiB).
///
/// Source: The RISC-V Instruction Set Manual, Volume II: Privileged Architecture, chapter "Supervisor-Level ISA",
/// sections "Sv32/Sv39/Sv48/Sv57", "Svnapot", "Supervisor Address Translation and Protection (satp) Register"; RISC-V
/// IOMMU Architecture Specification, section "Process context" (the same tables by `fsc`).
///
/// | bits | field | written as |
/// |---|---|---|
/// | 0 | V | 1 |
/// | 1, 2, 3 | R, W, X | the access; all 0 in a table entry |
/// | 4 | U | 0 in a leaf with [`Access::PRIVILEGED`]; else 1: requests of a device are user requests by default |
/// | 5 | G | 0 |
/// | 6 | A | 1 in a leaf |
/// | 7 | D | 1 in a writable leaf |
/// | 9:8 | RSW | 0 |
/// | 53:10 | PPN | address bits 55:12 |
/// | 62:61 | PBMT | with `PBMT` (Svpbmt) 1 in a leaf with [`Access::UNCACHED`], 2 with [`Access::MMIO`]; else 0 |
/// | 63 | N | 1 in the 16 entries of a 64 KiB page, if `NAPOT` (Svnapot), with `0b1000` in the lowest bits of PPN |
///
/// Input addresses are what the mode translates, zero-extended; a processor wants the highest of these bits extended to
/// 64 (the upper half of the table is its upper half).
///
/// Register beside it: `satp` (or `iosatp`) = MODE 8, 9 or 10 in bits 63:60, the address-space number in bits
/// 59:44 to be added, the page number of the root.
///
/// On a processor, supervisor mode reaches user pages with `SUM = 1` only, and never executes them. `PBMT` takes
/// `menvcfg.PBMTE = 1` (an IOMMU: `capabilities.Svpbmt`).
///
/// All rights that are not empty have an entry, but for [`Access::WRITE`] without [`Access::READ`]. Kinds of memory
/// take `PBMT`.
#[derive(Clone, Copy, Debug)]
pub struct RiscvSv<const LEVELS: u32, const NAPOT: bool = false, const PBMT: bool = false>;

/// Sv39: 3 levels.
pub type RiscvSv39 = RiscvSv<3>;
/// Sv48: 4 levels.
pub type RiscvSv48 = RiscvSv<4>;
/// Sv57: 5 levels.
pub type RiscvSv57 = RiscvSv<5>;

const VALID: u64 = 1;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXEC: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const NAPOT: u64 = 1 << 63;
/// Page-based memory types of Svpbmt.
const PBMT_NC: u64 = 1 << 61;
const PBMT_IO: u64 = 2 << 61;
const PBMT_FIELD: u64 = 3 << 61;
/// The lowest four bits of the page number.
const PPN_3_0: u64 = 0xf << 10;
/// Value of these bits in a 64 KiB page.
const NAPOT_64K: u64 = 0x8 << 10;
const RESERVED: u64 = !((1 << 54) - 1);

/// The PPN field of an address.
const fn ppn(address: u64) -> u64 {
    (address & ((1 << 56) - (1 << 12))) >> 2
}

impl<const L: u32, const N: bool, const P: bool> Format for RiscvSv<L, N, P> {
    const NAME: &'static str = match (L, N, P) {
        (3, false, false) => "riscv-sv39",
        (4, false, false) => "riscv-sv48",
        (5, false, false) => "riscv-sv57",
        (3, true, false) => "riscv-sv39-napot",
        (4, true, false) => "riscv-sv48-napot",
        (5, true, false) => "riscv-sv57-napot",
        (3, false, true) => "riscv-sv39-pbmt",
        (4, false, true) => "riscv-sv48-pbmt",
        (5, false, true) => "riscv-sv57-pbmt",
        (3, true, true) => "riscv-sv39-napot-pbmt",
        (4, true, true) => "riscv-sv48-napot-pbmt",
        (5, true, true) => "riscv-sv57-napot-pbmt",
        _ => panic!("Sv39, Sv48 and Sv57 have 3 to 5 levels"),
    };
    const LEVELS: u32 = L;
    const INDEX_BITS: u32 = 9;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 12 + 9 * L;
    const OUTPUT_BITS: u32 = 56;
    const VALID: u64 = 1;
    const PAGE_SIZES: PageSizes = {
        let sizes = PageSizes::from_bits(match L {
            3 => 1 << 12 | 1 << 21 | 1 << 30,
            4 => 1 << 12 | 1 << 21 | 1 << 30 | 1 << 39,
            _ => 1 << 12 | 1 << 21 | 1 << 30 | 1 << 39 | 1 << 48,
        });
        if N { sizes.with(PageSize::SIZE_64K) } else { sizes }
    };
    const GROUP_BITS: [u32; MAX_LEVELS] = {
        let mut bits = [0; MAX_LEVELS];
        if N {
            bits[L as usize - 1] = 4;
        }
        bits
    };
    const DIRTY: u64 = DIRTY;

    fn supports(access: Access) -> bool {
        let memory = access.intersects(Access::UNCACHED | Access::MMIO);
        let rights = access.rights();
        !rights.is_empty()
            && (rights.contains(Access::READ) || !rights.contains(Access::WRITE))
            && (P && access.is_consistent() || !memory)
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        ppn(next) | VALID
    }

    #[inline]
    fn encode_leaf(_level: u32, out: u64, access: Access) -> u64 {
        let mut entry = ppn(out) | VALID | ACCESSED;
        if !access.contains(Access::PRIVILEGED) {
            entry |= USER;
        }
        if access.contains(Access::MMIO) {
            entry |= PBMT_IO;
        } else if access.contains(Access::UNCACHED) {
            entry |= PBMT_NC;
        }
        entry |= bits(access, READ, WRITE | DIRTY);
        if access.contains(Access::EXEC) {
            entry |= EXEC;
        }
        entry
    }

    #[inline]
    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        Self::encode_leaf(level, out & !0xffff, access) | NAPOT | NAPOT_64K
    }

    #[inline]
    fn is_member(_level: u32, entry: u64) -> bool {
        N && entry & NAPOT != 0
    }

    #[inline]
    fn decode(level: u32, mut entry: u64) -> Entry {
        if Self::is_member(level, entry) {
            // The only size there is, and at the last level only.
            if level + 1 != L || entry & PPN_3_0 != NAPOT_64K || entry & (READ | WRITE | EXEC) == 0 {
                return Entry::Invalid;
            }
            entry &= !(NAPOT | PPN_3_0);
        }
        let mut access = Access::empty();
        if P && entry & (READ | WRITE | EXEC) != 0 {
            match entry & PBMT_FIELD {
                PBMT_NC => access |= Access::UNCACHED,
                PBMT_IO => access |= Access::MMIO,
                PBMT_FIELD => return Entry::Invalid,
                _ => {}
            }
            entry &= !PBMT_FIELD;
        }
        if entry & VALID == 0 || entry & RESERVED != 0 || level >= L {
            return Entry::Invalid;
        }
        let address = (entry & !0x3ff) << 2;
        if entry & (READ | WRITE | EXEC) == 0 {
            // A, D and U are reserved in an entry that points to a table.
            let pointer = level + 1 < L && entry & (ACCESSED | DIRTY | USER) == 0;
            return if pointer { Entry::Table(address) } else { Entry::Invalid };
        }
        let page = 1u64 << (12 + 9 * (L - 1 - level));
        // Write without read is reserved, and a large leaf must be aligned.
        if entry & (READ | WRITE) == WRITE || entry & ACCESSED == 0 || address & (page - 1) != 0 {
            return Entry::Invalid;
        }
        if entry & USER == 0 {
            access |= Access::PRIVILEGED;
        }
        for (bit, right) in [(READ, Access::READ), (WRITE, Access::WRITE), (EXEC, Access::EXEC)] {
            if entry & bit != 0 {
                access |= right;
            }
        }
        Entry::Leaf { out: address, access }
    }

    fn registers(root: u64) -> Registers {
        Register::list([Register::new("satp", u64::from(L + 5) << 60 | root >> 12)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from the figures "Sv39 page table entry" and so on.
    #[test]
    fn golden_entries() {
        type F = RiscvSv39;
        assert_eq!(F::encode_table(0, 0x8000_1000), 0x2000_0401);
        // V 1, R 2, W 4, X 8, U 0x10, A 0x40, D 0x80
        assert_eq!(F::encode_leaf(2, 0x8000_1000, Access::RW | Access::EXEC), 0x2000_04df);
        assert_eq!(F::encode_leaf(2, 0x8000_1000, Access::RW), 0x2000_04d7);
        assert_eq!(F::encode_leaf(2, 0xff_ffff_ffff_f000, Access::READ), 0x003f_ffff_ffff_fc53);
        assert_eq!(F::encode_leaf(1, 0x8020_0000, Access::EXEC), 0x2008_0059);
        assert_eq!(F::encode_leaf(0, 0x1_4000_0000, Access::READ), 0x5000_0053);
        // N, and the lowest four bits of the page number 0b1000
        type N = RiscvSv<3, true>;
        assert_eq!(N::encode_member(2, 0x8000_1000, Access::READ), 0x8000_0000_2000_2053);
        assert_eq!(N::decode(2, 0x8000_0000_2000_2053), Entry::Leaf { out: 0x8000_0000, access: Access::READ });
        assert_eq!(N::decode(2, 0x8000_0000_2000_1053), Entry::Invalid, "a size that is reserved");
        assert_eq!(N::decode(1, 0x8000_0000_2000_2053), Entry::Invalid, "a level without NAPOT pages");
        assert_eq!(F::registers(0x8000_1000).next().unwrap().value, 0x8000_0000_0008_0001);
        assert_eq!(RiscvSv57::registers(0x8000_1000).next().unwrap().value, 0xa000_0000_0008_0001);
    }

    #[test]
    fn reserved_and_faulting_entries() {
        type F = RiscvSv48;
        let page = F::encode_leaf(3, 0x1000, Access::RW);
        assert_eq!(F::decode(3, page & !READ), Entry::Invalid, "write-only is reserved");
        assert_eq!(F::decode(2, page), Entry::Invalid, "a large leaf that is not aligned");
        let supervisor = Entry::Leaf { out: 0x1000, access: Access::RW | Access::PRIVILEGED };
        assert_eq!(F::decode(3, page & !USER), supervisor);
        type P = RiscvSv<4, false, true>;
        let registers = Access::RW | Access::MMIO;
        assert_eq!(P::encode_leaf(3, 0x1000, registers), page | 2 << 61);
        assert_eq!(P::decode(3, page | 2 << 61), Entry::Leaf { out: 0x1000, access: registers });
        assert_eq!(P::decode(3, page | 3 << 61), Entry::Invalid, "a reserved memory type");
        assert_eq!(P::decode(2, VALID | 1 << 61), Entry::Invalid, "PBMT in a table entry");
        assert!(!F::supports(registers) && P::supports(registers));
        assert_eq!(F::decode(3, page & !ACCESSED), Entry::Invalid);
        assert_eq!(F::decode(3, page | 1 << 63), Entry::Invalid, "Svnapot");
        assert_eq!(F::decode(3, page | 1 << 61), Entry::Invalid, "Svpbmt");
        assert_eq!(F::decode(3, VALID | 0x400), Entry::Invalid, "a table below the last level");
        assert_eq!(F::decode(2, VALID | ACCESSED | 0x400), Entry::Invalid, "A in a table entry");
    }
}
