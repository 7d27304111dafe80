//! A heap of memory that a device's driver allocates, for devices that reach no other host memory.

use std::sync::Arc;

use super::{Heap, HeapCapabilities, Reserved};
use crate::account::{Account, Counters};
use crate::sys::{DriverMemory, Region, page};
use crate::{Error, HeapStats, PageBacking, PageKind};

/// Host memory of a driver: every buffer is one allocation of it.
pub struct DriverHeap {
    name: &'static str,
    allocate: Allocate,
    counters: Arc<Counters>,
}

type Allocate = Box<dyn Fn(usize) -> Result<Region, Error> + Send + Sync>;

impl DriverHeap {
    /// A heap of what `allocate` gives for a number of bytes, whole pages: as many bytes, or more. A buffer says which
    /// memory it is made of: [`BufferRef::driver`](crate::BufferRef::driver).
    pub fn new<M: DriverMemory>(
        name: &'static str,
        allocate: impl Fn(usize) -> Result<M, Error> + Send + Sync + 'static,
    ) -> Self {
        let allocate = move |len| allocate(len).map(Region::of_driver);
        Self { name, allocate: Box::new(allocate), counters: Arc::default() }
    }
}

impl Heap for DriverHeap {
    fn reserve(&self, len: usize) -> Result<Reserved, Error> {
        let whole = len.checked_next_multiple_of(page()).filter(|n| *n > 0).ok_or(Error::BadLength(len))?;
        let region = (self.allocate)(whole)?;
        if region.len() < whole {
            return Err(Error::Allocate { len, kind: self.name, source: std::io::ErrorKind::UnexpectedEof.into() });
        }
        // Buffers are zeroed, and drivers need not do that.
        region.as_volatile_slice().fill(0);
        let account = Account::open(&self.counters, region.len());
        Ok(Reserved::present(region, PageBacking::base(), account))
    }

    /// No file is read into it directly unless the driver says so: most map memory that the kernel cannot pin.
    fn capabilities(&self) -> HeapCapabilities {
        HeapCapabilities { shareable: false, dma_buf: false, best_pages: PageKind::Base }
    }

    fn stats(&self) -> HeapStats {
        self.counters.stats()
    }

    fn name(&self) -> &'static str {
        self.name
    }
}
