//! What may be asked of a VM.

use alloc::sync::Arc;

use dmalane_addr::{Access, DeviceVa, Span};

use crate::Bo;

/// One change to a [`Vm`](crate::Vm). All addresses and lengths are multiples of the format's granule.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Request {
    /// Makes part of a buffer object visible. What was bound there before is replaced; bindings that reach out of the
    /// new one are cut and keep the rest.
    Bind {
        /// Where, in the device's address space.
        va: DeviceVa,
        /// Of which buffer.
        bo: Arc<Bo>,
        /// From which byte of the buffer.
        offset: u64,
        /// Bytes, not zero.
        len: u64,
        /// What the device may do.
        access: Access,
    },
    /// Removes whatever is bound within the span; bindings that reach out of it are cut. Nothing need be bound there.
    Unbind(Span<DeviceVa>),
}
