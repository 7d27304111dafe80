//! Fragments: consecutive bytes of a buffer, on their way from the read to the sink.

use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_dma::BufferSlice;
use dmalane_queue::Registered;

use super::landing::Landed;

/// Consecutive bytes of a buffer, and the memory that they are in.
pub(super) struct Fragment {
    pub tag: Tag,
    pub slice: BufferSlice,
}

/// Identifies the bytes of a fragment.
#[derive(Clone)]
pub(super) struct Tag {
    pub buffer: usize,
    /// From where on in the buffer.
    pub offset: usize,
    /// Whether they are of an extent, and read; all others are zero.
    pub is_read: bool,
    /// The slot that the memory goes back to, of staging memory; none of memory that is the source's own.
    pub slot: Option<usize>,
    /// The registration of the memory.
    pub via: Option<Registered>,
    /// The chunk that the bytes are still to be copied to.
    pub landed: Option<Arc<Landed>>,
}

/// A fragment to be read.
pub(super) struct Read {
    pub source: usize,
    pub at: FileOffset,
    pub fragment: Fragment,
}

impl Fragment {
    /// Splits off the first `len` bytes; `None`, without any change, when there are fewer.
    pub fn split_off_front(&mut self, len: usize) -> Option<Self> {
        let slice = self.slice.split_off_front(len)?;
        let tag = self.tag.clone();
        self.tag.offset += len;
        Some(Self { tag, slice })
    }

    /// Where it ends in the buffer.
    pub fn end(&self) -> usize {
        self.tag.offset + self.slice.len()
    }
}
