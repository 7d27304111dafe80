//! Meaning of the bits of one page-table entry.

use core::array::IntoIter;
use core::fmt::Debug;
use core::iter::Take;

use dmalane_addr::{Access, PageSize, PageSizes};

/// Most levels a format may have; bounds the walkers' stacks.
pub const MAX_LEVELS: usize = 6;

/// A register, or a word of a structure in memory, and what to program into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Register {
    /// Its name in the specification that the format names.
    pub name: &'static str,
    /// Its value; bits that are not the page table's business are 0.
    pub value: u64,
}

impl Register {
    pub(crate) const fn new(name: &'static str, value: u64) -> Self {
        Self { name, value }
    }

    /// Those of a format, in this order.
    pub fn list<const N: usize>(some: [Self; N]) -> Registers {
        const { assert!(N <= 3) }
        let mut all = [Self::new("", 0); 3];
        all[..N].copy_from_slice(&some);
        all.into_iter().take(N)
    }
}

/// The registers of a format: three at most.
pub type Registers = Take<IntoIter<Register, 3>>;

/// A decoded entry.
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
        /// Rights of the device, and the kind of memory. With [`Access::PRIVILEGED`] the rights are those of
        /// privileged accesses; [`Format::unprivileged`] gives those of others.
        access: Access,
    },
}

/// An entry that a device understands and [`Format::decode`] does not: tables of others have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Foreign {
    /// A table that is not on the next level but on this one. The address bits of the levels between must be zero.
    Table {
        /// Its address.
        next: u64,
        /// Its level, below that of the entry.
        level: u32,
    },
    /// A leaf of a size that is not one of [`Format::PAGE_SIZES`].
    Leaf {
        /// Output address of the first byte.
        out: u64,
        /// Its size.
        size: PageSize,
        /// As of [`Entry::Leaf`].
        access: Access,
    },
}

