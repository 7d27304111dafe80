//! Measuring a device: what it moves, beside what is possible, and never a figure for bytes that were not compared.
//!
//! A [`TestedDevice`] is a device whose queues nothing else uses; [`run`] measures it as
//! [`ValidateSettings`] say and returns a [`ValidateReport`]. First every thread writes and reads back its buffers, all
//! of them before any is compared, so that threads that share addresses show. Then each figure is measured for a while
//! and the bytes that it moved last are compared; where they are not right, the report has no figure.
#![forbid(unsafe_code)]

mod channels;
mod measure;
mod place;
mod reference;
mod sweep;
mod target;
#[cfg(test)]
mod tests;
mod walk;
mod workers;

use std::time::Duration;

use dmalane_addr::CardAddr;
use dmalane_dma::PageKind;
use dmalane_queue::{OpError, Refusal, StopReason};
use thiserror::Error;

pub use channels::Channels;
pub use measure::{run, run_into};
pub use place::Phase;
pub use sweep::{BadSweep, Step, Sweep};
pub use target::{Contents, TestedDevice};

/// The directions of the bytes that a figure or a limit counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Directions {
    /// From the device (C2H).
    Read,
    /// To the device (H2C).
    Write,
    /// Both at once.
    Both,
}

/// Which channel a thread's bytes take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Allocation {
    /// Those that the address policy says.
    Auto,
    /// Buffers at even positions take one channel and lie in one region, those at odd positions take the other channel
    /// and lie in a second region above.
    Paired,
}

/// When a figure has been measured for long enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// Each thread has moved each of its buffers so often.
    After(u64),
    /// So much time has passed, and each buffer was moved once.
    For(Duration),
}

/// The pages behind the buffers of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Pages {
    /// Of 4 KiB.
    #[cfg_attr(feature = "clap", value(name = "4k"))]
    Small,
    /// Of 2 MiB: reserved ones, or transparent.
    #[cfg_attr(feature = "clap", value(name = "2m"))]
    Huge,
}

/// The measurements to make.
#[derive(Clone, Debug)]
pub struct ValidateSettings {
    /// Threads, 1 to 64, each with a buffer for either direction.
    pub threads: usize,
    /// Bytes of a buffer, multiples of 4 KiB; each is measured.
    pub buffers: Vec<u64>,
    /// First byte of each memory that is used; a multiple of 4 KiB.
    pub starting_offset: u64,
    /// Bytes from one buffer position to the next, a multiple of 4 KiB and at least a buffer. If set, each buffer lies
    /// contiguously at `starting_offset + position * stride` of its memory, in which the halves of HBM follow each
    /// other. If `None`, buffers are packed, and those in HBM striped over both halves.
    pub stride: Option<u64>,
    /// Bytes between the two regions of [`Allocation::Paired`], a multiple of 4 KiB; `None` for half of the memory.
    pub region_stride: Option<u64>,
    /// Which memories; an empty list for all that the device has.
    pub phases: Vec<Phase>,
    /// Which channels.
    pub channels: Channels,
    /// How threads share them.
    pub allocation: Allocation,
    /// How long.
    pub stop: Stop,
    /// One contiguous transfer for each buffer over one channel: no stripes, no policy. Without a channel of its
    /// own, the buffers' channels alternate.
    pub raw: bool,
    /// Which directions, in this order.
    pub directions: Vec<Directions>,
    /// Buffers are registered once, and not for each transfer.
    pub registered: bool,
    /// Which pages.
    pub pages: Vec<Pages>,
}

impl ValidateSettings {
    /// True when each buffer is contiguous at its position, and has a thread of its own, as in AMD's `v80-smi
    /// validate`: with a stride, a channel for each position, [raw](Self::raw) transfers or [`Allocation::Paired`].
    pub fn is_positional(&self) -> bool {
        self.raw || self.stride.is_some() || self.allocation == Allocation::Paired || self.channels.per_position()
    }
}

impl Default for ValidateSettings {
    /// Eight threads with buffers of 16 MiB; everything, half a second each.
    fn default() -> Self {
        Self {
            threads: 8,
            buffers: vec![16 << 20],
            starting_offset: 0,
            stride: None,
            region_stride: None,
            phases: Vec::new(),
            channels: Channels::default(),
            allocation: Allocation::Auto,
            stop: Stop::For(Duration::from_millis(500)),
            raw: false,
            directions: vec![Directions::Read, Directions::Write, Directions::Both],
            registered: true,
            pages: vec![Pages::Small, Pages::Huge],
        }
    }
}

