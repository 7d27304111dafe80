//! The software host: physical frames and an IOMMU, in process.
//!
//! A device model gets host memory only through [`DevicePort`]: IOVA, then the IOMMU's page tables (with a small IOTLB
//! in front), then the frame directory, then bytes. Unmapped addresses cannot be reached; the refusal is recorded as a
//! fault.
//!
//! Frames are synthetic (see `frames.rs`) and 4 KiB each whatever pages are really behind a buffer, so that the
//! fragmentation asked for is the fragmentation had.
//!
//! One reader-writer lock orders devices against the driver: a device holds it for reading while it copies, unmapping
//! takes it for writing. When [`Mapping`] has been dropped, no copy through it is under way and none can begin.

mod directory;
mod frames;
mod iotlb;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use dmalane_addr::{
    Access, Address, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, Segment, SgTable, Span,
};
use dmalane_dma::{
    BufferRef, DeviceMem, DmaFault, Error, FaultReason, HeldMem, Mapping, Pinned, Registrar, Undo, VolatileSlice, lock,
};
use dmalane_iopt::{Arm64S1_4k, Format, HeapTables, PageTable};

use self::directory::{Directory, Reading, Stretch, Translation};
use self::frames::{FRAME, Frames};
use self::iotlb::Iotlb;

/// How the software host is made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HostConfig {
    /// Physical memory in bytes, at most 16 TiB; rounded down to whole 64 MiB. Only what is pinned costs anything.
    pub memory: u64,
    /// 0 (every buffer contiguous) to 1 (every frame on its own).
    pub fragmentation: f64,
    /// Same seed, same frames.
    pub seed: u64,
}

impl Default for HostConfig {
    /// 64 GiB, fragmented like a machine that has been up for a week.
    fn default() -> Self {
        Self { memory: 64 << 30, fragmentation: 0.5, seed: 1 }
    }
}

/// The kernel's table memory starts here, well away from the frames: a walker that confuses the two hits nothing.
const TABLES_BASE: u64 = 1 << 46;
/// IOVAs: 39 bits as on small VT-d units, without the first MiB and the x86 interrupt window.
const IOVA_FIRST: u64 = 1 << 20;
const IOVA_LAST: u64 = (1 << 39) - 1;
const MSI_WINDOW: u64 = 0xfee0_0000;
const MSI_LEN: u64 = 1 << 20;

struct Inner<F: Format> {
    translation: RwLock<Translation<F>>,
    frames: Mutex<Frames>,
    iovas: Mutex<RangeCache<Iova>>,
    /// Counts invalidations; an IOTLB filled under another value is stale.
    epoch: AtomicU64,
    faults: AtomicU64,
}

/// Counters of a [`SoftHost`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostStats {
    /// Accesses refused.
    pub faults: u64,
    /// Frames of 4 KiB pinned now.
    pub pinned_frames: u64,
    /// Live page-table leaves by size.
    pub leaves: Vec<(PageSize, u64)>,
    /// Tables in use, the root included.
    pub tables: usize,
}

/// Synthetic physical memory behind an IOMMU of page-table format `F`. Clones are handles to the same host.
///
/// ```
/// use dmalane_addr::{Access, Address};
/// use dmalane_dma::{AnonHeap, CopyHint, DeviceMem, Heap, HeldMem, Registrar};
/// use dmalane_sim::{HostConfig, SoftHost};
/// let host: SoftHost = SoftHost::new(HostConfig::default())?;
/// let buf = AnonHeap::new().allocate(1 << 20)?.share();
/// let mapping = host.map(host.pin(&buf.reference())?, Access::READ)?;
/// let mut device = host.port();
/// let iova = mapping.span().first();
/// let mut word = [0; 4];
/// device.hold().read_bytes(iova, &mut word).unwrap();
/// device.hold().write_bytes(iova, &word).unwrap_err(); // mapped for reading only
/// drop(mapping);
/// device.hold().read_bytes(iova, &mut word).unwrap_err(); // no longer mapped
/// assert_eq!(host.stats().faults, 2);
/// # Ok::<(), dmalane_dma::Error>(())
/// ```
pub struct SoftHost<F: Format = Arm64S1_4k>(Arc<Inner<F>>);

impl<F: Format> Clone for SoftHost<F> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<F: Format> SoftHost<F> {
    /// A host with nothing pinned.
    ///
    /// # Errors
    /// [`PageTable`](crate::Error::PageTable) when the root table cannot be made.
    pub fn new(config: HostConfig) -> Result<Self, Error> {
        let space = Span::inclusive(Iova::new(IOVA_FIRST), Iova::new(IOVA_LAST)).expect("a constant span");
        // The window is never given back.
        let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
        let msi = Span::new(Iova::new(MSI_WINDOW), MSI_LEN).expect("a constant span");
        iovas.reserve(msi).expect("the window lies within the space");
        let table = PageTable::new(HeapTables::new(PhysAddr::new(TABLES_BASE)))
            .map_err(|source| crate::Error::PageTable { span: space, source })?;
        let limit = u32::try_from(config.memory.min(16 << 40) / FRAME).unwrap_or(u32::MAX);
        Ok(Self(Arc::new(Inner {
            translation: RwLock::new(Translation { table, directory: Directory::default() }),
            frames: Mutex::new(Frames::new(limit, config.fragmentation, config.seed)),
            iovas: Mutex::new(RangeCache::new(iovas)),
            epoch: AtomicU64::new(0),
            faults: AtomicU64::new(0),
        })))
    }

