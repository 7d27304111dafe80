//! Where tables live.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;
use core::ops::Range;

use dmalane_addr::{Address, PageSize};

use crate::Format;
use crate::chunks::in_chunks;
use crate::format::entries;

/// The sizes of a format's tables, and where they can be. All but the root have one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TableShape {
    /// Bytes of the root, at least those of a table, and its alignment.
    pub root: PageSize,
    /// Bytes of every other table, and its alignment.
    pub table: PageSize,
    /// The highest address that an entry can name.
    pub last: u64,
}

impl TableShape {
    /// All tables of 4 KiB, anywhere.
    pub const ALL_4K: Self = Self { root: PageSize::SIZE_4K, table: PageSize::SIZE_4K, last: u64::MAX };

    /// The shape of a format.
    pub const fn of<F: Format>() -> Self {
        let entry = F::ENTRY_BYTES.trailing_zeros() as u8;
        let table = entries::<F>(1).trailing_zeros() as u8 + entry;
        let root = entries::<F>(0).trailing_zeros() as u8 + entry;
        let root = if root > table { root } else { table };
        match (PageSize::from_log2(root), PageSize::from_log2(table)) {
            (Some(root), Some(table)) => Self { root, table, last: (1 << F::OUTPUT_BITS) - 1 },
            _ => panic!("tables larger than the address space"),
        }
    }
}

/// Memory for tables, as the walkers use it.
///
/// An address passed to `free`, `load` or `store` came from `allocate` or `allocate_root` of the same object and has
/// not been freed since; an implementation may panic on any other. Indices lie within the table.
///
/// An implementation with only 4 KiB tables serves most formats. It leaves `prepare` and the functions of the root as
/// they are.
pub trait Tables {
    /// The space that entries point into: what a device uses to fetch a table.
    type Addr: Address;

    /// True when other handles change the same tables at the same time: see
    /// [`PageTable::attach`](crate::PageTable::attach).
    const SHARED: bool = false;

    /// Called by [`PageTable::new`](crate::PageTable::new) before anything else: the sizes of the tables to come. False
    /// refuses them. Tables beyond [`TableShape::last`] are refused when they are allocated, so
    /// [`reserve`](Self::reserve) must not promise them.
    fn prepare(&mut self, shape: TableShape) -> bool {
        shape.root == PageSize::SIZE_4K && shape.table == PageSize::SIZE_4K
    }

    /// The root table: all zero, sized and aligned as asked of `prepare`, at an address that the format's registers can
    /// hold. `None` when there is no memory for it.
    fn allocate_root(&mut self) -> Option<Self::Addr> {
        self.allocate()
    }

    /// Takes the root back.
    fn free_root(&mut self, root: Self::Addr) {
        self.free(root);
    }

    /// One more table: all zero, sized and aligned as asked of `prepare`, at an address that the format's entries can
    /// hold. `None` when there is no memory for it.
    fn allocate(&mut self) -> Option<Self::Addr>;

    /// As [`allocate`](Self::allocate), but the words may be anything: the table will be written, and the rest of it
    /// [zeroed](Self::zero_but), before it is linked. An implementation that zeroes tables overrides both.
    #[inline]
    fn allocate_unzeroed(&mut self) -> Option<Self::Addr> {
        self.allocate()
    }

    /// Zeroes the words of a table from [`allocate_unzeroed`](Self::allocate_unzeroed) beside those of `written`.
    #[inline]
    fn zero_but(&mut self, table: Self::Addr, written: Range<usize>) {
        let _ = (table, written);
    }

    /// Takes a table back. Nothing points to it any more, and no device remembers it.
    fn free(&mut self, table: Self::Addr);

    /// The 64-bit word at `index`. (An entry of a format is a word, or half of one.)
    fn load(&self, table: Self::Addr, index: usize) -> u64;

    /// The address that [`loader`](Self::loader) counts from, which never changes.
    #[inline]
    fn base(&self) -> u64 {
        0
    }

    /// [`load`](Self::load) for a walk, which loads one word after another, from the table at [`base`](Self::base) plus
    /// an offset, modulo 2^64. It gives `None` for an offset that is not a multiple of 8: so a walk may take what
    /// follows from an entry for an offset before it knows that the entry points to a table.
    ///
    /// An implementation overrides it to copy what it would otherwise read again for each word.
    #[inline(always)]
    fn loader(&self) -> impl Fn(u64, usize) -> Option<u64> {
        |table, index| table.is_multiple_of(8).then(|| self.load(Self::Addr::new(table), index))
    }

    /// Replaces the word at `index`; a device sees one 64-bit write.
    fn store(&mut self, table: Self::Addr, index: usize, entry: u64);

