//! One channel of the card: fetches descriptors, copies, reports.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use dmalane_addr::{Access, Address, CardAddr, Iova};
use dmalane_engine::{DeviceAddr, Direction};
use dmalane_iopt::Format;
use dmalane_mem::{CopyHint, DeviceMem, DmaFault, FaultReason};

use crate::memory::CardMemory;
use crate::mmu::{Mmu, Tlb};
use crate::regs::{MAX_RING_LOG2, STATUS_HALTED, STATUS_RUNNING};
use crate::{Completion, Descriptor, Error, Halt, Malformed, Status};

/// What one [`Queue::step`] does at most.
const STEP_DESCRIPTORS: usize = 32;
const STEP_BYTES: u64 = 1 << 20;
/// Descriptors fetched at once.
const FETCH: u32 = 32;
/// Copies towards the card from this length on bypass the cache: what goes to card memory, the CPU has done with. Copies
/// towards the host do so only where they would not fit the second-level cache anyway.
const STREAM_TO_CARD: u32 = 32 << 10;
const STREAM_TO_HOST: u32 = 1 << 20;

/// A channel's registers, as both sides see them.
#[derive(Default)]
pub(crate) struct Registers {
    /// What the driver wants: 1 is enabled.
    pub control: AtomicU32,
    /// What the channel does. Written by [`Queue::step`] alone.
    pub status: AtomicU32,
    pub error: AtomicU32,
    pub error_iova: AtomicU64,
    pub ring_log2: AtomicU32,
    pub ring: AtomicU64,
    pub completions: AtomicU64,
    pub doorbell: AtomicU32,
    pub head: AtomicU32,
    pub interrupt: AtomicU32,
    pub bytes_h2c: AtomicU64,
    pub bytes_c2h: AtomicU64,
    pub ok: AtomicU64,
    pub failed: AtomicU64,
}

/// What all channels share.
pub(crate) struct Inside<F> {
    pub memory: CardMemory,
    pub mmu: Mmu<F>,
}

enum State {
    Stopped,
    Running(Rings),
    Halted,
}

#[derive(Clone, Copy)]
struct Rings {
    descriptors: Iova,
    completions: Iova,
    size: u32,
}

/// A descriptor under way.
struct Job {
    descriptor: Descriptor,
    done: u32,
}

/// Why a descriptor failed, and the address that it was about.
struct Failure(Status, u64);

/// The part of a channel that works. Whoever steps it has it alone.
pub(crate) struct Queue<M> {
    mem: M,
    tlb: Tlb,
    state: State,
    /// Descriptors completed, modulo 2^32.
    head: u32,
    /// Descriptors copied from the ring and not looked at yet: what the host does to the ring now no longer matters.
    fetched: [u8; FETCH as usize * Descriptor::BYTES],
    next: usize,
    end: usize,
    job: Option<Job>,
}

impl<M: DeviceMem> Queue<M> {
    pub(crate) fn new(mem: M) -> Self {
        let fetched = [0; FETCH as usize * Descriptor::BYTES];
        Self { mem, tlb: Tlb::new(), state: State::Stopped, head: 0, fetched, next: 0, end: 0, job: None }
    }

    /// Does a bounded amount of work and says whether there was any. Calls `interrupt` when one is due.
    pub(crate) fn step<F: Format>(&mut self, regs: &Registers, inside: &Inside<F>, interrupt: impl Fn()) -> bool {
        let enabled = regs.control.load(Ordering::SeqCst) & 1 == 1;
        match self.state {
            State::Stopped if enabled => {
                self.start(regs);
                // Nothing is done before the next step looks at the control register again. A driver that stopped the
                // channel in between either saw the status change or is seen there: both sides use one total order.
                true
            }
            State::Stopped => false,
            _ if !enabled => {
                self.stop(regs);
                true
            }
            State::Halted => false,
            State::Running(rings) => {
                let before = self.head;
                let worked = self.work(rings, regs, inside);
                // After a halt too: the driver must not sleep through it.
                if self.head != before || matches!(self.state, State::Halted) {
                    regs.head.store(self.head, Ordering::Relaxed);
                    // The completions before the look at the register: see `CardChannel::wait`.
                    fence(Ordering::SeqCst);
                    if regs.interrupt.load(Ordering::SeqCst) & 1 == 1
                        && regs.interrupt.swap(0, Ordering::SeqCst) & 1 == 1
                    {
                        interrupt();
                    }
                }
                worked
            }
        }
    }

