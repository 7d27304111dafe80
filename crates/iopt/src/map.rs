//! Mapping: a whole scatter list in one call.
//!
//! The walk from the root happens once per table, not once per page. Within one table all leaves have one size (a
//! larger one can only start where the table does, but for a group), so the loop that fills it pulls page after page out of the list,
//! checks that the entry is free, and writes it.

use core::iter::{Fuse, empty};
use core::marker::PhantomData;

use dmalane_addr::{Access, Address, PageSize, Segment, Span};

use crate::format::{
    Kind, MAX_LEVELS, entries, group_bits, index, input_len, leaf_kind, page_size, same_table, second_size, shift,
};
use crate::unmap::Detach;
use crate::{Entry, Error, Format, PageTable, Place, Tables, slots};

/// The tables down to where the last leaf was written, so that the next table is found from the nearest common one. Kept
/// from call to call, and forgotten whenever tables leave the tree.
#[derive(Debug)]
pub(crate) struct Cursor<A> {
    path: [A; MAX_LEVELS],
    /// The deepest level of `path` that is known.
    level: u32,
    /// The address that `path` leads to.
    at: u64,
}

impl<A: Copy> Cursor<A> {
    /// Knows nothing but the root, which never changes.
    pub(crate) fn new(root: A) -> Self {
        Self { path: [root; MAX_LEVELS], level: 0, at: 0 }
    }

    /// Back to that.
    pub(crate) fn forget(&mut self) {
        self.level = 0;
    }
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Maps `len` bytes from `at` to `to`, by the largest pages that alignment and length allow.
    ///
    /// # Errors
    /// As [`map_sg`](Self::map_sg); the table is then as it was.
    pub fn map(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        // Not by way of a list of one: this is the call that is made for every page of somebody else's loop.
        let now = checked::<F, O>(Segment { addr: to, len }).map_err(bad_segment::<F, O>)?;
        self.map_source(at, Source { now, ..Source::new(empty()) }, access, |_| Ok(())).map(drop)
    }

    /// Maps `count` pages of `size` that follow each other in both spaces, each by a leaf of exactly that size: they can
    /// be unmapped one by one and nothing is split.
    ///
    /// # Errors
    /// [`Error::PageSize`] for a size that has no leaf; [`Error::Misaligned`] when an address is not a multiple of it;
    /// otherwise as [`map_sg`](Self::map_sg). The table is then as it was.
    pub fn map_pages(&mut self, at: I, to: O, size: PageSize, count: u64, access: Access) -> Result<(), Error> {
        if !F::PAGE_SIZES.contains(size) {
            return Err(Error::PageSize { size, format: F::NAME });
        }
        for (aligned, at) in [(at.is_aligned(size), Place::of(at)), (to.is_aligned(size), Place::of(to))] {
            if !aligned {
                return Err(Error::Misaligned { at, len: 0, granule: size });
            }
        }
        // A length beyond 64 bits is beyond the input range too.
        let len = count.checked_mul(size.bytes()).unwrap_or(!(size.bytes() - 1));
        let now = checked::<F, O>(Segment { addr: to, len }).map_err(bad_segment::<F, O>)?;
        self.map_source(at, Source { now, limit: size.bytes(), ..Source::new(empty()) }, access, |_| Ok(())).map(drop)
    }

