//! The integration tests of this crate, linked once.

mod card;
mod cli;
mod compare;
mod dmalaned;
mod examples;
mod export;
mod gpu;
mod iopt;
mod layers;
mod manifest;
mod outputs;
mod refused;
mod slash;
mod supervisor;
mod timeline;
mod top;
mod usage;
mod validate;
mod vm;
