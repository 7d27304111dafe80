//! Mapping: a whole scatter list in one call.
//!
//! The walk from the root happens once per table, not once per page. Within one table all leaves have one size (a
//! larger one can only start where the table does, but for a group). So one loop fills a table: single pages are taken
//! straight from the list, several to a turn; pages that continue each other are counted, and that all their entries
//! are free is one question.

use core::iter::{empty, once};
use core::marker::PhantomData;
use core::mem::{replace, take};
use core::ops::Range;

use dmalane_addr::{Access, Address, PageSizes, Segment, Span};

use crate::chunks::in_chunks;
use crate::format::{
    Kind, encode_output, encode_template, entries, group_bits, has_groups, index, is_dirty, leaf_kind, next_table,
    page_size, same_table, second_size, shift, table_offset,
};
use crate::list::{self, List};
use crate::unmap::{Detach, Dirty, count_pages};
use crate::{Entry, Error, Format, Leaf, NamedAddr, PageTable, Tables, slots};

/// Single pages taken from a list in one turn of the loop.
const STEP: usize = 8;
/// Pages that continue each other from which on it pays to ask first whether all their entries are free.
const LONG: usize = 8;

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Maps `len` bytes from `at` to `to`, by the largest pages that alignment and length allow.
    ///
    /// # Errors
    /// As [`map_sg`](Self::map_sg); the table is then as it was.
    #[inline]
    pub fn map(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        // This is the call that is made for every page of somebody else's loop.
        if len == F::GRANULE.bytes() && self.map_page(at, to, access) {
            return Ok(());
        }
        self.map_extent(at, to, len, access)
    }

    #[inline(never)]
    fn map_extent(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        let now = checked::<F, O>(Segment { addr: to, len }).map_err(bad_segment::<F, O>)?;
        if self.map_few(at.bits(), now, access) {
            return Ok(());
        }
        self.map_source(at, Source { now, ..Source::new(empty()) }, access, |_| Ok(())).map(drop)
    }

    /// Maps pages within one table if nothing is in the way, as [`map_page`](Self::map_page) does one.
    #[inline]
    fn map_few(&mut self, at: u64, mut now: Extent, access: Access) -> bool {
        let kind = Kind::single(F::LEVELS - 1);
        let beyond = !(self.input_len() - F::GRANULE.bytes());
        let (i, end) = (index::<F>(at, kind.level), entries::<F>(kind.level));
        let count = run_of_pages::<F>(i, now);
        // All of it, and neither a table full nor a group.
        let pages = count < end
            && count <= end - i
            && count as u64 == now.len >> shift::<F>(kind.level)
            && !(may_start_group::<F>(i, now.out) && count == 1 << group_bits::<F>(kind.level));
        if !pages || !F::supports(access) || at & beyond != 0 {
            return false;
        }
        let Some(table) = self.last_table(at) else { return false };
        if self.first_taken(table, kind.level, i..i + count).is_some() {
            return false;
        }
        self.write_run(table, kind, i..i + count, &mut now, (encode_template::<F>(kind, access), false));
        slots::clean::<F, T>(&mut self.tables, table, i..i + count);
        self.count(kind, count as u64);
        true
    }

    /// Maps a list of segments one after another from `at` on, and gives the number of bytes mapped. An empty list maps
    /// nothing.
    ///
    /// Segments that continue each other are mapped as one, so a leaf may span several, and a segment need not be whole
    /// granules: four pages of 4 KiB in a row make one of 16 KiB, as with Linux' `iommu_map_sg`. Empty segments are
    /// skipped. Each leaf is the largest that the alignment of both addresses and the rest of the segment allow.
    ///
    /// New mappings need no invalidation, provided that the device does not cache faults.
    ///
    /// # Errors
    /// [`Error::Misaligned`] (segments that continue each other, as one), [`Error::InputRange`],
    /// [`Error::OutputRange`], [`Error::Unsupported`], [`Error::Overlap`] with the lowest address that is taken,
    /// [`Error::NoTables`] and [`Error::TableAddress`]: whichever comes first on the way through the list. After any of
    /// them the table is as it was. Tables that were linked for a moment are freed at once: where a device may stray
    /// into the span *during* the call, invalidate the span after a failure. In a pool that handles share,
    /// others may use them: there they stay, empty, until an unmap covers them.
    #[inline(always)]
    pub fn map_sg(
        &mut self,
        at: I,
        segments: impl IntoIterator<Item = Segment<O>>,
        access: Access,
    ) -> Result<u64, Error> {
        let mut segments = segments.into_iter();
        // A list of one page is no slower than a call of `map`.
        let one = if segments.size_hint() == (1, Some(1)) { segments.next() } else { None };
        match one {
            Some(Segment { addr, len }) if len == F::GRANULE.bytes() && self.map_page(at, addr, access) => Ok(len),
            Some(segment) => self.map_list(at, once(segment), access),
            None => self.map_list(at, segments, access),
        }
    }

    #[inline(never)]
    fn map_list(&mut self, at: I, segments: impl Iterator<Item = Segment<O>>, access: Access) -> Result<u64, Error> {
        self.map_source(at, Source::new(segments), access, |_| Ok(()))
    }

    /// Maps one page if nothing is in the way: no table to be made, no error. False leaves all as it was.
    ///
    /// Always inline, in [`map`](Self::map) and in [`map_sg`](Self::map_sg): it costs less than the call would.
    #[inline(always)]
    fn map_page(&mut self, at: I, to: O, access: Access) -> bool {
        let beyond = !(self.input_len() - F::GRANULE.bytes());
        if at.bits() & beyond != 0 || to.bits() & not_a_page::<F>() != 0 {
            return false;
        }
        let Some(template) = self.page_template(access) else { return false };
        let Some((table, i, 0)) = self.last_entry(at.bits()) else { return false };
        self.put_page(table, i, to, template);
        true
    }

    /// Maps a page where the caller knows that nothing is mapped. Both addresses are whole pages within the limits of
    /// the format; nothing of this is checked. False, and nothing has changed, where there is no table for the page, or
    /// the format does not support the access: [`map`](Self::map) says which.
    ///
    /// A page that was mapped is replaced, and counted twice from then on.
    ///
    /// # Panics
    /// With debug assertions, when one of this does not hold.
    #[inline(always)] // as `map_page`
    pub fn map_free(&mut self, at: I, to: O, access: Access) -> bool {
        debug_assert!(at.bits() < self.input_len() && at.is_aligned(F::GRANULE) && to.bits() & not_a_page::<F>() == 0);
        let Some(template) = self.page_template(access) else { return false };
        let Some(table) = self.last_table(at.bits()) else { return false };
        let i = index::<F>(at.bits(), F::LEVELS - 1);
        debug_assert!(self.load(table, i) == 0, "{at} is mapped");
        self.put_page(table, i, to, template);
        true
    }

    /// Writes and counts the entry of a page, in a table of the last level.
    #[inline(always)]
    fn put_page(&mut self, table: T::Addr, i: usize, to: O, template: u64) {
        let kind = Kind::single(F::LEVELS - 1);
        self.store(table, i, template | encode_output::<F>(kind, to.bits()));
        self.count(kind, 1);
    }

    /// The entry of a page but for its output address; that of the last access asked for is at hand. `None` for an
    /// access that the format does not support.
    #[inline]
    fn page_template(&mut self, access: Access) -> Option<u64> {
        let (of, template) = self.template;
        if of == u16::from(access.bits()) { Some(template) } else { self.new_template(access) }
    }

    #[inline(never)] // most calls ask for what the last one did
    fn new_template(&mut self, access: Access) -> Option<u64> {
        let template = F::supports(access).then(|| encode_template::<F>(Kind::single(F::LEVELS - 1), access))?;
        self.template = (access.bits().into(), template);
        Some(template)
    }

    /// Maps single pages one after another from `at` on, the page of number `n` to `to(n)`. Stops at the end of the
    /// last-level table (at once where there is none), at an entry in use, and at a page that cannot be mapped. Returns
    /// the number of pages mapped; [`map`](Self::map) of the next one reports the error, if there is one.
    ///
    /// Every page gets a leaf of its own, also where pages continue each other.
    #[inline]
    pub fn map_each(&mut self, at: I, pages: usize, access: Access, mut to: impl FnMut(usize) -> Option<O>) -> usize {
        let kind = Kind::single(F::LEVELS - 1);
        let beyond = !(self.input_len() - F::GRANULE.bytes());
        if !F::supports(access) || at.bits() & beyond != 0 {
            return 0;
        }
        let Some(table) = self.last_table(at.bits()) else { return 0 };
        let i = index::<F>(at.bits(), kind.level);
        let range = i..(i + pages).min(entries::<F>(kind.level));
        let template = encode_template::<F>(kind, access);
        let mut next = 0;
        let done = slots::update::<F, T>(&mut self.tables, table, range, |old| {
            let out = to(next).filter(|out| old == 0 && out.bits() & not_a_page::<F>() == 0)?;
            next += 1;
            Some(template | encode_output::<F>(kind, out.bits()))
        });
        self.count(kind, done as u64);
        done
    }

    /// Maps pages over what is mapped there, in one table of the last level: up to `pages` from `at` on, to those of
    /// the segments. An entry that was valid is replaced by one store, with no invalid one between (no Arm
    /// break-before-make); the device may remember it until it has invalidated the span. Gives the number of pages
    /// written, and of those among them that were mapped before.
    ///
    /// Their marks go with them, and [`replace_pages_dirty`](Self::replace_pages_dirty) alone tells of them.
    ///
    /// Stops at the end of the table and at a segment that cannot be mapped. Does nothing where there is no table, nor
    /// for formats with groups: [`clear`](Self::clear) and [`map_sg`](Self::map_sg) of the rest do it, or say why not.
    #[inline]
    pub fn replace_pages(
        &mut self,
        at: I,
        pages: usize,
        segments: impl IntoIterator<Item = Segment<O>>,
        access: Access,
    ) -> (usize, u64) {
        self.replace(at, pages, segments, access, None)
    }

    /// The same, and calls `each` for those that a device has written through, as in
    /// [`unmap_dirty`](Self::unmap_dirty): each entry is taken by an atomic exchange. Never where the format has no
    /// marks.
    pub fn replace_pages_dirty(
        &mut self,
        at: I,
        pages: usize,
        segments: impl IntoIterator<Item = Segment<O>>,
        access: Access,
        mut each: impl FnMut(Leaf<I, O>),
    ) -> (usize, u64) {
        self.replace(at, pages, segments, access, Some(&mut each))
    }

    #[inline]
    fn replace(
        &mut self,
        at: I,
        pages: usize,
        segments: impl IntoIterator<Item = Segment<O>>,
        access: Access,
        dirty: Dirty<'_, I, O>,
    ) -> (usize, u64) {
        let kind = Kind::single(F::LEVELS - 1);
        let beyond = !(self.input_len() - F::GRANULE.bytes());
        if has_groups::<F>() || at.bits() & beyond != 0 {
            return (0, 0);
        }
        let Some(template) = self.page_template(access) else { return (0, 0) };
        let Some(table) = self.last_table(at.bits()) else { return (0, 0) };
        let first = index::<F>(at.bits(), kind.level);
        let range = first..(first + pages).min(entries::<F>(kind.level));
        let mut source = Source::<F, O, _>::new(segments.into_iter());
        let (mut next, mut old) = (first, 0);
        let mut fill = |entries: &mut [u64]| {
            let (written, _) = source.fill(entries, next, true, template, true); // not blank: whatever is there goes
            next += written;
            written
        };
        let done = match dirty.filter(|_| F::DIRTY != 0) {
            Some(each) => {
                let exchange = |tables: &mut T, i: usize, entry| {
                    let was = tables.exchange(table, i, entry);
                    let Entry::Leaf { out, access } = F::decode(kind.level, was) else { return };
                    old += 1;
                    if is_dirty::<F>(was) {
                        let at = I::new(at.bits() + ((i - first) as u64 * F::GRANULE.bytes()));
                        each(Leaf { at, to: O::new(out), size: F::GRANULE, access });
                    }
                };
                in_chunks(&mut self.tables, range, |_, _| 0, exchange, fill)
            }
            None => slots::edit::<F, T>(&mut self.tables, table, range, |entries| {
                let (valid, _) = count_pages::<F>(entries);
                let written = fill(entries);
                old += valid - count_pages::<F>(&entries[written..]).0;
                written
            }),
        };
        slots::clean::<F, T>(&mut self.tables, table, first..first + done);
        self.uncount(kind.level, old, 0);
        self.count(kind, done as u64);
        (done, old)
    }

    /// The table of the last level that translates `at`, if there is one. It is remembered from call to call.
    #[inline]
    pub(crate) fn last_table(&mut self, at: u64) -> Option<T::Addr> {
        if !T::SHARED && same_table::<F>(at, self.cursor.here, F::LEVELS - 1) {
            return Some(self.cursor.last);
        }
        let table = self.last_offset(at).filter(|table| table.is_multiple_of(8))?;
        (self.cursor.here, self.cursor.last) = (at, self.table_at(table));
        Some(self.cursor.last)
    }

    /// The same with the entry for `at`: its index, and what stands there. The table is not remembered: in random order
    /// nobody can foresee whether it is the same.
    #[inline(always)]
    pub(crate) fn last_entry(&mut self, at: u64) -> Option<(T::Addr, usize, u64)> {
        let (table, i) = (self.last_offset(at)?, index::<F>(at, F::LEVELS - 1));
        let entry = slots::load_by::<F>(self.tables.loader(), table, i)?;
        Some((self.table_at(table), i, entry))
    }

    /// The offset of the table of the last level that translates `at`. Where there is none, this is `None`, or an
    /// offset that [`Tables::loader`] refuses.
    /// Of the table above it is remembered where it was the last time.
    #[inline(always)]
    fn last_offset(&mut self, at: u64) -> Option<u64> {
        let level = F::LEVELS - 2;
        if (T::SHARED || !same_table::<F>(at, self.cursor.near, level)) && !self.seek(at) {
            return None;
        }
        let entry = slots::load_by::<F>(self.tables.loader(), self.cursor.above, index::<F>(at, level))?;
        table_offset::<F>(level, entry, self.origin).or_else(|| self.marked_table(level, entry))
    }

    /// Where an entry leads to that is not one that this page table has written. A device may have marked it.
    #[cold]
    #[inline(never)]
    fn marked_table(&self, level: u32, entry: u64) -> Option<u64> {
        Some(next_table::<F>(level, entry)?.wrapping_sub(self.tables.base()))
    }

    #[inline]
    fn table_at(&self, offset: u64) -> T::Addr {
        T::Addr::new(self.tables.base().wrapping_add(offset))
    }

    /// Finds the table of the last level but one that translates `at`. False when there is none.
    #[inline(never)]
    fn seek(&mut self, at: u64) -> bool {
        let mut table = self.root;
        for level in self.root_level()..F::LEVELS - 2 {
            match next_table::<F>(level, self.load(table, index::<F>(at, level))) {
                Some(next) => table = T::Addr::new(next),
                None => return false,
            }
        }
        (self.cursor.near, self.cursor.above) = (at, table.bits().wrapping_sub(self.tables.base()));
        true
    }

    /// Maps a source from `at` on, or nothing of it. Gives the number of bytes, on which `finish` has the last word.
    #[inline]
    pub(crate) fn map_source(
        &mut self,
        at: I,
        mut source: Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
        finish: impl FnOnce(u64) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        if !F::supports(access) {
            return Err(Error::Unsupported { access, format: F::NAME });
        }
        check_start::<F, I>(at, self.input_len())?;
        if T::SHARED {
            self.cursor.forget(self.root_level()); // another handle may have unlinked what it knows
        }
        self.made.clear();
        let first = at.bits();
        let mut next = first;
        match self.fill(&mut next, &mut source, access).and_then(|()| finish(next - first)) {
            Ok(()) => Ok(next - first),
            Err(e) => {
                self.undo(first, next);
                Err(e)
            }
        }
    }

    /// Writes the leaves of a source at `next`, which always is the address behind the last leaf that was written.
    #[inline]
    fn fill(
        &mut self,
        next: &mut u64,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
    ) -> Result<(), Error> {
        // Where an empty table prevents a larger leaf: the largest size possible there, and the end of that range.
        let mut below = (u64::MAX, *next);
        let (limit, end) = (source.limit, self.end_from(*next));
        while source.next()? {
            let at = *next;
            check_room::<I>(at, source.now.len, end)?;
            source.limit = if at < below.1 { limit.min(below.0) } else { limit };
            let kind = source.leaf_kind(at, self.page_sizes())?;
            let level = kind.level;
            // A blank table is filled before anybody can see it, and linked then.
            let (table, blank) = self.table_for(at, level)?;
            let (done, stop) = if kind == Kind::single(F::LEVELS - 1) {
                self.fill_pages(table, at, source, access, blank)
            } else {
                self.fill_blocks(table, kind, at, source, access, blank)
            };
            if blank {
                self.link_table(at, level, done)?;
            }
            self.count(kind, (done / kind.entries::<F>()) as u64);
            *next = at + ((done as u64) << shift::<F>(level));
            match stop {
                None => {}
                Some(Stop::Taken(taken)) => {
                    let page = page_size::<F>(level).bytes();
                    let taken = at + (taken - index::<F>(at, level)) as u64 * page;
                    if let Some(taken) = self.first_mapped(taken, page) {
                        return Err(Error::Overlap { at: NamedAddr::of(taken) });
                    }
                    // A group goes by single leaves, a single leaf by what the empty table holds.
                    let within = kind.size::<F>().bytes() - 1;
                    below = (if kind.group { page } else { page - 1 }, (*next | within) + 1);
                }
                Some(Stop::BadSegment(segment)) => return Err(bad_segment::<F, O>(segment)),
            }
        }
        Ok(())
    }

    /// Fills a table of the last level from `at` on, to its end, that of the source, or where a group may start. Gives
    /// the number of pages written.
    #[inline]
    fn fill_pages(
        &mut self,
        table: T::Addr,
        at: u64,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
        blank: bool,
    ) -> (usize, Option<Stop<O>>) {
        let kind = Kind::single(F::LEVELS - 1);
        let start = index::<F>(at, kind.level);
        let template = encode_template::<F>(kind, access);
        let mut next = start;
        let mut stop = None;
        let each = |entries: &mut [u64]| {
            let count;
            (count, stop) = source.fill(entries, next, next == start, template, blank);
            next += count;
            count
        };
        let range = start..entries::<F>(kind.level);
        let done = if blank {
            slots::fill::<F, T>(&mut self.tables, table, range, each)
        } else {
            slots::edit::<F, T>(&mut self.tables, table, range, each)
        };
        if done > 0 {
            slots::clean::<F, T>(&mut self.tables, table, start..start + done);
        }
        (done, stop)
    }

    /// Fills a table with as many leaves of this kind as fit and the extent has. Gives the number of entries written.
    #[inline]
    fn fill_blocks(
        &mut self,
        table: T::Addr,
        kind: Kind,
        at: u64,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
        blank: bool,
    ) -> (usize, Option<Stop<O>>) {
        let level = kind.level;
        let page = page_size::<F>(level).bytes();
        let first = index::<F>(at, level);
        let group = 1usize << group_bits::<F>(level);
        let now = &mut source.now;
        let mut count = (now.len / page).min((entries::<F>(level) - first) as u64) as usize;
        if kind.group {
            count &= !(group - 1);
        } else if group > 1 && (at ^ now.out) & (page * group as u64 - 1) == 0 {
            count = count.min(group - first % group); // the next group may start there: decide again
        }
        if count == 1 && group == 1 && source.pending.len != 0 {
            return self.fill_single(table, kind, first, source, access, blank);
        }
        if count == 1 {
            // The last one of a list, or a call for each.
            if !blank && F::decode(level, self.load(table, first)) != Entry::Invalid {
                return (0, Some(Stop::Taken(first)));
            }
            self.store(table, first, F::encode_leaf(level, now.out, access));
            now.skip(page);
            return (1, None);
        }
        let taken = if blank { None } else { self.first_taken(table, level, first..first + count) };
        if let Some(taken) = taken {
            count = taken - first;
            if kind.group {
                count &= !(group - 1); // all of a group or nothing of it
            }
        }
        if count > 0 {
            self.write_run(table, kind, first..first + count, now, (encode_template::<F>(kind, access), blank));
            slots::clean::<F, T>(&mut self.tables, table, first..first + count);
        }
        (count, taken.map(Stop::Taken))
    }

    /// Fills a table with a leaf for the start of the present extent, and with those behind it that are extents of
    /// their own: lists of large pages that do not continue each other. For formats without groups of such pages. Gives
    /// the number of entries written.
    #[inline]
    fn fill_single(
        &mut self,
        table: T::Addr,
        kind: Kind,
        first: usize,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
        blank: bool,
    ) -> (usize, Option<Stop<O>>) {
        let page = page_size::<F>(kind.level).bytes();
        let template = encode_template::<F>(kind, access);
        let range = first..entries::<F>(kind.level);
        let (mut next, mut stop) = (first, None);
        let each = |entries: &mut [u64]| {
            let before = next;
            for entry in entries {
                if source.now.len == 0 {
                    match source.take() {
                        Some(Ok(extent)) => source.now = extent,
                        Some(Err(segment)) => {
                            stop = Some(Stop::BadSegment(segment));
                            break;
                        }
                        None => break,
                    }
                }
                let now = &mut source.now;
                if next != first && (now.len != page || now.out & (page - 1) != 0) {
                    break;
                }
                if !blank && *entry != 0 && is_taken::<F>(*entry, kind.level) {
                    stop = Some(Stop::Taken(next));
                    break;
                }
                *entry = template | encode_output::<F>(kind, now.out);
                now.skip(page);
                next += 1;
            }
            next - before
        };
        let done = if blank {
            slots::fill::<F, T>(&mut self.tables, table, range, each)
        } else {
            slots::edit::<F, T>(&mut self.tables, table, range, each)
        };
        if done > 0 {
            slots::clean::<F, T>(&mut self.tables, table, first..first + done);
        }
        (done, stop)
    }

    /// Stores entries of one kind that map an extent, which moves along, in a table that may be blank.
    #[inline]
    pub(crate) fn write_run(
        &mut self,
        table: T::Addr,
        kind: Kind,
        range: Range<usize>,
        now: &mut Extent,
        (template, blank): (u64, bool),
    ) {
        let page = page_size::<F>(kind.level).bytes();
        let mut out = now.out;
        now.skip(range.len() as u64 * page);
        let each = |entries: &mut [u64]| {
            write_entries::<F>(entries, kind, out, template);
            out += entries.len() as u64 * page;
            entries.len()
        };
        if blank {
            slots::fill::<F, T>(&mut self.tables, table, range, each);
        } else {
            slots::edit::<F, T>(&mut self.tables, table, range, each);
        }
    }

    /// The first entry of the range that is in use.
    #[inline]
    pub(crate) fn first_taken(&self, table: T::Addr, level: u32, mut range: Range<usize>) -> Option<usize> {
        if slots::is_zero::<F, T>(&self.tables, table, range.clone()) {
            return None;
        }
        range.find(|&i| F::decode(level, self.load(table, i)) != Entry::Invalid)
    }

    /// The table at `level` that translates `at`, made if need be, and whether it is blank: just made, and not linked
    /// yet. Then [`link_table`](Self::link_table) once it is filled.
    #[inline]
    pub(crate) fn table_for(&mut self, at: u64, level: u32) -> Result<(T::Addr, bool), Error> {
        let known = self.cursor.level == level && same_table::<F>(at, self.cursor.at, level);
        let blank = !known && self.move_cursor(at, level)?;
        Ok((self.cursor.path[level as usize], blank))
    }

    #[inline(never)] // once per table
    fn move_cursor(&mut self, at: u64, level: u32) -> Result<bool, Error> {
        let mut blank = false;
        let mut l = self.cursor.common_level::<F>(at).min(level);
        while l < level {
            let (table, i) = (self.cursor.path[l as usize], index::<F>(at, l));
            let next = match F::decode(l, self.load(table, i)) {
                Entry::Table(next) => T::Addr::new(next),
                Entry::Leaf { .. } => return Err(Error::Overlap { at: NamedAddr::of(I::new(at)) }),
                Entry::Invalid => {
                    if self.made.try_reserve(1).is_err() {
                        return Err(Error::NoTables { at: NamedAddr::of(I::new(at)) });
                    }
                    if l + 1 == level {
                        blank = true;
                        self.allocate_unzeroed(at)?
                    } else {
                        let next = self.allocate(at)?;
                        (self.cursor.level, self.cursor.at) = (l, at);
                        match self.install_table(at, l, next)? {
                            None => next,
                            Some(other) => {
                                self.tables.free(next);
                                other
                            }
                        }
                    }
                }
            };
            l += 1;
            self.cursor.path[l as usize] = next;
        }
        (self.cursor.level, self.cursor.at) = (level, at);
        Ok(blank)
    }

    /// Links a table below the cursor's at `level`. `None` gives it back when another handle was first, with what that
    /// has linked.
    fn install_table(&mut self, at: u64, level: u32, next: T::Addr) -> Result<Option<T::Addr>, Error> {
        let (table, i) = (self.cursor.path[level as usize], index::<F>(at, level));
        match slots::install::<F, T>(&mut self.tables, table, i, F::encode_table(level, next.bits())) {
            Ok(()) => {
                self.linked = self.linked.wrapping_add(1);
                // There is room (`move_cursor`), but without `alloc`: then the table stays should this call fail.
                list::push(&mut self.made, I::new(at & !(F::GRANULE.bytes() - 1) | u64::from(level + 1)));
                Ok(None)
            }
            Err(there) => match F::decode(level, there) {
                // No other call may map here, so no leaf is there.
                Entry::Table(other) => Ok(Some(T::Addr::new(other))),
                _ => {
                    self.tables.free(next);
                    Err(Error::Overlap { at: NamedAddr::of(I::new(at)) })
                }
            },
        }
    }

    /// Links the blank table at `level` that the cursor is at, in which `written` entries from that of `at` on are
    /// valid; without any, it is freed.
    #[inline(never)] // once per table
    pub(crate) fn link_table(&mut self, at: u64, level: u32, written: usize) -> Result<(), Error> {
        let next = self.cursor.path[level as usize];
        self.cursor.level = level - 1;
        if written == 0 {
            self.tables.free(next);
            return Ok(());
        }
        let first = index::<F>(at, level);
        let range = first..first + written;
        if F::ENTRY_BYTES == 8 {
            self.tables.zero_but(next, range.clone());
        }
        if let Some(other) = self.install_table(at, level - 1, next)? {
            // Copy the written entries to the table of the handle that was first.
            if let Some(taken) = self.first_taken(other, level, range.clone()) {
                self.tables.free(next);
                let at = at + (taken - first) as u64 * page_size::<F>(level).bytes();
                return Err(Error::Overlap { at: NamedAddr::of(I::new(at)) });
            }
            for i in range.clone() {
                let entry = self.load(next, i);
                slots::write::<F, T>(&mut self.tables, other, i, entry);
            }
            slots::clean::<F, T>(&mut self.tables, other, range);
            self.tables.free(next);
            self.cursor.path[level as usize] = other;
        }
        self.cursor.level = level;
        Ok(())
    }

    /// The lowest address of this page that is mapped. (The entry in use may be a table with only its last page mapped,
    /// or an empty one.)
    #[cold]
    fn first_mapped(&self, at: u64, page: u64) -> Option<I> {
        self.runs(Span::new(I::new(at), page)?).next().map(|run| run.at)
    }

    /// Takes back `first..next`, all of it free before this call, and the tables that this call made.
    #[cold]
    fn undo(&mut self, first: u64, next: u64) {
        self.cursor.forget(self.root_level());
        if next > first {
            self.clear_span(first, next - 1, Detach::Nothing, &mut List::new(), None);
        }
        while let Some(made) = self.made.pop().map(I::bits) {
            let (at, level) = (made & !(F::GRANULE.bytes() - 1), made as u32 & (F::GRANULE.bytes() - 1) as u32);
            let size = page_size::<F>(level - 1).bytes();
            let start = at & !(size - 1);
            if T::SHARED && !(start >= first && start + size <= next) {
                continue; // a neighbour may be using it
            }
            let mut above = self.root;
            for l in self.root_level()..level {
                let i = index::<F>(at, l);
                let Entry::Table(next) = F::decode(l, self.load(above, i)) else { break };
                let table = T::Addr::new(next);
                if l + 1 == level && self.is_empty(table, level) {
                    self.store(above, i, 0);
                    self.linked = self.linked.wrapping_sub(1);
                    self.tables.free(table);
                }
                above = table;
            }
        }
    }
}

