//! The port that makes host memory reachable for a device.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use dmalane_addr::{Access, Iova, Lease, PhysAddr, SgTable, Span};

use crate::{AnonHeap, BufferRef, BufferSlice, Error, Heap, PageKind, process_id};

/// Makes host memory reachable for a device: pins it, maps it, and offers a heap whose memory can be mapped.
///
/// Every device has one. All methods may be called from several threads.
pub trait Registrar: Send + Sync {
    /// Pins whole 4 KiB pages of a buffer: they do not move until the result is dropped.
    ///
    /// # Errors
    /// [`Error::BadRange`]; [`Error::OutOfFrames`] and the like when the host cannot hold that much.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error>;

    /// Maps pinned buffers, or ranges of one, one behind the other at contiguous IOVAs of the registrar's choice, until
    /// the result is dropped.
    ///
    /// # Errors
    /// When no IOVAs or no page tables are left, or a buffer was pinned elsewhere; [`Error::WholeBuffers`] for an empty
    /// list, and for several where the registrar maps one at a time.
    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, Error>;

    /// As [`Registrar::pin_range`], all of a buffer.
    ///
    /// # Errors
    /// Those of [`Registrar::pin_range`].
    fn pin(&self, buffer: &BufferRef) -> Result<Pinned, Error> {
        self.pin_range(buffer, 0..buffer.len())
    }

    /// As [`Registrar::map_list`], one pinned buffer.
    ///
    /// # Errors
    /// Those of [`Registrar::map_list`].
    fn map(&self, pinned: Pinned, access: Access) -> Result<Mapping, Error> {
        self.map_list(vec![pinned], access)
    }

    /// True when this registrar created the mapping. IOVAs of another registrar are meaningless here.
    fn owns(&self, mapping: &Mapping) -> bool;

    /// A heap whose memory this device can reach, with pages of at most the kind `best`; `None` for the default.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(best.map_or_else(AnonHeap::new, AnonHeap::starting_at))
    }
}

/// The cleanup of [`Pinned`] and [`Mapping`]; implemented by each registrar.
pub trait Undo: Send + Sync {
    /// Removes a mapping and frees its IOVAs. True when the device can no longer access the memory. After `false` the
    /// memory is leaked, as by [`Pinned::leak`].
    #[must_use]
    fn unmap(&self, lease: Lease<Iova>) -> bool;

    /// Releases pinned pages, which are no longer mapped.
    fn unpin(&self, pages: &SgTable<PhysAddr>);
}

/// A pinned buffer, or a pinned range of one. Holds a reference to the memory; unpins on drop.
pub struct Pinned {
    buffer: BufferRef,
    range: Range<usize>,
    pages: Option<SgTable<PhysAddr>>,
    owner: Arc<dyn Undo>,
    /// True when a device may write; then `buffer` counts it as a writer.
    writable: bool,
    /// The memory stays pinned and shared after this is dropped.
    leaked: bool,
    /// The process that pinned it. A child of `fork` undoes nothing: it has a copy, and the device is its parent's.
    process: u32,
}

impl Pinned {
    /// For registrars: wraps a range of a buffer that has just been pinned; dropping the result unpins it. `pages` is
    /// the scatter-gather table, or `None` where the registrar does not know it (a kernel that pins and maps in one
    /// step).
    pub fn new(buffer: BufferRef, range: Range<usize>, pages: Option<SgTable<PhysAddr>>, owner: Arc<dyn Undo>) -> Self {
        Self { buffer, range, pages, owner, writable: false, leaked: false, process: process_id() }
    }

    /// For registrars: checks a list that `owner` is to map, [admits](Pinned::admit) the access, and gives the bytes.
    ///
    /// # Errors
    /// [`Error::WholeBuffers`] for an empty list, [`Error::ForeignPin`]; [`Error::NoAccess`], also for writing to
    /// memory that can only be read.
    pub fn admit_all<T>(list: &mut [Self], owner: &Arc<T>, access: Access) -> Result<u64, Error> {
        if list.is_empty() {
            return Err(Error::WholeBuffers);
        }
        if list.iter().any(|pinned| !pinned.is_from(owner)) {
            return Err(Error::ForeignPin);
        }
        let read_only = |pinned: &Self| pinned.buffer.is_read_only();
        if !access.intersects(Access::RW) || access.contains(Access::WRITE) && list.iter().any(read_only) {
            return Err(Error::NoAccess(access));
        }
        list.iter_mut().for_each(|pinned| pinned.admit(access));
        // The buffers exist, so the sum does not overflow.
        Ok(list.iter().map(|pinned| pinned.range.len() as u64).sum())
    }

