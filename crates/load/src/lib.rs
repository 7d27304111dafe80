//! The pipeline from file to device: reading, mapping, transferring and binding overlap, with a clock on each stage.
//!
//! An [`OpenDevice`] is a device with its free memory, its queues driven as one, and a few staging buffers that are
//! registered once. [`OpenDevice::load`] takes [`Input`]s (a file, and a queue that reads it), cuts them into chunks,
//! and moves chunk after chunk through the staging buffers while every tensor of which the last byte has arrived is
//! bound at its own device virtual address. [`OpenDevice::verify`] reads every tensor back through the device's address
//! space and compares it with the file.
//!
//! [`fill`] is the path's first half alone: files into buffers that stay, read while they are still being allocated.
//!
//! Nothing here knows which device or which kind of file it drives; crate `dmalane` opens them by name.

mod blob;
mod channels;
mod choose;
mod clock;
pub mod container;

mod device;
mod difference;
mod engine;
mod error;
pub mod fill;
mod input;
pub mod kept;
mod layout;
mod manifest;
mod model;
mod near;
mod open_file;
mod parallel;
mod parts;
mod pipeline;
mod plain;
mod read;
mod readback;
mod reference;
mod report;
mod sample;
mod save;
mod set;
mod stage;
mod targets;
mod timeline;

pub use blob::{hash_in_name, verify_names};
pub use container::{CONTAINERS, Container, FormatError, Model, Tensor};
pub use device::{DriveOptions, JoinedQueue, Loaded, LoadedFile, LoadedTensor, OpenDevice};
pub use difference::{Difference, Problem, RegionKind};
pub use dmalane_device::Placement;
pub use error::Error;
pub use input::{Input, open_file, open_inputs};
pub use layout::{BadAlign, Layout, Place, TensorAlign, TensorRun, VaRange};
pub use manifest::{Manifest, ManifestFile, ManifestRegion};
pub use model::{
    Block, HostModel, HostRates, HostTensor, Inputs, LoadOptions, ModelFile, ModelOptions, Next, Part, Reads, Select,
    TensorStream, model_heap,
};
pub use near::nearest;
pub use open_file::OpenFile;
pub use parallel::in_parallel;
pub use plain::plain_json;
pub use read::{AllocRead, Read, ReadFiles, ReadMethod, ReadOptions, alloc_and_read};
pub use reference::ReferenceRates;
pub use report::Report;
pub use sample::write_sample;
pub use save::Output;
pub use set::{ModelSet, SetFile, is_index};
pub use stage::{Stage, StageReport};
pub use timeline::{StageSpan, StageTimeline, Track};
