//! Landing places: huge pages that reads arrive in, where the buffers have small pages behind a memfd.
//!
//! A disk request lists its pages, so that small pages make short requests, and the kernel zeroes a page of a memfd
//! that is touched for the first time. So reads go to huge pages, which are used again and again. The bytes are copied
//! from there into pages that the kernel makes with these contents, or that are present already. Both together take
//! less time than reads into small pages.

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex};

use dmalane_dma::{Absent, AnonHeap, BufferSlice, CopyHint, Error, Heap, PageKind, Pool, Reserved, SharedBuf, lock};

/// Bytes of all landing places of a job together, and where that memory cannot be had.
const BYTES: usize = 144 << 20;
const FEW_BYTES: usize = 32 << 20;
/// Bytes of landing places that the process keeps for its next jobs.
const KEPT: usize = 8 << 20;
/// Landing places are multiples of a huge page: places of one length are used again by jobs of any chunk.
const HUGE: usize = 2 << 20;

/// A huge page is made as slowly as a small file is read.
static PLACES: LazyLock<Pool> = LazyLock::new(|| Pool::new(AnonHeap::starting_at(PageKind::Transparent), KEPT));

/// The landing places of a job.
pub(super) struct Landing {
    heap: Pool,
    /// Bytes of each: at least a chunk.
    len: usize,
    places: Mutex<Places>,
    /// Chunks that have landed and are still to be copied.
    full: Mutex<VecDeque<Full>>,
}

struct Places {
    free: Vec<BufferSlice>,
    /// How many were made.
    made: usize,
    /// How many may still be made.
    left: usize,
}

/// All landing places are in use.
pub(super) struct Busy;

/// The right to one landing place, which is made when it is needed.
pub(super) struct Place(Option<BufferSlice>);

/// A chunk whose reads are in flight into a landing place.
pub(super) struct Landed(Mutex<Parts>);

struct Parts {
    absent: Option<Absent>,
    buffer: usize,
    /// Parts that have arrived: offset in the buffer, whether it was read, and its memory.
    slices: Vec<(usize, bool, BufferSlice)>,
    /// Bytes that have not arrived.
    missing: usize,
    /// The rest of the landing place, behind the chunk.
    rest: BufferSlice,
}

/// A chunk all of whose bytes are in its landing place.
pub(super) struct Full {
    /// Where they belong, and in which buffer.
    pub absent: Absent,
    pub buffer: usize,
    /// Its slices, front to back: whether each was read, and its bytes.
    pub slices: Vec<(bool, usize)>,
    from: BufferSlice,
    rest: BufferSlice,
}

impl Landing {
    /// Landing places for chunks of `chunk` bytes, if the memory of any buffer is better copied to, and `room` says
    /// that there is memory for them besides the buffers.
    pub fn new(reserved: &[Reserved], chunk: usize, room: impl Fn(usize) -> bool) -> Option<Self> {
        let wanted = chunk <= FEW_BYTES / 2 && reserved.iter().any(Reserved::is_better_copied_to);
        let bytes = [BYTES, FEW_BYTES].into_iter().find(|bytes| wanted && room(*bytes))?;
        let len = chunk.next_multiple_of(HUGE);
        let places = Places { free: Vec::new(), made: 0, left: bytes / len };
        Some(Self { heap: PLACES.clone(), len, places: Mutex::new(places), full: Mutex::default() })
    }

    /// A landing place; `None` where there is no memory for any, so that chunks are read where they stay.
    pub fn take(&self) -> Result<Option<Place>, Busy> {
        let mut places = lock(&self.places);
        if let Some(free) = places.free.pop() {
            return Ok(Some(Place(Some(free))));
        }
        match places.left.checked_sub(1) {
            Some(left) => {
                (places.left, places.made) = (left, places.made + 1);
                Ok(Some(Place(None)))
            }
            None if places.made == 0 => Ok(None),
            None => Err(Busy),
        }
    }

    /// Takes a landing place back.
    pub fn give_back(&self, Place(place): Place) {
        let mut places = lock(&self.places);
        match place {
            Some(place) => places.free.push(place),
            None => (places.left, places.made) = (places.left + 1, places.made - 1),
        }
    }

    /// Memory for the reads of a chunk of a buffer, of the same length, and what keeps the chunk until they have ended.
    /// Gives the chunk back where there is no memory for that, and never tries to make another landing place then.
    pub fn begin(
        &self,
        Place(place): Place,
        absent: Absent,
        buffer: usize,
    ) -> Result<(BufferSlice, Arc<Landed>), Absent> {
        let make = || self.heap.reserve(self.len).and_then(Reserved::populate).map(SharedBuf::into_slice);
        let missing = absent.len();
        let cut = place.or_else(|| make().ok()).and_then(|mut rest| Some((rest.split_off_front(missing)?, rest)));
        let Some((front, rest)) = cut else {
            let mut places = lock(&self.places);
            (places.left, places.made) = (0, places.made - 1);
            return Err(absent);
        };
        let parts = Parts { absent: Some(absent), buffer, slices: Vec::new(), missing, rest };
        Ok((front, Arc::new(Landed(Mutex::new(parts)))))
    }

