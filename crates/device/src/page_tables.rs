//! An address space made of page tables that this library writes.

use std::error::Error;

use dmalane_addr::{CardAddr, DeviceVa, PageSize, RangeAllocator, SgTable, Span};
use dmalane_iopt::{Format, Tables};
use dmalane_vm::{AnyVm, BindRequest, Plan, Vm};

use crate::{AddressSpace, AddressSpaceKind, SpaceError};

/// The address space of a device whose MMU walks tables of format `F` in table memory `T`.
pub struct PageTableSpace<F: Format, T: Tables<Addr = CardAddr>> {
    vm: Vm<F, T>,
    free: RangeAllocator<DeviceVa>,
    invalidate: Invalidate,
    /// The device may remember translations that are gone.
    stale: bool,
}

type Invalidate = Box<dyn FnMut() -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// Ranges start at multiples of this and are as long: the largest leaf that is laid out for.
const LARGE: PageSize = PageSize::SIZE_2M;

impl<F: Format, T: Tables<Addr = CardAddr>> PageTableSpace<F, T> {
    /// All addresses of `vm`, in which nothing is bound yet. `invalidate` makes the device forget translations; it is
    /// called after an unbind, before what was unbound is used again.
    pub fn new(
        vm: Vm<F, T>,
        invalidate: impl FnMut() -> Result<(), Box<dyn Error + Send + Sync>> + Send + 'static,
    ) -> Self {
        let free = RangeAllocator::new(vm.range(), F::GRANULE);
        Self { vm, free, invalidate: Box::new(invalidate), stale: false }
    }
}

impl<F: Format, T: Tables<Addr = CardAddr>> PageTableSpace<F, T> {
    /// The error of a batch. A device that is lost has no memory for tables either, and is the reason then.
    fn why(&mut self, error: dmalane_vm::Error) -> SpaceError {
        let tables = matches!(error, dmalane_vm::Error::NoTables { .. });
        match tables.then(|| (self.invalidate)().err()).flatten() {
            Some(lost) => SpaceError::Driver(lost),
            None => SpaceError::Vm(error),
        }
    }
}

impl<F: Format, T: Tables<Addr = CardAddr> + Send> AddressSpace for PageTableSpace<F, T> {
    fn kind(&self) -> AddressSpaceKind {
        AddressSpaceKind::PageTables { format: F::NAME }
    }

    fn reserve(&mut self, _: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        let whole = LARGE.round_up(len.max(1));
        whole.and_then(|whole| self.free.allocate(whole, LARGE).ok()).ok_or(SpaceError::Exhausted(len))
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        self.apply(&[BindRequest::Unbind(range)])?;
        self.free.free(range).map_err(|_| SpaceError::NotReserved(range))
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        let committed = match requests {
            // The VM has a shorter way for one.
            [BindRequest::Bind { va, bo, offset, len, access }] => self.vm.bind(*va, bo, *offset, *len, *access),
            [BindRequest::Unbind(span)] => self.vm.unbind(*span),
            _ => self.vm.plan(requests.iter().cloned()).map(Plan::commit).map_err(|e| e.error),
        };
        let committed = committed.map_err(|error| self.why(error))?;
        self.stale |= !committed.is_empty();
        if self.stale {
            (self.invalidate)().map_err(SpaceError::Invalidate)?;
            self.stale = false;
        }
        self.vm.invalidated(committed);
        Ok(())
    }

    fn leaf_counts(&self) -> Vec<(PageSize, u64)> {
        self.vm.page_table().leaf_counts().collect()
    }

    fn vm(&self) -> Option<&dyn AnyVm> {
        Some(&self.vm)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dmalane_addr::{Access, SgIndex};
    use dmalane_iopt::{HeapTables, X86_64_4Level};
    use dmalane_vm::Bo;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_range_whose_translations_are_not_forgotten_is_not_used_again() {
        let range = Span::new(DeviceVa::new(4 * MIB), 2 * MIB).unwrap();
        let vm = Vm::<X86_64_4Level, _>::new(range, HeapTables::new(CardAddr::new(0))).unwrap();
        let mut fails = true;
        let mut space = PageTableSpace::new(vm, move || match std::mem::replace(&mut fails, false) {
            true => Err("the card is gone".into()),
            false => Ok(()),
        });
        let mut memory = SgTable::new();
        memory.push(CardAddr::new(0), 4096).unwrap();
        memory.push(CardAddr::new(MIB), 4096).unwrap();
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&memory).unwrap()));

        let got = space.reserve(&memory, 8192).unwrap();
        assert_eq!(got, range, "rounded up to 2 MiB");
        assert!(matches!(space.reserve(&memory, 1), Err(SpaceError::Exhausted(1))));
        space
            .apply(&[BindRequest::Bind { va: got.first(), bo: bo.clone(), offset: 0, len: 8192, access: Access::READ }])
            .unwrap();
        assert_eq!(space.leaf_counts().iter().map(|(_, n)| n).sum::<u64>(), 2);
        assert_eq!(space.vm().unwrap().binding_count(), 1);
        let error = space.release(got).unwrap_err();
        assert!(matches!(error, SpaceError::Invalidate(_)), "{error}");
        assert!(matches!(space.reserve(&memory, 1), Err(SpaceError::Exhausted(1))));
        // The second try reaches the device.
        space.release(got).unwrap();
        assert_eq!(space.reserve(&memory, 8192).unwrap(), range);
    }
}
