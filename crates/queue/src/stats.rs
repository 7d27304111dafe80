//! Counters of a queue, kept cheaply.

use std::time::{Duration, Instant};

/// Counters of one queue.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Operations accepted.
    pub submitted: u64,
    /// Operations that ended without error.
    pub ok: u64,
    /// Operations that ended with an error, cancelled ones included.
    pub failed: u64,
    /// Operations that ended because they were cancelled or taken back.
    pub cancelled: u64,
    /// Bytes done, also by operations that failed later.
    pub bytes: u64,
    /// Operations refused because the queue was full.
    pub full: u64,
    /// Flushes with something to submit (doorbells).
    pub doorbells: u64,
    /// Times the queue was stopped by an error or a time-out.
    pub stops: u64,
    /// From submission to collection, of one operation in [`Latency::ONE_IN`].
    pub latency: Latency,
}

/// A histogram of durations: buckets an eighth apart, from 16 ns to 2^40 ns; what lies outside counts in the first or
/// last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Latency {
    buckets: Vec<u32>,
    count: u64,
}

/// log2 of the buckets per power of two.
const FINE: u32 = 3;
const FIRST: u32 = 4;
const LAST: u32 = 40;

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: vec![0; ((LAST - FIRST) << FINE) as usize], count: 0 }
    }
}

impl Latency {
    /// Reading the clock twice costs more than submitting, so only the first of this many operations is timed.
    pub const ONE_IN: u64 = 64;

    /// Counts one.
    pub fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1 << FIRST);
        let power = ns.ilog2();
        let fine = (ns >> (power - FINE)) as u32 & ((1 << FINE) - 1);
        let bucket = (((power - FIRST) << FINE | fine) as usize).min(self.buckets.len() - 1);
        self.buckets[bucket] = self.buckets[bucket].saturating_add(1);
        self.count += 1;
    }

    /// Number of durations that were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The duration that this share (0 to 1) of all stays below, rounded up to the end of its bucket: at most an eighth
    /// more than the truth. `None` when nothing was counted.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = (share.clamp(0.0, 1.0) * self.count as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        let bucket = self.buckets.iter().position(|n| {
            below += u64::from(*n);
            below >= rank
        })? as u64;
        let power = FIRST + (bucket >> FINE) as u32;
        let eighths = (1 << FINE) + (bucket & ((1 << FINE) - 1)) + 1;
        Some(Duration::from_nanos(eighths << (power - FINE)))
    }

    /// The median.
    pub fn p50(&self) -> Option<Duration> {
        self.quantile(0.5)
    }

    /// 99 of 100 stay below.
    pub fn p99(&self) -> Option<Duration> {
        self.quantile(0.99)
    }

    /// Adds another histogram's counts.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine = mine.saturating_add(*theirs);
        }
        self.count += other.count;
    }
}

impl Stats {
    /// Adds another queue's counters.
    pub fn add(&mut self, other: &Self) {
        self.submitted += other.submitted;
        self.ok += other.ok;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.bytes += other.bytes;
        self.full += other.full;
        self.doorbells += other.doorbells;
        self.stops += other.stops;
        self.latency.add(&other.latency);
    }
}

/// Times one operation in [`Latency::ONE_IN`], in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct Sampler(std::collections::VecDeque<(u64, Instant)>);

impl Sampler {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Operation `number` was submitted.
    #[inline]
    pub fn begun(&mut self, number: u64) {
        if number.is_multiple_of(Latency::ONE_IN) {
            self.0.push_back((number, Instant::now()));
        }
    }

    /// Operation `number` was collected, or taken back.
    #[inline]
    pub fn ended(&mut self, number: u64, into: &mut Latency) {
        if number.is_multiple_of(Latency::ONE_IN)
            && let Some(place) = self.0.iter().position(|(n, _)| *n == number)
            && let Some((_, at)) = self.0.remove(place)
        {
            into.record(at.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn quantiles_agree_with_a_sorted_list(
            mut ns in prop::collection::vec(1u64..1 << 41, 1..200), share in 0.0..1.0f64,
        ) {
            let mut latency = Latency::default();
            for n in &ns {
                latency.record(Duration::from_nanos(*n));
            }
            ns.sort_unstable();
            let rank = (share * ns.len() as f64).ceil().max(1.0) as usize;
            let want = ns[rank - 1].clamp(16, (1 << 40) - 1);
            let got = latency.quantile(share).unwrap().as_nanos() as u64;
            prop_assert!(got > want && got <= want + want / 8 + 2, "{} for {}", got, want);
        }
    }

    #[test]
    fn all_counters_add_up() {
        let of = |n: u64| {
            let mut latency = Latency::default();
            (0..n).for_each(|_| latency.record(Duration::from_micros(n)));
            let (submitted, ok, failed, cancelled) = (n, n + 1, n + 2, n + 3);
            let (bytes, full, doorbells, stops) = (n + 4, n + 5, n + 6, n + 7);
            Stats { submitted, ok, failed, cancelled, bytes, full, doorbells, stops, latency }
        };
        let (mut all, two, five) = (Stats::default(), of(2), of(5));
        [&two, &five, &five].into_iter().for_each(|stats| all.add(stats));
        let counters = |s: &Stats| [s.submitted, s.ok, s.failed, s.cancelled, s.bytes, s.full, s.doorbells, s.stops];
        assert_eq!(counters(&all), [12, 15, 18, 21, 24, 27, 30, 33]);
        assert_eq!((all.latency.count(), five.latency.count()), (12, 5));
        assert_eq!((all.latency.quantile(0.1), all.latency.p50()), (two.latency.p50(), five.latency.p50()));
        assert_eq!(all.latency.p99(), five.latency.p99());
    }

    #[test]
    fn percentiles_are_of_their_share() {
        let mut latency = Latency::default();
        (1..=1000).for_each(|n| latency.record(Duration::from_nanos(n * 1000)));
        let (p50, p99) = (latency.p50().unwrap().as_micros(), latency.p99().unwrap().as_micros());
        assert!((500..=563).contains(&p50) && (990..=1114).contains(&p99), "{p50} {p99}");
        // Values outside the range count in the first or the last bucket.
        let mut latency = Latency::default();
        latency.record(Duration::ZERO);
        assert_eq!(latency.p50(), Some(Duration::from_nanos(18)));
        latency.record(Duration::from_secs(10_000));
        assert_eq!(latency.quantile(1.0), Some(Duration::from_nanos(1 << 40)));
    }

    #[test]
    fn one_in_so_many_is_timed() {
        let (mut sampler, mut latency) = (Sampler::default(), Latency::default());
        for n in 0..100 {
            sampler.begun(n);
        }
        for n in 0..100 {
            sampler.ended(n, &mut latency);
        }
        assert_eq!(latency.count(), 2);
        assert!(Latency::default().p50().is_none());
    }
}
