//! Files into memory: read while the memory is still being allocated, and registered or copied to a device meanwhile.

mod alloc;
mod cached;
mod error;
mod files;
mod options;
mod plan;
mod report;
mod short;
mod source;
mod stream;

pub use alloc::AllocAndRead;
pub use error::ReadError;
pub use files::Read;
pub use options::{ReadOptions, Scheme};
pub use report::{AllocRead, ReadFiles, ReadMethod};
