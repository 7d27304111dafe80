//! Where tables live.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use dmalane_addr::Address;

/// Memory for tables, as the walkers use it.
///
/// An address passed to `free`, `load` or `store` came from `allocate` of the same object and has not been freed since;
/// an implementation may panic on any other. Indices are below the number of entries of a table.
pub trait Tables {
    /// The space that entries point into: what a device uses to fetch a table.
    type Addr: Address;

    /// One more table: all zero, granule sized and aligned, at an address that the format's entries can hold. `None`
    /// when there is no memory for it.
    fn allocate(&mut self) -> Option<Self::Addr>;

    /// Takes a table back. Nothing points to it any more, and no device remembers it.
    fn free(&mut self, table: Self::Addr);

    /// The entry at `index`.
    fn load(&self, table: Self::Addr, index: usize) -> u64;

    /// Replaces the entry at `index`, by one 64-bit write as far as a device can see.
    fn store(&mut self, table: Self::Addr, index: usize, entry: u64);

    /// After `true` the next `tables` calls of [`allocate`](Self::allocate) succeed, with frees, loads, stores and
    /// smaller reservations in between. Reservations do not add up: a second call promises what it says and no more.
    /// `false` changes nothing that a caller can see.
    fn reserve(&mut self, tables: usize) -> bool;

    /// Rewrites entries from the start of `range` on: `each` is given the entry there and gives the one to put in its
    /// place, or `None` to stop. Gives the number of entries replaced.
    ///
    /// The same as loads and stores. An implementation overrides it to find the table once for all of them.
    fn update(&mut self, table: Self::Addr, range: Range<usize>, mut each: impl FnMut(u64) -> Option<u64>) -> usize {
        let (start, len) = (range.start, range.len());
        for index in range {
            match each(self.load(table, index)) {
                Some(new) => self.store(table, index, new),
                None => return index - start,
            }
        }
        len
    }
}

/// Entries in a table of [`HeapTables`].
const ENTRIES: usize = 512;

/// Tables of 4 KiB on the heap, at made-up addresses: a base plus 4096 for each table. Every operation takes constant
/// time (taking a new table: amortised, as pushing to a `Vec`). Memory of freed tables is kept for the next ones.
pub struct HeapTables<A> {
    base: A,
    limit: usize,
    slots: Vec<[u64; ENTRIES]>,
    /// Freed slots.
    free: Vec<u32>,
}

impl<A: Address> HeapTables<A> {
    /// Tables from `base` up, which should be a multiple of 4096 (a page table refuses its first table otherwise).
    pub fn new(base: A) -> Self {
        Self::with_limit(base, u32::MAX as usize)
    }

    /// The same, with at most `limit` tables in use at a time. Limits from 2^32 up count as 2^32 - 1.
    pub fn with_limit(base: A, limit: usize) -> Self {
        Self { base, limit: limit.min(u32::MAX as usize), slots: Vec::new(), free: Vec::new() }
    }

    /// Tables in use.
    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The entry that starts at byte address `entry`, for [`walk`](crate::walk()); `None` when no table was ever there
    /// or the address is not a multiple of 8.
    #[inline]
    pub fn read(&self, entry: u64) -> Option<u64> {
        let offset = entry.checked_sub(self.base.bits())?;
        let table = self.slots.get(usize::try_from(offset / 4096).ok()?)?;
        if offset % 8 != 0 { None } else { Some(table[offset as usize % 4096 / 8]) }
    }

    #[inline]
    fn slot(&self, table: A) -> usize {
        (table.bits().wrapping_sub(self.base.bits()) / 4096) as usize
    }

    /// The address of a slot, or `None` where its table would wrap.
    fn addr(&self, slot: usize) -> Option<A> {
        let first = self.base.checked_add((slot as u64).checked_mul(4096)?)?;
        first.checked_add(4095)?;
        Some(first)
    }
}

impl<A: Address> fmt::Debug for HeapTables<A> {
    /// Where and how many; not the entries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapTables").field("base", &self.base).field("in_use", &self.in_use()).finish_non_exhaustive()
    }
}

impl<A: Address> Tables for HeapTables<A> {
    type Addr = A;

    fn allocate(&mut self) -> Option<A> {
        if self.in_use() >= self.limit {
            return None;
        }
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize].fill(0);
            return self.addr(slot as usize);
        }
        let addr = self.addr(self.slots.len())?;
        self.slots.try_reserve(1).ok()?;
        self.slots.push([0; ENTRIES]);
        Some(addr)
    }

    /// # Panics
    /// When the address is not that of a table.
    fn free(&mut self, table: A) {
        let slot = self.slot(table);
        assert!(slot < self.slots.len(), "{table} is not a table of this heap");
        self.free.push(slot as u32); // the limit keeps slots below 2^32
    }

    /// # Panics
    /// When the address is not that of a table or the index is not below 512.
    #[inline]
    fn load(&self, table: A, index: usize) -> u64 {
        self.slots[self.slot(table)][index]
    }

    /// # Panics
    /// When the address is not that of a table or the index is not below 512.
    #[inline]
    fn store(&mut self, table: A, index: usize, entry: u64) {
        let slot = self.slot(table);
        self.slots[slot][index] = entry;
    }

    /// # Panics
    /// When the address is not that of a table or the range reaches beyond 512.
    #[inline]
    fn update(&mut self, table: A, range: Range<usize>, mut each: impl FnMut(u64) -> Option<u64>) -> usize {
        let slot = self.slot(table);
        let (start, len) = (range.start, range.len());
        for (done, entry) in self.slots[slot][start..start + len].iter_mut().enumerate() {
            match each(*entry) {
                Some(new) => *entry = new,
                None => return done,
            }
        }
        len
    }

    fn reserve(&mut self, tables: usize) -> bool {
        let fresh = tables.saturating_sub(self.free.len());
        if fresh == 0 {
            return tables <= self.limit - self.in_use();
        }
        tables <= self.limit - self.in_use()
            && self.slots.len().checked_add(fresh - 1).is_some_and(|last| self.addr(last).is_some())
            && self.slots.try_reserve(fresh).is_ok()
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
}
