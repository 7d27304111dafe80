//! Claims of workers: chunks are made present and cut into reads.

use std::sync::atomic::Ordering;
use std::time::Instant;

use dmalane_dma::{Absent, BufferSlice};

use super::error::{Failed, FillError};
use super::fragment::{Fragment, Read, Tag};
use super::job::Extent;
use super::landing::Place;
use super::state::State;
use super::supply::{Chunk, ChunkMemory, Taken};
use super::watch::Event;
use crate::clock::Clocks;
use crate::stage::Stage;

impl State<'_, '_> {
    /// Takes the next chunk, makes it present and cuts it into reads: none where its bytes were in memory already. The
    /// worker has at most `depth` reads in flight.
    pub fn claim(&self, depth: usize, clocks: &mut Clocks) -> Taken<Vec<Read>> {
        // As many reads of staging memory as there are workers.
        let depth = depth.max(self.crew.at_work());
        let claimed = self.supply.take(depth, self.device_is_full(), clocks).and_then(|taken| match taken {
            Taken::Chunk(chunk) => self.begin(chunk, clocks).map(Taken::Chunk),
            Taken::Later => Ok(Taken::Later),
            Taken::Nothing => Ok(Taken::Nothing),
        });
        claimed.unwrap_or_else(|failed| {
            self.fail(failed);
            Taken::Nothing
        })
    }

    /// Makes a chunk present, or gives it a landing place.
    fn begin(
        &self,
        Chunk { buffer, end, extents, memory }: Chunk<'_>,
        clocks: &mut Clocks,
    ) -> Result<Vec<Read>, Failed> {
        let (absent, place) = match memory {
            ChunkMemory::Slot(fragment) => return Ok(self.cut(fragment, extents)),
            ChunkMemory::InPlace(fragment) => {
                self.reading();
                let len = fragment.slice.len();
                self.filled(fragment, len);
                return Ok(Vec::new());
            }
            ChunkMemory::Absent(absent, place) => (absent, place),
        };
        let offset = absent.offset();
        let failed = |error| ((buffer, offset), error);
        let absent = match self.fill_cached(absent, buffer, extents, clocks) {
            Err(absent) => absent,
            Ok((slice, len)) => {
                self.supply.give_back(place);
                self.filled(self.present(buffer, slice), len);
                return Ok(Vec::new());
            }
        };
        let rest = match self.land(absent, buffer, place, extents, clocks) {
            Ok(fragment) => fragment,
            Err(absent) => {
                let memory = |source| failed(FillError::Memory { buffer, source });
                let slice = clocks.time(Stage::Allocate, || absent.populate()).map_err(memory)?;
                clocks.bytes(Stage::Allocate, (end - offset) as u64);
                self.present(buffer, slice)
            }
        };
        Ok(self.cut(rest, extents))
    }

    /// Fills a chunk that is all of one extent from what is cached, and returns it with how many bytes of it that was;
    /// or returns the chunk as it was.
    fn fill_cached(
        &self,
        absent: Absent,
        buffer: usize,
        extents: &[Extent],
        clocks: &mut Clocks,
    ) -> Result<(BufferSlice, usize), Absent> {
        let (Some(cached), [e]) = (self.cached, extents) else { return Err(absent) };
        let offset = absent.offset();
        // Memory that was used before may be longer than the buffer.
        let len = absent.len().min((self.lens[buffer] as usize).saturating_sub(offset));
        if len == 0 || e.to > offset as u64 || e.to + e.len < (offset + len) as u64 {
            return Err(absent);
        }
        let at = e.at + (offset as u64 - e.to);
        let begin = Instant::now();
        let slice = clocks.time(Stage::Read, || cached.fill(absent, e.source, at, len))?;
        self.first_read.get_or_init(|| begin);
        clocks.bytes(Stage::Read, len as u64);
        Ok((slice, len))
    }

