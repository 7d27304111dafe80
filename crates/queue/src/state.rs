//! The state that every queue keeps besides its operations.

use std::collections::VecDeque;

use dmalane_dma::{Forked, process_id};

use crate::{Cancelled, Capabilities, DeviceAddr, Limits, Operation, QueueAddr, Refusal, Refused, StopReason, Ticket};

/// Operations that a queue has accepted and not begun, oldest first.
pub type Waiting<A = DeviceAddr> = VecDeque<(Ticket, Operation<A>)>;

/// For implementations of [`Queue`](crate::Queue): the numbers of tickets, how many operations are in
/// flight, and why the queue has stopped.
#[derive(Debug)]
pub struct QueueState {
    /// The process that made it.
    made_by: u32,
    /// Operations that were accepted: the number of the next ticket.
    accepted: u64,
    /// Accepted and not given back.
    in_flight: usize,
    stopped: Option<StopReason>,
}

impl Default for QueueState {
    /// That of a new queue of this process.
    fn default() -> Self {
        Self { made_by: process_id(), accepted: 0, in_flight: 0, stopped: None }
    }
}

impl QueueState {
    /// True until the queue stops.
    #[inline]
    pub fn is_running(&self) -> bool {
        self.stopped.is_none()
    }

    /// Why the queue has stopped.
    pub fn stopped(&self) -> Option<&StopReason> {
        self.stopped.as_ref()
    }

    /// Operations that were accepted and not given back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// True in a child of `fork`: the queue, and what its operations use, are its parent's.
    pub fn is_of_parent(&self) -> bool {
        self.made_by != process_id()
    }

    /// Refuses an operation for a queue that has stopped, and in a child of `fork`, whose parent has the device.
    ///
    /// # Errors
    /// [`Refusal::Stopped`].
    pub fn check_running(&self) -> Result<(), Refusal> {
        let Self { made_by, .. } = *self;
        if self.is_of_parent() {
            return Err(Refusal::Stopped(StopReason::Lost(Forked { made_by }.into())));
        }
        self.stopped.clone().map_or(Ok(()), |reason| Err(Refusal::Stopped(reason)))
    }

    /// Stops the queue. False when it had stopped before; the first reason stays.
    pub fn stop(&mut self, reason: StopReason) -> bool {
        let running = self.is_running();
        if running {
            self.stopped = Some(reason);
        }
        running
    }

    /// Lets a queue that has stopped run again; false while it has not, or operations are in flight.
    pub fn restart(&mut self) -> bool {
        let restarts = !self.is_running() && self.in_flight == 0;
        if restarts {
            self.stopped = None;
        }
        restarts
    }