/// A page-table format: the geometry of the tree and the bits of an entry. It knows nothing of walking.
///
/// Levels are numbered from the root, which is level 0 whatever the architecture calls it. The all-zero entry is
/// [`Entry::Invalid`] at every level. A table has two to the power of [`INDEX_BITS`](Self::INDEX_BITS) entries; the
/// root translates what is left of [`INPUT_BITS`](Self::INPUT_BITS) and may be smaller or larger. The walkers check
/// this geometry at compile time.
pub trait Format: Copy + Debug + 'static {
    /// The name of the format in messages.
    const NAME: &'static str;
    /// True for a [`StandIn`](crate::StandIn), of which a page table uses the lower levels and some page sizes.
    const STANDS_IN: bool = false;
    /// Levels of tables, at most 6.
    const LEVELS: u32;
    /// Address bits that a level below the root translates; its tables have two to this power entries.
    const INDEX_BITS: u32;
    /// Bytes of an entry: 8, or 4.
    const ENTRY_BYTES: u64 = 8;
    /// The smallest page.
    const GRANULE: PageSize;
    /// Bits of an input address, at most 63. Addresses above are refused.
    const INPUT_BITS: u32;
    /// Bits of an output address, at most 63; tables live below this limit too.
    const OUTPUT_BITS: u32;
    /// The page sizes that have a leaf: the granule, then the sizes of the next levels up without a gap (a leaf is
    /// split into leaves one level down), and those of groups.
    const PAGE_SIZES: PageSizes;
    /// By level, the logarithm of the number of neighbouring entries that form a *group*, one leaf larger than the page
    /// size of the level (a contiguous hint, an Arm large page, a NAPOT page); 0 where there is none.
    const GROUP_BITS: [u32; MAX_LEVELS] = [0; MAX_LEVELS];

    /// The bit of a leaf that a device sets when it writes through it, or 0 when there is none that these tables use.
    const DIRTY: u64 = 0;
    /// True when the device *clears* that bit, of a leaf that permits writing.
    const DIRTY_IS_CLEAR: bool = false;

    /// A bit that is set in every valid entry of the last level, and in no other entry that a page table writes there;
    /// 0 when there is none. Counting entries is faster with it.
    const VALID: u64 = 0;

    /// Bits, below the size of a table, that tell a table entry from everything else in its place: leaves, empty
    /// entries and table entries that a device has marked. They are tested in the entry less
    /// [`encode_table`](Self::encode_table) of address 0: for a table entry, that is the address of the table, with 0
    /// in these and the lowest three bits. 0 when it is not that simple. Walks are faster with it.
    const TABLE_BITS: u64 = 0;

    /// True when a leaf can express exactly this access, attributes included. An access that is not
    /// [consistent](Access::is_consistent) is not supported; [`Access::READ`] and [`Access::RW`] must be.
    fn supports(access: Access) -> bool;

    /// The entry at `level` that points to the table at `next`, an address below 2^`OUTPUT_BITS` that is aligned to the
    /// size of a table.
    fn encode_table(level: u32, next: u64) -> u64;

    /// The entry that maps `out` at `level`. `out` is a multiple of the level's page size below 2^`OUTPUT_BITS`, the
    /// page size is one of `PAGE_SIZES`, and `access` is supported.
    ///
    /// Bits that depend on `out` and bits that depend on `access` are disjoint, and [`Access::READ`] and [`Access::RW`]
    /// can be encoded at every leaf level: the walkers encode an access once, at address 0, and add the address bits of
    /// each entry, taken from one that permits reading and writing. The conformance suite checks this.
    fn encode_leaf(level: u32, out: u64, access: Access) -> u64;

    /// The entry of a group at `level` that maps `out`, the output address of this very entry. Called for levels that
    /// have groups. Address and access bits are as disjoint as those of [`encode_leaf`](Self::encode_leaf).
    fn encode_member(level: u32, out: u64, access: Access) -> u64 {
        Self::encode_leaf(level, out, access)
    }

    /// The leaf with the limits of the entry of a table above it applied, as a device applies them. The tables made
    /// here set no limits; those of others may. Formats without such limits return the leaf unchanged.
    #[inline]
    fn inherit(table: u64, leaf: u64) -> u64 {
        let _ = table;
        leaf
    }

    /// The rights of unprivileged accesses through a leaf that [`decode`](Self::decode) gives with
    /// [`Access::PRIVILEGED`]. Empty in most formats.
    #[inline]
    fn unprivileged(leaf: u64) -> Access {
        let _ = leaf;
        Access::empty()
    }

    /// Decodes an entry found at `level`; defined for every bit pattern. At the last level it never returns
    /// [`Entry::Table`]. For an entry of a group, `out` is where the group starts.
    fn decode(level: u32, entry: u64) -> Entry;

    /// Bits of an input address that [`walk`](crate::walk()) takes: more than [`INPUT_BITS`](Self::INPUT_BITS) where
    /// tables of others have them. They choose an entry of the root.
    const WALK_BITS: u32 = Self::INPUT_BITS;

    /// The meaning, in tables of others, of an entry that [`decode`](Self::decode) calls invalid:
    /// [`walk`](crate::walk()) goes on with it, a page table does not.
    #[inline]
    fn foreign(level: u32, entry: u64) -> Option<Foreign> {
        let _ = (level, entry);
        None
    }

    /// True for an entry that a device takes for valid before it looks at the rest.
    #[inline]
    fn is_present(entry: u64) -> bool {
        entry & Self::VALID != 0
    }

    /// True when a leaf found at `level` is part of a group.
    #[inline]
    fn is_member(level: u32, entry: u64) -> bool {
        let _ = (level, entry);
        false
    }

    /// Registers to program so that a device walks the tables from `root`, at least one: as the documentation of the
    /// format says.
    fn registers(root: u64) -> Registers;
}

/// True when a device has written through this leaf.
#[inline]
pub(crate) const fn is_dirty<F: Format>(leaf: u64) -> bool {
    F::DIRTY != 0 && (leaf & F::DIRTY == 0) == F::DIRTY_IS_CLEAR
}

