//! Memory that is still to be taken: chunk by chunk, in the order of the buffers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmalane_dma::{Absent, BufferSlice, PageKind, Reserved, lock};
use dmalane_queue::Registered;

use super::error::{Failed, FillError};
use super::fragment::{Fragment, Tag};
use super::job::{Extent, Job};
use super::landing::{Busy, Landing, Place};
use super::memory::{BufferMemory, Staging, ask};
use super::options::FillOptions;
use crate::clock::Clocks;

/// The memory of a job: what no worker has taken yet, and slots that were given back.
///
/// Chunks are taken front to back and do not overlap. The lock is held while one is taken, not while it is made
/// present; landing places have a lock of their own, which may be taken within it.
pub(super) struct Supply<'a> {
    /// Bytes of a chunk. A worker takes one while fewer bytes than this have memory and wait to be read.
    pub chunk: usize,
    /// Bytes of a read, at most. Reads end at multiples of this in their buffer.
    pub block: usize,
    lens: &'a [u64],
    /// For each buffer its extents, in the order of their destinations.
    plan: Vec<Vec<Extent>>,
    rest: Mutex<Rest<'a>>,
    /// The memory stays; else it is that of slots.
    pub stays: bool,
    /// Buffers whose memory is new, and so zero.
    fresh: Vec<bool>,
    /// Where reads go, if not to the memory itself.
    pub landing: Option<Landing>,
    /// Reads whose memory was taken and whose bytes were not sent on yet. Staging memory is not taken while there are
    /// many.
    pub unsent: AtomicUsize,
}

/// Memory that was not taken.
struct Rest<'a> {
    pages: Pages<'a>,
    /// The first buffer of which anything is left.
    buffer: usize,
    /// The extent with which its next chunk begins.
    extent: usize,
    /// No chunk was taken, and there will be several.
    first: bool,
}

enum Pages<'a> {
    Buffers(Vec<Reserved>),
    /// The next byte of the buffer goes to the next slot.
    Staging(&'a mut Staging, usize),
}

/// The answer of [`Supply::take`]: a chunk as `C`.
pub(super) enum Taken<C> {
    Chunk(C),
    /// There will be memory when some was given back, or when bytes that were read ahead are sent on.
    Later,
    /// Everything was taken, or the job failed.
    Nothing,
}

/// A chunk that was taken.
pub(super) struct Chunk<'s> {
    pub buffer: usize,
    /// Where it ends in the buffer.
    pub end: usize,
    /// The extents that lie in it, or partly so.
    pub extents: &'s [Extent],
    pub memory: ChunkMemory,
}

pub(super) enum ChunkMemory {
    /// Memory that is not present, and where reads into it land.
    Absent(Absent, Option<Place>),
    Slot(Fragment),
    /// The memory of the source itself, with its bytes.
    InPlace(Fragment),
}

/// Reads that have arrived in staging memory and wait to be sent on, at most.
const AHEAD: usize = 8;

impl<'a> Supply<'a> {
    /// Memory of staging buffers. `plan` has the extents of each buffer.
    pub fn of_staging(staging: &'a mut Staging, job: &'a Job, plan: Vec<Vec<Extent>>, options: &FillOptions) -> Self {
        let fresh = vec![false; job.buffers.len()];
        // A slot is free at once, so there is no point in taking one before there is room to read into it.
        Self { chunk: 1, ..Self::new(Pages::Staging(staging, 0), fresh, job, plan, options) }
    }

