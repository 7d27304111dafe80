//! Memory that is still to be taken: chunk by chunk, in the order of the buffers; or of a few lanes of them in turn.

use std::collections::VecDeque;
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
    /// For each buffer the ends of its lanes; empty where each is one.
    lanes: Vec<Vec<usize>>,
    /// Lanes of which chunks are taken in turn.
    at_once: usize,
    /// The memory stays; else it is that of slots.
    pub stays: bool,
    /// Buffers whose memory is new, and so zero.
    fresh: Vec<bool>,
    /// Where reads go, if not to the memory itself.
    pub landing: Option<Landing>,
    /// Reads whose memory was taken and whose bytes were not sent on yet. Staging memory is not taken while there are
    /// many.
    pub unsent: AtomicUsize,
    /// Bytes that were handed to the device and have not come back: of staging memory, and of sources in place.
    pub sent: AtomicUsize,
}

/// Memory that was not taken.
struct Rest<'a> {
    pages: Pages<'a>,
    /// Lanes of which something was taken, or the first one. The next chunk is one of the first.
    begun: VecDeque<Cursor>,
    /// The next lane, and its buffer.
    buffer: usize,
    lane: usize,
    /// No chunk was taken, and there will be several.
    first: bool,
}

enum Pages<'a> {
    Buffers(Vec<Reserved>),
    Staging(&'a mut Staging),
}

/// The rest of a lane.
struct Cursor {
    buffer: usize,
    /// The extent with which its next chunk begins.
    extent: usize,
    /// Of staging memory: the next byte of the buffer, which goes to the next slot, and the end.
    at: usize,
    end: usize,
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

/// The most that direct I/O asks for.
const ALIGNED: usize = 64 << 10;

/// Reads that have arrived in staging memory and wait to be sent on, at most.
const AHEAD: usize = 8;

impl<'a> Supply<'a> {
    /// Memory of staging buffers. `plan` has the extents of each buffer.
    pub fn of_staging(staging: &'a mut Staging, job: &'a Job, plan: Vec<Vec<Extent>>, options: &FillOptions) -> Self {
        let fresh = vec![false; job.buffers.len()];
        // A slot is free at once, so there is no point in taking one before there is room to read into it.
        Self { chunk: 1, ..Self::new(Pages::Staging(staging), fresh, job, plan, options) }
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
            rest: Mutex::new(Rest { pages, begun: VecDeque::new(), buffer: 0, lane: 0, first }),
            lanes: Vec::new(),
            at_once: 1,
            stays: false,
            fresh,
            landing: None,
            unsent: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
        }
    }

    /// Takes staging memory for so many lanes in turn, which end here in each buffer.
    pub fn in_lanes(self, lanes: Vec<Vec<usize>>, at_once: usize) -> Self {
        Self { lanes, at_once, ..self }
    }

