//! `dmalane validate`: a device measured.

mod plot;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use dmalane::card::{CardConfig, Workers};
use dmalane::daemon::Client;
use dmalane::file::{FileDeviceError, FileDeviceOptions, FileDevicePaths};
use dmalane::validate::{
    Directions, Event, FitReport, FitSettings, Report, Settings, SoftTarget, Target, ValidateError, fit_link,
    run_into as measure,
};
use dmalane::{CardUse, connect_pci_card, open_pci_card};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::cli::{CARD_DDR, CARD_HBM};
use crate::failure::Failure;
use crate::output;
use crate::pci_card::PciCard;
use crate::progress::Steps;
use crate::size::Size;

/// What to measure, how, and what to say about it.
pub struct ValidateArgs {
    /// Which device.
    pub device: Device,
    /// How the software card is made.
    pub soft: SoftOptions,
    /// Where a file may be probed.
    pub probe_at: Option<u64>,
    /// Past the page cache.
    pub direct: bool,
    /// What a device holds may be lost.
    pub lose: bool,
    /// What to measure.
    pub settings: Settings,
    /// Also find the limits of the link.
    pub fit: bool,
    /// Say how the device is driven.
    pub explain: bool,
    /// How to print.
    pub form: Form,
    /// Where to draw.
    pub plot: Option<PathBuf>,
    /// No progress bar.
    pub quiet: bool,
}

/// The devices that can be validated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Device {
    /// The software card.
    Soft,
    /// A share of the card of the daemon at this socket.
    Daemon(PathBuf),
    /// A card that is a PCI device.
    Pci(PciCard),
    /// A file, or one for each direction.
    File(FileDevicePaths),
}

/// How the software card is made.
pub struct SoftOptions {
    /// Entries of each ring.
    pub ring: Option<usize>,
    /// The modelled link that it hangs off.
    pub emulate: Option<String>,
    /// Bytes of DDR, here or asked of a daemon.
    pub ddr: Option<u64>,
    /// Bytes of HBM, here or asked of a daemon.
    pub hbm: Option<u64>,
    /// A thread for each channel.
    pub workers: bool,
}

/// How threads share channels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ChannelAllocation {
    /// By where the bytes go.
    Auto,
    /// Thread by thread in turns.
    Paired,
}

/// The pages behind buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PageChoice {
    /// Measure with either.
    Both,
    /// Of 4 KiB.
    #[value(name = "4k")]
    Small,
    /// Of 2 MiB.
    #[value(name = "2m")]
    Huge,
}

/// How to print.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// For spreadsheets.
    Csv,
}

/// What was found, for the report.
struct Outcome {
    device: String,
    notes: Vec<String>,
    settings: Settings,
    report: Report,
    fit: Option<(FitReport, FitSettings)>,
    /// Everything was measured that was asked for.
    complete: bool,
}

/// SIGINT and SIGTERM, caught.
struct Signals {
    told: Arc<AtomicBool>,
    which: Arc<AtomicUsize>,
}

impl Signals {
    /// The first one of either is to be looked for; the second ends the process at once.
    fn catch() -> Result<Self, Failure> {
        let this = Self { told: Arc::default(), which: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down.
            flag::register_conditional_shutdown(signal, 128 + signal, this.told.clone())?;
            flag::register_usize(signal, this.which.clone(), signal as usize)?;
            flag::register(signal, this.told.clone())?;
        }
        Ok(this)
    }

    /// Tells what stopped a measurement, and gives the exit status of that.
    fn end(&self, failure: &Failure) -> ExitCode {
        let failed = failure.report();
        match self.which.load(Ordering::Relaxed) {
            0 => failed,
            signal => ExitCode::from(128 + signal as u8),
        }
    }
}

