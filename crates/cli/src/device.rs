//! Devices by name, and how they are opened.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Args, Command};
use dmalane::daemon::ClientError;
use dmalane::daemon::wire::Code;
use dmalane::device::{BackingFiles, MemoryError};
use dmalane::file::{FileDeviceError, HoldsData};
use dmalane::registry::{self, KINDS};
use dmalane::sim::Workers;
use dmalane::vfio::Bdf;
use dmalane::{BadDeviceSpec, DeviceSpec, OpenDevice, OpenError, OpenOptions, PciCardError, load};

use crate::failure::Failure;
use crate::size::{self, Size, binary};

/// Default size of the software card's DDR.
pub const CARD_DDR: Size = Size::new(registry::CARD_DDR);
/// Default size of the software card's HBM.
pub const CARD_HBM: Size = Size::new(registry::CARD_HBM);
/// Largest size of either memory of the software card.
pub const CARD_MOST: Size = Size::new(registry::CARD_MOST);

/// Default size of a chunk that `dmalane load` reads and transfers.
pub const CHUNK: Size = Size::mib(16);

/// Synthetic memory of the software host, so much that it never runs out; it costs nothing until it is pinned.
pub const LARGE_HOST: u64 = 16 << 40;

/// The memory of a device that some kinds have.
#[derive(Args, Clone, Copy)]
pub struct MemoryOptions {
    /// Overwrite the data of a file, a block device or a character device that serves as device memory
    #[arg(long)]
    pub overwrite: bool,

    /// DDR size of the software card, or of a share of a daemon's card, at most 256GiB, rounded up to 2MiB
    /// [default: 64GiB, or the most that a daemon gives a client]
    #[arg(long, value_name = "SIZE", value_parser = card_memory, allow_hyphen_values = true)]
    pub card_ddr: Option<Size>,
}

impl MemoryOptions {
    /// How the device is opened.
    pub fn open_options(self) -> OpenOptions {
        OpenOptions { overwrite: self.overwrite, card_ddr: self.card_ddr.map(Size::bytes), ..OpenOptions::default() }
    }
}

/// The memory and the threads of a device that some kinds have.
#[derive(Args, Clone, Copy)]
pub struct CardOptions {
    #[command(flatten)]
    pub memory: MemoryOptions,

    /// HBM size of the software card (two halves), or of a share of a daemon's card, at most 256GiB, rounded up to
    /// 4MiB [default: 32GiB, or the most that a daemon gives a client]
    #[arg(long, value_name = "SIZE", value_parser = card_memory, allow_hyphen_values = true)]
    pub card_hbm: Option<Size>,

    /// Run the software card on its own threads, one per channel
    #[arg(long)]
    pub workers: bool,
}

impl CardOptions {
    /// How the device is opened.
    pub fn open_options(self) -> OpenOptions {
        OpenOptions {
            card_hbm: self.card_hbm.map(Size::bytes),
            workers: self.workers.then_some(Workers::PerChannel),
            ..self.memory.open_options()
        }
    }
}

/// Parses the name of a device, and tells completion scripts how the names begin.
#[derive(Clone)]
pub struct Name;

impl TypedValueParser for Name {
    type Value = DeviceSpec;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<DeviceSpec, clap::Error> {
        parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        // `vfio:` where something must follow, `soft` where nothing needs to.
        let begin = |syntax: &'static str, name: &'static str| match syntax.strip_prefix(name) {
            Some(rest) if rest.starts_with(':') => &syntax[..=name.len()],
            _ => name,
        };
        Some(Box::new(KINDS.iter().map(move |kind| PossibleValue::new(begin(kind.syntax, kind.name)))))
    }
}

/// The help of `-d`: what it is for, and the kinds of devices.
pub fn help(what: &str) -> String {
    let kinds: Vec<_> = KINDS.iter().filter_map(|kind| kind.syntax.split('[').next()).collect();
    format!("{what}: {}; `dmalane devices` describes them", kinds.join(", "))
}

