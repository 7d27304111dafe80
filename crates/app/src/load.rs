//! `dmalane load`: files into device memory.

mod report;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use dmalane::card::CardConfig;
use dmalane::load::{self, Error, Loaded, Report};
use dmalane::mem::HostConfig;
use dmalane::uring::{FileChannel, Mode};
use dmalane::{FileOptions, SoftConfig, SoftDevice, open_as, open_file};

use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;

/// What to load, how, and what to say about it.
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
    /// HBM, each file in the half that has more room.
    Hbm,
    /// HBM, in turns in the half of either channel.
    HbmStriped,
}

/// What was loaded, for the report.
pub(crate) struct Outcome {
    soft: SoftDevice,
    inputs: Vec<dmalane::load::Input<FileChannel>>,
    loaded: Loaded,
    report: Report,
    verified: bool,
    /// The heap's high-water mark, reading back included.
    heap_peak: u64,
}

/// Loads, and prints the result.
pub fn run(args: LoadArgs) -> Result<ExitCode, Failure> {
    let shown = !args.quiet && !args.json;
    let targets = save_targets(&args)?;
    let mut inputs = open(&args, shown)?;
    let mut soft = match args.device {
        Device::Soft => open_soft(&args)?,
    };
    let placement = match args.placement {
        Placement::Ddr => load::Placement::Ddr,
        Placement::Hbm => load::Placement::Hbm,
        Placement::HbmStriped => load::Placement::HbmStriped,
    };
    let bytes = |inputs: &[dmalane::load::Input<FileChannel>]| {
        inputs.iter().filter_map(|i| i.file.metadata().ok()).fold(0u64, |sum, m| sum.saturating_add(m.len()))
    };
    let bar = Progress::new("load", shown);
    bar.set_length(bytes(&inputs));
    let (loaded, mut report) =
        soft.device.load(&mut inputs, placement, &mut |n| bar.advance(n)).map_err(|e| failure(&e))?;
    bar.finish();
    if args.verify {
        let bar = Progress::new("verify", shown);
        bar.set_length(report.bytes);
        report.verify_wall = soft.device.verify(&loaded, &inputs, &mut |n| bar.advance(n)).map_err(|e| failure(&e))?;
        bar.finish();
    }
    for (file, to) in loaded.files.iter().zip(&targets) {
        soft.device.save(file, to).map_err(|e| failure(&e))?;
    }
    let heap_peak = soft.device.heap().stats().peak as u64;
    if args.explain {
        report.ceilings = Some(soft.device.ceilings(&mut inputs).map_err(|e| failure(&e))?);
    }
    let outcome = Outcome { soft, inputs, loaded, report, verified: args.verify, heap_peak };
    match args.json {
        true => output::print_json(&report::json(&outcome))?,
        false => output::print(&report::text(&outcome, args.explain))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn open_soft(args: &LoadArgs) -> Result<SoftDevice, Failure> {
    let config = SoftConfig {
        card: CardConfig { ddr: args.card_ddr, hbm: args.card_hbm, workers: args.workers, ..CardConfig::default() },
        host: HostConfig { fragmentation: args.fragmentation, seed: args.seed, ..HostConfig::default() },
        gather: args.gather,
        mm_channel: match args.mm_channel {
            MmChannel::Auto => dmalane::MmChannel::Auto,
            MmChannel::Zero => dmalane::MmChannel::Only(0),
            MmChannel::One => dmalane::MmChannel::Only(1),
        },
        ..SoftConfig::default()
    };
    SoftDevice::open(config).map_err(|e| Failure::because("cannot make the software card", &e))
}

/// Opens the files, or makes the sample.
fn open(args: &LoadArgs, shown: bool) -> Result<Vec<dmalane::load::Input<FileChannel>>, Failure> {
    let mode = match args.read {
        ReadMode::Auto => Mode::Auto,
        ReadMode::Direct => Mode::Direct,
        ReadMode::Buffered => Mode::Buffered,
    };
    let options = FileOptions::for_mode(mode);
    match &args.input {
        Input::Files(paths) => paths.iter().map(|path| open_file(path, options).map_err(|e| cannot_open(&e))).collect(),
        Input::Sample(size) => {
            let file = sample(*size, args.seed, shown)?;
            Ok(vec![open_as(file, "sample.safetensors", options).map_err(|e| cannot_open(&e))?])
        }
    }
}

/// A sample in the temporary folder that has no name, so that nothing is left however this process ends. It is written out
/// and dropped from the page cache, so that reading it is reading the disk.
fn sample(size: u64, seed: u64, shown: bool) -> Result<File, Failure> {
    let folder = std::env::temp_dir();
    let trouble = |what: &str, e: &io::Error| {
        Failure::because(format!("cannot {what} a sample of {size} bytes in {}", folder.display()), e)
            .hint("another folder can be set with TMPDIR")
    };
    let bar = Progress::new("make the sample", shown);
    bar.set_length(size);
    let mut file = tempfile::tempfile().map_err(|e| trouble("create", &e))?;
    let mut out = Counting { out: &mut file, bar: &bar };
    load::write_sample(&mut out, size, seed).map_err(|e| match e.kind() {
        io::ErrorKind::InvalidInput => Failure::new(e.to_string()),
        _ => trouble("write", &e),
    })?;
    file.sync_all().map_err(|e| trouble("write out", &e))?;
    // Advice: where it is refused the sample stays cached, and the ceiling of --explain is as warm as the load.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    bar.finish();
    Ok(file)
}

struct Counting<'a> {
    out: &'a mut File,
    bar: &'a Progress,
}

impl Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.bar.advance(n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Where `--save` writes each file: the path itself for one file, files of the same names in that folder for several.
fn save_targets(args: &LoadArgs) -> Result<Vec<PathBuf>, Failure> {
    let Some(save) = &args.save else { return Ok(Vec::new()) };
    let Input::Files(files) = &args.input else { return Ok(vec![save.clone()]) };
    if files.len() == 1 && !save.is_dir() {
        return Ok(vec![save.clone()]);
    }
    if !save.is_dir() {
        return Err(Failure::new(format!("--save {}: not a folder, and there are several files", save.display()))
            .hint(format!("make it with: mkdir -p {}", save.display())));
    }
    let mut targets: Vec<PathBuf> = Vec::new();
    for file in files {
        let name = file.file_name().ok_or_else(|| Failure::new(format!("{}: not a file name", file.display())))?;
        let target = save.join(name);
        if targets.contains(&target) {
            return Err(Failure::new(format!("two files would be saved as {}", target.display())));
        }
        targets.push(target);
    }
    Ok(targets)
}

fn cannot_open(error: &dmalane::uring::Error) -> Failure {
    let failure = Failure::because("cannot open a file", error);
    match error {
        dmalane::uring::Error::NoDirect { .. } => failure.hint("without --direct it is read through the page cache"),
        _ => failure,
    }
}

fn failure(error: &Error) -> Failure {
    let failure = Failure::because("the load failed, and nothing of it stays on the card", error);
    match error {
        Error::CardFull { placement, .. } => failure.hint(match placement {
            load::Placement::Ddr => "give the card more with --card-ddr, or place it elsewhere with --placement",
            _ => "give the card more with --card-hbm, or place it elsewhere with --placement",
        }),
        Error::Mismatch { .. } => failure.hint("was the file changed meanwhile? If not, please report it"),
        _ => failure,
    }
}
