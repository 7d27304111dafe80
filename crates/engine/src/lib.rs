//! Submit an owned buffer, get it back.
//!
//! [`Channel`] is the one port that everything which moves bytes implements: a file read, a copy by the software card, a
//! copy by a real card. An operation owns its [`dmalane_mem::Part`] from [`Channel::submit`] until its
//! [`Completion`] gives it back, so nothing can touch or free memory that is in flight.
//!
//! [`Registered`] is a buffer pinned and mapped once for many transfers. [`Split`] drives several channels as one,
//! cutting each transfer as a [`Policy`] says: by placement ([`AddressPolicy`]), or by rates that it measures
//! ([`BalancePolicy`]). [`run`] and [`drain`] wait.
//!
//! What is in flight cannot be used:
//!
//! ```compile_fail,E0382
//! use dmalane_engine::{Channel, Transfer};
//! fn misuse<C: Channel>(channel: &mut C, transfer: Transfer<C::Far>) {
//!     let _ticket = channel.submit(transfer);
//!     transfer.part.view(); // moved into the channel
//! }
//! ```
#![forbid(unsafe_code)]

mod balance;
mod channel;
#[cfg(feature = "conformance")]
pub mod conformance;
mod device;
mod policy;
mod registered;
mod split;
mod wait;

pub use balance::BalancePolicy;
pub use channel::{Channel, Completion, Direction, Far, Limits, OpError, Refusal, Refused, Ticket, Transfer};
pub use device::{DeviceAddr, DeviceFar};
pub use policy::{AddressPolicy, Area, Piece, Policy, Route};
pub use registered::Registered;
pub use split::{Clock, Split, WallClock};
pub use wait::{RunError, drain, run};
