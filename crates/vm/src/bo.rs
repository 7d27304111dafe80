//! Buffer objects.

use dmalane_addr::{CardAddr, SgTable};

/// A buffer object: card memory that a device program sees through bindings. Bindings hold it by `Arc`, so it lives as
/// long as it is bound anywhere.
#[derive(Debug)]
pub struct Bo {
    id: u64,
    sg: SgTable<CardAddr>,
}

impl Bo {
    /// The buffer made of these segments. The id is the caller's and appears in messages.
    ///
    /// Segments need not be whole pages here; a bind that would use one that is not is refused.
    pub fn new(id: u64, sg: SgTable<CardAddr>) -> Self {
        Self { id, sg }
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
}
