//! The system calls of VFIO (linux/vfio.h) and of iommufd (linux/iommufd.h), and mappings of device memory.
//!
//! Invariant of [`BarMemory`]: `ptr..ptr + len` is one mapping of device memory that this value owns and nobody else
//! unmaps. It is established by [`BarMemory::map`]. Nobody makes a reference into it: device memory changes by itself.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use dmalane_addr::{Access, Iova, PageSize, Span};
use dmalane_dma::{BufferRef, VolatileSlice};
use iommufd_bindings::iommufd as ioabi;
use rustix::mm::{self, MapFlags, ProtFlags};
use vfio_bindings::bindings::vfio as abi;

/// The requests of linux/vfio.h, `_IO(';', 100 + n)`, and of linux/iommufd.h, `_IO(';', 128 + n)`.
#[derive(Clone, Copy)]
enum Request {
    GetApiVersion = 100,
    CheckExtension = 101,
    SetIommu = 102,
    GroupGetStatus = 103,
    GroupSetContainer = 104,
    GroupGetDeviceFd = 106,
    DeviceGetInfo = 107,
    DeviceGetRegionInfo = 108,
    DeviceGetIrqInfo = 109,
    DeviceSetIrqs = 110,
    DeviceReset = 111,
    IommuGetInfo = 112,
    IommuMapDma = 113,
    IommuUnmapDma = 114,
    DeviceFeature = 117,
    DeviceBindIommufd = 118,
    DeviceAttachIommufdPt = 119,
    IoasAlloc = 0x81,
    IoasIovaRanges = 0x84,
    IoasMap = 0x85,
    IoasUnmap = 0x86,
    IoasMapFile = 0x8f,
}

impl Request {
    fn number(self) -> libc::Ioctl {
        (abi::VFIO_TYPE as libc::Ioctl) << 8 | self as libc::Ioctl
    }
}

fn checked(result: libc::c_int) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes a request whose argument is a number, or that has none.
fn number(fd: BorrowedFd<'_>, request: Request, argument: libc::c_ulong) -> io::Result<i32> {
    assert!(matches!(
        request,
        Request::GetApiVersion | Request::CheckExtension | Request::SetIommu | Request::DeviceReset
    ));
    // SAFETY: the kernel takes the argument of these requests (checked above) as a number and touches no memory of
    // ours. A file of another kind refuses the request.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request.number(), argument) })
}

/// Makes a request whose argument begins with its own length in bytes, `argsz`, which this function fills in, and that
/// gives no device access to memory.
fn words(fd: BorrowedFd<'_>, request: Request, argument: &mut [u32]) -> io::Result<i32> {
    assert!(!matches!(request, Request::IommuMapDma | Request::IoasMap | Request::IoasMapFile));
    // SAFETY: not one of the requests that map memory, checked above.
    unsafe { words_to_map(fd, request, argument) }
}

/// As [`words`], also for a request that maps memory.
///
/// # Safety
/// The memory that the argument has mapped, if any, is memory that devices may access: see [`dma_map`].
unsafe fn words_to_map(fd: BorrowedFd<'_>, request: Request, argument: &mut [u32]) -> io::Result<i32> {
    assert!(!matches!(
        request,
        Request::GetApiVersion
            | Request::SetIommu
            | Request::CheckExtension
            | Request::GroupSetContainer
            | Request::GroupGetDeviceFd
            | Request::DeviceReset
            | Request::IoasIovaRanges
    ));
    argument[0] = size_of_val(argument) as u32;
    // SAFETY: of these requests (checked above) the kernel reads and writes at most `argsz` bytes (`size`, to iommufd),
    // the length of the slice, and refuses one that is too short for it. The only pointer in an argument is the address
    // of memory to map, for which the caller vouches.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request.number(), argument.as_mut_ptr()) })
}

/// Reads a 64-bit field at a multiple of 32 bits.
fn wide(words: &[u32], at: usize) -> u64 {
    let half = |i| u64::from(words.get(i).copied().unwrap_or(0));
    if cfg!(target_endian = "little") { half(at) | half(at + 1) << 32 } else { half(at) << 32 | half(at + 1) }
}

fn set_wide(words: &mut [u32], at: usize, value: u64) {
    let (low, high) = (value as u32, (value >> 32) as u32);
    (words[at], words[at + 1]) = if cfg!(target_endian = "little") { (low, high) } else { (high, low) };
}

// ---- container and group -------------------------------------------------------------------------------------------

/// True when the container has our version of the interface and the IOMMU of type 1, version 2.
pub(crate) fn has_type1(container: BorrowedFd<'_>) -> io::Result<bool> {
    let version = number(container, Request::GetApiVersion, 0)?;
    let type1 = number(container, Request::CheckExtension, abi::VFIO_TYPE1v2_IOMMU.into())?;
    Ok(version == abi::VFIO_API_VERSION as i32 && type1 == 1)
}

pub(crate) fn set_type1(container: BorrowedFd<'_>) -> io::Result<()> {
    number(container, Request::SetIommu, abi::VFIO_TYPE1v2_IOMMU.into()).map(drop)
}

/// True when every device of the group is bound to VFIO or to no driver.
pub(crate) fn is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = [0; 2];
    words(group, Request::GroupGetStatus, &mut status)?;
    Ok(status[1] & abi::VFIO_GROUP_FLAGS_VIABLE != 0)
}

pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let container: RawFd = container.as_raw_fd();
    // SAFETY: the kernel reads one int, which lives through the call.
    let done = unsafe { libc::ioctl(group.as_raw_fd(), Request::GroupSetContainer.number(), &raw const container) };
    checked(done).map(drop)
}

pub(crate) fn device(group: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel reads a string that ends with a zero, which lives through the call.
    let fd = unsafe { libc::ioctl(group.as_raw_fd(), Request::GroupGetDeviceFd.number(), name.as_ptr()) };
    let fd = checked(fd)?;
    // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The capabilities after a structure of the kernel: (id, words from the capability's header). An invalid chain ends
/// early.
fn capabilities(words: &[u32], first: u32) -> Vec<(u16, Vec<u32>)> {
    let (mut found, mut at) = (Vec::new(), first as usize);
    // Each must be after the previous one, so the loop ends.
    while at > 0 && at.is_multiple_of(4) && at / 4 + 2 <= words.len() && found.len() < 64 {
        let here = &words[at / 4..];
        let id = if cfg!(target_endian = "little") { here[0] as u16 } else { (here[0] >> 16) as u16 };
        found.push((id, here.to_vec()));
        let next = here[1] as usize;
        at = if next > at { next } else { 0 };
    }
    found
}

/// The capabilities of a container's IOMMU.
pub(crate) struct IommuInfo {
    /// Bytes of its smallest page.
    pub(crate) page: u64,
    /// The mappable IOVAs; empty if the kernel does not report them.
    pub(crate) ranges: Vec<Span<Iova>>,
    /// Mappings left until the limit.
    pub(crate) left: Option<u32>,
}

pub(crate) fn iommu_info(container: BorrowedFd<'_>) -> io::Result<IommuInfo> {
    let mut info = vec![0; 6];
    // The first answer has the required length.
    words(container, Request::IommuGetInfo, &mut info)?;
    let wanted = (info[0] as usize).div_ceil(4).clamp(6, 1 << 16);
    info = vec![0; wanted];
    words(container, Request::IommuGetInfo, &mut info)?;
    let flags = info[1];
    // Bit n: pages of 2^n bytes.
    let pages = if flags & abi::VFIO_IOMMU_INFO_PGSIZES != 0 { wide(&info, 2) } else { 1 << 12 };
    let (mut ranges, mut left) = (Vec::new(), None);
    let first = if flags & abi::VFIO_IOMMU_INFO_CAPS != 0 { info[4] } else { 0 };
    for (id, capability) in capabilities(&info, first) {
        match u32::from(id) {
            abi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                let count = capability.get(2).copied().unwrap_or(0) as usize;
                let pairs = capability.get(4..).unwrap_or_default().chunks_exact(4).take(count);
                ranges = pairs.filter_map(|p| Span::inclusive(Iova::new(wide(p, 0)), Iova::new(wide(p, 2)))).collect();
            }
            abi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => left = capability.get(2).copied(),
            _ => {}
        }
    }
    Ok(IommuInfo { page: pages & pages.wrapping_neg(), ranges, left })
}

/// Maps `len` bytes at address `va` of this process to `iova` for the devices of the container.
///
/// The kernel pins the pages until they are unmapped, so a device never accesses pages with a new owner, even if `va`
/// is unmapped.
///
/// # Safety
/// Until the kernel has unmapped them, no reference to the bytes is in use that the access contradicts: none at all
/// where devices may write, none that is mutable where they may read. A [`Pinned`](dmalane_dma::Pinned) that was
/// admitted for the access and lives as long sees to that, and nobody has references into a [`BarMemory`].
pub(crate) unsafe fn dma_map(
    container: BorrowedFd<'_>,
    va: usize,
    len: u64,
    iova: Iova,
    access: Access,
) -> io::Result<()> {
    // struct vfio_iommu_type1_dma_map: argsz, flags (1: read, 2: write), vaddr, iova, size.
    let mut map = [0; size_of::<abi::vfio_iommu_type1_dma_map>() / 4];
    map[1] = (access & Access::RW).bits().into();
    set_wide(&mut map, 2, va as u64);
    set_wide(&mut map, 4, iova.bits());
    set_wide(&mut map, 6, len);
    // SAFETY: of the caller.
    unsafe { words_to_map(container, Request::IommuMapDma, &mut map) }.map(drop)
}

/// Unmaps the mappings that are wholly within the span, and returns their bytes. After it returns, no device can access
/// them.
pub(crate) fn dma_unmap(container: BorrowedFd<'_>, span: Span<Iova>) -> io::Result<u64> {
    // struct vfio_iommu_type1_dma_unmap: argsz, flags, iova, size.
    let mut unmap = [0; size_of::<abi::vfio_iommu_type1_dma_unmap>() / 4];
    set_wide(&mut unmap, 2, span.first().bits());
    set_wide(&mut unmap, 4, span.len());
    words(container, Request::IommuUnmapDma, &mut unmap)?;
    Ok(wide(&unmap, 4))
}

// ---- iommufd -------------------------------------------------------------------------------------------------------

/// Creates an address space of an iommufd, and returns its id.
pub(crate) fn ioas_alloc(iommufd: BorrowedFd<'_>) -> io::Result<u32> {
    // struct iommu_ioas_alloc: size, flags, out_ioas_id.
    let mut alloc = [0; size_of::<ioabi::iommu_ioas_alloc>() / 4];
    words(iommufd, Request::IoasAlloc, &mut alloc)?;
    Ok(alloc[2])
}

