//! IO page tables: shared walkers, one file per family of formats, table memory behind a trait.
#![doc = include_str!("../README.md")]
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
mod flush;
mod format;
#[macro_use]
mod formats;
#[cfg(feature = "alloc")]
mod image;
mod list;
mod map;
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

/// The addresses, spans and access rights that tables take, with the features that this crate was built with.
pub use dmalane_addr as addr;
pub use error::{Error, NamedAddr};
pub use flush::FlushList;
pub use format::{Entry, Foreign, Format, MAX_LEVELS, Register, Registers};
pub use formats::*;
#[cfg(feature = "alloc")]
pub use image::TableImage;
#[cfg(all(feature = "alloc", target_has_atomic = "64"))]
pub use pool::LocalPool;
#[cfg(target_has_atomic = "64")]
pub use pool::TablePool;
pub use runs::{Run, Runs};
pub use table::{Leaf, PageTable};
#[cfg(feature = "alloc")]
pub use tables::HeapTables;
pub use tables::{TableShape, Tables};
pub use walk::{FaultKind, WalkFault, Walked, walk, walk_privileged};
