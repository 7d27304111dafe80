//! One queue for many threads.
//!
//! A queue belongs to one thread. A [`SharedQueue`] puts it behind a lock and hands out [`SharedHandle`]s, which are
//! queues themselves. A handle writes operations into a list of its own. One thread at a time has the queue: it gives
//! the lists to it, polls, and puts the completions of others into their inboxes. Another thread that polls leaves its
//! list to that one. One that waits first tries to get the queue itself: operations stay in the cache of the processor
//! that made them, and the queue moves from thread to thread once for a whole list. Then it sleeps until its inbox has
//! something; one of those that sleep looks after the queue.
//!
//! Locks are taken in one order: the queue's, then either that of the batches or that of an inbox, which are held for
//! moments only.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use dmalane_dma::lock;

use crate::{
    Cancelled, Capabilities, Completion, Limits, OpError, Operation, Queue, RELEASE_TIMEOUT, Refusal, Refused,
    StopReason, Ticket,
};

/// Polls of a waiting handle before it lets other threads run, and before it sleeps.
const SPINS: u32 = 256;
const ASLEEP: u32 = SPINS + 64;
/// How often the one that looks after the queue polls it, and how long all others sleep at most. They are woken, so a
/// test would hang if they were not.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
const SLEEP: Duration = Duration::from_millis(if cfg!(test) { 600_000 } else { 10 });
/// Bits of a ticket's number for the operations of one handle.
const HANDLE_SHIFT: u32 = 40;

/// Operations of one handle that the queue has not got yet, oldest first.
struct Batch<A> {
    handle: usize,
    /// The number of the first one's ticket; the others' follow.
    first: u64,
    operations: VecDeque<Operation<A>>,
}

/// How a [`SharedQueue`] is shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedOptions {
    /// Operations that the queue has at most, or its own capacity; all others can be taken back. Too few let the device
    /// run dry.
    pub inside: usize,
    /// Operations of each handle, those in the queue included.
    pub each: usize,
    /// Time that dropped handles wait, all together, for the next operation to end.
    pub drop_timeout: Duration,
}

impl Default for SharedOptions {
    /// 64 in the queue, 1024 of each handle; 10 s.
    fn default() -> Self {
        Self { inside: 64, each: 1024, drop_timeout: Duration::from_secs(10) }
    }
}

/// A queue that any number of threads use, each through a [`SharedHandle`]. Clones share the same queue,
/// which is dropped with the last clone and the last handle.
pub struct SharedQueue<Q: Queue>(Arc<Inner<Q>>);

struct Inner<Q: Queue> {
    limits: Limits,
    drop_timeout: Duration,
    capabilities: Capabilities,
    /// The reason is in `front`.
    halted: AtomicBool,
    back: Mutex<Back<Q>>,
    front: Mutex<Front<Q::Addr>>,
}

/// Locked by the one that polls the queue. Threads that look at the lock must not slow that one down: it lies on
/// another cache line.
#[repr(align(128))]
struct Back<Q: Queue> {
    queue: Q,
    /// Operations that it has at most.
    inside: usize,
    /// Batches that the queue has not got yet, oldest first.
    waiting: VecDeque<Batch<Q::Addr>>,
    /// The operations in the queue, oldest first: its ticket, ours, and the handle.
    owners: VecDeque<(Ticket, Ticket, usize)>,
    handles: Handles<Q::Addr>,
    /// Operations that have ended, and how many that follow each other are of one handle.
    ended: Vec<Completion<Q::Addr>>,
    runs: Vec<(usize, usize)>,
    /// Until when dropped handles wait, all together.
    deadline: Option<Instant>,
}

type Locked<'a, Q> = MutexGuard<'a, Back<Q>>;

/// Locked for moments.
#[repr(align(128))]
struct Front<A> {
    /// Batches that nobody has taken yet, oldest first.
    batches: Vec<Batch<A>>,
    halted: Option<StopReason>,
    /// One of the threads that wait looks after the queue; the others sleep.
    watched: bool,
    sleepers: Vec<Arc<Inbox<A>>>,
}

