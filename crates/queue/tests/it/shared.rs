//! Handles of one queue: whose completion it is, and what is left when a handle goes.

use std::time::{Duration, Instant};

use dmalane_queue::{Cancelled, OpError, Queue, Refusal, SharedOptions, SharedQueue, StopReason, Ticket};

use crate::fakes::{Device, number, numbered};

fn options(inside: usize, each: usize) -> SharedOptions {
    SharedOptions { inside, each, drop_timeout: Duration::from_millis(200) }
}

/// Ends everything one by one and gives the order in which the device got it.
fn order(shared: &SharedQueue<Device>, orders: &std::sync::Mutex<crate::fakes::Orders>) -> Vec<u64> {
    for _ in 0..1000 {
        orders.lock().unwrap().end = 1;
        shared.poll();
    }
    assert_eq!(shared.in_flight(), 0);
    orders.lock().unwrap().got.clone()
}

#[test]
fn each_handle_gets_its_own_completions() {
    let (device, orders) = Device::new(8);
    let shared = SharedQueue::new(device, options(8, 1000));
    let (mut one, mut two) = (shared.handle(), shared.handle());
    let tickets: Vec<Ticket> = (0..6u64)
        .map(|i| if i % 2 == 0 { one.submit(numbered(i)).unwrap() } else { two.submit(numbered(i)).unwrap() })
        .collect();
    assert_eq!((one.in_flight(), two.in_flight(), shared.in_flight()), (3, 3, 0), "nothing was given away");
    one.flush();
    two.flush();
    assert_eq!(shared.in_flight(), 6);
    assert!(orders.lock().unwrap().flushed > 0 && orders.lock().unwrap().got.len() == 6);
    assert_eq!(orders.lock().unwrap().got, [0, 2, 4, 1, 3, 5], "batch by batch");
    orders.lock().unwrap().end = 6;
    let mut done = Vec::new();
    assert_eq!((one.poll(&mut done), two.in_flight()), (3, 3));
    for (completion, i) in done.iter().zip([0, 2, 4]) {
        assert_eq!((completion.ticket, number(&completion.operation)), (tickets[i], i as u64));
        assert_eq!((completion.bytes, &completion.result), (64, &Ok(())));
    }
    assert_eq!((two.wait(&mut done, Duration::ZERO), done.len(), shared.in_flight()), (3, 6, 0));
    assert_eq!((one.capabilities(), one.limits().capacity, one.limits().max_len), (two.capabilities(), 1000, 1 << 16));
}

#[test]
fn the_queue_gets_no_more_than_it_may_and_handles_no_more_than_all() {
    let (device, orders) = Device::new(4);
    let shared = SharedQueue::new(device, options(2, 5));
    let mut handle = shared.handle();
    for i in 0..5 {
        let _ = handle.submit(numbered(i)).unwrap();
    }
    let refused = handle.submit(numbered(5)).unwrap_err();
    assert_eq!((refused.reason, number(&refused.operation)), (Refusal::Full, 5));
    handle.flush();
    assert_eq!(orders.lock().unwrap().got, [0, 1], "two are inside");
    assert!(matches!(handle.submit(numbered(5)).unwrap_err().reason, Refusal::Full));
    let _ = shared.handle().submit(numbered(5)).unwrap();
    let long = dmalane_queue::Operation::read(crate::fakes::slice(1 << 17), dmalane_addr::CardAddr::new(0).into());
    assert!(matches!(handle.submit(long).unwrap_err().reason, Refusal::TooLong { .. }));
    order(&shared, &orders);
    // A device smaller than what is allowed inside.
    let (device, orders) = Device::new(1);
    let shared = SharedQueue::new(device, options(8, 5));
    let mut handle = shared.handle();
    for i in 0..3 {
        let _ = handle.submit(numbered(i)).unwrap();
    }
    handle.flush();
    assert_eq!(orders.lock().unwrap().got, [0]);
    assert_eq!(order(&shared, &orders), [0, 1, 2]);
}

#[test]
fn a_refusal_of_the_device_ends_the_operation() {
    let (device, orders) = Device::new(4);
    let shared = SharedQueue::new(device, options(4, 8));
    let mut handle = shared.handle();
    let ticket = handle.submit(numbered(0)).unwrap();
    orders.lock().unwrap().refuse = Some(Refusal::Full);
    assert_eq!(handle.poll(&mut Vec::new()), 0);
    assert_eq!((handle.in_flight(), shared.in_flight()), (1, 1), "full: tried again later");
    orders.lock().unwrap().refuse = Some(Refusal::NotRegistered);
    let mut done = Vec::new();
    handle.wait(&mut done, Duration::ZERO);
    assert_eq!(done[0].ticket, ticket);
    assert_eq!((&done[0].result, done[0].bytes), (&Err(OpError::Refused(Refusal::NotRegistered)), 0));
    assert_eq!((handle.in_flight(), shared.in_flight()), (0, 0));
}

