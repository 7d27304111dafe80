//! The state that workers share: what has arrived, who is told, where it goes, and whether to go on.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{SharedBuf, lock};

use super::crew::Crew;
use super::error::{Failed, FillError, broken};
use super::filled::{FillReport, Filled, FilledBuf};
use super::fragment::{Fragment, Tag};
use super::hash::{Hasher, Hashes};
use super::hash_thread::HashThreads;
use super::job::Job;
use super::memory::FillCached;
use super::options::FillOptions;
use super::order::LANE;
use super::progress::Progress;
use super::sink::{DeviceSink, Sink};
use super::supply::Supply;
use super::watch::{Event, Watch};
use crate::clock::Clocks;

/// The state that workers share.
///
/// While `watch` is locked, `progress` and the lock of `supply` may be taken, one at a time; all other locks are taken
/// alone.
pub(super) struct State<'a, 'w> {
    pub options: &'a FillOptions,
    deadline: Option<Instant>,
    pub lens: &'a [u64],
    total: u64,
    pub supply: Supply<'a>,
    pub cached: Option<&'a dyn FillCached>,
    /// Reads are copies out of the page cache into memory that stays, and not the disk's work.
    pub copies: bool,
    /// The sources have latency.
    pub late: bool,
    pub crew: Crew,
    pub first_read: OnceLock<Instant>,
    pub progress: Mutex<Progress>,
    pub hash_thread: HashThreads,
    pub device: Option<DeviceSink<'a>>,
    watch: Mutex<&'a mut Watch<'w>>,
    pub stop: AtomicBool,
}

/// A job that is done.
pub(crate) struct Done {
    /// The buffers; none of staging memory.
    pub whole: Vec<SharedBuf>,
    pub hashes: Vec<Hashes>,
    pub first_read: Option<Instant>,
    pub recycled: bool,
    /// The most workers at once.
    pub workers: usize,
    pub clocks: Clocks,
}

impl Done {
    /// The buffers of a job that began at `start`, and its report; of staging memory, the hashes of what passed it.
    pub fn filled(mut self, start: Instant, job: &Job) -> Filled {
        let report = FillReport {
            bytes: job.bytes(),
            wall: start.elapsed(),
            first_chunk: self.first_read.map_or(Duration::ZERO, |at| at - start),
            stages: self.clocks.stages().filter(|s| s.bytes > 0).collect(),
            workers: self.workers,
            backing: self.whole.first().map(|buf| buf.backing().clone()),
            recycled: self.recycled,
            timeline: self.clocks.timeline(),
        };
        let buffers = self.whole.into_iter().zip(&job.buffers);
        let hashed = |((buf, len), hashes): ((SharedBuf, &u64), _)| FilledBuf::hashed(buf, *len as usize, hashes);
        let stay = buffers.len();
        let mut hashes = self.hashes.into_iter();
        let buffers = buffers.zip(hashes.by_ref().take(stay)).map(hashed).collect();
        let gone = hashes.map(|hashes| hashes.digests).collect();
        Filled { buffers, gone, report }
    }
}

