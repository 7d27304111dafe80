//! PCI devices through the Linux kernel's VFIO.
//!
//! [`VfioContainer::open`] opens a device that is bound to `vfio-pci`. [`PciDevice`] has its regions, interrupts and
//! reset. [`VfioBus`] is the device as a driver sees it, through the port [`dmalane_dma::Mmio`]: a driver written for
//! the software card runs on it.
//!
//! The kernel offers VFIO through two interfaces ([`Backend`]): iommufd with the device's own file, or a container with
//! the device's IOMMU group. [`VfioContainer::new`] prefers iommufd; [`backends`] shows which one opens each device,
//! and why. Memory is mapped through the kernel's IOMMU driver, at IOVAs that the IOMMU supports. [`BarMap`] is a BAR
//! mapped at an address that is aligned to the largest pages that the kernel can map it with.
//!
//! ```no_run
//! use dmalane_addr::Access;
//! use dmalane_dma::{AnonHeap, Heap, Registrar};
//! use dmalane_vfio::{VfioContainer, VfioBus};
//!
//! let device = VfioContainer::new().open(&"0000:01:00.0".parse()?)?;
//! let bus = VfioBus::new(device)?;
//! let buf = AnonHeap::new().allocate(1 << 20)?.share();
//! let mapping = bus.map(bus.pin(&buf.reference())?, Access::RW)?;
//! println!("the device sees the buffer at {}", mapping.span());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backend;
mod bar;
mod bdf;
mod bus;
mod container;
mod device;
mod error;
mod gate;
mod iommufd;
mod iova;
mod node;
mod pages;
mod peer;
mod sys;
mod sysfs;

pub use backend::{Backend, BackendStatus, backends, check_iommufd};
pub use bar::{BarAlignment, BarMap};
pub use bdf::{BadBdf, Bdf};
pub use bus::{BusOptions, VfioBus};
pub use container::VfioContainer;
pub use device::{Irq, PciDevice, PciRegion};
pub use error::{Error, RegionError};
pub use pages::page_sizes;
pub use peer::PeerMapping;
