//! ARMv7-A short-descriptor tables.

use dmalane_addr::{Access, PageSize, PageSizes};

use crate::format::MAX_LEVELS;
use crate::{Entry, Format, Register, Registers};

/// ARMv7-A short descriptors: 32-bit input and output, two levels of 32-bit entries (a root of 16 KiB, tables of 1
/// KiB), supersections of 16 MiB, sections of 1 MiB, large pages of 64 KiB and small pages of 4 KiB.
///
/// Source: Arm Architecture Reference Manual, ARMv7-A and ARMv7-R edition (DDI 0406), section B3.5 "Short-descriptor
/// translation table format"; the same tables serve SMMUv1 and v2 contexts with `CBA2R.VA64 = 0`, `TTBCR.EAE = 0`.
///
/// | (super)section | large page | small page | field | written as |
/// |---|---|---|---|---|
/// | 1:0 | 1:0 | 1 | type | (super)section `0b10`, large page `0b01`, small page `0b10`, table `0b01` |
/// | 4 | 15 | 0 | XN | 1 without [`Access::EXEC`] |
/// | 0 | of the table: 2 | of the table: 2 | PXN | 0 |
/// | 2, 3 | 2, 3 | 2, 3 | B, C | 1, 1; with [`Access::MMIO`] 1, 0; with [`Access::UNCACHED`] 0, 0 |
/// | 11:10 | 5:4 | 5:4 | AP\[1:0\] | `0b11`: access for privileged and unprivileged alike; `0b01` with [`Access::PRIVILEGED`] |
/// | 15 | 9 | 9 | AP\[2\] | 1 without [`Access::WRITE`] |
/// | 14:12 | 14:12 | 8:6 | TEX | `0b001`: with C and B write-back, write-allocate, without them not cached; 0 with [`Access::MMIO`]: shareable device memory |
/// | 16 | 10 | 10 | S | 1 |
/// | 17 | 11 | 11 | nG | 1 |
/// | 18 | | | supersection | 1 in a supersection |
/// | 8:5 | of the table | of the table | domain | 0 (in a supersection: address bits 39:36, 0) |
/// | 31:20 | 31:16 | 31:12 | address | a supersection: 31:24, and 35:32 in 23:20, 0; a table: 31:10 |
///
/// The entry of a large page or supersection is repeated 16 times. Supersections are optional in an implementation
/// without large physical addresses.
///
/// Registers beside it: `TTBR0` = the root with bits `0x6a` (inner and outer write-back, shareable tables: IRGN
/// `0b01`, RGN `0b01`, S, NOS), `TTBCR = 0`, `DACR = 1` (domain 0 is checked), `SCTLR.TRE = SCTLR.AFE = 0`.
///
/// A valid entry is readable: an access without [`Access::READ`] is not supported. Of foreign tables, PXN counts for
/// privileged accesses (with it a page is not executable for them), and so does "write for privileged, read for all"
/// (`AP = 0b010`), which reads as read-only; domains are taken to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Armv7;

const TABLE: u64 = 0b01;
/// Section or small page: bit 1. The lowest bit is PXN in a section and XN in a small page.
const LEAF: u64 = 0b10;
const TYPE: u64 = 0b11;
/// A large page, at the second level.
const LARGE: u64 = 0b01;
/// B and C.
const CACHED: u64 = 0b11 << 2;
const BUFFERED: u64 = 0b01 << 2;
/// AP\[1:0\] of a page for privileged accesses, in units of the field.
const PRIVILEGED: u64 = 0b01;
/// In the entry of a table: what it translates is never executed by privileged software.
const TABLE_PXN: u64 = 1 << 2;
const SUPERSECTION: u64 = 1 << 18;
/// Bits 39:32 of the output address of a supersection.
const SUPER_HIGH: u64 = 0xf << 20 | 0xf << 5;

/// Where the fields of a leaf are that sections and small pages have at different places.
struct Fields {
    xn: u64,
    ap: u64,
    read_only: u64,
    tex: u64,
    shared: u64,
    not_global: u64,
    address: u64,
}

const SECTION: Fields = Fields {
    xn: 1 << 4,
    ap: 0b11 << 10,
    read_only: 1 << 15,
    tex: 0b001 << 12,
    shared: 1 << 16,
    not_global: 1 << 17,
    address: 0xfff0_0000,
};
const SUPER: Fields = Fields { address: 0xff00_0000, ..SECTION };
const LARGE_PAGE: Fields = Fields { xn: 1 << 15, tex: 0b001 << 12, address: 0xffff_0000, ..SMALL_PAGE };
const SMALL_PAGE: Fields = Fields {
    xn: 1,
    ap: 0b11 << 4,
    read_only: 1 << 9,
    tex: 0b001 << 6,
    shared: 1 << 10,
    not_global: 1 << 11,
    address: 0xffff_f000,
};

