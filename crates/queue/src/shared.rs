//! One queue for many threads.
//!
//! A queue belongs to one thread. A [`SharedQueue`] puts it behind a lock and hands out [`SharedHandle`]s, which are
//! queues themselves. A poll of one handle polls for all, and no thread waits for another one that polls: submitted
//! operations lie in a list until the next poll moves them into the queue; completions lie in the inbox of their
//! handle. The two locks are taken in one order: the queue's first, then that of the list and the inboxes, which is
//! held for moments only.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::{
    Cancelled, Capabilities, Completion, Limits, OpError, Operation, Queue, RELEASE_TIMEOUT, Refusal, Refused,
    StopReason, Ticket,
};

/// Polls of a waiting handle before its first sleep, and how long it sleeps.
const SPINS: u32 = 64;
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// How a [`SharedQueue`] is shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedOptions {
    /// Operations that the queue has at most, or its own capacity; all others can be taken back. Too few let the device
    /// run dry.
    pub inside: usize,
    /// Operations of all handles together, those in the queue included.
    pub total: usize,
    /// Time that dropped handles wait, all together, for the next operation to end.
    pub drop_timeout: Duration,
}

impl Default for SharedOptions {
    /// 64 in the queue, 1024 in all; 10 s.
    fn default() -> Self {
        Self { inside: 64, total: 1024, drop_timeout: Duration::from_secs(10) }
    }
}

/// A queue that any number of threads use, each through a [`SharedHandle`]. Clones share the same queue,
/// which is dropped with the last clone and the last handle.
pub struct SharedQueue<Q: Queue>(Arc<Inner<Q>>);

struct Inner<Q: Queue> {
    limits: Limits,
    inside: usize,
    drop_timeout: Duration,
    capabilities: Capabilities,
    back: Mutex<Back<Q>>,
    front: Mutex<Front<Q::Addr>>,
}

/// Locked while the queue is polled.
struct Back<Q: Queue> {
    queue: Q,
    /// The operations in the queue, oldest first: its ticket, ours, and the handle.
    owners: VecDeque<(Ticket, Ticket, usize)>,
    scratch: Vec<Completion<Q::Addr>>,
    /// Until when dropped handles wait, all together.
    deadline: Option<Instant>,
}

/// Locked for moments.
struct Front<A> {
    /// Submitted operations that the queue has not got yet, oldest first.
    waiting: VecDeque<Waiting<A>>,
    handles: Vec<Inbox<A>>,
    free: Vec<usize>,
    next: u64,
    in_flight: usize,
    halted: Option<StopReason>,
}

struct Waiting<A> {
    ticket: Ticket,
    handle: usize,
    operation: Operation<A>,
}

/// The state of one handle.
struct Inbox<A> {
    completions: VecDeque<Completion<A>>,
    /// Operations that have not ended.
    in_flight: usize,
    /// The handle is gone: completions are dropped.
    detached: bool,
}

impl<A> Default for Inbox<A> {
    fn default() -> Self {
        Self { completions: VecDeque::new(), in_flight: 0, detached: false }
    }
}

/// A handle of a [`SharedQueue`]: a queue with its own operations and completions.
///
/// A refusal that only the queue itself can give ends the operation with [`OpError::Refused`]. [`Queue::stop`]
/// and [`Queue::restart`] are for all handles. A fence is for the operations of all
/// handles.
///
/// A dropped handle waits for its operations, as every queue does,
/// but no longer than [`SharedOptions::drop_timeout`] for the next of them to end; [`SharedHandle::detach`] does not
/// wait.
pub struct SharedHandle<Q: Queue> {
    shared: SharedQueue<Q>,
    number: usize,
    /// Accepted and not given back.
    in_flight: usize,
}

impl<Q: Queue> Clone for SharedQueue<Q> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<Q: Queue> SharedQueue<Q> {
    /// Shares a queue.
    ///
    /// # Panics
    /// When the queue has operations in flight.
    pub fn new(queue: Q, options: SharedOptions) -> Self {
        assert_eq!(queue.in_flight(), 0, "a shared queue needs its queue for itself");
        let limits = queue.limits();
        let front = Front {
            waiting: VecDeque::new(),
            handles: Vec::new(),
            free: Vec::new(),
            next: 0,
            in_flight: 0,
            halted: queue.halted(),
        };
        Self(Arc::new(Inner {
            limits: Limits { capacity: options.total, ..limits },
            inside: options.inside.min(limits.capacity),
            drop_timeout: options.drop_timeout,
            capabilities: queue.capabilities(),
            back: Mutex::new(Back { queue, owners: VecDeque::new(), scratch: Vec::new(), deadline: None }),
            front: Mutex::new(front),
        }))
    }

