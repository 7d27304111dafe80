//! The port of everything that moves bytes.

use std::time::Duration;

use crate::{
    Cancelled, Capabilities, Completion, DeviceAddr, Limits, Operation, QueueAddr, QueueState, Refused, StopReason,
    Ticket,
};

/// Moves bytes between host memory and one address space, asynchronously.
///
/// [`submit`](Queue::submit) writes an operation down; [`flush`](Queue::flush) tells the device; [`poll`](Queue::poll)
/// collects what has ended. Operations may end in any order, unless the queue has the capability
/// [`ORDERED`](Capabilities::ORDERED).
///
/// An operation owns its host memory until a completion, a refusal or a cancellation gives it back. A queue that is
/// dropped with operations in flight waits for them; memory that a device does not let go of is never freed.
///
/// Queues that wrap others forward every method. So do `Box<Q>` and `&mut Q`.
pub trait Queue: Send {
    /// The address space of the targets. A queue of a device does not take file offsets:
    ///
    /// ```compile_fail,E0271
    /// use dmalane_addr::FileOffset;
    /// use dmalane_queue::{DeviceAddr, Queue};
    /// fn file<Q: Queue<Addr = FileOffset>>(q: Q) {}
    /// fn device<Q: Queue<Addr = DeviceAddr>>(q: Q) { file(q) }
    /// ```
    type Addr: QueueAddr;

    /// Operations in flight, and bytes per operation, at most.
    fn limits(&self) -> Limits;

    /// The operations that [`Queue::submit`] accepts, and other capabilities of the queue.
    fn capabilities(&self) -> Capabilities;

    /// Operations that were accepted and not yet given back.
    fn in_flight(&self) -> usize;

    /// Takes an operation. The device begins with it after the next [`Queue::flush`], [`Queue::poll`] or
    /// [`Queue::wait`], if not before.
    ///
    /// # Errors
    /// [`Refused`] gives the operation back. [`Refusal::Full`](crate::Refusal::Full) asks for a poll and another try;
    /// all others are final.
    fn submit(&mut self, operation: Operation<Self::Addr>) -> Result<Ticket, Refused<Self::Addr>>;

    /// Tells the device about everything that was submitted (the doorbell). May make a system call.
    fn flush(&mut self);

    /// Flushes, lets a device without threads of its own work, appends the operations that have ended to `done` and
    /// says how many. Does not block.
    fn poll(&mut self, done: &mut Vec<Completion<Self::Addr>>) -> usize;

    /// As [`Queue::poll`], but blocks until at least one operation has ended, none is in flight, or `timeout` has
    /// passed.
    fn wait(&mut self, done: &mut Vec<Completion<Self::Addr>>, timeout: Duration) -> usize;

    /// The [`QueueState`] of an implementation that keeps one. The default of [`Queue::halted`]
    /// read it; wrappers forward these two instead.
    fn state(&self) -> Option<&QueueState> {
        None
    }

    /// Why the queue accepts nothing any more: it halted by itself or was stopped, and was not restarted since.
    /// Operations in flight then end once the device has let go of them, which a device that is gone never confirms.
    fn halted(&self) -> Option<StopReason> {
        self.state()?.stopped().cloned()
    }

    /// Stops the queue, with the capability [`STOP`](Capabilities::STOP); others ignore it. Operations in flight end
    /// with [`OpError::Stopped`](crate::OpError::Stopped) once the device has let go of them.
    fn stop(&mut self, reason: StopReason) {
        drop(reason);
    }

    /// Starts a queue that has stopped. Tickets go on where they were. True when it runs again; false while it has not
    /// stopped, has operations in flight, or the device does not answer, and always without the capability
    /// [`STOP`](Capabilities::STOP).
    fn restart(&mut self) -> bool {
        false
    }

    /// Takes an operation back that the device has not received, or asks the device to end it.
    fn cancel(&mut self, ticket: Ticket) -> Cancelled<Self::Addr> {
        let _ = ticket;
        Cancelled::TooLate
    }
}

/// Any queue of a device.
pub type DeviceQueue = dyn Queue<Addr = DeviceAddr>;

macro_rules! forward {
    ($pointer:ty) => {
        impl<Q: Queue + ?Sized> Queue for $pointer {
            type Addr = Q::Addr;

            fn limits(&self) -> Limits {
                (**self).limits()
            }

            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }

            fn in_flight(&self) -> usize {
                (**self).in_flight()
            }

            fn submit(&mut self, operation: Operation<Self::Addr>) -> Result<Ticket, Refused<Self::Addr>> {
                (**self).submit(operation)
            }

            fn flush(&mut self) {
                (**self).flush();
            }

            fn poll(&mut self, done: &mut Vec<Completion<Self::Addr>>) -> usize {
                (**self).poll(done)
            }

            fn wait(&mut self, done: &mut Vec<Completion<Self::Addr>>, timeout: Duration) -> usize {
                (**self).wait(done, timeout)
            }

            fn halted(&self) -> Option<StopReason> {
                (**self).halted()
            }

            fn stop(&mut self, reason: StopReason) {
                (**self).stop(reason);
            }

            fn restart(&mut self) -> bool {
                (**self).restart()
            }

            fn cancel(&mut self, ticket: Ticket) -> Cancelled<Self::Addr> {
                (**self).cancel(ticket)
            }
        }
    };
}

forward!(Box<Q>);
forward!(&mut Q);
