//! The narrow port over the wide one.

use std::time::Duration;

use crate::{
    Channel, Completion, DeviceFar, Ended, HostPart, Limits, Operation, Queue, Refused, Rejected, Ticket, Transfer,
    Work,
};

/// Makes the narrow port of a wide one: every [`Queue`] is a [`Channel`](crate::Channel) of plain copies.
///
/// ```
/// use dmalane_queue::{Channel, Copies, DeviceFar, Queue};
/// fn as_channel<Q: Queue>(queue: Q) -> impl Channel<Far = DeviceFar> {
///     Copies::new(queue)
/// }
/// ```
#[derive(Debug)]
pub struct Copies<Q> {
    queue: Q,
    ended: Vec<Ended>,
}

impl<Q: Queue> Copies<Q> {
    /// # Panics
    /// When the queue has operations in flight: their completions would have no place to go.
    pub fn new(queue: Q) -> Self {
        assert_eq!(queue.in_flight(), 0, "a channel of copies needs its queue for itself");
        Self { queue, ended: Vec::new() }
    }

    /// The queue, to look at.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// The queue, to be used directly.
    ///
    /// # Errors
    /// Gives the channel back while operations are in flight.
    pub fn into_queue(self) -> Result<Q, Self> {
        if self.queue.in_flight() == 0 { Ok(self.queue) } else { Err(self) }
    }

    /// Tells the device about everything that was submitted, without waiting for the next poll.
    pub fn ring_doorbell(&mut self) {
        self.queue.doorbell();
    }
}

fn widen(transfer: Transfer<DeviceFar>) -> Operation {
    let Transfer { part, direction, far: DeviceFar { at, via } } = transfer;
    Operation::copy(direction, part, via, at)
}

fn narrow(operation: Operation) -> Transfer<DeviceFar> {
    match operation.work {
        Work::Copy { direction, host: HostPart { part, via }, at } => {
            Transfer { part, direction, far: DeviceFar { at, via } }
        }
        _ => unreachable!("only `widen` makes operations here"),
    }
}

fn hand_over(ended: &mut Vec<Ended>, done: &mut Vec<Completion<DeviceFar>>) -> usize {
    let n = ended.len();
    done.extend(ended.drain(..).map(|Ended { ticket, operation, result, .. }| Completion {
        ticket,
        transfer: narrow(operation),
        result,
    }));
    n
}

impl<Q: Queue> Channel for Copies<Q> {
    type Far = DeviceFar;

    fn limits(&self) -> Limits {
        self.queue.limits()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn submit(&mut self, transfer: Transfer<DeviceFar>) -> Result<Ticket, Refused<DeviceFar>> {
        self.queue
            .enqueue(widen(transfer))
            .map_err(|Rejected { operation, reason }| Refused { transfer: narrow(operation), reason })
    }

    fn poll(&mut self, done: &mut Vec<Completion<DeviceFar>>) -> usize {
        self.queue.poll(&mut self.ended);
        hand_over(&mut self.ended, done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<DeviceFar>>, timeout: Duration) -> usize {
        self.queue.wait(&mut self.ended, timeout);
        hand_over(&mut self.ended, done)
    }

    fn halted(&self) -> Option<String> {
        self.queue.halted()
    }

    fn stop(&mut self, why: &str) {
        self.queue.stop(why);
    }
}
