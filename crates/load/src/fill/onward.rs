//! Pieces that go on to a device as soon as their bytes are here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use dmalane_dma::BufferSlice;
use dmalane_queue::{
    Completion, DeviceAddr, HaltWatch, OpError, Operation, Queue, QueueAddr, RELEASE_TIMEOUT, Refusal, Refused,
    Registered, StallWatch, Ticket, drain,
};

use super::FillError;
use crate::clock::{Clocks, Stage};

/// A device that gets each piece of the buffers as soon as its bytes have arrived (and were hashed, if they shall be),
/// while the ones behind it are still being read or allocated.
pub struct Onward<'a> {
    /// The device's channel, with nothing in flight. What a job that has failed could not wait for stays in flight on
    /// it.
    pub channel: &'a mut dyn Queue<Addr = DeviceAddr>,
    /// True when the channel works inside `poll`, so that only time spent there is its time.
    pub inline: bool,
    /// For each buffer where its first byte goes; the others follow. Bytes that no extent names go there too, as
    /// zeroes.
    pub to: &'a [DeviceAddr],
    /// The registration, for reading, that a part of a buffer lies in; asked for after
    /// [`Event::Allocated`](super::Event::Allocated) was told of its gather. `None` stops the job.
    pub via: &'a (dyn Fn(usize, &BufferSlice) -> Option<Registered> + Sync),
}

/// A part on its way, without the part.
struct Away {
    buffer: usize,
    extent: Option<usize>,
}

/// A part that the device has read.
pub(super) struct Back {
    pub buffer: usize,
    pub extent: Option<usize>,
    pub part: BufferSlice,
}

/// The end of the pipeline that the lanes share: any of them hands parts to it, and one at a time drives it.
pub(super) struct Outlet<'a> {
    queue: Mutex<VecDeque<Back>>,
    end: Mutex<End<'a>>,
}

struct End<'a> {
    onward: Onward<'a>,
    /// The first of the queue, cut to what the channel takes; waiting for room in it.
    next: Option<(Away, Operation)>,
    flying: HashMap<Ticket, Away>,
    watch: HaltWatch,
    stall: StallWatch,
    /// How long nothing may end, and how long to wait for what is left.
    patience: Duration,
    clocks: Clocks,
}

/// Where something failed, and how.
pub(super) type Failed = ((usize, usize), FillError);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Outlet<'a> {
    pub fn new(onward: Onward<'a>, patience: Duration) -> Self {
        let end = End {
            onward,
            next: None,
            flying: HashMap::new(),
            watch: HaltWatch::default(),
            stall: StallWatch::default(),
            patience,
            clocks: Clocks::default(),
        };
        Self { queue: Mutex::default(), end: Mutex::new(end) }
    }

    /// Takes a part that is not empty.
    pub fn take(&self, piece: Back) {
        locked(&self.queue).push_back(piece);
    }

    /// Hands the device what it has room for, and takes back what has ended; waits for that at most `timeout`. Does
    /// nothing while another lane is at it.
    ///
    /// # Errors
    /// The failure that lies first, of those seen in this call; what came back before is in `back` all the same.
    pub fn drive(&self, back: &mut Vec<Back>, timeout: Duration) -> Result<(), Failed> {
        let mut end = match self.end.try_lock() {
            Ok(end) => end,
            Err(TryLockError::Poisoned(end)) => end.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        end.submit(&self.queue)?;
        end.reap(back, timeout)?;
        end.submit(&self.queue)
    }

    /// Waits for what is in flight; what does not end stays with its channel.
    pub fn quiesce(&self) {
        locked(&self.queue).clear();
        let mut end = locked(&self.end);
        end.next = None;
        let patience = end.patience;
        drain(end.onward.channel, patience);
        end.flying.clear();
    }

    pub fn into_clocks(self) -> Clocks {
        self.end.into_inner().unwrap_or_else(PoisonError::into_inner).clocks
    }
}

