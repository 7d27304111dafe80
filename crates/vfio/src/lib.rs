//! PCI devices that the kernel hands to user space.
//!
//! [`Container::open`] takes a device that is bound to `vfio-pci`; [`Device`] has its regions, interrupts and reset; [`VfioBus`] is the
//! driver's side of it as the port [`dmalane_dma::HostBus`], so that a driver that was written for the software card runs on it.
//! The kernel is asked by iommufd and the device's own file where it has them, else by container and group ([`Backend`], [`standings`]).
//! Memory is mapped through the kernel's IOMMU driver, at IOVAs that the IOMMU has. [`BarMap`] is a BAR mapped at an address aligned
//! to the largest pages that the kernel can map it with. [`Edu`] drives the `edu` device of QEMU.
//!
//! ```no_run
//! use dmalane_addr::Access;
//! use dmalane_queue::Registered;
//! use dmalane_dma::{AnonHeap, Heap};
//! use dmalane_vfio::{Container, VfioBus};
//!
//! let container = Container::new();
//! let device = container.open(&"0000:01:00.0".parse()?)?;
//! let bus = VfioBus::new(device)?;
//! let buf = AnonHeap::new().allocate(1 << 20)?.share();
//! let registered = Registered::new(&bus, &buf, Access::RW)?;
//! println!("the device sees the buffer at {}", registered.mapping().span());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)] // allowed again in kernel/sys.rs, and nowhere else

mod bdf;
mod edu;
mod error;
mod interrupts;
mod kernel;
pub mod user;

pub use bdf::{BadBdf, Bdf};
pub use edu::{EDU_ID, Edu, EduQueue};
pub use error::Error;
pub use kernel::{
    Backend, BarMap, Container, Device, FaultLog, Peer, Placement, Region, SeenFault, Standing, Took, VfioBus,
    no_iommufd, page_sizes, standings,
};