/// Measures, and prints the result.
pub fn run(args: ValidateArgs) -> Result<ExitCode, Failure> {
    // Before anything is written: from here on a signal ends this after what was overwritten is put back.
    let signals = Signals::catch()?;
    if let Some(path) = &args.plot {
        writable(path)?;
    }
    let (mut target, mut fitted) = targets(&args)?;
    [Some(&mut target), fitted.as_mut()].into_iter().flatten().for_each(|t| t.stop_when(signals.told.clone()));
    let bar = Steps::new(!args.quiet);
    let mut watch = |event| match event {
        Event::Steps(n) => bar.more(n),
        Event::Step(what) => bar.step(what),
    };
    let mut report = Report::default();
    let mut result = measure(&target, &args.settings, &mut report, &mut watch);
    let mut fit = None;
    if args.fit && result.is_ok() && report.passed() {
        let target = fitted.as_ref().unwrap_or(&target);
        let settings = FitSettings { offset: args.settings.offset, ..FitSettings::default() };
        match fit_link(target, &settings, &mut watch) {
            Ok(found) => fit = Some((found, settings)),
            Err(e) => result = Err(e),
        }
    }
    bar.finish();
    let failed = result.err().map(|e| (matches!(e, ValidateError::Interrupted), failure(e, &args)));
    let (device, notes) = (target.name.clone(), target.notes.clone());
    // Waits for what a device that hangs still has, and counts what it keeps.
    drop(target);
    let kept = dmalane::file::quarantined_bytes();
    let failed = failed.map(|(interrupted, failure)| match kept {
        0 => (interrupted, failure),
        n => (interrupted, failure.cause(format!("the kernel has not let go of {n} bytes of buffers"))),
    });
    if let (Some((_, failure)), true) = (&failed, report.integrity.is_empty()) {
        return Ok(signals.end(failure)); // there is nothing to print
    }
    let outcome = Outcome { device, notes, settings: args.settings, report, fit, complete: failed.is_none() };
    match args.form {
        Form::Text => output::print(&report::text(&outcome, args.explain))?,
        Form::Json => output::print_json(&report::json(&outcome))?,
        Form::Csv => output::print(&report::csv(&outcome))?,
    }
    if let Some(path) = args.plot.as_ref().filter(|_| !outcome.report.figures.is_empty()) {
        let svg = plot::svg(&outcome).map_err(|e| Failure::new(format!("cannot draw the figures: {e}")))?;
        std::fs::write(path, svg).map_err(|e| Failure::because(format!("cannot write {}", path.display()), &e))?;
    }
    if let Some((interrupted, failure)) = failed {
        return if interrupted { Ok(signals.end(&failure)) } else { Err(failure) };
    }
    if outcome.report.integrity.is_empty() {
        let failure = Failure::new("nothing was measured");
        return Err(outcome.report.left_out.iter().fold(failure, Failure::cause));
    }
    if !outcome.report.passed() {
        let failure = Failure::new("the integrity check failed: bytes came back wrong, and have no figures");
        let wrong =
            outcome.report.integrity.iter().flat_map(|i| i.wrong.iter().map(move |w| format!("{}: {w}", i.phase)));
        return Err(wrong.take(8).fold(failure, Failure::cause));
    }
    Ok(ExitCode::SUCCESS)
}

/// The device to measure, and the one to find the limits of.
fn targets(args: &ValidateArgs) -> Result<(Target, Option<Target>), Failure> {
    let told = |e| failure(e, args);
    match &args.device {
        Device::File(paths) => {
            // As many calls at once as the ceiling makes.
            let ways = if args.settings.ways.contains(&Directions::Both) { 2 } else { 1 };
            let threads = args.settings.threads * ways;
            let options = FileDeviceOptions {
                probe_at: args.probe_at,
                direct: args.direct,
                threads,
                ..FileDeviceOptions::default()
            };
            Ok((Target::file(paths.clone(), options, args.lose).map_err(told)?, None))
        }
        Device::Soft => {
            let workers = if args.soft.workers { Workers::PerChannel } else { Workers::Inline };
            let ddr = args.soft.ddr.unwrap_or(CARD_DDR.bytes());
            let hbm = args.soft.hbm.unwrap_or(CARD_HBM.bytes());
            let card = CardConfig { ddr, hbm, workers, ..CardConfig::default() };
            let soft = |catch_up| SoftTarget {
                card,
                ring: args.soft.ring,
                emulate: args.soft.emulate.clone(),
                catch_up,
                ..SoftTarget::default()
            };
            // A busy machine's late threads shall not look like a limit.
            let fitted =
                args.fit.then(|| Target::soft(soft(Some(Duration::from_millis(20))))).transpose().map_err(told)?;
            Ok((Target::soft(soft(None)).map_err(told)?, fitted))
        }
        Device::Daemon(socket) => {
            let client = Client::connect(crate::load::share_of(socket, args.soft.ddr, args.soft.hbm))?;
            let name = format!("the card of the daemon at {}", socket.display());
            let CardUse { heap, apart, .. } = CardUse::default();
            Ok((Target::card(name, Arc::new(client), &*heap, apart, args.soft.ring)?, None))
        }
        Device::Pci(card) => {
            let (name, ring) = (format!("the card {card}"), args.soft.ring);
            let target = match card {
                PciCard::Vfio(bdf) => {
                    let bus = open_pci_card(bdf).map_err(|e| card.refused(&e))?;
                    let CardUse { heap, apart, .. } = CardUse::vfio();
                    Target::card(name, Arc::new(bus), &*heap, apart, ring)
                }
                PciCard::VfioUser(socket) => {
                    let bus = connect_pci_card(socket).map_err(|e| card.refused(&e))?;
                    let CardUse { heap, apart, .. } = CardUse::vfio_user();
                    Target::card(name, Arc::new(bus), &*heap, apart, ring)
                }
            };
            Ok((target.map_err(told)?, None))
        }
    }
}

