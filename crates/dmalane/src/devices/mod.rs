//! The kinds of devices that can be opened by name, one file each.
//!
//! A kind is a [`Spec`]: its name, a sentence for people, its options, and how a device is opened. The command line, C
//! and Python take the same names, and every list of kinds is made from [`KINDS`].

mod card;
pub mod cuda;
pub mod daemon;
pub mod file;
mod kind;
mod option;
pub mod qdma;
pub mod ram;
pub mod slash;
pub mod soft;
pub mod vfio;
pub mod vfio_user;
pub mod vrtd;
pub mod vulkan;

pub use card::CardOptions;
pub(crate) use kind::AnySpec;
pub use kind::{Ability, BadDeviceSpec, DeviceKind, Listed, OpenResult, Spec};
pub use option::{OptionAbout, SpecOption, nearest};

/// Every kind of device.
pub const KINDS: &[DeviceKind] = &[
    DeviceKind::of::<soft::SoftSpec>(),
    DeviceKind::of::<daemon::DaemonSpec>(),
    DeviceKind::of::<vfio::VfioSpec>(),
    DeviceKind::of::<vfio_user::VfioUserSpec>(),
    DeviceKind::of::<file::FileSpec>(),
    DeviceKind::of::<qdma::QdmaSpec>(),
    DeviceKind::of::<ram::RamSpec>(),
    DeviceKind::of::<vulkan::VulkanSpec>(),
    DeviceKind::of::<cuda::CudaSpec>(),
    DeviceKind::of::<slash::SlashSpec>(),
    DeviceKind::of::<vrtd::VrtdSpec>(),
];
