//! Containers: kinds of files, and the tensors in them.
//!
//! Each kind is a module with a [`Container`], which says how it is recognized and parsed, and a line of
//! [`CONTAINERS`]. A new kind: see *A container* in `CONTRIBUTING.md`.

mod file;
mod foreign;
mod format_error;
pub mod gguf;
mod kinds;
mod lfs;
mod model;
pub mod npy;
pub mod raw;
pub mod safetensors;
mod tensor;
mod text;

pub(crate) use file::ContainerFile;
pub use file::HEAD;
pub use format_error::FormatError;
pub use kinds::{CONTAINERS, detect};
pub(crate) use kinds::{kind, parse, refuse_raw, what};
pub(crate) use lfs::lfs_pointer;
pub use lfs::refuse_lfs_pointer;
pub use model::{Container, Model};
pub use tensor::{Tensor, element_bits};
pub(crate) use text::short;
pub use text::{MAX_HEADER, MAX_PAIRS};