/// The mappable IOVAs, and the smallest alignment of addresses and lengths.
pub(crate) fn ioas_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> io::Result<(Vec<Span<Iova>>, u64)> {
    let mut count = 16_usize;
    loop {
        let mut pairs = vec![[0_u64; 2]; count];
        let mut ask = ioabi::iommu_ioas_iova_ranges {
            size: size_of::<ioabi::iommu_ioas_iova_ranges>() as u32,
            ioas_id: ioas,
            num_iovas: count as u32,
            __reserved: 0,
            allowed_iovas: pairs.as_mut_ptr().expose_provenance() as u64,
            out_iova_alignment: 0,
        };
        // SAFETY: the kernel reads and writes one structure, `ask`, and writes at most `num_iovas` pairs of 64 bits
        // (struct iommu_iova_range) at `allowed_iovas`: as many as `pairs` has, which lives through the call.
        let done = checked(unsafe { libc::ioctl(iommufd.as_raw_fd(), Request::IoasIovaRanges.number(), &raw mut ask) });
        let wanted = ask.num_iovas as usize;
        match done {
            Ok(_) => {
                pairs.truncate(wanted);
                let span = |[first, last]: &[u64; 2]| Span::inclusive(Iova::new(*first), Iova::new(*last));
                return Ok((pairs.iter().filter_map(span).collect(), ask.out_iova_alignment));
            }
            // More ranges than `pairs` has room for; the kernel returns their number.
            Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) && (count + 1..1 << 16).contains(&wanted) => {
                count = wanted;
            }
            Err(e) => return Err(e),
        }
    }
}

fn ioas_flags(access: Access) -> u32 {
    let mut flags = ioabi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA;
    if access.contains(Access::READ) {
        flags |= ioabi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE;
    }
    if access.contains(Access::WRITE) {
        flags |= ioabi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE;
    }
    flags
}

/// Like [`dma_map`], into an address space of an iommufd.
///
/// # Safety
/// As for [`dma_map`].
pub(crate) unsafe fn ioas_map(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    va: usize,
    span: Span<Iova>,
    access: Access,
) -> io::Result<()> {
    // struct iommu_ioas_map: size, flags, ioas_id, __reserved, user_va, length, iova.
    let mut map = [0; size_of::<ioabi::iommu_ioas_map>() / 4];
    (map[1], map[2]) = (ioas_flags(access), ioas);
    set_wide(&mut map, 4, va as u64);
    set_wide(&mut map, 6, span.len());
    set_wide(&mut map, 8, span.first().bits());
    // SAFETY: of the caller.
    unsafe { words_to_map(iommufd, Request::IoasMap, &mut map) }.map(drop)
}

/// Like [`ioas_map`], but maps a file from its byte `start`: that of memory ([`ioas_map_buffer`]), or a BAR's dma-buf.
///
/// # Safety
/// As for [`dma_map`], of the bytes of the file, wherever they are mapped.
pub(crate) unsafe fn ioas_map_file(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    file: BorrowedFd<'_>,
    start: u64,
    span: Span<Iova>,
    access: Access,
) -> io::Result<()> {
    // struct iommu_ioas_map_file: size, flags, ioas_id, fd, start, length, iova.
    let mut map = [0; size_of::<ioabi::iommu_ioas_map_file>() / 4];
    (map[1], map[2], map[3]) = (ioas_flags(access), ioas, file.as_raw_fd() as u32);
    set_wide(&mut map, 4, start);
    set_wide(&mut map, 6, span.len());
    set_wide(&mut map, 8, span.first().bits());
    // SAFETY: of the caller.
    unsafe { words_to_map(iommufd, Request::IoasMapFile, &mut map) }.map(drop)
}

/// Like [`ioas_map`], but maps the memory's file from its byte `start`; `None` when the memory has no file.
///
/// # Safety
/// As for [`dma_map`].
pub(crate) unsafe fn ioas_map_buffer(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    buffer: &BufferRef,
    start: u64,
    span: Span<Iova>,
    access: Access,
) -> Option<io::Result<()>> {
    // SAFETY: the descriptor goes to one request of the kernel, which takes hold of pages and of no descriptor that
    // anybody could use, and is not kept. For what devices do with the pages the caller vouches.
    let file = unsafe { buffer.lend_file() }?;
    // SAFETY: of the caller.
    Some(unsafe { ioas_map_file(iommufd, ioas, file, start, span, access) })
}

/// Like [`dma_unmap`]. On an error the kernel may have unmapped some mappings; `ENOENT` also when nothing was mapped.
pub(crate) fn ioas_unmap(iommufd: BorrowedFd<'_>, ioas: u32, span: Span<Iova>) -> io::Result<u64> {
    // struct iommu_ioas_unmap: size, ioas_id, iova, length.
    let mut unmap = [0; size_of::<ioabi::iommu_ioas_unmap>() / 4];
    unmap[1] = ioas;
    set_wide(&mut unmap, 2, span.first().bits());
    set_wide(&mut unmap, 4, span.len());
    words(iommufd, Request::IoasUnmap, &mut unmap)?;
    Ok(wide(&unmap, 4))
}

