//! The buffer objects that a VM knows: one slot for each that is bound, or about to be.

use alloc::sync::Arc;
use alloc::vec::Vec;

use hashbrown::HashMap;

use crate::Bo;
use crate::record::Record;

/// What a slot stands for.
#[derive(Debug)]
pub(crate) struct Slot {
    /// None in slot 0, that of null ranges, and in free slots.
    pub(crate) bo: Option<Arc<Bo>>,
    /// Of a binding that repeats: the pages that do, less one. They are a power of two.
    pub(crate) repeat_mask: u64,
    /// Pages bound.
    pages: u64,
    /// How often the plan holds it.
    planned: usize,
    /// Where pages of it may be bound: first chunk and the one after the last. Made shorter when it has doubled.
    places: Vec<(u64, u64)>,
    /// Length of `places` when it was last made shorter.
    shortest: usize,
    /// The next slot of the same buffer (another repetition), of the free ones, or of those released by one commit.
    next: u32,
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
    /// The buffer asked for last and its first slot.
    last: (usize, u32),
    /// Chain of free slots.
    free: u32,
    /// Slots of the plan.
    planned: Vec<u32>,
    /// Slots that have lost their last page and are no part of the plan.
    idle: Vec<u32>,
}

fn key(bo: &Arc<Bo>) -> usize {
    Arc::as_ptr(bo).addr()
}

impl Slots {
    pub(crate) fn new() -> Self {
        let null = Slot { bo: None, repeat_mask: 0, pages: 0, planned: 0, places: Vec::new(), shortest: 0, next: NONE };
        Self {
            slots: alloc::vec![null],
            by_bo: HashMap::new(),
            last: (0, NONE),
            free: NONE,
            planned: Vec::new(),
            idle: Vec::new(),
        }
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// The first slot of a buffer, or [`NONE`].
    #[inline]
    pub(crate) fn first_of(&mut self, bo: &Arc<Bo>) -> u32 {
        let key = key(bo);
        if self.last.0 != key {
            self.last = (key, self.by_bo.get(&key).copied().unwrap_or(NONE));
        }
        self.last.1
    }

    /// Counts one page of a buffer that is bound from now on in this chunk, if that takes no memory, and gives its
    /// slot.
    #[inline(always)]
    pub(crate) fn bound_page(&mut self, bo: &Arc<Bo>, chunk: u64) -> Option<u32> {
        let (known, number) = self.last;
        let slot = self.slots.get_mut(number as usize).filter(|slot| known == key(bo) && slot.repeat_mask == 0)?;
        let room = slot.places.len() < slot.places.capacity();
        match slot.places.last_mut() {
            Some(last) if last.0 <= chunk && chunk <= last.1 => last.1 = last.1.max(chunk + 1),
            _ if room => slot.places.push((chunk, chunk + 1)),
            _ => return None,
        }
        slot.pages += 1;
        Some(number)
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

    /// The slot for binding this buffer once, with room for the place of one more binding. It is held until
    /// [`end_plan`](Self::end_plan).
    #[inline]
    pub(crate) fn plan(&mut self, bo: &Arc<Bo>, repeat_mask: u64) -> Result<u32, Full> {
        let mut slot = self.first_of(bo);
        while slot != NONE && self.get(slot).repeat_mask != repeat_mask {
            slot = self.next_of(slot);
        }
        if slot == NONE {
            slot = self.add(bo, repeat_mask)?;
        }
        self.hold(slot)?;
        Ok(slot)
    }

    /// Holds a slot for the plan, with room for one more place.
    #[inline]
    pub(crate) fn hold(&mut self, slot: u32) -> Result<(), Full> {
        let it = &mut self.slots[slot as usize];
        if it.planned == 0 {
            self.planned.try_reserve(1)?;
            self.planned.push(slot);
        }
        it.planned += 1;
        if it.places.len() + it.planned > it.places.capacity() {
            it.make_room()?;
        }
        Ok(())
    }

    #[cold]
    fn add(&mut self, bo: &Arc<Bo>, repeat_mask: u64) -> Result<u32, Full> {
        self.by_bo.try_reserve(1).map_err(|_| Full)?;
        let first = self.first_of(bo);
        let slot = Slot {
            bo: Some(bo.clone()),
            repeat_mask,
            pages: 0,
            planned: 0,
            places: Vec::new(),
            shortest: 0,
            next: if first == NONE { NONE } else { self.next_of(first) },
        };
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
            self.idle.try_reserve(slots - self.idle.len())?; // so that a commit need not ask for memory
            self.slots.push(slot);
            (slots - 1) as u32
        };
        if first == NONE {
            self.by_bo.insert(key(bo), at);
            self.last = (key(bo), at);
        } else {
            self.slots[first as usize].next = at;
        }
        Ok(at)
    }

    /// Counts pages of a slot that are bound from now on, in these chunks.
    #[inline]
    pub(crate) fn bound(&mut self, slot: u32, pages: u64, chunks: (u64, u64)) {
        let slot = &mut self.slots[slot as usize];
        slot.pages += pages;
        match slot.places.last_mut() {
            Some(last) if last.0 <= chunks.0 && chunks.0 <= last.1 => last.1 = last.1.max(chunks.1),
            _ => slot.places.push(chunks), // there is room: `hold`
        }
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

    /// Where pages of the slot may be bound, from the place numbered `n` on.
    pub(crate) fn place(&self, slot: u32, n: usize) -> Option<(u64, u64)> {
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
        self.last = (0, NONE);
        let it = &mut self.slots[slot as usize];
        it.next = chain;
        it.places = Vec::new();
        slot
    }

    /// Bytes of memory in use.
    pub(crate) fn bytes(&self) -> usize {
        let places: usize = self.slots.iter().map(|slot| slot.places.capacity()).sum();
        self.slots.capacity() * size_of::<Slot>()
            + places * size_of::<(u64, u64)>()
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
    /// Pages bound.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Room for a place for each time that it is held.
    #[cold]
    fn make_room(&mut self) -> Result<(), Full> {
        if self.places.len() >= 2 * self.shortest.max(32) {
            self.places.sort_unstable();
            self.places.dedup_by(|next, kept| {
                let joins = next.0 <= kept.1;
                if joins {
                    kept.1 = kept.1.max(next.1);
                }
                joins
            });
            self.shortest = self.places.len();
        }
        Ok(self.places.try_reserve(self.planned)?)
    }
}