struct Handles<A> {
    all: Vec<Handle<A>>,
    free: Vec<usize>,
    /// How many there were: tickets of the next one begin there.
    made: u64,
}

/// The queue's side of a handle.
struct Handle<A> {
    inbox: Arc<Inbox<A>>,
    /// Operations that it gave away and that have not ended.
    in_flight: usize,
    /// The handle is gone: completions are dropped.
    detached: bool,
}

struct Inbox<A> {
    state: Mutex<Inbound<A>>,
    changed: Condvar,
}

struct Inbound<A> {
    completions: Vec<Completion<A>>,
    /// Its handle sleeps until there is one, or until it is to look after the queue.
    asleep: bool,
}

impl<A> Default for Inbox<A> {
    fn default() -> Self {
        Self { state: Mutex::new(Inbound { completions: Vec::new(), asleep: false }), changed: Condvar::new() }
    }
}

/// A handle of a [`SharedQueue`]: a queue with its own operations and completions.
///
/// The queue gets an operation after the next [`Queue::flush`], [`Queue::poll`] or [`Queue::wait`] of its handle, not
/// before. A refusal that only the queue itself can give ends the operation with [`OpError::Refused`]. [`Queue::stop`]
/// and [`Queue::restart`] are for all handles. A fence is for the operations of all handles.
///
/// A dropped handle waits for its operations, as every queue does,
/// but no longer than [`SharedOptions::drop_timeout`] for the next of them to end; [`SharedHandle::detach`] does not
/// wait.
pub struct SharedHandle<Q: Queue> {
    shared: SharedQueue<Q>,
    inbox: Arc<Inbox<Q::Addr>>,
    own: Pending<Q::Addr>,
    /// Accepted and not given back.
    in_flight: usize,
}

/// Operations of a handle that it has not given away yet.
struct Pending<A> {
    handle: usize,
    /// The number of the ticket of the next one to come.
    next: u64,
    operations: Vec<Operation<A>>,
}

