//! Unmapping: holes are fine, leaves that stick out are split.

use core::ops::Range;

use dmalane_addr::{Access, Address, PageSize, Span};

use crate::format::{Kind, entries, group_bits, has_groups, index, is_dirty, marked, page_size, same_table, shift};
use crate::list::{self, List};
use crate::{Entry, Error, FlushList, Format, Leaf, MAX_LEVELS, PageTable, Tables, slots};

/// A boundary inside a leaf, and the tables that make it a boundary between leaves.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    /// First address after the boundary.
    at: u64,
    /// Size of the leaf.
    size: u64,
    /// Level of the leaf.
    from: u32,
    /// Level of the leaves it must become, the first whose page size divides `at`.
    to: u32,
}

impl Cut {
    /// The number of tables for two cuts; those that both lie in are made once.
    pub(crate) fn tables<F: Format>(cuts: [Option<Cut>; 2]) -> usize {
        let one = |cut: Option<Cut>| cut.map_or(0, |c| c.to - c.from);
        let shared = match cuts {
            [Some(a), Some(b)] => {
                let levels = a.from.max(b.from) + 1..=a.to.min(b.to);
                levels.filter(|&level| same_table::<F>(a.at, b.at, level)).count()
            }
            _ => 0,
        };
        (one(cuts[0]) + one(cuts[1])) as usize - shared
    }
}

/// A leaf that is being split.
pub(crate) struct Split<A> {
    pub(crate) table: A,
    /// Its entry, or those of a group.
    pub(crate) entries: Range<usize>,
    /// Where the leaf starts.
    pub(crate) at: u64,
    pub(crate) size: PageSize,
}

/// Which tables go with what was mapped in them.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Detach {
    /// Those that become empty. (Where tables are shared: those that the span covers, since a neighbour may be about to
    /// use any other.)
    Emptied,
    /// Those that the span covers.
    Covered,
    /// None.
    Nothing,
}

/// Bytes and tables that a recursive clear has removed so far, and whom it tells of leaves that were written to.
struct Cleared<'a, 'd, I, O, A> {
    bytes: u64,
    tables: &'a mut List<A>,
    dirty: Dirty<'d, I, O>,
}

/// The receiver of removed leaves that a device has written to, if anybody asks for them.
pub(crate) type Dirty<'a, I, O> = Option<&'a mut dyn FnMut(Leaf<I, O>)>;

/// Tables for cuts: at most one a level for each end of a span.
pub(crate) struct Spare<A> {
    tables: [Option<A>; 2 * MAX_LEVELS],
    count: usize,
}

