//! Which blocks of a memory are present: a bit each, set once and for good.

use crate::atomic::{AtomicU64, Ordering};

pub(crate) struct Present {
    bits: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Present {
    pub(crate) fn new(blocks: u64) -> Self {
        Self { bits: (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), count: AtomicU64::new(0) }
    }

    /// How many blocks are present.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn contains(&self, block: u64) -> bool {
        // Pairs with the release in `insert`: whoever sees the bit sees the page.
        self.bits[(block / 64) as usize].load(Ordering::Acquire) >> (block % 64) & 1 == 1
    }

    /// Adds a block whose page is there; false if another thread was faster.
    pub(crate) fn insert(&self, block: u64) -> bool {
        let bit = 1 << (block % 64);
        let new = self.bits[(block / 64) as usize].fetch_or(bit, Ordering::Release) & bit == 0;
        if new {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        new
    }
}
