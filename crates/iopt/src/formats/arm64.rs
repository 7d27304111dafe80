//! Long descriptors of Arm, as both stages of VMSAv8-64 and those of Armv7 with large physical addresses have them. A
//! [`ArmStage`] adds its rights, memory types and registers.

use core::fmt::Debug;
use core::marker::PhantomData;

use dmalane_addr::{Access, PageSize, PageSizes};

use crate::format::MAX_LEVELS;
use crate::{Entry, Format, Registers};

/// Long descriptors with granules of 2^`GRANULE` bytes (12, 14 or 16), `INPUT` bits of input address and `OUTPUT` bits
/// of output, in the stage `S`: [`Arm64S1`](crate::Arm64S1), [`Arm64S2`](crate::Arm64S2),
/// [`Armv7LpaeS1`](crate::Armv7LpaeS1), [`Armv7LpaeS2`](crate::Armv7LpaeS2).
#[derive(Clone, Copy, Debug)]
pub struct Arm64<
    S,
    const GRANULE: u32,
    const INPUT: u32 = 48,
    const CONTIGUOUS: bool = false,
    const OUTPUT: u32 = 48,
    const DIRTY: bool = false,
>(PhantomData<S>);

/// The stage-specific bits of descriptors: everything about a leaf but its type and its address.
pub trait ArmStage: Copy + Debug + 'static {
    /// The stage in the name of a format of Armv8: `s1`.
    const STAGE: &'static str;
    /// The name of the format, where it is another one.
    const NAME: Option<&'static str> = None;
    /// Address bits that the root may translate beyond those of another table.
    const ROOT_BITS: u32;
    /// The bit of a leaf that a device changes when it writes through it, if the format has dirty leaves.
    const DIRTY: u64;
    /// True when the device clears it.
    const DIRTY_IS_CLEAR: bool;

    /// True when a leaf can express this access.
    fn supports(access: Access, dirty: bool) -> bool;

    /// The bits of a leaf beside type, address, shareability and access flag.
    fn encode(access: Access, dirty: bool) -> u64;

    /// Access that a leaf grants; none when every access would fault.
    fn decode(leaf: u64, dirty: bool) -> Access;

    /// [`Format::inherit`].
    #[inline]
    fn inherit(_table: u64, leaf: u64) -> u64 {
        leaf
    }

    /// [`Format::unprivileged`].
    #[inline]
    fn unprivileged(_leaf: u64) -> Access {
        Access::empty()
    }

    /// [`Format::registers`] for the levels of these fields.
    fn registers(fields: &Fields, root: u64) -> Registers;
}

/// The parameters of a format, for its registers.
pub struct Fields {
    /// Logarithm of the granule.
    pub(super) granule: u32,
    /// Bits of an input address.
    pub(super) input: u32,
    /// Bits of an output address.
    pub(super) output: u32,
    /// Levels of tables.
    pub(super) levels: u32,
    /// The device marks leaves that it has written through.
    pub(super) dirty: bool,
}

impl<S: ArmStage, const G: u32, const I: u32, const C: bool, const O: u32, const D: bool> Arm64<S, G, I, C, O, D> {
    const BUILT_NAME: &'static Name = &match S::NAME {
        Some(name) => Name::EMPTY.then(name),
        None => Name::new(S::STAGE, G, I, C, O, D),
    };
}

