//! Device virtual memory: bind and unbind page ranges of buffer objects, committed whole or not at all.
#![doc = include_str!("../README.md")]
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
