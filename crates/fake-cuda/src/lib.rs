//! A CUDA driver for tests, as a shared library: the calls that crate `cuda` makes, over host memory.
//!
//! No emulator of the driver exists. This one is strict where the real one is not: it answers what a driver would,
//! and notes a *violation* for what a driver only punishes later. Rules that were measured on an H100 (driver 580) are
//! kept: `cuMemMap` maps whole allocations only, overlapping registrations are refused, a copy lies in one of them,
//! calls check addresses and access at once, a batch has no order.
//!
//! - Streams work on threads of their own, a little late, in order; a batch is done backwards.
//! - Memory that is unmapped, freed or unregistered while a stream still uses it is a violation, and so is host memory
//!   that was never registered, a handle that is not live, a call without a context.
//! - Memory that was allocated for it is exported to other processes, and lives as long as a descriptor of it: then it
//!   is a memfd, in a wrapper that is as little of a file as the real driver's descriptor.
//! - Every call can be made to fail, once or for good; calls that undo something are done nevertheless, as the
//!   driver's are that report an error of earlier work.
//! - Everything that is created is counted: what is left at the end is a leak.
//!
//! [`Fake`] controls it. The state is one for the process, so tests take turns ([`Fake::turn`]).

mod abi;
mod model;

pub use abi::{Fake, Seen, library};
