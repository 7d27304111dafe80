//! Progress of a job, and who is told of it.

use std::ops::ControlFlow;

use dmalane_dma::BufferRef;

/// Progress of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A chunk of a buffer that stays is present, and can be pinned and mapped for a device by `reference`; reads into
    /// it begin now, unless its bytes are there already.
    Allocated {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// A reference to the buffer.
        reference: BufferRef,
    },
    /// Bytes have arrived.
    Arrived {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A transfer has ended: the device has bytes of one extent, or zeroes that belong to none. Only with a device as
    /// the [`Sink`](super::Sink).
    OnDevice {
        /// Which buffer.
        buffer: usize,
        /// Offset in it of the first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Called with every [`Event`] in order; may stop the job. Runs on the worker that an event happens on, one call at a
/// time; must not panic.
pub type Watch<'a> = dyn FnMut(Event) -> ControlFlow<()> + Send + 'a;
