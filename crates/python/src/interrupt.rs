//! Work without the interpreter's lock, which Ctrl-C ends and of which Python sees the progress.

use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dmalane::dma::lock;
use dmalane::load::fill::Event;
use pyo3::prelude::*;

/// How often signals are looked for: Ctrl-C ends a load well within 200 ms.
const EVERY: Duration = Duration::from_millis(40);
/// Less than this is done before anybody could interrupt it, and starting a thread costs as much.
const INLINE: u64 = 1 << 20;

/// The messages to and from the worker.
#[derive(Default)]
pub(crate) struct Progress {
    cancelled: Arc<AtomicBool>,
    done: AtomicU64,
}

impl Progress {
    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes, and stops a job that was cancelled.
    pub(crate) fn advance(&self, bytes: u64) -> ControlFlow<()> {
        self.add(bytes);
        if self.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Counts what has arrived, and stops a job that was cancelled.
    pub(crate) fn watch(&self, event: &Event) -> ControlFlow<()> {
        self.advance(if let Event::Arrived { len, .. } = event { *len } else { 0 })
    }

    /// The flag that is set when the work is to stop.
    pub(crate) fn stop(&self) -> Arc<AtomicBool> {
        self.cancelled.clone()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Runs `work`, which is short, without the interpreter's lock; then looks for signals.
pub(crate) fn quietly<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let result = py.detach(work);
    py.check_signals().map(|()| result)
}

/// Runs `work` of `total` bytes on a thread of its own, without the interpreter's lock. Meanwhile this thread looks for
/// signals and calls `watch(done, total)`; an exception in either cancels the work and is returned once that has ended.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    total: u64,
    watch: Option<&Py<PyAny>>,
    work: impl FnOnce(&Progress) -> T + Send,
) -> PyResult<T> {
    let progress = Progress::default();
    if total <= INLINE && watch.is_none() {
        return quietly(py, || work(&progress));
    }
    let ended = AtomicBool::new(false);
    let mut stopped = None;
    let tell = |py: Python<'_>, done: u64| match watch {
        Some(watch) => watch.call1(py, (done, total)).map(drop),
        None => Ok(()),
    };
    let result = py.detach(|| {
        let (waiting, work) = (thread::current(), Mutex::new(Some(work)));
        let run = || {
            let work = lock(&work).take().expect("it is run once");
            let result = work(&progress);
            ended.store(true, Ordering::Release);
            waiting.unpark();
            result
        };
        thread::scope(|scope| {
            // Where the process may have no more threads, nobody looks for signals.
            let Ok(worker) = thread::Builder::new().spawn_scoped(scope, run) else { return run() };
            while !ended.load(Ordering::Acquire) && !worker.is_finished() {
                thread::park_timeout(EVERY);
                if stopped.is_none() {
                    let done = progress.done.load(Ordering::Relaxed);
                    let go_on = Python::attach(|py| py.check_signals().and_then(|()| tell(py, done)));
                    if let Err(error) = go_on {
                        progress.cancel();
                        stopped = Some(error);
                    }
                }
            }
            worker.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    });
    match stopped {
        Some(error) => Err(error),
        None => tell(py, total).map(|()| result),
    }
}