    /// Memory of a landing place for a chunk, if it has one and anything is read into it; else returns the chunk.
    fn land(
        &self,
        absent: Absent,
        buffer: usize,
        place: Option<Place>,
        extents: &[Extent],
        clocks: &mut Clocks,
    ) -> Result<Fragment, Absent> {
        let offset = absent.offset();
        match (&self.supply.landing, place) {
            // Bytes that nobody reads are zero as soon as they are present.
            (Some(landing), Some(place)) if !extents.is_empty() => {
                let (slice, landed) = clocks.time(Stage::Allocate, || landing.begin(place, absent, buffer))?;
                let tag = Tag { buffer, offset, is_read: false, slot: None, via: None, landed: Some(landed) };
                Ok(Fragment { tag, slice })
            }
            (_, place) => {
                self.supply.give_back(place);
                Err(absent)
            }
        }
    }

    /// Takes a chunk of which the first `len` bytes are those of an extent.
    fn filled(&self, mut rest: Fragment, len: usize) {
        let end = rest.end();
        if let Some(mut front) = rest.split_off_front(len) {
            front.tag.is_read = true;
            self.supply.unsent.fetch_add(1, Ordering::Relaxed);
            self.arrived(front);
        }
        self.pass_over(&mut rest, end);
    }

    /// Cuts a chunk into reads. Bytes that nobody reads have arrived already.
    fn cut(&self, mut rest: Fragment, extents: &[Extent]) -> Vec<Read> {
        let (end, block) = (rest.end(), self.supply.block);
        let mut reads = Vec::new();
        for e in extents {
            // Both fit: a job's buffers are no larger than the address space.
            let (to, until) = (e.to as usize, (e.to + e.len) as usize);
            if until <= rest.tag.offset {
                continue; // ended in the chunk before
            }
            self.pass_over(&mut rest, to);
            while rest.tag.offset < until.min(end) {
                let at = e.at + (rest.tag.offset - to) as u64;
                // Reads end where blocks of the buffer end, so that they stay aligned as they are.
                let len = (until.min(end) - rest.tag.offset).min(block - rest.tag.offset % block);
                let Some(mut fragment) = rest.split_off_front(len) else { break };
                fragment.tag.is_read = true;
                reads.push(Read { source: e.source, at, fragment });
            }
        }
        self.pass_over(&mut rest, end);
        self.supply.unsent.fetch_add(reads.len(), Ordering::Relaxed);
        reads
    }

    /// Tells of a chunk that is present.
    fn present(&self, buffer: usize, slice: BufferSlice) -> Fragment {
        let (offset, len, reference) = (slice.offset(), slice.len() as u64, slice.reference());
        self.tell(Event::Allocated { buffer, offset: offset as u64, len, reference });
        Fragment { tag: Tag { buffer, offset, is_read: false, slot: None, via: None, landed: None }, slice }
    }

    /// The bytes before `to` belong to no extent: they are zero.
    fn pass_over(&self, rest: &mut Fragment, to: usize) {
        let len = to.saturating_sub(rest.tag.offset);
        if len > 0
            && let Some(gap) = rest.split_off_front(len)
        {
            let landed = gap.tag.landed.is_some();
            if landed || !self.supply.is_fresh(gap.tag.buffer) {
                gap.slice.as_volatile_slice().fill(0);
            }
            if landed { self.landed(gap) } else { self.settle(gap) }
        }
    }

    /// Copies a chunk that has landed to where it belongs; false where there is none. Only one: its landing place is
    /// read into again while the next one is copied.
    pub fn copy(&self, clocks: &mut Clocks) -> bool {
        let Some(landing) = &self.supply.landing else { return false };
        let Some(mut full) = landing.full() else { return false };
        let (buffer, offset, len) = (full.buffer, full.absent.offset(), full.absent.len());
        let slices = std::mem::take(&mut full.slices);
        let copied = clocks.time(Stage::Allocate, || landing.copy(full));
        clocks.bytes(Stage::Allocate, len as u64);
        let mut rest = match copied {
            Ok(slice) => self.present(buffer, slice),
            Err(source) => {
                self.fail(((buffer, offset), FillError::Memory { buffer, source }));
                return true;
            }
        };
        for (is_read, len) in slices {
            let Some(mut front) = rest.split_off_front(len) else { break };
            front.tag.is_read = is_read;
            if is_read { self.arrived(front) } else { self.settle(front) }
        }
        true
    }
}
