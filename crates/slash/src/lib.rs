//! AMD's V80 through its driver SLASH, as a device.
//!
//! [`SlashDevice::open`] opens the driver's node `/dev/slash_qdma_ctlN`. Nothing of SLASH is needed to build.
//!
//! | part | what it is here |
//! |---|---|
//! | host memory | buffers that the driver allocates and this process maps; the driver registers no other memory |
//! | device memory | `ddr` and the halves of the HBM, `hbm0` and `hbm1`, at the card's addresses |
//! | queues | two, each a queue pair of the driver on a memory channel of its own, with a thread |
//! | address space | flat: the card has no MMU |
//!
//! **After an error, progress is unknown.** The driver gives up on a transfer after 10 s without stopping the card, and
//! discards the byte counts of a call of which a part failed. So a queue stops its queue pair before it gives back the
//! buffers of a call that failed, and never frees them if it cannot.
//!
//! **A transfer begins at a page of its buffer.** Where an operation does not, its first bytes, less than a page, are
//! copied to a page of the queue and go as a transfer of their own within the same call.
//!
//! The interface is that of branch `dev` of SLASH at commit 6a4cc11e (18 August 2026),
//! `driver/libslash/include/slash/uapi/slash_interface.h`. SLASH promises no compatibility between releases, so an
//! unknown version is refused ([`Error::Version`]).

mod abi;
mod buffers;
mod card;
mod device;
mod error;
mod kernel;
#[cfg(feature = "model")]
pub mod model;
mod queue;
mod regions;
mod sys;
mod vrtd;
mod worker;

pub use buffers::quarantined_bytes;
pub use card::Info;
pub use device::{Node, SlashDevice, SlashOptions, nodes};
pub use error::Error;
pub use kernel::{Calls, Handle, Kernel, Request, Transfer};
pub use regions::{DDR, HBM};
pub use vrtd::{VRTD_SOCKET, VrtdCard, VrtdName, vrtd_cards};
