//! `dmalane load`: files into device memory.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;

use crate::failure::Failure;

/// What to load, how, and what to say about it.
#[allow(dead_code)] // read by the pipeline that joins here
pub struct LoadArgs {
    /// Where the bytes come from.
    pub input: Input,
    /// The device that gets them.
    pub device: Device,
    /// Show the table of stages.
    pub explain: bool,
    /// Read every tensor back and compare it with the file.
    pub verify: bool,
    /// Past the page cache, or through it.
    pub read: ReadMode,
    /// Bytes allocated together before reading into them starts; at least 1.
    pub gather: u64,
    /// Which channel moves the bytes.
    pub mm_channel: MmChannel,
    /// Which card memory gets them.
    pub placement: Placement,
    /// How scattered the synthetic physical frames are, 0 to 1.
    pub fragmentation: f64,
    /// Where to write what the card holds.
    pub save: Option<PathBuf>,
    /// Bytes of DDR on the software card; at least 1.
    pub card_ddr: u64,
    /// Bytes of HBM on the software card; at least 1.
    pub card_hbm: u64,
    /// Run the software card on threads of its own.
    pub workers: bool,
    /// Same seed, same frames and same sample.
    pub seed: u64,
    /// Result as JSON.
    pub json: bool,
    /// No progress bar.
    pub quiet: bool,
}

/// Where the bytes come from.
#[allow(dead_code)] // read by the pipeline that joins here
pub enum Input {
    /// These files, at least one.
    Files(Vec<PathBuf>),
    /// A safetensors file of this many bytes (at least 1) that the command makes.
    Sample(u64),
}

/// How files are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadMode {
    /// Direct I/O where the file system takes it, else through the page cache.
    Auto,
    /// Direct I/O or an error.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// The devices that can be loaded to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Device {
    /// The software card, inside this process.
    Soft,
}

/// Which DMA channel moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum MmChannel {
    /// Both, by where the bytes go.
    Auto,
    /// Only channel 0.
    #[value(name = "0")]
    Zero,
    /// Only channel 1.
    #[value(name = "1")]
    One,
}

/// Which card memory holds the tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Placement {
    /// DDR, which both channels reach.
    Ddr,
    /// HBM, filled from its start.
    Hbm,
    /// HBM, in turns in the half of either channel.
    HbmStriped,
}

/// Loads, and prints the result.
pub fn run(_args: LoadArgs) -> Result<ExitCode, Failure> {
    Err(Failure::new("load is not built yet"))
}
