//! How many reads a worker keeps in flight: as many as make the bytes come faster.
//!
//! Reads that begin together end one after the other: the first after the latency of the source, the next ones as fast
//! as it gives bytes. Both times together say how many are worth having in flight. Whether that is right, and stays so,
//! shows in the rate with more of them.

use std::time::{Duration, Instant};

/// Reads in flight at first: enough for a local disk, and few enough that what has arrived is still in the processor's
/// cache when it is used.
const FIRST: usize = 4;
/// Bytes in flight, at most.
const BYTES: u64 = 128 << 20;
/// While the first read has not ended after these times, so many are in flight at least.
const LATE: [(Duration, usize); 2] = [(Duration::from_micros(700), 16), (Duration::from_millis(3), 64)];
/// At first four times as many reads are tried, and again as long as the rate grows by this factor; else twice as many.
const MUCH: f64 = 2.0;
/// More reads stay in flight if the rate has grown by this factor.
const SOME: f64 = 1.1;
/// After so many turns without a gain more reads are tried again, and after twice as many each time, up to this number:
/// what was cached, or what else used the source, may have ended.
const REST: [usize; 2] = [8, 64];

/// The number of reads in flight. A turn is as many reads as may be in flight.
pub(super) struct Depth {
    limit: usize,
    /// The most that are tried.
    most: usize,
    /// No turn has ended.
    starting: bool,
    /// The limit before more were tried, and its rate.
    fewer: Option<(usize, f64)>,
    /// Turns until more are tried, and from the next time without a gain on.
    rest: [usize; 2],
    /// How many times as many are tried next.
    step: usize,
    /// When this turn began, when its first read ended, and what has arrived in it.
    began: Instant,
    first: Instant,
    reads: usize,
    bytes: usize,
    /// The worker had nothing to do in this turn but to wait.
    waited: bool,
}

impl Depth {
    /// `asked` reads, or as many as measuring finds, of `block` bytes; a queue takes `capacity`. `copies` come out of
    /// the page cache: one at first.
    pub fn new(asked: Option<usize>, block: u64, capacity: usize, copies: bool) -> Self {
        let (first, capacity, now) = (if copies { 1 } else { FIRST }, capacity.max(1), Instant::now());
        let limit = asked.unwrap_or(first).clamp(1, capacity);
        let most = asked.unwrap_or((BYTES / block.max(1)) as usize).clamp(limit, capacity);
        let (fewer, began, first) = (None, now, now);
        let (starting, rest) = (asked.is_none(), [0, REST[0]]);
        Self { limit, most, starting, fewer, rest, step: 4, began, first, reads: 0, bytes: 0, waited: false }
    }

    /// Reads that may be in flight.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Reads begin, after none was in flight: the time before does not count.
    pub fn begin(&mut self, now: Instant) {
        (self.began, self.reads, self.bytes, self.waited) = (now, 0, 0, false);
    }

    /// The worker has nothing to do but to wait. Returns when more may be in flight, which may be now, unless a read
    /// ends before.
    pub fn wait(&mut self, now: Instant) -> Option<Instant> {
        self.waited = true;
        if !self.starting || self.reads > 0 {
            return None;
        }
        let before = self.limit;
        let mut later = LATE.into_iter().map(|(late, limit)| (self.began + late, limit.min(self.most)));
        let next = later.find(|(at, limit)| {
            self.limit = self.limit.max(if now < *at { 0 } else { *limit });
            now < *at && self.limit < *limit
        });
        if self.limit > before { Some(now) } else { next.map(|(at, _)| at) }
    }

    /// A read has ended.
    pub fn ended(&mut self, bytes: usize, now: Instant) {
        (self.reads, self.bytes) = (self.reads + 1, self.bytes + bytes);
        if self.reads == 1 {
            self.first = now;
        }
        if self.reads < self.limit || self.limit == self.most && self.fewer.is_none() && !self.starting {
            return;
        }
        let rate = self.bytes as f64 / (now - self.began).as_secs_f64().max(1e-9);
        let (latency, rest, reads, waited) = (self.first - self.began, now - self.first, self.reads, self.waited);
        self.begin(now);
        if std::mem::take(&mut self.starting) && waited && reads > 1 {
            // As many as come in the time that one takes, and half as many again.
            let enough = latency.as_secs_f64() * (reads - 1) as f64 / rest.as_secs_f64().max(1e-9) + 1.0;
            if enough < reads as f64 {
                return self.keep(((enough * 1.5) as usize).clamp(FIRST.min(self.limit), self.limit));
            }
        }
        match self.fewer.take() {
            // A worker that has no need to wait gains nothing.
            Some((fewer, before)) if !waited || rate < before * SOME => self.keep(fewer),
            Some((_, before)) => self.try_more(if rate >= before * MUCH { 4 } else { 2 }, rate),
            None if self.rest[0] > 0 => self.rest[0] -= 1,
            None if waited => self.try_more(self.step, rate),
            None => {}
        }
    }

