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

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::devices::Ability;
use dmalane::validate::{
    Allocation, Directions, TestedDevice, ValidateError, ValidateEvent, ValidateReport, ValidateSettings,
    run as measure,
};
use dmalane::{DeviceSpec, OpenOptions, is_lost};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::device::{self, Consent};
use crate::failure::{Failure, USAGE};
use crate::output::{self, Outputs};
use crate::progress::Progress;
use crate::report::Page;
use crate::size::{Size, binary};
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

    #[command(flatten)]
    settings: ValidateSettings,

    #[command(flatten)]
    consent: Consent,

    /// Write a page (HTML): figures beside references
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    report: Option<PathBuf>,

    #[command(flatten, next_help_heading = OUTPUTS)]
    format: output::OutputFormat,

    #[command(flatten)]
    replace: output::Replace,
}

/// The heading of options about output.
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
        let (mut target, outputs) = self.target()?;
        target.stop_when(signals.stop.clone());
        let bar = Progress::steps("validate", !self.format.quiet);
        let mut watch = |event| match event {
            ValidateEvent::Steps(n) => bar.more_steps(n),
            ValidateEvent::Step(what) => bar.step(what),
            _ => {}
        };
        let mut report = ValidateReport::default();
        let result = measure(&target, &self.settings, &mut report, &mut watch);
        bar.finish();
        let failed = result.err().map(|e| self.failure(e));
        let (device, notes) = (target.name.clone(), target.notes());
        // Waits for transfers that a hung device has not completed, and counts the buffers that it keeps.
        drop(target);
        let held = dmalane::dma::quarantined_bytes();
        let failed = failed.map(|failure| match held {
            0 => signals.mark(failure),
            n => signals.mark(failure).cause(format!("{} of buffers are still in use", binary(n))),
        });
        let complete = failed.is_none();
        let outcome = ValidateOutcome { device, notes, settings: self.settings.clone(), report, complete };
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
        let settings = &self.settings;
        settings.check().map_err(|e| self.failure(e))?;
        let card = [
            ("--placement", !settings.phases.is_empty()),
            ("--channel-allocation", settings.allocation == Allocation::Paired),
            ("--raw-transfer-test", settings.raw),
        ];
        let given = |options: &[(&'static str, bool)]| options.iter().find(|o| o.1).map(|o| o.0);
        if let Some(option) = given(&card).filter(|_| !self.device.kind().has(Ability::Card)) {
            return Err(Failure::usage(format!("{option} is for a card, not for {}", self.device)));
        }
        if settings.region_stride.is_some() && settings.allocation != Allocation::Paired {
            return Err(Failure::usage("--channel-region-stride needs --channel-allocation paired"));
        }
        self.consent.check(&self.device)
    }

    /// How the device is opened.
    fn open_options(&self) -> OpenOptions {
        // As many calls at once as the reference makes.
        let both = if self.settings.directions.contains(&Directions::Both) { 2 } else { 1 };
        OpenOptions {
            // All memory is measured, and nothing is bound.
            flat: true,
            // `Self::overwrite` says what becomes of the data.
            overwrite: true,
            threads: Some(self.settings.threads * self.settings.iodepth * both),
            ..OpenOptions::default()
        }
    }

    /// The device to measure, and the report to write: checked before minutes of measuring, and never one of the
    /// device's files.
    fn target(&self) -> Result<(TestedDevice, Outputs), Failure> {
        let outputs = Outputs::new(self.replace, [("--report", self.report.as_ref())])?.excluding(&[])?;
        let device = self.open_options().device(&self.device).map_err(|e| device::cannot_open(&e))?;
        let backing = output::device_files(device.backing_files())?;
        let outputs = outputs.excluding(&backing)?;
        let target = TestedDevice::new(device, self.overwrite(&backing)).map_err(|e| self.failure(e))?;
        Ok((target, outputs))
    }

    /// Whether the contents of a device that is made of files may be lost.
    fn overwrite(&self, files: &[(PathBuf, Metadata)]) -> bool {
        let is_char = |(_, meta): &(PathBuf, Metadata)| meta.file_type().is_char_device();
        // Naming the first address of a character device permits overwriting it.
        self.consent.overwrite || self.settings.starting_offset.is_some() && files.iter().any(is_char)
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
        let settings = &self.settings;
        let offset = settings.starting_offset.unwrap_or(0);
        // Of settings that were refused, too.
        let buffers = 2_u64.saturating_mul(settings.threads as u64).saturating_mul(settings.iodepth as u64);
        Some(match error {
            E::TooSmall { .. } if settings.is_positional() => {
                let region = match settings.allocation {
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
