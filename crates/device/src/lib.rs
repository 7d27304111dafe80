//! A device: memory regions, registration of host memory, queues, an address space.
//!
//! [`Device`] is the trait. Its owner takes its queues, allocates its memory ([`DeviceMemory`], [`Placement`]),
//! registers host memory, and binds buffers in its [`AddressSpace`]: [`PageTableSpace`] for a device with an MMU whose
//! tables this library writes, [`FlatSpace`] for one without. [`Bounce`] moves plain slices. [`RamDevice`] is plain
//! memory.
//!
//! A device is one implementation of the trait, one line in the registry of crate `dmalane`, and one call of
//! [`conformance::suite`](crate::conformance). This one is complete: 64 KiB of memory behind a function that copies.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use dmalane_addr::{CardAddr, Span};
//! use dmalane_device::{AddressSpace, Device, DeviceInfo, FlatSpace, NoIommu, PolledQueue, Region};
//! use dmalane_dma::Registrar;
//! use dmalane_queue::{Capabilities, DeviceAddr, DeviceQueue, Direction, Limits, OpError, Operation, Work};
//!
//! struct Tiny {
//!     regions: [Region; 1],
//!     registrar: Arc<NoIommu>,
//!     queues: Vec<Box<DeviceQueue>>,
//!     space: FlatSpace,
//! }
//!
//! impl Tiny {
//!     fn new() -> Self {
//!         let memory = Mutex::new(vec![0; 64 << 10]);
//!         let copies = Capabilities::FROM_HOST | Capabilities::TO_HOST;
//!         let limits = Limits { capacity: 8, max_len: 64 << 10, max_parts: usize::MAX };
//!         let queue = PolledQueue::new(copies, limits, move |o| copy(&mut memory.lock().unwrap(), o));
//!         let span = Span::new(CardAddr::new(0), 64 << 10).unwrap();
//!         let (regions, registrar) = ([Region::new("tiny", span)], Arc::new(NoIommu::new()));
//!         Self { regions, registrar, queues: vec![Box::new(queue)], space: FlatSpace::new() }
//!     }
//! }
//!
//! fn copy(memory: &mut [u8], operation: &Operation) -> Result<(), OpError> {
//!     let Work::Copy { direction, host, at: DeviceAddr::Card(at) } = &operation.work else {
//!         return Err(OpError::Device { status: 1 });
//!     };
//!     let end = at.bits().saturating_add(host.slice.len() as u64);
//!     let range = at.bits() as usize..end as usize;
//!     let there = memory.get_mut(range).ok_or(OpError::NoCardMemory(*at))?;
//!     match direction {
//!         Direction::FromHost => host.slice.as_volatile_slice().read(there),
//!         Direction::ToHost => host.slice.as_volatile_slice().write(there),
//!     }
//!     Ok(())
//! }
//!
//! impl Device for Tiny {
//!     fn info(&self) -> DeviceInfo {
//!         DeviceInfo { name: "tiny".into(), polled: true, ..DeviceInfo::default() }
//!     }
//!     fn regions(&self) -> &[Region] {
//!         &self.regions
//!     }
//!     fn registrar(&self) -> Arc<dyn Registrar> {
//!         self.registrar.clone()
//!     }
//!     fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
//!         std::mem::take(&mut self.queues)
//!     }
//!     fn address_space(&mut self) -> &mut dyn AddressSpace {
//!         &mut self.space
//!     }
//! }
//!
//! // In a test, with the feature `conformance`:
//! dmalane_device::conformance::suite(|| Box::new(Tiny::new()));
//! ```
#![forbid(unsafe_code)]

mod bounce;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod contents;
mod device;
mod driver_copies;
mod flat;
mod memory;
mod no_iommu;
mod page_tables;
mod polled;
mod ram;
mod region;
mod space;

pub use bounce::{Bounce, IoError};
pub use device::{BackingFiles, Counters, Device, DeviceInfo, DlpackDevice, IommuCounters};
pub use driver_copies::{DriverCopies, DriverCopy};
pub use flat::FlatSpace;
pub use memory::{BadPlacement, DeviceMemory, End, MemoryDriver, MemoryError, MemoryGrants, Placement};
pub use no_iommu::NoIommu;
pub use page_tables::PageTableSpace;
pub use polled::PolledQueue;
pub use ram::RamDevice;
pub use region::{Region, areas};
pub use space::{AddressSpace, AddressSpaceKind, SpaceError, without_tables};
