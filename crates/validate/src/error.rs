//! Why a device could not be validated.

use std::time::Duration;

use dmalane_addr::CardAddr;
use dmalane_device::size::{Size, binary, binary_up};
use dmalane_queue::{OpError, Refusal, StopReason};
use thiserror::Error;

use crate::settings::Phase;

/// Why a device could not be validated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ValidateError {
    /// Settings that make no sense.
    #[error("{what}: {value} is {why}")]
    Bad {
        /// Which setting, as options are called.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The reason.
        why: &'static str,
    },
    /// A channel that the device does not have.
    #[error("the device has no channel {wanted}, it has {has}, numbered from 0")]
    NoChannel {
        /// Which was asked for.
        wanted: usize,
        /// Number of channels of the device.
        has: usize,
    },
    /// A list of channels of another length.
    #[error(
        "{entries} channels for {positions} buffer positions: one for all, or one for each position (two a thread)"
    )]
    ChannelCount {
        /// Entries of the list.
        entries: usize,
        /// Positions: two for each thread.
        positions: usize,
    },
    /// A memory that the device does not have.
    #[error("the device has no {0}")]
    NoMemory(Phase),
    /// The buffers do not fit.
    #[error(
        "{memory} has {:#}; the buffers need {:#}, the starting offset included",
        Size::new(*have), Size::new(*needed)
    )]
    TooSmall {
        /// Which memory.
        memory: &'static str,
        /// Bytes that the buffers take, the offset included.
        needed: u64,
        /// Bytes that there are.
        have: u64,
    },
    /// Host memory.
    #[error(transparent)]
    Memory(dmalane_dma::Error),
    /// Memory of a device whose driver allocates it.
    #[error(transparent)]
    DeviceMemory(dmalane_device::MemoryError),
    /// The file that the device writes is not locked.
    #[error(transparent)]
    Lock(#[from] dmalane_device::contents::LockError),
    /// The contents of the device's file cannot be read, so nothing was written.
    #[error("cannot read the device's contents")]
    Contents(#[source] std::io::Error),
    /// The device is a character device, which may hold data that are not to be overwritten.
    #[error("{0} is a character device, whose contents would be overwritten")]
    Lost(String),
    /// The device is a file that holds data, which are not to be overwritten.
    #[error("{0} holds data, which would be overwritten")]
    HoldsData(String),
    /// It was cancelled: see [`TestedDevice::stop_when`](crate::TestedDevice::stop_when).
    #[error("interrupted")]
    Interrupted,
    /// No thread could be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Not as much memory as buffers and references take.
    #[error("{} of memory are needed, and there is room for {} ({limited_by})", binary_up(*needed), binary(*have))]
    NoMemoryFor {
        /// Bytes.
        needed: u64,
        /// Bytes.
        have: u64,
        /// The setting or resource that sets the limit.
        limited_by: String,
    },
    /// A transfer was not accepted.
    #[error("a transfer to {at} was refused")]
    Refused {
        /// Where on the device.
        at: CardAddr,
        /// Why.
        #[source]
        reason: Refusal,
    },
    /// A transfer failed.
    #[error("{phase}, thread {thread}, {what} at {at}")]
    Failed {
        /// In which phase.
        phase: Phase,
        /// Which thread.
        thread: usize,
        /// "reading" or "writing".
        what: &'static str,
        /// Where on the device.
        at: CardAddr,
        /// How.
        #[source]
        error: OpError,
    },
    /// A channel has halted, and its device lets go of nothing.
    #[error("{phase}, thread {thread}: the channel has halted")]
    Halted {
        /// In which phase.
        phase: Phase,
        /// Which thread.
        thread: usize,
        /// Why it has halted.
        #[source]
        why: StopReason,
    },
    /// Nothing ends any more.
    #[error("{phase}, thread {thread}: nothing has ended for {after:?}")]
    Stuck {
        /// In which phase.
        phase: Phase,
        /// Which thread.
        thread: usize,
        /// How long.
        after: Duration,
    },
    /// Plain calls on the file failed while the reference was measured.
    #[error("the reference could not be measured")]
    Reference(#[source] std::io::Error),
    /// Copies by the driver alone, which are the reference, failed.
    #[error("the reference could not be measured by the device's driver")]
    DriverCopies(#[source] Box<dyn std::error::Error + Send + Sync>),
}
