//! Things that belong to the process that made them. A child of `fork` has a copy of each, but none of the threads that
//! work for it, maybe a lock that one of them held, and devices that it shares with its parent.

use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::process;
use std::sync::OnceLock;

use thiserror::Error;

use crate::PageKind;
use crate::sys::{Region, page};

/// Something belongs to the process that made it, of which this one is a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("it belongs to process {made_by}, of which this one, {}, is a fork: open it again here", process_id())]
pub struct Forked {
    /// The process that made it.
    pub made_by: u32,
}

/// The number of this process, also in a child of `fork`, without a system call.
#[inline]
pub fn process_id() -> u32 {
    /// A page that is zero again in a child.
    static PAGE: OnceLock<Option<Region>> = OnceLock::new();
    let wiped = || {
        let region = Region::anonymous(NonZeroUsize::new(page())?, PageKind::Base).ok()?;
        region.wipe_on_fork().ok().map(|()| region)
    };
    let Some(region) = PAGE.get_or_init(wiped) else { return process::id() };
    match region.as_volatile_slice().load_u32(0) {
        Some(0) | None => {
            let id = process::id();
            let _ = region.as_volatile_slice().store_u32(0, id);
            id
        }
        Some(id) => id,
    }
}

/// A value that only the process that made it may use, and that only this process drops.
pub struct OfProcess<T> {
    made_by: u32,
    /// `None` while it is dropped.
    value: Option<T>,
}

impl<T> OfProcess<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self { made_by: process_id(), value: Some(value) }
    }

    /// Checks that this is the process that made it. [`Deref`] does not.
    ///
    /// # Errors
    /// [`Forked`].
    #[inline]
    pub fn check(&self) -> Result<(), Forked> {
        let Self { made_by, .. } = *self;
        if process_id() == made_by { Ok(()) } else { Err(Forked { made_by }) }
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is there until it is dropped")
    }
}

impl<T> DerefMut for OfProcess<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is there until it is dropped")
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_value_of_another_process_is_neither_used_nor_dropped() {
        assert_eq!([process_id(), process_id()], [process::id(); 2]);
        /// Counts how often it is dropped.
        struct Value<'a>(&'a Cell<u32>);
        impl Drop for Value<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = Cell::new(0);
        let mut own = OfProcess::new(Value(&drops));
        assert!(own.check() == Ok(()) && own.0.get() == 0);
        *own = Value(&drops);
        assert_eq!(drops.get(), 1);
        drop(own);
        let others = OfProcess { made_by: 1, value: Some(Value(&drops)) };
        let error = others.check().unwrap_err();
        assert!(error.to_string().starts_with("it belongs to process 1, of which this one, "), "{error}");
        drop(others);
        assert_eq!(drops.get(), 2, "only that of another process stays");
    }
}
