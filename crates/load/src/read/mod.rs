//! Files into memory, read while the memory is still being allocated.

mod alloc;
mod builder;
mod cached;
mod job;
mod method;
mod options;
mod plan;
mod short;

pub use alloc::alloc_and_read;
pub use builder::Read;
pub(crate) use job::{ReadTo, read};
pub use method::{AllocRead, ReadFiles, ReadMethod};
pub use options::ReadOptions;
