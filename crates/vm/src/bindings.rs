//! Which part of which buffer is bound where.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use dmalane_addr::{Access, Address, DeviceVa, Span};

use crate::Bo;

/// One binding of a [`Vm`](crate::Vm), as it is now: a bind request, or what later requests have left of it.
#[derive(Clone, Debug)]
pub struct Binding {
    /// Where.
    pub span: Span<DeviceVa>,
    /// Of which buffer.
    pub bo: Arc<Bo>,
    /// The byte of the buffer that is at the start of the span.
    pub offset: u64,
    /// What the device may do.
    pub access: Access,
}

impl Binding {
    /// The part within `span`, if any.
    fn part(&self, span: Option<Span<DeviceVa>>) -> Option<Self> {
        let span = self.span.intersect(&span?)?;
        let offset = self.offset + span.first().offset_from(self.span.first())?; // within the buffer: no overflow
        Some(Self { span, bo: self.bo.clone(), offset, access: self.access })
    }
}

/// The bindings by their first address. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Bindings(BTreeMap<DeviceVa, Binding>);

impl Bindings {
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Binding> + ExactSizeIterator {
        self.0.values()
    }

    /// True when something is bound within the span.
    pub(crate) fn overlaps(&self, span: Span<DeviceVa>) -> bool {
        self.0.range(..=span.last()).next_back().is_some_and(|(_, b)| b.span.last() >= span.first())
    }

    /// Removes what is bound within the span and keeps what sticks out on either side. True when there was any.
    pub(crate) fn evict(&mut self, span: Span<DeviceVa>) -> bool {
        let mut any = false;
        // From above, as the one that reaches in from below has to be the last anyway.
        while let Some((&first, b)) = self.0.range(..=span.last()).next_back()
            && b.span.last() >= span.first()
        {
            any = true;
            let above = b.part(span.last().checked_add(1).and_then(|a| Span::inclusive(a, b.span.last())));
            let below = (first < span.first()).then(|| DeviceVa::new(span.first().bits() - 1));
            let below = below.and_then(|last| b.part(Span::inclusive(first, last)));
            self.0.remove(&first);
            for rest in [above, below].into_iter().flatten() {
                self.0.insert(rest.span.first(), rest);
            }
        }
        any
    }

    /// Adds a binding where nothing is bound.
    pub(crate) fn insert(&mut self, binding: Binding) {
        self.0.insert(binding.span.first(), binding);
    }
}
