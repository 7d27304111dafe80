//! A small cache of translations, as a device's IOMMU unit keeps one.

use dmalane_addr::{Iova, PhysAddr};
use dmalane_iopt::Leaf;

const ENTRIES: usize = 64;

/// Direct-mapped, one entry per 4 KiB page of IOVA, which may hold a larger leaf.
pub(super) struct Iotlb {
    entries: [Option<Leaf<Iova, PhysAddr>>; ENTRIES],
    epoch: u64,
}

impl Iotlb {
    pub(super) fn new() -> Self {
        Self { entries: [None; ENTRIES], epoch: 0 }
    }

    /// Forgets everything when an invalidation came since the last call.
    pub(super) fn check_epoch(&mut self, epoch: u64) {
        if self.epoch != epoch {
            self.entries = [None; ENTRIES];
            self.epoch = epoch;
        }
    }

    pub(super) fn find(&self, at: Iova) -> Option<Leaf<Iova, PhysAddr>> {
        self.entries[index(at)].filter(|leaf| at.bits().wrapping_sub(leaf.at.bits()) < leaf.size.bytes())
    }

    pub(super) fn insert(&mut self, at: Iova, leaf: Leaf<Iova, PhysAddr>) {
        self.entries[index(at)] = Some(leaf);
    }
}

fn index(at: Iova) -> usize {
    (at.bits() >> 12) as usize % ENTRIES
}
