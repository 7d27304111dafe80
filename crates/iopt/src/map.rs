//! Mapping: a whole scatter list in one call.
//!
//! The walk from the root happens once per table, not once per page. Within one table all leaves have one size (a
//! larger one can only start where the table does), so the loop that fills it pulls page after page out of the list,
//! checks that the entry is free, and writes it.

use core::iter::{Fuse, once};
use core::marker::PhantomData;

use dmalane_addr::{Access, Address, Segment, Span};

use crate::format::{MAX_LEVELS, entries, index, input_len, leaf_level, page_size, same_table};
use crate::{Entry, Error, Format, PageTable, Place, Tables};

/// The tables down to where the last leaf was written, so that the next table is found from the nearest common one.
struct Cursor<A> {
    path: [A; MAX_LEVELS],
    /// The deepest level of `path` that is known.
    level: u32,
    /// The address that `path` leads to.
    at: u64,
}

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Maps `len` bytes from `at` to `to`, by the largest pages that alignment and length allow.
    ///
    /// # Errors
    /// As [`map_sg`](Self::map_sg); the table is then as it was.
    pub fn map(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        self.map_sg(at, once(Segment { addr: to, len }), access).map(drop)
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
        if !F::supports(access) {
            return Err(Error::Unsupported { access, format: F::NAME });
        }
        check_start::<F, I>(at)?;
        let first = at.bits();
        let mut next = first;
        match self.map_extents(&mut next, Extents::<F, O, _>::new(segments.into_iter()), access) {
            Ok(()) => Ok(next - first),
            Err(e) => {
                self.undo(first, next);
                Err(e)
            }
        }
    }

    /// Maps extents at `next`, which moves along and always says how far the call has come.
    fn map_extents(
        &mut self,
        next: &mut u64,
        mut extents: Extents<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
    ) -> Result<(), Error> {
        let mut cursor = Cursor { path: [self.root; MAX_LEVELS], level: 0, at: *next };
        let mut extent = Extent { out: 0, len: 0 };
        loop {
            if extent.len == 0 {
                let Some(another) = extents.next()? else { return Ok(()) };
                extent = another;
            }
            check_room::<F, I>(*next, extent.len)?;
            let level = leaf_level::<F>(*next | extent.out, extent.len);
            let table = self.table_for(&mut cursor, *next, level)?;
            // The last level is by far the most frequent; as a constant it leaves no per-level work in the loop.
            let last = F::LEVELS - 1;
            if level == last {
                self.fill(table, last, next, &mut extent, &mut extents, access)?;
            } else {
                self.fill(table, level, next, &mut extent, &mut extents, access)?;
            }
        }
    }

    /// Fills one table from `next` on with leaves of its level, to its end or as long as they fit.
    #[inline(always)]
    fn fill(
        &mut self,
        table: T::Addr,
        level: u32,
        next: &mut u64,
        extent: &mut Extent,
        extents: &mut Extents<F, O, impl Iterator<Item = Segment<O>>>,
        access: Access,
    ) -> Result<(), Error> {
        let at = *next;
        let page = page_size::<F>(level).bytes();
        let range = index::<F>(at, level)..entries::<F>();
        let mut error = None;
        let mut taken = false;
        let mut now = *extent;
        let done = self.tables.update(table, range, |old| {
            if now.len < page || now.out & (page - 1) != 0 {
                if now.len > 0 {
                    return None; // the rest wants smaller pages
                }
                match extents.next() {
                    Ok(Some(another)) => now = another,
                    Ok(None) => return None,
                    Err(e) => {
                        error = Some(e);
                        return None;
                    }
                }
                if now.len < page || now.out & (page - 1) != 0 {
                    return None;
                }
            }
            if F::decode(level, old) != Entry::Invalid {
                taken = true;
                return None;
            }
            let entry = F::encode_leaf(level, now.out, access);
            now.skip(page);
            Some(entry)
        });
        *extent = now;
        *next = at + page * done as u64;
        self.leaves[level as usize] += done as u64;
        match error {
            Some(e) => Err(e),
            None if taken => Err(self.overlap(*next, page)),
            None => Ok(()),
        }
    }

    /// The table at `level` that translates `at`, made if need be.
    fn table_for(&mut self, cursor: &mut Cursor<T::Addr>, at: u64, level: u32) -> Result<T::Addr, Error> {
        let mut l = cursor.level.min(level);
        while !same_table::<F>(at, cursor.at, l) {
            l -= 1;
        }
        while l < level {
            let (table, i) = (cursor.path[l as usize], index::<F>(at, l));
            let next = match F::decode(l, self.tables.load(table, i)) {
                Entry::Table(next) => T::Addr::new(next),
                Entry::Leaf { .. } => return Err(Error::Overlap { at: Place::of(I::new(at)) }),
                Entry::Invalid => {
                    let next = self.allocate(at)?;
                    self.tables.store(table, i, F::encode_table(next.bits()));
                    next
                }
            };
            l += 1;
            cursor.path[l as usize] = next;
        }
        (cursor.level, cursor.at) = (level, at);
        Ok(cursor.path[level as usize])
    }

    /// The error for an entry at `at` that is in use.
    #[cold]
    fn overlap(&self, at: u64, page: u64) -> Error {
        // The entry may be a table with only its last page mapped: name that page.
        let taken = Span::new(I::new(at), page).and_then(|span| self.runs(span).next());
        Error::Overlap { at: Place::of(taken.map_or(I::new(at), |run| run.at)) }
    }

    /// Takes back `first..next`, and the tables made for `next` that hold nothing yet.
    #[cold]
    fn undo(&mut self, first: u64, next: u64) {
        self.prune(next.min(input_len::<F>() - 1));
        if next > first {
            // All of it was free before this call, so every table that becomes empty is one of ours.
            let (_, tables) = self.clear_span(first, next - 1);
            for table in tables {
                self.tables.free(table);
            }
        }
    }

    /// Frees the empty tables on the path to `at`.
    fn prune(&mut self, at: u64) {
        let mut path = [self.root; MAX_LEVELS];
        let mut level = 0;
        while let Entry::Table(next) = F::decode(level, self.tables.load(path[level as usize], index::<F>(at, level))) {
            level += 1;
            path[level as usize] = T::Addr::new(next);
        }
        while level > 0 && self.is_empty(path[level as usize], level) {
            self.tables.free(path[level as usize]);
            level -= 1;
            self.tables.store(path[level as usize], index::<F>(at, level), 0);
        }
    }
}

