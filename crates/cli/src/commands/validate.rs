//! `dmalane validate`: data integrity and speed of a device.

mod outcome;
mod page;
mod report;

use std::fs::Metadata;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, value_parser};
use dmalane::devices::Ability;
use dmalane::validate::{
    Allocation, Channels, Contents, Directions, Pages, Phase, Stop, TestedDevice, ValidateError, ValidateEvent,
    ValidateReport, ValidateSettings, run_into as measure,
};
use dmalane::{DeviceSpec, OpenOptions, is_lost};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::device::{self, Consent};
use crate::failure::{Failure, USAGE};
use crate::number::seconds;
use crate::output::{self, Outputs};
use crate::progress::Progress;
use crate::report::Page;
use crate::size::{Size, SizeError, binary};
use outcome::ValidateOutcome;

const EXAMPLES: &str = "\
Examples:
  dmalane validate                                 the software card: HBM, DDR, and both at once
  dmalane validate -j 2 --placement ddr --buffer-size 64MiB --direction both
  dmalane validate --buffer-size 4KiB,64KiB,1MiB,16MiB --report sizes.html
  dmalane validate -d daemon:/run/dmalane/dmalaned.sock
  dmalane validate -d file:/dev/shm/memory -v
  dmalane validate -j 1 --iodepth 16                   many transfers in flight, one thread
  dmalane validate -j 2 --buffer-size 64MiB --offset 64MiB --mm-channel 0,0,1,1
  dmalane validate -d file:/dev/xdma0_h2c_0,c2h=/dev/xdma0_c2h_0 --buffer-size 4MiB --overwrite

Overwrites the device's memory from --starting-offset on. A file or a block device that holds data is \
measured only with --overwrite, a character device with --starting-offset or --overwrite. Rates are in \
GB/s (10^9 bytes), sizes in GiB (2^30 bytes). Bandwidth is reported only where the data read back was \
equal.

Exit status: 0 all data was equal, 1 data differed or the device could not be measured, 2 usage error, \
130 or 143 interrupted by SIGINT or SIGTERM. Results from before an error or a signal are printed.";

/// Measure a device: data integrity, then bandwidth and latency, each beside a reference rate.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Validate {
    #[arg(short, long, value_name = "DEVICE", default_value = "soft")]
    #[arg(value_parser = device::NAME, hide_possible_values = true, help = device::help("The device"))]
    #[arg(env = "DMALANE_DEVICE", hide_env_values = true)]
    device: DeviceSpec,

    /// Threads, from 1 to 64
    #[arg(short = 'j', long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u8).range(1..=64))]
    threads: u8,

    /// Transfers in flight per thread and direction, from 1 to 64, each with a buffer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u8).range(1..=64))]
    iodepth: u8,

    /// Sizes of buffers, such as 16MiB or 4KiB,64KiB,1MiB
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "16MiB", value_parser = buffer)]
    #[arg(allow_hyphen_values = true)]
    buffer_size: Vec<Size>,

    /// Memories of a card to measure [default: each, then both at once]
    #[arg(long, value_name = "MEMORY", value_enum, value_delimiter = ',')]
    placement: Vec<Phase>,

    /// Directions
    #[arg(long, value_name = "WHICH", value_enum, value_delimiter = ',', default_value = "read,write,both")]
    direction: Vec<Directions>,

    /// Seconds per measurement
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds(1e-6))]
    duration: Duration,

    /// Transfers of each buffer per measurement, instead of a duration
    #[arg(long, value_name = "N", conflicts_with = "duration", value_parser = value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    #[command(flatten)]
    consent: Consent,

    /// Write a page (HTML): figures beside references
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    report: Option<PathBuf>,

    /// Page sizes
    #[arg(long, value_name = "SIZE", value_enum, value_delimiter = ',', default_value = "4k,2m")]
    #[arg(help_heading = BUFFERS)]
    pages: Vec<Pages>,

    /// First byte used of each memory, a multiple of 4KiB [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = pages, allow_hyphen_values = true, help_heading = BUFFERS)]
    starting_offset: Option<Size>,

    /// Distance from one buffer to the next, each contiguous [default: packed, in HBM striped over both halves]
    #[arg(long, value_name = "SIZE", value_parser = pages, allow_hyphen_values = true, help_heading = BUFFERS)]
    offset: Option<Size>,

    /// DMA channel: auto, a number, or one for each buffer (two per thread) like 0,1,0,auto
    #[arg(long, value_name = "CHANNELS", default_value = "auto", help_heading = BUFFERS)]
    mm_channel: Channels,

    /// paired: even buffers use one channel and region, odd ones the other
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Allocation::Auto, help_heading = BUFFERS)]
    channel_allocation: Allocation,

    /// Distance between the regions of --channel-allocation paired [default: half of each memory]
    #[arg(long, value_name = "SIZE", value_parser = pages, allow_hyphen_values = true, help_heading = BUFFERS)]
    #[arg(hide_short_help = true)]
    channel_region_stride: Option<Size>,

    /// Transfer each buffer whole over one channel; channels alternate
    #[arg(long, help_heading = BUFFERS)]
    raw_transfer_test: bool,

    #[command(flatten, next_help_heading = OUTPUTS)]
    format: output::OutputFormat,

    #[command(flatten)]
    replace: output::Replace,
}

