//! A card's channel, driven.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Iova, Span};
use dmalane_engine::{
    Channel, Completion as Ended, DeviceAddr, DeviceFar, Direction, Limits, OpError, Refusal, Refused, Ticket, Transfer,
};
use dmalane_mem::{DmaFault, FaultReason, HostBus, View};

use crate::driver::{Device, Rings, Shelf};
use crate::{Completion, Descriptor, Error, Halt, Status, regs};

/// How long a dropped channel waits for its operations before it stops the card under them.
const DRAIN: Duration = Duration::from_secs(2);
/// The longest sleep for an interrupt: another channel's waiter may have taken ours.
const NAP: Duration = Duration::from_millis(1);
/// Looks at the ring before sleeping.
const SPINS: u32 = 200;
/// Reading a register of a real card takes a microsecond, so a quiet ring is asked about only so often.
const LOOKS_PER_STATUS: u32 = 64;

/// Rings and buffers of channels whose card did not stop: it may still touch them, so they stay as they are for good.
static QUARANTINE: Mutex<Vec<(Rings, VecDeque<Transfer<DeviceFar>>)>> = Mutex::new(Vec::new());

/// A DMA channel of a card: copies between registered host memory and the card's memory. At most 1 GiB per operation.
///
/// Operations end in the order in which they were submitted. Dropping the channel waits up to 2 s for what is in flight,
/// then stops the card's side; memory is released once the card has confirmed that, and otherwise never
/// ([`Card::quarantined`](crate::Card::quarantined)).
pub struct CardChannel<B: HostBus> {
    bus: Arc<B>,
    shelf: Arc<Shelf>,
    /// `None` once given back.
    rings: Option<Rings>,
    index: usize,
    max_len: u64,
    /// Operations submitted so far; also the ticket of the next, and modulo 2^32 the card's number for it.
    tail: u64,
    /// What the card was told of `tail`.
    rung: u64,
    /// The last of them is number `tail - 1`.
    in_flight: VecDeque<Transfer<DeviceFar>>,
    quiet: u32,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Running,
    /// The card was told to stop and may not have done so yet.
    Stopping(String),
    /// The card touches no memory any more.
    Stopped(String),
}

impl<B: HostBus> CardChannel<B> {
    pub(crate) fn start(
        bus: Arc<B>,
        shelf: Arc<Shelf>,
        rings: Rings,
        index: usize,
        max_len: u64,
    ) -> Result<Self, Error> {
        let in_flight = VecDeque::with_capacity(1 << rings.log2);
        let state = State::Running;
        let this =
            Self { bus, shelf, rings: Some(rings), index, max_len, tail: 0, rung: 0, in_flight, quiet: 0, state };
        let device = this.device();
        // What an earlier user of the rings left there would look like completions.
        this.completions().fill(0);
        let [descriptors, completions] = this.rings().iovas();
        device.write(this.register(regs::CH_RING_LOG2), this.rings().log2.into())?;
        device.write64(this.register(regs::CH_RING), descriptors)?;
        device.write64(this.register(regs::CH_COMPLETIONS), completions)?;
        device.until("start a channel", || {
            // A card that is still busy stopping ignores this, so it is said again.
            device.write(this.register(regs::CH_CONTROL), 1)?;
            Ok(device.read(this.register(regs::CH_STATUS))? & regs::STATUS_RUNNING != 0)
        })?;
        Ok(this) // on errors above, the drop stops the card and puts the rings back
    }

    /// Which of the card's channels this is.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Tells the card about everything that was submitted, without waiting for the next poll.
    pub fn ring_doorbell(&mut self) {
        if self.rung != self.tail && self.state == State::Running {
            match self.device().write(self.register(regs::CH_DOORBELL), self.tail as u32) {
                Ok(()) => self.rung = self.tail,
                Err(e) => self.stop(e.to_string()),
            }
        }
    }

