//! Arm VMSAv8-64 stage 1 tables.

use dmalane_addr::Access;

use super::arm64::*;
use crate::{Register, Registers};

/// VMSAv8-64 stage 1 with granules of 2^`GRANULE` bytes (12, 14 or 16), `INPUT` bits of input address and `OUTPUT` bits
/// of output: 48, or 52 with FEAT_LPA2 (with 64 KiB granules FEAT_LPA). Input of more than 48 bits, at most 52, takes
/// FEAT_LPA2 too (FEAT_LVA). The blocks of 512 GiB, 64 GiB and 4 TiB that come with 52 bits are not used.
///
/// | granule | levels for 48 bits | page sizes |
/// |---|---|---|
/// | 4 KiB | 4 | 4 KiB, 2 MiB, 1 GiB |
/// | 16 KiB | 4 (a root of two entries) | 16 KiB, 32 MiB |
/// | 64 KiB | 3 (a root of 64 entries) | 64 KiB, 512 MiB |
///
/// For 52 bits: 5 (a root of 16 entries, which the architecture calls level -1), 4 (32 entries), 3 (1024 entries).
///
/// Source: Arm Architecture Reference Manual for A-profile (DDI 0487), chapter D8 "The AArch64 Virtual Memory System
/// Architecture", sections "Translation table descriptor formats", "Memory access control" and "Memory region
/// attributes"; Arm SMMUv3 (IHI 0070), section "Context Descriptor".
///
/// | bits | field | written as |
/// |---|---|---|
/// | 1:0 | type | `0b11` table or page, `0b01` block |
/// | 4:2 | AttrIndx | 1 with [`Access::MMIO`], 2 with [`Access::UNCACHED`], else 0: see `MAIR_EL1` below |
/// | 5 | NS | 0 |
/// | 6 | AP\[1\] | 0 with [`Access::PRIVILEGED`]; else 1: transactions of a device are unprivileged by default |
/// | 7 | AP\[2\] | 1 without [`Access::WRITE`]; if `DIRTY`, also with it until the device has written |
/// | 9:8 | SH | `0b11` inner shareable; with FEAT_LPA2 address bits 51:50 |
/// | 10 | AF | 1, so that the first access does not fault |
/// | 11 | nG | 1: the TLB entry belongs to the ASID of the context |
/// | 47:12 | address | from bit 14 or 16 with larger granules, to 49 with FEAT_LPA2; low bits of a block are zero; 15:12 are bits 51:48 with FEAT_LPA |
/// | 51 | DBM | 1 with [`Access::WRITE`], if `DIRTY` |
/// | 53, 54 | PXN, UXN | 1 without [`Access::EXEC`]; UXN also with [`Access::PRIVILEGED`] |
/// | 52 | Contiguous | 1 in the entries of a group, if `CONTIGUOUS` |
///
/// With `CONTIGUOUS`, 16 neighbours with 4 KiB granules (128 pages or 32 blocks with 16 KiB, 32 with 64 KiB) that map
/// aligned, contiguous memory are written as a group, which a device may cache as one: the page sizes are then 4K 64K
/// 2M 32M 1G 16G, or 16K 2M 32M 1G, or 64K 2M 512M 16G. Without it the bit is ignored, as hardware may do.
///
/// With `DIRTY` a device that updates the tables (FEAT_HAFDBS with `HD = 1`; `SMMU_IDR0.HTTU`) says which leaves it has
/// written through, by clearing AP\[2\]: [`take_dirty`](crate::PageTable::take_dirty). A device that does not would
/// fault instead.
///
/// Table descriptors carry none of the hierarchical limits (bits 63:59); [`walk`](crate::walk()) applies those of
/// others (APTable, UXNTable, PXNTable). A leaf that unprivileged software may execute and not read counts as
/// privileged.
///
/// Registers beside it: `TTBR0_EL1` = the root; `TCR_EL1` (SMMU: the context descriptor) `T0SZ = 64 - INPUT`,
/// `TG0` = the granule, `IPS = 0b101` (48 bits; `0b110` for 52), `SH0 = 0b11`, `IRGN0 = ORGN0 = 0b01` (write-back
/// tables), `EPD1 = 1`, `HA = HD = 0` (1 if `DIRTY`), `DS = 1` with FEAT_LPA2; `MAIR_EL1` = `0x4404ff` (attribute 0:
/// normal memory, write-back; 1: Device-nGnRE; 2: normal memory, non-cacheable). The upper half (`TTBR1`) walks the
/// same tables, with addresses counted from its own start. Without `IDR3.BBML` of 2 the device must be quiet on a block
/// while an unmap splits it (level 1 requires the bit nT, which is never written).
///
/// Stage 1 has no write-only and no execute-only entry for this use: an access without [`Access::READ`] is not
/// supported.
pub type Arm64S1<
    const GRANULE: u32,
    const INPUT: u32 = 48,
    const CONTIGUOUS: bool = false,
    const OUTPUT: u32 = 48,
    const DIRTY: bool = false,