    fn start(&mut self, regs: &Registers) {
        let log2 = regs.ring_log2.load(Ordering::Relaxed);
        let descriptors = Iova::new(regs.ring.load(Ordering::Relaxed));
        let completions = Iova::new(regs.completions.load(Ordering::Relaxed));
        let fits =
            |at: Iova, entry: usize| at.bits().is_multiple_of(4096) && at.checked_add((entry as u64) << log2).is_some();
        regs.doorbell.store(0, Ordering::Relaxed);
        regs.head.store(0, Ordering::Relaxed);
        if !(1..=MAX_RING_LOG2).contains(&log2)
            || !fits(descriptors, Descriptor::BYTES)
            || !fits(completions, Completion::BYTES)
        {
            return self.halt(regs, Halt::BadRing, descriptors);
        }
        self.state = State::Running(Rings { descriptors, completions, size: 1 << log2 });
        regs.status.store(STATUS_RUNNING, Ordering::SeqCst);
    }

    /// After this, the channel touches no host memory until it is started again.
    fn stop(&mut self, regs: &Registers) {
        self.state = State::Stopped;
        (self.head, self.next, self.end, self.job) = (0, 0, 0, None);
        regs.error.store(0, Ordering::Relaxed);
        regs.error_iova.store(0, Ordering::Relaxed);
        regs.interrupt.store(0, Ordering::Relaxed);
        regs.status.store(0, Ordering::SeqCst);
    }

    fn halt(&mut self, regs: &Registers, why: Halt, at: Iova) {
        self.state = State::Halted;
        regs.error_iova.store(at.bits(), Ordering::Relaxed);
        regs.error.store(why.code(), Ordering::Relaxed);
        regs.status.store(STATUS_HALTED, Ordering::SeqCst);
    }

    fn work<F: Format>(&mut self, rings: Rings, regs: &Registers, inside: &Inside<F>) -> bool {
        let mut budget = STEP_BYTES;
        for done in 0..STEP_DESCRIPTORS {
            let job = match self.job.take() {
                Some(job) => Ok(job),
                None => match self.fetch(rings, regs) {
                    Ok(Some(bytes)) => Descriptor::decode(&bytes).map(|descriptor| Job { descriptor, done: 0 }),
                    Ok(None) => return done > 0,
                    Err((why, at)) => {
                        self.halt(regs, why, at);
                        return true;
                    }
                },
            };
            let (cookie, result) = match job {
                Ok(mut job) => match self.advance(&mut job, inside, &mut budget) {
                    Ok(()) if job.done < job.descriptor.len => {
                        self.job = Some(job);
                        return true;
                    }
                    result => {
                        count(&job, regs);
                        (job.descriptor.cookie, result)
                    }
                },
                Err(Malformed { cookie, status }) => (cookie, Err(Failure(status, 0))),
            };
            add(if result.is_ok() { &regs.ok } else { &regs.failed }, 1);
            if let Err(fault) = self.complete(rings, cookie, result) {
                self.halt(regs, Halt::CompletionFault, fault.at);
                return true;
            }
        }
        true
    }

    /// The next descriptor, copied.
    fn fetch(&mut self, rings: Rings, regs: &Registers) -> Result<Option<[u8; Descriptor::BYTES]>, (Halt, Iova)> {
        if self.next == self.end {
            let waiting = regs.doorbell.load(Ordering::Acquire).wrapping_sub(self.head);
            let slot = self.head & (rings.size - 1);
            // `start` checked that no slot lies past the top of the space.
            let at = Iova::new(rings.descriptors.bits() + u64::from(slot) * Descriptor::BYTES as u64);
            if waiting == 0 {
                return Ok(None);
            }
            if waiting > rings.size {
                return Err((Halt::BadDoorbell, at));
            }
            let n = waiting.min(FETCH).min(rings.size - slot) as usize * Descriptor::BYTES;
            self.mem.read_bytes(at, &mut self.fetched[..n]).map_err(|fault| (Halt::RingFault, fault.at))?;
            (self.next, self.end) = (0, n);
        }
        let from = self.next;
        self.next += Descriptor::BYTES;
        Ok(Some(std::array::from_fn(|i| self.fetched[from + i])))
    }

