//! What the programs `dmalane` and `dmalaned` share: how they start, fail, print and write sizes.
#![forbid(unsafe_code)]

pub mod failure;
pub mod output;
pub mod program;
pub use dmalane::size;
