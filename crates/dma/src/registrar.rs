//! The port that makes host memory reachable for a device.

use std::ops::Range;
use std::sync::Arc;

use dmalane_addr::{Access, Iova, Lease, PhysAddr, SgTable, Span};

use crate::{AnonHeap, BufferRef, BufferSlice, Error, Heap, PageKind};

/// Makes host memory reachable for a device: pins it, maps it, and offers a heap whose memory can be mapped.
///
/// Every device has one. All methods may be called from several threads.
pub trait Registrar: Send + Sync {
    /// Pins a buffer: its pages stay where they are until the result is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfFrames`] and the like when the host cannot hold that much.
    fn pin(&self, buffer: &BufferRef) -> Result<Pinned, Error>;

    /// Maps a pinned buffer at IOVAs of the registrar's choice, contiguous, until the result is dropped.
    ///
    /// # Errors
    /// When no IOVAs or no page tables are left, or the buffer was pinned elsewhere.
    fn map(&self, pinned: Pinned, access: Access) -> Result<Mapping, Error>;

    /// As [`Registrar::pin`], only these bytes of the buffer: whole 4 KiB pages.
    ///
    /// # Errors
    /// Those of [`Registrar::pin`]; [`Error::BadRange`], [`Error::WholeBuffers`].
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        if range == (0..buffer.len()) { self.pin(buffer) } else { Err(Error::WholeBuffers) }
    }

    /// As [`Registrar::map`], several pinned buffers, or ranges of one, one behind the other at contiguous IOVAs.
    ///
    /// # Errors
    /// Those of [`Registrar::map`]; [`Error::WholeBuffers`], also for an empty list.
    fn map_list(&self, mut pinned: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        match (pinned.pop(), pinned.is_empty()) {
            (Some(only), true) => self.map(only, access),
            _ => Err(Error::WholeBuffers),
        }
    }

    /// Bytes that may be pinned at one time, all buffers together, as far as the registrar knows (RLIMIT_MEMLOCK).
    fn pin_limit(&self) -> Option<u64> {
        None
    }

    /// True when this registrar made the mapping: an IOVA of another one means something else here.
    fn owns(&self, mapping: &Mapping) -> bool;

    /// Memory that this device can reach, in pages of at most the kind `best`; `None` for the best there are.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(best.map_or_else(AnonHeap::new, AnonHeap::starting_at))
    }
}

/// How a [`Pinned`] or [`Mapping`] undoes itself; implemented by each registrar.
pub trait Undo: Send + Sync {
    /// Removes a mapping and takes its addresses back. When this returns, the device can no longer reach it.
    fn unmap(&self, lease: Lease<Iova>);

    /// Releases pinned pages, which are no longer mapped.
    fn unpin(&self, pages: &SgTable<PhysAddr>);
}

/// A buffer, or a range of one, whose pages stay where they are. Holds a reference to the memory; unpins on drop.
pub struct Pinned {
    buffer: BufferRef,
    range: Range<usize>,
    pages: Option<SgTable<PhysAddr>>,
    owner: Arc<dyn Undo>,
    /// A device may write: the reference counts it.
    writable: bool,
}

impl Pinned {
    /// Made by the registrar that has pinned `pages`, once, and by nobody else: dropping it unpins them. `pages` is the
    /// scatter-gather table where the registrar knows it; a kernel that pins and maps in one step tells nobody.
    pub fn new(buffer: BufferRef, pages: Option<SgTable<PhysAddr>>, owner: Arc<dyn Undo>) -> Self {
        let range = 0..buffer.len();
        Self { buffer, range, pages, owner, writable: false }
    }

    /// The same for a range of the buffer, which lies within it.
    pub fn of_range(
        buffer: BufferRef,
        range: Range<usize>,
        pages: Option<SgTable<PhysAddr>>,
        owner: Arc<dyn Undo>,
    ) -> Self {
        Self { buffer, range, pages, owner, writable: false }
    }