    /// Moves bytes of a job until it is done or the budget is used up.
    fn advance<F: Format>(&mut self, job: &mut Job, inside: &Inside<F>, budget: &mut u64) -> Result<(), Failure> {
        let Descriptor { direction, card, host, len, .. } = job.descriptor;
        if let DeviceAddr::Card(at) = card
            && job.done == 0
            && !inside.memory.holds(at, u64::from(len))
        {
            return Err(Failure(Status::NoCardMemory, at.bits()));
        }
        while job.done < len && *budget > 0 {
            let done = u64::from(job.done);
            let want = u64::from(len - job.done).min(*budget);
            // `decode` checked that neither range wraps.
            let host = Iova::new(host.bits() + done);
            let moved = match card {
                DeviceAddr::Card(at) => {
                    self.copy(direction, host, CardAddr::new(at.bits() + done), want, len, &inside.memory)?;
                    want
                }
                DeviceAddr::Va(at) => {
                    let at = dmalane_addr::DeviceVa::new(at.bits() + done);
                    let wanted = if direction == Direction::FromHost { Access::WRITE } else { Access::READ };
                    let state = inside.mmu.hold();
                    let (to, n) = inside
                        .mmu
                        .translate(&state, &mut self.tlb, &inside.memory, at, want, wanted)
                        .map_err(|at| Failure(Status::MmuFault, at.bits()))?;
                    self.copy(direction, host, to, n, len, &inside.memory)?;
                    n
                }
            };
            job.done += moved as u32; // at most `len - done`
            *budget -= moved;
        }
        Ok(())
    }

    /// Copies between host memory and card memory, straight. `len` is that of the whole descriptor.
    fn copy(
        &mut self,
        direction: Direction,
        host: Iova,
        card: CardAddr,
        bytes: u64,
        len: u32,
        memory: &CardMemory,
    ) -> Result<(), Failure> {
        let there = memory.view(card, bytes).map_err(|e| match e {
            Error::NoMemory { at, .. } => Failure(Status::OutOfMemory, at.bits()),
            _ => Failure(Status::NoCardMemory, card.bits()),
        })?;
        let hint = |from| if len >= from { CopyHint::Stream } else { CopyHint::Keep };
        let moved = match direction {
            Direction::FromHost => self.mem.read(host, there, hint(STREAM_TO_CARD)),
            Direction::ToHost => self.mem.write(host, there, hint(STREAM_TO_HOST)),
        };
        moved.map_err(|fault| {
            let status = match fault.reason {
                FaultReason::NotMapped => Status::HostNotMapped,
                FaultReason::NotPermitted => Status::HostNotPermitted,
                _ => Status::HostFault,
            };
            Failure(status, fault.at.bits())
        })
    }

    /// Writes the completion of the descriptor at `head`.
    fn complete(&mut self, rings: Rings, cookie: u32, result: Result<(), Failure>) -> Result<(), DmaFault> {
        let slot = self.head & (rings.size - 1);
        let at = rings.completions.bits() + u64::from(slot) * Completion::BYTES as u64;
        let status = match result {
            Ok(()) => Status::Ok,
            Err(Failure(status, detail)) => {
                self.mem.write_bytes(Iova::new(at), &detail.to_le_bytes())?;
                status
            }
        };
        let completion = Completion { cookie, status: status.code(), sequence: Completion::sequence_of(self.head) };
        self.mem.write_word(Iova::new(at + 8), completion.word())?;
        self.head = self.head.wrapping_add(1);
        Ok(())
    }
}

fn count(job: &Job, regs: &Registers) {
    let counter = match job.descriptor.direction {
        Direction::FromHost => &regs.bytes_h2c,
        Direction::ToHost => &regs.bytes_c2h,
    };
    add(counter, u64::from(job.done));
}

/// Only one thread at a time steps a queue, so its counters need no read-modify-write.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}
