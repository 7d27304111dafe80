//! IO page tables: shared walkers, one file per family of formats, table memory behind a trait.
//!
//! A [`Format`] says what the bits of an entry mean, [`Tables`] says where tables live, and [`PageTable`] walks: it
//! maps a whole scatter list in one call, unmaps into a [`FlushList`], and strides over what is mapped by leaf.
//! [`walk`] is the device's side of the same tables.
//!
//! Beyond that: [`map_through`](PageTable::map_through) maps what another table translates, [`cut`](PageTable::cut) and
//! [`merge`](PageTable::merge) change the size of leaves under a running device, [`take_dirty`](PageTable::take_dirty)
//! and [`unmap_dirty`](PageTable::unmap_dirty) say what it wrote. [`HeapTables`] is memory for one owner; with a
//! [`TablePool`], threads share a tree without a lock.
//!
//! ```
//! use dmalane_addr::{Access, Iova, PageSize, PhysAddr, Segment, Span};
//! use dmalane_iopt::{Arm64S1_4k, HeapTables, PageTable};
//!
//! let tables = HeapTables::new(PhysAddr::new(0x8000_0000));
//! let mut table = PageTable::<Arm64S1_4k, Iova, PhysAddr, _>::new(tables)?;
//! let at = Iova::new(0x20_0000);
//! let list = [
//!     Segment { addr: PhysAddr::new(0x4000_0000), len: 2 << 20 }, // becomes one 2 MiB leaf
//!     Segment { addr: PhysAddr::new(0x7000), len: 4096 },
//! ];
//! assert_eq!(table.map_sg(at, list, Access::RW)?, (2 << 20) + 4096);
//! assert_eq!(table.lookup(at).unwrap().size, PageSize::SIZE_2M);
//!
//! let flush = table.unmap(Span::new(at, (2 << 20) + 4096).unwrap())?;
//! // ... the IOTLB forgets flush.span() here ...
//! table.free_tables(flush);
//! # Ok::<(), dmalane_iopt::Error>(())
//! ```
#![no_std]

#[cfg(feature = "alloc")]
extern crate alloc;

// By this name `pool.rs` finds its atomics, so that `tests/interleavings.rs` can give the same source others.
#[cfg(target_has_atomic = "64")]
use core::sync::atomic;

mod chunks;
mod cursor;
mod cut;
mod dirty;
mod error;
mod estimate;
mod flush;
mod format;
mod formats;
mod list;
mod map;
mod plain;
#[cfg(target_has_atomic = "64")]
mod pool;
mod protect;
mod runs;
mod slots;
mod table;
mod tables;
mod through;
mod unmap;
mod walk;
mod words;

pub use error::{Error, NamedAddr};
pub use estimate::TableEstimate;
pub use flush::FlushList;
pub use format::{Entry, Foreign, Format, MAX_LEVELS, Register, Registers};
pub use formats::*;
#[cfg(target_has_atomic = "64")]
pub use pool::*;
pub use runs::{Run, Runs};
pub use table::{Leaf, PageTable};
pub use tables::*;
pub use walk::{FaultKind, WalkFault, Walked, walk, walk_privileged};
