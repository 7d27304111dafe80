//! `dmalane load`: files into device memory.

mod record;
mod report;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::ValueEnum;
use dmalane::addr::PageSize;
use dmalane::card::{CardConfig, SoftBus, regs};
use dmalane::daemon::{Client, Options};
use dmalane::dma::{HostBus, HostConfig, PageBacking};
use dmalane::file::{FileQueue, Mode};
use dmalane::load::{self, Error, Layout, Loaded, Report};
use dmalane::queue::QueueChoice;
use dmalane::{
    CardDevice, CardUse, FileOptions, SoftConfig, SoftDevice, SoftError, connect_pci_card, open_as, open_file,
    open_pci_card,
};

use crate::cli::{CARD_DDR, CARD_HBM, CARD_MOST};
use crate::failure::Failure;
use crate::output;
use crate::pci_card::PciCard;
use crate::progress::Progress;
use crate::size::{Size, binary};
use record::Recording;

/// What to load, how, and what to say about it.
pub struct LoadArgs {
    /// Where the bytes come from.
    pub input: Input,
    /// The device that gets them.
    pub device: Device,
    /// Show the table of stages.
    pub explain: bool,
    /// List the tensors.
    pub list: bool,
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
    /// Where to write a trace of what was bound.
    pub record: Option<PathBuf>,
    /// Bytes of DDR on the software card, or asked of a daemon; at least 1.
    pub card_ddr: Option<u64>,
    /// Bytes of HBM on the software card, or asked of a daemon; at least 1.
    pub card_hbm: Option<u64>,
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
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Device {
    /// The software card, inside this process.
    Soft,
    /// A share of the card of the daemon at this socket.
    Daemon(PathBuf),
    /// A card that is a PCI device.
    Pci(PciCard),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Soft => f.write_str("soft"),
            Self::Daemon(socket) => write!(f, "daemon:{}", socket.display()),
            Self::Pci(card) => card.fmt(f),
        }
    }
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
    /// HBM, in turns in the half of either channel.
    #[value(alias = "hbm-striped")]
    Hbm,
    /// HBM, each file in the half that has more room.
    HbmHalf,
}

/// What was loaded, for the report.
pub(crate) struct Outcome {
    device: String,
    inputs: Vec<dmalane::load::Input<FileQueue>>,
    loaded: Loaded,
    report: Report,
    verified: bool,
    /// The pages behind the staging buffers.
    backing: Option<PageBacking>,
    /// At the end of the load, before reading back; of a card in this process.
    iommu: Option<Iommu>,
    /// Bytes of card memory that the load touched first; of a card in this process.
    touched: Option<u64>,
    /// The heap's high-water mark, reading back included.
    heap_peak: u64,
    /// That of the process, reading back included.
    resident_peak: u64,
}

/// The IOMMU's counters at some moment.
pub(crate) struct Iommu {
    leaves: Vec<(PageSize, u64)>,
    tables: usize,
    hits: u64,
    misses: u64,
    faults: u64,
}

impl Iommu {
    fn of(bus: &SoftBus) -> Self {
        let host = bus.host().stats();
        Self {
            leaves: host.leaves,
            tables: host.tables,
            hits: host.iotlb_hits,
            misses: host.iotlb_misses,
            faults: host.faults,
        }
    }
}

/// Loads, and prints the result.
pub fn run(args: LoadArgs) -> Result<ExitCode, Failure> {
    let shown = !args.quiet && !args.json;
    let targets = save_targets(&args)?;
    for target in &targets {
        load::check_target(target).map_err(|e| Failure::because("cannot save", &e))?;
    }
    if let Some(record) = &args.record {
        load::check_target(record).map_err(|e| Failure::because("cannot record", &e))?;
    }
    // Before the card is touched: a file that cannot be opened resets none. A sample must know how large the card is.
    let opened = match &args.input {
        Input::Files(paths) => Ok(open(paths, &args)?),
        Input::Sample(size) => Err(*size),
    };
    let inputs = |sizes| opened.or_else(|size| sample_input(size, &args, sizes, shown));
    match &args.device {
        Device::Soft => {
            let inputs = inputs(soft_sizes(&args))?;
            let soft = open_soft(&args)?;
            let bus = soft.bus.clone();
            load_onto(soft, Some(&bus), &args, soft_sizes(&args), inputs, &targets)
        }
        Device::Daemon(socket) => {
            let (card, sizes) = open_daemon(socket, &args)?;
            load_onto(card, None, &args, sizes, inputs(sizes)?, &targets)
        }
        Device::Pci(name @ PciCard::Vfio(bdf)) => {
            let bus = open_pci_card(bdf).map_err(|e| name.refused(&e))?;
            let (card, sizes) = on_bus(bus, CardUse::vfio(), &args)?;
            load_onto(card, None, &args, sizes, inputs(sizes)?, &targets)
        }
        Device::Pci(name @ PciCard::VfioUser(socket)) => {
            let bus = connect_pci_card(socket).map_err(|e| name.refused(&e))?;
            let (card, sizes) = on_bus(bus, CardUse::vfio_user(), &args)?;
            load_onto(card, None, &args, sizes, inputs(sizes)?, &targets)
        }
    }
}

