//! Progress bars on stderr.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::layout::wrap;
use crate::size::duration;

/// As wide as the terminal, however wide that is.
const TEMPLATE: &str = "{prefix} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {decimal_bytes_per_sec}, {eta} left";
const STEPS: &str = "{prefix} [{bar:30}] {pos}/{len} {wide_msg}";

/// Bytes done of bytes known, with rate and time left; or steps. It disappears when finished or dropped, so that what
/// is printed next starts on a clean line.
///
/// Each is a phase of the command: [`whole_time`] has those that were finished.
pub struct Progress {
    bar: ProgressBar,
    what: &'static str,
    begun: Instant,
}

/// When the command began.
static BEGUN: OnceLock<Instant> = OnceLock::new();

/// The phases that were finished, in the order of the first of each name.
static PHASES: Mutex<Vec<(&str, Duration)>> = Mutex::new(Vec::new());

/// Notes that the command begins.
pub fn begin() {
    BEGUN.get_or_init(Instant::now);
}

/// A sentence: the time since the command began, and its phases.
pub fn whole_time() -> String {
    let whole = BEGUN.get_or_init(Instant::now).elapsed();
    let mut phases = PHASES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let rest = whole.saturating_sub(phases.iter().map(|(_, time)| *time).sum());
    phases.push(("the rest", rest));
    let phases: Vec<String> = phases.iter().map(|(what, time)| format!("{what} {}", duration(*time))).collect();
    wrap(&format!("The whole command took {}: {}.", duration(whole), phases.join(", ")), 0)
}

impl Progress {
    /// A bar for `what`, shown if `wanted` and somebody is watching stderr.
    pub fn new(what: &'static str, wanted: bool) -> Self {
        Self { bar: bar(TEMPLATE, what, wanted), what, begun: Instant::now() }
    }

    /// A bar of steps, each with what it is about.
    pub fn steps(what: &'static str, wanted: bool) -> Self {
        Self { bar: bar(STEPS, what, wanted), what, begun: Instant::now() }
    }

    /// Adds to the total number of steps.
    pub fn more_steps(&self, steps: usize) {
        self.bar.inc_length(steps as u64);
    }

    /// Completes the current step, if any, and begins this one.
    pub fn step(&self, what: String) {
        self.bar.set_message(what);
        self.bar.inc(1);
    }

    /// Sets the total number of bytes.
    pub fn set_length(&self, bytes: u64) {
        self.bar.set_length(bytes);
    }

    /// Adds to the bytes that are done.
    pub fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Counts what is written to `to`.
    pub fn writing<W: Write>(&self, to: W) -> impl Write {
        self.bar.wrap_write(to)
    }

    /// Removes the bar: the phase is over.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
        let mut phases = PHASES.lock().unwrap_or_else(PoisonError::into_inner);
        match phases.iter_mut().find(|(what, _)| *what == self.what) {
            Some((_, time)) => *time += self.begun.elapsed(),
            None => phases.push((self.what, self.begun.elapsed())),
        }
    }
}

/// A bar on stderr, hidden unless `wanted` and somebody is watching.
fn bar(template: &str, what: &'static str, wanted: bool) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    // A test reads the templates; and a plain bar is still a bar.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_prefix(what);
    bar.with_finish(ProgressFinish::AndClear)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_everything_is_no_panic() {
        for wanted in [false, true] {
            let bar = Progress::new("load", wanted);
            bar.set_length(10);
            bar.advance(7);
            bar.advance(u64::MAX / 2);
            bar.set_length(0);
            bar.finish();
            bar.advance(1);
        }
    }

    #[test]
    fn the_template_is_one() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok() && ProgressStyle::with_template(STEPS).is_ok());
    }

    #[test]
    fn threads_may_share_it() {
        fn shared<T: Send + Sync>() {}
        shared::<Progress>();
    }
}
