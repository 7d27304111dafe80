//! A model of the driver and of the card behind it, for tests: answers the ioctls with the driver's checks, and fails
//! on command.
//!
//! [`DriverModel::kernel`] is the kernel for this process. A supervisor of another process calls
//! [`DriverModel::answer`] with the bytes of that process. Buffers are memfds; the card's memory is a sparse one.
//!
//! The checks and error numbers are those of `driver/slash_qdma.c` of SLASH. Where a transfer fails or ends short, the
//! card goes on with it until its queue pair is stopped, as hardware may: a buffer that is closed before that is a
//! [violation](DriverModel::violations).

mod daemon;
mod driver;

pub use daemon::{Tamper, Vrtd};
pub use driver::{Answer, Counts, DriverModel, Fault, FileId, Script, Version, words_of};
