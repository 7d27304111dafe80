//! Allocating and reading at once and the bind manager of dmalane, for programs in C.
//!
//! `include/dmalane.h` is the description; this crate builds a shared and a static library that it fits. Objects are
//! known to C by numbers, not by pointers: one that was destroyed, or never was, is an error and not a crash. What C
//! passes by pointer is read or written within the length that it says, and nowhere kept. A panic ends in an error
//! number too.
//!
//! The functions lock what they use, so they may be called from any thread.

mod abi;
mod buffers;
mod objects;

pub use abi::*;
