//! What becomes of an operation: a ticket, then a completion; or it is refused, or taken back.

use thiserror::Error;

use crate::{DeviceAddr, OpError, Operation, Refusal};

/// Names an operation in flight; unique within its queue.
///
/// It is only a name: dropping it neither cancels the operation nor frees its memory.
#[must_use = "only the ticket tells one completion from another"]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

impl Ticket {
    /// For implementations of [`Queue`](crate::Queue): the ticket with this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// An operation that ended, with its host memory.
#[derive(Debug)]
pub struct Completion<A = DeviceAddr> {
    /// The ticket that [`Queue::submit`](crate::Queue::submit) returned.
    pub ticket: Ticket,
    /// The operation, exactly as it was submitted.
    pub operation: Operation<A>,
    /// Ok when every byte was done.
    pub result: Result<(), OpError>,
    /// Bytes, counted from the front, that are known to be done: all of them when the result is Ok.
    pub bytes: u64,
}

// Operations are moved on the way of every transfer: into the queue, and out of it with the completion.
const _: () = assert!(size_of::<Operation>() <= 72 && size_of::<Completion>() <= 144);

/// An operation that was not accepted, given back whole.
#[derive(Debug, Error)]
#[error("the operation was not accepted")]
pub struct Refused<A: std::fmt::Debug = crate::DeviceAddr> {
    /// The operation as it was submitted.
    pub operation: Operation<A>,
    /// Why.
    #[source]
    pub reason: Refusal,
}

/// The outcome of [`Queue::cancel`](crate::Queue::cancel).
#[derive(Debug)]
pub enum Cancelled<A = DeviceAddr> {
    /// The device had not received it: here it is back, and no completion will follow.
    Removed(Operation<A>),
    /// The device has it and was asked to end it. It ends normally or with
    /// [`OpError::Cancelled`].
    Requested,
    /// The device has it and cannot be asked. It ends normally.
    TooLate,
    /// No operation in flight has this ticket.
    Unknown,
}
