//! The one port of everything that moves bytes.

use std::fmt::Debug;
use std::time::Duration;

use dmalane_addr::{Address, CardAddr, DeviceVa, FileOffset};
use dmalane_dma::{BufferSlice, DmaFault};
use thiserror::Error;

use crate::Abilities;

/// Which way the bytes go, seen from host memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Into host memory: a file read; card to host (C2H).
    ToHost,
    /// Out of host memory: a file write; host to card (H2C).
    FromHost,
}

/// The far end of a transfer: what host memory is copied from or to.
pub trait Far: Clone + Debug + Send {
    /// The place `bytes` further on, or `None` past the top of its space.
    fn advance(&self, bytes: u64) -> Option<Self>;

    /// The place as an address of card memory, for policies that route by placement.
    fn card_addr(&self) -> Option<CardAddr> {
        None
    }
}

impl Far for FileOffset {
    fn advance(&self, bytes: u64) -> Option<Self> {
        self.checked_add(bytes)
    }
}

/// One operation: `part` of host memory, and the place that it is copied from or to. As long as the part.
#[derive(Debug)]
pub struct Transfer<F> {
    /// The host side.
    pub part: BufferSlice,
    /// Which way.
    pub direction: Direction,
    /// The other side.
    pub far: F,
}

/// Names an operation in flight; unique within its channel.
///
/// It is only a name: dropping it neither cancels the operation nor frees its memory.
#[must_use = "the completion can only be told from others by its ticket"]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket(u64);

impl Ticket {
    /// For implementations of [`Channel`]: the ticket with this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// An operation that ended, with its buffer.
#[derive(Debug)]
pub struct Completion<F> {
    /// What [`Channel::submit`] returned.
    pub ticket: Ticket,
    /// The operation, exactly as it was submitted.
    pub transfer: Transfer<F>,
    /// Ok when every byte was moved.
    pub result: Result<(), OpError>,
}

/// Why an operation failed. What was moved before may be any part of the bytes.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum OpError {
    /// The IOMMU refused the device an access to host memory.
    #[error(transparent)]
    Fault(#[from] DmaFault),
    /// The device could not reach its own memory at this address.
    #[error("the device has no memory at {0}")]
    NoCardMemory(CardAddr),
    /// The device's MMU does not translate this address, or not for this access.
    #[error("the device's MMU refused {0}")]
    MmuFault(DeviceVa),
    /// The device refused or failed the operation with a status of its own.
    #[error("the device failed the operation with status {status:#x}")]
    Device {
        /// The status as the device gave it.
        status: u32,
    },
    /// The file ended early: it is shorter than the read, perhaps because somebody truncated it.
    #[error("the file ended at {at}, {missing} bytes early")]
    EndOfFile {
        /// Where it ended.
        at: FileOffset,
        /// Bytes that were expected from there on.
        missing: u64,
    },
    /// The kernel failed a file operation.
    #[error("I/O error at {at}: {}", std::io::Error::from_raw_os_error(*errno))]
    Io {
        /// The first byte of the piece that failed.
        at: FileOffset,
        /// The error number.
        errno: i32,
    },
    /// The device answered a request with a count that cannot be: what it did is not known.
    #[error("the device answered a request for {asked} bytes at {at} with {got}")]
    BadCount {
        /// The first byte of the request.
        at: FileOffset,
        /// Its bytes.
        asked: u64,
        /// The answer.
        got: u64,
    },
    /// A comparison found a difference.
    #[error("the memories differ at byte {offset}")]
    Differs {
        /// The first byte that differs, counted over what is compared.
        offset: u64,
    },
    /// The operation was cancelled before it was done.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The channel was stopped or reset before the operation ended.
    #[error("the channel stopped: {0}")]
    Stopped(String),
}

/// An operation that was not accepted, given back whole.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct Refused<F: Debug> {
    /// The operation as it was submitted.
    pub transfer: Transfer<F>,
    /// Why.
    pub reason: Refusal,
}

