//! The context of a GPU: memory is allocated and mapped through it.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::ranges::{Mapped, Range, RangeKind, check, chunk_at, cut, overlaps};
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
        may_call!(driver.granularity(&raw mut bytes, &raw const property, 0))?;
        Ok(bytes as u64)
    }

    /// Allocates plain memory.
    pub(super) fn allocate(self: &Arc<Self>, len: u64) -> Result<u64, Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let mut at = 0;
        call!(driver.alloc(&raw mut at, len as usize))?;
        Ok(at)
    }

    /// Allocates memory in chunks of `chunk` bytes and maps it at an address of a [`Window`] of this context. Both
    /// lengths are multiples of the granularity, and `len` of `chunk`.
    pub(super) fn map_new(&self, at: u64, len: u64, chunk: u64) -> Result<(), Error> {
        let mut mapped = self.mapped_mut();
        if overlaps(&mapped, at, len) {
            return Err(Error::Allocated(at));
        }
        let (driver, _current) = (self.driver, self.current()?);
        let property = self.property();
        let (mut handles, mut done) = (Vec::new(), 0);
        let mut make = || {
            for i in 0..len / chunk {
                let mut handle = 0;
                may_call!(driver.create(&raw mut handle, chunk as usize, &raw const property, 0))?;
                handles.push(handle);
                may_call!(driver.map(at + i * chunk, chunk as usize, 0, handle, 0))?;
                done += chunk;
            }
            self.set_access(at, len, true)
        };
        if let Err(e) = make() {
            // Steps that cannot be undone after an error stay with the driver.
            if done > 0 {
                // The driver unmaps nothing where a part is not mapped.
                let _ = may_call!(driver.unmap(at, done as usize));
            }
            handles.into_iter().for_each(|handle| drop(may_call!(driver.release_memory(handle))));
            return Err(e);
        }
        mapped.insert(at, Range { len, kind: RangeKind::Memory, writable: true, handles, chunk, closed: false });
        Ok(())
    }

    pub(super) fn set_access(&self, at: u64, len: u64, writable: bool) -> Result<(), Error> {
        let driver = self.driver;
        let location = Location { kind: ON_DEVICE, id: self.device };
        let access = AccessDesc { location, flags: if writable { 3 } else { 1 } };
        may_call!(driver.set_access(at, len as usize, &raw const access, 1))
    }

    /// Maps memory that was allocated at `from`, whole chunks of it, at `at`, too, which lies in a [`Window`] of this
    /// context; nothing is mapped there.
    pub(super) fn map_again(&self, at: u64, from: &[(u64, u64)], writable: bool) -> Result<(), Error> {
        let mut mapped = self.mapped_mut();
        let len: u64 = from.iter().map(|(_, len)| len).sum();
        if overlaps(&mapped, at, len) {
            return Err(Error::Mapped(at));
        }
        let (driver, _current) = (self.driver, self.current()?);
        let mut done = 0;
        let mut make = || {
            for (first, len) in from {
                let mut next = *first;
                while next < first + len {
                    let (handle, chunk) = chunk_at(&mapped, next, first + len).ok_or(Error::NotAllocated(next))?;
                    may_call!(driver.map(at + done, chunk as usize, 0, handle, 0))?;
                    (done, next) = (done + chunk, next + chunk);
                }
            }
            self.set_access(at, len, writable)
        };
        if let Err(e) = make() {
            if done > 0 {
                let _ = may_call!(driver.unmap(at, done as usize));
            }
            return Err(e);
        }
        mapped
            .insert(at, Range { len, kind: RangeKind::Bound, writable, handles: Vec::new(), chunk: 0, closed: false });
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
        cut(&mut mapped, at);
        cut(&mut mapped, end);
        if mapped.range(at..end).next().is_none() {
            return Ok(());
        }
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        // From here on nothing begins to use it; what has begun ends.
        mapped.range_mut(at..end).for_each(|(_, range)| range.closed = true);
        drop(mapped);
        self.settle()?;
        let mut mapped = self.mapped_mut();
        let inside: Vec<u64> = mapped.range(at..at.saturating_add(len)).map(|(first, _)| *first).collect();
        let mut result = Ok(());
        for (first, range) in inside.iter().filter_map(|first| mapped.remove_entry(first)) {
            result = result.and(may_call!(driver.unmap(first, range.len as usize)));
            for handle in range.handles {
                result = result.and(may_call!(driver.release_memory(handle)));
            }
        }
        result
    }

    /// Waits until all work of the context has ended: also that of kernels and other libraries, which were given
    /// pointers to memory that is about to go. Asked twice, in case that only the call failed.
    pub(super) fn settle(&self) -> Result<(), Error> {
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        let wait = || call!(driver.synchronize());
        wait().or_else(|_| wait())
    }

    /// A dma-buf of device memory, whole pages of the host.
    pub(crate) fn dma_buf(&self, at: u64, len: u64) -> Result<OwnedFd, Error> {
        self.has_memory(at, len)?;
        let (driver, _current) = (self.driver, self.current()?);
        let mut fd: c_int = -1;
        // 1: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
        may_call!(driver.range_handle((&raw mut fd).cast(), at, len as usize, 1, 0))?;
        // SAFETY: the driver has stored a new descriptor, which is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// An error where no device memory is allocated.
    pub(crate) fn has_memory(&self, at: u64, len: u64) -> Result<(), Error> {
        self.check(at, len, RangeKind::Memory, false).map_err(Error::NotAllocated)
    }

    /// Checks that a range of device memory may be used; the error is the first address that may not.
    fn check(&self, at: u64, len: u64, kind: RangeKind, write: bool) -> Result<(), u64> {
        check(&self.mapped(), at, len, kind, write)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.driver;
        // The driver has nothing to tell that would help here.
        let _ = call!(driver.release(self.device));
    }
}
