//! The frame directory: which buffer's bytes a synthetic frame stands for.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::sync::RwLockReadGuard;

use dmalane_addr::{Access, Iova, PhysAddr, SgTable};
use dmalane_dma::{BufferRef, VolatileSlice};
use dmalane_iopt::{Format, HeapTables, PageTable};

use super::frames::{FRAME, ZONE, frame_of};

/// Which page of which buffer; `FREE` when of none.
#[derive(Clone, Copy)]
struct Owner {
    slot: u32,
    page: u32,
}

/// Contiguous bytes of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    slot: u32,
    offset: u64,
    len: u64,
}

impl Stretch {
    /// Bytes.
    #[inline]
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The rest behind the first `bytes`, which are fewer than it has.
    #[inline]
    pub(super) fn skip(self, bytes: u64) -> Stretch {
        Stretch { offset: self.offset + bytes, len: self.len - bytes, ..self }
    }

    /// The first `bytes` at most.
    #[inline]
    pub(super) fn at_most(self, bytes: u64) -> Stretch {
        Stretch { len: self.len.min(bytes), ..self }
    }

    /// This stretch and `next` as one, when `next` continues it.
    #[inline]
    pub(super) fn join(self, next: Stretch) -> Option<Stretch> {
        let continues = self.slot == next.slot && self.offset + self.len == next.offset;
        continues.then_some(Stretch { len: self.len + next.len, ..self })
    }
}

/// State that the device side reads and the driver side changes.
pub(super) struct Translation<F: Format> {
    pub(super) table: PageTable<F, Iova, PhysAddr, HeapTables<PhysAddr>>,
    pub(super) directory: Directory,
}

/// The translations, locked against changes, with the bytes of the stretch that was used last: small copies often
/// follow each other in one buffer, and each would wait for its look-up.
pub(super) struct Reading<'a, F: Format> {
    translation: RwLockReadGuard<'a, Translation<F>>,
    /// Where the stretch begins, what a device may do there, and its bytes. They are lent out for no longer than `self`
    /// is borrowed.
    last: Option<(Iova, Access, VolatileSlice<'a>)>,
}

impl<'a, F: Format> Reading<'a, F> {
    pub(super) fn new(translation: RwLockReadGuard<'a, Translation<F>>) -> Self {
        Self { translation, last: None }
    }

    /// The bytes at `at` if all of them lie in the stretch that was kept and `wanted` is permitted there.
    #[inline]
    pub(super) fn last(&self, at: Iova, len: usize, wanted: Access) -> Option<VolatileSlice<'_>> {
        let (first, access, bytes) = self.last.as_ref()?;
        // Of an address before the stretch the offset wraps, and lies in none.
        let offset = usize::try_from(at.bits().wrapping_sub(first.bits())).ok()?;
        bytes.sub(offset, len).filter(|_| access.contains(wanted))
    }

    /// Keeps a stretch at hand that begins at `first`.
    #[inline]
    pub(super) fn keep(&mut self, first: Iova, access: Access, stretch: Stretch) {
        let view = self.translation.directory.view(stretch);
        // SAFETY: a view is valid while the memory is mapped, and the directory holds a reference to it until `remove`,
        // for which the lock must be held for writing. `self` holds it for reading for as long as it has this view, and
        // `last` lends the view for no longer than that.
        let view = view.map(|view| unsafe { std::mem::transmute::<VolatileSlice<'_>, VolatileSlice<'a>>(view) });
        self.last = view.map(|view| (first, access, view));
    }
}

impl<F: Format> Deref for Reading<'_, F> {
    type Target = Translation<F>;

    fn deref(&self) -> &Translation<F> {
        &self.translation
    }
}

const FREE: Owner = Owner { slot: u32::MAX, page: 0 };

#[derive(Default)]
pub(super) struct Directory {
    zones: Vec<Vec<Owner>>,
    slots: Vec<Option<BufferRef>>,
    vacant: Vec<u32>,
    frames: u64,
}