/// Output that continues: whole granules below 2^`OUTPUT_BITS`.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) out: u64,
    pub(crate) len: u64,
}

impl Extent {
    const EMPTY: Self = Self { out: 0, len: 0 };

    #[inline]
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.out += bytes;
        self.len -= bytes;
    }
}

/// Why a table was not filled to its end.
enum Stop<O> {
    /// This entry is in use.
    Taken(usize),
    /// A segment that cannot be mapped.
    BadSegment(Segment<O>),
}

/// True when a group may start at entry `i` of the last level with a page at `out`.
#[inline]
fn may_start_group<F: Format>(i: usize, out: u64) -> bool {
    let group = 1usize << group_bits::<F>(F::LEVELS - 1);
    group > 1 && i.is_multiple_of(group) && out & (second_size::<F>() - 1) == 0
}

/// Pages of the extent that can be stored in a row from entry `i` of the last level on: up to where a group may start.
#[inline]
fn run_of_pages<F: Format>(i: usize, now: Extent) -> usize {
    let group = 1usize << group_bits::<F>(F::LEVELS - 1);
    let pages = (now.len >> shift::<F>(F::LEVELS - 1)) as usize;
    let meets = group > 1 && (i ^ (now.out >> shift::<F>(F::LEVELS - 1)) as usize).is_multiple_of(group);
    if meets { pages.min(group - i % group) } else { pages }
}

