//! The rings of a card's channels.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmalane_addr::Access;
use dmalane_dma::{Error, Heap, Mmio, SharedBuf, lock};
use dmalane_queue::Registered;

use crate::{CompletionEntry, Descriptor};

/// The rings of the channels that nobody drives, and a count of what was given up.
pub(crate) struct Shelf {
    pub(crate) rings: Mutex<Vec<Option<Rings>>>,
    quarantined: AtomicUsize,
}

/// The two rings of a channel. The card cannot write the first.
pub(crate) struct Rings {
    pub descriptors: SharedBuf,
    pub completions: SharedBuf,
    pub log2: u8,
    registered: [Registered; 2],
}

impl Shelf {
    pub(crate) fn new(rings: Vec<Option<Rings>>) -> Self {
        Self { rings: Mutex::new(rings), quarantined: AtomicUsize::new(0) }
    }

    /// Takes the rings of a channel that has stopped.
    pub(crate) fn put_back(&self, index: usize, rings: Rings) {
        if let Some(slot) = lock(&self.rings).get_mut(index) {
            *slot = Some(rings);
        }
    }

    /// Counts operations that are lost for good.
    pub(crate) fn quarantine(&self, operations: usize) {
        self.quarantined.fetch_add(operations, Ordering::Relaxed);
    }

    /// Operations that are lost for good.
    pub(crate) fn quarantined(&self) -> usize {
        self.quarantined.load(Ordering::Relaxed)
    }
}

impl Rings {
    pub(crate) fn new(bus: &impl Mmio, heap: &dyn Heap, entries: usize) -> Result<Self, Error> {
        let descriptors = heap.allocate(entries * Descriptor::BYTES)?.share();
        let completions = heap.allocate(entries * CompletionEntry::BYTES)?.share();
        let registered =
            [Registered::new(bus, &descriptors, Access::READ)?, Registered::new(bus, &completions, Access::RW)?];
        Ok(Self { descriptors, completions, log2: entries.trailing_zeros() as u8, registered })
    }

    /// Bytes of both.
    pub(crate) fn len(&self) -> u64 {
        (self.descriptors.len() + self.completions.len()) as u64
    }

    /// The IOVAs of the descriptor ring and of the completion ring.
    pub(crate) fn iovas(&self) -> [u64; 2] {
        [0, 1].map(|i: usize| self.registered[i].mapping().span().first().bits())
    }
}