/// Binds a device, opened by its own file, to an iommufd.
pub(crate) fn bind(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    // struct vfio_device_bind_iommufd, as far as every kernel knows it: argsz, flags, iommufd, out_devid.
    let mut bind = [0, 0, iommufd.as_raw_fd() as u32, 0];
    words(device, Request::DeviceBindIommufd, &mut bind).map(drop)
}

/// Attaches a bound device to an address space.
pub(crate) fn attach(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    // struct vfio_device_attach_iommufd_pt, as far as every kernel knows it: argsz, flags, pt_id.
    words(device, Request::DeviceAttachIommufdPt, &mut [0, 0, ioas]).map(drop)
}

/// Exports part of a BAR as a dma-buf, without exclusive access.
pub(crate) fn dma_buf(device: BorrowedFd<'_>, region: u32, start: u64, len: u64) -> io::Result<OwnedFd> {
    // struct vfio_device_feature: argsz, flags; struct vfio_device_feature_dma_buf: region_index, open_flags, flags,
    // nr_ranges; struct vfio_region_dma_range: offset, length.
    let flags = abi::VFIO_DEVICE_FEATURE_GET | abi::VFIO_DEVICE_FEATURE_DMA_BUF;
    let mut get = [0, flags, region, (libc::O_RDWR | libc::O_CLOEXEC) as u32, 0, 1, 0, 0, 0, 0];
    set_wide(&mut get, 6, start);
    set_wide(&mut get, 8, len);
    let fd = words(device, Request::DeviceFeature, &mut get)?;
    // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

// ---- device --------------------------------------------------------------------------------------------------------

/// `VFIO_DEVICE_GET_INFO`: flags, regions.
pub(crate) fn device_info(device: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut info = [0; 6];
    words(device, Request::DeviceGetInfo, &mut info)?;
    Ok((info[1], info[2]))
}

/// `VFIO_DEVICE_GET_REGION_INFO`.
pub(crate) struct RegionInfo {
    pub(crate) flags: u32,
    pub(crate) size: u64,
    /// Offset of the region in the device's file.
    pub(crate) offset: u64,
    /// The mappable areas (offset, length), if not all of the region is mappable.
    pub(crate) sparse: Option<Vec<(u64, u64)>>,
}

pub(crate) fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<RegionInfo> {
    let mut info = vec![0; 8];
    info[2] = index;
    words(device, Request::DeviceGetRegionInfo, &mut info)?;
    let wanted = (info[0] as usize).div_ceil(4).clamp(8, 1 << 16);
    info = vec![0; wanted];
    info[2] = index;
    words(device, Request::DeviceGetRegionInfo, &mut info)?;
    let flags = info[1];
    let first = if flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0 { info[3] } else { 0 };
    Ok(RegionInfo { flags, size: wide(&info, 4), offset: wide(&info, 6), sparse: sparse(&info, first) })
}

/// The mappable areas in the capabilities of a region, if it has such a list.
fn sparse(info: &[u32], first: u32) -> Option<Vec<(u64, u64)>> {
    capabilities(info, first).into_iter().find_map(|(id, capability)| {
        let areas = || {
            let count = capability.get(2).copied().unwrap_or(0) as usize;
            let areas = capability.get(4..).unwrap_or_default().chunks_exact(4).take(count);
            areas.map(|a| (wide(a, 0), wide(a, 2))).collect()
        };
        (u32::from(id) == abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP).then(areas)
    })
}

/// The number of interrupts of a kind.
pub(crate) fn irq_count(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = [0, 0, index, 0];
    words(device, Request::DeviceGetIrqInfo, &mut info)?;
    Ok(info[3])
}

/// Sets the eventfds of the interrupts of a kind, from number `first` on; an empty list disables the kind.
pub(crate) fn set_irqs(
    device: BorrowedFd<'_>,
    index: u32,
    first: u32,
    events: &[Option<BorrowedFd<'_>>],
) -> io::Result<()> {
    let data = if events.is_empty() { abi::VFIO_IRQ_SET_DATA_NONE } else { abi::VFIO_IRQ_SET_DATA_EVENTFD };
    let mut set = vec![0, data | abi::VFIO_IRQ_SET_ACTION_TRIGGER, index, first, events.len() as u32];
    set.extend(events.iter().map(|event| event.map_or(-1, |event| event.as_raw_fd()) as u32));
    words(device, Request::DeviceSetIrqs, &mut set).map(drop)
}

pub(crate) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    number(device, Request::DeviceReset, 0).map(drop)
}

// ---- device memory -------------------------------------------------------------------------------------------------

/// The kernel's base page size.
pub(crate) fn base_page() -> u64 {
    rustix::param::page_size() as u64
}

/// A range of a BAR, mapped into this process.
pub(crate) struct BarMemory {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: device memory is not tied to a thread.
unsafe impl Send for BarMemory {}
// SAFETY: all access is volatile, by whole words; threads that use it at once may see each other's words in any order,
// as with any device, and never a reference.
unsafe impl Sync for BarMemory {}

impl BarMemory {
    /// Maps `len` bytes at `offset` of the device's file at an address congruent to `phase` modulo `align`; with `None`
    /// the kernel chooses the address.
    pub(crate) fn map(
        device: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        align: Option<(PageSize, u64)>,
    ) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let Some((align, phase)) = align else {
            // SAFETY: no address is asked for, so no existing mapping is replaced.
            let ptr = unsafe { mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, device, offset) }?;
            return Ok(Self { ptr: NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len });
        };
        let align = usize::try_from(align.bytes()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let phase = phase as usize & (align - 1);
        let total = len.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        let taken = |e: &rustix::io::Errno| *e == rustix::io::Errno::EXIST;
        let mut tries = 0;
        loop {
            let start = Self::room(total, align, phase)?;
            let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
            // SAFETY: no existing mapping is replaced: another thread may have taken the addresses meanwhile, and then
            // the kernel refuses. `FIXED` would replace, and where the device refuses to be mapped, kernels leave a
            // hole behind, which must not be unmapped again: it is anybody's.
            match unsafe { mm::mmap(start, len, access, flags, device, offset) } {
                Ok(ptr) => return Ok(Self { ptr: NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len }),
                Err(e) if taken(&e) && tries < 100 => tries += 1,
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// An address congruent to `phase` modulo `align` from which `total - align` bytes are free: until another thread
    /// takes them.
    fn room(total: usize, align: usize, phase: usize) -> io::Result<*mut std::ffi::c_void> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::empty(), flags) }?;
        // SAFETY: the mapping made above, to which nothing refers.
        unsafe { mm::munmap(base, total) }?;
        // The first such address at or after `base`: less than `align` after it.
        let head = phase.wrapping_sub(base.addr()) & (align - 1);
        Ok(base.wrapping_byte_add(head))
    }

    pub(crate) fn address(&self) -> usize {
        self.ptr.as_ptr().addr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Reads, so that later reads of memory see what the device wrote before.
    pub(crate) fn read<T>(&self, read: impl FnOnce(VolatileSlice<'_>) -> Option<T>) -> Option<T> {
        let value = read(self.words());
        fence(Ordering::SeqCst);
        value
    }

    /// Writes after all earlier writes of this thread to memory.
    pub(crate) fn write(&self, write: impl FnOnce(VolatileSlice<'_>) -> Option<()>) -> Option<()> {
        order_device_write();
        write(self.words())
    }

    fn words(&self) -> VolatileSlice<'_> {
        // SAFETY: this value's own mapping, to which nobody has references, and which lives as long as the borrow.
        unsafe { VolatileSlice::from_raw(self.ptr, self.len) }
    }
}

impl Drop for BarMemory {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and nothing refers to it: words are read and written by value.
        let unmapped = unsafe { mm::munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

/// Orders this thread's earlier writes to memory before its later writes to a device.
fn order_device_write() {
    // On x86 stores to device memory stay after earlier stores. On Arm the barrier of a fence does not include devices.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier; it touches neither memory nor registers.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// A file in place of a device, for the same calls.
    fn file(len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn a_mapping_has_the_requested_alignment() {
        let file = file(8 << 20);
        // Whole pages of any kernel.
        const PAGE: usize = 64 << 10;
        for (log2, phase, len) in
            [(16, 0, PAGE), (21, 0, 4 << 20), (21, 0x3_0000, 1 << 20), (30, 0, 8 << 20), (30, 0x40_0000, PAGE)]
        {
            let align = PageSize::from_log2(log2).unwrap();
            let bar = BarMemory::map(file.as_fd(), 0, len, Some((align, phase))).unwrap();
            assert_eq!(bar.address() as u64 % align.bytes(), phase);
            assert_eq!(bar.len(), len);
            bar.write(|m| m.store_u32(len - 4, 7)).unwrap();
            assert_eq!(bar.read(|m| m.load_u32(len - 4)), Some(7));
        }
        assert!(BarMemory::map(file.as_fd(), 0, usize::MAX - PAGE + 1, Some((PageSize::SIZE_2M, 0))).is_err());
        // No reservation is left. Other threads' heaps have inaccessible memory too, but not 20 ranges of it.
        let maps = || {
            std::fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .filter(|l| l.contains("---p 00000000 00:00 0"))
                .count()
        };
        let before = maps();
        let bars: Vec<_> =
            (0..20).map(|_| BarMemory::map(file.as_fd(), 0, PAGE, Some((PageSize::SIZE_1G, 0))).unwrap()).collect();
        drop(bars);
        let after = maps();
        assert!(after < before + 15, "{before} then {after}");
    }

    /// Where a device refuses to be mapped at an address, the kernel has already unmapped what was there, and another
    /// thread may have the place.
    #[test]
    fn a_refused_mapping_takes_nothing_from_other_threads() {
        const LEN: usize = 2 << 20;
        // More reserved huge pages than any machine has: `mmap` of the file fails, late.
        let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
        let Ok(refused) = rustix::fs::memfd_create("refused", flags) else {
            return println!("SKIPPED: this kernel has no reserved huge pages");
        };
        let many = 1usize << 40;
        rustix::fs::ftruncate(&refused, many as u64).unwrap();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let lost = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut lost = 0;
                while !ended.load(Ordering::Relaxed) {
                    let access = ProtFlags::READ | ProtFlags::WRITE;
                    // SAFETY: no address is asked for; nothing refers to the mapping; the advice changes no contents.
                    unsafe {
                        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                        let at = mm::mmap_anonymous(std::ptr::null_mut(), many, access, flags).unwrap();
                        lost += u32::from(mm::madvise(at, many, mm::Advice::LinuxDontDump).is_err());
                        mm::munmap(at, many).unwrap();
                    }
                }
                lost
            });
            for _ in 0..20_000 {
                let align = Some((PageSize::from_log2(LEN.ilog2() as u8).unwrap(), 0));
                assert!(BarMemory::map(refused.as_fd(), 0, many, align).is_err());
            }
            ended.store(true, Ordering::Relaxed);
            other.join().unwrap()
        });
        assert_eq!(lost, 0, "mappings of another thread that were unmapped");
    }

    #[test]
    fn out_of_range_or_unaligned_words_are_refused() {
        let file = file(4096);
        let bar = BarMemory::map(file.as_fd(), 0, 4096, None).unwrap();
        for out in [4096, 2, usize::MAX - 1] {
            assert_eq!((bar.read(|m| m.load_u32(out)), bar.write(|m| m.store_u32(out, 0))), (None, None), "{out}");
        }
        assert_eq!((bar.read(|m| m.load_u64(4092)), bar.write(|m| m.store_u64(4092, 0))), (None, None));
        let mut byte = [0];
        bar.write(|m| m.write_words(4095, &[1])).unwrap();
        bar.read(|m| m.read_words(4095, &mut byte)).unwrap();
        assert_eq!(byte, [1]);
    }

    #[test]
    fn other_files_refuse_requests() {
        let file = file(4096);
        let fd = file.as_fd();
        let span = Span::new(Iova::new(0), 4096).unwrap();
        assert!(has_type1(fd).is_err() && set_type1(fd).is_err() && is_viable(fd).is_err());
        assert!(set_container(fd, fd).is_err() && device(fd, "0000:00:00.0").is_err() && device(fd, "a\0b").is_err());
        assert!(iommu_info(fd).is_err() && device_info(fd).is_err() && region_info(fd, 0).is_err());
        assert!(irq_count(fd, 0).is_err() && set_irqs(fd, 0, 0, &[]).is_err() && reset(fd).is_err());
        // SAFETY: a file of another kind, which maps nothing.
        unsafe {
            assert!(dma_map(fd, 0, 4096, span.first(), Access::RW).is_err());
            assert!(ioas_map(fd, 1, 0, span, Access::RW).is_err());
            assert!(ioas_map_file(fd, 1, fd, 0, span, Access::RW).is_err());
        }
        assert!(dma_unmap(fd, span).is_err() && ioas_unmap(fd, 1, span).is_err());
        assert!(ioas_alloc(fd).is_err() && ioas_ranges(fd, 1).is_err());
        assert!(bind(fd, fd).is_err() && attach(fd, 1).is_err() && dma_buf(fd, 0, 0, 4096).is_err());
        let buffer = |heap: &dyn dmalane_dma::Heap| heap.allocate(4096).unwrap().share().reference();
        // SAFETY: as above.
        let map = |heap: &dyn dmalane_dma::Heap| unsafe { ioas_map_buffer(fd, 1, &buffer(heap), 0, span, Access::RW) };
        assert!(map(&dmalane_dma::MemfdHeap::new()).unwrap().is_err());
        assert!(map(&dmalane_dma::AnonHeap::new()).is_none(), "no file");
    }

    #[test]
    fn request_numbers_match_the_headers() {
        assert_eq!(Request::IommuMapDma.number() as u32, u32::from(b';') << 8 | (abi::VFIO_BASE + 13));
        assert_eq!(Request::DeviceFeature as u32, abi::VFIO_BASE + 17);
        assert_eq!(Request::IoasAlloc as u32, ioabi::IOMMUFD_CMD_IOAS_ALLOC);
        assert_eq!(Request::IoasIovaRanges as u32, ioabi::IOMMUFD_CMD_IOAS_IOVA_RANGES);
        assert_eq!(Request::IoasMap as u32, ioabi::IOMMUFD_CMD_IOAS_MAP);
        assert_eq!(Request::IoasUnmap as u32, ioabi::IOMMUFD_CMD_IOAS_UNMAP);
        assert_eq!(Request::IoasMapFile as u32, ioabi::IOMMUFD_CMD_IOAS_MAP_FILE);
        assert_eq!(ioabi::IOMMUFD_TYPE, abi::VFIO_TYPE);
    }

    #[test]
    fn no_safe_call_maps_memory() {
        let file = file(4096);
        for request in [Request::IommuMapDma, Request::IoasMap, Request::IoasMapFile] {
            let call = || words(file.as_fd(), request, &mut [0; 12]);
            assert!(std::panic::catch_unwind(call).is_err(), "{}", request as u32);
        }
    }

    #[test]
    fn a_device_gets_the_access_that_was_asked_for() {
        let (readable, writable) = (
            ioabi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
            ioabi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
        );
        for (access, wanted) in [(Access::READ, readable), (Access::WRITE, writable), (Access::RW, readable | writable)]
        {
            assert_eq!(ioas_flags(access) & (readable | writable), wanted, "{access:?}");
        }
    }

    #[test]
    fn areas_that_can_be_mapped() {
        // After a capability of another kind, two areas: struct vfio_region_info_cap_sparse_mmap has a header (id,
        // version, next), nr_areas, reserved, and areas of 64-bit offset and length.
        let mut words = vec![0, 0, 0, 0, 9 | 1 << 16, 24, 1 | 1 << 16, 0, 2, 0];
        words.resize(18, 0);
        for (at, value) in [(10, 0), (12, 0x1000), (14, 1 << 32), (16, 0x2000)] {
            set_wide(&mut words, at, value);
        }
        assert_eq!(sparse(&words, 16), Some(vec![(0, 0x1000), (1 << 32, 0x2000)]));
        // No more than the count: what follows may be another capability.
        words[8] = 1;
        assert_eq!(sparse(&words, 16), Some(vec![(0, 0x1000)]));
        // As many as there is room for, whatever the count.
        words[8] = u32::MAX;
        words.truncate(16);
        assert_eq!(sparse(&words, 16), Some(vec![(0, 0x1000)]));
        assert_eq!((sparse(&words[..7], 16), sparse(&words, 0)), (None, None));
    }

    #[test]
    fn invalid_capabilities_end_the_chain() {
        // Two capabilities, the second of which points back.
        let words = [0, 0, 0, 0, 1 | 1 << 16, 24, 2 | 1 << 16, 16];
        let found = capabilities(&words, 16);
        assert_eq!(found.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
        for first in [0, 2, 28, 30, 32, u32::MAX] {
            assert!(capabilities(&words, first).is_empty(), "{first}");
        }
    }
}

/// Which calls of the kernel accept which kinds of mappings, tested with the calls themselves, since our interfaces
/// refuse some of them. `scripts/vm` runs this in guests with a disk and with a BAR.
#[cfg(test)]
mod mapping_kinds {
    use std::fs::{self, File};
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};

    use dmalane_dma::{AnonHeap, DmaHeap, Heap, MemfdHeap, PageKind, SharedBuf, export_dma_buf};
    use io_uring::{IoUring, opcode, types};

    use super::*;

    const DISK: &str = "/dev/vda";
    /// Bytes of each transfer, and the offset of writes on the disk.
    const LEN: usize = 64 << 10;
    const WRITE_OFFSET: u64 = 4 << 20;

    /// The address of a mapping that outlives the test.
    #[derive(Clone, Copy)]
    struct Place(*mut u8);

    /// The error number; 0 for success.
    fn errno(result: io::Result<()>) -> i32 {
        result.err().map_or(0, |e| e.raw_os_error().unwrap_or(-1))
    }

    fn whole(n: libc::ssize_t) -> io::Result<()> {
        match n {
            n if n < 0 => Err(io::Error::last_os_error()),
            n => (n as usize == LEN).then_some(()).ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn read(file: &File, into: Place) -> io::Result<()> {
        // SAFETY: each place is a mapping of at least LEN bytes that outlives the call, and no reference into it
        // exists.
        whole(unsafe { libc::pread(file.as_raw_fd(), into.0.cast(), LEN, 0) })
    }

    fn write(file: &File, from: Place) -> io::Result<()> {
        // SAFETY: as in `read`.
        whole(unsafe { libc::pwrite(file.as_raw_fd(), from.0.cast(), LEN, WRITE_OFFSET as libc::off_t) })
    }

    fn bytes(at: Place) -> Vec<u8> {
        // SAFETY: as in `read`; the bytes are looked at one by one, and nobody writes them meanwhile.
        (0..LEN).map(|i| unsafe { at.0.wrapping_add(i).read_volatile() }).collect()
    }

    fn clear(at: Place) {
        // SAFETY: as in `bytes`.
        (0..LEN).for_each(|i| unsafe { at.0.wrapping_add(i).write_volatile(0) });
    }

    fn register(ring: &IoUring, at: Place, len: usize) -> io::Result<()> {
        let buffers = [libc::iovec { iov_base: at.0.cast(), iov_len: len }];
        // SAFETY: the mapping outlives the ring, and what the kernel writes into it is read by `bytes` when that is
        // done.
        unsafe { ring.submitter().register_buffers(&buffers) }
    }

    fn read_fixed(ring: &mut IoUring, file: &File, into: Place) -> io::Result<()> {
        let read = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), into.0, LEN as u32, 0).build();
        // SAFETY: the buffer is registered, and the call below waits for the read.
        unsafe { ring.submission().push(&read) }.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        match ring.completion().next().map(|entry| entry.result()) {
            Some(n) if n < 0 => Err(io::Error::from_raw_os_error(-n)),
            Some(n) => whole(n as libc::ssize_t),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The device whose BAR is backed by a file, in a container of its own: container, group, device.
    fn ivshmem() -> Option<(File, File, OwnedFd)> {
        let ours =
            |path: &std::path::Path| fs::read_to_string(path.join("device")).is_ok_and(|id| id.trim() == "0x1110");
        let devices = fs::read_dir("/sys/bus/pci/drivers/vfio-pci").ok()?.filter_map(|e| Some(e.ok()?.path()));
        let path = devices.into_iter().find(|path| ours(path))?;
        let group = fs::read_link(path.join("iommu_group")).ok()?;
        let open = |path: String| File::options().read(true).write(true).open(path).unwrap();
        let container = open("/dev/vfio/vfio".into());
        let group = open(format!("/dev/vfio/{}", group.file_name()?.to_str()?));
        set_container(group.as_fd(), container.as_fd()).unwrap();
        set_type1(container.as_fd()).unwrap();
        let device = device(group.as_fd(), path.file_name()?.to_str()?).unwrap();
        Some((container, group, device))
    }

    #[test]
    fn what_the_kernel_does_with_each_kind_of_mapping() {
        let Some((container, _group, device)) = ivshmem() else {
            return println!("SKIPPED: no ivshmem device is bound to vfio-pci here");
        };
        let Ok(disk) = File::options().read(true).write(true).open(DISK) else {
            return println!("SKIPPED: no disk {DISK}: this kernel was built without its driver");
        };
        let direct = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(DISK).unwrap();
        let mut on_disk = vec![0; LEN];
        disk.read_exact_at(&mut on_disk, 0).unwrap();
        assert!(on_disk.starts_with(b"1000000\n1000001\n"));
        // Make the device respond at its BARs.
        let config = region_info(device.as_fd(), abi::VFIO_PCI_CONFIG_REGION_INDEX).unwrap().offset;
        rustix::io::pwrite(&device, &6u16.to_le_bytes(), config + 4).unwrap();

        let memfd = |kind| MemfdHeap::starting_at(kind).allocate(4 << 20).unwrap().share();
        let shared = memfd(PageKind::Base);
        let wrapped = memfd(PageKind::Base);
        let wrapped = SharedBuf::import_dma_buf(export_dma_buf(&wrapped.reference()).unwrap()).unwrap();
        let huge = memfd(PageKind::Hugetlb2M);
        assert_eq!(huge.backing().kind, PageKind::Hugetlb2M);
        let heap = DmaHeap::open("system").map(|heap| heap.allocate(4 << 20).unwrap().share());
        let region = region_info(device.as_fd(), 2).unwrap();
        // Outside of the bytes that other tests write.
        let at = region.offset + (256 << 20);
        let bar = BarMemory::map(device.as_fd(), at, 4 << 20, Some((PageSize::SIZE_2M, 0))).unwrap();

        const NO: i32 = libc::EFAULT;
        // Errors of: buffered read, direct read, direct write, io_uring registration, VFIO mapping.
        let of = |buf: &SharedBuf| Place(buf.as_volatile_slice().as_ptr());
        let mut rows = vec![
            ("udmabuf", of(&wrapped), [0, NO, NO, NO, NO]),
            ("memfd, the kernel's pages", of(&shared), [0, 0, 0, 0, 0]),
            ("memfd, hugetlb 2M", of(&huge), [0, 0, 0, 0, 0]),
            ("VFIO BAR", Place(bar.ptr.as_ptr()), [0, NO, NO, NO, 0]),
        ];
        match &heap {
            Ok(heap) => rows.insert(0, ("/dev/dma_heap/system", of(heap), [0, NO, NO, NO, NO])),
            Err(e) => println!("no row for the kernel's heap: {e}"),
        }
        for (name, at, expected) in rows {
            clear(at);
            let buffered = errno(read(&disk, at));
            assert!(buffered != 0 || bytes(at) == on_disk, "{name}: buffered");
            clear(at);
            let read_directly = errno(read(&direct, at));
            assert!(read_directly != 0 || bytes(at) == on_disk, "{name}: direct");
            let written = errno(write(&direct, at));
            if written == 0 {
                let mut back = vec![0; LEN];
                disk.read_exact_at(&mut back, WRITE_OFFSET).unwrap();
                assert!(back == on_disk, "{name}: written");
            }
            let mut ring = IoUring::new(4).unwrap();
            let registered = errno(register(&ring, at, 4 << 20));
            if registered == 0 {
                clear(at);
                read_fixed(&mut ring, &direct, at).unwrap();
                assert!(bytes(at) == on_disk, "{name}: READ_FIXED");
            }
            drop(ring);
            let iova = Span::new(Iova::new(0x4000_0000), 4 << 20).unwrap();
            // SAFETY: as in `read`.
            let mapped = unsafe { dma_map(container.as_fd(), at.0.addr(), iova.len(), iova.first(), Access::RW) };
            let mapped = errno(mapped);
            if mapped == 0 {
                assert_eq!(dma_unmap(container.as_fd(), iova).unwrap(), iova.len());
            }
            let got = [buffered, read_directly, written, registered, mapped];
            println!("{name}: buffered read, direct read, direct write, registration, MAP_DMA: {got:?}");
            assert_eq!(got, expected, "{name}");
        }
    }

    /// Kernels before 6.15 or so take at most 1 GiB as one registered buffer.
    #[test]
    fn more_than_a_gib_as_one_registered_buffer() {
        const MORE: usize = (1 << 30) + (2 << 20);
        if ivshmem().is_none() {
            return println!("SKIPPED: no guest of scripts/vm");
        }
        let buf = match AnonHeap::starting_at(PageKind::Transparent).allocate(MORE) {
            Ok(buf) => buf.share(),
            Err(e) => return println!("SKIPPED: not enough memory: {e}"),
        };
        let at = Place(buf.as_volatile_slice().as_ptr());
        let registered = |len| errno(register(&IoUring::new(4).unwrap(), at, len));
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let numbers: Vec<u32> = release.split('.').map_while(|n| n.parse().ok()).collect();
        let accepted = numbers[..2] >= [6, 15][..];
        assert_eq!((registered(1 << 30), registered(MORE)), (0, if accepted { 0 } else { libc::EFAULT }), "{release}");
        println!(
            "Linux {}: more than 1 GiB as one buffer: {}",
            release.trim(),
            if accepted { "taken" } else { "EFAULT" }
        );
    }
}
