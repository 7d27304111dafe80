//! The integration tests of this crate, linked once.

mod conformance;
mod device;
mod reads;
mod stream;