/// The heading of options about buffers.
const BUFFERS: &str = "Buffers and channels";
/// That of options about output.
const OUTPUTS: &str = "Outputs";

/// SIGINT and SIGTERM, caught.
struct Signals {
    stop: Arc<AtomicBool>,
    which: Arc<AtomicUsize>,
}

impl Signals {
    /// The first signal raises the flag; the second ends the process at once.
    fn catch() -> Result<Self, Failure> {
        let this = Self { stop: Arc::default(), which: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down.
            flag::register_conditional_shutdown(signal, 128 + signal, this.stop.clone())?;
            flag::register_usize(signal, this.which.clone(), signal as usize)?;
            flag::register(signal, this.stop.clone())?;
        }
        Ok(this)
    }

    /// Sets the exit status of a failure to that of the signal that stopped the measurement, where one did.
    fn mark(&self, failure: Failure) -> Failure {
        match self.which.load(Ordering::Relaxed) {
            0 => failure,
            signal => failure.status(128 + signal as u8),
        }
    }
}

impl Validate {
    /// Measures, and prints the result.
    pub fn run(self) -> Result<ExitCode, Failure> {
        self.check_options()?;
        // From here on a signal ends the measurement, and what was measured is printed.
        let signals = Signals::catch()?;
        let settings = self.settings();
        let (mut target, outputs) = self.target()?;
        target.stop_when(signals.stop.clone());
        let bar = Progress::steps("validate", !self.format.quiet);
        let mut watch = |event| match event {
            ValidateEvent::Steps(n) => bar.more_steps(n),
            ValidateEvent::Step(what) => bar.step(what),
            _ => {}
        };
        let mut report = ValidateReport::default();
        let result = measure(&target, &settings, &mut report, &mut watch);
        bar.finish();
        let failed = result.err().map(|e| self.failure(e));
        let (device, notes) = (target.name.clone(), target.notes());
        // Waits for transfers that a hung device has not completed, and counts the buffers that it keeps.
        drop(target);
        let held = dmalane::file::quarantined_bytes();
        let failed = failed.map(|failure| match held {
            0 => signals.mark(failure),
            n => signals.mark(failure).cause(format!("the kernel still holds {} of buffers", binary(n))),
        });
        let complete = failed.is_none();
        let outcome = ValidateOutcome { device, notes, settings, report, complete };
        if complete || !outcome.report.integrity.is_empty() {
            self.print(&outcome, &outputs)?;
        }
        if let Some(failure) = failed {
            return Err(failure);
        }
        if outcome.report.integrity.is_empty() {
            let failure = Failure::new("nothing was measured");
            return Err(outcome.report.left_out.iter().fold(failure, Failure::cause));
        }
        if !outcome.report.passed() {
            let failure = Failure::new("the integrity check failed: data read back differs; no bandwidth reported");
            let wrong =
                outcome.report.integrity.iter().flat_map(|i| i.wrong.iter().map(move |w| format!("{}: {w}", i.phase)));
            return Err(wrong.take(8).fold(failure, Failure::cause));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Writes the page, and prints the figures.
    fn print(&self, outcome: &ValidateOutcome, outputs: &Outputs) -> Result<(), Failure> {
        let page = Page {
            command: "dmalane validate",
            device: &self.device.to_string(),
            answer: (report::answer(outcome, report::verdict(outcome)), report::how(outcome)),
            sections: page::sections(outcome),
        };
        let written = page.write(outputs, " (the device was measured)");
        let path = self.report.as_deref().filter(|_| written.is_ok());
        match self.format.json {
            true => output::print_json(&report::json(outcome, path))?,
            false => output::print_text(&report::text(outcome, path, self.format.verbose))?,
        }
        written
    }

    /// Refuses options that do not fit the device.
    fn check_options(&self) -> Result<(), Failure> {
        let card = [
            ("--placement", !self.placement.is_empty()),
            ("--channel-allocation", self.channel_allocation == Allocation::Paired),
            ("--raw-transfer-test", self.raw_transfer_test),
        ];
        let given = |options: &[(&'static str, bool)]| options.iter().find(|o| o.1).map(|o| o.0);
        if let Some(option) = given(&card).filter(|_| !self.device.kind().has(Ability::Card)) {
            return Err(Failure::usage(format!("{option} is for a card, not for {}", self.device)));
        }
        if self.channel_region_stride.is_some() && self.channel_allocation != Allocation::Paired {
            return Err(Failure::usage("--channel-region-stride needs --channel-allocation paired"));
        }
        self.consent.check(&self.device)
    }

    /// How the device is opened.
    fn open_options(&self) -> OpenOptions {
        // As many calls at once as the reference makes.
        let both = if self.direction.contains(&Directions::Both) { 2 } else { 1 };
        OpenOptions {
            // All memory is measured, and nothing is bound.
            flat: true,
            // `contents` says what becomes of the data.
            overwrite: true,
            threads: Some(usize::from(self.threads) * usize::from(self.iodepth) * both),
            ..OpenOptions::default()
        }
    }

    fn settings(&self) -> ValidateSettings {
        ValidateSettings {
            threads: self.threads.into(),
            iodepth: self.iodepth.into(),
            buffers: self.buffer_size.iter().map(|size| size.bytes()).collect(),
            starting_offset: self.starting_offset.map_or(0, Size::bytes),
            stride: self.offset.map(Size::bytes),
            region_stride: self.channel_region_stride.map(Size::bytes),
            phases: self.placement.clone(),
            channels: self.mm_channel.clone(),
            allocation: self.channel_allocation,
            stop: self.iterations.map_or(Stop::For(self.duration), Stop::After),
            raw: self.raw_transfer_test,
            directions: self.direction.clone(),
            pages: self.pages.clone(),
        }
    }

    /// The device to measure, and the report to write: checked before minutes of measuring, and never one of the
    /// device's files.
    fn target(&self) -> Result<(TestedDevice, Outputs), Failure> {
        let outputs = Outputs::new(self.replace, [("--report", self.report.as_ref())])?.excluding(&[])?;
        let device = self.open_options().device(&self.device).map_err(|e| device::cannot_open(&e))?;
        let backing = output::device_files(device.backing_files())?;
        let outputs = outputs.excluding(&backing)?;
        let target = TestedDevice::new(device, self.contents(&backing)).map_err(|e| self.failure(e))?;
        Ok((target, outputs))
    }

    /// The treatment of the contents of a device that is made of files.
    fn contents(&self, files: &[(PathBuf, Metadata)]) -> Contents {
        let is_char = |(_, meta): &(PathBuf, Metadata)| meta.file_type().is_char_device();
        let named = self.starting_offset.is_some() && files.iter().any(is_char);
        // Naming the first address of a character device permits overwriting it.
        match self.consent.overwrite || named {
            true => Contents::Overwrite,
            false => Contents::Refuse,
        }
    }

    /// The error with a hint. Settings that the device does not support are usage errors.
    fn failure(&self, error: ValidateError) -> Failure {
        let hint = self.hint(&error);
        let usage = matches!(
            error,
            ValidateError::Bad { .. } | ValidateError::NoChannel { .. } | ValidateError::ChannelCount { .. }
        );
        let failure = Failure::of(&error).status(if usage { USAGE } else { 1 });
        hint.into_iter().fold(failure, Failure::hint)
    }

    fn hint(&self, error: &ValidateError) -> Option<String> {
        use ValidateError as E;
        let offset = self.starting_offset.map_or(0, Size::bytes);
        let buffers = 2 * u64::from(self.threads) * u64::from(self.iodepth);
        Some(match error {
            E::TooSmall { .. } if self.settings().is_positional() => {
                let region = match self.channel_allocation {
                    Allocation::Paired => ", --channel-region-stride",
                    Allocation::Auto => "",
                };
                format!(
                    "buffers lie at {buffers} positions: fewer of them (-j, --iodepth), or other values \
                         of --buffer-size, --offset, --starting-offset{region}"
                )
            }
            E::ChannelCount { positions, .. } => {
                let half = positions / 2;
                format!("thread N reads at position 2N and writes at 2N+1; one direction alone uses the first {half}")
            }
            E::TooSmall { have, .. } => {
                let room = have.saturating_sub(offset) / buffers / 4096 * 4096;
                let smaller = match room {
                    0 if offset > 0 => "a smaller --starting-offset".to_owned(),
                    0 => "smaller buffers".to_owned(),
                    room => format!("--buffer-size {}", Size::new(room)),
                };
                format!(
                    "there are {buffers} buffers: {smaller}, fewer of them (-j, --iodepth), or a device with more \
                     memory"
                )
            }
            E::NoChannel { has: 1, .. } => "without --mm-channel its only channel is used".to_owned(),
            E::NoChannel { .. } => "--mm-channel auto uses all of them".to_owned(),
            E::Lost(_) => {
                "name the first address that may be overwritten with --starting-offset SIZE, or --overwrite for all"
                    .to_owned()
            }
            E::HoldsData(_) => "--overwrite measures it all the same; the data are lost".to_owned(),
            E::Memory(e) if is_lost(e) => return None,
            E::Memory(_) | E::NoMemoryFor { .. } => {
                "a smaller --buffer-size or fewer buffers (-j, --iodepth) need less memory".to_owned()
            }
            _ => return None,
        })
    }
}

fn pages(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|e: SizeError| e.to_string())?;
    match size.bytes().is_multiple_of(4096) {
        true => Ok(size),
        false => Err("not a multiple of 4KiB".to_owned()),
    }
}

fn buffer(text: &str) -> Result<Size, String> {
    let size = pages(text)?;
    (4096..=1 << 30).contains(&size.bytes()).then_some(size).ok_or_else(|| "not from 4KiB to 1GiB".to_owned())
}
