//! Ranges of device addresses that are reserved.

use std::sync::Arc;

use super::context::Context;
use crate::Error;

/// Device addresses that belong to this process, in which memory can be mapped.
pub(crate) struct Window {
    context: Arc<Context>,
    at: u64,
    len: u64,
}

impl Window {
    /// Reserves addresses; `len` is a multiple of the granularity.
    pub(crate) fn reserve(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut at = 0;
        // 0: aligned as the driver likes, anywhere, without flags.
        call!(driver.address_reserve(&raw mut at, len as usize, 0, 0, 0))?;
        Ok(Self { context: context.clone(), at, len })
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn holds(&self, at: u64, len: u64) -> Result<(), Error> {
        let inside =
            at.checked_sub(self.at).and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len);
        if inside { Ok(()) } else { Err(Error::NoAddress(at)) }
    }

    /// Allocates memory and maps it in the window.
    pub(crate) fn map_new(&self, at: u64, len: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.map_new(at, len)
    }

    /// Unmaps everything in a part of the window and frees what it owns; see [`Context::unmap`].
    pub(crate) fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.unmap(at, len)
    }

    fn end(&self) -> Result<(), Error> {
        let (context, driver) = (&self.context, self.context.driver);
        // Memory that a stream may still use stays mapped, and its addresses stay reserved.
        context.unmap(self.at, self.len)?;
        let _current = context.current_to_undo()?;
        call!(driver.address_free(self.at, self.len as usize))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Memory that a stream may still use stays with the driver.
        let _ = self.end();
    }
}
