//! The integration tests of this crate, linked once.

mod cases;
mod faults;
mod suites;