/// Finds out now, and not after minutes of measuring.
fn writable(path: &Path) -> Result<(), Failure> {
    let new = !path.exists();
    let opened = std::fs::File::options().write(true).create(true).truncate(false).open(path);
    opened.map(drop).map_err(|e| Failure::because(format!("cannot write {}", path.display()), &e))?;
    if new {
        // Not an empty one when nothing is drawn. Whoever took it away meanwhile has done the same.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// The error with what helps against it.
fn failure(error: ValidateError, args: &ValidateArgs) -> Failure {
    use ValidateError as E;
    let hint = match &error {
        E::TooSmall { needed, have, memory } => {
            let room = have.saturating_sub(args.settings.offset) / (2 * args.settings.threads as u64) / 4096 * 4096;
            let grow = match (&args.device, *memory) {
                (Device::File(_), _) => format!("a file of {needed} bytes"),
                (Device::Soft, "DDR") => format!("--card-ddr {}", Size::about(*needed)),
                (Device::Soft, _) => format!("--card-hbm {}", Size::about(needed.saturating_mul(2))),
                (Device::Pci(_), _) => "a card with more memory".to_owned(),
                (Device::Daemon(_), _) => {
                    "a daemon that gives a client more (dmalaned --client-ddr, --client-hbm)".to_owned()
                }
            };
            let smaller = match room {
                0 if args.settings.offset > 0 => "a smaller --offset".to_owned(),
                0 => "smaller buffers".to_owned(),
                room => format!("--buffer-size {}", Size::from(room)),
            };
            format!("each thread needs two buffers: {smaller}, fewer threads (-j), or {grow}")
        }
        E::NoChannel { has: 1, .. } => "without --mm-channel its only channel is used".to_owned(),
        E::NoChannel { .. } => "--mm-channel auto uses all of them".to_owned(),
        E::FileDevice(FileDeviceError::Open { source, .. }) => match source.kind() {
            std::io::ErrorKind::NotFound => "make a file to measure with: truncate -s 1GiB /dev/shm/memory".to_owned(),
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
                "validating writes to the device: it must be readable and writable for you".to_owned()
            }
            _ => return chain(error),
        },
        E::FileDevice(FileDeviceError::InUse(_)) => "unmount it first; validating writes to it".to_owned(),
        E::FileDevice(FileDeviceError::ProbeAt { .. }) => "for example --probe-at 1MiB".to_owned(),
        E::FileDevice(FileDeviceError::NotMemory { .. }) => {
            "name the file of each direction: file:PATH,h2c=PATH,c2h=PATH".to_owned()
        }
        E::FileDevice(FileDeviceError::NoDirect { .. }) => {
            "without --direct it is used through the page cache".to_owned()
        }
        E::Lost(_) => {
            "say from which address on it may be overwritten: --offset SIZE, or --overwrite for all of it".to_owned()
        }
        E::Memory(_) | E::NoRoom(_) | E::NoMemoryFor { .. } => {
            "a smaller --buffer-size or fewer threads (-j) need less memory".to_owned()
        }
        _ => return chain(error),
    };
    chain(error).hint(hint)
}

fn chain(error: ValidateError) -> Failure {
    error.into()
}
