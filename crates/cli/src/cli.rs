//! The commands, their options and their help.

mod bar_map;
mod card;
mod iopt;
mod read;
mod validate;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use dmalane::daemon::SOCKET;

use crate::failure::Failure;
use crate::load::{Device, Input, LoadArgs, MmChannel, Placement, ReadMode};
use crate::pci_card::PciCard;
use crate::probe::Probe;
use crate::size::{self, Size};
use crate::{devices, doctor, load, output};

/// DDR of the software card unless told otherwise.
pub const CARD_DDR: Size = Size::gib(64);
/// HBM of the software card unless told otherwise.
pub const CARD_HBM: Size = Size::gib(32);
/// Bytes allocated together unless told otherwise.
pub const GATHER: Size = Size::mib(16);
/// The most that either memory of the software card can have.
pub const CARD_MOST: Size = Size::gib(256);
/// The smallest sample.
const SAMPLE_LEAST: Size = Size::kib(4);

const EXAMPLES: &str = "\
Examples:
  dmalane load --sample 1GiB --explain --verify   make a file and watch it travel
  dmalane load model.safetensors                  load a real one
  dmalane read model.safetensors --explain        only into memory, and why so
  dmalane validate                                how fast is a device, and are its bytes right?
  dmalane doctor                                  what does this machine lack?

Sizes: MB and GB are powers of 10, MiB and GiB are powers of 2; without a unit, bytes.

Exit status:
  0  it worked
  1  the job failed: a bad file, a mismatch, a machine that cannot do it
  2  the command line was wrong";

const LOAD_EXAMPLES: &str = "\
Examples:
  dmalane load --sample 1GiB --explain --verify
  dmalane load model.safetensors --verify --json
  dmalane load shard-*.safetensors --placement hbm --explain
  dmalane load weights.bin --buffered --gather 4MiB
  dmalane load model.safetensors --save copy.safetensors
  dmalane load model.safetensors --record binds.jsonl && dmalane vm replay binds.jsonl
  dmalane load model.safetensors -d vfio:0000:01:00.0 --verify
  dmalane load model.safetensors -d vfio-user:/tmp/card   after: dmalane card serve --vfio-user /tmp/card
  dmalane load model.safetensors --list           a line per tensor, with its device addresses:
    tensor           dtype  shape      bytes   device VA
    encoder.0.bias   F32    [384]       1536   0x100000000-0x1000005ff

Files named *.safetensors are parsed; any other file is loaded as one run of bytes.

Exit status: 0 loaded (and verified), 1 bad file or mismatch, 2 wrong command line.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  dmalane doctor
  dmalane doctor /mnt/models
  dmalane doctor --json | jq '.checks[] | select(.status == \"lack\") | .mend'

Exit status: 0 `dmalane load` can run here on the software card, whatever else is lacking; 1 it cannot.";

const DEVICES_EXAMPLES: &str = "\
Examples:
  dmalane devices
  dmalane devices --json | jq -r '.devices[].name'";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  dmalane completions bash > ~/.local/share/bash-completion/completions/dmalane
  dmalane completions zsh > \"${fpath[1]}/_dmalane\"
  dmalane completions fish > ~/.config/fish/completions/dmalane.fish";

/// Moves bytes from files to devices along one path: allocate, read, map, transfer, bind.
#[derive(Parser)]
#[command(name = "dmalane", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Load(Box<LoadOptions>),
    Read(Box<read::ReadOptions>),
    Inspect(read::InspectOptions),
    Validate(Box<validate::ValidateOptions>),
    Doctor(DoctorOptions),
    Devices(DevicesOptions),
    BarMap(bar_map::BarMapOptions),
    Card(card::CardOptions),
    Iopt(iopt::IoptOptions),
    Vm(vm::VmOptions),
    Completions(CompletionsOptions),
    #[command(hide = true)]
    Man(ManOptions),
}

/// Load files into device memory.
///
/// Files named *.safetensors are parsed and loaded tensor by tensor, each bound at a device address of its own; any other
/// file, whatever is in it, is loaded as one run of bytes.
#[derive(Args)]
#[command(
    after_help = LOAD_EXAMPLES,
    group(ArgGroup::new("input").args(["files", "sample"]).required(true)),
    override_usage = "dmalane load [OPTIONS] <FILE>...\n       dmalane load [OPTIONS] --sample <SIZE>"
)]
struct LoadOptions {
    /// Files to load, several shards at once
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Make a safetensors file of this size, 4KiB or more, and load that
    #[arg(long, value_name = "SIZE", value_parser = sample, allow_hyphen_values = true)]
    sample: Option<Size>,