impl<S: ArmStage, const G: u32, const I: u32, const C: bool, const O: u32, const D: bool> Format
    for Arm64<S, G, I, C, O, D>
{
    const NAME: &'static str = Self::BUILT_NAME.as_str();
    const LEVELS: u32 = levels(G, I, S::ROOT_BITS);
    const INDEX_BITS: u32 = index_bits(G);
    const GRANULE: PageSize = granule_size(G);
    const INPUT_BITS: u32 = I;
    const OUTPUT_BITS: u32 = O;
    const VALID: u64 = 1;
    const TABLE_BITS: u64 = TABLE_OR_PAGE;
    const PAGE_SIZES: PageSizes = page_and_group_sizes(G, Self::LEVELS, C);
    const GROUP_BITS: [u32; MAX_LEVELS] = group_bits(G, Self::LEVELS, C);
    const DIRTY: u64 = if D { S::DIRTY } else { 0 };
    const DIRTY_IS_CLEAR: bool = D && S::DIRTY_IS_CLEAR;

    fn supports(access: Access) -> bool {
        access.is_consistent() && S::supports(access, D)
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        put_address(G, O, next) | VALID | TABLE_OR_PAGE
    }

    #[inline]
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64 {
        let page = if level + 1 == Self::LEVELS { TABLE_OR_PAGE } else { 0 };
        put_address(G, O, out) | VALID | page | shareability(G, O) | AF | S::encode(access, D)
    }

    #[inline]
    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        Self::encode_leaf(level, out, access) | CONTIGUOUS
    }

    #[inline]
    fn is_member(_level: u32, entry: u64) -> bool {
        C && entry & CONTIGUOUS != 0
    }

    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        S::inherit(table, leaf)
    }

    #[inline]
    fn unprivileged(leaf: u64) -> Access {
        S::unprivileged(leaf)
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        match descriptor_type(Self::LEVELS, const { top(G, Self::LEVELS) }, level, entry) {
            Type::Table => return Entry::Table(get_address(G, O, entry)),
            // Without the access flag every access would fault, unless the device sets it: `HA = 1`, as `HD` demands.
            Type::Leaf if D || entry & AF != 0 => {}
            _ => return Entry::Invalid,
        }
        let access = S::decode(entry, D);
        if access.rights().is_empty() {
            return Entry::Invalid;
        }
        let page = 1u64 << leaf_log2(G, Self::LEVELS, level, Self::is_member(level, entry));
        Entry::Leaf { out: get_address(G, O, entry) & !(page - 1), access }
    }

    fn registers(root: u64) -> Registers {
        S::registers(&Fields { granule: G, input: I, output: O, levels: Self::LEVELS, dirty: D }, root)
    }
}

pub(super) const VALID: u64 = 1;
/// With `VALID`: a table above the last level, a page at it. Without it: a block.
pub(super) const TABLE_OR_PAGE: u64 = 1 << 1;
const SH_INNER: u64 = 0b11 << 8;
pub(super) const AF: u64 = 1 << 10;

/// Address bits that a full table translates, for granules of 2^`granule` bytes.
pub(super) const fn index_bits(granule: u32) -> u32 {
    granule - 3
}

/// The fewest levels for `input` bits when the root may translate `extra` bits more than another table.
pub(super) const fn levels(granule: u32, input: u32, extra: u32) -> u32 {
    let mut levels = 2;
    while granule + levels * index_bits(granule) + extra < input {
        levels += 1;
    }
    levels
}

/// Logarithm of the page size at `level`.
pub(super) const fn page_log2(granule: u32, levels: u32, level: u32) -> u32 {
    granule + (levels - 1 - level) * index_bits(granule)
}

/// The contiguous bit: this entry is one of a group.
pub(super) const CONTIGUOUS: u64 = 1 << 52;

/// Logarithms of the entries of a contiguous group, by level; only blocks and pages have one.
pub(super) const fn group_bits(granule: u32, levels: u32, contiguous: bool) -> [u32; MAX_LEVELS] {
    let mut bits = [0; MAX_LEVELS];
    let mut level = top(granule, levels);
    while contiguous && level < levels {
        bits[level as usize] = match granule {
            12 => 4,
            14 if level + 1 == levels => 7,
            _ => 5,
        };
        level += 1;
    }
    bits
}

