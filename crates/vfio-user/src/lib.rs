//! The vfio-user protocol: a PCI device in another process, over a socket.
//!
//! The messages are those of QEMU's specification (docs/interop/vfio-user.rst), version 0.1. [`serve`] is the device's
//! side: a [`ServedDevice`] implements the registers, and [`ClientMemory`] is the memory that the client has mapped for
//! it. [`UserBus`] is the client's side, an [`Mmio`](dmalane_dma::Mmio): a driver runs on it as on a device of the
//! kernel's.
//!
//! Neither side trusts the other. This crate parses the messages itself because the crate `vfio_user` 0.1.7 panics on a
//! malformed version message, allocates as many bytes as a client asks for, and does not check whether a mapping was
//! refused.

mod client;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod memory;
mod server;
mod wire;

pub use client::UserBus;
pub use error::{Error, ProtocolError};
pub use memory::{ClientMemory, ClientPort, Traffic};
pub use server::{MappableFile, RegionSpec, ServeError, ServedDevice, serve};
pub use wire::Command;