    /// Checks whether the queue can accept an operation now, which `more` checks too.
    ///
    /// # Errors
    /// [`Refusal::Stopped`], those of [`Operation::admit`] and of `more`, [`Refusal::Full`].
    pub fn check<A: QueueAddr>(
        &self,
        operation: &Operation<A>,
        capabilities: Capabilities,
        limits: Limits,
        more: impl FnOnce(&Operation<A>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        self.check_running()?;
        operation.admit(capabilities, limits)?;
        more(operation)?;
        if self.in_flight >= limits.capacity { Err(Refusal::Full) } else { Ok(()) }
    }

    /// Counts an operation that was checked, and names it.
    #[inline]
    pub fn accept(&mut self) -> Ticket {
        let number = self.accepted;
        self.in_flight += 1;
        self.accepted += 1;
        Ticket::new(number)
    }

    /// Operations that were accepted so far: the number of the next ticket.
    #[inline]
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// [`Queue::submit`](crate::Queue::submit): [checks](QueueState::check) an operation and puts it at the end of a
    /// list.
    ///
    /// # Errors
    /// The refusal, with the operation.
    pub fn submit<A: QueueAddr>(
        &mut self,
        operation: Operation<A>,
        capabilities: Capabilities,
        limits: Limits,
        more: impl FnOnce(&Operation<A>) -> Result<(), Refusal>,
        into: &mut Waiting<A>,
    ) -> Result<Ticket, Refused<A>> {
        if let Err(reason) = self.check(&operation, capabilities, limits, more) {
            return Err(Refused { operation, reason });
        }
        let ticket = self.accept();
        into.push_back((ticket, operation));
        Ok(ticket)
    }

    /// [`Queue::cancel`](crate::Queue::cancel) of a queue that cannot end what it has begun: takes an operation out of
    /// the list of those that were not. [`Cancelled::TooLate`] may also stand for one that has ended, while others are
    /// in flight.
    pub fn cancel<A>(&mut self, ticket: Ticket, from: &mut Waiting<A>) -> Cancelled<A> {
        if let Some(at) = from.iter().position(|(waiting, _)| *waiting == ticket)
            && let Some((_, operation)) = from.remove(at)
        {
            self.ended();
            return Cancelled::Removed(operation);
        }
        let maybe = ticket.number() < self.accepted && self.in_flight > 0;
        if maybe { Cancelled::TooLate } else { Cancelled::Unknown }
    }

    /// Counts an operation that has ended, or was taken back.
    #[inline]
    pub fn ended(&mut self) {
        self.in_flight -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_until_a_restart() {
        let mut state = QueueState::default();
        assert!(state.is_running() && state.check_running().is_ok());
        let reason = StopReason::Lost("unplugged".into());
        assert!(state.stop(reason.clone()) && !state.stop(StopReason::Requested("later".into())));
        assert_eq!((state.stopped(), state.check_running()), (Some(&reason), Err(Refusal::Stopped(reason.clone()))));
        // Not before everything in flight has ended.
        state.in_flight = 1;
        assert!(!state.restart() && !state.is_running());
        state.in_flight = 0;
        assert!(state.restart() && state.is_running() && !state.restart());
    }

    #[test]
    fn another_process_is_refused() {
        let state = QueueState { made_by: process_id() + 1, ..QueueState::default() };
        let submitted = QueueState::default().check_running().and(state.check_running());
        let Err(Refusal::Stopped(StopReason::Lost(cause))) = submitted else { panic!("{submitted:?}") };
        assert!(cause.to_string().contains("is a fork"), "{cause}");
    }

    #[test]
    fn every_operation_is_counted_once() {
        let mut state = QueueState::default();
        let limits = Limits { capacity: 3, max_len: 100, max_parts: usize::MAX };
        let mut waiting = Waiting::<DeviceAddr>::new();
        let submit = |state: &mut QueueState, waiting: &mut Waiting| {
            let submitted = state.submit(Operation::fence(), Capabilities::FENCE, limits, |_| Ok(()), waiting);
            submitted.map_err(|refused| refused.reason)
        };
        let tickets: Vec<Ticket> = (0..3).map(|_| submit(&mut state, &mut waiting).unwrap()).collect();
        assert_eq!((tickets[2].number(), state.in_flight(), waiting.len()), (2, 3, 3));
        assert_eq!(submit(&mut state, &mut waiting), Err(Refusal::Full));
        let Cancelled::Removed(_) = state.cancel(tickets[1], &mut waiting) else { panic!("it has not begun") };
        assert!(matches!(state.cancel(tickets[1], &mut waiting), Cancelled::TooLate), "others are in flight");
        assert!(matches!(state.cancel(Ticket::new(3), &mut waiting), Cancelled::Unknown), "never submitted");
        waiting.clear();
        (0..2).for_each(|_| state.ended());
        assert!(matches!(state.cancel(tickets[0], &mut waiting), Cancelled::Unknown), "nothing is in flight");
        assert_eq!((state.accept().number(), state.accepted(), state.in_flight()), (3, 4, 1));
    }

    #[test]
    fn an_operation_is_checked_in_order() {
        let mut state = QueueState { in_flight: 2, ..QueueState::default() };
        let operation = Operation::<DeviceAddr>::fence();
        let check = |state: &QueueState, capacity, more: Result<(), Refusal>| {
            state.check(&operation, Capabilities::FENCE, Limits { capacity, max_len: 1, max_parts: usize::MAX }, |_| {
                more
            })
        };
        assert_eq!(check(&state, 3, Ok(())), Ok(()));
        assert_eq!(check(&state, 2, Ok(())), Err(Refusal::Full));
        assert_eq!(check(&state, 3, Err(Refusal::Full)), Err(Refusal::Full));
        let reason = StopReason::Lost("unplugged".into());
        state.stop(reason.clone());
        assert_eq!(check(&state, 3, Ok(())), Err(Refusal::Stopped(reason)));
    }
}