/// The longest sleep before everything is polled again.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl<'a, 'w> State<'a, 'w> {
    pub fn new(
        start: Instant,
        sink: Sink<'a>,
        job: &'a Job,
        (workers, all, sources, late): (usize, bool, usize, bool),
        options: &'a FillOptions,
        watch: &'a mut Watch<'w>,
    ) -> Result<Self, FillError> {
        let plan = job.by_buffer(sources)?;
        let (supply, device, cached, copies) = match sink {
            Sink::Memory(memory) => {
                (Supply::of_buffers(memory, job, plan, options)?, None, memory.cached, !memory.direct)
            }
            Sink::Staging(staging, device) => (Supply::of_staging(staging, job, plan, options), device, None, false),
        };
        let (buffers, there) = (job.buffers.len(), device.as_ref().map(|to| to.targets.buffers()));
        if let Some(there) = there.filter(|there| *there != buffers) {
            let text = format!("{buffers} buffers are to go to {there} places on the device");
            return Err(FillError::Job(text));
        }
        let total = job.bytes();
        let crew = Crew::new(workers, all);
        let workers = crew.at_work();
        let hash_thread = HashThreads::new(options, device.as_ref(), (total, supply.piece()), workers, copies);
        let at_once = if options.takes_sha256() && device.is_none() { hash_thread.count().max(workers) } else { 1 };
        let progress = Progress::new(job, options, (at_once > 1).then_some(LANE));
        let supply = match supply.stays || at_once == 1 {
            true => supply,
            // What is read goes at once, so what several threads hash has to come at the same time.
            false => supply.in_lanes(progress.order.lanes(), at_once),
        };
        Ok(Self {
            options,
            deadline: options.time_limit.and_then(|limit| start.checked_add(limit)),
            lens: &job.buffers,
            total,
            cached,
            copies,
            late,
            crew,
            first_read: OnceLock::new(),
            progress: Mutex::new(progress),
            hash_thread,
            supply,
            device: device.map(|to| DeviceSink::new(to, options, start)),
            watch: Mutex::new(watch),
            stop: AtomicBool::new(false),
        })
    }

    /// Whether to give up, checking the deadline.
    pub fn stopped(&self) -> bool {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let (done, undelivered) = {
                let progress = lock(&self.progress);
                (progress.done, progress.undelivered)
            };
            if done < self.total || undelivered > 0 {
                self.fail(((usize::MAX, 0), FillError::Deadline { done, of: self.total }));
            }
        }
        self.stop.load(Ordering::Relaxed)
    }

    /// Notes a failure, and stops the job.
    pub fn fail(&self, failed: Failed) {
        let mut progress = lock(&self.progress);
        progress.fail(failed);
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn tell(&self, event: Event) {
        self.tell_to(&mut **lock(&self.watch), event);
    }

    fn tell_to(&self, watch: &mut Watch<'_>, event: Event) {
        if watch(event) == ControlFlow::Break(()) {
            let done = lock(&self.progress).done;
            self.fail(((usize::MAX, 0), FillError::Cancelled { done, of: self.total }));
        }
    }

    /// A read begins; the first one is noted.
    pub fn reading(&self) {
        self.first_read.get_or_init(Instant::now);
    }

    /// Takes a fragment that was read.
    pub fn arrived(&self, fragment: Fragment) {
        if fragment.tag.landed.is_some() {
            return self.landed(fragment);
        }
        let Tag { buffer, offset, .. } = fragment.tag;
        let len = fragment.slice.len() as u64;
        self.crew.arrived(len);
        let sent = {
            // Held from here on, so that workers tell events in the order in which they count bytes.
            let mut watch = lock(&self.watch);
            let mut progress = lock(&self.progress);
            progress.done += len;
            let sent = self.sort(&mut progress, fragment);
            drop(progress);
            self.tell_to(&mut **watch, Event::Arrived { buffer, offset: offset as u64, len });
            sent
        };
        sent.into_iter().for_each(|fragment| self.send(fragment));
    }

    /// Takes a fragment in its landing place, which is copied with its chunk.
    pub fn landed(&self, Fragment { tag, slice }: Fragment) {
        if let (Some(landing), Some(landed)) = (&self.supply.landing, &tag.landed) {
            landing.add(landed, tag.offset, tag.is_read, slice);
        }
    }

    /// Takes a fragment whose bytes are final. It is hashed first, if checksums are on, when its turn comes.
    pub fn settle(&self, fragment: Fragment) {
        let sent = self.sort(&mut lock(&self.progress), fragment);
        sent.into_iter().for_each(|fragment| self.send(fragment));
    }

    /// As [`State::settle`]; returns the fragment if it is to be sent on at once.
    fn sort(&self, progress: &mut Progress, fragment: Fragment) -> Option<Fragment> {
        if self.device.is_some() {
            progress.undelivered += fragment.slice.len() as u64;
        }
        if !Hasher::is_wanted(self.options) {
            return self.keep_hashed(progress, fragment);
        }
        progress.order.add(fragment);
        if self.hash_thread.runs() && progress.order.is_behind(self.hash_thread.leaves) {
            // Of several lanes it may be the turn.
            self.hash_thread.hashable.notify_all();
        }
        None
    }

    /// Keeps a fragment that is not to be hashed any more, if its memory stays; else returns it, to be sent.
    pub fn keep_hashed(&self, progress: &mut Progress, fragment: Fragment) -> Option<Fragment> {
        if !self.supply.stays {
            return Some(fragment);
        }
        if fragment.tag.is_read {
            self.supply.unsent.fetch_sub(1, Ordering::Relaxed);
        }
        progress.order.keep(fragment);
        None
    }

    /// Hands a fragment, whose memory does not stay, to the sink.
    pub fn send(&self, fragment: Fragment) {
        if fragment.tag.is_read {
            self.supply.unsent.fetch_sub(1, Ordering::Relaxed);
        }
        match &self.device {
            Some(device) => {
                self.supply.sent.fetch_add(fragment.slice.len(), Ordering::Relaxed);
                device.take(fragment);
            }
            None => self.supply.put_back(fragment),
        }
    }

    /// Drives the device, if there is one: see [`DeviceSink::drive`]. True when anything came back.
    pub fn drive(&self, timeout: Duration) -> bool {
        let Some(device) = &self.device else { return false };
        let (mut back, was_full) = (Vec::new(), device.is_full());
        if let Err(failed) = device.drive(&mut back, timeout) {
            self.fail(failed);
        }
        if self.hash_thread.runs() && was_full && !device.is_full() {
            // Under the lock, so that it is not between looking and waiting.
            let _progress = lock(&self.progress);
            self.hash_thread.hashable.notify_one();
        }
        let any = !back.is_empty();
        for (fragment, moved) in back {
            let Tag { buffer, offset, .. } = fragment.tag;
            let len = fragment.slice.len() as u64;
            let mut watch = lock(&self.watch);
            lock(&self.progress).undelivered -= len;
            self.supply.sent.fetch_sub(fragment.slice.len(), Ordering::Relaxed);
            self.supply.put_back(fragment);
            if moved {
                self.tell_to(&mut **watch, Event::OnDevice { buffer, offset: offset as u64, len });
            }
        }
        any
    }

    /// Rejoins everything when the device has let go of it, or returns the failure.
    pub fn finish(mut self, mut clocks: Clocks) -> Result<Done, FillError> {
        if let Some(device) = self.device.take() {
            device.quiesce();
            clocks.add(device.into_clocks());
        }
        let (stays, recycled) = (self.supply.stays, self.supply.is_recycled());
        let (first_read, workers) = (self.first_read.into_inner(), self.crew.reached());
        drop(self.supply);
        let progress = self.progress.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (mut whole, mut hashes) = (Vec::new(), Vec::new());
        for (of_buffer, buf) in progress.into_order()?.into_buffers() {
            hashes.push(of_buffer);
            match buf {
                // Every chunk was taken, and every fragment of it has arrived.
                None if stays => {
                    let (at, error) = (FileOffset::new(0), broken("it did not return all of its memory"));
                    return Err(FillError::Read { source_index: 0, at, error });
                }
                buf => whole.extend(buf),
            }
        }
        Ok(Done { whole, hashes, first_read, recycled, workers, clocks })
    }
}
