//! The integration tests of this crate, linked once.

mod as_device;
mod conformance;
mod device;
mod many;
mod reads;
