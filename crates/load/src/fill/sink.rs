//! Where bytes go when they have arrived: they stay in memory, or go on to a device.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use dmalane_dma::lock;
use dmalane_queue::{
    Completion, DeviceAddr, HaltWatch, OpError, Operation, Queue, RELEASE_TIMEOUT, Refusal, Refused, StallWatch,
    Ticket, drain,
};

use super::error::{Failed, FillError, not_submitted};
use super::fragment::{Fragment, Tag};
use super::memory::{BufferMemory, Staging};
use super::options::FillOptions;
use crate::clock::Clocks;
use crate::stage::Stage;

/// Where bytes go when they have arrived, and were hashed if checksums are on.
pub enum Sink<'a> {
    /// They stay in their buffers.
    Memory(BufferMemory<'a>),
    /// A chunk is a slot of a staging buffer. A device, if there is one, gets each fragment while the ones behind it
    /// are still being read; then the slot is used again.
    Staging(&'a mut Staging, Option<ToDevice<'a>>),
}

/// A device that gets the bytes of a job.
pub struct ToDevice<'a> {
    /// The device's queue, with nothing in flight. Transfers that a failed job could not wait for stay in flight on it.
    pub queue: &'a mut (dyn Queue<Addr = DeviceAddr> + 'a),
    /// True when the queue works inside `poll`, so that only time spent there is its time.
    pub polled: bool,
    /// Processors that the device needs for itself while it works, as [`DeviceInfo`](dmalane_device::DeviceInfo) says.
    pub processors: usize,
    /// Where the bytes go. Bytes that no extent names go there too, as zeroes.
    pub targets: &'a dyn Targets,
}

/// Bytes with one destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// Bytes; at least one.
    pub len: u64,
    /// Where the first of them goes; `None` for bytes that stay on the host, such as a header.
    pub to: Option<DeviceAddr>,
}

/// Maps ranges of buffers to device addresses.
pub trait Targets: Sync {
    /// Buffers that have a destination.
    fn buffers(&self) -> usize;

    /// Cuts a range of a buffer, which is not empty, into targets of at most `max_len` bytes each, in order and without
    /// gaps.
    ///
    /// # Errors
    /// [`Refusal`] when there are no such addresses.
    fn cut(&self, buffer: usize, range: Range<u64>, max_len: u64, out: &mut VecDeque<Target>) -> Result<(), Refusal>;
}

/// Fragments that the sink is done with: true when the device has them, false for bytes without a destination.
pub(super) type Back = Vec<(Fragment, bool)>;

/// The device end that the workers share: any of them hands fragments to it, and one at a time drives it.
pub(super) struct DeviceSink<'a> {
    queue: Mutex<VecDeque<Fragment>>,
    /// The device had no room for the next transfer.
    full: AtomicBool,
    end: Mutex<End<'a>>,
}

struct End<'a> {
    queue: &'a mut (dyn Queue<Addr = DeviceAddr> + 'a),
    polled: bool,
    targets: &'a dyn Targets,
    /// The rest of the fragment that is being cut, and its targets.
    rest: Option<Fragment>,
    cut: VecDeque<Target>,
    /// The next transfer, waiting for room.
    next: Option<(Tag, Operation)>,
    /// Transfers in flight.
    flying: HashMap<Ticket, Tag>,
    halt: HaltWatch,
    stall: StallWatch,
    /// Time in which the device may end nothing, and to wait for transfers in flight after a failure.
    timeout: Duration,
    clocks: Clocks,
}

impl<'a> DeviceSink<'a> {
    pub fn new(to: ToDevice<'a>, options: &FillOptions, start: Instant) -> Self {
        let ToDevice { queue, polled, targets, .. } = to;
        let end = End {
            queue,
            polled,
            targets,
            rest: None,
            cut: VecDeque::new(),
            next: None,
            flying: HashMap::new(),
            halt: HaltWatch::default(),
            stall: StallWatch::default(),
            timeout: options.timeout,
            clocks: Clocks::recording("device", options.epoch(start)),
        };
        Self { queue: Mutex::default(), full: AtomicBool::new(false), end: Mutex::new(end) }
    }

    /// Takes a fragment that is not empty.
    pub fn take(&self, fragment: Fragment) {
        lock(&self.queue).push_back(fragment);
    }

    /// True while the device has no room.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Hands the device what it has room for, and takes back what has ended, waiting up to `timeout`. Does
    /// nothing while another worker is at it.
    ///
    /// # Errors
    /// The failure that lies first, of those seen in this call; what came back before is in `back` all the same.
    pub fn drive(&self, back: &mut Back, timeout: Duration) -> Result<(), Failed> {
        let mut end = match self.end.try_lock() {
            Ok(end) => end,
            Err(TryLockError::Poisoned(end)) => end.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        end.submit(self, back)?;
        // Bytes that stay here are back without any waiting.
        end.reap(back, if back.is_empty() { timeout } else { Duration::ZERO })?;
        end.submit(self, back)
    }

    /// Waits for transfers in flight; those that do not end stay with their queue.
    pub fn quiesce(&self) {
        lock(&self.queue).clear();
        let mut end = lock(&self.end);
        (end.next, end.rest) = (None, None);
        let timeout = end.timeout;
        drain(end.queue, timeout);
        end.flying.clear();
    }

    pub fn into_clocks(self) -> Clocks {
        self.end.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).clocks
    }
}

