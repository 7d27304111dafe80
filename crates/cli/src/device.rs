//! Devices by name, and how they are opened.

use std::error::Error;
use std::io::ErrorKind;
use std::path::Path;

use clap::Args;
use dmalane::daemon::ClientError;
use dmalane::daemon::wire::Code;
use dmalane::device::MemoryError;
use dmalane::devices::soft::SoftSpec;
use dmalane::devices::{Ability, KINDS};
use dmalane::file::{FileDeviceError, HoldsData};
use dmalane::vfio::Bdf;
use dmalane::vfio_user::{self, Command};
use dmalane::{BadDeviceSpec, DeviceSpec, OpenDevice, OpenError, OpenOptions, PciCardError, error_chain, load};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::named::Named;
use crate::size::binary;

/// Consent to lose data.
#[derive(Args, Clone, Copy)]
pub struct Consent {
    /// Overwrite the data of a file, a block device or a character device that serves as device memory
    #[arg(long)]
    pub overwrite: bool,
}

impl Consent {
    /// How the device is opened.
    pub fn open_options(self) -> OpenOptions {
        OpenOptions { overwrite: self.overwrite, ..OpenOptions::default() }
    }

    /// Refuses what a device of this kind has no use for. To be called before anything else is touched.
    pub fn check(self, spec: &DeviceSpec) -> Result<(), Failure> {
        if !self.overwrite || spec.kind().has(Ability::KeepsData) {
            return Ok(());
        }
        let kinds = KINDS.iter().filter(|kind| kind.has(Ability::KeepsData)).map(|kind| kind.name);
        let kinds = kinds.collect::<Vec<_>>().join(" and ");
        Err(Failure::usage(format!("--overwrite is for {kinds}, not for {spec}")))
    }
}

/// The parser of the name of a device.
pub const NAME: Named<DeviceSpec> = Named {
    parse,
    names: || {
        // `vfio:` where something must follow, `soft` where nothing needs to.
        let begin = |syntax: &'static str, name: &'static str| match syntax.strip_prefix(name) {
            Some(rest) if rest.starts_with(':') => &syntax[..=name.len()],
            _ => name,
        };
        KINDS.iter().map(|kind| begin(kind.syntax, kind.name)).collect()
    },
};

/// The help of `-d`: what it is for, and the kinds of devices.
pub fn help(what: &str) -> String {
    let kinds: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
    format!("{what}: {}; `dmalane devices` shows how each is named", kinds.join(", "))
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
        format!("{}\nhint: {hint}", error_chain(&e))
    })
}

/// Opens a device.
pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<OpenDevice, Failure> {
    options.open(spec).map_err(|e| cannot_open(&e))
}

/// The error of opening a device, with what helps against it.
pub fn cannot_open(error: &OpenError) -> Failure {
    let (spec, source) = match error {
        // The option calls queues channels, as v80-smi does.
        OpenError::Drive(load::Error::NoQueue { wanted, has }) => {
            let message = format!("the device has no channel {wanted}, it has {has}, numbered from 0");
            return Failure::usage(message).hint("--mm-channel auto uses all channels");
        }
        OpenError::Drive(load::Error::MixedQueues) => {
            return Failure::usage("--mm-channel takes auto or numbers, not both");
        }
        OpenError::Device { spec, source } => (spec, &**source),
        _ => return Failure::because("cannot open the device", error),
    };
    let failure = Failure::because(format!("cannot open {spec}"), source);
    hint(spec, source).into_iter().fold(failure, Failure::hint)
}

/// A way out of an error of opening a device.
fn hint(spec: &DeviceSpec, source: &(dyn Error + 'static)) -> Option<String> {
    let text = match (source.downcast_ref(), source.downcast_ref(), source.downcast_ref()) {
        (Some(PciCardError::VfioUser(vfio_user::Error::Connect { source, .. })), ..) => match source.kind() {
            ErrorKind::PermissionDenied => "this user may not open the socket",
            _ => "`dmalane card serve --vfio-user SOCKET` serves a card, to one client at a time",
        },
        (Some(PciCardError::VfioUser(vfio_user::Error::Unanswered { command: Command::Version, .. })), ..) => {
            "it may have another client: `dmalane card serve` serves one at a time"
        }
        (Some(PciCardError::NotACard { .. }), ..) if spec.kind().has(Ability::NeedsDriver) => {
            "`dmalane devices` lists what is bound to vfio-pci"
        }
        (_, Some(ClientError::Refused { code: Code::Quota, .. }), _) => {
            "`dmalaned status` says who has what; -d daemon:SOCKET,ddr=SIZE,hbm=SIZE asks for less; dmalaned gives \
             more with --clients, --client-ddr and --client-hbm"
        }
        (_, Some(ClientError::Connect { source: Errno::ACCESS, .. }), _) => return None,
        (_, Some(ClientError::Connect { .. }), _) => {
            "`dmalaned --socket SOCKET` shares a card at that socket, and `-d daemon:SOCKET` names it"
        }
        (.., Some(error)) => return file_hint(error),
        _ if spec.kind().has(Ability::NeedsDriver) => {
            "`dmalane doctor` says what this machine lacks for it, `dmalane devices` lists what it has"
        }
        _ => {
            let card = spec.get::<SoftSpec>().filter(|_| Failure::is_out_of_memory(source))?;
            return Some(format!(
                "the card reserves address space for all of its memory (ulimit -v): make it smaller with -d \
                 soft,ddr=SIZE,hbm=SIZE, now {} and {}",
                binary(card.config.ddr),
                binary(card.config.hbm)
            ));
        }
    };
    Some(text.to_owned())
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
            ErrorKind::NotFound => return Some(makes_memory(path)),
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                "device memory is read and written: you need both permissions on this file"
            }
            _ => return None,
        },
        FileDeviceError::TooSmall { path, .. } if !is_node(path) => return Some(makes_memory(path)),
        FileDeviceError::InUse(_) => "unmount it first: device memory is written",
        FileDeviceError::NoDirect { .. } => "without ,direct it is used through the page cache",
        _ => return None,
    };
    Some(hint.to_owned())
}

fn makes_memory(path: &Path) -> String {
    format!("`truncate -s 1GiB {}` makes a file to be used as device memory", path.display())
}

/// True for the name of a driver's node, which is not made like a file.
fn is_node(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// Adds what helps when device memory was refused because a file holds data there.
pub fn with_overwrite_hint(failure: Failure, error: &MemoryError) -> Failure {
    match error {
        MemoryError::Driver { source, .. } if source.is::<HoldsData>() => {
            failure.hint("pass --overwrite to lose the data")
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_keeps_data_is_overwritten() {
        let overwrite = Consent { overwrite: true };
        let Err(failure) = overwrite.check(&parse("vfio:0000:01:00.0").unwrap()) else { panic!("vfio keeps no data") };
        assert!(failure.text("x").contains("--overwrite is for file and qdma, not for vfio:0000:01:00.0"));
        assert!(overwrite.check(&parse("file:x").unwrap()).is_ok());
        assert!(Consent { overwrite: false }.check(&parse("soft").unwrap()).is_ok());
        assert!(parse("gpu0").unwrap_err().contains("`dmalane devices`"));
    }
}
