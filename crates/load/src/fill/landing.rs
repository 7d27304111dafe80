//! Landing places: huge pages that reads arrive in, where the buffers have small pages behind a memfd.
//!
//! A disk request lists pages, and the kernel zeroes pages of a memfd that are touched. Reads into huge pages that are
//! used again and again, and copies from there into pages that the kernel makes with these contents, take less
//! processor time, and leave the disk's requests as long as they are elsewhere.

use std::sync::{Arc, Mutex};

use dmalane_dma::{Absent, AnonHeap, BufferSlice, CopyHint, Error, Heap, PageKind, Reserved};

use super::locked;
use super::state::Fragment;

/// Bytes of all landing places together.
const BYTES: usize = 32 << 20;
/// More of them than this, of small chunks, help nobody.
const PLACES: usize = 64;

/// The landing places of a job.
pub(super) struct Landing {
    heap: AnonHeap,
    /// Bytes of each: a chunk.
    len: usize,
    places: Mutex<Places>,
}

struct Places {
    free: Vec<BufferSlice>,
    /// How many may still be made.
    left: usize,
}

/// The right to one landing place, which is made when it is needed.
pub(super) struct Place(Option<BufferSlice>);

/// A chunk whose reads are in flight into a landing place.
pub(super) struct Landed(Mutex<Parts>);

struct Parts {
    absent: Option<Absent>,
    /// What has arrived.
    fragments: Vec<Fragment>,
    /// Bytes that have not.
    missing: usize,
    /// What the chunk leaves of its landing place.
    rest: BufferSlice,
}

/// A chunk all of whose bytes are in its landing place.
pub(super) struct Full {
    /// Where they belong, and in which buffer.
    pub absent: Absent,
    pub buffer: usize,
    /// The extents that they are of, front to back, and how many bytes of each.
    pub tags: Vec<(Option<usize>, usize)>,
    from: BufferSlice,
    rest: BufferSlice,
}

impl Landing {
    /// Landing places for chunks of `chunk` bytes, if the memory of any buffer is better copied to.
    pub fn new(reserved: &[Reserved], chunk: usize) -> Option<Self> {
        let wanted = chunk <= BYTES / 2 && reserved.iter().any(Reserved::is_better_copied_to);
        let places = Places { free: Vec::new(), left: (BYTES / chunk.max(1)).clamp(2, PLACES) };
        wanted.then(|| Self {
            heap: AnonHeap::starting_at(PageKind::Transparent),
            len: chunk,
            places: Mutex::new(places),
        })
    }

    /// A landing place; `None` while all are in use.
    pub fn take(&self) -> Option<Place> {
        let mut places = locked(&self.places);
        if let Some(free) = places.free.pop() {
            return Some(Place(Some(free)));
        }
        places.left = places.left.checked_sub(1)?;
        Some(Place(None))
    }

    /// Takes a landing place back.
    pub fn give_back(&self, Place(place): Place) {
        let mut places = locked(&self.places);
        match place {
            Some(place) => places.free.push(place),
            None => places.left += 1,
        }
    }

    /// Memory for the reads of a chunk, as long as that, and what keeps the chunk until they have ended.
    pub fn begin(&self, Place(place): Place, absent: Absent) -> Result<(BufferSlice, Arc<Landed>), Error> {
        let mut rest = match place {
            Some(place) => place,
            None => self.heap.reserve(self.len)?.populate()?.into_slice(),
        };
        let missing = absent.len();
        let front = rest.split_off_front(missing).ok_or(Error::BadLength(missing))?;
        let parts = Parts { absent: Some(absent), fragments: Vec::new(), missing, rest };
        Ok((front, Arc::new(Landed(Mutex::new(parts)))))
    }

    /// Copies a chunk to where it belongs, and frees its landing place.
    pub fn copy(&self, Full { absent, from, rest, .. }: Full) -> Result<BufferSlice, Error> {
        let there = match absent.copy_from(from.view()) {
            Ok(there) => there,
            Err((absent, _)) => {
                let there = absent.populate()?;
                there.view().copy_from(from.view(), CopyHint::Keep);
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
    /// Takes a fragment that has arrived; the chunk, if that was the last one.
    pub fn add(&self, fragment: Fragment) -> Option<Full> {
        let mut parts = locked(&self.0);
        parts.missing = parts.missing.saturating_sub(fragment.slice.len());
        parts.fragments.push(fragment);
        if parts.missing > 0 {
            return None;
        }
        let mut fragments = std::mem::take(&mut parts.fragments);
        fragments.sort_by_key(|fragment| fragment.tag.offset);
        let left = parts.rest.len();
        let (absent, rest) = (parts.absent.take()?, parts.rest.split_off_front(left)?);
        let buffer = fragments.first()?.tag.buffer;
        let (tags, slices): (Vec<_>, Vec<_>) =
            fragments.into_iter().map(|Fragment { tag, slice }| ((tag.extent, slice.len()), Some(slice))).unzip();
        let from = slices.into_iter().reduce(|a, b| a?.join(b?).ok()).flatten()?;
        Some(Full { absent, buffer, tags, from, rest })
    }
}
