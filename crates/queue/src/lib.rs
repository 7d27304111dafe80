//! Submit an operation that owns its buffer, get it back.
//!
//! [`Queue`] is the one port of everything that moves bytes: files ([`FileOffset`](dmalane_addr::FileOffset)) and
//! devices ([`DeviceAddr`]). An [`Operation`] owns its host memory from [`Queue::submit`] until its [`Completion`], so
//! nothing can touch or free memory that is in flight. [`Capabilities`] say what a queue does besides copies.
//!
//! [`Registered`] is a buffer pinned and mapped once for many operations.
//!
//! Wrappers are queues too: [`Split`] drives several queues as one, distributing each copy as a [`Policy`] says: by
//! address ([`AddressPolicy`]), or by measured rates ([`BalancePolicy`]). [`SharedQueue`] lets threads use one queue at
//! the same time. [`run`] and [`drain`] wait.
//!
//! # A queue of your own
//!
//! [`QueueState`] checks and names operations, and [`wait_with`] waits by polling. This queue copies into a
//! buffer that stands for a device's memory; `PolledQueue` of `dmalane-device` makes a queue of a function. To test a
//! queue, call `conformance::suite` (feature `conformance`).
//!
//! ```
//! use std::time::Duration;
//! use dmalane_addr::CardAddr;
//! use dmalane_dma::{AnonHeap, CopyHint, Heap, SharedBuf};
//! use dmalane_queue::{
//!     Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue, QueueState, Refused, Ticket,
//!     Waiting, Work, run, wait_with,
//! };
//!
//! struct Memory { bytes: SharedBuf, state: QueueState, waiting: Waiting }
//!
//! impl Memory {
//!     fn copy(&self, operation: &Operation) -> Result<(), OpError> {
//!         let Work::Copy { direction, host, at: DeviceAddr::Card(at) } = &operation.work else {
//!             return Err(OpError::Device { status: 1 }); // an address that this device does not have
//!         };
//!         let there = self.bytes.as_volatile_slice().sub(at.bits() as usize, host.slice.len());
//!         let there = there.ok_or(OpError::NoCardMemory(*at))?;
//!         match direction {
//!             Direction::FromHost => there.copy_from(host.slice.as_volatile_slice(), CopyHint::Keep),
//!             Direction::ToHost => host.slice.as_volatile_slice().copy_from(there, CopyHint::Keep),
//!         }
//!         Ok(())
//!     }
//! }
//!
//! impl Queue for Memory {
//!     type Addr = DeviceAddr;
//!     fn limits(&self) -> Limits { Limits { capacity: 64, max_len: 1 << 30, max_parts: usize::MAX } }
//!     fn capabilities(&self) -> Capabilities { Capabilities::FROM_HOST | Capabilities::TO_HOST }
//!     fn in_flight(&self) -> usize { self.state.in_flight() }
//!     fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
//!         let (capabilities, limits) = (self.capabilities(), self.limits());
//!         self.state.submit(operation, capabilities, limits, |_| Ok(()), &mut self.waiting)
//!     }
//!     fn flush(&mut self) {}
//!     fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
//!         let before = done.len();
//!         while let Some((ticket, operation)) = self.waiting.pop_front() {
//!             let result = self.copy(&operation);
//!             let bytes = if result.is_ok() { operation.bytes() } else { 0 };
//!             let completion = Completion { ticket, operation, result, bytes };
//!             self.state.ended();
//!             done.push(completion);
//!         }
//!         done.len() - before
//!     }
//!     fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
//!         wait_with(self, done, timeout, |_, left| std::thread::sleep(left.min(Duration::from_millis(1))))
//!     }
//! }
//!
//! let heap = AnonHeap::new();
//! let bytes = heap.allocate(1 << 20)?.share();
//! let mut queue = Memory { bytes, state: QueueState::default(), waiting: Waiting::new() };
//! let host = || heap.allocate(4096).unwrap().share().into_slice();
//! let write = |at| Operation::write(host(), DeviceAddr::Card(CardAddr::new(at)));
//! assert!(run(&mut queue, write(0x1000), Duration::from_secs(1)).is_ok());
//! assert!(run(&mut queue, write(1 << 20), Duration::from_secs(1)).is_err(), "behind the end");
//! # Ok::<(), dmalane_dma::Error>(())
//! ```
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
pub use choice::{BadQueueChoice, QueueChoice, parse_queues};
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
