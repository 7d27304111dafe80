//! Several queues as one: operations that go whole, fences, cancellation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::{Access, CardAddr};
use dmalane_queue::{
    AddressPolicy, BalancePolicy, Cancelled, Capabilities, DeviceAddr, Direction, Limits, OpError, Operation, Piece,
    Policy, Queue, Refusal, Refused, Registered, Split, StopReason, Ticket, Work, drain,
};

use crate::fakes::{Bus, Device, Orders, number, pages, slice};

const LONG: Duration = Duration::from_secs(60);

/// Cuts copies into pieces of 64 bytes, and gives them to the queues in turn.
#[derive(Default)]
struct Cut {
    queues: Vec<VecDeque<Piece>>,
    /// The only queue for operations that are not cut.
    only: Option<usize>,
}

impl Policy for Cut {
    fn arrive(&mut self, transfer: u64, _: Direction, _: Option<CardAddr>, len: u64, channels: usize) {
        self.queues.resize_with(channels, VecDeque::new);
        for (i, offset) in (0..len).step_by(64).enumerate() {
            self.queues[i % channels].push_back(Piece { transfer, offset, len: 64 });
        }
    }

    fn next(&mut self, channel: usize, _: Duration) -> Option<Piece> {
        self.queues.get_mut(channel)?.pop_front()
    }

    fn ended(&mut self, _: usize, _: &Piece, _: Duration, _: bool) {}

    fn forget(&mut self, transfer: u64) {
        self.queues.iter_mut().for_each(|queue| queue.retain(|f| f.transfer != transfer));
    }

    fn uses(&self, channel: usize, _: usize) -> bool {
        self.only.is_none_or(|only| only == channel)
    }
}

type Both = (Split<Device>, [Arc<Mutex<Orders>>; 2]);

