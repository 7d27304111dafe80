//! The options of `dmalane validate`, and their help.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::file::FileDevicePaths;
use dmalane::queue::QueueChoice;
use dmalane::validate::{Allocation, Directions, Pages, Phase, Settings, Stop, Sweep, emulations};

use crate::pci_card::PciCard;
use crate::size::Size;
use crate::validate::{ChannelAllocation, Device, Form, PageChoice, SoftOptions, ValidateArgs};

const EXAMPLES: &str = "\
Examples:
  dmalane validate                                 the software card: HBM, DDR, both
  dmalane validate -j 2 --ddr-only --buffer-size 64MiB --bidirectional
  dmalane validate --sweep 4KiB,16MiB,MUL4 --plot sizes.svg
  dmalane validate --unregistered --iterations 100 --csv
  dmalane validate --emulate shared-23 --fit       what limits a modelled card?
  dmalane validate -d daemon:/run/dmalane/dmalaned.sock
  dmalane validate -d file:/dev/shm/memory --probe-at 1MiB --explain
  dmalane validate -d file:/dev/xdma0_h2c_0,c2h=/dev/xdma0_c2h_0 --buffer-size 4MiB

Writes to the device's memory from --offset on, and reads it back. What a file or a block device
held there is put back at the end, also after an error, Ctrl-C or SIGTERM, but not after SIGKILL, a
second Ctrl-C, or when the device hangs. What a card held is lost, and so is what a character
device held: one is measured only with --offset or --overwrite.
MB/s are 10^6 bytes per second. There is no figure for bytes that did not compare.

Exit status: 0 all bytes were right, 1 some were not or it could not be measured, 2 wrong command line,
130 or 143 interrupted by SIGINT or SIGTERM. What was measured before an error or a signal is printed.";

/// Measure a device: integrity, bandwidth and latency, each figure beside what is possible.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct ValidateOptions {
    /// The device: soft; daemon or daemon:SOCKET for a share of the card of a dmalaned; vfio:BDF for a card that is bound to vfio-pci;
    /// vfio-user:SOCKET for one that a process serves; or file:PATH[,h2c=PATH,c2h=PATH] for files that take reads and writes at device
    /// addresses
    #[arg(short, long, value_name = "DEVICE", default_value = "soft", value_parser = device)]
    device: Device,

    /// Threads, from 1 to 64, each with a buffer for either direction
    #[arg(short = 'j', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    threads: u8,

    /// Bytes of a buffer, a multiple of 4KiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(16), value_parser = buffer, allow_hyphen_values = true)]
    buffer_size: Size,

    /// Bytes at the front of each memory that are left alone, a multiple of 4KiB [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = pages, allow_hyphen_values = true)]
    offset: Option<Size>,

    /// Measure a device whose contents are not put back (a character device), from its first address on
    #[arg(long)]
    overwrite: bool,

    /// The DMA channels that move the bytes: auto, one, or several like 0,1
    #[arg(long, value_name = "CHANNELS", default_value = "auto", value_parser = mm_channel)]
    mm_channel: QueueChoice,

    /// Only DDR
    #[arg(long, conflicts_with = "hbm_only")]
    ddr_only: bool,

    /// Only HBM
    #[arg(long)]
    hbm_only: bool,

    /// Which channel a thread's bytes take: by where they go, or the threads in turns
    #[arg(long, value_enum, default_value_t = ChannelAllocation::Auto)]
    channel_allocation: ChannelAllocation,

    /// Entries of each ring of the software card, a power of two
    #[arg(long, value_name = "N")]
    ring_size: Option<usize>,

    /// Measure until each thread has moved each of its buffers so often
    #[arg(long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    /// Measure each figure for so many seconds
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds, allow_negative_numbers = true)]
    duration: Duration,

    /// One transfer for each buffer, in one piece over one channel: no stripes and no policy
    #[arg(long)]
    raw_transfer_test: bool,

    /// Measure reading (by default reading, writing and both at once)
    #[arg(long)]
    read: bool,

    /// Measure writing
    #[arg(long)]
    write: bool,

    /// Measure reading and writing at once
    #[arg(long)]
    bidirectional: bool,

    /// Register each buffer once; this is the default
    #[arg(long, conflicts_with = "unregistered")]
    registered: bool,

    /// Register a buffer for each transfer
    #[arg(long)]
    unregistered: bool,

    /// The pages behind the buffers
    #[arg(long, value_enum, default_value_t = PageChoice::Both)]
    pages: PageChoice,

    /// Measure several buffer sizes: from FIRST to LAST, each times 2 (MUL) or N (MULN) the one before, or plus FIRST (ADD) or SIZE (ADDSIZE)
    #[arg(long, value_name = "FIRST,LAST,MUL|ADD", value_parser = sweep, conflicts_with = "buffer_size")]
    sweep: Option<Sweep>,

    /// Hang the software card off a modelled link with known limits
    #[arg(long, value_name = "LINK", value_parser = emulate)]
    emulate: Option<String>,

    /// Measure what tells the limits of the link apart, and name those that explain the rates
    #[arg(long)]
    fit: bool,

    /// Where a file may be written to and read back to find out whether io_uring can be trusted with it: 16KiB or more
    #[arg(long, value_name = "OFFSET", value_parser = pages, allow_hyphen_values = true)]
    probe_at: Option<Size>,

    /// Past the page cache, for files
    #[arg(long)]
    direct: bool,

    /// DDR of the software card, at most 256GiB; rounded up to 4MiB
    #[arg(long, value_name = "SIZE", value_parser = super::card_memory, allow_hyphen_values = true)]
    card_ddr: Option<Size>,

    /// HBM of the software card, in two halves, at most 256GiB; rounded up to 4MiB
    #[arg(long, value_name = "SIZE", value_parser = super::card_memory, allow_hyphen_values = true)]
    card_hbm: Option<Size>,

    /// Run the software card on threads of its own, one for each channel
    #[arg(long)]
    workers: bool,

    /// Say how the device is driven
    #[arg(long)]
    explain: bool,

    /// Print the result as JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// Print the figures as CSV
    #[arg(long)]
    csv: bool,

    /// Draw the figures into this file, as SVG
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(super::save))]
    plot: Option<PathBuf>,

    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
}