    /// Takes a slice of a chunk that has arrived; a chunk that has landed as a whole is the next one to be copied.
    pub fn add(&self, landed: &Landed, offset: usize, is_read: bool, slice: BufferSlice) {
        if let Some(full) = landed.add(offset, is_read, slice) {
            lock(&self.full).push_back(full);
        }
    }

    /// A chunk that is to be copied.
    pub fn full(&self) -> Option<Full> {
        lock(&self.full).pop_front()
    }

    /// Copies a chunk to where it belongs, and frees its landing place.
    pub fn copy(&self, Full { absent, from, rest, .. }: Full) -> Result<BufferSlice, Error> {
        let there = match absent.copy_from(from.as_volatile_slice()) {
            Ok(there) => there,
            Err((absent, _)) => {
                let there = absent.populate()?;
                there.as_volatile_slice().copy_from(from.as_volatile_slice(), CopyHint::Keep);
                there
            }
        };
        if let Ok(place) = from.join(rest) {
            self.give_back(Place(Some(place)));
        }
        Ok(there)
    }
}

impl Landed {
    /// Takes a slice that has arrived; the chunk, if that was the last one.
    fn add(&self, offset: usize, is_read: bool, slice: BufferSlice) -> Option<Full> {
        let mut parts = lock(&self.0);
        parts.missing = parts.missing.saturating_sub(slice.len());
        parts.slices.push((offset, is_read, slice));
        if parts.missing > 0 {
            return None;
        }
        let mut slices = std::mem::take(&mut parts.slices);
        slices.sort_by_key(|(offset, ..)| *offset);
        let left = parts.rest.len();
        let (absent, rest) = (parts.absent.take()?, parts.rest.split_off_front(left)?);
        let (slices, memory): (Vec<_>, Vec<_>) =
            slices.into_iter().map(|(_, is_read, slice)| ((is_read, slice.len()), Some(slice))).unzip();
        let from = memory.into_iter().reduce(|a, b| a?.join(b?).ok()).flatten()?;
        Some(Full { absent, buffer: parts.buffer, slices, from, rest })
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{HeapCapabilities, HeapStats, MemfdHeap};

    use super::*;

    struct Refuses;

    impl Heap for Refuses {
        fn reserve(&self, len: usize) -> Result<Reserved, Error> {
            Err(Error::BadLength(len))
        }

        fn capabilities(&self) -> HeapCapabilities {
            MemfdHeap::new().capabilities()
        }

        fn stats(&self) -> HeapStats {
            HeapStats::default()
        }

        fn name(&self) -> &'static str {
            "none"
        }
    }

    #[test]
    fn landing_places_are_used_again_by_other_jobs() {
        let reserved = [MemfdHeap::starting_at(PageKind::Base).reserve(8 << 20).unwrap()];
        // No other test of this process makes landing places.
        for (job, chunk) in [2 << 20, 4096, 1 << 20].into_iter().enumerate() {
            let landing = Landing::new(&reserved, chunk, |_| true).unwrap();
            assert_eq!(landing.len, HUGE);
            let mut there = Vec::new();
            while let Ok(place) = landing.take() {
                let absent = MemfdHeap::starting_at(PageKind::Base).reserve(chunk).unwrap().next(chunk).unwrap();
                there.push(landing.begin(place.unwrap(), absent, 0).map_err(drop).unwrap());
            }
            assert_eq!(there.len() * HUGE, BYTES, "all of them are in use");
            drop((landing, there));
            let stats = PLACES.pool_stats();
            assert_eq!((stats.cached, stats.hits), (KEPT, job * (KEPT / HUGE)));
        }
    }

    #[test]
    fn without_memory_for_landing_places_chunks_are_read_where_they_stay() {
        let mut reserved = vec![MemfdHeap::starting_at(PageKind::Base).reserve(8 << 20).unwrap()];
        assert!(Landing::new(&reserved, 2 << 20, |_| false).is_none(), "there is no room");
        let mut landing = Landing::new(&reserved, 2 << 20, |more| more == BYTES).unwrap();
        landing.heap = Pool::new(Refuses, 0);
        let place = |landing: &Landing| landing.take().map_or(None, |place| place);
        let (first, second) = (place(&landing).unwrap(), place(&landing).unwrap());
        let chunk = reserved[0].next(2 << 20).unwrap();
        let chunk = landing.begin(first, chunk, 0).map(drop).unwrap_err();
        assert_eq!(chunk.populate().unwrap().len(), 2 << 20, "as if nothing had happened");
        assert!(matches!(landing.take(), Err(Busy)), "the other one may still be made");
        let chunk = reserved[0].next(2 << 20).unwrap();
        assert!(landing.begin(second, chunk, 0).is_err() && matches!(landing.take(), Ok(None)));
    }
}