    /// The device to load to: soft; daemon or daemon:SOCKET for a share of the card of a dmalaned; vfio:BDF for a card that is bound to vfio-pci;
    /// vfio-user:SOCKET for one that a process serves
    #[arg(short, long, default_value = "soft", value_parser = device)]
    device: Device,

    /// Show where the time went: a table of the stages, each beside its measured ceiling
    #[arg(long)]
    explain: bool,

    /// List the tensors: dtype, shape, bytes and device addresses (with --json they are always there)
    #[arg(long)]
    list: bool,

    /// Read every tensor back through the device's MMU and compare it with the file
    #[arg(long)]
    verify: bool,

    /// Read through the page cache (by default: direct I/O where the file system takes it)
    #[arg(long, conflicts_with = "direct")]
    buffered: bool,

    /// Read with direct I/O or fail
    #[arg(long)]
    direct: bool,

    /// Bytes allocated together before reading into them starts, from 4KiB to 1GiB; host memory is at most four times this
    #[arg(long, value_name = "SIZE", default_value_t = GATHER, value_parser = gather, allow_hyphen_values = true)]
    gather: Size,

    /// The DMA channel that moves the bytes
    #[arg(long, value_name = "CHANNEL", value_enum, default_value_t = MmChannel::Auto)]
    mm_channel: MmChannel,

    /// The device memory that gets them
    #[arg(long, value_enum, default_value_t = Placement::Ddr)]
    placement: Placement,

    /// How scattered the host's physical memory is, from 0 to 1
    /// [default: 0.5]
    #[arg(long, value_name = "F", value_parser = fraction, allow_negative_numbers = true)]
    fragmentation: Option<f64>,

    /// Write what the device holds, read back through its MMU: a safetensors file again, or the bytes for a raw file; to
    /// this file, or into this directory if there are several
    #[arg(long, value_name = "PATH", value_parser = PathBufValueParser::new().try_map(save))]
    save: Option<PathBuf>,

