//! Arm VMSAv8-64 stage 2 tables.

use dmalane_addr::Access;

use super::arm64::*;
use super::rights::{bits, rights};
use crate::{Register, Registers};

/// VMSAv8-64 stage 2 with granules of 2^`GRANULE` bytes (12, 14 or 16) and `INPUT` bits of intermediate physical
/// address; output as [`Arm64S1`](crate::Arm64S1) has it.
///
/// The walk starts at the lowest level that up to 16 *concatenated* root tables can reach, which saves a level: with 4
/// KiB granules and 40 bits the root is two tables, 8 KiB, and with 52 bits it is 16 tables at level 0. The root is
/// aligned to its whole size. Page sizes are those of [`Arm64S1`](crate::Arm64S1).
///
/// Source: Arm Architecture Reference Manual for A-profile (DDI 0487), chapter D8, sections "Translation table
/// descriptor formats", "Stage 2 data access permissions", "Stage 2 instruction execution permissions", "Stage 2 memory
/// attributes" and "Concatenated translation tables"; Arm SMMUv3 (IHI 0070), section "Stream Table Entry".
///
/// | bits | field | written as |
/// |---|---|---|
/// | 1:0 | type | `0b11` table or page, `0b01` block |
/// | 5:2 | MemAttr | `0b1111`, normal memory, write-back; `0b0101`, normal memory, non-cacheable, with [`Access::UNCACHED`]; `0b0001`, Device-nGnRE, with [`Access::MMIO`] |
/// | 6 | S2AP\[0\] | [`Access::READ`] |
/// | 7 | S2AP\[1\] | [`Access::WRITE`]; if `DIRTY`, 0 until the device has written |
/// | 51 | DBM | [`Access::WRITE`], if `DIRTY` (see [`Arm64S1`](crate::Arm64S1)) |
/// | 9:8 | SH | `0b11` inner shareable; with FEAT_LPA2 address bits 51:50 |
/// | 10 | AF | 1 |
/// | 47:12 | address | from bit 14 or 16 with larger granules, to 49 with FEAT_LPA2; 15:12 are bits 51:48 with FEAT_LPA |
/// | 52 | Contiguous | 1 in the entries of a group, if `CONTIGUOUS` (see [`Arm64S1`](crate::Arm64S1)) |
/// | 54:53 | XN | `0b10` without [`Access::EXEC`], `0b00` with it |
///
/// Registers beside it: `VTTBR_EL2` = the root; `VTCR_EL2` (SMMU: the stream table entry) `T0SZ = 64 - INPUT`,
/// `SL0` = the level to start at, `TG0` = the granule, `PS = 0b101` (48 bits; `0b110` for 52), `SH0 = 0b11`, `IRGN0 =
/// ORGN0 = 0b01`, `HA = HD = 0` (1 if `DIRTY`), `DS = 1` with FEAT_LPA2, bit 31 = 1; `HCR_EL2.VM = 1` with `FWB = 0`.
/// An implementation may have fewer bits of physical address, and then takes an `INPUT` up to that many only.
///
/// Write-only entries exist, but not with `DIRTY`. Fetching instructions takes the right to read: [`Access::EXEC`]
/// without [`Access::READ`] is not supported. Stage 2 does not tell privileged accesses from others.
pub type Arm64S2<
    const GRANULE: u32,
    const INPUT: u32 = 48,
    const CONTIGUOUS: bool = false,
    const OUTPUT: u32 = 48,
    const DIRTY: bool = false,
> = Arm64<Stage2, GRANULE, INPUT, CONTIGUOUS, OUTPUT, DIRTY>;

/// Stage 2 with 4 KiB granules and 48 bits: four levels.
#[allow(non_camel_case_types)]
pub type Arm64S2_4k = Arm64S2<12>;
/// Stage 2 with 16 KiB granules and 48 bits: three levels, the root is two tables.
#[allow(non_camel_case_types)]
pub type Arm64S2_16k = Arm64S2<14>;
/// Stage 2 with 64 KiB granules and 48 bits: three levels.
#[allow(non_camel_case_types)]
pub type Arm64S2_64k = Arm64S2<16>;

/// Rights, memory types and registers of stage 2: of Armv8, or of Armv7 if `V7`.
#[derive(Clone, Copy, Debug)]
pub struct Stage2<const V7: bool = false>;

