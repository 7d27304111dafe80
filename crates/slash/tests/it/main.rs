//! The integration tests of this crate, linked once.

mod cases;
mod faults;
mod overhead;
mod suites;
mod vrtd;
