//! Device virtual memory: bind and unbind page ranges of buffer objects, committed whole or not at all.
//!
//! A [`Vm`] is one device address space. A batch of [`BindRequest`]s becomes a [`Plan`], which may fail; committing the
//! plan may not. The spans that a commit unmaps must be invalidated on the device before its tables are used again.
//!
//! ```
//! use std::sync::Arc;
//! use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, Segment, Span};
//! use dmalane_iopt::{HeapTables, X86_64_4Level};
//! use dmalane_vm::{Bo, BindRequest, Vm};
//!
//! let range = Span::new(DeviceVa::new(0x1000), (1 << 40) - 0x1000).unwrap();
//! let mut vm = Vm::<X86_64_4Level, _>::new(range, HeapTables::new(CardAddr::new(0)))?;
//!
//! let bo = Arc::new(Bo::of_segments(1, [Segment { addr: CardAddr::new(0x20_0000), len: 4 << 20 }])?);
//! let va = DeviceVa::new(0x4000_0000);
//! let bind = BindRequest::Bind { va, bo, offset: 0, len: 4 << 20, access: Access::RW };
//! let committed = vm.plan([bind])?.commit();
//! vm.invalidated(committed); // nothing was bound there before, so there was nothing to invalidate
//! assert_eq!(vm.lookup(va).unwrap().size, PageSize::SIZE_2M);
//!
//! let committed = vm.plan([BindRequest::Unbind(Span::new(va, 4096).unwrap())])?.commit();
//! for span in committed.spans() { /* the device's TLB forgets the span here */ }
//! vm.invalidated(committed);
//! assert_eq!(vm.lookup(va), None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]

extern crate alloc;
#[cfg(test)]
#[macro_use]
extern crate std;

mod any;
pub mod array;
mod binding;
mod bo;
mod errno;
mod error;
mod facts;
mod handles;
mod mapped;
mod plan;
mod record;
mod records;
mod request;
mod segments;
mod slots;
mod vm;
mod words;

pub use any::{AnyVm, any_vm};
pub use binding::{Binding, BindingTarget};
pub use bo::Bo;
pub use errno::Errno;
pub use error::Error;
pub use handles::Handles;
pub use mapped::{Mapped, MappedSource};
pub use plan::{Committed, Invalidate, Plan, PlanError};
pub use request::BindRequest;
pub use vm::Vm;