fn both(capacity: usize, only: Option<usize>) -> Both {
    let ((a, a_orders), (b, b_orders)) = (Device::new(capacity), Device::new(capacity));
    (Split::new(vec![a, b], Box::new(Cut { only, ..Cut::default() })), [a_orders, b_orders])
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

/// Lets each queue end `each` operations.
fn end(orders: &[Arc<Mutex<Orders>>; 2], each: usize) {
    orders.iter().for_each(|orders| orders.lock().unwrap().end = each);
}

fn results(split: &mut Split<Device>) -> Vec<(Ticket, Result<(), OpError>, u64)> {
    let mut done = Vec::new();
    split.poll(&mut done);
    done.into_iter().map(|end| (end.ticket, end.result, end.bytes)).collect()
}

#[test]
fn a_copy_that_is_not_cut_is_passed_on_as_it_was_submitted() {
    let bus = Bus::default();
    let (mut split, orders) = both(4, None);
    // What takes an operation apart holds its registration itself, and gives each part another.
    for (len, shared) in [(64, [vec![false], vec![]]), (128, [vec![true], vec![true]])] {
        let buf = pages(1);
        let via = Registered::new(&bus, &buf, Access::RW).unwrap();
        let slice = buf.into_slice().split_at(len).unwrap().0;
        let _ticket = split.submit(Operation::read((slice, via), DeviceAddr::Card(CardAddr::new(0)))).unwrap();
        split.flush();
        assert_eq!([0, 1].map(|i| std::mem::take(&mut orders[i].lock().unwrap().shared)), shared);
        end(&orders, 1);
        let back = drain(&mut split, LONG).remove(0).operation;
        assert!(back.bytes() == len as u64 && !back.hosts()[0].via.as_ref().unwrap().is_busy());
    }
}

#[test]
fn operations_that_are_not_copies_go_whole_to_the_queue_with_the_fewest() {
    let (mut split, orders) = both(4, None);
    let all = Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::FILL | Capabilities::STOP;
    assert_eq!(split.capabilities(), all | Capabilities::FENCE, "what both can do, and fences");
    let tickets: Vec<Ticket> = (0..4).map(|i| split.submit(fill(i)).unwrap()).collect();
    assert_eq!((got(&orders), split.in_flight()), ([vec![0, 2], vec![1, 3]], 4));
    end(&orders, 2);
    let mut ended = results(&mut split);
    ended.sort_by_key(|(ticket, ..)| *ticket);
    assert_eq!(ended, tickets.iter().map(|ticket| (*ticket, Ok(()), 64)).collect::<Vec<_>>());
    assert_eq!(split.in_flight(), 0);
    assert_eq!(both(3, None).0.limits(), Limits { capacity: 6, max_len: 1 << 16, max_parts: usize::MAX });
    let splits = Split::new(vec![both(1, None).0, both(1, None).0], Box::<Cut>::default());
    assert!(splits.capabilities().contains(Capabilities::FENCE), "as those it is made of");
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
    // Also for what is no copy.
    end(&orders, 0);
    let (before, fence) = (split.submit(fill(0)).unwrap(), split.submit(Operation::fence()).unwrap());
    assert!(results(&mut split).is_empty());
    end(&orders, 1);
    assert_eq!(results(&mut split), [(before, Ok(()), 64), (fence, Ok(()), 0)]);
    end(&orders, 9);
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
    assert!(split.restart() && !split.restart(), "it runs");
    let fence = split.submit(Operation::fence()).unwrap();
    split.flush();
    assert!(matches!(split.cancel(fence), Cancelled::TooLate), "it has ended");
    assert!(matches!(split.cancel(Ticket::new(fence.number() + 1)), Cancelled::Unknown));
    assert_eq!(drain(&mut split, LONG)[0].result, Ok(()));
}

#[test]
fn a_cancelled_copy_comes_back_whole_or_ends_without_what_was_not_begun() {
    let (mut split, orders) = both(2, None);
    let first = split.submit(read(0, 128)).unwrap();
    split.flush();
    assert_eq!(got(&orders), [[0], [64]], "one piece each, which the devices have begun");
    // Six pieces: two in the queues, the others not yet given to them.
    let long = split.submit(read(1000, 384)).unwrap();
    split.flush();
    let Cancelled::Removed(back) = split.cancel(long) else { panic!("no device has begun with it") };
    assert_eq!((number(&back), back.bytes(), split.in_flight()), (1000, 384, 1));
    assert!(matches!(split.cancel(long), Cancelled::Unknown), "it is back");
    assert!(matches!(split.cancel(first), Cancelled::Requested), "both devices were asked");
    end(&orders, 1);
    assert_eq!(results(&mut split), [(first, Ok(()), 128)]);
    // With the first two pieces begun, the rest of the bytes is taken back.
    let third = split.submit(back).unwrap();
    split.flush();
    assert!(matches!(split.cancel(third), Cancelled::Requested));
    assert!(matches!(split.cancel(third), Cancelled::Requested), "again");
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
    assert!(matches!(split.cancel(tickets[0]), Cancelled::Requested), "begun");
    assert!(matches!(split.cancel(tickets[3]), Cancelled::Removed(o) if number(&o) == 2));
    assert!(matches!(split.cancel(tickets[1]), Cancelled::Removed(o) if number(&o) == 1));
    assert!(matches!(split.cancel(tickets[1]), Cancelled::Unknown));
    assert!(matches!(split.cancel(tickets[2]), Cancelled::Removed(o) if matches!(o.work, Work::Fence)));
    assert_eq!(split.in_flight(), 1);
    end(&orders, 1);
    assert_eq!(results(&mut split), [(tickets[0], Ok(()), 64)]);
    assert_eq!(split.in_flight(), 0);
}

#[test]
fn fragments_begin_where_there_is_room() {
    let (mut split, orders) = both(2, Some(0));
    let whole = [1000, 2000].map(|i| split.submit(fill(i)).unwrap());
    let copy = split.submit(read(0, 256)).unwrap();
    split.flush();
    assert_eq!(got(&orders), [[1000, 2000], [64, 192]], "one half first");
    end(&orders, 2);
    assert_eq!(results(&mut split), whole.map(|ticket| (ticket, Ok(()), 64)));
    assert_eq!(got(&orders), [vec![1000, 2000, 0, 128], vec![64, 192]]);
    end(&orders, 2);
    let mut done = Vec::new();
    split.poll(&mut done);
    assert_eq!((done[0].ticket, &done[0].result, done[0].operation.bytes()), (copy, &Ok(()), 256));
    // Work for a full queue stays free for another queue.
    let ((a, a_orders), (b, b_orders)) = (Device::new(1), Device::new(1));
    let mut split = Split::new(vec![a, b], Box::new(BalancePolicy::new(Vec::new())));
    let _both = [fill(1000), read(0, 64)].map(|operation| split.submit(operation).unwrap());
    (0..2).for_each(|_| split.flush());
    assert_eq!(got(&[a_orders, b_orders]), [[1000], [0]]);
}

#[test]
fn a_copy_is_refused_with_its_first_fragment() {
    let (mut split, orders) = both(2, None);
    let refuse = |reason| orders[0].lock().unwrap().refuse = reason;
    refuse(Some(Refusal::NotPermitted));
    let Refused { operation, reason } = split.submit(read(0, 256)).unwrap_err();
    assert_eq!((reason, operation.bytes(), split.in_flight()), (Refusal::NotPermitted, 256, 0));
    refuse(None);
    let copy = split.submit(operation).unwrap();
    assert_eq!(got(&orders), [vec![0], vec![]], "the others are given to the queues with what else comes");
    // A queue that has less room than it says holds up no other one.
    refuse(Some(Refusal::Full));
    split.flush();
    assert_eq!(got(&orders), [vec![0], vec![64, 192]]);
    // An operation that is refused later is a failure at its place.
    refuse(Some(Refusal::NotPermitted));
    end(&orders, 2);
    assert_eq!(results(&mut split), [(copy, Err(OpError::Refused(Refusal::NotPermitted)), 128)]);
    assert_eq!(split.in_flight(), 0);
}

#[test]
fn a_copy_ends_with_the_failure_that_lies_first() {
    let refused = Err(OpError::Refused(Refusal::NotPermitted));
    let refuse = |orders: &[Arc<Mutex<Orders>>; 2]| {
        orders[0].lock().unwrap().refuse = Some(Refusal::NotPermitted);
        orders[1].lock().unwrap().refuse = Some(Refusal::NotRegistered);
    };
    for turns in [[0, 1], [1, 0]] {
        let (mut split, orders) = both(1, None);
        let copy = split.submit(read(0, 256)).unwrap();
        split.flush();
        refuse(&orders);
        let ended = turns.map(|turn| {
            orders[turn].lock().unwrap().end = 1;
            results(&mut split)
        });
        assert_eq!(ended, [vec![], vec![(copy, refused.clone(), 128)]]);
    }
    // Of two at the same byte, with the one that was told first.
    let (mut split, orders) = both(1, None);
    let copy = split.submit(read(0, 128)).unwrap();
    refuse(&orders);
    split.stop(StopReason::Requested("for a test".into()));
    assert_eq!(results(&mut split), [(copy, Err(OpError::Refused(Refusal::NotRegistered)), 64)]);
}

#[test]
fn only_the_copy_that_is_cancelled_is_taken_back() {
    let (mut split, orders) = both(2, None);
    let [first, second] = [0, 1000].map(|number| split.submit(read(number, 64)).unwrap());
    split.flush();
    assert_eq!(got(&orders), [vec![0, 1000], vec![]]);
    assert!(matches!(split.cancel(first), Cancelled::Requested), "the device is at work on it");
    end(&orders, 2);
    assert_eq!(results(&mut split), [first, second].map(|ticket| (ticket, Ok(()), 64)));
    // Also when a queue did not take it yet.
    let first = split.submit(read(0, 64)).unwrap();
    orders[0].lock().unwrap().refuse = Some(Refusal::Full);
    let second = split.submit(read(1000, 64)).unwrap();
    assert!(matches!(split.cancel(first), Cancelled::Requested));
    assert!(matches!(split.cancel(second), Cancelled::Removed(o) if number(&o) == 1000));
    end(&orders, 1);
    assert_eq!(results(&mut split), [(first, Ok(()), 64)]);
}

#[test]
fn a_wait_sleeps_on_each_queue_in_turn_and_long_on_the_last() {
    let (mut split, orders) = both(1, None);
    let copy = split.submit(read(0, 128)).unwrap();
    orders[0].lock().unwrap().last_wait = 2;
    orders[1].lock().unwrap().last_wait = 3;
    let mut done = Vec::new();
    assert_eq!((split.wait(&mut done, LONG), done[0].ticket), (1, copy));
    let waits = [0, 1].map(|i| orders[i].lock().unwrap().waits.clone());
    let short = waits[0][0];
    assert!(short < LONG / 1000, "{waits:?}");
    assert_eq!((&waits[0], waits[1].len(), waits[1][0]), (&vec![short; 2], 3, short));
    assert!(waits[1][1..].iter().all(|long| *long > LONG / 100), "{waits:?}");
    // It does not wait for all, nor for a queue at rest.
    let (mut split, orders) = both(2, Some(1));
    let _both = [0, 1].map(|number| split.submit(fill(number)).unwrap());
    let waits = || [0, 1].map(|i| orders[i].lock().unwrap().waits.len());
    end(&orders, 1);
    orders[1].lock().unwrap().last_wait = 1;
    assert_eq!((split.wait(&mut done, LONG), done.len(), waits()), (1, 2, [0, 0]));
    assert_eq!((split.wait(&mut done, LONG), done.len(), waits()), (1, 3, [0, 1]));
}
