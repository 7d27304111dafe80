//! A batch between its check and its commit.

use alloc::vec::Vec;

use dmalane_addr::{Address, DeviceVa, Span};
use dmalane_iopt::{FlushList, Format, Tables};

use crate::{Binding, Error, Request, Vm};

/// A request that has been checked: within the VM, within the buffer, whole pages.
#[derive(Debug)]
pub(crate) enum Step {
    Bind(Binding),
    Unbind(Span<DeviceVa>),
}

impl Step {
    pub(crate) fn span(&self) -> Span<DeviceVa> {
        match self {
            Self::Bind(b) => b.span,
            Self::Unbind(span) => *span,
        }
    }

    /// Checks everything but the buffer's segments.
    pub(crate) fn check<F: Format>(request: Request, vm: Span<DeviceVa>) -> Result<Self, Error> {
        let granule = F::GRANULE;
        let step = match request {
            Request::Unbind(span) => Self::Unbind(span),
            Request::Bind { va, bo, offset, len, access } => {
                if len == 0 {
                    return Err(Error::Empty { va });
                }
                let span = Span::new(va, len).ok_or(Error::Wraps { va, len })?;
                if offset & (granule.bytes() - 1) != 0 {
                    return Err(Error::MisalignedOffset { va, bo: bo.id(), offset, granule });
                }
                if offset.checked_add(len).is_none_or(|end| end > bo.len()) {
                    return Err(Error::BeyondBo { va, bo: bo.id(), offset, len, bo_len: bo.len() });
                }
                if !F::supports(access) {
                    return Err(Error::Unsupported { va, access, format: F::NAME });
                }
                Self::Bind(Binding { span, bo, offset, access })
            }
        };
        let span = step.span();
        if !span.is_aligned(granule) {
            return Err(Error::Misaligned { span, granule });
        }
        if !vm.covers(&span) {
            return Err(Error::OutsideVm { span, vm });
        }
        Ok(step)
    }
}

/// A checked batch with its tables reserved. It borrows the VM, so nothing can come between plan and commit; dropping it
/// leaves the VM as it is.
#[must_use = "a plan does nothing until it is committed"]
#[derive(Debug)]
pub struct Plan<'a, F, T: Tables> {
    vm: &'a mut Vm<F, T>,
    steps: Vec<Step>,
}

/// The two calls that could fail, did `Vm::plan` not rule it out: spans and segments are checked, what a bind replaces
/// is unmapped first, and the worst case of tables is reserved.
const RESERVED: &str = "a planned step has its tables: Tables::reserve said so";

impl<'a, F: Format, T: Tables> Plan<'a, F, T> {
    pub(crate) fn new(vm: &'a mut Vm<F, T>, steps: Vec<Step>) -> Self {
        Self { vm, steps }
    }

    /// Applies the whole batch.
    ///
    /// New bindings are visible to the device when this returns. Old ones are gone from the tables, but the device may
    /// remember them until it has invalidated [`Committed::spans`]; buffers that lost their last binding must not be
    /// reused before that either.
    ///
    /// # Panics
    /// Only when `T` breaks its word: an allocation fails that [`Tables::reserve`] has promised, or a table comes at an
    /// address that the format cannot hold.
    pub fn commit(self) -> Committed<T::Addr> {
        let Self { vm, steps } = self;
        let mut flushes = Vec::new();
        for step in steps {
            let span = step.span();
            if vm.bindings.evict(span) {
                flushes.push(vm.table.unmap(span).expect(RESERVED));
            }
            if let Step::Bind(b) = step {
                let segments = b.bo.sg().runs(b.offset..b.offset + span.len()).into_iter().flatten();
                vm.table.map_sg(span.first(), segments, b.access).expect(RESERVED);
                vm.bindings.insert(b);
            }
        }
        Committed { flushes }
    }
}

/// What a commit took away. Invalidate its spans on the device, then hand it to [`Vm::invalidated`].
///
/// When dropped, the tables in it are leaked, which is safe.
#[must_use = "invalidate the spans on the device, then hand this to Vm::invalidated"]
#[derive(Debug)]
pub struct Committed<A> {
    pub(crate) flushes: Vec<FlushList<DeviceVa, A>>,
}

impl<A: Address> Committed<A> {
    /// What the device must invalidate, in the order of the requests; may repeat and overlap. Empty when the batch only
    /// bound where nothing was.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = Span<DeviceVa>> {
        self.flushes.iter().map(FlushList::span)
    }

    /// The flush list of each request that unmapped something.
    pub fn flushes(&self) -> &[FlushList<DeviceVa, A>] {
        &self.flushes
    }

    /// Bytes that were unmapped, including those that the same batch bound anew.
    pub fn unmapped_bytes(&self) -> u64 {
        self.flushes.iter().map(FlushList::bytes).sum()
    }

    /// True when there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.flushes.is_empty()
    }
}
