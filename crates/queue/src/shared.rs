//! One queue for many threads: handles, classes of priority, futures.
//!
//! A queue belongs to one thread. [`Shared`] puts it behind a lock. What is submitted waits in one list for each
//! [`Class`] and goes to the queue as far as that is not full of it already: the classes only mean something as long as what is more
//! urgent has little in front of it. Whoever polls or waits, by a handle or by a [`Pending`], does so for all: it feeds the queue,
//! collects what has ended, puts it where its owner finds it, and wakes the owner's task. There is no thread behind this.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::{Cancelled, Ended, OpError, Operation, Queue, Refusal, Rejected, Stats, Ticket};

/// How urgent an operation is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Class {
    /// Before everything else.
    High,
    /// As ever.
    #[default]
    Normal,
    /// When nothing else waits, and once in a while all the same.
    Low,
}

const CLASSES: usize = 3;
/// One operation in so many comes from the least urgent class that has any: nothing starves.
const FAIR_EVERY: u64 = 16;
/// A waiter's sleep between polls, once it has spun and yielded for nothing.
const NAP: Duration = Duration::from_micros(50);

/// A queue shared by any number of threads, as one of its handles. Clones are handles to the same queue.
///
/// The queue is dropped, and so drained, with the last handle and the last [`Pending`].
pub struct Shared<Q: Queue>(Arc<Inner<Q>>);

struct Inner<Q> {
    state: Mutex<State<Q>>,
}

struct State<Q> {
    queue: Q,
    window: usize,
    waiting: [VecDeque<Waiting>; CLASSES],
    places: HashMap<u64, Place>,
    /// By the queue's tickets.
    flying: HashMap<Ticket, u64>,
    next: u64,
    limit: usize,
    fed: u64,
    ended: Vec<Ended>,
    full: u64,
    /// Somebody polls without being asked: futures need not wake themselves.
    driven: bool,
    /// Of tasks whose operation has ended, to be woken without the lock: a waker may run its task at once.
    woken: Vec<Waker>,
}

struct Waiting {
    id: u64,
    operation: Operation,
}

/// What has become of an operation.
enum Place {
    Waiting {
        class: Class,
        waker: Option<Waker>,
    },
    Flying {
        ticket: Ticket,
        waker: Option<Waker>,
    },
    /// Nobody wants to know.
    Forgotten,
    Ended(Box<Ended>),
}

/// An operation on its way through a [`Shared`] queue: to be polled, waited for, awaited, or dropped.
///
/// It is a [`Future`] for any executor: the task is woken by whoever collects the operation's end. Each time it is polled it polls for all,
/// and asks to be polled again, so that it ends whether or not anybody else polls; with [`Shared::set_driven`] it leaves
/// that to whoever said so.
///
/// Dropping it lets the operation go on; its memory is dropped when it has ended.
#[must_use = "dropping it drops the buffers when the operation has ended"]
pub struct Pending<Q: Queue> {
    inner: Arc<Inner<Q>>,
    id: u64,
    done: bool,
}

impl<Q: Queue> Shared<Q> {
    /// Shares a queue. At most `limit` operations may wait outside of it.
    ///
    /// # Panics
    /// When the queue has operations in flight.
    pub fn new(queue: Q, limit: usize) -> Self {
        assert_eq!(queue.in_flight(), 0, "a shared queue is nobody else's");
        // Few enough that an urgent operation is soon at the front, many enough that the device does not run dry.
        let window = queue.limits().capacity.min(64);
        let state = State {
            queue,
            window,
            waiting: Default::default(),
            places: HashMap::new(),
            flying: HashMap::new(),
            next: 0,
            limit,
            fed: 0,
            ended: Vec::new(),
            full: 0,
            driven: false,
            woken: Vec::new(),
        };
        Self(Arc::new(Inner { state: Mutex::new(state) }))
    }

    /// Accepts an operation; the next poll of anybody gives it to the queue.
    ///
    /// # Errors
    /// [`Rejected`]: [`Refusal::Full`] when as many wait as may; what [`Operation::check`] says; [`Refusal::Unable`]. What only the queue itself finds wrong
    /// ends the operation with [`OpError::Stopped`].
    pub fn submit(&self, class: Class, operation: Operation) -> Result<Pending<Q>, Rejected> {
        let mut state = self.0.lock();
        let missing = operation.needs() - state.queue.abilities();
        let reason = match operation.check() {
            _ if !missing.is_empty() => Refusal::Unable(missing),
            Err(reason) => reason,
            Ok(()) if state.waiting.iter().map(VecDeque::len).sum::<usize>() >= state.limit => {
                state.full += 1;
                Refusal::Full
            }
            Ok(()) => {
                let id = state.next;
                state.next += 1;
                state.places.insert(id, Place::Waiting { class, waker: None });
                state.waiting[class as usize].push_back(Waiting { id, operation });
                return Ok(Pending { inner: self.0.clone(), id, done: false });
            }
        };
        Err(Rejected { operation, reason })
    }

