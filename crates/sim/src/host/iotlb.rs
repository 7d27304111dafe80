//! A small cache of translations, as a device's IOMMU unit keeps one.
//!
//! An entry is a stretch: IOVAs that follow each other, with one access right, whose bytes follow each other in one
//! buffer. It comes from walking the page table leaf by leaf and looking every frame up in the directory, and it is
//! good until the next invalidation. There are two sets of entries. *Pages* are made of one leaf each. *Windows* reach
//! as far as a stretch does within 2 MiB of IOVAs: they are made for windows that miss again and again, so that a large
//! buffer in small leaves is walked once and not each time. (Hardware does the same where it can: AMD's and Arm's TLBs
//! coalesce neighbouring pages.)

use dmalane_addr::{Access, Address, Iova, PhysAddr, Span};
use dmalane_iopt::{Format, HeapTables, PageTable};

use super::directory::{Directory, Stretch};
use super::frames::FRAME;

/// Entries of each set.
const ENTRIES: usize = 256;
const WINDOW: u64 = 2 << 20;

type Table<F> = PageTable<F, Iova, PhysAddr, HeapTables<PhysAddr>>;

/// A stretch of IOVAs and the bytes behind it.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    first: u64,
    /// 0: empty.
    len: u64,
    access: Access,
    bytes: Stretch,
    /// The count of invalidations at which it was made.
    epoch: u64,
}

impl Entry {
    /// The bytes from `at` on, which lies within.
    #[inline]
    pub(super) fn bytes_from(&self, at: Iova) -> Stretch {
        self.bytes.skip(at.bits() - self.first)
    }

    /// Where it begins.
    #[inline]
    pub(super) fn first(&self) -> Iova {
        Iova::new(self.first)
    }

    /// All of its bytes.
    #[inline]
    pub(super) fn bytes(&self) -> Stretch {
        self.bytes
    }

    /// The access that a device has there.
    #[inline]
    pub(super) fn access(&self) -> Access {
        self.access
    }
}

/// Misses in the window that last missed here.
#[derive(Clone, Copy)]
struct Misses {
    window: u64,
    epoch: u64,
    count: u32,
}

pub(super) struct Iotlb {
    pages: Box<[Option<Entry>; ENTRIES]>,
    windows: Box<[Option<Entry>; ENTRIES]>,
    misses: Box<[Misses; ENTRIES]>,
    epoch: u64,
    /// Entries of page tables that were read to fill this one.
    entries_read: u64,
}

impl Iotlb {
    pub(super) fn new() -> Self {
        let misses = Box::new([Misses { window: 0, epoch: 0, count: 0 }; ENTRIES]);
        let [pages, windows] = [(); 2].map(|()| Box::new([None; ENTRIES]));
        Self { pages, windows, misses, epoch: 0, entries_read: 0 }
    }

    #[inline]
    pub(super) fn entries_read(&self) -> u64 {
        self.entries_read
    }

    /// From now on only what was filled under this count of invalidations is found.
    pub(super) fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    #[inline]
    pub(super) fn find(&self, at: Iova) -> Option<&Entry> {
        let at = at.bits();
        let hit = |e: &&Entry| at.wrapping_sub(e.first) < e.len && e.epoch == self.epoch;
        let window = self.windows[(at / WINDOW) as usize % ENTRIES].as_ref();
        window.filter(hit).or_else(|| self.pages[(at / FRAME) as usize % ENTRIES].as_ref().filter(hit))
    }

    /// Walks for what `find` did not find; `None` when nothing is mapped there.
    #[cold]
    pub(super) fn fill<F: Format>(&mut self, at: Iova, table: &Table<F>, directory: &Directory) -> Option<Entry> {
        self.entries_read += F::LEVELS as u64;
        let leaf = table.lookup(at)?;
        // Of a large leaf, the part within the window.
        let first = leaf.at.bits().max(at.bits() & !(WINDOW - 1));
        let len = leaf.size.bytes().min(WINDOW);
        // A leaf without a frame behind it would be a bug of the host; to the device it is a fault.
        let to = leaf.to.checked_add(first - leaf.at.bits())?;
        let here = to.checked_add(at.bits() - first)?;
        let epoch = self.epoch;
        let mut entry = Entry { first, len, access: leaf.access, bytes: directory.locate(to, len)?, epoch };
        entry.len = entry.bytes.len();
        if at.bits() - first >= entry.len {
            // Frames of two buffers behind one leaf: what lies here is another stretch.
            let page = at.bits() & !(FRAME - 1);
            let bytes = directory.locate(PhysAddr::new(here.bits() & !(FRAME - 1)), first + len - page)?;
            entry = Entry { first: page, len: bytes.len(), bytes, ..entry };
        }
        if entry.len == WINDOW {
            self.windows[(at.bits() / WINDOW) as usize % ENTRIES] = Some(entry);
            return Some(entry);
        }
        self.pages[(at.bits() / FRAME) as usize % ENTRIES] = Some(entry);
        let window = at.bits() / WINDOW;
        let misses = &mut self.misses[window as usize % ENTRIES];
        if misses.window != window || misses.epoch != epoch {
            *misses = Misses { window, epoch, count: 0 };
        }
        misses.count += 1;
        // Ever more rarely: many small buffers in one window would have it walked for each of them.
        if misses.count >= 2 && misses.count.is_power_of_two() {
            let slot = &mut self.windows[window as usize % ENTRIES];
            // The whole window is walked, leaf by leaf.
            self.entries_read += WINDOW / FRAME;
            let stretch = stretch(at, table, directory, epoch)?;
            if !slot.is_some_and(|e| e.epoch == epoch && e.first / WINDOW == window && e.len >= stretch.len) {
                *slot = Some(stretch);
            }
        }
        Some(entry)
    }
}

