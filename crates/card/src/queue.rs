//! A card's channel, driven.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Iova};
use dmalane_dma::{DmaFault, FaultReason, Mmio, VolatileSlice, quarantine};
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, GatherList, HostSlice, Limits, OpError, Operation, Queue,
    QueueAddr, QueueState, Refusal, Refused, StopReason, Ticket, Work,
};

use crate::in_flight::InFlight;
use crate::registers::Registers;
use crate::rings::{Rings, Shelf};
use crate::{ChannelError, CompletionEntry as Entry, Descriptor, Error, Halt, Status, Task, regs};

/// Time that a dropped channel waits for its operations before it stops the card under them.
const DRAIN: Duration = Duration::from_secs(2);
/// The longest sleep for an interrupt: another channel's waiter may have taken ours.
const NAP: Duration = Duration::from_millis(1);
/// Polls of the ring before sleeping.
const SPINS: u32 = 200;
/// Reading a register of a real card takes a microsecond, so a quiet ring is asked about only so often.
const POLLS_PER_STATUS: u32 = 64;

/// A DMA channel of a card. At most 1 GiB per operation.
///
/// Operations end in the order of their submission. Dropping the channel waits up to 2 s for what is in flight,
/// then stops the card's side; memory is released once the card has confirmed that, and otherwise never
/// ([`Card::quarantined`](crate::Card::quarantined)).
pub struct CardQueue<B: Mmio> {
    bus: Arc<B>,
    shelf: Arc<Shelf>,
    /// `None` once given back.
    rings: Option<Rings>,
    index: usize,
    max_len: u64,
    /// Descriptors collected since the start; modulo 2^32 the card's number for the next.
    head: u64,
    /// Descriptors written since the start.
    tail: u64,
    /// The `tail` that the card knows by its doorbell.
    submitted: u64,
    /// Their numbers are their tickets. One that was taken back left a fence behind, which keeps its places in the
    /// ring.
    flying: InFlight,
    /// Of the operations in flight, those of more than one descriptor: their numbers, and how many descriptors.
    long: VecDeque<(u64, u32)>,
    /// Those that were taken back.
    taken_back: BTreeSet<u64>,
    /// Of the first of them: descriptors collected, and how the first of these that failed did, after how many bytes.
    collected: u32,
    failed: Option<(OpError, u64)>,
    /// Tickets of operations to cancel, oldest first. The card has the request for the first.
    cancels: VecDeque<u64>,
    /// Polls since the last completion or reading of the status.
    quiet: u32,
    state: QueueState,
    /// The channel has stopped, and the card has confirmed that it accesses no memory.
    released: bool,
}

impl<B: Mmio> CardQueue<B> {
    pub(crate) fn start(
        bus: Arc<B>,
        shelf: Arc<Shelf>,
        rings: Rings,
        index: usize,
        max_len: u64,
    ) -> Result<Self, Error> {
        let mut this = Self {
            flying: InFlight::new(),
            long: VecDeque::new(),
            bus,
            shelf,
            rings: Some(rings),
            index,
            max_len,
            head: 0,
            tail: 0,
            submitted: 0,
            taken_back: BTreeSet::new(),
            collected: 0,
            failed: None,
            cancels: VecDeque::new(),
            quiet: 0,
            state: QueueState::default(),
            released: false,
        };
        this.start_channel()?;
        Ok(this) // on an error the drop stops the card and puts the rings back
    }

    /// Starts a card's channel that has stopped.
    fn start_channel(&mut self) -> Result<(), Error> {
        (self.head, self.tail, self.submitted) = (0, 0, 0);
        (self.collected, self.failed, self.quiet) = (0, None, 0);
        let device = self.registers();
        // Entries of an earlier user of the rings would be taken for completions.
        self.completions().fill(0);
        let [descriptors, completions] = self.rings().iovas();
        device.write(self.register(regs::CH_RING_LOG2), self.rings().log2.into())?;
        device.write64(self.register(regs::CH_RING), descriptors)?;
        device.write64(self.register(regs::CH_COMPLETIONS), completions)?;
        device.until("start a channel", || {
            // A card that is still busy stopping ignores this, so it is repeated.
            device.write(self.register(regs::CH_CONTROL), 1)?;
            Ok(device.read(self.register(regs::CH_STATUS))? & regs::STATUS_RUNNING != 0)
        })?;
        self.released = false;
        self.state.restart();
        Ok(())
    }