const MEMORY: u64 = 0b1111 << 2;
const MEMORY_UNCACHED: u64 = 0b0101 << 2;
const MEMORY_MMIO: u64 = 0b0001 << 2;
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const XN: u64 = 0b10 << 53;
const XN_FIELD: u64 = 0b11 << 53;

impl<const V7: bool> ArmStage for Stage2<V7> {
    const STAGE: &'static str = "s2";
    const NAME: Option<&'static str> = if V7 { Some("armv7-lpae-s2") } else { None };
    const ROOT_BITS: u32 = 4;
    const DIRTY: u64 = WRITE;
    const DIRTY_IS_CLEAR: bool = false;

    fn supports(access: Access, dirty: bool) -> bool {
        let rights = access.rights();
        !access.contains(Access::PRIVILEGED) && (rights.contains(Access::READ) || rights == Access::WRITE && !dirty)
    }

    #[inline]
    fn encode(access: Access, dirty: bool) -> u64 {
        let mut entry = match access.intersection(Access::MMIO.union(Access::UNCACHED)) {
            Access::MMIO => MEMORY_MMIO,
            Access::UNCACHED => MEMORY_UNCACHED,
            _ => MEMORY,
        };
        entry |= bits(access, READ, if dirty { DBM } else { WRITE });
        if !access.contains(Access::EXEC) {
            entry |= XN;
        }
        entry
    }

    #[inline]
    fn decode(leaf: u64, dirty: bool) -> Access {
        let mut access = match leaf & MEMORY {
            MEMORY_UNCACHED => Access::UNCACHED,
            // Any of the four kinds of device memory.
            kind if kind & 0b1100 << 2 == 0 => Access::MMIO,
            _ => Access::empty(),
        };
        access |= rights(leaf, READ, if dirty { WRITE | DBM } else { WRITE });
        // The values other than 0 permit one exception level at most.
        if leaf & XN_FIELD == 0 && leaf & READ != 0 {
            access |= Access::EXEC;
        }
        access
    }

    fn registers(f: &Fields, root: u64) -> Registers {
        if V7 {
            // T0SZ is 32 less the bits of input, in four bits and a sign.
            let size = u64::from(32u32.wrapping_sub(f.input)) & 0xf | u64::from(f.input > 32) << 4;
            let vtcr = 1 << 31 | table_control(f.granule, f.input) & !0xff | start_level(f) << 6 | size;
            return Register::list([Register::new("VTTBR", root), Register::new("VTCR", vtcr)]);
        }
        let vtcr = table_control(f.granule, f.input)
            | start_level(f) << 6
            | output_size(f.output) << 16    // PS
            | 1 << 31                        // RES1
            | if f.dirty { 0b11 << 21 } else { 0 } // HA, HD
            | ds(f.granule, f.output) << 32;
        Register::list([Register::new("VTTBR_EL2", ttbr(root)), Register::new("VTCR_EL2", vtcr)])
    }
}

