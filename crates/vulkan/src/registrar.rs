//! Host memory that the GPU reaches: imported where it lies, or, where the driver cannot do that, its own.

use std::ops::Range;
use std::sync::Arc;

use dmalane_device::NoIommu;
use dmalane_dma::{BufferRef, DriverHeap, DriverMemory, Error as DmaError, Heap};

use crate::error::Error;
use crate::gpu::{Buffer, Gpu, HostMemory};

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
    let gpu = gpu.clone();
    let of = |e| DmaError::Backend(Box::new(e));
    let driver = || -> Arc<dyn Heap> {
        let gpu = gpu.clone();
        let allocate = move |len| gpu.host_memory(len as u64).map_err(of);
        Arc::new(DriverHeap::new("the GPU driver's host memory", allocate))
    };
    let heap = gpu.import_align().is_none().then(driver);
    NoIommu::calling(heap, move |memory, range| import(&gpu, memory, range).map_err(of))
}

/// Imports a range of a buffer: by its address, or, where the driver refuses that, as a dma-buf. A driver may
/// refuse pages of a file by their address, and those of a dma-buf cannot be pinned.
fn import(gpu: &Arc<Gpu>, memory: &BufferRef, range: Range<usize>) -> Result<Vec<Import>, Error> {
    let by_address = match import_by_address(gpu, memory, range.clone()) {
        Err(e) if gpu.info().dma_buf_import && !matches!(e, Error::Lost(_)) => e,
        done => return done,
    };
    let made = dmalane_dma::export_dma_buf_range(memory, range.clone());
    // The memfd itself, where there is no udmabuf: GPUs in software map one like a dma-buf.
    #[cfg(test)]
    let made = made.or_else(|e| match gpu.info().kind {
        "software GPU" => {
            let fd = memory.export().map_err(std::io::Error::other)?.try_clone_to_owned()?;
            Ok((fd, 0..memory.len()))
        }
        _ => Err(e),
    });
    let (buffer, offset) = made
        .map_err(Error::Descriptor)
        .and_then(|(fd, has)| Ok((gpu.import_dma_buf(Some(memory), has.len() as u64, fd)?, range.start - has.start)))
        .map_err(|e| match e {
            Error::Lost(_) => e,
            e => Error::Import { by_address: Box::new(by_address), as_dma_buf: Box::new(e) },
        })?;
    let address = (memory.address() + range.start) as u64;
    Ok(vec![Import { bytes: 0..range.len() as u64, buffer, offset: offset as u64, address }])
}

/// Imports a range in as many buffers as the GPU's limits ask for.
fn import_by_address(gpu: &Arc<Gpu>, memory: &BufferRef, range: Range<usize>) -> Result<Vec<Import>, Error> {
    let base = memory.address() as u64;
    let (start, end) = (base + range.start as u64, base + range.end as u64);
    let Some(align) = gpu.import_align() else {
        let own = memory.driver().filter(|own: &&HostMemory| own.is_of(gpu)).ok_or(Error::ForeignMemory)?;
        let offset = start - own.span().0.addr().get() as u64;
        return Ok(vec![Import { bytes: 0..end - start, buffer: own.buffer().clone(), offset, address: start }]);
    };
    let info = gpu.info();
    let most = info.max_allocation.min(info.max_buffer) / align * align;
    let (mut imports, mut at) = (Vec::new(), start);
    while at < end {
        // Whole multiples of the alignment, as far as they belong to the memory.
        let first = at / align * align;
        let last = end.next_multiple_of(align).min(first.saturating_add(most.max(align)));
        let offset = first.checked_sub(base).ok_or(Error::Misaligned { align, address: first as usize })?;
        let buffer = gpu.import(memory, offset as usize, (last - first) as usize)?;
        let bytes = at - start..last.min(end) - start;
        imports.push(Import { bytes, buffer, offset: at - first, address: at });
        at = last.min(end);
    }
    Ok(imports)
}