impl End<'_> {
    fn submit(&mut self, device: &DeviceSink<'_>, back: &mut Back) -> Result<(), Failed> {
        loop {
            let (tag, operation) = match self.next.take() {
                Some(next) => next,
                None => match self.next_transfer(&device.queue, back)? {
                    Some(next) => next,
                    None => break,
                },
            };
            let queue = &mut *self.queue;
            let submitted = match self.polled {
                true => self.clocks.time(Stage::Transfer, || queue.submit(operation)),
                false => queue.submit(operation),
            };
            match submitted {
                Ok(ticket) => {
                    self.flying.insert(ticket, tag);
                    self.count();
                }
                Err(Refused { operation, reason: Refusal::Full }) => {
                    self.next = Some((tag, operation));
                    break;
                }
                Err(Refused { reason, .. }) => return Err(refused(&tag, reason)),
            }
        }
        device.full.store(self.next.is_some(), Ordering::Relaxed);
        Ok(())
    }

    /// Counts what is in flight.
    fn count(&mut self) {
        if !self.polled {
            self.clocks.in_flight(Stage::Transfer, self.flying.len());
        }
    }

    /// The next transfer: the first target of the first fragment.
    fn next_transfer(
        &mut self,
        queue: &Mutex<VecDeque<Fragment>>,
        back: &mut Back,
    ) -> Result<Option<(Tag, Operation)>, Failed> {
        loop {
            if self.rest.is_none() {
                let Some(fragment) = lock(queue).pop_front() else { return Ok(None) };
                let (tag, from) = (&fragment.tag, fragment.tag.offset as u64);
                let range = from..from + fragment.slice.len() as u64;
                let max = self.queue.limits().max_len.max(1);
                self.cut.clear();
                let cut = self.targets.cut(tag.buffer, range, max, &mut self.cut);
                cut.map_err(|reason| refused(tag, reason))?;
                self.rest = Some(fragment);
            }
            let Some(rest) = &mut self.rest else { return Ok(None) };
            let target = self.cut.pop_front();
            let front = target.and_then(|Target { len, to }| Some((rest.split_off_front(len as usize)?, to)));
            let Some((front, to)) = front else { return Err(refused(&rest.tag, Refusal::PastTheTop)) };
            if rest.slice.is_empty() {
                self.rest = None;
            }
            match (to, front) {
                (None, fragment) => back.push((fragment, false)),
                (Some(to), Fragment { tag, slice }) => {
                    let Some(via) = tag.via.clone() else { return Err(refused(&tag, Refusal::NotRegistered)) };
                    return Ok(Some((tag, Operation::write((slice, via), to))));
                }
            }
        }
    }

    fn reap(&mut self, back: &mut Back, timeout: Duration) -> Result<(), Failed> {
        if self.flying.is_empty() {
            self.stall.moved();
            return Ok(());
        }
        let mut done: Vec<Completion> = Vec::new();
        let queue = &mut *self.queue;
        let poll = || match timeout {
            Duration::ZERO => queue.poll(&mut done),
            timeout => queue.wait(&mut done, timeout),
        };
        match self.polled {
            true => self.clocks.time(Stage::Transfer, poll),
            false => self.clocks.time_wall(Stage::Transfer, poll),
        };
        let quiet = done.is_empty();
        if !quiet {
            self.stall.moved();
        }
        let mut failed: Option<Failed> = None;
        for Completion { ticket, operation, result, .. } in done {
            let Some(slice) = operation.into_slice() else { continue };
            let error = match (self.flying.remove(&ticket), result) {
                (Some(tag), Ok(())) => {
                    self.clocks.bytes(Stage::Transfer, slice.len() as u64);
                    back.push((Fragment { tag, slice }, true));
                    continue;
                }
                (Some(Tag { buffer, offset, .. }), Err(error)) => {
                    ((buffer, offset), FillError::Transfer { buffer, offset: offset as u64, error })
                }
                (None, _) => ((0, 0), FillError::Transfer { buffer: 0, offset: 0, error: not_submitted(ticket) }),
            };
            if failed.as_ref().is_none_or(|(first, _)| error.0 < *first) {
                failed = Some(error);
            }
        }
        self.count();
        if let Some(failed) = failed {
            return Err(failed);
        }
        // A device that has halted gets no more time. One that hangs is stopped, and may let go of its transfers then.
        // Only time in which a worker waited for it counts.
        let mut lost = self.halt.lost(&*self.queue).map(|reason| (reason, Duration::ZERO));
        if lost.is_none() && quiet && !timeout.is_zero() {
            lost = self.stall.lost(self.timeout).map(|reason| (reason, self.timeout.min(RELEASE_TIMEOUT)));
        }
        let Some((reason, timeout)) = lost else { return Ok(()) };
        self.queue.stop(reason.clone());
        self.timeout = timeout;
        let buffer = self.flying.values().map(|tag| tag.buffer).min().unwrap_or(0);
        Err(((buffer, 0), FillError::Transfer { buffer, offset: 0, error: OpError::Stopped(reason) }))
    }
}

fn refused(tag: &Tag, reason: Refusal) -> Failed {
    let Tag { buffer, offset, .. } = *tag;
    ((buffer, offset), FillError::Transfer { buffer, offset: offset as u64, error: reason.into() })
}
