//! Ranges of device addresses that are reserved.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::context::Context;
use super::ranges::{Mapped, Range, overlaps, page_at};
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
        if inside { Ok(()) } else { Err(Error::NotAllocated(at)) }
    }

    /// Allocates memory in pages of `page` bytes and maps them in the window. Both lengths are multiples of the
    /// granularity, and `len` of `page`.
    pub(crate) fn map_new(&self, at: u64, len: u64, page: u64, lendable: bool) -> Result<(), Error> {
        self.holds(at, len)?;
        let (context, driver) = (&self.context, self.context.driver);
        let (mut mapped, _current) = (context.mapped_mut(), context.current()?);
        let (mut handles, property) = (Vec::new(), context.property(lendable));
        let made = (0..len / page).try_for_each(|_| {
            let mut handle = 0;
            call!(driver.create(&raw mut handle, page as usize, &raw const property, 0))?;
            handles.push(handle);
            Ok(())
        });
        if let Err(e) = made.and_then(|()| self.map(&mapped, at, page, &handles, true)) {
            // Steps that cannot be undone after an error stay with the driver.
            handles.into_iter().for_each(|handle| drop(call!(driver.release_memory(handle))));
            return Err(e);
        }
        let own =
            |(at, handle)| (at, Range { len: page, handle: Some(handle), lent: false, writable: true, closed: false });
        mapped.extend((at..).step_by(page as usize).zip(handles).map(own));
        Ok(())
    }

    /// Maps memory of another process, `len` bytes, in a window of its own, for reading.
    pub(crate) fn of_lent(context: &Arc<Context>, fd: BorrowedFd<'_>, len: u64) -> Result<Self, Error> {
        let window = Self::reserve(context, len)?;
        let (driver, mut mapped, _current) = (context.driver, context.mapped_mut(), context.current()?);
        let handle = context.take(fd)?;
        let done = window.map(&mapped, window.at, len, &[handle], false);
        // The mapping holds the memory. Without the handle nothing else is ever bound to it, for writing.
        let _ = call!(driver.release_memory(handle));
        done?;
        mapped.insert(window.at, Range { len, handle: None, lent: true, writable: false, closed: false });
        drop(mapped);
        Ok(window)
    }

    /// Maps memory that was allocated in pages of `page` bytes, those at the addresses `memory`, one behind the other
    /// in the window, too.
    pub(crate) fn map_again(&self, at: u64, memory: &[u64], page: u64, writable: bool) -> Result<(), Error> {
        self.holds(at, page * memory.len() as u64)?;
        let mut mapped = self.context.mapped_mut();
        let handles = memory.iter().map(|at| page_at(&mapped, *at, page)).collect::<Result<Vec<_>, _>>()?;
        let _current = self.context.current()?;
        self.map(&mapped, at, page, &handles, writable)?;
        let bound = |(at, _)| (at, Range { len: page, handle: None, lent: false, writable, closed: false });
        mapped.extend((at..).step_by(page as usize).zip(handles).map(bound));
        Ok(())
    }

    /// Maps pages one behind the other, all or none; the context is current.
    fn map(&self, mapped: &Mapped, at: u64, page: u64, handles: &[u64], writable: bool) -> Result<(), Error> {
        if overlaps(mapped, at, page * handles.len() as u64) {
            return Err(Error::Mapped(at));
        }
        let (driver, mut done) = (self.context.driver, 0);
        let mapping = handles.iter().try_for_each(|handle| {
            call!(driver.map(at + done, page as usize, 0, *handle, 0))?;
            done += page;
            Ok(())
        });
        mapping.and_then(|()| self.context.set_access(at, done, writable)).inspect_err(|_| {
            // The driver unmaps nothing where a part is not mapped.
            if done > 0 {
                let _ = call!(driver.unmap(at, done as usize));
            }
        })
    }

    /// Unmaps all ranges within these addresses of the window, and frees what they own, once all work of the context
    /// has ended. The calls that undo something also report errors of earlier work, so they count as done.
    ///
    /// # Errors
    /// When the driver does not say that the work has ended: then the memory stays mapped, though nothing new begins to
    /// use it.
    pub(crate) fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        let (context, end) = (&self.context, at + len);
        let mut mapped = context.mapped_mut();
        if mapped.range(at..end).next().is_none() {
            return Ok(());
        }
        let (driver, _current) = (context.driver, context.current_to_undo()?);
        // From here on nothing begins to use it; what has begun ends.
        mapped.range_mut(at..end).for_each(|(_, range)| range.closed = true);
        drop(mapped);
        context.settle()?;
        let mut mapped = context.mapped_mut();
        let inside: Vec<u64> = mapped.range(at..end).map(|(first, _)| *first).collect();
        let gone: Vec<_> = inside.iter().filter_map(|first| mapped.remove_entry(first)).collect();
        let mut result = Ok(());
        for run in gone.chunk_by(|(first, range), (next, _)| first + range.len == *next) {
            let len: u64 = run.iter().map(|(_, range)| range.len).sum();
            result = result.and(call!(driver.unmap(run[0].0, len as usize)));
            for handle in run.iter().filter_map(|(_, range)| range.handle) {
                result = result.and(call!(driver.release_memory(handle)));
            }
        }
        result
    }

    fn end(&self) -> Result<(), Error> {
        let (context, driver) = (&self.context, self.context.driver);
        // Memory that a stream may still use stays mapped, and its addresses stay reserved.
        self.unmap(self.at, self.len)?;
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
