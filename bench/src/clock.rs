//! Turns: all variants of a case, round by round, on one processor.

use std::time::Instant;

/// Ties this thread to the last processor it may use, so that rounds compare like with like.
pub fn pin() {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return };
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|&cpu| set.is_set(cpu));
    let mut one = rustix::thread::CpuSet::new();
    if let Some(cpu) = last {
        one.set(cpu);
        // Where it is not allowed, the rounds are only noisier.
        let _ = rustix::thread::sched_setaffinity(None, &one);
    }
}

/// How long it takes, in seconds.
pub fn time(job: impl FnOnce()) -> f64 {
    let start = Instant::now();
    job();
    start.elapsed().as_secs_f64()
}
