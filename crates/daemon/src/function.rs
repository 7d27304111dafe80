//! A function: the registers, queues and memory of the card that one client gets.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dmalane_addr::CardAddr;
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_dma::error_chain;
use dmalane_sim::{CardMemory, DevicePort, HostConfig, SoftCard, SoftHost, Workers};

use crate::account::{Accounts, Charge};
use crate::config::ClientLimits;
use crate::page::Page;
use crate::wire::{ClientStatus, Code, Denied};

/// The least that a step costs, in bytes: about the time of 32 short copies.
const MIN_COST: u64 = 64 << 10;

/// Memory that a process takes before its client has opened anything: 150 KiB were measured.
pub(crate) const PROCESS_BYTES: u64 = 192 << 10;
/// Memory that a function takes beside that before anything is touched or mapped, and each of its queues: what was
/// copied recently, and the translations at hand.
const BASE_BYTES: u64 = (1 << 20) - PROCESS_BYTES;
const QUEUE_BYTES: u64 = 192 << 10;

/// Registers, queues, an MMU, card memory and an IOMMU domain for one client.
///
/// The memory belongs to this function alone: no address in it reaches another client's data, and it starts as zeros.
pub(crate) struct Function {
    pub card: SoftCard<DevicePort>,
    pub host: SoftHost,
    pub page: Page,
    /// The client's: written to wake the daemon, and never read, since a read could block.
    pub kick: OwnedFd,
    /// The client's: the daemon's end of the socket pair that wakes the client. It receives nothing.
    pub call: OwnedFd,
    pub queues: usize,
    pub ddr: u64,
    pub hbm: u64,
    /// For the card's DDR and HBM.
    _card_memory: [Charge; 2],
}

impl Function {
    /// Creates a function for the client of a seat, with its register page, its kick and its call descriptor.
    pub(crate) fn new(
        limits: &ClientLimits,
        (ddr, hbm, queues): (u64, u64, u32),
        (page, kick, call): (Page, OwnedFd, OwnedFd),
        seat: usize,
        accounts: &Accounts,
    ) -> Result<Self, Denied> {
        let failed =
            |e: &dyn std::error::Error| Denied(Code::Failed, format!("cannot create a function: {}", error_chain(e)));
        // The software host scatters frames among occupied ones: four times as many are enough.
        let memory = limits.bytes.saturating_mul(4).saturating_add(256 << 20);
        let base = BASE_BYTES + u64::from(queues) * QUEUE_BYTES;
        let _card_memory = [accounts.ddr.charge(seat, ddr)?, accounts.hbm.charge(seat, hbm)?];
        let charge = accounts.memory.charge(seat, base)?;
        let host: SoftHost = SoftHost::new(HostConfig { memory, ..HostConfig::default() }).map_err(|e| failed(&e))?;
        let refused = |e| match e {
            dmalane_sim::Error::BadConfig { .. } => Denied(Code::Quota, e.to_string()),
            e => failed(&e),
        };
        let memory = CardMemory::new(ddr, hbm).map_err(refused)?.with_allowance(Arc::new(charge));
        let card = SoftCard::new(memory, (queues, Workers::Inline), || host.port(), |_| {}).map_err(refused)?;
        Ok(Self { card, host, page, kick, call, queues: queues as usize, ddr, hbm, _card_memory })
    }

    fn register(&self, queue: usize, register: u64) -> u32 {
        self.card.read32(BAR_REGISTERS, regs::channel(queue as u32, register)).unwrap_or(0)
    }

    /// Adds to a row of the status what the function counts.
    pub(crate) fn count_into(&self, row: &mut ClientStatus) {
        let wide = |queue, r| u64::from(self.register(queue, r)) | u64::from(self.register(queue, r + 4)) << 32;
        let all = |r| (0..self.queues).map(|queue| wide(queue, r)).fold(0, u64::wrapping_add);
        (row.h2c, row.c2h) = (all(regs::CH_BYTES_H2C), all(regs::CH_BYTES_C2H));
        (row.in_flight, row.faults) = (self.in_flight(), self.host.faults());
    }

    /// Descriptors that running queues were given and have not completed.
    fn in_flight(&self) -> u64 {
        let of = |queue: usize| {
            let head = self.register(queue, regs::CH_HEAD);
            // The client may write anything.
            let most = 1 << self.register(queue, regs::CH_RING_LOG2).min(regs::MAX_RING_LOG2);
            u64::from(self.page.doorbell(queue).wrapping_sub(head).min(most))
        };
        let running = |queue: &usize| self.register(*queue, regs::CH_STATUS) == regs::STATUS_RUNNING;
        (0..self.queues).filter(running).map(of).sum()
    }

    /// Resets the doorbell word of a queue that is neither running nor requested to run, before it is started, so that
    /// the value of its previous run is not taken as new.
    pub(crate) fn forget_doorbell(&self, queue: usize) {
        if self.register(queue, regs::CH_STATUS) == 0 && self.register(queue, regs::CH_CONTROL) == 0 {
            self.page.ring(queue, 0);
        }
    }

    /// Writes card memory through its BAR.
    pub(crate) fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), Denied> {
        if bar != BAR_MEMORY {
            return Err(Denied(Code::NoSuchThing, format!("BAR {bar} is not a memory BAR")));
        }
        self.card.memory().write(CardAddr::new(offset), bytes).map_err(|e| {
            let code = if matches!(e, dmalane_sim::Error::NoMemory { .. }) { Code::Quota } else { Code::NoSuchThing };
            Denied(code, error_chain(&e))
        })
    }

    /// Requests that all queues stop.
    pub(crate) fn stop(&self) {
        // One by one: a reset of the card would wait for the step under way.
        for queue in 0..self.queues as u32 {
            let _ = self.card.write32(BAR_REGISTERS, regs::channel(queue, regs::CH_CONTROL), 0);
        }
    }

    /// True when no queue accesses host memory any more, according to the card's registers, not to the page.
    pub(crate) fn has_stopped(&self) -> bool {
        (0..self.queues).all(|queue| self.register(queue, regs::CH_STATUS) == 0)
    }

    /// Some queue may have work.
    pub(crate) fn has_work(&self) -> bool {
        (0..self.queues).any(|queue| {
            self.look_at_doorbell(queue);
            self.card.wants_step(queue)
        })
    }

    fn look_at_doorbell(&self, queue: usize) {
        let doorbell = self.page.doorbell(queue);
        if doorbell != self.register(queue, regs::CH_DOORBELL) {
            let _ = self.card.write32(BAR_REGISTERS, regs::channel(queue as u32, regs::CH_DOORBELL), doorbell);
        }
    }

    /// Lets a queue do work that costs about as much as `most`. Returns its cost in bytes, and whether the client wants
    /// a call, or `None` when there was nothing to do.
    pub(crate) fn step(&self, queue: usize, most: u64) -> Option<(u64, bool)> {
        self.look_at_doorbell(queue);
        let stepped = self.card.step(queue, most)?;
        self.page.set_status(queue, self.register(queue, regs::CH_STATUS));
        let calls = stepped.reported && self.page.swap_wakeup_wanted(queue, 0) & 1 == 1;
        Some((stepped.cost.max(MIN_COST), calls))
    }
}
