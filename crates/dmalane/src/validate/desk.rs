//! A channel that threads share: each has a seat, and gets what it submitted back.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_engine::{Channel, Completion, DeviceFar, Limits, Refused, Ticket, Transfer};

/// How long a seat sleeps when nothing has ended.
const NAP: Duration = Duration::from_micros(50);
/// How long seats that are dropped wait for something to end.
const LAST: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });
/// Looks before the first sleep.
const LOOKS: u32 = 64;

type Any = dyn Channel<Far = DeviceFar>;

/// A channel behind a lock. Whoever polls, polls for all.
#[derive(Clone)]
pub(super) struct Desk(Arc<Mutex<State>>);

struct State {
    channel: Box<Any>,
    /// Which seat has submitted what is in flight.
    owners: HashMap<Ticket, usize>,
    inboxes: Vec<VecDeque<Completion<DeviceFar>>>,
    scratch: Vec<Completion<DeviceFar>>,
    /// Until when seats that are dropped wait for what is in flight, all together.
    deadline: Option<Instant>,
}

/// The right to use a [`Desk`].
pub(super) struct Seat {
    desk: Desk,
    number: usize,
    limits: Limits,
    in_flight: usize,
}

impl Desk {
    pub fn new(channel: impl Channel<Far = DeviceFar> + 'static) -> Self {
        let (owners, inboxes, scratch) = (HashMap::new(), Vec::new(), Vec::new());
        Self(Arc::new(Mutex::new(State { channel: Box::new(channel), owners, inboxes, scratch, deadline: None })))
    }

    pub fn seat(&self) -> Seat {
        let mut state = self.lock();
        state.inboxes.push(VecDeque::new());
        let limits = state.channel.limits();
        Seat { desk: self.clone(), number: state.inboxes.len() - 1, limits, in_flight: 0 }
    }

    /// What the channel has.
    pub fn in_flight(&self) -> usize {
        self.lock().channel.in_flight()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What a panic elsewhere left is consistent: every operation is in one place.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel for Seat {
    type Far = DeviceFar;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, transfer: Transfer<DeviceFar>) -> Result<Ticket, Refused<DeviceFar>> {
        let mut state = self.desk.lock();
        let ticket = state.channel.submit(transfer)?;
        state.owners.insert(ticket, self.number);
        self.in_flight += 1;
        Ok(ticket)
    }

    fn poll(&mut self, done: &mut Vec<Completion<DeviceFar>>) -> usize {
        let mut state = self.desk.lock();
        let State { channel, owners, inboxes, scratch, deadline } = &mut *state;
        if channel.poll(scratch) > 0 {
            *deadline = None;
        }
        for completion in scratch.drain(..) {
            if let Some(owner) = owners.remove(&completion.ticket) {
                inboxes[owner].push_back(completion);
            }
        }
        let n = inboxes[self.number].len();
        done.extend(inboxes[self.number].drain(..));
        self.in_flight -= n;
        n
    }

    fn wait(&mut self, done: &mut Vec<Completion<DeviceFar>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        let mut looks = 0;
        loop {
            let n = self.poll(done);
            if n > 0 || self.in_flight == 0 || deadline.is_some_and(|d| Instant::now() >= d) {
                return n;
            }
            looks += 1;
            // Without the lock: others submit meanwhile.
            if looks > LOOKS { std::thread::sleep(NAP) } else { std::thread::yield_now() }
        }
    }

    /// Stops it for all seats.
    fn stop(&mut self, why: &str) {
        self.desk.lock().channel.stop(why);
    }
}

impl Drop for Seat {
    /// Waits for what is in flight, until nothing has ended for a while: all seats of a desk wait for that once. What comes later is
    /// dropped with the desk.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = Instant::now();
            if now >= *self.desk.lock().deadline.get_or_insert(now + LAST) {
                return;
            }
            self.wait(&mut done, Duration::from_millis(100));
            done.clear();
        }
    }
}
