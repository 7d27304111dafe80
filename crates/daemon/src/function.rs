//! A function: one client's share of the card.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dmalane_addr::CardAddr;
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_sim::{CardConfig, DevicePort, HostConfig, SoftCard, SoftHost, Workers};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};

use crate::config::{Budget, Limits};
use crate::page::Page;
use crate::socket;
use crate::wire::Code;

/// What a step costs at least, in bytes: as long as 32 short copies take.
const LEAST: i64 = 64 << 10;

/// Registers, queues, an MMU, card memory and an IOMMU domain, reached by one client and by nobody else.
///
/// Memory is the function's own, so nothing of another client's has an address in it, and it is zeros at first.
pub(crate) struct Function {
    card: SoftCard<DevicePort>,
    host: SoftHost,
    page: Page,
    /// Rung by the client. Never read: what one can read, or write, another can have block.
    kick: OwnedFd,
    /// The daemon's ends of those that wake the client. They receive nothing.
    calls: Vec<OwnedFd>,
    pub(crate) ddr: u64,
    pub(crate) hbm: u64,
    /// The user whose share it is.
    uid: u32,
    budget: Arc<Budget>,
}

/// Why there is no function.
pub(crate) struct NoFunction(pub Code, pub String);

impl Function {
    /// Makes one for a client of this user, and the client's ends of its calls: that of the daemon first, then one for each queue.
    pub(crate) fn new(
        limits: &Limits,
        ddr: u64,
        hbm: u64,
        queues: u32,
        uid: u32,
        budget: &Arc<Budget>,
    ) -> Result<(Self, Vec<OwnedFd>), NoFunction> {
        let failed = |e: &dyn std::fmt::Display| NoFunction(Code::Failed, format!("cannot make a function: {e}"));
        // Frames are strewn among others that "somebody else" holds: four times as many are enough.
        let memory = limits.bytes.saturating_mul(4).saturating_add(256 << 20);
        let host: SoftHost = SoftHost::new(HostConfig { memory, ..HostConfig::default() }).map_err(|e| failed(&e))?;
        let config = CardConfig { ddr, hbm, channels: queues, workers: Workers::Inline };
        let page = Page::new().map_err(|e| failed(&e))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pairs = (0..queues).map(|_| socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None));
        let (calls, theirs): (Vec<_>, Vec<_>) =
            pairs.collect::<Result<Vec<_>, _>>().map_err(|e| failed(&e))?.into_iter().unzip();
        for call in &calls {
            // Nothing can be sent to it, so no descriptor of the client's is closed with it.
            rustix::net::shutdown(call, Shutdown::Read).map_err(|e| failed(&e))?;
        }
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(&e))?;
        let theirs = std::iter::once(kick.try_clone().map_err(|e| failed(&e))?).chain(theirs).collect();
        let card = SoftCard::new(config, || host.port(), |_| {}).map_err(|e| match e {
            dmalane_sim::Error::BadConfig { .. } => NoFunction(Code::Quota, e.to_string()),
            e => failed(&e),
        })?;
        budget.take(uid, ddr, hbm).map_err(|text| NoFunction(Code::Quota, text))?;
        Ok((Self { card, host, page, kick, calls, ddr, hbm, uid, budget: budget.clone() }, theirs))
    }

    pub(crate) fn host(&self) -> &SoftHost {
        &self.host
    }

    pub(crate) fn card(&self) -> &SoftCard<DevicePort> {
        &self.card
    }

    pub(crate) fn page(&self) -> &Page {
        &self.page
    }

    /// Becomes readable, again and again, as the client rings it.
    pub(crate) fn kick(&self) -> &OwnedFd {
        &self.kick
    }

    pub(crate) fn queues(&self) -> usize {
        self.calls.len()
    }

    fn register(&self, queue: usize, register: u64) -> u32 {
        self.card.read32(BAR_REGISTERS, regs::channel(queue as u32, register)).unwrap_or(0)
    }

    /// Bytes that went over the link so far.
    pub(crate) fn moved(&self) -> u64 {
        let both = [regs::CH_BYTES_H2C, regs::CH_BYTES_C2H];
        let wide = |queue, r| u64::from(self.register(queue, r)) | u64::from(self.register(queue, r + 4)) << 32;
        (0..self.queues()).flat_map(|queue| both.map(|r| wide(queue, r))).fold(0, u64::wrapping_add)
    }

    /// Before a queue is started: what its last life left in the page would be taken for doorbells of the next.
    pub(crate) fn forget_doorbell(&self, queue: usize) {
        self.page.ring(queue, 0);
    }

    /// True while a queue is neither running nor told to run.
    pub(crate) fn is_at_rest(&self, queue: usize) -> bool {
        self.register(queue, regs::CH_STATUS) == 0 && self.register(queue, regs::CH_CONTROL) == 0
    }

    /// Writes card memory through its BAR.
    pub(crate) fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), String> {
        if bar != BAR_MEMORY {
            return Err(format!("BAR {bar} is not one of memory"));
        }
        self.card.memory().write(CardAddr::new(offset), bytes).map_err(|e| e.to_string())
    }

    /// Tells all queues to stop.
    pub(crate) fn stop(&self) {
        let _ = self.card.write32(BAR_REGISTERS, regs::CONTROL, 1);
    }

    /// True when no queue touches host memory any more: the card says so, not the page.
    pub(crate) fn has_stopped(&self) -> bool {
        (0..self.queues()).all(|queue| self.register(queue, regs::CH_STATUS) == 0)
    }

    /// Lets a queue do a bounded amount of work. Gives what that cost, `None` when there was nothing to do.
    pub(crate) fn step(&self, queue: usize) -> Option<i64> {
        let doorbell = self.page.doorbell(queue);
        if doorbell != self.register(queue, regs::CH_DOORBELL) {
            let _ = self.card.write32(BAR_REGISTERS, regs::channel(queue as u32, regs::CH_DOORBELL), doorbell);
        }
        let stepped = self.card.step(queue)?;
        self.page.set_status(queue, self.register(queue, regs::CH_STATUS));
        if stepped.reported && self.page.set_wish(queue, 0) & 1 == 1 {
            socket::call(self.calls[queue].as_fd());
        }
        Some((stepped.bytes as i64).max(LEAST)) // a step has at most 1 MiB
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        self.budget.give(self.uid, self.ddr, self.hbm);
    }
}
