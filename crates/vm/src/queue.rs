//! Bind queues: batches that wait for fences, run in order, and signal fences.
//!
//! A queue is a plain object without a thread. The driver of the device calls [`BindQueue::poll`], which applies the
//! batches at the head whose fences are signalled. A batch that took something away is not over before the device has
//! forgotten it: poll stops there, [`BindQueue::to_invalidate`] says what to invalidate, and [`BindQueue::invalidated`]
//! ends the batch and signals its fences. Queues know nothing of each other; one that waits delays no other.
//!
//! A batch that fails when its turn comes has no caller left that could change it: later batches, and
//! programs that were started on the strength of its fences, rely on it. So the VM is marked as failed
//! ([`Vm::has_failed`]), as Linux drivers do it: every batch that still waits in any queue of that VM fails, and only
//! synchronous unbinds, which need no memory and rely on nothing, are planned from then on.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use dmalane_addr::{Address, CardAddr, Fence, Signaller};
use dmalane_iopt::{Format, Tables};

use crate::{BindRequest, Committed, PlanError, Vm};

/// A batch for a queue.
#[derive(Debug, Default)]
pub struct Submission {
    /// The batch; it is applied whole or not at all.
    pub requests: Vec<BindRequest>,
    /// Fences that must be signalled before it is applied.
    pub wait: Vec<Fence>,
    /// Fences to signal once it is applied and the device has invalidated what it unmapped; failed when it fails.
    pub signal: Vec<Signaller>,
}

/// Names a batch, over all queues with different ids.
#[must_use = "only its ticket identifies the end of the batch"]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BindTicket {
    /// The id of its queue.
    pub queue: u32,
    /// Its number in the queue, from 0.
    pub number: u64,
}

/// A full queue, with the batch that it refused. Poll, then try again.
#[derive(Debug, thiserror::Error)]
#[error("queue {queue} holds {depth} batches, as many as it may")]
pub struct Full {
    /// The batch, as it was submitted.
    pub submission: Submission,
    /// The id of the queue.
    pub queue: u32,
    /// Its depth.
    pub depth: usize,
}

/// Why a batch of a queue failed. Its fences have failed, and so has the VM.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The VM refused it.
    #[error("the VM refused a batch when its turn had come")]
    Refused(#[source] PlanError),
    /// A fence that it waited for has failed.
    #[error("a fence that a batch waited for has failed")]
    Fence,
    /// The VM had failed before, by another batch.
    #[error("the VM has failed by another batch")]
    VmFailed,
}

/// A batch that has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// The ticket that [`BindQueue::submit`] returned.
    pub ticket: BindTicket,
    /// Whether it was applied.
    pub result: Result<(), QueueError>,
}

/// Batches that are applied to one VM in the order in which they were submitted. `A` is the address of a page table.
///
/// A queue always works on the same VM. Dropping it drops what waits in it, whose fences fail.
///
/// ```
/// use dmalane_addr::{CardAddr, DeviceVa, Span, Timeline};
/// use dmalane_iopt::{HeapTables, X86_64_4Level};
/// use dmalane_vm::{BindQueue, BindRequest, Submission, Vm};
///
/// let range = Span::new(DeviceVa::new(0), 1 << 40).unwrap();
/// let mut vm = Vm::<X86_64_4Level, _>::new(range, HeapTables::new(CardAddr::new(0)))?;
/// let mut queue = BindQueue::new(0, 16);
/// let (copied, bound) = (Timeline::new(), Timeline::new());
/// let unbind = BindRequest::Unbind(range);
/// let batch = Submission { requests: vec![unbind], wait: vec![copied.fence(1)], signal: vec![bound.signaller(1)] };
/// queue.submit(batch).unwrap();
///
/// let mut ended = Vec::new();
/// queue.poll(&mut vm, &mut ended);
/// assert!(ended.is_empty(), "it waits");
/// copied.signal(1);
/// queue.poll(&mut vm, &mut ended);
/// assert!(ended[0].result.is_ok() && bound.fence(1).is_signalled());
/// # Ok::<(), dmalane_vm::Error>(())
/// ```
#[derive(Debug)]
pub struct BindQueue<A = CardAddr> {
    id: u32,
    depth: usize,
    /// The number of the next batch; that of the last in `waiting` is one less.
    next: u64,
    waiting: VecDeque<(BindTicket, Submission)>,
    /// The batch that is applied and has not been invalidated.
    running: Option<Running<A>>,
}

