//! A bind queue: batches that wait for fences, run in order, and signal fences, as those of Linux's GPU drivers do.
//!
//! The queue is a plain object without a thread: the driver polls it. A batch that took something away is not over
//! before the device has forgotten it; only then may its memory be used again, so only then are its fences signalled.
//! A batch that fails when its turn comes has no caller left that could change it, and later ones rely on it. So the
//! queue fails for good, with all that still waits; what is bound can still be unbound in the VM itself.
//!
//! `cargo run -p dmalane-vm --example bind_queue` prints what happens.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane_iopt::{HeapTables, X86_64_4Level};
use dmalane_vm::{BindRequest, Bo, Committed, Vm};

type CardVm = Vm<X86_64_4Level, HeapTables<CardAddr>>;

const WAITING: u8 = 0;
const SIGNALLED: u8 = 1;
const FAILED: u8 = 2;

/// The end of some work, which others wait for.
#[derive(Clone, Default)]
struct Fence(Arc<AtomicU8>);

impl Fence {
    /// Whether the work has ended, and well.
    fn ended(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            WAITING => None,
            state => Some(state == SIGNALLED),
        }
    }
}

/// Who does the work. Dropped without a signal, the fence fails: nobody waits for ever.
struct Signaller(Fence);

impl Signaller {
    fn signal(self) {
        self.0.0.store(SIGNALLED, Ordering::Release);
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // Writes before a signal are visible to whoever sees it.
        let _ = self.0.0.compare_exchange(WAITING, FAILED, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// A batch of requests, applied whole or not at all.
struct Submission {
    requests: Vec<BindRequest>,
    wait: Vec<Fence>,
    signal: Signaller,
}

#[derive(Default)]
struct BindQueue {
    waiting: VecDeque<Submission>,
    /// The batch that is applied, and that the device has not forgotten the old translations of.
    running: Option<(Committed<CardAddr>, Signaller)>,
    failed: bool,
}

impl BindQueue {
    /// Applies what is ready, until a batch waits for a fence, or for [`invalidated`](Self::invalidated).
    fn poll(&mut self, vm: &mut CardVm) -> Result<(), Box<dyn Error>> {
        while self.running.is_none()
            && let Some(head) = self.waiting.front()
        {
            if !self.failed && head.wait.iter().any(|fence| fence.ended().is_none()) {
                return Ok(());
            }
            let Some(Submission { requests, wait, signal }) = self.waiting.pop_front() else { return Ok(()) };
            self.failed |= wait.iter().any(|fence| fence.ended() == Some(false));
            if self.failed {
                return Err("a fence, or a batch before this one, has failed".into());
            }
            let committed = vm.plan(requests).map(|plan| plan.commit());
            self.running = Some((committed.inspect_err(|_| self.failed = true)?, signal));
            if self.to_invalidate().next().is_none() {
                self.invalidated(vm);
            }
        }
        Ok(())
    }

    /// What the device must forget before the queue goes on.
    fn to_invalidate(&self) -> impl Iterator<Item = Span<DeviceVa>> {
        self.running.iter().flat_map(|(committed, _)| committed.spans())
    }

    /// It has forgotten it: the batch ends.
    fn invalidated(&mut self, vm: &mut CardVm) {
        if let Some((committed, signal)) = self.running.take() {
            vm.invalidated(committed);
            signal.signal();
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let range = Span::new(DeviceVa::new(0), 1 << 40).ok_or("no range")?;
    let mut vm = CardVm::new(range, HeapTables::new(CardAddr::new(0)))?;
    let mut queue = BindQueue::default();
    let bo = Arc::new(Bo::of_segments(1, [Segment { addr: CardAddr::new(1 << 30), len: 4 << 20 }])?);
    let va = DeviceVa::new(1 << 32);
    let bind = |offset| BindRequest::Bind { va, bo: bo.clone(), offset, len: 2 << 20, access: Access::RW };

    let submit = |queue: &mut BindQueue, offset, wait: &Fence| {
        let bound = Fence::default();
        let (requests, wait, signal) = (vec![bind(offset)], vec![wait.clone()], Signaller(bound.clone()));
        queue.waiting.push_back(Submission { requests, wait, signal });
        bound
    };

    // A bind waits for a copy into the memory that it makes visible.
    let copied = Fence::default();
    let bound = submit(&mut queue, 0, &copied);
    queue.poll(&mut vm)?;
    assert!(bound.ended().is_none() && vm.lookup(va).is_none());
    println!("the bind waits for the copy");
    Signaller(copied).signal();
    queue.poll(&mut vm)?;
    assert_eq!(bound.ended(), Some(true));
    println!("bound to {}", vm.lookup(va).ok_or("nothing is bound")?.to);

    // The next one replaces it: it has ended when the device has forgotten the old translations.
    let replaced = submit(&mut queue, 2 << 20, &bound);
    queue.poll(&mut vm)?;
    assert!(replaced.ended().is_none());
    queue.to_invalidate().for_each(|span| println!("the device forgets {span}"));
    queue.invalidated(&mut vm);
    assert_eq!(replaced.ended(), Some(true));
    println!("bound to {}", vm.lookup(va).ok_or("nothing is bound")?.to);

    // A copy that fails takes with it what relies on it.
    let copied = Fence::default();
    let never = submit(&mut queue, 0, &copied);
    let nor_this = submit(&mut queue, 0, &never);
    drop(Signaller(copied));
    for _ in 0..2 {
        let error = queue.poll(&mut vm).err().ok_or("a batch was applied")?;
        println!("{error}");
    }
    assert_eq!([never.ended(), nor_this.ended()], [Some(false); 2]);
    assert!(queue.failed && vm.lookup(va).is_some());
    let committed = vm.unbind(range)?;
    vm.invalidated(committed);
    println!("the queue takes nothing any more, and nothing is bound");
    Ok(())
}