impl Fields {
    /// The lowest bit of AP.
    const fn ap_lowest(&self) -> u64 {
        self.ap & self.ap.wrapping_neg()
    }

    /// Access that a leaf permits, PXN ignored; `None` for no access at all.
    #[inline]
    fn access(&self, entry: u64) -> Option<Access> {
        let mut access = Access::READ;
        let ap = (entry & self.ap) / self.ap_lowest();
        if ap == 0 {
            return None;
        }
        if ap == PRIVILEGED {
            access |= Access::PRIVILEGED;
        }
        if entry & self.read_only == 0 && ap != 0b10 {
            access |= Access::WRITE;
        }
        if entry & self.xn == 0 {
            access |= Access::EXEC;
        }
        // TEX, C and B without remapping: Strongly-ordered and Device memory; normal memory that is not cached.
        let tex = entry & self.tex_field();
        if tex == 0 && entry & CACHED <= BUFFERED || tex == self.tex << 1 && entry & CACHED == 0 {
            access |= Access::MMIO;
        } else if tex == self.tex && entry & CACHED == 0 {
            access |= Access::UNCACHED;
        }
        Some(access)
    }

    /// The field TEX; `tex` is its lowest bit.
    const fn tex_field(&self) -> u64 {
        self.tex * 0b111
    }

    /// A leaf but for its type.
    #[inline]
    fn encode(&self, out: u64, access: Access) -> u64 {
        let memory = match access.intersection(Access::MMIO.union(Access::UNCACHED)) {
            Access::MMIO => BUFFERED,
            Access::UNCACHED => self.tex,
            _ => self.tex | CACHED,
        };
        let mut entry = out & self.address | memory | self.shared | self.not_global;
        entry |= if access.contains(Access::PRIVILEGED) { self.ap_lowest() * PRIVILEGED } else { self.ap };
        if !access.contains(Access::WRITE) {
            entry |= self.read_only;
        }
        if !access.contains(Access::EXEC) {
            entry |= self.xn;
        }
        entry
    }
}

impl Format for Armv7 {
    const NAME: &'static str = "armv7-short";
    const LEVELS: u32 = 2;
    const INDEX_BITS: u32 = 8;
    const ENTRY_BYTES: u64 = 4;
    const GRANULE: PageSize = PageSize::SIZE_4K;
    const INPUT_BITS: u32 = 32;
    const OUTPUT_BITS: u32 = 32;
    const PAGE_SIZES: PageSizes = PageSizes::from_bits(1 << 12 | 1 << 16 | 1 << 20 | 1 << 24);
    const GROUP_BITS: [u32; MAX_LEVELS] = [4, 4, 0, 0, 0, 0];

    fn supports(access: Access) -> bool {
        access.contains(Access::READ) && access.is_consistent()
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        next & 0xffff_fc00 | TABLE
    }

