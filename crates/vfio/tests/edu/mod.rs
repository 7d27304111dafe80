//! A driver for QEMU's `edu` device, a PCI device for teaching with a small DMA engine (docs/specs/edu.rst of QEMU).
//!
//! The device copies between host memory and its own buffer of 4 KiB. It does one copy at a time, which takes 100 ms,
//! and then raises an interrupt.

mod faults;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, Iova, PageSize};
use dmalane_dma::{self as dma, DmaFault, FaultReason, Mmio as _};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue, Refusal, Refused, StopReason,
    Ticket, Work,
};

use dmalane_vfio::{Bdf, VfioBus};

pub use faults::{FaultLog, IommuFault};

/// The registers, all in BAR 0.
mod regs {
    pub(super) const ID: u64 = 0x00;
    /// Reads as the inverse of what was written.
    pub(super) const LIVENESS: u64 = 0x04;
    pub(super) const INTERRUPTS: u64 = 0x24;
    pub(super) const RAISE: u64 = 0x60;
    pub(super) const ACKNOWLEDGE: u64 = 0x64;
    pub(super) const DMA_FROM: u64 = 0x80;
    pub(super) const DMA_TO: u64 = 0x88;
    pub(super) const DMA_LEN: u64 = 0x90;
    pub(super) const DMA_COMMAND: u64 = 0x98;

    pub(super) const RUN: u64 = 1;
    pub(super) const TO_HOST: u64 = 2;
    pub(super) const INTERRUPT: u64 = 4;
}

/// The address of the device's own buffer, as its DMA engine sees it.
const BUFFER: u64 = 0x4_0000;
/// Usable bytes of the buffer. It has 4096, but QEMU up to 7.2 aborts on a copy that reaches the last one, as if it ran
/// past the end.
const BUFFER_LEN: u64 = 4095;
/// Maximum bytes of one operation, so that two fit into the buffer.
const MAX_LEN: u64 = 2048;
/// Operations that a channel queues; the device runs one at a time.
const DEPTH: usize = 4;
/// After this time an operation has failed: 20 times its duration.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The longest wait for an interrupt, since another channel may have consumed ours.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Memory that a stuck device may still write; never freed.
static QUARANTINE: Mutex<Vec<Operation>> = Mutex::new(Vec::new());

/// An `edu` device.
pub struct Edu {
    bus: Arc<VfioBus>,
    /// A channel, or [`Edu::copy`], is using the device.
    busy: Arc<AtomicBool>,
}

impl Edu {
    /// Takes the device of a bus.
    ///
    /// # Panics
    /// When the bus fails, or its registers are not those of an `edu`.
    pub fn open(bus: Arc<VfioBus>) -> Self {
        assert_eq!(bus.read32(0, regs::ID).unwrap() & 0xff, 0xed, "{} is not an edu", bus.bdf());
        bus.write32(0, regs::LIVENESS, 0x1234_5678).unwrap();
        assert_eq!(bus.read32(0, regs::LIVENESS).unwrap(), !0x1234_5678, "{} is not an edu", bus.bdf());
        Self { bus, busy: Arc::default() }
    }

    /// The bus.
    pub fn bus(&self) -> &Arc<VfioBus> {
        &self.bus
    }

    /// Bytes of the device's own memory, from [`CardAddr`] 0.
    pub fn memory(&self) -> u64 {
        BUFFER_LEN
    }

