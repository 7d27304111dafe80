//! What is measured, and how.

use std::fmt;
use std::time::Duration;

use dmalane_queue::Direction;

use crate::channels::Channels;

/// Which memory a measurement is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Phase {
    /// HBM: each buffer striped over both halves.
    Hbm,
    /// DDR.
    Ddr,
    /// Each buffer half in HBM, half in DDR.
    #[cfg_attr(feature = "clap", value(name = "hbm+ddr"))]
    Both,
    /// The only memory of a device that has no others.
    #[cfg_attr(feature = "clap", value(skip))]
    Device,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Hbm => "HBM",
            Self::Ddr => "DDR",
            Self::Both => "HBM+DDR",
            Self::Device => "device",
        })
    }
}

/// The directions of the bytes that a figure counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Directions {
    /// From the device (C2H).
    Read,
    /// To the device (H2C).
    Write,
    /// Both at once.
    Both,
}

impl Directions {
    /// True when a figure counts bytes of this direction.
    pub(crate) fn include(self, direction: Direction) -> bool {
        self == Self::Both || (self == Self::Read) == (direction == Direction::ToHost)
    }
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
    /// This time has passed, and each buffer was moved once.
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

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Small => "4 KiB pages",
            Self::Huge => "2 MiB pages",
        })
    }
}

/// The measurements to make.
#[derive(Clone, Debug)]
pub struct ValidateSettings {
    /// Threads, 1 to 64.
    pub threads: usize,
    /// Buffers of each thread for either direction, 1 to 64, all of them in flight at once.
    pub iodepth: usize,
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
    /// Which pages.
    pub pages: Vec<Pages>,
}

impl ValidateSettings {
    /// True when each buffer is contiguous at its position, and a thread has buffers for one direction, as in AMD's
    /// `v80-smi validate`: with a stride, a channel for each position, [raw](Self::raw) transfers or
    /// [`Allocation::Paired`].
    pub fn is_positional(&self) -> bool {
        self.raw || self.stride.is_some() || self.allocation == Allocation::Paired || self.channels.per_position()
    }
}

impl Default for ValidateSettings {
    /// Eight threads with a buffer of 16 MiB for either direction; everything, half a second each.
    fn default() -> Self {
        Self {
            threads: 8,
            iodepth: 1,
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
            pages: vec![Pages::Small, Pages::Huge],
        }
    }
}
