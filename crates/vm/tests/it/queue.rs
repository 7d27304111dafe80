//! Bind queues: order, fences, failures, cancelling, back-pressure.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, Fence, SgIndex, SgTable, Span, Timeline};
use dmalane_iopt::{HeapTables, X86_64_4Level};
use dmalane_vm::{BindQueue, BindRequest, Bo, Ended, Error, QueueError, Submission, Vm};
use proptest::prelude::*;

const PAGE: u64 = 4096;

type TestVm = Vm<X86_64_4Level, HeapTables<CardAddr>>;

fn vm() -> TestVm {
    Vm::new(span(1, 1 << 20), HeapTables::new(CardAddr::new(0))).unwrap()
}

fn span(page: u64, pages: u64) -> Span<DeviceVa> {
    Span::new(DeviceVa::new(page * PAGE), pages * PAGE).unwrap()
}

fn bo() -> Arc<Bo> {
    let mut sg = SgTable::new();
    sg.push(CardAddr::new(1 << 30), 64 * PAGE).unwrap();
    Arc::new(Bo::new(1, SgIndex::from_table(&sg).unwrap()))
}

fn bind(bo: &Arc<Bo>, page: u64, offset: u64) -> BindRequest {
    BindRequest::Bind {
        va: DeviceVa::new(page * PAGE),
        bo: bo.clone(),
        offset: offset * PAGE,
        len: PAGE,
        access: Access::RW,
    }
}

fn unbind(page: u64) -> BindRequest {
    BindRequest::Unbind(span(page, 1))
}

fn after(requests: Vec<BindRequest>, wait: &[Fence]) -> Submission {
    Submission { requests, wait: wait.to_vec(), signal: Vec::new() }
}

/// Polls once, invalidating whatever is asked for.
fn drive(queue: &mut BindQueue, vm: &mut TestVm) -> Vec<Ended> {
    let mut ended = Vec::new();
    queue.poll(vm, &mut ended);
    while queue.to_invalidate().is_some() {
        ended.extend(queue.invalidated(vm));
        queue.poll(vm, &mut ended);
    }
    ended
}

fn bound(vm: &TestVm) -> Vec<u64> {
    vm.bindings().map(|b| b.span.first().bits() / PAGE).collect()
}

#[test]
fn a_queue_keeps_its_order_and_holds_up_no_other() {
    let (mut vm, bo) = (vm(), bo());
    let (mut a, mut b) = (BindQueue::new(0, 8), BindQueue::new(1, 8));
    let gate = Timeline::new();
    let first = a.submit(after(vec![bind(&bo, 10, 0)], &[gate.fence(1)])).unwrap();
    let second = a.submit(after(vec![bind(&bo, 11, 0)], &[])).unwrap();
    let other = b.submit(after(vec![bind(&bo, 12, 0)], &[])).unwrap();
    assert_ne!((first.queue, first.number), (other.queue, other.number));
    assert!(drive(&mut a, &mut vm).is_empty(), "the second is ready and must wait for the first");
    assert_eq!(drive(&mut b, &mut vm), [Ended { ticket: other, result: Ok(()) }]);
    assert_eq!(bound(&vm), [12]);
    gate.signal(1);
    assert_eq!(drive(&mut a, &mut vm).iter().map(|e| e.ticket).collect::<Vec<_>>(), [first, second]);
    assert_eq!((bound(&vm), a.in_flight()), (vec![10, 11, 12], 0));
}

#[test]
fn fences_are_signalled_only_when_the_device_has_forgotten() {
    let (mut vm, bo) = (vm(), bo());
    let mut queue = BindQueue::new(0, 8);
    let done = Timeline::new();
    let batch = |requests, value| Submission { requests, wait: Vec::new(), signal: vec![done.signaller(value)] };
    let _ = queue.submit(batch(vec![bind(&bo, 5, 0)], 1)).unwrap();
    let replace = queue.submit(batch(vec![bind(&bo, 5, 9)], 2)).unwrap();
    let _ = queue.submit(batch(vec![bind(&bo, 6, 0)], 3)).unwrap();
    let mut ended = Vec::new();
    queue.poll(&mut vm, &mut ended);
    queue.poll(&mut vm, &mut ended);
    assert_eq!((ended.len(), done.value(), queue.in_flight()), (1, 1, 2), "the replaced page is still in the TLB");
    assert_eq!(queue.to_invalidate().unwrap().spans().collect::<Vec<_>>(), [span(5, 1)]);
    assert_eq!(queue.cancel(replace).map(drop), None, "it has begun");
    assert_eq!(queue.invalidated(&mut vm), Some(Ended { ticket: replace, result: Ok(()) }));
    assert_eq!((done.value(), queue.invalidated(&mut vm)), (2, None));
    queue.poll(&mut vm, &mut ended);
    assert_eq!((ended.len(), done.value()), (2, 3));
}

