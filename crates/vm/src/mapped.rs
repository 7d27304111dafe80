//! Runs of what a VM maps: bindings joined with the leaves behind them.

use alloc::sync::Arc;
use core::ops::ControlFlow;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, Span};
use dmalane_iopt::{Format, Run, Tables};

use crate::{Binding, BindingTarget, Bo, Vm};

/// A run of mappings of a VM that continue each other, in leaves of one size. It does not depend on how the bindings
/// behind it were cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Mapped {
    /// Where.
    pub span: Span<DeviceVa>,
    /// Content of the run.
    pub source: MappedSource,
    /// Where the first byte is. Of a buffer's bytes in order, the following ones follow it; what repeats does so.
    pub to: CardAddr,
    /// Rights of the device.
    pub access: Access,
    /// The size of the leaves. One of them may reach beyond the span.
    pub leaf: PageSize,
}

/// Content of a [`Mapped`] run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MappedSource {
    /// Bytes of a buffer object in order.
    Bo {
        /// Its id.
        bo: u64,
        /// The byte at the start of the span.
        offset: u64,
    },
    /// Bytes of a buffer object again and again.
    Repeat {
        /// Its id.
        bo: u64,
        /// The first of the bytes that repeat; they are at every multiple of `page`.
        offset: u64,
        /// Bytes that repeat.
        page: u64,
    },
    /// Zeroes.
    Null,
}

impl Mapped {
    fn new(binding: &Binding, run: Run<DeviceVa, CardAddr>) -> Option<Self> {
        let within = run.at.offset_from(binding.span.first())?;
        let source = match &binding.to {
            BindingTarget::Bo { bo, offset } => MappedSource::Bo { bo: bo.id(), offset: offset + within },
            BindingTarget::Repeat { bo, offset, page } => {
                MappedSource::Repeat { bo: bo.id(), offset: *offset, page: *page }
            }
            BindingTarget::Null => MappedSource::Null,
        };
        let span = Span::new(run.at, run.len)?;
        Some(Self { span, source, to: run.to, access: run.access, leaf: run.size })
    }

    /// This and `next` as one, when `next` goes on where this one ends.
    fn joined(&self, next: &Self) -> Option<Self> {
        let len = self.span.len();
        let goes_on = match (self.source, next.source) {
            (MappedSource::Bo { bo, offset }, MappedSource::Bo { bo: other, offset: there }) => {
                bo == other && offset.checked_add(len) == Some(there) && self.to.checked_add(len) == Some(next.to)
            }
            // Where each byte of it is follows from the first: the same ones again.
            (here, there) => here == there,
        };
        let follows = self.span.first().checked_add(len) == Some(next.span.first());
        let alike = (self.access, self.leaf) == (next.access, next.leaf);
        Span::inclusive(self.span.first(), next.span.last())
            .filter(|_| goes_on && follows && alike)
            .map(|span| Self { span, ..*self })
    }
}

pub(crate) fn mapping<F: Format, T: Tables>(
    vm: &Vm<F, T>,
    span: Span<DeviceVa>,
    each: &mut dyn FnMut(Mapped) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut last: Option<Mapped> = None;
    let mut last_bo: Option<Arc<Bo>> = None;
    let page = |at: DeviceVa| at.bits() >> F::GRANULE.log2();
    for binding in vm.bindings_within(page(span.first()), page(span.last())) {
        let Some(part) = binding.span.intersect(&span) else { break };
        // Two buffers may have one id.
        if last_bo.as_ref().map(Arc::as_ptr) != binding.bo().map(Arc::as_ptr) {
            last.take().map_or(ControlFlow::Continue(()), &mut *each)?;
            last_bo = binding.bo().cloned();
        }
        for run in vm.runs(part) {
            let Some(next) = Mapped::new(&binding, run) else { continue };
            last = match last {
                None => Some(next),
                Some(before) => match before.joined(&next) {
                    Some(both) => Some(both),
                    None => {
                        each(before)?;
                        Some(next)
                    }
                },
            };
        }
    }
    last.map_or(ControlFlow::Continue(()), each)
}
