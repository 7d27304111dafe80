//! The driver of QEMU's `edu` device, a PCI device for teaching with a small DMA engine (docs/specs/edu.rst of QEMU).
//!
//! It copies between memory and a buffer of 4 KiB of its own, one copy at a time, each of which takes 100 ms, and raises an interrupt.
//! It knows nothing of the port that it is driven through: any [`HostBus`] does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, Iova, PageSize};
use dmalane_dma::{self as mem, DmaFault, FaultReason, HostBus};
use dmalane_queue::{
    Abilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue, Refusal, Refused, Ticket, Work,
};

use crate::{Bdf, Error, FaultLog, SeenFault, VfioBus};

/// Vendor and device number of an `edu`.
pub const EDU_ID: (u16, u16) = (0x1234, 0x11e8);

/// The registers, all in BAR 0.
mod regs {
    pub(super) const ID: u64 = 0x00;
    /// Reads as the inverse of what was written.
    pub(super) const LIVENESS: u64 = 0x04;
    pub(super) const INTERRUPTS: u64 = 0x24;
    pub(super) const ACKNOWLEDGE: u64 = 0x64;
    pub(super) const DMA_FROM: u64 = 0x80;
    pub(super) const DMA_TO: u64 = 0x88;
    pub(super) const DMA_LEN: u64 = 0x90;
    pub(super) const DMA_COMMAND: u64 = 0x98;

    pub(super) const RUN: u64 = 1;
    pub(super) const TO_HOST: u64 = 2;
    pub(super) const INTERRUPT: u64 = 4;
}

/// Where the device's own buffer is, as its DMA engine sees it.
const BUFFER: u64 = 0x4_0000;
/// Bytes of it that can be used. It has 4096, but QEMU up to 7.2 takes a copy that reaches the last one for one that runs past the end, and ends.
const BUFFER_LEN: u64 = 4095;
/// Bytes of one operation, so that two fit.
const MAX_LEN: u64 = 2048;
/// Operations that wait in the channel; the device has one at a time.
const DEPTH: usize = 4;
/// Twenty times what an operation takes.
const STUCK: Duration = Duration::from_secs(2);
/// The longest sleep for an interrupt: another may have taken ours.
const NAP: Duration = Duration::from_millis(20);

/// What a device that did not end its work may still write: kept for good.
static QUARANTINE: Mutex<Vec<Operation>> = Mutex::new(Vec::new());

/// An `edu` device on a bus.
pub struct Edu<B: HostBus> {
    bus: Arc<B>,
    /// It is at work for somebody.
    busy: Arc<AtomicBool>,
}

impl Edu<VfioBus> {
    /// Takes a device of the kernel's that is an `edu`.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; those of the bus.
    pub fn open(bus: Arc<VfioBus>) -> Result<Self, Error> {
        let bdf = bus.bdf();
        let wrong = |found: String| Error::WrongDevice { bdf, wanted: "an edu device", found };
        let (vendor, device) = bus.device().id()?;
        if (vendor, device) != EDU_ID {
            return Err(wrong(format!("{vendor:04x}:{device:04x}")));
        }
        Self::new(bus).map_err(|e| wrong(e.to_string()))
    }
}

impl<B: HostBus> Edu<B> {
    /// Takes the device of a bus.
    ///
    /// # Errors
    /// Those of the bus; [`mem::Error::NoRegister`] when its registers are not those of an `edu`.
    pub fn new(bus: Arc<B>) -> Result<Self, mem::Error> {
        let id = bus.read32(0, regs::ID)?;
        bus.write32(0, regs::LIVENESS, 0x1234_5678)?;
        if id & 0xff != 0xed || bus.read32(0, regs::LIVENESS)? != !0x1234_5678 {
            return Err(mem::Error::NoRegister { bar: 0, offset: regs::ID, bytes: 4 });
        }
        Ok(Self { bus, busy: Arc::default() })
    }

    /// The bus.
    pub fn bus(&self) -> &Arc<B> {
        &self.bus
    }

    /// Bytes of the device's own memory, from [`CardAddr`] 0 on.
    pub fn memory(&self) -> u64 {
        BUFFER_LEN
    }

    /// A queue to the device's memory. There is one DMA engine, so queues take turns, operation by operation.
    pub fn queue(&self) -> EduQueue<B> {
        EduQueue {
            bus: self.bus.clone(),
            busy: self.busy.clone(),
            faults: None,
            waiting: VecDeque::new(),
            running: None,
            ended: Vec::new(),
            next: 0,
            stopped: None,
        }
    }