    /// As [`Supply::of_staging`], with buffers that stay, which are reserved here.
    pub fn of_buffers(
        memory: BufferMemory<'a>,
        job: &'a Job,
        plan: Vec<Vec<Extent>>,
        options: &FillOptions,
    ) -> Result<Self, FillError> {
        let mut reserved = Vec::new();
        for (buffer, len) in job.buffers.iter().enumerate() {
            // A buffer has at least a page.
            let len = usize::try_from(*len).map_err(|_| FillError::too_large(*len))?.max(1);
            reserved.push(memory.heap.reserve(len).map_err(|source| FillError::Memory { buffer, source })?);
        }
        enough(&reserved, 0)?;
        let all = usize::try_from(job.bytes()).unwrap_or(usize::MAX);
        let room = |more: usize| enough(&reserved, more.min(all) as u64).is_ok();
        let landing = memory.direct.then(|| Landing::new(&reserved, whole_pages(options.chunk), room)).flatten();
        let fresh = reserved.iter().map(Reserved::is_fresh).collect();
        Ok(Self { landing, stays: true, ..Self::new(Pages::Buffers(reserved), fresh, job, plan, options) })
    }

    fn new(pages: Pages<'a>, fresh: Vec<bool>, job: &'a Job, plan: Vec<Vec<Extent>>, options: &FillOptions) -> Self {
        let first = options.chunk < job.bytes();
        Self {
            chunk: whole_pages(options.chunk),
            block: whole_pages(options.block),
            lens: &job.buffers,
            plan,
            rest: Mutex::new(Rest { pages, buffer: 0, extent: 0, first }),
            stays: false,
            fresh,
            landing: None,
            unsent: AtomicUsize::new(0),
        }
    }

    /// Bytes that arrive together, about.
    pub fn piece(&self) -> u64 {
        match &lock(&self.rest).pages {
            Pages::Staging(staging, _) => staging.slot(),
            Pages::Buffers(_) => self.block.min(self.chunk) as u64,
        }
    }

    /// Whether the memory stays, and that of any buffer was used before.
    pub fn is_recycled(&self) -> bool {
        self.stays && self.fresh.contains(&false)
    }

    /// Whether the memory of a buffer is zero where nothing was read into it.
    pub fn is_fresh(&self, buffer: usize) -> bool {
        self.fresh[buffer]
    }

