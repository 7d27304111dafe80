//! Where chunks get their memory: buffers that stay, or slots of staging buffers that are used again.

use std::sync::Arc;

use dmalane_addr::{Access, FileOffset, PageSize};
use dmalane_dma::{Absent, BufferRef, BufferSlice, Error, Heap, PageBacking, Registrar};
use dmalane_queue::Registered;

use super::error::FillError;
use crate::clock::Clocks;
use crate::stage::Stage;

/// Less than this is not worth asking the kernel about.
const WORTH_ASKING: u64 = 32 << 20;

/// Buffers that stay: reserved as wholes, and made present chunk by chunk.
#[derive(Clone, Copy)]
pub struct BufferMemory<'a> {
    /// The heap that they are reserved in.
    pub heap: &'a dyn Heap,
    /// Fills chunks without making them present first, where it can.
    pub cached: Option<&'a dyn FillCached>,
    /// Reads are the disk's work, and not copies out of the page cache.
    pub direct: bool,
}

/// Fills memory that is not present with bytes that a source has in memory already, such as the page cache.
pub trait FillCached: Sync {
    /// Fills the first `len` bytes of `absent` with bytes of a source from `at` on, and what is left of its last page
    /// with zeroes. Called by several workers at a time. Must not wait for another call: a worker that would have to
    /// wait does better to read.
    ///
    /// # Errors
    /// The memory, which then is made present and read into by the source's queue.
    fn fill(&self, absent: Absent, source: usize, at: FileOffset, len: usize) -> Result<BufferSlice, Absent>;
}

impl<'a> BufferMemory<'a> {
    /// Buffers of direct reads.
    pub fn of(heap: &'a dyn Heap) -> Self {
        Self { heap, cached: None, direct: true }
    }
}

/// Buffers that carry bytes to the device, unless a source with latency has many reads in flight; with the one that
/// carries them back, four in all.
const BUFFERS: usize = 3;
/// And the most, where there is memory.
const MORE_BUFFERS: usize = 9;
/// Bytes of a slot, at most: small enough that a chunk which was just copied out of the page cache is still in the
/// processor's cache when it is hashed and transferred, large enough for the disk.
const SLOT: u64 = 2 << 20;

/// A few buffers, registered once and cut into slots. They are made one by one, when all slots of those before are
/// taken.
pub struct Staging {
    pub(crate) heap: Arc<dyn Heap>,
    registrar: Arc<dyn Registrar>,
    slots: Vec<Slot>,
    /// Buffers made, and the most that are.
    buffers: usize,
    most: usize,
    /// Bytes of a buffer, at most.
    pub(crate) limit: u64,
    /// Bytes of the buffers that are still to be made.
    len: u64,
    /// By source: its memory, where the device reaches that. It needs no slots.
    pub(crate) in_place: Vec<Option<InPlace>>,
}

/// The memory of a source, from its first byte on, and its registration with the device.
pub(crate) struct InPlace(pub BufferSlice, pub Registered);

/// A slice of a staging buffer.
struct Slot {
    /// All of it, while it is free.
    slice: Option<BufferSlice>,
    /// The slices of it that have come back, while it is not.
    returned: Vec<BufferSlice>,
    /// Their bytes, counted because a slot of tiny tensors comes back in a hundred thousand slices.
    returned_bytes: usize,
    len: usize,
    via: Registered,
    backing: PageBacking,
}

impl Staging {
    /// No buffers yet; each will have at most `limit` bytes.
    pub fn new(heap: Arc<dyn Heap>, registrar: Arc<dyn Registrar>, limit: u64) -> Self {
        Self {
            heap,
            registrar,
            slots: Vec::new(),
            buffers: 0,
            most: MORE_BUFFERS,
            limit,
            len: limit,
            in_place: Vec::new(),
        }
    }

