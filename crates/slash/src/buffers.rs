//! Buffers of the driver, and which of them memory of this process is of.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmalane_device::NoIommu;
use dmalane_dma::{BufferSlice, DriverHeap, Error as DmaError};

use crate::Error;
use crate::abi::{self, halves};
use crate::kernel::{Handle, Kernel, Request};
use crate::sys::Mapped;

/// The kernel's pages, in bytes: transfers begin at multiples of this in a buffer.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// The buffers of a queue pair's file, which all queue pairs of the card can use.
pub(crate) struct Buffers {
    kernel: Arc<dyn Kernel>,
    file: Arc<Handle>,
    hint: AtomicU32,
}

impl Buffers {
    pub(crate) fn new(kernel: &Arc<dyn Kernel>, file: &Arc<Handle>) -> Self {
        Self { kernel: kernel.clone(), file: file.clone(), hint: AtomicU32::new(0) }
    }

    /// Creates and maps a buffer of `len` bytes, whole pages of the kernel.
    pub(crate) fn create(&self, len: usize) -> Result<Mapped, Error> {
        let mut argument = [0; abi::BUF_WORDS];
        argument[1] = abi::CLOEXEC;
        argument[2..4].copy_from_slice(&halves(len as u64));
        let of = |e: io::Error| Error::call(Request::BufferCreate, e);
        let file = self.kernel.open(&self.file, Request::BufferCreate, &mut argument).map_err(of)?;
        let [granule, hint] = [0, 1].map(|i| argument[abi::BUF_GRANULE + i]);
        if granule as usize != page() {
            return Err(Error::Answer {
                call: Request::BufferCreate.name(),
                what: format!("pages of {granule} bytes"),
            });
        }
        self.hint.store(hint, Ordering::Relaxed);
        let bytes =
            NonZeroUsize::new(len).ok_or(Error::Answer { call: "BUF_CREATE", what: "an empty buffer".into() })?;
        Mapped::new(file, bytes, Arc::downgrade(&self.file)).map_err(Error::Map)
    }

    /// How the driver says that the channels should share the work, once a buffer was created.
    pub(crate) fn hint(&self) -> u32 {
        self.hint.load(Ordering::Relaxed)
    }

    /// The file of the buffer that holds these bytes, and the offset there.
    pub(crate) fn find(&self, bytes: &BufferSlice) -> Option<(RawFd, u64)> {
        let mapped = bytes.driver().filter(|mapped: &&Mapped| mapped.is_of(&self.file))?;
        Some(mapped.find(bytes.as_volatile_slice().as_ptr().addr()))
    }
}

/// A heap of buffers of the driver.
pub(crate) fn heap(buffers: &Arc<Buffers>) -> DriverHeap {
    let buffers = buffers.clone();
    let allocate = move |len| match buffers.create(len) {
        Ok(mapped) => Ok(mapped),
        Err(e) => Err(DmaError::Allocate { len, kind: "buffers of SLASH", source: io::Error::new(e.kind(), e) }),
    };
    DriverHeap::new("slash", allocate)
}

/// Registers buffers of the driver, which the card reaches already; all others are refused. The driver's pages are
/// single ones, whatever is asked for.
pub(crate) fn registrar(buffers: &Arc<Buffers>) -> NoIommu {
    let file = buffers.file.clone();
    NoIommu::calling(Some(Arc::new(heap(buffers))), move |buffer, _| match buffer.driver::<Mapped>() {
        Some(mapped) if mapped.is_of(&file) => Ok(()),
        _ => Err(DmaError::Backend(Box::new(Error::Foreign))),
    })
}
