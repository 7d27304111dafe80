//! The vfio-user protocol: a PCI device in another process, over a socket.
//!
//! The messages are those of QEMU's specification (docs/interop/vfio-user.rst), version 0.1. [`serve`] is the device's
//! side: a [`ServedDevice`] implements the registers, and [`ClientMemory`] is the memory that the client has mapped for
//! it. [`UserBus`] is the client's side, an [`Mmio`](dmalane_dma::Mmio): a driver runs on it as on a device of the
//! kernel's. It keeps to the limits that the other side announces: descriptors and bytes of a message, page sizes.
//!
//! A device with a BAR of one register, and a driver that uses it:
//!
//! ```
//! use std::os::fd::OwnedFd;
//! use std::os::unix::net::UnixStream;
//!
//! use dmalane_vfio_user::{ClientMemory, RegionSpec, ServedDevice, UserBus, serve};
//!
//! struct Counter(u32);
//!
//! impl ServedDevice for Counter {
//!     fn region(&self, index: u32) -> RegionSpec {
//!         RegionSpec { len: if index == 0 { 4 } else { 0 }, accessible: index == 0 }
//!     }
//!     fn read(&mut self, _region: u32, offset: u64, into: &mut [u8]) -> bool {
//!         let at = offset as usize; // within the region, as is its end
//!         into.copy_from_slice(&self.0.to_le_bytes()[at..at + into.len()]);
//!         true
//!     }
//!     fn write(&mut self, _region: u32, _offset: u64, from: &[u8]) -> bool {
//!         self.0 += from.iter().map(|byte| u32::from(*byte)).sum::<u32>();
//!         true
//!     }
//!     fn interrupts(&self) -> u32 {
//!         0
//!     }
//!     fn set_interrupts(&mut self, _first: u32, _events: Vec<Option<OwnedFd>>) {}
//!     fn reset(&mut self) -> bool {
//!         self.0 = 0;
//!         true
//!     }
//! }
//!
//! let (device, driver) = UnixStream::pair()?;
//! let served = std::thread::spawn(move || serve(device, &mut Counter(0), &ClientMemory::new()));
//! let bus = UserBus::over(driver)?;
//! bus.write_region(0, 0, &[40])?;
//! bus.write_region(0, 0, &[2])?;
//! let mut value = [0; 4];
//! bus.read_region(0, 0, &mut value)?;
//! assert_eq!(u32::from_le_bytes(value), 42);
//! drop(bus);
//! served.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
#[cfg(test)]
mod strict;
mod wire;

pub use client::UserBus;
pub use error::{Error, ProtocolError};
pub use memory::{ClientMemory, ClientPort};
pub use server::{MappableFile, RegionSpec, ServeError, ServedDevice, serve};
pub use wire::Command;
