//! Memory of the GPU by card address: the driver allocates it, in as many chunks as its limits ask for.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ash::vk;
use dmalane_addr::{CardAddr, PageSize, RangeAllocator, Span};
use dmalane_device::{Lending, LentMemory, MemoryDriver, Region};
use dmalane_dma::lock;

use crate::error::Error;
use crate::gpu::{Buffer, Gpu};

/// The distance between the first addresses of two heaps. The first begins there too: 0 is no address. All of them have
/// 48 bits, as page-table formats want.
const HEAP: u64 = 1 << 43;
/// The first address of memory that other processes have lent, behind those of all heaps.
const LENT: u64 = HEAP * (vk::MAX_MEMORY_HEAPS as u64 + 1);
/// Lent memory begins at multiples of it, and no two ranges of it touch.
const APART: PageSize = PageSize::SIZE_2M;

/// Allocator of the GPU's memory. Card addresses are this crate's: each heap of the GPU has a range of them.
pub(crate) struct GpuMemory {
    gpu: Arc<Gpu>,
    regions: Vec<(Region, u32)>,
    /// Bytes of a chunk at most, a multiple of the granule.
    chunk: u64,
    areas: Mutex<Areas>,
    /// Memory that is allocated from now on can be lent.
    lendable: AtomicBool,
    /// Addresses of memory that others have lent.
    lent: Mutex<RangeAllocator<CardAddr>>,
}

/// Allocated ranges, by first address.
#[derive(Default)]
pub(crate) struct Areas(BTreeMap<u64, Arc<Area>>);

/// A range that was allocated at once.
pub(crate) struct Area {
    first: u64,
    len: u64,
    chunk: u64,
    chunks: Vec<Arc<Buffer>>,
    /// Memory of another process, for reading.
    is_lent: bool,
}

impl Area {
    /// The chunk that an address lies in, and the offset in it.
    pub fn chunk_at(&self, at: u64) -> (&Arc<Buffer>, u64) {
        let within = at - self.first;
        (&self.chunks[(within / self.chunk) as usize], within % self.chunk)
    }

    /// The chunks of the range from `at` on, `len` bytes that lie in the area: each with the offset in its buffer, its
    /// address and its bytes.
    fn chunks(&self, at: u64, len: u64, mut each: impl FnMut(&Arc<Buffer>, u64, u64, u64)) {
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let (buffer, offset) = self.chunk_at(at);
            let here = left.min(self.chunk - offset);
            each(buffer, offset, at, here);
            (at, left) = (at + here, left - here);
        }
    }
}

impl Areas {
    /// The area that an address lies in.
    fn at(&self, at: u64) -> Option<&Arc<Area>> {
        let (_, area) = self.0.range(..=at).next_back()?;
        (at - area.first < area.len).then_some(area)
    }

    /// Calls `each` with the buffers behind a range: area, buffer, offset in it, card address, bytes.
    ///
    /// # Errors
    /// The first address where nothing is allocated, or not for writing; `each` was called for what lies before it.
    pub fn resolve(
        &self,
        at: CardAddr,
        len: u64,
        writes: bool,
        mut each: impl FnMut(&Arc<Area>, &Arc<Buffer>, u64, u64, u64),
    ) -> Result<(), CardAddr> {
        let (mut at, mut left) = (at.bits(), len);
        while left > 0 {
            let area = self.at(at).filter(|area| !(writes && area.is_lent)).ok_or(CardAddr::new(at))?;
            let here = left.min(area.first + area.len - at);
            area.chunks(at, here, |buffer, offset, at, len| each(area, buffer, offset, at, len));
            // No overflow: areas lie below 2^62.
            (at, left) = (at + here, left - here);
        }
        Ok(())
    }
}

impl GpuMemory {
    /// All memory of a GPU, allocated in multiples of `granule`.
    pub fn new(gpu: &Arc<Gpu>, granule: PageSize) -> Arc<Self> {
        let info = gpu.info();
        // The largest first. Small ones are windows through which the host sees a part of the others.
        let mut heaps: Vec<_> = info.heaps.iter().zip(0u32..).filter(|(heap, _)| heap.device_local).collect();
        heaps.sort_by_key(|(heap, _)| std::cmp::Reverse(heap.bytes));
        let mut regions: Vec<(Region, u32)> = Vec::new();
        for (heap, index) in heaps {
            let len = heap.bytes.min(HEAP) / granule.bytes() * granule.bytes();
            let Some(span) = Span::new(CardAddr::new(HEAP * (u64::from(index) + 1)), len) else { continue };
            let name = if regions.is_empty() { "vram".to_owned() } else { format!("vram{}", regions.len()) };
            let mut region = Region::new("", span);
            (region.name, region.group, region.granule) = (name.clone().into(), name.into(), granule);
            regions.push((region, index));
        }
        let most = info.max_allocation.min(info.max_buffer).min(HEAP);
        let whole = [PageSize::SIZE_2M.bytes(), granule.bytes()].into_iter().find(|whole| *whole <= most);
        let chunk = whole.map_or(granule.bytes(), |whole| most / whole * whole);
        let space = Span::inclusive(CardAddr::new(LENT), CardAddr::new((1 << 48) - 1)).expect("16 heaps lie below");
        let (lendable, lent) = (AtomicBool::new(false), Mutex::new(RangeAllocator::new(space, APART)));
        Arc::new(Self { gpu: gpu.clone(), regions, chunk, areas: Mutex::default(), lendable, lent })
    }

    pub fn regions(&self) -> Vec<Region> {
        self.regions.iter().map(|(region, _)| region.clone()).collect()
    }