impl<A> Pending<A> {
    /// The number of the first one's ticket.
    fn first(&self) -> u64 {
        self.next - self.operations.len() as u64
    }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
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
        let (limits, capabilities, halted) = (queue.limits(), queue.capabilities(), queue.halted());
        let back = Back {
            queue,
            inside: options.inside.min(limits.capacity),
            waiting: VecDeque::new(),
            owners: VecDeque::new(),
            handles: Handles { all: Vec::new(), free: Vec::new(), made: 0 },
            ended: Vec::new(),
            runs: Vec::new(),
            deadline: None,
        };
        Self(Arc::new(Inner {
            limits: Limits { capacity: options.each, ..limits },
            drop_timeout: options.drop_timeout,
            capabilities,
            halted: AtomicBool::new(halted.is_some()),
            back: Mutex::new(back),
            front: Mutex::new(Front { batches: Vec::new(), halted, watched: false, sleepers: Vec::new() }),
        }))
    }

    /// A new handle.
    pub fn handle(&self) -> SharedHandle<Q> {
        let inbox = Arc::<Inbox<Q::Addr>>::default();
        let (handle, next) = self.with(|back| back.handles.add(inbox.clone()));
        let own = Pending { handle, next, operations: Vec::new() };
        SharedHandle { shared: self.clone(), inbox, own, in_flight: 0 }
    }

    /// Operations that handles gave to the queue, by a flush or a poll, and that have not ended.
    pub fn in_flight(&self) -> usize {
        self.with(|back| back.handles.all.iter().map(|handle| handle.in_flight).sum())
    }

    /// Gives the queue what waits, lets it work, and puts completions into inboxes; says how many. Returns at once when
    /// another thread is doing that.
    pub fn poll(&self) -> usize {
        let Some(mut back) = try_lock(&self.0.back) else { return 0 };
        self.take(&mut back);
        self.turn(back, None, &mut Vec::new())
    }

    /// Takes the queue, unless another thread has it, and gives it what a handle has, or `leaves` that to the thread.
    fn give(&self, own: &mut Pending<Q::Addr>, leaves: bool) -> Option<Locked<'_, Q>> {
        if let Some(mut back) = try_lock(&self.0.back) {
            self.take(&mut back); // what is older
            let room = back.room();
            back.give(own, room);
            return Some(back);
        }
        if own.operations.is_empty() || !leaves {
            return None;
        }
        let (handle, first, room) = (own.handle, own.first(), Vec::with_capacity(own.operations.len()));
        let operations = mem::replace(&mut own.operations, room).into();
        lock(&self.0.front).batches.push(Batch { handle, first, operations });
        // The other thread may have looked for batches before.
        let mut back = try_lock(&self.0.back)?;
        self.take(&mut back);
        Some(back)
    }

    /// A poll by the thread that has the lock, perhaps that of a handle, whose completions go to `done`. Says how many
    /// operations have ended.
    fn turn(&self, mut back: Locked<'_, Q>, own: Option<usize>, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        back.feed();
        if let Some(own) = own {
            back.handles.all[own].inbox.collect(done); // what ended earlier
        }
        let ended = back.poll(own, done);
        if ended > 0 {
            back.flush(); // it has room again
        }
        let halted = back.queue.halted();
        if halted.is_some() {
            self.halt(halted);
        }
        self.leave(back);
        ended
    }

    /// Unlocks the queue, and gives it what others were leaving to this thread meanwhile.
    fn leave<'a>(&'a self, mut back: Locked<'a, Q>) {
        loop {
            drop(back);
            if lock(&self.0.front).batches.is_empty() {
                return;
            }
            let Some(again) = try_lock(&self.0.back) else { return };
            back = again;
            self.take(&mut back);
            back.flush();
        }
    }

    /// Waits for the queue, and does something with it.
    fn with<R>(&self, job: impl FnOnce(&mut Back<Q>) -> R) -> R {
        let mut back = lock(&self.0.back);
        self.take(&mut back);
        let result = job(&mut back);
        self.leave(back);
        result
    }

    /// Moves batches behind those that wait.
    fn take(&self, back: &mut Back<Q>) {
        for batch in lock(&self.0.front).batches.drain(..) {
            back.handles.all[batch.handle].in_flight += batch.operations.len();
            back.waiting.push_back(batch);
        }
    }

    fn halt(&self, reason: Option<StopReason>) {
        let mut front = lock(&self.0.front);
        self.0.halted.store(reason.is_some(), Ordering::Release);
        front.halted = reason;
    }
}

impl<Q: Queue> Back<Q> {
    /// Takes operations of a handle, of which the queue gets `room` when nothing else waits.
    fn give(&mut self, own: &mut Pending<Q::Addr>, room: usize) {
        let (handle, mut first) = (own.handle, own.first());
        self.handles.all[handle].in_flight += own.operations.len();
        let room = if self.waiting.is_empty() { room } else { 0 };
        let mut full = None;
        let mut operations = own.operations.drain(..);
        for operation in operations.by_ref().take(room) {
            if let Some(operation) = self.submit(handle, first, operation) {
                full = Some(operation);
                break;
            }
            first += 1;
        }
        if full.is_some() || operations.len() > 0 {
            let operations = full.into_iter().chain(operations).collect();
            self.waiting.push_back(Batch { handle, first, operations });
        }
    }

    /// Gives the queue what it may have of what waits.
    fn feed(&mut self) {
        while let Some(mut batch) = self.waiting.pop_front() {
            for _ in 0..self.room() {
                let Some(operation) = batch.operations.pop_front() else { break };
                if let Some(operation) = self.submit(batch.handle, batch.first, operation) {
                    batch.operations.push_front(operation);
                    break;
                }
                batch.first += 1;
            }
            if !batch.operations.is_empty() {
                return self.waiting.push_front(batch);
            }
        }
    }

