//! The integration tests of this crate, linked once.

mod alloc_read;
mod card_server;
mod devices;
mod errors;
mod kept;
mod manifest;
mod path;
mod peers;
mod slash;
