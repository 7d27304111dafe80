//! Bindings, as a caller sees them.

use alloc::sync::Arc;

use dmalane_addr::{Access, DeviceVa, Span};

use crate::Bo;

/// One binding of a [`Vm`](crate::Vm), as it is now: a bind request, or what later requests have left of it. Requests
/// that continue each other show as one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Binding {
    /// Where.
    pub span: Span<DeviceVa>,
    /// To what.
    pub to: BindingTarget,
    /// Rights of the device.
    pub access: Access,
}

/// Target of a [`Binding`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum BindingTarget {
    /// The bytes of a buffer from an offset on.
    Bo {
        /// The buffer.
        bo: Arc<Bo>,
        /// The byte of it that is at the start of the span.
        offset: u64,
    },
    /// Some bytes of a buffer again and again.
    Repeat {
        /// The buffer.
        bo: Arc<Bo>,
        /// The first of the bytes that repeat. They are at every address that is a multiple of `page`.
        offset: u64,
        /// Bytes that repeat.
        page: u64,
    },
    /// Zeroes.
    Null,
}

impl Binding {
    /// The buffer, unless it is a null range.
    pub fn bo(&self) -> Option<&Arc<Bo>> {
        match &self.to {
            BindingTarget::Bo { bo, .. } | BindingTarget::Repeat { bo, .. } => Some(bo),
            BindingTarget::Null => None,
        }
    }

    /// The byte of the buffer where the binding starts (of those that repeat, the first); 0 for a null range.
    pub fn offset(&self) -> u64 {
        match &self.to {
            BindingTarget::Bo { offset, .. } | BindingTarget::Repeat { offset, .. } => *offset,
            BindingTarget::Null => 0,
        }
    }
}