    /// Gives the queue what it may have, and tells the device.
    fn flush(&mut self) {
        self.feed();
        self.queue.flush();
    }

    /// Takes an operation of a handle back, from those that wait or from the queue.
    fn cancel(&mut self, handle: usize, ticket: Ticket) -> Cancelled<Q::Addr> {
        let number = ticket.number();
        let tickets = |batch: &Batch<_>| batch.first..batch.first + batch.operations.len() as u64;
        let has = |batch: &Batch<_>| batch.handle == handle && tickets(batch).contains(&number);
        if let Some(at) = self.waiting.iter().position(has) {
            // Tickets in a batch follow each other, so what is behind it becomes another batch.
            let Batch { first, operations, .. } = &mut self.waiting[at];
            let mut operations = operations.split_off((number - *first) as usize);
            let removed = operations.pop_front();
            self.waiting.insert(at + 1, Batch { handle, first: number + 1, operations });
            return removed.map_or(Cancelled::Unknown, Cancelled::Removed);
        }
        let Some(place) = self.owners.iter().position(|(_, ours, of)| *ours == ticket && *of == handle) else {
            return Cancelled::Unknown;
        };
        let cancelled = self.queue.cancel(self.owners[place].0);
        if let Cancelled::Removed(_) = cancelled {
            self.owners.remove(place);
        }
        cancelled
    }

    /// Operations that the queue may have now.
    fn room(&self) -> usize {
        self.inside.saturating_sub(self.queue.in_flight())
    }

    /// Gives the queue an operation, which comes back when the queue is full.
    #[inline]
    fn submit(&mut self, handle: usize, ticket: u64, operation: Operation<Q::Addr>) -> Option<Operation<Q::Addr>> {
        let ticket = Ticket::new(ticket);
        match self.queue.submit(operation) {
            Ok(theirs) => self.owners.push_back((theirs, ticket, handle)),
            Err(Refused { operation, reason: Refusal::Full }) => return Some(operation),
            // It was accepted before, so this is reported as its end.
            Err(Refused { operation, reason }) => {
                let end = Completion { ticket, operation, result: Err(OpError::from(reason)), bytes: 0 };
                self.handles.end(handle, [end].into_iter());
            }
        }
        None
    }

    /// Lets the queue work, and delivers what has ended: that of `own` to `done`, the rest to inboxes.
    fn poll(&mut self, own: Option<usize>, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        let Self { queue, owners, handles, ended, runs, .. } = self;
        queue.poll(ended);
        let n = ended.len();
        if n == 0 {
            return 0;
        }
        self.deadline = None;
        for completion in &mut *ended {
            // Most queues end operations in order.
            let (_, ours, handle) = match owners.pop_front() {
                Some(oldest) if oldest.0 == completion.ticket => oldest,
                other => {
                    other.into_iter().for_each(|oldest| owners.push_front(oldest));
                    let place = owners.iter().position(|(theirs, ..)| *theirs == completion.ticket);
                    place.and_then(|at| owners.remove(at)).expect("a queue gives each operation back once")
                }
            };
            completion.ticket = ours;
            match runs.last_mut() {
                Some((of, n)) if *of == handle => *n += 1,
                _ => runs.push((handle, 1)),
            }
        }
        if done.is_empty() && runs.len() == 1 && own == Some(runs[0].0) {
            // Exchanging the memory of the two lists costs less than moving each completion.
            mem::swap(done, ended);
            handles.all[runs[0].0].in_flight -= n;
            runs.clear();
            return n;
        }
        let mut all = ended.drain(..);
        for (handle, n) in runs.drain(..) {
            let some = all.by_ref().take(n);
            if own == Some(handle) {
                done.extend(some);
                handles.all[handle].in_flight -= n;
            } else {
                handles.end(handle, some);
            }
        }
        n
    }
}

