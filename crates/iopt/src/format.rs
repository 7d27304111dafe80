//! What the bits of one page-table entry mean.

use core::fmt::Debug;

use dmalane_addr::{Access, PageSize, PageSizes};

/// Most levels a format may have; bounds the walkers' stacks.
pub(crate) const MAX_LEVELS: usize = 6;

/// What an entry says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing is mapped. A bit pattern that the format reserves at this level counts as this: hardware faults too.
    Invalid,
    /// The address of the table one level down.
    Table(u64),
    /// A mapping of the page size of the entry's level.
    Leaf {
        /// Output address of the first byte, a multiple of the page size.
        out: u64,
        /// What the device may do.
        access: Access,
    },
}

/// A page-table format: the geometry of the tree and the bits of an entry. It knows nothing of walking.
///
/// Levels are numbered from the root, which is level 0, as in the Arm manuals. Entries are 64-bit, the all-zero entry
/// is [`Entry::Invalid`] at every level, and a table fills exactly one granule. The walkers check this geometry at
/// compile time.
pub trait Format: Copy + Debug + 'static {
    /// The name of the format as it stands in messages.
    const NAME: &'static str;
    /// Levels of tables, at most 6.
    const LEVELS: u32;
    /// Address bits that one level translates; a table has two to this power entries.
    const INDEX_BITS: u32;
    /// The smallest page, and the size and alignment of a table.
    const GRANULE: PageSize;
    /// Bits of an input address, at most 63. Addresses above are refused.
    const INPUT_BITS: u32;
    /// Bits of an output address, at most 63; tables live below this limit too.
    const OUTPUT_BITS: u32;
    /// The page sizes that have a leaf: the granule, then the sizes of the next levels up without a gap (a leaf is
    /// split into leaves one level down).
    const PAGE_SIZES: PageSizes;

    /// True when a leaf can grant exactly this access (apart from rights that the format does not have at all).
    fn supports(access: Access) -> bool;

    /// The entry that points to the table at `next`, a granule-aligned address below 2^`OUTPUT_BITS`.
    fn encode_table(next: u64) -> u64;

    /// The entry that maps `out` at `level`. `out` is a multiple of the level's page size below 2^`OUTPUT_BITS`, the
    /// page size is one of `PAGE_SIZES`, and `access` is supported.
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64;

    /// What an entry found at `level` means; defined for every bit pattern. At the last level it never gives
    /// [`Entry::Table`].
    fn decode(level: u32, entry: u64) -> Entry;
}

/// Position of the lowest input-address bit that `level` translates.
pub(crate) const fn shift<F: Format>(level: u32) -> u32 {
    F::GRANULE.log2() as u32 + (F::LEVELS - 1 - level) * F::INDEX_BITS
}

/// The entry of a table at `level` that translates `at`.
pub(crate) const fn index<F: Format>(at: u64, level: u32) -> usize {
    (at >> shift::<F>(level)) as usize & (entries::<F>() - 1)
}

/// Entries in a table.
pub(crate) const fn entries<F: Format>() -> usize {
    1 << F::INDEX_BITS
}

/// The page size of a leaf at `level`.
pub(crate) const fn page_size<F: Format>(level: u32) -> PageSize {
    PageSize::from_log2(shift::<F>(level) as u8).expect("checked by geometry_is_sound")
}

/// The level of the largest leaf for this alignment (addresses joined by "or") and length, both whole granules.
#[inline]
pub(crate) fn leaf_level<F: Format>(alignment: u64, len: u64) -> u32 {
    let mut level = F::LEVELS - 1;
    while level > top_leaf_level::<F>() {
        let size = page_size::<F>(level - 1).bytes();
        if len < size || alignment & (size - 1) != 0 {
            break;
        }
        level -= 1;
    }
    level
}

/// The level of the largest leaf.
pub(crate) const fn top_leaf_level<F: Format>() -> u32 {
    F::LEVELS - F::PAGE_SIZES.bits().count_ones()
}

/// Bytes of input address space.
pub(crate) const fn input_len<F: Format>() -> u64 {
    1 << F::INPUT_BITS
}

/// True when both addresses are translated by the same table of `level`.
pub(crate) const fn same_table<F: Format>(a: u64, b: u64, level: u32) -> bool {
    level == 0 || (a ^ b) >> shift::<F>(level - 1) == 0
}

/// Evaluated at compile time for every format in use: what the walkers assume about the constants.
pub(crate) const fn geometry_is_sound<F: Format>() -> bool {
    let granule = F::GRANULE.log2() as u32;
    let mut level = F::LEVELS;
    let mut sizes = 0u64;
    // The page sizes are those of the last levels, without a gap, and level 0 has no leaf.
    while level > 1 && sizes.count_ones() < F::PAGE_SIZES.bits().count_ones() {
        level -= 1;
        sizes |= 1 << shift::<F>(level);
    }
    F::LEVELS >= 2
        && F::LEVELS as usize <= MAX_LEVELS
        && F::INDEX_BITS + 3 == granule
        && F::INPUT_BITS <= granule + F::LEVELS * F::INDEX_BITS
        && F::INPUT_BITS > shift::<F>(0)
        && F::INPUT_BITS < 64
        && F::OUTPUT_BITS < 64
        && sizes != 0
        && sizes == F::PAGE_SIZES.bits()
}
