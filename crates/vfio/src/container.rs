//! Containers: devices that share one IOMMU address space, and the memory mapped into it, with either backend.
//!
//! `unsafe` where devices get access to memory: `map_to` is where a list of pins that are admitted
//! meets the kernel, and [`Mapping`] keeps them until it is unmapped.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeError, SgTable, Span};
use dmalane_dma::{self as dma, BufferRef, Mapping, Pinned, Registrar, Undo};
use rustix::io::Errno;

use crate::backend::{Backend, more_specific};
use crate::device;
use crate::iommufd::Iommufd;
use crate::iova::{Iovas, start_of_longest};
use crate::node::open;
use crate::sysfs::Sysfs;
use crate::{Bdf, Error, PciDevice, sys};

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
    pub(crate) kernel: OnceLock<Kernel>,
    /// Why iommufd was not used.
    iommufd_error: OnceLock<Error>,
    state: Mutex<State>,
    /// Bytes mapped. Shared with mappings of BARs, which a device may end.
    pub(crate) mapped: Arc<AtomicU64>,
    /// Mappings that the kernel refused to unmap; their IOVAs stay allocated.
    failed_unmaps: AtomicU64,
}

/// The kernel object of the address space.
pub(crate) enum Kernel {
    /// A container of VFIO.
    Type1(OwnedFd),
    Iommufd(Iommufd),
}

#[derive(Default)]
pub(crate) struct State {
    /// The open groups, with type 1.
    groups: BTreeMap<u32, OwnedFd>,
    /// The open devices. Each is opened once: iommufd allows no more, and what is known of its command register is
    /// known in one place.
    devices: BTreeMap<Bdf, Weak<device::Inner>>,
    pub(crate) iovas: Iovas,
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
    /// [`Error::NotBound`], [`Error::NoPermission`], [`Error::Busy`], [`Error::NotViable`], [`Error::Attach`],
    /// [`Error::Kernel`]; with type 1 [`Error::NoType1`]; with iommufd [`Error::NoDeviceFile`].
    pub fn open(&self, bdf: &Bdf) -> Result<PciDevice, Error> {
        let group = self.0.sysfs.group(*bdf)?;
        let mut state = self.0.lock();
        if let Some(open) = state.devices.get(bdf).and_then(Weak::upgrade) {
            return Ok(PciDevice::from_open(open));
        }
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
        self.0.attach_group(state, group)?;
        let fd = state.groups.get(&group).ok_or(Error::NoIommu(bdf))?;
        let device = sys::device(fd.as_fd(), &bdf.to_string()).map_err(Error::kernel(format_args!("open {bdf}")))?;
        let device = PciDevice::new(device, bdf, self.clone())?;
        state.devices.insert(bdf, device.weak());
        Ok(device)
    }

