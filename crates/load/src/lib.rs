//! The pipeline from file to device: reading, mapping, transferring and binding overlap, with a clock on each stage.
//!
//! A [`Device`] is a card's channel, its memory, its virtual address space and a few staging buffers that are registered
//! once. [`Device::load`] takes [`Input`]s (a file, and a channel that reads it), cuts them into chunks, and moves
//! chunk after chunk through the staging buffers while every tensor of which the last byte has arrived is bound at its own
//! device virtual address. [`Device::verify`] reads every tensor back through the card's MMU and compares it with the file;
//! [`Device::save`] writes what the card holds as a safetensors file.
//!
//! [`fill`] is the path's first half alone: files into buffers that stay, read while they are still being allocated.
//!
//! Nothing here knows which card or which kind of file channel it drives; crate `dmalane` puts them together.

mod ceiling;
mod clock;
mod cut;
mod device;
mod error;
pub mod fill;
mod format;
mod layout;
mod memory;
mod pipeline;
mod readback;
mod report;
mod sample;
mod save;

pub use ceiling::Ceilings;
pub use clock::Stage;
pub use device::{Device, DeviceParts, Loaded, LoadedFile, LoadedTensor};
pub use error::Error;
pub use format::{FormatError, MAX_HEADER, Model, Tensor};
pub use layout::{Layout, Place};
pub use memory::{CardMemory, Placement};
pub use pipeline::Input;
pub use report::{Report, StageReport};
pub use sample::write_sample;
pub use save::{check_target, save_bytes};