/// Loads onto a card, of which `soft` tells what only a card in this process tells.
fn load_onto<B: HostBus + 'static>(
    mut card: CardDevice<B>,
    soft: Option<&SoftBus>,
    args: &LoadArgs,
    sizes: Sizes,
    mut inputs: Vec<dmalane::load::Input<FileQueue>>,
    targets: &[PathBuf],
) -> Result<ExitCode, Failure> {
    let shown = !args.quiet && !args.json;
    let placement = match args.placement {
        Placement::Ddr => load::Placement::Ddr,
        Placement::HbmHalf => load::Placement::HbmHalf,
        Placement::Hbm => load::Placement::Hbm,
    };
    let bytes = |inputs: &[dmalane::load::Input<FileQueue>]| {
        inputs.iter().filter_map(|i| i.file.metadata().ok()).fold(0u64, |sum, m| sum.saturating_add(m.len()))
    };
    let touched = || {
        let (ddr, hbm) = soft?.memory().touched();
        Some(ddr + hbm)
    };
    let recording = args.record.as_deref().map(|to| Recording::of(&mut card.device, to)).transpose()?;
    let before = touched();
    let bar = Progress::new("load", shown);
    bar.set_length(bytes(&inputs));
    let result = card.device.load(&mut inputs, placement, &mut |n| bar.advance(n));
    let (loaded, mut report) = result.map_err(|e| load_failure(&e, args, sizes, &inputs))?;
    bar.finish();
    let (iommu, touched) = (soft.map(Iommu::of), touched().zip(before).map(|(now, then)| now.saturating_sub(then)));
    if let Some(recording) = recording {
        recording.save()?;
    }
    if args.verify {
        let bar = Progress::new("verify", shown);
        bar.set_length(report.bytes);
        let result = card.device.verify(&loaded, &inputs, &mut |n| bar.advance(n));
        report.verify_wall = result.map_err(|e| verify_failure(&e))?;
        bar.finish();
    }
    for (saved, (file, to)) in loaded.files.iter().zip(targets).enumerate() {
        card.device.save(file, to).map_err(|e| save_failure(&e, saved, targets.len()))?;
    }
    let (heap_peak, resident_peak) = (card.device.heap().stats().peak as u64, card.device.resident_peak());
    if args.explain {
        let ceilings = card.device.ceilings(&mut inputs);
        let trouble = |e| Failure::because("cannot measure the ceilings (the files are loaded)", &e);
        report.ceilings = Some(ceilings.map_err(trouble)?);
    }
    let (device, verified, backing) = (args.device.to_string(), args.verify, card.device.staging_backing().cloned());
    let outcome =
        Outcome { device, inputs, loaded, report, verified, backing, iommu, touched, heap_peak, resident_peak };
    match args.json {
        true => output::print_json(&report::json(&outcome))?,
        false => output::print(&report::text(&outcome, args.explain, args.list))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes of a card's DDR and HBM.
type Sizes = (u64, u64);

fn soft_sizes(args: &LoadArgs) -> Sizes {
    (args.card_ddr.unwrap_or(CARD_DDR.bytes()), args.card_hbm.unwrap_or(CARD_HBM.bytes()))
}

fn channels(args: &LoadArgs) -> QueueChoice {
    match args.mm_channel {
        MmChannel::Auto => QueueChoice::Auto,
        MmChannel::Zero => QueueChoice::Only(0),
        MmChannel::One => QueueChoice::Only(1),
    }
}

/// Opens the card on a bus, whose memories are as large as it says.
fn on_bus<B: HostBus + 'static>(bus: B, how: CardUse, args: &LoadArgs) -> Result<(CardDevice<B>, Sizes), Failure> {
    let how = CardUse { gather: args.gather, mm_channel: channels(args), ..how };
    let card = CardDevice::on(Arc::new(bus), how).map_err(|e| Failure::because("cannot open the card", &e))?;
    let read = |register: u64| {
        let half = |offset| card.bus.read32(regs::BAR_REGISTERS, offset).map(u64::from);
        Ok::<_, dmalane::dma::Error>(half(register)? | half(register + 4)? << 32)
    };
    let sizes = (read(regs::DDR_LEN)?, read(regs::HBM_LEN)?);
    Ok((card, sizes))
}

/// What is asked of a daemon: so many bytes of its card's memories, or all that a client may have.
pub fn share_of(socket: &Path, ddr: Option<u64>, hbm: Option<u64>) -> Options {
    let whole = |bytes: Option<u64>, to: u64| bytes.map_or(0, |bytes| bytes.next_multiple_of(to));
    Options { ddr: whole(ddr, 2 << 20), hbm: whole(hbm, 4 << 20), ..Options::new(socket) }
}

/// Connects to a daemon, and opens the function of its card that this process gets.
fn open_daemon(socket: &Path, args: &LoadArgs) -> Result<(CardDevice<Client>, Sizes), Failure> {
    let options = share_of(socket, args.card_ddr, args.card_hbm);
    let (ddr, hbm) = (options.ddr, options.hbm);
    let client = Client::connect(options)?;
    let all = |asked: u64, most: u64| if asked == 0 { most } else { asked };
    let sizes = (all(ddr, client.limits().ddr), all(hbm, client.limits().hbm));
    let how = CardUse { gather: args.gather, mm_channel: channels(args), ..CardUse::default() };
    let card = CardDevice::on(Arc::new(client), how);
    Ok((card.map_err(|e| Failure::because("cannot open the daemon's card", &e))?, sizes))
}

fn open_soft(args: &LoadArgs) -> Result<SoftDevice, Failure> {
    let (ddr, hbm) = soft_sizes(args);
    let config = SoftConfig {
        card: CardConfig { ddr, hbm, workers: args.workers.into(), ..CardConfig::default() },
        host: HostConfig { fragmentation: args.fragmentation, seed: args.seed, ..HostConfig::default() },
        gather: args.gather,
        mm_channel: channels(args),
        ..SoftConfig::default()
    };
    SoftDevice::open(config).map_err(|e| no_card(&e, ddr, hbm))
}

/// The software card, with so much memory of both kinds, cannot be made.
pub(crate) fn no_card(error: &SoftError, ddr: u64, hbm: u64) -> Failure {
    let failure = Failure::because("cannot make the software card", error);
    if !Failure::is_out_of_memory(error) {
        return failure;
    }
    failure.hint(format!(
        "the card takes address space for all of its memory (ulimit -v): make it smaller with --card-ddr and \
         --card-hbm, now {} and {}",
        binary(ddr),
        binary(hbm)
    ))
}

fn options(args: &LoadArgs) -> FileOptions {
    FileOptions::for_mode(match args.read {
        ReadMode::Auto => Mode::Auto,
        ReadMode::Direct => Mode::Direct,
        ReadMode::Buffered => Mode::Buffered,
    })
}

fn open(paths: &[PathBuf], args: &LoadArgs) -> Result<Vec<dmalane::load::Input<FileQueue>>, Failure> {
    let open = |path| {
        let input = open_file(path, options(args)).map_err(cannot_open)?;
        has_size(&input)?;
        Ok(input)
    };
    paths.iter().map(open).collect()
}

/// Makes a sample that fits the card.
fn sample_input(
    size: u64,
    args: &LoadArgs,
    sizes: Sizes,
    shown: bool,
) -> Result<Vec<dmalane::load::Input<FileQueue>>, Failure> {
    sample_fits(size, args, sizes)?;
    let file = sample(size, args.seed, shown)?;
    Ok(vec![open_as(file, SAMPLE, options(args)).map_err(cannot_open)?])
}

/// What a sample is called.
const SAMPLE: &str = "sample.safetensors";

/// Files that the kernel makes up as they are read say that they have no bytes.
fn has_size(input: &dmalane::load::Input<FileQueue>) -> Result<(), Failure> {
    let made_up = rustix::fs::fstatfs(&input.file).is_ok_and(|s| MADE_UP.contains(&(s.f_type as u32)));
    let empty = input.file.metadata().is_ok_and(|m| m.is_file() && m.len() == 0);
    if !(made_up && empty) {
        return Ok(());
    }
    let path = input.path.display();
    Err(Failure::new(format!("{path} has no size: the kernel makes it up as it is read"))
        .hint(format!("copy it first: cat {path} > copy")))
}

/// The file systems proc, sysfs, cgroup2, debugfs and tracefs.
const MADE_UP: [u32; 5] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x6462_6720, 0x7472_6163];