    /// A device's access to this host's memory, with an IOTLB of its own.
    pub fn port(&self) -> DevicePort<F> {
        DevicePort { host: self.0.clone(), tlb: Iotlb::new() }
    }

    /// Accesses refused so far. Waits for no mapping.
    pub fn faults(&self) -> u64 {
        self.0.faults.load(Ordering::Relaxed)
    }

    /// Counters.
    pub fn stats(&self) -> HostStats {
        let translation = self.0.read();
        HostStats {
            faults: self.faults(),
            pinned_frames: translation.directory.frames(),
            leaves: translation.table.leaf_counts().collect(),
            tables: translation.table.tables().in_use(),
        }
    }

    fn owner(&self) -> Arc<dyn Undo> {
        self.0.clone()
    }
}

impl<F: Format> Registrar for SoftHost<F> {
    /// Gives pages of the buffer frames.
    ///
    /// # Errors
    /// [`Error::BadRange`] unless the range is whole 4 KiB pages of the buffer; [`Error::OutOfFrames`].
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        buffer.check_pages(&range, FRAME as usize)?;
        let wanted = range.len() as u64 / FRAME;
        let mut frames = lock(&self.0.frames);
        let out = Error::OutOfFrames { wanted, limit: frames.limit() };
        let Some(pages) = frames.allocate(wanted) else { return Err(out) };
        if self.0.write().directory.enter(buffer.clone(), range.start as u64 / FRAME, &pages).is_none() {
            frames.release(&pages);
            return Err(out);
        }
        Ok(Pinned::new(buffer.clone(), range, Some(pages), self.owner()))
    }

    /// Maps them in one batch of page-table entries, congruent with their frames so that large leaves fit.
    ///
    /// # Errors
    /// [`Error::WholeBuffers`] for an empty list, [`Error::ForeignPin`], [`Error::NoAccess`], [`Error::Iova`],
    /// [`PageTable`](crate::Error::PageTable); nothing stays mapped.
    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        let len = Pinned::admit_all(&mut list, &self.0, access)?;
        let segments = list.iter().filter_map(Pinned::pages).flat_map(SgTable::segments);
        let lease = self.0.allocate(len, segments.clone())?;
        let span = lease.span();
        let mapped = self.0.write().table.map_sg(span.first(), segments, access);
        match mapped {
            Ok(_) => Ok(Mapping::new(list, lease, access)),
            Err(source) => {
                lock(&self.0.iovas).free(lease);
                Err(crate::Error::PageTable { span, source }.into())
            }
        }
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }
}

impl<F: Format> Inner<F> {
    fn read(&self) -> std::sync::RwLockReadGuard<'_, Translation<F>> {
        self.translation.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Translation<F>> {
        self.translation.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// IOVAs for `len` bytes, congruent with the frames of the segment that has room for the largest leaf; aligned to 2
    /// MiB where they are that many and none has.
    fn allocate(&self, len: u64, segments: impl Iterator<Item = Segment<PhysAddr>>) -> Result<Lease<Iova>, Error> {
        let (mut align, mut phase) = (PageSize::SIZE_4K, 0);
        if len >= PageSize::SIZE_2M.bytes() {
            let (mut leaf, mut offset) = (PageSize::SIZE_64K, 0_u64);
            align = PageSize::SIZE_2M;
            for Segment { addr, len } in segments {
                // Short segments, of which there may be many, need no check.
                if len > leaf.bytes()
                    && let Some(fits) = F::PAGE_SIZES.largest_within(addr.bits(), len).filter(|fits| *fits > leaf)
                {
                    (leaf, align) = (fits, fits);
                    phase = addr.bits().wrapping_sub(offset) & (fits.bytes() - 1);
                }
                offset += len;
            }
        }
        let mut iovas = lock(&self.iovas);
        // Not congruent rather than not at all.
        Ok(iovas.allocate_at(len, align, phase).or_else(|_| iovas.allocate(len, PageSize::SIZE_4K))?)
    }

    fn record(&self, fault: DmaFault) -> DmaFault {
        self.faults.fetch_add(1, Ordering::Relaxed);
        fault
    }
}

impl<F: Format> Undo for Inner<F> {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        let mut translation = self.write();
        // A mapping's span starts and ends at its own leaves, so nothing is split and no table is needed.
        let list = translation.table.unmap(lease.span()).expect("unmapping whole leaves needs no memory");
        self.epoch.fetch_add(1, Ordering::Release);
        translation.table.free_tables(list);
        drop(translation);
        lock(&self.iovas).free(lease);
        true
    }

    fn unpin(&self, pages: &SgTable<PhysAddr>) {
        let mut frames = lock(&self.frames);
        self.write().directory.remove(pages);
        frames.release(pages);
    }
}