/// The bits that are 0 in the address of every page that an entry can hold.
#[inline]
const fn not_a_page<F: Format>() -> u64 {
    !((1 << F::OUTPUT_BITS) - F::GRANULE.bytes())
}

/// The segments, checked one by one, and what has been taken from them but not used.
pub(crate) struct Source<F, O, S> {
    /// The rest of the list; `None` once it has reported its end.
    segments: Option<S>,
    /// The extent in work.
    pub(crate) now: Extent,
    /// A segment that was looked at and does not continue `now`.
    pending: Extent,
    /// The size of the largest leaf.
    limit: u64,
    kinds: PhantomData<(F, O)>,
}

impl<F: Format, O: Address, S: Iterator<Item = Segment<O>>> Source<F, O, S> {
    #[inline]
    pub(crate) fn new(segments: S) -> Self {
        Self {
            segments: Some(segments),
            now: Extent::EMPTY,
            pending: Extent::EMPTY,
            limit: u64::MAX,
            kinds: PhantomData,
        }
    }

    /// Sees to it that there is something in `now`; false at the end.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<bool, Error> {
        self.next_extent().map_err(bad_segment::<F, O>)
    }

    /// The same, and a segment that cannot be mapped as an error.
    #[inline]
    fn next_extent(&mut self) -> Result<bool, Segment<O>> {
        if self.now.len == 0 {
            match self.take() {
                Some(extent) => self.now = extent?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The leaf that starts with `now` at `at`, of these sizes.
    #[inline]
    pub(crate) fn leaf_kind(&mut self, at: u64, sizes: PageSizes) -> Result<Kind, Error> {
        if (at | self.now.out) & (second_size::<F>() - 1) != 0 {
            return Ok(Kind::single(F::LEVELS - 1)); // decided without looking ahead
        }
        while self.pending.len == 0 {
            match self.take() {
                Some(Ok(extent)) if extent.out == self.now.out + self.now.len => self.now.len += extent.len,
                Some(Ok(extent)) => self.pending = extent,
                Some(Err(segment)) => return Err(bad_segment::<F, O>(segment)),
                None => break,
            }
        }
        Ok(leaf_kind::<F>(at | self.now.out, self.now.len, self.limit, sizes))
    }

    /// The next segment as it is.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Result<Extent, Segment<O>>> {
        if self.pending.len != 0 {
            return Some(Ok(replace(&mut self.pending, Extent::EMPTY)));
        }
        let next = self.segments.as_mut()?.next();
        if next.is_none() {
            self.segments = None;
        }
        self.admit(next?)
    }

    /// The extent that begins with a segment just taken from the list. `None` when it, and all behind it, are empty.
    #[inline(always)]
    fn admit(&mut self, segment: Segment<O>) -> Option<Result<Extent, Segment<O>>> {
        match checked::<F, O>(segment) {
            Ok(extent) => Some(Ok(extent)),
            Err(segment) => self.join(segment),
        }
    }

    /// Joins a segment, which cannot be mapped alone, with those that continue it until whole granules are there, as a
    /// host with smaller pages lists them. Empty segments are skipped.
    #[cold]
    #[inline(never)]
    fn join(&mut self, mut joined: Segment<O>) -> Option<Result<Extent, Segment<O>>> {
        loop {
            let (start, whole) = (joined.addr.bits(), 1u64 << F::OUTPUT_BITS);
            if joined.len != 0 {
                if let Ok(extent) = checked::<F, O>(joined) {
                    return Some(Ok(extent));
                }
                let hopeless = start & (F::GRANULE.bytes() - 1) != 0 || start >= whole || joined.len > whole - start;
                if hopeless || joined.len & (F::GRANULE.bytes() - 1) == 0 {
                    return Some(Err(joined));
                }
            }
            match self.segments.as_mut().and_then(Iterator::next) {
                Some(Segment { len: 0, .. }) => {}
                Some(next) if joined.len == 0 => joined = next,
                // Neither sum is beyond 2^64: the first is below `whole`, and the other is checked.
                Some(next) if next.addr.bits() == start + joined.len => match joined.len.checked_add(next.len) {
                    Some(len) => joined.len = len,
                    None => return Some(Err(next)),
                },
                _ if joined.len == 0 => {
                    self.segments = None;
                    return None;
                }
                _ => return Some(Err(joined)),
            }
        }
    }

    /// Puts pages into entries of the last level, of which the first has index `first`, until they are full, the source
    /// is at its end, or a group may start (other than with the first page, if that was `decided`). Gives the number of
    /// entries written.
    #[inline]
    fn fill(
        &mut self,
        entries: &mut [u64],
        first: usize,
        decided: bool,
        template: u64,
        blank: bool,
    ) -> (usize, Option<Stop<O>>) {
        let end = first + entries.len();
        let mut rest = entries;
        let stop = loop {
            // No look-ahead here: whether segments continue each other makes no difference within this table.
            if self.now.len == 0 {
                if self.pending.len != 0 {
                    self.now = replace(&mut self.pending, Extent::EMPTY);
                } else {
                    let next = match blank {
                        true => self.fill_short::<true>(&mut rest, end, template),
                        false => self.fill_short::<false>(&mut rest, end, template),
                    };
                    match next.and_then(|segment| self.admit(segment)) {
                        None => break None,
                        Some(Ok(extent)) => self.now = extent,
                        Some(Err(segment)) => break Some(Stop::BadSegment(segment)),
                    }
                }
            }
            let i = end - rest.len();
            if may_start_group::<F>(i, self.now.out) && !(decided && i == first) {
                break None; // decided by the caller, with a look-ahead
            }
            let count = run_of_pages::<F>(i, self.now).min(rest.len());
            if let Err(free) = write_pages::<F>(&mut rest[..count], self.now.out, template, blank) {
                break Some(Stop::Taken(i + free));
            }
            self.now.skip((count as u64) << shift::<F>(F::LEVELS - 1));
            rest = &mut rest[count..];
            if rest.is_empty() {
                break None;
            }
        };
        (end - rest.len() - first, stop)
    }

    /// Puts short segments into entries, of which the last has index `end - 1`, straight from the list: the loop that
    /// counts. Gives a segment that is something else, or that was better looked at more closely; `None` when the
    /// entries are full or the list is at its end.
    #[inline(never)] // with all that surrounds it, the loop would not fit into the registers
    fn fill_short<const BLANK: bool>(
        &mut self,
        rest: &mut &mut [u64],
        end: usize,
        template: u64,
    ) -> Option<Segment<O>> {
        let page = Kind::single(F::LEVELS - 1);
        let mut segments = self.segments.take()?;
        let mut entries = take(rest);
        let other = loop {
            // Single pages are most of most lists: several to a turn.
            let next = 'turns: loop {
                let i = end - entries.len();
                let Some(some) = entries.first_chunk_mut::<STEP>() else {
                    break if i == end { None } else { segments.next() };
                };
                for k in 0..STEP {
                    match segments.next() {
                        Some(Segment { addr, len })
                            if len == F::GRANULE.bytes()
                                && addr.bits() & not_a_page::<F>() == 0
                                && (BLANK || some[k] == 0)
                                && !may_start_group::<F>(i + k, addr.bits()) =>
                        {
                            some[k] = template | encode_output::<F>(page, addr.bits());
                        }
                        other => {
                            entries = &mut entries[k..];
                            break 'turns other;
                        }
                    }
                }
                entries = &mut entries[STEP..];
            };
            let Some(segment) = next else { break None };
            let Ok(extent) = checked::<F, O>(segment) else { break Some(segment) };
            let i = end - entries.len();
            let count = (extent.len >> shift::<F>(page.level)) as usize;
            let simple =
                count <= entries.len() && !may_start_group::<F>(i, extent.out) && run_of_pages::<F>(i, extent) == count;
            if !simple || write_pages::<F>(&mut entries[..count], extent.out, template, BLANK).is_err() {
                break Some(segment);
            }
            entries = &mut entries[count..];
        };
        if other.is_some() || entries.is_empty() {
            self.segments = Some(segments);
        }
        *rest = entries;
        other
    }
}