/// The leaf as a device leaves it that has written through it, or has not.
#[inline]
pub(crate) const fn marked<F: Format>(leaf: u64, dirty: bool) -> u64 {
    if dirty == F::DIRTY_IS_CLEAR { leaf & !F::DIRTY } else { leaf | F::DIRTY }
}

/// Position of the lowest input-address bit that `level` translates.
pub(crate) const fn shift<F: Format>(level: u32) -> u32 {
    F::GRANULE.log2() as u32 + (F::LEVELS - 1 - level) * F::INDEX_BITS
}

/// The entry of a table at `level` that translates `at`, an address within the input range.
pub(crate) const fn index<F: Format>(at: u64, level: u32) -> usize {
    (at >> shift::<F>(level)) as usize & (entries::<F>(level) - 1)
}

/// Entries in a table at `level`.
pub(crate) const fn entries<F: Format>(level: u32) -> usize {
    if level == 0 { 1 << (F::INPUT_BITS - shift::<F>(0)) } else { 1 << F::INDEX_BITS }
}

/// The page size of a leaf at `level`.
pub(crate) const fn page_size<F: Format>(level: u32) -> PageSize {
    PageSize::from_log2(shift::<F>(level) as u8).expect("checked by geometry_is_sound")
}

/// A size of leaf: the level of its entries, and whether they are a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Kind {
    pub(crate) level: u32,
    pub(crate) group: bool,
}

impl Kind {
    /// Number of kinds, for a table of them.
    pub(crate) const COUNT: usize = 2 * MAX_LEVELS;

    /// The kind of a leaf found at `level`.
    #[inline]
    pub(crate) fn of<F: Format>(level: u32, entry: u64) -> Self {
        Self { level, group: has_groups::<F>() && F::is_member(level, entry) }
    }

    pub(crate) const fn single(level: u32) -> Self {
        Self { level, group: false }
    }

    /// The position in a table of kinds.
    pub(crate) const fn slot(self) -> usize {
        2 * self.level as usize + self.group as usize
    }

    /// Entries of one such leaf.
    #[inline]
    pub(crate) const fn entries<F: Format>(self) -> usize {
        if self.group { 1 << group_bits::<F>(self.level) } else { 1 }
    }

    /// Its size.
    #[inline]
    pub(crate) const fn size<F: Format>(self) -> PageSize {
        let log2 = shift::<F>(self.level) + if self.group { group_bits::<F>(self.level) } else { 0 };
        PageSize::from_log2(log2 as u8).expect("checked by geometry_is_sound")
    }
}

/// True when any level has groups.
pub(crate) const fn has_groups<F: Format>() -> bool {
    let mut level = 0;
    while level < MAX_LEVELS {
        if F::GROUP_BITS[level] > 0 {
            return true;
        }
        level += 1;
    }
    false
}

#[inline]
pub(crate) const fn group_bits<F: Format>(level: u32) -> u32 {
    if has_groups::<F>() { F::GROUP_BITS[level as usize] } else { 0 }
}

/// The entry of a leaf of this kind but for its output address.
#[inline]
pub(crate) fn encode_template<F: Format>(kind: Kind, access: Access) -> u64 {
    if kind.group { F::encode_member(kind.level, 0, access) } else { F::encode_leaf(kind.level, 0, access) }
}

/// Bits that an output address adds to the template of its entry, whatever the access ([`Format::encode_leaf`] promises
/// that): so a loop over entries need not encode the same access for each.
#[inline]
pub(crate) fn encode_output<F: Format>(kind: Kind, out: u64) -> u64 {
    const ANY: Access = Access::RW;
    if kind.group {
        F::encode_member(kind.level, out, ANY) & !F::encode_member(kind.level, 0, ANY)
    } else {
        F::encode_leaf(kind.level, out, ANY) & !F::encode_leaf(kind.level, 0, ANY)
    }
}