    #[inline]
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64 {
        let f = if level == 0 { &SECTION } else { &SMALL_PAGE };
        f.encode(out, access) | LEAF
    }

    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        if level == 0 {
            SUPER.encode(out, access) | LEAF | SUPERSECTION
        } else {
            LARGE_PAGE.encode(out, access) | LARGE
        }
    }

    #[inline]
    fn is_member(level: u32, entry: u64) -> bool {
        if level == 0 { entry & (LEAF | SUPERSECTION) == LEAF | SUPERSECTION } else { entry & TYPE == LARGE }
    }

    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        // No page has PXN. In one for privileged accesses XN says the same.
        let f = if leaf & TYPE == LARGE { LARGE_PAGE } else { SMALL_PAGE };
        let privileged = leaf & f.ap == f.ap_lowest() * PRIVILEGED;
        if table & TABLE_PXN != 0 && privileged { leaf | f.xn } else { leaf }
    }

    #[inline]
    fn is_present(entry: u64) -> bool {
        entry & TYPE != 0
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        let f = match (level, entry & TYPE) {
            (0, TABLE) => return Entry::Table(entry & 0xffff_fc00),
            (0, LEAF | 0b11) if entry & SUPERSECTION == 0 => SECTION,
            // Output addresses above 32 bits are not used.
            (0, LEAF | 0b11) if entry & SUPER_HIGH == 0 => SUPER,
            (1, LARGE) => LARGE_PAGE,
            (1, LEAF | 0b11) => SMALL_PAGE,
            _ => return Entry::Invalid,
        };
        let Some(mut access) = f.access(entry) else { return Entry::Invalid };
        // The lowest bit of a section is PXN.
        if level == 0 && entry & 1 != 0 && access.contains(Access::PRIVILEGED) {
            access -= Access::EXEC;
        }
        Entry::Leaf { out: entry & f.address, access }
    }

    fn registers(root: u64) -> Registers {
        Register::list([Register::new("TTBR0", root | 0x6a), Register::new("TTBCR", 0), Register::new("DACR", 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together by hand from figures B3-4 and B3-5 of DDI 0406.
    #[test]
    fn golden_entries() {
        type F = Armv7;
        assert_eq!(F::encode_table(0, 0x8000_1400), 0x8000_1401);
        // small page: 0b10, C and B 0xc, AP 0x30, TEX 0x40, S 0x400, nG 0x800; XN 1, AP[2] 0x200
        assert_eq!(F::encode_leaf(1, 0x1234_5000, Access::RW | Access::EXEC), 0x1234_5c7e);
        assert_eq!(F::encode_leaf(1, 0x1234_5000, Access::RW), 0x1234_5c7f);
        assert_eq!(F::encode_leaf(1, 0xffff_f000, Access::READ), 0xffff_fe7f);
        // section: 0b10, C and B 0xc, AP 0xc00, TEX 0x1000, S 0x1_0000, nG 0x2_0000; XN 0x10, AP[2] 0x8000
        assert_eq!(F::encode_leaf(0, 0x1230_0000, Access::RW | Access::EXEC), 0x1233_1c0e);
        assert_eq!(F::encode_leaf(0, 0x1230_0000, Access::READ), 0x1233_9c1e);
        // supersection: bit 18, the same entry whichever of the 16 it is
        assert_eq!(F::encode_member(0, 0x1230_0000, Access::RW | Access::EXEC), 0x1207_1c0e);
        // large page: 0b01, C and B 0xc, AP 0x30, S 0x400, nG 0x800, TEX 0x1000; AP[2] 0x200, XN 0x8000
        assert_eq!(F::encode_member(1, 0x1234_5000, Access::RW | Access::EXEC), 0x1234_1c3d);
        assert_eq!(F::encode_member(1, 0x1234_5000, Access::READ), 0x1234_9e3d);
        // AP 0b01; B alone, without TEX; TEX alone
        assert_eq!(F::encode_leaf(1, 0x1234_5000, Access::RW | Access::PRIVILEGED), 0x1234_5c5f);
        assert_eq!(F::encode_leaf(1, 0x1234_5000, Access::RW | Access::MMIO), 0x1234_5c37);
        assert_eq!(F::encode_leaf(0, 0x1230_0000, Access::RW | Access::UNCACHED), 0x1233_1c12);
    }

    #[test]
    fn reserved_and_faulting_entries() {
        type F = Armv7;
        let page = F::encode_leaf(1, 0x1000, Access::RW);
        assert_eq!(F::decode(0, 0x1277_1c0e | 1 << 5), Entry::Invalid, "supersection above 32 bits");
        assert_eq!(F::decode(1, 0x1_0001), Entry::Invalid, "large page without rights");
        let privileged = Entry::Leaf { out: 0x1000, access: Access::RW | Access::PRIVILEGED };
        assert_eq!(F::decode(1, page & !(1 << 5)), privileged, "AP = 01");
        assert_eq!(F::decode(1, page & !(1 << 4)), Entry::Leaf { out: 0x1000, access: Access::READ }, "AP = 10");
        assert_eq!(
            F::decode(0, 0x1233_0402),
            Entry::Leaf { out: 0x1230_0000, access: Access::RW | Access::EXEC | Access::PRIVILEGED | Access::MMIO }
        );
        let boot = |pxn: u64| F::decode(0, 0x1231_140e | pxn);
        let all = Access::RW | Access::EXEC | Access::PRIVILEGED;
        assert_eq!(boot(0), Entry::Leaf { out: 0x1230_0000, access: all });
        assert_eq!(boot(1), Entry::Leaf { out: 0x1230_0000, access: all - Access::EXEC });
        for page in [F::encode_leaf(1, 0x1_0000, all), F::encode_member(1, 0x1_0000, all)] {
            let page = F::decode(1, F::inherit(TABLE | TABLE_PXN, page));
            assert_eq!(page, Entry::Leaf { out: 0x1_0000, access: all - Access::EXEC });
        }
    }
}
