//! BARs of a card, as dma-bufs of the driver: mapped whole, each access between a begin and an end.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crate::device::Node;
use crate::kernel::{Handle, Kernel, Request};
use crate::sys::{BarMemory, Linux};
use crate::vrtd::{Daemon, VrtdName, wide};
use crate::{Error, abi};

/// Bytes of a BAR at most that are mapped.
const MAX_LEN: u64 = 1 << 40;

/// A BAR of a card, mapped into this process. The card may change it at any time.
///
/// The driver exports it as a dma-buf for processes only; no other device can map it. A card that is gone reads as
/// ones.
pub struct Bar {
    number: u8,
    memory: BarMemory,
    file: Handle,
    kernel: Arc<dyn Kernel>,
}

impl Bar {
    /// Maps a BAR, from 0 to 5, of a card of this machine.
    ///
    /// # Errors
    /// [`Error`]: no such node, no permission, no such BAR.
    pub fn open(node: Node, bar: u8) -> Result<Self, Error> {
        let path = node.control(Path::new("/"));
        let of = |source: io::Error| Error::Open { path: path.clone(), source };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(of)?;
        Self::with(Arc::new(Linux), &Handle::new(file.into()), bar)
    }

    /// The same over the control node, which is open, and another implementation of the driver's calls.
    ///
    /// # Errors
    /// As [`Bar::open`].
    pub fn with(kernel: Arc<dyn Kernel>, control: &Handle, bar: u8) -> Result<Self, Error> {
        let mut words = [0; abi::BAR_WORDS];
        words[1] = u32::from_ne_bytes([bar, 0, 0, 0]);
        words[2] = abi::CLOEXEC;
        let file = kernel.open(control, Request::BarFile, &mut words);
        let file = file.map_err(|e| Error::call(Request::BarFile, e))?;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        Self::map(kernel, file, bar, wide(&bytes, 16))
    }

    /// Maps a BAR of a card that vrtd lends.
    ///
    /// # Errors
    /// [`Error`]: no such socket or card, no permission, no such BAR.
    pub fn open_via_vrtd(name: &VrtdName, bar: u8) -> Result<Self, Error> {
        Self::map_from(Arc::new(Daemon::connect(name)?), bar)
    }

    fn map_from(daemon: Arc<Daemon>, bar: u8) -> Result<Self, Error> {
        let (file, len) = daemon.bar(bar).map_err(|e| Error::call(Request::BarFile, e))?;
        Self::map(daemon, file, bar, len)
    }

    fn map(kernel: Arc<dyn Kernel>, file: Handle, number: u8, len: u64) -> Result<Self, Error> {
        // A dma-buf has its length as the end of the file.
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(|e| Error::Map(e.into()))?;
        let bytes = usize::try_from(len).ok().and_then(NonZeroUsize::new).filter(|_| len <= MAX_LEN && len == size);
        let what = || format!("a BAR of {len} bytes whose file has {size}");
        let bytes = bytes.ok_or_else(|| Error::Answer { call: Request::BarFile.name(), what: what() })?;
        let memory = BarMemory::map(&file, bytes).map_err(Error::Map)?;
        Ok(Self { number, memory, file, kernel })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Reads the 32-bit register at an offset.
    ///
    /// # Errors
    /// [`Error::NoRegister`] for an offset that is no multiple of 4 or beyond the end; [`Error::Call`] when the driver
    /// refuses the access.
    pub fn read32(&self, offset: u64) -> Result<u32, Error> {
        self.bracketed(abi::SYNC_READ, || self.memory.read32(offset).ok_or(self.no_register(offset)))
    }

    /// Writes the 32-bit register at an offset.
    ///
    /// # Errors
    /// As [`Bar::read32`].
    pub fn write32(&self, offset: u64, value: u32) -> Result<(), Error> {
        self.bracketed(abi::SYNC_WRITE, || self.memory.write32(offset, value).ok_or(self.no_register(offset)))
    }

    const fn no_register(&self, offset: u64) -> Error {
        Error::NoRegister { bar: self.number, offset }
    }

    /// An access, between its begin and its end.
    fn bracketed<T>(&self, direction: u64, access: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let of = |source| Error::Call { call: "DMA_BUF_IOCTL_SYNC", source };
        self.kernel.sync(&self.file, direction).map_err(of)?;
        let result = access();
        self.kernel.sync(&self.file, direction | abi::SYNC_END).map_err(of)?;
        result
    }
}

impl fmt::Debug for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bar({}, {} bytes)", self.number, self.len())
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap, export_dma_buf};

    use super::*;

    const LEN: u64 = 64 << 10;

    fn errno(of: Result<u32, Error>) -> Option<i32> {
        match of {
            Err(Error::Call { source, .. }) => source.raw_os_error(),
            other => panic!("{other:?}"),
        }
    }

    /// The kernel's own dma-buf in place of a BAR: it answers the begin and the end, and refuses unknown flags.
    #[test]
    fn a_dma_buf_of_the_kernel_is_mapped_and_takes_each_access() {
        let memory = MemfdHeap::new().allocate(LEN as usize).unwrap().share();
        let file = match export_dma_buf(&memory.reference()) {
            Ok(file) => Handle::new(file),
            Err(e) => return println!("SKIPPED: no dma-buf: {e}"),
        };
        let bar = Bar::map(Arc::new(Linux), file, 2, LEN).unwrap();
        for (offset, value) in [(0, 0x1234_5678), (LEN - 4, 0xfedc_ba98)] {
            bar.write32(offset, value).unwrap();
            assert_eq!(bar.read32(offset).unwrap(), value);
            assert_eq!(memory.as_volatile_slice().load_u32(offset as usize).unwrap(), value);
        }
        assert!(matches!(bar.read32(LEN), Err(Error::NoRegister { bar: 2, offset: LEN })));
        assert_eq!(errno(bar.bracketed(1 << 8, || Ok(0))), Some(libc::EINVAL));
    }

    #[test]
    fn a_file_that_is_no_dma_buf_refuses_each_access() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        let file = Handle::new(file.into());
        let bar = Bar::map(Arc::new(Linux), file, 0, LEN).unwrap();
        assert_eq!(errno(bar.read32(0)), Some(libc::ENOTTY));
    }
}