/// Output that continues across segments: whole granules below 2^`OUTPUT_BITS`.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) out: u64,
    pub(crate) len: u64,
}

impl Extent {
    #[inline]
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.out += bytes;
        self.len -= bytes;
    }
}

/// Checks segments and merges those that continue each other.
pub(crate) struct Extents<F, O, S> {
    segments: Fuse<S>,
    /// Looked at, not given out yet. No bytes at the start and at the end.
    pending: Extent,
    kinds: PhantomData<(F, O)>,
}

impl<F: Format, O: Address, S: Iterator<Item = Segment<O>>> Extents<F, O, S> {
    pub(crate) fn new(segments: S) -> Self {
        Self { segments: segments.fuse(), pending: Extent { out: 0, len: 0 }, kinds: PhantomData }
    }

    /// The next extent, at least one granule long; `None` at the end. Not to be asked again after an error.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<Option<Extent>, Error> {
        let mut extent = self.pending;
        for segment in &mut self.segments {
            let (out, len) = (segment.addr.bits(), segment.len);
            let limit = 1u64 << F::OUTPUT_BITS;
            let good = (out | len) & (F::GRANULE.bytes() - 1) == 0 && len != 0 && out < limit && len <= limit - out;
            if !good {
                return Err(bad_segment::<F, O>(segment));
            }
            if out == extent.out + extent.len {
                extent.len += len; // at most the limit: it ends where the segment ends
            } else {
                self.pending = Extent { out, len };
                if extent.len > 0 {
                    return Ok(Some(extent));
                }
                extent = self.pending;
            }
        }
        self.pending.len = 0;
        Ok((extent.len > 0).then_some(extent))
    }
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
