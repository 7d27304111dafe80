//! Queues slowed down to the rates of a modelled link.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane::queue::{
    Capabilities, Completion, Direction, Limits, Operation, Queue, Refusal, Refused, StopReason, Ticket, Work,
    wait_with,
};

use super::{Half, Link, Stream, Throttle};

/// A queue whose operations end no sooner than on a modelled link. Copies only.
///
/// The inner queue moves the bytes at its own rate; completions are delayed. So the link must be slower than the queue
/// for its model to hold. Each direction does one operation after the other, as on a card.
pub struct Slow<Q: Queue> {
    inner: Q,
    index: usize,
    shared: Arc<Shared<Q::Addr>>,
    /// Per direction: what is under way on the modelled link, in order. The first one's end is known.
    directions: [VecDeque<Op>; 2],
    /// Ended on the inner queue.
    arrived: HashMap<Ticket, Completion<Q::Addr>>,
    scratch: Vec<Completion<Q::Addr>>,
}

struct Op {
    ticket: Ticket,
    stream: Stream,
    bytes: u64,
    end: Option<Duration>,
}

/// The half of the memory that an address lies in.
type HalfOf<A> = dyn Fn(A) -> Half + Send + Sync;

/// State that the queues of a link share.
struct Shared<A> {
    throttle: Mutex<Throttle>,
    began: Instant,
    half: Box<HalfOf<A>>,
}

impl<Q: Queue> Slow<Q> {
    /// Slows `queues` down to `link`. `half` returns the half of the memory that an address lies in. Late polls may
    /// catch up with `burst`; after idle time as much more moves at once.
    ///
    /// # Panics
    /// When there are more queues than the link has channels, or one of them has operations in flight.
    pub fn new(
        queues: Vec<Q>,
        link: Link,
        burst: Duration,
        half: impl Fn(Q::Addr) -> Half + Send + Sync + 'static,
    ) -> Vec<Self> {
        assert!(queues.len() <= link.channels(), "the link has {} channels", link.channels());
        assert!(queues.iter().all(|q| q.in_flight() == 0), "a slow queue needs its queue for itself");
        let throttle = Mutex::new(Throttle::new(link, burst));
        let shared = Arc::new(Shared { throttle, began: Instant::now(), half: Box::new(half) });
        let slow = |(index, inner)| {
            let directions = Default::default();
            Self { inner, index, shared: shared.clone(), directions, arrived: HashMap::new(), scratch: Vec::new() }
        };
        queues.into_iter().enumerate().map(slow).collect()
    }

    /// When something may end next.
    fn next_end(&self) -> Option<Duration> {
        self.directions.iter().filter_map(|ops| ops.front()?.end).min()
    }
}

impl<Q: Queue> Queue for Slow<Q> {
    type Addr = Q::Addr;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities() & (Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::STOP)
    }

    fn in_flight(&self) -> usize {
        self.directions.iter().map(VecDeque::len).sum()
    }

    fn submit(&mut self, operation: Operation<Q::Addr>) -> Result<Ticket, Refused<Q::Addr>> {
        let missing = operation.needs() - self.capabilities();
        let Work::Copy { direction, at, .. } = &operation.work else {
            return Err(Refused { operation, reason: Refusal::Unsupported(missing) });
        };
        if !missing.is_empty() {
            return Err(Refused { operation, reason: Refusal::Unsupported(missing) });
        }
        if self.in_flight() >= self.limits().capacity {
            return Err(Refused { operation, reason: Refusal::Full });
        }
        let (direction, bytes) = (*direction, operation.bytes());
        let stream = Stream { channel: self.index, half: (self.shared.half)(*at), direction };
        let ticket = self.inner.submit(operation)?;
        let ops = &mut self.directions[usize::from(direction == Direction::FromHost)];
        ops.push_back(Op { ticket, stream, bytes, end: None });
        Ok(ticket)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        self.inner.poll(&mut self.scratch);
        self.arrived.extend(self.scratch.drain(..).map(|c| (c.ticket, c)));
        let before = done.len();
        let mut throttle = self.shared.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        for ops in &mut self.directions {
            while let Some(op) = ops.front_mut() {
                let now = self.shared.began.elapsed();
                let end = *op.end.get_or_insert_with(|| {
                    throttle.ask(&op.stream, op.bytes, now);
                    // Asking for nothing says when all of it is paid for.
                    now.saturating_add(throttle.ask(&op.stream, 0, now))
                });
                if end > now {
                    break;
                }
                let Some(completion) = self.arrived.remove(&op.ticket) else { break };
                done.push(completion);
                ops.pop_front();
            }
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion<Q::Addr>>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| {
            let until_end = this.next_end().map_or(left, |end| end.saturating_sub(this.shared.began.elapsed()));
            if this.inner.in_flight() > 0 {
                this.inner.wait(&mut this.scratch, left.min(until_end));
            } else {
                std::thread::sleep(left.min(until_end));
            }
        })
    }

    fn halted(&self) -> Option<StopReason> {
        self.inner.halted()
    }

    fn stop(&mut self, reason: StopReason) {
        self.inner.stop(reason);
    }

    fn restart(&mut self) -> bool {
        self.in_flight() == 0 && self.inner.restart()
    }
}
