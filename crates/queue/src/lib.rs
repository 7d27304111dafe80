//! Submit an operation that owns its buffer, get it back.
#![doc = include_str!("../README.md")]
//! Memory in flight cannot be used:
//!
//! ```compile_fail,E0382
//! use dmalane_queue::{Operation, Queue};
//! fn misuse<Q: Queue>(queue: &mut Q, operation: Operation<Q::Addr>) {
//!     let _ticket = queue.submit(operation);
//!     operation.into_slice(); // moved into the queue
//! }
//! ```

mod addr;
mod balance;
mod capabilities;
mod choice;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod operation;
mod outcome;
mod policy;
mod queue;
mod registered;
mod shared;
mod split;
mod state;
mod wait;

pub use addr::{DeviceAddr, QueueAddr};
pub use balance::BalancePolicy;
pub use capabilities::{Capabilities, Direction, Limits};
pub use choice::{BadQueueChoice, QueueChoice};
pub use error::{OpError, Refusal, StopCause, StopReason};
pub use operation::{CacheHint, GatherList, HostSlice, Operation, Shape, Work};
pub use outcome::{Cancelled, Completion, Refused, Ticket};
pub use policy::{AddressPolicy, Area, Piece, Policy, Route};
pub use queue::{DeviceQueue, Queue};
pub use registered::Registered;
pub use shared::{SharedHandle, SharedOptions, SharedQueue};
pub use split::Split;
pub use state::{QueueState, Waiting};
pub use wait::{HaltWatch, RELEASE_TIMEOUT, RunError, StallWatch, drain, run, wait_with};
