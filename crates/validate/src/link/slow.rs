//! Real channels that seem to hang off a modelled link.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_queue::{Channel, Completion, Direction, Limits, Refused, Ticket, Transfer};

use super::{Half, Link, Stream, Throttle};

/// What late polls may catch up with.
const BURST: Duration = Duration::from_millis(1);

/// A channel whose operations end no sooner than a modelled link would let them.
///
/// The bytes are moved by the real channel at its own pace; what is held back are completions. So the link must be slower
/// than the channel for its model to hold. Each direction does one operation after the other, as on a card.
pub struct Slow<C: Channel> {
    inner: C,
    index: usize,
    shared: Arc<Shared<C>>,
    /// Per direction: what is under way on the modelled link, in order. The first one's end is known.
    lanes: [VecDeque<Op>; 2],
    /// Ended on the real channel.
    arrived: HashMap<Ticket, Completion<C::Far>>,
    scratch: Vec<Completion<C::Far>>,
}

struct Op {
    ticket: Ticket,
    stream: Stream,
    bytes: u64,
    end: Option<Duration>,
}

/// Which half a far end lies in.
type HalfOf<F> = dyn Fn(&F) -> Half + Send + Sync;

/// What the channels of a link share.
struct Shared<C: Channel> {
    throttle: Mutex<Throttle>,
    began: Instant,
    half: Box<HalfOf<C::Far>>,
}

impl<C: Channel> Slow<C> {
    /// Hangs `channels` off `link`. `half` says which half a far end lies in.
    ///
    /// Late polls may catch up with a millisecond.
    ///
    /// # Panics
    /// When there are more channels than the link has, or one of them has operations in flight.
    pub fn new(channels: Vec<C>, link: Link, half: impl Fn(&C::Far) -> Half + Send + Sync + 'static) -> Vec<Self> {
        Self::catching_up(channels, link, BURST, half)
    }

    /// The same where polls may be later than that, because threads do not get to run. After idle time as much more moves at once.
    ///
    /// # Panics
    /// As [`Slow::new`].
    pub fn catching_up(
        channels: Vec<C>,
        link: Link,
        burst: Duration,
        half: impl Fn(&C::Far) -> Half + Send + Sync + 'static,
    ) -> Vec<Self> {
        assert!(channels.len() <= link.channels(), "the link has {} channels", link.channels());
        assert!(channels.iter().all(|c| c.in_flight() == 0), "a slow channel needs its channel for itself");
        let throttle = Mutex::new(Throttle::new(link, burst));
        let shared = Arc::new(Shared { throttle, began: Instant::now(), half: Box::new(half) });
        let slow = |(index, inner)| {
            let lanes = Default::default();
            Self { inner, index, shared: shared.clone(), lanes, arrived: HashMap::new(), scratch: Vec::new() }
        };
        channels.into_iter().enumerate().map(slow).collect()
    }

    /// When something may end next.
    fn next_end(&self) -> Option<Duration> {
        self.lanes.iter().filter_map(|ops| ops.front()?.end).min()
    }
}

impl<C: Channel> Channel for Slow<C> {
    type Far = C::Far;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(VecDeque::len).sum()
    }

    fn submit(&mut self, transfer: Transfer<C::Far>) -> Result<Ticket, Refused<C::Far>> {
        if self.in_flight() >= self.limits().capacity {
            return Err(Refused { transfer, reason: dmalane_queue::Refusal::Full });
        }
        let direction = transfer.direction;
        let stream = Stream { channel: self.index, half: (self.shared.half)(&transfer.far), direction };
        let bytes = transfer.part.len() as u64;
        let ticket = self.inner.submit(transfer)?;
        self.lanes[usize::from(direction == Direction::FromHost)].push_back(Op { ticket, stream, bytes, end: None });
        Ok(ticket)
    }

    fn poll(&mut self, done: &mut Vec<Completion<C::Far>>) -> usize {
        self.inner.poll(&mut self.scratch);
        self.arrived.extend(self.scratch.drain(..).map(|c| (c.ticket, c)));
        let before = done.len();
        let mut throttle = self.shared.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        for ops in &mut self.lanes {
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

    fn wait(&mut self, done: &mut Vec<Completion<C::Far>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let n = self.poll(done);
            let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if n > 0 || self.in_flight() == 0 || left.is_zero() {
                return n;
            }
            let until_end = self.next_end().map_or(left, |end| end.saturating_sub(self.shared.began.elapsed()));
            if self.inner.in_flight() > 0 {
                self.inner.wait(&mut self.scratch, left.min(until_end));
            } else {
                std::thread::sleep(left.min(until_end));
            }
        }
    }

    fn halted(&self) -> Option<String> {
        self.inner.halted()
    }

    fn stop(&mut self, why: &str) {
        self.inner.stop(why);
    }
}
