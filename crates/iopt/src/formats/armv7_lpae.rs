//! ARMv7-A long-descriptor tables (LPAE), both stages.

use super::arm64::Arm64;
use super::arm64_s1::Stage1;
use super::arm64_s2::Stage2;

/// ARMv7-A long descriptors (LPAE), stage 1: 32-bit input, 40-bit output, three levels (a root of four entries), leaves
/// of 1 GiB, 2 MiB and 4 KiB.
///
/// Source: Arm Architecture Reference Manual, ARMv7-A and ARMv7-R edition (DDI 0406), section B3.6 "Long-descriptor
/// translation table format"; the same tables serve SMMUv1 and v2 contexts with `CBA2R.VA64 = 0`, `TTBCR.EAE = 1`, and
/// Mali GPUs of the Midgard family keep close to them.
///
/// Entries are those of [`Arm64S1`](crate::Arm64S1) with 4 KiB granules, with one difference: bit 54 is XN and holds
/// for all, bit 53 (PXN) for privileged accesses too.
///
/// Registers beside it: `TTBR0` = the root; `TTBCR` = `EAE`, `EPD1`, `SH0 = 0b11`, `IRGN0 = ORGN0 = 0b01`, `T0SZ
/// = 0`; `MAIR0` attributes as [`Arm64S1`](crate::Arm64S1) has them.
pub type Armv7LpaeS1 = Arm64<Stage1<true>, 12, 32, false, 40>;

/// ARMv7-A long descriptors, stage 2: 40-bit input and output, three levels (a root of two tables).
///
/// Source: DDI 0406, section B3.6. Entries are those of [`Arm64S2`](crate::Arm64S2) with 4 KiB granules; XN is bit 54
/// alone, and bit 53 is 0.
///
/// Registers beside it: `VTTBR` = the root; `VTCR` = `T0SZ = -8` with its sign in `S`, `SL0 = 1`, `SH0 = 0b11`,
/// `IRGN0 = ORGN0 = 0b01`; `HCR.VM = 1`.
pub type Armv7LpaeS2 = Arm64<Stage2<true>, 12, 40, false, 40>;

#[cfg(test)]
mod tests {
    use dmalane_addr::Access;

    use super::super::arm64_s1::UXN;
    use super::*;
    use crate::{Entry, Format, Registers, TableShape};

    /// Put together by hand from the figures of DDI 0406, section B3.6.
    #[test]
    fn golden_entries() {
        type F = Armv7LpaeS1;
        assert_eq!((F::LEVELS, F::NAME), (3, "armv7-lpae-s1"));
        assert_eq!(F::encode_table(0, 0x80_8000_1000), 0x80_8000_1003);
        // 0x3 | AP[1] 0x40 | SH 0x300 | AF 0x400 | nG 0x800; PXN and XN 0x60 << 48
        assert_eq!(F::encode_leaf(2, 0xff_1234_5000, Access::RW), 0x0060_00ff_1234_5f43);
        assert_eq!(F::encode_leaf(1, 0x4020_0000, Access::READ | Access::EXEC), 0x4020_0fc1);
        assert_eq!(F::encode_leaf(0, 0x40_4000_0000, Access::RW), 0x0060_0040_4000_0f41);
        let privileged = F::encode_leaf(2, 0, Access::RW | Access::EXEC | Access::PRIVILEGED);
        let no_exec = Entry::Leaf { out: 0, access: Access::RW | Access::PRIVILEGED };
        assert_eq!(F::decode(2, privileged | UXN), no_exec, "XN holds for all");
        assert_eq!(Armv7LpaeS2::encode_leaf(2, 0xff_1234_5000, Access::RW), 0x0040_00ff_1234_57ff);
    }

    /// Fields of `TTBCR` and `VTCR`, from the registers' own pages.
    #[test]
    fn registers() {
        let values = |r: Registers| r.map(|r| r.value).collect::<alloc::vec::Vec<_>>();
        assert_eq!(values(Armv7LpaeS1::registers(0x12_3456_7000)), [0x12_3456_7000, 0x8080_3500, 0x44_04ff]);
        assert_eq!(values(Armv7LpaeS2::registers(0x12_3456_8000)), [0x12_3456_8000, 0x8000_3558]);
        let shape = TableShape::of::<Armv7LpaeS2>();
        assert_eq!((Armv7LpaeS2::LEVELS, shape.root.bytes()), (3, 8192));
    }
}
