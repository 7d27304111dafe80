//! Binds by calls of the driver and nothing else: what benches compare with.

use std::sync::Arc;

use dmalane_addr::{CardAddr, DeviceVa, PageSize, Span};

use super::context::Context;
use super::ranges::{Range, page_at};
use crate::Error;

/// Addresses where pages of memory are bound without an address space of this crate.
pub struct PlainBinds {
    context: Arc<Context>,
    memory: Span<CardAddr>,
    page: u64,
    at: u64,
    /// For each page of the addresses: something is bound there.
    bound: Vec<bool>,
}

impl PlainBinds {
    /// As [`CudaDevice::plain_binds`](crate::CudaDevice::plain_binds).
    pub(crate) fn new(context: &Arc<Context>, memory: Span<CardAddr>, page: PageSize) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let (mut at, page) = (0, page.bytes());
        call!(driver.address_reserve(&raw mut at, memory.len() as usize, 0, 0, 0))?;
        let bound = vec![false; (memory.len() / page) as usize];
        Ok(Self { context: context.clone(), memory, page, at, bound })
    }

    /// Binds consecutive pages, from the page `first` of the addresses on, to these pages of the memory: by a call for
    /// each, and one for the access to all.
    ///
    /// # Errors
    /// [`Error::NotAllocated`] for pages and addresses that there are not, [`Error::Mapped`] where something is bound;
    /// [`Error::Call`].
    pub fn bind(&mut self, first: u64, pages: &[u64]) -> Result<(), Error> {
        let (driver, _current) = (self.context.driver, self.context.current()?);
        let room = (self.bound.len() as u64).checked_sub(first).is_some_and(|room| pages.len() as u64 <= room);
        if !room {
            return Err(Error::NotAllocated(self.at.saturating_add(first.saturating_mul(self.page))));
        }
        let at = self.at + first * self.page;
        for (i, page) in pages.iter().enumerate() {
            let from = page.checked_mul(self.page).and_then(|at| self.memory.sub(at, self.page));
            let from = from.ok_or(Error::NotAllocated(page.saturating_mul(self.page)))?.first().bits();
            let (handle, to) = (page_at(&self.context.mapped(), from, self.page)?, at + i as u64 * self.page);
            let free = self.bound.get_mut(first as usize + i).filter(|bound| !**bound).ok_or(Error::Mapped(to))?;
            call!(driver.map(to, self.page as usize, 0, handle, 0))?;
            *free = true;
        }
        self.context.set_access(at, pages.len() as u64 * self.page, true)
    }

    /// Unbinds consecutive pages that are bound, by one call.
    ///
    /// # Errors
    /// [`Error::NotAllocated`] where one is not; [`Error::Call`].
    pub fn unbind(&mut self, first: u64, count: u64) -> Result<(), Error> {
        let (driver, _current) = (self.context.driver, self.context.current_to_undo()?);
        let end = first.checked_add(count).and_then(|end| usize::try_from(end).ok());
        let pages = end.and_then(|end| self.bound.get_mut(first as usize..end));
        let pages = pages.filter(|pages| pages.iter().all(|bound| *bound));
        let pages = pages.ok_or(Error::NotAllocated(self.at.saturating_add(first.saturating_mul(self.page))))?;
        call!(driver.unmap(self.at + first * self.page, (count * self.page) as usize))?;
        pages.fill(false);
        Ok(())
    }

    /// Calls `look` while queues of the device may use the addresses, at which everything is bound.
    ///
    /// # Errors
    /// [`Error::NotAllocated`] where something is missing; [`Error::Call`].
    pub fn shown<T>(&self, look: impl FnOnce(DeviceVa) -> T) -> Result<T, Error> {
        if let Some(missing) = self.bound.iter().position(|bound| !bound) {
            return Err(Error::NotAllocated(self.at + missing as u64 * self.page));
        }
        let range = Range { len: self.memory.len(), handle: None, lent: false, writable: false, closed: false };
        self.context.mapped_mut().insert(self.at, range);
        let seen = look(DeviceVa::new(self.at));
        self.context.mapped_mut().remove(&self.at);
        self.context.settle().map(|()| seen)
    }
}

impl Drop for PlainBinds {
    fn drop(&mut self) {
        for page in 0..self.bound.len() {
            if self.bound[page] && self.unbind(page as u64, 1).is_err() {
                return; // what is mapped keeps its addresses
            }
        }
        let (context, driver) = (&self.context, self.context.driver);
        if let Ok(_current) = context.current_to_undo() {
            let _ = call!(driver.address_free(self.at, self.memory.len() as usize));
        }
    }
}