/// Looks, before anything is written, whether a sample has room on the card and in the temporary folder.
fn sample_fits(size: u64, args: &LoadArgs, sizes: Sizes) -> Result<(), Failure> {
    let room = card_room(args, sizes);
    if size > room {
        let have = format!("the card has {} for it", binary(room));
        let failure = Failure::new(format!("a sample of {} does not fit the card: {have}", binary(size)));
        return Err(failure.hint(card_hint(args, sizes, &[size])));
    }
    let folder = std::env::temp_dir();
    // Where it cannot be told, writing will tell.
    let free = rustix::fs::statvfs(&folder).map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize));
    if size > free {
        let message = format!("a sample of {} does not fit in {}", binary(size), folder.display());
        return Err(
            Failure::new(format!("{message}: {} are free", binary(free))).hint("another folder can be set with TMPDIR")
        );
    }
    Ok(())
}

/// The most that one file can have on an empty card.
fn card_room(args: &LoadArgs, (ddr, hbm): Sizes) -> u64 {
    let ddr = ddr.next_multiple_of(2 << 20);
    let half = hbm.next_multiple_of(4 << 20) / 2;
    let tables = tables(ddr, 2 * half);
    match args.placement {
        // The tables are where there is most room.
        Placement::Ddr if ddr >= half => ddr.saturating_sub(tables),
        Placement::Ddr => ddr,
        Placement::HbmHalf => half,
        Placement::Hbm if ddr >= half => 2 * half,
        Placement::Hbm => 2 * half.saturating_sub(tables),
    }
}

