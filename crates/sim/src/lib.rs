//! The software card, and the software host that it is plugged into.
//!
//! [`SoftHost`] is synthetic physical memory behind an IOMMU whose page tables are those of `dmalane-iopt`.
//! [`SoftCard`] is the model of a card: it knows `docs/formats/card.md`, and reaches host memory only through
//! [`dmalane_dma::DeviceMem`]. [`SoftBus`] puts a card into a host, and is what the driver ([`dmalane_card::Card`])
//! drives.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use dmalane_addr::Access;
//! use dmalane_card::Card;
//! use dmalane_queue::{DeviceAddr, Operation, Registered, run};
//! use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost};
//! use dmalane_dma::{AnonHeap, Heap};
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
//! let write = Operation::write((buf.into_slice(), via), DeviceAddr::Card(at));
//! run(&mut queue, write, Duration::from_secs(1))?;
//!
//! let mut there = [0; 5];
//! bus.memory().read(at, &mut there)?;
//! assert_eq!(&there, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bus;
mod device;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod host;
mod memory;
mod mmu;
mod present;
mod queue;
mod recent;

// By this name `present.rs` finds its atomics, so that `tests/interleavings.rs` can give the same source others.
use std::sync::atomic;

pub use bus::SoftBus;
pub use device::{CardConfig, SoftCard, Workers};
pub use error::Error;
pub use host::{DevicePort, HeldPort, HostConfig, HostStats, SoftHost};
pub use memory::{Allowance, CardMemory};
pub use queue::Stepped;