/// The table that an entry found at `level` points to: of what [`Format::decode`] says no more than that, which costs
/// less.
#[inline]
pub(crate) fn next_table<F: Format>(level: u32, entry: u64) -> Option<u64> {
    match F::decode(level, entry) {
        Entry::Table(next) => Some(next),
        _ => None,
    }
}

/// The same as an offset for [`Tables::loader`](crate::Tables::loader), where `origin` is the base of the tables plus
/// what an entry of the root has beside an address. A multiple of 8 for an entry that [`Format::encode_table`] gave;
/// `None` or something else for a leaf and for no entry.
#[inline(always)]
pub(crate) fn table_offset<F: Format>(level: u32, entry: u64, origin: u64) -> Option<u64> {
    let (bits, highest) = (F::encode_table(level, 0), 1 << F::OUTPUT_BITS >> 1);
    let origin = origin.wrapping_sub(F::encode_table(0, 0));
    let plain = F::TABLE_BITS != 0 && F::encode_table(level, highest) == highest | bits;
    if !plain {
        return Some(next_table::<F>(level, entry)?.wrapping_sub(origin));
    }
    let offset = entry.wrapping_sub(origin).wrapping_sub(bits);
    // The lowest three bits are the business of the loader.
    let other = F::TABLE_BITS & !7 != 0 && offset & F::TABLE_BITS != 0;
    if other { None } else { Some(offset) }
}

/// The size of the smallest leaf but one, or of the table that holds the smallest.
pub(crate) const fn second_size<F: Format>() -> u64 {
    let last = F::LEVELS - 1;
    if group_bits::<F>(last) > 0 {
        Kind { level: last, group: true }.size::<F>().bytes()
    } else {
        1 << shift::<F>(last - 1)
    }
}

/// The largest leaf of these sizes for this alignment (addresses joined by "or"), length and limit, all whole granules.
#[inline]
pub(crate) fn leaf_kind<F: Format>(alignment: u64, len: u64, limit: u64, sizes: PageSizes) -> Kind {
    let exists = |kind: Kind| !F::STANDS_IN || sizes.contains(kind.size::<F>());
    let fits = |kind: Kind| {
        let size = kind.size::<F>().bytes();
        exists(kind) && len >= size && limit >= size && alignment & (size - 1) == 0
    };
    let mut kind = Kind::single(F::LEVELS - 1);
    loop {
        let group = Kind { level: kind.level, group: true };
        if group_bits::<F>(kind.level) > 0 && exists(group) {
            if !fits(group) {
                return kind;
            }
            kind = group;
        }
        if kind.level == top_leaf_level::<F>() || !fits(Kind::single(kind.level - 1)) {
            return kind;
        }
        kind = Kind::single(kind.level - 1);
    }
}

/// The level of the largest leaf.
pub(crate) const fn top_leaf_level<F: Format>() -> u32 {
    let mut level = F::LEVELS - 1;
    while level > 0 && F::PAGE_SIZES.bits() >> shift::<F>(level - 1) & 1 == 1 {
        level -= 1;
    }
    level
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
    // The page sizes are those of the last levels, without a gap, and of the groups there.
    let mut level = F::LEVELS;
    let mut sizes = 0u64;
    let mut groups_fit = true;
    while level > top_leaf_level::<F>() {
        level -= 1;
        sizes |= 1 << shift::<F>(level);
        let bits = F::GROUP_BITS[level as usize];
        if bits > 0 {
            sizes |= 1 << (shift::<F>(level) + bits);
            let entries = entries::<F>(level).trailing_zeros();
            groups_fit = groups_fit && bits < F::INDEX_BITS && bits <= entries;
        }
    }
    F::LEVELS >= 2
        && F::LEVELS as usize <= MAX_LEVELS
        && (F::ENTRY_BYTES == 8 || F::ENTRY_BYTES == 4)
        && F::INPUT_BITS > shift::<F>(0)
        && F::INPUT_BITS < 64
        && F::OUTPUT_BITS < 64
        && groups_fit
        && sizes == F::PAGE_SIZES.bits()
}