> = Arm64<Stage1, GRANULE, INPUT, CONTIGUOUS, OUTPUT, DIRTY>;

/// Stage 1 with 4 KiB granules and 48 bits.
#[allow(non_camel_case_types)] // "Arm64S14k" would read as stage 14
pub type Arm64S1_4k = Arm64S1<12>;
/// Stage 1 with 16 KiB granules and 48 bits.
#[allow(non_camel_case_types)]
pub type Arm64S1_16k = Arm64S1<14>;
/// Stage 1 with 64 KiB granules and 48 bits.
#[allow(non_camel_case_types)]
pub type Arm64S1_64k = Arm64S1<16>;

/// Rights, memory types and registers of stage 1: of Armv8, or of Armv7 if `V7`.
#[derive(Clone, Copy, Debug)]
pub struct Stage1<const V7: bool = false>;

/// `MAIR_EL1`: attribute 0 is normal memory, write-back; 1 Device-nGnRE; 2 normal memory, non-cacheable.
const MAIR: u64 = 0x44_04_ff;
const ATTRIBUTE: u64 = 0b111 << 2;
const ATTRIBUTE_MMIO: u64 = 1 << 2;
const ATTRIBUTE_UNCACHED: u64 = 2 << 2;
const AP_UNPRIVILEGED: u64 = 1 << 6;
const AP_READ_ONLY: u64 = 1 << 7;
const NG: u64 = 1 << 11;
const PXN: u64 = 1 << 53;
/// UXN; XN where there is one for all.
pub(super) const UXN: u64 = 1 << 54;
/// In the entry of a table, what it says of all leaves below: PXNTable, UXNTable, APTable.
const TABLE_PXN: u64 = 1 << 59;
const TABLE_UXN: u64 = 1 << 60;
const TABLE_PRIVILEGED: u64 = 1 << 61;
const TABLE_READ_ONLY: u64 = 1 << 62;

impl<const V7: bool> ArmStage for Stage1<V7> {
    const STAGE: &'static str = "s1";
    const NAME: Option<&'static str> = if V7 { Some("armv7-lpae-s1") } else { None };
    const ROOT_BITS: u32 = 0;
    const DIRTY: u64 = AP_READ_ONLY;
    const DIRTY_IS_CLEAR: bool = true;

    fn supports(access: Access, _dirty: bool) -> bool {
        access.contains(Access::READ)
    }

    #[inline]
    fn encode(access: Access, dirty: bool) -> u64 {
        let mut entry = NG;
        if access.contains(Access::MMIO) {
            entry |= ATTRIBUTE_MMIO;
        } else if access.contains(Access::UNCACHED) {
            entry |= ATTRIBUTE_UNCACHED;
        }
        if !access.contains(Access::PRIVILEGED) {
            entry |= AP_UNPRIVILEGED;
        }
        if !access.contains(Access::WRITE) {
            entry |= AP_READ_ONLY;
        } else if dirty {
            entry |= AP_READ_ONLY | DBM;
        }
        if !access.contains(Access::EXEC) {
            entry |= PXN | UXN;
        } else if access.contains(Access::PRIVILEGED) && !V7 {
            entry |= UXN; // or EL0 might execute what it may not read
        }
        entry
    }