/// Page sizes with those of the contiguous groups.
pub(super) const fn page_and_group_sizes(granule: u32, levels: u32, contiguous: bool) -> PageSizes {
    let bits = group_bits(granule, levels, contiguous);
    let mut sizes = page_sizes(granule).bits();
    let mut level = top(granule, levels);
    while contiguous && level < levels {
        sizes |= 1 << (page_log2(granule, levels, level) + bits[level as usize]);
        level += 1;
    }
    PageSizes::from_bits(sizes)
}

/// Logarithm of the size of the leaf that an entry is part of.
#[inline]
pub(super) const fn leaf_log2(granule: u32, levels: u32, level: u32, member: bool) -> u32 {
    page_log2(granule, levels, level) + if member { group_bits(granule, levels, true)[level as usize] } else { 0 }
}

/// Pages, and the blocks that need no extension: 2 MiB and 1 GiB, 32 MiB, or 512 MiB.
pub(super) const fn page_sizes(granule: u32) -> PageSizes {
    match granule {
        12 => PageSizes::from_bits(1 << 30 | 1 << 21 | 1 << 12),
        14 => PageSizes::from_bits(1 << 25 | 1 << 14),
        16 => PageSizes::from_bits(1 << 29 | 1 << 16),
        _ => panic!("granules are of 4, 16 and 64 KiB"),
    }
}

/// The granule as a page size.
pub(super) const fn granule_size(granule: u32) -> PageSize {
    PageSize::from_log2(granule as u8).expect("checked by page_sizes")
}

/// True for descriptors of FEAT_LPA2 (`DS = 1`): address bits 51:50 are where the shareability would be.
const fn lpa2(granule: u32, output: u32) -> bool {
    output == 52 && granule != 16
}

/// The field of a descriptor that holds the address from the granule up, to bit 47 or 49 (or 39 of 40 bits).
const fn address_field(granule: u32, output: u32) -> u64 {
    let top = match output {
        52 if lpa2(granule, output) => 50,
        52 => 48,
        fewer => fewer,
    };
    (1 << top) - (1 << granule)
}

/// Where the highest bits of 52 are: their number, lowest bit in the descriptor, and lowest bit of the address.
const fn high_bits(granule: u32, output: u32) -> (u64, u32, u32) {
    if lpa2(granule, output) { (0b11, 8, 50) } else { (0xf, 12, 48) }
}

/// Descriptor bits for an address. Of 52 bits, 51:48 are in bits 15:12 with 64 KiB granules (FEAT_LPA), and 51:50 in
/// bits 9:8 with smaller ones (FEAT_LPA2).
#[inline]
pub(super) const fn put_address(granule: u32, output: u32, address: u64) -> u64 {
    let low = address & address_field(granule, output);
    let (mask, at, of) = high_bits(granule, output);
    if output == 52 { low | (address >> of & mask) << at } else { low }
}

/// The address in a descriptor.
#[inline]
pub(super) const fn get_address(granule: u32, output: u32, entry: u64) -> u64 {
    let low = entry & address_field(granule, output);
    let (mask, at, of) = high_bits(granule, output);
    if output == 52 { low | (entry >> at & mask) << of } else { low }
}

/// The SH field of a leaf: inner shareable. FEAT_LPA2 takes it from `SH0` for all of them.
pub(super) const fn shareability(granule: u32, output: u32) -> u64 {
    if lpa2(granule, output) { 0 } else { SH_INNER }
}

/// The root as `TTBR0_EL1` and `VTTBR_EL2` take it: address bits 51:48 go to bits 5:2.
pub(super) const fn ttbr(root: u64) -> u64 {
    root & ((1 << 48) - 1) | (root >> 48 & 0xf) << 2
}

/// The fields that `TCR_EL1` and `VTCR_EL2` have at the same place: `T0SZ`, `IRGN0` and `ORGN0` (write-back), `SH0`
/// (inner shareable), `TG0`.
pub(super) const fn table_control(granule: u32, input: u32) -> u64 {
    let tg0 = match granule {
        12 => 0b00,
        14 => 0b10,
        _ => 0b01,
    };
    (64 - input) as u64 | 0b01 << 8 | 0b01 << 10 | 0b11 << 12 | tg0 << 14
}