    /// Places in the ring that are free: a plain operation takes one, a shape one more, a gather list one for each of
    /// its fragments.
    pub fn room(&self) -> usize {
        self.capacity() - (self.tail - self.head) as usize
    }

    fn registers(&self) -> Registers<'_, B> {
        Registers(&*self.bus)
    }

    fn register(&self, register: u64) -> u64 {
        regs::channel(self.index as u32, register)
    }

    fn rings(&self) -> &Rings {
        self.rings.as_ref().expect("the rings are there until the channel is dropped")
    }

    /// The descriptors of an operation in flight.
    fn descriptors_of(&self, number: u64) -> Range<u64> {
        let before = self.long.iter().take_while(|(long, _)| *long < number);
        let extra: u64 = before.map(|(_, descriptors)| u64::from(descriptors - 1)).sum();
        let first = self.head - u64::from(self.collected) + (number - self.flying.oldest()) + extra;
        let own = self.long.binary_search_by_key(&number, |(long, _)| *long);
        first..first + own.map_or(1, |place| u64::from(self.long[place].1))
    }

    fn completions(&self) -> VolatileSlice<'_> {
        self.rings().completions.as_volatile_slice()
    }

    fn capacity(&self) -> usize {
        1 << self.rings().log2
    }

    /// The descriptor and the bytes of a plain copy that may be accepted: the fast path. `None` leaves the operation to
    /// the general one, which says what is wrong.
    #[inline]
    fn plain_copy(&self, operation: &Operation) -> Option<(Descriptor, u64)> {
        let Operation { work: Work::Copy { direction, host, at }, shape: None, cache } = operation else {
            return None;
        };
        let len = host.slice.len() as u64;
        let mapping = host.via.as_ref()?.mapping();
        let span = mapping.iova_of(&host.slice)?; // of no bytes there is none
        let good = self.state.is_running()
            && len <= self.max_len
            && at.advance(len - 1).is_some()
            && mapping.access().contains(direction.host_access())
            && self.bus.owns(mapping)
            && self.tail - self.head < self.capacity() as u64;
        let task = Task::Copy { direction: *direction, host: span.first(), card: *at, len: len as u32 };
        good.then_some((Descriptor { task, chained: false, cache: *cache, cookie: self.tail as u32 }, len))
    }

    /// Checks whether an operation can be accepted; gives the number of its descriptors.
    fn check(&self, operation: &Operation) -> Result<u32, Refusal> {
        self.state.check_running()?;
        operation.admit(Capabilities::all(), self.limits())?;
        operation.check_registered(&*self.bus)?;
        let slots = match (&operation.shape, &operation.work) {
            (Some(_), _) => 2,
            (None, Work::Gather(g)) => g.parts(),
            (None, _) => 1,
        };
        if slots > self.room() {
            return Err(Refusal::Full);
        }
        Ok(slots as u32)
    }

    /// Writes the descriptors, `slots` of them, of an operation that was checked.
    fn write(&mut self, operation: &Operation, slots: u32) {
        let put = |at: u64, task: Task, chained: bool| {
            self.put(at, Descriptor { task, chained, cache: operation.cache, cookie: at as u32 });
        };
        let mut at = self.tail;
        if let Some(shape) = &operation.shape {
            let (host_pitch, card_pitch) = (shape.host_pitch, shape.device_pitch);
            let task = Task::Shape { host_pitch, card_pitch, rows: shape.rows };
            self.put(at, Descriptor { chained: true, cookie: at as u32, ..task.into() });
            at += 1;
        }
        // `check`: no more than `max_len`, which fits, and no row is longer than all of them.
        let len = operation.shape.as_ref().map_or(operation.bytes(), |s| s.row) as u32;
        let iova = |host: &HostSlice| host.iova().expect("`check` looked").first();
        match &operation.work {
            Work::Copy { direction, host, at: card } => {
                put(at, Task::Copy { direction: *direction, host: iova(host), card: *card, len }, false);
            }
            Work::Compare { host, at: card } => put(at, Task::Compare { host: iova(host), card: *card, len }, false),
            Work::Within { from, to, .. } => put(at, Task::Within { from: *from, to: *to, len }, false),
            Work::Fill { at: card, pattern, .. } => put(at, Task::Fill { pattern: *pattern, card: *card, len }, false),
            Work::Fence => self.put(at, Descriptor { cookie: at as u32, ..Task::Fence.into() }),
            Work::Gather(g) => {
                let last = at + u64::from(slots) - 1;
                for (at, (host, card, len)) in (at..).zip(fragments(g)) {
                    put(at, Task::Copy { direction: g.direction, host, card, len: len as u32 }, at < last);
                }
            }
        }
    }

    #[inline]
    fn put(&self, number: u64, descriptor: Descriptor) {
        let offset = (number as usize & (self.capacity() - 1)) * Descriptor::BYTES;
        let slot = self
            .rings()
            .descriptors
            .as_volatile_slice()
            .sub(offset, Descriptor::BYTES)
            .expect("a slot lies within the ring");
        for (i, word) in descriptor.encode().into_iter().enumerate() {
            slot.store_u64(8 * i, word).expect("four aligned words are a descriptor");
        }
    }

    /// Tells the card about new work, lets it work, and collects what has ended. Gives the number collected, and
    /// whether the card did anything.
    fn advance(&mut self, done: &mut Vec<Completion>) -> (usize, bool) {
        if self.flying.is_empty() {
            return (0, false);
        }
        self.flush();
        let worked = self.bus.progress();
        let (before, head) = (done.len(), self.head);
        self.collect(done);
        if self.head != head {
            self.quiet = 0;
        } else {
            self.quiet += 1;
        }
        if self.quiet >= POLLS_PER_STATUS || !self.state.is_running() {
            self.quiet = 0;
            self.check_status(done);
        }
        (done.len() - before, worked)
    }

    /// The completion of the next descriptor, once the card has written it.
    fn next_completion(&mut self) -> Option<(Status, usize)> {
        let number = self.head;
        let offset = (number as usize & (self.capacity() - 1)) * Entry::BYTES;
        let word = self.completions().load_u64(offset + 8).expect("a slot lies within the ring");
        let got = Entry::from_word(word);
        if got.sequence != Entry::sequence_of(number as u32) {
            let before = match number.checked_sub(self.capacity() as u64) {
                Some(lap_before) => Entry::sequence_of(lap_before as u32),
                None => 0,
            };
            if got.sequence != before {
                self.stop(StopReason::Protocol(ChannelError::NotDue { word, number }.into()));
            }
            return None;
        }
        let status = Status::from_code(got.status);
        let (Some(status), true, true) = (status, got.cookie == number as u32, number < self.submitted) else {
            self.stop(StopReason::Protocol(ChannelError::BadCompletion { word, number }.into()));
            return None;
        };
        Some((status, offset))
    }

    /// The fast path: collects the operations of one descriptor that have ended well, up to the first other one.
    fn collect_plain(&mut self, done: &mut Vec<Completion>) {
        let Self { rings: Some(rings), flying, long, head, state, .. } = self else { return };
        if !self.cancels.is_empty() || !self.taken_back.is_empty() || !state.is_running() {
            return;
        }
        // None where the oldest is of more than one descriptor, some of which may have been collected.
        let plain = long.front().map_or(flying.len() as u64, |(number, _)| number - flying.oldest());
        let n = ended_well(rings, *head, plain) as usize;
        flying.pop_into(n, done);
        (0..n).for_each(|_| state.ended());
        *head += n as u64;
    }

    /// Collects the operations that the card has reported.
    fn collect(&mut self, done: &mut Vec<Completion>) {
        self.collect_plain(done);
        while self.state.is_running() && !self.flying.is_empty() {
            let number = self.flying.oldest();
            let long = self.long.front().filter(|(long, _)| *long == number);
            let descriptors = long.map_or(1, |(_, descriptors)| *descriptors);
            // All but the last, which ends the operation.
            let well = ended_well(self.rings(), self.head, (descriptors - 1 - self.collected).into());
            self.head += well;
            self.collected += well as u32;
            let Some((status, offset)) = self.next_completion() else { return };
            self.head += 1;
            let Some(operation) = self.flying.front() else { return };
            if status != Status::Ok && self.failed.is_none() && !self.taken_back.contains(&number) {
                let detail = self.completions().load_u64(offset).expect("a slot lies within the ring");
                self.failed = Some(failure(status, detail, operation, self.collected));
            }
            self.collected += 1;
            if self.collected < descriptors {
                continue;
            }
            let Some(completion) = self.flying.pop() else { return };
            if descriptors > 1 {
                self.long.pop_front();
            }
            self.collected = 0;
            let failed = self.failed.take();
            if self.cancels.front() == Some(&number) {
                self.cancels.pop_front();
                self.send_cancel();
            }
            if self.taken_back.remove(&number) {
                continue;
            }
            done.push(self.end(completion, failed));
        }
    }

    /// Counts the end of an operation, which has ended well, or failed after a number of bytes.
    fn end(&mut self, mut completion: Completion, failed: Option<(OpError, u64)>) -> Completion {
        if let Some((error, bytes)) = failed {
            (completion.result, completion.bytes) = (Err(error), bytes);
        }
        self.state.ended();
        completion
    }

    /// Checks for a halt of the card, and for the confirmation of a stop, with which everything in flight ends, as with
    /// the end of the card.
    fn check_status(&mut self, done: &mut Vec<Completion>) {
        // A failed read yields an unknown status.
        let status = self.registers().read(self.register(regs::CH_STATUS)).unwrap_or(u32::MAX);
        match self.state.stopped() {
            None if status == regs::STATUS_RUNNING => {}
            None => {
                // Operations that it completed before the halt count as completed.
                self.collect(done);
                let reason = self.why_halted(status);
                self.stop(reason);
            }
            Some(reason) if status == 0 || self.bus.is_gone() => {
                // A device that is gone has not obeyed, whatever the queue was stopped for.
                let reason = match reason {
                    StopReason::Lost(_) => reason.clone(),
                    _ if self.bus.is_gone() => StopReason::Lost("the device is gone".into()),
                    _ => reason.clone(),
                };
                let stopped = OpError::Stopped(reason);
                self.long.clear();
                while let Some(completion) = self.flying.pop() {
                    if !self.taken_back.remove(&completion.ticket.number()) {
                        done.push(self.end(completion, Some((stopped.clone(), 0))));
                    }
                }
                self.cancels.clear();
                self.released = true;
            }
            Some(_) => {
                // Repeated, because the card may have missed the first.
                let _ = self.registers().write(self.register(regs::CH_CONTROL), 0);
            }
        }
    }

    fn why_halted(&self, status: u32) -> StopReason {
        let device = self.registers();
        let code = match device.read(self.register(regs::CH_ERROR)) {
            Ok(code) => code,
            Err(e) => return StopReason::Lost(e.into()),
        };
        if (status, code) == (u32::MAX, u32::MAX) {
            return StopReason::Lost(ChannelError::Gone.into());
        }
        let at = Iova::new(device.read64(self.register(regs::CH_ERROR_IOVA)).unwrap_or(u64::MAX));
        match Halt::from_code(code) {
            Some(halt) => StopReason::Device(ChannelError::Halted { halt, at }.into()),
            None => StopReason::Protocol(ChannelError::UnknownStatus { status, code }.into()),
        }
    }

    /// Requests the oldest cancellation from the card, if there is one.
    fn send_cancel(&mut self) {
        if let Some(number) = self.cancels.front().filter(|number| self.flying.contains(**number)) {
            let descriptor = self.descriptors_of(*number).start as u32;
            let register = self.register(regs::CH_CANCEL);
            // The valid bit last: until then the card sees no request, or the one before, which is done. A card that
            // does not take it just continues.
            let device = self.registers();
            let _ = device.write(register + 4, 0);
            let _ = device.write(register, descriptor);
            let _ = device.write(register + 4, 1);
        }
    }

    /// Waits until the card has confirmed that it stopped; false when it does not.
    fn wait_for_stop(&mut self) -> bool {
        let _ = self.registers().write(self.register(regs::CH_CONTROL), 0);
        let (device, status) = (self.registers(), self.register(regs::CH_STATUS));
        device.until("stop a channel", || Ok(device.0.is_gone() || device.read(status)? == 0)).is_ok()
    }
}

