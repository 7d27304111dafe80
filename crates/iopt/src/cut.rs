//! Splitting leaves and merging them again, while what they map stays mapped.
//!
//! Both follow the break-before-make order: the old entry is cleared, the device forgets it, the new entry is written.
//! So a device that uses the addresses in between sees a fault, never two translations at once.

use core::ops::Range;

use dmalane_addr::{Access, Address, PageSize, Span};

use crate::format::{Kind, entries, index, is_dirty, page_size};
use crate::unmap::Cut;
use crate::{Entry, Error, Format, PageTable, Tables, slots};

/// Entries of one table, whole ones only.
struct Whole {
    first: u64,
    last: u64,
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Splits the leaf that reaches across `at`, if there is one, so that a leaf starts there. Translations stay the
    /// same, and so do the marks of leaves that were written to.
    ///
    /// `invalidate` is called once for each leaf that goes, with its span, while its entry is clear: it returns when no
    /// device remembers the leaf. Where the architecture lets a block be replaced at once (Arm's `BBML` 2, x86-64), it
    /// may put that off until the call returns.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::InputRange`]; [`Error::NoTables`] and [`Error::TableAddress`], before anything
    /// has changed: all tables are taken first.
    pub fn cut(&mut self, at: I, mut invalidate: impl FnMut(Span<I>)) -> Result<(), Error> {
        crate::map::check_start::<F, I>(at, self.input_len())?;
        let Some(cut) = self.find_cut(at.bits()) else { return Ok(()) };
        let mut spare = self.spare_tables(Cut::tables::<F>([Some(cut), None]), at.bits())?;
        self.split(at.bits(), &mut spare, |table, leaf| {
            table.break_entries(leaf.table, leaf.entries, leaf.at, leaf.size, &mut invalidate)
        });
        debug_assert!(spare.is_empty());
        Ok(())
    }

    /// Makes larger leaves of smaller ones within the span, wherever a table is filled by leaves that continue each
    /// other and permit the same. Returns the number of tables that this freed. Translations stay the same; a leaf
    /// counts as written to when one of its parts did.
    ///
    /// `invalidate` is called once for each table that goes and each group that forms, with the span that it
    /// translates, while its entries are clear: it returns when no device caches these entries or their old values. The
    /// table is freed then.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::InputRange`].
    pub fn merge(&mut self, span: Span<I>, mut invalidate: impl FnMut(Span<I>)) -> Result<usize, Error> {
        let (first, last) = self.check_span(span)?;
        let mut freed = 0;
        self.merge_below(self.root, self.root_level(), &Whole { first, last }, first, &mut freed, &mut invalidate);
        self.note_detached(freed);
        Ok(freed)
    }

    /// Merges within the table at `level` that translates `at`, the lower levels first.
    fn merge_below(
        &mut self,
        table: T::Addr,
        level: u32,
        span: &Whole,
        mut at: u64,
        freed: &mut usize,
        invalidate: &mut impl FnMut(Span<I>),
    ) {
        if level + 1 == F::LEVELS && !self.has_groups_at(level) {
            return;
        }
        let size = page_size::<F>(level);
        for k in index::<F>(at, level)..entries::<F>(level) {
            let first = at & !(size.bytes() - 1);
            let last = first | (size.bytes() - 1);
            if let Entry::Table(next) = F::decode(level, self.load(table, k)) {
                let next = T::Addr::new(next);
                self.merge_below(next, level + 1, span, at, freed, invalidate);
                let whole = first >= span.first && last <= span.last && self.page_sizes().contains(size);
                if whole && let Some((out, access)) = self.as_one_leaf(next, 0..entries::<F>(level + 1), level + 1) {
                    self.break_entries(table, k..k + 1, first, size, invalidate);
                    let dirty = (0..entries::<F>(level + 1)).any(|i| is_dirty::<F>(self.load(next, i)));
                    self.uncount_table(next, level + 1);
                    self.write_leaves(table, k..k + 1, Kind::single(level), (out, access), dirty);
                    self.tables.free(next);
                    *freed += 1;
                }
            }
            let group = Kind { level, group: true };
            if self.has_groups_at(level) && (k + 1) % group.entries::<F>() == 0 {
                let size = group.size::<F>();
                let start = last - (size.bytes() - 1);
                let range = k + 1 - group.entries::<F>()..k + 1;
                let formed = Kind::of::<F>(level, self.load(table, k)).group;
                if start >= span.first
                    && last <= span.last
                    && !formed
                    && let Some((out, access)) = self.as_one_leaf(table, range.clone(), level)
                {
                    let dirty = self.break_entries(table, range.clone(), start, size, invalidate);
                    self.uncount(level, range.len() as u64, 0);
                    self.write_leaves(table, range, group, (out, access), dirty);
                }
            }
            if last >= span.last {
                return;
            }
            at = last + 1;
        }
    }

    /// Output address and access of the leaf that could replace these entries.
    fn as_one_leaf(&self, table: T::Addr, range: Range<usize>, level: u32) -> Option<(u64, Access)> {
        let page = page_size::<F>(level).bytes();
        let (start, all) = self.own_leaf(table, range.start, level)?;
        let aligned = start & (page * range.len() as u64 - 1) == 0;
        let continues = |(k, i): (u64, usize)| self.own_leaf(table, i, level) == Some((start + k * page, all));
        (aligned && (0..).zip(range).all(continues)).then_some((start, all))
    }

    /// Output address and access of one entry by itself, be it part of a group or not.
    fn own_leaf(&self, table: T::Addr, i: usize, level: u32) -> Option<(u64, Access)> {
        let entry = self.load(table, i);
        let Entry::Leaf { out, access } = F::decode(level, entry) else { return None };
        let within = i & (Kind::of::<F>(level, entry).entries::<F>() - 1);
        Some((out + within as u64 * page_size::<F>(level).bytes(), access))
    }

    /// Takes the leaves of a full table off the count.
    fn uncount_table(&mut self, table: T::Addr, level: u32) {
        let entries = entries::<F>(level);
        let members = (0..entries).filter(|&i| Kind::of::<F>(level, self.load(table, i)).group).count();
        self.uncount(level, entries as u64, members as u64);
    }

    /// Clears the entries of leaves or of a table, and has the device forget what they were. True when it has written
    /// through one of the leaves.
    pub(crate) fn break_entries(
        &mut self,
        table: T::Addr,
        range: Range<usize>,
        at: u64,
        size: PageSize,
        invalidate: &mut (impl FnMut(Span<I>) + ?Sized),
    ) -> bool {
        let dirty = slots::exchange::<F, T>(&mut self.tables, table, range.clone(), || 0);
        slots::clean::<F, T>(&mut self.tables, table, range);
        if let Some(span) = Span::new(I::new(at), size.bytes()) {
            invalidate(span);
        }
        dirty
    }
}