    #[inline]
    fn decode(leaf: u64, dirty: bool) -> Access {
        let mut access = Access::READ;
        if leaf & AP_READ_ONLY == 0 || dirty && leaf & DBM != 0 {
            access |= Access::WRITE;
        }
        let privileged = leaf & AP_UNPRIVILEGED == 0;
        if privileged {
            access |= Access::PRIVILEGED;
        }
        // XN of Armv7 holds for privileged accesses too.
        let never = if !privileged { UXN } else { PXN | if V7 { UXN } else { 0 } };
        if leaf & never == 0 {
            access |= Access::EXEC;
        }
        match leaf & ATTRIBUTE {
            ATTRIBUTE_MMIO => access |= Access::MMIO,
            ATTRIBUTE_UNCACHED => access |= Access::UNCACHED,
            _ => {}
        }
        access
    }

    #[inline]
    fn inherit(table: u64, mut leaf: u64) -> u64 {
        if table & TABLE_PRIVILEGED != 0 {
            leaf &= !AP_UNPRIVILEGED;
        }
        if table & TABLE_READ_ONLY != 0 {
            leaf = leaf & !DBM | AP_READ_ONLY;
        }
        if table & TABLE_UXN != 0 {
            leaf |= UXN;
        }
        if table & TABLE_PXN != 0 {
            leaf |= PXN;
        }
        leaf
    }

    #[inline]
    fn unprivileged(leaf: u64) -> Access {
        // EL0 may execute what it may not read; Armv7 forbids that.
        if leaf & UXN == 0 && !V7 { Access::EXEC } else { Access::empty() }
    }

