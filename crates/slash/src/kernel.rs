//! The port to the driver: its calls, made by the kernel or answered by a model of it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::abi;

/// A call of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Versions and the PCI address.
    Info,
    /// Adds a queue pair.
    PairAdd,
    /// Starts, stops or deletes a queue pair.
    PairOp,
    /// Returns a file for transfers by one or two queue pairs.
    PairFile,
    /// Returns a file for a new buffer of host memory.
    BufferCreate,
    /// Moves bytes, and returns how many.
    Transfer,
}

impl Request {
    /// True when it returns a file.
    pub(crate) const fn opens(self) -> bool {
        matches!(self, Self::PairFile | Self::BufferCreate)
    }

    /// The driver's name of it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::PairAdd => "QPAIR_ADD",
            Self::PairOp => "Q_OP",
            Self::PairFile => "QPAIR_GET_FD",
            Self::BufferCreate => "BUF_CREATE",
            Self::Transfer => "TRANSFER",
        }
    }

    /// Its number and the length in bytes that is part of it. INFO keeps the length of its first version.
    const fn parts(self) -> (u32, u32) {
        match self {
            Self::Info => (0x50, abi::INFO_SIZES[0]),
            Self::PairAdd => (0x51, abi::ADD_WORDS as u32 * 4),
            Self::PairOp => (0x52, abi::OP_WORDS as u32 * 4),
            Self::PairFile => (0x53, abi::FD_WORDS as u32 * 4),
            Self::BufferCreate => (0x54, abi::BUF_WORDS as u32 * 4),
            Self::Transfer => (0x56, abi::TRANSFER_WORDS as u32 * 4),
        }
    }

    /// The number of the ioctl: `_IOWR('v', number, length)`.
    pub const fn number(self) -> u32 {
        let (number, len) = self.parts();
        3 << 30 | len << 16 | (b'v' as u32) << 8 | number
    }

    /// Bytes of the argument that the driver reads or writes even if the argument says that it is shorter.
    pub const fn bytes(self) -> usize {
        self.parts().1 as usize
    }
}

/// An open file of the driver: its node, queue pairs, or a buffer.
pub struct Handle(Box<dyn AsFd + Send + Sync>);

impl Handle {
    /// An open file.
    pub fn new(file: OwnedFd) -> Self {
        Self(Box::new(file))
    }

    /// A file of a model, which sees by the drop that it is closed.
    #[cfg(feature = "model")]
    pub(crate) fn of_model(file: impl AsFd + Send + Sync + 'static) -> Self {
        Self(Box::new(file))
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

dmalane_dma::debug_as!(Handle, |it| "{:?}", it.as_fd());

/// The driver's calls. All may be made from several threads.
pub trait Kernel: Send + Sync {
    /// Makes a call that returns a number. The first word of `argument` is set to its length in bytes.
    ///
    /// # Errors
    /// The driver's; `InvalidInput` for an argument that is too short for the call.
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64>;

    /// Makes a call that returns a file.
    ///
    /// # Errors
    /// As [`Kernel::call`].
    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle>;

    /// Transfers on a queue pair's file of which several are in flight, where the driver has that.
    fn calls(&self, file: &Arc<Handle>) -> Option<Box<dyn Calls>> {
        let _ = file;
        None
    }
}

/// The argument of a transfer.
pub type Transfer = [u32; abi::TRANSFER_WORDS];

/// Transfers of a queue pair that are in flight at the same time.
pub trait Calls: Send {
    /// How many may be in flight, one at least.
    fn depth(&self) -> usize;

    /// Begins a transfer, at the latest when an end is waited for. Its end has this number.
    fn begin(&mut self, number: u64, argument: Transfer);

    /// Lets transfers begin now, unless only one may be in flight. Does not block.
    ///
    /// # Errors
    /// When they cannot, for good.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Waits until a transfer has ended, and gives its number and its result; `None` when none has within the time.
    ///
    /// # Errors
    /// When that cannot be known any more.
    fn end(&mut self, timeout: Option<Duration>) -> io::Result<Option<(u64, io::Result<u64>)>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        let numbers = [
            (Request::Info, 0xc014_7650),
            (Request::PairAdd, 0xc024_7651),
            (Request::PairOp, 0xc00c_7652),
            (Request::PairFile, 0xc018_7653),
            (Request::BufferCreate, 0xc018_7654),
            (Request::Transfer, 0xc058_7656),
        ];
        for (request, number) in numbers {
            assert_eq!(request.number(), number, "{}", request.name());
        }
    }
}
