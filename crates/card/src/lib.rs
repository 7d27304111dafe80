//! The software card, and the driver of every card with the same register map.
//!
//! Three parts, joined by `docs/formats/card.md` alone: the formats ([`regs`], [`Descriptor`], [`Completion`]); the
//! device ([`SoftCard`], which reaches host memory only through [`dmalane_dma::DeviceMem`]); the driver ([`Card`],
//! [`CardQueue`], which reach the device only through [`dmalane_dma::Mmio`]). [`SoftBus`] puts a software card
//! into a software host.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use dmalane_addr::Access;
//! use dmalane_card::{Card, CardConfig, SoftBus};
//! use dmalane_queue::{DeviceAddr, Operation, Registered, run};
//! use dmalane_dma::{AnonHeap, Heap, HostConfig, SoftHost};
//!
//! let heap = AnonHeap::new();
//! let host: SoftHost = SoftHost::new(HostConfig::default())?;
//! let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, CardConfig::default())?);
//! let card = Card::open(bus.clone(), &heap)?;
//! let mut queue = card.queue(0)?;
//!
//! let mut buf = heap.allocate(4096)?;
//! buf[..5].copy_from_slice(b"hello");
//! let buf = buf.share();
//! let via = Registered::new(&*bus, &buf, Access::RW)?;
//! let at = card.layout().hbm.first();
//! let write = Operation::write((buf.into_part(), via), DeviceAddr::Card(at));
//! run(&mut queue, write, Duration::from_secs(1))?;
//!
//! let mut there = [0; 5];
//! bus.memory().read(at, &mut there)?;
//! assert_eq!(&there, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_endian = "big")]
compile_error!("rings are little-endian, and their words are stored as the processor has them");

mod bus;
mod card_device;
mod channel;
mod descriptor;
mod device;
mod driver;
mod error;
pub mod fuzzing;
mod memory;
mod mmu;
mod queue;
mod recent;
pub mod regs;
mod tables;

pub use bus::SoftBus;
pub use card_device::{CardDevice, CardUse};
pub use channel::CardQueue;
pub use descriptor::{Completion, Descriptor, Halt, Malformed, Status, Task};
pub use device::{CardConfig, SoftCard, Workers};
pub use driver::{Card, CardLayout};
pub use error::Error;
pub use memory::CardMemory;
pub use queue::Stepped;
pub use tables::CardTables;
