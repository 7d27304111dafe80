//! The buffer objects that a VM knows: one slot for each that is bound, or about to be.

use alloc::sync::Arc;
use alloc::vec::Vec;

use hashbrown::HashMap;

use crate::Bo;
use crate::bo::BoundBo;
use crate::record::Record;

/// The buffer of a slot, and the places where it is bound.
#[derive(Debug)]
pub(crate) struct Slot {
    /// None in slot 0, that of null ranges, and in free slots.
    pub(crate) bo: Option<BoundBo>,
    /// Of a binding that repeats: the pages that do, less one. They are a power of two.
    pub(crate) repeat_mask: u64,
    /// True when all of the buffer can be bound in this VM.
    mappable: bool,
    /// True when pages of it can be bound by themselves: it is mappable, and nothing repeats.
    takes_pages: bool,
    /// Pages bound.
    pages: u64,
    /// Places that the plan may add.
    planned: usize,
    /// The last chunk of the plan's last bind of it.
    planned_chunk: u64,
    /// Where pages of it may be bound. Made shorter when it has doubled.
    places: Vec<Place>,
    /// True while the places are no longer than what was bound. With [`FEW`] of them they become whole chunks, since a
    /// chunk need be noted once.
    exact: bool,
    /// Length of `places` when it was last made shorter.
    shortest: usize,
    /// The next slot of the same buffer (another repetition), of the free ones, or of those released by one commit.
    next: u32,
}

/// Pages of which some of a slot may be bound: the first, and the one after the last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Place {
    pub(crate) first: u64,
    pub(crate) end: u64,
}

impl Place {
    /// The chunks that it lies in.
    fn whole(self, chunk: u32) -> Self {
        Self { first: self.first >> chunk << chunk, end: (((self.end - 1) >> chunk) + 1) << chunk }
    }

    /// Makes it go on with another one, if it is not behind that.
    #[inline(always)]
    fn join(&mut self, other: Self) -> bool {
        let goes_on = self.first <= other.first && other.first <= self.end;
        if goes_on {
            self.end = self.end.max(other.end);
        }
        goes_on
    }
}

/// Places of a slot that are exact, at most.
const FEW: usize = 32;

/// Buffers that are found without a search.
const RECENT: usize = 64;