/// Parses the name of a device.
pub fn parse(text: &str) -> Result<DeviceSpec, String> {
    text.parse().map_err(|e: BadDeviceSpec| {
        let meant = |kind: &str| format!("did you mean `-d {kind}:{text}`? `dmalane devices` describes all kinds");
        let hint = match &e {
            BadDeviceSpec::Kind { .. } if text.starts_with(['/', '.']) => meant("file"),
            BadDeviceSpec::Kind { .. } if text.parse::<Bdf>().is_ok() => meant("vfio"),
            _ => "`dmalane devices` lists the devices of this machine".to_owned(),
        };
        format!("{e}\nhint: {hint}")
    })
}

/// Refuses options that devices of this kind do not have. To be called before anything else is touched.
pub fn check(spec: &DeviceSpec, options: &OpenOptions) -> Result<(), Failure> {
    match options.refused(spec) {
        Some(option) => Err(refused(spec, option)),
        None => Ok(()),
    }
}

/// The error of an option that devices of this kind do not have.
fn refused(spec: &DeviceSpec, option: &str) -> Failure {
    let have: Vec<_> = KINDS.iter().filter(|kind| kind.options.contains(&option)).map(|kind| kind.name).collect();
    Failure::usage(format!("--{option} is for {}, not for {spec}", have.join(" and ")))
}

/// Opens a device.
pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<OpenDevice, Failure> {
    options.open(spec).map_err(|e| cannot_open(&e, options))
}

/// The error of opening a device, with what helps against it.
pub fn cannot_open(error: &OpenError, options: &OpenOptions) -> Failure {
    let (spec, source) = match error {
        OpenError::Option { option, .. } => return Failure::usage(format!("--{option}: {error}")),
        // The option calls queues channels, as v80-smi does.
        OpenError::Drive(load::Error::NoQueue { wanted, has }) => {
            let message = format!("the device has no channel {wanted}, it has {has}, numbered from 0");
            return Failure::usage(message).hint("--mm-channel auto uses all channels");
        }
        OpenError::Device { spec, source } => (spec, &**source),
        _ => return Failure::because("cannot open the device", error),
    };
    let failure = Failure::because(format!("cannot open {spec}"), source);
    let hint = match source.downcast_ref::<PciCardError>() {
        Some(PciCardError::VfioUser(_)) => {
            "`dmalane card serve --vfio-user SOCKET` serves a card, to one client at a time".to_owned()
        }
        Some(PciCardError::NotACard { .. }) => "`dmalane devices` lists what is bound to vfio-pci".to_owned(),
        _ if matches!(source.downcast_ref(), Some(ClientError::Refused { code: Code::Quota, .. })) => {
            "--card-ddr and --card-hbm ask for less; dmalaned gives more with --client-ddr and --client-hbm".to_owned()
        }
        _ if spec.kind().options.contains(&"host-memory") && Failure::is_out_of_memory(source) => format!(
            "the card reserves address space for all of its memory (ulimit -v): make it smaller with --card-ddr and \
             --card-hbm, now {} and {}",
            binary(options.card_ddr.unwrap_or(CARD_DDR.bytes())),
            binary(options.card_hbm.unwrap_or(CARD_HBM.bytes()))
        ),
        _ if matches!(source.downcast_ref(), Some(ClientError::Connect { .. })) => {
            "`dmalaned --socket SOCKET` shares a card at that socket, and `-d daemon:SOCKET` names it".to_owned()
        }
        _ => match source.downcast_ref::<FileDeviceError>() {
            Some(error) => match file_hint(error) {
                Some(hint) => hint,
                None => return failure,
            },
            None if spec.kind().needs_driver => {
                "`dmalane doctor` says what this machine lacks for it, `dmalane devices` lists what it has".to_owned()
            }
            None => return failure,
        },
    };
    failure.hint(hint)
}