#[test]
fn hints_are_passed_on() {
    let (mut vm, bo) = (vm(), bo());
    let mut queue = BindQueue::new(0, 8);
    let ticket = queue.submit(after(vec![bind(&bo, 5, 0), BindRequest::Prefetch(span(5, 1))], &[])).unwrap();
    let mut ended = Vec::new();
    queue.poll(&mut vm, &mut ended);
    let committed = queue.to_invalidate().unwrap();
    assert!(committed.is_empty() && ended.is_empty());
    assert_eq!(committed.prefetches().collect::<Vec<_>>(), [span(5, 1)]);
    assert_eq!(queue.invalidated(&mut vm), Some(Ended { ticket, result: Ok(()) }));
}

#[test]
fn a_failure_marks_the_vm() {
    let (mut vm, bo) = (vm(), bo());
    let (mut a, mut b) = (BindQueue::new(0, 8), BindQueue::new(1, 8));
    let (done, other, gate) = (Timeline::new(), Timeline::new(), Timeline::new());
    let committed = vm.plan([bind(&bo, 3, 0)]).unwrap().commit();
    vm.invalidated(committed);
    let good = bind(&bo, 4, 0);
    let bad = bind(&bo, 5, 64);
    let batch = |r, t: &Timeline, value| Submission { requests: r, wait: Vec::new(), signal: vec![t.signaller(value)] };
    let _ = a.submit(batch(vec![bind(&bo, 7, 0)], &done, 1)).unwrap();
    let failing = a.submit(batch(vec![good.clone(), bad], &done, 2)).unwrap();
    let _ = a.submit(batch(vec![good.clone()], &done, 3)).unwrap();
    let mut waits = batch(vec![unbind(3)], &other, 1);
    waits.wait.push(gate.fence(1));
    let _ = b.submit(waits).unwrap();

    assert!(drive(&mut b, &mut vm).is_empty());
    let ended = drive(&mut a, &mut vm);
    assert!(ended[0].result.is_ok() && ended[1].ticket == failing);
    assert!(matches!(&ended[1].result, Err(QueueError::Refused(_))), "{ended:?}");
    assert_eq!(ended[2].result, Err(QueueError::VmFailed));
    assert_eq!(drive(&mut b, &mut vm)[0].result, Err(QueueError::VmFailed), "though its fence was not signalled");
    assert!(!done.fence(1).has_failed() && done.fence(2).has_failed() && done.fence(3).has_failed());
    assert!(other.fence(1).has_failed());
    assert_eq!(bound(&vm), [3, 7], "the failed batch left nothing");

    // Only synchronous unbinds from here on.
    assert!(vm.has_failed());
    let refused = vm.plan([unbind(3), good]).map(drop).unwrap_err();
    assert_eq!((refused.index, refused.error), (1, Error::Failed));
    assert_eq!(bound(&vm), [3, 7]);
    let committed = vm.plan([BindRequest::Unbind(vm.range())]).unwrap().commit();
    vm.invalidated(committed);
    assert!(bound(&vm).is_empty());
}

#[test]
fn a_failed_fence_fails_what_waits_for_it() {
    let (mut vm, bo) = (vm(), bo());
    let mut queue = BindQueue::new(0, 8);
    let copied = Timeline::new();
    let _ = queue.submit(after(vec![bind(&bo, 5, 0)], &[copied.fence(1)])).unwrap();
    drop(copied.signaller(1)); // the copying side is gone
    assert_eq!(drive(&mut queue, &mut vm)[0].result, Err(QueueError::Fence));
    assert!(vm.has_failed() && bound(&vm).is_empty());
}

#[test]
fn cancelling_and_dropping() {
    let (mut vm, bo) = (vm(), bo());
    let (mut queue, mut other) = (BindQueue::new(0, 8), BindQueue::<CardAddr>::new(1, 8));
    let (gate, a, b, c) = (Timeline::new(), Timeline::new(), Timeline::new(), Timeline::new());
    let batch = |page, t: &Timeline| Submission {
        requests: vec![bind(&bo, page, 0)],
        wait: vec![gate.fence(1)],
        signal: vec![t.signaller(1)],
    };
    let tickets = [(10, &a), (11, &b), (12, &c)].map(|(page, t)| queue.submit(batch(page, t)).unwrap());
    assert!(other.cancel(tickets[1]).is_none());
    let taken = queue.cancel(tickets[1]).unwrap();
    assert_eq!(taken.requests.len(), 1);
    assert!(queue.cancel(tickets[1]).is_none() && !b.fence(1).is_signalled());
    drop(taken);
    assert!(b.fence(1).has_failed() && !vm.has_failed(), "cancelling is not a failure of the VM");
    gate.signal(1);
    let ended = drive(&mut queue, &mut vm);
    assert_eq!(ended.iter().map(|e| e.ticket).collect::<Vec<_>>(), [tickets[0], tickets[2]]);
    assert!(queue.cancel(tickets[0]).is_none());
    assert_eq!(bound(&vm), [10, 12]);

    // Nobody waits for a queue that is gone.
    let d = Timeline::new();
    let _ = queue.submit(batch(13, &d)).unwrap();
    let holders = Arc::strong_count(&bo);
    drop(queue);
    assert!(d.fence(1).has_failed());
    assert_eq!(Arc::strong_count(&bo), holders - 1);
}

