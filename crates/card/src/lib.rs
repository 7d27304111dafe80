//! The driver of every card with the register map of `docs/formats/card.md`.
//!
//! The formats ([`regs`], [`Descriptor`], [`Completion`]) are shared with models of such a card. The driver ([`Card`],
//! [`CardQueue`] and [`CardChannel`]) reaches the device only through [`dmalane_dma::Mmio`].
//! ```
//! use std::{sync::Arc, time::Duration};
//! use dmalane_addr::Access;
//! use dmalane_card::{Card, CardConfig, SoftBus};
//! use dmalane_queue::{DeviceAddr, DeviceFar, Direction, Registered, Transfer, run};
//! use dmalane_dma::{AnonHeap, Heap, HostConfig, SoftHost};
//!
//! let heap = AnonHeap::new();
//! let host: SoftHost = SoftHost::new(HostConfig::default())?;
//! let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, CardConfig::default())?);
//! let card = Card::open(bus.clone(), &heap)?;
//! let mut channel = card.channel(0)?;
//!
//! let mut buf = heap.allocate(4096)?;
//! buf[..5].copy_from_slice(b"hello");
//! let buf = buf.share();
//! let via = Registered::new(&*bus, &buf, Access::RW)?;
//! let at = card.layout().hbm.first();
//! let far = DeviceFar { at: DeviceAddr::Card(at), via };
//! run(&mut channel, Transfer { part: buf.into_part(), direction: Direction::FromHost, far }, Duration::from_secs(1))?;
//!
//! let mut there = [0; 5];
//! bus.memory().read(at, &mut there)?;
//! assert_eq!(&there, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_endian = "big")]
compile_error!("rings are little-endian, and their words are stored as the processor has them");

mod channel;
mod descriptor;
mod driver;
mod error;
pub mod regs;
mod tables;

pub use channel::{CardChannel, CardQueue};
pub use descriptor::{Completion, Descriptor, Halt, Malformed, Status, Task};
pub use driver::{Card, CardLayout};
pub use error::Error;
pub use tables::CardTables;
