//! Objects that belong to the process that made them. A child of `fork` has a copy of each, but none of the threads
//! that fill it, maybe a lock that one of them held, and devices that it shares with its parent.

use dmalane::dma;

use crate::failure::Failure;

/// A value that only the process that made it uses and drops; `None` once it is closed.
pub(crate) struct OfProcess<T>(dma::OfProcess<Option<T>>);

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(dma::OfProcess::new(Some(value)))
    }

    /// Nothing.
    pub(crate) fn none() -> Self {
        Self(dma::OfProcess::new(None))
    }

    pub(crate) fn get(&self) -> Result<&T, Failure> {
        self.check()?;
        self.0.as_ref().ok_or_else(Failure::closed)
    }

    pub(crate) fn get_mut(&mut self) -> Result<&mut T, Failure> {
        self.check()?;
        self.0.as_mut().ok_or_else(Failure::closed)
    }

    /// Takes the value out; nothing in another process.
    pub(crate) fn take(&mut self) -> Option<T> {
        self.check().ok().and_then(|()| self.0.take())
    }

    fn check(&self) -> Result<(), Failure> {
        let failed = |e| Failure::new("ForkedError", format!("{e}, or start processes by \"spawn\""));
        self.0.check().map_err(failed)
    }
}