impl Directory {
    /// Enters the frames of a buffer from one of its pages on. `None`, and nothing entered, when it has more pages or
    /// the directory more buffers than 32 bits count.
    pub(super) fn enter(&mut self, buffer: BufferRef, first: u64, frames: &SgTable<PhysAddr>) -> Option<()> {
        u32::try_from(first.checked_add(frames.len() / FRAME)?).ok()?;
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.slots.len()).ok().filter(|s| *s != FREE.slot)?;
                self.slots.push(None);
                slot
            }
        };
        self.slots[slot as usize] = Some(buffer);
        self.frames += frames.len() / FRAME;
        let mut page = first as u32; // checked above, with all that follow
        self.set(frames, || {
            page += 1;
            Owner { slot, page: page - 1 }
        });
        Some(())
    }

    /// Removes a buffer's frames again.
    pub(super) fn remove(&mut self, frames: &SgTable<PhysAddr>) {
        if let Some(first) = frames.segments().next()
            && let Some(owner) = self.owner(first.addr)
        {
            self.slots[owner.slot as usize] = None;
            self.vacant.push(owner.slot);
        }
        self.frames -= frames.len() / FRAME;
        self.set(frames, || FREE);
    }

    /// Frames that stand for something.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// The buffer's bytes behind `addr`, up to `len` of them as far as they are contiguous in the buffer too. `None`
    /// for a frame that stands for nothing.
    pub(super) fn locate(&self, addr: PhysAddr, len: u64) -> Option<Stretch> {
        let first = self.owner(addr)?;
        let within = addr.bits() % FRAME;
        let mut have = FRAME - within;
        while have < len {
            let next = PhysAddr::new(addr.bits().checked_add(have)?);
            // `have + within` is a whole number of frames; a page number plus a length that fits a buffer fits 64 bits.
            let page = u64::from(first.page) + (have + within) / FRAME;
            match self.owner(next) {
                Some(o) if o.slot == first.slot && u64::from(o.page) == page => have += FRAME,
                _ => break,
            }
        }
        Some(Stretch { slot: first.slot, offset: u64::from(first.page) * FRAME + within, len: have.min(len) })
    }

    /// The bytes of a stretch.
    #[inline]
    pub(super) fn view(&self, stretch: Stretch) -> Option<VolatileSlice<'_>> {
        let buffer = self.slots.get(stretch.slot as usize)?.as_ref()?;
        // SAFETY: `HeldPort::access` writes only where a leaf of the IOMMU permits it, under the lock that
        // `Undo::unmap` takes to remove the leaf. `map_list` lets each `Pinned` admit the access before it makes the
        // leaf, and `Mapping` drops them after the unmapping.
        let bytes = unsafe { buffer.device_view() };
        bytes.sub(usize::try_from(stretch.offset).ok()?, usize::try_from(stretch.len).ok()?)
    }

    fn owner(&self, addr: PhysAddr) -> Option<Owner> {
        let frame = frame_of(addr)?;
        let owner = *self.zones.get((frame / ZONE) as usize)?.get((frame % ZONE) as usize)?;
        (owner.slot != FREE.slot).then_some(owner)
    }

    fn set(&mut self, frames: &SgTable<PhysAddr>, mut owner: impl FnMut() -> Owner) {
        for segment in frames.segments() {
            let first = frame_of(segment.addr).expect("frames of this host");
            for frame in first..first + (segment.len / FRAME) as u32 {
                let zone = (frame / ZONE) as usize;
                if zone >= self.zones.len() {
                    self.zones.resize_with(zone + 1, Vec::new);
                }
                let zone = &mut self.zones[zone];
                if zone.is_empty() {
                    zone.resize(ZONE as usize, FREE);
                }
                zone[(frame % ZONE) as usize] = owner();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::Segment;
    use dmalane_dma::{AnonHeap, Heap};

    use super::*;

    fn buffer(frames: u64) -> BufferRef {
        AnonHeap::new().allocate((frames * FRAME) as usize).unwrap().share().reference()
    }

    /// Frames of this host, from the first one on.
    fn frames(first: u64, count: u64) -> Segment<PhysAddr> {
        Segment { addr: PhysAddr::new((4 << 30) + first * FRAME), len: count * FRAME }
    }

    fn table(segments: &[Segment<PhysAddr>]) -> SgTable<PhysAddr> {
        let mut table = SgTable::new();
        segments.iter().for_each(|segment| table.push(segment.addr, segment.len).unwrap());
        table
    }

    #[test]
    fn a_stretch_ends_with_its_buffer() {
        let mut directory = Directory::default();
        // The second begins with the page that would follow, as part of its buffer alone can be entered.
        directory.enter(buffer(2), 0, &table(&[frames(0, 2)])).unwrap();
        directory.enter(buffer(4), 2, &table(&[frames(2, 2)])).unwrap();
        let located = |first: u64, within: u64, len: u64| {
            let at = PhysAddr::new(frames(first, 1).addr.bits() + within);
            let Stretch { slot, offset, len } = directory.locate(at, len)?;
            Some((slot, offset, len))
        };
        assert_eq!(located(0, 0, 4 * FRAME), Some((0, 0, 2 * FRAME)));
        assert_eq!(located(1, 8, 4 * FRAME), Some((0, FRAME + 8, FRAME - 8)));
        assert_eq!(located(2, 0, 4 * FRAME), Some((1, 2 * FRAME, 2 * FRAME)), "nothing is behind it");
        assert_eq!((located(0, 0, 100), located(4, 0, 1)), (Some((0, 0, 100)), None));
    }

    #[test]
    fn a_stretch_ends_where_pages_of_the_buffer_do_not_follow_each_other() {
        let mut directory = Directory::default();
        // Pages 0 to 3 in the order 2, 3, 1, 0 of their frames.
        let order = [frames(3, 1), frames(2, 1), frames(0, 2)];
        directory.enter(buffer(4), 0, &table(&order)).unwrap();
        let located = |first: u64| directory.locate(frames(first, 1).addr, 4 * FRAME).map(|s| (s.offset, s.len));
        let pages = [(0, (2, 2)), (1, (3, 1)), (2, (1, 1)), (3, (0, 1))];
        for (frame, (page, count)) in pages {
            assert_eq!(located(frame), Some((page * FRAME, count * FRAME)), "frame {frame}");
        }
    }

    #[test]
    fn a_buffer_that_is_removed_is_left_alone() {
        let mut directory = Directory::default();
        let shared = AnonHeap::new().allocate(2 * FRAME as usize).unwrap().share();
        let these = table(&[frames(0, 2)]);
        directory.enter(shared.reference(), 0, &these).unwrap();
        directory.remove(&these);
        assert_eq!((directory.frames(), shared.into_cpu().is_ok()), (0, true));
        // What takes its slot is not behind its frames.
        directory.enter(buffer(2), 0, &table(&[frames(2, 2)])).unwrap();
        assert!([0, 1].iter().all(|frame| directory.locate(frames(*frame, 1).addr, 1).is_none()));
    }

    #[test]
    fn a_page_number_has_32_bits() {
        let mut directory = Directory::default();
        let these = table(&[frames(0, 2)]);
        for first in [u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::MAX] {
            assert!(directory.enter(buffer(2), first, &these).is_none(), "{first:#x}");
        }
        assert_eq!(directory.frames(), 0);
        directory.enter(buffer(2), u64::from(u32::MAX) - 2, &these).unwrap();
    }
}