#[test]
fn what_is_cancelled_comes_back_or_ends() {
    let (device, orders) = Device::new(2);
    let shared = SharedQueue::new(device, options(2, 8));
    let (mut handle, mut other) = (shared.handle(), shared.handle());
    let tickets: Vec<Ticket> = (0..4).map(|i| handle.submit(numbered(i)).unwrap()).collect();
    handle.flush();
    assert!(matches!(other.cancel(tickets[3]), Cancelled::Unknown), "another's");
    assert!(matches!(handle.cancel(tickets[3]), Cancelled::Removed(o) if number(&o) == 3), "not yet given");
    assert!(matches!(handle.cancel(tickets[3]), Cancelled::Unknown), "gone");
    assert!(matches!(other.cancel(tickets[1]), Cancelled::Unknown));
    assert!(matches!(handle.cancel(tickets[1]), Cancelled::Removed(o) if number(&o) == 1), "from the device");
    assert!(matches!(handle.cancel(tickets[0]), Cancelled::Requested));
    assert_eq!((handle.in_flight(), shared.in_flight()), (2, 2));
    assert_eq!(format!("{handle:?}"), "SharedHandle(2 in flight)");
    orders.lock().unwrap().end = 1;
    shared.poll();
    assert!(matches!(handle.cancel(tickets[0]), Cancelled::TooLate), "it has ended");
    assert!(matches!(handle.cancel(tickets[3]), Cancelled::Unknown), "another has ended");
    assert_eq!(order(&shared, &orders), [0, 1, 2]);
    let mut done = Vec::new();
    handle.poll(&mut done);
    assert_eq!(done.iter().map(|c| number(&c.operation)).collect::<Vec<_>>(), [0, 2]);
    drop((handle, other));
    assert_eq!(format!("{shared:?}"), "SharedQueue(0 handles, 0 in flight)", "nothing is owed for what came back");
}

#[test]
fn a_batch_of_which_one_is_cancelled_stays_in_order() {
    let (device, orders) = Device::new(1);
    let shared = SharedQueue::new(device, options(1, 8));
    let (mut handle, mut other) = (shared.handle(), shared.handle());
    let tickets: Vec<Ticket> = (0..6).map(|i| handle.submit(numbered(i)).unwrap()).collect();
    handle.flush();
    let _ = other.submit(numbered(9)).unwrap();
    other.flush();
    // One that waits, the last, and one that was never given away.
    let late = handle.submit(numbered(6)).unwrap();
    for (ticket, i) in [(tickets[3], 3), (tickets[5], 5), (late, 6)] {
        assert!(matches!(handle.cancel(ticket), Cancelled::Removed(o) if number(&o) == i));
        assert!(matches!(handle.cancel(ticket), Cancelled::Unknown));
    }
    let _ = handle.submit(numbered(7)).unwrap();
    handle.flush();
    assert_eq!((handle.in_flight(), shared.in_flight()), (5, 6));
    assert_eq!(order(&shared, &orders), [0, 1, 2, 4, 9, 7]);
    let mut done = Vec::new();
    assert_eq!((handle.poll(&mut done), handle.in_flight()), (5, 0));
    let got: Vec<_> = done.iter().map(|c| (c.ticket, number(&c.operation))).collect();
    assert_eq!(got[..4], [0, 1, 2, 4].map(|i| (tickets[i], i as u64)));
}

#[test]
fn a_stop_is_for_all_handles_until_a_restart() {
    let (device, orders) = Device::new(2);
    let shared = SharedQueue::new(device, options(2, 8));
    let (mut one, mut two) = (shared.handle(), shared.handle());
    let _ = one.submit(numbered(0)).unwrap();
    let why = StopReason::Requested("for a test".into());
    one.flush();
    two.stop(why.clone());
    assert_eq!((one.halted(), two.halted()), (Some(why.clone()), Some(why.clone())));
    assert_eq!(one.submit(numbered(1)).unwrap_err().reason, Refusal::Stopped(why.clone()));
    assert!(!one.restart(), "an operation is in flight");
    let mut done = Vec::new();
    one.wait(&mut done, Duration::ZERO);
    assert_eq!(done[0].result, Err(OpError::Stopped(why)));
    assert!(one.restart() && one.halted().is_none() && two.halted().is_none());
    let _ = two.submit(numbered(2)).unwrap();
    two.flush();
    assert_eq!(order(&shared, &orders), [0, 2]);
}

