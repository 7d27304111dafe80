//! A device: memory regions, registration of host memory, queues, an address space.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bounce;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod contents;
mod device;
mod driver_copies;
mod flat;
mod lending;
mod memory;
mod no_iommu;
mod page_tables;
mod polled;
mod ram;
mod region;
pub mod size;
mod space;

pub use bounce::{Bounce, IoError};
pub use device::{BackingFiles, Counters, Device, DeviceInfo, DlpackDevice, IommuCounters};
pub use driver_copies::{DriverCopies, DriverCopy};
pub use flat::FlatSpace;
pub use lending::{Lending, LentMemory};
pub use memory::{BadPlacement, DeviceMemory, End, MemoryDriver, MemoryError, MemoryGrants, Placement};
pub use no_iommu::NoIommu;
pub use page_tables::PageTableSpace;
pub use polled::PolledQueue;
pub use ram::RamDevice;
pub use region::{Region, areas};
pub use space::{AddressSpace, AddressSpaceKind, SpaceError, without_tables};
