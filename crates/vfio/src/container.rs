//! Containers: devices that share one IOMMU address space, and the memory mapped into it, with either backend.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use dmalane_addr::{
    Access, Address, Iova, Lease, PageSize, PageSizes, PhysAddr, RangeAllocator, RangeCache, SgTable, Span,
};
use dmalane_dma::{self as dma, BufferRef, Mapping, Pinned, Undo};
use rustix::io::Errno;

use crate::backend::{Backend, more_specific};
use crate::device;
use crate::error::{RegionError, VfioOperation};
use crate::gate::Revocable;
use crate::iommufd::Iommufd;
use crate::sysfs::Sysfs;
use crate::{BarMap, Bdf, Error, PciDevice, sys};

const VFIO: &str = "/dev/vfio/vfio";

/// One IOMMU address space. Every device that was opened through it can access all memory that is mapped in it. Clones
/// share the container.
#[derive(Clone)]
pub struct VfioContainer(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    sysfs: Sysfs,
    /// The only backend that is tried.
    only: Option<Backend>,
    /// Map file-backed memory by its address, not by its file.
    by_address: AtomicBool,
    /// Set when the first device is opened.
    kernel: OnceLock<Kernel>,
    /// Why iommufd was not used.
    iommufd_error: OnceLock<Error>,
    state: Mutex<State>,
    /// Bytes mapped. Shared with mappings of BARs, which a device may end.
    mapped: Arc<AtomicU64>,
    /// Mappings that the kernel refused to unmap; their IOVAs stay allocated.
    failed_unmaps: AtomicU64,
}

/// The kernel object of the address space.
enum Kernel {
    /// A container of VFIO.
    Type1(OwnedFd),
    Iommufd(Iommufd),
}

#[derive(Default)]
struct State {
    /// The open groups, with type 1.
    groups: BTreeMap<u32, OwnedFd>,
    /// The open devices. Each is opened once: iommufd allows no more, and what is known of its command register is
    /// known in one place.
    devices: BTreeMap<Bdf, Weak<device::Inner>>,
    /// Set when the first device is opened.
    space: Option<Space>,
}

/// The IOVAs of the IOMMU.
struct Space {
    iovas: RangeCache<Iova>,
    ranges: Vec<Span<Iova>>,
    pages: PageSizes,
}

impl Space {
    /// The IOMMU's smallest page.
    fn page(&self) -> PageSize {
        self.pages.smallest().unwrap_or(PageSize::SIZE_4K)
    }
}

/// How a BAR was mapped for other devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PeerMethod {
    /// Type 1 walks the process's page table, page by page of the mapping of the BAR.
    PageTable,
    /// iommufd maps a dma-buf of the BAR, independent of its mapping in this process.
    DmaBuf,
}

impl fmt::Display for PeerMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PageTable => "type1",
            Self::DmaBuf => "dma-buf",
        })
    }
}

impl Default for VfioContainer {
    fn default() -> Self {
        Self::new()
    }
}

impl VfioContainer {
    /// A container without devices. The first device selects the [`Backend`]: iommufd if it exists and this process may
    /// open it, else type 1.
    pub fn new() -> Self {
        Self::create(None)
    }

    /// A container that uses this backend and no other.
    pub fn with_backend(backend: Backend) -> Self {
        Self::create(Some(backend))
    }

    fn create(only: Option<Backend>) -> Self {
        Self(Arc::new(Inner {
            sysfs: Sysfs::new("/"),
            only,
            by_address: AtomicBool::new(false),
            kernel: OnceLock::new(),
            iommufd_error: OnceLock::new(),
            state: Mutex::default(),
            mapped: Arc::default(),
            failed_unmaps: AtomicU64::new(0),
        }))
    }

    /// Opens a device that is bound to `vfio-pci`. The first device selects the backend of the container.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::NoModule`], [`Error::NotBuilt`], [`Error::NoIommu`], [`Error::NoProtection`],
    /// [`Error::NotBound`], [`Error::NoPermission`], [`Error::Busy`], [`Error::NotViable`], [`Error::Kernel`]; with
    /// type 1 [`Error::NoType1`], [`Error::Attach`]; with iommufd [`Error::NoDeviceFile`], [`Error::AttachDevice`].
    pub fn open(&self, bdf: &Bdf) -> Result<PciDevice, Error> {
        let group = self.0.sysfs.group(*bdf)?;
        let mut state = self.0.lock();
        let selected = self.0.kernel.get().map(Kernel::backend).or(self.0.only);
        match selected {
            Some(Backend::Iommufd) => self.open_with_iommufd(&mut state, *bdf, group)?,
            Some(Backend::Type1) => self.open_with_type1(&mut state, *bdf, group),
            None => self.open_with_iommufd(&mut state, *bdf, group).unwrap_or_else(|iommufd| {
                match self.open_with_type1(&mut state, *bdf, group) {
                    Ok(device) => {
                        let _ = self.0.iommufd_error.set(iommufd);
                        Ok(device)
                    }
                    Err(type1) => Err(more_specific(iommufd, type1)),
                }
            }),
        }
    }

