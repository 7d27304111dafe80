//! Submit an owned buffer, get it back.
//!
//! [`Channel`] is the one port that everything which moves bytes implements: a file read, a copy by the software card, a
//! copy by a real card. An operation owns its [`dmalane_dma::BufferSlice`] from [`Channel::submit`] until its
//! [`Completion`] gives it back, so nothing can touch or free memory that is in flight.
//!
//! [`Queue`] is the wide port: a DMA engine's channel with all that it does ([`Operation`]). Every queue is a channel
//! ([`Copies`]), and can be used by many threads and tasks ([`Shared`]).
//!
//! [`Registered`] is a buffer pinned and mapped once for many transfers; [`Registry`] keeps them, within limits. [`Split`]
//! drives several channels as one, cutting each transfer as a [`Policy`] says: by placement ([`AddressPolicy`]), or by rates
//! that it measures ([`BalancePolicy`]). [`Fenced`] signals fences as operations end. [`run`] and [`drain`] wait.
//!
//! What is in flight cannot be used:
//!
//! ```compile_fail,E0382
//! use dmalane_queue::{Channel, Transfer};
//! fn misuse<C: Channel>(channel: &mut C, transfer: Transfer<C::Far>) {
//!     let _ticket = channel.submit(transfer);
//!     transfer.part.view(); // moved into the channel
//! }
//! ```

mod balance;
mod channel;
mod choice;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "conformance")]
pub mod conformance_queue;
mod copies;
mod device;
mod fenced;
mod operation;
mod policy;
mod queue;
mod registered;
mod registry;
mod shared;
mod split;
mod stats;
mod wait;

pub use balance::BalancePolicy;
pub use channel::{Channel, Completion, Direction, Far, Limits, OpError, Refusal, Refused, Ticket, Transfer};
pub use choice::{BadQueueChoice, QueueChoice};
pub use copies::Copies;
pub use device::{DeviceAddr, DeviceFar};
pub use fenced::Fenced;
pub use operation::{Abilities, CacheHint, Ended, Gather, HostPart, Operation, Rejected, Shape, Work};
pub use policy::{AddressPolicy, Area, Piece, Policy, Route};
pub use queue::{Cancelled, Queue};
pub use registered::Registered;
pub use registry::{CopyError, Registry, RegistryError, RegistryLimits, RegistryStats};
pub use shared::{Class, Pending, Shared};
pub use split::{Clock, Split, WallClock};
pub use stats::{Latency, Sampler, Stats};
pub use wait::{HaltWatch, LETS_GO, RunError, StallWatch, drain, run};