/// Puts pages that continue each other into entries if all of these are free; else gives the index of the first that is
/// not, and writes nothing.
#[inline]
fn write_pages<F: Format>(entries: &mut [u64], out: u64, template: u64, blank: bool) -> Result<(), usize> {
    let kind = Kind::single(F::LEVELS - 1);
    if entries.len() > LONG {
        return write_many::<F>(entries, kind, out, template, blank);
    }
    if !blank && let Some(taken) = entries.iter().position(|&entry| entry != 0 && is_taken::<F>(entry, kind.level)) {
        return Err(taken);
    }
    let mut out = out;
    for entry in entries {
        *entry = template | encode_output::<F>(kind, out);
        out += F::GRANULE.bytes();
    }
    Ok(())
}

/// The same with one question for all of them, which pays from some length on.
#[inline(never)]
fn write_many<F: Format>(entries: &mut [u64], kind: Kind, out: u64, template: u64, blank: bool) -> Result<(), usize> {
    if !blank
        && entries.iter().fold(0, |all, entry| all | entry) != 0
        && let Some(taken) = entries.iter().position(|&entry| is_taken::<F>(entry, kind.level))
    {
        return Err(taken);
    }
    write_entries::<F>(entries, kind, out, template);
    Ok(())
}

/// Writes entries of one kind that map from `out` on.
#[inline]
fn write_entries<F: Format>(entries: &mut [u64], kind: Kind, out: u64, template: u64) {
    let page = page_size::<F>(kind.level).bytes();
    let entry_at = |k: u64| template | encode_output::<F>(kind, out + k * page);
    let last = (entries.len() as u64).saturating_sub(1);
    let (first, step) = (entry_at(0), entry_at(1).wrapping_sub(entry_at(0)));
    if entry_at(last) == first.wrapping_add(last.wrapping_mul(step)) {
        // The bits of the address that change are contiguous in the entry: entries count up as the address does.
        let mut next = first;
        for entry in entries {
            *entry = next;
            next = next.wrapping_add(step);
        }
    } else {
        (0..).zip(entries).for_each(|(k, entry)| *entry = entry_at(k));
    }
}