    /// The outer error: iommufd cannot open the device, type 1 may. The inner error: the device is unusable with any
    /// backend.
    fn open_with_iommufd(&self, state: &mut State, bdf: Bdf, group: u32) -> Result<Result<PciDevice, Error>, Error> {
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
            _ => Error::Attach { what: format!("to attach {bdf} to iommufd"), module: "iommufd", source },
        })?;
        // Before the container changes, so that it stays unchanged on an error.
        let device = match PciDevice::new(file, bdf, self.clone()) {
            Ok(device) => device,
            Err(e) => return Ok(Err(e)),
        };
        state.iovas.update(info);
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
    #[doc(hidden)]
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
        self.0.lock().iovas.ranges()
    }

    /// The smallest page of the IOMMU, as its driver reports it; 4 KiB before the first device.
    pub fn page_size(&self) -> PageSize {
        self.0.lock().iovas.page()
    }

    /// Number of further mappings that the kernel accepts; `None` if it does not report it, or has no limit (iommufd).
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn mappings_left(&self) -> Result<Option<u32>, Error> {
        let Some(Kernel::Type1(fd)) = self.0.kernel.get() else { return Ok(None) };
        Ok(sys::iommu_info(fd.as_fd()).map_err(Error::kernel("query the container"))?.left)
    }

    /// Bytes that are currently mapped, without BARs whose mapping the kernel has removed
    /// ([`PeerMapping::is_mapped`](crate::PeerMapping::is_mapped)).
    pub fn mapped_bytes(&self) -> u64 {
        self.0.mapped.load(Ordering::Relaxed)
    }

    /// The number of mappings that the kernel refused to unmap: 0, unless the kernel has a bug.
    pub fn failed_unmaps(&self) -> u64 {
        self.0.failed_unmaps.load(Ordering::Relaxed)
    }

    /// As [`Registrar::map`], from this IOVA on, which may be 0: the memory of a guest at its physical addresses.
    ///
    /// # Errors
    /// Those that [`Registrar::map`] has in a box, as they are; [`Error::Iova`] where anything is mapped, or the IOMMU
    /// translates no such addresses ([`VfioContainer::iova_ranges`]).
    pub fn map_at(&self, at: Iova, pinned: Pinned, access: Access) -> Result<Mapping, Error> {
        self.map_to(Some(at), vec![pinned], access)
    }

    fn map_to(&self, at: Option<Iova>, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        let inner = &self.0;
        let len = Pinned::admit_all(&mut list, inner, access)?;
        let mut state = inner.lock();
        let place = start_of_longest(list.iter().map(|p| (address(p) as u64, p.range().len() as u64)));
        let lease = match at {
            None => state.iovas.allocate(place, len)?,
            Some(at) => {
                let bad_length = RangeError::BadLength { len, page: state.iovas.page() };
                state.iovas.reserve(Span::new(at, len).ok_or(bad_length)?)?
            }
        };
        // SAFETY: admitted above; the mapping owns the list until `Inner::unmap` has unmapped it. What the kernel
        // refuses to unmap, there or below, is leaked with its admission.
        if let Err((e, done)) = unsafe { inner.map_contiguous(&list, lease.span(), access) } {
            // Neither IOVAs nor memory that may still be mapped are used again.
            match done.is_none_or(|done| inner.unmap_span(done)) {
                true => state.iovas.free(lease),
                false => list.iter_mut().for_each(Pinned::leak),
            }
            return Err(e);
        }
        drop(state);
        inner.mapped.fetch_add(len, Ordering::Relaxed);
        Ok(Mapping::new(list, lease, access))
    }

    /// Unmaps whole mappings now, while their owners still hold them, and returns their bytes: 0 if nothing is mapped.
    /// After it returns, no device can access them; the IOMMU stops such an access, and the kernel's log reports it.
    ///
    /// # Errors
    /// [`Error::PartialUnmap`]; [`Error::Kernel`].
    pub fn revoke(&self, span: Span<Iova>) -> Result<u64, Error> {
        self.0.kernel.get().map_or(Ok(0), |kernel| kernel.unmap(span))
    }
}

/// Memory goes to all devices of the container. What a [`VfioBus`](crate::VfioBus) registers is its container's.
impl Registrar for VfioContainer {
    /// Only records the buffer: the kernel pins memory when it is mapped.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, dma::Error> {
        buffer.check_pages(&range, self.page_size().bytes() as usize)?;
        Ok(Pinned::new(buffer.clone(), range, None, self.0.clone()))
    }

    /// Each of the list counts as one mapping towards the kernel's limit ([`VfioContainer::mappings_left`]).
    ///
    /// # Errors
    /// [`Error`] by cause, such as [`Error::Unopened`], [`Error::NotMemory`], [`Error::Memlock`], [`Error::TooMany`]
    /// and [`Error::Iova`]; nothing stays mapped.
    fn map_list(&self, list: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        Ok(self.map_to(None, list, access)?)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }
}

impl Kernel {
    fn backend(&self) -> Backend {
        match self {
            Self::Type1(_) => Backend::Type1,
            Self::Iommufd(_) => Backend::Iommufd,
        }
    }

    pub(crate) fn unmap(&self, span: Span<Iova>) -> Result<u64, Error> {
        match self {
            Self::Type1(fd) => sys::dma_unmap(fd.as_fd(), span).map_err(|source| match Errno::from_io_error(&source) {
                Some(Errno::INVAL) => Error::PartialUnmap(span),
                _ => Error::kernel(format_args!("unmap {span}"))(source),
            }),
            Self::Iommufd(space) => space.unmap(span),
        }
    }
}