/// `SL0`: counts up from the level that two levels of 4 KiB granules, or one level of larger ones, start at.
fn start_level(f: &Fields) -> u64 {
    u64::from(f.levels) - if f.granule == 12 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Entry, Format, TableShape};

    /// Put together by hand from the descriptor figures of DDI 0487, chapter D8.
    #[test]
    fn golden_entries() {
        type F = Arm64S2_4k;
        assert_eq!(F::encode_table(1, 0x8000_1000), 0x0000_0000_8000_1003);
        // page: 0x3 | MemAttr 0x3c | SH 0x300 | AF 0x400, then read 0x40, write 0x80, XN[1] 0x40 << 48
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::EXEC), 0x0000_0000_1234_57ff);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x0040_0000_1234_57ff);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::READ), 0x0040_0000_1234_577f);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::WRITE), 0x0040_0000_1234_57bf);
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::RW), 0x0040_0000_4020_07fd);
        assert_eq!(Arm64S2_16k::encode_leaf(1, 0x4200_0000, Access::RW), 0x0040_0000_4200_07fd);
        assert_eq!(Arm64S2_64k::encode_leaf(2, 0x1235_0000, Access::RW), 0x0040_0000_1235_07ff);
        // MemAttr 0b0001 and 0b0101
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::MMIO), 0x0040_0000_1234_57c7);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::UNCACHED), 0x0040_0000_1234_57d7);
        let strongly_ordered = Entry::Leaf { out: 0x1234_5000, access: Access::RW | Access::MMIO };
        assert_eq!(F::decode(3, 0x0040_0000_1234_57c3), strongly_ordered, "Device-nGnRnE");
        // dirty: S2AP[1] is set by the device, DBM 0x8 << 48
        type D = Arm64S2<12, 48, false, 48, true>;
        assert_eq!(D::encode_leaf(3, 0x1234_5000, Access::RW), 0x0048_0000_1234_577f);
        assert_eq!(D::decode(3, 0x0048_0000_1234_57ff), Entry::Leaf { out: 0x1234_5000, access: Access::RW });
        assert_eq!((D::NAME, D::registers(0).nth(1).unwrap().value), ("arm64-s2-4k-dirty", 0x8065_3590));
        // FEAT_LPA2: no SH, address bits 51:50 in its place
        type M = Arm64S2<14, 52, false, 52>;
        assert_eq!(M::encode_leaf(3, 0xe_0000_1234_4000, Access::RW), 0x0042_0000_1234_47ff);
        assert_eq!(M::encode_leaf(3, 0x1234_4000, Access::RW), 0x0040_0000_1234_44ff);
    }

    #[test]
    fn reserved_and_faulting_entries() {
        type F = Arm64S2_4k;
        let page = F::encode_leaf(3, 0x1000, Access::RW);
        assert_eq!(F::decode(3, page & !(0b11 << 6)), Entry::Invalid, "no access");
        assert_eq!(F::decode(3, page & !AF), Entry::Invalid, "access flag");
        assert_eq!(F::decode(3, page & !0b10), Entry::Invalid, "type 0b01 at level 3");
        let exec = F::encode_leaf(3, 0x1000, Access::READ | Access::EXEC);
        let data = Entry::Leaf { out: 0x1000, access: Access::READ };
        assert_eq!(F::decode(3, exec | 1 << 53), data, "executable for one exception level");
        assert!(!F::supports(Access::empty()) && !F::supports(Access::WRITE | Access::EXEC));
        assert!(!F::supports(Access::READ | Access::PRIVILEGED));
    }

    /// "Concatenated translation tables": 40 bits with 4 KiB start at level 1 with two tables, 43 bits with 16.
    #[test]
    fn concatenated_roots() {
        let root = |shape: TableShape| shape.root.bytes() / shape.table.bytes();
        assert_eq!((Arm64S2::<12, 40>::LEVELS, root(TableShape::of::<Arm64S2<12, 40>>())), (3, 2));
        assert_eq!((Arm64S2::<12, 43>::LEVELS, root(TableShape::of::<Arm64S2<12, 43>>())), (3, 16));
        assert_eq!((Arm64S2::<12, 44>::LEVELS, root(TableShape::of::<Arm64S2<12, 44>>())), (4, 1));
        assert_eq!((Arm64S2_16k::LEVELS, root(TableShape::of::<Arm64S2_16k>())), (3, 2));
        assert_eq!(
            (Arm64S2::<12, 52, false, 52>::LEVELS, root(TableShape::of::<Arm64S2<12, 52, false, 52>>())),
            (4, 16)
        );
        assert_eq!((Arm64S2_64k::LEVELS, root(TableShape::of::<Arm64S2_64k>())), (3, 1));
    }

    /// Fields of `VTCR_EL2`, from the register's own page of DDI 0487.
    #[test]
    fn registers() {
        let vtcr = |mut r: Registers| r.nth(1).unwrap().value;
        assert_eq!(vtcr(Arm64S2_4k::registers(0)), 0x8005_3590); // SL0 2: level 0
        assert_eq!(vtcr(Arm64S2::<12, 40>::registers(0)), 0x8005_3558); // SL0 1: level 1
        assert_eq!(vtcr(Arm64S2_16k::registers(0)), 0x8005_b590); // SL0 2: level 1
        assert_eq!(vtcr(Arm64S2_64k::registers(0)), 0x8005_7590); // SL0 2: level 1
        assert_eq!(vtcr(Arm64S2::<12, 52, false, 52>::registers(0)), 0x1_8006_358c); // SL0 2: level 0; DS: bit 32
        assert_eq!(vtcr(Arm64S2::<14, 52, false, 52>::registers(0)), 0x1_8006_b5cc); // SL0 3: level 0
    }
}
