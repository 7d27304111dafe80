//! The thread of a queue: takes operations in order, makes a call for as many as fit, and gives them back.
//!
//! Between a call that failed and the stop of the queue pair, the thread owns the operations of that call: they are
//! given back after the stop, or kept for ever.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{Address, CardAddr, Span};
use dmalane_dma::{BufferSlice, CopyHint};
use dmalane_queue::{Completion, DeviceAddr, Direction, OpError, Operation, Refusal, StopReason, Ticket, Work};

use crate::Error;
use crate::abi::{MAX_PARTS, Part, Way};
use crate::buffers::{Buffers, keep, page};
use crate::card::Pair;
use crate::kernel::Request;

/// Bytes of a part at most. The driver takes 2^32 - 1, but returns the sum of both as an `int`.
pub(crate) const MAX_LEN: u64 = 1 << 29;

/// The state that a queue shares with its thread.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// There is something to do, or the thread shall end.
    work: Condvar,
    /// Something has ended.
    ended: Condvar,
}

/// Counters of a queue, which outlive it.
#[derive(Default)]
pub(crate) struct Counters {
    /// Bytes that were copied because they did not begin at a page of their buffer.
    pub copied: AtomicU64,
    /// Calls that moved bytes.
    pub calls: AtomicU64,
}

#[derive(Default)]
pub(crate) struct State {
    pub todo: VecDeque<(Ticket, Operation)>,
    /// Operations of the call that is being made, or of one whose buffers the card may still use.
    pub busy: usize,
    pub ended: VecDeque<Completion>,
    /// The queue pair could not be stopped.
    pub stuck: bool,
    /// Nothing further is begun.
    pub halted: Option<StopReason>,
    pub quit: bool,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        self.work.notify_one();
    }

    /// Waits until something has ended, nothing is left or the time is over.
    pub(crate) fn wait(&self, timeout: Duration) {
        let works = |s: &State| s.busy > 0 && !s.stuck || s.halted.is_none() && !s.todo.is_empty();
        let idle = |s: &mut State| s.ended.is_empty() && works(s);
        let _ = self.ended.wait_timeout_while(self.lock(), timeout, idle);
    }

    /// Tells the thread to end; true once it makes no call any more.
    pub(crate) fn quit(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        state.quit = true;
        state.todo.clear();
        self.work.notify_one();
        let (state, _) = self
            .ended
            .wait_timeout_while(state, timeout, |s| s.busy > 0 && !s.stuck)
            .unwrap_or_else(PoisonError::into_inner);
        state.busy == 0 || state.stuck
    }
}

/// The parts of the thread.
pub(crate) struct Worker {
    pub shared: Arc<Shared>,
    pub counters: Arc<Counters>,
    pub pair: Arc<Pair>,
    pub plans: Planner,
    /// A page for each part, for bytes before the first page of an operation.
    pub pages: Vec<BufferSlice>,
}

/// Knows where an operation's bytes lie.
pub(crate) struct Planner {
    pub buffers: Arc<Buffers>,
    /// The card's memory.
    pub memory: Vec<Span<CardAddr>>,
    /// Which queue pair of its file does the work.
    pub pair: u32,
}

/// The bytes of an operation, in a buffer and on the card.
struct Plan {
    part: Part,
    /// Bytes before the first multiple of the granule: they go through a page of the queue.
    head: u64,
}

/// A call that is being put together.
#[derive(Default)]
struct Call {
    operations: Vec<(Ticket, Operation)>,
    parts: Vec<Part>,
    /// Operations whose first bytes go through the page of a part: the part, the operation, the bytes.
    heads: Vec<(usize, usize, usize)>,
}

impl Planner {
    /// `None` for a fence.
    fn plan(&self, operation: &Operation) -> Result<Option<Plan>, OpError> {
        let Work::Copy { direction, host, at } = &operation.work else { return Ok(None) };
        let len = host.slice.len() as u64;
        let at = match at {
            DeviceAddr::Card(at) => *at,
            DeviceAddr::Va(va) => return Err(OpError::MmuFault(*va)),
        };
        // Memories that touch are one: a copy may cross from one into the next.
        let mut next = at;
        while let Some(memory) = self.memory.iter().find(|m| m.contains(next)) {
            let end = at.checked_add(len - 1).ok_or(OpError::NoCardMemory(at))?;
            if memory.contains(end) {
                let way = match direction {
                    Direction::FromHost => Way::HostToCard,
                    Direction::ToHost => Way::CardToHost,
                };
                let address = host.slice.view().as_ptr().addr();
                let found = self.buffers.find(address, host.slice.len());
                let (buffer, offset) = found.ok_or(OpError::Refused(Refusal::NotRegistered))?;
                let head = (offset.next_multiple_of(page() as u64) - offset).min(len);
                let part = Part { pair: self.pair, way, buffer, offset, at: at.bits(), len };
                return Ok(Some(Plan { part, head }));
            }
            next = memory.last().checked_add(1).ok_or(OpError::NoCardMemory(at))?;
        }
        Err(OpError::NoCardMemory(next))
    }
}

