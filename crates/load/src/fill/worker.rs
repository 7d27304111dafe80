//! One worker: allocates, reads, allocates further while reads are in flight.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_queue::{Completion, Operation, Queue, Refusal, Refused, Ticket};

use super::crew::Crew;
use super::depth::Depth;
use super::error::{FillError, not_submitted};
use super::fragment::{Fragment, Read, Tag};
use super::state::{POLL_INTERVAL, State};
use super::supply::Taken;
use crate::clock::Clocks;
use crate::stage::Stage;

pub(super) struct Worker<'l, 'a, 'w, S> {
    state: &'l State<'a, 'w>,
    queues: &'l mut [S],
    number: usize,
    /// Reads that have memory and wait for room in their queue, in order.
    waiting: VecDeque<Read>,
    waiting_bytes: usize,
    /// Reads in flight, without their slices, and when they began, if that is recorded. By source and ticket.
    flying: HashMap<(usize, Ticket), (FileOffset, Tag, Option<Instant>)>,
    /// Sources with reads in flight, the one that was begun first in front.
    active: Vec<usize>,
    depth: Depth,
    clocks: Clocks,
}

impl<'l, 'a, 'w, S: Queue<Addr = FileOffset>> Worker<'l, 'a, 'w, S> {
    pub fn new(state: &'l State<'a, 'w>, (queues, number): (&'l mut [S], usize), clocks: Clocks) -> Self {
        let capacity = queues.iter().map(|queue| queue.limits().capacity).max().unwrap_or(1);
        let round = state.supply.piece().saturating_mul(state.crew.all as u64);
        Self {
            state,
            depth: Depth::new(state.options.depth, round, capacity, state.copies, state.late),
            queues,
            number,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            flying: HashMap::new(),
            active: Vec::new(),
            clocks,
        }
    }

    /// Works until nothing is left to do, or the job is stopped and nothing is in flight.
    pub fn run(mut self) -> Clocks {
        let mut done = Vec::new();
        let _disbands = Disbands(&self.state.crew);
        while !self.state.stopped() {
            if self.rests() && self.flying.is_empty() && self.waiting.is_empty() {
                self.state.crew.rest(self.number);
                continue;
            }
            let seen = self.state.handed_on();
            let mut busy = self.reap(&mut done, Duration::ZERO);
            if self.state.copies {
                // Before pages are made for the next chunk, which would push the bytes out of the processor's cache.
                busy |= self.state.hash_in_worker(false, &mut self.clocks);
            }
            // Before anything is done with what has arrived, so that the disk always has as many reads as it takes.
            let (claimed, later) = self.refill();
            busy |= claimed;
            busy |= self.state.copy(&mut self.clocks);
            busy |= self.state.hash_in_worker(false, &mut self.clocks);
            busy |= self.state.drive(Duration::ZERO);
            if busy || self.state.hash_in_worker(true, &mut self.clocks) {
                continue;
            }
            if !later && self.flying.is_empty() && self.waiting.is_empty() {
                return self.clocks;
            }
            // A polled device works while it is waited for; another one ends something sooner than the disk.
            if self.state.drive(POLL_INTERVAL) {
                continue;
            }
            let begun = Instant::now();
            let any = self.reap(&mut done, self.state.disk_timeout().min(self.depth.patience()));
            self.depth.waited(begun.elapsed());
            if !any && self.flying.is_empty() {
                // Another worker drives the device, or a thread hashes.
                self.state.pause(seen);
            }
        }
        self.quiesce(&mut done);
        self.clocks
    }

    /// Takes chunks and begins reads into them, until a queue has no room. True when there was a chunk; and true when
    /// there will be more later.
    fn refill(&mut self) -> (bool, bool) {
        let mut claimed = false;
        loop {
            self.submit();
            if self.waiting_bytes >= self.state.supply.chunk || self.state.stopped() {
                return (claimed, false);
            }
            if self.rests() {
                return (claimed, true);
            }
            match self.state.claim(self.depth.limit(), &mut self.clocks) {
                // It was filled from memory, and is to be hashed while it is in the processor's cache.
                Taken::Chunk(reads) if reads.is_empty() => return (true, false),
                Taken::Chunk(reads) => {
                    claimed = true;
                    self.waiting_bytes += reads.iter().map(|read| read.fragment.slice.len()).sum::<usize>();
                    self.waiting.extend(reads);
                }
                Taken::Later => return (claimed, true),
                Taken::Nothing => return (claimed, false),
            }
        }
    }

    fn rests(&self) -> bool {
        self.state.crew.rests(self.number)
    }

    /// Hands reads to their queues, in order, until as many are in flight as help. Those of a queue without room wait,
    /// but not those behind them.
    fn submit(&mut self) {
        let (mut any, mut kept, mut full) = (false, Vec::new(), Vec::new());
        while self.flying.len() < self.depth.limit()
            && full.len() < self.queues.len()
            && let Some(Read { source, at, fragment: Fragment { tag, slice } }) = self.waiting.pop_front()
        {
            if full.contains(&source) {
                kept.push(Read { source, at, fragment: Fragment { tag, slice } });
                continue;
            }
            let (len, begun) = (slice.len(), self.clocks.begin());
            match self.queues[source].submit(Operation::read(slice, at)) {
                Ok(ticket) => {
                    if self.flying.is_empty() {
                        self.state.reading();
                        self.depth.begin(Instant::now());
                    }
                    self.waiting_bytes -= len;
                    self.flying.insert((source, ticket), (at, tag, begun));
                    if !self.active.contains(&source) {
                        self.active.push(source);
                    }
                    self.clocks.in_flight(Stage::Read, self.flying.len());
                    any = true;
                }
                Err(Refused { operation, reason: Refusal::Full }) => {
                    if let Some(slice) = operation.into_slice() {
                        kept.push(Read { source, at, fragment: Fragment { tag, slice } });
                    }
                    full.push(source);
                }
                Err(Refused { reason, .. }) => {
                    let error = FillError::Read { source_index: source, at, error: reason.into() };
                    return self.state.fail(((tag.buffer, tag.offset), error));
                }
            }
        }
        kept.into_iter().rev().for_each(|read| self.waiting.push_front(read));
        if any {
            self.active.iter().for_each(|source| self.queues[*source].flush());
        }
    }

    /// Takes what has ended; waits up to `timeout` for the source that was begun first. True when anything has ended.
    fn reap(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> bool {
        let mut any = false;
        for i in (0..self.active.len()).rev() {
            let source = self.active[i];
            let queue = &mut self.queues[source];
            self.clocks.time_wall(Stage::Read, || match i {
                // The only one that it waits for, and after all others were polled.
                0 if !timeout.is_zero() && !any => queue.wait(done, timeout),
                _ => queue.poll(done),
            });
            any |= !done.is_empty();
            for completion in done.drain(..) {
                self.settle(source, completion);
            }
            if self.queues[source].in_flight() == 0 {
                self.active.remove(i);
            }
        }
        self.clocks.in_flight(Stage::Read, self.flying.len());
        any
    }

    fn settle(&mut self, source: usize, completion: Completion<FileOffset>) {
        let Completion { ticket, operation, result, .. } = completion;
        let (Some((at, tag, begun)), Some(slice)) = (self.flying.remove(&(source, ticket)), operation.into_slice())
        else {
            let (at, error) = (FileOffset::new(0), not_submitted(ticket));
            return self.state.fail(((0, 0), FillError::Read { source_index: source, at, error }));
        };
        match result {
            Ok(()) => {
                self.clocks.bytes(Stage::Read, slice.len() as u64);
                self.clocks.ended(Stage::Read, begun, slice.len() as u64);
                self.depth.ended(slice.len(), Instant::now());
                self.state.arrived(Fragment { tag, slice });
            }
            Err(error) => {
                let place = (tag.buffer, tag.offset);
                self.state.fail((place, FillError::Read { source_index: source, at, error }));
            }
        }
    }

    /// Waits for reads in flight. Those that do not end stay with their queue.
    fn quiesce(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        self.waiting.clear();
        let deadline = Instant::now() + self.state.options.timeout;
        while !self.active.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.reap(done, left.min(POLL_INTERVAL)) && left.is_zero() {
                return;
            }
        }
    }
}

/// When a worker has ended, or panicked, nobody waits for the bytes to come faster.
struct Disbands<'s>(&'s Crew);

impl Drop for Disbands<'_> {
    fn drop(&mut self) {
        self.0.disband();
    }
}
