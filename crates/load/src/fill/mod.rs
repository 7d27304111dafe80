//! The engine of all reading: bytes of files arrive in buffers, chunk by chunk, and go on to a sink.
//!
//! A job ([`Job`]) names buffers and the ranges of files that are read into them. Buffers that stay ([`BufferMemory`])
//! are reserved as wholes and made present chunk by chunk, so that reads into one chunk are in flight while the next
//! one is being allocated; small pages behind a memfd are filled from landing places instead. A load onto a device
//! uses the slots of a few [`Staging`] buffers. Bytes that have arrived are hashed, if checksums are on, in the order
//! of their buffer while they are in the processor's cache; large jobs have a thread for that, or several for
//! SHA-256, where there is a processor that neither workers nor the device need. On their way to a device they are
//! transferred right after that; a buffer that stays is rejoined in the end.
//!
//! Workers do this, each with queues of its own to all files: one worker where the kernel or the disk does the work,
//! several where the processor copies out of the page cache. One worker runs on the thread of the caller and needs no
//! other.
//!
//! In the order in which these modules use each other: `job`, `options` and `error`; `memory` and `landing` places;
//! `fragment`; `sink`; the `supply` of memory, the `order` of hashing, and `progress`, which `state` joins; what is
//! done with it, `claim` and `hashing`; how much at once, `depth` and `crew`; `worker`.

mod claim;
mod crew;
mod depth;
mod error;
mod filled;
mod fragment;
mod hash;
mod hash_thread;
mod hashing;
mod job;
mod landing;
mod memory;
mod options;
mod order;
mod progress;
mod sink;
mod state;
mod supply;
mod watch;
mod worker;

use std::thread::Builder;
use std::time::Instant;

use dmalane_addr::FileOffset;
use dmalane_queue::Queue;

use crate::clock::Clocks;
use state::State;
use worker::Worker;

pub(crate) use depth::LATE;
pub use error::FillError;
pub(crate) use error::broken;
pub use filled::{FillReport, Filled, FilledBuf};
pub use hash::Digest;
pub use job::{Extent, Job};
pub use memory::{BufferMemory, FillCached, Staging};
pub(crate) use memory::{InPlace, ask, register};
pub use options::{FillOptions, HashRegions};
pub use sink::{Sink, Target, Targets, ToDevice};
pub(crate) use state::Done;
pub use watch::{Event, Watch};

/// Fills buffers as `job` says and hands them to a sink. `workers` has a set of queues for each worker, each with one
/// queue per source.
///
/// # Errors
/// [`FillError`]. Every read and transfer in flight has ended by then, or stays with its queue; the memory is freed as
/// soon as that is the case.
///
/// # Panics
/// When there is no worker.
pub fn fill<'a, S: Queue<Addr = FileOffset>>(
    sink: Sink<'a>,
    job: &'a Job,
    workers: &mut [Vec<S>],
    options: &'a FillOptions,
    watch: &'a mut Watch<'_>,
) -> Result<Filled, FillError> {
    let start = Instant::now();
    let workers = Workers { queues: workers, all: true, late: false };
    Ok(run(start, sink, job, workers, options, watch)?.filled(start, job))
}

/// Those who do a job.
pub(crate) struct Workers<'w, S> {
    /// A set of queues for each.
    pub queues: &'w mut [Vec<S>],
    /// All of them work; else as many as make the bytes come faster.
    pub all: bool,
    /// The sources were seen to have latency.
    pub late: bool,
}

/// As [`fill`], of a job that began at `start`.
pub(crate) fn run<'a, S: Queue<Addr = FileOffset>>(
    start: Instant,
    sink: Sink<'a>,
    job: &'a Job,
    Workers { queues: workers, all, late }: Workers<'_, S>,
    options: &'a FillOptions,
    watch: &'a mut Watch<'_>,
) -> Result<Done, FillError> {
    let sources = workers.iter().map(Vec::len).min().expect("at least one worker");
    let state = State::new(start, sink, job, (workers.len(), all, sources, late), options, watch)?;
    let (first, others) = workers.split_first_mut().expect("at least one worker");
    let clocks = |name: String| Clocks::recording(&name, options.epoch(start));
    let clocks = if others.is_empty() && !state.hash_thread.runs() {
        let clocks = Worker::new(&state, (first, 0), clocks("worker 0".to_owned())).run();
        state.drain(clocks)
    } else {
        std::thread::scope(|scope| {
            let state = &state;
            // Where the process may have no more threads, those that there are do the work.
            let hash = |i| {
                let clocks = clocks(if i == 1 { "hashing".to_owned() } else { format!("hashing {i}") });
                Builder::new().spawn_scoped(scope, move || state.hash_in_background(clocks)).ok()
            };
            let hashers: Vec<_> = (1..=state.hash_thread.count()).map_while(hash).collect();
            if hashers.is_empty() {
                state.hash_thread.leave_out();
            }
            let done = NothingComes(state);
            let named = |(queues, i)| ((queues, i), clocks(format!("worker {i}")));
            let threads: Vec<_> = others
                .iter_mut()
                .map(Vec::as_mut_slice)
                .zip(1..)
                .map(named)
                .map(|(queues, clocks)| move || Worker::new(state, queues, clocks).run())
                .map_while(|work| Builder::new().spawn_scoped(scope, work).ok())
                .collect();
            let mut clocks = Worker::new(state, (first, 0), clocks("worker 0".to_owned())).run();
            let add = |clocks: &mut Clocks, thread: std::thread::ScopedJoinHandle<'_, Clocks>| match thread.join() {
                Ok(other) => clocks.add(other),
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().for_each(|thread| add(&mut clocks, thread));
            clocks = state.drain(clocks);
            drop(done);
            hashers.into_iter().for_each(|thread| add(&mut clocks, thread));
            clocks
        })
    };
    state.finish(clocks)
}

/// Tells the thread that hashes when workers have ended and the device has everything, or when there was a panic.
struct NothingComes<'s, 'a, 'w>(&'s State<'a, 'w>);

impl Drop for NothingComes<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.nothing_comes();
    }
}
