//! VFIO as the Linux kernel has it: by iommufd and the device's own file, or by container and group with the IOMMU of type 1.

mod backend;
mod bar;
mod bus;
mod container;
mod device;
mod faults;
mod iommufd;
mod pages;
mod sys;
mod sysfs;

pub use backend::{Backend, Standing, no_iommufd, standings};
pub use bar::{BarMap, Placement};
pub use bus::VfioBus;
pub use container::{Container, Peer, Took};
pub use device::{Device, Region};
pub use faults::{FaultLog, SeenFault};
pub use pages::page_sizes;
