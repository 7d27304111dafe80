//! Drives a PCIe card: QEMU's `edu`, which has registers, a DMA engine with a buffer of 4 KiB, and an interrupt.
//!
//! ```text
//! cargo run -p dmalane-vfio --example edu -- 0000:00:04.0
//! ```

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr, Span};
use dmalane_device::{AddressSpace, Bounce, Device, DeviceInfo, FlatSpace, PolledQueue, Region};
use dmalane_dma::{self as dma, AnonHeap, BufferRef, Mapping, Mmio, Pinned, Registrar};
use dmalane_queue::{Capabilities, DeviceAddr, DeviceQueue, Direction, Limits, OpError, Operation, StopReason, Work};
use dmalane_vfio::{Bdf, VfioBus, VfioContainer};

/// The registers in BAR 0, from the device's specification (`docs/specs/edu.rst` of QEMU).
mod regs {
    pub const ID: u64 = 0x00;
    pub const FACTORIAL: u64 = 0x08;
    pub const STATUS: u64 = 0x20;
    pub const INTERRUPTS: u64 = 0x24;
    pub const ACKNOWLEDGE: u64 = 0x64;
    pub const DMA_FROM: u64 = 0x80;
    pub const DMA_TO: u64 = 0x88;
    pub const DMA_LEN: u64 = 0x90;
    pub const DMA_COMMAND: u64 = 0x98;

    /// In `STATUS`: an interrupt shall tell that the factorial is there.
    pub const TELL: u32 = 0x80;
    /// In `INTERRUPTS`, and to acknowledge it.
    pub const HAS_FACTORIAL: u32 = 0x001;
    pub const HAS_COPIED: u32 = 0x100;
    /// In `DMA_COMMAND`.
    pub const RUN: u64 = 1;
    pub const TO_HOST: u64 = 2;
    pub const INTERRUPT: u64 = 4;
}

/// Where the DMA engine sees the buffer.
const BUFFER: u64 = 0x4_0000;
/// Bytes of the buffer. QEMU up to 7.2 aborts when the last one is copied, so that one is refused.
const BUFFER_LEN: u64 = 4096;
/// The device sends addresses of 28 bits; from larger ones it drops the rest.
const ADDRESSES: u64 = 1 << 28;
/// A copy takes 100 ms.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The card as a device: 4 KiB of memory and one queue.
pub struct Edu {
    bus: Arc<VfioBus>,
    regions: [Region; 1],
    queues: Vec<Box<DeviceQueue>>,
    space: FlatSpace,
}

impl Edu {
    /// Opens the card, which is bound to vfio-pci.
    pub fn open(container: &VfioContainer, bdf: &Bdf) -> Result<Self, Box<dyn Error>> {
        let bus = Arc::new(VfioBus::new(container.open(bdf)?)?);
        let id = bus.read32(0, regs::ID)?;
        if id & 0xff != 0xed {
            return Err(format!("{bdf} is not an edu: its first register reads {id:#x}").into());
        }
        let copies = Capabilities::FROM_HOST | Capabilities::TO_HOST;
        let limits = Limits { capacity: 16, max_len: BUFFER_LEN, max_parts: 1 };
        let engine = bus.clone();
        let queue = PolledQueue::new(copies, limits, move |operation| copy(&engine, operation));
        let memory = Span::new(CardAddr::new(0), BUFFER_LEN).ok_or("no memory")?;
        let (regions, space) = ([Region::new("buffer", memory)], FlatSpace::new());
        Ok(Self { bus, regions, queues: vec![Box::new(queue)], space })
    }

    /// The factorial of a number, which the card computes; only the lower 32 bits.
    pub fn factorial(&self, n: u32) -> Result<u32, Box<dyn Error>> {
        self.bus.write32(0, regs::STATUS, regs::TELL)?;
        self.bus.write32(0, regs::FACTORIAL, n)?;
        wait(&self.bus, regs::HAS_FACTORIAL)?;
        Ok(self.bus.read32(0, regs::FACTORIAL)?)
    }
}