    /// Copies by any bus address: registrations are not asked, nor does anybody own the memory. `at` may be of a BAR of another device
    /// ([`Container::map_peer`](crate::Container::map_peer)). Waits for the end.
    ///
    /// # Errors
    /// [`OpError::NoCardMemory`]; [`OpError::Stopped`] when the device does not end, after which nobody gets it any more.
    pub fn copy(&self, direction: Direction, at: Iova, card: CardAddr, len: u64) -> Result<(), OpError> {
        check(card, len)?;
        let began = Instant::now();
        let late = || began.elapsed() > STUCK;
        while self.busy.swap(true, Ordering::Acquire) {
            if late() {
                return Err(OpError::Stopped("another channel keeps the device".into()));
            }
            std::thread::sleep(NAP);
        }
        start(&*self.bus, direction, at, card, len).map_err(lost)?;
        let began = Instant::now();
        while is_running(&*self.bus).map_err(lost)? {
            if began.elapsed() > STUCK {
                return Err(OpError::Stopped(format!("the device did not end an operation within {STUCK:?}")));
            }
            self.bus.wait(NAP);
        }
        acknowledge(&*self.bus).map_err(lost)?;
        self.busy.store(false, Ordering::Release);
        Ok(())
    }
}

/// Does the device have this memory? It ends QEMU when told to copy what it does not have.
fn check(card: CardAddr, len: u64) -> Result<(), OpError> {
    let end = card.bits().checked_add(len).filter(|end| *end <= BUFFER_LEN && len <= MAX_LEN);
    end.map(drop).ok_or(OpError::NoCardMemory(card))
}

fn lost(error: mem::Error) -> OpError {
    OpError::Stopped(error.to_string())
}

fn start<B: HostBus + ?Sized>(
    bus: &B,
    direction: Direction,
    host: Iova,
    card: CardAddr,
    len: u64,
) -> Result<(), mem::Error> {
    let device = BUFFER + card.bits();
    let (from, to, way) = match direction {
        Direction::FromHost => (host.bits(), device, 0),
        Direction::ToHost => (device, host.bits(), regs::TO_HOST),
    };
    let command = regs::RUN | regs::INTERRUPT | way;
    for (register, value) in
        [(regs::DMA_FROM, from), (regs::DMA_TO, to), (regs::DMA_LEN, len), (regs::DMA_COMMAND, command)]
    {
        // These take a word of 64 bits in one piece.
        bus.write_bytes(0, register, &value.to_le_bytes())?;
    }
    Ok(())
}

fn is_running<B: HostBus + ?Sized>(bus: &B) -> Result<bool, mem::Error> {
    Ok(u64::from(bus.read32(0, regs::DMA_COMMAND)?) & regs::RUN != 0)
}

/// Takes note of the interrupt: until then the device raises no further one.
fn acknowledge<B: HostBus + ?Sized>(bus: &B) -> Result<(), mem::Error> {
    let raised = bus.read32(0, regs::INTERRUPTS)?;
    bus.write32(0, regs::ACKNOWLEDGE, raised)
}

/// Copies between registered memory and the buffer of an [`Edu`]: at most 2048 bytes an operation, 100 ms each.
///
/// The far end is an address of the device's memory, 0 to 4094; one by which the device's MMU would go ends in an error, since there
/// is none. A device that does not end an operation within 2 s is given up, with the memory of that operation.
pub struct EduQueue<B: HostBus> {
    bus: Arc<B>,
    busy: Arc<AtomicBool>,
    faults: Option<(FaultLog, Bdf)>,
    waiting: VecDeque<(Ticket, Operation)>,
    running: Option<(Ticket, Operation, Instant)>,
    ended: Vec<Completion>,
    next: u64,
    stopped: Option<String>,
}

impl<B: HostBus> EduQueue<B> {
    /// Reports what the IOMMU stopped as the operation's fault. Without, nobody learns of it but the kernel's log: the device does not
    /// say.
    #[must_use]
    pub fn with_faults(mut self, log: FaultLog, bdf: Bdf) -> Self {
        self.faults = Some((log, bdf));
        self
    }

    /// Begins with the next operation, if the device is free. One that the device cannot do ends at once.
    fn begin(&mut self) {
        while self.running.is_none() && !self.waiting.is_empty() {
            if self.stopped.is_none() && self.busy.swap(true, Ordering::Acquire) {
                return; // another channel's turn
            }
            let Some((ticket, operation)) = self.waiting.pop_front() else { return };
            match self.give(&operation) {
                Ok(()) => self.running = Some((ticket, operation, Instant::now())),
                Err(e) => {
                    if self.stopped.is_none() {
                        self.busy.store(false, Ordering::Release);
                    }
                    self.ended.push(Completion { ticket, operation, result: Err(e), bytes: 0 });
                }
            }
        }
    }