    fn device(&self) -> Device<'_, B> {
        Device(&*self.bus)
    }

    fn register(&self, register: u64) -> u64 {
        regs::channel(self.index as u32, register)
    }

    fn rings(&self) -> &Rings {
        self.rings.as_ref().expect("the rings are there until the channel is dropped")
    }

    fn completions(&self) -> View<'_> {
        self.rings().completions.view()
    }

    fn capacity(&self) -> usize {
        1 << self.rings().log2
    }

    /// What keeps a transfer from being accepted, or where its host side is.
    fn check(&self, transfer: &Transfer<DeviceFar>) -> Result<Span<Iova>, Refusal> {
        if let State::Stopping(why) | State::Stopped(why) = &self.state {
            return Err(Refusal::Stopped(why.clone()));
        }
        let Transfer { part, direction, far } = transfer;
        let len = part.len() as u64;
        if len == 0 {
            return Err(Refusal::Empty);
        }
        if len > self.max_len {
            return Err(Refusal::TooLong { len, max: self.max_len });
        }
        let end = match far.at {
            DeviceAddr::Card(at) => at.checked_add(len - 1).map(drop),
            DeviceAddr::Va(at) => at.checked_add(len - 1).map(drop),
        };
        end.ok_or(Refusal::PastTheTop)?;
        let span = far.via.iova_of(part).ok_or(Refusal::NotRegistered)?;
        if !self.bus.owns(far.via.mapping()) {
            return Err(Refusal::NotRegistered);
        }
        if !far.via.mapping().access().contains(host_access(*direction)) {
            return Err(Refusal::NotPermitted);
        }
        if self.in_flight.len() >= self.capacity() {
            return Err(Refusal::Full);
        }
        Ok(span)
    }

    /// Tells the card about new work, lets it work, and collects what has ended. Gives the number collected, and
    /// whether the card did anything.
    fn advance(&mut self, done: &mut Vec<Ended<DeviceFar>>) -> (usize, bool) {
        if self.in_flight.is_empty() {
            return (0, false);
        }
        self.ring_doorbell();
        let worked = self.bus.progress();
        let before = done.len();
        self.collect(done);
        self.quiet = if done.len() > before { 0 } else { self.quiet + 1 };
        if self.quiet >= LOOKS_PER_STATUS || self.state != State::Running {
            self.quiet = 0;
            self.look_at_status(done);
        }
        (done.len() - before, worked)
    }

    /// Collects the operations that the card has reported.
    fn collect(&mut self, done: &mut Vec<Ended<DeviceFar>>) {
        while self.state == State::Running && !self.in_flight.is_empty() {
            let number = self.tail - self.in_flight.len() as u64;
            let slot = number as usize & (self.capacity() - 1);
            let offset = slot * Completion::BYTES;
            let word = self.completions().load_u64(offset + 8).expect("a slot lies within the ring");
            let got = Completion::from_word(word);
            let mark = Completion::sequence_of(number as u32);
            if got.sequence != mark {
                let before = match number.checked_sub(self.capacity() as u64) {
                    Some(lap_before) => Completion::sequence_of(lap_before as u32),
                    None => 0,
                };
                if got.sequence != before {
                    self.stop(format!("the card wrote {word:#x} as completion of operation {number}"));
                }
                return;
            }
            let status = Status::from_code(got.status);
            let (Some(status), true, true) = (status, got.cookie == number as u32, number < self.rung) else {
                self.stop(format!("the card completed operation {number} with {word:#x}"));
                return;
            };
            let Some(transfer) = self.in_flight.pop_front() else { return };
            let result = match status {
                Status::Ok => Ok(()),
                _ => {
                    let detail = self.completions().load_u64(offset).expect("a slot lies within the ring");
                    Err(op_error(status, detail, &transfer))
                }
            };
            done.push(Ended { ticket: Ticket::new(number), transfer, result });
        }
    }

    /// Tells the card to stop. The memory of what is in flight stays here until it has.
    fn stop(&mut self, why: String) {
        if self.state == State::Running {
            self.state = State::Stopping(why);
            // A card that does not take this will not confirm it either.
            let _ = self.device().write(self.register(regs::CH_CONTROL), 0);
        }
    }

    /// Notices that the card has halted, or that it has stopped as it was told; then everything in flight has ended.
    fn look_at_status(&mut self, done: &mut Vec<Ended<DeviceFar>>) {
        // An error reads as something that is neither.
        let status = self.device().read(self.register(regs::CH_STATUS)).unwrap_or(u32::MAX);
        match &self.state {
            State::Running if status == regs::STATUS_RUNNING => {}
            State::Running => {
                // What it completed before counts.
                self.collect(done);
                let why = self.why_halted(status);
                self.stop(why);
            }
            State::Stopping(why) if status == 0 => {
                let why = why.clone();
                let first = self.tail - self.in_flight.len() as u64;
                done.extend(self.in_flight.drain(..).zip(first..).map(|(transfer, number)| {
                    let result = Err(OpError::Stopped(why.clone()));
                    Ended { ticket: Ticket::new(number), transfer, result }
                }));
                self.state = State::Stopped(why);
            }
            State::Stopping(_) | State::Stopped(_) => {}
        }
    }

    fn why_halted(&self, status: u32) -> String {
        let device = self.device();
        let code = device.read(self.register(regs::CH_ERROR)).unwrap_or(u32::MAX);
        let at = device.read64(self.register(regs::CH_ERROR_IOVA)).unwrap_or(u64::MAX);
        match Halt::from_code(code) {
            Some(halt) => format!("{halt}, {}", Iova::new(at)),
            None => format!("status {status:#x}, error {code:#x}"),
        }
    }

    /// Waits until the card has confirmed that it stopped; false when it does not.
    fn wait_for_stop(&mut self) -> bool {
        self.stop("the channel was dropped".to_owned());
        let (device, status) = (self.device(), self.register(regs::CH_STATUS));
        device.until("stop a channel", || Ok(device.read(status)? == 0)).is_ok()
    }
}