    /// Feeds the queue, lets it work, and hands out what has ended; says how many operations that were. Returns at once when another
    /// thread is doing that.
    pub fn poll(&self) -> usize {
        let mut state = match self.0.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        let n = state.turn();
        release(state);
        n
    }

    /// Operations that were accepted and have not ended.
    pub fn in_flight(&self) -> usize {
        let state = self.0.lock();
        state.flying.len() + state.waiting.iter().map(VecDeque::len).sum::<usize>()
    }

    /// The queue's counters, refusals of this layer included.
    pub fn stats(&self) -> Stats {
        let state = self.0.lock();
        let mut stats = state.queue.stats();
        stats.full += state.full;
        stats
    }

    /// Says whether somebody polls without being asked (a thread, a loop around [`Shared::event`]). Then a [`Pending`] that is awaited sleeps until
    /// that wakes it, instead of keeping its executor busy.
    pub fn set_driven(&self, driven: bool) {
        let mut state = self.0.lock();
        state.driven = driven;
        if !driven {
            // Whoever sleeps has to poll again.
            let State { places, woken, .. } = &mut *state;
            woken.extend(places.values_mut().filter_map(|place| match place {
                Place::Waiting { waker, .. } | Place::Flying { waker, .. } => waker.take(),
                Place::Forgotten | Place::Ended(_) => None,
            }));
        }
        release(state);
    }

    /// A file descriptor to wait for, as [`Queue::event`].
    pub fn event(&self) -> Option<OwnedFd> {
        self.0.lock().queue.event().and_then(|fd| fd.try_clone_to_owned().ok())
    }

    /// Gives the queue what it may have and asks for an event, as [`Queue::arm`]. False: poll instead of waiting.
    pub fn arm(&self) -> bool {
        let mut state = self.0.lock();
        state.feed();
        let armed = state.queue.arm();
        release(state);
        armed
    }

    /// Lets `f` use the queue, for what is not passed on here: time-outs, stopping, events. It must neither enqueue nor collect.
    pub fn with_queue<T>(&self, f: impl FnOnce(&mut Q) -> T) -> T {
        f(&mut self.0.lock().queue)
    }

    /// Polls until nothing is in flight or the time is up; true when nothing is.
    pub fn drain(&self, timeout: Duration) -> bool {
        let mut patience = Patience::new(timeout);
        while self.in_flight() > 0 {
            let collected = self.poll();
            if !patience.pause(collected > 0) {
                return false;
            }
        }
        true
    }
}

/// Pauses between polls, ever longer, without the lock: spins, gives the processor away, sleeps.
struct Patience {
    deadline: Option<Instant>,
    idle: u32,
}

impl Patience {
    fn new(timeout: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(timeout), idle: 0 }
    }

    /// False when the time is up.
    fn pause(&mut self, worked: bool) -> bool {
        self.idle = if worked { 0 } else { self.idle + 1 };
        match self.idle {
            0 => return true,
            1..100 => std::hint::spin_loop(),
            100..200 => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
        self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }
}

impl<Q: Queue> Clone for Shared<Q> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Unlocks, then wakes.
fn release<Q>(mut state: MutexGuard<'_, State<Q>>) {
    let woken = std::mem::take(&mut state.woken);
    drop(state);
    woken.into_iter().for_each(Waker::wake);
}

impl<Q> Inner<Q> {
    fn lock(&self) -> MutexGuard<'_, State<Q>> {
        // What a panic elsewhere left is consistent: every operation is in one place.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Q: Queue> State<Q> {
    /// One round.
    fn turn(&mut self) -> usize {
        self.feed();
        let mut ended = std::mem::take(&mut self.ended);
        self.queue.poll(&mut ended);
        let n = ended.len();
        for end in ended.drain(..) {
            if let Some(id) = self.flying.remove(&end.ticket) {
                self.settle(id, end);
            }
        }
        self.ended = ended;
        if n > 0 {
            self.feed();
            self.queue.doorbell();
        }
        n
    }

    /// Puts the end of an operation where its owner looks.
    fn settle(&mut self, id: u64, end: Ended) {
        match self.places.insert(id, Place::Ended(Box::new(end))) {
            Some(Place::Forgotten) => {
                self.places.remove(&id);
            }
            Some(Place::Waiting { waker, .. } | Place::Flying { waker, .. }) => {
                self.woken.extend(waker);
            }
            Some(Place::Ended(_)) | None => {}
        }
    }

    /// The class whose turn it is.
    fn turn_of(&self) -> Option<usize> {
        let mut classes = 0..CLASSES;
        let some = |c: &usize| !self.waiting[*c].is_empty();
        if self.fed % FAIR_EVERY == FAIR_EVERY - 1 { classes.rfind(some) } else { classes.find(some) }
    }