    /// True when all words of `range` are 0. An implementation overrides it to find the table once for all of them.
    fn is_zero(&self, table: Self::Addr, mut range: Range<usize>) -> bool {
        range.all(|index| self.load(table, index) == 0)
    }

    /// Links a table: replaces the word at `index`, which is 0, by `entry`. Where tables are shared, the word that
    /// another handle has put there in the meantime is given as an error, and stays.
    ///
    /// # Errors
    /// The word that was there.
    fn install(&mut self, table: Self::Addr, index: usize, entry: u64) -> Result<(), u64> {
        self.store(table, index, entry);
        Ok(())
    }

    /// Clears `bits` of the word at `index`, and gives what it was.
    ///
    /// Override it by an atomic operation where a device writes to entries, or a bit that it sets in between is lost.
    fn clear_bits(&mut self, table: Self::Addr, index: usize, bits: u64) -> u64 {
        let word = self.load(table, index);
        if word & bits != 0 {
            self.store(table, index, word & !bits);
        }
        word
    }

    /// Replaces the word at `index` and gives what it was; atomic where [`clear_bits`](Self::clear_bits) is.
    fn exchange(&mut self, table: Self::Addr, index: usize, entry: u64) -> u64 {
        let word = self.load(table, index);
        self.store(table, index, entry);
        word
    }

    /// The words of `range` were stored, and a device must see them before anything that is stored after this call.
    ///
    /// For a device whose walker does not snoop the caches: clean each cache line of the range once, and wait. Called
    /// once for each run of stores to one table, before the entry that links the table. (Zeroing is the business of
    /// [`allocate`](Self::allocate).) Does nothing unless overridden.
    #[inline]
    fn clean(&mut self, table: Self::Addr, range: Range<usize>) {
        let _ = (table, range);
    }

    /// After `true` the next `tables` calls of [`allocate`](Self::allocate) succeed, with frees, loads, stores and
    /// smaller reservations in between. Reservations do not add up: a second call promises what it says and no more.
    /// `false` changes nothing that a caller can see.
    fn reserve(&mut self, tables: usize) -> bool;

