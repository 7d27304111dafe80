//! A stream of the driver as a queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmalane_device::NoIommu;
use dmalane_queue::{
    Abilities, Cancelled, Completion, DeviceAddr, HostSlice, Limits, OpError, Operation, Queue, Refusal, Refused,
    Sampler, Stats, Ticket, Work,
};

use crate::Error;
use crate::plan;
use crate::sys::{Attribute, Context, Step, Stream};

/// Operations in flight, at most.
const CAPACITY: usize = 256;
/// Calls that the driver has and has not ended, at most: it would block at about a thousand (measured: 992).
const CALLS: usize = 768;
/// How long a wait asks the driver without sleeping: what a copy of some KiB takes.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep of a wait.
const NAP: Duration = Duration::from_micros(500);

/// One stream. Operations wait in the queue until a flush gives them to the driver.
pub(crate) struct CudaQueue {
    stream: Stream,
    registrar: NoIommu,
    limits: Limits,
    longest_pitch: u64,
    waiting: VecDeque<(Ticket, Operation)>,
    next: u64,
    stopped: Option<String>,
    stats: Stats,
    sampler: Sampler,
    steps: Vec<Step>,
}

/// The host memory of an operation.
pub(crate) fn hosts(operation: &Operation) -> &[HostSlice] {
    match &operation.work {
        Work::Copy { host, .. } | Work::Compare { host, .. } => std::slice::from_ref(host),
        Work::Gather(g) => &g.host,
        Work::Within { .. } | Work::Fill { .. } | Work::Fence => &[],
    }
}

impl CudaQueue {
    const ABILITIES: Abilities = Abilities::FROM_HOST
        .union(Abilities::TO_HOST)
        .union(Abilities::WITHIN)
        .union(Abilities::FILL)
        .union(Abilities::SHAPE)
        .union(Abilities::GATHER)
        .union(Abilities::FENCE)
        .union(Abilities::STOP)
        .union(Abilities::ORDERED);

    /// A stream of its own. Host memory is registered by `registrar`; no operation is longer than `max_len`.
    pub(crate) fn new(context: &Arc<Context>, device: i32, registrar: NoIommu, max_len: u64) -> Result<Self, Error> {
        let longest = context.driver().attribute(device, Attribute::MaxPitch);
        Ok(Self {
            stream: Stream::new(context)?,
            registrar,
            limits: Limits { capacity: CAPACITY, max_len },
            longest_pitch: u64::try_from(longest).unwrap_or(0),
            waiting: VecDeque::new(),
            next: 0,
            stopped: None,
            stats: Stats::default(),
            sampler: Sampler::default(),
            steps: Vec::new(),
        })
    }

    /// Why an operation cannot be taken.
    fn refusal(&self, operation: &Operation) -> Result<(), Refusal> {
        if let Some(why) = &self.stopped {
            return Err(Refusal::Stopped(why.clone()));
        }
        operation.admit(Self::ABILITIES, self.limits)?;
        let access = match &operation.work {
            Work::Copy { direction, .. } => Some(direction.host_access()),
            Work::Gather(gather) => Some(gather.direction.host_access()),
            _ => None,
        };
        if let Some(access) = access {
            hosts(operation).iter().try_for_each(|host| host.check(&self.registrar, access))?;
        }
        if self.in_flight() >= self.limits.capacity { Err(Refusal::Full) } else { Ok(()) }
    }

    /// Stops when the context is broken.
    fn notice(&mut self) {
        if self.stopped.is_none()
            && let Some(error) = self.stream.broken()
        {
            let why = format!("{error}; the GPU's context is lost until this process ends");
            self.stop(&why);
        }
    }

    fn end(&mut self, mut completion: Completion, done: &mut Vec<Completion>) {
        if let Some(why) = &self.stopped {
            (completion.result, completion.bytes) = (Err(OpError::Stopped(why.clone())), 0);
        }
        self.sampler.ended(completion.ticket.number(), &mut self.stats.latency);
        match completion.result {
            Ok(()) => self.stats.ok += 1,
            Err(_) => self.stats.failed += 1,
        }
        self.stats.bytes += completion.bytes;
        done.push(completion);
    }
}

impl Queue for CudaQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn abilities(&self) -> Abilities {
        Self::ABILITIES
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.stream.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if let Err(reason) = self.refusal(&operation) {
            self.stats.full += u64::from(reason == Refusal::Full);
            return Err(Refused { operation, reason });
        }
        let ticket = Ticket::new(self.next);
        self.sampler.begun(self.next);
        self.next += 1;
        self.stats.submitted += 1;
        self.waiting.push_back((ticket, operation));
        Ok(ticket)
    }

    fn flush(&mut self) {
        if self.waiting.is_empty() || self.stopped.is_some() {
            return;
        }
        self.stats.doorbells += 1;
        let mut steps = std::mem::take(&mut self.steps);
        while self.stream.calls() < CALLS && self.stream.broken().is_none() {
            let Some((ticket, operation)) = self.waiting.pop_front() else { break };
            match plan::steps(&operation, self.longest_pitch, &mut steps) {
                Ok(()) => self.stream.begin(ticket, operation, &steps),
                Err(reason) => self.stream.give_up(ticket, operation, OpError::Refused(reason)),
            }
            self.stream.record(false);
        }
        self.steps = steps;
        self.stream.record(true);
        self.notice();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.flush();
        let mut ended = Vec::new();
        self.stream.ended(&mut ended);
        self.notice();
        for completion in ended {
            self.end(completion, done);
        }
        if self.stopped.is_some() && self.stream.len() == 0 {
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
        loop {
            let ended = self.poll(done);
            let passed = begun.elapsed();
            if ended > 0 || self.in_flight() == 0 || passed >= timeout {
                return ended;
            }
            if passed > SPIN {
                thread::sleep((passed / 8).min(NAP).min(timeout - passed));
            }
        }
    }

    fn halted(&self) -> Option<String> {
        self.stopped.clone()
    }

    fn stop(&mut self, why: &str) {
        if self.stopped.is_none() {
            self.stopped = Some(why.to_owned());
            self.stats.stops += 1;
        }
    }

    fn restart(&mut self) -> bool {
        let restarts = self.stopped.is_some() && self.in_flight() == 0 && self.stream.broken().is_none();
        if restarts {
            self.stopped = None;
        }
        restarts
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<DeviceAddr> {
        match self.waiting.iter().position(|(waiting, _)| *waiting == ticket) {
            Some(at) => match self.waiting.remove(at) {
                Some((_, operation)) => {
                    self.sampler.ended(ticket.number(), &mut self.stats.latency);
                    (self.stats.failed, self.stats.cancelled) = (self.stats.failed + 1, self.stats.cancelled + 1);
                    Cancelled::TakenBack(operation)
                }
                None => Cancelled::Unknown,
            },
            None if self.stream.has(ticket) => Cancelled::TooLate,
            None => Cancelled::Unknown,
        }
    }

    fn stats(&self) -> Option<Stats> {
        Some(self.stats.clone())
    }
}
