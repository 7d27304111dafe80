//! What a VM maps, told as runs: bindings joined with the leaves behind them.

use core::ops::ControlFlow;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, Span};
use dmalane_iopt::{Format, Tables};

use crate::Vm;

/// A part of a VM that goes on in one way: bytes of one buffer object in order, in leaves of one size, contiguous on the
/// card. It says the same however the bindings behind it were cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// Where.
    pub span: Span<DeviceVa>,
    /// The id of the buffer object.
    pub bo: u64,
    /// The byte of the buffer at the start of the span.
    pub offset: u64,
    /// Where that byte is.
    pub to: CardAddr,
    /// What the device may do.
    pub access: Access,
    /// The size of the leaves. One of them may reach beyond the span.
    pub leaf: PageSize,
}

impl Mapped {
    /// This and `next` as one, when `next` goes on where this one ends.
    fn joined(&self, next: &Self) -> Option<Self> {
        let len = self.span.len();
        let continues = self.span.first().checked_add(len) == Some(next.span.first())
            && self.to.checked_add(len) == Some(next.to)
            && self.offset.checked_add(len) == Some(next.offset)
            && (self.bo, self.access, self.leaf) == (next.bo, next.access, next.leaf);
        let span = Span::inclusive(self.span.first(), next.span.last()).filter(|_| continues)?;
        Some(Self { span, ..*self })
    }
}

pub(crate) fn mapping<F: Format, T: Tables>(
    vm: &Vm<F, T>,
    span: Span<DeviceVa>,
    each: &mut dyn FnMut(Mapped) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut last: Option<Mapped> = None;
    for binding in vm.bindings() {
        let Some(part) = binding.span.intersect(&span) else { continue };
        for run in vm.runs(part) {
            let Some((within, span)) = run.at.offset_from(binding.span.first()).zip(Span::new(run.at, run.len)) else {
                continue;
            };
            let next = Mapped {
                span,
                bo: binding.bo.id(),
                offset: binding.offset + within,
                to: run.to,
                access: run.access,
                leaf: run.size,
            };
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
