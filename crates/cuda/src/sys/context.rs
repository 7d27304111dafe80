//! The context of a GPU: memory is allocated and mapped through it.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::ranges::{Mapped, Range, check, overlaps};
use super::{AccessDesc, AllocationProp, Attribute, Driver, Location, ON_DEVICE, RawHandle};
use crate::Error;

/// The primary context of a GPU, which all users of the GPU in this process share.
pub(crate) struct Context {
    pub(super) driver: &'static Driver,
    device: c_int,
    raw: RawHandle,
    mapped: RwLock<Mapped>,
}

/// Keeps the context current on this thread.
pub(super) struct Current<'a>(&'a Context);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let (driver, mut raw) = (self.0.driver, ptr::null_mut());
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

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn device(&self) -> c_int {
        self.device
    }

    pub(super) fn current(&self) -> Result<Current<'_>, Error> {
        let driver = self.driver;
        call!(driver.push(self.raw.0))?;
        Ok(Current(self))
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

    fn property(&self) -> AllocationProp {
        AllocationProp {
            kind: 1,
            handle_types: 0,
            location: Location { kind: ON_DEVICE, id: self.device },
            win32: ptr::null_mut(),
            compression: 0,
            // Without it network cards cannot reach the memory.
            rdma: u8::from(self.driver.attribute(self.device, Attribute::RdmaWithVirtualMemory) == 1),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Bytes that allocations and mappings are multiples of.
    pub(crate) fn granularity(&self) -> Result<u64, Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let (mut bytes, property) = (0usize, self.property());
        // 0: the smallest.
        call!(driver.granularity(&raw mut bytes, &raw const property, 0))?;
        Ok(bytes as u64)
    }

    /// Allocates memory and maps it at an address of a [`Window`](super::Window) of this context; `len` is a multiple
    /// of the granularity.
    pub(super) fn map_new(&self, at: u64, len: u64) -> Result<(), Error> {
        let mut mapped = self.mapped_mut();
        if overlaps(&mapped, at, len) {
            return Err(Error::Allocated(at));
        }
        let (driver, _current) = (self.driver, self.current()?);
        let (mut handle, property, bytes) = (0, self.property(), len as usize);
        call!(driver.create(&raw mut handle, bytes, &raw const property, 0))?;
        let mapping = call!(driver.map(at, bytes, 0, handle, 0)).and_then(|()| {
            // 3: read and write.
            let access = AccessDesc { location: property.location, flags: 3 };
            call!(driver.set_access(at, bytes, &raw const access, 1)).inspect_err(|_| {
                let _ = call!(driver.unmap(at, bytes));
            })
        });
        if let Err(e) = mapping {
            // Steps that cannot be undone after an error stay with the driver.
            let _ = call!(driver.release_memory(handle));
            return Err(e);
        }
        mapped.insert(at, Range { len, handle, closed: false });
        Ok(())
    }

    /// Unmaps all ranges within these addresses, and frees what they own, once all work of the context has ended.
    /// The calls that undo something also report errors of earlier work, so they count as done.
    ///
    /// # Errors
    /// When the driver does not say that the work has ended: then the memory stays mapped, though nothing new begins to
    /// use it.
    pub(super) fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        let end = at.saturating_add(len);
        let mut mapped = self.mapped_mut();
        if mapped.range(at..end).next().is_none() {
            return Ok(());
        }
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        // From here on nothing begins to use it; what has begun ends.
        mapped.range_mut(at..end).for_each(|(_, range)| range.closed = true);
        drop(mapped);
        self.settle()?;
        let mut mapped = self.mapped_mut();
        let inside: Vec<u64> = mapped.range(at..end).map(|(first, _)| *first).collect();
        let mut result = Ok(());
        for (first, range) in inside.iter().filter_map(|first| mapped.remove_entry(first)) {
            result = result.and(call!(driver.unmap(first, range.len as usize)));
            result = result.and(call!(driver.release_memory(range.handle)));
        }
        result
    }

    /// Waits until all work of the context has ended: also that of kernels and other libraries, which were given
    /// pointers to memory that is about to go. Asked twice, in case that only the call failed.
    fn settle(&self) -> Result<(), Error> {
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        let wait = || call!(driver.synchronize());
        wait().or_else(|_| wait())
    }

    /// A dma-buf of device memory, whole pages of the host.
    pub(crate) fn dma_buf(&self, at: u64, len: u64) -> Result<OwnedFd, Error> {
        check(&self.mapped(), at, len).map_err(Error::NotAllocated)?;
        let (driver, _current) = (self.driver, self.current()?);
        let mut fd: c_int = -1;
        // 1: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
        may_call!(driver.range_handle((&raw mut fd).cast(), at, len as usize, 1, 0))?;
        // SAFETY: the driver has stored a new descriptor, which is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.driver;
        // The driver has nothing to tell that would help here.
        let _ = call!(driver.release(self.device));
    }
}
