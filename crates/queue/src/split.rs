//! Several channels driven as one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dmalane_dma::BufferSlice;

use crate::{Channel, Completion, Direction, Far, Limits, OpError, Piece, Policy, Refusal, Refused, Ticket, Transfer};

/// Where a [`Split`] has the time from, for the rates that its policy measures.
pub trait Clock: Send {
    /// The time since some fixed moment. Never goes back.
    fn now(&self) -> Duration;
}

/// The time that passes for everyone.
#[derive(Clone, Copy, Debug)]
pub struct WallClock(Instant);

impl Default for WallClock {
    /// Counts from now.
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The longest sleep on one channel while others are at work too: as long as the smallest two pieces of a fast channel
/// take (2 x 256 KiB at 12 GB/s), so that no channel runs dry for long.
const NAP: Duration = Duration::from_micros(50);

/// Drives several channels as one: a [`Policy`] says which channel moves which piece of a transfer, and a transfer
/// completes when its last piece has.
pub struct Split<C: Channel, P, K = WallClock> {
    channels: Vec<C>,
    policy: P,
    clock: K,
    parents: HashMap<u64, Parent<C::Far>>,
    /// Per channel: its tickets, and the piece that each stands for.
    children: Vec<HashMap<Ticket, Piece>>,
    /// Per channel: a piece that it had no room for after all.
    held: Vec<Option<(Piece, Transfer<C::Far>)>>,
    /// Parents that miss nothing any more.
    ended: Vec<u64>,
    next: u64,
    /// The channel that [`Channel::wait`] sleeps on next.
    nap: usize,
    scratch: Vec<Completion<C::Far>>,
}

struct Parent<F> {
    far: F,
    direction: Direction,
    /// What no channel was given yet, and what came back: each with its offset.
    waiting: Vec<(u64, BufferSlice)>,
    back: Vec<(u64, BufferSlice)>,
    missing: u64,
    result: Result<(), OpError>,
}

impl<F> Parent<F> {
    /// Takes a piece out of what is waiting.
    fn take(&mut self, piece: &Piece) -> BufferSlice {
        let holds = |(at, part): &(u64, BufferSlice)| (*at..*at + part.len() as u64).contains(&piece.offset);
        let i = self.waiting.iter().position(holds).expect("a policy hands out each byte once");
        let (at, part) = self.waiting.swap_remove(i);
        let (before, rest) = part.split_at((piece.offset - at) as usize).expect("the piece starts in this part");
        let (part, after) = rest.split_at(piece.len as usize).expect("a policy hands out each byte once");
        if !before.is_empty() {
            self.waiting.push((at, before));
        }
        if !after.is_empty() {
            self.waiting.push((piece.offset + piece.len, after));
        }
        part
    }

    /// All of the parts, joined again.
    fn whole(&mut self) -> BufferSlice {
        let mut parts = std::mem::take(&mut self.back);
        parts.append(&mut self.waiting);
        parts.sort_unstable_by_key(|(at, _)| *at);
        let parts = parts.into_iter().map(|(_, part)| part);
        parts.reduce(|a, b| a.join(b).expect("neighbours")).expect("a transfer is not empty")
    }
}

impl<C: Channel, P: Policy<C::Far>> Split<C, P> {
    /// Drives `channels` as one.
    ///
    /// # Panics
    /// When there are no channels, or one of them has operations in flight.
    pub fn new(channels: Vec<C>, policy: P) -> Self {
        Self::with_clock(channels, policy, WallClock::default())
    }
}

impl<C: Channel, P: Policy<C::Far>, K: Clock> Split<C, P, K> {
    /// As [`Split::new`], with a clock of one's own.
    ///
    /// # Panics
    /// As [`Split::new`].
    pub fn with_clock(channels: Vec<C>, policy: P, clock: K) -> Self {
        assert!(!channels.is_empty(), "a split needs a channel");
        assert!(channels.iter().all(|c| c.in_flight() == 0), "a split needs its channels for itself");
        let n = channels.len();
        Self {
            channels,
            policy,
            clock,
            parents: HashMap::new(),
            children: (0..n).map(|_| HashMap::new()).collect(),
            held: (0..n).map(|_| None).collect(),
            ended: Vec::new(),
            next: 0,
            nap: 0,
            scratch: Vec::new(),
        }
    }

