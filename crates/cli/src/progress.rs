//! Progress bars on stderr.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// As wide as the terminal, however wide that is.
const TEMPLATE: &str = "{prefix} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {decimal_bytes_per_sec}, {eta} left";
const STEPS: &str = "{prefix} [{bar:30}] {pos}/{len} {wide_msg}";

/// Bytes done of bytes known, with rate and time left; or steps. It disappears when finished or dropped, so that what
/// is printed next starts on a clean line.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for `what`, shown if `wanted` and somebody is watching stderr.
    pub fn new(what: &'static str, wanted: bool) -> Self {
        Self(bar(TEMPLATE, what, wanted))
    }

    /// A bar of steps, each with what it is about.
    pub fn steps(what: &'static str, wanted: bool) -> Self {
        Self(bar(STEPS, what, wanted))
    }

    /// Adds to the total number of steps.
    pub fn more_steps(&self, steps: usize) {
        self.0.inc_length(steps as u64);
    }

    /// Completes the current step, if any, and begins this one.
    pub fn step(&self, what: String) {
        self.0.set_message(what);
        self.0.inc(1);
    }

    /// Sets the total number of bytes.
    pub fn set_length(&self, bytes: u64) {
        self.0.set_length(bytes);
    }

    /// Adds to the bytes that are done.
    pub fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// Counts what is written to `to`.
    pub fn writing<W: Write>(&self, to: W) -> impl Write {
        self.0.wrap_write(to)
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
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