impl Call {
    /// Adds the parts of an operation, unless they do not fit; it will be the next of `operations`.
    fn takes(&mut self, plan: &Plan, pages: &[(i32, u64)]) -> bool {
        let Plan { part, head } = *plan;
        // The parts of a call may run at the same time, so an order between them must not matter.
        let other_way = self.parts.first().is_some_and(|first| first.way != part.way);
        if other_way || self.parts.iter().any(|p| p.at < part.at + part.len && part.at < p.at + p.len) {
            return false;
        }
        if head == 0
            && let Some(last) = self.parts.last_mut()
            && (last.buffer, last.offset + last.len, last.at + last.len) == (part.buffer, part.offset, part.at)
            && last.len + part.len <= MAX_LEN
        {
            last.len += part.len;
            return true;
        }
        let rest = Part { offset: part.offset + head, at: part.at + head, len: part.len - head, ..part };
        let wanted = usize::from(head > 0) + usize::from(rest.len > 0);
        if self.parts.len() + wanted > MAX_PARTS {
            return false;
        }
        if head > 0 {
            let (buffer, offset) = pages[self.parts.len()];
            self.heads.push((self.parts.len(), self.operations.len(), head as usize));
            self.parts.push(Part { buffer, offset, len: head, ..part });
        }
        if rest.len > 0 {
            self.parts.push(rest);
        }
        true
    }

    /// Copies the first bytes of operations to or from the pages; returns how many.
    fn copy_heads(&self, pages: &[BufferSlice], way: Way) -> u64 {
        if self.parts.first().is_none_or(|part| part.way != way) {
            return 0;
        }
        let mut copied = 0;
        for (part, operation, len) in &self.heads {
            let host = self.operations[*operation].1.hosts().first().and_then(|h| h.slice.view().sub(0, *len));
            if let (Some(page), Some(host)) = (pages[*part].view().sub(0, *len), host) {
                match way {
                    Way::HostToCard => page.copy_from(host, CopyHint::Keep),
                    Way::CardToHost => host.copy_from(page, CopyHint::Keep),
                }
                copied += *len as u64;
            }
        }
        copied
    }
}

impl Worker {
    /// Runs until it is told to end.
    pub(crate) fn run(self) {
        let shared = self.shared.clone();
        let place = |page: &BufferSlice| self.plans.buffers.find(page.view().as_ptr().addr(), page.len());
        let pages: Vec<(i32, u64)> = self.pages.iter().map(|page| place(page).unwrap_or((-1, 0))).collect();
        let mut state = shared.lock();
        while !state.quit {
            if state.halted.is_some() || state.todo.is_empty() {
                state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (mut call, mut result) = (Call::default(), Ok(()));
            while let Some((_, operation)) = state.todo.front() {
                let plan = self.plans.plan(operation);
                let alone = call.operations.is_empty();
                let more = match plan {
                    Ok(Some(plan)) if call.takes(&plan, &pages) => true,
                    // A fence, and an operation that fails, is a call of its own without parts.
                    Ok(None) if alone => false,
                    Err(error) if alone => {
                        result = Err(error);
                        false
                    }
                    _ => break,
                };
                call.operations.extend(state.todo.pop_front());
                if !more {
                    break;
                }
            }
            state.busy = call.operations.len();
            drop(state);
            let result = if result.is_ok() { self.make(&call) } else { Outcome::Ended(result) };
            state = shared.lock();
            let ended = match result {
                Outcome::Ended(result) => result,
                Outcome::Stopped(reason) => {
                    let reason = state.halted.get_or_insert(reason).clone();
                    Err(OpError::Stopped(reason))
                }
                Outcome::Stuck(reason) => {
                    state.halted.get_or_insert(reason);
                    state.stuck = true;
                    // The queue counts them as in flight for ever.
                    call.operations.into_iter().for_each(|(_, op)| keep_operation(op));
                    self.pages.into_iter().for_each(|page| {
                        let bytes = page.len() as u64;
                        keep(page, bytes);
                    });
                    shared.ended.notify_all();
                    return;
                }
            };
            state.busy = 0;
            for (ticket, operation) in call.operations {
                let bytes = if ended.is_ok() { operation.bytes() } else { 0 };
                state.ended.push_back(Completion { ticket, operation, result: ended.clone(), bytes });
            }
            shared.ended.notify_all();
        }
    }

    /// Makes the call.
    fn make(&self, call: &Call) -> Outcome {
        let wanted: u64 = call.parts.iter().map(|part| part.len).sum();
        if call.parts.is_empty() {
            return Outcome::Ended(Ok(()));
        }
        let copied = call.copy_heads(&self.pages, Way::HostToCard);
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        let why = match self.pair.transfer(&call.parts) {
            Ok(moved) if moved == wanted => {
                let copied = copied + call.copy_heads(&self.pages, Way::CardToHost);
                self.counters.copied.fetch_add(copied, Ordering::Relaxed);
                return Outcome::Ended(Ok(()));
            }
            Ok(moved) => format!("TRANSFER of {wanted} bytes answered with {moved}"),
            Err(e) => Error::call(Request::Transfer, e).to_string(),
        };
        let first = CardAddr::new(call.parts[0].at);
        match self.pair.stop() {
            Ok(()) => Outcome::Stopped(StopReason::Driver(
                format!("{why}; {wanted} bytes at {first} and on are in an unknown state").into(),
            )),
            Err(e) => Outcome::Stuck(StopReason::Lost(
                format!("{why}, and the queue cannot be stopped ({e}): its buffers are kept").into(),
            )),
        }
    }
}

/// How a call ended.
enum Outcome {
    /// The card uses none of its buffers.
    Ended(Result<(), OpError>),
    /// The same, because the queue pair was stopped.
    Stopped(StopReason),
    /// The card may use its buffers.
    Stuck(StopReason),
}

fn keep_operation(operation: Operation) {
    let bytes = operation.bytes();
    keep(operation, bytes);
}
