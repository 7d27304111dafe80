//! A channel that threads share: each has a seat, and gets what it submitted back.
//!
//! A card without threads works while it is polled. So nobody waits for who polls: what a seat submits lies in a tray that the next poll
//! empties, and what has ended lies in its inbox; a thread that finds the channel taken goes on to another one.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use dmalane_queue::{Channel, Completion, DeviceFar, LETS_GO, Limits, OpError, Refusal, Refused, Ticket, Transfer};

/// How long a seat sleeps when nothing has ended.
const NAP: Duration = Duration::from_micros(50);
/// How long seats that are dropped wait for something to end.
const LAST: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });
/// Looks before the first sleep.
const LOOKS: u32 = 64;

type Any = dyn Channel<Far = DeviceFar>;

/// A channel behind a lock. Whoever polls, polls for all.
#[derive(Clone)]
pub(crate) struct Desk(Arc<Shared>);

struct Shared {
    limits: Limits,
    state: Mutex<State>,
    trays: Mutex<Trays>,
}

/// What is locked only for a moment.
#[derive(Default)]
struct Trays {
    /// What the channel has not got yet, oldest first, with its number here.
    out: VecDeque<(u64, usize, Transfer<DeviceFar>)>,
    inboxes: Vec<VecDeque<Completion<DeviceFar>>>,
    next: u64,
    /// In the tray and in the channel.
    in_flight: usize,
}

/// What is locked while the channel is polled.
struct State {
    channel: Box<Any>,
    /// What the channel has: its number here, and whose it is.
    owners: HashMap<Ticket, (u64, usize)>,
    scratch: Vec<Completion<DeviceFar>>,
    /// Until when seats that are dropped wait for what is in flight, all together.
    deadline: Option<Instant>,
}

/// The right to use a [`Desk`].
pub(crate) struct Seat {
    desk: Desk,
    number: usize,
    in_flight: usize,
}

impl Desk {
    pub fn new(channel: impl Channel<Far = DeviceFar> + 'static) -> Self {
        let limits = channel.limits();
        let (owners, scratch) = (HashMap::new(), Vec::new());
        let state = Mutex::new(State { channel: Box::new(channel), owners, scratch, deadline: None });
        Self(Arc::new(Shared { limits, state, trays: Mutex::default() }))
    }

    pub fn seat(&self) -> Seat {
        let mut trays = self.trays();
        trays.inboxes.push(VecDeque::new());
        Seat { desk: self.clone(), number: trays.inboxes.len() - 1, in_flight: 0 }
    }

    /// What has been submitted and not ended.
    pub fn in_flight(&self) -> usize {
        self.trays().in_flight
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What a panic elsewhere left is consistent: every operation is in one place.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trays(&self) -> MutexGuard<'_, Trays> {
        self.0.trays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the channel what lies in the tray, as much as it takes, and puts what has ended into inboxes; unless another thread is doing so.
    fn turn(&self) {
        let mut state = match self.0.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let State { channel, owners, scratch, deadline } = &mut *state;
        loop {
            let Some((id, owner, transfer)) = self.trays().out.pop_front() else { break };
            match channel.submit(transfer) {
                Ok(ticket) => drop(owners.insert(ticket, (id, owner))),
                Err(Refused { transfer, reason: Refusal::Full }) => {
                    self.trays().out.push_front((id, owner, transfer));
                    break;
                }
                Err(Refused { transfer, reason }) => {
                    let result = Err(OpError::Stopped(reason.to_string()));
                    self.trays().end(owner, Completion { ticket: Ticket::new(id), transfer, result });
                }
            }
        }
        channel.poll(scratch);
        if scratch.is_empty() {
            return;
        }
        *deadline = None;
        let mut trays = self.trays();
        for completion in scratch.drain(..) {
            if let Some((id, owner)) = owners.remove(&completion.ticket) {
                trays.end(owner, Completion { ticket: Ticket::new(id), ..completion });
            }
        }
    }
}

impl Trays {
    fn end(&mut self, owner: usize, completion: Completion<DeviceFar>) {
        self.in_flight -= 1;
        self.inboxes[owner].push_back(completion);
    }
}

impl Channel for Seat {
    type Far = DeviceFar;

    fn limits(&self) -> Limits {
        self.desk.0.limits
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What the channel refuses for another reason than being full ends as stopped, with the reason.
    fn submit(&mut self, transfer: Transfer<DeviceFar>) -> Result<Ticket, Refused<DeviceFar>> {
        let mut trays = self.desk.trays();
        if trays.in_flight >= self.desk.0.limits.capacity {
            return Err(Refused { transfer, reason: Refusal::Full });
        }
        let id = trays.next;
        trays.next += 1;
        trays.in_flight += 1;
        trays.out.push_back((id, self.number, transfer));
        self.in_flight += 1;
        Ok(Ticket::new(id))
    }

    fn poll(&mut self, done: &mut Vec<Completion<DeviceFar>>) -> usize {
        self.desk.turn();
        let mut trays = self.desk.trays();
        let inbox = &mut trays.inboxes[self.number];
        let n = inbox.len();
        done.extend(inbox.drain(..));
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
            // Without a lock: others submit meanwhile.
            if looks > LOOKS { std::thread::sleep(NAP) } else { std::thread::yield_now() }
        }
    }

    fn halted(&self) -> Option<String> {
        self.desk.lock().channel.halted()
    }

    /// Stops it for all seats.
    fn stop(&mut self, why: &str) {
        self.desk.lock().channel.stop(why);
    }
}

impl Drop for Seat {
    /// Waits for what is in flight, until nothing has ended for a while, which is short for a channel that has halted: all seats of a desk
    /// wait for that once. What comes later is dropped with the desk.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = Instant::now();
            let last = if self.halted().is_some() { LAST.min(LETS_GO) } else { LAST };
            if now >= *self.desk.lock().deadline.get_or_insert(now + last) {
                return;
            }
            self.wait(&mut done, Duration::from_millis(100));
            done.clear();
        }
    }
}
