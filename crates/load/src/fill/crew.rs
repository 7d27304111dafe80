//! How many workers take chunks: as many as make the bytes come faster.
//!
//! Copies out of the page cache are the processors' work, until memory, the device or one stream of hashing is as fast
//! as it gets. Further workers would only keep processors from others.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_dma::lock;

/// A quarter of the workers begin, but at least so many.
const FIRST: usize = 4;
/// Bytes for each worker in a turn, whose rate is measured.
const EACH: u64 = 16 << 20;
/// The longest that a worker rests before it looks whether the job is over.
const REST: Duration = Duration::from_millis(20);
/// More workers stay if the rate has grown by this factor.
const SOME: f64 = 1.1;

/// The workers of a job that may take chunks: those with the lowest numbers.
pub(super) struct Crew {
    limit: AtomicUsize,
    /// How many there are.
    pub all: usize,
    /// Their number is not found yet.
    measures: AtomicBool,
    turn: Mutex<Turn>,
    /// There may be more.
    changed: Condvar,
}

/// The turn that is being measured.
struct Turn {
    limit: usize,
    most: usize,
    /// The highest limit until now.
    reached: usize,
    /// The limit before there were more, and its rate.
    fewer: Option<(usize, f64)>,
    /// When the first bytes of this turn came.
    began: Option<Instant>,
    bytes: u64,
}

impl Crew {
    /// So many workers: `all` of them, or as many as measuring finds.
    pub fn new(workers: usize, all: bool) -> Self {
        let turn = Turn::new(workers, all);
        Self {
            limit: AtomicUsize::new(turn.limit),
            all: workers,
            measures: AtomicBool::new(turn.limit < workers),
            turn: Mutex::new(turn),
            changed: Condvar::new(),
        }
    }

    /// Bytes have arrived.
    pub fn arrived(&self, bytes: u64) {
        if !self.measures.load(Ordering::Relaxed) {
            return;
        }
        let mut turn = lock(&self.turn);
        // Another worker may have found it.
        if self.measures.load(Ordering::Relaxed) {
            let before = turn.limit;
            self.measures.store(turn.arrived(bytes, Instant::now()), Ordering::Relaxed);
            if turn.limit != before {
                self.limit.store(turn.limit, Ordering::Relaxed);
                self.changed.notify_all();
            }
        }
    }

    /// Workers that may take chunks.
    pub fn at_work(&self) -> usize {
        self.limit.load(Ordering::Relaxed).min(self.all)
    }

    /// Whether this worker takes no chunks for now.
    pub fn rests(&self, worker: usize) -> bool {
        worker >= self.limit.load(Ordering::Relaxed)
    }