/// The comparison that comes before figures.
#[derive(Clone, PartialEq, Debug)]
pub struct Integrity {
    /// Which memory.
    pub phase: Phase,
    /// Bytes of a buffer.
    pub buffer: u64,
    /// The pages behind it.
    pub pages: Pages,
    /// Threads whose buffers came back as they were.
    pub ok: usize,
    /// Threads in all.
    pub threads: usize,
    /// The fault of the others.
    pub wrong: Vec<String>,
}

/// Bytes moved one way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// All threads together.
    pub bytes_per_s: f64,
    /// Median of the times that moving one buffer took, to 1 %.
    pub p50: Duration,
    /// 99 of 100 of these times are at most this, to 1 %.
    pub p99: Duration,
    /// Buffers moved, all threads together.
    pub buffers: u64,
}

impl Integrity {
    /// Both comparisons as one: as many threads as either had, of which those are right that are so in both.
    fn and(mut self, other: Self) -> Self {
        let failed = (self.threads - self.ok).max(other.threads - other.ok);
        self.threads = self.threads.max(other.threads);
        self.ok = self.threads - failed;
        self.wrong.extend(other.wrong);
        self
    }
}

/// A measured rate, of bytes that were compared.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// Which memory.
    pub phase: Phase,
    /// Bytes of a buffer.
    pub buffer: u64,
    /// The pages asked for, and those that there were.
    pub pages: Pages,
    /// See there.
    pub kind: PageKind,
    /// Which directions.
    pub directions: Directions,
    /// From the device.
    pub read: Option<Rate>,
    /// To the device.
    pub write: Option<Rate>,
    /// The reference in bytes per second, both directions together, measured next to it.
    pub reference: Option<f64>,
}

impl Figure {
    /// Bytes per second both ways together.
    pub fn total(&self) -> f64 {
        self.read.iter().chain(&self.write).map(|r| r.bytes_per_s).sum()
    }
}

/// The result of a validation.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ValidateReport {
    /// One for each memory, buffer and kind of pages.
    pub integrity: Vec<Integrity>,
    /// The measurement.
    pub figures: Vec<Figure>,
    /// Measurements that were left out, with the reason.
    pub left_out: Vec<String>,
    /// The kind of reference that [`Figure::reference`] is.
    pub reference: &'static str,
}

impl ValidateReport {
    /// True when all bytes were right.
    pub fn passed(&self) -> bool {
        self.integrity.iter().all(|i| i.ok == i.threads && i.wrong.is_empty())
    }
}

/// Progress of a validation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ValidateEvent {
    /// So many steps there will be.
    Steps(usize),
    /// This one has begun.
    Step(String),
}

/// Why a device could not be validated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ValidateError {
    /// Settings that make no sense.
    #[error("{what} of {value} is {why}")]
    Bad {
        /// Which setting.
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
    #[error("{memory} has {have} bytes; the buffers need {needed}, the starting offset included")]
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
    #[error("cannot read the device's contents: {0}")]
    Contents(std::io::Error),
    /// The device is a character device, which may hold data, and [`Contents`] does not allow to overwrite them.
    #[error("{0} is a character device, whose contents would be overwritten")]
    Lost(String),
    /// The device is a file that holds data, and [`Contents`] does not allow to overwrite them.
    #[error("{0} holds data, which would be overwritten")]
    HoldsData(String),
    /// It was cancelled: see [`TestedDevice::stop_when`].
    #[error("interrupted")]
    Interrupted,
    /// No thread could be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// Not as much memory as buffers and references take.
    #[error("{needed} bytes of memory are needed, and there is room for {have} ({limited_by})")]
    NoMemoryFor {
        /// Bytes.
        needed: u64,
        /// Bytes.
        have: u64,
        /// The setting or resource that sets the limit.
        limited_by: String,
    },
    /// A transfer was not accepted.
    #[error("a transfer to {at} was refused: {reason}")]
    Refused {
        /// Where on the device.
        at: CardAddr,
        /// Why.
        reason: Refusal,
    },
    /// A transfer failed.
    #[error("{phase}, thread {thread}, {what} at {at}: {error}")]
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
        error: OpError,
    },
    /// A channel has halted, and its device lets go of nothing.
    #[error("{phase}, thread {thread}: the channel has halted: {why}")]
    Halted {
        /// In which phase.
        phase: Phase,
        /// Which thread.
        thread: usize,
        /// Why it has halted.
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
    #[error("the reference could not be measured: {0}")]
    Reference(std::io::Error),
    /// Copies by the driver alone, which are the reference, failed.
    #[error("the reference could not be measured by the device's driver: {0}")]
    DriverCopies(Box<dyn std::error::Error + Send + Sync>),
}