    fn keep(&mut self, limit: usize) {
        let [_, turns] = self.rest;
        (self.limit, self.rest, self.step) = (limit, [turns, (2 * turns).min(REST[1])], 2);
    }

    fn try_more(&mut self, times: usize, rate: f64) {
        let limit = (self.limit * times).min(self.most);
        self.fewer = Some((std::mem::replace(&mut self.limit, limit), rate)).filter(|(fewer, _)| *fewer < limit);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::Duration;

    use super::*;

    const BLOCK: u64 = 2 << 20;
    const US: Duration = Duration::from_micros(1);

    /// Reads `reads` blocks of a source that answers after `latency` and takes `each` for a block, and returns how long
    /// that took, with the limit in the end.
    fn read(mut depth: Depth, latency: Duration, each: Duration, reads: usize) -> (Duration, usize) {
        let start = Instant::now();
        let (mut now, mut free, mut flying) = (start, start, VecDeque::new());
        let mut left = reads;
        depth.begin(now);
        while left > 0 || !flying.is_empty() {
            while left > 0 && flying.len() < depth.limit() {
                free = free.max(now) + each;
                flying.push_back(free + latency);
                left -= 1;
            }
            let next = *flying.front().unwrap();
            if let Some(at) = depth.wait(now).filter(|at| *at < next) {
                now = at;
                continue;
            }
            flying.pop_front();
            now = next.max(now);
            depth.ended(BLOCK as usize, now);
        }
        (now - start, depth.limit())
    }

    fn new(capacity: usize) -> Depth {
        Depth::new(None, BLOCK, capacity, false)
    }

    #[test]
    fn a_source_with_latency_gets_as_many_reads_as_it_serves_at_once() {
        for (latency, reads) in [(200, 128), (1000, 128), (5000, 128), (20_000, 128)] {
            let (latency, each) = (latency * US, 1400 * US);
            let best = latency + each * reads as u32;
            let (took, limit) = read(new(64), latency, each, reads);
            assert!(took < best * 10 / 9, "{latency:?}: {took:?}, at best {best:?}, {limit} in flight");
            // In the end not many more than it needs, also while twice as many are tried.
            let needed = 1 + latency.as_nanos().div_ceil(each.as_nanos()) as usize;
            assert!(limit <= 2 * FIRST.max(2 * needed), "{latency:?}: {limit} in flight");
        }
    }

    #[test]
    fn a_source_that_gains_nothing_keeps_few() {
        assert_eq!(read(new(64), Duration::ZERO, 250 * US, 50).1, FIRST);
        // Whoever is never idle gains nothing either.
        let mut busy = new(64);
        let start = Instant::now();
        busy.begin(start);
        for i in 1..100 {
            busy.ended(BLOCK as usize, start + i * US);
        }
        assert_eq!(busy.limit(), FIRST);
    }

    #[test]
    fn no_more_than_the_queue_takes_the_memory_has_or_was_asked_for() {
        let far = Duration::from_secs(1);
        assert_eq!(read(new(8), far, US, 100).1, 8);
        assert_eq!(read(new(4096), far, US, 1000).1, 64);
        assert_eq!(read(Depth::new(Some(3), BLOCK, 64, false), far, US, 100).1, 3);
        assert_eq!(read(Depth::new(Some(100), BLOCK, 64, false), far, US, 100).1, 64);
        assert_eq!(read(Depth::new(None, u64::MAX, 64, true), far, US, 100).1, 1);
        assert_eq!(read(Depth::new(None, BLOCK, 64, true), far, US, 200).1, 64);
    }

    #[test]
    fn more_are_tried_again_when_the_source_has_changed() {
        let mut depth = new(64);
        let (mut now, mut reads) = (Instant::now(), 0);
        depth.begin(now);
        // First each read takes its time, whatever else is in flight; later all in flight take that together.
        while reads < 2000 {
            depth.wait(now);
            let at_once = if reads < 100 { 1 } else { depth.limit() as u32 };
            now += Duration::from_millis(1) / at_once;
            depth.ended(BLOCK as usize, now);
            reads += 1;
        }
        assert_eq!(depth.limit(), 64);
    }
}
