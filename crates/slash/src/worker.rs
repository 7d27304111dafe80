//! The worker of a queue: takes operations in order, makes a call for as many as fit, and gives them back.
//!
//! Where the driver takes io_uring commands, several calls are in flight. They have one direction and no card memory in
//! common, and end in order. No call blocks, so the queue drives the worker itself ([`Worker::advance`]) until one
//! fails. Elsewhere, and after a failure, a thread does ([`Worker::run`]). It polls for [`POLLS`] before it sleeps,
//! because waking a thread takes longer than all else that happens before the call.
//!
//! Between a call that failed and the stop of the queue pair, the worker owns the operations of all calls in flight:
//! they are given back after the stop, or leaked (never freed).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::CardAddr;
use dmalane_dma::{BufferSlice, CopyHint, quarantine};
use dmalane_queue::{Completion, DeviceAddr, Direction, OpError, Operation, Refusal, StopReason, Ticket, Work};

use crate::Error;
use crate::abi::{self, DmaDirection, MAX_RANGES, TransferRange};
use crate::buffers::{Buffers, page};
use crate::card::Pair;
use crate::kernel::{Calls, Request};
use crate::vrtd::Reach;

/// Bytes of a range at most. The driver takes 2^32 - 1, but returns the sum of both as an `int`.
pub(crate) const MAX_LEN: u64 = 1 << 29;

/// Time for the driver to end calls of a queue pair that was stopped.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long the thread polls for work after its last.
const POLLS: Duration = Duration::from_micros(50);

/// The state that a queue shares with its thread.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// There may be something to do; set with the lock held, and read without it by the thread that polls.
    news: AtomicBool,
    /// There is something to do, or the thread shall end.
    work: Condvar,
    /// Something has ended.
    ended: Condvar,
    /// How long the thread polls for news before it sleeps.
    polls: Duration,
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
    /// The thread must be woken.
    sleeps: bool,
    /// Somebody waits for an end.
    waits: bool,
}

