//! The C interface of dmalane: overlapped allocation and reading of files, models in host memory, the
//! bind manager, and open devices.
//!
//! `include/dmalane.h` documents it; this crate builds a shared and a static library for that header. C refers to
//! objects by numbers, not pointers, so that using a destroyed object is an error instead of a crash. Memory that C
//! passes is accessed only within the given length and only during the call. A panic becomes an error number.
//!
//! The functions lock the objects that they use, so they may be called from any thread.

mod abi;
mod buffers;
mod models;
mod numbers;
mod objects;
mod stretches;
mod targets;
mod types;

pub use abi::*;
pub use types::*;
