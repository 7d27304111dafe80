//! The context of a GPU: memory is allocated and mapped through it.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use dmalane_addr::CardAddr;
use dmalane_queue::DeviceAddr;

use super::ranges::{Mapped, check, page_at};
use super::{AccessDesc, AllocationProp, Attribute, Driver, Location, ON_DEVICE, RawHandle};
use crate::Error;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;

/// The primary context of a GPU, which all users of the GPU in this process share.
pub(crate) struct Context {
    pub(super) driver: &'static Driver,
    device: c_int,
    raw: RawHandle,
    mapped: RwLock<Mapped>,
}

/// Keeps the context current on this thread, whose calls do not end a graph that another thread captures.
pub(super) struct Current<'a> {
    context: &'a Context,
    /// The mode of the thread before.
    capture_mode: c_int,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let (driver, mut raw) = (self.context.driver, ptr::null_mut());
        let _ = call!(driver.capture_mode(&raw mut self.capture_mode));
        // A context that was pushed can be popped.
        let _ = call!(driver.pop(&raw mut raw));
    }
}

impl Context {
    /// Retains the primary context.
    pub(crate) fn new(driver: &'static Driver, device: c_int) -> Result<Arc<Self>, Error> {
        let mut raw = ptr::null_mut();
        call!(driver.retain(&raw mut raw, device))?;
        Ok(Arc::new(Self { driver, device, raw: RawHandle(raw), mapped: RwLock::default() }))
    }

    /// An attribute of the GPU; 0 when the driver does not know it.
    pub(crate) fn attribute(&self, attribute: Attribute) -> i32 {
        self.driver.attribute(self.device, attribute)
    }

    /// The number of the GPU, as the driver counts them.
    pub(super) fn ordinal(&self) -> u32 {
        self.device as u32
    }

    pub(super) fn current(&self) -> Result<Current<'_>, Error> {
        // 2: CU_STREAM_CAPTURE_MODE_RELAXED. No stream here is ever captured.
        let (driver, mut capture_mode) = (self.driver, 2);
        call!(driver.push(self.raw.0))?;
        let mut current = Current { context: self, capture_mode: 0 };
        call!(driver.capture_mode(&raw mut capture_mode))?;
        current.capture_mode = capture_mode;
        Ok(current)
    }

    /// As [`Context::current`], tried twice: to leave something behind is worse.
    pub(super) fn current_to_undo(&self) -> Result<Current<'_>, Error> {
        self.current().or_else(|_| self.current())
    }

    pub(super) fn mapped(&self) -> RwLockReadGuard<'_, Mapped> {
        self.mapped.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mapped_mut(&self) -> RwLockWriteGuard<'_, Mapped> {
        self.mapped.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free and total memory, in bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let (mut free, mut total) = (0usize, 0usize);
        call!(driver.memory_info(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn property(&self, lendable: bool) -> AllocationProp {
        AllocationProp {
            kind: 1,
            handle_types: if lendable { DESCRIPTOR } else { 0 },
            location: Location { kind: ON_DEVICE, id: self.device },
            win32: ptr::null_mut(),
            compression: 0,
            // Without it network cards cannot reach the memory.
            rdma: u8::from(self.attribute(Attribute::RdmaWithVirtualMemory) == 1),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Bytes that allocations and mappings are multiples of.
    pub(crate) fn granularity(&self) -> Result<u64, Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let (mut bytes, property) = (0usize, self.property(false));
        // 0: the smallest.
        call!(driver.granularity(&raw mut bytes, &raw const property, 0))?;
        Ok(bytes as u64)
    }

    /// Sets the rights of the GPU to what is mapped; the context is current.
    pub(super) fn set_access(&self, at: u64, len: u64, writable: bool) -> Result<(), Error> {
        let driver = self.driver;
        let location = Location { kind: ON_DEVICE, id: self.device };
        let access = AccessDesc { location, flags: if writable { 3 } else { 1 } };
        call!(driver.set_access(at, len as usize, &raw const access, 1))
    }

    /// Waits until all work of the context has ended: also that of kernels and other libraries, which were given
    /// pointers to memory that is about to go. Asked twice, in case that only the call failed.
    pub(super) fn settle(&self) -> Result<(), Error> {
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        let wait = || call!(driver.synchronize());
        wait().or_else(|_| wait())
    }

    /// An error where no memory was allocated as one page.
    pub(crate) fn has_page(&self, at: u64, page: u64) -> Result<(), Error> {
        page_at(&self.mapped(), at, page).map(drop)
    }

    /// A dma-buf of device memory, whole pages of the host.
    pub(crate) fn dma_buf(&self, at: u64, len: u64) -> Result<OwnedFd, Error> {
        // Who imports it may write.
        check(&self.mapped(), DeviceAddr::Card(CardAddr::new(at)), len, true).map_err(Error::NotAllocated)?;
        let (driver, _current) = (self.driver, self.current()?);
        let mut fd: c_int = -1;
        // 1: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
        may_call!(driver.range_handle((&raw mut fd).cast(), at, len as usize, 1, 0))?;
        // SAFETY: the driver has stored a new descriptor, which is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A descriptor of memory that was allocated as one page, lendable.
    pub(crate) fn lend(&self, at: u64, len: u64) -> Result<OwnedFd, Error> {
        // Until the driver has made it, nobody frees the memory.
        let mapped = self.mapped();
        let (handle, driver, _current) = (page_at(&mapped, at, len)?, self.driver, self.current()?);
        let mut fd: c_int = -1;
        call!(driver.export((&raw mut fd).cast(), handle, DESCRIPTOR, 0))?;
        // SAFETY: as in `dma_buf`.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A handle, to be released, of memory of this GPU that another process has lent; the context is current.
    pub(super) fn take(&self, fd: BorrowedFd<'_>) -> Result<u64, Error> {
        let (driver, mut handle, mut property) = (self.driver, 0, self.property(false));
        // The driver takes the number of a descriptor where it takes pointers elsewhere.
        let number = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        call!(driver.import(&raw mut handle, number, DESCRIPTOR))?;
        let known = call!(driver.property_of(&raw mut property, handle)).and_then(|()| match property.location {
            Location { kind: ON_DEVICE, id } if id == self.device => Ok(()),
            Location { id, .. } => Err(Error::OtherGpu(id)),
        });
        if known.is_err() {
            let _ = call!(driver.release_memory(handle));
        }
        known.map(|()| handle)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.driver;
        // The driver has nothing to tell that would help here.
        let _ = call!(driver.release(self.device));
    }
}
