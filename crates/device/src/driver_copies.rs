//! Copies by a device's driver alone.

use std::error::Error;

use dmalane_addr::{CardAddr, Iova, Span};
use dmalane_dma::Registrar;
use dmalane_queue::{Direction, Refusal, Registered};

/// Copies that the driver of a device makes back to back, without a queue of this library: as fast as the device's link
/// is, to measure queues beside. [`Device::driver_copies`](crate::Device::driver_copies) makes it.
pub trait DriverCopies: Send {
    /// Gives all copies to the driver, `times` times, those of both directions at once where it can, and waits for the
    /// end of the last. No two copies use the same memory.
    ///
    /// # Errors
    /// The driver refused a copy, or its memory is not registered with the device or not allocated there; some of the
    /// bytes may have been copied.
    fn copy(&mut self, copies: &[DriverCopy], times: u64) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// A copy between host memory and a device's memory.
#[derive(Clone, Debug)]
pub struct DriverCopy {
    /// Which way.
    pub direction: Direction,
    /// Host memory that is registered with the device. It stays so until the copy has ended.
    pub host: Registered,
    /// The first byte in it.
    pub offset: u64,
    /// The first address in the device's memory.
    pub at: CardAddr,
    /// Bytes to copy, at least one.
    pub len: u64,
}

impl DriverCopy {
    /// Checks that the host memory is registered with the device behind `bus`, for this direction.
    ///
    /// # Errors
    /// [`Refusal::NotRegistered`], [`Refusal::NotPermitted`].
    pub fn check(&self, bus: &(impl Registrar + ?Sized)) -> Result<(), Refusal> {
        let mapping = self.host.mapping();
        match bus.owns(mapping) {
            false => Err(Refusal::NotRegistered),
            true if mapping.access().contains(self.direction.host_access()) => Ok(()),
            true => Err(Refusal::NotPermitted),
        }
    }

    /// Where the device sees the host memory; `None` where the copy is longer than that.
    pub fn iova(&self) -> Option<Span<Iova>> {
        self.host.mapping().span().sub(self.offset, self.len)
    }

    /// Where the host memory lies in this process; `None` where the copy is longer than the first registered buffer.
    pub fn address(&self) -> Option<usize> {
        let pinned = self.host.mapping().pinned();
        let (range, end) = (pinned.range(), self.offset.checked_add(self.len)?);
        let inside = end <= range.len() as u64;
        inside.then(|| pinned.reference().address() + range.start + self.offset as usize)
    }
}
