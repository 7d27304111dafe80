//! Buffers pinned and mapped once, for many transfers.

use std::ops::Range;
use std::sync::Arc;

use dmalane_addr::{Access, Iova, Span};
use dmalane_dma::{BufferRef, BufferSlice, Error, Mapping, Registrar, SharedBuf};

/// A buffer that a device can reach until the last clone is dropped. Holds a reference to the memory.
#[derive(Clone, Debug)]
pub struct Registered(Arc<Mapping>);

impl Registered {
    /// Pins `buf` and maps it for the device on `bus`.
    ///
    /// # Errors
    /// Those of [`Registrar::pin`] and [`Registrar::map`].
    pub fn new(bus: &(impl Registrar + ?Sized), buf: &SharedBuf, access: Access) -> Result<Self, Error> {
        Ok(Self::from_mapping(bus.map(bus.pin(&buf.reference())?, access)?))
    }

    /// Pins some whole 4 KiB pages of a memory and maps them.
    ///
    /// # Errors
    /// Those of [`Registrar::pin_range`] and [`Registrar::map`].
    pub fn of_range(
        bus: &(impl Registrar + ?Sized),
        buffer: &BufferRef,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self, Error> {
        Ok(Self::from_mapping(bus.map(bus.pin_range(buffer, range)?, access)?))
    }

    /// Pins several buffers and maps them one behind the other, at contiguous IOVAs: a gather list that the device sees
    /// as one buffer.
    ///
    /// # Errors
    /// Those of [`Registrar::pin`] and [`Registrar::map_list`]; nothing stays pinned.
    pub fn of_list(bus: &(impl Registrar + ?Sized), bufs: &[&SharedBuf], access: Access) -> Result<Self, Error> {
        let pinned = bufs.iter().map(|buf| bus.pin(&buf.reference())).collect::<Result<_, _>>()?;
        Ok(Self::from_mapping(bus.map_list(pinned, access)?))
    }

    /// True while an operation in flight, or another clone, holds the registration too.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// From a mapping made in two steps.
    pub fn from_mapping(mapping: Mapping) -> Self {
        Self(Arc::new(mapping))
    }

    /// The mapping.
    #[inline]
    pub fn mapping(&self) -> &Mapping {
        &self.0
    }

    /// Where the device sees a slice of the buffer; `None` when the slice is empty or belongs to another buffer.
    #[inline]
    pub fn iova_of(&self, slice: &BufferSlice) -> Option<Span<Iova>> {
        self.0.iova_of(slice)
    }

    /// Unmaps and unpins the buffer now.
    ///
    /// # Errors
    /// Gives the registration back while it is busy: an operation in flight, or a clone, still holds it.
    pub fn deregister(self) -> Result<(), Self> {
        Arc::try_unwrap(self.0).map(drop).map_err(Self)
    }
}
