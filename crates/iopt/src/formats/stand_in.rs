//! Entries of this library's own, for tables that no device walks.

use dmalane_addr::{Access, PageSize, PageSizes};

use crate::format::MAX_LEVELS;
use crate::{Entry, Format, Register, Registers};

/// A format whose tables no device walks: only what made them reads them. It stands for every format with granules of
/// 2^`GRANULE` bytes (12, 14 or 16) and tables as long as a granule, those with groups or those without:
/// [`PageTable::standing_for`](crate::PageTable::standing_for) takes the number of levels and the page sizes of one of
/// them at run time. So a few of these are compiled where all formats were.
///
/// The entry of a leaf has the access in bits 63:56, the address from the granule up, and the type in bits 2:0.
#[derive(Clone, Copy, Debug)]
pub struct StandIn<const GRANULE: u32, const GROUPS: bool>;

const VALID: u64 = 1;
const TABLE: u64 = 1 << 1;
const MEMBER: u64 = 1 << 2;
/// Where the access is.
const ACCESS: u32 = 56;

/// Levels that have leaves: as many as a format of this granule has.
const fn leaf_levels(granule: u32) -> u32 {
    match granule {
        12 => 5,
        14 | 16 => 2,
        _ => panic!("granules are of 4, 16 and 64 KiB"),
    }
}

/// Logarithm of the entries of a group, by the number of levels below its own.
const fn group(granule: u32, below: u32) -> u32 {
    match (granule, below) {
        (12, 0..3) => 4,
        (14, 0) => 7,
        (14, 1) | (16, 0..2) => 5,
        _ => 0,
    }
}

impl<const G: u32, const C: bool> StandIn<G, C> {
    /// Logarithm of the size of the leaf that an entry at `level` is, or is part of.
    #[inline]
    const fn leaf_log2(level: u32, member: bool) -> u32 {
        let below = Self::LEVELS - 1 - level;
        G + below * Self::INDEX_BITS + if C && member { group(G, below) } else { 0 }
    }
}

impl<const G: u32, const C: bool> Format for StandIn<G, C> {
    const NAME: &'static str = "stand-in";
    const STANDS_IN: bool = true;
    const LEVELS: u32 = match G {
        12 => 6,
        14 => 4,
        _ => 3,
    };
    const INDEX_BITS: u32 = G - 3;
    const GRANULE: PageSize = PageSize::from_log2(G as u8).expect("checked by leaf_levels");
    const INPUT_BITS: u32 = {
        let bits = G + Self::LEVELS * Self::INDEX_BITS;
        if bits > 63 { 63 } else { bits }
    };
    const OUTPUT_BITS: u32 = ACCESS;
    const PAGE_SIZES: PageSizes = {
        let (mut sizes, mut below) = (0, 0);
        while below < leaf_levels(G) {
            let level = Self::LEVELS - 1 - below;
            sizes |= 1 << Self::leaf_log2(level, false) | 1 << Self::leaf_log2(level, true);
            below += 1;
        }
        PageSizes::from_bits(sizes)
    };
    const GROUP_BITS: [u32; MAX_LEVELS] = {
        let (mut bits, mut below) = ([0; MAX_LEVELS], 0);
        while C && below < leaf_levels(G) {
            bits[(Self::LEVELS - 1 - below) as usize] = group(G, below);
            below += 1;
        }
        bits
    };
    const VALID: u64 = VALID;
    const TABLE_BITS: u64 = TABLE;

    fn supports(access: Access) -> bool {
        access.is_consistent()
    }

    #[inline]
    fn encode_table(_level: u32, next: u64) -> u64 {
        next | VALID | TABLE
    }

    #[inline]
    fn encode_leaf(_level: u32, out: u64, access: Access) -> u64 {
        out | VALID | u64::from(access.bits()) << ACCESS
    }

    #[inline]
    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        Self::encode_leaf(level, out, access) | MEMBER
    }

    #[inline]
    fn is_member(_level: u32, entry: u64) -> bool {
        C && entry & MEMBER != 0
    }

    #[inline]
    fn decode(level: u32, entry: u64) -> Entry {
        let address = entry & ((1 << ACCESS) - (1 << G));
        if entry & VALID == 0 {
            return Entry::Invalid;
        }
        if entry & TABLE != 0 {
            return if level + 1 < Self::LEVELS { Entry::Table(address) } else { Entry::Invalid };
        }
        let size = 1u64 << Self::leaf_log2(level, Self::is_member(level, entry));
        Entry::Leaf { out: address & !(size - 1), access: Access::from_bits_truncate((entry >> ACCESS) as u8) }
    }

    /// None: there is nothing to program into a device.
    fn registers(_root: u64) -> Registers {
        Register::list([])
    }
}