/// How many descriptors from this one on have ended well, at most `most`.
#[inline]
fn ended_well(rings: &Rings, head: u64, most: u64) -> u64 {
    let ring = rings.completions.as_volatile_slice();
    let mask = (1usize << rings.log2) - 1;
    let ended = |number: &u64| {
        let cookie = *number as u32;
        let good = Entry { cookie, status: Status::Ok.code(), sequence: Entry::sequence_of(cookie) }.word();
        ring.load_u64((*number as usize & mask) * Entry::BYTES + 8) == Some(good)
    };
    (head..head + most).take_while(ended).count() as u64
}

/// The copies of a gather list that was checked: where in host memory, where on the card, how many bytes.
fn fragments(gather: &GatherList) -> impl Iterator<Item = (Iova, DeviceAddr, u64)> {
    let mut hosts = gather.host.iter().filter_map(HostSlice::iova);
    let mut device = gather.device.iter().copied();
    // The sides of the next, of which nothing may be left.
    let (mut host, mut left) = (Iova::new(0), 0);
    let (mut at, mut have) = (DeviceAddr::Card(CardAddr::new(0)), 0);
    std::iter::from_fn(move || {
        if left == 0 {
            let span = hosts.next()?;
            (host, left) = (span.first(), span.len());
        }
        if have == 0 {
            (at, have) = device.next()?;
        }
        let (len, fragment) = (left.min(have), (host, at));
        (left, have) = (left - len, have - len);
        // Not past the top of a space, where nothing is left.
        host = host.checked_add(len).unwrap_or(host);
        at = at.advance(len).unwrap_or(at);
        Some((fragment.0, fragment.1, len))
    })
}

