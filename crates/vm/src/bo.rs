//! Buffer objects.

use dmalane_addr::{CardAddr, SgTable};

/// A buffer object: card memory that a device program sees through bindings. Bindings hold it by `Arc`, so it lives as
/// long as it is bound anywhere.
#[derive(Debug)]
pub struct Bo {
    id: u64,
    sg: SgTable<CardAddr>,
    /// The addresses and lengths of all segments, joined by "or".
    alignment: u64,
    /// The highest address.
    top: u64,
}

impl Bo {
    /// The buffer made of these segments. The id is the caller's and appears in messages.
    ///
    /// Segments need not be whole pages here; a bind that would use one that is not is refused.
    pub fn new(id: u64, sg: SgTable<CardAddr>) -> Self {
        let (mut alignment, mut top) = (0, 0);
        for s in sg.segments() {
            alignment |= s.addr.bits() | s.len;
            top = top.max(s.addr.bits() + (s.len - 1)); // a segment of a table does not wrap
        }
        Self { id, sg, alignment, top }
    }

    /// The id it was made with.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where its bytes are.
    pub fn sg(&self) -> &SgTable<CardAddr> {
        &self.sg
    }

    /// Bytes in all.
    #[allow(clippy::len_without_is_empty)] // an empty one is of no use, but nothing depends on it
    pub fn len(&self) -> u64 {
        self.sg.len()
    }

    /// True when every segment is made of whole pages of this size and has addresses of so many bits.
    #[inline]
    pub(crate) fn is_mappable(&self, granule: u64, bits: u32) -> bool {
        self.alignment & (granule - 1) == 0 && self.top >> bits == 0
    }
}