/// What the card does to host memory.
fn host_access(direction: Direction) -> Access {
    match direction {
        Direction::ToHost => Access::WRITE,
        Direction::FromHost => Access::READ,
    }
}

/// The card's word for it as an error. `detail` is whatever the card says.
fn op_error(status: Status, detail: u64, transfer: &Transfer<DeviceFar>) -> OpError {
    let fault = |reason| {
        let first = transfer.far.via.iova_of(&transfer.part).map(|span| span.first());
        let done = first.and_then(|first| Iova::new(detail).offset_from(first)).unwrap_or(0);
        let wanted = host_access(transfer.direction);
        OpError::Fault(DmaFault { at: Iova::new(detail), wanted, reason, done })
    };
    match status {
        Status::HostNotMapped => fault(FaultReason::NotMapped),
        Status::HostNotPermitted => fault(FaultReason::NotPermitted),
        Status::NoCardMemory => OpError::NoCardMemory(CardAddr::new(detail)),
        Status::MmuFault => OpError::MmuFault(DeviceVa::new(detail)),
        _ => OpError::Device { status: status.code().into() },
    }
}

impl<B: HostBus> Channel for CardChannel<B> {
    type Far = DeviceFar;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity(), max_len: self.max_len }
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn submit(&mut self, transfer: Transfer<DeviceFar>) -> Result<Ticket, Refused<DeviceFar>> {
        let host = match self.check(&transfer) {
            Ok(host) => host,
            Err(reason) => return Err(Refused { transfer, reason }),
        };
        let number = self.tail;
        let descriptor = Descriptor {
            direction: transfer.direction,
            card: transfer.far.at,
            host: host.first(),
            len: host.len() as u32, // `check`: at most `max_len`, which fits
            cookie: number as u32,
        };
        let offset = (number as usize & (self.capacity() - 1)) * Descriptor::BYTES;
        let slot = self.rings().descriptors.view().sub(offset, Descriptor::BYTES).expect("a slot lies within the ring");
        for (i, word) in descriptor.encode().into_iter().enumerate() {
            slot.store_u64(8 * i, word).expect("four aligned words are a descriptor");
        }
        self.in_flight.push_back(transfer);
        self.tail += 1;
        Ok(Ticket::new(number))
    }

    fn poll(&mut self, done: &mut Vec<Ended<DeviceFar>>) -> usize {
        self.advance(done).0
    }

    fn wait(&mut self, done: &mut Vec<Ended<DeviceFar>>, timeout: Duration) -> usize {
        let before = done.len();
        let (_, mut worked) = self.advance(done);
        if done.len() > before || self.in_flight.is_empty() {
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
                self.look_at_status(done);
                // First the register, then a last look at the ring, then sleep: a completion that the look does not see
                // is one that comes with an interrupt.
                let armed = self.device().write(self.register(regs::CH_INTERRUPT), 1);
                self.advance(done);
                if done.len() == before && armed.is_ok() {
                    self.bus.wait(left.min(NAP));
                }
            }
            worked = self.advance(done).1;
            if done.len() > before || self.in_flight.is_empty() {
                return done.len() - before;
            }
        }
    }
}

impl<B: HostBus> Drop for CardChannel<B> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        let start = Instant::now();
        while !self.in_flight.is_empty() && self.state == State::Running {
            let Some(left) = DRAIN.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else { break };
            self.wait(&mut done, left);
            done.clear();
        }
        let Some(rings) = self.rings.take() else { return };
        if self.wait_for_stop() {
            self.shelf.put_back(self.index, rings);
        } else {
            // The card may still read and write all of this, so it must stay as it is for ever.
            self.shelf.quarantine(self.in_flight.len());
            let kept = (rings, std::mem::take(&mut self.in_flight));
            QUARANTINE.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        }
    }
}

impl<B: HostBus> std::fmt::Debug for CardChannel<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CardChannel")
            .field("index", &self.index)
            .field("in_flight", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}
