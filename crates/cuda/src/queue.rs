//! Two streams of the driver as a queue: a GPU copies in both directions at the same time, on streams of their own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue, QueueState, Refused,
    StopReason, Ticket, Waiting, Work, wait_with,
};

use crate::Error;
use crate::plan::{self, Step};
use crate::sys::{Attribute, Context, Pins, Stream};

/// Operations in flight, at most.
const CAPACITY: usize = 256;
/// Calls that the driver has and has not ended, at most: it would block at about a thousand (measured: 992).
const CALLS: usize = 768;
/// Time that a wait polls the driver before it sleeps: about that of a copy of some KiB.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep of a wait.
const NAP: Duration = Duration::from_micros(500);

/// Copies to the host go on a stream of their own; everything else shares one. Operations wait in the queue until a
/// flush gives them to the driver. One waits for those before it on the other stream that use the same device memory,
/// so all have the effect that they have one after the other; and they end in order.
pub(crate) struct CudaQueue {
    /// That of copies to the host is the last.
    streams: [Stream; 2],
    /// Begun and not given back, in order.
    begun: VecDeque<Begun>,
    /// Ended before one that was begun earlier, by number.
    early: BTreeMap<u64, Completion>,
    /// For each stream: it waits for what was begun on the other before the operation of this number.
    ordered: [u64; 2],
    registrar: Pins,
    limits: Limits,
    longest_pitch: u64,
    waiting: Waiting,
    state: QueueState,
    steps: Vec<Step>,
}

/// An operation that was begun.
struct Begun {
    number: u64,
    stream: usize,
    uses: Uses,
}

/// Device memory that an operation uses: the first and last address that it reads, and that it writes.
#[derive(Clone, Copy, Default)]
struct Uses {
    read: Option<(u64, u64)>,
    written: Option<(u64, u64)>,
}

impl Uses {
    /// Uses of a fence: all of device memory is written.
    const ALL: Self = Self { read: None, written: Some((0, u64::MAX)) };

    fn of(steps: &[Step]) -> Self {
        let mut uses = Self::default();
        for (at, len, writes) in steps.iter().flat_map(Step::device).flatten() {
            let (first, last) = plan::memory(at, len);
            let range = if writes { &mut uses.written } else { &mut uses.read };
            let (low, high) = range.unwrap_or((first, last));
            *range = Some((low.min(first), high.max(last)));
        }
        uses
    }

    /// True when one writes what the other uses.
    fn conflicts(&self, other: &Self) -> bool {
        let overlap = |a: Option<(u64, u64)>, b: Option<(u64, u64)>| {
            a.zip(b).is_some_and(|((first, last), (low, high))| first <= high && low <= last)
        };
        overlap(self.written, other.written) || overlap(self.written, other.read) || overlap(self.read, other.written)
    }
}

impl CudaQueue {
    /// A queue on streams of its own. Host memory is registered by `registrar`; no operation is longer than `max_len`.
    pub(crate) fn new(context: &Arc<Context>, registrar: Pins, max_len: u64) -> Result<Self, Error> {
        let longest = context.attribute(Attribute::MaxPitch);
        Ok(Self {
            streams: [Stream::new(context)?, Stream::new(context)?],
            begun: VecDeque::new(),
            early: BTreeMap::new(),
            ordered: [0; 2],
            registrar,
            limits: Limits { capacity: CAPACITY, max_len, max_parts: usize::MAX },
            longest_pitch: u64::try_from(longest).unwrap_or(0),
            waiting: Waiting::new(),
            state: QueueState::default(),
            steps: Vec::new(),
        })
    }

    /// Stops when a stream is broken.
    fn notice(&mut self) {
        if let Some(error) = self.streams.iter().find_map(Stream::broken) {
            self.state.stop(error.clone().into());
        }
    }

    /// Gives an operation to its stream.
    fn begin(&mut self, ticket: Ticket, operation: Operation) {
        let mut steps = std::mem::take(&mut self.steps);
        let to_host = operation.direction() == Some(Direction::ToHost);
        let stream = usize::from(to_host);
        let planned = plan::steps(&operation, self.longest_pitch, &mut steps);
        let uses = if matches!(operation.work, Work::Fence) { Uses::ALL } else { Uses::of(&steps) };
        let since = self.ordered[stream];
        let mut others = self.begun.iter().filter(|begun| begun.stream != stream && begun.number >= since);
        if others.any(|begun| begun.uses.conflicts(&uses)) {
            let [other, host] = &mut self.streams;
            if to_host {
                host.wait_for(other)
            } else {
                other.wait_for(host)
            }
            self.ordered[stream] = ticket.number();
        }
        let this = &mut self.streams[stream];
        match planned {
            Ok(()) => this.begin(ticket, operation, &steps),
            Err(reason) => this.give_up(ticket, operation, OpError::Refused(reason)),
        }
        this.record(false);
        self.begun.push_back(Begun { number: ticket.number(), stream, uses });
        self.steps = steps;
    }

    fn end(&mut self, mut completion: Completion, done: &mut Vec<Completion>) {
        if let Some(reason) = self.state.stopped() {
            (completion.result, completion.bytes) = (Err(OpError::Stopped(reason.clone())), 0);
        }
        self.state.ended();
        done.push(completion);
    }
}

impl Queue for CudaQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::COPY_ENGINE
    }

    fn in_flight(&self) -> usize {
        self.state.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let registered = |operation: &Operation| operation.check_registered(&self.registrar);
        self.state.submit(operation, Capabilities::COPY_ENGINE, self.limits, registered, &mut self.waiting)
    }

    fn flush(&mut self) {
        if self.waiting.is_empty() || !self.state.is_running() {
            return;
        }
        let room = |stream: &Stream| stream.calls() < CALLS && stream.broken().is_none();
        while self.streams.iter().all(room) {
            let Some((ticket, operation)) = self.waiting.pop_front() else { break };
            self.begin(ticket, operation);
        }
        self.streams.iter_mut().for_each(|stream| stream.record(true));
        self.notice();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.flush();
        let mut ended = Vec::new();
        self.streams.iter_mut().for_each(|stream| stream.ended(&mut ended));
        self.notice();
        self.early.extend(ended.into_iter().map(|completion| (completion.ticket.number(), completion)));
        while let Some(first) = self.begun.front()
            && let Some(completion) = self.early.remove(&first.number)
        {
            self.begun.pop_front();
            self.end(completion, done);
        }
        if !self.state.is_running() && self.begun.is_empty() {
            for (ticket, operation) in std::mem::take(&mut self.waiting) {
                self.end(Completion { ticket, operation, result: Ok(()), bytes: 0 }, done);
            }
        }
        done.len() - before
    }

    /// Asks the driver for some microseconds without pause, then sleeps for an eighth of the time that has passed, at
    /// most half a millisecond, between questions: the driver's own blocking wait knows no timeout.
    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let begun = Instant::now();
        wait_with(self, done, timeout, |_, left| {
            let passed = begun.elapsed();
            if passed > SPIN {
                thread::sleep((passed / 8).min(NAP).min(left));
            }
        })
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn stop(&mut self, reason: StopReason) {
        self.state.stop(reason);
    }

    fn restart(&mut self) -> bool {
        self.streams.iter().all(|stream| stream.broken().is_none()) && self.state.restart()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<DeviceAddr> {
        match self.state.cancel(ticket, &mut self.waiting) {
            Cancelled::TooLate if self.begun.iter().all(|begun| begun.number != ticket.number()) => Cancelled::Unknown,
            cancelled => cancelled,
        }
    }
}