impl Shared {
    pub(crate) fn new() -> Self {
        // One processor is needed by the thread that is waited for.
        let alone = std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
        Self { polls: if alone { Duration::ZERO } else { POLLS }, ..Self::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the thread that the state has changed.
    pub(crate) fn tell(&self, state: MutexGuard<'_, State>) {
        self.news.store(true, Ordering::Release);
        let sleeps = state.sleeps;
        drop(state);
        if sleeps {
            self.work.notify_one();
        }
    }

    /// Waits for news: polls at first, and then sleeps.
    fn await_news(&self) {
        let begun = Instant::now();
        while begun.elapsed() < self.polls {
            if self.news.swap(false, Ordering::Acquire) {
                return;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        state.sleeps = true;
        let no_news = |_: &mut State| !self.news.load(Ordering::Acquire);
        let mut state = self.work.wait_while(state, no_news).unwrap_or_else(PoisonError::into_inner);
        state.sleeps = false;
        self.news.store(false, Ordering::Release);
    }

    /// Waits until something has ended, nothing is left or the time is over.
    pub(crate) fn wait(&self, timeout: Duration) {
        let works = |s: &State| s.busy > 0 && !s.stuck || s.halted.is_none() && !s.todo.is_empty();
        let goes_on = |s: &mut State| s.ended.is_empty() && works(s);
        drop(self.wait_while(self.lock(), timeout, goes_on));
    }

    fn wait_while<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        timeout: Duration,
        condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        state.waits = true;
        let waited = self.ended.wait_timeout_while(state, timeout, condition);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waits = false;
        state
    }

    /// Wakes the one who waits if something has ended, once the lock is free.
    fn tell_end(&self, state: MutexGuard<'_, State>) {
        let waits = state.waits && !state.ended.is_empty();
        drop(state);
        if waits {
            self.ended.notify_all();
        }
    }

    /// Tells the thread to end; true once it makes no call any more.
    pub(crate) fn quit(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        state.quit = true;
        state.todo.clear();
        self.tell(state);
        let state = self.wait_while(self.lock(), timeout, |s| s.busy > 0 && !s.stuck);
        state.busy == 0 || state.stuck
    }
}

/// Makes the calls of a queue.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    pair: Arc<Pair>,
    plans: Planner,
    calls: Box<dyn Calls>,
    /// For each call in flight a page for each range, for bytes before the first page of an operation.
    pages: Vec<Vec<BufferSlice>>,
    /// The buffers of the pages, and the offsets in them.
    places: Vec<Vec<(i32, u64)>>,
    /// Calls that have not ended, oldest first.
    flights: VecDeque<Call>,
    number: u64,
}

/// Knows where an operation's bytes lie.
pub(crate) struct Planner {
    pub buffers: Arc<Buffers>,
    /// The card's memory.
    pub reach: Arc<Reach>,
}

/// The bytes of an operation, in a buffer and on the card.
struct Plan {
    range: TransferRange,
    /// Bytes before the first multiple of the granule: they go through a page of the queue.
    head: u64,
}

/// A call that is being put together.
#[derive(Default)]
struct Call {
    operations: Vec<(Ticket, Operation)>,
    ranges: Vec<TransferRange>,
    /// Operations whose first bytes go through the page of a range: the range, the operation, the bytes.
    heads: Vec<(usize, usize, usize)>,
    number: u64,
    /// Which of the worker's pages are its own.
    pages: usize,
    /// Whether it moved all bytes, once it has ended.
    end: Option<bool>,
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
        self.reach.check(at, len).map_err(OpError::NoCardMemory)?;
        let direction = match direction {
            Direction::FromHost => DmaDirection::HostToCard,
            Direction::ToHost => DmaDirection::CardToHost,
        };
        let found = self.buffers.find(&host.slice);
        let (buffer, offset) = found.ok_or(OpError::Refused(Refusal::NotRegistered))?;
        let head = (offset.next_multiple_of(page() as u64) - offset).min(len);
        Ok(Some(Plan { range: TransferRange { pair: 0, direction, buffer, offset, at: at.bits(), len }, head }))
    }
}

impl Call {
    /// True when the order of the range and of what is in the call could be seen.
    fn conflicts(&self, range: &TransferRange) -> bool {
        self.ranges
            .iter()
            .any(|p| p.direction != range.direction || p.at < range.at + range.len && range.at < p.at + p.len)
    }

    /// Adds the ranges of an operation, unless they do not fit; it will be the next of `operations`.
    fn takes(&mut self, plan: &Plan, pages: &[(i32, u64)]) -> bool {
        let Plan { range, head } = *plan;
        // The ranges of a call may run at the same time.
        if self.conflicts(&range) {
            return false;
        }
        if head == 0
            && let Some(last) = self.ranges.last_mut()
            && (last.buffer, last.offset + last.len, last.at + last.len) == (range.buffer, range.offset, range.at)
            && last.len + range.len <= MAX_LEN
        {
            last.len += range.len;
            return true;
        }
        let rest = TransferRange { offset: range.offset + head, at: range.at + head, len: range.len - head, ..range };
        let wanted = usize::from(head > 0) + usize::from(rest.len > 0);
        if self.ranges.len() + wanted > MAX_RANGES {
            return false;
        }
        if head > 0 {
            let (buffer, offset) = pages[self.ranges.len()];
            self.heads.push((self.ranges.len(), self.operations.len(), head as usize));
            self.ranges.push(TransferRange { buffer, offset, len: head, ..range });
        }
        if rest.len > 0 {
            self.ranges.push(rest);
        }
        true
    }

