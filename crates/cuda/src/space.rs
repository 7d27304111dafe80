//! An address space made of mappings of the driver.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, Bind, Observer, SpaceError};
use dmalane_vm::BindRequest;

use crate::sys::{Context, Window};

/// Ranges of addresses in which memory is mapped again, page by page.
pub(crate) struct MapSpace {
    context: Arc<Context>,
    page: PageSize,
    reserved: BTreeMap<DeviceVa, Window>,
    observer: Observer,
}

impl MapSpace {
    pub(crate) fn new(context: Arc<Context>, page: PageSize) -> Self {
        Self { context, page, reserved: BTreeMap::new(), observer: Observer::default() }
    }
}

fn driver(error: crate::Error) -> SpaceError {
    SpaceError::Driver(Box::new(error))
}

impl AddressSpace for MapSpace {
    fn kind(&self) -> AddressSpaceKind {
        AddressSpaceKind::Driver { name: "cuMemMap" }
    }

    fn page(&self) -> PageSize {
        self.page
    }

    fn reserve(&mut self, _: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        let whole = self.page.round_up(len.max(1)).ok_or(SpaceError::Exhausted(len))?;
        let window = Window::reserve(&self.context, whole).map_err(driver)?;
        let span = Span::new(DeviceVa::new(window.at()), whole).ok_or(SpaceError::Exhausted(len))?;
        self.reserved.insert(span.first(), window);
        Ok(span)
    }

    fn bind(&mut self, bind: &Bind<'_>) -> Result<(), SpaceError> {
        let Bind { va, bo, offset, len, access } = *bind;
        let span = Span::new(va, len).ok_or(SpaceError::Exhausted(len))?;
        let window = self.reserved.range(..=va).next_back().map(|(_, window)| window);
        let window = window.filter(|w| span.last().bits() - w.at() < w.len()).ok_or(SpaceError::NotReserved(span))?;
        let end = offset.checked_add(len);
        let runs = end.and_then(|end| bo.sg().runs(offset..end)).into_iter().flatten();
        let from: Vec<(u64, u64)> = runs.map(|run| (run.addr.bits(), run.len)).collect();
        let short = from.iter().map(|(_, len)| len).sum::<u64>() != len;
        let odd = from.iter().flat_map(|(at, len)| [at, len]).chain([&va.bits()]).any(|n| n % self.page.bytes() != 0);
        if short || odd || len == 0 {
            let what = format!("{len} bytes from {offset} of the buffer at {va} are not pages of {}", self.page);
            return Err(driver(crate::Error::Memory(what)));
        }
        window.map_again(va.bits(), &from, access.contains(Access::WRITE)).map_err(driver)?;
        self.observer.see(&[bind.request()]);
        Ok(())
    }

    fn unbind(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        let window = self.reserved.get(&range.first()).filter(|window| window.len() == range.len());
        let window = window.ok_or(SpaceError::NotReserved(range))?;
        window.unmap(range.first().bits(), range.len()).map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        self.reserved.remove(&range.first());
        self.observer.see(&[BindRequest::Unbind(range)]);
        Ok(())
    }

    fn observer(&mut self) -> Option<&mut Observer> {
        Some(&mut self.observer)
    }
}
