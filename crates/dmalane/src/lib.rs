//! Loads model files onto devices from user space, and shows where the time goes.
//!
//! This crate is the face of the workspace: it re-exports the layers, each usable alone, and holds the glue that has to
//! know two of them at once. [`open`] opens a device by name, [`HostModel`] the files of a
//! model.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # dmalane::load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
//! let mut device = dmalane::open("soft")?;
//! let model = dmalane::HostModel::open([&path], Default::default())?;
//! let loaded = model.load_onto(&mut device, &Default::default(), |_| {})?;
//! println!("{:?}", loaded["embeddings.weight"].va);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Other devices have other names ([`devices::KINDS`]): `daemon:SOCKET`, `vfio:BDF`, `file:PATH`, `ram:SIZE`. With
//! [`OpenOptions`] a device is opened as it is needed; [`OpenDevice`] has all that can be done with one.
//!
//! [`validate`] measures a device beside a reference.
//! [`Read`] is the first half of the path alone: files into buffers. [`alloc_and_read`] is its shortest form: an open
//! file in, a filled buffer out.

mod card_server;
mod causes;
mod config_space;
pub mod devices;
mod open;
mod open_options;
pub mod pci;
mod pci_card;
mod spec;

pub use dmalane_addr as addr;
pub use dmalane_card as card;
#[cfg(feature = "cuda")]
pub use dmalane_cuda as cuda;
#[cfg(feature = "daemon")]
pub use dmalane_daemon as daemon;
pub use dmalane_device as device;
pub use dmalane_dma as dma;
pub use dmalane_file as file;
pub use dmalane_iopt as iopt;
#[cfg(feature = "daemon")]
pub use dmalane_keep as keep;
pub use dmalane_load as load;
pub use dmalane_queue as queue;
pub use dmalane_sim as sim;
#[cfg(feature = "slash")]
pub use dmalane_slash as slash;
#[cfg(feature = "validate")]
pub use dmalane_validate as validate;
pub use dmalane_vfio as vfio;
pub use dmalane_vfio_user as vfio_user;
pub use dmalane_vm as vm;
#[cfg(feature = "vulkan")]
pub use dmalane_vulkan as vulkan;

pub use card_server::{CARD_PCI_ID, CardClient, CardServer, CardServerError};
pub use causes::{error_chain, is_lost};
pub use devices::BadDeviceSpec;
pub use dmalane_device::size;
pub use dmalane_file::FileOptions;
pub use dmalane_load::{
    AllocRead, HostModel, Input, LoadOptions, ModelOptions, OpenDevice, OpenFile, Placement, Read, ReadFiles,
    ReadMethod, ReadOptions, alloc_and_read, open_file,
};
pub use open::{OpenError, open};
pub use open_options::OpenOptions;
pub use pci_card::{PciCardError, connect_pci_card, open_pci_card};
pub use spec::DeviceSpec;

/// The programs of the documentation.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../../docs/reference/library.md")]
    struct Library;
}
