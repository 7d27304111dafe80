//! Files into memory, read while the memory is still being allocated.

mod alloc;
mod builder;
mod cached;
mod error;
mod job;
mod method;
mod options;
mod plan;
mod short;
mod source;
mod stream;

pub use alloc::AllocAndRead;
pub use builder::Read;
pub use error::ReadError;
pub use method::{AllocRead, ReadFiles, ReadMethod};
pub use options::{ReadOptions, Scheme};