impl<A> Inbox<A> {
    fn collect(&self, done: &mut Vec<Completion<A>>) {
        done.append(&mut lock(&self.state).completions);
    }
}

impl<A> Handles<A> {
    /// Adds a handle; gives its place, and the number of its first ticket.
    fn add(&mut self, inbox: Arc<Inbox<A>>) -> (usize, u64) {
        let handle = Handle { inbox, in_flight: 0, detached: false };
        let place = self.free.pop().unwrap_or(self.all.len());
        match self.all.get_mut(place) {
            Some(free) => *free = handle,
            None => self.all.push(handle),
        }
        self.made += 1;
        (place, (self.made - 1) << HANDLE_SHIFT)
    }

    /// Delivers completions.
    fn end(&mut self, place: usize, completions: impl ExactSizeIterator<Item = Completion<A>>) {
        let handle = &mut self.all[place];
        handle.in_flight -= completions.len();
        if handle.detached {
            completions.for_each(drop);
            self.release(place);
        } else {
            let mut inbound = lock(&handle.inbox.state);
            inbound.completions.extend(completions);
            if mem::take(&mut inbound.asleep) {
                handle.inbox.changed.notify_one();
            }
        }
    }

    /// Frees the place of a handle that is gone, unless operations are in flight.
    fn release(&mut self, place: usize) {
        if self.all[place].in_flight == 0 {
            self.free.push(place);
        }
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
        self.shared.with(|back| {
            back.give(&mut self.own, 0);
            back.handles.all[self.own.handle].detached = true;
            back.handles.release(self.own.handle);
            back.flush();
        });
        lock(&self.inbox.state).completions.clear();
    }

    fn check(&self, operation: &Operation<Q::Addr>) -> Result<(), Refusal> {
        let Inner { capabilities, limits, halted, .. } = &*self.shared.0;
        operation.admit(*capabilities, *limits)?;
        if halted.load(Ordering::Acquire)
            && let Some(reason) = self.halted()
        {
            return Err(Refusal::Stopped(reason));
        }
        if self.in_flight >= limits.capacity { Err(Refusal::Full) } else { Ok(()) }
    }

    fn poll_or(&mut self, done: &mut Vec<Completion<Q::Addr>>, leaves: bool) -> usize {
        let before = done.len();
        match self.shared.give(&mut self.own, leaves) {
            Some(back) => {
                self.shared.turn(back, Some(self.own.handle), done);
            }
            None => self.inbox.collect(done),
        }
        let ended = done.len() - before;
        self.in_flight -= ended;
        ended
    }

    /// Sleeps until something has ended, another thread asks it to look after the queue, or `most` has passed; looks
    /// after the queue, in short sleeps, where no other does.
    fn sleep(&self, most: Duration, watches: &mut bool) {
        let front = &self.shared.0.front;
        {
            let mut inbound = lock(&self.inbox.state);
            if !inbound.completions.is_empty() {
                return;
            }
            inbound.asleep = true;
        }
        if !*watches {
            let mut front = lock(front);
            *watches = !mem::replace(&mut front.watched, true);
            if !*watches {
                front.sleepers.push(self.inbox.clone());
            }
        }
        let watched = !*watches;
        let most = most.min(if watched { SLEEP } else { POLL_INTERVAL });
        let asleep = self.inbox.changed.wait_timeout_while(lock(&self.inbox.state), most, |inbound| inbound.asleep);
        asleep.unwrap_or_else(PoisonError::into_inner).0.asleep = false;
        if watched {
            let sleepers = &mut lock(front).sleepers;
            match sleepers.iter().position(|inbox| Arc::ptr_eq(inbox, &self.inbox)) {
                Some(place) => drop(sleepers.remove(place)),
                None => *watches = true, // it was woken for that
            }
        }
    }

