//! Tables in memory that somebody else owns, shared by threads.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use dmalane_addr::Address;

use crate::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::words::word_at;
use crate::{Format, TableShape, Tables};

/// Tables in a slice of words: a guest's memory, a region set aside at boot, or a `Vec` of the worst case.
///
/// `&TablePool` is the [`Tables`], and `&mut TablePool` those of one owner, which are faster. Copies of the former
/// serve threads at the same time ([`PageTable::attach`](crate::PageTable::attach)), without a lock: tables that were
/// never used are counted off, freed ones are a stack linked through their first words. Threads that free and take
/// tables all the time each want a [`LocalPool`] of their own in front of that. Entries are stored in the machine's
/// byte order, which is the devices' on little-endian ones.
///
/// ```
/// # use std::sync::atomic::AtomicU64;
/// # use dmalane_addr::{Access, Address, Iova, PhysAddr};
/// # use dmalane_iopt::{PageTable, TablePool, X86_64_4Level};
/// let memory: Vec<AtomicU64> = (0..64 * 512).map(|_| AtomicU64::new(0)).collect();
/// let pool = TablePool::new::<X86_64_4Level>(PhysAddr::new(0x10_0000), &memory);
/// let root = PageTable::<X86_64_4Level, Iova, PhysAddr, _>::new(&pool)?.root();
/// std::thread::scope(|threads| {
///     for n in 0..4 {
///         let pool = &pool;
///         threads.spawn(move || {
///             let mut table = PageTable::<X86_64_4Level, Iova, PhysAddr, _>::attach(pool, root);
///             table.map(Iova::new(n << 30), PhysAddr::new(0), 4096, Access::RW).unwrap();
///         });
///     }
/// });
/// assert_eq!(pool.in_use(), 1 + 1 + 4 + 4); // one table of the second level serves all four
/// # Ok::<(), dmalane_iopt::Error>(())
/// ```
pub struct TablePool<'m, A> {
    base: A,
    shape: TableShape,
    words: &'m [AtomicU64],
    limit: usize,
    counters: Counters,
}

/// Counters that change with every table that is taken or freed: on cache lines of their own, since every access to an
/// entry reads the other fields of the pool. (Two lines: processors fetch them in pairs.)
#[repr(align(128))]
struct Counters {
    /// Slots that were ever taken.
    fresh: AtomicUsize,
    /// The stack of freed slots: in the low half the top one plus 1, in the high half a number that changes with every
    /// change, so that a top that was taken and freed again is not mistaken for one that stayed.
    freed: AtomicU64,
    in_use: AtomicUsize,
}

impl<'m, A: Address> TablePool<'m, A> {
    /// Tables for format `F` in `words`, which a device finds at `base`. The content of the words does not matter.
    /// Memory from 2^32 - 1 tables up is not used, nor is any at addresses that no entry can name.
    pub fn new<F: Format>(base: A, words: &'m [AtomicU64]) -> Self {
        let shape = TableShape::of::<F>();
        let counters = Counters { fresh: AtomicUsize::new(0), freed: AtomicU64::new(0), in_use: AtomicUsize::new(0) };
        let bytes = shape.table.bytes();
        let room = (shape.last + 1).saturating_sub(base.bits()) / bytes;
        let limit = (words.len() as u64 * 8 / bytes).min(room).min(u64::from(u32::MAX) - 1) as usize;
        Self { base, shape, words, limit, counters }
    }

    /// An empty [`LocalPool`] that keeps up to `keep` tables.
    #[cfg(feature = "alloc")]
    pub fn local(&'m self, keep: usize) -> LocalPool<'m, A> {
        LocalPool { pool: self, tables: Vec::new(), keep, reserved: 0 }
    }

    /// Tables in use or in a [`LocalPool`]; a root counts as one for each table that would fit in it.
    pub fn in_use(&self) -> usize {
        self.counters.in_use.load(Ordering::Relaxed)
    }

    /// Tables that fit in all.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The word at byte address `at`, for [`walk`](crate::walk()); `None` outside of the pool or when the address is
    /// not a multiple of 8.
    pub fn read(&self, at: u64) -> Option<u64> {
        let offset = at.checked_sub(self.base.bits())?;
        let word = self.words.get(usize::try_from(offset / 8).ok()?)?;
        if offset % 8 != 0 { None } else { Some(word.load(Ordering::Acquire)) }
    }

    fn table_words(&self) -> usize {
        self.shape.table.bytes() as usize / 8
    }

    #[inline]
    fn first(&self, table: A) -> usize {
        (table.bits().wrapping_sub(self.base.bits()) / 8) as usize
    }

    /// The position of one word.
    #[inline]
    fn position(&self, table: A, index: usize) -> usize {
        word_at(table.bits().wrapping_sub(self.base.bits()), index)
    }

    /// [`Tables::loader`]. The words are copied: behind an acquire load the compiler would read them again.
    #[inline(always)]
    fn load_words(&self, order: Ordering) -> impl Fn(u64, usize) -> Option<u64> + use<'m, A> {
        let words = self.words;
        move |table, index| Some(words.get(word_at(table, index))?.load(order))
    }

