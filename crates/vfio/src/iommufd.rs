//! The iommufd backend: one address space, to which devices are attached by their own files.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dmalane_addr::{Access, Iova, Span};
use dmalane_dma::BufferRef;
use iommufd_bindings::iommufd as abi;
use rustix::io::Errno;

use crate::node::open;
use crate::sys::{self, IommuInfo};
use crate::{Error, VfioOperation};

const IOMMU: &str = "/dev/iommu";

/// An address space of an iommufd.
pub(crate) struct Iommufd {
    fd: OwnedFd,
    ioas: u32,
    /// Bit n: all IOMMUs of the address space can use pages of 2^n bytes.
    pages: AtomicU64,
    /// The kernel can map files directly, without walking the process's page table.
    files: AtomicBool,
    /// The mappings: first to last address. The kernel has the same error number for no mapping and for half a mapping.
    /// Locked during calls to the kernel, so it agrees with the kernel whenever it is unlocked.
    mapped: Mutex<BTreeMap<u64, u64>>,
}

impl Iommufd {
    /// Creates an empty address space.
    pub(crate) fn new() -> Result<Self, Error> {
        let fd = open(Path::new(IOMMU), "iommufd")?;
        let ioas = sys::ioas_alloc(fd.as_fd()).map_err(Error::kernel(VfioOperation::Initialize(IOMMU.into())))?;
        let (pages, files) = (AtomicU64::new(u64::MAX), AtomicBool::new(true));
        Ok(Self { fd, ioas, pages, files, mapped: Mutex::default() })
    }

    /// Attaches a device, and returns what can be mapped from now on.
    pub(crate) fn attach(&self, device: BorrowedFd<'_>) -> io::Result<IommuInfo> {
        let number = sys::bind(device, self.fd.as_fd())?;
        sys::attach(device, self.ioas)?;
        let (ranges, smallest) = sys::ioas_ranges(self.fd.as_fd(), self.ioas)?;
        // The first kernels with iommufd do not report this, nor does every driver.
        let larger = sys::hw_info(self.fd.as_fd(), number).map_or(0, |(kind, data)| page_sizes(kind, &data));
        let smallest = smallest.max(1).next_power_of_two();
        let common = self.pages.fetch_and(larger, Ordering::Relaxed) & larger;
        let pages = common & !(smallest - 1) | smallest;
        Ok(IommuInfo { pages, ranges, left: None })
    }

    /// Maps memory of this process at `va`, by its file if it has one.
    pub(crate) fn map(
        &self,
        va: usize,
        file: Option<(&BufferRef, u64)>,
        span: Span<Iova>,
        access: Access,
    ) -> io::Result<()> {
        self.record(span, || match file.filter(|_| self.files.load(Ordering::Relaxed)) {
            Some((buffer, start)) => self.map_file(va, buffer, start, span, access),
            None => self.map_address(va, span, access),
        })
    }

    fn map_address(&self, va: usize, span: Span<Iova>, access: Access) -> io::Result<()> {
        sys::ioas_map(self.fd.as_fd(), self.ioas, va, span, access)
    }

    fn map_file(&self, va: usize, buffer: &BufferRef, start: u64, span: Span<Iova>, access: Access) -> io::Result<()> {
        let mapped = sys::ioas_map_buffer(self.fd.as_fd(), self.ioas, buffer, start, span, access);
        match mapped {
            Some(Ok(())) => return Ok(()),
            // Not every kernel with iommufd can map files.
            Some(Err(e)) if Errno::from_io_error(&e) == Some(Errno::NOTTY) => {
                self.files.store(false, Ordering::Relaxed)
            }
            // No file, or one of an unsupported kind, such as the dma-buf of a heap (EOPNOTSUPP). Any other error
            // occurs again below.
            Some(Err(_)) | None => {}
        }
        self.map_address(va, span, access)
    }

    /// Maps part of a dma-buf of device memory.
    pub(crate) fn map_dma_buf(
        &self,
        dma_buf: BorrowedFd<'_>,
        start: u64,
        span: Span<Iova>,
        access: Access,
    ) -> io::Result<()> {
        self.record(span, || sys::ioas_map_dma_buf(self.fd.as_fd(), self.ioas, dma_buf, start, span, access))
    }

    /// Unmaps the mappings within the span, and returns their bytes.
    ///
    /// # Errors
    /// [`Error::PartialUnmap`], and nothing is unmapped, when the span covers a mapping only in part.
    pub(crate) fn unmap(&self, span: Span<Iova>) -> Result<u64, Error> {
        let (first, last) = (span.first().bits(), span.last().bits());
        let mut mapped = self.lock();
        // The last mapping before the span and the last one in it may cross its ends.
        let cut = |at: Option<(&u64, &u64)>, edge: u64| at.is_some_and(|(_, end)| *end >= edge);
        let beyond = last.checked_add(1);
        if cut(mapped.range(..first).next_back(), first)
            || beyond.is_some_and(|beyond| cut(mapped.range(first..=last).next_back(), beyond))
        {
            return Err(Error::PartialUnmap(span));
        }
        let ended = match sys::ioas_unmap(self.fd.as_fd(), self.ioas, span) {
            // Nothing was mapped.
            Err(e) if Errno::from_io_error(&e) == Some(Errno::NOENT) => 0,
            other => other.map_err(Error::kernel(VfioOperation::Unmap(span)))?,
        };
        while let Some(start) = mapped.range(first..=last).next().map(|(start, _)| *start) {
            mapped.remove(&start);
        }
        Ok(ended)
    }