    /// Copies the first bytes of operations to or from the pages.
    fn copy_heads(&self, pages: &[BufferSlice], direction: DmaDirection) {
        if self.ranges.first().is_none_or(|range| range.direction != direction) {
            return;
        }
        for (range, operation, len) in &self.heads {
            let host =
                self.operations[*operation].1.hosts().first().and_then(|h| h.slice.as_volatile_slice().sub(0, *len));
            if let (Some(page), Some(host)) = (pages[*range].as_volatile_slice().sub(0, *len), host) {
                match direction {
                    DmaDirection::HostToCard => page.copy_from(host, CopyHint::Keep),
                    DmaDirection::CardToHost => host.copy_from(page, CopyHint::Keep),
                }
            }
        }
    }
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        pair: Arc<Pair>,
        plans: Planner,
        calls: Box<dyn Calls>,
        pages: Vec<Vec<BufferSlice>>,
    ) -> Self {
        let place = |page: &BufferSlice| plans.buffers.find(page).unwrap_or((-1, 0));
        let places = |pages: &Vec<BufferSlice>| pages.iter().map(place).collect();
        let places = pages.iter().map(places).collect();
        Self { shared, pair, plans, calls, pages, places, flights: VecDeque::new(), number: 0 }
    }

    /// True while the card may use buffers.
    pub(crate) fn is_busy(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Runs until it is told to end.
    pub(crate) fn run(mut self) {
        let shared = self.shared.clone();
        loop {
            let quit = self.turn();
            if self.flights.is_empty() {
                if quit {
                    return;
                }
                shared.await_news();
                continue;
            }
            let end = self.calls.end(None);
            if let Err(why) = self.note(end) {
                let Some(this) = self.fail(why) else { return };
                self = this;
            }
        }
    }

    /// Gives back the operations of calls that have ended, and begins calls. They begin before this returns.
    ///
    /// # Errors
    /// Why [`Worker::fail`] must be called.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        self.turn();
        self.calls.flush().map_err(Error::NoBegin)
    }

    /// Begins calls, and gives back the operations of those that have ended, or end within the time.
    ///
    /// # Errors
    /// As [`Worker::begin`].
    pub(crate) fn advance(&mut self, mut timeout: Duration) -> Result<(), Error> {
        self.begin()?;
        while !self.flights.is_empty() {
            match self.calls.end(Some(timeout)) {
                Ok(None) => break,
                end => self.note(end)?,
            }
            timeout = Duration::ZERO;
        }
        self.begin()
    }

    /// Stops the queue pair after a failure, and gives back the operations in flight; `None` if it cannot be stopped:
    /// then all of it is leaked (never freed).
    pub(crate) fn fail(mut self, why: Error) -> Option<Self> {
        let stopped = self.stop();
        let shared = self.shared.clone();
        let mut state = shared.lock();
        match stopped {
            Ok(()) => {
                let reason = state.halted.get_or_insert_with(|| StopReason::Driver(why.into())).clone();
                for call in self.flights.drain(..) {
                    let result = if call.end == Some(true) { Ok(()) } else { Err(OpError::Stopped(reason.clone())) };
                    state.busy -= call.operations.len();
                    give_back(&mut state, call, &result);
                }
                shared.ended.notify_all();
                Some(self)
            }
            Err(stopping) => {
                let lost = Error::Unstoppable { failure: Box::new(why), stopping };
                state.halted.get_or_insert_with(|| StopReason::Lost(lost.into()));
                state.stuck = true;
                // The queue counts them as in flight for ever.
                self.flights.into_iter().flat_map(|call| call.operations).for_each(|(_, op)| keep_operation(op));
                self.pages.into_iter().flatten().for_each(|page| {
                    let bytes = page.len() as u64;
                    quarantine(page, bytes);
                });
                quarantine(self.calls, 0);
                shared.ended.notify_all();
                None
            }
        }
    }

