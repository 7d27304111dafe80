//! The blocks that a channel wrote last: the card's guess whether memory is in the processor's cache.
//!
//! Stores that bypass the cache are faster where the destination is not in it, and much slower where it is. A
//! destination that this channel wrote a few MiB ago is taken to be there still, every other one not. The card cannot
//! know of other accesses by the processor: the hint in a descriptor tells it.

use std::sync::OnceLock;

use dmalane_dma::CopyHint;

/// Bytes of a block: no more than the shortest write that is counted, or neighbours would be taken for one block.
const BLOCK: u64 = 4 << 10;
/// This much later a block is no longer in the cache, where nothing else is known; and the most that is believed.
const RECENT: u64 = 4 << 20;
const MOST: u64 = 32 << 20;

/// One processor's share of the last cache, as the kernel says (`/sys/devices/system/cpu`), between [`RECENT`] and
/// [`MOST`].
fn share() -> u64 {
    static SHARE: OnceLock<u64> = OnceLock::new();
    *SHARE.get_or_init(|| {
        let read = |file| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index3/{file}")).ok();
        let found = read("size").zip(read("shared_cpu_list")).and_then(|(size, sharers)| share_of(&size, &sharers));
        found.unwrap_or(RECENT)
    })
}

/// The share of each of the processors in a list such as `0-3,8`, of a cache of a size such as `32768K`, as a power of
/// two.
fn share_of(size: &str, sharers: &str) -> Option<u64> {
    let kibs: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
    let count = |range: &str| -> Option<u64> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    let sharers = sharers.trim().split(',').map(count).sum::<Option<u64>>()?;
    let share = kibs.checked_mul(1 << 10)?.checked_div(sharers)?;
    Some((share.max(1).ilog2()).min(MOST.ilog2()).max(RECENT.ilog2())).map(|log2| 1 << log2)
}

/// Which memory a destination is in: addresses of different memories differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    Card,
}

/// The blocks written last.
pub(crate) struct Recent {
    /// Which block, and how many bytes had been written before.
    blocks: Box<[(u64, u64)]>,
    written: u64,
    /// Bytes after which a block is no longer in the cache.
    recent: u64,
}

impl Recent {
    pub(crate) fn new() -> Self {
        Self::of(share())
    }

    /// For a cache of which the channel has `recent` bytes, a power of two.
    fn of(recent: u64) -> Self {
        Self { blocks: vec![(u64::MAX, 0); (recent / BLOCK) as usize].into(), written: recent, recent }
    }

    /// Notes a write of `len` bytes at `at`, and says how to do it. Writes shorter than `from` are never worth
    /// bypassing the cache.
    pub(crate) fn hint(&mut self, memory: Memory, at: u64, len: u64, from: u64) -> CopyHint {
        if len < from {
            return CopyHint::Keep;
        }
        let key = |block: u64| block << 1 | u64::from(memory == Memory::Card);
        let (first, last) = (at / BLOCK, at.saturating_add(len - 1) / BLOCK);
        // The last one: the first may also be the end of what was written before this.
        let mask = self.blocks.len() - 1;
        let (block, then) = self.blocks[last as usize & mask];
        let hot = block == key(last) && self.written - then <= self.recent;
        self.written += len;
        for block in first.max(last.saturating_sub(mask as u64))..=last {
            self.blocks[block as usize & mask] = (key(block), self.written);
        }
        // A longer range has evicted its own beginning by the time it is accessed again.
        if hot && len <= self.recent { CopyHint::Keep } else { CopyHint::StreamUnordered }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_round_again_is_hot() {
        let mut recent = Recent::of(4 << 20);
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

    #[test]
    fn a_cache_is_shared_out() {
        for (size, sharers, share) in [
            ("32768K\n", "0-1\n", 16 << 20),
            ("32768K", "0-15", 4 << 20),
            ("98304K", "0-7,64-71", 4 << 20),
            ("98304K", "3", 32 << 20),
            ("16384K", "0,2,4", 4 << 20),
        ] {
            assert_eq!(share_of(size, sharers), Some(share), "{size} {sharers}");
        }
        for (size, sharers) in
            [("", "0"), ("32M", "0"), ("1K", ""), ("1K", "3-1"), ("99999999999999999999K", "0"), ("9K", "0-x")]
        {
            assert_eq!(share_of(size, sharers), None, "{size} {sharers}");
        }
        assert!((RECENT..=MOST).contains(&share()) && share().is_power_of_two());
    }
}
