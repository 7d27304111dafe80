//! A tree of tables, owned together with the memory it lives in.

use core::marker::PhantomData;

use dmalane_addr::{Access, Address, PageSize, PageSizes, Span};

use crate::cursor::Cursor;
use crate::format::{
    Kind, entries, geometry_is_sound, group_bits, index, input_len, next_table, page_size, shift, table_offset,
    top_leaf_level,
};
use crate::list::List;
use crate::{Entry, Error, FlushList, Format, FormatId, NamedAddr, Registers, TableShape, Tables, slots};

/// A page table in format `F` that translates `I` to `O`, its tables in `T`.
///
/// The methods that walk are in `map.rs`, `unmap.rs` and `runs.rs`. [`clear`](Self::clear), and an
/// [`unmap`](Self::unmap) of tables that threads share, may leave an empty linked table; later maps there use smaller
/// leaves until an unmap covers it. A map that fails frees the tables that it made itself and no other.
///
/// A table can be walked by a device at any time. An entry is written once its table is complete, and a table is linked
/// after it was zeroed; ordering those writes for the device, and cleaning caches for one that does not snoop, is the
/// business of [`Tables`].
#[derive(Debug)]
pub struct PageTable<F, I, O, T: Tables> {
    pub(crate) tables: T,
    pub(crate) root: T::Addr,
    /// The value subtracted from an entry of the root to get the offset of a table, as [`Tables::loader`] counts.
    pub(crate) origin: u64,
    /// Live leaves, by [`Kind::slot`].
    pub(crate) leaves: [u64; Kind::COUNT],
    /// Tables below the root that were linked, less those that were detached.
    pub(crate) linked: usize,
    pub(crate) cursor: Cursor<T::Addr>,
    /// The tables that the present map call has linked: an address that each translates, its level in the low bits.
    pub(crate) made: List<I>,
    /// By address of a table of the last level, an entry that was valid when it was last looked at.
    pub(crate) witnesses: [u16; 64],
    /// The bits of an access, and the entry of a page with it but for the output address; none has the first ones.
    pub(crate) template: (u16, u64),
    /// Used where [`Format::STANDS_IN`] is true.
    part: Part,
    kinds: PhantomData<fn(I) -> (F, O)>,
}

/// The part of a format that a page table uses.
#[derive(Clone, Copy, Debug)]
struct Part {
    root_level: u32,
    input_len: u64,
    sizes: PageSizes,
}

impl Part {
    const fn whole<F: Format>() -> Self {
        Self { root_level: 0, input_len: input_len::<F>(), sizes: F::PAGE_SIZES }
    }
}

/// A mapping found by [`PageTable::lookup`]: one leaf, whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Leaf<I, O> {
    /// Input address where the leaf starts.
    pub at: I,
    /// Output address where the leaf starts.
    pub to: O,
    /// Its page size.
    pub size: PageSize,
    /// Access that it permits.
    pub access: Access,
}

impl<I: Address, O: Address> Leaf<I, O> {
    /// Where `at` leads, or `None` when it lies outside the leaf.
    #[inline]
    pub fn translate(&self, at: I) -> Option<O> {
        let offset = at.offset_from(self.at)?;
        if offset >= self.size.bytes() { None } else { self.to.checked_add(offset) }
    }
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// An empty page table: one zero table as its root.
    ///
    /// # Errors
    /// [`Error::TableSize`] when the memory has no tables of the format's sizes; [`Error::NoTables`] or
    /// [`Error::TableAddress`] when the root cannot be had.
    pub fn new(tables: T) -> Result<Self, Error> {
        Self::of_part(Part::whole::<F>(), tables)
    }

