//! Where a word of a table is in memory. (A file of its own, because `tests/interleavings.rs` compiles it once more.)

/// The number of a word, by the offset of its table in bytes. Of an offset that is not a multiple of 8 it is larger
/// than any memory has words, so that the question whether there is such a word answers that one too.
#[inline]
pub(crate) fn word_at(table: u64, index: usize) -> usize {
    usize::try_from(table.wrapping_add(8 * index as u64).rotate_right(3)).unwrap_or(usize::MAX)
}
