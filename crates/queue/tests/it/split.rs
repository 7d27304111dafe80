//! Several queues as one: operations that go whole, fences, cancellation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::CardAddr;
use dmalane_queue::{
    Abilities, AddressPolicy, Cancelled, DeviceAddr, Direction, Fragment, OpError, Operation, Policy, Queue, Refusal,
    Split, StopReason, Ticket, Work, drain,
};

use crate::fakes::{Device, Orders, number, slice};

const LONG: Duration = Duration::from_secs(60);

/// Cuts copies into fragments of 64 bytes, and gives them to the queues in turn.
#[derive(Default)]
struct Cut {
    queues: Vec<VecDeque<Fragment>>,
    /// The only queue for operations that are not cut.
    only: Option<usize>,
}

impl Policy for Cut {
    fn arrive(&mut self, transfer: u64, _: Direction, _: Option<CardAddr>, len: u64, channels: usize) {
        self.queues.resize_with(channels, VecDeque::new);
        for (i, offset) in (0..len).step_by(64).enumerate() {
            self.queues[i % channels].push_back(Fragment { transfer, offset, len: 64 });
        }
    }

    fn next(&mut self, channel: usize, _: Duration) -> Option<Fragment> {
        self.queues.get_mut(channel)?.pop_front()
    }

    fn ended(&mut self, _: usize, _: &Fragment, _: Duration, _: bool) {}

    fn forget(&mut self, transfer: u64) {
        self.queues.iter_mut().for_each(|queue| queue.retain(|f| f.transfer != transfer));
    }

    fn uses(&self, channel: usize, _: usize) -> bool {
        self.only.is_none_or(|only| only == channel)
    }
}

type Both = (Split<Device, Cut>, [Arc<Mutex<Orders>>; 2]);

fn both(capacity: usize, only: Option<usize>) -> Both {
    let ((a, a_orders), (b, b_orders)) = (Device::new(capacity), Device::new(capacity));
    (Split::new(vec![a, b], Cut { only, ..Cut::default() }), [a_orders, b_orders])
}

fn read(number: u64, len: usize) -> Operation {
    Operation::read(slice(len), DeviceAddr::Card(CardAddr::new(number)))
}

fn fill(number: u64) -> Operation {
    Operation::fill(DeviceAddr::Card(CardAddr::new(number)), 64, 0)
}

fn got(orders: &[Arc<Mutex<Orders>>; 2]) -> [Vec<u64>; 2] {
    [0, 1].map(|i| orders[i].lock().unwrap().got.clone())
}

/// Lets each queue end so many.
fn end(orders: &[Arc<Mutex<Orders>>; 2], each: usize) {
    orders.iter().for_each(|orders| orders.lock().unwrap().end = each);
}

fn results(split: &mut Split<Device, Cut>) -> Vec<(Ticket, Result<(), OpError>, u64)> {
    let mut done = Vec::new();
    split.poll(&mut done);
    done.into_iter().map(|end| (end.ticket, end.result, end.bytes)).collect()
}

#[test]
fn operations_that_are_not_copies_go_whole_to_the_queue_with_the_fewest() {
    let (mut split, orders) = both(4, None);
    let all = Abilities::FROM_HOST | Abilities::TO_HOST | Abilities::FILL | Abilities::STOP;
    assert_eq!(split.abilities(), all | Abilities::FENCE, "what both can do, and fences");
    let tickets: Vec<Ticket> = (0..4).map(|i| split.submit(fill(i)).unwrap()).collect();
    assert_eq!((got(&orders), split.in_flight()), ([vec![0, 2], vec![1, 3]], 4));
    end(&orders, 2);
    let mut ended = results(&mut split);
    ended.sort_by_key(|(ticket, ..)| *ticket);
    assert_eq!(ended, tickets.iter().map(|ticket| (*ticket, Ok(()), 64)).collect::<Vec<_>>());
    assert_eq!(split.in_flight(), 0);
    // A policy that leaves one queue alone is obeyed.
    let (mut split, orders) = both(2, Some(1));
    for i in 0..2 {
        let _ticket = split.submit(fill(i)).unwrap();
    }
    let refused = split.submit(fill(2)).unwrap_err();
    assert_eq!((refused.reason, number(&refused.operation)), (Refusal::Full, 2));
    assert_eq!(got(&orders), [vec![], vec![0, 1]]);
    let uses = |policy: AddressPolicy| [0, 1].map(|channel| policy.uses(channel, 2));
    assert_eq!(uses(AddressPolicy::new(Vec::new())), [true, true]);
    assert_eq!((uses(AddressPolicy::only(0)), uses(AddressPolicy::only(7))), ([true, false], [false, true]));
}

