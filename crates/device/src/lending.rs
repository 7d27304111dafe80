//! Memory of a device that other processes use, too.

use std::error::Error;
use std::os::fd::{BorrowedFd, OwnedFd};

use dmalane_addr::{CardAddr, Span};
use dmalane_dma::OfProcess;

/// Lends memory of a device to other processes, and takes what they lend: no byte is copied.
/// [`Device::lending`](crate::Device::lending) makes it.
pub trait Lending: Send {
    /// The name of the device, by which other processes of this machine know that theirs is the same ("GPU-2918...").
    fn device(&self) -> &str;

    /// Says whether memory that is allocated from now on can be lent; at first it cannot.
    fn allow(&self, lendable: bool);

    /// Descriptors of memory that was allocated as one range, while that was allowed, with their bytes: one, or where
    /// the driver has limits one of each piece. The memory lives as long as any copy of them, and whoever has one can
    /// write to it.
    ///
    /// # Errors
    /// It is no such memory, or the driver has no descriptor for it.
    fn lend(&self, memory: Span<CardAddr>) -> Result<Vec<(OwnedFd, u64)>, Box<dyn Error + Send + Sync>>;

    /// Lets the device's queues read memory that was lent, in these pieces, and programs on the device, too.
    ///
    /// # Errors
    /// It is no memory of a [device](Self::device) of this name, as far as the driver knows, or shorter.
    fn take(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<LentMemory, Box<dyn Error + Send + Sync>>;
}

/// Memory that another process has lent, until this is dropped by the process that took it.
pub struct LentMemory {
    /// Where it lies.
    pub at: Span<CardAddr>,
    _held: OfProcess<Box<dyn Send + Sync>>,
}

impl LentMemory {
    /// Memory that stays where it is until `held` is dropped.
    pub fn new(at: Span<CardAddr>, held: impl Send + Sync + 'static) -> Self {
        Self { at, _held: OfProcess::new(Box::new(held)) }
    }
}

dmalane_dma::debug_as!(LentMemory, |it| "LentMemory({:?})", it.at);
