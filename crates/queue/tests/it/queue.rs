//! The port itself: its addresses, and a queue that has nothing but what it must have.

use std::time::Duration;

use dmalane_addr::{Access, CardAddr, DeviceVa, FileOffset};
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, DeviceQueue, Direction, Limits, Operation, Queue, QueueAddr,
    QueueState, Refused, Registered, StopReason, Ticket, Waiting,
};

use crate::fakes::{Bus, numbered, pages};

/// Ends everything at the next poll.
#[derive(Default)]
struct Plain {
    state: QueueState,
    waiting: Waiting,
}

impl Queue for Plain {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: 2, max_len: 100, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        self.state.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let (capabilities, limits) = (self.capabilities(), self.limits());
        self.state.submit(operation, capabilities, limits, |_| Ok(()), &mut self.waiting)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        while let Some((ticket, operation)) = self.waiting.pop_front() {
            let completion = Completion { ticket, bytes: operation.bytes(), operation, result: Ok(()) };
            self.state.ended();
            done.push(completion);
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, _: Duration) -> usize {
        self.poll(done)
    }
}

#[test]
fn a_queue_without_other_capabilities_says_so() {
    let mut boxed: Box<DeviceQueue> = Box::<Plain>::default();
    let ticket = boxed.submit(numbered(0)).unwrap();
    boxed.stop(StopReason::Requested("ignored".into()));
    assert_eq!((boxed.halted(), boxed.restart()), (None, false));
    assert!(matches!(boxed.cancel(ticket), Cancelled::TooLate) && boxed.in_flight() == 1);
    let mut done = Vec::new();
    assert_eq!((boxed.poll(&mut done), done[0].ticket, boxed.in_flight()), (1, ticket, 0));
}

#[test]
fn the_device_writes_what_goes_to_the_host() {
    assert_eq!([Direction::ToHost, Direction::FromHost].map(Direction::host_access), [Access::WRITE, Access::READ]);
}

#[test]
fn addresses_advance_within_their_space() {
    fn check<A: QueueAddr>(of: impl Fn(u64) -> A, card: bool) {
        let moved = of(4096).advance(100).unwrap();
        assert_eq!((of(4096).bits(), moved.bits()), (4096, 4196));
        assert!(of(u64::MAX).advance(1).is_none() && of(u64::MAX - 1).advance(1).is_some());
        assert_eq!(moved.card_addr(), card.then_some(CardAddr::new(4196)));
    }
    check(FileOffset::new, false);
    check(|at| DeviceAddr::from(DeviceVa::new(at)), false);
    check(|at| DeviceAddr::from(CardAddr::new(at)), true);
}

#[test]
fn a_registration_knows_whether_it_is_used() {
    let bus = Bus::default();
    let (one, two) = (pages(1), pages(2));
    let via = Registered::new(&bus, &one, Access::RW).unwrap();
    assert!(!via.is_busy());
    let clone = via.clone();
    assert!(via.is_busy());
    let via = via.deregister().unwrap_err();
    drop(clone);
    let (part, rest) = one.into_slice().split_at(100).unwrap();
    assert_eq!(via.iova_of(&part), via.mapping().span().sub(0, 100));
    assert_eq!(via.iova_of(&rest), via.mapping().span().sub(100, 3996));
    assert_eq!(via.iova_of(&two.into_slice()), None);
    via.deregister().unwrap();
    assert_eq!(bus.pinned(), 0);
}
