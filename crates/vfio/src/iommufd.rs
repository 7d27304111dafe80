//! The iommufd backend: one address space, to which devices are attached by their own files.
//!
//! `unsafe` passes on what devices get access to: [`sys::dma_map`] says what the caller promises.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use dmalane_addr::{Access, Iova, Span};
use dmalane_dma::{BufferRef, lock};
use rustix::io::Errno;

use crate::Error;
use crate::node::open;
use crate::sys::{self, IommuInfo};

const IOMMU: &str = "/dev/iommu";

/// An address space of an iommufd.
pub(crate) struct Iommufd {
    fd: OwnedFd,
    ioas: u32,
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
        let ioas = sys::ioas_alloc(fd.as_fd()).map_err(Error::kernel(format_args!("initialize {IOMMU}")))?;
        Ok(Self { fd, ioas, files: AtomicBool::new(true), mapped: Mutex::default() })
    }

    /// Attaches a device, and returns what can be mapped from now on.
    pub(crate) fn attach(&self, device: BorrowedFd<'_>) -> io::Result<IommuInfo> {
        sys::bind(device, self.fd.as_fd())?;
        sys::attach(device, self.ioas)?;
        let (ranges, smallest) = sys::ioas_ranges(self.fd.as_fd(), self.ioas)?;
        Ok(IommuInfo { page: smallest.max(1).next_power_of_two(), ranges, left: None })
    }

    /// Maps memory of this process at `va`, by its file if it has one.
    ///
    /// # Safety
    /// As for [`sys::dma_map`].
    pub(crate) unsafe fn map(
        &self,
        va: usize,
        file: Option<(&BufferRef, u64)>,
        span: Span<Iova>,
        access: Access,
    ) -> io::Result<()> {
        self.record(span, || match file.filter(|_| self.files.load(Ordering::Relaxed)) {
            // SAFETY: of the caller.
            Some((buffer, start)) => unsafe { self.map_file(va, buffer, start, span, access) },
            // SAFETY: of the caller.
            None => unsafe { self.map_address(va, span, access) },
        })
    }

    /// # Safety
    /// As for [`sys::dma_map`].
    unsafe fn map_address(&self, va: usize, span: Span<Iova>, access: Access) -> io::Result<()> {
        // SAFETY: of the caller.
        unsafe { sys::ioas_map(self.fd.as_fd(), self.ioas, va, span, access) }
    }

    /// # Safety
    /// As for [`sys::dma_map`].
    unsafe fn map_file(
        &self,
        va: usize,
        buffer: &BufferRef,
        start: u64,
        span: Span<Iova>,
        access: Access,
    ) -> io::Result<()> {
        // SAFETY: of the caller.
        match unsafe { sys::ioas_map_buffer(self.fd.as_fd(), self.ioas, buffer, start, span, access) } {
            Some(Ok(())) => return Ok(()),
            // Not every kernel with iommufd can map files.
            Some(Err(e)) if Errno::from_io_error(&e) == Some(Errno::NOTTY) => {
                self.files.store(false, Ordering::Relaxed)
            }
            // No file, or one of an unsupported kind, such as the dma-buf of a heap (EOPNOTSUPP). Any other error
            // occurs again below.
            Some(Err(_)) | None => {}
        }
        // SAFETY: of the caller.
        unsafe { self.map_address(va, span, access) }
    }

    /// Maps part of a dma-buf of device memory.
    ///
    /// # Safety
    /// As for [`sys::ioas_map_file`].
    pub(crate) unsafe fn map_dma_buf(
        &self,
        dma_buf: BorrowedFd<'_>,
        start: u64,
        span: Span<Iova>,
        access: Access,
    ) -> io::Result<()> {
        // SAFETY: of the caller.
        let map = || unsafe { sys::ioas_map_file(self.fd.as_fd(), self.ioas, dma_buf, start, span, access) };
        self.record(span, map)
    }

    /// Unmaps the mappings within the span, and returns their bytes.
    ///
    /// # Errors
    /// [`Error::PartialUnmap`], and nothing is unmapped, when the span covers a mapping only in part.
    pub(crate) fn unmap(&self, span: Span<Iova>) -> Result<u64, Error> {
        let (first, last) = (span.first().bits(), span.last().bits());
        let mut mapped = lock(&self.mapped);
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
            other => other.map_err(Error::kernel(format_args!("unmap {span}")))?,
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
        let mut mapped = lock(&self.mapped);
        map()?;
        mapped.insert(span.first().bits(), span.last().bits());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap};

    use super::*;

    /// A file in place of an iommufd: it refuses every request as one that it does not know.
    #[test]
    fn requests_that_a_kernel_does_not_know() {
        let fd = tempfile::tempfile().unwrap().into();
        let space = Iommufd { fd, ioas: 1, files: AtomicBool::new(true), mapped: Mutex::default() };
        let errno = |result: io::Result<()>| Errno::from_io_error(&result.unwrap_err());
        let span = |first: u64, last: u64| Span::inclusive(Iova::new(first), Iova::new(last)).unwrap();
        let memfd = MemfdHeap::new().allocate(8192).unwrap().share().reference();
        let two = span(0x2000, 0x3fff);
        // By its file first, and then, as with memory that has none, by its address.
        // SAFETY: the file maps nothing.
        let map = || unsafe { space.map(memfd.address(), Some((&memfd, 0)), two, Access::RW) };
        assert_eq!(errno(map()), Some(Errno::NOTTY));
        assert!(!space.files.load(Ordering::Relaxed), "the kernel is not asked for files again");
        assert_eq!(errno(map()), Some(Errno::NOTTY));
        // SAFETY: as above.
        let mapped = unsafe { space.map_dma_buf(space.fd.as_fd(), 0, two, Access::RW) };
        assert_eq!(errno(mapped), Some(Errno::NOTTY));
        assert!(lock(&space.mapped).is_empty(), "nothing was mapped");
        assert_eq!(errno(space.attach(space.fd.as_fd()).map(drop)), Some(Errno::NOTTY));
        // Half a mapping is refused here, a whole one by the kernel; it stays on the list.
        space.record(two, || Ok(())).unwrap();
        for half in [span(0x2000, 0x2fff), span(0x3000, 0x3fff), span(0, 0x2fff), span(0x3000, u64::MAX)] {
            assert!(matches!(space.unmap(half), Err(Error::PartialUnmap(refused)) if refused == half), "{half}");
        }
        for whole in [two, span(1, u64::MAX)] {
            let refused = space.unmap(whole).unwrap_err();
            assert!(refused.to_string().starts_with("cannot unmap "), "{refused}");
        }
        assert_eq!(lock(&space.mapped).len(), 1);
    }
}
