//! Several channels driven as one.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dmalane_mem::Part;

use crate::{Channel, Completion, Direction, Far, Limits, OpError, Piece, Policy, Refusal, Refused, Ticket, Transfer};

/// Drives several channels as one: each transfer is cut by a [`Policy`], its pieces go their ways, and it completes
/// when the last of them has.
pub struct Split<C: Channel, P> {
    channels: Vec<C>,
    policy: P,
    parents: HashMap<u64, Parent<C::Far>>,
    /// Per channel: its tickets, and the piece that each stands for.
    children: Vec<HashMap<Ticket, PieceOf>>,
    /// Per channel: pieces that it had no room for yet.
    backlog: Vec<VecDeque<(PieceOf, Transfer<C::Far>)>>,
    next: u64,
    pieces: Vec<Piece>,
    scratch: Vec<Completion<C::Far>>,
}

/// A piece by its parent's number and its place there.
#[derive(Clone, Copy)]
struct PieceOf {
    parent: u64,
    index: usize,
}

struct Parent<F> {
    far: F,
    direction: Direction,
    parts: Vec<Option<Part>>,
    missing: usize,
    result: Result<(), OpError>,
}

impl<C: Channel, P: Policy<C::Far>> Split<C, P> {
    /// Drives `channels` as one.
    ///
    /// # Panics
    /// When there are no channels, or one of them has operations in flight.
    pub fn new(channels: Vec<C>, policy: P) -> Self {
        assert!(!channels.is_empty(), "a split needs a channel");
        assert!(channels.iter().all(|c| c.in_flight() == 0), "a split needs its channels for itself");
        let n = channels.len();
        Self {
            channels,
            policy,
            parents: HashMap::new(),
            children: (0..n).map(|_| HashMap::new()).collect(),
            backlog: (0..n).map(|_| VecDeque::new()).collect(),
            next: 0,
            pieces: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// The channels.
    pub fn channels(&self) -> &[C] {
        &self.channels
    }

    /// Gives the channels as much of the backlog as they take.
    fn feed(&mut self) {
        for (i, channel) in self.channels.iter_mut().enumerate() {
            while let Some((piece, transfer)) = self.backlog[i].pop_front() {
                match channel.submit(transfer) {
                    Ok(ticket) => {
                        self.children[i].insert(ticket, piece);
                    }
                    Err(Refused { transfer, reason: Refusal::Full }) => {
                        self.backlog[i].push_front((piece, transfer));
                        break;
                    }
                    // The whole transfer was accepted before, so this is reported as its failure.
                    Err(Refused { transfer, reason }) => {
                        let result = Err(OpError::Stopped(reason.to_string()));
                        settle(&mut self.parents, piece, transfer.part, result);
                    }
                }
            }
        }
    }

    fn collect(&mut self, done: &mut Vec<Completion<C::Far>>) -> usize {
        self.feed();
        for (i, channel) in self.channels.iter_mut().enumerate() {
            channel.poll(&mut self.scratch);
            for c in self.scratch.drain(..) {
                let piece = self.children[i].remove(&c.ticket).expect("a ticket of this channel");
                settle(&mut self.parents, piece, c.transfer.part, c.result);
            }
        }
        self.feed();
        let before = done.len();
        let ended: Vec<u64> = self.parents.iter().filter(|(_, p)| p.missing == 0).map(|(id, _)| *id).collect();
        done.extend(ended.into_iter().filter_map(|id| {
            let p = self.parents.remove(&id)?;
            let part = p.parts.into_iter().flatten().reduce(|a, b| a.join(b).expect("neighbours"))?;
            let transfer = Transfer { part, direction: p.direction, far: p.far };
            Some(Completion { ticket: Ticket::new(id), transfer, result: p.result })
        }));
        done.len() - before
    }
}

fn settle<F>(parents: &mut HashMap<u64, Parent<F>>, piece: PieceOf, part: Part, result: Result<(), OpError>) {
    let p = parents.get_mut(&piece.parent).expect("a parent outlives its pieces");
    p.parts[piece.index] = Some(part);
    p.missing -= 1;
    if p.result.is_ok() {
        p.result = result;
    }
}

impl<C: Channel, P: Policy<C::Far>> Channel for Split<C, P> {
    type Far = C::Far;

    /// The channels' capacities together; the shortest of their longest operations.
    fn limits(&self) -> Limits {
        let limits = self.channels.iter().map(Channel::limits);
        limits
            .reduce(|a, b| Limits { capacity: a.capacity + b.capacity, max_len: a.max_len.min(b.max_len) })
            .expect("at least one channel")
    }

    fn in_flight(&self) -> usize {
        self.parents.len()
    }

    fn submit(&mut self, transfer: Transfer<C::Far>) -> Result<Ticket, Refused<C::Far>> {
        let limits = self.limits();
        let len = transfer.part.len() as u64;
        let refuse = |transfer, reason| Err(Refused { transfer, reason });
        match len {
            _ if self.parents.len() >= limits.capacity => return refuse(transfer, Refusal::Full),
            0 => return refuse(transfer, Refusal::Empty),
            _ if len > limits.max_len => {
                return refuse(transfer, Refusal::TooLong { len, max: limits.max_len });
            }
            _ if transfer.far.advance(len - 1).is_none() => return refuse(transfer, Refusal::PastTheTop),
            _ => {}
        }
        self.pieces.clear();
        self.policy.cut(&transfer.far, len, self.channels.len(), &mut self.pieces);
        let id = self.next;
        self.next += 1;
        let Transfer { mut part, direction, far } = transfer;
        // The first piece decides whether the transfer is acceptable at all; the rest differ only in where they lie.
        let mut at = 0;
        for (i, piece) in self.pieces.iter().enumerate() {
            let (front, rest) = part.split_at(piece.len as usize).expect("pieces add up to the part");
            part = rest;
            let place = far.advance(at).expect("within the transfer, whose end was checked");
            at += piece.len;
            let this = PieceOf { parent: id, index: i };
            let sub = Transfer { part: front, direction, far: place };
            if i > 0 || !self.backlog[piece.channel].is_empty() {
                self.backlog[piece.channel].push_back((this, sub));
                continue;
            }
            match self.channels[piece.channel].submit(sub) {
                Ok(ticket) => {
                    self.children[piece.channel].insert(ticket, this);
                }
                Err(Refused { transfer: sub, reason: Refusal::Full }) => {
                    self.backlog[piece.channel].push_back((this, sub));
                }
                Err(Refused { transfer: sub, reason }) => {
                    let part = sub.part.join(part).expect("neighbours");
                    return refuse(Transfer { part, direction, far }, reason);
                }
            }
        }
        assert!(part.is_empty(), "the pieces of a policy add up to the transfer");
        let missing = self.pieces.len();
        let parts = (0..missing).map(|_| None).collect();
        self.parents.insert(id, Parent { far, direction, parts, missing, result: Ok(()) });
        self.feed();
        Ok(Ticket::new(id))
    }

    fn poll(&mut self, done: &mut Vec<Completion<C::Far>>) -> usize {
        self.collect(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<C::Far>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let n = self.collect(done);
            let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if n > 0 || self.parents.is_empty() || left.is_zero() {
                return n;
            }
            // No way to sleep on several channels at once: sleep briefly on the first that has work.
            if let Some(i) = (0..self.channels.len()).find(|&i| self.channels[i].in_flight() > 0) {
                let nap = left.min(Duration::from_micros(200));
                self.channels[i].wait(&mut self.scratch, nap);
                for c in self.scratch.drain(..) {
                    let piece = self.children[i].remove(&c.ticket).expect("a ticket of this channel");
                    settle(&mut self.parents, piece, c.transfer.part, c.result);
                }
            }
        }
    }
}