    /// Bytes that arrive together, about.
    pub fn piece(&self) -> u64 {
        match &lock(&self.rest).pages {
            Pages::Staging(staging) => staging.slot(),
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
        let (buffer, memory, end, extent) = loop {
            self.begin(&mut rest);
            let Rest { pages, begun, first, .. } = &mut *rest;
            let lanes = if self.at_once > 1 { begun.len() } else { 0 };
            let Some(Cursor { buffer, extent, at, end }) = begun.front_mut() else { return Ok(Taken::Nothing) };
            let buffer = *buffer;
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
                Pages::Staging(_) if at >= end => None,
                // As many reads may wait for their turn as are in flight, but a few. Reading further ahead would only
                // push them out of the processor's cache.
                Pages::Staging(_) if self.unsent.load(Ordering::Relaxed) >= self.ahead(depth, lanes) => {
                    return Ok(Taken::Later);
                }
                Pages::Staging(staging) => match self.in_place(buffer, *extent, *at, staging) {
                    Some(_) if full => return Ok(Taken::Later),
                    Some((slice, via)) => {
                        let tag = Tag { buffer, offset: *at, is_read: false, slot: None, via: Some(via), landed: None };
                        *at += slice.len();
                        Some((*at, ChunkMemory::InPlace(Fragment { tag, slice })))
                    }
                    None => {
                        // The first bytes of a lane that begins within a block are read alone: direct I/O needs what
                        // follows at the place in memory that it has in the file.
                        let head = if lanes > 0 { at.next_multiple_of(ALIGNED) - *at } else { 0 };
                        let len = if head > 0 { head.min(*end - *at) } else { *end - *at };
                        let taken = staging.take(len as u64, self.sent.load(Ordering::Relaxed), clocks);
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
                Some((end, memory)) => break (buffer, memory, end, extent),
                None => drop(begun.pop_front()),
            }
        };
        let begin = *extent;
        let more = self.plan[buffer][begin..].partition_point(|e| e.to < end as u64);
        // The last extent may go on in the next chunk.
        *extent = (begin + more).saturating_sub(1).max(begin);
        if self.at_once > 1 {
            rest.begun.rotate_left(1);
        }
        drop(rest);
        let extents = &self.plan[buffer][begin..begin + more];
        Ok(Taken::Chunk(Chunk { buffer, end, extents, memory }))
    }

    /// Reads that may be in flight, or wait for their turn, of so many lanes.
    fn ahead(&self, depth: usize, lanes: usize) -> usize {
        (depth + depth.min(AHEAD)).max(2 * lanes)
    }

    /// Begins lanes until there are as many as are taken in turn.
    fn begin(&self, rest: &mut Rest<'_>) {
        while rest.begun.len() < self.at_once
            && let Some(len) = self.lens.get(rest.buffer)
        {
            let (buffer, lane) = (rest.buffer, rest.lane);
            let ends = self.lanes.get(buffer).map_or(&[][..], Vec::as_slice);
            let at = lane.checked_sub(1).map_or(0, |before| ends[before]);
            let extent = self.plan[buffer].partition_point(|e| e.to + e.len <= at as u64);
            let end = ends.get(lane).map_or(*len as usize, |end| *end);
            rest.begun.push_back(Cursor { buffer, extent, at, end });
            (rest.buffer, rest.lane) = if lane + 1 < ends.len() { (buffer, lane + 1) } else { (buffer + 1, 0) };
        }
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
    pub fn put_back(&self, fragment: Fragment) {
        if let Pages::Staging(staging) = &mut lock(&self.rest).pages
            && let Some(slot) = fragment.tag.slot
        {
            staging.put_back(slot, fragment.slice);
        }
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
    use std::sync::Arc;

    use dmalane_device::NoIommu;
    use dmalane_dma::{AnonHeap, Heap, Pool, Registrar};

    use super::*;

    /// Chunks of several lanes in turn are all of the bytes once, with the extents that lie in them.
    #[test]
    fn lanes_are_taken_in_turn_and_as_a_whole() {
        let len = 9 << 20;
        let job = Job::whole(&[len as u64, 100, 0, 5000]);
        let plan = || job.by_buffer(4).unwrap();
        let options = FillOptions::default();
        let lanes = vec![vec![(2 << 20) + 8, 4 << 20, (4 << 20) + 4095, len], vec![100], vec![0], vec![8, 5000]];
        for at_once in [1, 2, 3, 8] {
            let registrar = Arc::new(NoIommu::new());
            let mut staging = Staging::new(registrar.heap(None), registrar, 16 << 20);
            let supply = Supply::of_staging(&mut staging, &job, plan(), &options).in_lanes(lanes.clone(), at_once);
            let (mut clocks, mut places) = (Clocks::default(), Vec::new());
            while let Taken::Chunk(chunk) = supply.take(64, false, &mut clocks).unwrap() {
                let ChunkMemory::Slot(fragment) = chunk.memory else { unreachable!("staging memory") };
                let (buffer, start) = (chunk.buffer, fragment.tag.offset);
                assert!(fragment.end() == chunk.end && start < chunk.end);
                let lane = lanes[buffer].partition_point(|end| *end <= start);
                let first = lane.checked_sub(1).map_or(0, |before| lanes[buffer][before]);
                assert!(
                    chunk.end <= lanes[buffer][lane]
                        && (at_once == 1 || start == first || start.is_multiple_of(ALIGNED))
                );
                let [extent] = chunk.extents else { panic!("one extent") };
                assert_eq!((extent.buffer, extent.to), (buffer, 0));
                places.push((buffer, lane, start, chunk.end));
                supply.put_back(fragment);
            }
            assert!(matches!(supply.take(64, false, &mut clocks), Ok(Taken::Nothing)));
            let others = places.iter().position(|(buffer, lane, ..)| (*buffer, *lane) != (0, 0)).unwrap();
            assert_eq!(others == 1, at_once > 1);
            places.sort_unstable();
            for (buffer, len) in job.buffers.iter().enumerate() {
                let parts = places.iter().filter(|place| place.0 == buffer);
                let end = parts.fold(0, |end, (_, _, from, to)| if *from == end { *to } else { usize::MAX });
                assert_eq!(end as u64, *len, "{at_once} {buffer}");
            }
        }
    }

    #[test]
    fn memory_that_is_present_is_not_asked_for_again() {
        let base = AnonHeap::starting_at(PageKind::Base);
        let pool = Pool::new(AnonHeap::starting_at(PageKind::Base), 1 << 20);
        drop(pool.allocate(64 << 10).unwrap());
        let reserved = [base.reserve(8 << 10).unwrap(), pool.reserve(64 << 10).unwrap()];
        assert_eq!((reserved[1].is_present(), to_come(&reserved)), (true, 8 << 10));
    }
}