#[test]
fn a_full_queue_gives_the_batch_back() {
    let (mut vm, bo) = (vm(), bo());
    let mut queue = BindQueue::new(9, 2);
    let done = Timeline::new();
    let batch = |page, value| Submission {
        requests: vec![bind(&bo, page, 0)],
        wait: Vec::new(),
        signal: vec![done.signaller(value)],
    };
    let _ = queue.submit(batch(1, 1)).unwrap();
    let _ = queue.submit(batch(1, 2)).unwrap();
    let full = queue.submit(batch(1, 3)).unwrap_err();
    assert_eq!((full.queue, full.depth, done.value()), (9, 2, 0));
    assert_eq!(full.to_string(), "queue 9 holds 2 batches, as many as it may");
    // One that is being invalidated counts too.
    let mut ended = Vec::new();
    queue.poll(&mut vm, &mut ended);
    assert_eq!((ended.len(), queue.in_flight()), (1, 1));
    let _ = queue.submit(full.submission).unwrap();
    assert!(queue.submit(Submission::default()).is_err());
    ended.extend(drive(&mut queue, &mut vm));
    while queue.in_flight() > 0 {
        ended.extend(queue.invalidated(&mut vm));
        queue.poll(&mut vm, &mut ended);
    }
    assert!(done.fence(3).is_signalled() && !done.fence(3).has_failed());
    let mut none = BindQueue::<CardAddr>::new(0, 0);
    assert!(none.submit(Submission::default()).is_err());
}

proptest! {
    /// Batches over three queues with fences among each other: what the queues make of them is what the order in which
    /// they ended makes of them by synchronous calls.
    #[test]
    fn queues_are_an_order_of_synchronous_batches(
        batches in prop::collection::vec(
            (0usize..3, prop::collection::vec((any::<bool>(), 1u64..12, 0u64..64), 0..4), any::<prop::sample::Index>()),
            1..24,
        ),
        polls in prop::collection::vec(0usize..3, 0..60),
    ) {
        let bo = bo();
        let (mut vm, mut reference) = (vm(), vm());
        let mut queues: Vec<BindQueue> = (0..3).map(|id| BindQueue::new(id, 64)).collect();
        // One timeline for each batch; a batch waits for one before it, so there is no ring.
        let done: Vec<Timeline> = batches.iter().map(|_| Timeline::new()).collect();
        let mut tickets = Vec::new();
        let requests: Vec<Vec<BindRequest>> = batches.iter().map(|(_, ops, _)| ops.iter().map(
            |&(binds, page, offset)| if binds { bind(&bo, page, offset) } else { unbind(page) }).collect()).collect();
        for (i, (queue, _, wait)) in batches.iter().enumerate() {
            let wait = if i == 0 { vec![] } else { vec![done[wait.index(i)].fence(1)] };
            let signal = vec![done[i].signaller(1)];
            tickets.push(queues[*queue].submit(Submission { requests: requests[i].clone(), wait, signal }).unwrap());
        }
        let mut ended = Vec::new();
        for q in polls.into_iter().chain((0..3).cycle().take(3 * batches.len() * 2)) {
            queues[q].poll(&mut vm, &mut ended);
            ended.extend(queues[q].invalidated(&mut vm));
        }
        prop_assert_eq!(ended.len(), batches.len());
        let mut last = [None; 3];
        for e in &ended {
            prop_assert!(e.result.is_ok());
            let i = tickets.iter().position(|t| *t == e.ticket).unwrap();
            prop_assert!(last[batches[i].0] < Some(e.ticket.number), "out of order in its queue");
            last[batches[i].0] = Some(e.ticket.number);
            let committed = reference.plan(requests[i].clone()).unwrap().commit();
            reference.invalidated(committed);
        }
        let runs = |vm: &TestVm| vm.runs(vm.range()).collect::<Vec<_>>();
        prop_assert_eq!(runs(&vm), runs(&reference));
        prop_assert!(done.iter().all(|t| t.fence(1).is_signalled() && !t.fence(1).has_failed()));
    }
}
