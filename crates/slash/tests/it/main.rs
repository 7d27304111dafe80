//! The integration tests of this crate, linked once.

mod bars;
mod cases;
mod faults;
mod suites;
mod vrtd;