    fn open_with_type1(&self, state: &mut State, bdf: Bdf, group: u32) -> Result<PciDevice, Error> {
        if let Some(open) = state.devices.get(&bdf).and_then(Weak::upgrade) {
            return Ok(PciDevice::from_open(open));
        }
        self.0.attach_group(state, group)?;
        let fd = state.groups.get(&group).ok_or(Error::NoIommu(bdf))?;
        let device =
            sys::device(fd.as_fd(), &bdf.to_string()).map_err(Error::kernel(VfioOperation::OpenDevice(bdf)))?;
        let device = PciDevice::new(device, bdf, self.clone())?;
        state.devices.insert(bdf, device.weak());
        Ok(device)
    }

    /// The outer error: iommufd cannot open the device, type 1 may. The inner error: the device is unusable with any
    /// backend.
    fn open_with_iommufd(&self, state: &mut State, bdf: Bdf, group: u32) -> Result<Result<PciDevice, Error>, Error> {
        if let Some(open) = state.devices.get(&bdf).and_then(Weak::upgrade) {
            return Ok(Ok(PciDevice::from_open(open)));
        }
        let path = self.0.sysfs.device_file(bdf)?;
        let mut new = None;
        let space = match self.0.kernel.get() {
            Some(Kernel::Iommufd(space)) => space,
            _ => new.insert(Iommufd::new()?),
        };
        let file = open(&path, "vfio-pci")?;
        let info = space.attach(file.as_fd()).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::BUSY | Errno::INVAL) => match self.0.sysfs.others(group) {
                others if others.is_empty() => Error::Busy { path },
                others => Error::NotViable { group, others },
            },
            _ => Error::AttachDevice { bdf, source },
        })?;
        // Before the container changes, so that it stays unchanged on an error.
        let device = match PciDevice::new(file, bdf, self.clone()) {
            Ok(device) => device,
            Err(e) => return Ok(Err(e)),
        };
        state.update(info);
        if let Some(space) = new {
            let _ = self.0.kernel.set(Kernel::Iommufd(space));
        }
        state.devices.insert(bdf, device.weak());
        Ok(Ok(device))
    }

    /// The backend in use; `None` before the first device.
    pub fn backend(&self) -> Option<Backend> {
        self.0.kernel.get().map(Kernel::backend)
    }

    /// From now on maps memfds by their address in this process, which iommufd otherwise maps by their file, to measure
    /// the difference.
    pub fn map_by_address(&self) {
        self.0.by_address.store(true, Ordering::Relaxed);
    }

    /// Why iommufd was unavailable, if that is why type 1 was selected.
    pub fn iommufd_error(&self) -> Option<&Error> {
        self.0.iommufd_error.get()
    }

    /// The IOVAs to which memory can be mapped, lowest first; the gaps belong to interrupts and firmware. Empty before
    /// the first device.
    pub fn iova_ranges(&self) -> Vec<Span<Iova>> {
        self.0.lock().space.as_ref().map_or(Vec::new(), |space| space.ranges.clone())
    }

    /// The page sizes of the IOMMU, as its driver reports them; some report every multiple of 4 KiB and use the largest
    /// that fits.
    pub fn page_sizes(&self) -> PageSizes {
        self.0.lock().space.as_ref().map_or(PageSizes::from_bits(0), |space| space.pages)
    }

    /// Number of further mappings that the kernel accepts; `None` if it does not report it, or has no limit (iommufd).
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn mappings_left(&self) -> Result<Option<u32>, Error> {
        let Some(Kernel::Type1(fd)) = self.0.kernel.get() else { return Ok(None) };
        Ok(sys::iommu_info(fd.as_fd()).map_err(Error::kernel(VfioOperation::QueryContainer))?.left)
    }

    /// Bytes that are currently mapped, without BARs whose mapping the kernel has removed
    /// ([`PeerMapping::is_mapped`]).
    pub fn mapped_bytes(&self) -> u64 {
        self.0.mapped.load(Ordering::Relaxed)
    }

    /// The number of mappings that the kernel refused to unmap: 0, unless the kernel has a bug.
    pub fn failed_unmaps(&self) -> u64 {
        self.0.failed_unmaps.load(Ordering::Relaxed)
    }

    /// Maps pinned buffers, or ranges of them, at contiguous IOVAs that the container chooses. Each counts as one
    /// mapping towards the kernel's limit ([`VfioContainer::mappings_left`]).
    ///
    /// # Errors
    /// [`Error`] by cause, such as [`Error::NotMemory`], [`Error::Memlock`], [`Error::TooMany`] and [`Error::Iova`];
    /// nothing stays mapped.
    pub fn map_list(&self, list: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        self.0.map_list(list, access, None)
    }

    /// Maps a pinned buffer at a given IOVA, for a device that requires certain addresses.
    ///
    /// # Errors
    /// As [`VfioContainer::map_list`]; [`Error::OutsideIova`], [`Error::Overlap`], [`Error::Unaligned`].
    pub fn map_at(&self, pinned: Pinned, access: Access, at: Iova) -> Result<Mapping, dma::Error> {
        self.0.map_list(vec![pinned], access, Some(at))
    }

    /// Maps part of a BAR of a device (the same or another one) for the devices of this container, for peer-to-peer
    /// DMA.
    ///
    /// With type 1 the kernel walks the mapping of the BAR in this process. With iommufd the BAR is mapped as a
    /// dma-buf; when its device is reset, or its memory is disabled, the kernel removes the mapping
    /// ([`PeerMapping::is_mapped`]), and it must be renewed ([`PeerMapping::renew`]).
    ///
    /// # Errors
    /// As [`VfioContainer::map_list`]; [`Error::Region`] when the range is not within `bar`, or the device does not
    /// respond; [`Error::NoDmaBuf`].
    pub fn map_peer(&self, bar: &Arc<BarMap>, range: Range<u64>, access: Access) -> Result<PeerMapping, Error> {
        let len = range.end.checked_sub(range.start).filter(|len| *len > 0 && range.end <= bar.len());
        let len = len.ok_or_else(|| bar.error(RegionError::OutOfRange))?;
        let mut state = self.0.lock();
        let method = match self.0.kernel.get().ok_or(Error::NoType1)? {
            Kernel::Type1(_) => PeerMethod::PageTable,
            Kernel::Iommufd(_) => PeerMethod::DmaBuf,
        };
        let congruent = match method {
            PeerMethod::PageTable => bar.address() as u64 + range.start,
            // The physical address of a BAR is a multiple of its length.
            PeerMethod::DmaBuf => bar.range().start + range.start,
        };
        let lease = state.allocate(congruent, len)?;
        let span = lease.span();
        match self.0.map_bar(&state, bar, range.start, span, access) {
            Ok((live, map_time)) => Ok(PeerMapping {
                span,
                access,
                start: range.start,
                lease: Some(lease),
                container: self.0.clone(),
                bar: bar.clone(),
                method,
                map_time,
                live,
            }),
            Err(e) => {
                state.free(lease);
                Err(e)
            }
        }
    }

    /// Unmaps whole mappings now, while their owners still hold them, and returns their bytes: 0 if nothing is mapped.
    /// After it returns, no device can access them; the IOMMU stops such an access, and the kernel's log reports it
    /// ([`FaultLog`](crate::FaultLog)).
    ///
    /// # Errors
    /// [`Error::PartialUnmap`]; [`Error::Kernel`].
    pub fn revoke(&self, span: Span<Iova>) -> Result<u64, Error> {
        self.0.kernel.get().map_or(Ok(0), |kernel| kernel.unmap(span))
    }
}

