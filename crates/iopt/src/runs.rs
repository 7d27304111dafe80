//! Striding over what is mapped, leaf by leaf.

use dmalane_addr::{Access, Address, PageSize, Span};

use crate::format::{Kind, MAX_LEVELS, index, page_size, same_table};
use crate::{Entry, Format, PageTable, Tables};

/// One leaf, or the part of it within the span asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Run<I, O> {
    /// Input address of the first byte.
    pub at: I,
    /// Output address of the first byte.
    pub to: O,
    /// Bytes, at least one and at most `size`.
    pub len: u64,
    /// Access that the leaf permits.
    pub access: Access,
    /// The page size of the leaf.
    pub size: PageSize,
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// The leaves within `span` in ascending order, the first and last clipped to it. Each step goes from leaf to leaf
    /// and skips what an absent table would translate, so a 32 GiB mapping by 1 GiB leaves takes 32 steps.
    ///
    /// Leaves that continue each other are not merged: one item is one entry of the table.
    pub fn runs(&self, span: Span<I>) -> Runs<'_, F, I, O, T> {
        Runs::new(self, span)
    }
}

/// Iterator over the leaves of a span, made by [`PageTable::runs`].
#[derive(Debug)]
pub struct Runs<'a, F, I, O, T: Tables> {
    table: &'a PageTable<F, I, O, T>,
    /// The tables that translate `at`, down to `level`.
    path: [T::Addr; MAX_LEVELS],
    level: u32,
    /// The next address to translate, and the last; `None` when done.
    rest: Option<(u64, u64)>,
}

impl<'a, F: Format, I: Address, O: Address, T: Tables> Runs<'a, F, I, O, T> {
    pub(crate) fn new(table: &'a PageTable<F, I, O, T>, span: Span<I>) -> Self {
        let first = span.first().bits();
        let last = span.last().bits().min(table.input_len() - 1);
        let rest = (first <= last).then_some((first, last));
        Self { table, path: [table.root; MAX_LEVELS], level: table.root_level(), rest }
    }

    /// Goes on after the entries that translate the page of this size around `at`, at the present level.
    fn skip(&mut self, size: PageSize, at: u64, last: u64) {
        let entry_last = at | (size.bytes() - 1);
        if entry_last >= last {
            self.rest = None;
            return;
        }
        let next = entry_last + 1;
        while !same_table::<F>(at, next, self.level) {
            self.level -= 1;
        }
        self.rest = Some((next, last));
    }
}

impl<F: Format, I: Address, O: Address, T: Tables> Iterator for Runs<'_, F, I, O, T> {
    type Item = Run<I, O>;

    fn next(&mut self) -> Option<Run<I, O>> {
        while let Some((at, last)) = self.rest {
            let level = self.level;
            let entry = self.table.load(self.path[level as usize], index::<F>(at, level));
            match F::decode(level, entry) {
                Entry::Invalid => self.skip(page_size::<F>(level), at, last),
                Entry::Table(next) => {
                    self.level += 1;
                    self.path[self.level as usize] = T::Addr::new(next);
                }
                Entry::Leaf { out, access } => {
                    let size = Kind::of::<F>(level, entry).size::<F>();
                    self.skip(size, at, last);
                    let mask = size.bytes() - 1;
                    let len = (at | mask).min(last) - at + 1;
                    return Some(Run { at: I::new(at), to: O::new(out | at & mask), len, access, size });
                }
            }
        }
        None
    }
}