#[cold]
fn is_taken<F: Format>(entry: u64, level: u32) -> bool {
    F::decode(level, entry) != Entry::Invalid
}

/// The extent of a segment that can be mapped, or the segment itself.
#[inline]
pub(crate) fn checked<F: Format, O: Address>(segment: Segment<O>) -> Result<Extent, Segment<O>> {
    let (out, len) = (segment.addr.bits(), segment.len);
    let limit = 1u64 << F::OUTPUT_BITS;
    let good = (out | len) & (F::GRANULE.bytes() - 1) == 0 && len != 0 && out < limit && len <= limit - out;
    if good { Ok(Extent { out, len }) } else { Err(segment) }
}

#[cold]
pub(crate) fn bad_segment<F: Format, O: Address>(segment: Segment<O>) -> Error {
    let (at, len) = (NamedAddr::of(segment.addr), segment.len);
    if len == 0 {
        Error::Empty { at }
    } else if (segment.addr.bits() | len) & (F::GRANULE.bytes() - 1) != 0 {
        Error::Misaligned { at, len, granule: F::GRANULE }
    } else {
        Error::OutputRange { at, len, bits: F::OUTPUT_BITS }
    }
}

/// `beyond` is the end of the input range, here and below.
pub(crate) fn check_start<F: Format, I: Address>(at: I, beyond: u64) -> Result<(), Error> {
    if !at.is_aligned(F::GRANULE) {
        return Err(Error::Misaligned { at: NamedAddr::of(at), len: 0, granule: F::GRANULE });
    }
    if at.bits() > beyond {
        return Err(Error::InputRange { at: NamedAddr::of(at), len: 0, bits: beyond.ilog2() });
    }
    Ok(())
}

#[inline]
pub(crate) fn check_room<I: Address>(at: u64, len: u64, beyond: u64) -> Result<(), Error> {
    if len > beyond - at {
        return Err(Error::InputRange { at: NamedAddr::of(I::new(at)), len, bits: beyond.ilog2() });
    }
    Ok(())
}