    pub fn areas(&self) -> MutexGuard<'_, Areas> {
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer that has no card address and is never exported, in the first region's heap.
    pub fn scratch(&self, len: u64) -> Result<Arc<Buffer>, Error> {
        let (_, heap) = self.regions.first().ok_or(Error::NoMemoryType("buffers of the device"))?;
        self.gpu.device_buffer(len, *heap, false)
    }

    fn allocate(&self, range: Span<CardAddr>) -> Result<(), Error> {
        let refused = Error::Range(range);
        let region = self.regions.iter().find(|(r, _)| r.span.covers(&range) && range.is_aligned(r.granule));
        let Some((_, heap)) = region else { return Err(refused) };
        let taken = |areas: &Areas| {
            areas
                .0
                .range(..=range.last().bits())
                .next_back()
                .is_some_and(|(_, a)| a.first + a.len > range.first().bits())
        };
        if taken(&self.areas()) {
            return Err(refused);
        }
        // Without the lock: a driver may take long.
        let mut chunks = Vec::new();
        let mut left = range.len();
        while left > 0 {
            let len = left.min(self.chunk);
            let exported = self.gpu.exports() || self.lendable.load(Ordering::Relaxed);
            chunks.push(self.gpu.device_buffer(len, *heap, exported)?);
            left -= len;
        }
        let (first, len) = (range.first().bits(), range.len());
        let mut areas = self.areas();
        if taken(&areas) {
            return Err(refused);
        }
        areas.0.insert(first, Arc::new(Area { first, len, chunk: self.chunk, chunks, is_lent: false }));
        Ok(())
    }

    /// A dma-buf of each chunk of memory that was allocated at once, to be lent, with its bytes.
    fn lend(&self, memory: Span<CardAddr>) -> Result<Vec<(OwnedFd, u64)>, Error> {
        let area = self.areas().0.get(&memory.first().bits()).filter(|area| area.len == memory.len()).cloned();
        let area = area.filter(|area| !area.is_lent).ok_or(Error::NotAllocated(memory.first()))?;
        area.chunks.iter().map(|chunk| Ok((self.gpu.export_dma_buf(chunk)?, chunk.len()))).collect()
    }

    /// Gives memory that was lent card addresses.
    fn take(self: &Arc<Self>, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<LentMemory, Error> {
        let (Some((_, chunk)), Some((_, last))) = (pieces.first(), pieces.last()) else { return Err(Error::Pieces) };
        let whole = chunk.checked_mul(pieces.len() as u64 - 1);
        let len = whole.and_then(|whole| whole.checked_add(*last)).filter(|len| *len < 1 << 48).ok_or(Error::Pieces)?;
        let are_chunks = pieces.split_last().is_some_and(|(_, whole)| whole.iter().all(|(_, len)| len == chunk));
        if *last == 0 || last > chunk || !are_chunks {
            return Err(Error::Pieces);
        }
        let mut chunks = Vec::new();
        for (piece, len) in pieces {
            let fd = piece.try_clone_to_owned().map_err(Error::Descriptor)?;
            chunks.push(self.gpu.import_dma_buf(None, *len, fd)?);
        }
        let room = APART.round_up(len).and_then(|room| room.checked_add(APART.bytes()));
        let room = room.and_then(|room| lock(&self.lent).allocate(room, APART).ok());
        let room =
            room.ok_or_else(|| Error::Limit("no card addresses are left for memory that was lent".to_owned()))?;
        let taken = Taken { memory: self.clone(), room };
        let first = room.first().bits();
        self.areas().0.insert(first, Arc::new(Area { first, len, chunk: *chunk, chunks, is_lent: true }));
        let at = Span::new(room.first(), len).ok_or(Error::Range(room))?;
        Ok(LentMemory::new(at, taken))
    }

    /// The memory is the driver's again once nothing in flight uses it.
    fn free(&self, range: Span<CardAddr>) {
        let area = self.areas().0.remove(&range.first().bits());
        debug_assert!(area.is_none_or(|a| a.len == range.len()), "freed as it was allocated");
    }
}

/// Memory that others have lent, until this is dropped.
struct Taken {
    memory: Arc<GpuMemory>,
    /// Its addresses, and those behind it up to the next.
    room: Span<CardAddr>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // What is in flight keeps the buffers.
        self.memory.areas().0.remove(&self.room.first().bits());
        let freed = lock(&self.memory.lent).free(self.room);
        debug_assert!(freed.is_ok(), "freed as it was allocated");
    }
}

/// Lends the memory, and takes what was lent.
pub(crate) struct Lender(pub Arc<GpuMemory>, pub String);

impl Lending for Lender {
    fn device(&self) -> &str {
        &self.1
    }

    fn allow(&self, lendable: bool) {
        self.0.lendable.store(lendable, Ordering::Relaxed);
    }

    fn lend(&self, memory: Span<CardAddr>) -> Result<Vec<(OwnedFd, u64)>, Box<dyn StdError + Send + Sync>> {
        Ok(self.0.lend(memory)?)
    }

    fn take(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<LentMemory, Box<dyn StdError + Send + Sync>> {
        Ok(self.0.take(pieces)?)
    }
}

/// The memory, for one owner.
pub(crate) struct Allocator(pub Arc<GpuMemory>);

impl MemoryDriver for Allocator {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn StdError + Send + Sync>> {
        self.0.allocate(range).map_err(|error| match error {
            Error::NoMemory { .. } => io::Error::new(io::ErrorKind::OutOfMemory, error).into(),
            error => error.into(),
        })
    }

    fn free(&mut self, range: Span<CardAddr>) {
        self.0.free(range);
    }

    fn free_bytes(&self) -> Option<u64> {
        // Where memory is taken by default; the others are windows into it.
        let (_, heap) = self.0.regions.first()?;
        self.0.gpu.free_memory(*heap)
    }
}