    /// Leaves the queue to one of those that sleep.
    fn wake_another(&self) {
        let mut front = lock(&self.shared.0.front);
        match front.sleepers.pop() {
            Some(inbox) => {
                drop(front);
                lock(&inbox.state).asleep = false;
                inbox.changed.notify_one();
            }
            None => front.watched = false,
        }
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

    #[inline]
    fn submit(&mut self, operation: Operation<Q::Addr>) -> Result<Ticket, Refused<Q::Addr>> {
        match self.check(&operation) {
            Ok(()) => {
                // One copy: a second one, of what was just written in other portions, would wait for that.
                self.own.operations.push(operation);
                self.in_flight += 1;
                self.own.next += 1;
                Ok(Ticket::new(self.own.next - 1))
            }
            Err(reason) => Err(Refused { operation, reason }),
        }
    }

    /// Leaves it to another thread that is polling.
    fn flush(&mut self) {
        if let Some(mut back) = self.shared.give(&mut self.own, true) {
            back.flush();
            self.shared.leave(back);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        self.poll_or(done, true)
    }

    fn wait(&mut self, done: &mut Vec<Completion<Q::Addr>>, timeout: Duration) -> usize {
        let mut n = self.poll_or(done, false);
        if n > 0 || self.in_flight == 0 {
            return n; // without asking for the time
        }
        let deadline = Instant::now().checked_add(timeout);
        let (mut polls, mut watches) = (0, false);
        while n == 0 && self.in_flight > 0 {
            let left = deadline.map_or(SLEEP, |d| d.saturating_duration_since(Instant::now()));
            polls = u32::saturating_add(polls, 1);
            match polls {
                _ if left.is_zero() => break,
                ..SPINS => std::hint::spin_loop(),
                SPINS..ASLEEP => std::thread::yield_now(),
                _ => self.sleep(left, &mut watches),
            }
            n = self.poll_or(done, polls >= SPINS);
        }
        if watches {
            self.wake_another();
        }
        n
    }

    fn halted(&self) -> Option<StopReason> {
        let halted = self.shared.0.halted.load(Ordering::Acquire);
        halted.then(|| lock(&self.shared.0.front).halted.clone())?
    }

    fn stop(&mut self, reason: StopReason) {
        self.shared.with(|back| {
            back.queue.stop(reason);
            self.shared.halt(back.queue.halted());
        });
    }

    fn restart(&mut self) -> bool {
        self.shared.with(|back| {
            let runs = back.queue.restart();
            if runs {
                self.shared.halt(None);
            }
            runs
        })
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<Q::Addr> {
        let cancelled = self.shared.with(|back| {
            back.give(&mut self.own, 0);
            let cancelled = back.cancel(self.own.handle, ticket);
            if let Cancelled::Removed(_) = cancelled {
                back.handles.all[self.own.handle].in_flight -= 1;
            }
            cancelled
        });
        match cancelled {
            Cancelled::Removed(_) => self.in_flight -= 1,
            Cancelled::Unknown if lock(&self.inbox.state).completions.iter().any(|c| c.ticket == ticket) => {
                return Cancelled::TooLate;
            }
            _ => {}
        }
        cancelled
    }
}

impl<Q: Queue> Drop for SharedHandle<Q> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = Instant::now();
            let timeout = self.shared.0.drop_timeout;
            let timeout = if self.halted().is_some() { timeout.min(RELEASE_TIMEOUT) } else { timeout };
            if now >= self.shared.with(|back| *back.deadline.get_or_insert(now + timeout)) {
                break;
            }
            self.wait(&mut done, Duration::from_millis(100));
            done.clear();
        }
        self.leave();
    }
}

dmalane_dma::debug_as!(SharedQueue<Q>, [Q: Queue], |it| "SharedQueue({} handles, {} in flight)", {
    let handles = &lock(&it.0.back).handles;
    handles.all.len() - handles.free.len()
}, it.in_flight());

