//! Which pages a device has written to.

use core::ops::Range;

use dmalane_addr::{Address, Span};

use crate::format::{Kind, index, is_dirty, marked, page_size};
use crate::list::List;
use crate::unmap::Detach;
use crate::{Entry, Error, FlushList, Format, Leaf, PageTable, Tables, slots};

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Calls `each` for every leaf in the span that a device has written to since the last call, and marks it as not
    /// written. Gives the number of such leaves.
    ///
    /// A leaf that sticks out of the span is given whole, since its mark covers all of it; [`cut`](Self::cut) makes
    /// marks finer. Afterwards invalidate the device's translations of the span: until then it may write without
    /// setting the mark again. Writable leaves of x86-64 and RISC-V are made with their mark set, which spares the
    /// walker the write, so the first call reports all of them. Marks mean nothing for a device that never sets them.
    /// Arm's formats have marks only with their parameter `DIRTY`.
    ///
    /// # Errors
    /// [`Error::NoDirtyBit`], [`Error::Misaligned`], [`Error::InputRange`].
    pub fn take_dirty(&mut self, span: Span<I>, mut each: impl FnMut(Leaf<I, O>)) -> Result<usize, Error> {
        if F::DIRTY == 0 {
            return Err(Error::NoDirtyBit { format: F::NAME });
        }
        let (first, last) = self.check_span(span)?;
        Ok(self.dirty_below(self.root, self.root_level(), (first, last), &mut each))
    }

    /// As [`unmap`](Self::unmap), and calls `each` for every leaf that it takes away, or part of a split one, that a
    /// device has written to since the last [`take_dirty`](Self::take_dirty): as VFIO's unmap with a dirty bitmap.
    ///
    /// Each entry is taken by an atomic exchange, so that no mark is lost that the device sets meanwhile; an unmap that
    /// does not report marks is faster. Afterwards invalidate [`FlushList::span`] before the pages are read: until then
    /// the device may write to those that were reported.
    ///
    /// # Errors
    /// As `unmap`; [`Error::NoDirtyBit`].
    pub fn unmap_dirty(
        &mut self,
        span: Span<I>,
        mut each: impl FnMut(Leaf<I, O>),
    ) -> Result<FlushList<I, T::Addr>, Error> {
        if F::DIRTY == 0 {
            return Err(Error::NoDirtyBit { format: F::NAME });
        }
        self.check_span(span)?;
        let mut tables = List::new();
        let (span, bytes) = self.unmap_all(span, Detach::Emptied, &mut tables, Some(&mut each), None)?;
        Ok(FlushList { span, bytes, tables })
    }

    fn dirty_below(
        &mut self,
        table: T::Addr,
        level: u32,
        (first, last): (u64, u64),
        each: &mut impl FnMut(Leaf<I, O>),
    ) -> usize {
        let size = page_size::<F>(level);
        let mut count = 0;
        let mut at = first;
        let begin = index::<F>(first, level);
        for k in begin..=index::<F>(last, level) {
            let entry_last = (at | (size.bytes() - 1)).min(last);
            let entry = self.load(table, k);
            match F::decode(level, entry) {
                Entry::Invalid => {}
                Entry::Table(next) => count += self.dirty_below(T::Addr::new(next), level + 1, (at, entry_last), each),
                Entry::Leaf { out, access } => {
                    // A mark on one entry of a group covers all of it, be the entry within the span or not.
                    let kind = Kind::of::<F>(level, entry);
                    let start = k & !(kind.entries::<F>() - 1);
                    let group = start..start + kind.entries::<F>();
                    if k == start.max(begin) && group.clone().any(|i| is_dirty::<F>(self.load(table, i))) {
                        self.clear_marks(table, group);
                        let size = kind.size::<F>();
                        each(Leaf { at: I::new(at).align_down(size), to: O::new(out), size, access });
                        count += 1;
                    }
                }
            }
            at = entry_last.wrapping_add(1);
        }
        count
    }

    /// Marks the entries of a leaf as not written.
    fn clear_marks(&mut self, table: T::Addr, entries: Range<usize>) {
        for i in entries.clone() {
            if F::DIRTY_IS_CLEAR {
                let entry = self.load(table, i);
                if is_dirty::<F>(entry) {
                    // No device writes to it in between: its mark is there already.
                    slots::write::<F, T>(&mut self.tables, table, i, marked::<F>(entry, false));
                }
            } else {
                slots::clear_bits::<F, T>(&mut self.tables, table, i, F::DIRTY);
            }
        }
        slots::clean::<F, T>(&mut self.tables, table, entries);
    }
}
