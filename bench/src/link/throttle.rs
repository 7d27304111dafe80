//! Token buckets that make copies as slow as a link would.
//!
//! Each limit of the link has a bucket that fills at its capacity. A copy takes its bytes from the buckets of all
//! limits that it goes through at once, and goes ahead when what they owed before is paid: so copies of any size pass,
//! in the order in which they asked, and over time no limit is exceeded. A copy asks before each fragment, in real
//! or in virtual time, one fragment at a time for each stream; small fragments (64 KiB) make the
//! smoothest shares.

use std::time::Duration;

use super::{Link, Stream};

/// Says when copies may go ahead.
#[derive(Clone, Debug)]
pub struct Throttle {
    link: Link,
    /// The credit that may be saved while nothing is copied, in time at full capacity.
    burst: Duration,
    /// Bytes in the bucket of each limit; negative is debt.
    buckets: Vec<f64>,
    filled: Duration,
}

impl Throttle {
    /// Buckets for the limits of `link`, empty at time 0. They never hold more than fills them in `burst`.
    pub fn new(link: Link, burst: Duration) -> Self {
        let buckets = vec![0.0; link.limits().len()];
        Self { link, burst, buckets, filled: Duration::ZERO }
    }

    /// Counts a copy of `bytes` that is asked for at time `now` (not before those of earlier calls), and says how long
    /// it has to wait before it goes ahead.
    pub fn ask(&mut self, stream: &Stream, bytes: u64, now: Duration) -> Duration {
        self.fill(now);
        let mut wait = 0.0f64;
        for (limit, level) in self.link.limits().iter().zip(&mut self.buckets) {
            if limit.streams.contain(stream) {
                wait = wait.max(-*level / limit.at(now));
                *level -= bytes as f64;
            }
        }
        Duration::try_from_secs_f64(wait).unwrap_or(Duration::MAX)
    }

    fn fill(&mut self, now: Duration) {
        while self.filled < now {
            // Up to where a capacity changes.
            let until = self.link.next_change(self.filled).map_or(now, |change| change.min(now));
            let seconds = (until - self.filled).as_secs_f64();
            for (limit, level) in self.link.limits().iter().zip(&mut self.buckets) {
                let capacity = limit.at(self.filled);
                *level = (*level + capacity * seconds).min(capacity * self.burst.as_secs_f64());
            }
            self.filled = until;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::assumptions::all;
    use super::super::{Half, Limit, Streams};
    use super::*;
    use dmalane::queue::Direction;

    const SLICE: u64 = 64 << 10;
    const BURST: Duration = Duration::from_micros(20);

    /// Streams that copy slice after slice for a while; the bytes of each.
    fn copy(throttle: &mut Throttle, streams: &[Stream], time: Duration) -> Vec<u64> {
        let mut moved = vec![0; streams.len()];
        let mut due = vec![Duration::ZERO; streams.len()];
        loop {
            let next = (0..streams.len()).min_by_key(|&i| due[i]).unwrap();
            let now = due[next];
            if now >= time {
                return moved;
            }
            // The copy itself takes no time here: the buckets are all there is.
            due[next] = now + throttle.ask(&streams[next], SLICE, now);
            moved[next] += SLICE;
        }
    }

    #[test]
    fn limits_are_kept_and_shared_as_the_model_says() {
        let time = Duration::from_millis(20);
        let stream = |channel, half, direction| Stream { channel, half, direction };
        let (read, write) = (Direction::ToHost, Direction::FromHost);
        let sets = [
            vec![stream(0, Half::Ddr0, read)],
            vec![stream(0, Half::Ddr0, read), stream(1, Half::Ddr0, read)],
            vec![stream(0, Half::Hbm0, read), stream(1, Half::Hbm0, read)],
            vec![stream(0, Half::Hbm0, read), stream(1, Half::Hbm1, read)],
            vec![stream(0, Half::Ddr0, read), stream(0, Half::Ddr0, write)],
        ];
        for a in all().into_iter().filter(|a| !a.name.starts_with("toggling")) {
            for streams in &sets {
                let moved = copy(&mut Throttle::new(a.link.clone(), BURST), streams, time);
                for (moved, fair) in moved.iter().zip(a.link.fair_shares(streams, Duration::ZERO)) {
                    let rate = *moved as f64 / time.as_secs_f64();
                    assert!((rate / fair - 1.0).abs() < 0.03, "{} {streams:?}: {rate:e} {fair:e}", a.name);
                }
            }
        }
    }

    #[test]
    fn capacities_that_change_are_followed() {
        let limit = Limit::toggling("all", Streams::ALL, [8e9, 2e9], Duration::from_millis(1), 1000);
        let link = Link::new(1, vec![limit], Duration::ZERO).unwrap();
        let stream = Stream { channel: 0, half: Half::Ddr0, direction: Direction::ToHost };
        let moved = copy(&mut Throttle::new(link, BURST), &[stream], Duration::from_millis(20));
        assert!((moved[0] as f64 / (20e-3 * 5e9) - 1.0).abs() < 0.03, "{}", moved[0]);
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let link = Link::new(1, vec![Limit::constant("all", Streams::ALL, 1e9)], Duration::ZERO).unwrap();
        let stream = Stream { channel: 0, half: Half::Ddr0, direction: Direction::ToHost };
        let mut throttle = Throttle::new(link, BURST);
        let later = Duration::from_secs(1);
        assert_eq!(throttle.ask(&stream, 1_000_000, later), Duration::ZERO);
        // 20 kB were saved up.
        let wait = throttle.ask(&stream, 1, later);
        assert_eq!(wait.as_micros(), 980);
    }
}