/// A way out of an error of opening a file as a device.
fn file_hint(error: &FileDeviceError) -> Option<String> {
    let hint = match error {
        FileDeviceError::Open { path, source, .. } => match source.kind() {
            ErrorKind::NotFound if is_node(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let driver = name.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
                let like = path.with_file_name(format!("{driver}*"));
                return Some(format!(
                    "the driver makes this node; once its module is loaded, `ls {}` lists its nodes",
                    like.display()
                ));
            }
            ErrorKind::NotFound => {
                return Some(format!("`truncate -s 1GiB {}` makes a file to be used as device memory", path.display()));
            }
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                "device memory is read and written: you need both permissions on this file"
            }
            _ => return None,
        },
        FileDeviceError::InUse(_) => "unmount it first: device memory is written",
        FileDeviceError::ProbeAt { .. } => "for example --probe-at 1MiB",
        FileDeviceError::ProbeDamage { .. } => "load the driver anew; without --probe-at, pread and pwrite are used",
        FileDeviceError::NotMemory { .. } => "name the file of each direction: file:PATH,c2h=PATH",
        FileDeviceError::NoDirect { .. } => "without --direct it is used through the page cache",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// True for the name of a driver's node, which is not made like a file.
fn is_node(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// Refuses an input that is the device's memory, which would be overwritten while it is read.
pub fn check_inputs<'a>(
    spec: &DeviceSpec,
    device: Option<BackingFiles>,
    inputs: impl IntoIterator<Item = &'a (PathBuf, Metadata)>,
) -> Result<(), Failure> {
    let Some(device) = device else { return Ok(()) };
    let memory = device.written.metadata()?;
    for (path, meta) in inputs {
        if (meta.dev(), meta.ino()) == (memory.dev(), memory.ino()) {
            let message = format!("{} is the memory of {spec}, and would be overwritten", path.display());
            return Err(Failure::new(message).hint("name another file to read, or another device"));
        }
    }
    Ok(())
}

/// Adds what helps when device memory was refused because a file holds data there.
pub fn with_overwrite_hint(failure: Failure, error: &MemoryError) -> Failure {
    match error {
        MemoryError::Driver { source, .. } => match source.downcast_ref::<HoldsData>() {
            Some(HoldsData { path }) if is_node(path) => failure.hint("pass --overwrite to lose the data"),
            Some(_) => {
                failure.hint("pass --overwrite to lose the data; `truncate -s SIZE FILE` makes a file without any")
            }
            None => failure,
        },
        _ => failure,
    }
}

/// Parses the size of a memory of the software card.
pub fn card_memory(text: &str) -> Result<Size, String> {
    match size::nonzero(text) {
        Ok(size) if size.bytes() <= CARD_MOST.bytes() => Ok(size),
        Ok(_) => Err(format!("a memory of the card has at most {CARD_MOST}")),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_option_of_another_kind_is_refused_with_the_kinds_that_have_it() {
        let options = OpenOptions { card_ddr: Some(1), ..OpenOptions::default() };
        let spec = parse("vfio:0000:01:00.0").unwrap();
        let Err(failure) = check(&spec, &options) else { panic!("vfio takes sizes") };
        assert!(failure.text("x").contains("--card-ddr is for soft and daemon, not for vfio:0000:01:00.0"));
        assert!(check(&parse("soft").unwrap(), &options).is_ok());
        assert!(parse("gpu0").unwrap_err().contains("`dmalane devices`"));
    }

    #[test]
    fn options_of_devices_are_flags_of_the_same_name() {
        use crate::commands::Commands;
        use clap::Subcommand;

        let commands = Commands::augment_subcommands(Command::new("dmalane"));
        let arguments = commands.get_subcommands().flat_map(Command::get_arguments);
        let flags: Vec<_> = arguments.filter_map(Arg::get_long).collect();
        let options: BTreeSet<_> = KINDS.iter().flat_map(|kind| kind.options).copied().collect();
        let without: Vec<_> = options.into_iter().filter(|option| !flags.contains(option)).collect();
        // `validate` has the flags --ring-size, --ring-size-index, and some of files.
        assert_eq!(without, ["channels", "file", "flat", "host-memory", "ring", "slash", "vulkan"]);
    }
}