    /// Waits a while for a worker to be needed.
    pub fn rest(&self, worker: usize) {
        let waited = self.changed.wait_timeout_while(lock(&self.turn), REST, |_| self.rests(worker));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// A worker has nothing left to do: others need not wait for more.
    pub fn disband(&self) {
        let _turn = lock(&self.turn);
        self.measures.store(false, Ordering::Relaxed);
        self.limit.store(usize::MAX, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// The most that worked at once, before there was nothing left to do.
    pub fn reached(&self) -> usize {
        lock(&self.turn).reached
    }
}

impl Turn {
    fn new(most: usize, all: bool) -> Self {
        let limit = if all { most } else { (most / 4).max(FIRST).min(most) };
        Self { limit, most, reached: limit, fewer: None, began: None, bytes: 0 }
    }

    /// Bytes have arrived: whether the number is still to be found.
    fn arrived(&mut self, bytes: u64, now: Instant) -> bool {
        let Some(began) = self.began else {
            self.began = Some(now);
            return true;
        };
        self.bytes += bytes;
        if self.bytes < EACH * self.limit as u64 {
            return true;
        }
        let rate = self.bytes as f64 / (now - began).as_secs_f64().max(1e-9);
        (self.began, self.bytes) = (Some(now), 0);
        match self.fewer {
            Some((fewer, before)) if rate < before * SOME => self.limit = fewer,
            _ if self.limit == self.most => {}
            _ => {
                self.fewer = Some((self.limit, rate));
                self.limit = (2 * self.limit).min(self.most);
                self.reached = self.limit;
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};
    use std::ops::ControlFlow;

    use dmalane_dma::AnonHeap;
    use dmalane_file::{FileOptions, FileQueue, Mode};

    use super::*;
    use crate::fill::{BufferMemory, FillOptions, Job, Sink, Workers, run};

    const CHUNK: u64 = 2 << 20;

    /// Copies `gib` where a worker copies 8 GB/s, and all together at most `most`. Returns the time beside that of the
    /// best number of workers, and the number in the end.
    fn copy(processors: usize, most: f64, gib: u64) -> (f64, usize) {
        let rate = |workers: usize| (workers as f64 * 8e9).min(most);
        let (mut turn, start) = (Turn::new(processors, false), Instant::now());
        let (mut now, mut measures) = (start, true);
        for _ in 0..(gib << 30) / CHUNK {
            now += Duration::from_secs_f64(CHUNK as f64 / rate(turn.limit));
            measures = measures && turn.arrived(CHUNK, now);
        }
        ((now - start).as_secs_f64() / ((gib << 30) as f64 / rate(processors)), turn.limit)
    }

    #[test]
    fn as_many_as_make_the_bytes_come_faster() {
        for processors in [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64] {
            for most in [10e9, 20e9, 50e9, 100e9, 200e9, 1e12] {
                let (took, found) = copy(processors, most, 16);
                assert!(took < 1.15, "{processors} processors, {most} B/s: {took} of the best, {found}");
                // No more than twice what is needed, beside those that begin.
                let needed = (most / 8e9).ceil() as usize;
                assert!(found <= (2 * needed).max(processors / 4).max(FIRST), "{processors}, {most}: {found}");
            }
        }
    }

    #[test]
    fn who_is_asked_for_or_among_few_does_not_wait() {
        for (crew, workers) in [(Crew::new(64, true), 64), (Crew::new(4, false), 4), (Crew::new(1, false), 1)] {
            assert!((0..workers).all(|worker| !crew.rests(worker)) && crew.reached() == workers);
            crew.arrived(1 << 40);
            assert_eq!(crew.reached(), workers);
        }
        let crew = Crew::new(64, false);
        assert!(!crew.rests(15) && crew.rests(16));
        crew.disband();
        assert!(!crew.rests(63));
    }

    #[test]
    fn a_job_is_done_by_all_of_its_workers_or_by_some() {
        const LEN: u64 = 200 << 20;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        let marks: Vec<u64> = (0..LEN).step_by(999_983).collect();
        for at in &marks {
            file.seek(SeekFrom::Start(*at)).unwrap();
            file.write_all(&at.to_le_bytes()).unwrap();
        }
        for (all, checksum) in [(true, false), (false, false), (false, true)] {
            let options = FileOptions { mode: Mode::Buffered, ..FileOptions::default() };
            let queues = (0..16).map(|_| vec![FileQueue::open(file.path(), options).unwrap()]);
            let (mut queues, job) = (queues.collect::<Vec<_>>(), Job::whole(&[LEN]));
            let workers = Workers { queues: &mut queues, all, late: false };
            let memory = BufferMemory { heap: &AnonHeap::new(), cached: None, direct: false };
            let options = FillOptions { checksum, ..FillOptions::default() };
            let mut watch = |_| ControlFlow::Continue(());
            let done = run(Instant::now(), Sink::Memory(memory), &job, workers, &options, &mut watch).unwrap();
            let range = if all { 16..=16 } else { FIRST..=16 };
            assert!(range.contains(&done.workers), "{}", done.workers);
            let view = done.whole[0].as_volatile_slice();
            for at in &marks {
                let mut mark = [0; 8];
                view.sub(*at as usize, 8).unwrap().read(&mut mark);
                assert_eq!(u64::from_le_bytes(mark), *at);
            }
        }
    }
}
