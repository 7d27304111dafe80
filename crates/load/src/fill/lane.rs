//! One lane: allocates, reads, allocates further while reads are in flight.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_queue::{Completion, Operation, Queue, Refusal, Refused, Ticket};

use super::FillError;
use super::state::{Piece, State};
use crate::clock::{Clocks, Stage};

/// How long to sleep at most before looking at everything again.
pub(super) const NAP: Duration = Duration::from_millis(20);

pub(super) struct Lane<'l, 'a, 'w, 'o, S> {
    state: &'l State<'a, 'w, 'o>,
    channels: &'l mut [S],
    /// Pieces with memory, waiting for room in their channel, in order.
    queue: VecDeque<Piece>,
    queued: usize,
    /// Pieces in flight, without their parts. By source and ticket.
    flying: HashMap<(usize, Ticket), Flight>,
    /// Sources with something in flight, the one that was begun first in front.
    active: Vec<usize>,
    clocks: Clocks,
}

/// A piece whose part the channel has.
struct Flight {
    buffer: usize,
    extent: usize,
    at: FileOffset,
}

impl<'l, 'a, 'w, 'o, S: Queue<Addr = FileOffset>> Lane<'l, 'a, 'w, 'o, S> {
    pub fn new(state: &'l State<'a, 'w, 'o>, channels: &'l mut [S]) -> Self {
        Self {
            state,
            channels,
            queue: VecDeque::new(),
            queued: 0,
            flying: HashMap::new(),
            active: Vec::new(),
            clocks: Clocks::default(),
        }
    }

    /// Works until nothing is left to do, or the job is stopped and nothing is in flight.
    pub fn run(mut self) -> Clocks {
        let mut done = Vec::new();
        while !self.state.stopped() {
            self.submit();
            let mut busy = self.reap(&mut done, Duration::ZERO);
            busy |= self.state.drive(Duration::ZERO);
            if self.queued < self.state.gather
                && let Some(claim) = self.state.claim()
            {
                for piece in self.state.allocate(claim, &mut self.clocks).into_iter().flatten() {
                    self.queued += piece.part.len();
                    self.queue.push_back(piece);
                }
                continue;
            }
            if self.flying.is_empty() && self.queue.is_empty() {
                return self.clocks;
            }
            // A device that works inline works while it is waited for; one that does not ends something sooner than the
            // disk.
            if !busy && !self.state.drive(NAP) {
                self.reap(&mut done, NAP);
            }
        }
        self.quiesce(&mut done);
        self.clocks
    }

    /// Hands pieces to their channels, in order, until one has no room.
    fn submit(&mut self) {
        while let Some(Piece { buffer, extent, source, at, part }) = self.queue.pop_front() {
            let (offset, len) = (part.offset(), part.len());
            match self.channels[source].submit(Operation::read(part, at)) {
                Ok(ticket) => {
                    if self.flying.is_empty() {
                        self.state.reading();
                    }
                    self.queued -= len;
                    self.flying.insert((source, ticket), Flight { buffer, extent, at });
                    if !self.active.contains(&source) {
                        self.active.push(source);
                    }
                    self.clocks.in_flight(Stage::Read, true);
                }
                Err(Refused { operation, reason: Refusal::Full }) => {
                    let Some(part) = operation.into_slice() else { return };
                    return self.queue.push_front(Piece { buffer, extent, source, at, part });
                }
                Err(Refused { reason, .. }) => {
                    let error = FillError::Channel { source_index: source, reason: reason.to_string() };
                    return self.state.fail((buffer, offset), error);
                }
            }
        }
    }

    /// Takes what has ended; waits for the source that was begun first if told how long. True when anything has.
    fn reap(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> bool {
        let mut any = false;
        for i in (0..self.active.len()).rev() {
            let source = self.active[i];
            let start = Instant::now();
            let channel = &mut self.channels[source];
            match i {
                // The only one that it waits for, and after all others were asked.
                0 if !timeout.is_zero() && !any => channel.wait(done, timeout),
                _ => channel.poll(done),
            };
            self.clocks.held(Stage::Read, start);
            any |= !done.is_empty();
            for completion in done.drain(..) {
                self.settle(source, completion);
            }
            if self.channels[source].in_flight() == 0 {
                self.active.remove(i);
            }
        }
        self.clocks.in_flight(Stage::Read, !self.flying.is_empty());
        any
    }

    fn settle(&mut self, source: usize, completion: Completion<FileOffset>) {
        let Completion { ticket, operation, result, .. } = completion;
        let (Some(Flight { buffer, extent, at }), Some(part)) =
            (self.flying.remove(&(source, ticket)), operation.into_slice())
        else {
            let reason = format!("an operation ended that was not begun: {ticket:?}");
            return self.state.fail((0, 0), FillError::Channel { source_index: source, reason });
        };
        match result {
            Ok(()) => {
                self.clocks.bytes(Stage::Read, part.len() as u64);
                self.state.arrived(Piece { buffer, extent, source, at, part }, &mut self.clocks);
            }
            Err(error) => {
                self.state.fail((buffer, part.offset()), FillError::Read { source_index: source, at, error });
            }
        }
    }

    /// Waits for what is in flight. What does not end stays with its channel.
    fn quiesce(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        self.queue.clear();
        let deadline = Instant::now() + self.state.options.patience;
        while !self.active.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.reap(done, left.min(NAP)) && left.is_zero() {
                return;
            }
        }
    }
}
