//! Host memory that the GPU reaches: imported where it lies, or, where the driver cannot do that, its own.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{
    AnonHeap, BufferRef, DriverHeap, DriverMemory, Error as DmaError, Heap, Mapping, PageKind, Pinned, Registrar, Undo,
};

use crate::error::Error;
use crate::gpu::{Buffer, Gpu};

/// Registers host memory by importing it; without import, that of a heap of the driver's memory. IOVAs are only names,
/// no two of which are ever the same.
#[derive(Clone)]
pub(crate) struct Importer(Arc<Imports>);

struct Imports {
    gpu: Arc<Gpu>,
    state: Mutex<State>,
}

struct State {
    iovas: RangeCache<Iova>,
    next: u64,
    live: BTreeMap<u64, Vec<Import>>,
    /// The driver's memory that buffers are made of, by address in this process.
    own: BTreeMap<usize, Weak<Buffer>>,
}

/// A part of a registration.
struct Import {
    /// From its first IOVA to behind its last.
    start: u64,
    end: u64,
    buffer: Arc<Buffer>,
    /// The offset of the first byte in the buffer.
    offset: u64,
    /// The address of the first byte in this process.
    address: u64,
}

/// As many addresses as user space has.
const SPACE: u64 = 1 << 56;

/// The imported memory, locked.
pub(crate) struct Imported<'a>(MutexGuard<'a, State>);

impl Imported<'_> {
    /// Calls `each` with the buffers behind a range: buffer, offset in it, address in this process, bytes. False when
    /// the range is not registered.
    pub fn resolve(&self, range: Span<Iova>, mut each: impl FnMut(&Arc<Buffer>, u64, u64, u64)) -> bool {
        let (mut at, mut left) = (range.first().bits(), range.len());
        let Some((_, imports)) = self.0.live.range(..=at).next_back() else { return false };
        for import in imports {
            if left == 0 {
                break;
            }
            if at >= import.start && at < import.end {
                let (within, here) = (at - import.start, left.min(import.end - at));
                each(&import.buffer, import.offset + within, import.address + within, here);
                (at, left) = (at + here, left - here);
            }
        }
        left == 0
    }
}

impl Importer {
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        let space = Span::new(Iova::new(0), SPACE).expect("a constant span");
        let iovas = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
        let state = State { iovas, next: 0, live: BTreeMap::new(), own: BTreeMap::new() };
        Self(Arc::new(Imports { gpu: gpu.clone(), state: Mutex::new(state) }))
    }

    pub fn imported(&self) -> Imported<'_> {
        Imported(self.0.lock())
    }

    fn owner(&self) -> Arc<dyn Undo> {
        self.0.clone()
    }
}

impl Imports {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver's memory that a buffer is made of, and where in it the buffer begins.
    fn own(&self, memory: &BufferRef) -> Option<(Arc<Buffer>, u64)> {
        let (first, state) = (memory.address(), self.lock());
        let (start, buffer) = state.own.range(..=first).next_back()?;
        let (buffer, offset) = (buffer.upgrade()?, (first - start) as u64);
        let inside = offset.checked_add(memory.len() as u64).is_some_and(|end| end <= buffer.len());
        inside.then_some((buffer, offset))
    }

    /// Allocates memory of the driver.
    fn allocate(&self, len: usize) -> Result<Box<dyn DriverMemory>, Error> {
        let memory = self.gpu.host_memory(len as u64)?;
        let (at, buffer) = (memory.span().0.addr().get(), Arc::downgrade(memory.buffer()));
        let mut state = self.lock();
        state.own.retain(|_, buffer| buffer.strong_count() > 0);
        state.own.insert(at, buffer);
        Ok(Box::new(memory))
    }