    /// A queue to the device's memory. Queues share the one DMA engine: they take turns, operation by operation.
    pub fn queue(&self) -> EduQueue {
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

    /// Copies to or from any bus address and waits for the end. Checks no registration and owns no memory; `at` may be
    /// in a BAR of another device ([`VfioContainer::map_peer`](dmalane_vfio::VfioContainer::map_peer)).
    ///
    /// # Errors
    /// [`OpError::NoCardMemory`]; [`OpError::Stopped`] when the device does not end, after which it stays busy.
    pub fn copy(&self, direction: Direction, at: Iova, card: CardAddr, len: u64) -> Result<(), OpError> {
        check(card, len)?;
        let began = Instant::now();
        let late = || began.elapsed() > TIMEOUT;
        while self.busy.swap(true, Ordering::Acquire) {
            if late() {
                return Err(OpError::Stopped(StopReason::Driver(
                    "another channel uses the device for too long".into(),
                )));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        start(&self.bus, direction, at, card, len).map_err(lost)?;
        let began = Instant::now();
        while is_running(&self.bus).map_err(lost)? {
            if began.elapsed() > TIMEOUT {
                return Err(OpError::Stopped(StopReason::Timeout(TIMEOUT)));
            }
            self.bus.wait(POLL_INTERVAL);
        }
        acknowledge(&self.bus).map_err(lost)?;
        self.busy.store(false, Ordering::Release);
        Ok(())
    }
}

/// Checks that the device has this memory: QEMU aborts on a copy outside of it.
fn check(card: CardAddr, len: u64) -> Result<(), OpError> {
    let end = card.bits().checked_add(len).filter(|end| *end <= BUFFER_LEN && len <= MAX_LEN);
    end.map(drop).ok_or(OpError::NoCardMemory(card))
}

fn lost(error: dma::Error) -> OpError {
    OpError::Stopped(StopReason::Lost(error.to_string().into()))
}

pub fn start(bus: &VfioBus, direction: Direction, host: Iova, card: CardAddr, len: u64) -> Result<(), dma::Error> {
    let device = BUFFER + card.bits();
    let (from, to, direction) = match direction {
        Direction::FromHost => (host.bits(), device, 0),
        Direction::ToHost => (device, host.bits(), regs::TO_HOST),
    };
    let command = regs::RUN | regs::INTERRUPT | direction;
    for (register, value) in
        [(regs::DMA_FROM, from), (regs::DMA_TO, to), (regs::DMA_LEN, len), (regs::DMA_COMMAND, command)]
    {
        // These registers take a word of 64 bits in one access.
        bus.write_bytes(0, register, &value.to_le_bytes())?;
    }
    Ok(())
}

fn is_running(bus: &VfioBus) -> Result<bool, dma::Error> {
    Ok(u64::from(bus.read32(0, regs::DMA_COMMAND)?) & regs::RUN != 0)
}

/// Has the device raise an interrupt, whose bits [`acknowledge`] takes back.
pub fn interrupt(bus: &VfioBus, bits: u32) -> Result<(), dma::Error> {
    bus.write32(0, regs::RAISE, bits)
}

/// Acknowledges the interrupt: until then the device raises no other one.
pub fn acknowledge(bus: &VfioBus) -> Result<(), dma::Error> {
    let raised = bus.read32(0, regs::INTERRUPTS)?;
    bus.write32(0, regs::ACKNOWLEDGE, raised)
}

/// Copies between registered memory and the buffer of an [`Edu`]: at most 2048 bytes an operation, 100 ms each.
///
/// The target is a card address from 0 to 4094; a device virtual address is refused, since the device has no MMU. When
/// an operation takes more than 2 s, the channel stops and its memory is never freed.
pub struct EduQueue {
    bus: Arc<VfioBus>,
    busy: Arc<AtomicBool>,
    faults: Option<(FaultLog, Bdf)>,
    waiting: VecDeque<(Ticket, Operation)>,
    running: Option<(Ticket, Operation, Instant)>,
    ended: Vec<Completion>,
    next: u64,
    stopped: Option<StopReason>,
}

impl EduQueue {
    /// Reports accesses that the IOMMU stopped as faults of their operations. The device itself does not report them.
    #[must_use]
    pub fn with_faults(mut self, log: FaultLog, bdf: Bdf) -> Self {
        self.faults = Some((log, bdf));
        self
    }

    /// Starts the next operation if the device is free. One that the device cannot do ends at once.
    fn start_next(&mut self) {
        while self.running.is_none() && !self.waiting.is_empty() {
            if self.stopped.is_none() && self.busy.swap(true, Ordering::Acquire) {
                return; // another channel uses the device
            }
            let Some((ticket, operation)) = self.waiting.pop_front() else { return };
            match self.start(&operation) {
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

    fn start(&self, operation: &Operation) -> Result<(), OpError> {
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
        // The slice was registered at submit, and the operation holds the registration.
        let host = host.iova().ok_or(Refusal::NotRegistered)?;
        start(&self.bus, *direction, host.first(), card, len).map_err(lost)
    }

    /// Completes the running operation if the device is done. A stuck operation stays in flight, since the device may
    /// still write its memory.
    fn complete(&mut self) {
        let Some((_, _, began)) = &self.running else { return };
        let done = match is_running(&self.bus) {
            Ok(false) => acknowledge(&self.bus),
            Ok(true) if began.elapsed() <= TIMEOUT => return,
            Ok(true) => {
                self.stopped.get_or_insert(StopReason::Timeout(TIMEOUT));
                return;
            }
            Err(e) => Err(e),
        };
        if let Err(e) = done {
            self.stopped = Some(StopReason::Lost(e.to_string().into()));
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

    /// The fault of the operation that has just ended, from the kernel's log.
    fn fault(&mut self, operation: &Operation) -> Option<DmaFault> {
        let (log, bdf) = self.faults.as_mut()?;
        let Work::Copy { host, .. } = &operation.work else { return None };
        let host = host.iova()?;
        let page = host.first().align_down(PageSize::SIZE_4K);
        let ours = |f: &IommuFault| f.bdf == *bdf && f.at >= page && f.at <= host.last();
        let seen = log.take().into_iter().find(ours)?;
        let wanted = if seen.write { Access::WRITE } else { Access::READ };
        Some(DmaFault { at: seen.at.max(host.first()), wanted, reason: FaultReason::NotMapped, done: 0 })
    }

    fn check(&self, operation: &Operation) -> Result<(), Refusal> {
        operation.admit(self.capabilities(), self.limits())?;
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

impl Queue for EduQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: DEPTH, max_len: MAX_LEN, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::ORDERED
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
        self.start_next();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.complete();
        self.start_next();
        let count = self.ended.len();
        done.append(&mut self.ended);
        count
    }

    fn halted(&self) -> Option<StopReason> {
        self.stopped.clone()
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let count = self.poll(done);
            let left = deadline.map_or(POLL_INTERVAL, |deadline| deadline.saturating_duration_since(Instant::now()));
            if count > 0 || self.in_flight() == 0 || left.is_zero() {
                return count;
            }
            self.bus.wait(left.min(POLL_INTERVAL));
        }
    }
}

impl Drop for EduQueue {
    /// Waits for the running operation; queued ones are dropped.
    fn drop(&mut self) {
        self.waiting.clear();
        while self.running.is_some() && self.stopped.is_none() {
            self.complete();
            if self.running.is_some() {
                self.bus.wait(POLL_INTERVAL);
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
    fn only_memory_of_the_device() {
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