    /// Prepares for files of which the largest has `largest` bytes.
    pub(crate) fn prepare(&mut self, largest: u64) {
        // Small files take small buffers, but whole huge pages where that is no more than was asked for.
        let largest = largest.min(self.limit);
        let huge = PageSize::SIZE_2M.round_up(largest).filter(|len| *len <= self.limit && largest > 1 << 20);
        self.len = huge.unwrap_or(largest);
        // Buffers of a load of smaller files, or of a load that failed, are of no use.
        if !self.slots.iter().all(|s| s.slice.is_some() && s.via.mapping().span().len() >= largest) {
            self.clear();
        }
    }

    /// Bytes of a slot of the buffers that are made next, about.
    pub(crate) fn slot(&self) -> u64 {
        self.len.min(SLOT)
    }

    /// Bytes of the buffers of full length: of the few that each load has, and of the most.
    pub(crate) fn bounds(&self) -> (u64, u64) {
        (self.limit.saturating_mul(BUFFERS as u64), self.limit.saturating_mul(MORE_BUFFERS as u64))
    }

    /// Makes no buffers of full length beyond this number of bytes, but the few that each load has.
    pub(crate) fn keep_within(&mut self, bytes: u64) {
        self.most = usize::try_from(bytes / self.limit).map_or(MORE_BUFFERS, |most| most.clamp(BUFFERS, MORE_BUFFERS));
    }

    /// Bytes of the buffers that files of which the largest has `largest` bytes may still need.
    pub(crate) fn to_come(&self, largest: u64) -> u64 {
        largest.min(self.limit).saturating_mul(BUFFERS.saturating_sub(self.buffers) as u64)
    }

    /// Gives all buffers up. Operations in flight keep theirs.
    pub(crate) fn clear(&mut self) {
        self.slots.clear();
        (self.buffers, self.most) = (0, MORE_BUFFERS);
    }

    /// Buffers made, and bytes of each.
    pub(crate) fn size(&self) -> (usize, u64) {
        (self.buffers, self.slots.first().map_or(0, |s| s.via.mapping().span().len()))
    }

    /// The registration of each buffer, and the pages behind it.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&Registered, &PageBacking)> {
        let first = |s: &&Slot| s.slice.as_ref().is_some_and(|slice| slice.offset() == 0);
        self.slots.iter().filter(first).map(|s| (&s.via, &s.backing))
    }

    /// The first `len` bytes of a free slot, or all of it if it has fewer, with its number and registration; `None`
    /// when none is free. There are no more for reads while the device, which has `sent` bytes, has half of them: it
    /// is the slower one.
    pub(crate) fn take(
        &mut self,
        len: u64,
        sent: usize,
        clocks: &mut Clocks,
    ) -> Result<Option<(usize, BufferSlice, Registered)>, Error> {
        let slot = match self.slots.iter().position(|s| s.slice.is_some()) {
            Some(slot) => slot,
            None if self.buffers > 0 && sent > self.slots.iter().map(|s| s.len).sum::<usize>() / 2 => return Ok(None),
            None if self.buffers < BUFFERS || self.may_have_more() => {
                self.add(clocks)?;
                return self.take(len, sent, clocks);
            }
            None => return Ok(None),
        };
        let Some(mut rest) = self.slots[slot].slice.take() else { return Ok(None) };
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(rest.len());
        let front = rest.split_off_front(len);
        if !rest.is_empty() {
            self.put_back(slot, rest);
        }
        Ok(front.map(|front| (slot, front, self.slots[slot].via.clone())))
    }

    /// Whether there may be another buffer for reads in flight. Memory is asked for, and once it lacks, not again.
    fn may_have_more(&mut self) -> bool {
        if self.buffers < self.most && dmalane_dma::room().is_some_and(|room| room.bytes < 2 * self.len) {
            self.most = self.buffers;
        }
        self.buffers < self.most
    }

    /// Takes a slice of a slot back; with the last one the slot is free.
    pub(crate) fn put_back(&mut self, slot: usize, slice: BufferSlice) {
        let slot = &mut self.slots[slot];
        slot.returned_bytes += slice.len();
        slot.returned.push(slice);
        if slot.returned_bytes == slot.len {
            slot.returned_bytes = 0;
            slot.returned.sort_by_key(BufferSlice::offset);
            let slices = slot.returned.drain(..).map(Some);
            slot.slice = slices.reduce(|a, b| a?.join(b?).ok()).flatten();
        }
    }

    /// The bytes of a source from `at` on, about as many as a slot has, where the device reaches its memory.
    pub(crate) fn in_place(&self, source: usize, at: u64, len: u64) -> Option<(BufferSlice, Registered)> {
        let InPlace(memory, via) = self.in_place.get(source)?.as_ref()?;
        let at = usize::try_from(at).ok()?;
        let slice = memory.duplicate(at..at.checked_add(len.min(self.slot()) as usize)?).ok()?;
        Some((slice, via.clone()))
    }

    /// Makes a buffer, cut into slots of about equal length.
    fn add(&mut self, clocks: &mut Clocks) -> Result<(), Error> {
        let len = usize::try_from(self.len).map_err(|_| Error::BadLength(usize::MAX))?;
        let buf = clocks.time(Stage::Allocate, || self.heap.allocate(len))?.share();
        let len = buf.len() as u64;
        clocks.bytes(Stage::Allocate, len);
        let via = register(&*self.registrar, &buf.reference(), clocks)?;
        self.buffers += 1;
        let backing = buf.backing().clone();
        // Whole pages, so that direct I/O finds every slot aligned.
        let step = PageSize::SIZE_4K.round_up(len / len.div_ceil(SLOT)).unwrap_or(len) as usize;
        let mut rest = buf.into_slice();
        while !rest.is_empty() {
            let slice = rest.split_off_front(step.min(rest.len()));
            let len = slice.as_ref().map_or(0, BufferSlice::len);
            let (via, backing) = (via.clone(), backing.clone());
            self.slots.push(Slot { slice, returned: Vec::new(), returned_bytes: 0, len, via, backing });
        }
        Ok(())
    }
}

