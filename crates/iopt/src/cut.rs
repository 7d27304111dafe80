//! Splitting leaves and merging them again, while what they map stays mapped.
//!
//! Both follow the break-before-make order: the old entry is cleared, the device forgets it, the new entry is written. So a
//! device that uses the addresses in between sees a fault, never two translations at once.

use alloc::vec::Vec;

use dmalane_addr::{Access, Address, Span};

use crate::format::{entries, index, input_len, page_size, top_leaf_level};
use crate::unmap::Cut;
use crate::{Entry, Error, Format, PageTable, Place, Tables};

/// Entries of one table, whole ones only.
struct Whole {
    first: u64,
    last: u64,
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Splits the leaf that reaches across `at`, if there is one, so that a leaf starts there. What is mapped stays the
    /// same.
    ///
    /// `invalidate` is called once for each leaf that goes, with its span, while its entry is clear: it returns when no
    /// device remembers the leaf. Where the architecture lets a block be replaced at once (Arm's `BBML` 2, x86-64), it
    /// may put that off until the call returns.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::InputRange`]; [`Error::NoTables`] and [`Error::TableAddress`], before anything has
    /// changed: all tables are taken first.
    pub fn cut(&mut self, at: I, mut invalidate: impl FnMut(Span<I>)) -> Result<(), Error> {
        crate::map::check_start::<F, I>(at)?;
        let Some(cut) = self.find_cut(at.bits()) else { return Ok(()) };
        let mut spare = self.spare_tables(Cut::tables::<F>([Some(cut), None]), at.bits())?;
        self.split(at.bits(), &mut spare, |table, leaf| {
            table.store(leaf.table, leaf.index, 0);
            invalidate_entry::<F, I>(&mut invalidate, leaf.at, leaf.level);
        });
        debug_assert!(spare.is_empty());
        Ok(())
    }

    /// Makes larger leaves of smaller ones within the span, wherever a table is filled by leaves that continue each other
    /// and permit the same. Gives the number of tables that this freed. What is mapped stays the same.
    ///
    /// `invalidate` is called once for each table that goes, with the span that it translates, while its entry is clear:
    /// it returns when no device remembers the table or what it held. The table is freed then.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::InputRange`].
    pub fn merge(&mut self, span: Span<I>, mut invalidate: impl FnMut(Span<I>)) -> Result<usize, Error> {
        let (first, last) = Self::check_span(span)?;
        let mut freed = Vec::new();
        self.merge_below(self.root, 0, &Whole { first, last }, first, &mut freed, &mut invalidate);
        if !freed.is_empty() {
            self.cursor.forget();
        }
        let count = freed.len();
        freed.into_iter().for_each(|table| self.tables.free(table));
        Ok(count)
    }

    /// Merges within the table at `level` that translates `at`, the lower levels first.
    fn merge_below(
        &mut self,
        table: T::Addr,
        level: u32,
        span: &Whole,
        mut at: u64,
        freed: &mut Vec<T::Addr>,
        invalidate: &mut impl FnMut(Span<I>),
    ) {
        let page = page_size::<F>(level).bytes();
        if level + 1 == F::LEVELS {
            return;
        }
        for k in index::<F>(at, level)..entries::<F>(level) {
            let (first, last) = (at & !(page - 1), at | (page - 1));
            if let Entry::Table(next) = F::decode(level, self.load(table, k)) {
                let next = T::Addr::new(next);
                self.merge_below(next, level + 1, span, at, freed, invalidate);
                let whole = first >= span.first && last <= span.last && level >= top_leaf_level::<F>();
                if whole && let Some((out, access)) = self.as_one_leaf(next, level + 1) {
                    self.store(table, k, 0);
                    invalidate_entry::<F, I>(invalidate, first, level);
                    self.store(table, k, F::encode_leaf(level, out, access));
                    self.leaves[level as usize] += 1;
                    self.leaves[level as usize + 1] -= entries::<F>(level + 1) as u64;
                    freed.push(next);
                }
            }
            if last >= span.last {
                return;
            }
            at = last + 1;
        }
    }

    /// Output address and access of the leaf that could stand for a whole table.
    fn as_one_leaf(&self, table: T::Addr, level: u32) -> Option<(u64, Access)> {
        let Entry::Leaf { out: start, access: all } = F::decode(level, self.load(table, 0)) else { return None };
        let page = page_size::<F>(level).bytes();
        let aligned = start & (page_size::<F>(level - 1).bytes() - 1) == 0;
        let continues = |k: usize| {
            let leaf = Entry::Leaf { out: start + k as u64 * page, access: all };
            F::decode(level, self.load(table, k)) == leaf
        };
        (aligned && (1..entries::<F>(level)).all(continues)).then_some((start, all))
    }
}

/// Has the entry of `level` that starts at `at` forgotten.
fn invalidate_entry<F: Format, I: Address>(invalidate: &mut impl FnMut(Span<I>), at: u64, level: u32) {
    let last = at | (page_size::<F>(level).bytes() - 1);
    debug_assert!(last < input_len::<F>(), "{}", Place::of(I::new(at)));
    if let Some(span) = Span::inclusive(I::new(at), I::new(last)) {
        invalidate(span);
    }
}
