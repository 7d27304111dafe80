//! Moves bytes from files to devices along one path: allocate, read, map, transfer, bind.
//!
//! This crate is the face of the workspace: it re-exports the layers, each usable alone, and holds the glue that has to
//! know two of them at once. [`SoftDevice::open`] makes the software card behind a software IOMMU; [`open_file`] opens a
//! file for it.
//!
//! ```
//! use dmalane::load::Placement;
//! use dmalane::{FileOptions, SoftConfig, SoftDevice, open_file};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("model.safetensors");
//! dmalane::load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
//!
//! let mut soft = SoftDevice::open(SoftConfig::default())?;
//! let mut inputs = [open_file(&path, FileOptions::default())?];
//! let (loaded, report) = soft.device.load(&mut inputs, Placement::Ddr, &mut |_bytes| {})?;
//! soft.device.verify(&loaded, &inputs, &mut |_bytes| {})?;
//! assert_eq!(report.bytes, 1 << 20);
//! for t in loaded.files[0].tensors() {
//!     println!("{} {:?}", t.tensor.name, t.va);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`validate`] measures a device beside its ceiling, and fits a model of its link.
//! [`AllocAndRead`] is the first half of the path alone: an open file in, a filled buffer out.

mod alloc_read;
mod card_server;
mod open_file;
mod pci_card;
mod soft;

pub use dmalane_addr as addr;
pub use dmalane_card as card;
pub use dmalane_daemon as daemon;
pub use dmalane_dma as dma;
pub use dmalane_file as file;
pub use dmalane_iopt as iopt;
pub use dmalane_load as load;
pub use dmalane_queue as queue;
pub use dmalane_trace as trace;
pub use dmalane_validate as validate;
pub use dmalane_vfio as vfio;
pub use dmalane_vfio_user as vfio_user;
pub use dmalane_vm as vm;

pub use alloc_read::{
    AllocAndRead, AllocRead, MappedRead, ReadError, ReadMethod, ReadOptions, ReadSource, Scheme, read_all, read_mapped,
    read_to_device,
};
pub use card_server::{CARD_PCI_ID, CardServer, CardServerError};
pub use dmalane_file::Options as FileOptions;
pub use open_file::{open_as, open_file};
pub use pci_card::{PciCardError, connect_pci_card, open_pci_card};
pub use soft::{
    CardDevice, CardParts, CardUse, JoinedChannel, SoftChannel, SoftConfig, SoftDevice, SoftError, SoftParts,
};