/// The error for a status of the card, and the bytes done before. `detail` is what the card reported for descriptor
/// `index` of the operation.
fn failure(status: Status, detail: u64, operation: &Operation, index: u32) -> (OpError, u64) {
    let total = operation.bytes();
    // The fragment that the descriptor stands for: where its sides begin, and the bytes before.
    let (host, card, before, wanted) = match &operation.work {
        Work::Copy { direction, host, at } => (host.iova().map(|s| s.first()), Some(*at), 0, direction.host_access()),
        Work::Compare { host, at } => (host.iova().map(|s| s.first()), Some(*at), 0, Access::READ),
        Work::Gather(g) => {
            let before = fragments(g).take(index as usize).map(|(_, _, len)| len).sum();
            let fragment = fragments(g).nth(index as usize);
            (fragment.map(|p| p.0), fragment.map(|p| p.1), before, g.direction.host_access())
        }
        Work::Within { to, .. } => (None, Some(*to), 0, Access::READ),
        Work::Fill { at, .. } => (None, Some(*at), 0, Access::READ),
        Work::Fence => (None, None, 0, Access::READ),
    };
    // From a distance on one side to bytes of rows.
    let shape = operation.shape.as_deref();
    let rows = |distance: u64, pitch: u64, row: u64| match distance.checked_div(pitch) {
        Some(rows) if pitch >= row => rows.saturating_mul(row).saturating_add((distance % pitch).min(row)),
        _ => 0, // rows that overlap: unknown
    };
    let done_on_host = |at: u64| {
        let distance = host.and_then(|first| Iova::new(at).offset_from(first)).unwrap_or(0);
        shape.map_or(distance, |s| rows(distance, s.host_pitch, s.row))
    };
    let done_on_card = |at: u64| {
        let Some(first) = card else { return 0 };
        let distance = at.saturating_sub(first.bits());
        shape.map_or(distance, |s| rows(distance, s.device_pitch, s.row))
    };
    let fault = |reason| {
        let done = done_on_host(detail);
        (OpError::Fault(DmaFault { at: Iova::new(detail), wanted, reason, done }), done)
    };
    let within = matches!(operation.work, Work::Within { .. });
    let (error, done) = match status {
        Status::HostNotMapped => fault(FaultReason::NotMapped),
        Status::HostNotPermitted => fault(FaultReason::NotPermitted),
        // Of a copy within the card it may be either side, so the bytes done are unknown.
        Status::NoCardMemory => (OpError::NoCardMemory(CardAddr::new(detail)), 0),
        Status::MmuFault if within => (OpError::MmuFault(DeviceVa::new(detail)), 0),
        Status::MmuFault => (OpError::MmuFault(DeviceVa::new(detail)), done_on_card(detail)),
        Status::Cancelled => (OpError::Cancelled, detail),
        Status::Differs => (OpError::Differs { offset: detail.saturating_add(before) }, detail),
        _ => (OpError::Device { status: status.code().into() }, 0),
    };
    // From the card, so it may be any number.
    (error, done.saturating_add(before).min(total))
}

