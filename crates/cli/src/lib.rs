//! The program `dmalane` as a function, and what it shares with `dmalaned`: failures, output, sizes.
#![forbid(unsafe_code)]

mod commands;
mod device;
mod entry;
pub mod failure;
pub mod layout;
mod model;
mod named;
pub mod output;
mod probe;
pub mod program;
mod progress;
mod range;
mod report;
mod room;
mod runs;
mod source;
mod timeline;
pub use dmalane::size;
pub use entry::{definition, run};
