//! The daemon's threads: their priority, and their processor time, for which users pay.

use std::cell::Cell;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Lowers the priority of this thread (nice 10) below the worker's, whose time is what users share. `dmalane.slice`
/// weighs ten times as much as `user.slice`: at full priority, a user could have this thread take processors from other
/// users' processes.
pub(crate) fn yield_to_worker() {
    // It may always get less.
    let _ = rustix::process::setpriority_process(None, 10);
}

/// Processor time of this thread so far.
pub(crate) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Processor time of this thread since the last call.
pub(crate) fn take_time() -> Duration {
    thread_local!(static TAKEN: Cell<Duration> = const { Cell::new(Duration::ZERO) });
    let now = thread_time();
    now.saturating_sub(TAKEN.replace(now))
}