    /// Gives back the operations of the calls that have ended, in order, and begins as many calls as may be in flight,
    /// or as there are. True when told to end.
    fn turn(&mut self) -> bool {
        let depth = self.calls.depth().min(self.pages.len());
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while self.flights.front().is_some_and(|call| call.end == Some(true))
            && let Some(call) = self.flights.pop_front()
        {
            state.busy -= call.operations.len();
            give_back(&mut state, call, &Ok(()));
        }
        loop {
            let begins = !state.quit && state.halted.is_none() && self.flights.len() < depth;
            match begins.then(|| self.next(&mut state.todo)).flatten() {
                Some((call, error)) if call.ranges.is_empty() => {
                    give_back(&mut state, call, &error.map_or(Ok(()), Err));
                }
                Some((mut call, _)) => {
                    (call.number, self.number) = (self.number, self.number + 1);
                    state.busy += call.operations.len();
                    shared.tell_end(state);
                    call.copy_heads(&self.pages[call.pages], DmaDirection::HostToCard);
                    self.calls.begin(call.number, abi::transfer(&call.ranges));
                    self.flights.push_back(call);
                    if self.flights.len() == depth {
                        return false;
                    }
                    state = shared.lock();
                }
                None => {
                    let quit = state.quit;
                    shared.tell_end(state);
                    return quit;
                }
            }
        }
    }

    /// Takes the operations of the next call. One without ranges is a fence, or an operation with its error; it and
    /// what conflicts with a call in flight wait until none is in flight.
    fn next(&self, todo: &mut VecDeque<(Ticket, Operation)>) -> Option<(Call, Option<OpError>)> {
        let Self { flights, places, .. } = self;
        let pages = (0..places.len()).find(|pages| flights.iter().all(|call| call.pages != *pages))?;
        let (mut call, mut error) = (Call { pages, ..Call::default() }, None);
        while let Some((_, operation)) = todo.front() {
            match self.plans.plan(operation) {
                Ok(Some(plan)) => {
                    let waits = flights.iter().any(|flight| flight.conflicts(&plan.range));
                    if waits || !call.takes(&plan, &places[pages]) {
                        break;
                    }
                    call.operations.extend(todo.pop_front());
                }
                alone => {
                    if call.operations.is_empty() && flights.is_empty() {
                        error = alone.err();
                        call.operations.extend(todo.pop_front());
                    }
                    break;
                }
            }
        }
        (!call.operations.is_empty()).then_some((call, error))
    }

    /// Notes the end of a call, or says what is wrong.
    fn note(&mut self, end: io::Result<Option<(u64, io::Result<u64>)>>) -> Result<(), Error> {
        let Some((number, result)) = end.map_err(Error::NoEnd)? else { return Ok(()) };
        let Some(call) = self.flights.iter_mut().find(|call| call.number == number) else { return Ok(()) };
        let wanted = call.ranges.iter().map(|range| range.len).sum::<u64>();
        let source = match result {
            Ok(moved) if moved == wanted => {
                call.copy_heads(&self.pages[call.pages], DmaDirection::CardToHost);
                call.end = Some(true);
                return Ok(());
            }
            Ok(moved) => Error::Short { wanted, moved },
            Err(e) => Error::call(Request::Transfer, e),
        };
        call.end = Some(false);
        Err(Error::Unknown { len: wanted, at: CardAddr::new(call.ranges[0].at), source: Box::new(source) })
    }

    /// Stops the queue pair after a failure, and awaits all calls in flight. Afterwards the card uses none of their
    /// buffers; an error says that it may.
    fn stop(&mut self) -> io::Result<()> {
        self.pair.stop()?;
        while self.flights.iter().any(|call| call.end.is_none()) {
            match self.calls.end(Some(TIMEOUT))? {
                None => return Err(io::Error::new(io::ErrorKind::TimedOut, "the driver does not end its transfers")),
                // Why the others failed is known.
                end => drop(self.note(Ok(end))),
            }
        }
        Ok(())
    }
}

/// Gives back the operations of a call.
fn give_back(state: &mut State, call: Call, result: &Result<(), OpError>) {
    for (ticket, operation) in call.operations {
        let bytes = if result.is_ok() { operation.bytes() } else { 0 };
        state.ended.push_back(Completion { ticket, operation, result: result.clone(), bytes });
    }
}

fn keep_operation(operation: Operation) {
    let bytes = operation.bytes();
    quarantine(operation, bytes);
}