/// The whole stretch around `at` within its window.
fn stretch<F: Format>(at: Iova, table: &Table<F>, directory: &Directory, epoch: u64) -> Option<Entry> {
    let window = Span::new(Iova::new(at.bits() & !(WINDOW - 1)), WINDOW)?;
    let mut current: Option<Entry> = None;
    for run in table.runs(window) {
        let mut done = 0;
        while done < run.len {
            let bytes = directory.locate(run.to.checked_add(done)?, run.len - done)?;
            let first = run.at.bits() + done;
            done += bytes.len();
            let joined = current.filter(|e| e.first + e.len == first && e.access == run.access);
            let joined =
                joined.and_then(|e| Some(Entry { bytes: e.bytes.join(bytes)?, len: e.len + bytes.len(), ..e }));
            if joined.is_none()
                && current.is_some_and(|e| at.bits() - e.first.min(at.bits()) < e.len && e.first <= at.bits())
            {
                return current;
            }
            current = joined.or(Some(Entry { first, len: bytes.len(), access: run.access, bytes, epoch }));
        }
    }
    current.filter(|e| e.first <= at.bits() && at.bits() - e.first < e.len)
}

#[cfg(test)]
mod tests {
    use dmalane_addr::{Segment, SgTable};
    use dmalane_dma::{AnonHeap, Heap, SharedBuf};
    use dmalane_iopt::X86_64_4Level;

    use super::*;

    /// A leaf of 2 MiB, of which the second half and 2 MiB beyond are one buffer: nothing is mapped beyond.
    #[test]
    fn an_entry_ends_with_its_leaf() {
        const BASE: u64 = 4 << 30;
        let half = WINDOW / 2;
        let mut directory = Directory::default();
        let mut first = 0;
        for len in [half, half + WINDOW] {
            let buffer = AnonHeap::new().allocate(len as usize).unwrap().share().reference();
            let mut frames = SgTable::new();
            frames.push(PhysAddr::new(BASE + first), len).unwrap();
            directory.enter(buffer, 0, &frames).unwrap();
            first += len;
        }
        let mut table: Table<X86_64_4Level> = PageTable::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
        let leaf = Segment { addr: PhysAddr::new(BASE), len: WINDOW };
        table.map_sg(Iova::new(WINDOW), [leaf], Access::RW).unwrap();
        assert_eq!(table.lookup(Iova::new(WINDOW)).unwrap().size.bytes(), WINDOW);
        let mut tlb = Iotlb::new();
        let mut fill = |at: u64| {
            let entry = tlb.fill(Iova::new(WINDOW + at), &table, &directory).unwrap();
            (entry.first - WINDOW, entry.len, entry.bytes.len())
        };
        assert_eq!(fill(0), (0, half, half));
        for page in [half, half + FRAME, WINDOW - FRAME] {
            let left = WINDOW - page;
            assert_eq!(fill(page + 8), (page, left, left), "at {page:#x}");
        }
        assert!(tlb.fill(Iova::new(2 * WINDOW), &table, &directory).is_none());
    }

    /// Pages of one buffer that follow each other, behind leaves of two rights and with a page between them where
    /// nothing is mapped.
    #[test]
    fn a_stretch_has_one_right_and_no_hole() {
        const BASE: u64 = 4 << 30;
        let buffer = AnonHeap::new().allocate(3 * FRAME as usize).unwrap().share().reference();
        let mut frames = SgTable::new();
        frames.push(PhysAddr::new(BASE), 3 * FRAME).unwrap();
        let mut directory = Directory::default();
        directory.enter(buffer, 0, &frames).unwrap();
        let mut table: Table<X86_64_4Level> = PageTable::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
        for (frame, page, access) in [(0, 0, Access::READ), (1, 1, Access::RW), (2, 3, Access::RW)] {
            let leaf = Segment { addr: PhysAddr::new(BASE + frame * FRAME), len: FRAME };
            table.map_sg(Iova::new(WINDOW + page * FRAME), [leaf], access).unwrap();
        }
        for (page, access) in [(0, Some(Access::READ)), (1, Some(Access::RW)), (2, None), (3, Some(Access::RW))] {
            let first = WINDOW + page * FRAME;
            let found = stretch(Iova::new(first + 8), &table, &directory, 0);
            let found = found.map(|entry| (entry.first, entry.len, entry.bytes.len(), entry.access));
            assert_eq!(found, access.map(|access| (first, FRAME, FRAME, access)), "page {page}");
        }
    }

    #[test]
    fn an_entry_of_a_large_leaf_is_a_window() {
        const GIB: u64 = 1 << 30;
        let buffer = SharedBuf::sparse("test", (GIB + WINDOW) as usize).unwrap().reference();
        let mut frames = SgTable::new();
        frames.push(PhysAddr::new(4 * GIB), GIB + WINDOW).unwrap();
        let mut directory = Directory::default();
        directory.enter(buffer, 0, &frames).unwrap();
        let mut table: Table<X86_64_4Level> = PageTable::new(HeapTables::new(PhysAddr::new(1 << 40))).unwrap();
        let leaf = Segment { addr: PhysAddr::new(4 * GIB), len: GIB };
        table.map_sg(Iova::new(GIB), [leaf], Access::RW).unwrap();
        assert_eq!(table.lookup(Iova::new(GIB)).unwrap().size.bytes(), GIB);
        let mut tlb = Iotlb::new();
        for first in [GIB, GIB + WINDOW, 2 * GIB - WINDOW] {
            let entry = tlb.fill(Iova::new(first + 8), &table, &directory).unwrap();
            assert_eq!((entry.first, entry.len, entry.bytes.len()), (first, WINDOW, WINDOW));
        }
    }
}
