//! The vocabulary of dmalane: one type per address space and the plain data structures built on them.
#![doc = include_str!("../README.md")]
//! Mixing two address spaces does not compile:
//!
//! ```compile_fail,E0308
//! use dmalane_addr::{Iova, PhysAddr};
//! fn map(iova: Iova, to: PhysAddr) {}
//! map(PhysAddr::new(0x1000), Iova::new(0x2000)); // swapped
//! ```
//!
//! ```compile_fail,E0308
//! use dmalane_addr::{CardAddr, DeviceVa};
//! fn bind(va: DeviceVa, to: CardAddr) {}
//! bind(CardAddr::new(0x1000), DeviceVa::new(0x2000)); // swapped
//! ```
//!
//! ```compile_fail,E0308
//! use dmalane_addr::{FileOffset, Iova};
//! fn read(from: FileOffset, to: Iova) {}
//! read(Iova::new(0), FileOffset::new(0)); // swapped
//! ```
//!
//! and a number does not turn into an address by itself:
//!
//! ```compile_fail,E0277
//! let a: dmalane_addr::Iova = 0x1000u64.into();
//! ```
#![no_std]

#[cfg(any(feature = "alloc", test))]
extern crate alloc;

mod access;
mod address;
#[cfg(feature = "alloc")]
mod cache;
mod page;
#[cfg(feature = "alloc")]
mod phases;
#[cfg(feature = "alloc")]
mod range;
mod sg;
mod span;

pub use access::{Access, NotAccess};
pub use address::{Address, CardAddr, DeviceVa, FileOffset, Iova, PhysAddr};
#[cfg(feature = "alloc")]
pub use cache::{Lease, RangeCache};
pub use page::{PageSize, PageSizes};
#[cfg(feature = "alloc")]
pub use range::{RangeAllocator, RangeError};
pub use sg::{Segment, SegmentAt, SgError};
#[cfg(feature = "alloc")]
pub use sg::{SgIndex, SgPages, SgRuns, SgTable};
pub use span::Span;