impl<B: Mmio> Queue for CardQueue<B> {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity(), max_len: self.max_len, max_parts: self.capacity() }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::all()
    }

    fn in_flight(&self) -> usize {
        self.state.in_flight()
    }

    #[inline]
    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let (slots, bytes) = match self.plain_copy(&operation) {
            Some((descriptor, len)) => {
                self.put(self.tail, descriptor);
                (1, len)
            }
            None => match self.check(&operation) {
                Ok(slots) => {
                    self.write(&operation, slots);
                    (slots, operation.bytes())
                }
                Err(reason) => return Err(Refused { operation, reason }),
            },
        };
        let ticket = self.state.accept();
        let number = self.flying.push(operation, bytes);
        if slots > 1 {
            self.long.push_back((number, slots));
        }
        self.tail += u64::from(slots);
        debug_assert_eq!(ticket.number(), number);
        Ok(ticket)
    }

    #[inline]
    fn flush(&mut self) {
        if self.submitted != self.tail && self.state.is_running() {
            // Before the write: one that fails may have arrived, and what the card may know of is not taken back.
            self.submitted = self.tail;
            if let Err(e) = self.registers().write(self.register(regs::CH_DOORBELL), self.tail as u32) {
                self.stop(StopReason::Lost(e.into()));
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.advance(done).0
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let before = done.len();
        let (_, mut worked) = self.advance(done);
        if done.len() > before || self.flying.is_empty() {
            return done.len() - before; // without asking for the time
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut spins = 0;
        loop {
            let left = deadline.map_or(NAP, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return 0;
            }
            if worked {
                spins = 0;
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                self.check_status(done);
                // First the register, then a last check of the ring, then sleep: a completion that the check misses
                // comes with an interrupt.
                let armed = self.registers().write(self.register(regs::CH_INTERRUPT), 1);
                self.advance(done);
                if done.len() == before && armed.is_ok() {
                    self.bus.wait(left.min(NAP));
                }
            }
            worked = self.advance(done).1;
            if done.len() > before || self.flying.is_empty() {
                return done.len() - before;
            }
        }
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        let number = ticket.number();
        if !self.flying.contains(number) || self.taken_back.contains(&number) {
            return Cancelled::Unknown;
        }
        let descriptors = self.descriptors_of(number);
        if descriptors.start >= self.submitted
            && let Some(operation) = self.flying.take(number)
        {
            // Its place in the ring stays: what comes after it has its number already.
            for at in descriptors {
                self.put(at, Descriptor { cookie: at as u32, ..Task::Fence.into() });
            }
            self.taken_back.insert(number);
            self.state.ended();
            return Cancelled::Removed(operation);
        }
        if let Err(place) = self.cancels.binary_search(&number) {
            self.cancels.insert(place, number);
            if place == 0 {
                self.send_cancel();
            }
        }
        Cancelled::Requested
    }

    fn stop(&mut self, reason: StopReason) {
        if self.state.stop(reason) {
            // A card that does not take this will not confirm it either.
            let _ = self.registers().write(self.register(regs::CH_CONTROL), 0);
        }
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn restart(&mut self) -> bool {
        if !self.state.is_running() && !self.released && self.flying.is_empty() {
            // Nothing in flight that a poll would have waited for.
            self.check_status(&mut Vec::new());
            self.bus.progress();
            self.check_status(&mut Vec::new());
        }
        self.released && self.flying.is_empty() && self.start_channel().is_ok()
    }
}

impl<B: Mmio> Drop for CardQueue<B> {
    fn drop(&mut self) {
        if self.state.is_of_parent() {
            // A child of `fork` has a copy: the channel, and what it uses, are its parent's.
            std::mem::forget((self.rings.take(), std::mem::replace(&mut self.flying, InFlight::new())));
            return;
        }
        let mut done = Vec::new();
        let start = Instant::now();
        while !self.flying.is_empty() && self.state.is_running() {
            let Some(left) = DRAIN.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else { break };
            self.wait(&mut done, left);
            done.clear();
        }
        let Some(rings) = self.rings.take() else { return };
        let flying = std::mem::replace(&mut self.flying, InFlight::new());
        if self.wait_for_stop() {
            self.shelf.put_back(self.index, rings);
        } else {
            // The card may still read and write all of this, so it is never freed.
            self.shelf.quarantine(flying.len() - self.taken_back.len());
            let bytes = rings.len() + flying.bytes();
            quarantine((rings, flying), bytes);
        }
    }
}

dmalane_dma::debug_as!(CardQueue<B>, [B: Mmio], |it| "CardQueue(index: {}, in_flight: {})", it.index, it.in_flight());