    /// The same for a [`StandIn`](crate::StandIn): with the levels and the page sizes of `format`. Where the root of
    /// that is several tables in a row, there is one more level instead.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn standing_for(format: FormatId, tables: T) -> Result<Self, Error> {
        const { assert!(F::STANDS_IN, "not a stand-in") }
        let (granule, sizes) = (u32::from(F::GRANULE.log2()), format.facts().page_sizes);
        let levels = (format.facts().input_bits - granule).div_ceil(F::INDEX_BITS).max(2);
        debug_assert!(levels <= F::LEVELS && sizes.bits() & !F::PAGE_SIZES.bits() == 0, "{format} has another family");
        let input_len = 1 << (granule + levels * F::INDEX_BITS).min(F::INPUT_BITS);
        Self::of_part(Part { root_level: F::LEVELS - levels, input_len, sizes }, tables)
    }

    fn of_part(part: Part, mut tables: T) -> Result<Self, Error> {
        const { assert!(geometry_is_sound::<F>(), "the constants of this format contradict each other") }
        let shape = TableShape::of::<F>();
        if !tables.prepare(shape) {
            return Err(Error::TableSize { table: shape.table, root: shape.root });
        }
        let root = tables.allocate_root().ok_or_else(|| match T::Addr::new(tables.base()) {
            beyond if beyond.bits() > shape.last => Error::TableAddress { at: NamedAddr::of(beyond) },
            _ => Error::NoTables { at: NamedAddr::of(I::new(0)) },
        })?;
        if !fits::<F, T>(root, shape.root) {
            tables.free_root(root);
            return Err(Error::TableAddress { at: NamedAddr::of(root) });
        }
        Ok(Self::at_root(tables, root, part))
    }

    /// Another handle on the tree at `root`, for another thread: `tables` are those of the first handle.
    ///
    /// Handles map, unmap and look up at the same time without a lock, as long as each call's range, and every large
    /// leaf that it splits or merges, belongs to its caller alone, as a range of IOVAs from an allocator does. Tables
    /// that two of them need are linked by the first of them. An unmap unlinks a table only when its span covers all
    /// that the table translates; others are left behind empty and used again. Leaves are counted by the handle that
    /// made or unmade them: the sum over all handles, wrapping, is that of the tree.
    ///
    /// Drop all handles but one before [`into_tables`](Self::into_tables). Formats with 4-byte entries cannot be
    /// shared.
    pub fn attach(tables: T, root: T::Addr) -> Self {
        const { assert!(T::SHARED && F::ENTRY_BYTES == 8, "these tables cannot be shared") }
        Self::at_root(tables, root, Part::whole::<F>())
    }

    fn at_root(tables: T, root: T::Addr, part: Part) -> Self {
        let offset = root.bits().wrapping_sub(tables.base());
        let (cursor, made) = (Cursor::new(root, offset, part.root_level), List::new());
        let origin = tables.base().wrapping_add(F::encode_table(0, 0));
        let (witnesses, template) = ([0; 64], (u16::MAX, 0));
        Self {
            tables,
            root,
            origin,
            leaves: [0; Kind::COUNT],
            linked: 0,
            cursor,
            made,
            witnesses,
            template,
            part,
            kinds: PhantomData,
        }
    }

    /// The level of the root: 0, but where the format is a [`StandIn`](crate::StandIn) for one of fewer levels.
    #[inline(always)]
    pub fn root_level(&self) -> u32 {
        if F::STANDS_IN { self.part.root_level } else { 0 }
    }

    /// The page sizes that have a leaf.
    #[inline(always)]
    pub(crate) fn page_sizes(&self) -> PageSizes {
        if F::STANDS_IN { self.part.sizes } else { F::PAGE_SIZES }
    }

    /// True when neighbouring entries at `level` can form a group.
    #[inline(always)]
    pub(crate) fn has_groups_at(&self, level: u32) -> bool {
        let group = Kind { level, group: true };
        group_bits::<F>(level) > 0 && (!F::STANDS_IN || self.page_sizes().contains(group.size::<F>()))
    }

    /// Bytes of input address space.
    #[inline(always)]
    pub(crate) fn input_len(&self) -> u64 {
        if F::STANDS_IN { self.part.input_len } else { input_len::<F>() }
    }

    /// The address of the root table, to be programmed into the device. It never changes.
    pub fn root(&self) -> T::Addr {
        self.root
    }

    /// The memory of the tables.
    pub fn tables(&self) -> &T {
        &self.tables
    }

    /// The memory of the tables, for example to reserve some. Freeing or overwriting tables of the tree breaks it.
    pub fn tables_mut(&mut self) -> &mut T {
        &mut self.tables
    }

    /// Frees every table, the root included, and gives the memory back. No device may use the tree any more.
    pub fn into_tables(mut self) -> T {
        self.free_below(self.root, self.root_level());
        self.tables.free_root(self.root);
        self.tables
    }

    /// [`Tables::reserve`], and what the page table itself needs beside: after `true`, calls that take this number of
    /// tables together cannot fail for want of memory.
    pub fn reserve(&mut self, tables: usize) -> bool {
        self.made.clear();
        self.made.try_reserve(tables).is_ok() && self.tables.reserve(tables)
    }

    /// Frees what an unmap detached.
    ///
    /// Call it only after the device has forgotten [`FlushList::span`]: until then its walker may still read these
    /// tables. The list must come from this page table.
    #[inline]
    pub fn free_tables(&mut self, list: FlushList<I, T::Addr>) {
        if !list.tables.is_empty() {
            self.free_detached(list.tables.iter().copied());
        }
    }

    /// The same for tables that [`clear_into`](Self::clear_into) and [`detach_empty`](Self::detach_empty) detached.
    #[inline(never)] // most lists have none
    pub fn free_detached(&mut self, tables: impl IntoIterator<Item = T::Addr>) {
        tables.into_iter().for_each(|table| self.tables.free(table));
    }

    /// The leaf that translates `at`, or `None` where nothing is mapped and beyond the input range.
    #[inline(always)]
    pub fn lookup(&self, at: I) -> Option<Leaf<I, O>> {
        self.at_last_entry(at, |level, entry| {
            let Entry::Leaf { out, access } = F::decode(level, entry) else { return None };
            let size = Kind::of::<F>(level, entry).size::<F>();
            Some(Leaf { at: at.align_down(size), to: O::new(out), size, access })
        })
    }

    /// Where `at` leads, as Linux's `iova_to_phys`; `None` as for [`lookup`](Self::lookup), which also finds the leaf
    /// with its rights, and takes longer.
    #[inline(always)]
    pub fn translate(&self, at: I) -> Option<O> {
        self.at_last_entry(at, |level, entry| {
            let Entry::Leaf { out, .. } = F::decode(level, entry) else { return None };
            let size = Kind::of::<F>(level, entry).size::<F>();
            Some(O::new(out | at.bits() & (size.bytes() - 1)))
        })
    }

    /// Walks to `at` and asks `ask` about the entry in which the walk ends, with its level (a constant at each call).
    #[inline(always)]
    fn at_last_entry<R>(&self, at: I, ask: impl Fn(u32, u64) -> Option<R>) -> Option<R> {
        let bits = at.bits();
        if bits >= self.input_len() {
            return None;
        }
        let words = self.tables.loader();
        let load = |table, level| slots::load_by::<F>(&words, table, index::<F>(bits, level));
        let root = table_offset::<F>(0, F::encode_table(0, self.root.bits()), self.origin)?;
        let mut entry = load(root, self.root_level())?;
        for level in self.root_level()..F::LEVELS - 1 {
            // Most entries lead to the next table: whether this one does is not asked apart from where that is.
            entry = match table_offset::<F>(level, entry, self.origin).and_then(|table| load(table, level + 1)) {
                Some(entry) => entry,
                None => match ask(level, entry) {
                    None => self.entry_below(level, entry, bits)?,
                    found => return found,
                },
            };
        }
        ask(F::LEVELS - 1, entry)
    }

    /// The entry for `at` in the table that this one links, if it links one: it is not what this page table wrote, but
    /// a device may have marked it.
    #[cold]
    #[inline(never)]
    fn entry_below(&self, level: u32, entry: u64, at: u64) -> Option<u64> {
        let table = T::Addr::new(next_table::<F>(level, entry)?);
        Some(self.load(table, index::<F>(at, level + 1)))
    }

    /// The number of live leaves of each page size, smallest size first. Kept up to date, so this costs nothing.
    pub fn leaf_counts(&self) -> impl Iterator<Item = (PageSize, u64)> + use<F, I, O, T> {
        let (leaves, sizes) = (self.leaves, self.page_sizes());
        (top_leaf_level::<F>()..F::LEVELS)
            .rev()
            .flat_map(|level| [false, true].map(|group| Kind { level, group }))
            .filter(|kind| !kind.group || group_bits::<F>(kind.level) > 0)
            .filter(move |kind| !F::STANDS_IN || sizes.contains(kind.size::<F>()))
            .map(move |kind| (kind.size::<F>(), leaves[kind.slot()]))
    }

    /// The number of tables below the root: the most that a call can detach. Kept up to date, and counted as leaves
    /// are where handles share the tree ([`attach`](Self::attach)).
    pub fn linked_tables(&self) -> usize {
        self.linked
    }

    /// Bytes mapped in all.
    pub fn mapped_bytes(&self) -> u64 {
        self.leaf_counts().fold(0, |sum, (size, n)| size.bytes().wrapping_mul(n).wrapping_add(sum))
    }

    /// The most tables below the root that mapping the span can take, whatever the segments are. This covers the tables
    /// that unmapping the span first may need for splitting leaves at its ends: such a table holds the first or the
    /// last byte of the span, stays in use for what is left of the leaf, and is counted here already.
    pub fn max_tables_for(span: Span<I>) -> usize {
        let table = |at: u64, level: u32| at >> shift::<F>(level - 1);
        let of_level = |level| (table(span.last().bits(), level) - table(span.first().bits(), level)) as usize + 1;
        (1..F::LEVELS).map(of_level).sum()
    }

    /// The number of tables that it would take to split every leaf into smallest pages. With these in reserve a
    /// caller can unmap any pages, in any order.
    pub fn split_tables(&self) -> usize {
        let tables_of = |size: u64| {
            let regions = (1..F::LEVELS).map(|level| page_size::<F>(level - 1).bytes());
            regions.filter(|&region| region <= size).map(|region| size / region).fold(0, u64::saturating_add)
        };
        let mut tables = 0u64;
        // Most have leaves of the last level alone, which take no table, and every plan asks.
        for level in top_leaf_level::<F>()..F::LEVELS - 1 {
            for kind in [false, true].map(|group| Kind { level, group }) {
                let leaves = self.leaves[kind.slot()];
                if leaves > 0 {
                    tables = tables.saturating_add(leaves.saturating_mul(tables_of(kind.size::<F>().bytes())));
                }
            }
        }
        usize::try_from(tables).unwrap_or(usize::MAX)
    }

    /// Registers to program into a device so that it walks this table ([`Format::registers`]).
    pub fn registers(&self) -> Registers {
        F::registers(self.root.bits())
    }

    /// A table whose address fits into an entry. `at` is for the message.
    pub(crate) fn allocate(&mut self, at: u64) -> Result<T::Addr, Error> {
        let table = self.tables.allocate();
        self.fitting(table, at)
    }

    /// The same for a table that is filled before it is linked: see [`Tables::allocate_unzeroed`].
    pub(crate) fn allocate_unzeroed(&mut self, at: u64) -> Result<T::Addr, Error> {
        let table = if F::ENTRY_BYTES == 8 { self.tables.allocate_unzeroed() } else { self.tables.allocate() };
        self.fitting(table, at)
    }

    fn fitting(&mut self, table: Option<T::Addr>, at: u64) -> Result<T::Addr, Error> {
        let table = table.ok_or(Error::NoTables { at: NamedAddr::of(I::new(at)) })?;
        if !fits::<F, T>(table, TableShape::of::<F>().table) {
            self.tables.free(table);
            return Err(Error::TableAddress { at: NamedAddr::of(table) });
        }
        Ok(table)
    }

    #[inline]
    pub(crate) fn load(&self, table: T::Addr, index: usize) -> u64 {
        slots::load::<F, T>(&self.tables, table, index)
    }

    #[inline]
    pub(crate) fn store(&mut self, table: T::Addr, index: usize, entry: u64) {
        slots::store::<F, T>(&mut self.tables, table, index, entry);
    }

    /// The end of the addresses that follow `at`: of sign-extended ones, the lower half has one of its own.
    pub(crate) fn end_from(&self, at: u64) -> u64 {
        let (end, is_low) = (self.input_len(), |bits| I::new(bits).shown() == bits);
        if is_low(at) && !is_low(end - 1) { end / 2 } else { end }
    }

    /// The span as first and last number, if it is made of whole granules within the input range.
    pub(crate) fn check_span(&self, span: Span<I>) -> Result<(u64, u64), Error> {
        let (at, len) = (NamedAddr::of(span.first()), span.len());
        if !span.is_aligned(F::GRANULE) {
            return Err(Error::Misaligned { at, len, granule: F::GRANULE });
        }
        if span.last().bits() >= self.input_len() {
            return Err(Error::InputRange { at, len, bits: self.input_len().ilog2() });
        }
        Ok((span.first().bits(), span.last().bits()))
    }

    /// Frees all tables below one at `level`.
    fn free_below(&mut self, table: T::Addr, level: u32) {
        if level + 1 < F::LEVELS {
            for i in 0..entries::<F>(level) {
                if let Entry::Table(next) = F::decode(level, self.load(table, i)) {
                    self.free_below(T::Addr::new(next), level + 1);
                    self.tables.free(T::Addr::new(next));
                }
            }
        }
    }
}

/// True for a table that an entry, or the register of the root, can hold.
fn fits<F: Format, T: Tables>(table: T::Addr, size: PageSize) -> bool {
    table.is_aligned(size) && table.bits() >> F::OUTPUT_BITS == 0
}
