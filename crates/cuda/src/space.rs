//! An address space made of mappings of the driver.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, SpaceError, without_tables};
use dmalane_vm::BindRequest;

use crate::sys::{Context, Window};

/// How buffers are bound in the device's address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Binds {
    /// Buffers are seen where their memory lies.
    #[default]
    Flat,
    /// Buffers are bound by `cuMemMap`, in pages of 2 MiB: read-only where that was asked for, scattered memory
    /// contiguous. Memory is allocated in pages, too.
    CuMemMap,
}

/// Ranges of addresses in which memory is mapped again, page by page.
pub(crate) struct MapSpace {
    context: Arc<Context>,
    page: PageSize,
    /// The reserved ranges, by first address.
    reserved: BTreeMap<u64, Window>,
}

/// A page of a reserved range that requests change.
struct Page<'a> {
    window: &'a Window,
    at: u64,
    /// The address of the memory that is bound there in the end, and whether it may be written.
    memory: Option<(u64, bool)>,
}

impl MapSpace {
    pub(crate) fn new(context: Arc<Context>, page: PageSize) -> Self {
        Self { context, page, reserved: BTreeMap::new() }
    }

    fn not_pages(&self, va: DeviceVa, len: u64) -> SpaceError {
        let page = self.page;
        SpaceError::Refused(format!("cannot bind or unbind {len} bytes at {va}: not whole pages of {page}").into())
    }

    /// The reserved range in which these pages lie.
    fn window(&self, va: DeviceVa, len: u64) -> Result<&Window, SpaceError> {
        let span = Span::new(va, len).ok_or_else(|| self.not_pages(va, len))?;
        let window = self.reserved.range(..=va.bits()).next_back().map(|(_, window)| window);
        let window = window.filter(|window| span.last().bits() - window.at() < window.len());
        let window = window.ok_or(SpaceError::NotReserved(span))?;
        if span.is_aligned(self.page) { Ok(window) } else { Err(self.not_pages(va, len)) }
    }

    /// The pages that requests change, in order.
    fn plan(&self, requests: &[BindRequest]) -> Result<Vec<Page<'_>>, SpaceError> {
        let page = self.page.bytes();
        let each = |va: DeviceVa, len: u64| (0..len / page).map(move |i| va.bits() + i * page);
        let mut pages = BTreeMap::new();
        for request in requests {
            without_tables(request)?;
            match request {
                BindRequest::Bind { va, bo, offset, len, access } => {
                    let (window, end) = (self.window(*va, *len)?, offset.checked_add(*len));
                    let memory = end.and_then(|end| bo.sg().pages(*offset..end, self.page));
                    let memory = memory.ok_or_else(|| self.not_pages(*va, *len))?;
                    for (at, memory) in each(*va, *len).zip(memory) {
                        self.context.has_page(memory.bits(), page).map_err(|e| SpaceError::Refused(e.into()))?;
                        let memory = Some((memory.bits(), access.contains(Access::WRITE)));
                        pages.insert(at, Page { window, at, memory });
                    }
                }
                BindRequest::Unbind(span) => {
                    let window = self.window(span.first(), span.len())?;
                    let gone = |at| (at, Page { window, at, memory: None });
                    pages.extend(each(span.first(), span.len()).map(gone));
                }
                BindRequest::Prefetch(_) => {}
                _ => return Err(SpaceError::NoTables),
            }
        }
        Ok(pages.into_values().collect())
    }
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
        let window = Window::reserve(&self.context, whole).map_err(|e| SpaceError::Driver(e.into()))?;
        let span = Span::new(DeviceVa::new(window.at()), whole).ok_or(SpaceError::Exhausted(len))?;
        self.reserved.insert(window.at(), window);
        Ok(span)
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        let at = range.first().bits();
        let window = self.reserved.get(&at).filter(|window| window.len() == range.len());
        window
            .ok_or(SpaceError::NotReserved(range))?
            .unmap(at, range.len())
            .map_err(|e| SpaceError::Invalidate(e.into()))?;
        self.reserved.remove(&at);
        Ok(())
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        let (pages, page) = (self.plan(requests)?, self.page.bytes());
        let next = |a: &Page, b: &Page| a.at + page == b.at && a.window.at() == b.window.at();
        let unmap = |run: &[Page]| {
            run[0].window.unmap(run[0].at, run.len() as u64 * page).map_err(|e| SpaceError::Invalidate(e.into()))
        };
        pages.chunk_by(next).try_for_each(unmap)?;
        // Rights are set for a whole run at once.
        let rights = |page: &Page| page.memory.map(|(_, writable)| writable);
        for run in pages.chunk_by(|a, b| next(a, b) && rights(a) == rights(b)) {
            let Some(writable) = rights(&run[0]) else { continue };
            let memory: Vec<u64> = run.iter().filter_map(|page| page.memory).map(|(at, _)| at).collect();
            if let Err(e) = run[0].window.map_again(run[0].at, &memory, page, writable) {
                // Nothing is bound where some of it may be.
                pages.chunk_by(next).try_for_each(unmap)?;
                return Err(SpaceError::Driver(e.into()));
            }
        }
        Ok(())
    }
}
