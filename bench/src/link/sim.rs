//! Transfers over a modelled link in virtual time.
//!
//! The queues here are [`Queue`]s, except that they move no bytes and that time passes only while a thread waits. So a
//! [`Split`] and its policy run over them exactly as over a card.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane::addr::{Address, CardAddr};
use dmalane::dma::SharedBuf;
use dmalane::queue::{
    Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Policy, Queue, QueueAddr, Refusal,
    Refused, Split, Ticket, Work,
};

use super::{Half, Link, Stream};

/// Operations in flight on a modelled queue, at most.
const CAPACITY: usize = 256;

/// A link in virtual time, which begins at 0.
#[derive(Clone)]
pub struct Sim(Arc<Mutex<World>>);

/// The queue of one channel of a [`Sim`]. Its two directions are independent; in each, one operation moves after the
/// other.
pub struct SimQueue {
    world: Sim,
    index: usize,
}

struct World {
    link: Link,
    now: Duration,
    /// Per channel and direction.
    flying: Vec<[VecDeque<Op>; 2]>,
    /// Per channel.
    done: Vec<Vec<Completion>>,
    next: u64,
}

struct Op {
    ticket: Ticket,
    operation: Operation,
    at: CardAddr,
    /// When its first byte can move, if it does not have to wait for others.
    ready: Duration,
    /// The bytes that are left per half, in order. `None` is memory that does not exist.
    left: VecDeque<(Option<Half>, f64)>,
}

const DIRECTIONS: [Direction; 2] = [Direction::ToHost, Direction::FromHost];

impl Sim {
    /// A link with nothing on it.
    pub fn new(link: Link) -> Self {
        let n = link.channels();
        let flying = (0..n).map(|_| Default::default()).collect();
        let done = (0..n).map(|_| Vec::new()).collect();
        Self(Arc::new(Mutex::new(World { link, now: Duration::ZERO, flying, done, next: 0 })))
    }

    /// The queues of the link's channels.
    pub fn queues(&self) -> Vec<SimQueue> {
        let n = self.lock().link.channels();
        (0..n).map(|index| SimQueue { world: self.clone(), index }).collect()
    }

    /// Lets time pass until the next operation ends, but not past `until`. Says whether one ended.
    pub fn advance(&self, until: Option<Duration>) -> bool {
        self.lock().advance(until)
    }

    /// The virtual time.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    fn advance(&mut self, until: Option<Duration>) -> bool {
        loop {
            let heads = self.heads();
            let streams: Vec<Stream> = heads.iter().map(|h| h.1).collect();
            let rates = self.link.fair_shares(&streams, self.now);
            // The next event: a stretch is over, a capacity changes, or an operation becomes ready.
            let over = |((c, d), rate): (&(usize, usize), &f64)| {
                let (_, left) = self.flying[*c][*d].front()?.left.front()?;
                Some(self.now + Duration::from_nanos((left / rate * 1e9).ceil() as u64))
            };
            let moving: Vec<(usize, usize)> = heads.iter().map(|h| h.0).collect();
            let ends = moving.iter().zip(&rates).filter_map(over);
            let fronts = self.flying.iter().flatten().filter_map(|ops| ops.front());
            let ready = fronts.map(|op| op.ready).filter(|t| *t > self.now);
            let change = self.link.next_change(self.now).filter(|_| !heads.is_empty());
            let event = ends.chain(ready).chain(change).min();
            let next = match (event, until) {
                (Some(event), Some(until)) => event.min(until),
                (Some(t), None) | (None, Some(t)) => t,
                (None, None) => return false,
            };
            let seconds = (next.saturating_sub(self.now)).as_secs_f64();
            self.now = self.now.max(next);
            let mut ended = false;
            for ((c, d), rate) in moving.into_iter().zip(rates) {
                ended |= self.pass(c, d, rate * seconds);
            }
            ended |= self.refuse_missing();
            if ended || until.is_some_and(|u| self.now >= u) {
                return ended;
            }
        }
    }

    /// The operations that move now, one per channel and direction at most.
    fn heads(&self) -> Vec<((usize, usize), Stream)> {
        let mut heads = Vec::new();
        for (channel, directions) in self.flying.iter().enumerate() {
            for (d, ops) in directions.iter().enumerate() {
                let Some(op) = ops.front().filter(|op| op.ready <= self.now) else { continue };
                if let Some((Some(half), _)) = op.left.front() {
                    heads.push(((channel, d), Stream { channel, half: *half, direction: DIRECTIONS[d] }));
                }
            }
        }
        heads
    }

    /// Moves bytes of the operation at the head of a direction.
    fn pass(&mut self, channel: usize, direction: usize, bytes: f64) -> bool {
        let ops = &mut self.flying[channel][direction];
        let Some(op) = ops.front_mut() else { return false };
        if let Some((_, left)) = op.left.front_mut() {
            *left -= bytes;
            // Times are whole nanoseconds: half a byte is nothing.
            if *left < 0.5 {
                op.left.pop_front();
            }
        }
        if !op.left.is_empty() {
            return false;
        }
        let Op { ticket, operation, .. } = ops.pop_front().expect("it has a front");
        let bytes = operation.bytes();
        self.done[channel].push(Completion { ticket, operation, result: Ok(()), bytes });
        true
    }

    /// Fails operations that have come to memory that does not exist.
    fn refuse_missing(&mut self) -> bool {
        let mut any = false;
        for (directions, done) in self.flying.iter_mut().zip(&mut self.done) {
            for ops in directions {
                let lost = |op: &Op| op.ready <= self.now && matches!(op.left.front(), Some((None, _)));
                while ops.front().is_some_and(lost) {
                    let Op { ticket, operation, at, .. } = ops.pop_front().expect("it has a front");
                    let result = Err(OpError::NoCardMemory(at));
                    done.push(Completion { ticket, operation, result, bytes: 0 });
                    any = true;
                }
            }
        }
        any
    }
}

