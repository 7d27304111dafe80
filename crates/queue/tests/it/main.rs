//! The integration tests of this crate, linked once.

mod fakes;
mod operation;
mod queue;
mod shared;
mod split;
