//! The integration tests of this crate, linked once.

mod any;
mod array;
mod breaking;
#[path = "../geometries/mod.rs"]
mod geometries;
mod long;
mod shapes;
mod vm;
