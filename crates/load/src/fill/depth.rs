//! How many reads a worker keeps in flight: as many as make the bytes come faster.
//!
//! Only the rate says that. Reads that begin together may end one after the other or all at once, and a worker that has
//! other things to do sees that late.

use std::time::{Duration, Instant};

/// Reads in flight at first: enough for a local disk, and few enough that what has arrived is still in the processor's
/// cache when it is used.
const FIRST: usize = 4;
/// Where nothing of the first reads has come for so long, the source has latency, as those behind networks have, and as
/// many as may be are in flight at once: to find that number takes several times as long. Local disks are faster.
pub(crate) const LATE: Duration = Duration::from_millis(10);
/// Bytes in flight of all workers, at most, but for the first reads of each.
const BYTES: u64 = 128 << 20;
/// Four times as many reads are tried after a turn in which the worker did hardly anything but wait, and as long as the
/// rate grows by this factor; else twice as many.
const MUCH: f64 = 2.0;
/// More reads stay in flight if the rate has grown by this factor.
const SOME: f64 = 1.1;
/// Shares of a turn in which the worker waits: with less than the one it can gain nothing; with more than the other,
/// much may be gained.
const HARDLY: f64 = 0.15;
const MOSTLY: f64 = 0.7;
/// Turns without a gain after which more reads are tried again, at first and at most; twice as many each time: what was
/// cached, or what else used the source, may have ended.
const REST: [usize; 2] = [8, 64];

/// The number of reads in flight. A turn is as many reads as may be in flight.
pub(super) struct Depth {
    limit: usize,
    /// The most that are tried.
    most: usize,
    /// The limit before more were tried, and its rate.
    fewer: Option<(usize, f64)>,
    /// Turns until more are tried, and from the next time without a gain on.
    rest: [usize; 2],
    /// When this turn began, and what has arrived in it.
    began: Instant,
    reads: usize,
    bytes: usize,
    /// Time in this turn in which the worker had nothing to do but to wait.
    idle: Duration,
    /// Nothing has ever arrived, of reads past the page cache.
    is_new: bool,
}

impl Depth {
    /// `asked` reads, or as many as measuring finds; one of each worker has `round` bytes; a queue takes `capacity`.
    /// `copies` come out of the page cache: one at first. `late`: the source was seen to have latency.
    pub fn new(asked: Option<usize>, round: u64, capacity: usize, copies: bool, late: bool) -> Self {
        let (first, capacity) = (if copies { 1 } else { FIRST }, capacity.max(1));
        let limit = asked.unwrap_or(first).clamp(1, capacity);
        let most = asked.unwrap_or((BYTES / round.max(1)) as usize).clamp(limit, capacity);
        let (rest, idle) = ([0, REST[0]], Duration::ZERO);
        let mut depth =
            Self { limit, most, fewer: None, rest, began: Instant::now(), reads: 0, bytes: 0, idle, is_new: !copies };
        if late {
            depth.late();
        }
        depth
    }

    /// Reads that may be in flight.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Reads begin, after none was in flight: the time before does not count.
    pub fn begin(&mut self, now: Instant) {
        (self.began, self.reads, self.bytes, self.idle) = (now, 0, 0, Duration::ZERO);
    }

    /// The longest that a worker should wait for a read: then there may be room for more.
    pub fn patience(&self) -> Duration {
        if self.is_new { LATE } else { Duration::MAX }
    }

    /// The worker had nothing to do but to wait.
    pub fn waited(&mut self, time: Duration) {
        self.idle += time;
        if self.idle >= LATE {
            self.late();
        }
    }

    /// The source has latency: all reads at once, but after a turn in which the worker hardly waits it is as before.
    fn late(&mut self) {
        if self.is_new && self.limit < self.most {
            self.fewer = Some((std::mem::replace(&mut self.limit, self.most), 0.0));
        }
    }

    /// A read has ended.
    pub fn ended(&mut self, bytes: usize, now: Instant) {
        (self.reads, self.bytes, self.is_new) = (self.reads + 1, self.bytes + bytes, false);
        if self.reads < self.limit || self.limit == self.most && self.fewer.is_none() {
            return;
        }
        let took = (now - self.began).as_secs_f64().max(1e-9);
        let (rate, idle) = (self.bytes as f64 / took, self.idle.as_secs_f64() / took);
        self.begin(now);
        match self.fewer.take() {
            Some((fewer, before)) if idle < HARDLY || rate < before * SOME => self.keep(fewer),
            Some((_, before)) => self.try_more(if rate >= before * MUCH { 4 } else { 2 }, rate),
            None if self.rest[0] > 0 => self.rest[0] -= 1,
            None if idle >= HARDLY => self.try_more(if idle >= MOSTLY { 4 } else { 2 }, rate),
            None => {}
        }
    }

    fn keep(&mut self, limit: usize) {
        let [_, turns] = self.rest;
        (self.limit, self.rest) = (limit, [turns, (2 * turns).min(REST[1])]);
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
            let wait = flying[0].saturating_duration_since(now).min(depth.patience());
            depth.waited(wait);
            now += wait;
            while flying.front().is_some_and(|next| *next <= now) {
                flying.pop_front();
                depth.ended(BLOCK as usize, now);
            }
        }
        (now - start, depth.limit())
    }

    fn new(capacity: usize) -> Depth {
        Depth::new(None, BLOCK, capacity, false, false)
    }

    #[test]
    fn a_source_with_latency_gets_as_many_reads_as_it_serves_at_once() {
        for (latency, reads) in [(200, 128), (1000, 128), (5000, 256), (20_000, 128)] {
            let (latency, each) = (latency * US, 1400 * US);
            let best = latency + each * reads as u32;
            let (took, limit) = read(new(64), latency, each, reads);
            assert!(took < best * 10 / 9, "{latency:?}: {took:?}, at best {best:?}, {limit} in flight");
        }
        // What was seen to have latency loses nothing.
        let (latency, each) = (20_000 * US, 1400 * US);
        let (took, limit) = read(Depth::new(None, BLOCK, 64, false, true), latency, each, 128);
        assert!(took < (latency + each * 128) * 101 / 100 && limit == 64, "{took:?}, {limit} in flight");
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
        assert_eq!(read(Depth::new(Some(3), BLOCK, 64, false, true), far, US, 100).1, 3);
        assert_eq!(read(Depth::new(Some(100), BLOCK, 64, false, false), far, US, 100).1, 64);
        assert_eq!(read(Depth::new(None, u64::MAX, 64, true, false), far, US, 100).1, 1);
        assert_eq!(read(Depth::new(None, BLOCK, 64, true, false), far, US, 200).1, 64);
    }

    #[test]
    fn more_are_tried_again_when_the_source_has_changed() {
        let mut depth = new(64);
        let (mut now, mut reads) = (Instant::now(), 0);
        depth.begin(now);
        // First each read takes its time, whatever else is in flight; later all in flight take that together.
        while reads < 2000 {
            let at_once = if reads < 100 { 1 } else { depth.limit() as u32 };
            depth.waited(Duration::from_millis(1) / at_once);
            now += Duration::from_millis(1) / at_once;
            depth.ended(BLOCK as usize, now);
            reads += 1;
        }
        assert_eq!(depth.limit(), 64);
    }
}