/// Registers a buffer, of which a device only reads.
pub(crate) fn register(bus: &dyn Registrar, buffer: &BufferRef, clocks: &mut Clocks) -> Result<Registered, Error> {
    let pinned = clocks.time(Stage::Register, || bus.pin(buffer))?;
    let mapping = clocks.time(Stage::Map, || bus.map(pinned, Access::READ))?;
    for stage in [Stage::Register, Stage::Map] {
        clocks.bytes(stage, buffer.len() as u64);
    }
    Ok(Registered::from_mapping(mapping))
}

/// Makes sure that there are `wanted` bytes of memory for `what`.
pub(crate) fn ask(wanted: u64, what: &'static str) -> Result<(), FillError> {
    if wanted < WORTH_ASKING {
        return Ok(());
    }
    match dmalane_dma::room() {
        Some(room) if room.bytes < wanted => {
            Err(FillError::NoRoom { what, wanted, left: room.bytes, limited_by: room.limited_by })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use dmalane_device::NoIommu;
    use dmalane_dma::AnonHeap;

    use super::*;

    #[test]
    fn a_device_that_is_slower_than_reads_gets_no_more_buffers() {
        const LEN: usize = 8 << 20;
        let mut staging = Staging::new(Arc::new(AnonHeap::new()), Arc::new(NoIommu::new()), LEN as u64);
        let mut clocks = Clocks::default();
        let mut taken = Vec::new();
        for (buffers, sent) in [(1, usize::MAX), (1, LEN / 2 + 1), (2, LEN / 2), (2, LEN + 1), (3, LEN)] {
            while let Some((slot, slice, _)) = staging.take(u64::MAX, sent, &mut clocks).unwrap() {
                taken.push((slot, slice));
                if staging.slots.iter().all(|slot| slot.slice.is_none()) {
                    break;
                }
            }
            assert_eq!(staging.size().0, buffers, "{sent} bytes sent");
        }
        let (slot, slice) = taken.pop().unwrap();
        staging.put_back(slot, slice);
        assert!(staging.take(u64::MAX, usize::MAX, &mut clocks).unwrap().is_some(), "a slot that is free is taken");
    }
}
