//! Turns: all variants of a case, round by round, on one processor.

use std::sync::OnceLock;
use std::time::Instant;

/// Ties this thread to the last processor it may use, so that rounds compare like with like.
pub fn pin() {
    pin_to(0);
}

/// Ties this thread to the n-th processor from the last that this process may use.
pub fn pin_to(n: usize) {
    // Of the process: the thread that calls may be tied already.
    let Ok(set) = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())) else { return };
    let mut one = rustix::thread::CpuSet::new();
    if let Some(cpu) = (0..rustix::thread::CpuSet::MAX_CPU).rev().filter(|&cpu| set.is_set(cpu)).nth(n) {
        one.set(cpu);
        // Where it is not allowed, the rounds are only noisier.
        let _ = rustix::thread::sched_setaffinity(None, &one);
    }
}

/// Processor time that this thread has used, in seconds.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// How long it takes, in seconds.
pub fn time(job: impl FnOnce()) -> f64 {
    let start = Instant::now();
    job();
    start.elapsed().as_secs_f64()
}

/// How much of the processor it takes, in seconds, less what looking costs: for samples in which other programs get
/// their turn.
pub fn cpu_time(job: impl FnOnce()) -> f64 {
    static LOOK: OnceLock<f64> = OnceLock::new();
    let took = |job: &mut dyn FnMut()| {
        let start = cpu_seconds();
        job();
        cpu_seconds() - start
    };
    let look = *LOOK.get_or_init(|| {
        let mut empty: Vec<f64> = (0..1001).map(|_| took(&mut || ())).collect();
        empty.sort_by(f64::total_cmp);
        empty[empty.len() / 2]
    });
    let mut job = Some(job);
    (took(&mut || job.take().expect("called once")()) - look).max(0.0)
}
