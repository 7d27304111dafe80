//! Buffer objects by number, for callers that cannot hold a reference.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::Bo;

/// Bits of a handle that say which slot, from 1 on; the others count how often the slot was used before.
const SLOT_BITS: u32 = 20;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
const LAST_USE: u32 = u32::MAX >> SLOT_BITS;

/// Buffer objects by handle.
///
/// No handle is given twice, so one that is used after it was removed names nothing, not somebody else's buffer. The
/// first one is 1; there is no handle 0.
///
/// ```
/// use std::sync::Arc;
/// use dmalane_addr::{CardAddr, Segment};
/// use dmalane_vm::{Bo, Handles};
///
/// let bo = |id| Arc::new(Bo::of_segments(id, [Segment { addr: CardAddr::new(0), len: 1 << 20 }]).unwrap());
/// let mut handles = Handles::new();
/// let handle = handles.insert(bo(1)).unwrap();
/// assert_eq!(handles.get(handle).unwrap().id(), 1);
/// handles.remove(handle);
/// let other = handles.insert(bo(2)).unwrap();
/// assert!(handles.get(handle).is_none() && other != handle);
/// ```
#[derive(Debug, Default)]
pub struct Handles {
    slots: Vec<Slot>,
    /// Slots to use again. One that has had its last use is not among them.
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    /// Before this one.
    uses: u32,
    bo: Option<Arc<Bo>>,
}

impl Handles {
    /// No handles.
    pub fn new() -> Self {
        Self::default()
    }

    /// A handle for the buffer object. `None` when there are 2^20 - 1 at once (or none is left that was never given),
    /// or no memory.
    pub fn insert(&mut self, bo: Arc<Bo>) -> Option<u32> {
        self.insert_with(|_| bo)
    }

    /// As [`insert`](Self::insert), for a buffer object that is made knowing its handle.
    pub fn insert_with(&mut self, make: impl FnOnce(u32) -> Arc<Bo>) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.slots.len()).ok().filter(|slot| *slot < SLOT_MASK)?;
                // Room on the list of free slots too, so that a removal needs no memory.
                self.slots.try_reserve(1).ok()?;
                self.free.try_reserve(self.slots.len() + 1).ok()?;
                self.slots.push(Slot { uses: 0, bo: None });
                slot
            }
        };
        let entry = &mut self.slots[slot as usize];
        let handle = entry.uses << SLOT_BITS | (slot + 1);
        entry.bo = Some(make(handle));
        Some(handle)
    }

    /// The buffer object of a handle.
    #[inline]
    pub fn get(&self, handle: u32) -> Option<&Arc<Bo>> {
        let slot = self.slots.get((handle & SLOT_MASK).checked_sub(1)? as usize)?;
        slot.bo.as_ref().filter(|_| slot.uses == handle >> SLOT_BITS)
    }

    /// Takes a handle back. The buffer object lives on where it is bound.
    pub fn remove(&mut self, handle: u32) -> Option<Arc<Bo>> {
        self.get(handle)?;
        let slot = (handle & SLOT_MASK) - 1;
        let entry = &mut self.slots[slot as usize];
        if entry.uses < LAST_USE {
            entry.uses += 1;
            self.free.push(slot);
        }
        entry.bo.take()
    }

    /// Handles in use.
    pub fn len(&self) -> usize {
        self.slots.iter().filter(|s| s.bo.is_some()).count()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_addr::{SgIndex, SgTable};
    use std::collections::BTreeSet;

    extern crate std;

    fn bo(id: u64) -> Arc<Bo> {
        Arc::new(Bo::new(id, SgIndex::from_table(&SgTable::new()).unwrap()))
    }

    #[test]
    fn no_handle_comes_twice() {
        let mut handles = Handles::new();
        let mut seen = BTreeSet::from([0]);
        let kept = handles.insert(bo(0)).unwrap();
        assert!(seen.insert(kept));
        for id in 1..3 * u64::from(LAST_USE) {
            let handle = handles.insert(bo(id)).unwrap();
            assert!(seen.insert(handle), "{handle:#x} again");
            assert_eq!(handles.get(handle).unwrap().id(), id);
            assert_eq!(handles.remove(handle).unwrap().id(), id);
            assert!(handles.get(handle).is_none() && handles.remove(handle).is_none());
        }
        assert_eq!((handles.get(kept).unwrap().id(), handles.len()), (0, 1));
        assert!(handles.slots.len() < 6, "slots are used again until their uses are counted out");
        assert_eq!(kept, 1);
        for never in [0, u32::MAX, SLOT_MASK] {
            assert!(handles.get(never).is_none() && handles.remove(never).is_none());
        }
    }

    #[test]
    fn there_is_a_most() {
        let mut handles = Handles::new();
        let one = bo(1);
        let all: BTreeSet<u32> = (0..SLOT_MASK).map(|_| handles.insert(one.clone()).unwrap()).collect();
        assert!(all.iter().copied().eq(1..1 << SLOT_BITS) && handles.len() == SLOT_MASK as usize);
        assert_eq!(handles.insert(one.clone()), None);
        handles.remove(*all.first().unwrap()).unwrap();
        assert!(!all.contains(&handles.insert(one).unwrap()));
    }
}