    /// Write a trace of what was bound to this file, for `dmalane vm replay`
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(save))]
    record: Option<PathBuf>,

    /// DDR of the software card, at most 256GiB; rounded up to 2MiB [default: 64GiB, or all that a daemon gives a client]
    #[arg(long, value_name = "SIZE", value_parser = card_memory, allow_hyphen_values = true)]
    card_ddr: Option<Size>,

    /// HBM of the software card, in two halves, at most 256GiB; rounded up to 4MiB [default: 32GiB, or all that a daemon gives]
    #[arg(long, value_name = "SIZE", value_parser = card_memory, allow_hyphen_values = true)]
    card_hbm: Option<Size>,

    /// Run the software card on threads of its own
    #[arg(long)]
    workers: bool,

    /// Same number, same physical frames and same sample
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// Say what this machine offers and lacks, and how to mend it.
#[derive(Args)]
#[command(after_help = DOCTOR_EXAMPLES)]
struct DoctorOptions {
    /// The directory or file whose file system is tried for direct I/O
    #[arg(value_name = "PATH", default_value = ".")]
    path: PathBuf,

    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

/// List the devices that can be loaded to.
#[derive(Args)]
#[command(after_help = DEVICES_EXAMPLES)]
struct DevicesOptions {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

/// Print a completion script for a shell.
#[derive(Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
struct CompletionsOptions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write manual pages.
#[derive(Args)]
struct ManOptions {
    /// Where to
    directory: PathBuf,
}

impl LoadOptions {
    /// What does not go together and clap cannot know.
    fn conflict(&self) -> Option<String> {
        let soft = [("--workers", self.workers), ("--fragmentation", self.fragmentation.is_some())];
        let sized = [("--card-ddr", self.card_ddr.is_some()), ("--card-hbm", self.card_hbm.is_some())];
        let given = |options: &[(&'static str, bool)]| options.iter().find(|o| o.1).map(|o| o.0);
        match &self.device {
            Device::Soft => None,
            Device::Daemon(_) => {
                given(&soft).map(|option| format!("{option} is for a card in this process: a daemon has its own"))
            }
            Device::Pci(_) => {
                let option = given(&soft).or(given(&sized));
                option.map(|option| format!("{option} is for a card in this process: {} is as it is", self.device))
            }
        }
    }
}

impl From<LoadOptions> for LoadArgs {
    fn from(options: LoadOptions) -> Self {
        Self {
            input: match options.sample {
                Some(size) => Input::Sample(size.bytes()),
                None => Input::Files(options.files),
            },
            device: options.device,
            explain: options.explain,
            list: options.list,
            verify: options.verify,
            read: match (options.buffered, options.direct) {
                (true, _) => ReadMode::Buffered,
                (_, true) => ReadMode::Direct,
                _ => ReadMode::Auto,
            },
            gather: options.gather.bytes(),
            mm_channel: options.mm_channel,
            placement: options.placement,
            fragmentation: options.fragmentation.unwrap_or(0.5),
            save: options.save,
            record: options.record,
            card_ddr: options.card_ddr.map(Size::bytes),
            card_hbm: options.card_hbm.map(Size::bytes),
            workers: options.workers,
            seed: options.seed,
            json: options.json,
            quiet: options.quiet,
        }
    }
}

/// Runs the command that the process was started with.
pub fn run() -> Result<ExitCode, Failure> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_a_command(&error),
    };
    match cli.command {
        Command::Load(options) => match options.conflict() {
            Some(text) => not_a_command(&Cli::command().error(ErrorKind::ArgumentConflict, text)),
            None => load::run((*options).into()),
        },
        Command::Read(options) => match options.conflict() {
            Some(text) => not_a_command(&Cli::command().error(ErrorKind::ArgumentConflict, text)),
            None => crate::read::run((*options).into()),
        },
        Command::Inspect(options) => crate::inspect::run(&options.into()),
        Command::Validate(options) => match options.conflict() {
            Some(text) => not_a_command(&Cli::command().error(ErrorKind::ArgumentConflict, text)),
            None => crate::validate::run((*options).into()),
        },
        Command::Doctor(options) => doctor::run(&Probe::machine(), &options.path, options.json),
        Command::Devices(options) => devices::run(&Probe::machine(), options.json),
        Command::BarMap(options) => crate::bar_map::run(&options.into()),
        Command::Card(options) => card::run(options),
        Command::Iopt(options) => iopt::run(options),
        Command::Vm(options) => vm::run(options),
        Command::Completions(options) => completions(options.shell),
        Command::Man(options) => {
            clap_mangen::generate_to(Cli::command(), options.directory)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Help and version were asked for; anything else is a mistake, told in our words.
fn not_a_command(error: &clap::Error) -> Result<ExitCode, Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        output::written(error.print())?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").map_or(text.clone(), |rest| format!("dmalane: {rest}"));
    // Nobody is left to hear that stderr is closed.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.replace("\n  tip: ", "\nhint: ").as_bytes());
    Ok(ExitCode::from(2))
}

fn completions(shell: Shell) -> Result<ExitCode, Failure> {
    // Into memory first: the generator panics when a pipe breaks.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "dmalane", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Devices beside the software card, for hints.
const OTHERS: &str = "daemon:SOCKET, vfio:BDF, or vfio-user:SOCKET";

fn device(text: &str) -> Result<Device, String> {
    match text {
        "soft" => Ok(Device::Soft),
        text => match (daemon(text), PciCard::parse(text)) {
            (Some(socket), _) => Ok(Device::Daemon(socket)),
            (None, Some(card)) => card.map(Device::Pci),
            (None, None) => Err(format!("not a device\nhint: soft, {OTHERS}; dmalane devices lists what there is")),
        },
    }
}

/// The socket of a daemon that is named as a device.
fn daemon(text: &str) -> Option<PathBuf> {
    match text.strip_prefix("daemon")? {
        "" => Some(SOCKET.into()),
        socket => socket.strip_prefix(':').filter(|socket| !socket.is_empty()).map(PathBuf::from),
    }
}

fn gather(text: &str) -> Result<Size, String> {
    match text.parse::<Size>() {
        Ok(size) if (4 << 10..=1 << 30).contains(&size.bytes()) => Ok(size),
        Ok(_) => Err("not from 4KiB to 1GiB".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn sample(text: &str) -> Result<Size, String> {
    match text.parse::<Size>() {
        Ok(size) if size.bytes() >= SAMPLE_LEAST.bytes() => Ok(size),
        Ok(_) => Err(format!("a sample needs at least {SAMPLE_LEAST}")),
        Err(e) => Err(e.to_string()),
    }
}

fn card_memory(text: &str) -> Result<Size, String> {
    match size::nonzero(text) {
        Ok(size) if size.bytes() <= CARD_MOST.bytes() => Ok(size),
        Ok(_) => Err(format!("a memory of the card has at most {CARD_MOST}")),
        Err(e) => Err(e.to_string()),
    }
}

fn save(path: PathBuf) -> Result<PathBuf, &'static str> {
    if path.as_os_str() == "-" {
        return Err("stdout is for the report\nhint: name a file, or ./- for a file of that name");
    }
    Ok(path)
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(f) if (0.0..=1.0).contains(&f) => Ok(f),
        _ => Err("not a number from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(line: &[&str]) -> Result<LoadArgs, clap::Error> {
        let words = ["dmalane", "load"].iter().chain(line);
        match Cli::try_parse_from(words)?.command {
            Command::Load(options) => Ok((*options).into()),
            _ => unreachable!("the line starts with load"),
        }
    }

    #[test]
    fn the_definitions_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults() {
        let args = load(&["a", "b"]).unwrap();
        assert!(matches!(args.input, Input::Files(f) if f == ["a", "b"].map(PathBuf::from)));
        assert_eq!((args.device, args.read), (Device::Soft, ReadMode::Auto));
        assert_eq!((args.mm_channel, args.placement), (MmChannel::Auto, Placement::Ddr));
        assert_eq!((args.gather, args.card_ddr, args.card_hbm), (16 << 20, None, None));
        assert_eq!((args.fragmentation, args.seed, args.save, args.record), (0.5, 1, None, None));
        assert!(!(args.explain || args.verify || args.workers || args.json || args.quiet || args.list));
    }

    #[test]
    fn everything_said() {
        let line = "--sample 1.5GiB -d soft --explain --verify --buffered --gather 2MiB --mm-channel 1 --placement hbm-striped \
             --fragmentation 1 --save out --record trace --card-ddr 1GB --card-hbm 4096 --workers --seed 7 --json -q --list";
        let args = load(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert!(matches!(args.input, Input::Sample(n) if n == 3 << 29));
        assert_eq!((args.read, args.mm_channel), (ReadMode::Buffered, MmChannel::One));
        assert_eq!(args.placement, Placement::Hbm);
        assert_eq!((args.gather, args.card_ddr, args.card_hbm), (2 << 20, Some(1_000_000_000), Some(4096)));
        assert_eq!((args.fragmentation, args.seed, args.save), (1.0, 7, Some("out".into())));
        assert_eq!(args.record, Some("trace".into()));
        assert!(args.explain && args.verify && args.workers && args.json && args.quiet && args.list);
        assert_eq!(load(&["a", "--direct"]).unwrap().read, ReadMode::Direct);
    }

    #[test]
    fn daemons_and_pci_cards_are_devices() {
        let daemon = |text: &str| load(&["a", "-d", text]).unwrap().device;
        assert_eq!(daemon("daemon"), Device::Daemon(SOCKET.into()));
        assert_eq!(daemon("daemon:/tmp/a:b"), Device::Daemon("/tmp/a:b".into()));
        let bdf = "0000:01:00.0".parse().unwrap();
        assert_eq!(daemon("vfio:01:00.0"), Device::Pci(PciCard::Vfio(bdf)));
        assert_eq!(daemon("vfio-user:s"), Device::Pci(PciCard::VfioUser("s".into())));
        assert!(load(&["a", "-d", "vfio:x"]).is_err() && load(&["a", "-d", "vfio-user:"]).is_err());
        assert!(load(&["a", "-d", "daemon:"]).is_err() && load(&["a", "-d", "daemons"]).is_err());
    }

    #[test]
    fn what_does_not_go_together() {
        for line in [
            "",
            "a --sample 1MB",
            "a --direct --buffered",
            "a --gather 0",
            "a --fragmentation 1.1",
            "a --fragmentation -0.5",
            "a --fragmentation NaN",
            "a --mm-channel 2",
            "a --placement sram",
            "a -d gpu0",
            "a --seed -1",
            "--sample 0",
            "--sample 4095",
            "a --save -",
            "a --record -",
            "a --card-ddr 257GiB",
            "a --card-hbm 274877906945",
        ] {
            assert!(load(&line.split_whitespace().collect::<Vec<_>>()).is_err(), "{line}");
        }
    }
}
