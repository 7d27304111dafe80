//! The wide port: a channel with everything that a DMA engine does.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::{Abilities, Ended, Limits, Operation, Rejected, Stats, Ticket};

/// What became of a wish to cancel.
#[derive(Debug)]
pub enum Cancelled {
    /// The device had not been told of it: here it is back, and no completion will come.
    TakenBack(Operation),
    /// The device has it. It ends as it would have, or with [`OpError::Cancelled`](crate::OpError::Cancelled).
    Asked,
    /// The device has it and cannot be asked. It ends as it would have.
    TooLate,
    /// No operation in flight has this ticket.
    Unknown,
}

/// A channel of a DMA engine.
///
/// `enqueue` only writes down what to do; `doorbell` tells the device; `poll` collects what has ended. None of the three makes a
/// system call (a doorbell wakes a worker that has gone to sleep). Operations end in the order in which they were enqueued.
///
/// An operation owns its host memory until it is given back by `poll`, `wait` or a cancellation that took it back.
/// An implementation that is dropped with operations in flight waits for them; what cannot be waited for keeps its memory for ever.
pub trait Queue: Send {
    /// Operations in flight, and bytes per operation, at most. A gather list or a shape takes more than one place.
    fn limits(&self) -> Limits;

    /// What it can do.
    fn abilities(&self) -> Abilities;

    /// Operations that were accepted and not yet given back.
    fn in_flight(&self) -> usize;

    /// Takes an operation. The device begins with it after the next [`Queue::doorbell`], [`Queue::poll`] or [`Queue::wait`].
    ///
    /// # Errors
    /// [`Rejected`] gives the operation back: [`Refusal::Full`](crate::Refusal::Full) asks for a poll and another try, all
    /// others are final.
    fn enqueue(&mut self, operation: Operation) -> Result<Ticket, Rejected>;

    /// Tells the device about everything that was enqueued.
    fn doorbell(&mut self);

    /// Rings the doorbell, lets a device without threads of its own work, appends the operations that have ended to `done`
    /// and says how many. Does not block.
    fn poll(&mut self, done: &mut Vec<Ended>) -> usize;

    /// As [`Queue::poll`], but blocks until at least one operation has ended, none is in flight, or `timeout` has
    /// passed.
    fn wait(&mut self, done: &mut Vec<Ended>, timeout: Duration) -> usize;

    /// Takes an operation back that the device has not been told of, or asks the device to end it.
    fn cancel(&mut self, ticket: Ticket) -> Cancelled;

    /// Stops the channel when nothing has ended for so long although something is in flight; `None`: waits for ever.
    ///
    /// Memory is released only once the device has confirmed that it stopped. Then everything in flight ends with
    /// [`OpError::Stopped`](crate::OpError::Stopped), and only [`Queue::restart`] makes the channel take operations again.
    fn set_timeout(&mut self, timeout: Option<Duration>);

    /// Stops the channel now, as a time-out does.
    fn stop(&mut self, why: &str);

    /// Why the channel takes nothing any more, when it has halted by itself or was stopped, until it is restarted.
    fn halted(&self) -> Option<String> {
        None
    }

    /// Starts a channel that has stopped. Tickets go on where they were. True when it runs again, false while it has not
    /// stopped, has operations in flight, or the device does not answer.
    fn restart(&mut self) -> bool;

    /// Counters.
    fn stats(&self) -> Stats;

    /// Becomes readable after [`Queue::arm`] when something has ended; for an event loop. Shared by whoever asks, so it may be
    /// readable for nothing. `None` where the device has no interrupts that a file descriptor could stand for.
    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Asks for an event at the next end, and takes back one that has come. False when something has ended already, or when
    /// the device only works while it is polled: then poll instead of waiting for an event.
    fn arm(&mut self) -> bool {
        false
    }
}
