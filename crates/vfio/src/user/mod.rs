//! vfio-user: a PCI device in another process, over a socket.
//!
//! The messages are those of QEMU's specification (docs/interop/vfio-user.rst), version 0.1. [`serve`] is the device's side: a [`Model`] answers
//! for registers, [`ClientMemory`] is what the client has mapped for it. [`UserBus`] is the client's side, and a
//! [`Mmio`](dmalane_dma::Mmio): a driver cannot tell it from a device of the kernel's.
//!
//! The protocol is small and the other side may send anything, so the messages are read here: the crate `vfio_user` 0.1.7 panics on a bad
//! version message, allocates as many bytes as a client says, and its client does not look whether a mapping was refused.

mod client;
pub mod fuzzing;
mod memory;
mod server;
mod wire;

pub use client::UserBus;
pub use memory::{ClientMemory, ClientPort};
pub use server::{Mappable, Model, RegionSpec, ServeError, serve};