#[test]
fn a_dropped_handle_waits_and_a_detached_one_does_not() {
    let (device, orders) = Device::new(2);
    let shared = SharedQueue::new(device, options(2, 8));
    let mut handle = shared.handle();
    let _ = handle.submit(numbered(0)).unwrap();
    orders.lock().unwrap().end = 1;
    handle.detach();
    assert_eq!((shared.in_flight(), shared.poll(), shared.in_flight()), (1, 1, 0), "it did not even poll");

    let mut handle = shared.handle();
    for i in 0..3 {
        let _ = handle.submit(numbered(i)).unwrap();
    }
    orders.lock().unwrap().end = 3;
    drop(handle);
    assert_eq!((shared.in_flight(), orders.lock().unwrap().got.len()), (0, 4), "it waited");

    let mut handle = shared.handle();
    let _ = handle.submit(numbered(3)).unwrap();
    let began = Instant::now();
    drop(handle); // nothing ends
    assert!(began.elapsed() >= Duration::from_millis(200) && began.elapsed() < Duration::from_secs(10));
    assert_eq!(shared.in_flight(), 1, "it goes on without its handle");

    let mut handle = shared.handle();
    let _ = handle.submit(numbered(4)).unwrap();
    handle.detach();
    // Its place is not given to another handle before its operation has ended.
    let mut next = shared.handle();
    let _ = next.submit(numbered(5)).unwrap();
    next.flush();
    orders.lock().unwrap().end = 2;
    shared.poll();
    let mut done = Vec::new();
    assert_eq!((next.poll(&mut done), next.in_flight()), (0, 1));
    orders.lock().unwrap().end = 1;
    assert_eq!((next.wait(&mut done, Duration::from_secs(60)), number(&done[0].operation)), (1, 5));
    assert_eq!(format!("{:?}", next.shared()), "SharedQueue(1 handles, 0 in flight)", "the others have left");

    // Completions that a handle did not collect go with it.
    let (buf, card) = (crate::fakes::pages(1), dmalane_addr::CardAddr::new(6));
    let memory = buf.reference();
    let _ = next.submit(dmalane_queue::Operation::read(buf.into_slice(), card.into())).unwrap();
    next.flush();
    orders.lock().unwrap().end = 1;
    shared.poll();
    assert!(!memory.is_last());
    next.detach();
    assert!(memory.is_last());
    assert_eq!(format!("{shared:?}"), "SharedQueue(0 handles, 0 in flight)");
}

#[test]
fn a_detached_handle_leaves_its_place_once() {
    let (device, orders) = Device::new(2);
    let shared = SharedQueue::new(device, options(2, 8));
    shared.handle().detach(); // with nothing in flight
    let (mut one, mut two) = (shared.handle(), shared.handle());
    let _ = one.submit(numbered(1)).unwrap();
    let _ = two.submit(numbered(2)).unwrap();
    one.flush();
    two.flush();
    orders.lock().unwrap().end = 2;
    let mut done = Vec::new();
    assert_eq!(one.wait(&mut done, Duration::from_secs(60)), 1, "two handles share one place");
    assert_eq!(number(&done[0].operation), 1);
    assert_eq!((two.poll(&mut done), number(&done[1].operation)), (1, 2));
}

#[test]
fn a_wait_ends_in_time() {
    let (device, orders) = Device::new(2);
    let shared = SharedQueue::new(device, options(2, 8));
    let mut handle = shared.handle();
    let mut done = Vec::new();
    // Without an end: a wait that goes on for too long would go on for ever.
    assert_eq!(handle.wait(&mut done, Duration::MAX), 0, "nothing to wait for");
    let _ = handle.submit(numbered(0)).unwrap();
    let began = Instant::now();
    assert_eq!(handle.wait(&mut done, Duration::from_millis(20)), 0);
    assert!(began.elapsed() >= Duration::from_millis(20));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            orders.lock().unwrap().end = 1;
        });
        assert_eq!(handle.wait(&mut done, Duration::MAX), 1);
    });
    let _ = handle.submit(numbered(0)).unwrap();
    let _ = handle.submit(numbered(0)).unwrap();
    orders.lock().unwrap().end = 1;
    assert_eq!(handle.wait(&mut done, Duration::MAX), 1, "one of two is enough");
    orders.lock().unwrap().end = 1;
    assert_eq!(handle.wait(&mut done, Duration::MAX), 1);
}

#[test]
#[should_panic(expected = "for itself")]
fn a_queue_in_use_is_not_shared() {
    let (mut device, _) = Device::new(2);
    let _ = device.submit(numbered(0)).unwrap();
    SharedQueue::new(device, SharedOptions::default());
}