    /// Imports a pinned range, whose first IOVA is `start`: by its address, or, where the driver refuses that, as a
    /// dma-buf. A driver may refuse pages of a file by their address, and those of a dma-buf cannot be pinned.
    fn import(&self, pinned: &Pinned, start: u64, into: &mut Vec<Import>) -> Result<(), Error> {
        let first = into.len();
        let by_address = match self.import_by_address(pinned, start, into) {
            Err(e) if self.gpu.info().dma_buf_import && !matches!(e, Error::Lost(_)) => e,
            done => return done,
        };
        into.truncate(first);
        let (memory, range) = (pinned.reference(), pinned.range());
        let (buffer, offset) = self
            .dma_buf_of(memory, range.clone())
            .map_err(Error::Descriptor)
            .and_then(|(fd, has)| Ok((self.gpu.import_dma_buf(memory, has.len(), fd)?, range.start - has.start)))
            .map_err(|e| match e {
                Error::Lost(_) => e,
                e => Error::Import { by_address: Box::new(by_address), as_dma_buf: Box::new(e) },
            })?;
        let (end, address) = (start + range.len() as u64, (memory.address() + range.start) as u64);
        into.push(Import { start, end, buffer, offset: offset as u64, address });
        Ok(())
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

    /// Imports a pinned range in as many buffers as the GPU's limits ask for.
    fn import_by_address(&self, pinned: &Pinned, start: u64, into: &mut Vec<Import>) -> Result<(), Error> {
        let (memory, range) = (pinned.reference(), pinned.range());
        let base = memory.address() as u64;
        let Some(align) = self.gpu.import_align() else {
            let (buffer, offset) = self.own(memory).ok_or(Error::ForeignMemory)?;
            let (end, at) = (start + range.len() as u64, range.start as u64);
            into.push(Import { start, end, buffer, offset: offset + at, address: base + at });
            return Ok(());
        };
        let info = self.gpu.info();
        let most = info.max_allocation.min(info.max_buffer) / align * align;
        let (mut at, end) = (base + range.start as u64, base + range.end as u64);
        while at < end {
            // Whole multiples of the alignment, as far as they belong to the memory.
            let first = at / align * align;
            let last = end.next_multiple_of(align).min(first.saturating_add(most.max(align)));
            let offset = first.checked_sub(base).ok_or(Error::Misaligned { align, address: first as usize })?;
            let buffer = self.gpu.import(memory, offset as usize, (last - first) as usize)?;
            let here = last.min(end) - at;
            let start = start + (at - base - range.start as u64);
            into.push(Import { start, end: start + here, buffer, offset: at - first, address: at });
            at += here;
        }
        Ok(())
    }
}

impl Undo for Imports {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        let mut state = self.lock();
        let imports = state.live.remove(&lease.span().first().bits());
        state.iovas.free(lease);
        drop(state);
        // Without the lock: the driver unpins the pages.
        drop(imports);
        true
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl Registrar for Importer {
    /// Pins nothing: the driver does that when it imports.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, DmaError> {
        let whole = |n: usize| n.is_multiple_of(PageSize::SIZE_4K.bytes() as usize) || n == buffer.len();
        if range.start >= range.end || range.end > buffer.len() || !whole(range.start) || !whole(range.end) {
            return Err(DmaError::BadRange { range, len: buffer.len() });
        }
        Ok(Pinned::new(buffer.clone(), range, None, self.owner()))
    }

    fn map_list(&self, mut pinned: Vec<Pinned>, access: Access) -> Result<Mapping, DmaError> {
        // Before the GPU can write: nobody may hold the bytes as a plain slice.
        let bytes = Pinned::admit_all(&mut pinned, &self.0, access)?;
        let mut state = self.0.lock();
        let first = state.next;
        let len = bytes.checked_next_multiple_of(PageSize::SIZE_4K.bytes());
        let span = len.and_then(|len| Span::new(Iova::new(first), len));
        let span = span.ok_or(DmaError::BadLength(bytes as usize))?;
        let lease = state.iovas.reserve(span)?;
        state.next += span.len(); // no overflow: the span lies in a space of 2^56
        drop(state);
        let (mut imports, mut at) = (Vec::new(), first);
        for pinned in &pinned {
            if let Err(e) = self.0.import(pinned, at, &mut imports) {
                drop(imports);
                self.0.lock().iovas.free(lease);
                return Err(DmaError::Backend(Box::new(e)));
            }
            at += pinned.range().len() as u64;
        }
        self.0.lock().live.insert(first, imports);
        Ok(Mapping::new(pinned, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    fn only_own_heap(&self) -> bool {
        self.0.gpu.import_align().is_none()
    }

    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        if self.0.gpu.import_align().is_some() {
            return Arc::new(best.map_or_else(AnonHeap::new, AnonHeap::starting_at));
        }
        let imports = self.0.clone();
        let allocate = move |len| imports.allocate(len).map_err(|e| DmaError::Backend(Box::new(e)));
        Arc::new(DriverHeap::new("the GPU driver's host memory", allocate))
    }
}