impl ValidateOptions {
    /// What does not go together and clap cannot know.
    pub fn conflict(&self) -> Option<String> {
        let file = matches!(self.device, Device::File(_));
        let card = [
            ("--ring-size", self.ring_size.is_some()),
            ("--emulate", self.emulate.is_some()),
            ("--card-ddr", self.card_ddr.is_some()),
            ("--card-hbm", self.card_hbm.is_some()),
            ("--workers", self.workers),
            ("--fit", self.fit),
            ("--ddr-only", self.ddr_only),
            ("--hbm-only", self.hbm_only),
            ("--channel-allocation", self.channel_allocation == ChannelAllocation::Paired),
            ("--raw-transfer-test", self.raw_transfer_test),
        ];
        let node =
            [("--probe-at", self.probe_at.is_some()), ("--direct", self.direct), ("--overwrite", self.overwrite)];
        let here = [("--emulate", self.emulate.is_some()), ("--workers", self.workers)];
        let sized = [("--card-ddr", self.card_ddr.is_some()), ("--card-hbm", self.card_hbm.is_some())];
        let given = |options: &[(&'static str, bool)]| options.iter().find(|o| o.1).map(|o| o.0);
        match (file, given(&card), given(&node)) {
            (true, Some(option), _) => Some(format!("{option} is for a card, and a file is none")),
            (false, ..) if matches!(self.device, Device::Daemon(_)) && given(&here).is_some() => {
                given(&here).map(|option| format!("{option} is for a card in this process: a daemon has its own"))
            }
            (false, ..) if matches!(self.device, Device::Pci(_)) && given(&here).or(given(&sized)).is_some() => {
                let option = given(&here).or(given(&sized));
                option.map(|option| format!("{option} is for a card in this process: this one is as it is"))
            }
            (false, _, Some(option)) => Some(format!("{option} is for a file: -d file:PATH")),
            _ => None,
        }
    }
}

impl From<ValidateOptions> for ValidateArgs {
    fn from(options: ValidateOptions) -> Self {
        let chosen = [
            (options.read, Directions::Read),
            (options.write, Directions::Write),
            (options.bidirectional, Directions::Both),
        ];
        let ways: Vec<Directions> = chosen.iter().filter(|w| w.0 || !chosen.iter().any(|w| w.0)).map(|w| w.1).collect();
        let settings = Settings {
            threads: options.threads.into(),
            buffers: match &options.sweep {
                Some(sweep) => sweep.iter().collect(),
                None => vec![options.buffer_size.bytes()],
            },
            offset: options.offset.map_or(0, Size::bytes),
            phases: match (options.ddr_only, options.hbm_only) {
                (true, _) => vec![Phase::Ddr],
                (_, true) => vec![Phase::Hbm],
                _ => Vec::new(),
            },
            channels: options.mm_channel,
            allocation: match options.channel_allocation {
                ChannelAllocation::Auto => Allocation::Auto,
                ChannelAllocation::Paired => Allocation::Paired,
            },
            stop: options.iterations.map_or(Stop::For(options.duration), Stop::After),
            raw: options.raw_transfer_test,
            ways,
            registered: !options.unregistered,
            pages: match options.pages {
                PageChoice::Both => vec![Pages::Small, Pages::Huge],
                PageChoice::Small => vec![Pages::Small],
                PageChoice::Huge => vec![Pages::Huge],
            },
        };
        Self {
            device: options.device,
            soft: SoftOptions {
                ring: options.ring_size,
                emulate: options.emulate,
                ddr: options.card_ddr.map(Size::bytes),
                hbm: options.card_hbm.map(Size::bytes),
                workers: options.workers,
            },
            probe_at: options.probe_at.map(Size::bytes),
            direct: options.direct,
            lose: options.overwrite || options.offset.is_some(),
            settings,
            fit: options.fit,
            explain: options.explain,
            form: match (options.json, options.csv) {
                (true, _) => Form::Json,
                (_, true) => Form::Csv,
                _ => Form::Text,
            },
            plot: options.plot,
            quiet: options.quiet,
        }
    }
}

fn device(text: &str) -> Result<Device, String> {
    match text.strip_prefix("file:") {
        Some(paths) => paths.parse::<FileDevicePaths>().map(Device::File).map_err(|e| e.to_string()),
        None if text == "soft" => Ok(Device::Soft),
        None => match (super::daemon(text), PciCard::parse(text)) {
            (Some(socket), _) => Ok(Device::Daemon(socket)),
            (None, Some(card)) => card.map(Device::Pci),
            (None, None) => Err(format!(
                "not a device\nhint: soft, file:PATH, {}; dmalane devices lists what there is",
                super::OTHERS
            )),
        },
    }
}

fn mm_channel(text: &str) -> Result<QueueChoice, String> {
    text.parse().map_err(|e: dmalane::queue::BadQueueChoice| e.to_string())
}

fn pages(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|e: crate::size::SizeError| e.to_string())?;
    match size.bytes().is_multiple_of(4096) {
        true => Ok(size),
        false => Err("not a multiple of 4KiB".to_owned()),
    }
}

fn buffer(text: &str) -> Result<Size, String> {
    match pages(text)? {
        size if (4096..=1 << 30).contains(&size.bytes()) => Ok(size),
        _ => Err("not from 4KiB to 1GiB".to_owned()),
    }
}

fn sweep(text: &str) -> Result<Sweep, String> {
    let sweep =
        Sweep::parse(text, |size| size.parse().map(Size::bytes).map_err(|e: crate::size::SizeError| e.to_string()));
    let sweep = sweep.map_err(|e| e.to_string())?;
    match sweep.iter().find(|size| !size.is_multiple_of(4096) || *size > 1 << 30) {
        Some(size) => Err(format!("{size} is not a multiple of 4KiB up to 1GiB")),
        None => Ok(sweep),
    }
}

fn emulate(text: &str) -> Result<String, String> {
    let known: Vec<String> = emulations().into_iter().map(|(name, _)| name).collect();
    match known.iter().any(|name| name == text) {
        true => Ok(text.to_owned()),
        false => Err(format!("no such link\nhint: there are {}", known.join(", "))),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let bad = "not a number of seconds above 0 and up to 3600, such as 0.5";
    let seconds: f64 = text.parse().map_err(|_| bad.to_owned())?;
    match seconds > 0.0 && seconds <= 3600.0 {
        true => Duration::try_from_secs_f64(seconds).map_err(|_| bad.to_owned()),
        false => Err(bad.to_owned()),
    }
}
