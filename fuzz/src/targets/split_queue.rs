//! Copies split over queues that fail, refuse and stop: each ends once, whole, and what it says was moved was moved.

use std::collections::BTreeMap;
use std::time::Duration;

use dmalane_addr::{CardAddr, Span};
use dmalane_dma::fuzzing::FuzzInput;
use crate::script::{Script, ScriptQueue, TARGET, copy};
use dmalane_queue::{
    AddressPolicy, Area, BalancePolicy, Cancelled, Completion, DeviceAddr, Direction, OpError, Operation, Policy,
    Queue, Route, Split, StopReason, Work,
};

const CALLS: usize = 60;

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let (head, decisions) = data.split_at(data.len() / 2);
    let input = &mut FuzzInput::new(head);
    let script = Script::new(decisions);
    let count = usize::from(input.u8() % 4) + 1;
    let queues = (0..count).map(|_| ScriptQueue::new(&script, usize::from(input.u8() % 4) + 1)).collect();
    let half = Span::new(CardAddr::new(0), TARGET as u64 / 2).expect("a span");
    let other = Span::new(CardAddr::new(TARGET as u64 / 2), TARGET as u64 / 2).expect("a span");
    let route = Route::Channel(usize::from(input.u8()) % count);
    let areas = vec![Area { span: half, route: Route::Shared }, Area { span: other, route }];
    let policy: Box<dyn Policy> = match input.u8() & 1 {
        0 => Box::new(AddressPolicy::new(areas)),
        _ => Box::new(BalancePolicy::new(areas)),
    };
    let mut split = Split::new(queues, policy);
    let mut waiting = BTreeMap::new();
    let mut done = Vec::new();
    // The copy in flight, if no other was since before it was submitted: what it wrote is still there.
    let mut alone = None;
    for call in 0..CALLS {
        if input.is_empty() {
            break;
        }
        match input.u8() % 8 {
            0..=3 => {
                // Long ones, so that they are cut.
                let operation = copy(input, 4 * TARGET, call as u8);
                let at = place(&operation);
                match split.submit(operation) {
                    Ok(ticket) => {
                        alone = waiting.is_empty().then_some(ticket.number());
                        assert!(waiting.insert(ticket.number(), at).is_none(), "a ticket for two");
                    }
                    Err(refused) => assert_eq!(place(&refused.operation), at, "a refusal gives the memory back"),
                }
            }
            4 | 5 => drop(split.poll(&mut done)),
            6 => {
                let ticket = waiting.keys().nth(usize::from(input.u8()) % 4).copied();
                let asked = dmalane_queue::Ticket::new(ticket.unwrap_or(u64::MAX));
                match split.cancel(asked) {
                    Cancelled::Removed(operation) => {
                        assert_eq!(waiting.remove(&asked.number()), Some(place(&operation)), "another operation");
                    }
                    Cancelled::Unknown if ticket.is_some() => {
                        split.poll(&mut done);
                        assert!(done.iter().any(|completion| completion.ticket == asked), "lost");
                    }
                    _ => {}
                }
            }
            _ if input.u8() < 0x40 => split.stop(StopReason::Requested("the test".into())),
            _ => drop(split.restart()),
        }
        collect(&mut waiting, &mut done, alone, &script);
        assert_eq!(split.in_flight(), waiting.len());
    }
    for _ in 0..100_000 {
        if waiting.is_empty() {
            break;
        }
        split.wait(&mut done, Duration::ZERO);
        collect(&mut waiting, &mut done, alone, &script);
    }
    assert!(waiting.is_empty(), "{} copies never end", waiting.len());
    assert!(split.queues().iter().all(|queue| queue.in_flight() == 0));
}

type Place = (usize, usize);

fn place(operation: &Operation) -> Place {
    operation.hosts().first().map_or((0, 0), |h| (h.slice.as_volatile_slice().as_ptr().addr(), h.slice.len()))
}

fn collect(
    waiting: &mut BTreeMap<u64, Place>,
    done: &mut Vec<Completion>,
    alone: Option<u64>,
    script: &std::sync::Arc<std::sync::Mutex<Script>>,
) {
    for completion in done.drain(..) {
        let at = place(&completion.operation);
        assert_eq!(waiting.remove(&completion.ticket.number()), Some(at), "not as it was submitted");
        assert!(completion.bytes <= completion.operation.bytes());
        let Work::Copy { at: DeviceAddr::Card(first), .. } = &completion.operation.work else { panic!("not a copy") };
        let first = first.bits() as usize;
        match completion.result {
            Ok(()) => {
                assert_eq!(completion.bytes, completion.operation.bytes());
                assert!(first + at.1 <= TARGET, "nothing is there");
                if alone == Some(completion.ticket.number())
                    && completion.operation.direction() == Some(Direction::FromHost)
                {
                    let mut bytes = vec![0; at.1];
                    completion.operation.hosts()[0].slice.as_volatile_slice().read(&mut bytes);
                    assert!(script.lock().expect("no panic").target[first..first + at.1] == bytes, "not moved");
                }
            }
            Err(OpError::NoCardMemory(_) | OpError::Stopped(_) | OpError::Refused(_) | OpError::Cancelled) => {}
            Err(e) => panic!("{e}"),
        }
    }
}