/// A device's access to a [`SoftHost`]'s memory, through the IOMMU.
pub struct DevicePort<F: Format = Arm64S1_4k> {
    host: Arc<Inner<F>>,
    tlb: Iotlb,
}

impl<F: Format> DeviceMem for DevicePort<F> {
    type Held<'a> = HeldPort<'a, F>;

    fn hold(&mut self) -> HeldPort<'_, F> {
        let translation = self.host.read();
        Self::held(&self.host, translation, &mut self.tlb)
    }

    fn try_hold(&mut self) -> Option<HeldPort<'_, F>> {
        let translation = match self.host.translation.try_read() {
            Ok(translation) => translation,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Self::held(&self.host, translation, &mut self.tlb))
    }
}

impl<F: Format> DevicePort<F> {
    #[inline]
    fn held<'a>(
        host: &'a Inner<F>,
        translation: RwLockReadGuard<'a, Translation<F>>,
        tlb: &'a mut Iotlb,
    ) -> HeldPort<'a, F> {
        // An invalidation counts up while it holds the lock for writing: under this lock the number stays as it is.
        tlb.set_epoch(host.epoch.load(Ordering::Acquire));
        HeldPort { host, translation: Reading::new(translation), tlb }
    }
}

/// A [`DevicePort`] while it holds the host's translations: what it reaches stays mapped until it is dropped.
pub struct HeldPort<'a, F: Format> {
    host: &'a Inner<F>,
    translation: Reading<'a, F>,
    tlb: &'a mut Iotlb,
}

impl<F: Format> HeldPort<'_, F> {
    /// [`HeldMem::access`] of anything.
    fn access_slowly(
        &mut self,
        at: Iova,
        len: u64,
        wanted: Access,
        each: &mut dyn FnMut(usize, VolatileSlice<'_>) -> bool,
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        let mut pending: Option<Stretch> = None;
        while done < len {
            match self.locate(at, done, len, wanted) {
                Ok(next) => {
                    pending = match pending.map(|p| (p, p.join(next))) {
                        None => Some(next),
                        Some((_, Some(joined))) => Some(joined),
                        Some((before, None)) => {
                            if !each((done - before.len()) as usize, self.view(before)) {
                                return Ok(());
                            }
                            Some(next)
                        }
                    };
                    done += next.len();
                }
                Err(reason) => {
                    if let Some(last) = pending
                        && !each((done - last.len()) as usize, self.view(last))
                    {
                        return Ok(());
                    }
                    let at = Iova::new(at.bits().wrapping_add(done));
                    return Err(self.host.record(DmaFault { at, wanted, reason, done }));
                }
            }
        }
        if let Some(last) = pending {
            each((done - last.len()) as usize, self.view(last));
        }
        Ok(())
    }

    #[inline]
    fn view(&self, stretch: Stretch) -> VolatileSlice<'_> {
        // `locate` found the stretch under the same lock, or under no later invalidation.
        self.translation.directory.view(stretch).expect("a stretch lies in its buffer")
    }

    /// The stretch `done` bytes behind `at`, as far as one entry of the IOTLB reaches.
    #[inline]
    fn locate(&mut self, at: Iova, done: u64, len: u64, wanted: Access) -> Result<Stretch, FaultReason> {
        let here = at.checked_add(done).ok_or(FaultReason::PastTheTop)?;
        let entry = match self.tlb.find(here) {
            Some(entry) => *entry,
            None => {
                let Translation { table, directory } = &*self.translation;
                self.tlb.fill(here, table, directory).ok_or(FaultReason::NotMapped)?
            }
        };
        if !entry.access().contains(wanted) {
            return Err(FaultReason::NotPermitted);
        }
        Ok(entry.bytes_from(here).at_most(len - done))
    }
}

impl<F: Format> HeldMem for HeldPort<'_, F> {
    /// Translates `len` bytes from `at` and hands each contiguous stretch of a buffer to `each` with its offset, until
    /// that says false.
    ///
    /// Every page has been translated and checked, now or since the last invalidation. A range that is contiguous in
    /// the buffer, as it is wherever IOVAs are, is copied at once all the same: many small copies cost more than the
    /// translations.
    #[inline]
    fn access(
        &mut self,
        at: Iova,
        len: usize,
        wanted: Access,
        mut each: impl FnMut(usize, VolatileSlice<'_>) -> bool,
    ) -> Result<(), DmaFault> {
        // Nearly always all of it lies behind one entry, and often behind the one before.
        if let Some(all) = self.translation.last(at, len, wanted) {
            each(0, all);
            return Ok(());
        }
        if let Some(entry) = self.tlb.find(at) {
            self.translation.keep(entry.first(), entry.access(), entry.bytes());
            if let Some(all) = self.translation.last(at, len, wanted) {
                each(0, all);
                return Ok(());
            }
        }
        self.access_slowly(at, len as u64, wanted, &mut each)
    }

    #[inline]
    fn entries_read(&self) -> u64 {
        self.tlb.entries_read()
    }
}

#[cfg(test)]
mod tests;