    /// Maps a list of segments one after another from `at` on, and gives the number of bytes mapped. An empty list maps
    /// nothing.
    ///
    /// Segments that continue each other are mapped as one, so a leaf may span several. Each leaf is the largest that the
    /// alignment of both addresses and the rest of the segment allow.
    ///
    /// New mappings need no invalidation, provided that the device does not cache faults.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::Empty`] (a segment of no bytes), [`Error::InputRange`], [`Error::OutputRange`],
    /// [`Error::Unsupported`], [`Error::Overlap`] with the lowest address that is taken, [`Error::NoTables`] and
    /// [`Error::TableAddress`]: whichever comes first on the way through the list. After any of them the table is as it
    /// was. Tables that were linked for a moment are freed at once: where a device may stray into the span *during* the
    /// call, invalidate the span after a failure.
    pub fn map_sg(
        &mut self,
        at: I,
        segments: impl IntoIterator<Item = Segment<O>>,
        access: Access,
    ) -> Result<u64, Error> {
        self.map_source(at, Source::new(segments.into_iter()), access, |_| Ok(()))
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
        check_start::<F, I>(at)?;
        if T::SHARED {
            self.cursor.forget(); // another handle may have unlinked what it knows
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

    /// Writes the leaves of a source at `next`, which moves along and always says how far the call has come.
    #[inline]
    fn fill(
        &mut self,
        next: &mut u64,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
    ) -> Result<(), Error> {
        // Where an empty table is in the way of a larger leaf: the largest that goes there, and how far.
        let mut below = (u64::MAX, *next);
        let limit = source.limit;
        while source.next()? {
            let at = *next;
            check_room::<F, I>(at, source.now.len)?;
            source.limit = if at < below.1 { limit.min(below.0) } else { limit };
            let kind = source.leaf_kind(at)?;
            let level = kind.level;
            let table = self.table_for(at, level)?;
            let (done, stop) = if kind == Kind::single(F::LEVELS - 1) {
                self.fill_pages(table, at, source, access)
            } else {
                self.fill_blocks(table, kind, at, &mut source.now, access)
            };
            self.leaves[kind.slot()] += (done / kind.entries::<F>()) as u64;
            *next = at + ((done as u64) << shift::<F>(level));
            match stop {
                None => {}
                Some(Stop::Taken(taken)) => {
                    let page = page_size::<F>(level).bytes();
                    if let Some(taken) = self.first_mapped(taken, page) {
                        return Err(Error::Overlap { at: Place::of(taken) });
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

    /// Fills a table of the last level from `at` on, to its end or that of the source. This is the loop that counts.
    /// Gives the number of pages written.
    #[inline]
    fn fill_pages(
        &mut self,
        table: T::Addr,
        at: u64,
        source: &mut Source<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
    ) -> (usize, Option<Stop<O>>) {
        let level = F::LEVELS - 1;
        let page = F::GRANULE.bytes();
        let mut stop = None;
        let mut now = source.now;
        let mut here = at;
        let done = slots::update::<F, T>(&mut self.tables, table, index::<F>(at, level)..entries::<F>(level), |old| {
            if now.len == 0 {
                // No look-ahead here: whether segments continue each other makes no difference within this table.
                match source.take() {
                    Some(Ok(another)) => now = another,
                    Some(Err(segment)) => {
                        stop = Some(Stop::BadSegment(segment));
                        return None;
                    }
                    None => return None,
                }
            }
            if old != 0 && F::decode(level, old) != Entry::Invalid {
                stop = Some(Stop::Taken(at));
                return None;
            }
            if group_bits::<F>(level) > 0 {
                // A group may start here: that is decided with a look ahead.
                if here != at && (here | now.out) & (second_size::<F>() - 1) == 0 {
                    return None;
                }
                here += page;
            }
            let entry = F::encode_leaf(level, now.out, access);
            now.skip(page);
            Some(entry)
        });
        source.now = now;
        if let Some(Stop::Taken(at)) = &mut stop {
            *at += done as u64 * page;
        }
        (done, stop)
    }

    /// Fills a table with as many leaves of this kind as fit and the extent has. Gives the number of entries written.
    fn fill_blocks(
        &mut self,
        table: T::Addr,
        kind: Kind,
        at: u64,
        now: &mut Extent,
        access: Access,
    ) -> (usize, Option<Stop<O>>) {
        let level = kind.level;
        let page = page_size::<F>(level).bytes();
        let first = index::<F>(at, level);
        let group = 1usize << group_bits::<F>(level);
        let mut count = (now.len / page).min((entries::<F>(level) - first) as u64) as usize;
        if kind.group {
            count &= !(group - 1);
        } else if group > 1 {
            count = count.min(group - first % group); // where the next group may start, look again
        }
        let mut stop = None;
        let taken = |&i: &usize| F::decode(level, self.load(table, i)) != Entry::Invalid;
        if let Some(taken) = (first..first + count).find(taken) {
            stop = Some(Stop::Taken(at + (taken - first) as u64 * page));
            count = taken - first;
            if kind.group {
                count &= !(group - 1); // all of a group or nothing of it
            }
        }
        let done = slots::update::<F, T>(&mut self.tables, table, first..first + count, |_| {
            let encode = if kind.group { F::encode_member } else { F::encode_leaf };
            let entry = encode(level, now.out, access);
            now.skip(page);
            Some(entry)
        });
        (done, stop)
    }

    /// The table at `level` that translates `at`, made if need be.
    #[inline]
    fn table_for(&mut self, at: u64, level: u32) -> Result<T::Addr, Error> {
        if self.cursor.level != level || !same_table::<F>(at, self.cursor.at, level) {
            self.move_cursor(at, level)?;
        }
        Ok(self.cursor.path[level as usize])
    }

    #[inline(never)] // once per table
    fn move_cursor(&mut self, at: u64, level: u32) -> Result<(), Error> {
        let mut l = self.cursor.level.min(level);
        while !same_table::<F>(at, self.cursor.at, l) {
            l -= 1;
        }
        while l < level {
            let (table, i) = (self.cursor.path[l as usize], index::<F>(at, l));
            let next = match F::decode(l, self.load(table, i)) {
                Entry::Table(next) => T::Addr::new(next),
                Entry::Leaf { .. } => return Err(Error::Overlap { at: Place::of(I::new(at)) }),
                Entry::Invalid => {
                    if self.made.try_reserve(1).is_err() {
                        return Err(Error::NoTables { at: Place::of(I::new(at)) });
                    }
                    let next = self.allocate(at)?;
                    match slots::install::<F, T>(&mut self.tables, table, i, F::encode_table(l, next.bits())) {
                        Ok(()) => {
                            self.made.push(at & !(F::GRANULE.bytes() - 1) | u64::from(l + 1));
                            next
                        }
                        Err(there) => {
                            // Another handle was first. Its entry is a table: what we map is ours, so no leaf is there.
                            self.tables.free(next);
                            match F::decode(l, there) {
                                Entry::Table(next) => T::Addr::new(next),
                                _ => return Err(Error::Overlap { at: Place::of(I::new(at)) }),
                            }
                        }
                    }
                }
            };
            l += 1;
            self.cursor.path[l as usize] = next;
        }
        (self.cursor.level, self.cursor.at) = (level, at);
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
        self.cursor.forget();
        if next > first {
            self.clear_span(first, next - 1, Detach::Nothing);
        }
        while let Some(made) = self.made.pop() {
            let (at, level) = (made & !(F::GRANULE.bytes() - 1), made as u32 & (F::GRANULE.bytes() - 1) as u32);
            let size = page_size::<F>(level - 1).bytes();
            let start = at & !(size - 1);
            if T::SHARED && !(start >= first && start + size <= next) {
                continue; // a neighbour may be using it
            }
            let mut above = self.root;
            for l in 0..level {
                let i = index::<F>(at, l);
                let Entry::Table(next) = F::decode(l, self.load(above, i)) else { break };
                let table = T::Addr::new(next);
                if l + 1 == level && self.is_empty(table, level) {
                    self.store(above, i, 0);
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

/// Why a table was not filled as far as it could be.
enum Stop<O> {
    /// The entry for this address is in use.
    Taken(u64),
    /// A segment that cannot be mapped.
    BadSegment(Segment<O>),
}

/// The segments, checked one by one, and what has been taken from them but not used.
pub(crate) struct Source<F, O, S> {
    segments: Fuse<S>,
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
            segments: segments.fuse(),
            now: Extent::EMPTY,
            pending: Extent::EMPTY,
            limit: u64::MAX,
            kinds: PhantomData,
        }
    }

    /// Sees to it that there is something in `now`; false at the end.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<bool, Error> {
        if self.now.len == 0 {
            match self.take() {
                Some(Ok(extent)) => self.now = extent,
                Some(Err(segment)) => return Err(bad_segment::<F, O>(segment)),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The leaf that starts with `now` at `at`.
    #[inline]
    pub(crate) fn leaf_kind(&mut self, at: u64) -> Result<Kind, Error> {
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
        Ok(leaf_kind::<F>(at | self.now.out, self.now.len, self.limit))
    }

    /// The next segment as it is.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Result<Extent, Segment<O>>> {
        if self.pending.len != 0 {
            return Some(Ok(core::mem::replace(&mut self.pending, Extent::EMPTY)));
        }
        self.segments.next().map(checked::<F, O>)
    }
}

/// The extent of a segment that can be mapped, or the segment itself.
#[inline]
fn checked<F: Format, O: Address>(segment: Segment<O>) -> Result<Extent, Segment<O>> {
    let (out, len) = (segment.addr.bits(), segment.len);
    let limit = 1u64 << F::OUTPUT_BITS;
    let good = (out | len) & (F::GRANULE.bytes() - 1) == 0 && len != 0 && out < limit && len <= limit - out;
    if good { Ok(Extent { out, len }) } else { Err(segment) }
}

#[cold]
fn bad_segment<F: Format, O: Address>(segment: Segment<O>) -> Error {
    let (at, len) = (Place::of(segment.addr), segment.len);
    if len == 0 {
        Error::Empty { at }
    } else if (segment.addr.bits() | len) & (F::GRANULE.bytes() - 1) != 0 {
        Error::Misaligned { at, len, granule: F::GRANULE }
    } else {
        Error::OutputRange { at, len, bits: F::OUTPUT_BITS }
    }
}

pub(crate) fn check_start<F: Format, I: Address>(at: I) -> Result<(), Error> {
    if !at.is_aligned(F::GRANULE) {
        return Err(Error::Misaligned { at: Place::of(at), len: 0, granule: F::GRANULE });
    }
    if at.bits() > input_len::<F>() {
        return Err(Error::InputRange { at: Place::of(at), len: 0, bits: F::INPUT_BITS });
    }
    Ok(())
}

#[inline]
pub(crate) fn check_room<F: Format, I: Address>(at: u64, len: u64) -> Result<(), Error> {
    if len > input_len::<F>() - at {
        return Err(Error::InputRange { at: Place::of(I::new(at)), len, bits: F::INPUT_BITS });
    }
    Ok(())
}
