//! Measuring a device: what it moves, beside what is possible, and never a figure for bytes that were not compared.
//!
//! A [`TestedDevice`] is a device whose queues nothing else uses; [`run`] measures it as
//! [`ValidateSettings`] say into a [`ValidateReport`]. First every thread writes and reads back its buffers, all
//! of them before any is compared, so that buffers that share addresses show. Then each figure is measured for a while
//! and the bytes that it moved last are compared; where they are not right, the report has no figure.
#![forbid(unsafe_code)]

mod error;
mod measure;
mod place;
mod reference;
mod report;
mod settings;
mod target;
#[cfg(test)]
mod tests;
mod walk;
mod workers;

pub use error::ValidateError;
pub use measure::run;
pub use report::{Figure, Integrity, Rate, ValidateEvent, ValidateReport};
pub use settings::{Allocation, Directions, Pages, Phase, ValidateSettings};
pub use target::TestedDevice;
