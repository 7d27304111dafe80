//! Host memory that the driver has pinned.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use dmalane_device::NoIommu;
use dmalane_dma::{BufferRef, DriverMemory};

use super::context::Context;
use super::{Registration, lock};
use crate::Error;

/// Names registrations; of each range what is registered with the driver, where host memory can be.
pub(crate) type Pins = NoIommu<Option<Registered>>;

/// Host memory that the driver has pinned; unpinned with the last value for it.
pub(crate) struct Registered {
    context: Arc<Context>,
    at: usize,
    /// Keeps the memory.
    _buffer: BufferRef,
}

impl Registered {
    /// Registers a range of a buffer for all GPUs of the process, unless it lies in one that is.
    pub(crate) fn new(
        context: &Arc<Context>,
        buffer: &BufferRef,
        range: std::ops::Range<usize>,
    ) -> Result<Self, Error> {
        let outside = range.start >= range.end || range.end > buffer.len();
        let (first, len) = (buffer.address() + range.start, range.len());
        if outside {
            return Err(Error::Unsupported("host memory beyond the end of its buffer"));
        }
        let driver = context.driver;
        let mut registered = lock(&driver.registered);
        let near = registered.range_mut(..first + len).next_back().filter(|(at, near)| *at + near.len > first);
        let at = match near {
            Some((at, near)) if *at <= first && first + len <= at + near.len => {
                near.users += 1;
                *at
            }
            Some(_) => return Err(Error::Overlap { first, last: first + len - 1 }),
            None => {
                let _current = context.current()?;
                // CU_MEMHOSTREGISTER_PORTABLE, pinned for all contexts; and READ_ONLY, which some drivers refuse.
                let flags = if buffer.is_read_only() { 1 | 8 } else { 1 };
                call!(driver.host_register(first as *mut c_void, len, flags))?;
                registered.insert(first, Registration { len, users: 1, context: context.clone() });
                first
            }
        };
        Ok(Self { context: context.clone(), at, _buffer: buffer.clone() })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let driver = self.context.driver;
        let mut registered = lock(&driver.registered);
        let Some(registration) = registered.get_mut(&self.at) else { return };
        registration.users -= 1;
        if registration.users == 0
            && let Some(registration) = registered.remove(&self.at)
            && let Ok(_current) = registration.context.current_to_undo()
        {
            // Nothing is left to be done about an error: operations that use the memory hold it.
            let _ = call!(driver.host_unregister(self.at as *mut c_void));
        }
    }
}

/// Host memory that the driver has allocated, pinned for all contexts.
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    start: NonNull<u8>,
    len: NonZeroUsize,
}

impl PinnedMemory {
    /// Allocates whole pages.
    pub(crate) fn allocate(context: &Arc<Context>, len: usize) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut at = ptr::null_mut();
        // 1: CU_MEMHOSTALLOC_PORTABLE, pinned for all contexts.
        call!(driver.host_alloc(&raw mut at, len, 1))?;
        match (NonNull::new(at.cast::<u8>()), NonZeroUsize::new(len)) {
            (Some(start), Some(len)) if start.addr().get().is_multiple_of(4096) && len.get().is_multiple_of(4096) => {
                Ok(Self { context: context.clone(), start, len })
            }
            _ => {
                let _ = call!(driver.host_free(at));
                Err(Error::Unsupported("host memory of whole pages (cuMemHostAlloc)"))
            }
        }
    }
}

// SAFETY: it is plain memory, not tied to a thread; the context is made current by whom uses it.
unsafe impl Send for PinnedMemory {}
// SAFETY: it gives only its address.
unsafe impl Sync for PinnedMemory {}

// SAFETY: the memory is mapped until it is freed, which is the drop of this. The kernel initialises what it gives to
// the driver. Start and length were checked to be whole pages and do not change.
unsafe impl DriverMemory for PinnedMemory {
    fn span(&self) -> (NonNull<u8>, NonZeroUsize) {
        (self.start, self.len)
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let driver = self.context.driver;
        if let Ok(_current) = self.context.current_to_undo() {
            // Nothing is left to be done about an error: operations that use the memory hold it.
            let _ = call!(driver.host_free(self.start.as_ptr().cast()));
        }
    }
}
