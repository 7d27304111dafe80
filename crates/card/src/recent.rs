//! What a channel has written lately: the card's guess whether memory is in the processor's cache.
//!
//! Stores that bypass the cache are faster where the destination is not in it, and much slower where it is. A destination that
//! this channel wrote a few MiB ago is taken to be there still, every other one not. What the processor does besides,
//! the card cannot know: that is what the hint in a descriptor is for.

use dmalane_mem::CopyHint;

/// Bytes of a block: no more than the shortest write that is looked at, or its neighbours would pass for itself.
const BLOCK: u64 = 4 << 10;
const BLOCKS: usize = 1024;
/// This much later a block is no longer in the cache: about one core's share of a third-level cache.
const RECENT: u64 = BLOCK * BLOCKS as u64;

/// Which memory a destination is in: addresses of different memories are told apart.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    Card,
}

/// The blocks written last.
pub(crate) struct Recent {
    /// Which block, and how many bytes had been written before.
    blocks: Box<[(u64, u64); BLOCKS]>,
    written: u64,
}

impl Recent {
    pub(crate) fn new() -> Self {
        Self { blocks: Box::new([(u64::MAX, 0); BLOCKS]), written: RECENT }
    }

    /// Notes a write of `len` bytes at `at`, and says how to do it. Writes shorter than `from` are never worth bypassing the
    /// cache.
    pub(crate) fn hint(&mut self, memory: Memory, at: u64, len: u64, from: u64) -> CopyHint {
        if len < from {
            return CopyHint::Keep;
        }
        let key = |block: u64| block << 1 | u64::from(memory == Memory::Card);
        let (first, last) = (at / BLOCK, at.saturating_add(len - 1) / BLOCK);
        // The last one: the first may also be the end of what was written before this.
        let (block, then) = self.blocks[last as usize % BLOCKS];
        let hot = block == key(last) && self.written - then <= RECENT;
        self.written += len;
        for block in first.max(last.saturating_sub(BLOCKS as u64 - 1))..=last {
            self.blocks[block as usize % BLOCKS] = (key(block), self.written);
        }
        // What is longer than that has pushed its own beginning out when it comes round again.
        if hot && len <= RECENT { CopyHint::Keep } else { CopyHint::StreamUnordered }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_round_again_is_hot() {
        let mut recent = Recent::new();
        let mut hint = |memory, at, len| recent.hint(memory, at, len, 4096);
        assert!(hint(Memory::Card, 0, 100) == CopyHint::Keep, "too short");
        for at in [0, 1 << 20] {
            assert!(hint(Memory::Card, at, 1 << 20) == CopyHint::StreamUnordered, "first time");
            assert!(hint(Memory::Card, at, 1 << 20) == CopyHint::Keep);
        }
        for i in 0..100 {
            assert!(hint(Memory::Card, 1 << 30 | (i * 4096 + 100), 4096) == CopyHint::StreamUnordered, "neighbours");
        }
        assert!(hint(Memory::Host, 0, 1 << 20) == CopyHint::StreamUnordered, "another memory");
        for i in 0..10u64 {
            hint(Memory::Host, 1 << 40 | i << 20, 1 << 20);
        }
        assert!(hint(Memory::Card, 0, 1 << 20) == CopyHint::StreamUnordered, "long ago");
        assert!(hint(Memory::Card, u64::MAX - 9, 1 << 40) == CopyHint::StreamUnordered, "no overflow");
    }
}