dmalane_dma::debug_as!(SharedHandle<Q>, [Q: Queue], |it| "SharedHandle({} in flight)", it.in_flight);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceAddr;
    use dmalane_addr::CardAddr;

    const LONG: Duration = Duration::from_secs(300);

    /// Ends each operation, in order, so long after it came.
    struct Late {
        flying: VecDeque<(Instant, Completion)>,
        after: Duration,
        next: u64,
    }

    impl Queue for Late {
        type Addr = DeviceAddr;

        fn limits(&self) -> Limits {
            Limits { capacity: 3, max_len: 1 << 20, max_parts: usize::MAX }
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities::FILL | Capabilities::ORDERED
        }

        fn in_flight(&self) -> usize {
            self.flying.len()
        }

        fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
            if self.flying.len() >= 3 {
                return Err(Refused { operation, reason: Refusal::Full });
            }
            let (ticket, bytes) = (Ticket::new(self.next), operation.bytes());
            self.next += 1;
            let completion = Completion { ticket, operation, result: Ok(()), bytes };
            self.flying.push_back((Instant::now(), completion));
            Ok(ticket)
        }

        fn flush(&mut self) {}

        fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
            let n = self.flying.iter().take_while(|(came, _)| came.elapsed() >= self.after).count();
            done.extend(self.flying.drain(..n).map(|(_, completion)| completion));
            n
        }

        fn wait(&mut self, _: &mut Vec<Completion>, _: Duration) -> usize {
            unreachable!("a shared queue polls")
        }
    }

    /// A handle that sleeps is woken for its completions, or to look after the queue: else this takes ten minutes.
    #[test]
    fn nobody_sleeps_through_its_turn() {
        for after in [0, 30, 300, 2000].map(Duration::from_micros) {
            let late = Late { flying: VecDeque::new(), after, next: 0 };
            let shared = SharedQueue::new(late, SharedOptions { inside: 2, each: 4, ..SharedOptions::default() });
            std::thread::scope(|s| {
                for thread in 0..6u64 {
                    let mut handle = shared.handle();
                    s.spawn(move || {
                        let (mut done, mut sent, mut ended) = (Vec::new(), 0, 0);
                        // Different numbers at once, so that they end their waits at different times.
                        let at_once = 1 + thread as usize % 4;
                        while ended < 50 {
                            while sent < 50 && handle.in_flight() < at_once {
                                let at = DeviceAddr::Card(CardAddr::new(thread << 32 | sent));
                                let _ = handle.submit(Operation::fill(at, 8, 0)).unwrap();
                                sent += 1;
                            }
                            assert!(handle.wait(&mut done, LONG) > 0);
                            for completion in done.drain(..) {
                                let crate::Work::Fill { at, .. } = completion.operation.work else { panic!() };
                                assert_eq!(at, DeviceAddr::Card(CardAddr::new(thread << 32 | ended)), "in order");
                                ended += 1;
                            }
                        }
                    });
                }
            });
            let front = lock(&shared.0.front);
            assert!(!front.watched && front.sleepers.is_empty() && front.batches.is_empty());
            drop(front);
            assert_eq!(format!("{shared:?}"), "SharedQueue(0 handles, 0 in flight)");
        }
    }

    /// Whoever has the queue while another thread flushes gives it what that left.
    #[test]
    fn what_is_left_to_another_thread_arrives() {
        let late = Late { flying: VecDeque::new(), after: Duration::ZERO, next: 0 };
        let shared = SharedQueue::new(late, SharedOptions::default());
        let mut handle = shared.handle();
        let back = lock(&shared.0.back);
        let _ = handle.submit(Operation::fill(DeviceAddr::Card(CardAddr::new(0)), 8, 0)).unwrap();
        handle.flush();
        assert_eq!((handle.poll(&mut Vec::new()), lock(&shared.0.front).batches.len()), (0, 1));
        shared.leave(back);
        assert_eq!((lock(&shared.0.front).batches.len(), lock(&shared.0.back).queue.in_flight()), (0, 1));
        let mut done = Vec::new();
        assert_eq!((handle.wait(&mut done, LONG), done[0].bytes), (1, 8));
    }
}
