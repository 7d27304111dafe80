//! The integration tests of this crate, linked once.

mod card;
mod conformance;
mod device;
mod hostile;
mod queue;
mod raw;