    fn give(&self, operation: &Operation) -> Result<(), OpError> {
        if let Some(why) = &self.stopped {
            return Err(OpError::Stopped(why.clone()));
        }
        let Work::Copy { direction, host, at } = &operation.work else {
            return Err(Refusal::Unsupported(operation.needs()).into());
        };
        let card = match *at {
            DeviceAddr::Card(card) => card,
            DeviceAddr::Va(va) => return Err(OpError::MmuFault(va)),
        };
        let len = operation.bytes();
        check(card, len)?;
        // It was registered when it was submitted, and the operation holds the registration.
        let host = host.iova().ok_or(Refusal::NotRegistered)?;
        start(&*self.bus, *direction, host.first(), card, len).map_err(lost)
    }

    /// Ends what the device has ended. Moves nothing while the device is at work; one that does not end stays in flight for good, since
    /// the device may still write its memory.
    fn end(&mut self) {
        let Some((_, _, began)) = &self.running else { return };
        let done = match is_running(&*self.bus) {
            Ok(false) => acknowledge(&*self.bus),
            Ok(true) if began.elapsed() <= STUCK => return,
            Ok(true) => {
                self.stopped.get_or_insert_with(|| format!("the device did not end an operation within {STUCK:?}"));
                return;
            }
            Err(e) => Err(e),
        };
        if let Err(e) = done {
            self.stopped = Some(e.to_string());
            return;
        }
        let Some((ticket, operation, _)) = self.running.take() else { return };
        self.busy.store(false, Ordering::Release);
        let (result, bytes) = match self.fault(&operation) {
            None => (Ok(()), operation.bytes()),
            Some(fault) => (Err(fault.into()), 0),
        };
        self.ended.push(Completion { ticket, operation, result, bytes });
    }

    /// What the kernel's log says of the operation that has just ended.
    fn fault(&mut self, operation: &Operation) -> Option<DmaFault> {
        let (log, bdf) = self.faults.as_mut()?;
        let Work::Copy { host, .. } = &operation.work else { return None };
        let host = host.iova()?;
        let page = host.first().align_down(PageSize::SIZE_4K);
        let ours = |f: &SeenFault| f.bdf == *bdf && f.at >= page && f.at <= host.last();
        let seen = log.take().into_iter().find(ours)?;
        let wanted = if seen.write { Access::WRITE } else { Access::READ };
        Some(DmaFault { at: seen.at.max(host.first()), wanted, reason: FaultReason::NotMapped, done: 0 })
    }

    fn check(&self, operation: &Operation) -> Result<(), Refusal> {
        operation.admit(self.abilities(), self.limits())?;
        if let Work::Copy { direction, host, .. } = &operation.work {
            host.check(&*self.bus, direction.host_access())?;
        }
        match &self.stopped {
            Some(why) => Err(Refusal::Stopped(why.clone())),
            None if self.in_flight() >= DEPTH => Err(Refusal::Full),
            None => Ok(()),
        }
    }
}

impl<B: HostBus> Queue for EduQueue<B> {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: DEPTH, max_len: MAX_LEN }
    }

    fn abilities(&self) -> Abilities {
        Abilities::FROM_HOST | Abilities::TO_HOST | Abilities::ORDERED
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + usize::from(self.running.is_some()) + self.ended.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        if let Err(reason) = self.check(&operation) {
            return Err(Refused { operation, reason });
        }
        let ticket = Ticket::new(self.next);
        self.next += 1;
        self.waiting.push_back((ticket, operation));
        Ok(ticket)
    }

    fn flush(&mut self) {
        self.begin();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.end();
        self.begin();
        let count = self.ended.len();
        done.append(&mut self.ended);
        count
    }

    fn halted(&self) -> Option<String> {
        self.stopped.clone()
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let count = self.poll(done);
            let left = deadline.map_or(NAP, |deadline| deadline.saturating_duration_since(Instant::now()));
            if count > 0 || self.in_flight() == 0 || left.is_zero() {
                return count;
            }
            self.bus.wait(left.min(NAP));
        }
    }
}

impl<B: HostBus> Drop for EduQueue<B> {
    /// Waits for what the device is doing; what it has not begun with is let go of.
    fn drop(&mut self) {
        self.waiting.clear();
        while self.running.is_some() && self.stopped.is_none() {
            self.end();
            if self.running.is_some() {
                self.bus.wait(NAP);
            }
        }
        if let Some((_, operation, _)) = self.running.take() {
            QUARANTINE.lock().unwrap_or_else(PoisonError::into_inner).push(operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_device_has() {
        for (at, len, ok) in [
            (0, 2048, true),
            (2047, 2048, true),
            (2048, 2048, false),
            (0, 2049, false),
            (4095, 1, false),
            (u64::MAX, 2, false),
        ] {
            assert_eq!(check(CardAddr::new(at), len).is_ok(), ok, "{len} at {at}");
        }
    }
}
