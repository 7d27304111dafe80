//! The integration tests of this crate, linked once.

mod array;
mod long;
mod queue;
mod shapes;
#[cfg(feature = "trace")]
mod trace;
mod vm;