/// A range of card memory as bytes per half.
fn by_half(at: CardAddr, len: u64) -> VecDeque<(Option<Half>, f64)> {
    let (mut at, mut left, mut fragments) = (Some(at), len, VecDeque::new());
    while left > 0 {
        let half = at.and_then(Half::of);
        // Bytes beyond the end of a half lie in the next one, or in none.
        let n = match (half, at) {
            (Some(half), Some(a)) => left.min(half.span().last().bits() - a.bits() + 1),
            _ => left,
        };
        fragments.push_back((half, n as f64));
        left -= n;
        at = at.and_then(|a| a.checked_add(n));
    }
    fragments
}

impl Queue for SimQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: CAPACITY, max_len: u64::MAX, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST | Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        let world = self.world.lock();
        world.flying[self.index].iter().map(VecDeque::len).sum::<usize>() + world.done[self.index].len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let reason = match (operation.admit(self.capabilities(), self.limits()), &operation.work) {
            (Err(reason), _) => reason,
            _ if self.in_flight() >= CAPACITY => Refusal::Full,
            (_, Work::Copy { direction, at, .. }) => {
                let (direction, at) = (usize::from(*direction == DIRECTIONS[1]), CardAddr::new(at.bits()));
                let mut world = self.world.lock();
                let ticket = Ticket::new(world.next);
                world.next += 1;
                let left = by_half(at, operation.bytes());
                let op = Op { ticket, operation, at, ready: world.now + world.link.latency(), left };
                world.flying[self.index][direction].push_back(op);
                return Ok(ticket);
            }
            _ => Refusal::Unsupported(operation.needs()),
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let mine = &mut self.world.lock().done[self.index];
        let n = mine.len();
        done.append(mine);
        n
    }

    /// Lets virtual time pass.
    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let until = self.world.now().saturating_add(timeout);
        loop {
            let n = self.poll(done);
            if n > 0 || self.in_flight() == 0 || self.world.now() >= until {
                return n;
            }
            self.world.advance(Some(until));
        }
    }
}

/// Bytes between the host and card memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkCopy {
    /// Where on the card.
    pub at: CardAddr,
    /// Which way.
    pub direction: Direction,
    /// Bytes, at least 1.
    pub bytes: u64,
}

/// Result of a batch of copies in virtual time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RigRun {
    /// When it began.
    pub began: Duration,
    /// Seconds from the first submission to the last completion.
    pub seconds: f64,
    /// Bytes per second.
    pub rate: f64,
}

/// A policy over a modelled link, batch after batch.
pub struct Rig {
    sim: Sim,
    split: Split<SimQueue>,
}

impl Rig {
    /// Drives the channels of `link` by `policy`.
    pub fn new(link: Link, policy: impl Policy + 'static) -> Self {
        let sim = Sim::new(link);
        let clock = sim.clone();
        Self { split: Split::with_clock(sim.queues(), Box::new(policy), move || clock.now()), sim }
    }

    /// Submits all copies at once, as far as there is room, and waits for all of them.
    ///
    /// # Errors
    /// The first operation that failed; memory for the host's side.
    ///
    /// # Panics
    /// When the policy leaves bytes lying although nothing is under way, which it must not.
    pub fn run(&mut self, copies: &[LinkCopy]) -> Result<RigRun, Box<dyn std::error::Error>> {
        let began = self.sim.now();
        let mut done = Vec::new();
        let mut waiting = VecDeque::new();
        for c in copies {
            // The bytes are never touched, so the pages never exist.
            let slice = SharedBuf::sparse("dmalane-link", usize::try_from(c.bytes)?)?.into_slice();
            let (slice, _) = slice.split_at(c.bytes as usize).map_err(|_| "the heap gave less than was asked for")?;
            waiting.push_back(Operation::copy(c.direction, slice, DeviceAddr::Card(c.at)));
        }
        while !waiting.is_empty() || self.split.in_flight() > 0 {
            while let Some(operation) = waiting.pop_front() {
                match self.split.submit(operation) {
                    Ok(_ticket) => {}
                    Err(Refused { operation, reason: Refusal::Full }) => {
                        waiting.push_front(operation);
                        break;
                    }
                    Err(Refused { reason, .. }) => return Err(reason.into()),
                }
            }
            if self.split.poll(&mut done) == 0 {
                let busy = self.split.queues().iter().any(|c| c.in_flight() > 0);
                assert!(busy, "the policy leaves bytes lying");
                self.sim.advance(None);
            }
            for c in done.drain(..) {
                c.result?;
            }
        }
        let seconds = (self.sim.now() - began).as_secs_f64();
        let bytes: u64 = copies.iter().map(|c| c.bytes).sum();
        Ok(RigRun { began, seconds, rate: bytes as f64 / seconds })
    }
}
