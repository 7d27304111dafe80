//! The kinds of devices that can be opened by name, one file each.
//!
//! A kind is a [`Spec`]: its name, a sentence for people, its options, and how a device is opened. The command line, C
//! and Python take the same names, and every list of kinds is made from [`KINDS`].

mod card;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod file;
mod kind;
mod option;
pub mod qdma;
pub mod ram;
#[cfg(feature = "slash")]
pub mod slash;
pub mod soft;
pub mod vfio;
pub mod vfio_user;
#[cfg(feature = "slash")]
pub mod vrtd;
#[cfg(feature = "vulkan")]
pub mod vulkan;

pub(crate) use kind::AnySpec;
pub use kind::{Ability, DeviceKind, Listed, OpenResult, Spec};
pub use option::{BadDeviceSpec, OptionAbout, SpecOption};

/// Every kind of device.
pub const KINDS: &[DeviceKind] = &[
    DeviceKind::of::<soft::SoftSpec>(),
    #[cfg(feature = "daemon")]
    DeviceKind::of::<daemon::DaemonSpec>(),
    DeviceKind::of::<vfio::VfioSpec>(),
    DeviceKind::of::<vfio_user::VfioUserSpec>(),
    DeviceKind::of::<file::FileSpec>(),
    DeviceKind::of::<qdma::QdmaSpec>(),
    DeviceKind::of::<ram::RamSpec>(),
    #[cfg(feature = "vulkan")]
    DeviceKind::of::<vulkan::VulkanSpec>(),
    #[cfg(feature = "cuda")]
    DeviceKind::of::<cuda::CudaSpec>(),
    #[cfg(feature = "slash")]
    DeviceKind::of::<slash::SlashSpec>(),
    #[cfg(feature = "slash")]
    DeviceKind::of::<vrtd::VrtdSpec>(),
];
