//! The time of a whole run, by what it was spent on.

use std::time::{Duration, Instant};

use crate::size::duration;

/// The phases of a run, in order.
pub struct Phases {
    start: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl Phases {
    /// The run begins now.
    pub fn new() -> Self {
        Self { start: Instant::now(), parts: Vec::new() }
    }

    /// Adds time that was spent on `what`.
    pub fn add(&mut self, what: &'static str, time: Duration) {
        match self.parts.iter_mut().find(|(known, _)| *known == what) {
            Some((_, all)) => *all += time,
            None => self.parts.push((what, time)),
        }
    }

    /// Runs `f`, whose time is spent on `what`.
    pub fn time<T>(&mut self, what: &'static str, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        self.add(what, start.elapsed());
        result
    }

    /// A line that accounts for all of the time until now.
    pub fn text(&self) -> String {
        let all = self.start.elapsed();
        let known: Duration = self.parts.iter().map(|(_, time)| *time).sum();
        let parts = self.parts.iter().map(|(what, time)| format!("{what} {}", duration(*time)));
        let parts: Vec<_> = parts.chain([format!("other {}", duration(all.saturating_sub(known)))]).collect();
        format!("The whole run took {}: {}\n", duration(all), parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_of_one_name_are_one() {
        let mut phases = Phases::new();
        assert_eq!(phases.time("load", || 7), 7);
        phases.add("load", Duration::from_secs(2));
        phases.add("verify", Duration::from_secs(1));
        let text = phases.text();
        assert!(text.starts_with("The whole run took ") && text.contains(": load 2.000 s, verify 1.000 s, other "));
    }
}
