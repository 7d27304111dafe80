//! Objects that belong to the process that made them. A child of `fork` has a copy of each, but none of the threads
//! that fill it, maybe a lock that one of them held, and devices that it shares with its parent.

use std::process;

use crate::failure::Failure;

/// A value that only the process that made it uses and drops.
pub(crate) struct OfProcess<T> {
    made_by: u32,
    /// `None` while it is dropped.
    value: Option<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { made_by: process::id(), value: Some(value) }
    }

    /// Nothing.
    pub(crate) fn none() -> Self {
        Self { made_by: process::id(), value: None }
    }

    pub(crate) fn get(&self) -> Result<&T, Failure> {
        self.check()?;
        self.value.as_ref().ok_or_else(Failure::closed)
    }

    pub(crate) fn get_mut(&mut self) -> Result<&mut T, Failure> {
        self.check()?;
        self.value.as_mut().ok_or_else(Failure::closed)
    }

    /// Takes the value out; nothing in another process.
    pub(crate) fn take(&mut self) -> Option<T> {
        self.check().ok().and_then(|()| self.value.take())
    }

    fn check(&self) -> Result<(), Failure> {
        if process::id() == self.made_by {
            return Ok(());
        }
        let message = format!(
            "it belongs to process {}, of which this one, {}, is a fork: open it again here, or start processes by \
             \"spawn\"",
            self.made_by,
            process::id()
        );
        Err(Failure::new("ForkedError", message))
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.check().is_err() {
            // Its drop would wait for threads, or undo on a device what the parent uses.
            std::mem::forget(self.value.take());
        }
    }
}
