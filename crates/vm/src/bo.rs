//! Buffer objects.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::any::Any;
use core::ops::Deref;
use core::sync::atomic::{AtomicUsize, Ordering};

use dmalane_addr::{CardAddr, PageSize, Segment, SgError, SgIndex};

/// A buffer object: card memory that a device program sees through bindings. Bindings hold it by `Arc`, so it lives as
/// long as it is bound anywhere, and every VM that binds it uses the same index of its segments.
#[derive(Debug)]
pub struct Bo {
    id: u64,
    sg: SgIndex<CardAddr>,
    /// The highest address.
    top: u64,
    owner: Option<Box<dyn Any + Send + Sync>>,
    /// Number of [`BoundBo`] that hold it for VMs.
    bound: AtomicUsize,
}

/// A buffer that is bound, or was until the device forgets it.
#[derive(Debug)]
pub(crate) struct BoundBo(Arc<Bo>);

impl BoundBo {
    pub(crate) fn new(bo: &Arc<Bo>) -> Self {
        bo.bound.fetch_add(1, Ordering::Relaxed);
        Self(bo.clone())
    }
}

impl Drop for BoundBo {
    fn drop(&mut self) {
        self.0.bound.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Deref for BoundBo {
    type Target = Arc<Bo>;

    #[inline]
    fn deref(&self) -> &Arc<Bo> {
        &self.0
    }
}

impl Bo {
    /// The buffer made of these segments. The id is the caller's and appears in messages.
    ///
    /// Segments need not be whole pages here; a bind that would use one that is not is refused.
    pub fn new(id: u64, sg: SgIndex<CardAddr>) -> Self {
        let last = |s: Segment<CardAddr>| s.addr.bits() + (s.len - 1); // a segment of an index does not wrap
        let top = sg.segments().map(last).max().unwrap_or(0);
        Self { id, sg, top, owner: None, bound: AtomicUsize::new(0) }
    }

    /// The same buffer with something that owns its memory, and is dropped when that may be used again: when the last
    /// reference is gone, and every device has forgotten the last binding
    /// ([`Vm::invalidated`](crate::Vm::invalidated)).
    #[must_use]
    pub fn with_owner(self, owner: impl Any + Send + Sync) -> Self {
        Self { owner: Some(Box::new(owner)), ..self }
    }

    /// In how many VMs it is bound. A VM counts until its device has forgotten the last binding
    /// ([`Vm::invalidated`](crate::Vm::invalidated)), and once more for each page size in which it repeats the buffer.
    pub fn bound_vms(&self) -> usize {
        self.bound.load(Ordering::Relaxed)
    }

    /// The owner of its memory, if that is a `T`.
    pub fn owner<T: Any>(&self) -> Option<&T> {
        self.owner.as_deref()?.downcast_ref()
    }

    /// The same, with the index made of a list of segments.
    ///
    /// # Errors
    /// Any of [`SgError`].
    pub fn of_segments(
        id: u64,
        segments: impl IntoIterator<Item = Segment<CardAddr>>,
    ) -> Result<Self, SgError<CardAddr>> {
        Ok(Self::new(id, SgIndex::try_new(segments)?))
    }

    /// The id it was made with.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where its bytes are.
    #[inline]
    pub fn sg(&self) -> &SgIndex<CardAddr> {
        &self.sg
    }

    /// Bytes in all.
    #[allow(clippy::len_without_is_empty)] // an empty one is of no use, but nothing depends on it
    #[inline]
    pub fn len(&self) -> u64 {
        self.sg.len()
    }

    /// True when all of it is made of whole pages of this size, fewer than `pages`, at addresses of `bits` bits.
    #[inline]
    pub(crate) fn is_mappable(&self, granule: PageSize, bits: u32, pages: u64) -> bool {
        let whole = self.sg.granule() >= granule && self.len() & (granule.bytes() - 1) == 0;
        whole && self.top >> bits == 0 && self.len() >> granule.log2() < pages
    }
}
