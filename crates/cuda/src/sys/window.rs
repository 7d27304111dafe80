//! Ranges of device addresses that are reserved, or one allocation.

use std::sync::Arc;

use super::context::Context;
use super::ranges::{Range, RangeKind};
use crate::Error;

/// Device addresses that belong to this process, in which memory can be mapped.
pub(crate) struct Window {
    context: Arc<Context>,
    at: u64,
    len: u64,
    /// One allocation, which is all there, instead of addresses.
    plain: bool,
}

impl Window {
    /// Reserves addresses; `len` is a multiple of the granularity.
    pub(crate) fn reserve(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut at = 0;
        // 0: aligned as the driver likes, anywhere, without flags.
        may_call!(driver.address_reserve(&raw mut at, len as usize, 0, 0, 0))?;
        Ok(Self { context: context.clone(), at, len, plain: false })
    }

    /// One allocation of plain memory, for GPUs without virtual memory.
    pub(crate) fn allocate(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let at = context.allocate(len)?;
        let range =
            Range { len, kind: RangeKind::Memory, writable: true, handles: Vec::new(), chunk: 0, closed: false };
        context.mapped_mut().insert(at, range);
        Ok(Self { context: context.clone(), at, len, plain: true })
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn holds(&self, at: u64, len: u64) -> Result<(), Error> {
        let offset = at.checked_sub(self.at).filter(|_| !self.plain);
        let inside = offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len);
        if inside { Ok(()) } else { Err(Error::NoAddress(at)) }
    }

    /// Allocates memory in chunks of `chunk` bytes and maps it in the window.
    pub(crate) fn map_new(&self, at: u64, len: u64, chunk: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.map_new(at, len, chunk)
    }

    /// Maps memory that is allocated at these addresses and lengths in the window, too.
    pub(crate) fn map_again(&self, at: u64, from: &[(u64, u64)], writable: bool) -> Result<(), Error> {
        self.holds(at, from.iter().map(|(_, len)| len).sum())?;
        self.context.map_again(at, from, writable)
    }

    /// Unmaps everything in a part of the window and frees what it owns; see [`Context::unmap`].
    pub(crate) fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.unmap(at, len)
    }

    fn end(&self) -> Result<(), Error> {
        let (context, driver) = (&self.context, self.context.driver);
        if self.plain {
            context.mapped_mut().range_mut(self.at..=self.at).for_each(|(_, range)| range.closed = true);
            context.settle()?;
            let _current = context.current_to_undo()?;
            context.mapped_mut().remove(&self.at);
            return call!(driver.free(self.at));
        }
        // Memory that a stream may still use stays mapped, and its addresses stay reserved.
        context.unmap(self.at, self.len)?;
        let _current = context.current_to_undo()?;
        may_call!(driver.address_free(self.at, self.len as usize))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Memory that a stream may still use stays with the driver.
        let _ = self.end();
    }
}
