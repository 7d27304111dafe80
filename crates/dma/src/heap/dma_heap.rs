//! The kernel's DMA buffers: dma-buf heaps, and memfds wrapped as dma-bufs.

use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use super::{Heap, HeapCapabilities, Reserved};
use crate::account::{Account, Counters};
use crate::sys::{Region, page, udmabuf_create};
use crate::{BufferRef, Error, HeapStats, PageBacking, PageKind};

const UDMABUF: &str = "/dev/udmabuf";
/// Module parameter: largest buffer that udmabuf accepts, in MiB.
const SIZE_LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";

/// A heap of the kernel, `/dev/dma_heap/NAME`, whose buffers are dma-bufs that drivers import.
///
/// Their mappings support neither direct I/O nor io_uring registration (both `EFAULT`). For direct reads use a memfd,
/// which [`export_dma_buf`] wraps afterwards.
pub struct DmaHeap {
    device: File,
    counters: Arc<Counters>,
}

impl DmaHeap {
    /// Opens the heap with this name; `system` exists on every kernel with dma-buf heaps.
    ///
    /// # Errors
    /// The kernel's, with the path: `NotFound` on a kernel without dma-buf heaps.
    pub fn open(name: &str) -> io::Result<Self> {
        let path = PathBuf::from("/dev/dma_heap").join(name);
        let device = File::open(&path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        Ok(Self { device, counters: Arc::default() })
    }
}

impl Heap for DmaHeap {
    /// Allocates a dma-buf, whose pages are all present from the start.
    fn reserve(&self, len: usize) -> Result<Reserved, Error> {
        let size = len.checked_next_multiple_of(page()).and_then(NonZeroUsize::new).ok_or(Error::BadLength(len))?;
        let kind = "dma-buf heap memory";
        // The kernel (6.12, 7.2) allocates until the OOM killer acts, and does not charge this memory to the process,
        // so the OOM killer would choose the wrong one.
        if let Some(room) = crate::room().filter(|room| room.bytes < size.get() as u64) {
            let left = format!("{} bytes are left, limited by {}", room.bytes, room.limited_by);
            return Err(Error::Allocate { len, kind, source: io::Error::new(io::ErrorKind::OutOfMemory, left) });
        }
        let region =
            Region::dma_buf(self.device.as_fd(), size).map_err(|source| Error::Allocate { len, kind, source })?;
        let account = Account::open(&self.counters, region.len());
        Ok(Reserved::present(region, PageBacking::base(), account))
    }

    fn capabilities(&self) -> HeapCapabilities {
        HeapCapabilities { shareable: true, dma_buf: true, best_pages: PageKind::Base }
    }

    fn stats(&self) -> HeapStats {
        self.counters.stats()
    }

    fn name(&self) -> &'static str {
        "dma-heap"
    }
}

/// True when this process can wrap memfds as dma-bufs.
pub(super) fn has_udmabuf() -> bool {
    use rustix::fs::{Access, access};
    access(UDMABUF, Access::READ_OK | Access::WRITE_OK).is_ok()
}

/// A dma-buf of the memory, which drivers import: its own one, or the pages of a memfd, wrapped. From then on the
/// memory counts as exported.
///
/// # Errors
/// `Unsupported` for memory without a descriptor; `ResourceBusy` while its bytes are lent. For a memfd: `NotFound` when
/// the kernel has no `/dev/udmabuf`; `InvalidInput` for one larger than `size_limit_mb` of the module udmabuf (64 MiB
/// by default).
pub fn export_dma_buf(memory: &BufferRef) -> io::Result<OwnedFd> {
    export_dma_buf_range(memory, 0..memory.len()).map(|(fd, _)| fd)
}

/// A dma-buf of a range of the memory, and what it has of the memory: all of it, where that is a dma-buf; of a memfd
/// only the pages of the range, so that a memfd can be larger than a udmabuf.
///
/// # Errors
/// As [`export_dma_buf`], the limit being that of the range; `InvalidInput` for a range that is empty or not in the
/// memory.
pub fn export_dma_buf_range(memory: &BufferRef, range: Range<usize>) -> io::Result<(OwnedFd, Range<usize>)> {
    if range.is_empty() || range.end > memory.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{UDMABUF}: {e}"));
    // Only dma-bufs take this, and an access that ends at once has no effect.
    let own = memory.0.region.sync(true, false).and_then(|()| memory.0.region.sync(false, false)).is_ok();
    // Before the memory counts as exported: it would not be without this.
    let udmabuf = if own { None } else { Some(File::options().read(true).write(true).open(UDMABUF).map_err(named)?) };
    let fd = memory.export().map_err(|e| match e {
        Error::Borrowed => io::Error::new(io::ErrorKind::ResourceBusy, e),
        e => io::Error::new(io::ErrorKind::Unsupported, e),
    })?;
    let Some(device) = udmabuf else { return Ok((fd.try_clone_to_owned()?, 0..memory.len())) };
    let (start, end) = (range.start / page() * page(), range.end.next_multiple_of(page()).min(memory.len()));
    let len = end - start;
    let made = udmabuf_create(device.as_fd(), fd, start as u64, len as u64).map_err(|e| {
        let limit = fs::read_to_string(SIZE_LIMIT).ok().and_then(|text| text.trim().parse::<usize>().ok());
        match limit {
            Some(mib) if e.raw_os_error() == Some(libc::EINVAL) && len > mib << 20 => {
                let why = format!(
                    "{UDMABUF} accepts at most {mib} MiB, but the buffer has {len} bytes (as root: echo MIB > \
                     {SIZE_LIMIT})"
                );
                io::Error::new(e.kind(), why)
            }
            _ => named(e),
        }
    })?;
    Ok((made, start..end))
}