#[derive(Debug)]
struct Running<A> {
    ticket: BindTicket,
    committed: Committed<A>,
    signal: Vec<Signaller>,
}

impl<A: Address> BindQueue<A> {
    /// An empty queue that holds at most `depth` batches, with an id for its tickets.
    pub fn new(id: u32, depth: usize) -> Self {
        Self { id, depth, next: 0, waiting: VecDeque::new(), running: None }
    }

    /// The id that it was made with.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Batches that have not ended.
    pub fn in_flight(&self) -> usize {
        self.waiting.len() + usize::from(self.running.is_some())
    }

    /// Takes a batch. Its requests are looked at when its turn comes, as they may build on batches before it.
    ///
    /// # Errors
    /// [`Full`] gives the batch back.
    pub fn submit(&mut self, submission: Submission) -> Result<BindTicket, Full> {
        if self.in_flight() >= self.depth {
            return Err(Full { submission, queue: self.id, depth: self.depth });
        }
        let ticket = BindTicket { queue: self.id, number: self.next };
        self.next += 1;
        self.waiting.push_back((ticket, submission));
        Ok(ticket)
    }

    /// Cancels a batch that has not begun and returns it. Dropping its signallers fails their fences. `None` for a
    /// batch that has begun or ended, or is not of this queue.
    pub fn cancel(&mut self, ticket: BindTicket) -> Option<Submission> {
        // Ascending by number; the queue is a part of the ticket.
        let at = self.waiting.binary_search_by_key(&ticket.number, |(t, _)| t.number).ok()?;
        if ticket.queue != self.id {
            return None;
        }
        self.waiting.remove(at).map(|(_, submission)| submission)
    }

    /// Applies what is ready: batches from the head on, until one waits for a fence, has taken something away that the
    /// device must forget, or has hints for it. Appends those that have ended.
    ///
    /// `vm` is always the same.
    pub fn poll<F: Format, T: Tables<Addr = A>>(&mut self, vm: &mut Vm<F, T>, ended: &mut Vec<Ended>) {
        while self.running.is_none()
            && let Some((_, head)) = self.waiting.front()
        {
            let failed = vm.has_failed();
            if !failed && !head.wait.iter().all(Fence::is_signalled) {
                return;
            }
            let Some((ticket, submission)) = self.waiting.pop_front() else { return };
            let result =
                if failed { Err(QueueError::VmFailed) } else { apply(vm, submission.requests, &submission.wait) };
            match result {
                Ok(committed) => {
                    self.running = Some(Running { ticket, committed, signal: submission.signal });
                    // The caller gets a batch of mere prefetches too.
                    if self.to_invalidate().is_some_and(|c| c.is_empty() && c.prefetches().next().is_none()) {
                        ended.extend(self.invalidated(vm));
                    }
                }
                Err(error) => {
                    vm.fail();
                    drop(submission.signal); // which fails them
                    ended.push(Ended { ticket, result: Err(error) });
                }
            }
        }
    }

    /// Spans that the device must invalidate before the queue goes on, and spans that it may prefetch.
    pub fn to_invalidate(&self) -> Option<&Committed<A>> {
        self.running.as_ref().map(|r| &r.committed)
    }

    /// The device has forgotten all spans of [`to_invalidate`](Self::to_invalidate): the batch ends, and its fences are
    /// signalled. `None` when there was nothing to invalidate.
    pub fn invalidated<F: Format, T: Tables<Addr = A>>(&mut self, vm: &mut Vm<F, T>) -> Option<Ended> {
        let Running { ticket, committed, signal } = self.running.take()?;
        vm.invalidated(committed);
        signal.into_iter().for_each(Signaller::signal);
        Some(Ended { ticket, result: Ok(()) })
    }
}

fn apply<F: Format, T: Tables>(
    vm: &mut Vm<F, T>,
    requests: Vec<BindRequest>,
    wait: &[Fence],
) -> Result<Committed<T::Addr>, QueueError> {
    if wait.iter().any(Fence::has_failed) {
        return Err(QueueError::Fence);
    }
    Ok(vm.plan(requests).map_err(QueueError::Refused)?.commit())
}