/// What the device's page tables take of a card.
fn tables(ddr: u64, hbm: u64) -> u64 {
    ((ddr + hbm) / 128).max(128 << 10)
}

/// Which option gives the card room for `files` of so many bytes, and a size that is enough for all of them.
fn card_hint(args: &LoadArgs, (ddr, hbm): Sizes, files: &[u64]) -> String {
    const SLACK: u64 = 4 << 20;
    let padded = || files.iter().map(|bytes| bytes.saturating_add(SLACK));
    let total = padded().fold(0, u64::saturating_add);
    let (option, needed, other) = match args.placement {
        Placement::Ddr => ("--card-ddr", total, hbm),
        // Each file goes to the half with more room, which then has at most half of the largest file more than half of all.
        Placement::HbmHalf => ("--card-hbm", total.saturating_add(padded().max().unwrap_or(0)), ddr),
        Placement::Hbm => ("--card-hbm", total, ddr),
    };
    // Tables for the larger card; in HBM both halves lose what one gives to them.
    let tables = tables(needed.saturating_add(needed / 16).saturating_add(SLACK).min(1 << 40), other);
    let enough = needed.saturating_add(tables.saturating_mul(2)).saturating_add(SLACK);
    if enough > CARD_MOST.bytes() {
        return format!("that is more than {option} can be ({CARD_MOST}): load less at a time");
    }
    match args.device {
        Device::Soft => format!("{option} {} is enough", Size::about(enough)),
        Device::Daemon(_) => format!(
            "{option} {} is enough, if the daemon gives a client as much (dmalaned --client-{})",
            Size::about(enough),
            option.trim_start_matches("--card-")
        ),
        Device::Pci(_) => format!("load less at a time, or onto a card with more ({} is enough)", Size::about(enough)),
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
    let sample = [PathBuf::from(SAMPLE)];
    let files = match &args.input {
        Input::Files(files) => files.as_slice(),
        Input::Sample(_) => &sample,
    };
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

/// The path stands in the first line, once.
fn cannot_open(error: dmalane::file::Error) -> Failure {
    match &error {
        dmalane::file::Error::Open { path, source } => {
            Failure::because(format!("cannot open {}", path.display()), source)
        }
        dmalane::file::Error::NoDirect { .. } => {
            Failure::from(error).hint("without --direct it is read through the page cache")
        }
        _ => error.into(),
    }
}

fn load_failure(error: &Error, args: &LoadArgs, sizes: Sizes, inputs: &[dmalane::load::Input<FileQueue>]) -> Failure {
    let failure = Failure::because("the load failed, and nothing of it stays on the card", error);
    match error {
        Error::CardFull { .. } => {
            let layouts = inputs.iter().map(|i| Layout::new(&i.model().ok()?).map(|l| l.bo_len));
            match layouts.collect::<Option<Vec<_>>>() {
                Some(files) => failure.hint(card_hint(args, sizes, &files)),
                None => failure,
            }
        }
        e if Failure::is_out_of_memory(e) => {
            failure.hint(
            "the card's memory is this machine's: load less at a time; under ulimit -v a smaller --card-ddr or --card-hbm \
             leaves more",
        )
        }
        _ => failure,
    }
}

fn verify_failure(error: &Error) -> Failure {
    let failure = Failure::because("the verification failed", error);
    match error {
        Error::Mismatch { .. } => failure.hint("was the file changed meanwhile? If not, please report it"),
        _ => failure,
    }
}

fn save_failure(error: &Error, saved: usize, of: usize) -> Failure {
    let before = if of > 1 { format!(", {saved} of {of} saved before") } else { String::new() };
    Failure::because(format!("cannot save (the files are loaded{before})"), error)
}
