//! Changing the rights of what is mapped.

use dmalane_addr::{Access, Address, Span};

use crate::format::{Kind, index, marked, page_size};
use crate::list::List;
use crate::{Entry, Error, FlushList, Format, PageTable, Tables, slots};

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Gives everything mapped within the span these rights and this kind of memory. Translations stay the same.
    ///
    /// Holes are skipped, and larger leaves that reach across an end of the span are split, as in
    /// [`unmap`](Self::unmap). Until the span of the list is invalidated, a device may use the old rights. The list has
    /// no tables; [`FlushList::bytes`] is what was changed.
    ///
    /// Leaves keep their marks of having been written to, but for those of Arm's formats that become read-only:
    /// [`take_dirty`](Self::take_dirty) before.
    ///
    /// # Errors
    /// [`Error::Unsupported`], and those of [`unmap`](Self::unmap). The table is then as it was.
    pub fn protect(&mut self, span: Span<I>, access: Access) -> Result<FlushList<I, T::Addr>, Error> {
        if !F::supports(access) {
            return Err(Error::Unsupported { access, format: F::NAME });
        }
        let (first, last) = self.check_span(span)?;
        let span = self.split_ends(span, None)?;
        let bytes = self.protect_below(self.root, self.root_level(), (first, last), access);
        Ok(FlushList { span, bytes, tables: List::new() })
    }

    fn protect_below(&mut self, table: T::Addr, level: u32, (first, last): (u64, u64), access: Access) -> u64 {
        let page = page_size::<F>(level).bytes();
        let (mut at, mut bytes) = (first, 0);
        for k in index::<F>(first, level)..=index::<F>(last, level) {
            let entry_last = (at | (page - 1)).min(last);
            let entry = self.load(table, k);
            match F::decode(level, entry) {
                Entry::Table(next) => {
                    bytes += self.protect_below(T::Addr::new(next), level + 1, (at, entry_last), access);
                }
                // The entries of a group, which lies within the span, at its first one.
                Entry::Leaf { out: mut to, .. } if k & (Kind::of::<F>(level, entry).entries::<F>() - 1) == 0 => {
                    let kind = Kind::of::<F>(level, entry);
                    let leaf = k..k + kind.entries::<F>();
                    let encode = if kind.group { F::encode_member } else { F::encode_leaf };
                    let new = || {
                        let entry = encode(level, to, access);
                        to += page;
                        marked::<F>(entry, false)
                    };
                    let dirty = slots::exchange::<F, T>(&mut self.tables, table, leaf.clone(), new);
                    slots::clean::<F, T>(&mut self.tables, table, leaf.clone());
                    // The mark of Arm's formats is the right to write.
                    if dirty && (!F::DIRTY_IS_CLEAR || access.contains(Access::WRITE)) {
                        self.mark(table, leaf);
                    }
                    bytes += kind.size::<F>().bytes();
                }
                _ => {}
            }
            at = entry_last.wrapping_add(1);
        }
        bytes
    }
}
