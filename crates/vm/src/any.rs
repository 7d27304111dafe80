//! A VM whose format is known only at run time.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{ControlFlow, Deref};

use dmalane_addr::{CardAddr, DeviceVa, PageSize, Span};
use dmalane_iopt::{Armv7, Format, FormatId, HeapTables, Leaf, StandIn, Tables};

use crate::array::ArrayError;
use crate::{BindRequest, Bo, Committed, Error, Handles, Invalidate, Mapped, PlanError, Vm, mapped};

/// A [`Vm`] of any format, for callers that choose the format at run time. Each function is that of the VM.
pub trait AnyVm {
    /// The format's smallest page.
    fn granule(&self) -> PageSize;

    /// Address range of the VM.
    fn range(&self) -> Span<DeviceVa>;

    /// [`Vm::plan`], or [`Vm::plan_reserved`] where `reserved` is true, and commit.
    ///
    /// # Errors
    /// As of these; the VM is as it was.
    fn apply(&mut self, requests: Vec<BindRequest>, reserved: bool) -> Result<Committed<CardAddr>, PlanError>;

    /// [`Vm::plan_array`] and commit; where `reserved` is true, as [`Vm::plan_reserved`]. Drops `handles`, which may be
    /// locked, before it commits.
    ///
    /// # Errors
    /// As of these; the VM is as it was.
    fn apply_array(
        &mut self,
        bytes: &[u8],
        stride: usize,
        count: usize,
        handles: Box<dyn Deref<Target = Handles> + '_>,
        reserved: bool,
    ) -> Result<Committed<CardAddr>, ArrayError>;

    /// [`Vm::merge`].
    ///
    /// # Errors
    /// As there.
    fn merge(&mut self, span: Span<DeviceVa>, invalidate: &mut dyn FnMut(Span<DeviceVa>)) -> Result<usize, Error>;

    /// [`Vm::bound_bytes`].
    fn bound_bytes(&mut self, bo: &Arc<Bo>) -> u64;

    /// [`Vm::invalidated`].
    fn invalidated(&mut self, committed: Committed<CardAddr>);

    /// [`Vm::lookup`].
    fn lookup(&self, va: DeviceVa) -> Option<Leaf<DeviceVa, CardAddr>>;

    /// Calls `each` with the mapped runs within the span, by ascending address, until `each` breaks off.
    fn mapping(&self, span: Span<DeviceVa>, each: &mut dyn FnMut(Mapped) -> ControlFlow<()>);

    /// [`Vm::break_before_make`].
    fn break_before_make(&mut self, invalidate: Option<Invalidate>);

    /// The number of bindings.
    fn binding_count(&self) -> usize;

    /// [`Vm::set_null_page`].
    ///
    /// # Errors
    /// As there.
    fn set_null_page(&mut self, addr: CardAddr, len: u64) -> Result<(), Error>;
}

/// An empty VM of a format that is chosen at run time: [`Vm::new`], or [`Vm::with_reserved`] where a part is reserved.
/// Not generic, so that the VMs of all formats are compiled once, with this crate: a few [`StandIn`]s stand for all of
/// them. Nobody else reads these tables, so it does not matter what their entries look like.
///
/// # Errors
/// As of these.
pub fn any_vm(
    format: FormatId,
    range: Span<DeviceVa>,
    reserved: Option<Span<DeviceVa>>,
    tables: HeapTables<CardAddr>,
) -> Result<Box<dyn AnyVm + Send>, Error> {
    macro_rules! vm {
        ($stand_in:ty) => {
            Box::new(Vm::<$stand_in, _>::standing_for(format, range, reserved, tables)?)
        };
    }
    let sizes = format.facts().page_sizes;
    let (k64, m2) = (sizes.contains(PageSize::SIZE_64K), sizes.contains(PageSize::SIZE_2M));
    Ok(match sizes.smallest() {
        // Its tables are shorter than a page.
        _ if format == FormatId::armv7_short => match reserved {
            Some(reserved) => Box::new(Vm::<Armv7, _>::with_reserved(range, reserved, tables)?),
            None => Box::new(Vm::<Armv7, _>::new(range, tables)?),
        },
        Some(PageSize::SIZE_4K) if !k64 => vm!(StandIn<12, false>),
        Some(PageSize::SIZE_4K) => vm!(StandIn<12, true>),
        Some(PageSize::SIZE_16K) if !m2 => vm!(StandIn<14, false>),
        Some(PageSize::SIZE_16K) => vm!(StandIn<14, true>),
        _ if !m2 => vm!(StandIn<16, false>),
        _ => vm!(StandIn<16, true>),
    })
}

impl<F: Format, T: Tables<Addr = CardAddr>> AnyVm for Vm<F, T> {
    fn granule(&self) -> PageSize {
        F::GRANULE
    }

    fn range(&self) -> Span<DeviceVa> {
        self.range()
    }

    fn apply(&mut self, requests: Vec<BindRequest>, reserved: bool) -> Result<Committed<CardAddr>, PlanError> {
        Ok(self.plan_batch(requests, reserved)?.commit())
    }

    fn apply_array(
        &mut self,
        bytes: &[u8],
        stride: usize,
        count: usize,
        handles: Box<dyn Deref<Target = Handles> + '_>,
        reserved: bool,
    ) -> Result<Committed<CardAddr>, ArrayError> {
        let plan = self.plan_operations(bytes, stride, count, &handles, reserved);
        drop(handles);
        Ok(plan?.commit())
    }

    fn merge(&mut self, span: Span<DeviceVa>, invalidate: &mut dyn FnMut(Span<DeviceVa>)) -> Result<usize, Error> {
        self.merge(span, invalidate)
    }

    fn bound_bytes(&mut self, bo: &Arc<Bo>) -> u64 {
        self.bound_bytes(bo)
    }

    fn invalidated(&mut self, committed: Committed<CardAddr>) {
        self.invalidated(committed);
    }

    fn lookup(&self, va: DeviceVa) -> Option<Leaf<DeviceVa, CardAddr>> {
        self.lookup(va)
    }

    fn mapping(&self, span: Span<DeviceVa>, each: &mut dyn FnMut(Mapped) -> ControlFlow<()>) {
        let _ = mapped::mapping(self, span, each);
    }

    fn break_before_make(&mut self, invalidate: Option<Invalidate>) {
        self.break_before_make(invalidate);
    }

    fn binding_count(&self) -> usize {
        self.bindings().count()
    }

    fn set_null_page(&mut self, addr: CardAddr, len: u64) -> Result<(), Error> {
        self.set_null_page(addr, len)
    }
}
