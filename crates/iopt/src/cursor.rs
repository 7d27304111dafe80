//! Where a page table wrote last.

use crate::Format;
use crate::format::{MAX_LEVELS, same_table};

/// The tables down to where the last leaf was written, so that the next table is found from the nearest common one.
/// Kept from call to call, and forgotten whenever tables leave the tree.
#[derive(Debug)]
pub(crate) struct Cursor<A> {
    pub(crate) path: [A; MAX_LEVELS],
    /// The deepest level of `path` that is known.
    pub(crate) level: u32,
    /// The address that `path` leads to.
    pub(crate) at: u64,
    /// An address that the last level but one was asked for; `u64::MAX` for none.
    pub(crate) near: u64,
    /// The offset of the table there, as [`Tables::loader`] counts. With only two levels it is the root.
    pub(crate) above: u64,
    /// An address that the last level was asked for; `u64::MAX` for none.
    pub(crate) here: u64,
    /// The table there.
    pub(crate) last: A,
}

impl<A: Copy> Cursor<A> {
    /// Knows nothing but the root, which never changes, its offset and its level.
    pub(crate) fn new(root: A, offset: u64, level: u32) -> Self {
        Self { path: [root; MAX_LEVELS], level, at: 0, near: u64::MAX, above: offset, here: u64::MAX, last: root }
    }

    /// Back to that: the root is at `level`.
    pub(crate) fn forget(&mut self, level: u32) {
        (self.level, self.near, self.here) = (level, u64::MAX, u64::MAX);
    }

    /// Forgets the table at `level` that translates `at`, and those below.
    #[cfg(feature = "alloc")]
    pub(crate) fn leave<F: Format>(&mut self, at: u64, level: u32) {
        if self.level >= level && same_table::<F>(at, self.at, level) {
            self.level = level - 1;
        }
        self.here = u64::MAX;
        if level + 1 < F::LEVELS {
            self.near = u64::MAX;
        }
    }

    /// The deepest level at which one known table translates `at` too.
    #[inline]
    pub(crate) fn common_level<F: Format>(&self, at: u64) -> u32 {
        let mut level = self.level;
        while !same_table::<F>(at, self.at, level) {
            level -= 1;
        }
        level
    }
}
