//! The kernel's side of file queues: a ring, or threads in its place, for one queue or for several.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_dma::lock;

use crate::Fallback;
use crate::error::errno;
use crate::ring::{Request, Ring};
use crate::workers::{Short, Workers};

/// A ring, or threads in its place, that several [`FileQueue`](crate::FileQueue)s share: files that are read by one
/// thread need one ring, however many they are.
///
/// Made by the first queue that needs it. While one queue waits for the kernel, the others of it wait too, so that it
/// is for queues that one thread uses. What is read for a queue that was dropped ends before the last queue is.
#[derive(Clone, Default)]
pub struct SharedReads(pub(crate) Arc<Mutex<Reads>>);

/// The carrier of a queue's reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    Ring,
    Threads,
}

#[derive(Default)]
pub(crate) struct Reads {
    ring: Option<Ring>,
    workers: Option<Workers>,
    /// Why the kernel refuses a ring, or to enter it.
    refused: Option<Fallback>,
    /// The number of the next queue.
    next: u64,
    /// Reads that have ended, for each queue that there is.
    ended: HashMap<u64, VecDeque<(Request, i32)>>,
    /// How many these are.
    unreaped: usize,
}

dmalane_dma::debug_as!(SharedReads, |it| "SharedReads({} queues)", lock(&it.0).ended.len());

impl Reads {
    /// A number for a queue, which [`Reads::forget`] ends.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.ended.insert(self.next, VecDeque::new());
        self.next
    }

    /// A queue is gone; what is read for it ends by itself.
    pub fn forget(&mut self, queue: u64) {
        // Slots of the ring that its reads have are free again.
        self.collect();
        self.unreaped -= self.ended.remove(&queue).map_or(0, |ended| ended.len());
    }

    /// Makes the ring, if there is none, for this number of reads.
    pub fn need_ring(&mut self, depth: usize) -> Result<(), Fallback> {
        if self.ring.is_none() && self.refused.is_none() {
            match Ring::new(depth) {
                Ok(ring) => self.ring = Some(ring),
                Err(why) => self.refused = Some(why),
            }
        }
        self.refused.clone().map_or(Ok(()), Err)
    }

    /// Makes the threads, if there are none, up to this number; false where none can be had.
    pub fn need_threads(&mut self, most: usize) -> bool {
        if self.workers.is_none() {
            self.workers = Workers::new(most, Short::Returns).ok();
        }
        self.workers.is_some()
    }

    /// Threads that were started.
    pub fn threads(&self) -> usize {
        self.workers.as_ref().map_or(0, Workers::threads)
    }

    /// True where a further read can be begun.
    pub fn has_room(&mut self, via: Via, depth: usize) -> bool {
        if self.ring.as_ref().is_some_and(Ring::is_full) {
            self.collect();
        }
        match via {
            Via::Ring => self.ring.as_ref().is_some_and(|ring| !ring.is_dead() && !ring.is_full()),
            Via::Threads => self.workers.as_ref().is_some_and(|workers| workers.busy() < depth),
        }
    }

    /// Begins a read; gives it back where there is no room.
    pub fn push(&mut self, via: Via, read: Request) -> Result<(), Request> {
        match (via, &mut self.ring, &mut self.workers) {
            (Via::Ring, Some(ring), _) => ring.push(read),
            (Via::Threads, _, Some(workers)) => {
                workers.push(read);
                Ok(())
            }
            _ => Err(read),
        }
    }

    /// Submits what is in the ring, and waits for the given time, on threads without submitting.
    ///
    /// # Errors
    /// The kernel refuses, now or since before: reads that it did not get end with `ECANCELED`.
    pub fn enter(&mut self, via: Via, wait: Option<Duration>) -> Result<(), Fallback> {
        match (via, &mut self.ring, &self.workers) {
            (Via::Threads, _, Some(workers)) => wait.into_iter().for_each(|wait| workers.wait(wait)),
            (Via::Ring, Some(ring), _) => {
                if let Err(error) = ring.enter(wait) {
                    self.refused = Some(Fallback::RingFailed(errno(&error)));
                    while let Some(read) = ring.take_back() {
                        end(&mut self.ended, &mut self.unreaped, read, -libc::ECANCELED);
                    }
                }
            }
            _ => {}
        }
        self.refused.clone().filter(|_| via == Via::Ring).map_or(Ok(()), Err)
    }

    /// Whether anything has ended that was not reaped, and if so, whether for this queue.
    pub fn has_ended(&mut self, queue: u64) -> Option<bool> {
        self.collect();
        let own = self.ended.get(&queue).is_some_and(|ended| !ended.is_empty());
        (self.unreaped > 0).then_some(own)
    }

    /// The next read of a queue that has ended.
    pub fn reap(&mut self, queue: u64) -> Option<(Request, i32)> {
        if self.ended.get(&queue).is_none_or(VecDeque::is_empty) {
            self.collect();
        }
        let ended = self.ended.get_mut(&queue)?.pop_front()?;
        self.unreaped -= 1;
        Some(ended)
    }

    fn collect(&mut self) {
        while let Some((read, result)) = self.ring.as_mut().and_then(Ring::reap) {
            end(&mut self.ended, &mut self.unreaped, read, result);
        }
        while let Some((read, result)) = self.workers.as_ref().and_then(Workers::reap) {
            end(&mut self.ended, &mut self.unreaped, read, result);
        }
    }

    #[cfg(test)]
    pub fn ring(&mut self) -> Option<&mut Ring> {
        self.ring.as_mut()
    }
}

fn end(ended: &mut HashMap<u64, VecDeque<(Request, i32)>>, unreaped: &mut usize, read: Request, result: i32) {
    if let Some(of_queue) = ended.get_mut(&read.queue) {
        of_queue.push_back((read, result));
        *unreaped += 1;
    }
}
