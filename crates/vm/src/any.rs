//! A VM whose format is known only at run time.

use alloc::vec::Vec;
use core::ops::ControlFlow;

use dmalane_addr::{CardAddr, DeviceVa, PageSize, Span};
use dmalane_iopt::{Format, Leaf, Tables};

use crate::{BindRequest, Committed, Error, Mapped, PlanError, Vm, mapped};

/// A [`Vm`] of any format, for callers that choose the format at run time. Each function is that of the VM.
pub trait AnyVm {
    /// The name of the page-table format.
    fn format(&self) -> &'static str;

    /// The format's smallest page.
    fn granule(&self) -> PageSize;

    /// What the VM covers.
    fn range(&self) -> Span<DeviceVa>;

    /// [`Vm::plan`] and commit.
    ///
    /// # Errors
    /// As of [`Vm::plan`]; the VM is as it was.
    fn apply(&mut self, requests: Vec<BindRequest>) -> Result<Committed<CardAddr>, PlanError>;

    /// [`Vm::invalidated`].
    fn invalidated(&mut self, committed: Committed<CardAddr>);

    /// [`Vm::lookup`].
    fn lookup(&self, va: DeviceVa) -> Option<Leaf<DeviceVa, CardAddr>>;

    /// What is bound within the span and where it leads, by ascending address, until `each` breaks off.
    fn mapping(&self, span: Span<DeviceVa>, each: &mut dyn FnMut(Mapped) -> ControlFlow<()>);

    /// The number of bindings.
    fn binding_count(&self) -> usize;

    /// [`Vm::set_null_page`].
    ///
    /// # Errors
    /// As there.
    fn set_null_page(&mut self, addr: CardAddr, len: u64) -> Result<(), Error>;
}

impl<F: Format, T: Tables<Addr = CardAddr>> AnyVm for Vm<F, T> {
    fn format(&self) -> &'static str {
        F::NAME
    }

    fn granule(&self) -> PageSize {
        F::GRANULE
    }

    fn range(&self) -> Span<DeviceVa> {
        self.range()
    }

    fn apply(&mut self, requests: Vec<BindRequest>) -> Result<Committed<CardAddr>, PlanError> {
        Ok(self.plan(requests)?.commit())
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

    fn binding_count(&self) -> usize {
        self.bindings().count()
    }

    fn set_null_page(&mut self, addr: CardAddr, len: u64) -> Result<(), Error> {
        self.set_null_page(addr, len)
    }
}
