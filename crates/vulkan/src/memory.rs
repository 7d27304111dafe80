//! Memory of the GPU by card address: the driver allocates it, in as many chunks as its limits ask for.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_device::{MemoryDriver, Region};

use crate::error::Error;
use crate::gpu::{Buffer, Gpu};

/// The distance between the first addresses of two heaps. The first begins there too: 0 is no address. All of them have
/// 48 bits, as page-table formats want.
const HEAP: u64 = 1 << 43;

/// Allocator of the GPU's memory. Card addresses are this crate's: each heap of the GPU has a range of them.
pub(crate) struct GpuMemory {
    gpu: Arc<Gpu>,
    regions: Vec<(Region, u32)>,
    /// Bytes of a chunk at most, a multiple of the granule.
    chunk: u64,
    areas: Mutex<Areas>,
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
    /// The first address where nothing is allocated; `each` was called for what lies before it.
    pub fn resolve(
        &self,
        at: CardAddr,
        len: u64,
        mut each: impl FnMut(&Arc<Area>, &Arc<Buffer>, u64, u64, u64),
    ) -> Result<(), CardAddr> {
        let (mut at, mut left) = (at.bits(), len);
        while left > 0 {
            let area = self.at(at).ok_or(CardAddr::new(at))?;
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
        Arc::new(Self { gpu: gpu.clone(), regions, chunk, areas: Mutex::default() })
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
            chunks.push(self.gpu.device_buffer(len, *heap, true)?);
            left -= len;
        }
        let (first, len) = (range.first().bits(), range.len());
        let mut areas = self.areas();
        if taken(&areas) {
            return Err(refused);
        }
        areas.0.insert(first, Arc::new(Area { first, len, chunk: self.chunk, chunks }));
        Ok(())
    }

    /// The memory is the driver's again once nothing in flight uses it.
    fn free(&self, range: Span<CardAddr>) {
        let area = self.areas().0.remove(&range.first().bits());
        debug_assert!(area.is_none_or(|a| a.len == range.len()), "freed as it was allocated");
    }
}

/// The memory, for one owner.
pub(crate) struct Allocator(pub Arc<GpuMemory>);

impl MemoryDriver for Allocator {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn StdError + Send + Sync>> {
        Ok(self.0.allocate(range)?)
    }

    fn free(&mut self, range: Span<CardAddr>) {
        self.0.free(range);
    }
}