    /// The pinned range of the buffer, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Offset of a slice from the first pinned byte; `None` when the slice is not completely pinned here.
    #[inline]
    fn place_of(&self, slice: &BufferSlice) -> Option<u64> {
        let inside = self.buffer.holds(slice) && slice.offset() >= self.range.start;
        (inside && slice.offset() + slice.len() <= self.range.end).then(|| (slice.offset() - self.range.start) as u64)
    }

    /// A reference to the memory.
    pub fn reference(&self) -> &BufferRef {
        &self.buffer
    }

    /// The physical pages, where the registrar knows them.
    pub fn pages(&self) -> Option<&SgTable<PhysAddr>> {
        self.pages.as_ref()
    }

    /// Announces that a device will get this access. A registrar calls it *before* the device can use it. For write
    /// access, [`BufferSlice::with_bytes`] refuses the memory until this is dropped, and the call waits for borrows in
    /// progress.
    pub fn admit(&mut self, access: Access) {
        if access.contains(Access::WRITE) && !self.writable {
            self.buffer.admit_writer();
            self.writable = true;
        }
    }

    /// Leaks the memory, because a device may still access it: it stays pinned and is never freed or reused. If the
    /// device may write, it is also never borrowed as a slice of bytes.
    pub fn leak(&mut self) {
        self.leaked = true;
    }

    /// True when `owner` created this.
    #[inline]
    pub fn is_from<T>(&self, owner: &Arc<T>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.owner), Arc::as_ptr(owner))
    }
}

/// Memory that devices may access until this process ends.
static LEAKED: Mutex<Vec<BufferRef>> = Mutex::new(Vec::new());

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.process != process_id() {
            return;
        }
        if self.leaked {
            return LEAKED.lock().unwrap_or_else(PoisonError::into_inner).push(self.buffer.clone());
        }
        if let Some(pages) = &self.pages {
            self.owner.unpin(pages);
        }
        if self.writable {
            self.buffer.retire_writer();
        }
    }
}

debug_as!(Pinned, |it| "Pinned {{ buffer: {:?}, .. }}", it.buffer);

/// A buffer that the device can reach at contiguous IOVAs. Unmaps, then unpins, on drop.
#[derive(Debug)]
pub struct Mapping {
    span: Span<Iova>,
    /// The lease of `span`; `None` only during drop.
    lease: Option<Lease<Iova>>,
    access: Access,
    /// Dropped after `Mapping::drop` has unmapped: the pages stay pinned until then.
    pinned: Pinned,
    /// Further buffers, mapped after the first.
    more: Vec<Pinned>,
}

impl Mapping {
    /// For registrars: wraps a mapping of these buffers that has just been established. `lease` is its IOVA range, as
    /// long as all of them; dropping the result unmaps it.
    ///
    /// # Panics
    /// When the list is empty.
    pub fn new(list: Vec<Pinned>, lease: Lease<Iova>, access: Access) -> Self {
        let mut list = list.into_iter();
        let mut pinned = list.next().expect("a mapping has a buffer");
        let mut more: Vec<Pinned> = list.collect();
        pinned.admit(access);
        more.iter_mut().for_each(|pinned| pinned.admit(access));
        Self { span: lease.span(), lease: Some(lease), access, pinned, more }
    }

    /// The IOVA range of the mapping.
    #[inline]
    pub fn span(&self) -> Span<Iova> {
        self.span
    }

    /// Access that the device has.
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The first mapped buffer.
    #[inline]
    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// The IOVA range of a buffer slice; `None` when the slice is empty or not within one of the mapped buffers.
    #[inline]
    pub fn iova_of(&self, slice: &BufferSlice) -> Option<Span<Iova>> {
        match self.pinned.place_of(slice) {
            Some(place) => self.span.sub(place, slice.len() as u64),
            None => self.iova_of_more(slice),
        }
    }

    fn iova_of_more(&self, slice: &BufferSlice) -> Option<Span<Iova>> {
        let mut before = self.pinned.range.len() as u64;
        self.more.iter().find_map(|pinned| {
            let place = pinned.place_of(slice).map(|place| before + place);
            before += pinned.range.len() as u64;
            self.span.sub(place?, slice.len() as u64)
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take().filter(|_| self.pinned.process == process_id())
            && !self.pinned.owner.unmap(lease)
        {
            self.pinned.leak();
            self.more.iter_mut().for_each(Pinned::leak);
        }
    }
}
