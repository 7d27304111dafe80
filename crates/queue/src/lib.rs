//! Submit an operation that owns its buffer, get it back.
//!
//! [`Queue`] is the one port of everything that moves bytes: files ([`FileOffset`](dmalane_addr::FileOffset)) and
//! devices ([`DeviceAddr`]). An [`Operation`] owns its host memory from [`Queue::submit`] until its [`Completion`], so
//! nothing can touch or free memory that is in flight. [`Abilities`] say what a queue does besides copies.
//!
//! [`Registered`] is a buffer pinned and mapped once for many operations; [`Registry`] caches registrations, within
//! limits.
//!
//! Wrappers are queues too: [`Split`] drives several queues as one, distributing each copy as a [`Policy`] says: by
//! address ([`AddressPolicy`]), or by measured rates ([`BalancePolicy`]). [`SharedQueue`] lets threads and tasks use
//! one queue at the same time. [`run`] and [`drain`] wait.
//!
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
mod choice;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod operation;
mod policy;
mod queue;
mod registered;
mod registry;
mod shared;
mod split;
mod state;
mod stats;
mod wait;

pub use addr::{DeviceAddr, QueueAddr};
pub use balance::BalancePolicy;
pub use choice::{BadQueueChoice, QueueChoice};
pub use error::{OpError, Refusal, Refused, StopReason};
pub use operation::{Abilities, CacheHint, Completion, GatherList, HostSlice, Operation, Shape, Work};
pub use policy::{AddressPolicy, Area, Fragment, Policy, Route};
pub use queue::{Cancelled, DeviceQueue, Direction, Limits, Queue, Ticket};
pub use registered::Registered;
pub use registry::{Registry, RegistryError, RegistryLimits, RegistryStats};
pub use shared::{Class, SharedHandle, SharedOptions, SharedQueue};
pub use split::{Clock, Split, WallClock};
pub use state::{QueueState, Waiting};
pub use stats::{Latency, Stats};
pub use wait::{HaltWatch, RELEASE_TIMEOUT, RunError, StallWatch, drain, run, wait_with};