    fn registers(f: &Fields, root: u64) -> Registers {
        if V7 {
            // The fields from bit 8 on are where those of TCR are; T0SZ is 32 less the bits of input.
            let ttbcr = 1 << 31 | 1 << 23 | table_control(f.granule, f.input) & !0xff | u64::from(32 - f.input);
            return Register::list([
                Register::new("TTBR0", root),
                Register::new("TTBCR", ttbcr),
                Register::new("MAIR0", MAIR),
            ]);
        }
        let tg1: u64 = match f.granule {
            12 => 0b10,
            14 => 0b01,
            _ => 0b11,
        };
        let tcr = table_control(f.granule, f.input)
            | 1 << 23                        // EPD1
            | tg1 << 30                      // TG1: not used, but 0 is reserved there
            | output_size(f.output) << 32    // IPS
            | if f.dirty { 0b11 << 39 } else { 0 } // HA, HD
            | ds(f.granule, f.output) << 59;
        Register::list([
            Register::new("TTBR0_EL1", ttbr(root)),
            Register::new("TCR_EL1", tcr),
            Register::new("MAIR_EL1", MAIR),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Entry, Format};

    /// Put together by hand from the descriptor figures of DDI 0487, chapter D8.
    #[test]
    fn golden_entries() {
        type F = Arm64S1_4k;
        assert_eq!(F::encode_table(0, 0x8000_1000), 0x0000_0000_8000_1003);
        // page: 0x3 | AP[1] 0x40 | SH 0x300 | AF 0x400 | nG 0x800, then read-only 0x80, PXN and UXN 0x60 << 48
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::EXEC), 0x0000_0000_1234_5f43);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW), 0x0060_0000_1234_5f43);
        assert_eq!(F::encode_leaf(3, 0xffff_ffff_f000, Access::READ), 0x0060_ffff_ffff_ffc3);
        // AP[1] 0; AttrIndx 1 and 2
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::PRIVILEGED), 0x0060_0000_1234_5f03);
        let code = Access::READ | Access::EXEC | Access::PRIVILEGED;
        assert_eq!(F::encode_leaf(3, 0x1234_5000, code), 0x0040_0000_1234_5f83);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::MMIO), 0x0060_0000_1234_5f47);
        assert_eq!(F::encode_leaf(3, 0x1234_5000, Access::RW | Access::UNCACHED), 0x0060_0000_1234_5f4b);
        // blocks: type 0b01
        assert_eq!(F::encode_leaf(2, 0x4020_0000, Access::READ | Access::EXEC), 0x0000_0000_4020_0fc1);
        assert_eq!(F::encode_leaf(1, 0x40_4000_0000, Access::RW), 0x0060_0040_4000_0f41);
        // the contiguous bit is 0x10 << 48, and each entry has its own address
        type C = Arm64S1<12, 48, true>;
        assert_eq!(C::encode_member(3, 0x1234_5000, Access::RW), 0x0070_0000_1234_5f43);
        assert_eq!(C::decode(3, 0x0070_0000_1234_5f43), Entry::Leaf { out: 0x1234_0000, access: Access::RW });
        assert!(C::is_member(3, 0x0070_0000_1234_5f43) && !F::is_member(3, 0x0070_0000_1234_5f43));
        // FEAT_LPA: address bits 51:48 in 15:12, of tables too; in TTBR0 in 5:2
        type L = Arm64S1<16, 52, false, 52>;
        assert_eq!(L::encode_leaf(2, 0xa_0000_1235_0000, Access::READ), 0x0060_0000_1235_afc3);
        assert_eq!(L::encode_table(0, 0xf_0000_1235_0000), 0x0000_0000_1235_f003);
        assert_eq!(L::decode(2, 0x0060_0000_1235_afc3), Entry::Leaf { out: 0xa_0000_1235_0000, access: Access::READ });
        assert_eq!(L::registers(0xa_0000_1235_0000).next().unwrap().value, 0x1235_0028);
        assert_eq!(L::registers(0).nth(1).unwrap().value, 0x0000_0006_c080_750c);
        // FEAT_LPA2: address bits 49:12 in place, 51:50 in 9:8, where SH was
        type M = Arm64S1<12, 52, false, 52>;
        assert_eq!((M::LEVELS, M::NAME), (5, "arm64-s1-4k-52"));
        assert_eq!(M::encode_leaf(4, 0xa_0000_1234_5000, Access::READ), 0x0062_0000_1234_5ec3);
        assert_eq!(M::encode_table(0, 0xf_0000_1234_5000), 0x0003_0000_1234_5303);
        assert_eq!(M::decode(4, 0x0062_0000_1234_5ec3), Entry::Leaf { out: 0xa_0000_1234_5000, access: Access::READ });
        assert_eq!(M::registers(0xa_0000_1234_5000).next().unwrap().value, 0x1234_5028);
        assert_eq!(Arm64S1::<14, 52, true, 52>::LEVELS, 4);
        // dirty: read-only until it is written through, DBM 0x8 << 48
        type D = Arm64S1<12, 48, false, 48, true>;
        assert_eq!(D::encode_leaf(3, 0x1234_5000, Access::RW), 0x0068_0000_1234_5fc3);
        assert_eq!(D::encode_leaf(3, 0x1234_5000, Access::READ), 0x0060_0000_1234_5fc3);
        assert_eq!(D::decode(3, 0x0068_0000_1234_5f43), Entry::Leaf { out: 0x1234_5000, access: Access::RW });
        let leaf = Entry::Leaf { out: 0x1234_5000, access: Access::RW };
        assert_eq!(D::decode(3, 0x0068_0000_1234_5b43), leaf, "the device sets the access flag");
        assert_eq!((D::NAME, D::registers(0).nth(1).unwrap().value), ("arm64-s1-4k-dirty", 0x0000_0185_8080_3510));
        // 16 KiB: page at level 3, 32 MiB at level 2; 64 KiB has three levels, 512 MiB in the middle one
        assert_eq!(Arm64S1_16k::encode_table(0, 0x8000_4000), 0x0000_0000_8000_4003);
        assert_eq!(Arm64S1_16k::encode_leaf(3, 0x1234_4000, Access::RW), 0x0060_0000_1234_4f43);
        assert_eq!(Arm64S1_16k::encode_leaf(2, 0x4200_0000, Access::RW), 0x0060_0000_4200_0f41);
        assert_eq!(Arm64S1_64k::encode_leaf(2, 0x1235_0000, Access::READ), 0x0060_0000_1235_0fc3);
        assert_eq!(Arm64S1_64k::encode_leaf(1, 0x6000_0000, Access::RW), 0x0060_0000_6000_0f41);
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
        let privileged = Entry::Leaf { out: 0x1000, access: Access::RW | Access::PRIVILEGED };
        assert_eq!(F::decode(3, page & !(1 << 6)), privileged);
        assert_eq!(F::decode(9, page), Entry::Invalid, "no such level");
        assert_eq!(Arm64S1_16k::decode(1, block), Entry::Invalid, "64 GiB blocks need FEAT_LPA2");
        assert_eq!(Arm64S1_64k::decode(0, block), Entry::Invalid, "4 TiB blocks need FEAT_LPA");
    }

    #[test]
    fn limits_of_tables() {
        let below = |table, leaf| match Arm64S1_4k::decode(3, Arm64S1_4k::inherit(table, leaf)) {
            Entry::Leaf { access, .. } => access,
            entry => panic!("{entry:?}"),
        };
        let all = Access::RW | Access::EXEC;
        let (page, privileged) =
            (Arm64S1_4k::encode_leaf(3, 0, all), Arm64S1_4k::encode_leaf(3, 0, all | Access::PRIVILEGED));
        assert_eq!(below(1 << 62, page), Access::READ | Access::EXEC, "APTable[1]");
        assert_eq!(below(1 << 61, page), all | Access::PRIVILEGED, "APTable[0]");
        assert_eq!(below(1 << 60, page), Access::RW, "UXNTable");
        assert_eq!(
            (below(1 << 59, page), below(1 << 59, privileged)),
            (all, Access::RW | Access::PRIVILEGED),
            "PXNTable"
        );
        type D = Arm64S1<12, 48, false, 48, true>;
        let leaf = D::inherit(1 << 62, D::encode_leaf(3, 0, Access::RW));
        assert_eq!(D::decode(3, leaf), Entry::Leaf { out: 0, access: Access::READ }, "no dirty state below a limit");
    }

    /// Fields of `TCR_EL1`, DDI 0487 section D19 (the register's own page).
    #[test]
    fn registers() {
        let value = |r: &Registers, name| r.clone().find(|r| r.name == name).map(|r| r.value);
        let r = Arm64S1_4k::registers(0x4000_0000);
        assert_eq!(value(&r, "TTBR0_EL1"), Some(0x4000_0000));
        assert_eq!(value(&r, "TCR_EL1"), Some(0x0000_0005_8080_3510));
        assert_eq!(value(&Arm64S1::<12, 39>::registers(0), "TCR_EL1"), Some(0x0000_0005_8080_3519));
        assert_eq!(value(&Arm64S1_16k::registers(0), "TCR_EL1"), Some(0x0000_0005_4080_b510));
        assert_eq!(value(&Arm64S1_64k::registers(0), "TCR_EL1"), Some(0x0000_0005_c080_7510));
        // DS: bit 59.
        assert_eq!(value(&Arm64S1::<12, 52, false, 52>::registers(0), "TCR_EL1"), Some(0x0800_0006_8080_350c));
    }

    #[test]
    fn levels_by_input_bits() {
        assert_eq!((Arm64S1::<12, 39>::LEVELS, Arm64S1_4k::LEVELS), (3, 4));
        assert_eq!((Arm64S1::<14, 36>::LEVELS, Arm64S1::<14, 47>::LEVELS, Arm64S1_16k::LEVELS), (2, 3, 4));
        assert_eq!((Arm64S1::<16, 42>::LEVELS, Arm64S1_64k::LEVELS), (2, 3));
    }
}