    /// Rewrites words from the start of `range` on, many at a time: `each` is given the next words, changes some of
    /// them from the first on, and returns how many. When that is not all of them, it is not called again. Returns the
    /// number of words replaced; the others are not stored to.
    ///
    /// The same as loads and stores. An implementation overrides it to hand out words where they are, or larger chunks.
    fn edit(&mut self, table: Self::Addr, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize {
        in_chunks(self, range, |tables, i| tables.load(table, i), |tables, i, word| tables.store(table, i, word), each)
    }

    /// As [`edit`](Self::edit), in a table that nothing points to yet: no device and no other handle sees it before it
    /// is linked, which orders these stores before it. `each` may be given any values.
    ///
    /// An implementation overrides it to store plainly, many words at a time, without reading them.
    #[inline]
    fn fill(&mut self, table: Self::Addr, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize {
        self.edit(table, range, each)
    }
}

/// Tables on the heap, at made-up addresses from a base up. Every operation takes constant time (taking a new table:
/// amortised, as pushing to a `Vec`). Memory of freed tables is kept for the next ones.
#[cfg(feature = "alloc")]
pub struct HeapTables<A> {
    base: A,
    limit: usize,
    shape: TableShape,
    /// All tables, one after another.
    words: Vec<u64>,
    /// Freed tables, by position.
    free: Vec<u32>,
    /// The table that was taken last, if it was never used: it is all zero but for what was written since.
    fresh: Option<A>,
    /// Positions beyond one for each table that is in use: those of a root that is larger than a table.
    extra: usize,
}

#[cfg(feature = "alloc")]
impl<A: Address> HeapTables<A> {
    /// Tables from `base` up, which should be a multiple of the size of the root (a page table refuses its first table
    /// otherwise).
    pub fn new(base: A) -> Self {
        Self::with_limit(base, u32::MAX as usize)
    }

    /// The same, with at most `limit` tables in use at a time. Limits from 2^32 up count as 2^32 - 1.
    pub fn with_limit(base: A, limit: usize) -> Self {
        let limit = limit.min(u32::MAX as usize);
        Self { base, limit, shape: TableShape::ALL_4K, words: Vec::new(), free: Vec::new(), fresh: None, extra: 0 }
    }

    /// Tables in use.
    pub fn in_use(&self) -> usize {
        self.slots() - self.free.len() - self.extra
    }

    /// The word that starts at byte address `at`, for [`walk`](crate::walk()); `None` when no table was ever there or
    /// the address is not a multiple of 8.
    #[inline]
    pub fn read(&self, at: u64) -> Option<u64> {
        let offset = at.checked_sub(self.base.bits())?;
        let word = self.words.get(usize::try_from(offset / 8).ok()?)?;
        if offset % 8 != 0 { None } else { Some(*word) }
    }

    /// The first word of a table.
    #[inline]
    fn first(&self, table: A) -> usize {
        (table.bits().wrapping_sub(self.base.bits()) / 8) as usize
    }

    /// The position of one word.
    #[inline]
    fn position(&self, table: A, index: usize) -> usize {
        crate::words::word_at(table.bits().wrapping_sub(self.base.bits()), index)
    }

    /// Words of a table.
    fn table_words(&self) -> usize {
        self.shape.table.bytes() as usize / 8
    }

    /// Tables that memory was taken for.
    fn slots(&self) -> usize {
        self.words.len() >> (self.shape.table.log2() - 3)
    }

    /// The address of a slot, or `None` where no entry can name its table.
    fn addr(&self, slot: usize) -> Option<A> {
        let size = self.shape.table.bytes();
        let first = self.base.checked_add((slot as u64).checked_mul(size)?)?;
        first.checked_add(size - 1).filter(|last| last.bits() <= self.shape.last).map(|_| first)
    }

    /// Memory for one more slot.
    fn push(&mut self) -> Option<A> {
        let addr = self.addr(self.slots())?;
        let words = self.table_words();
        self.room_to_free(1)?;
        self.words.try_reserve(words).ok()?;
        self.words.resize(self.words.len() + words, 0);
        Some(addr)
    }

    /// Room for every table in the list of freed ones, `fresh` new ones included: freeing must not fail.
    fn room_to_free(&mut self, fresh: usize) -> Option<()> {
        let tables = self.slots().checked_add(fresh)?;
        self.free.try_reserve(tables - self.free.len()).ok()
    }

    fn slot(&self, table: A) -> u32 {
        let first = self.first(table);
        assert!(first < self.words.len(), "{table} is not a table of this heap");
        (first >> (self.shape.table.log2() - 3)) as u32 // the limit keeps slots below 2^32
    }

    /// Slots of the root.
    fn root_slots(&self) -> usize {
        (self.shape.root.bytes() / self.shape.table.bytes()) as usize
    }
}

#[cfg(feature = "alloc")]
impl<A: Address> core::fmt::Debug for HeapTables<A> {
    /// Where and how many; not the entries.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("HeapTables").field("base", &self.base).field("in_use", &self.in_use()).finish_non_exhaustive()
    }
}

#[cfg(feature = "alloc")]
impl<A: Address> Tables for HeapTables<A> {
    type Addr = A;

    /// Any sizes, as long as no table is in use.
    fn prepare(&mut self, shape: TableShape) -> bool {
        if shape != self.shape {
            if self.in_use() > 0 || shape.table.bytes() < 8 || shape.root < shape.table {
                return false;
            }
            self.words.clear();
            self.free.clear();
            self.shape = shape;
        }
        true
    }

    fn allocate_root(&mut self) -> Option<A> {
        if self.root_slots() == 1 || self.in_use() >= self.limit {
            return self.allocate();
        }
        if self.in_use() == 0 {
            self.words.clear();
            self.free.clear();
        }
        // Another root starts at its alignment; slots in front of it become free tables.
        for _ in 1..self.root_slots() {
            if self.words.is_empty() || self.addr(self.slots())?.is_aligned(self.shape.root) {
                break;
            }
            let slot = self.slots() as u32;
            self.push()?;
            self.free.push(slot);
        }
        let root = self.push()?;
        for made in 1..self.root_slots() {
            if self.push().is_none() {
                let slots = self.slots();
                self.free.extend((slots - made..slots).map(|slot| slot as u32));
                return None;
            }
        }
        self.extra += self.root_slots() - 1;
        Some(root)
    }

    /// # Panics
    /// When the address is not that of a table.
    fn free_root(&mut self, root: A) {
        let first = self.slot(root);
        self.free.extend(first..first + self.root_slots() as u32);
        self.extra -= self.root_slots() - 1;
    }

    fn allocate(&mut self) -> Option<A> {
        let table = self.allocate_unzeroed()?;
        self.zero_but(table, 0..0);
        Some(table)
    }

    fn allocate_unzeroed(&mut self) -> Option<A> {
        if self.in_use() >= self.limit {
            return None;
        }
        self.fresh = None;
        if let Some(slot) = self.free.pop() {
            return self.addr(slot as usize);
        }
        self.fresh = self.push();
        self.fresh
    }

