//! A device as the pipeline drives it, and what has been loaded onto it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, PhysAddr, RangeAllocator, SgIndex, SgTable, Span};
use dmalane_dma::{BufferSlice, Heap, PageBacking, Registrar, footprint};
use dmalane_iopt::{Format, Tables};
use dmalane_queue::{DeviceAddr, Queue, Registered};
use dmalane_vm::{BindRequest, Bo, Vm};

use crate::clock::{Clocks, Stage};
use crate::{CardMemory, Error, Layout, Model, Tensor};

/// What a [`Device`] is made of.
pub struct DeviceParts<C, F, T: Tables> {
    /// The driver's side of the device: pins and maps staging buffers.
    pub bus: Arc<dyn Registrar>,
    /// Where staging buffers come from.
    pub heap: Arc<dyn Heap>,
    /// Moves bytes to and from the device.
    pub channel: C,
    /// The device's virtual address space.
    pub vm: Vm<F, T>,
    /// The device's free memory.
    pub memory: CardMemory,
    /// Makes the device forget translations; called after an unbind, before what was unbound is used again.
    pub invalidate: Box<dyn FnMut() -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send>,
    /// True when the channel works inside `poll`, so that only time spent there is its time.
    pub inline: bool,
    /// Bytes of a staging buffer (`--gather`); rounded up to 4 KiB, at most 1 GiB.
    pub gather: u64,
    /// How long a load that has failed, or a piece that is read back, waits for what is in flight, and how long the device may end nothing
    /// in a load before it is stopped.
    pub patience: Duration,
}

/// A device that files can be loaded onto.
pub struct Device<C: Queue<Addr = DeviceAddr>, F: Format, T: Tables<Addr = CardAddr>> {
    pub(crate) parts: DeviceParts<C, F, T>,
    pub(crate) vas: RangeAllocator<DeviceVa>,
    /// The pieces of all staging buffers.
    pub(crate) staging: Vec<Slot>,
    /// Staging buffers made.
    pub(crate) buffers: usize,
    pub(crate) readback: Option<Slot>,
    /// Tells this process's devices apart.
    pub(crate) number: u64,
    abandoned: u64,
    next_bo: u64,
    resident_peak: u64,
    /// Bytes moved since the footprint was last read.
    unsampled: u64,
    observer: Option<Observer>,
}

/// Sees what was asked of a device's VM.
type Observer = Box<dyn FnMut(&[BindRequest]) + Send>;

/// The footprint is read once per this many bytes moved.
const SAMPLE_EVERY: u64 = 16 << 20;

static DEVICES: AtomicU64 = AtomicU64::new(0);

/// A piece of a staging buffer, which is registered once and used for chunk after chunk.
pub(crate) struct Slot {
    /// The piece, when no operation has any of it.
    pub(crate) part: Option<BufferSlice>,
    /// Bytes of it.
    pub(crate) len: u64,
    pub(crate) via: Registered,
    /// The pages that the heap gave.
    pub(crate) backing: PageBacking,
}

/// Buffers that carry bytes to the device; with the one that carries them back, four in all.
pub(crate) const STAGING: usize = 3;
/// Bytes of a slot, at most: small enough that a chunk which was just copied out of the page cache is still in the
/// processor's cache when it is hashed and transferred, large enough for the disk.
const SLOT: u64 = 2 << 20;

/// What a load put on the device.
#[derive(Debug)]
pub struct Loaded {
    /// The files, in the order given.
    pub files: Vec<LoadedFile>,
}

/// A file on the device.
#[derive(Debug)]
pub struct LoadedFile {
    /// Where it came from.
    pub path: PathBuf,
    /// What is in it.
    pub model: Model,
    /// XXH3-64 of all bytes of the file in order, as `xxhsum -H3` prints it.
    pub checksum: u64,
    /// The buffer object that holds its tensors; `None` when they have no bytes.
    pub bo: Option<Arc<Bo>>,
    /// Where it lies in device virtual memory, gaps included.
    pub range: Option<Span<DeviceVa>>,
    pub(crate) layout: Layout,
    /// The number of the device that it is on.
    pub(crate) device: u64,
}

/// A tensor on the device.
#[derive(Clone, Copy, Debug)]
pub struct LoadedTensor<'a> {
    /// What it is.
    pub tensor: &'a Tensor,
    /// Where it is bound; `None` for a tensor of no bytes. As long as the tensor.
    pub va: Option<Span<DeviceVa>>,
}

impl LoadedFile {
    /// The tensors in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = LoadedTensor<'_>> {
        (0..self.model.tensors.len()).map(|index| self.tensor(index))
    }

    /// The tensor at `index`.
    ///
    /// # Panics
    /// When there are not that many.
    pub fn tensor(&self, index: usize) -> LoadedTensor<'_> {
        let (tensor, place) = (&self.model.tensors[index], &self.layout.places[index]);
        let va = self.range.and_then(|r| Span::new(r.first().checked_add(place.va_offset)?, tensor.len));
        LoadedTensor { tensor, va }
    }

    /// What is bound for the tensor at `index`: its pages.
    pub(crate) fn bound(&self, index: usize) -> Option<Span<DeviceVa>> {
        let place = &self.layout.places[index];
        Span::new(self.range?.first().checked_add(place.va_offset)?, place.bound)
    }
}

