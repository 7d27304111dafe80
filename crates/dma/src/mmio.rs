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

    /// Reads bytes from a memory BAR. The provided method reads the 32-bit words that they lie in, one after the other.
    ///
    /// # Errors
    /// [`Error::NoRegister`] when they do not lie within it.
    fn read_bytes(&self, bar: u8, mut offset: u64, mut into: &mut [u8]) -> Result<(), Error> {
        while !into.is_empty() {
            let word = self.read32(bar, offset & !3)?.to_le_bytes();
            let bytes = &word[(offset & 3) as usize..];
            let now = into.split_off_mut(..bytes.len().min(into.len())).expect("no more than there are");
            now.copy_from_slice(&bytes[..now.len()]);
            offset = offset.wrapping_add(now.len() as u64);
        }
        Ok(())
    }

    /// Reads an aligned 64-bit word from a memory BAR, whole where [`Mmio::read_bytes`] is not the provided one.
    ///
    /// # Errors
    /// [`Error::NoRegister`] when it does not lie within it.
    #[inline]
    fn read64(&self, bar: u8, offset: u64) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.read_bytes(bar, offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

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

    /// True when the device is gone for good and has made its last access to memory: the process that served it has
    /// ended. What it held can be released then, as after a stop that the device confirmed.
    fn is_gone(&self) -> bool {
        false
    }

    /// Waits for an interrupt, for at most `timeout`; true when one came. May return early without one.
    fn wait(&self, timeout: Duration) -> bool;
}
