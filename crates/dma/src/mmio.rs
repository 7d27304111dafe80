//! The port of drivers of register-mapped hardware.

use std::time::Duration;

use crate::{Error, Registrar};

/// A PCI device as its driver sees it: its registers, its interrupts, and the turn of a device model that has no
/// thread.
///
/// All methods may be called from several threads.
pub trait Mmio: Registrar {
    /// Reads a 32-bit register.
    ///
    /// # Errors
    /// [`Error::NoRegister`].
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, Error>;

    /// Writes a 32-bit register. Everything that this thread wrote to mapped memory before is visible to the device
    /// when it sees the write, as a doorbell needs it.
    ///
    /// # Errors
    /// [`Error::NoRegister`].
    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), Error>;

    /// Writes bytes into a memory BAR. Aligned 64-bit words are written whole and in their order.
    ///
    /// # Errors
    /// [`Error::NoRegister`] when they do not lie within it.
    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Writes an aligned 64-bit word into a memory BAR, whole: an entry of a page table.
    ///
    /// # Errors
    /// [`Error::NoRegister`] when it does not lie within it.
    #[inline]
    fn write64(&self, bar: u8, offset: u64, value: u64) -> Result<(), Error> {
        self.write_bytes(bar, offset, &value.to_le_bytes())
    }

    /// Lets a device model without threads do some of its work; true when it did any. Does nothing for other devices.
    fn progress(&self) -> bool {
        false
    }

    /// False for a device that works only in [`Mmio::progress`]: a caller must poll and not sleep.
    fn works_alone(&self) -> bool {
        true
    }

    /// Waits for an interrupt, for at most `timeout`; true when one came. May return early without one.
    fn wait(&self, timeout: Duration) -> bool;
}
