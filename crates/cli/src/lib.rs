//! Shared parts of the programs `dmalane` and `dmalaned`: start, failures, output, numbers and sizes.
#![forbid(unsafe_code)]

pub mod config;
pub mod failure;
pub mod layout;
pub mod number;
pub mod output;
pub mod program;
pub use dmalane::size;