    /// Gives the queue what it may have of what waits.
    fn feed(&mut self) {
        while self.queue.in_flight() < self.window
            && let Some(class) = self.turn_of()
            && let Some(Waiting { id, operation }) = self.waiting[class].pop_front()
        {
            match self.queue.enqueue(operation) {
                Ok(ticket) => {
                    self.fed += 1;
                    self.flying.insert(ticket, id);
                    if let Some(place) = self.places.get_mut(&id)
                        && let Place::Waiting { waker, .. } = place
                    {
                        *place = Place::Flying { ticket, waker: waker.take() };
                    }
                }
                Err(Rejected { operation, reason: Refusal::Full }) => {
                    self.waiting[class].push_front(Waiting { id, operation });
                    return;
                }
                // It was accepted before, so this is reported as its end.
                Err(Rejected { operation, reason }) => {
                    let result = Err(OpError::Stopped(reason.to_string()));
                    self.settle(id, Ended { ticket: Ticket::new(u64::MAX), operation, result, bytes: 0 });
                }
            }
        }
    }
}

impl<Q: Queue> Pending<Q> {
    /// The operation when it has ended, after one poll for all; `None` while it has not.
    ///
    /// # Panics
    /// When it was given out before.
    pub fn poll_once(&mut self) -> Option<Ended> {
        let inner = self.inner.clone();
        let mut state = inner.lock();
        if let Some(end) = self.take(&mut state) {
            return Some(end);
        }
        state.turn();
        let end = self.take(&mut state);
        release(state);
        end
    }

    /// Waits for the operation.
    ///
    /// # Errors
    /// Itself when the time was not enough.
    pub fn wait(mut self, timeout: Duration) -> Result<Ended, Self> {
        let mut patience = Patience::new(timeout);
        let inner = self.inner.clone();
        loop {
            let mut state = inner.lock();
            let collected = state.turn();
            let end = self.take(&mut state);
            release(state);
            match end {
                Some(end) => return Ok(end),
                None if patience.pause(collected > 0) => {}
                None => return Err(self),
            }
        }
    }

    /// Takes the operation back when the device has not been told of it; else asks for its end.
    ///
    /// # Errors
    /// Itself when it was not taken back: it ends as it would have, or with [`OpError::Cancelled`].
    pub fn cancel(mut self) -> Result<Operation, Self> {
        let inner = self.inner.clone();
        let mut state = inner.lock();
        let taken = match state.places.get(&self.id) {
            Some(Place::Waiting { class, .. }) => {
                let class = *class as usize;
                let list = &mut state.waiting[class];
                let place = list.iter().position(|w| w.id == self.id);
                place.and_then(|place| list.remove(place)).map(|w| w.operation)
            }
            Some(Place::Flying { ticket, .. }) => {
                let ticket = *ticket;
                match state.queue.cancel(ticket) {
                    Cancelled::TakenBack(operation) => {
                        state.flying.remove(&ticket);
                        Some(operation)
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        match taken {
            Some(operation) => {
                state.places.remove(&self.id);
                self.done = true;
                drop(state);
                Ok(operation)
            }
            None => {
                drop(state);
                Err(self)
            }
        }
    }

    /// Its end, if that has come.
    fn take(&mut self, state: &mut State<Q>) -> Option<Ended> {
        assert!(!self.done, "an operation ends once");
        match state.places.get(&self.id) {
            Some(Place::Ended(_)) => {}
            _ => return None,
        }
        self.done = true;
        match state.places.remove(&self.id) {
            Some(Place::Ended(end)) => Some(*end),
            _ => None,
        }
    }
}

impl<Q: Queue> Future for Pending<Q> {
    type Output = Ended;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let inner = self.inner.clone();
        let mut state = inner.lock();
        // Known before the poll, which may be the one that ends it.
        if let Some(Place::Waiting { waker, .. } | Place::Flying { waker, .. }) = state.places.get_mut(&self.id)
            && !waker.as_ref().is_some_and(|known| known.will_wake(cx.waker()))
        {
            *waker = Some(cx.waker().clone());
        }
        state.turn();
        let end = self.take(&mut state);
        let driven = state.driven;
        release(state);
        match end {
            Some(end) => Poll::Ready(end),
            None => {
                if !driven {
                    cx.waker().wake_by_ref();
                }
                Poll::Pending
            }
        }
    }
}

impl<Q: Queue> Drop for Pending<Q> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut state = self.inner.lock();
        match state.places.get_mut(&self.id) {
            Some(Place::Ended(_)) => {
                state.places.remove(&self.id);
            }
            Some(place) => *place = Place::Forgotten,
            None => {}
        }
    }
}

impl<Q: Queue> std::fmt::Debug for Pending<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending({})", self.id)
    }
}

impl<Q: Queue> std::fmt::Debug for Shared<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({} in flight)", self.in_flight())
    }
}
