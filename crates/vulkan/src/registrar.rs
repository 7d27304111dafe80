//! Host memory that the GPU reaches: imported where it lies, or, where the driver cannot do that, its own.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use dmalane_device::NoIommu;
use dmalane_dma::{BufferRef, DriverHeap, DriverMemory, Error as DmaError, Heap, lock};

use crate::error::Error;
use crate::gpu::{Buffer, Gpu};

/// Registers host memory by importing it; without import, that of a heap of the driver's memory.
pub(crate) type Importer = NoIommu<Vec<Import>>;

/// A part of a registered range.
pub(crate) struct Import {
    /// Its bytes of the range.
    pub bytes: Range<u64>,
    pub buffer: Arc<Buffer>,
    /// The offset of the first byte in the buffer.
    pub offset: u64,
    /// The address of the first byte in this process.
    pub address: u64,
}

/// The registrar of a GPU.
pub(crate) fn importer(gpu: &Arc<Gpu>) -> Importer {
    let imports = Arc::new(Imports { gpu: gpu.clone(), own: Mutex::default() });
    let of = |e| DmaError::Backend(Box::new(e));
    let driver = || -> Arc<dyn Heap> {
        let imports = imports.clone();
        let allocate = move |len| imports.allocate(len).map_err(of);
        Arc::new(DriverHeap::new("the GPU driver's host memory", allocate))
    };
    let heap = gpu.import_align().is_none().then(driver);
    NoIommu::calling(heap, move |memory, range| imports.import(memory, range).map_err(of))
}

struct Imports {
    gpu: Arc<Gpu>,
    /// The driver's memory that buffers are made of, by address in this process.
    own: Mutex<BTreeMap<usize, Weak<Buffer>>>,
}

impl Imports {
    /// The driver's memory that a buffer is made of, and where in it the buffer begins.
    fn own(&self, memory: &BufferRef) -> Option<(Arc<Buffer>, u64)> {
        let (first, own) = (memory.address(), lock(&self.own));
        let (start, buffer) = own.range(..=first).next_back()?;
        let (buffer, offset) = (buffer.upgrade()?, (first - start) as u64);
        let inside = offset.checked_add(memory.len() as u64).is_some_and(|end| end <= buffer.len());
        inside.then_some((buffer, offset))
    }

    /// Allocates memory of the driver.
    fn allocate(&self, len: usize) -> Result<Box<dyn DriverMemory>, Error> {
        let memory = self.gpu.host_memory(len as u64)?;
        let (at, buffer) = (memory.span().0.addr().get(), Arc::downgrade(memory.buffer()));
        let mut own = lock(&self.own);
        own.retain(|_, buffer| buffer.strong_count() > 0);
        own.insert(at, buffer);
        Ok(Box::new(memory))
    }

    /// Imports a range of a buffer: by its address, or, where the driver refuses that, as a dma-buf. A driver may
    /// refuse pages of a file by their address, and those of a dma-buf cannot be pinned.
    fn import(&self, memory: &BufferRef, range: Range<usize>) -> Result<Vec<Import>, Error> {
        let by_address = match self.import_by_address(memory, range.clone()) {
            Err(e) if self.gpu.info().dma_buf_import && !matches!(e, Error::Lost(_)) => e,
            done => return done,
        };
        let (buffer, offset) = self
            .dma_buf_of(memory, range.clone())
            .map_err(Error::Descriptor)
            .and_then(|(fd, has)| Ok((self.gpu.import_dma_buf(memory, has.len(), fd)?, range.start - has.start)))
            .map_err(|e| match e {
                Error::Lost(_) => e,
                e => Error::Import { by_address: Box::new(by_address), as_dma_buf: Box::new(e) },
            })?;
        let address = (memory.address() + range.start) as u64;
        Ok(vec![Import { bytes: 0..range.len() as u64, buffer, offset: offset as u64, address }])
    }

    /// A dma-buf of a range of the buffer's memory, and what it has of that. For tests the memfd itself, where there is
    /// no udmabuf: GPUs in software map one like a dma-buf.
    fn dma_buf_of(&self, memory: &BufferRef, range: Range<usize>) -> std::io::Result<(OwnedFd, Range<usize>)> {
        let made = dmalane_dma::export_dma_buf_range(memory, range);
        #[cfg(test)]
        if made.is_err() && self.gpu.info().kind == "software GPU" {
            let fd = memory.export().map_err(std::io::Error::other)?.try_clone_to_owned()?;
            return Ok((fd, 0..memory.len()));
        }
        made
    }

    /// Imports a range in as many buffers as the GPU's limits ask for.
    fn import_by_address(&self, memory: &BufferRef, range: Range<usize>) -> Result<Vec<Import>, Error> {
        let base = memory.address() as u64;
        let (start, end) = (base + range.start as u64, base + range.end as u64);
        let Some(align) = self.gpu.import_align() else {
            let (buffer, offset) = self.own(memory).ok_or(Error::ForeignMemory)?;
            let offset = offset + range.start as u64;
            return Ok(vec![Import { bytes: 0..end - start, buffer, offset, address: start }]);
        };
        let info = self.gpu.info();
        let most = info.max_allocation.min(info.max_buffer) / align * align;
        let (mut imports, mut at) = (Vec::new(), start);
        while at < end {
            // Whole multiples of the alignment, as far as they belong to the memory.
            let first = at / align * align;
            let last = end.next_multiple_of(align).min(first.saturating_add(most.max(align)));
            let offset = first.checked_sub(base).ok_or(Error::Misaligned { align, address: first as usize })?;
            let buffer = self.gpu.import(memory, offset as usize, (last - first) as usize)?;
            let bytes = at - start..last.min(end) - start;
            imports.push(Import { bytes, buffer, offset: at - first, address: at });
            at = last.min(end);
        }
        Ok(imports)
    }
}
