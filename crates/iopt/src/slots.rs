//! Entries of a format in the 64-bit words of table memory.
//!
//! Entries of 4 bytes lie two to a word, the one with the even index in the low half, as a little-endian device sees
//! them. Storing one rewrites its word, and so its neighbour with what it was.

use core::ops::Range;

use crate::chunks::in_chunks;
use crate::format::is_dirty;
use crate::{Format, Tables};

/// Which bits of which word an entry is, for formats with 4-byte entries.
const fn half(index: usize) -> (usize, u32) {
    (index / 2, index as u32 % 2 * 32)
}

#[inline]
pub(crate) fn load<F: Format, T: Tables>(tables: &T, table: T::Addr, index: usize) -> u64 {
    if F::ENTRY_BYTES == 8 {
        return tables.load(table, index);
    }
    let (word, shift) = half(index);
    tables.load(table, word) >> shift & u64::from(u32::MAX)
}

/// The same by a [`Tables::loader`].
#[inline(always)]
pub(crate) fn load_by<F: Format>(words: impl Fn(u64, usize) -> Option<u64>, table: u64, index: usize) -> Option<u64> {
    if F::ENTRY_BYTES == 8 {
        return words(table, index);
    }
    let (word, shift) = half(index);
    Some(words(table, word)? >> shift & u64::from(u32::MAX))
}

#[inline(always)]
pub(crate) fn store<F: Format, T: Tables>(tables: &mut T, table: T::Addr, index: usize, entry: u64) {
    write::<F, T>(tables, table, index, entry);
    clean::<F, T>(tables, table, index..index + 1);
}

/// [`Tables::install`] for entries, cleaned.
#[inline]
pub(crate) fn install<F: Format, T: Tables>(
    tables: &mut T,
    table: T::Addr,
    index: usize,
    entry: u64,
) -> Result<(), u64> {
    if F::ENTRY_BYTES == 8 {
        tables.install(table, index, entry)?;
    } else {
        write::<F, T>(tables, table, index, entry); // not shared: see PageTable::attach
    }
    clean::<F, T>(tables, table, index..index + 1);
    Ok(())
}

/// [`Tables::is_zero`] for entries.
#[inline]
pub(crate) fn is_zero<F: Format, T: Tables>(tables: &T, table: T::Addr, mut range: Range<usize>) -> bool {
    if F::ENTRY_BYTES == 8 {
        return tables.is_zero(table, range);
    }
    range.all(|index| load::<F, T>(tables, table, index) == 0)
}

/// [`Tables::clean`] for entries.
#[inline]
pub(crate) fn clean<F: Format, T: Tables>(tables: &mut T, table: T::Addr, range: Range<usize>) {
    let per_word = (8 / F::ENTRY_BYTES) as usize;
    tables.clean(table, range.start / per_word..range.end.div_ceil(per_word));
}

/// [`Tables::clear_bits`] for entries.
pub(crate) fn clear_bits<F: Format, T: Tables>(tables: &mut T, table: T::Addr, index: usize, bits: u64) -> u64 {
    if F::ENTRY_BYTES == 8 {
        return tables.clear_bits(table, index, bits);
    }
    let (word, shift) = half(index);
    tables.clear_bits(table, word, bits << shift) >> shift & u64::from(u32::MAX)
}

/// Replaces entries from the start of a range on, which will be cleaned together: each of them is taken at once, with
/// the mark that a device may set until then. True when it has written through one of the old leaves.
#[inline]
pub(crate) fn exchange<F: Format, T: Tables>(
    tables: &mut T,
    table: T::Addr,
    range: Range<usize>,
    mut new: impl FnMut() -> u64,
) -> bool {
    let mut dirty = false;
    for index in range {
        let entry = new();
        if F::DIRTY == 0 {
            write::<F, T>(tables, table, index, entry);
        } else {
            debug_assert!(F::ENTRY_BYTES == 8, "no format with halves of words has marks");
            let old = tables.exchange(table, index, entry);
            dirty |= old != 0 && is_dirty::<F>(old);
        }
    }
    dirty
}

/// Stores an entry that will be cleaned together with its neighbours.
#[inline(always)]
pub(crate) fn write<F: Format, T: Tables>(tables: &mut T, table: T::Addr, index: usize, entry: u64) {
    if F::ENTRY_BYTES == 8 {
        return tables.store(table, index, entry);
    }
    let (word, shift) = half(index);
    let others = tables.load(table, word) & !(u64::from(u32::MAX) << shift);
    tables.store(table, word, others | entry << shift);
}

/// [`Tables::edit`] for entries that will be cleaned together with others.
#[inline]
pub(crate) fn edit<F: Format, T: Tables>(
    tables: &mut T,
    table: T::Addr,
    range: Range<usize>,
    each: impl FnMut(&mut [u64]) -> usize,
) -> usize {
    if F::ENTRY_BYTES == 8 {
        return tables.edit(table, range, each);
    }
    in_chunks(tables, range, |t, i| load::<F, T>(t, table, i), |t, i, entry| write::<F, T>(t, table, i, entry), each)
}

/// [`Tables::fill`] for entries that will be cleaned together with others.
#[inline]
pub(crate) fn fill<F: Format, T: Tables>(
    tables: &mut T,
    table: T::Addr,
    range: Range<usize>,
    each: impl FnMut(&mut [u64]) -> usize,
) -> usize {
    if F::ENTRY_BYTES == 8 { tables.fill(table, range, each) } else { edit::<F, T>(tables, table, range, each) }
}

/// Replaces entries from the start of a range on by those that `each` gives for them, until it gives none; cleaned.
/// Gives their number.
#[inline]
pub(crate) fn update<F: Format, T: Tables>(
    tables: &mut T,
    table: T::Addr,
    range: Range<usize>,
    mut each: impl FnMut(u64) -> Option<u64>,
) -> usize {
    let start = range.start;
    let done = edit::<F, T>(tables, table, range, |entries| {
        let mut changed = 0;
        for entry in entries {
            let Some(new) = each(*entry) else { break };
            *entry = new;
            changed += 1;
        }
        changed
    });
    if done > 0 {
        clean::<F, T>(tables, table, start..start + done);
    }
    done
}

/// The entry at byte address `at`, out of the word that `load` fetches.
#[inline]
pub(crate) fn fetch<F: Format>(at: u64, mut load: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
    if F::ENTRY_BYTES == 8 {
        return load(at);
    }
    Some(load(at & !7)? >> (at % 8 * 8) & u64::from(u32::MAX))
}