/// `IPS` of `TCR_EL1` and `PS` of `VTCR_EL2`.
pub(super) const fn output_size(output: u32) -> u64 {
    if output == 52 { 0b110 } else { 0b101 }
}

/// `DS` of `TCR_EL1` and `VTCR_EL2`.
pub(super) const fn ds(granule: u32, output: u32) -> u64 {
    lpa2(granule, output) as u64
}

/// The dirty bit modifier, with `HD = 1`: a leaf that may not be written to may, and the device then says so in the
/// entry.
pub(super) const DBM: u64 = 1 << 51;

/// The name of a format, put together at compile time.
pub(super) struct Name {
    text: [u8; Self::MOST],
    len: usize,
}

impl Name {
    const MOST: usize = 48;
    const EMPTY: Self = Self { text: [0; Self::MOST], len: 0 };

    /// `arm64-STAGE-GRANULE`; then the bits of input and output, of equal ones one, of 48 none; then the options.
    ///
    /// # Panics
    /// When there is no such format.
    pub(super) const fn new(stage: &str, granule: u32, input: u32, contiguous: bool, output: u32, dirty: bool) -> Self {
        assert!(output == 48 || output == 52, "output is of 48 or 52 bits");
        assert!(
            input <= 48 || granule == 16 || output == 52,
            "input beyond 48 bits takes 52 bits of output (FEAT_LPA2)"
        );
        assert!(input <= 52, "input is of 52 bits at most");
        let granule = match granule {
            12 => "-4k",
            14 => "-16k",
            16 => "-64k",
            _ => panic!("granules are of 4, 16 and 64 KiB"),
        };
        let mut name = Self::EMPTY.then("arm64-").then(stage).then(granule);
        if input != 48 || output != 48 {
            name = name.then_number(input);
        }
        if output != 48 && output != input {
            name = name.then_number(output);
        }
        name.then(if contiguous { "-contiguous" } else { "" }).then(if dirty { "-dirty" } else { "" })
    }

    const fn then(mut self, more: &str) -> Self {
        let mut i = 0;
        while i < more.len() {
            self.text[self.len] = more.as_bytes()[i];
            self.len += 1;
            i += 1;
        }
        self
    }

    /// Of two digits.
    const fn then_number(self, number: u32) -> Self {
        let digits = [b'-', b'0' + (number / 10) as u8, b'0' + (number % 10) as u8];
        match core::str::from_utf8(&digits) {
            Ok(digits) => self.then(digits),
            Err(_) => panic!("digits are text"),
        }
    }

    /// The name.
    pub(super) const fn as_str(&'static self) -> &'static str {
        match core::str::from_utf8(self.text.split_at(self.len).0) {
            Ok(name) => name,
            Err(_) => panic!("made of text"),
        }
    }
}

/// The type of a descriptor.
pub(super) enum Type {
    Invalid,
    Table,
    Leaf,
}

/// Reads bits 1:0 at `level`. Blocks exist from `top` on.
#[inline]
pub(super) fn descriptor_type(levels: u32, top: u32, level: u32, entry: u64) -> Type {
    // Bit by bit: a walk comes by here at every level, and most entries on its way are tables.
    if entry & VALID == 0 || level >= levels {
        return Type::Invalid;
    }
    let last = level + 1 == levels;
    match entry & TABLE_OR_PAGE != 0 {
        true if last => Type::Leaf,
        true => Type::Table,
        false if level >= top && !last => Type::Leaf,
        false => Type::Invalid, // at the last level type 0b01 is reserved
    }
}

/// The first level that has leaves.
pub(super) const fn top(granule: u32, levels: u32) -> u32 {
    levels - page_sizes(granule).bits().count_ones()
}