/// Where a buffer, by its address in memory, is noted among the recent ones.
#[inline(always)]
fn recent_of(key: usize) -> usize {
    // A buffer is larger than 64 bytes. The product spreads neighbours, and those at any stride, evenly.
    ((key as u64 >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

/// The end of a chain of slots.
pub(crate) const NONE: u32 = u32::MAX;

/// The slot of null ranges.
pub(crate) const NULL: u32 = 0;

/// No memory, or no number, for another slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full;

impl From<alloc::collections::TryReserveError> for Full {
    fn from(_: alloc::collections::TryReserveError) -> Self {
        Self
    }
}

#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// The first slot of each buffer, by its address in memory.
    by_bo: HashMap<usize, u32>,
    /// Buffers asked for lately, each with its first slot or [`NONE`].
    recent: [(usize, u32); RECENT],
    /// Chain of free slots.
    free: u32,
    /// Slots of the plan.
    planned: Vec<u32>,
    /// Slots that have lost their last page and are no part of the plan.
    idle: Vec<u32>,
    /// Logarithm of the pages of a chunk.
    chunk: u32,
}

#[inline]
pub(crate) fn key(bo: &Arc<Bo>) -> usize {
    Arc::as_ptr(bo).addr()
}

impl Slots {
    pub(crate) fn new(chunk: u32) -> Self {
        let null = Slot::new(None, 0, true);
        Self {
            slots: alloc::vec![null],
            by_bo: HashMap::new(),
            recent: [(0, NONE); RECENT],
            free: NONE,
            planned: Vec::new(),
            idle: Vec::new(),
            chunk,
        }
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// The first slot of a buffer, or [`NONE`].
    #[inline(always)]
    pub(crate) fn first_of(&mut self, bo: &Arc<Bo>) -> u32 {
        let key = key(bo);
        match self.recent[recent_of(key)] {
            (known, slot) if known == key => slot,
            _ => self.find(key),
        }
    }

    #[inline(never)]
    fn find(&mut self, key: usize) -> u32 {
        let slot = self.by_bo.get(&key).copied().unwrap_or(NONE);
        self.recent[recent_of(key)] = (key, slot);
        slot
    }

    /// The slot of a buffer of which a page is to be bound, with its number, if that takes no memory and all of the
    /// buffer can be bound. Then [`count_one`](Slot::count_one). `noted` says of a slot that it has pages in the chunk
    /// already.
    #[inline(always)]
    pub(crate) fn for_page(
        &mut self,
        bo: &Arc<Bo>,
        page: u64,
        noted: impl FnOnce(u32) -> bool,
    ) -> Option<(u32, &mut Slot)> {
        let number = self.first_of(bo);
        let slot = self.slots.get_mut(number as usize).filter(|slot| slot.takes_pages)?;
        let known = slot.goes_on(page) || !slot.exact && noted(number);
        let has_place = known || slot.adds(Place { first: page, end: page + 1 }, self.chunk);
        has_place.then_some((number, slot))
    }

    /// Counts a page that is bound from now on to a slot of the plan, which has room for it. Gives the buffer.
    #[inline(always)]
    pub(crate) fn count_page(&mut self, slot: u32, page: u64, noted: impl FnOnce(u32) -> bool) -> Option<&Arc<Bo>> {
        let it = &mut self.slots[slot as usize];
        it.bo.as_ref()?;
        let known = it.goes_on(page) || !it.exact && noted(slot);
        let added = known || it.adds(Place { first: page, end: page + 1 }, self.chunk);
        debug_assert!(added, "there is room: `hold`");
        it.pages += 1;
        it.bo.as_deref()
    }

    /// Counts one page that is bound no more, unless it is the last one of its slot.
    #[inline(always)]
    pub(crate) fn unbound_page(&mut self, slot: u32) -> bool {
        let slot = &mut self.slots[slot as usize];
        if slot.pages <= 1 {
            return false;
        }
        slot.pages -= 1;
        true
    }

    /// The next slot of the same buffer, or [`NONE`].
    pub(crate) fn next_of(&self, slot: u32) -> u32 {
        self.get(slot).next
    }

    /// The slot for binding this buffer with these repetitions, or [`NONE`].
    #[inline(always)]
    pub(crate) fn of(&mut self, bo: &Arc<Bo>, repeat_mask: u64) -> u32 {
        let mut slot = self.first_of(bo);
        while slot != NONE && self.get(slot).repeat_mask != repeat_mask {
            slot = self.next_of(slot);
        }
        slot
    }

    /// Holds a slot for the plan until [`end_plan`](Self::end_plan), with room for one more place, of which the first
    /// and the last chunk are given.
    #[inline(always)]
    pub(crate) fn hold(&mut self, slot: u32, (first, last): (u64, u64)) -> Result<(), Full> {
        let it = &mut self.slots[slot as usize];
        if it.planned > 0 && it.planned_chunk == first && first == last && !it.exact {
            return Ok(()); // the place before it will do
        }
        if it.planned == 0 {
            self.planned.try_reserve(1)?;
            self.planned.push(slot);
        }
        it.planned += 1;
        it.planned_chunk = last;
        if it.places.len() + it.planned > it.places.capacity() {
            it.make_room(self.chunk)?;
        }
        Ok(())
    }

    /// A slot for binding this buffer with these repetitions, which has none yet. Then [`hold`](Self::hold) it.
    #[cold]
    pub(crate) fn add(&mut self, bo: &Arc<Bo>, repeat_mask: u64, mappable: bool) -> Result<u32, Full> {
        self.by_bo.try_reserve(1).map_err(|_| Full)?;
        let first = self.first_of(bo);
        let next = if first == NONE { NONE } else { self.next_of(first) };
        let slot = Slot { next, ..Slot::new(Some(BoundBo::new(bo)), repeat_mask, mappable) };
        let at = if self.free != NONE {
            let at = self.free;
            self.free = core::mem::replace(&mut self.slots[at as usize], slot).next;
            at
        } else {
            if self.slots.len() == Record::MAX_SLOTS {
                return Err(Full);
            }
            self.slots.try_reserve(1)?;
            let slots = self.slots.len() + 1;
            self.idle.try_reserve(slots)?; // so that a commit need not ask for memory
            self.slots.push(slot);
            (slots - 1) as u32
        };
        if first == NONE {
            self.by_bo.insert(key(bo), at);
            self.recent[recent_of(key(bo))] = (key(bo), at);
        } else {
            self.slots[first as usize].next = at;
        }
        Ok(at)
    }

    /// Counts these pages, which are bound to a slot from now on.
    #[inline]
    pub(crate) fn bound(&mut self, slot: u32, place: Place) {
        let slot = &mut self.slots[slot as usize];
        slot.pages += place.end - place.first;
        let added = slot.adds(place, self.chunk);
        debug_assert!(added, "there is room: `hold`");
    }

    /// Counts pages of a slot that are bound no more.
    #[inline]
    pub(crate) fn unbound(&mut self, slot: u32, pages: u64) {
        let it = &mut self.slots[slot as usize];
        it.pages -= pages;
        if it.pages == 0 && it.planned == 0 && slot != NULL {
            self.idle.push(slot); // there is room: `add`
        }
    }

    /// Pages bound of a buffer, by its first slot.
    pub(crate) fn all_pages(&self, mut slot: u32) -> u64 {
        let mut pages = 0;
        while slot != NONE {
            pages += self.get(slot).pages();
            slot = self.next_of(slot);
        }
        pages
    }

    /// Where pages of the slot may be bound, from the place numbered `n` on.
    pub(crate) fn place(&self, slot: u32, n: usize) -> Option<Place> {
        self.get(slot).places.get(n).copied()
    }

    /// The slots of the plan and those that became idle are let go of if nothing of them is bound. Gives the chain of
    /// slots to [`release`](Self::release).
    #[inline]
    pub(crate) fn end_plan(&mut self) -> u32 {
        let mut chain = NONE;
        if self.planned.is_empty() && self.idle.is_empty() {
            return chain;
        }
        while let Some(slot) = self.planned.pop() {
            self.slots[slot as usize].planned = 0;
            if self.get(slot).pages == 0 && slot != NULL {
                chain = self.retire(slot, chain);
            }
        }
        while let Some(slot) = self.idle.pop() {
            if self.get(slot).pages == 0 && self.get(slot).bo.is_some() {
                chain = self.retire(slot, chain);
            }
        }
        chain
    }

    /// Takes a slot off the list of its buffer.
    #[cold]
    fn retire(&mut self, slot: u32, chain: u32) -> u32 {
        let Some(bo) = &self.slots[slot as usize].bo else { return chain };
        let key = key(bo);
        let next = self.next_of(slot);
        match self.by_bo.get_mut(&key) {
            Some(first) if *first == slot => {
                if next == NONE {
                    self.by_bo.remove(&key);
                } else {
                    *first = next;
                }
            }
            Some(first) => {
                let mut at = *first;
                while self.next_of(at) != slot && self.next_of(at) != NONE {
                    at = self.next_of(at);
                }
                self.slots[at as usize].next = next;
            }
            None => {} // retired already
        }
        self.recent[recent_of(key)] = (0, NONE);
        let it = &mut self.slots[slot as usize];
        it.next = chain;
        it.places = Vec::new();
        slot
    }

    /// Bytes of memory in use.
    pub(crate) fn bytes(&self) -> usize {
        let places: usize = self.slots.iter().map(|slot| slot.places.capacity()).sum();
        self.slots.capacity() * size_of::<Slot>()
            + places * size_of::<Place>()
            + (self.planned.capacity() + self.idle.capacity()) * size_of::<u32>()
            + self.by_bo.allocation_size()
    }

    /// Lets go of the buffers of a chain.
    pub(crate) fn release(&mut self, mut chain: u32) {
        while chain != NONE {
            let slot = &mut self.slots[chain as usize];
            slot.bo = None;
            let next = core::mem::replace(&mut slot.next, self.free);
            self.free = chain;
            chain = next;
        }
    }
}

impl Slot {
    fn new(bo: Option<BoundBo>, repeat_mask: u64, mappable: bool) -> Self {
        Self {
            bo,
            repeat_mask,
            mappable,
            takes_pages: mappable && repeat_mask == 0,
            pages: 0,
            planned: 0,
            planned_chunk: 0,
            places: Vec::new(),
            exact: true,
            shortest: 0,
            next: NONE,
        }
    }

    /// Makes the last place one page longer, if that is exact and ends there.
    #[inline(always)]
    fn goes_on(&mut self, page: u64) -> bool {
        match self.places.last_mut() {
            Some(last) if self.exact && last.end == page => {
                last.end += 1;
                true
            }
            _ => false,
        }
    }

    /// Counts a page that is bound from now on.
    #[inline(always)]
    pub(crate) fn count_one(&mut self) {
        self.pages += 1;
    }

    /// Adds a place if there is room for it.
    #[inline(never)]
    fn adds(&mut self, place: Place, chunk: u32) -> bool {
        let place = if self.exact { place } else { place.whole(chunk) };
        self.places.last_mut().is_some_and(|last| last.join(place)) || self.has_room_for(place)
    }

    #[inline(never)]
    fn has_room_for(&mut self, place: Place) -> bool {
        let room = self.places.len() < self.places.capacity();
        if room {
            self.places.push(place);
        }
        room
    }

    /// True when all of the buffer can be bound in this VM.
    pub(crate) fn is_mappable(&self) -> bool {
        self.mappable
    }

    /// Pages bound.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Reserves room for the planned places. A list that has doubled is sorted and joined first.
    #[cold]
    fn make_room(&mut self, chunk: u32) -> Result<(), Full> {
        if self.exact && self.places.len() + self.planned > FEW {
            self.exact = false;
            self.places.iter_mut().for_each(|place| *place = place.whole(chunk));
        }
        if self.places.len() >= 2 * self.shortest.max(FEW) {
            self.places.sort_unstable();
            self.places.dedup_by(|next, kept| kept.join(*next));
            self.shortest = self.places.len();
        }
        Ok(self.places.try_reserve(self.planned)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few places are no longer than what is bound, so that unbinding a buffer visits nothing else. Many are chunks.
    #[test]
    fn few_places_are_exact() {
        let bo = Arc::new(Bo::of_segments(1, []).unwrap());
        let mut slots = Slots::new(9);
        let slot = slots.add(&bo, 0, true).unwrap();
        let mut page = |n: u64| {
            slots.hold(slot, (n, n)).unwrap();
            slots.bound(slot, Place { first: 600 * n, end: 600 * n + 1 });
            slots.end_plan();
            (0..).map_while(|i| slots.place(slot, i)).map(|place| place.end - place.first).sum::<u64>()
        };
        for n in 0..FEW as u64 {
            assert_eq!(page(n), n + 1);
        }
        assert_eq!(page(FEW as u64), (FEW as u64 + 1) * 512);
    }
}
