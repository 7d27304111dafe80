//! Counters of a queue.

/// Counters of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_counters_add_up() {
        let of = |n: u64| {
            let (submitted, ok, failed, cancelled) = (n, n + 1, n + 2, n + 3);
            let (bytes, full, doorbells, stops) = (n + 4, n + 5, n + 6, n + 7);
            Stats { submitted, ok, failed, cancelled, bytes, full, doorbells, stops }
        };
        let mut all = Stats::default();
        [of(2), of(5), of(5)].iter().for_each(|stats| all.add(stats));
        let counters = |s: &Stats| [s.submitted, s.ok, s.failed, s.cancelled, s.bytes, s.full, s.doorbells, s.stops];
        assert_eq!(counters(&all), [12, 15, 18, 21, 24, 27, 30, 33]);
    }
}
