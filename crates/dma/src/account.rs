//! Counters of a heap, and the share of a buffer in them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allocation counters of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapStats {
    /// Bytes in live buffers.
    pub live: usize,
    /// Maximum of `live`.
    pub peak: usize,
    /// Buffers allocated since the heap was created.
    pub buffers: usize,
}

#[derive(Default)]
pub(crate) struct Counters {
    live: AtomicUsize,
    peak: AtomicUsize,
    buffers: AtomicUsize,
}

impl Counters {
    pub(crate) fn stats(&self) -> HeapStats {
        HeapStats {
            live: self.live.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
            buffers: self.buffers.load(Ordering::Relaxed),
        }
    }
}

/// Counts a buffer's bytes as live until dropped.
pub(crate) struct Account {
    counters: Arc<Counters>,
    bytes: usize,
}

impl Account {
    /// For memory outside of heaps.
    pub(crate) fn none() -> Self {
        Self { counters: Arc::default(), bytes: 0 }
    }

    pub(crate) fn open(counters: &Arc<Counters>, bytes: usize) -> Self {
        let live = counters.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        counters.peak.fetch_max(live, Ordering::Relaxed);
        counters.buffers.fetch_add(1, Ordering::Relaxed);
        Self { counters: counters.clone(), bytes }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.counters.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
