//! Rewriting words of a table that can only be loaded and stored.

use core::ops::Range;

/// [`Tables::edit`](crate::Tables::edit) by loads and stores, of words or of entries. `each` may stop anywhere, so
/// a chunk is as large as all before it together, within 8 to 64 words.
pub(crate) fn in_chunks<T: ?Sized>(
    tables: &mut T,
    range: Range<usize>,
    load: impl Fn(&T, usize) -> u64,
    mut store: impl FnMut(&mut T, usize, u64),
    mut each: impl FnMut(&mut [u64]) -> usize,
) -> usize {
    const LARGEST: usize = 64;
    let mut buffer = [0; LARGEST];
    let mut next = range.start;
    while next < range.end {
        let size = (next - range.start).clamp(8, LARGEST).min(range.end - next);
        let chunk = &mut buffer[..size];
        for (k, word) in chunk.iter_mut().enumerate() {
            *word = load(tables, next + k);
        }
        let changed = each(chunk);
        for (k, word) in chunk[..changed].iter().enumerate() {
            store(tables, next + k, *word);
        }
        next += changed;
        if changed < size {
            break;
        }
    }
    next - range.start
}
