//! The integration tests of this crate, linked once.

mod conformance;
mod dirty;
mod failures;
mod formats;
mod operations;
mod shared;
mod specification;
mod understood;
