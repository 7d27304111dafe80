//! PCI devices through the Linux kernel's VFIO.
#![doc = include_str!("../README.md")]

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
