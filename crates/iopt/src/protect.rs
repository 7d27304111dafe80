//! Changing the rights of what is mapped.

use dmalane_addr::{Access, Address, Span};

use crate::format::{Kind, index, marked, page_size};
use crate::list::List;
use crate::unmap::Dirty;
use crate::{Entry, Error, FlushList, Format, Leaf, PageTable, Tables, slots};

/// The access that leaves get, and who is told of each.
struct Change<'i, 'd, I, O> {
    access: Access,
    invalidate: Option<&'i mut dyn FnMut(Span<I>)>,
    dirty: Dirty<'d, I, O>,
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Gives everything mapped within the span these rights and this kind of memory. Translations stay the same.
    ///
    /// Holes are skipped, and larger leaves that reach across an end of the span are split, as in
    /// [`unmap`](Self::unmap). Until the span of the list is invalidated, a device may use the old rights. The list has
    /// no tables; [`FlushList::bytes`] is what was changed.
    ///
    /// Leaves keep their marks of having been written to, but for those of Arm's formats that become read-only, and
    /// each is replaced by one store. [`protect_with`](Self::protect_with) tells of marks and breaks before it makes.
    ///
    /// # Errors
    /// [`Error::Unsupported`], and those of [`unmap`](Self::unmap). The table is then as it was.
    pub fn protect(&mut self, span: Span<I>, access: Access) -> Result<FlushList<I, T::Addr>, Error> {
        self.protect_with(span, access, None, None)
    }

    /// The same by break-before-make, with `invalidate`: it is called as in a [`cut`](Self::cut), for each leaf that is
    /// split, is a group, or becomes another kind of memory. Arm's architecture does not ask for it where only rights
    /// change.
    ///
    /// With `dirty`, marks are taken, and it is called for each leaf that a device has written to, as in
    /// [`unmap_dirty`](Self::unmap_dirty); never where the format has no marks.
    ///
    /// # Errors
    /// As of `protect`.
    pub fn protect_with(
        &mut self,
        span: Span<I>,
        access: Access,
        mut invalidate: Option<&mut dyn FnMut(Span<I>)>,
        dirty: Option<&mut dyn FnMut(Leaf<I, O>)>,
    ) -> Result<FlushList<I, T::Addr>, Error> {
        if !F::supports(access) {
            return Err(Error::Unsupported { access, format: F::NAME });
        }
        let (first, last) = self.check_span(span)?;
        let span = self.split_ends(span, invalidate.as_mut().map(|invalidate| &mut **invalidate as _))?;
        let mut change = Change { access, invalidate, dirty };
        let bytes = self.protect_below(self.root, self.root_level(), (first, last), &mut change);
        Ok(FlushList { span, bytes, tables: List::new() })
    }

    fn protect_below(
        &mut self,
        table: T::Addr,
        level: u32,
        (first, last): (u64, u64),
        change: &mut Change<'_, '_, I, O>,
    ) -> u64 {
        let page = page_size::<F>(level).bytes();
        let (mut at, mut bytes) = (first, 0);
        for k in index::<F>(first, level)..=index::<F>(last, level) {
            let entry_last = (at | (page - 1)).min(last);
            let entry = self.load(table, k);
            match F::decode(level, entry) {
                Entry::Table(next) => {
                    bytes += self.protect_below(T::Addr::new(next), level + 1, (at, entry_last), change);
                }
                // The entries of a group, which lies within the span, at its first one.
                Entry::Leaf { out, access: old } if k & (Kind::of::<F>(level, entry).entries::<F>() - 1) == 0 => {
                    let kind = Kind::of::<F>(level, entry);
                    let leaf = k..k + kind.entries::<F>();
                    let size = kind.size::<F>();
                    let encode = if kind.group { F::encode_member } else { F::encode_leaf };
                    let keeps = change.dirty.is_none() && can_be_marked::<F>(level, encode(level, out, change.access));
                    let mut dirty = false;
                    if let Some(invalidate) = &mut change.invalidate
                        && (kind.group || (old ^ change.access).intersects(Access::MMIO | Access::UNCACHED))
                    {
                        dirty = self.break_entries(table, leaf.clone(), at, size, &mut **invalidate);
                    }
                    let mut to = out;
                    let new = || {
                        let entry = encode(level, to, change.access);
                        to += page;
                        marked::<F>(entry, keeps && dirty)
                    };
                    let late = slots::exchange::<F, T>(&mut self.tables, table, leaf.clone(), new);
                    slots::clean::<F, T>(&mut self.tables, table, leaf.clone());
                    match &mut change.dirty {
                        Some(each) if dirty || late => {
                            each(Leaf { at: I::new(at), to: O::new(out), size, access: old });
                        }
                        None if late && keeps => self.mark(table, leaf),
                        _ => {}
                    }
                    bytes += size.bytes();
                }
                _ => {}
            }
            at = entry_last.wrapping_add(1);
        }
        bytes
    }
}

/// False for a read-only leaf of Arm's formats: its mark would be the right to write.
fn can_be_marked<F: Format>(level: u32, leaf: u64) -> bool {
    F::decode(level, marked::<F>(leaf, true)) == F::decode(level, marked::<F>(leaf, false))
}
