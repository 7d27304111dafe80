//! One channel of the card: fetches descriptors, works, reports.
//!
//! A step holds the host's translations and those of the MMU once for all that it does, and writes the completions of
//! what it did together at its end: locks, and the fence behind stores that bypass the cache, cost as much as copying 4
//! KiB.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Iova};
use dmalane_dma::{CopyHint, DeviceMem, DmaFault, FaultReason, HeldMem, VolatileSlice, stream_fence};
use dmalane_iopt::Format;
use dmalane_queue::{CacheHint, DeviceAddr, Direction, QueueAddr};

use crate::Error;
use crate::memory::{Block, CardMemory};
use crate::mmu::{self, Mmu, Tlb};
use crate::recent::{Memory, Recent};
use dmalane_card::regs::{MAX_LEN, MAX_RING_LOG2, STATUS_HALTED, STATUS_RUNNING};
use dmalane_card::{CompletionEntry, Descriptor, Halt, Malformed, PlainCopy, Status, Task};

/// Limits of one [`Queue::step`].
const STEP_DESCRIPTORS: usize = 32;
/// A step ends when it has cost this much, or less where the caller says so.
pub(crate) const STEP_COST: u64 = 1 << 20;
const STEP_TIME: Duration = Duration::from_millis(1);
/// A row of a shape costs at least this: rows of single bytes must not make a step long.
const ROW_COST: u64 = 512;
/// Short rows between two looks at the clock.
const ROWS_PER_LOOK: u32 = 16;
/// A page-table entry that a translation reads, of the IOMMU or of the MMU: its cost in copied bytes.
const ENTRY_COST: u64 = 256;
/// A byte of card memory that is made present: its cost in copied bytes, as the kernel finds and zeroes pages.
const PRESENT_COST: u64 = 4;
/// Descriptors fetched at once.
const FETCH: u32 = 32;
/// Copies towards the card from this length on may bypass the cache: what goes to card memory, the CPU has done with.
/// Copies towards the host do so only where they would not fit the second-level cache anyway.
const STREAM_TO_CARD: u64 = 4 << 10;
const STREAM_TO_HOST: u64 = 1 << 20;

/// The work of one step of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stepped {
    /// Bytes copied, filled or compared, and what else the step had the host do, as the bytes that could have been
    /// copied instead: a row of a shape counts as 512 at least, a page-table entry read as 256, and a byte of card
    /// memory made present as 4. A step ends after the access that brings it to 1 MiB, or to the caller's limit.
    pub cost: u64,
    /// Completions were written, or the channel halted: what an interrupt is for.
    pub reported: bool,
}

/// A channel's registers, as both sides see them.
#[derive(Default)]
pub(crate) struct Registers {
    /// The state that the driver requests: 1 is enabled.
    pub control: AtomicU32,
    /// The state of the channel. Written by [`Queue::step`] alone.
    pub status: AtomicU32,
    pub error: AtomicU32,
    pub error_iova: AtomicU64,
    pub ring_log2: AtomicU32,
    pub ring: AtomicU64,
    pub completions: AtomicU64,
    pub doorbell: AtomicU32,
    pub head: AtomicU32,
    pub interrupt: AtomicU32,
    pub cancel: AtomicU64,
    pub bytes_h2c: AtomicU64,
    pub bytes_c2h: AtomicU64,
    pub ok: AtomicU64,
    pub failed: AtomicU64,
}

impl Registers {
    /// False when a step would certainly do nothing: found out without the queue's lock.
    #[inline]
    pub(crate) fn want_a_step(&self) -> bool {
        let status = self.status.load(Ordering::SeqCst);
        match self.control.load(Ordering::SeqCst) & 1 {
            0 => status != 0,
            // To be started; or with descriptors that are not completed. A halted one waits to be stopped.
            _ if status == 0 => true,
            _ => status == STATUS_RUNNING && self.doorbell.load(Ordering::Acquire) != self.head.load(Ordering::Relaxed),
        }
    }
}

/// State that all channels share.
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

/// Rows.
#[derive(Clone, Copy)]
struct Shape {
    host_pitch: u64,
    card_pitch: u64,
    rows: u32,
}

/// A descriptor under way.
struct Job {
    task: Task,
    hint: CopyHint,
    shape: Option<Shape>,
    /// Bytes of a row, or of all.
    len: u32,
    /// Bytes in all, and how many of them are done.
    total: u32,
    done: u32,
}