    /// Takes the next chunk. The worker has at most `depth` reads in flight. Bytes that need no read are taken when the
    /// device is not `full`, so that they count as read when it is their turn.
    pub fn take(&self, depth: usize, full: bool, clocks: &mut Clocks) -> Result<Taken<Chunk<'_>>, Failed> {
        let mut rest = lock(&self.rest);
        let Rest { pages, buffer: next, extent, first } = &mut *rest;
        let (buffer, memory, end) = loop {
            let buffer = *next;
            let Some(len) = self.lens.get(buffer) else { return Ok(Taken::Nothing) };
            let taken = match pages {
                Pages::Buffers(reserved) => {
                    let reserved = reserved.get_mut(buffer);
                    let copied = reserved.as_ref().is_some_and(|r| r.left() > 0 && r.is_better_copied_to());
                    let place = match self.landing.as_ref().filter(|_| copied).map_or(Ok(None), Landing::take) {
                        Ok(place) => place,
                        Err(Busy) => return Ok(Taken::Later),
                    };
                    // The first chunk is a single block, so that reading can begin.
                    let len = if std::mem::take(first) { self.block.min(self.chunk) } else { self.chunk };
                    let absent = reserved.and_then(|reserved| reserved.next(len));
                    absent.map(|absent| (absent.offset() + absent.len(), ChunkMemory::Absent(absent, place)))
                }
                Pages::Staging(_, at) if *at as u64 >= *len => {
                    *at = 0;
                    None
                }
                // As many reads may wait for their turn as are in flight, but a few. Reading further ahead would only
                // push them out of the processor's cache.
                Pages::Staging(..) if self.unsent.load(Ordering::Relaxed) >= depth + depth.min(AHEAD) => {
                    return Ok(Taken::Later);
                }
                Pages::Staging(staging, at) => match self.in_place(buffer, *extent, *at, staging) {
                    Some(_) if full => return Ok(Taken::Later),
                    Some((slice, via)) => {
                        let tag = Tag { buffer, offset: *at, is_read: false, slot: None, via: Some(via), landed: None };
                        *at += slice.len();
                        Some((*at, ChunkMemory::InPlace(Fragment { tag, slice })))
                    }
                    None => {
                        let taken = staging.take(*len - *at as u64, clocks);
                        let failed = |source| ((buffer, *at), FillError::Memory { buffer, source });
                        let Some((slot, slice, via)) = taken.map_err(failed)? else { return Ok(Taken::Later) };
                        let (slot, via) = (Some(slot), Some(via));
                        let tag = Tag { buffer, offset: *at, is_read: false, slot, via, landed: None };
                        *at += slice.len();
                        Some((*at, ChunkMemory::Slot(Fragment { tag, slice })))
                    }
                },
            };
            match taken {
                Some((end, memory)) => break (buffer, memory, end),
                None => (*next, *extent) = (buffer + 1, 0),
            }
        };
        let begin = *extent;
        let more = self.plan[buffer][begin..].partition_point(|e| e.to < end as u64);
        // The last extent may go on in the next chunk.
        *extent = (begin + more).saturating_sub(1).max(begin);
        drop(rest);
        let extents = &self.plan[buffer][begin..begin + more];
        Ok(Taken::Chunk(Chunk { buffer, end, extents, memory }))
    }

    /// The memory from `at` on in a buffer, where it is that of the source of its next extent.
    fn in_place(
        &self,
        buffer: usize,
        extent: usize,
        at: usize,
        staging: &Staging,
    ) -> Option<(BufferSlice, Registered)> {
        let at = at as u64;
        let e = self.plan[buffer][extent..].iter().find(|e| e.to + e.len > at)?;
        let within = at.checked_sub(e.to)?;
        staging.in_place(e.source, e.at.bits() + within, e.len - within)
    }

    /// Takes the right to a landing place back that was not used.
    pub fn give_back(&self, place: Option<Place>) {
        if let (Some(landing), Some(place)) = (&self.landing, place) {
            landing.give_back(place);
        }
    }

    /// Gives a slice back to its slot; returns the fragment if its memory stays.
    pub fn put_back(&self, fragment: Fragment) -> Option<Fragment> {
        if !self.stays
            && let Pages::Staging(staging, _) = &mut lock(&self.rest).pages
        {
            if let Some(slot) = fragment.tag.slot {
                staging.put_back(slot, fragment.slice);
            }
            return None;
        }
        Some(fragment)
    }
}

/// A length in whole pages, and one that can be allocated.
fn whole_pages(bytes: u64) -> usize {
    usize::try_from(bytes.clamp(1, 1 << 40)).unwrap_or(1 << 30).next_multiple_of(4096)
}

/// Bytes of the reservations that the kernel has yet to find memory for: none for what is present, nor for huge pages
/// once reserved.
fn to_come(reserved: &[Reserved]) -> usize {
    let is_there =
        |r: &Reserved| matches!(r.backing().kind, PageKind::Hugetlb2M | PageKind::Hugetlb1G) || r.is_present();
    reserved.iter().filter(|r| !is_there(r)).fold(0, |sum, r| sum.saturating_add(r.len()))
}

/// Makes sure that there is memory for the reservations and `more` bytes: where the kernel overcommits, a reservation
/// promises nothing, and a cgroup that runs full has somebody killed.
fn enough(reserved: &[Reserved], more: u64) -> Result<(), FillError> {
    ask((to_come(reserved) as u64).saturating_add(more), "the buffers")
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{AnonHeap, Heap, Pool};

    use super::*;

    #[test]
    fn memory_that_is_present_is_not_asked_for_again() {
        let base = AnonHeap::starting_at(PageKind::Base);
        let pool = Pool::new(AnonHeap::starting_at(PageKind::Base), 1 << 20);
        drop(pool.allocate(64 << 10).unwrap());
        let reserved = [base.reserve(8 << 10).unwrap(), pool.reserve(64 << 10).unwrap()];
        assert_eq!((reserved[1].is_present(), to_come(&reserved)), (true, 8 << 10));
    }
}