impl<C, F, T> Device<C, F, T>
where
    C: Queue<Addr = DeviceAddr>,
    F: Format,
    T: Tables<Addr = CardAddr>,
{
    /// A device with nothing loaded.
    pub fn new(mut parts: DeviceParts<C, F, T>) -> Self {
        let page = PageSize::SIZE_4K;
        parts.gather = page.round_up(parts.gather.max(1)).unwrap_or(1 << 30).min(1 << 30);
        let vas = RangeAllocator::new(parts.vm.range(), page);
        Self {
            parts,
            vas,
            staging: Vec::new(),
            buffers: 0,
            readback: None,
            number: DEVICES.fetch_add(1, Ordering::Relaxed),
            abandoned: 0,
            next_bo: 1,
            resident_peak: 0,
            unsampled: 0,
            observer: None,
        }
    }

    /// Calls `observer` with each batch of requests that is committed from now on, for example to write a trace.
    pub fn observe(&mut self, observer: impl FnMut(&[BindRequest]) + Send + 'static) {
        self.observer = Some(Box::new(observer));
    }

    fn observed(&mut self, request: Option<BindRequest>) {
        if let (Some(observer), Some(request)) = (&mut self.observer, request) {
            observer(&[request]);
        }
    }

    /// The device's virtual address space.
    pub fn vm(&self) -> &Vm<F, T> {
        &self.parts.vm
    }

    /// The device's free memory.
    pub fn memory(&self) -> &CardMemory {
        &self.parts.memory
    }

    /// The device's channel. Operations of one's own must have ended before the next load.
    pub fn channel_mut(&mut self) -> &mut C {
        &mut self.parts.channel
    }

    /// The most that the process's anonymous memory and huge pages (RssAnon + HugetlbPages) were seen to be during loads,
    /// verifications and saves, in bytes.
    pub fn resident_peak(&self) -> u64 {
        self.resident_peak
    }

    /// Looks at the footprint now and then, as bytes move.
    pub(crate) fn sample_resident(&mut self, moved: u64) {
        self.unsampled += moved;
        if self.unsampled >= SAMPLE_EVERY {
            self.see_resident();
        }
    }

    pub(crate) fn see_resident(&mut self) -> u64 {
        self.unsampled = 0;
        let now = footprint().map_or(0, |f| f.anonymous + f.hugetlb);
        self.resident_peak = self.resident_peak.max(now);
        now
    }

    /// The heap of the staging buffers.
    pub fn heap(&self) -> &dyn Heap {
        &*self.parts.heap
    }

    /// The scatter-gather tables of the staging buffers, where the bus knows them.
    pub fn staging_pages(&self) -> impl Iterator<Item = &SgTable<PhysAddr>> {
        // One table per buffer: that of its first slot.
        let first = |s: &&Slot| s.part.as_ref().is_some_and(|p| p.offset() == 0);
        self.staging.iter().filter(first).chain(&self.readback).filter_map(|s| s.via.mapping().pinned().pages())
    }

    /// The pages behind the staging buffers, and why no better ones; `None` before the first load.
    pub fn staging_backing(&self) -> Option<&PageBacking> {
        self.staging.first().map(|s| &s.backing)
    }

    /// A new buffer of at most `gather` bytes, pinned and mapped.
    pub(crate) fn buffer(&self, len: u64, access: Access, clocks: &mut Clocks) -> Result<Slot, Error> {
        let len = usize::try_from(len.min(self.parts.gather)).map_err(|_| dmalane_dma::Error::BadLength(usize::MAX))?;
        let buf = clocks.time(Stage::Allocate, || self.parts.heap.allocate(len))?.share();
        let len = buf.len() as u64;
        let pinned = clocks.time(Stage::Register, || self.parts.bus.pin(&buf.reference()))?;
        let mapping = clocks.time(Stage::Map, || self.parts.bus.map(pinned, access))?;
        for stage in [Stage::Allocate, Stage::Register, Stage::Map] {
            clocks.bytes(stage, len);
        }
        let backing = buf.backing().clone();
        Ok(Slot { part: Some(buf.into_part()), len, via: Registered::from_mapping(mapping), backing })
    }

    /// Adds a staging buffer, cut into slots of about equal length.
    pub(crate) fn add_staging(&mut self, len: u64, clocks: &mut Clocks) -> Result<(), Error> {
        let Slot { mut part, len, via, backing } = self.buffer(len, Access::READ, clocks)?;
        self.buffers += 1;
        let count = len.div_ceil(SLOT);
        // Whole pages, so that direct I/O finds every slot aligned.
        let step = PageSize::SIZE_4K.round_up(len / count).unwrap_or(len);
        while let Some(rest) = part.take() {
            let n = step.min(rest.len() as u64);
            let (front, rest) = rest.split_at(n as usize).expect("at most what is left");
            self.staging.push(Slot { part: Some(front), len: n, via: via.clone(), backing: backing.clone() });
            part = (!rest.is_empty()).then_some(rest);
        }
        Ok(())
    }

    /// Takes card memory and device virtual memory for a file.
    pub(crate) fn place(
        &mut self,
        path: PathBuf,
        model: Model,
        placement: crate::Placement,
    ) -> Result<LoadedFile, Error> {
        let too_much = |path| Error::CardFull {
            path,
            needed: model.len,
            placement,
            align: PageSize::SIZE_16K,
            largest: self.parts.memory.free_bytes(),
        };
        let Some(layout) = Layout::new(&model) else { return Err(too_much(path)) };
        let mut file = LoadedFile { path, model, checksum: 0, bo: None, range: None, layout, device: self.number };
        if file.layout.bo_len == 0 {
            return Ok(file);
        }
        let sg = self.parts.memory.allocate(&file.path, file.layout.bo_len, placement)?;
        let index = match SgIndex::from_table(&sg) {
            Ok(index) => index,
            Err(source) => {
                self.parts.memory.free(sg.segments())?;
                return Err(Error::Index { path: file.path, source });
            }
        };
        let va_len = crate::layout::LARGE.round_up(file.layout.va_len);
        let range = va_len.and_then(|len| self.vas.allocate(len, crate::layout::LARGE).ok());
        let Some(range) = range else {
            self.parts.memory.free(sg.segments())?;
            return Err(Error::NoDeviceVa { path: file.path, needed: file.layout.va_len });
        };
        file.bo = Some(Arc::new(Bo::new(self.next_bo, index)));
        file.range = Some(range);
        self.next_bo += 1;
        Ok(file)
    }

    /// Makes a tensor visible at its device virtual address.
    pub(crate) fn bind(&mut self, file: &LoadedFile, index: usize) -> Result<(), Error> {
        let (Some(bo), Some(span)) = (&file.bo, file.bound(index)) else { return Ok(()) };
        let request = BindRequest::Bind {
            va: span.first(),
            bo: bo.clone(),
            offset: file.layout.places[index].bo_offset,
            len: span.len(),
            access: Access::READ,
        };
        let seen = self.observer.is_some().then(|| request.clone());
        let plan = self.parts.vm.plan([request]).map_err(|e| Error::Bind {
            path: file.path.clone(),
            tensor: file.model.tensors[index].name.clone(),
            source: e.error,
        })?;
        let committed = plan.commit();
        // Nothing was bound there before: ranges of files do not overlap.
        debug_assert!(committed.is_empty());
        self.parts.vm.invalidated(committed);
        self.observed(seen);
        Ok(())
    }

    /// Unbinds everything that a load bound and frees its memory.
    ///
    /// # Errors
    /// [`Error::Bind`] when the tables for the unbind cannot be had, [`Error::Invalidate`] when the device may still
    /// remember it: then nothing of that file is freed. [`Error::OtherDevice`] for files of another device. The other files
    /// are unloaded all the same; the first error is returned.
    pub fn unload(&mut self, loaded: Loaded) -> Result<(), Error> {
        let results: Vec<_> = loaded.files.into_iter().map(|file| self.unload_file(file)).collect();
        results.into_iter().collect()
    }

    /// Gives up what a failed load has placed while transfers to it may still be under way: it stays allocated for good,
    /// so that a late copy cannot land in something else.
    pub(crate) fn abandon(&mut self, loaded: Loaded) {
        self.abandoned += loaded.files.iter().filter_map(|f| f.bo.as_ref()).map(|bo| bo.len()).sum::<u64>();
    }

    /// Bytes of device memory that are never used again, because transfers to them did not end.
    pub fn abandoned_bytes(&self) -> u64 {
        self.abandoned
    }

    /// # Errors
    /// [`Error::OtherDevice`] for a file that was loaded onto another device.
    pub(crate) fn check(&self, file: &LoadedFile) -> Result<(), Error> {
        if file.device == self.number { Ok(()) } else { Err(Error::OtherDevice { path: file.path.clone() }) }
    }

    fn unload_file(&mut self, file: LoadedFile) -> Result<(), Error> {
        self.check(&file)?;
        let (Some(bo), Some(range)) = (file.bo, file.range) else { return Ok(()) };
        let plan = self.parts.vm.plan([BindRequest::Unbind(range)]).map_err(|e| Error::Bind {
            path: file.path.clone(),
            tensor: String::new(),
            source: e.error,
        })?;
        let committed = plan.commit();
        self.observed(Some(BindRequest::Unbind(range)));
        (self.parts.invalidate)().map_err(Error::Invalidate)?;
        self.parts.vm.invalidated(committed);
        self.parts.memory.free(bo.sg().segments())?;
        // The range came from this allocator and is freed once, with its file.
        let freed = self.vas.free(range);
        debug_assert!(freed.is_ok(), "{freed:?}");
        Ok(())
    }
}
