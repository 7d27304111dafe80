//! Table memory for the card's MMU, in card memory.

use std::ops::Range;
use std::sync::Arc;

use dmalane_addr::{Address, CardAddr, PageSize, Span};
use dmalane_dma::{self as mem, Mmio};
use dmalane_iopt::Tables;
use zerocopy::IntoBytes;

use crate::regs::BAR_MEMORY;

const TABLE: u64 = 4096;
const ENTRIES: usize = 512;

/// Tables of 4 KiB in card memory, written through BAR 2 and read from a copy in host memory, since reading over PCIe
/// is slow.
///
/// Allocation zeroes tables, and so makes them present, on the card. A store cannot say that the card did not take it;
/// [`CardTables::error`] does.
pub struct CardTables<B: Mmio> {
    bus: Arc<B>,
    first: CardAddr,
    limit: usize,
    /// Tables that lie on the card, by slot. Slots from the length on were never used.
    copy: Vec<[u64; ENTRIES]>,
    /// Slots that were freed, or prepared by `reserve`.
    free: Vec<u32>,
    error: Option<mem::Error>,
}

impl<B: Mmio> CardTables<B> {
    /// Tables in the whole pages of `span`; `None` when there is none.
    pub(crate) fn new(bus: Arc<B>, span: Span<CardAddr>) -> Option<Self> {
        let first = span.first().align_up(PageSize::SIZE_4K)?;
        let room = span.last().offset_from(first)?.checked_add(1)?;
        let limit = (room / TABLE).min(u32::MAX.into()) as usize;
        (limit > 0).then_some(Self { bus, first, limit, copy: Vec::new(), free: Vec::new(), error: None })
    }

    /// Tables in use.
    pub fn in_use(&self) -> usize {
        self.copy.len() - self.free.len()
    }

    /// Tables that fit in all.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Why the card did not take a store, if that has happened: then its tables are not what they should be.
    pub fn error(&self) -> Option<&mem::Error> {
        self.error.as_ref()
    }

    fn slot(&self, table: CardAddr) -> usize {
        (table.bits().wrapping_sub(self.first.bits()) / TABLE) as usize
    }

    fn addr(&self, slot: usize) -> CardAddr {
        // Below `limit`, so within the span.
        self.first + slot as u64 * TABLE
    }

    /// Writes entries as they are in the copy to the card.
    fn write(&mut self, slot: usize, range: Range<usize>) -> bool {
        let at = self.addr(slot).bits() + 8 * range.start as u64;
        let entries = &self.copy[slot][range];
        let written = self.bus.write_bytes(BAR_MEMORY, at, entries.as_bytes());
        self.noted(written)
    }

    /// True for a write that the card has taken. Keeps the first error.
    #[inline]
    fn noted(&mut self, written: Result<(), mem::Error>) -> bool {
        match written {
            Ok(()) => true,
            Err(e) => {
                self.error.get_or_insert(e);
                false
            }
        }
    }

    /// Zeroes a slot that was never used.
    fn fresh(&mut self) -> Option<usize> {
        let slot = self.copy.len();
        if slot >= self.limit {
            return None;
        }
        self.copy.try_reserve(1).ok()?;
        self.copy.push([0; ENTRIES]);
        if self.write(slot, 0..ENTRIES) {
            return Some(slot);
        }
        self.copy.pop();
        // Nothing points there yet: the tables are still what they should be.
        self.error = None;
        None
    }
}

impl<B: Mmio> Tables for CardTables<B> {
    type Addr = CardAddr;

    fn allocate(&mut self) -> Option<CardAddr> {
        let table = self.allocate_unzeroed()?;
        self.zero_but(table, 0..0);
        Some(table)
    }

    fn allocate_unzeroed(&mut self) -> Option<CardAddr> {
        let slot = match self.free.pop() {
            Some(slot) => slot as usize,
            None => self.fresh()?,
        };
        Some(self.addr(slot))
    }

    /// # Panics
    /// When the address is not that of a table or the range reaches beyond 512.
    fn zero_but(&mut self, table: CardAddr, written: Range<usize>) {
        let slot = self.slot(table);
        for rest in [0..written.start, written.end..ENTRIES] {
            if !self.is_zero(table, rest.clone()) {
                self.copy[slot][rest.clone()].fill(0);
                self.write(slot, rest);
            }
        }
    }

    /// # Panics
    /// When the address is not that of a table.
    fn free(&mut self, table: CardAddr) {
        let slot = self.slot(table);
        assert!(slot < self.copy.len(), "{table} is not a table of this memory");
        self.free.push(slot as u32); // below `limit`, which fits
    }

    /// # Panics
    /// When the address is not that of a table or the index is not below 512.
    #[inline]
    fn load(&self, table: CardAddr, index: usize) -> u64 {
        self.copy[self.slot(table)][index]
    }

    /// # Panics
    /// When the address is not that of a table or the index is not below 512.
    #[inline]
    fn store(&mut self, table: CardAddr, index: usize, entry: u64) {
        let slot = self.slot(table);
        self.copy[slot][index] = entry;
        let written = self.bus.write64(BAR_MEMORY, table.bits() + 8 * index as u64, entry);
        self.noted(written);
    }

    /// Makes the memory for that many tables present on the card now.
    fn reserve(&mut self, tables: usize) -> bool {
        if tables > self.limit - self.in_use() || self.free.try_reserve(tables.saturating_sub(self.free.len())).is_err()
        {
            return false;
        }
        while self.free.len() < tables {
            match self.fresh() {
                Some(slot) => self.free.push(slot as u32),
                None => return false,
            }
        }
        true
    }

    /// # Panics
    /// When the address is not that of a table or the range reaches beyond 512.
    fn is_zero(&self, table: CardAddr, range: Range<usize>) -> bool {
        self.copy[self.slot(table)][range].iter().fold(0, |all, entry| all | entry) == 0
    }

    /// One write to the card for all of them.
    ///
    /// # Panics
    /// When the address is not that of a table or the range reaches beyond 512.
    fn edit(&mut self, table: CardAddr, range: Range<usize>, mut each: impl FnMut(&mut [u64]) -> usize) -> usize {
        let slot = self.slot(table);
        let start = range.start;
        let done = each(&mut self.copy[slot][range]);
        if done > 0 {
            self.write(slot, start..start + done);
        }
        done
    }
}

dmalane_dma::debug_as!(CardTables<B>, [B: Mmio], |it| "CardTables(in use: {} of {})", it.in_use(), it.limit);
