//! Requests to a VM.

use alloc::sync::Arc;

use dmalane_addr::{Access, DeviceVa, Span};

use crate::Bo;

/// One change to a [`Vm`](crate::Vm). All addresses and lengths are multiples of the format's granule.
///
/// The requests are those of the Linux GPU drivers (`DRM_IOCTL_XE_VM_BIND`, `DRM_IOCTL_PANTHOR_VM_BIND`,
/// `DRM_IOCTL_NOUVEAU_VM_BIND`) and of Vulkan's sparse binding.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum BindRequest {
    /// Makes part of a buffer object visible. Earlier bindings there are replaced; bindings that reach out of the
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
        /// Rights of the device.
        access: Access,
    },
    /// Makes the same bytes of a buffer object visible again and again, as a sparse image does with the page behind its
    /// holes. Replaces and cuts like `Bind`.
    Repeat {
        /// Where; a multiple of `page`.
        va: DeviceVa,
        /// Of which buffer.
        bo: Arc<Bo>,
        /// The first of the bytes that repeat.
        offset: u64,
        /// Bytes that repeat: a granule, or a power of two of them.
        page: u64,
        /// Bytes of address space, a multiple of `page`, not zero.
        len: u64,
        /// Rights of the device.
        access: Access,
    },
    /// Makes the addresses read as zeroes, by way of the [null page](crate::Vm::set_null_page). They are mapped
    /// read-only, so a write is the device's fault and changes nothing. Replaces and cuts like `Bind`.
    Null {
        /// Where.
        va: DeviceVa,
        /// Bytes, not zero.
        len: u64,
    },
    /// Removes whatever is bound within the span; bindings that reach out of it are cut. Nothing need be bound there.
    Unbind(Span<DeviceVa>),
    /// Removes every binding of a buffer object. There need not be any.
    UnbindBo(Arc<Bo>),
    /// A hint that the device will soon use the span. It is checked and passed on
    /// ([`Committed::prefetches`](crate::Committed::prefetches)), and changes nothing.
    Prefetch(Span<DeviceVa>),
}