#[test]
fn what_is_behind_a_fence_waits_for_what_is_before_it() {
    let (mut split, orders) = both(4, None);
    let before = [split.submit(read(0, 128)).unwrap(), split.submit(fill(1000)).unwrap()];
    let fence = split.submit(Operation::fence()).unwrap();
    let behind = [split.submit(read(2000, 64)).unwrap(), split.submit(fill(3000)).unwrap()];
    let second = split.submit(Operation::fence()).unwrap();
    split.flush();
    assert!(results(&mut split).is_empty());
    let mut begun = got(&orders).concat();
    begun.sort_unstable();
    assert_eq!((begun, split.in_flight()), (vec![0, 64, 1000], 6));
    // The second half of the copy is not there yet.
    orders[0].lock().unwrap().end = 9;
    assert!(results(&mut split).iter().all(|(ticket, ..)| before.contains(ticket)));
    end(&orders, 9);
    let ended = results(&mut split);
    assert!(ended.contains(&(fence, Ok(()), 0)), "{ended:?}");
    assert!(!ended.iter().any(|(ticket, ..)| behind.contains(ticket) || *ticket == second), "{ended:?}");
    assert_eq!(split.in_flight(), 3);
    end(&orders, 9);
    let ended = drain(&mut split, LONG);
    assert_eq!((ended.len(), ended.last().map(|end| end.ticket)), (3, Some(second)));
    // A refusal behind a fence is a failure.
    let _fence = split.submit(Operation::fence()).unwrap();
    let late = split.submit(fill(1)).unwrap();
    orders.iter().for_each(|orders| orders.lock().unwrap().refuse = Some(Refusal::NotRegistered));
    let ended = drain(&mut split, LONG);
    assert_eq!((ended[1].ticket, &ended[1].result), (late, &Err(OpError::Refused(Refusal::NotRegistered))));
}

#[test]
fn fences_of_queues_that_have_stopped_end_too() {
    let (mut split, _orders) = both(4, None);
    let why = StopReason::Requested("for a test".into());
    let stopped = Err(OpError::Stopped(why.clone()));
    let tickets = [fill(0), Operation::fence(), read(1, 64), fill(2)].map(|operation| split.submit(operation).unwrap());
    split.stop(why.clone());
    assert_eq!(split.submit(fill(3)).unwrap_err().reason, Refusal::Stopped(why.clone()));
    let ended = drain(&mut split, LONG);
    assert_eq!(ended.iter().map(|end| end.ticket).collect::<Vec<_>>(), tickets);
    assert!(ended.iter().all(|end| end.result == stopped), "{ended:?}");
    assert_eq!(split.submit(Operation::fence()).unwrap_err().reason, Refusal::Stopped(why));
    assert!(split.restart() && split.submit(Operation::fence()).is_ok());
    assert_eq!(drain(&mut split, LONG)[0].result, Ok(()));
}

#[test]
fn a_cancelled_copy_comes_back_whole_or_ends_without_what_was_not_begun() {
    let (mut split, orders) = both(2, None);
    let first = split.submit(read(0, 128)).unwrap();
    split.flush();
    assert_eq!(got(&orders), [[0], [64]], "one fragment each, which the devices have begun");
    // Six fragments: two in the queues, the others not yet given to them.
    let long = split.submit(read(1000, 384)).unwrap();
    split.flush();
    let Cancelled::TakenBack(back) = split.cancel(long) else { panic!("no device has begun with it") };
    assert_eq!((number(&back), back.bytes(), split.in_flight()), (1000, 384, 1));
    assert!(matches!(split.cancel(long), Cancelled::Unknown), "it is back");
    assert!(matches!(split.cancel(first), Cancelled::Asked), "both devices were asked");
    end(&orders, 1);
    assert_eq!(results(&mut split), [(first, Ok(()), 128)]);
    // With the first two fragments begun, the rest of the bytes is taken back.
    let third = split.submit(back).unwrap();
    split.flush();
    assert!(matches!(split.cancel(third), Cancelled::Asked));
    assert!(matches!(split.cancel(third), Cancelled::Asked), "again");
    orders[1].lock().unwrap().end = 1;
    assert!(results(&mut split).is_empty());
    orders[0].lock().unwrap().end = 1;
    let mut done = Vec::new();
    split.poll(&mut done);
    assert_eq!((done[0].ticket, &done[0].result, done[0].bytes), (third, &Err(OpError::Cancelled), 128));
    assert_eq!(done[0].operation.bytes(), 384, "the whole of its memory");
    assert!(matches!(split.cancel(third), Cancelled::Unknown) && split.in_flight() == 0);
}

#[test]
fn whole_operations_and_those_behind_a_fence_are_taken_back() {
    let (mut split, orders) = both(2, Some(0));
    let tickets = [fill(0), fill(1), Operation::fence(), fill(2)].map(|operation| split.submit(operation).unwrap());
    assert!(matches!(split.cancel(tickets[0]), Cancelled::Asked), "begun");
    assert!(matches!(split.cancel(tickets[3]), Cancelled::TakenBack(o) if number(&o) == 2));
    assert!(matches!(split.cancel(tickets[1]), Cancelled::TakenBack(o) if number(&o) == 1));
    assert!(matches!(split.cancel(tickets[1]), Cancelled::Unknown));
    assert!(matches!(split.cancel(tickets[2]), Cancelled::TakenBack(o) if matches!(o.work, Work::Fence)));
    assert_eq!(split.in_flight(), 1);
    end(&orders, 1);
    assert_eq!(results(&mut split), [(tickets[0], Ok(()), 64)]);
    assert_eq!(split.in_flight(), 0);
}
