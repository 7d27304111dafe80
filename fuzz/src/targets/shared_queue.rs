//! Handles of one shared queue in random order: every operation comes back once, to its own handle, with its bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use dmalane_dma::fuzzing::FuzzInput;
use crate::script::{Script, ScriptQueue, copy};
use dmalane_queue::{
    Cancelled, Completion, Operation, Queue, SharedHandle, SharedOptions, SharedQueue, StopReason,
};

const HANDLES: usize = 4;
const CALLS: usize = 200;

/// A handle, and what it waits for: the tickets with the address of the host memory.
struct User {
    handle: SharedHandle<ScriptQueue>,
    waiting: BTreeMap<u64, (usize, usize)>,
}

impl User {
    fn collect(&mut self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            let known = self.waiting.remove(&completion.ticket.number());
            assert_eq!(known, Some(place(&completion.operation)), "another's operation, or one for the second time");
            assert!(completion.result.is_err() || completion.bytes == completion.operation.bytes());
        }
        assert_eq!(self.handle.in_flight(), self.waiting.len());
    }
}

fn place(operation: &Operation) -> (usize, usize) {
    operation.hosts().first().map_or((0, 0), |h| (h.slice.as_volatile_slice().as_ptr().addr(), h.slice.len()))
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let (head, decisions) = data.split_at(data.len() / 2);
    let input = &mut FuzzInput::new(head);
    let capacity = usize::from(input.u8() % 8) + 1;
    let queue = ScriptQueue::new(&Script::new(decisions), capacity);
    let (inside, each) = (usize::from(input.u8() % 8) + 1, usize::from(input.u8() % 32) + 1);
    let options = SharedOptions { inside, each, drop_timeout: Duration::from_secs(10) };
    let shared = SharedQueue::new(queue, options);
    let mut users: [Option<User>; HANDLES] = Default::default();
    let mut done = Vec::new();
    // Of handles that left without waiting.
    let mut detached = 0;
    for _ in 0..CALLS {
        if input.is_empty() {
            break;
        }
        let (kind, which) = (input.u8(), usize::from(input.u8()) % HANDLES);
        let Some(user) = &mut users[which] else {
            users[which] = Some(User { handle: shared.handle(), waiting: BTreeMap::new() });
            continue;
        };
        match kind % 9 {
            0..=3 => {
                let operation = copy(input, 8192, kind);
                let at = place(&operation);
                match user.handle.submit(operation) {
                    Ok(ticket) => assert!(user.waiting.insert(ticket.number(), at).is_none(), "a ticket for two"),
                    Err(refused) => assert_eq!(place(&refused.operation), at, "a refusal gives the memory back"),
                }
            }
            4 => {
                user.handle.poll(&mut done);
                user.collect(&mut done);
            }
            5 => {
                let n = user.handle.wait(&mut done, Duration::ZERO);
                assert_eq!(n, done.len());
                user.collect(&mut done);
            }
            6 => {
                let ticket = user.waiting.keys().nth(usize::from(input.u8()) % 8).copied();
                let asked = dmalane_queue::Ticket::new(ticket.unwrap_or_else(|| u64::from(input.u16())));
                match user.handle.cancel(asked) {
                    Cancelled::Removed(operation) => {
                        assert_eq!(user.waiting.remove(&asked.number()), Some(place(&operation)));
                    }
                    Cancelled::Unknown if ticket.is_some() => {
                        // It has ended and waits in the inbox.
                        user.handle.poll(&mut done);
                        assert!(done.iter().any(|completion| completion.ticket == asked), "lost");
                        user.collect(&mut done);
                    }
                    _ => {}
                }
            }
            7 => {
                let user = users[which].take().expect("as above");
                if kind & 0x80 == 0 {
                    detached += user.waiting.len();
                    user.handle.detach();
                } else {
                    drop(user);
                }
            }
            _ if kind & 0x80 == 0 => drop(user.handle.restart()),
            _ => user.handle.stop(StopReason::Requested("the test".into())),
        }
        let waiting: usize = users.iter().flatten().map(|user| user.waiting.len()).sum();
        let most = users.iter().flatten().map(|user| user.waiting.len()).max().unwrap_or(0);
        assert!(most <= each, "more than a handle may have");
        assert!(shared.in_flight() <= waiting + detached, "in flight without an owner");
    }
    // Everything ends, since each poll of the queue ends something.
    for user in users.iter_mut().flatten() {
        for _ in 0..10_000 {
            if user.waiting.is_empty() {
                break;
            }
            user.handle.wait(&mut done, Duration::ZERO);
            user.collect(&mut done);
        }
        assert!(user.waiting.is_empty(), "{} operations never end", user.waiting.len());
    }
    for _ in 0..10_000 {
        if shared.in_flight() == 0 {
            break;
        }
        shared.poll();
    }
    assert_eq!(shared.in_flight(), 0, "of detached handles");
}