    /// The channels.
    pub fn channels(&self) -> &[C] {
        &self.channels
    }

    /// The policy, with what it has learned.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// Gives the channels what the policy has for them. `fresh` is a transfer that has only just arrived: when the first of
    /// its pieces is refused, nothing of it is under way, and the reason is returned. When it is accepted, the rest waits for
    /// the next poll: nothing begins before, and by then the policy knows what else has arrived.
    fn feed(&mut self, fresh: Option<u64>) -> Result<(), Refusal> {
        let mut now = None;
        loop {
            let mut any = false;
            for i in 0..self.channels.len() {
                let channel = &mut self.channels[i];
                let (piece, transfer) = match self.held[i].take() {
                    Some(held) => held,
                    // A full channel is not asked for, so that its work stays free for others to take.
                    None if channel.in_flight() >= channel.limits().capacity => continue,
                    None => {
                        let now = *now.get_or_insert_with(|| self.clock.now());
                        let Some(piece) = self.policy.next(i, now) else { continue };
                        let parent = self.parents.get_mut(&piece.transfer).expect("a transfer that arrived");
                        let far = parent.far.advance(piece.offset).expect("within the transfer, whose end was checked");
                        (piece, Transfer { part: parent.take(&piece), direction: parent.direction, far })
                    }
                };
                match channel.submit(transfer) {
                    Ok(ticket) => {
                        self.children[i].insert(ticket, piece);
                        if fresh == Some(piece.transfer) {
                            return Ok(());
                        }
                        any = true;
                    }
                    Err(Refused { transfer, reason: Refusal::Full }) => {
                        self.held[i] = Some((piece, transfer));
                        // Accepted as far as anyone can tell.
                        if fresh == Some(piece.transfer) {
                            return Ok(());
                        }
                    }
                    Err(Refused { transfer, reason }) => {
                        any = true;
                        let refused = fresh == Some(piece.transfer);
                        let result = Err(OpError::Stopped(reason.to_string()));
                        self.settle(i, piece, transfer.part, result);
                        if refused {
                            return Err(reason);
                        }
                    }
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    /// A piece is over.
    fn settle(&mut self, channel: usize, piece: Piece, part: BufferSlice, result: Result<(), OpError>) {
        self.policy.ended(channel, &piece, self.clock.now(), result.is_ok());
        let parent = self.parents.get_mut(&piece.transfer).expect("a parent outlives its pieces");
        parent.back.push((piece.offset, part));
        parent.missing -= piece.len;
        if parent.missing == 0 {
            self.ended.push(piece.transfer);
        }
        if parent.result.is_ok() {
            parent.result = result;
        }
    }

    /// What the channel in `scratch` gave back.
    fn absorb(&mut self, channel: usize) {
        let mut scratch = std::mem::take(&mut self.scratch);
        for c in scratch.drain(..) {
            let piece = self.children[channel].remove(&c.ticket).expect("a ticket of this channel");
            self.settle(channel, piece, c.transfer.part, c.result);
        }
        self.scratch = scratch;
    }

    fn collect(&mut self, done: &mut Vec<Completion<C::Far>>) -> usize {
        // Only a fresh transfer can be refused.
        let _ = self.feed(None);
        for i in 0..self.channels.len() {
            self.channels[i].poll(&mut self.scratch);
            self.absorb(i);
        }
        let _ = self.feed(None);
        let n = self.ended.len();
        for id in self.ended.drain(..) {
            let mut p = self.parents.remove(&id).expect("a transfer ends once");
            let transfer = Transfer { part: p.whole(), direction: p.direction, far: p.far };
            done.push(Completion { ticket: Ticket::new(id), transfer, result: p.result });
        }
        n
    }
}

impl<C: Channel, P: Policy<C::Far>, K: Clock> Channel for Split<C, P, K> {
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
        let id = self.next;
        self.next += 1;
        let Transfer { part, direction, far } = transfer;
        self.policy.arrive(id, direction, &far, len, self.channels.len());
        let parent =
            Parent { far, direction, waiting: vec![(0, part)], back: Vec::new(), missing: len, result: Ok(()) };
        self.parents.insert(id, parent);
        // The first piece decides whether the transfer is acceptable at all; the rest differ only in where they lie.
        match self.feed(Some(id)) {
            Ok(()) => Ok(Ticket::new(id)),
            Err(reason) => {
                self.policy.forget(id);
                self.ended.retain(|&ended| ended != id);
                let mut p = self.parents.remove(&id).expect("just inserted");
                refuse(Transfer { part: p.whole(), direction: p.direction, far: p.far }, reason)
            }
        }
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
            // No way to sleep on several channels at once: sleep briefly on each in turn. One alone is slept on in peace.
            let n = self.channels.len();
            let busy = |i: &usize| self.channels[*i].in_flight() > 0;
            let Some(i) = (0..n).map(|k| (self.nap + k) % n).find(busy) else { continue };
            let alone = (0..n).filter(busy).count() == 1;
            self.nap = (i + 1) % n;
            self.channels[i].wait(&mut self.scratch, if alone { left } else { left.min(NAP) });
            self.absorb(i);
        }
    }

    /// One that has halted is enough, since no transfer can do without its pieces; but not while another one still has something to end.
    fn halted(&self) -> Option<String> {
        let works = |channel: &C| channel.in_flight() > 0 && channel.halted().is_none();
        if self.channels.iter().any(works) { None } else { self.channels.iter().find_map(Channel::halted) }
    }

    fn stop(&mut self, why: &str) {
        self.channels.iter_mut().for_each(|channel| channel.stop(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain;
    use crate::wait::LETS_GO;
    use crate::wait::fake::{Anywhere, Fake, transfer};

    /// Half of a transfer for each of two channels.
    #[derive(Default)]
    struct Halves(Vec<Option<Piece>>);

    impl Policy<Anywhere> for Halves {
        fn arrive(&mut self, transfer: u64, _: Direction, _: &Anywhere, len: u64, _: usize) {
            self.0 = [0, len / 2].map(|offset| Some(Piece { transfer, offset, len: len / 2 })).into();
        }

        fn next(&mut self, channel: usize, _: Duration) -> Option<Piece> {
            self.0[channel].take()
        }

        fn ended(&mut self, _: usize, _: &Piece, _: Duration, _: bool) {}

        fn forget(&mut self, _: u64) {}
    }

    #[test]
    fn one_that_has_halted_condemns_no_other_that_works() {
        let mut split = Split::new(vec![Fake::default(), Fake::default()], Halves::default());
        let _only = split.submit(transfer()).unwrap();
        split.poll(&mut Vec::new());
        assert_eq!(split.channels.iter().map(Channel::in_flight).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(split.halted(), None);
        split.channels[0].stop("gone");
        assert_eq!(split.halted(), None, "the other one works");
        let begun = Instant::now();
        assert!(drain(&mut split, 3 * LETS_GO).is_empty() && begun.elapsed() >= 3 * LETS_GO, "it is waited for");
        // Once it has ended what it had, nothing comes any more.
        split.channels[1].ends = true;
        split.poll(&mut Vec::new());
        assert_eq!(split.halted().as_deref(), Some("gone"));
        let (begun, long) = (Instant::now(), Duration::from_secs(60));
        assert!(drain(&mut split, long).is_empty() && begun.elapsed() < long / 2);
        split.channels[0].ends = true;
        assert_eq!(drain(&mut split, long).len(), 1);
    }
}