/// Why a descriptor failed, and the address that it was about.
struct Failure(Status, u64);

/// The part of a channel that works. The thread that steps it has it alone.
pub(crate) struct Queue<M> {
    mem: M,
    engine: Engine,
}

/// A [`Queue`] but for its access to host memory.
struct Engine {
    tlb: Tlb,
    recent: Recent,
    state: State,
    /// Descriptors reported, modulo 2^32.
    head: u32,
    /// Entries of the completion ring for those that ended since, not written yet: of each the detail, if it has one,
    /// and the word.
    ended: Vec<Option<u64>>,
    /// Descriptors copied from the ring and not decoded yet: later changes of the ring have no effect on them.
    fetched: [[u8; Descriptor::BYTES]; FETCH as usize],
    next: usize,
    end: usize,
    /// The one under way, with its cookie and whether it is chained.
    job: Option<(Job, u32, bool)>,
    /// The shape of the next descriptor.
    shape: Option<Shape>,
    /// The number of the descriptor with which the present operation began; `None` between operations.
    first: Option<u32>,
    /// An operation has failed: what is left of it is skipped.
    skipping: bool,
    /// Stores that bypass the cache since the last fence.
    streamed: bool,
}

/// The context of a step.
struct Work<'a, H, F> {
    mem: H,
    /// Held from the first device virtual address on.
    mmu: Option<mmu::Held<'a>>,
    inside: &'a Inside<F>,
    block: Block<'a>,
    regs: &'a Registers,
    rings: Rings,
    /// Bytes and operations of [`Engine::copy_plain`], added to the registers at the end.
    h2c: u64,
    c2h: u64,
    ok: u64,
    /// The cost of the step so far, and what ends it.
    cost: u64,
    most: u64,
    /// Page-table entries and bytes made present that the cost contains.
    charged: (u64, u64),
    /// Bytes made present by accesses that do not go through `block`.
    made: u64,
    /// Rows, and when the first was begun.
    rows: u32,
    rows_since: Option<Instant>,
}

impl<H: HeldMem, F> Work<'_, H, F> {
    /// Adds what the translations and first touches since the last call cost. `walked`: entries that the MMU read.
    #[inline]
    fn charge(&mut self, walked: u64) {
        let now = (self.mem.entries_read().wrapping_add(walked), self.made + self.block.made);
        let entries = now.0.wrapping_sub(self.charged.0);
        self.cost += entries * ENTRY_COST + (now.1 - self.charged.1) * PRESENT_COST;
        self.charged = now;
    }

    /// The cost that is left to the step.
    #[inline]
    fn left(&self) -> u64 {
        self.most.saturating_sub(self.cost)
    }

    /// Ends the step when its short rows have taken too long: the host may have to find pages for each.
    #[inline]
    fn look_at_clock(&mut self) {
        self.rows += 1;
        if self.rows.is_multiple_of(ROWS_PER_LOOK)
            && self.rows_since.get_or_insert_with(Instant::now).elapsed() > STEP_TIME
        {
            self.cost = self.cost.max(self.most);
        }
    }
}

impl<M: DeviceMem> Queue<M> {
    pub(crate) fn new(mem: M) -> Self {
        let engine = Engine {
            tlb: Tlb::new(),
            recent: Recent::new(),
            state: State::Stopped,
            head: 0,
            ended: Vec::with_capacity(2 * STEP_DESCRIPTORS),
            fetched: [[0; Descriptor::BYTES]; FETCH as usize],
            next: 0,
            end: 0,
            job: None,
            shape: None,
            first: None,
            skipping: false,
            streamed: false,
        };
        Self { mem, engine }
    }