impl End<'_> {
    fn submit(&mut self, queue: &Mutex<VecDeque<Back>>) -> Result<(), Failed> {
        loop {
            let (away, operation) = match self.next.take() {
                Some(next) => next,
                None => match self.cut(queue)? {
                    Some(next) => next,
                    None => return Ok(()),
                },
            };
            let Onward { channel, inline, .. } = &mut self.onward;
            let submitted = match inline {
                true => self.clocks.time(Stage::Transfer, || channel.submit(operation)),
                false => channel.submit(operation),
            };
            match submitted {
                Ok(ticket) => {
                    if !self.onward.inline {
                        self.clocks.in_flight(Stage::Transfer, true);
                    }
                    self.flying.insert(ticket, away);
                }
                Err(Refused { operation, reason: Refusal::Full }) => {
                    self.next = Some((away, operation));
                    return Ok(());
                }
                Err(Refused { operation, reason }) => {
                    let offset = operation.into_slice().map_or(0, |part| part.offset());
                    return Err(refused(away.buffer, offset, reason));
                }
            }
        }
    }

    /// The next transfer: as much of the first part of the queue as the channel takes at once.
    fn cut(&mut self, queue: &Mutex<VecDeque<Back>>) -> Result<Option<(Away, Operation)>, Failed> {
        let most = usize::try_from(self.onward.channel.limits().max_len).unwrap_or(usize::MAX).max(1);
        let mut queue = locked(queue);
        let Some(Back { buffer, extent, mut part }) = queue.pop_front() else { return Ok(None) };
        let Some(front) = part.split_off_front(most.min(part.len())) else { return Ok(None) };
        if !part.is_empty() {
            queue.push_front(Back { buffer, extent, part });
        }
        drop(queue);
        let offset = front.offset();
        let Some(via) = (self.onward.via)(buffer, &front) else {
            return Err(refused(buffer, offset, Refusal::NotRegistered));
        };
        let Some(at) = self.onward.to.get(buffer).and_then(|at| at.advance(offset as u64)) else {
            return Err(refused(buffer, offset, Refusal::PastTheTop));
        };
        Ok(Some((Away { buffer, extent }, Operation::write((front, via), at))))
    }

    fn reap(&mut self, back: &mut Vec<Back>, timeout: Duration) -> Result<(), Failed> {
        if self.flying.is_empty() {
            self.stall.moved();
            return Ok(());
        }
        let mut done: Vec<Completion> = Vec::new();
        let Onward { channel, inline, .. } = &mut self.onward;
        let poll = || match timeout {
            Duration::ZERO => channel.poll(&mut done),
            timeout => channel.wait(&mut done, timeout),
        };
        match inline {
            true => self.clocks.time(Stage::Transfer, poll),
            false => self.clocks.hold(Stage::Transfer, poll),
        };
        let quiet = done.is_empty();
        if !quiet {
            self.stall.moved();
        }
        let mut failed: Option<Failed> = None;
        for Completion { ticket, operation, result, .. } in done {
            let Some(part) = operation.into_slice() else { continue };
            let error = match (self.flying.remove(&ticket), result) {
                (Some(Away { buffer, extent }), Ok(())) => {
                    self.clocks.bytes(Stage::Transfer, part.len() as u64);
                    back.push(Back { buffer, extent, part });
                    continue;
                }
                (Some(Away { buffer, .. }), Err(error)) => {
                    let offset = part.offset();
                    ((buffer, offset), FillError::Transfer { buffer, offset: offset as u64, error })
                }
                (None, _) => {
                    let error = OpError::Stopped(format!("an operation ended that was not begun: {ticket:?}"));
                    ((0, 0), FillError::Transfer { buffer: 0, offset: 0, error })
                }
            };
            if failed.as_ref().is_none_or(|(first, _)| error.0 < *first) {
                failed = Some(error);
            }
        }
        if !self.onward.inline {
            self.clocks.in_flight(Stage::Transfer, !self.flying.is_empty());
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        // A device that is gone, or hangs, would be waited for without end.
        let mut lost = self.watch.lost(&*self.onward.channel);
        if lost.is_none() && quiet {
            lost = self.stall.lost(self.patience);
            if let Some(why) = &lost {
                // So that it lets go of what it has, if it can.
                self.onward.channel.stop(why);
                self.patience = self.patience.min(RELEASE_TIMEOUT);
            }
        }
        let Some(why) = lost else { return Ok(()) };
        let buffer = self.flying.values().map(|away| away.buffer).min().unwrap_or(0);
        Err(((buffer, 0), FillError::Transfer { buffer, offset: 0, error: OpError::Stopped(why) }))
    }
}

fn refused(buffer: usize, offset: usize, reason: Refusal) -> Failed {
    ((buffer, offset), FillError::Refused { buffer, offset: offset as u64, reason })
}
