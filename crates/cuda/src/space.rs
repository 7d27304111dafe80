//! An address space made of mappings of the driver.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_device::{AddressSpace, AddressSpaceKind, Observer, SpaceError};
use dmalane_vm::{BindRequest, Bo};

use crate::sys::{Context, Window};

/// Ranges of addresses in which memory is mapped again, page by page.
pub(crate) struct MapSpace {
    context: Arc<Context>,
    page: PageSize,
    reserved: BTreeMap<DeviceVa, Window>,
    observer: Observer,
}

/// The contents of a page: the address of its memory, and whether it may be written; `None` where nothing is bound.
type Shown = Option<(u64, bool)>;

impl MapSpace {
    pub(crate) fn new(context: Arc<Context>, page: PageSize) -> Self {
        Self { context, page, reserved: BTreeMap::new(), observer: Observer::default() }
    }

    /// The reserved range that a span lies in.
    fn window(&self, span: &Span<DeviceVa>) -> Option<&Window> {
        let window = self.reserved.range(..=span.first()).next_back().map(|(_, window)| window);
        window.filter(|w| span.last().bits() - w.at() < w.len())
    }

    /// The memory of a bind, in whole pages that are allocated: addresses and lengths.
    fn runs_of(&self, va: DeviceVa, bo: &Bo, offset: u64, len: u64) -> Result<Vec<(u64, u64)>, SpaceError> {
        let end = offset.checked_add(len);
        let runs = end.and_then(|end| bo.sg().runs(offset..end)).into_iter().flatten();
        let from: Vec<(u64, u64)> = runs.map(|run| (run.addr.bits(), run.len)).collect();
        let short = from.iter().map(|(_, len)| len).sum::<u64>() != len;
        let odd = from.iter().flat_map(|(at, len)| [at, len]).chain([&va.bits()]).any(|n| n % self.page.bytes() != 0);
        if short || odd || len == 0 {
            return Err(refused(crate::Error::NotPages { va, len, offset, page: self.page }));
        }
        from.iter().try_for_each(|(at, len)| self.context.has_memory(*at, *len)).map_err(refused)?;
        Ok(from)
    }

    /// The pages that requests change, with what they show in the end.
    fn plan(&self, requests: &[BindRequest]) -> Result<BTreeMap<u64, Shown>, SpaceError> {
        let page = self.page.bytes();
        let each = |first: u64, len: u64| (0..len / page).map(move |i| first + i * page);
        let mut pages = BTreeMap::new();
        for request in requests {
            match request {
                BindRequest::Bind { va, bo, offset, len, access } => {
                    let span = Span::new(*va, *len).ok_or(SpaceError::Exhausted(*len))?;
                    self.window(&span).ok_or(SpaceError::NotReserved(span))?;
                    let from = self.runs_of(*va, bo, *offset, *len)?;
                    let memory = from.into_iter().flat_map(|(first, len)| each(first, len));
                    let writable = access.contains(Access::WRITE);
                    pages.extend(each(va.bits(), *len).zip(memory.map(|at| Some((at, writable)))));
                }
                BindRequest::Unbind(span) => {
                    self.window(span).ok_or(SpaceError::NotReserved(*span))?;
                    if !span.is_aligned(self.page) {
                        return Err(refused(crate::Error::Unaligned { span: *span, page: self.page }));
                    }
                    pages.extend(each(span.first().bits(), span.len()).map(|at| (at, None)));
                }
                BindRequest::Prefetch(_) => {}
                _ => return Err(refused(crate::Error::Unsupported("null pages, or pages that repeat"))),
            }
        }
        Ok(pages)
    }

    /// Pages one behind the other in one window, of which `alike` says that they belong together.
    fn groups<'a>(
        &'a self,
        pages: &'a BTreeMap<u64, Shown>,
        alike: impl Fn(&Shown, &Shown) -> bool,
    ) -> Vec<(&'a Window, u64, Vec<Shown>)> {
        let page = self.page.bytes();
        let mut groups: Vec<(&Window, u64, Vec<Shown>)> = Vec::new();
        for (at, shown) in pages {
            let last = groups.last_mut().filter(|(window, first, group)| {
                let next = first + group.len() as u64 * page;
                next == *at && next - window.at() < window.len() && alike(&group[0], shown)
            });
            match (last, self.window(&Span::inclusive(DeviceVa::new(*at), DeviceVa::new(*at)).expect("in order"))) {
                (Some((.., group)), _) => group.push(*shown),
                (None, Some(window)) => groups.push((window, *at, vec![*shown])),
                (None, None) => {} // each was found in a window before
            }
        }
        groups
    }

    /// Unmaps what is mapped at any of these pages.
    fn unmap(&self, pages: &BTreeMap<u64, Shown>) -> Result<(), SpaceError> {
        for (window, at, group) in self.groups(pages, |_, _| true) {
            let gone = window.unmap(at, group.len() as u64 * self.page.bytes());
            gone.map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        }
        Ok(())
    }
}

fn driver(error: crate::Error) -> SpaceError {
    SpaceError::Driver(Box::new(error))
}

fn refused(error: crate::Error) -> SpaceError {
    SpaceError::Refused(Box::new(error))
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

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        let window = self.reserved.get(&range.first()).filter(|window| window.len() == range.len());
        let window = window.ok_or(SpaceError::NotReserved(range))?;
        window.unmap(range.first().bits(), range.len()).map_err(|e| SpaceError::Invalidate(Box::new(e)))?;
        self.reserved.remove(&range.first());
        self.observer.see(&[BindRequest::Unbind(range)]);
        Ok(())
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        let pages = self.plan(requests)?;
        self.unmap(&pages)?;
        let page = self.page.bytes();
        // Rights are set for a whole group at once.
        let alike = |a: &Shown, b: &Shown| a.map(|(_, writable)| writable) == b.map(|(_, writable)| writable);
        for (window, at, group) in self.groups(&pages, alike) {
            let Some((_, writable)) = group[0] else { continue };
            let from: Vec<_> = group.iter().flatten().map(|(memory, _)| (*memory, page)).collect();
            if let Err(e) = window.map_again(at, &from, writable) {
                // Nothing is bound where some of it may be.
                self.unmap(&pages)?;
                return Err(driver(e));
            }
        }
        self.observer.see(requests);
        Ok(())
    }

    fn observer(&mut self) -> Option<&mut Observer> {
        Some(&mut self.observer)
    }
}