    /// Does work that costs about as much as `most`, `None` when there was none. Calls `interrupt` when one is due.
    /// Unless it `waits`, there is none either while the host is changing translations.
    pub(crate) fn step<F: Format>(
        &mut self,
        regs: &Registers,
        inside: &Inside<F>,
        (most, waits): (u64, bool),
        interrupt: impl Fn(),
    ) -> Option<Stepped> {
        let Self { mem, engine } = self;
        let enabled = regs.control.load(Ordering::SeqCst) & 1 == 1;
        match engine.state {
            State::Stopped if enabled => {
                engine.start(regs);
                // Nothing is done before the next step looks at the control register again. A driver that stopped the
                // channel in between either saw the status change or is seen there: both sides use one total order.
                Some(Stepped { cost: 0, reported: matches!(engine.state, State::Halted) })
            }
            State::Stopped => None,
            _ if !enabled => {
                engine.stop(regs);
                Some(Stepped::default())
            }
            State::Halted => None,
            State::Running(_) if engine.is_idle(regs) => None,
            State::Running(rings) => {
                let before = engine.head;
                let mem = if waits { mem.hold() } else { mem.try_hold()? };
                let charged = (mem.entries_read().wrapping_add(engine.tlb.entries_read), 0);
                let mut work = Work {
                    mem,
                    mmu: None,
                    inside,
                    block: Block::of(&inside.memory),
                    regs,
                    rings,
                    h2c: 0,
                    c2h: 0,
                    ok: 0,
                    cost: 0,
                    most: most.min(STEP_COST),
                    charged,
                    made: 0,
                    rows: 0,
                    rows_since: None,
                };
                let worked = engine.work(&mut work);
                engine.report(&mut work);
                work.charge(engine.tlb.entries_read);
                let cost = work.cost;
                add(&regs.bytes_h2c, work.h2c);
                add(&regs.bytes_c2h, work.c2h);
                add(&regs.ok, work.ok);
                drop(work);
                // After a halt too: the driver must not sleep through it.
                let reported = engine.head != before || matches!(engine.state, State::Halted);
                if reported {
                    regs.head.store(engine.head, Ordering::Relaxed);
                    // The completions before the register. Both sides exchange: the second one sees
                    // what the first one wrote before (`CardQueue::wait`).
                    if regs.interrupt.swap(0, Ordering::SeqCst) & 1 == 1 {
                        interrupt();
                    }
                }
                worked.then_some(Stepped { cost, reported })
            }
        }
    }
}