    /// A new handle.
    pub fn handle(&self) -> SharedHandle<Q> {
        let mut front = self.front();
        let number = front.free.pop().unwrap_or_else(|| {
            front.handles.push(Inbox::default());
            front.handles.len() - 1
        });
        drop(front);
        SharedHandle { shared: self.clone(), number, in_flight: 0 }
    }

    /// Operations of all handles that have not ended.
    pub fn in_flight(&self) -> usize {
        self.front().in_flight
    }

    /// Gives the queue what waits, lets it work, and puts completions into inboxes; says how many. Returns at once when
    /// another thread is doing that.
    pub fn poll(&self) -> usize {
        let mut back = match self.0.back.try_lock() {
            Ok(back) => back,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        self.feed(&mut back);
        let Back { queue, owners, scratch, deadline } = &mut *back;
        queue.poll(scratch);
        let ended = scratch.len();
        if ended > 0 {
            *deadline = None;
            let mut front = self.front();
            for completion in scratch.drain(..) {
                let place = owners.iter().position(|(theirs, ..)| *theirs == completion.ticket);
                let Some((_, ticket, handle)) = place.and_then(|place| owners.remove(place)) else { continue };
                front.end(handle, Completion { ticket, ..completion });
            }
            drop(front);
            // The queue has room again.
            self.feed(&mut back);
            back.queue.flush();
        }
        let halted = back.queue.halted();
        if halted.is_some() {
            self.front().halted = halted;
        }
        ended
    }

    /// Gives the queue what it may have of what waits.
    fn feed(&self, back: &mut Back<Q>) {
        while back.queue.in_flight() < self.0.inside {
            let Some(Waiting { ticket, handle, operation }) = self.front().waiting.pop_front() else { break };
            match back.queue.submit(operation) {
                Ok(theirs) => back.owners.push_back((theirs, ticket, handle)),
                Err(Refused { operation, reason: Refusal::Full }) => {
                    self.front().waiting.push_front(Waiting { ticket, handle, operation });
                    break;
                }
                // It was accepted before, so this is reported as its end.
                Err(Refused { operation, reason }) => {
                    let result = Err(OpError::from(reason));
                    self.front().end(handle, Completion { ticket, operation, result, bytes: 0 });
                }
            }
        }
    }

    fn back(&self) -> MutexGuard<'_, Back<Q>> {
        // A panic elsewhere leaves it consistent: every operation is in one place.
        self.0.back.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn front(&self) -> MutexGuard<'_, Front<Q::Addr>> {
        self.0.front.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<A> Front<A> {
    /// Delivers a completion.
    fn end(&mut self, handle: usize, completion: Completion<A>) {
        self.in_flight -= 1;
        let inbox = &mut self.handles[handle];
        inbox.in_flight -= 1;
        if !inbox.detached {
            inbox.completions.push_back(completion);
        } else if inbox.in_flight == 0 {
            self.release(handle);
        }
    }

    fn release(&mut self, handle: usize) {
        self.handles[handle] = Inbox::default();
        self.free.push(handle);
    }
}

impl<Q: Queue> SharedHandle<Q> {
    /// The shared queue, for further handles.
    pub fn shared(&self) -> &SharedQueue<Q> {
        &self.shared
    }

    /// Drops the handle without waiting: its operations go on, and their memory is dropped when they have ended.
    pub fn detach(mut self) {
        // The drop that follows waits for none, and leaves.
        self.in_flight = 0;
    }

    fn leave(&mut self) {
        let mut front = self.shared.front();
        let inbox = &mut front.handles[self.number];
        inbox.detached = true;
        let dropped = std::mem::take(&mut inbox.completions);
        if inbox.in_flight == 0 {
            front.release(self.number);
        }
        drop(front);
        drop(dropped);
    }

    fn collect(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        let mut front = self.shared.front();
        let inbox = &mut front.handles[self.number].completions;
        let n = inbox.len();
        done.extend(inbox.drain(..));
        self.in_flight -= n;
        n
    }
}

impl<Q: Queue> Queue for SharedHandle<Q> {
    type Addr = Q::Addr;

    fn limits(&self) -> Limits {
        self.shared.0.limits
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.0.capabilities
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, operation: Operation<Q::Addr>) -> Result<Ticket, Refused<Q::Addr>> {
        if let Err(reason) = operation.admit(self.shared.0.capabilities, self.shared.0.limits) {
            return Err(Refused { operation, reason });
        }
        let mut front = self.shared.front();
        let reason = match &front.halted {
            Some(reason) => Refusal::Stopped(reason.clone()),
            None if front.in_flight >= self.shared.0.limits.capacity => Refusal::Full,
            None => {
                let ticket = Ticket::new(front.next);
                front.next += 1;
                front.in_flight += 1;
                front.handles[self.number].in_flight += 1;
                let handle = self.number;
                front.waiting.push_back(Waiting { ticket, handle, operation });
                self.in_flight += 1;
                return Ok(ticket);
            }
        };
        Err(Refused { operation, reason })
    }

    /// Leaves it to another thread that is polling.
    fn flush(&mut self) {
        if let Ok(mut back) = self.shared.0.back.try_lock() {
            self.shared.feed(&mut back);
            back.queue.flush();
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        self.shared.poll();
        self.collect(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<Q::Addr>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        let mut spins = 0;
        loop {
            let n = self.poll(done);
            if n > 0 || self.in_flight == 0 || deadline.is_some_and(|d| Instant::now() >= d) {
                return n;
            }
            spins += 1;
            // Without a lock: others submit meanwhile.
            if spins > SPINS { std::thread::sleep(POLL_INTERVAL) } else { std::thread::yield_now() }
        }
    }

    fn halted(&self) -> Option<StopReason> {
        self.shared.front().halted.clone()
    }

    fn stop(&mut self, reason: StopReason) {
        let mut back = self.shared.back();
        back.queue.stop(reason);
        let halted = back.queue.halted();
        self.shared.front().halted = halted;
    }

    fn restart(&mut self) -> bool {
        let mut back = self.shared.back();
        let runs = back.queue.restart();
        if runs {
            self.shared.front().halted = None;
        }
        runs
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<Q::Addr> {
        let mut back = self.shared.back();
        let mut front = self.shared.front();
        let list = &mut front.waiting;
        let ours = |waiting: &Waiting<Q::Addr>| waiting.ticket == ticket && waiting.handle == self.number;
        let taken = match list.iter().position(ours).and_then(|place| list.remove(place)) {
            Some(waiting) => waiting.operation,
            None => {
                let Back { queue, owners, .. } = &mut *back;
                let owner = |(_, ours, handle): &(Ticket, Ticket, usize)| *ours == ticket && *handle == self.number;
                let Some(place) = owners.iter().position(owner) else {
                    let ended = front.handles[self.number].completions.iter().any(|c| c.ticket == ticket);
                    return if ended { Cancelled::TooLate } else { Cancelled::Unknown };
                };
                match queue.cancel(owners[place].0) {
                    Cancelled::Removed(operation) => {
                        owners.remove(place);
                        operation
                    }
                    other => return other,
                }
            }
        };
        front.in_flight -= 1;
        front.handles[self.number].in_flight -= 1;
        self.in_flight -= 1;
        Cancelled::Removed(taken)
    }
}

impl<Q: Queue> Drop for SharedHandle<Q> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = Instant::now();
            let timeout = self.shared.0.drop_timeout;
            let timeout = if self.halted().is_some() { timeout.min(RELEASE_TIMEOUT) } else { timeout };
            if now >= *self.shared.back().deadline.get_or_insert(now + timeout) {
                break;
            }
            self.wait(&mut done, Duration::from_millis(100));
            done.clear();
        }
        self.leave();
    }
}

impl<Q: Queue> std::fmt::Debug for SharedQueue<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let front = self.front();
        let handles = front.handles.len() - front.free.len();
        write!(f, "SharedQueue({handles} handles, {} in flight)", front.in_flight)
    }
}

impl<Q: Queue> std::fmt::Debug for SharedHandle<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedHandle({} in flight)", self.in_flight)
    }
}