    fn zero_but(&mut self, table: A, written: Range<usize>) {
        if self.fresh.take() == Some(table) {
            return;
        }
        let (first, words) = (self.first(table), self.table_words());
        self.words[first..first + written.start].fill(0);
        self.words[first + written.end..first + words].fill(0);
    }

    /// # Panics
    /// When the address is not that of a table.
    fn free(&mut self, table: A) {
        let slot = self.slot(table);
        self.free.push(slot);
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn load(&self, table: A, index: usize) -> u64 {
        self.words[self.position(table, index)]
    }

    #[inline]
    fn base(&self) -> u64 {
        self.base.bits()
    }

    #[inline(always)]
    fn loader(&self) -> impl Fn(u64, usize) -> Option<u64> {
        |table, index| self.words.get(crate::words::word_at(table, index)).copied()
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline(always)]
    fn store(&mut self, table: A, index: usize, entry: u64) {
        let position = self.position(table, index);
        self.words[position] = entry;
    }

    /// All of the range in one chunk, where it is: no device walks this memory, so nobody sees how it is written.
    ///
    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn edit(&mut self, table: A, range: Range<usize>, mut each: impl FnMut(&mut [u64]) -> usize) -> usize {
        let first = self.first(table);
        each(&mut self.words[first + range.start..first + range.end])
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn is_zero(&self, table: A, range: Range<usize>) -> bool {
        let first = self.first(table);
        self.words[first + range.start..first + range.end].iter().fold(0, |all, word| all | word) == 0
    }

    fn reserve(&mut self, tables: usize) -> bool {
        let fresh = tables.saturating_sub(self.free.len());
        if fresh == 0 {
            return tables <= self.limit - self.in_use();
        }
        tables <= self.limit - self.in_use()
            && self.slots().checked_add(fresh - 1).is_some_and(|last| self.addr(last).is_some())
            && self.room_to_free(fresh).is_some()
            && fresh.checked_mul(self.table_words()).is_some_and(|words| self.words.try_reserve(words).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_addr::PhysAddr;

    #[test]
    fn tables_come_back_zeroed_and_the_limit_holds() {
        let mut t = HeapTables::with_limit(PhysAddr::new(0x10000), 2);
        assert!(t.reserve(2) && !t.reserve(3));
        let a = t.allocate().unwrap();
        let b = t.allocate().unwrap();
        assert_eq!((a.bits(), b.bits(), t.allocate(), t.in_use()), (0x10000, 0x11000, None, 2));
        t.store(a, 511, 7);
        assert_eq!((t.load(a, 511), t.read(0x10ff8), t.read(0x10ff9)), (7, Some(7), None));
        assert_eq!((t.read(0x12000), t.read(0xfff8)), (None, None));
        t.free(a);
        assert_eq!((t.allocate(), t.load(a, 511)), (Some(a), 0));
    }

    #[test]
    fn the_top_of_the_space_is_a_limit_too() {
        let mut t = HeapTables::new(PhysAddr::new(u64::MAX - 0x1fff));
        assert!(t.reserve(2) && !t.reserve(3));
        assert!(t.allocate().is_some() && t.allocate().is_some());
        assert_eq!(t.allocate(), None);
        assert!(!t.reserve(1) && t.reserve(0));
        assert!(!t.reserve(usize::MAX));
    }

    #[test]
    fn other_sizes_and_a_larger_root() {
        let k1 = PageSize::new(1024).unwrap();
        let shape = TableShape { root: PageSize::SIZE_16K, table: k1, last: 0x1_3fff };
        let mut t = HeapTables::with_limit(PhysAddr::new(0x8000), 3);
        assert!(t.prepare(shape) && t.prepare(shape));
        let root = t.allocate_root().unwrap();
        let a = t.allocate().unwrap();
        assert_eq!((root.bits(), a.bits(), t.in_use()), (0x8000, 0xc000, 2));
        t.store(root, 2047, 9);
        assert_eq!((t.read(0xbff8), t.load(a, 0)), (Some(9), 0));
        assert!(!t.prepare(TableShape::ALL_4K), "in use");
        // A second root starts at its alignment, and the tables in front of it can be had.
        let second = t.allocate_root().unwrap();
        assert_eq!((second.bits(), t.in_use(), t.allocate()), (0x1_0000, 3, None));
        t.free_root(second);
        assert!(t.reserve(1) && t.allocate().is_some());
        t.free_root(root);
        t.free(a);
        assert_eq!(t.in_use(), 1);
        let mut t = HeapTables::new(PhysAddr::new(0x1_3000));
        assert!(t.prepare(shape) && t.reserve(4) && !t.reserve(5), "the others are beyond the last address");
    }
}