    /// The kernel's error number for unmapping a span, without checks of our own.
    #[cfg(test)]
    pub(crate) fn unmap_error(&self, span: Span<Iova>) -> Option<Errno> {
        sys::ioas_unmap(self.fd.as_fd(), self.ioas, span).err().and_then(|e| Errno::from_io_error(&e))
    }

    /// Maps a span in the kernel and records it.
    fn record(&self, span: Span<Iova>, map: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut mapped = self.lock();
        map()?;
        mapped.insert(span.first().bits(), span.last().bits());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The page sizes, bit n for 2^n bytes, according to the registers of an IOMMU: Intel's capability register (VT-d
/// specification, 11.4.2: second-stage large pages, first-stage pages of 1 GiB), Arm's IDR5 (SMMUv3, 6.3.6: granules of
/// 4, 16 and 64 KiB). 0 for others.
fn page_sizes(kind: u32, data: &[u32; 16]) -> u64 {
    let word = |at: usize| u64::from(data[at]) | u64::from(data[at + 1]) << 32;
    let pages = |found: bool, sizes: &[u32]| if found { sizes.iter().map(|log2| 1 << log2).sum() } else { 0_u64 };
    match kind {
        abi::iommu_hw_info_type_IOMMU_HW_INFO_TYPE_INTEL_VTD => {
            // struct iommu_hw_info_vtd: flags, __reserved, cap_reg.
            let capabilities = word(2);
            let has = |bit: u32| capabilities >> bit & 1 == 1;
            pages(true, &[12]) | pages(has(34), &[21]) | pages(has(35) || has(56), &[30])
        }
        abi::iommu_hw_info_type_IOMMU_HW_INFO_TYPE_ARM_SMMUV3 => {
            // struct iommu_hw_info_arm_smmuv3: flags, __reserved, idr[6].
            let has = |bit: u32| data[2 + 5] >> bit & 1 == 1;
            pages(has(4), &[12, 21, 30]) | pages(has(5), &[14, 25]) | pages(has(6), &[16, 29])
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap};

    use super::*;

    /// A file in place of an iommufd: it refuses every request as one that it does not know.
    #[test]
    fn requests_that_a_kernel_does_not_know() {
        let (pages, files) = (AtomicU64::new(u64::MAX), AtomicBool::new(true));
        let fd = tempfile::tempfile().unwrap().into();
        let space = Iommufd { fd, ioas: 1, pages, files, mapped: Mutex::default() };
        let errno = |result: io::Result<()>| Errno::from_io_error(&result.unwrap_err());
        let span = |first: u64, last: u64| Span::inclusive(Iova::new(first), Iova::new(last)).unwrap();
        let memfd = MemfdHeap::new().allocate(8192).unwrap().share().reference();
        let two = span(0x2000, 0x3fff);
        // By its file first, and then, as with memory that has none, by its address.
        assert_eq!(errno(space.map(memfd.address(), Some((&memfd, 0)), two, Access::RW)), Some(Errno::NOTTY));
        assert!(!space.files.load(Ordering::Relaxed), "the kernel is not asked for files again");
        assert_eq!(errno(space.map(memfd.address(), Some((&memfd, 0)), two, Access::RW)), Some(Errno::NOTTY));
        assert_eq!(errno(space.map_dma_buf(space.fd.as_fd(), 0, two, Access::RW)), Some(Errno::NOTTY));
        assert!(space.lock().is_empty(), "nothing was mapped");
        assert_eq!(errno(space.attach(space.fd.as_fd()).map(drop)), Some(Errno::NOTTY));
        // Half a mapping is refused here, a whole one by the kernel; it stays on the list.
        space.record(two, || Ok(())).unwrap();
        for half in [span(0x2000, 0x2fff), span(0x3000, 0x3fff), span(0, 0x2fff), span(0x3000, u64::MAX)] {
            assert!(matches!(space.unmap(half), Err(Error::PartialUnmap(refused)) if refused == half), "{half}");
        }
        for whole in [two, span(1, u64::MAX)] {
            let refused = space.unmap(whole).unwrap_err();
            assert!(matches!(refused, Error::Kernel { operation: VfioOperation::Unmap(_), .. }), "{refused}");
        }
        assert_eq!(space.lock().len(), 1);
    }

    #[test]
    fn pages_from_registers() {
        let intel = |capabilities: u64| {
            let mut data = [0; 16];
            (data[2], data[3]) = (capabilities as u32, (capabilities >> 32) as u32);
            page_sizes(1, &data)
        };
        assert_eq!(intel(0), 1 << 12);
        assert_eq!(intel(0b11 << 34), 1 << 12 | 1 << 21 | 1 << 30);
        assert_eq!(intel(1 << 34 | 1 << 56), 1 << 12 | 1 << 21 | 1 << 30);
        let mut data = [0; 16];
        data[7] = 0b101 << 4;
        assert_eq!(page_sizes(2, &data), 1 << 12 | 1 << 21 | 1 << 30 | 1 << 16 | 1 << 29);
        assert_eq!(page_sizes(0, &[u32::MAX; 16]), 0);
    }
}