/// Why a channel did not accept an operation.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many operations are in flight as the channel holds; poll, then try again.
    #[error("the channel is full")]
    Full,
    /// A transfer of no bytes.
    #[error("the transfer is empty")]
    Empty,
    /// More bytes than one operation may move.
    #[error("a transfer of {len} bytes is longer than {max}")]
    TooLong {
        /// Bytes asked for.
        len: u64,
        /// [`Limits::max_len`].
        max: u64,
    },
    /// The far end would run past the top of its address space.
    #[error("the far end runs past the top of its address space")]
    PastTheTop,
    /// The part belongs to other memory than the registration, or the registration to another bus than the channel.
    #[error("the part is not a part of a buffer registered on this bus")]
    NotRegistered,
    /// The registration does not let the device write (card to host) or read (host to card).
    #[error("the registration does not permit this direction")]
    NotPermitted,
    /// The channel does not go this way.
    #[error("the channel does not do {0:?}")]
    Unsupported(Direction),
    /// The queue does not have this ability.
    #[error("the channel does not do {0:?}")]
    Unable(Abilities),
    /// The device moves whole blocks only (direct I/O): its address, the length and the host's memory are multiples of this.
    #[error("addresses, lengths and memory must be multiples of {align} bytes here")]
    Misaligned {
        /// Bytes.
        align: u64,
    },
    /// The two sides of an operation are not of the same length, or its shape does not cover them.
    #[error("the two sides of the operation do not go together")]
    Mismatch,
    /// The channel has stopped: for good, or until it is restarted.
    #[error("the channel has stopped: {0}")]
    Stopped(String),
}

/// What a channel can hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Operations in flight, at most.
    pub capacity: usize,
    /// Bytes per operation, at most.
    pub max_len: u64,
}

/// Moves bytes between host memory and one far end, asynchronously.
///
/// Operations may complete in any order. An implementation that is dropped with operations in flight waits for them; what
/// cannot be waited for keeps its memory for ever rather than freeing it under the device.
pub trait Channel: Send {
    /// The kind of far end. A card channel does not take a file offset:
    ///
    /// ```compile_fail,E0271
    /// use dmalane_addr::FileOffset;
    /// use dmalane_queue::{Channel, DeviceFar};
    /// fn file<C: Channel<Far = FileOffset>>(c: C) {}
    /// fn card<C: Channel<Far = DeviceFar>>(c: C) { file(c) }
    /// ```
    type Far: Far;

    /// What the channel can hold.
    fn limits(&self) -> Limits;

    /// Operations that were accepted and not yet given back.
    fn in_flight(&self) -> usize;

    /// Takes an operation. It may not begin until the next [`Channel::poll`] or [`Channel::wait`], which tell the device
    /// about everything that was submitted.
    ///
    /// # Errors
    /// [`Refused`] gives the operation back.
    fn submit(&mut self, transfer: Transfer<Self::Far>) -> Result<Ticket, Refused<Self::Far>>;

    /// Appends the operations that have ended to `done` and says how many. Does not block.
    fn poll(&mut self, done: &mut Vec<Completion<Self::Far>>) -> usize;

    /// As [`Channel::poll`], but blocks until at least one operation has ended, none is in flight, or `timeout` has
    /// passed.
    fn wait(&mut self, done: &mut Vec<Completion<Self::Far>>, timeout: Duration) -> usize;

    /// Why the channel takes nothing any more, when it has halted by itself or was stopped. What is in flight then ends once the device has
    /// let go of it, which a device that is gone never confirms.
    fn halted(&self) -> Option<String> {
        None
    }

    /// Stops the channel, where it can be stopped: what is in flight ends with [`OpError::Stopped`] once the device has let go of it, and
    /// nothing more is accepted. For one that seems to hang; others do nothing here.
    fn stop(&mut self, why: &str) {
        let _ = why;
    }
}