impl Device for Edu {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { name: format!("edu at {}", self.bus.bdf()), polled: true, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(Low(self.bus.clone()))
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        std::mem::take(&mut self.queues)
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut self.space
    }
}

/// Host memory for a device with few address lines. The bus takes the lowest free addresses.
struct Low(Arc<VfioBus>);

impl Registrar for Low {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, dma::Error> {
        self.0.pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        let mapping = self.0.map_list(pinned, access)?;
        match mapping.span().last().bits() < ADDRESSES {
            true => Ok(mapping),
            false => Err(dma::Error::Backend(format!("{} is beyond the card's 28 bits", mapping.span()).into())),
        }
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.0.owns(mapping)
    }
}

/// One operation. The queue has checked its length and its registration, which holds the memory until this returns.
fn copy(bus: &VfioBus, operation: &Operation) -> Result<(), OpError> {
    let Work::Copy { direction, host, at: DeviceAddr::Card(at) } = &operation.work else {
        return Err(OpError::Device { status: 0 });
    };
    if at.bits().checked_add(operation.bytes()).is_none_or(|end| end >= BUFFER_LEN) {
        return Err(OpError::NoCardMemory(*at));
    }
    let Some(host) = host.iova() else { return Err(OpError::Device { status: 0 }) };
    let (there, here) = (BUFFER + at.bits(), host.first().bits());
    let (from, to, command) = match direction {
        Direction::FromHost => (here, there, regs::RUN | regs::INTERRUPT),
        Direction::ToHost => (there, here, regs::RUN | regs::INTERRUPT | regs::TO_HOST),
    };
    let start = || -> Result<(), dma::Error> {
        bus.write64(0, regs::DMA_FROM, from)?;
        bus.write64(0, regs::DMA_TO, to)?;
        bus.write64(0, regs::DMA_LEN, host.len())?;
        bus.write64(0, regs::DMA_COMMAND, command)
    };
    start().and_then(|()| wait(bus, regs::HAS_COPIED)).map_err(|error| {
        // A card that does not answer must not reach the memory, which is given back now. One that was removed cannot.
        let _ = bus.device().set_bus_master(false);
        OpError::Stopped(StopReason::Lost(error.into()))
    })
}

/// Waits until the card has raised an interrupt for this, and acknowledges it.
fn wait(bus: &VfioBus, what: u32) -> Result<(), dma::Error> {
    let began = Instant::now();
    while bus.read32(0, regs::INTERRUPTS)? & what == 0 {
        if began.elapsed() > TIMEOUT {
            return Err(dma::Error::Backend(format!("the card has not answered within {TIMEOUT:?}").into()));
        }
        bus.wait(Duration::from_millis(20));
    }
    bus.write32(0, regs::ACKNOWLEDGE, what)
}

/// Uses all of it once.
pub fn drive(container: &VfioContainer, bdf: &Bdf) -> Result<(), Box<dyn Error>> {
    let mut card = Edu::open(container, bdf)?;
    assert_eq!(card.factorial(10)?, 3_628_800);

    let at = |offset| DeviceAddr::Card(CardAddr::new(offset));
    let mut queue = card.take_queues().pop().ok_or("a queue")?;
    let mut bounce = Bounce::new(&*card.registrar(), &AnonHeap::new(), 4096, TIMEOUT)?;
    bounce.write(&mut *queue, at(100), b"bytes on a card")?;
    let mut back = [0; 15];
    bounce.read(&mut *queue, at(100), &mut back)?;
    assert_eq!(&back, b"bytes on a card");

    let beyond = bounce.read(&mut *queue, at(BUFFER_LEN - 8), &mut back).unwrap_err();
    println!("{}: {}", card.info().name, dma::error_chain(&beyond));
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let bdf = std::env::args().nth(1).ok_or("usage: edu BDF, of a device that is bound to vfio-pci")?;
    drive(&VfioContainer::new(), &bdf.parse()?)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", dma::error_chain(&*error));
        std::process::exit(1);
    }
}