    /// Which bytes of the memory.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Where a part lies behind the first pinned byte; `None` when it is not all pinned here.
    #[inline]
    fn place_of(&self, part: &BufferSlice) -> Option<u64> {
        let inside = self.buffer.holds(part) && part.offset() >= self.range.start;
        (inside && part.offset() + part.len() <= self.range.end).then(|| (part.offset() - self.range.start) as u64)
    }

    /// A reference to the memory.
    pub fn reference(&self) -> &BufferRef {
        &self.buffer
    }

    /// The physical pages, where the registrar knows them.
    pub fn pages(&self) -> Option<&SgTable<PhysAddr>> {
        self.pages.as_ref()
    }

    /// Announces that a device is going to have this access. A registrar calls it *before* the device has it; until
    /// this is dropped nobody borrows the memory as a slice. Waits while somebody does.
    pub fn admit(&mut self, access: Access) {
        if access.contains(Access::WRITE) && !self.writable {
            self.buffer.admit_writer();
            self.writable = true;
        }
    }

    /// True when `owner` made this.
    #[inline]
    pub fn is_from<T>(&self, owner: &Arc<T>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.owner), Arc::as_ptr(owner))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(pages) = &self.pages {
            self.owner.unpin(pages);
        }
        if self.writable {
            self.buffer.retire_writer();
        }
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

/// A buffer that the device can reach at contiguous IOVAs. Unmaps, then unpins, on drop.
#[derive(Debug)]
pub struct Mapping {
    span: Span<Iova>,
    /// Of `span`; `None` only while it is dropped.
    lease: Option<Lease<Iova>>,
    access: Access,
    /// Dropped after `Mapping::drop` has unmapped: the pages stay pinned until then.
    pinned: Pinned,
    /// What follows behind it.
    more: Vec<Pinned>,
}

impl Mapping {
    /// Made by the registrar that has pinned the pages, once the range of `lease` translates to them, and by nobody
    /// else: dropping it unmaps the range. The range is as long as the buffer.
    pub fn new(mut pinned: Pinned, lease: Lease<Iova>, access: Access) -> Self {
        pinned.admit(access);
        Self { span: lease.span(), lease: Some(lease), access, pinned, more: Vec::new() }
    }

    /// The same for several, one behind the other, the first of which is `pinned`: the range is as long as all of them
    /// together.
    pub fn of_list(pinned: Pinned, mut more: Vec<Pinned>, lease: Lease<Iova>, access: Access) -> Self {
        more.iter_mut().for_each(|p| p.admit(access));
        let mut this = Self::new(pinned, lease, access);
        this.more = more;
        this
    }

    /// Where the device sees the buffer.
    #[inline]
    pub fn span(&self) -> Span<Iova> {
        self.span
    }

    /// What the device may do.
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }

    /// What is mapped: the first of what is.
    #[inline]
    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// All that is mapped, in order.
    pub fn all_pinned(&self) -> impl Iterator<Item = &Pinned> {
        std::iter::once(&self.pinned).chain(&self.more)
    }

    /// Where the device sees a part of the memory; `None` when the part is empty or does not lie in one of the buffers
    /// that are mapped.
    #[inline]
    pub fn iova_of(&self, part: &BufferSlice) -> Option<Span<Iova>> {
        match self.pinned.place_of(part) {
            Some(place) => self.span.sub(place, part.len() as u64),
            None => self.iova_of_more(part),
        }
    }

    fn iova_of_more(&self, part: &BufferSlice) -> Option<Span<Iova>> {
        let mut before = self.pinned.range.len() as u64;
        self.more.iter().find_map(|pinned| {
            let place = pinned.place_of(part).map(|place| before + place);
            before += pinned.range.len() as u64;
            self.span.sub(place?, part.len() as u64)
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.pinned.owner.unmap(lease);
        }
    }
}