impl Engine {
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
            || !fits(completions, CompletionEntry::BYTES)
        {
            return self.halt(regs, Halt::BadRing, descriptors);
        }
        self.state = State::Running(Rings { descriptors, completions, size: 1 << log2 });
        regs.status.store(STATUS_RUNNING, Ordering::SeqCst);
    }

    /// After this, the channel touches no host memory until it is started again.
    fn stop(&mut self, regs: &Registers) {
        self.state = State::Stopped;
        (self.head, self.next, self.end) = (0, 0, 0);
        (self.job, self.shape, self.first, self.skipping) = (None, None, None, false);
        regs.error.store(0, Ordering::Relaxed);
        regs.error_iova.store(0, Ordering::Relaxed);
        regs.interrupt.store(0, Ordering::Relaxed);
        regs.cancel.store(0, Ordering::Relaxed);
        regs.status.store(0, Ordering::SeqCst);
    }

    fn halt(&mut self, regs: &Registers, why: Halt, at: Iova) {
        self.state = State::Halted;
        regs.error_iova.store(at.bits(), Ordering::Relaxed);
        regs.error.store(why.code(), Ordering::Relaxed);
        regs.status.store(STATUS_HALTED, Ordering::SeqCst);
    }

    /// Nothing under way, and nothing new in the ring.
    fn is_idle(&self, regs: &Registers) -> bool {
        self.job.is_none() && self.next == self.end && regs.doorbell.load(Ordering::Acquire) == self.head
    }

    fn work<H: HeldMem, F: Format>(&mut self, work: &mut Work<'_, H, F>) -> bool {
        let mut left = STEP_DESCRIPTORS;
        while left > 0 {
            if work.left() == 0 {
                return true;
            }
            if self.job.is_none() {
                match self.fetch(work) {
                    Ok(true) => {}
                    Ok(false) => return left < STEP_DESCRIPTORS,
                    Err((why, at)) => {
                        // Operations that were done before are reported first.
                        self.report(work);
                        self.halt(work.regs, why, at);
                        return true;
                    }
                }
                let copied = self.copy_plain(work, left);
                if copied > 0 {
                    left -= copied;
                    continue;
                }
            }
            let (mut job, cookie, chained) = match self.job.take() {
                Some(job) => job,
                None => {
                    let number = self.number();
                    // Decoded where it lies: another copy, written and read in other portions, would wait for all
                    // stores before.
                    let descriptor = Descriptor::decode(&self.fetched[self.next]);
                    self.next += 1;
                    let (cookie, chained) = match &descriptor {
                        Ok(d) => (d.cookie, d.chained),
                        Err(m) => (m.cookie, m.chained),
                    };
                    self.first.get_or_insert(number);
                    match descriptor.map_err(|Malformed { status, .. }| Failure(status, 0)).and_then(|d| self.begin(d))
                    {
                        Ok(Some(job)) => (job, cookie, chained),
                        nothing_to_do => {
                            self.finish(work.regs, cookie, chained, nothing_to_do.map(drop));
                            left -= 1;
                            continue;
                        }
                    }
                }
            };
            let result = match self.is_cancelled(work.regs) {
                true => Err(Failure(Status::Cancelled, job.done.into())),
                false => self.advance(&mut job, work),
            };
            if result.is_ok() && job.done < job.total {
                self.job = Some((job, cookie, chained));
                return true;
            }
            count(&job, work.regs);
            self.finish(work.regs, cookie, chained, result);
            left -= 1;
        }
        true
    }

    /// The number of the next descriptor.
    fn number(&self) -> u32 {
        self.head.wrapping_add(self.ended.len() as u32 / 2)
    }

    /// Copies descriptors from the ring unless some are left to decode; false when there are none.
    #[inline]
    fn fetch<H: HeldMem, F>(&mut self, work: &mut Work<'_, H, F>) -> Result<bool, (Halt, Iova)> {
        if self.next < self.end {
            return Ok(true);
        }
        let (rings, number) = (work.rings, self.number());
        let doorbell = work.regs.doorbell.load(Ordering::Acquire);
        let slot = number & (rings.size - 1);
        // `start` checked that no slot lies past the top of the space.
        let at = Iova::new(rings.descriptors.bits() + u64::from(slot) * Descriptor::BYTES as u64);
        if doorbell.wrapping_sub(self.head) > rings.size {
            return Err((Halt::BadDoorbell, at));
        }
        // A doorbell that went back by less than what is not reported yet reads as more than the ring holds.
        let waiting = doorbell.wrapping_sub(number);
        if waiting == 0 {
            return Ok(false);
        }
        if waiting > rings.size {
            return Err((Halt::BadDoorbell, at));
        }
        let n = waiting.min(FETCH).min(rings.size - slot) as usize;
        work.mem.read_bytes(at, self.fetched[..n].as_flattened_mut()).map_err(|fault| (Halt::RingFault, fault.at))?;
        (self.next, self.end) = (0, n);
        Ok(true)
    }

    /// Begins the job of a descriptor; `None` for one that has nothing to do.
    #[inline]
    fn begin(&mut self, descriptor: Descriptor) -> Result<Option<Job>, Failure> {
        if self.skipping {
            return Err(Failure(Status::Skipped, 0));
        }
        let Descriptor { task, chained, cache, .. } = descriptor;
        let shape = self.shape.take();
        let bad_shape = Err(Failure(Status::BadShape, 0));
        let (len, memory, at, from) = match task {
            Task::Fence if shape.is_some() => return bad_shape,
            Task::Fence => return Ok(None),
            Task::Shape { host_pitch, card_pitch, rows } => {
                if shape.is_some() || !chained {
                    return bad_shape;
                }
                self.shape = Some(Shape { host_pitch, card_pitch, rows });
                return Ok(None);
            }
            Task::Copy { direction: Direction::ToHost, host, len, .. } => {
                (len, Memory::Host, host.bits(), STREAM_TO_HOST)
            }
            Task::Copy { card, len, .. } | Task::Fill { card, len, .. } | Task::Within { to: card, len, .. } => {
                (len, Memory::Card, card.bits(), STREAM_TO_CARD)
            }
            Task::Compare { len, .. } => (len, Memory::Host, 0, u64::MAX),
        };
        let mut total = len;
        if let Some(Shape { host_pitch, card_pitch, rows }) = shape {
            match len.checked_mul(rows) {
                Some(bytes) if bytes <= MAX_LEN => total = bytes,
                _ => return bad_shape,
            }
            let extent = |pitch: u64| pitch.checked_mul(u64::from(rows) - 1)?.checked_add(u64::from(len) - 1);
            let wraps = |at: u64, pitch: u64| extent(pitch).and_then(|extent| at.checked_add(extent)).is_none();
            let (host_at, card_at) = match task {
                Task::Copy { host, card, .. } | Task::Compare { host, card, .. } => (host.bits(), card.bits()),
                Task::Within { from, to, .. } => (from.bits(), to.bits()),
                Task::Fill { card, .. } => (0, card.bits()),
                Task::Shape { .. } | Task::Fence => (0, 0),
            };
            if wraps(host_at, host_pitch) || wraps(card_at, card_pitch) {
                return Err(Failure(Status::Wraps, 0));
            }
        }
        let hint = match cache {
            CacheHint::Auto => self.recent.hint(memory, at, total.into(), from),
            CacheHint::Hot => CopyHint::Keep,
            CacheHint::Cold => CopyHint::StreamUnordered,
        };
        self.streamed |= hint == CopyHint::StreamUnordered;
        Ok(Some(Job { task, hint, shape, len, total, done: 0 }))
    }

    /// The fast path: makes the plain copies among the fetched descriptors, at most `most`, up to the first other
    /// descriptor. Returns their number.
    #[inline]
    fn copy_plain<H: HeldMem, F: Format>(&mut self, work: &mut Work<'_, H, F>, most: usize) -> usize {
        if self.shape.is_some() || self.skipping {
            return 0; // the next descriptor is not to be done as it is
        }
        let mut copied = 0;
        for bytes in self.fetched[self.next..self.end].iter().take(most) {
            let Some(copy) = PlainCopy::decode(bytes) else { break };
            let PlainCopy { direction, host, card, len, chained, cache, cookie } = copy;
            let len = u64::from(len);
            // A copy that would fit but for a few translations is not split.
            if work.left() == 0 || len > work.left() + work.most / 16 || work.regs.cancel.load(Ordering::Relaxed) != 0 {
                break;
            }
            let Some(there) = work.block.view(card, len) else { break };
            let hint = match (cache, direction) {
                (CacheHint::Hot, _) => CopyHint::Keep,
                (CacheHint::Cold, _) => CopyHint::StreamUnordered,
                (CacheHint::Auto, Direction::FromHost) => {
                    self.recent.hint(Memory::Card, card.bits(), len, STREAM_TO_CARD)
                }
                (CacheHint::Auto, Direction::ToHost) => {
                    self.recent.hint(Memory::Host, host.bits(), len, STREAM_TO_HOST)
                }
            };
            self.streamed |= hint == CopyHint::StreamUnordered;
            let moved = match direction {
                Direction::FromHost => work.mem.read(host, there, hint),
                Direction::ToHost => work.mem.write(host, there, hint),
            };
            // Also where it failed: what lies before the fault was copied.
            work.cost += len;
            let number = self.number();
            let sequence = CompletionEntry::sequence_of(number);
            let (status, detail) = match moved {
                Ok(()) => {
                    *match direction {
                        Direction::FromHost => &mut work.h2c,
                        Direction::ToHost => &mut work.c2h,
                    } += len;
                    work.ok += 1;
                    (Status::Ok, None)
                }
                Err(fault) => {
                    let Failure(status, detail) = host_failure(fault);
                    add(&work.regs.failed, 1);
                    (status, Some(detail))
                }
            };
            self.ended.extend([detail, Some(CompletionEntry { cookie, status: status.code(), sequence }.word())]);
            copied += 1;
            work.charge(self.tlb.entries_read);
            if chained {
                self.first.get_or_insert(number);
                self.skipping = status != Status::Ok;
                if self.skipping {
                    break;
                }
            } else {
                end_operation(&mut self.first, work.regs);
            }
        }
        self.next += copied;
        copied
    }

    /// The driver wants the present operation to end.
    #[inline]
    fn is_cancelled(&self, regs: &Registers) -> bool {
        let request = regs.cancel.load(Ordering::Relaxed);
        request != 0 && self.first.is_some_and(|first| request == 1 << 32 | u64::from(first))
    }

    /// Does bytes of a job until it is done or the step has cost enough.
    #[inline]
    fn advance<H: HeldMem, F: Format>(&mut self, job: &mut Job, work: &mut Work<'_, H, F>) -> Result<(), Failure> {
        if job.done == 0 {
            holds_all(job, &work.inside.memory)?;
        }
        while job.done < job.total && work.left() > 0 {
            // The row, and the place in it.
            let (within, host_offset, card_offset) = match job.shape {
                None => (job.done, u64::from(job.done), u64::from(job.done)),
                Some(shape) => {
                    let (row, within) = (u64::from(job.done / job.len), job.done % job.len);
                    // `begin` checked that the last of these does not wrap.
                    (within, row * shape.host_pitch + u64::from(within), row * shape.card_pitch + u64::from(within))
                }
            };
            let want = u64::from(job.len - within).min(work.left());
            let moved = self.do_some(job, work, host_offset, card_offset, within, want);
            // A failure costs as if all had been done: a fault or a difference may come after the last but one byte.
            work.cost += ROW_COST.max(*moved.as_ref().unwrap_or(&want));
            work.charge(self.tlb.entries_read);
            let moved = moved?;
            job.done += moved as u32; // at most `len - within`
            if moved < ROW_COST {
                work.look_at_clock();
            }
        }
        Ok(())
    }

    /// Does the bytes at these distances from the starts of both sides, as far as both are contiguous; at most `want`.
    #[inline]
    fn do_some<H: HeldMem, F: Format>(
        &mut self,
        job: &Job,
        work: &mut Work<'_, H, F>,
        host_offset: u64,
        card_offset: u64,
        within: u32,
        want: u64,
    ) -> Result<u64, Failure> {
        let Work { mem, mmu, inside, made, .. } = work;
        // `decode` and `begin` checked that no range wraps.
        let iova = |host: Iova| Iova::new(host.bits() + host_offset);
        let (read, write) = (Access::READ, Access::WRITE);
        match job.task {
            Task::Copy { direction: Direction::FromHost, host, card, .. } => {
                let there = card_view(&mut self.tlb, mmu, (*inside, &mut *made), card, card_offset, want, write)?;
                mem.read(iova(host), there, job.hint).map_err(host_failure)?;
                Ok(there.len() as u64)
            }
            Task::Copy { direction: Direction::ToHost, host, card, .. } => {
                let there = card_view(&mut self.tlb, mmu, (*inside, &mut *made), card, card_offset, want, read)?;
                mem.write(iova(host), there, job.hint).map_err(host_failure)?;
                Ok(there.len() as u64)
            }
            Task::Compare { host, card, .. } => {
                let there = card_view(&mut self.tlb, mmu, (*inside, &mut *made), card, card_offset, want, read)?;
                match mem.compare(iova(host), there).map_err(host_failure)? {
                    None => Ok(there.len() as u64),
                    Some(offset) => Err(Failure(Status::Differs, u64::from(job.done) + offset as u64)),
                }
            }
            Task::Within { from, to, .. } => {
                let source = card_view(&mut self.tlb, mmu, (*inside, &mut *made), from, host_offset, want, read)?;
                let there =
                    card_view(&mut self.tlb, mmu, (*inside, &mut *made), to, card_offset, source.len() as u64, write)?;
                let source = source.sub(0, there.len()).expect("no longer than the source");
                there.copy_from(source, job.hint);
                Ok(there.len() as u64)
            }
            Task::Fill { pattern, card, .. } => {
                let there = card_view(&mut self.tlb, mmu, (*inside, &mut *made), card, card_offset, want, write)?;
                there.fill_pattern(pattern.rotate_right(within % 8 * 8), job.hint);
                Ok(there.len() as u64)
            }
            Task::Shape { .. } | Task::Fence => Ok(want), // `begin` makes no jobs of these
        }
    }

    /// Notes how a descriptor ended.
    #[inline]
    fn finish(&mut self, regs: &Registers, cookie: u32, chained: bool, result: Result<(), Failure>) {
        add(if result.is_ok() { &regs.ok } else { &regs.failed }, 1);
        let (status, detail) = match result {
            Ok(()) => (Status::Ok, 0),
            Err(Failure(status, detail)) => {
                self.shape = None;
                self.skipping = true;
                (status, detail)
            }
        };
        let sequence = CompletionEntry::sequence_of(self.number());
        let word = CompletionEntry { cookie, status: status.code(), sequence }.word();
        self.ended.extend([(status != Status::Ok).then_some(detail), Some(word)]);
        if !chained {
            self.skipping = false;
            end_operation(&mut self.first, regs);
        }
    }

    /// Writes the completions of what has ended.
    fn report<H: HeldMem, F>(&mut self, work: &mut Work<'_, H, F>) {
        if std::mem::take(&mut self.streamed) {
            // A job that goes on in the next step fences there again.
            stream_fence();
            self.streamed = self.job.as_ref().is_some_and(|(job, ..)| job.hint == CopyHint::StreamUnordered);
        }
        let mut reported = 0;
        while reported < self.ended.len() {
            // Up to the end of the ring at once. A detail lies before its word, and so is written before it.
            let slot = self.head & (work.rings.size - 1);
            let n = (self.ended.len() - reported).min(2 * (work.rings.size - slot) as usize);
            let at = work.rings.completions.bits() + u64::from(slot) * CompletionEntry::BYTES as u64;
            if let Err(fault) = work.mem.write_words(Iova::new(at), &self.ended[reported..reported + n]) {
                self.ended.clear();
                self.halt(work.regs, Halt::CompletionFault, fault.at);
                return;
            }
            reported += n;
            self.head = self.head.wrapping_add(n as u32 / 2);
        }
        self.ended.clear();
    }
}

