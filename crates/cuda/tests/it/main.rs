//! The crate over the fake driver, and over a real GPU where there is one.

mod conforms;
mod faults;
mod gpu;