impl Kernel {
    fn backend(&self) -> Backend {
        match self {
            Self::Type1(_) => Backend::Type1,
            Self::Iommufd(_) => Backend::Iommufd,
        }
    }

    fn unmap(&self, span: Span<Iova>) -> Result<u64, Error> {
        match self {
            Self::Type1(fd) => sys::dma_unmap(fd.as_fd(), span).map_err(|source| match Errno::from_io_error(&source) {
                Some(Errno::INVAL) => Error::PartialUnmap(span),
                _ => Error::Kernel { operation: VfioOperation::Unmap(span), source },
            }),
            Self::Iommufd(space) => space.unmap(span),
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state consistent, so a panic of another thread does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches a group, unless it is already attached.
    fn attach_group(&self, state: &mut State, group: u32) -> Result<(), Error> {
        if state.groups.contains_key(&group) {
            return Ok(());
        }
        let path = self.sysfs.group_file(group)?;
        let mut new = None;
        let container = match self.kernel.get() {
            Some(Kernel::Type1(container)) => container,
            _ => new.insert(open_container()?),
        };
        let container = container.as_fd();
        let file = open(&path, "vfio-pci")?;
        let asked = Error::kernel(VfioOperation::QueryGroup(group));
        if !sys::is_viable(file.as_fd()).map_err(asked)? {
            return Err(Error::NotViable { group, others: self.sysfs.others(group) });
        }
        let refused = |source| Error::Attach { group, source };
        sys::set_container(file.as_fd(), container).map_err(refused)?;
        if state.space.is_none() {
            sys::set_type1(container).map_err(refused)?;
        }
        let info = sys::iommu_info(container).map_err(Error::kernel(VfioOperation::QueryContainer))?;
        state.update(info);
        state.groups.insert(group, file);
        if let Some(container) = new {
            let _ = self.kernel.set(Kernel::Type1(container));
        }
        Ok(())
    }

    fn map_list(
        self: &Arc<Self>,
        mut list: Vec<Pinned>,
        access: Access,
        at: Option<Iova>,
    ) -> Result<Mapping, dma::Error> {
        let len = Pinned::admit_all(&mut list, self, access)?;
        let mut state = self.lock();
        let mut taken = None;
        let first = match at {
            Some(at) => at,
            None => {
                let place = start_of_longest(list.iter().map(|p| (address(p) as u64, p.range().len() as u64)));
                taken.insert(state.allocate(place, len)?).span().first()
            }
        };
        let mapped = self.map_contiguous(&state, &list, first, access);
        let span = match mapped {
            Ok(span) => span,
            Err((e, done)) => {
                // Neither IOVAs nor memory that may still be mapped are used again.
                match done.is_none_or(|done| self.unmap_span(done)) {
                    true => taken.into_iter().for_each(|lease| state.free(lease)),
                    false => list.iter_mut().for_each(Pinned::keep),
                }
                return Err(e.into());
            }
        };
        let lease = match taken {
            Some(lease) => lease,
            // These IOVAs are free, or the kernel would have refused the mapping.
            None => state.reserve(span).inspect_err(|_| {
                if !self.unmap_span(span) {
                    list.iter_mut().for_each(Pinned::keep);
                }
            })?,
        };
        drop(state);
        self.mapped.fetch_add(len, Ordering::Relaxed);
        Ok(Mapping::new(list, lease, access))
    }

    /// Maps the list at contiguous IOVAs. An error comes with the span that is still mapped.
    fn map_contiguous(
        &self,
        state: &State,
        list: &[Pinned],
        first: Iova,
        access: Access,
    ) -> Result<Span<Iova>, (Error, Option<Span<Iova>>)> {
        let mut done: Option<Span<Iova>> = None;
        for pinned in list {
            let len = pinned.range().len() as u64;
            let at = done.map_or(Some(first), |done| done.last().checked_add(1));
            let span = at.and_then(|at| Span::new(at, len));
            let mapped = match span {
                Some(span) => {
                    let by_file = !self.by_address.load(Ordering::Relaxed);
                    let file = by_file.then(|| (pinned.reference(), pinned.range().start as u64));
                    self.map_span(state, address(pinned), file, span, access).map(|()| span)
                }
                // Past the end of 64 bits.
                None => Err(Error::OutsideIova {
                    span: Span::inclusive(first, first).expect("one byte"),
                    ranges: state.ranges(),
                }),
            };
            match mapped {
                Ok(span) => done = Span::inclusive(first, span.last()),
                Err(e) => return Err((e, done)),
            }
        }
        done.ok_or((Error::TooMany, None)) // the list is not empty
    }

    /// Makes one mapping in the kernel: of memory at an address of this process, or of its file at an offset.
    fn map_span(
        &self,
        state: &State,
        va: usize,
        file: Option<(&BufferRef, u64)>,
        span: Span<Iova>,
        access: Access,
    ) -> Result<(), Error> {
        let mapped = match self.kernel.get().ok_or(Error::NoType1)? {
            Kernel::Type1(container) => sys::dma_map(container.as_fd(), va, span.len(), span.first(), access),
            Kernel::Iommufd(space) => space.map(va, file, span, access),
        };
        mapped.map_err(|source| explain(source, va, span, access, state.page(), &state.ranges()))
    }

    /// Maps part of a BAR, and measures the kernel.
    fn map_bar(
        &self,
        state: &State,
        bar: &BarMap,
        start: u64,
        span: Span<Iova>,
        access: Access,
    ) -> Result<(Arc<Revocable>, Duration), Error> {
        // No reset until the mapping is registered.
        let _gate = bar.device().responding(bar.region())?;
        let va = bar.address() + start as usize;
        let began = Instant::now();
        let kernel = self.kernel.get().ok_or(Error::NoType1)?;
        match kernel {
            Kernel::Type1(_) => self.map_span(state, va, None, span, access)?,
            Kernel::Iommufd(space) => {
                let mapped = space.map_dma_buf(bar.dma_buf()?, start, span, access);
                mapped.map_err(|source| match Errno::from_io_error(&source) {
                    Some(Errno::NODEV) => bar.error(RegionError::Disabled),
                    _ => explain(
                        source,
                        (bar.range().start + start) as usize,
                        span,
                        access,
                        state.page(),
                        &state.ranges(),
                    ),
                })?;
            }
        }
        let map_time = began.elapsed();
        let live = Arc::new(Revocable::new(span.len(), self.mapped.clone()));
        if let Kernel::Iommufd(_) = kernel {
            bar.device().gate().register(&live);
        }
        Ok((live, map_time))
    }

    /// Unmaps a span; false when the kernel refused, so that any of it may still be mapped.
    fn unmap_span(&self, span: Span<Iova>) -> bool {
        let ended = matches!(self.kernel.get().map(|kernel| kernel.unmap(span)), Some(Ok(_)));
        if !ended {
            self.failed_unmaps.fetch_add(1, Ordering::Relaxed);
        }
        ended
    }

    /// Unmaps and frees IOVAs; false when the kernel refused. IOVAs that may still be mapped are not reused.
    fn release(&self, lease: Lease<Iova>) -> bool {
        let ended = self.unmap_span(lease.span());
        if ended {
            self.lock().free(lease);
        }
        ended
    }
}

impl Undo for Inner {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        self.mapped.fetch_sub(lease.span().len(), Ordering::Relaxed);
        self.release(lease)
    }

    /// Does nothing: the kernel unpins what it unmaps.
    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl State {
    /// The IOMMU's smallest page.
    fn page(&self) -> PageSize {
        self.space.as_ref().map_or(PageSize::SIZE_4K, Space::page)
    }

    fn ranges(&self) -> Vec<Span<Iova>> {
        self.space.as_ref().map_or(Vec::new(), |space| space.ranges.clone())
    }

    /// Updates the IOVAs and page sizes of the IOMMU, which another group may have reduced.
    fn update(&mut self, info: sys::IommuInfo) {
        let pages = PageSizes::from_bits(info.pages);
        let page = pages.smallest().unwrap_or(PageSize::SIZE_4K);
        let ranges = match info.ranges.is_empty() {
            // Kernels before 5.4 do not report ranges. Every machine has the first 4 GiB without the window of the
            // interrupts.
            true => [(page.bytes(), 0xfedf_ffff), (0xfef0_0000, 0xffff_ffff)]
                .iter()
                .filter_map(|(first, last)| Span::inclusive(Iova::new(*first), Iova::new(*last)))
                .collect(),
            false => info.ranges,
        };
        let iovas = match self.space.take() {
            Some(space) => {
                let mut iovas = space.iovas;
                for hole in space.ranges.iter().flat_map(|old| holes(*old, &ranges)) {
                    // Fails where something is mapped; then the kernel would have refused the group.
                    let _reserved_permanently = iovas.reserve(hole);
                }
                iovas
            }
            None => {
                // Without the page at 0: drivers and devices use 0 as "no address".
                let first = ranges.iter().map(|r| r.first().bits()).min().unwrap_or(0).max(page.bytes());
                let last = ranges.iter().map(|r| r.last().bits()).max().unwrap_or(u64::MAX);
                let space = Span::inclusive(Iova::new(first), Iova::new(last.max(first)));
                let space = space.expect("the first is not behind the last");
                let mut iovas = RangeAllocator::new(space, page);
                for hole in holes(space, &ranges) {
                    let _reserved_permanently = iovas.reserve(widen(hole, page));
                }
                RangeCache::new(iovas)
            }
        };
        self.space = Some(Space { iovas, ranges, pages });
    }

    /// Allocates IOVAs for `len` bytes of memory or of a BAR at `place`, congruent with it up to the largest page of
    /// which one fits, so that the IOMMU can use pages as large as those of the memory.
    fn allocate(&mut self, place: u64, len: u64) -> Result<Lease<Iova>, Error> {
        let space = self.space.as_mut().ok_or(Error::NoType1)?;
        let page = space.page();
        // IOMMUs have page sizes of their own, so any power of two is one here.
        let align = PageSizes::from_bits(u64::MAX >> 33).largest_within(place, len).map_or(page, |fits| fits.max(page));
        let phase = place & (align.bytes() - 1) & !(page.bytes() - 1);
        // Not congruent rather than not at all.
        Ok(space.iovas.allocate_at(len, align, phase).or_else(|_| space.iovas.allocate(len, page))?)
    }

    fn reserve(&mut self, span: Span<Iova>) -> Result<Lease<Iova>, Error> {
        let space = self.space.as_mut().ok_or(Error::NoType1)?;
        Ok(space.iovas.reserve(span)?)
    }

    fn free(&mut self, lease: Lease<Iova>) {
        if let Some(space) = &mut self.space {
            space.iovas.free(lease);
        }
    }
}

/// The parts of `span` that no range covers.
fn holes(span: Span<Iova>, ranges: &[Span<Iova>]) -> Vec<Span<Iova>> {
    let mut ranges: Vec<_> = ranges.iter().filter_map(|range| range.intersect(&span)).collect();
    ranges.sort_by_key(Span::first);
    let (mut holes, mut next) = (Vec::new(), Some(span.first()));
    for range in ranges {
        let Some(at) = next else { break };
        if let Some(before) = range.first().bits().checked_sub(1).filter(|before| *before >= at.bits()) {
            holes.extend(Span::inclusive(at, Iova::new(before)));
        }
        next = range.last().checked_add(1).map(|after| after.max(at));
    }
    holes.extend(next.filter(|at| *at <= span.last()).and_then(|at| Span::inclusive(at, span.last())));
    holes
}

/// A span extended to whole pages.
fn widen(span: Span<Iova>, page: PageSize) -> Span<Iova> {
    let last = Iova::new(span.last().bits() | (page.bytes() - 1));
    Span::inclusive(span.first().align_down(page), last).unwrap_or(span)
}

/// Where contiguous addresses must start for the longest of these pieces, (address, length) in their order, to be at
/// its own address.
fn start_of_longest(pieces: impl Iterator<Item = (u64, u64)>) -> u64 {
    let (mut before, mut longest) = (0_u64, (0, 0));
    for (at, len) in pieces {
        if len > longest.1 {
            longest = (at.wrapping_sub(before), len);
        }
        before = before.wrapping_add(len);
    }
    longest.0
}

fn address(pinned: &Pinned) -> usize {
    pinned.reference().address() + pinned.range().start
}

/// Opens a new VFIO container, without groups.
fn open_container() -> Result<OwnedFd, Error> {
    let file = open(Path::new(VFIO), "vfio")?;
    let has = sys::has_type1(file.as_fd()).map_err(Error::kernel(VfioOperation::Initialize(VFIO.into())))?;
    if has { Ok(file) } else { Err(Error::NoType1) }
}

pub(crate) fn open(path: &Path, module: &'static str) -> Result<OwnedFd, Error> {
    let opened = File::options().read(true).write(true).open(path).map(OwnedFd::from);
    opened.map_err(|source| match Errno::from_io_error(&source) {
        Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoModule { path: path.to_owned(), module },
        Some(Errno::ACCESS | Errno::PERM) => Error::NoPermission { path: path.to_owned() },
        Some(Errno::BUSY) => Error::Busy { path: path.to_owned() },
        _ => Error::Kernel { operation: VfioOperation::Open(path.to_owned()), source },
    })
}

/// The error for a mapping that the kernel refused. One error number has several causes, which the arguments of the
/// mapping tell apart.
fn explain(
    source: io::Error,
    va: usize,
    span: Span<Iova>,
    access: Access,
    page: PageSize,
    ranges: &[Span<Iova>],
) -> Error {
    let (iova, len) = (span.first(), span.len());
    match Errno::from_io_error(&source) {
        Some(Errno::INVAL) if (va as u64 | iova.bits() | len) & (page.bytes() - 1) != 0 => {
            Error::Unaligned { va, len, iova, page }
        }
        Some(Errno::INVAL) if !ranges.iter().any(|range| range.covers(&span)) => {
            Error::OutsideIova { span, ranges: ranges.to_vec() }
        }
        Some(Errno::EXIST) => Error::Overlap(span),
        Some(Errno::FAULT) => Error::NotMemory { va, len, writable: access.contains(Access::WRITE) },
        Some(Errno::NOSPC) => Error::TooMany,
        Some(Errno::NOMEM) => match dma::memlock_left() {
            Some(left) if left < len => Error::Memlock { wanted: len, left },
            _ => Error::Kernel { operation: VfioOperation::Map { va, span }, source },
        },
        _ => Error::Kernel { operation: VfioOperation::Map { va, span }, source },
    }
}

/// Part of a BAR that is mapped for the devices of a container. Unmapped on drop; keeps the BAR mapped in this process
/// until then.
pub struct PeerMapping {
    span: Span<Iova>,
    access: Access,
    /// Offset in the mapping of the BAR.
    start: u64,
    /// `None` only during drop.
    lease: Option<Lease<Iova>>,
    container: Arc<Inner>,
    /// Dropped after `PeerMapping::drop` has unmapped.
    bar: Arc<BarMap>,
    method: PeerMethod,
    map_time: Duration,
    live: Arc<Revocable>,
}

impl PeerMapping {
    /// False after the kernel has removed the mapping, because the device of the BAR was reset, or did not respond for
    /// a while: its memory was disabled, or it was in a low-power state. Accesses of other devices are stopped by the
    /// IOMMU then. Type 1 keeps its mappings.
    pub fn is_mapped(&self) -> bool {
        self.live.is_live()
    }

    /// Maps the range again, at the same IOVAs, if the kernel has removed the mapping.
    ///
    /// # Errors
    /// As [`VfioContainer::map_peer`]; [`Error::Region`] while the device does not respond.
    pub fn renew(&mut self) -> Result<(), Error> {
        if self.is_mapped() {
            return Ok(());
        }
        let state = self.container.lock();
        // iommufd keeps the IOVAs of a mapping that it has emptied.
        if let Some(kernel) = self.container.kernel.get() {
            kernel.unmap(self.span)?;
        }
        let (live, map_time) = self.container.map_bar(&state, &self.bar, self.start, self.span, self.access)?;
        (self.live, self.map_time) = (live, map_time);
        Ok(())
    }

    /// The IOVAs of the range.
    pub fn span(&self) -> Span<Iova> {
        self.span
    }

    /// The BAR.
    pub fn bar(&self) -> &BarMap {
        &self.bar
    }

    /// How the BAR was mapped.
    pub fn method(&self) -> PeerMethod {
        self.method
    }

    /// Time that the kernel took to map it.
    pub fn map_time(&self) -> Duration {
        self.map_time
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        self.live.end();
        if let Some(lease) = self.lease.take() {
            // The memory is the device's; a refused unmap keeps its IOVAs.
            let _ended = self.container.release(lease);
        }
    }
}

impl fmt::Debug for PeerMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerMapping")
            .field("span", &self.span)
            .field("method", &self.method)
            .field("map_time", &self.map_time)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for VfioContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioContainer").field("mapped", &self.mapped_bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::RangeError;

    use super::*;

    fn span(first: u64, last: u64) -> Span<Iova> {
        Span::inclusive(Iova::new(first), Iova::new(last)).unwrap()
    }

    #[test]
    fn holes_between_ranges() {
        let ranges = [span(0, 0xfedf_ffff), span(0xfef0_0000, 0x7f_ffff_ffff)];
        assert_eq!(holes(span(0x1000, 0x7f_ffff_ffff), &ranges), [span(0xfee0_0000, 0xfeef_ffff)]);
        assert_eq!(holes(span(1, u64::MAX), &ranges).len(), 2);
        assert_eq!(holes(span(5, 9), &[]), [span(5, 9)]);
        assert_eq!(holes(span(5, 9), &[span(1, u64::MAX)]), []);
        assert_eq!(holes(span(1, u64::MAX), &[span(9, u64::MAX), span(2, 3), span(3, 5)]), [span(1, 1), span(6, 8)]);
    }

    #[test]
    fn iovas_are_outside_of_holes() {
        let info = |ranges: &[Span<Iova>]| sys::IommuInfo { pages: !0xfff, ranges: ranges.to_vec(), left: None };
        let mut state = State::default();
        let ranges = [span(0, 0x7fff), span(0xa000, 0xffff), span(0x10_0800, 0x10_3fff)];
        state.update(info(&ranges));
        let mut got = Vec::new();
        while let Ok(lease) = state.allocate(0x1000, 0x1000) {
            assert!(ranges.iter().any(|r| r.covers(&lease.span())), "{}", lease.span());
            got.push(lease);
        }
        assert_eq!(got.len(), 7 + 6 + 3, "all but the page at 0 and the partial one");
        assert!(matches!(state.reserve(span(0x8000, 0x8fff)), Err(Error::Iova(RangeError::NotFree(_)))));
        // Another group removes a page.
        got.into_iter().for_each(|lease| state.free(lease));
        state.update(info(&[span(0, 0x7fff), span(0xb000, 0xffff), span(0x10_0800, 0x10_3fff)]));
        let mut count = 0;
        while let Ok(lease) = state.allocate(0x1000, 0x1000) {
            assert!(lease.span().first() != Iova::new(0xa000));
            count += 1;
        }
        assert_eq!(count, 7 + 5 + 3);
    }

    /// The IOVA and the memory, or the BAR, agree modulo the largest page of which one fits.
    #[test]
    fn iovas_are_congruent_with_what_they_map() {
        let mut state = State::default();
        state.update(sys::IommuInfo { pages: !0xfff, ranges: vec![span(0, 1 << 39)], left: None });
        for (place, len, log2) in [
            (0x20_0000, 2 << 20, 21),
            (0x4000_0000, 1 << 30, 30),
            (0x4000_0000, 3 << 20, 21),
            (0x1f_f000, (2 << 20) + 0x1000, 21),
            (0x3000, 5 << 20, 21),
            (0x1000, (32 << 30) - 0x1000, 30),
            (0x20_0000, (32 << 30) - (2 << 20), 30),
            (0x5000, 0x1000, 12),
        ] {
            let lease = state.allocate(place, len).unwrap();
            let difference = lease.span().first().bits() ^ place;
            assert!(difference.is_multiple_of(1 << log2), "{place:#x} {len:#x}: {}", lease.span());
        }
        // Of a list, the longest piece.
        assert_eq!(start_of_longest([(0x5000, 0x1000), (0x40_0000, 0x40_0000), (0, 0x1000)].into_iter()), 0x3f_f000);
    }

    /// A file in place of a container: it refuses every request.
    #[test]
    fn memory_that_the_kernel_does_not_unmap_is_kept() {
        let container = VfioContainer::new();
        let file = tempfile::tempfile().unwrap();
        assert!(container.0.kernel.set(Kernel::Type1(file.into())).is_ok());
        let info = sys::IommuInfo { pages: !0xfff, ranges: vec![span(0, 1 << 39)], left: None };
        container.0.lock().update(info);
        let map = |buf: &dma::SharedBuf, access| {
            let pinned = Pinned::new(buf.reference(), 0..buf.len(), None, container.0.clone());
            container.0.mapped.fetch_add(4096, Ordering::Relaxed);
            Mapping::new(vec![pinned], container.0.lock().allocate(0, 4096).unwrap(), access)
        };
        let allocate = || dma::Heap::allocate(&dma::AnonHeap::new(), 4096).unwrap().share();
        let (read, written) = (allocate(), allocate());
        let first = map(&read, Access::READ);
        let span = first.span();
        drop((first, map(&written, Access::RW)));
        assert_eq!((container.failed_unmaps(), container.mapped_bytes()), (2, 0));
        assert!(read.into_cpu().is_err(), "a device may still read it");
        let mut part = written.into_slice();
        assert!(part.with_bytes(|_| ()).is_none(), "a device may still write it");
        assert!(container.0.lock().reserve(span).is_err(), "its addresses stay taken");
        // A list that was mapped in part.
        let (buf, other) = (allocate(), allocate());
        let list = [&buf, &other].map(|buf| Pinned::new(buf.reference(), 0..buf.len(), None, container.0.clone()));
        assert!(container.map_list(list.into(), Access::RW).is_err());
        assert!(buf.into_cpu().is_ok(), "nothing of it was mapped");
    }

    #[test]
    fn one_error_number_has_several_causes() {
        let ranges = [span(0, 0xfedf_ffff), span(0xfef0_0000, 0x7f_ffff_ffff)];
        let explained = |errno: Errno, va: usize, at: Span<Iova>, access: Access| {
            explain(io::Error::from(errno), va, at, access, PageSize::SIZE_4K, &ranges)
        };
        let page = span(0x1000, 0x1fff);
        assert!(matches!(explained(Errno::INVAL, 5, page, Access::RW), Error::Unaligned { va: 5, .. }));
        assert!(matches!(explained(Errno::INVAL, 0, span(0x1000, 0x1ffe), Access::RW), Error::Unaligned { .. }));
        let msi = explained(Errno::INVAL, 0x1000, span(0xfee0_0000, 0xfee0_0fff), Access::RW);
        assert!(matches!(&msi, Error::OutsideIova { ranges, .. } if ranges.len() == 2), "{msi}");
        assert!(msi.to_string().contains("0xfedfffff"), "{msi}");
        assert!(matches!(explained(Errno::INVAL, 0x1000, page, Access::RW), Error::Kernel { .. }));
        assert!(matches!(explained(Errno::EXIST, 0x1000, page, Access::RW), Error::Overlap(s) if s == page));
        let read_only = explained(Errno::FAULT, 0x1000, page, Access::RW);
        assert!(matches!(read_only, Error::NotMemory { writable: true, .. }));
        assert!(read_only.to_string().contains("read-only"));
        assert!(!explained(Errno::FAULT, 0x1000, page, Access::READ).to_string().contains("read-only"));
        assert!(matches!(explained(Errno::NOSPC, 0x1000, page, Access::RW), Error::TooMany));
        assert!(matches!(explained(Errno::PERM, 0x1000, page, Access::RW), Error::Kernel { .. }));
    }

    /// The largest base page of any kernel.
    const PAGE: usize = 64 << 10;

    /// The kernel's errors for memory that no buffer consists of. `scripts/vm` runs this with a device.
    #[test]
    fn the_kernels_errors_for_addresses() {
        #[repr(align(65536))]
        struct Page([u8; PAGE]);
        static READ_ONLY: Page = Page([7; PAGE]);
        for backend in [Backend::Iommufd, Backend::Type1] {
            let container = VfioContainer::with_backend(backend);
            let Some(device) = Sysfs::new("/").bound().into_iter().find_map(|bdf| container.open(&bdf).ok()) else {
                println!("SKIPPED: no PCI device can be opened by {backend} here");
                continue;
            };
            addresses(&container, &device, READ_ONLY.0.as_ptr().addr());
        }
    }

    fn addresses(container: &VfioContainer, device: &PciDevice, constant: usize) {
        let inner = &container.0;
        let at = span(0x20_0000, 0x20_ffff);
        let map = |va: usize, span, access| inner.map_span(&inner.lock(), va, None, span, access);
        let refused = map(constant, at, Access::RW).unwrap_err();
        assert!(matches!(refused, Error::NotMemory { writable: true, .. }), "{refused}");
        map(constant, at, Access::READ).unwrap();
        assert_eq!(container.revoke(at).unwrap(), PAGE as u64);
        // Nothing is mapped in the first page of a process.
        assert!(matches!(map(0, at, Access::READ), Err(Error::NotMemory { writable: false, .. })));
        assert!(matches!(map(constant + 8, at, Access::READ), Err(Error::Unaligned { .. })));
        let odd = span(0x20_0000, 0x20_fffe);
        assert!(matches!(map(constant, odd, Access::READ), Err(Error::Unaligned { len: 65535, .. })));
        let Some(Kernel::Iommufd(space)) = inner.kernel.get() else { return };
        let at = span(0x20_0000, 0x20_0fff);
        // The error numbers of iommufd, before they are explained.
        let errno = |result: io::Result<()>| result.map_err(|e| Errno::from_io_error(&e).unwrap());
        let heap = dma::DmaHeap::open("system").unwrap();
        let dma_buf = dma::Heap::allocate(&heap, 4096).unwrap().share();
        let (buffer, file) = (dma_buf.reference(), dma_buf.export().unwrap());
        assert_eq!(errno(space.map_dma_buf(file, 0, at, Access::RW)), Err(Errno::OPNOTSUPP));
        let can_map = |region: &&crate::PciRegion| region.index < 6 && region.mappable.contains(&(0..region.len));
        let region = device.regions().iter().find(can_map).unwrap();
        let bar = device.map_bar(region.index, None, crate::BarAlignment::LargestPage).unwrap();
        assert_eq!(errno(space.map(bar.address(), None, at, Access::RW)), Err(Errno::FAULT), "a BAR by its address");
        assert_eq!(errno(space.map(buffer.address(), Some((&buffer, 0)), at, Access::RW)), Err(Errno::FAULT));
        let memfd = dma::Heap::allocate(&dma::MemfdHeap::new(), 8192).unwrap().share();
        let buffer = memfd.reference();
        let map = |span| errno(space.map(buffer.address(), Some((&buffer, 0)), span, Access::RW));
        let two = span(0x20_0000, 0x20_1fff);
        assert_eq!(map(two), Ok(()));
        assert_eq!(map(at), Err(Errno::EXIST));
        assert_eq!(space.unmap_error(at), Some(Errno::NOENT), "the kernel's error for half a mapping");
        assert!(matches!(container.revoke(at), Err(Error::PartialUnmap(_))), "our error for it");
        assert_eq!(container.revoke(two).unwrap(), 8192);
        assert_eq!(space.unmap_error(at), Some(Errno::NOENT), "the kernel's error for no mapping");
        assert_eq!(container.revoke(two).unwrap(), 0);
        drop(buffer);
        assert!(memfd.into_cpu().is_ok(), "the kernel's mapping did not export the file");
    }
}