    /// The address of `count` slots that follow each other and are in use from now on.
    fn address(&self, slot: usize, count: usize) -> Option<A> {
        let bytes = self.shape.table.bytes();
        let first = self.base.checked_add((slot as u64).checked_mul(bytes)?)?;
        first.checked_add(count as u64 * bytes - 1)?;
        self.counters.in_use.fetch_add(count, Ordering::Relaxed);
        Some(first)
    }

    /// A table that is not zeroed.
    fn take(&self) -> Option<A> {
        let slot = self.pop().or_else(|| self.take_fresh(1))?;
        self.address(slot, 1)
    }

    /// Zeroes words.
    fn zero(&self, words: Range<usize>) {
        for word in &self.words[words] {
            word.store(0, Ordering::Relaxed); // seen with the link to the table, which is a release
        }
    }

    /// The words of `tables` tables from this one on.
    fn words_of(&self, table: A, tables: usize) -> Range<usize> {
        let first = self.first(table);
        first..first + tables * self.table_words()
    }

    /// [`Tables::zero_but`].
    fn zero_words_but(&self, table: A, written: Range<usize>) {
        let all = self.words_of(table, 1);
        self.zero(all.start..all.start + written.start);
        self.zero(all.start + written.end..all.end);
    }

    /// Takes slots that were never used.
    fn take_fresh(&self, count: usize) -> Option<usize> {
        let enough = |fresh: usize| fresh.checked_add(count).filter(|end| *end <= self.limit());
        self.counters.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).ok()
    }

    fn push(&self, slot: usize) {
        let link = &self.words[slot * self.table_words()];
        let mut top = self.counters.freed.load(Ordering::Relaxed);
        loop {
            link.store(top & u64::from(u32::MAX), Ordering::Relaxed);
            let new = ((top >> 32).wrapping_add(1) << 32) | (slot as u64 + 1);
            match self.counters.freed.compare_exchange_weak(top, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    fn pop(&self) -> Option<usize> {
        let mut top = self.counters.freed.load(Ordering::Acquire);
        loop {
            let slot = (top & u64::from(u32::MAX)).checked_sub(1)? as usize;
            // If somebody takes the slot now, this is not a link: but then the number has changed.
            let link = self.words[slot * self.table_words()].load(Ordering::Relaxed) & u64::from(u32::MAX);
            let new = ((top >> 32).wrapping_add(1) << 32) | link;
            match self.counters.freed.compare_exchange_weak(top, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => top = now,
            }
        }
    }

    fn give_back(&self, table: A, count: usize) {
        let slot = self.first(table) / self.table_words();
        self.counters.in_use.fetch_sub(count, Ordering::Relaxed);
        (slot..slot + count).for_each(|slot| self.push(slot));
    }

    fn root_slots(&self) -> usize {
        (self.shape.root.bytes() / self.shape.table.bytes()) as usize
    }
}

impl<A: Address> fmt::Debug for TablePool<'_, A> {
    /// Where and how many; not the entries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TablePool").field("base", &self.base).field("in_use", &self.in_use()).finish_non_exhaustive()
    }
}