/// Forgets the present operation, and a request to cancel it.
#[inline]
fn end_operation(first: &mut Option<u32>, regs: &Registers) {
    if let Some(first) = first.take() {
        // Only this request: another may have come in the meantime.
        let request = 1 << 32 | u64::from(first);
        if regs.cancel.load(Ordering::Relaxed) == request {
            let _ = regs.cancel.compare_exchange(request, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Refuses a job before its first byte when a range of card memory that it names does not exist.
#[inline]
fn holds_all(job: &Job, memory: &CardMemory) -> Result<(), Failure> {
    let holds = |at: DeviceAddr, pitch: fn(&Shape) -> u64| {
        let DeviceAddr::Card(at) = at else { return Ok(()) };
        let rows = job.shape.as_ref().map_or(0, |s| pitch(s) * u64::from(s.rows - 1));
        match memory.holds(at, rows.saturating_add(job.len.into())) {
            true => Ok(()),
            false => Err(Failure(Status::NoCardMemory, at.bits())),
        }
    };
    match job.task {
        Task::Copy { card, .. } | Task::Fill { card, .. } | Task::Compare { card, .. } => holds(card, |s| s.card_pitch),
        Task::Within { from, to, .. } => {
            holds(from, |s| s.host_pitch)?;
            holds(to, |s| s.card_pitch)
        }
        Task::Shape { .. } | Task::Fence => Ok(()),
    }
}

/// Card memory `offset` bytes behind `at`, as far as it is contiguous.
#[inline]
fn card_view<'m, F: Format>(
    tlb: &mut Tlb,
    mmu: &mut Option<mmu::Held<'m>>,
    (inside, made): (&'m Inside<F>, &mut u64),
    at: DeviceAddr,
    offset: u64,
    want: u64,
    wanted: Access,
) -> Result<VolatileSlice<'m>, Failure> {
    let (card, len) = match at {
        DeviceAddr::Card(at) => (CardAddr::new(at.bits() + offset), want),
        DeviceAddr::Va(at) => {
            let at = DeviceVa::new(at.bits() + offset);
            let mmu = mmu.get_or_insert_with(|| inside.mmu.hold());
            let found = inside.mmu.translate(mmu, tlb, &inside.memory, at, want, wanted);
            found.map_err(|at| Failure(Status::MmuFault, at.bits()))?
        }
    };
    inside.memory.view_counting(card, len, made).map_err(|e| match e {
        Error::NoMemory { at, .. } => Failure(Status::OutOfMemory, at.bits()),
        _ => Failure(Status::NoCardMemory, card.bits()),
    })
}

fn host_failure(fault: DmaFault) -> Failure {
    let status = match fault.reason {
        FaultReason::NotMapped => Status::HostNotMapped,
        FaultReason::NotPermitted => Status::HostNotPermitted,
        _ => Status::HostFault,
    };
    Failure(status, fault.at.bits())
}

fn count(job: &Job, regs: &Registers) {
    let counter = match job.task {
        Task::Copy { direction: Direction::FromHost, .. } => &regs.bytes_h2c,
        Task::Copy { direction: Direction::ToHost, .. } => &regs.bytes_c2h,
        _ => return,
    };
    add(counter, u64::from(job.done));
}

/// Only one thread at a time steps a queue, so its counters need no read-modify-write.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}
