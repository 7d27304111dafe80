//! The vfio-user protocol: a PCI device in another process, over a socket.
#![doc = include_str!("../README.md")]

mod capabilities;
mod client;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod link;
mod memory;
#[cfg(test)]
mod messages;
mod migration;
mod server;
#[cfg(test)]
mod strict;
mod wire;

pub use client::UserBus;
pub use error::{Error, ProtocolError};
pub use memory::{ClientMemory, ClientPort};
pub use server::{MappableFile, RegionSpec, ServeError, ServedDevice, serve};
pub use wire::Command;