impl<A> Spare<A> {
    pub(crate) fn pop(&mut self) -> Option<A> {
        self.count = self.count.checked_sub(1)?;
        self.tables[self.count].take()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Takes away everything mapped within the span.
    ///
    /// Holes are skipped; [`FlushList::bytes`] says how much was mapped. A larger leaf that reaches across an end of
    /// the span is first split into a table of smaller ones. (The leaf is replaced by a table with one store. Where the
    /// architecture wants break-before-make, [`cut`](Self::cut) at both ends first.) Tables that become empty are
    /// unlinked and handed out in the list; give it to [`free_tables`](Self::free_tables) after invalidation.
    ///
    /// What is left of a split leaf keeps its mark, and one that a device sets meanwhile; those of what goes are told
    /// by [`unmap_dirty`](Self::unmap_dirty) and `clear_dirty_into`.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::InputRange`]; [`Error::NoTables`] and [`Error::TableAddress`] when a leaf had to
    /// be split and there was no table for it (see [`split_tables`](Self::split_tables)). The table is then as it was.
    #[inline]
    pub fn unmap(&mut self, span: Span<I>) -> Result<FlushList<I, T::Addr>, Error> {
        self.unmap_listed(span, Detach::Emptied)
    }

    /// The same, but a table that the span covers only in part stays linked even when it becomes empty: a caller that
    /// maps there again does not need another one. Tables that the span covers are detached as ever.
    ///
    /// An empty table prevents a leaf as large as the range that it translates; smaller leaves are mapped in it.
    /// An unmap of all that it translates takes it away.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    #[inline]
    pub fn clear(&mut self, span: Span<I>) -> Result<FlushList<I, T::Addr>, Error> {
        self.unmap_listed(span, Detach::Covered)
    }

    /// The same into a list of the caller's, who may have made room in it for all
    /// [`linked_tables`](Self::linked_tables): then this asks for no memory. Gives what [`FlushList::span`] and
    /// [`FlushList::bytes`] would be.
    ///
    /// With `invalidate`, leaves that are split go by break-before-make, as in a [`cut`](Self::cut).
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    #[cfg(feature = "alloc")]
    #[inline]
    pub fn clear_into(
        &mut self,
        span: Span<I>,
        tables: &mut alloc::vec::Vec<T::Addr>,
        invalidate: Option<&mut dyn FnMut(Span<I>)>,
    ) -> Result<(Span<I>, u64), Error> {
        if self.clear_one(span, Detach::Covered) {
            return Ok((span, F::GRANULE.bytes()));
        }
        self.unmap_more(span, Detach::Covered, tables, invalidate)
    }

    /// The same, and calls `each` as [`unmap_dirty`](Self::unmap_dirty) does; never where the format has no marks.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    #[cfg(feature = "alloc")]
    pub fn clear_dirty_into(
        &mut self,
        span: Span<I>,
        tables: &mut alloc::vec::Vec<T::Addr>,
        invalidate: Option<&mut dyn FnMut(Span<I>)>,
        mut each: impl FnMut(Leaf<I, O>),
    ) -> Result<(Span<I>, u64), Error> {
        self.check_span(span)?;
        self.unmap_all(span, Detach::Covered, tables, Some(&mut each), invalidate)
    }

    /// Unmaps the page at `at` if a leaf of its own maps it, and gives true; otherwise changes nothing. No table is
    /// detached, as with [`clear`](Self::clear), which does the same and all the rest.
    #[inline]
    pub fn clear_leaf(&mut self, at: I) -> bool {
        self.clear_page(at.bits(), Detach::Covered)
    }

    /// Detaches the table at `level`, counted from the root at 0, that translates `at`, if there is one: the caller
    /// knows that it is empty, so nothing is searched. True when there was one. Tables above it stay, be they empty or
    /// not, and so does everything where tables are shared.
    ///
    /// A table that was not empty takes what it maps with it, and the counts of leaves are wrong from then on.
    ///
    /// # Panics
    /// With debug assertions, when the table is not empty.
    #[cfg(feature = "alloc")]
    pub fn detach_empty(&mut self, at: I, level: u32, tables: &mut alloc::vec::Vec<T::Addr>) -> bool {
        if T::SHARED || level <= self.root_level() || level >= F::LEVELS || at.bits() >= self.input_len() {
            return false;
        }
        let mut above = self.root;
        for l in self.root_level()..level {
            let i = index::<F>(at.bits(), l);
            let Entry::Table(next) = F::decode(l, self.load(above, i)) else { return false };
            if l + 1 == level {
                debug_assert!(self.is_empty(T::Addr::new(next), level), "a table that is not empty at {at}");
                self.store(above, i, 0);
                tables.push(T::Addr::new(next));
                self.linked -= 1;
                self.cursor.leave::<F>(at.bits(), level);
                return true;
            }
            above = T::Addr::new(next);
        }
        false
    }

    /// Unmaps into a new list. Always inline: one page is the call that drivers make most, and the list goes through
    /// memory when it is given back by a function that is not.
    #[inline(always)]
    fn unmap_listed(&mut self, span: Span<I>, detach: Detach) -> Result<FlushList<I, T::Addr>, Error> {
        if self.clear_one(span, detach) {
            return Ok(FlushList { span, bytes: F::GRANULE.bytes(), tables: List::new() });
        }
        let mut tables = List::new();
        let (span, bytes) = self.unmap_more(span, detach, &mut tables, None)?;
        Ok(FlushList { span, bytes, tables })
    }

    /// [`clear_page`](Self::clear_page) for a span that is one.
    #[inline(always)]
    fn clear_one(&mut self, span: Span<I>, detach: Detach) -> bool {
        let (first, last) = (span.first().bits(), span.last().bits());
        last - first == F::GRANULE.bytes() - 1 && self.clear_page(first, detach)
    }

    /// Clears one page if it is mapped and nothing else is to be done. Otherwise gives false, and nothing has changed.
    #[inline(always)]
    fn clear_page(&mut self, at: u64, detach: Detach) -> bool {
        let level = F::LEVELS - 1;
        if at & !(self.input_len() - F::GRANULE.bytes()) != 0 {
            return false;
        }
        let Some((table, i, entry)) = self.last_entry(at) else { return false };
        if !is_page::<F>(entry) || Kind::of::<F>(level, entry).group {
            return false;
        }
        if detach == Detach::Emptied && !T::SHARED && !self.has_another(table, i) {
            return self.clear_unless_last(table, i);
        }
        self.store(table, i, 0);
        self.uncount(level, 1, 0);
        true
    }

    /// True when a table of the last level is known to have a valid entry other than the one at `i`. The entry that
    /// answered this for one of the last tables is asked again: which one that is does not depend on `i`, so that a
    /// processor foresees the answer in whatever order pages go.
    #[inline(always)]
    fn has_another(&self, table: T::Addr, i: usize) -> bool {
        let known = usize::from(self.witnesses[self.witness_slot(table)]);
        known != i && is_page::<F>(self.load(table, known))
    }

    /// Clears the page at `i` of a table of the last level if another one is mapped there. The search for that is from
    /// both ends of the table: what is found there goes last when pages go in order.
    #[inline(never)]
    fn clear_unless_last(&mut self, table: T::Addr, i: usize) -> bool {
        let level = F::LEVELS - 1;
        let above = || self.find_valid(table, level, i + 1..entries::<F>(level), true);
        let found = self.find_valid(table, level, 0..i, false).or_else(above);
        if let Some(found) = found {
            let slot = self.witness_slot(table);
            self.witnesses[slot] = found as u16; // below 2^13
            self.store(table, i, 0);
            self.uncount(level, 1, 0);
        }
        found.is_some()
    }

    /// Where the witness of a table of the last level is.
    #[inline]
    fn witness_slot(&self, table: T::Addr) -> usize {
        (table.bits() >> (F::INDEX_BITS + F::ENTRY_BYTES.trailing_zeros())) as usize % self.witnesses.len()
    }

    #[inline(never)]
    fn unmap_more(
        &mut self,
        span: Span<I>,
        detach: Detach,
        tables: &mut List<T::Addr>,
        invalidate: Option<&mut dyn FnMut(Span<I>)>,
    ) -> Result<(Span<I>, u64), Error> {
        let (first, last) = self.check_span(span)?;
        match self.clear_pages(first, last, detach) {
            Some(bytes) => Ok((span, bytes)),
            None => self.unmap_all(span, detach, tables, None, invalidate),
        }
    }

    /// Clears a part of one table of the last level, if that suffices: nothing to split, no table to detach. Returns
    /// the bytes that were mapped; `None` when it does not suffice, and nothing has changed.
    fn clear_pages(&mut self, first: u64, last: u64, detach: Detach) -> Option<u64> {
        let level = F::LEVELS - 1;
        let (i, j, end) = (index::<F>(first, level), index::<F>(last, level), entries::<F>(level));
        if !same_table::<F>(first, last, level) || j - i == end - 1 {
            return None;
        }
        let table = self.last_table(first)?;
        let group = 1usize << group_bits::<F>(level);
        let inside = |k: usize| !k.is_multiple_of(group) && F::is_member(level, self.load(table, k));
        if group > 1 && (inside(i) || j + 1 < end && inside(j + 1)) {
            return None; // perhaps a group to be split
        }
        if detach == Detach::Emptied && !T::SHARED && self.is_empty_but(table, level, i, j) {
            return None;
        }
        let (pages, members) = self.take_out(table, i..j + 1, false);
        self.uncount(level, pages, members);
        Some(pages << shift::<F>(level))
    }

    /// Clears entries of a table of the last level, or leaves them as they are in one that goes as a whole. Gives the
    /// number of those that were valid, and of members of groups among them.
    fn take_out(&mut self, table: T::Addr, range: Range<usize>, whole: bool) -> (u64, u64) {
        let (mut pages, mut members, mut seen) = (0, 0, 0);
        let mut count = |entries: &[u64]| {
            let counted = count_pages::<F>(entries);
            (pages, members) = (pages + counted.0, members + counted.1);
        };
        slots::edit::<F, T>(&mut self.tables, table, range.clone(), |entries| {
            count(entries);
            seen += entries.len();
            if whole {
                return 0;
            }
            entries.fill(0);
            entries.len()
        });
        if whole {
            // The entries that did not come in one chunk.
            (range.start + seen..range.end).for_each(|k| count(&[self.load(table, k)]));
        } else {
            slots::clean::<F, T>(&mut self.tables, table, range);
        }
        (pages, members)
    }

    /// The span is one that [`check_span`](Self::check_span) accepts.
    pub(crate) fn unmap_all(
        &mut self,
        span: Span<I>,
        detach: Detach,
        tables: &mut List<T::Addr>,
        dirty: Dirty<'_, I, O>,
        invalidate: Option<&mut dyn FnMut(Span<I>)>,
    ) -> Result<(Span<I>, u64), Error> {
        let flush = self.split_ends(span, invalidate)?;
        let before = tables.len();
        let bytes = self.clear_span(span.first().bits(), span.last().bits(), detach, tables, dirty);
        self.note_detached(tables.len() - before);
        Ok((flush, bytes))
    }

    /// Splits the leaves that reach across an end of the span. Gives the span, widened to all of those.
    pub(crate) fn split_ends(
        &mut self,
        span: Span<I>,
        mut invalidate: Option<&mut dyn FnMut(Span<I>)>,
    ) -> Result<Span<I>, Error> {
        let (first, last) = (span.first().bits(), span.last().bits());
        let cuts = [self.find_cut(first), self.find_cut(last + 1)];
        let mut spare = self.spare_tables(Cut::tables::<F>(cuts), first)?;
        let mut flush_first = first;
        let mut flush_last = last;
        for cut in cuts.into_iter().flatten() {
            let mask = cut.size - 1;
            flush_first = flush_first.min(cut.at & !mask);
            flush_last = flush_last.max(cut.at | mask);
            self.split(cut.at, &mut spare, |table, leaf| match &mut invalidate {
                Some(invalidate) => table.break_entries(leaf.table, leaf.entries, leaf.at, leaf.size, *invalidate),
                None => false,
            });
        }
        Ok(Span::inclusive(I::new(flush_first), I::new(flush_last)).unwrap_or(span))
    }

    /// Notes that `tables` tables have left the tree.
    pub(crate) fn note_detached(&mut self, tables: usize) {
        if tables > 0 {
            self.linked = self.linked.wrapping_sub(tables); // another handle may have linked them
            self.cursor.forget(self.root_level());
        }
    }

    /// Tables for cuts, or none of them.
    pub(crate) fn spare_tables(&mut self, count: usize, at: u64) -> Result<Spare<T::Addr>, Error> {
        let mut spare = Spare { tables: [None; 2 * MAX_LEVELS], count: 0 };
        while spare.count < count {
            match self.allocate(at) {
                Ok(table) => {
                    spare.tables[spare.count] = Some(table);
                    spare.count += 1;
                }
                Err(e) => {
                    while let Some(table) = spare.pop() {
                        self.tables.free(table);
                    }
                    return Err(e);
                }
            }
        }
        Ok(spare)
    }

    /// The cut that makes a leaf end at `at`; `None` when no leaf reaches across.
    pub(crate) fn find_cut(&self, at: u64) -> Option<Cut> {
        if at >= self.input_len() {
            return None;
        }
        let mut table = self.root;
        for level in self.root_level()..F::LEVELS {
            // A boundary of this level's entries already: but one may lie inside a group.
            let boundary = at & (page_size::<F>(level).bytes() - 1) == 0;
            if boundary && group_bits::<F>(level) == 0 {
                return None;
            }
            let entry = self.load(table, index::<F>(at, level));
            match F::decode(level, entry) {
                Entry::Table(next) if !boundary => table = T::Addr::new(next),
                Entry::Leaf { .. } => {
                    let size = Kind::of::<F>(level, entry).size::<F>().bytes();
                    let inside = at & (size - 1) != 0;
                    return inside.then(|| Cut { at, size, from: level, to: first_aligned_level::<F>(at) });
                }
                _ => return None,
            }
        }
        None
    }

    /// Splits leaves on the path to `at` until one starts there, with tables from `spare`. `ready` is called between
    /// filling a table and linking it, with the table and the index of the leaf's entry, and says whether the device
    /// has written through the leaf in the meantime. (Or else it counts as written to if it did before.)
    pub(crate) fn split(
        &mut self,
        at: u64,
        spare: &mut Spare<T::Addr>,
        mut ready: impl FnMut(&mut Self, Split<T::Addr>) -> bool,
    ) {
        let mut table = self.root;
        for level in self.root_level()..F::LEVELS {
            let i = index::<F>(at, level);
            let entry = self.load(table, i);
            if let Entry::Leaf { out, access } = F::decode(level, entry) {
                let kind = Kind::of::<F>(level, entry);
                if kind.group && at & (kind.size::<F>().bytes() - 1) != 0 {
                    self.split_group(table, kind, at, (out, access), &mut ready);
                }
            }
            if at & (page_size::<F>(level).bytes() - 1) == 0 {
                return;
            }
            table = match F::decode(level, self.load(table, i)) {
                Entry::Invalid => return,
                Entry::Table(next) => T::Addr::new(next),
                Entry::Leaf { out, access } => {
                    // The other cut may have split this leaf already; what was counted is never too little.
                    let Some(next) = spare.pop() else { return };
                    let parts = Kind { level: level + 1, group: self.has_groups_at(level + 1) };
                    let (all, dirty) = (0..entries::<F>(level + 1), is_dirty::<F>(self.load(table, i)));
                    self.write_leaves(next, all.clone(), parts, (out, access), dirty);
                    let size = page_size::<F>(level);
                    let mut late = ready(self, Split { table, entries: i..i + 1, at: at & !(size.bytes() - 1), size });
                    let link = || F::encode_table(level, next.bits());
                    late |= slots::exchange::<F, T>(&mut self.tables, table, i..i + 1, link);
                    slots::clean::<F, T>(&mut self.tables, table, i..i + 1);
                    if late && !dirty {
                        self.mark(next, all);
                    }
                    self.linked = self.linked.wrapping_add(1);
                    self.uncount(level, 1, 0);
                    next
                }
            };
        }
    }

    /// Makes single leaves of the group around `at`, which maps `to`.
    fn split_group(
        &mut self,
        table: T::Addr,
        kind: Kind,
        at: u64,
        mut to: (u64, Access),
        ready: &mut impl FnMut(&mut Self, Split<T::Addr>) -> bool,
    ) {
        let size = kind.size::<F>();
        let start = at & !(size.bytes() - 1);
        let first = index::<F>(start, kind.level);
        let entries = first..first + kind.entries::<F>();
        let dirty = ready(self, Split { table, entries: entries.clone(), at: start, size });
        self.uncount(kind.level, kind.entries::<F>() as u64, kind.entries::<F>() as u64);
        self.count(Kind::single(kind.level), entries.len() as u64);
        let page = page_size::<F>(kind.level).bytes();
        let part = || {
            let entry = F::encode_leaf(kind.level, to.0, to.1);
            to.0 += page;
            marked::<F>(entry, dirty)
        };
        let late = slots::exchange::<F, T>(&mut self.tables, table, entries.clone(), part);
        slots::clean::<F, T>(&mut self.tables, table, entries.clone());
        if late {
            self.mark(table, entries);
        }
    }

    /// Marks leaves as written to.
    pub(crate) fn mark(&mut self, table: T::Addr, leaves: Range<usize>) {
        slots::update::<F, T>(&mut self.tables, table, leaves, |leaf| Some(marked::<F>(leaf, true)));
    }

    /// Writes and counts leaves of one kind that map from `out` on, marked as written to or not.
    pub(crate) fn write_leaves(
        &mut self,
        table: T::Addr,
        range: Range<usize>,
        kind: Kind,
        (mut out, access): (u64, Access),
        dirty: bool,
    ) {
        self.count(kind, (range.len() / kind.entries::<F>()) as u64);
        let encode = if kind.group { F::encode_member } else { F::encode_leaf };
        slots::update::<F, T>(&mut self.tables, table, range, |_| {
            let entry = encode(kind.level, out, access);
            out += page_size::<F>(kind.level).bytes();
            Some(marked::<F>(entry, dirty))
        });
    }

    /// Clears all leaves in the range, none of which reaches outside, and adds the tables that are detached to the
    /// list. Gives the bytes that were mapped.
    pub(crate) fn clear_span(
        &mut self,
        first: u64,
        last: u64,
        detach: Detach,
        tables: &mut List<T::Addr>,
        dirty: Dirty<'_, I, O>,
    ) -> u64 {
        let mut cleared = Cleared { bytes: 0, tables, dirty };
        let detach = if T::SHARED && detach == Detach::Emptied { Detach::Covered } else { detach };
        self.clear_below(self.root, self.root_level(), (first, last), detach, &mut cleared);
        cleared.bytes
    }

    /// True when the table goes, so that the caller unlinks it.
    fn clear_below(
        &mut self,
        table: T::Addr,
        level: u32,
        (first, last): (u64, u64),
        detach: Detach,
        cleared: &mut Cleared<'_, '_, I, O, T::Addr>,
    ) -> bool {
        let (i, j) = (index::<F>(first, level), index::<F>(last, level));
        let page = page_size::<F>(level).bytes();
        // A table that goes as a whole keeps its entries: nothing reads them once it is unlinked, but for a walker
        // whose caches must be invalidated anyway. (Marks are taken with their entries.) The root is never unlinked.
        let mask = page * entries::<F>(level) as u64 - 1;
        let covered =
            detach != Detach::Nothing && level > self.root_level() && first & mask == 0 && last & mask == mask;
        // Without `alloc` the list may have no room for it.
        let whole = covered && cfg!(feature = "alloc");
        let if_empty = detach == Detach::Emptied && level > self.root_level();
        if level + 1 == F::LEVELS && cleared.dirty.is_none() {
            let (pages, members) = self.take_out(table, i..j + 1, whole);
            cleared.bytes += page * pages;
            self.uncount(level, pages, members);
            return whole || (covered || if_empty && pages > 0) && self.is_empty_but(table, level, i, j);
        }
        let (mut changed, mut kept) = (false, false);
        let (mut leaves, mut members) = (0, 0);
        let mut at = first;
        for k in i..=j {
            let entry_last = (at | (page - 1)).min(last);
            let entry = self.load(table, k);
            let gone = match F::decode(level, entry) {
                Entry::Invalid => false,
                Entry::Leaf { out, access } => {
                    let kind = Kind::of::<F>(level, entry);
                    leaves += 1;
                    members += u64::from(kind.group);
                    if let Some(each) = &mut cleared.dirty {
                        let leaf = k..k + kind.entries::<F>();
                        leaves += leaf.len() as u64 - 1; // the others will be clear
                        members += leaf.len() as u64 - 1;
                        changed = true;
                        if slots::exchange::<F, T>(&mut self.tables, table, leaf, || 0) {
                            each(Leaf { at: I::new(at), to: O::new(out), size: kind.size::<F>(), access });
                        }
                    }
                    cleared.dirty.is_none()
                }
                Entry::Table(next) => {
                    let next = T::Addr::new(next);
                    let emptied = self.clear_below(next, level + 1, (at, entry_last), detach, cleared)
                        && list::push(cleared.tables, next);
                    kept |= !emptied;
                    emptied
                }
            };
            if gone && !whole {
                slots::write::<F, T>(&mut self.tables, table, k, 0);
                changed = true;
            }
            at = entry_last.wrapping_add(1);
        }
        cleared.bytes += page * leaves;
        self.uncount(level, leaves, members);
        if changed {
            slots::clean::<F, T>(&mut self.tables, table, i..j + 1);
        }
        whole || (covered || if_empty && changed) && !kept && self.is_empty_but(table, level, i, j)
    }

    /// Counts leaves of a kind. Another handle may take them off its own count: only the sum is never negative.
    #[inline]
    pub(crate) fn count(&mut self, kind: Kind, leaves: u64) {
        let count = &mut self.leaves[kind.slot()];
        *count = count.wrapping_add(leaves);
    }

    /// Takes leaves at `level` off the count: entries, some of which are members of groups.
    #[inline]
    pub(crate) fn uncount(&mut self, level: u32, entries: u64, members: u64) {
        // Another handle may have counted them.
        let single = &mut self.leaves[Kind::single(level).slot()];
        *single = single.wrapping_sub(entries - members);
        if group_bits::<F>(level) > 0 {
            let groups = &mut self.leaves[Kind { level, group: true }.slot()];
            *groups = groups.wrapping_sub(members >> group_bits::<F>(level));
        }
    }

    /// True when no entry of the table is valid.
    pub(crate) fn is_empty(&self, table: T::Addr, level: u32) -> bool {
        !self.any_valid(table, level, 0..entries::<F>(level))
    }

    /// True when an entry of the range is valid.
    fn any_valid(&self, table: T::Addr, level: u32, range: Range<usize>) -> bool {
        self.find_valid(table, level, range, false).is_some()
    }

    /// The first valid entry of the range, or the last one.
    fn find_valid(&self, table: T::Addr, level: u32, range: Range<usize>, last: bool) -> Option<usize> {
        const STEP: usize = 32;
        let steps = range.len().div_ceil(STEP);
        (0..steps).find_map(|step| {
            let start = range.start + STEP * if last { steps - 1 - step } else { step };
            let mut some = start..(start + STEP).min(range.end);
            if slots::is_zero::<F, T>(&self.tables, table, some.clone()) {
                return None;
            }
            let valid = |&i: &usize| !self.is_invalid(table, level, i);
            if last { some.rfind(valid) } else { some.find(valid) }
        })
    }

    /// True when no entry of the table is valid, given that `i` to `j` are not. The neighbours come first: when a table
    /// is taken down page by page in either direction, one of them is still there.
    fn is_empty_but(&self, table: T::Addr, level: u32, i: usize, j: usize) -> bool {
        let end = entries::<F>(level);
        (i == 0 || self.is_invalid(table, level, i - 1))
            && (j + 1 == end || self.is_invalid(table, level, j + 1))
            && !self.any_valid(table, level, j + 1..end)
            && !self.any_valid(table, level, 0..i)
    }

    #[inline]
    fn is_invalid(&self, table: T::Addr, level: u32, i: usize) -> bool {
        F::decode(level, self.load(table, i)) == Entry::Invalid
    }
}

/// True for a valid entry of the last level.
#[inline]
fn is_page<F: Format>(entry: u64) -> bool {
    if F::VALID != 0 { entry & F::VALID != 0 } else { F::decode(F::LEVELS - 1, entry) != Entry::Invalid }
}

/// The number of entries of the last level that are valid, and of members of groups among them.
#[inline]
pub(crate) fn count_pages<F: Format>(entries: &[u64]) -> (u64, u64) {
    let valid = |&&entry: &&u64| entry != 0 && F::decode(F::LEVELS - 1, entry) != Entry::Invalid;
    let all = || entries.iter().filter(valid);
    if F::VALID == 0 || has_groups::<F>() {
        let members = all().filter(|&&entry| has_groups::<F>() && F::is_member(F::LEVELS - 1, entry));
        return (all().count() as u64, members.count() as u64);
    }
    // A few instructions for several entries; fewest where all are valid.
    let bit = F::VALID.trailing_zeros();
    let every = entries.iter().fold(F::VALID, |every, entry| every & entry) != 0;
    let some = if every { entries.len() as u64 } else { entries.iter().map(|entry| entry >> bit & 1).sum() };
    debug_assert_eq!(some, all().count() as u64, "{}", F::NAME);
    (some, 0)
}

/// The topmost level whose page size divides `at`, a multiple of the granule.
fn first_aligned_level<F: Format>(at: u64) -> u32 {
    (0..F::LEVELS).find(|&level| at & (page_size::<F>(level).bytes() - 1) == 0).unwrap_or(F::LEVELS - 1)
}