impl Inner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
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
        if !sys::is_viable(file.as_fd()).map_err(Error::kernel(format_args!("query IOMMU group {group}")))? {
            return Err(Error::NotViable { group, others: self.sysfs.others(group) });
        }
        let refused = |source| {
            let what = format!("the IOMMU of group {group}");
            Error::Attach { what, module: "vfio_iommu_type1", source }
        };
        sys::set_container(file.as_fd(), container).map_err(refused)?;
        if state.iovas.is_unknown() {
            sys::set_type1(container).map_err(refused)?;
        }
        let info = sys::iommu_info(container).map_err(Error::kernel("query the container"))?;
        state.iovas.update(info);
        state.groups.insert(group, file);
        if let Some(container) = new {
            let _ = self.kernel.set(Kernel::Type1(container));
        }
        Ok(())
    }

    /// Maps the list at contiguous IOVAs, which it fills. An error comes with the span that is still mapped.
    ///
    /// # Safety
    /// All of the list is admitted for the access, and stays so until the kernel has unmapped it.
    unsafe fn map_contiguous(
        &self,
        list: &[Pinned],
        all: Span<Iova>,
        access: Access,
    ) -> Result<(), (Error, Option<Span<Iova>>)> {
        let by_file = !self.by_address.load(Ordering::Relaxed);
        let mut done = 0;
        for pinned in list {
            let len = pinned.range().len() as u64;
            let span = all.sub(done, len).expect("the lengths add up to the span's");
            let file = by_file.then(|| (pinned.reference(), pinned.range().start as u64));
            // SAFETY: of the caller; a pin keeps its buffer mapped here.
            let mapped = unsafe { self.map_span(address(pinned), file, span, access) };
            mapped.map_err(|e| (e, all.sub(0, done)))?;
            done += len;
        }
        Ok(())
    }

    /// Makes one mapping in the kernel: of memory at an address of this process, or of its file at an offset.
    ///
    /// # Safety
    /// As for [`sys::dma_map`].
    pub(crate) unsafe fn map_span(
        &self,
        va: usize,
        file: Option<(&BufferRef, u64)>,
        span: Span<Iova>,
        access: Access,
    ) -> Result<(), Error> {
        let mapped = match self.kernel.get().ok_or(Error::Unopened)? {
            // SAFETY: of the caller.
            Kernel::Type1(container) => unsafe {
                sys::dma_map(container.as_fd(), va, span.len(), span.first(), access)
            },
            // SAFETY: of the caller.
            Kernel::Iommufd(space) => unsafe { space.map(va, file, span, access) },
        };
        mapped.map_err(|source| explain(source, va, span, access))
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
    pub(crate) fn release(&self, lease: Lease<Iova>) -> bool {
        let ended = self.unmap_span(lease.span());
        if ended {
            self.lock().iovas.free(lease);
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

fn address(pinned: &Pinned) -> usize {
    pinned.reference().address() + pinned.range().start
}

/// Opens a new VFIO container, without groups.
fn open_container() -> Result<OwnedFd, Error> {
    let file = open(Path::new(VFIO), "vfio")?;
    let has = sys::has_type1(file.as_fd()).map_err(Error::kernel(format_args!("initialize {VFIO}")))?;
    if has { Ok(file) } else { Err(Error::NoType1) }
}

/// The error for a mapping that the kernel refused.
pub(crate) fn explain(source: io::Error, va: usize, span: Span<Iova>, access: Access) -> Error {
    let (iova, len) = (span.first(), span.len());
    match (Errno::from_io_error(&source), dma::memlock_left()) {
        (Some(Errno::FAULT), _) => Error::NotMemory { va, len, writable: access.contains(Access::WRITE) },
        (Some(Errno::NOSPC), _) => Error::TooMany,
        (Some(Errno::NOMEM), Some(left)) if left < len => Error::Memlock { wanted: len, left },
        _ => Error::kernel(format_args!("map {len} bytes at {va:#x} to {iova}"))(source),
    }
}

dmalane_dma::debug_as!(VfioContainer, |it| "VfioContainer {{ mapped: {:?}, .. }}", it.mapped_bytes());

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first: u64, last: u64) -> Span<Iova> {
        Span::inclusive(Iova::new(first), Iova::new(last)).unwrap()
    }

    #[test]
    fn nothing_is_mapped_before_a_device_is_opened() {
        let container = VfioContainer::new();
        let buf = dma::Heap::allocate(&dma::AnonHeap::new(), 4096).unwrap().share();
        let pin = || container.pin(&buf.reference()).unwrap();
        let at_0 = container.map_at(Iova::new(0), pin(), Access::RW);
        let refused = [container.map(pin(), Access::RW), at_0.map_err(dma::Error::from)];
        for text in refused.map(|refused| dma::error_chain(&refused.unwrap_err())) {
            assert!(text.contains("before a device is opened") && !text.contains("modprobe"), "{text}");
        }
    }

    /// A file in place of a container: it refuses every request.
    #[test]
    fn memory_that_the_kernel_does_not_unmap_is_kept() {
        let container = VfioContainer::new();
        let file = tempfile::tempfile().unwrap();
        assert!(container.0.kernel.set(Kernel::Type1(file.into())).is_ok());
        let info = sys::IommuInfo { page: 4096, ranges: vec![span(0, 1 << 39)], left: None };
        container.0.lock().iovas.update(info);
        let map = |buf: &dma::SharedBuf, access| {
            let pinned = Pinned::new(buf.reference(), 0..buf.len(), None, container.0.clone());
            container.0.mapped.fetch_add(4096, Ordering::Relaxed);
            Mapping::new(vec![pinned], container.0.lock().iovas.allocate(0, 4096).unwrap(), access)
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
        assert!(container.0.lock().iovas.reserve(span).is_err(), "its addresses stay taken");
        // A list that was mapped in part.
        let (buf, other) = (allocate(), allocate());
        let list = [&buf, &other].map(|buf| Pinned::new(buf.reference(), 0..buf.len(), None, container.0.clone()));
        assert!(container.map_list(list.into(), Access::RW).is_err());
        // A guest's memory: what is refused leaves nothing behind, not even at 0.
        for (at, taken) in [(0, false), (0, false), (span.first().bits(), true), (!0xfff, true), (1 << 40, true)] {
            let pinned = container.pin(&buf.reference()).unwrap();
            assert!(pinned.is_from(&container.0));
            let error = container.map_at(Iova::new(at), pinned, Access::RW).unwrap_err();
            assert_eq!(matches!(error, Error::Iova(_)), taken, "{at:#x}: {error}");
        }
        assert!(container.pin_range(&buf.reference(), 0..100).is_err());
        assert!(buf.into_cpu().is_ok(), "nothing of it was mapped");
    }

    #[test]
    fn error_numbers_have_causes() {
        let page = span(0x1000, 0x1fff);
        let explained = |errno: Errno, access: Access| explain(io::Error::from(errno), 0x1000, page, access);
        let refused = explained(Errno::INVAL, Access::RW).to_string();
        assert_eq!(refused, "cannot map 4096 bytes at 0x1000 to IOVA 0x1000");
        let read_only = explained(Errno::FAULT, Access::RW);
        assert!(matches!(read_only, Error::NotMemory { writable: true, .. }));
        assert!(read_only.to_string().contains("read-only"));
        assert!(!explained(Errno::FAULT, Access::READ).to_string().contains("read-only"));
        assert!(matches!(explained(Errno::NOSPC, Access::RW), Error::TooMany));
        assert!(matches!(explained(Errno::PERM, Access::RW), Error::Kernel { .. }));
        // Nothing to lock: the kernel itself has no memory left.
        let starved = explain(Errno::NOMEM.into(), 0, span(0, 0), Access::READ);
        assert!(matches!(starved, Error::Kernel { .. }), "{starved}");
    }

    #[test]
    fn a_container_without_devices_is_empty() {
        let container = VfioContainer::default();
        container.map_by_address();
        assert!(container.backend().is_none() && container.iommufd_error().is_none());
        assert!(container.iova_ranges().is_empty() && container.page_size() == PageSize::SIZE_4K);
        assert_eq!((container.mappings_left().unwrap(), container.mapped_bytes()), (None, 0));
        assert_eq!(container.revoke(span(0, 0xfff)).unwrap(), 0);
        assert_eq!(format!("{container:?}"), "VfioContainer { mapped: 0, .. }");
        let absent = "ffff:ff:1f.7".parse().unwrap();
        assert!(matches!(container.open(&absent), Err(Error::NoDevice(bdf)) if bdf == absent));
    }

    #[test]
    fn files_that_cannot_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("vfio");
        assert!(matches!(open(&missing, "vfio"), Err(Error::NoModule { path, module: "vfio" }) if path == missing));
        let error = open(folder.path(), "vfio").unwrap_err();
        assert!(matches!(error, Error::Kernel { .. }), "a folder: {error}");
    }

    /// A guest's memory: QEMU's `edu` copies bytes out of one page and back into another, through its own buffer.
    #[test]
    fn a_device_reaches_memory_that_exists() {
        for backend in [Backend::Iommufd, Backend::Type1] {
            let container = VfioContainer::with_backend(backend);
            let edu = |device: &PciDevice| device.id().ok() == Some((0x1234, 0x11e8));
            let mut bound = Sysfs::new("/").bound().into_iter();
            let Some(device) = bound.find_map(|bdf| container.open(&bdf).ok().filter(edu)) else {
                println!("SKIPPED: no edu can be opened by {backend} here");
                continue;
            };
            let page = rustix::param::page_size();
            let heap = dma::AnonHeap::starting_at(dma::PageKind::Base);
            let guest = Arc::new(dma::Heap::allocate(&heap, 2 * page).unwrap().share());
            guest.as_volatile_slice().write(b"theirs");
            let at = std::ptr::NonNull::new(guest.as_volatile_slice().as_ptr()).unwrap();
            // SAFETY: the memory is the owner's, and shared: nobody has a reference into it.
            let memory = unsafe { dma::RawMemory::new(at, 2 * page, guest.clone()) }.unwrap();
            let pinned = container.pin(&dma::SharedBuf::from_memory(memory).reference()).unwrap();
            let mapping = container.map_at(Iova::new(0), pinned, Access::RW).unwrap();
            let bus = crate::VfioBus::with_options(device, crate::BusOptions::passive()).unwrap();
            bus.device().set_bus_master(true).unwrap();
            for (from, to, command) in [(0, 0x4_0000, 1), (0x4_0000, page as u64, 3)] {
                for (register, value) in [(0x80, from), (0x88, to), (0x90, 6), (0x98, command)] {
                    dma::Mmio::write64(&bus, 0, register, value).unwrap();
                }
                let began = std::time::Instant::now();
                while dma::Mmio::read32(&bus, 0, 0x98).unwrap() & 1 != 0 {
                    assert!(began.elapsed().as_secs() < 60, "the copy does not end");
                }
            }
            drop(mapping);
            let mut got = [0; 6];
            guest.as_volatile_slice().sub(page, 6).unwrap().read(&mut got);
            assert_eq!(&got, b"theirs");
        }
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
        // SAFETY: no device does anything, and what is mapped for writing is no variable.
        let map = |va: usize, span, access| unsafe { inner.map_span(va, None, span, access) };
        let refused = map(constant, at, Access::RW).unwrap_err();
        assert!(matches!(refused, Error::NotMemory { writable: true, .. }), "{refused}");
        map(constant, at, Access::READ).unwrap();
        assert_eq!(container.revoke(at).unwrap(), PAGE as u64);
        // Nothing is mapped in the first page of a process.
        assert!(matches!(map(0, at, Access::READ), Err(Error::NotMemory { writable: false, .. })));
        assert!(matches!(map(constant + 8, at, Access::READ), Err(Error::Kernel { .. })));
        let Some(Kernel::Iommufd(space)) = inner.kernel.get() else { return };
        let at = span(0x20_0000, 0x20_0fff);
        // The error numbers of iommufd, before they are explained.
        let errno = |result: io::Result<()>| result.map_err(|e| Errno::from_io_error(&e).unwrap());
        let heap = dma::DmaHeap::open("system").unwrap();
        let dma_buf = dma::Heap::allocate(&heap, 4096).unwrap().share();
        let (buffer, file) = (dma_buf.reference(), dma_buf.export().unwrap());
        // SAFETY: as above.
        assert_eq!(errno(unsafe { space.map_dma_buf(file, 0, at, Access::RW) }), Err(Errno::OPNOTSUPP));
        let can_map = |region: &&crate::PciRegion| region.index < 6 && region.mappable.contains(&(0..region.len));
        let region = device.regions().iter().find(can_map).unwrap();
        let bar = device.map_bar(region.index, None, crate::BarAlignment::LargestPage).unwrap();
        // SAFETY: as above.
        let map = |va, file, span| errno(unsafe { space.map(va, file, span, Access::RW) });
        assert_eq!(map(bar.address(), None, at), Err(Errno::FAULT), "a BAR by its address");
        assert_eq!(map(buffer.address(), Some((&buffer, 0)), at), Err(Errno::FAULT));
        let memfd = dma::Heap::allocate(&dma::MemfdHeap::new(), 8192).unwrap().share();
        let buffer = memfd.reference();
        let map = |span| map(buffer.address(), Some((&buffer, 0)), span);
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
