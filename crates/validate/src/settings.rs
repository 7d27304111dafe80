//! What is measured, and how.

use std::fmt;
use std::time::Duration;

use dmalane_queue::{Direction, QueueChoice};

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
pub(crate) enum Stop {
    /// Each thread has moved each of its buffers this number of times.
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

/// The measurements to make; with feature `clap`, options of a command line.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ValidateSettings {
    /// Threads, from 1 to 64.
    #[cfg_attr(feature = "clap", arg(short = 'j', long, value_name = "N", default_value_t = 8))]
    pub threads: usize,
    /// Transfers in flight per thread and direction, from 1 to 64, each with a buffer.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    pub iodepth: usize,
    /// Sizes of buffers, such as 16MiB or 4KiB,64KiB,1MiB.
    ///
    /// Each is measured: multiples of 4 KiB up to 1 GiB.
    #[cfg_attr(feature = "clap", arg(long = "buffer-size", value_name = "SIZE", value_delimiter = ','))]
    #[cfg_attr(feature = "clap", arg(default_value = "16MiB", value_parser = bytes, allow_hyphen_values = true))]
    pub buffers: Vec<u64>,
    /// Memories of a card to measure [default: each, then both at once].
    #[cfg_attr(feature = "clap", arg(long = "placement", value_name = "MEMORY", value_enum, value_delimiter = ','))]
    pub phases: Vec<Phase>,
    /// Directions, measured in this order.
    #[cfg_attr(feature = "clap", arg(long = "direction", value_name = "WHICH", value_enum, value_delimiter = ','))]
    #[cfg_attr(feature = "clap", arg(default_value = "read,write,both"))]
    pub directions: Vec<Directions>,
    /// Seconds per measurement, in which each buffer is moved at least once.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "0.5"))]
    #[cfg_attr(feature = "clap", arg(value_parser = dmalane_device::size::seconds(1e-6)))]
    pub duration: Duration,
    /// Transfers of each buffer per measurement, instead of a duration.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", conflicts_with = "duration"))]
    pub iterations: Option<u64>,
    /// Page sizes.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", value_enum, value_delimiter = ','))]
    #[cfg_attr(feature = "clap", arg(default_value = "4k,2m", help_heading = BUFFERS))]
    pub pages: Vec<Pages>,
    /// First byte used of each memory, a multiple of 4KiB [default: 0].
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", value_parser = bytes, help_heading = BUFFERS))]
    #[cfg_attr(feature = "clap", arg(allow_hyphen_values = true))]
    pub starting_offset: Option<u64>,
    /// Distance from one buffer to the next, each contiguous [default: packed, in HBM striped over both halves]
    ///
    /// A multiple of 4 KiB and at least a buffer. Each buffer lies at its position times this, behind the starting
    /// offset, of its memory, in which the halves of HBM follow each other.
    #[cfg_attr(feature = "clap", arg(long = "offset", value_name = "SIZE", value_parser = bytes))]
    #[cfg_attr(feature = "clap", arg(allow_hyphen_values = true, help_heading = BUFFERS))]
    pub stride: Option<u64>,
    /// DMA channel: auto, a number, or one for each buffer (two per thread) like 0,1,0,auto.
    ///
    /// With both directions at once, thread T reads at position 2T and writes at position 2T+1; with one direction, it
    /// uses position T.
    #[cfg_attr(feature = "clap", arg(long = "mm-channel", value_name = "CHANNELS", default_value = "auto"))]
    #[cfg_attr(feature = "clap", arg(help_heading = BUFFERS))]
    pub channels: QueueChoice,
    /// paired: even buffers use one channel and region, odd ones the other.
    #[cfg_attr(feature = "clap", arg(long = "channel-allocation", value_name = "HOW", value_enum))]
    #[cfg_attr(feature = "clap", arg(default_value = "auto", help_heading = BUFFERS))]
    pub allocation: Allocation,
    /// Distance between the regions of --channel-allocation paired [default: half of each memory].
    #[cfg_attr(feature = "clap", arg(long = "channel-region-stride", value_name = "SIZE", value_parser = bytes))]
    #[cfg_attr(feature = "clap", arg(allow_hyphen_values = true, hide_short_help = true, help_heading = BUFFERS))]
    pub region_stride: Option<u64>,
    /// Transfer each buffer whole over one channel; channels alternate.
    #[cfg_attr(feature = "clap", arg(long = "raw-transfer-test", help_heading = BUFFERS))]
    pub raw: bool,
}

/// The heading of options about buffers.
#[cfg(feature = "clap")]
const BUFFERS: &str = "Buffers and channels";

#[cfg(feature = "clap")]
fn bytes(text: &str) -> Result<u64, dmalane_device::size::SizeError> {
    text.parse().map(dmalane_device::size::Size::bytes)
}

impl ValidateSettings {
    /// True when each buffer is contiguous at its position, and a thread has buffers for one direction, as in AMD's
    /// `v80-smi validate`: with a stride, a channel for each position, [raw](Self::raw) transfers or
    /// [`Allocation::Paired`].
    pub fn is_positional(&self) -> bool {
        self.raw || self.stride.is_some() || self.allocation == Allocation::Paired || self.channels.entries().len() > 1
    }

    /// How long a figure is measured.
    pub(crate) fn stop(&self) -> Stop {
        self.iterations.map_or(Stop::For(self.duration), Stop::After)
    }
}

impl Default for ValidateSettings {
    /// Eight threads with a buffer of 16 MiB for either direction; everything, half a second each.
    fn default() -> Self {
        Self {
            threads: 8,
            iodepth: 1,
            buffers: vec![16 << 20],
            phases: Vec::new(),
            directions: vec![Directions::Read, Directions::Write, Directions::Both],
            duration: Duration::from_millis(500),
            iterations: None,
            pages: vec![Pages::Small, Pages::Huge],
            starting_offset: None,
            stride: None,
            channels: QueueChoice::default(),
            allocation: Allocation::Auto,
            region_stride: None,
            raw: false,
        }
    }
}

#[cfg(all(test, feature = "clap"))]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_without_options_has_the_defaults() {
        use clap::{Args, Command, FromArgMatches};
        let matches = ValidateSettings::augment_args(Command::new("")).get_matches_from([""]);
        assert_eq!(ValidateSettings::from_arg_matches(&matches).unwrap(), ValidateSettings::default());
    }
}