impl<A: Address> Tables for &TablePool<'_, A> {
    type Addr = A;
    const SHARED: bool = true;

    fn prepare(&mut self, shape: TableShape) -> bool {
        shape == self.shape
    }

    /// A root that is larger than a table needs slots that were never used, and is best taken first.
    fn allocate_root(&mut self) -> Option<A> {
        let count = self.root_slots();
        if count == 1 {
            return self.allocate();
        }
        let root = self.address(self.take_fresh(count)?, count)?;
        self.zero(self.words_of(root, count));
        Some(root)
    }

    fn free_root(&mut self, root: A) {
        self.give_back(root, self.root_slots());
    }

    fn allocate(&mut self) -> Option<A> {
        let table = self.take()?;
        self.zero(self.words_of(table, 1));
        Some(table)
    }

    fn allocate_unzeroed(&mut self) -> Option<A> {
        self.take()
    }

    fn zero_but(&mut self, table: A, written: Range<usize>) {
        self.zero_words_but(table, written);
    }

    /// # Panics
    /// When the address is not that of a table.
    fn free(&mut self, table: A) {
        self.give_back(table, 1);
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn load(&self, table: A, index: usize) -> u64 {
        self.words[self.position(table, index)].load(Ordering::Acquire)
    }

    #[inline]
    fn base(&self) -> u64 {
        self.base.bits()
    }

    #[inline(always)]
    fn loader(&self) -> impl Fn(u64, usize) -> Option<u64> {
        self.load_words(Ordering::Acquire)
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline(always)]
    fn store(&mut self, table: A, index: usize, entry: u64) {
        self.words[self.position(table, index)].store(entry, Ordering::Release);
    }

    fn install(&mut self, table: A, index: usize, entry: u64) -> Result<(), u64> {
        let word = &self.words[self.first(table) + index];
        word.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Acquire).map(drop)
    }

    fn clear_bits(&mut self, table: A, index: usize, bits: u64) -> u64 {
        self.words[self.first(table) + index].fetch_and(!bits, Ordering::AcqRel)
    }

    fn exchange(&mut self, table: A, index: usize, entry: u64) -> u64 {
        self.words[self.first(table) + index].swap(entry, Ordering::AcqRel)
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn edit(&mut self, table: A, range: Range<usize>, mut each: impl FnMut(&mut [u64]) -> usize) -> usize {
        let first = self.first(table);
        let words = &self.words[first + range.start..first + range.end];
        let mut buffer = [0; 16];
        let mut done = 0;
        // Two cache lines at a time: those behind may be another thread's.
        for chunk in words.chunks(16) {
            let buffer = &mut buffer[..chunk.len()];
            buffer.iter_mut().zip(chunk).for_each(|(copy, word)| *copy = word.load(Ordering::Acquire));
            let changed = each(buffer);
            buffer[..changed].iter().zip(chunk).for_each(|(copy, word)| word.store(*copy, Ordering::Release));
            done += changed;
            if changed < chunk.len() {
                break;
            }
        }
        done
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn fill(&mut self, table: A, range: Range<usize>, mut each: impl FnMut(&mut [u64]) -> usize) -> usize {
        let first = self.first(table);
        let words = &self.words[first + range.start..first + range.end];
        let mut buffer = [0; 128];
        let mut done = 0;
        for chunk in words.chunks(buffer.len()) {
            let written = each(&mut buffer[..chunk.len()]);
            // Seen with the link to the table, which is a release.
            buffer[..written].iter().zip(chunk).for_each(|(copy, word)| word.store(*copy, Ordering::Relaxed));
            done += written;
            if written < chunk.len() {
                break;
            }
        }
        done
    }

    /// # Panics
    /// When the address is not that of a table.
    fn is_zero(&self, table: A, range: Range<usize>) -> bool {
        let first = self.first(table);
        let words = &self.words[first + range.start..first + range.end];
        words.iter().fold(0, |all, word| all | word.load(Ordering::Acquire)) == 0
    }

    /// Tables are there or not: this promises them as long as no other handle takes them.
    fn reserve(&mut self, tables: usize) -> bool {
        self.limit().checked_sub(self.in_use()).is_some_and(|left| tables <= left)
    }
}

/// Methods of [`Tables`] that are those of the pool.
macro_rules! from_pool {
    ($pool:expr; $(
        $(#[$attribute:meta])*
        fn $name:ident(&$($me:ident)+ $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;
    )*) => {$(
        $(#[$attribute])*
        fn $name(&$($me)+ $(, $argument: $type)*) $(-> $result)? {
            $pool.$name($($argument),*)
        }
    )*};
}

/// The same for one owner: nobody else changes the tables, so a page table remembers where it was from call to call. A
/// device may walk them, and every entry of a linked table is still one atomic store.
impl<A: Address> Tables for &mut TablePool<'_, A> {
    type Addr = A;

    from_pool! { &**self;
        fn prepare(&mut self, shape: TableShape) -> bool;
        fn allocate_root(&mut self) -> Option<A>;
        fn free_root(&mut self, root: A);
        fn allocate(&mut self) -> Option<A>;
        fn allocate_unzeroed(&mut self) -> Option<A>;
        fn free(&mut self, table: A);
        fn reserve(&mut self, tables: usize) -> bool;
        fn zero_but(&mut self, table: A, written: Range<usize>);
        #[inline]
        fn base(&self) -> u64;
        #[inline(always)]
        fn store(&mut self, table: A, index: usize, entry: u64);
        fn clear_bits(&mut self, table: A, index: usize, bits: u64) -> u64;
        fn exchange(&mut self, table: A, index: usize, entry: u64) -> u64;
        #[inline]
        fn edit(&mut self, table: A, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize;
        #[inline]
        fn fill(&mut self, table: A, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize;
        fn is_zero(&self, table: A, range: Range<usize>) -> bool;
    }

    #[inline(always)]
    fn loader(&self) -> impl Fn(u64, usize) -> Option<u64> {
        self.load_words(Ordering::Relaxed)
    }

    /// # Panics
    /// When the address is not that of a table.
    #[inline]
    fn load(&self, table: A, index: usize) -> u64 {
        // Relaxed: nobody else writes tables. Behind an acquire load the compiler would read base and words again.
        self.words[self.position(table, index)].load(Ordering::Relaxed)
    }
}

/// One handle's tables, in front of a [`TablePool`]: made by [`TablePool::local`] for
/// [`PageTable::attach`](crate::PageTable::attach), one for each thread.
///
/// It takes tables that lie side by side, keeps freed ones and hands them out again: so a table, and what a processor
/// fetches ahead behind it, stays in the caches of one processor, and the threads seldom meet at the pool
/// (`docs/bench/threads.md` has figures). No other handle can take its tables; dropping it gives all back. With a
/// local pool, [`reserve`](Tables::reserve) cannot be undone by other handles.
#[cfg(feature = "alloc")]
#[derive(Debug)]
pub struct LocalPool<'p, A: Address> {
    pool: &'p TablePool<'p, A>,
    /// Tables at hand, not zeroed; the last one was used last.
    tables: Vec<A>,
    /// Tables that stay in the local pool.
    keep: usize,
    /// Tables that are reserved and must stay.
    reserved: usize,
}

#[cfg(feature = "alloc")]
impl<A: Address> LocalPool<'_, A> {
    /// Takes half a local pool that was never used, where there is one: at the end of a table processors fetch ahead
    /// from the next, which had better be this thread's too.
    fn take_neighbours(&mut self) {
        let count = self.keep / 2;
        if count > 0
            && let Some(slot) = self.pool.take_fresh(count)
        {
            let tables = (slot..slot + count).rev().map_while(|slot| self.pool.address(slot, 1));
            self.tables.extend(tables);
        }
    }

    /// Gives back all but `to`, those that were used longest ago.
    fn shrink(&mut self, to: usize) {
        let surplus = self.tables.len().saturating_sub(to);
        for table in self.tables.drain(..surplus) {
            self.pool.give_back(table, 1);
        }
    }
}

#[cfg(feature = "alloc")]
impl<A: Address> Drop for LocalPool<'_, A> {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(feature = "alloc")]
impl<A: Address> Tables for LocalPool<'_, A> {
    type Addr = A;
    const SHARED: bool = true;

    from_pool! { self.pool;
        fn prepare(&mut self, shape: TableShape) -> bool;
        fn allocate_root(&mut self) -> Option<A>;
        fn free_root(&mut self, root: A);
        #[inline]
        fn load(&self, table: A, index: usize) -> u64;
        fn install(&mut self, table: A, index: usize, entry: u64) -> Result<(), u64>;
        fn zero_but(&mut self, table: A, written: Range<usize>);
        #[inline]
        fn base(&self) -> u64;
        #[inline(always)]
        fn store(&mut self, table: A, index: usize, entry: u64);
        fn clear_bits(&mut self, table: A, index: usize, bits: u64) -> u64;
        fn exchange(&mut self, table: A, index: usize, entry: u64) -> u64;
        #[inline]
        fn edit(&mut self, table: A, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize;
        #[inline]
        fn fill(&mut self, table: A, range: Range<usize>, each: impl FnMut(&mut [u64]) -> usize) -> usize;
        fn is_zero(&self, table: A, range: Range<usize>) -> bool;
    }

    #[inline(always)]
    fn loader(&self) -> impl Fn(u64, usize) -> Option<u64> {
        self.pool.load_words(Ordering::Acquire)
    }

    fn allocate(&mut self) -> Option<A> {
        let table = self.allocate_unzeroed()?;
        self.pool.zero(self.pool.words_of(table, 1));
        Some(table)
    }

    fn allocate_unzeroed(&mut self) -> Option<A> {
        self.reserved = self.reserved.saturating_sub(1);
        if self.tables.is_empty() {
            self.take_neighbours();
        }
        self.tables.pop().or_else(|| self.pool.take())
    }

    fn free(&mut self, table: A) {
        self.tables.push(table);
        // Half of them, so that the next calls have room and need not come here.
        if self.tables.len() > self.keep.max(self.reserved) {
            self.shrink(self.reserved.max(self.keep / 2));
        }
    }

    fn reserve(&mut self, tables: usize) -> bool {
        while self.tables.len() < tables {
            let Some(table) = self.pool.take() else {
                self.shrink(self.keep.max(self.reserved));
                return false;
            };
            self.tables.push(table);
        }
        self.reserved = tables;
        true
    }
}
