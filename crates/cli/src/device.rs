//! Devices by name, and how they are opened.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dmalane::daemon::{Client, ClientOptions, SOCKET};
use dmalane::dma::Mmio;
use dmalane::file::{BadFileDevicePaths, FileDevicePaths};
use dmalane::sim::HostConfig;
use dmalane::vfio::{BadBdf, Bdf};
use dmalane::{CardUse, PciCardError, SoftError, connect_pci_card, open_pci_card};

use crate::failure::Failure;
use crate::size::{self, Size, binary};

/// Default size of the software card's DDR.
pub const CARD_DDR: Size = Size::gib(64);
/// Default size of the software card's HBM.
pub const CARD_HBM: Size = Size::gib(32);
/// Largest size of either memory of the software card.
pub const CARD_MOST: Size = Size::gib(256);

/// Default size of a chunk that `dmalane load` reads and transfers.
pub const CHUNK: Size = Size::mib(16);

/// A device, as `-d` names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Device {
    /// The software card in this process: `soft`.
    Soft,
    /// A share of the card of the daemon at this socket: `daemon` or `daemon:SOCKET`.
    Daemon(PathBuf),
    /// A card bound to vfio-pci: `vfio:BDF`.
    Vfio(Bdf),
    /// A card that another process serves at this socket: `vfio-user:SOCKET`.
    VfioUser(PathBuf),
    /// A file, or one for each direction: `file:PATH[,h2c=PATH,c2h=PATH]`.
    File(FileDevicePaths),
}

impl Device {
    /// Parses the name of any device.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        match (kind, rest) {
            ("soft", None) => Ok(Self::Soft),
            ("daemon", None) => Ok(Self::Daemon(SOCKET.into())),
            ("daemon", Some(socket)) if !socket.is_empty() => Ok(Self::Daemon(socket.into())),
            ("vfio", Some(bdf)) => bdf.parse().map(Self::Vfio).map_err(|e: BadBdf| e.to_string()),
            ("vfio-user", Some("")) => Err("the socket is missing\nhint: vfio-user:SOCKET, as served by `dmalane \
                                            card serve --vfio-user SOCKET`"
                .to_owned()),
            ("vfio-user", Some(socket)) => Ok(Self::VfioUser(socket.into())),
            ("file", Some(paths)) => paths.parse().map(Self::File).map_err(|e: BadFileDevicePaths| e.to_string()),
            _ => Err("not a device\nhint: soft, daemon:SOCKET, vfio:BDF, vfio-user:SOCKET or file:PATH; \
                      `dmalane devices` lists the devices of this machine"
                .to_owned()),
        }
    }

    /// Parses the name of a card, which a file is not.
    pub fn parse_card(text: &str) -> Result<Self, String> {
        match Self::parse(text)? {
            Self::File(_) => Err("a file is no card\nhint: `dmalane validate` takes file:PATH".to_owned()),
            card => Ok(card),
        }
    }

    /// Another process must be able to map the memory that is transferred.
    pub fn shares(&self) -> bool {
        matches!(self, Self::Daemon(_) | Self::VfioUser(_))
    }

    /// Refuses options of the card in this process (`soft`) and sizes of a card whose size can be chosen (`sized`),
    /// where this device takes none. Each is a name and whether it was given.
    pub fn check_options(&self, soft: &[(&str, bool)], sized: &[(&str, bool)]) -> Result<(), Failure> {
        let refused = match self {
            Self::Soft => &[][..],
            Self::Daemon(_) => &[soft][..],
            _ => &[soft, sized],
        };
        match refused.iter().copied().flatten().find(|option| option.1) {
            Some((option, _)) => {
                Err(Failure::usage(format!("{option} is for the software card in this process, not for {self}")))
            }
            None => Ok(()),
        }
    }

    /// Connects to a card that is not in this process and hands its bus to `then`. `ddr` and `hbm` are what a daemon is
    /// asked for.
    ///
    /// # Panics
    /// On [`Device::Soft`] and [`Device::File`], which have no such bus.
    pub fn connect<T: OnBus>(&self, ddr: Option<u64>, hbm: Option<u64>, then: T) -> Result<T::Output, Failure> {
        let refused = |e: PciCardError| self.refused(&e);
        match self {
            Self::Daemon(socket) => then.run(Client::connect(share_of(socket, ddr, hbm))?.into(), CardUse::default()),
            Self::Vfio(bdf) => then.run(open_pci_card(bdf).map_err(refused)?.into(), CardUse::pci()),
            Self::VfioUser(socket) => then.run(connect_pci_card(socket).map_err(refused)?.into(), CardUse::pci()),
            Self::Soft | Self::File(_) => unreachable!("{self} is opened by its command"),
        }
    }

    fn refused(&self, error: &PciCardError) -> Failure {
        let failure = Failure::because(format!("cannot use {self}"), error);
        match (self, error) {
            (Self::VfioUser(_), PciCardError::VfioUser(_)) => {
                failure.hint("`dmalane card serve --vfio-user SOCKET` serves a card, to one client at a time")
            }
            (Self::Vfio(_), PciCardError::NotACard { .. }) => {
                failure.hint("`dmalane devices` lists what is bound to vfio-pci")
            }
            _ => failure,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("soft"),
            Self::Daemon(socket) => write!(f, "daemon:{}", socket.display()),
            Self::Vfio(bdf) => write!(f, "vfio:{bdf}"),
            Self::VfioUser(socket) => write!(f, "vfio-user:{}", socket.display()),
            Self::File(paths) if paths.h2c == paths.c2h => write!(f, "file:{}", paths.h2c.display()),
            Self::File(paths) => write!(f, "file:{},c2h={}", paths.h2c.display(), paths.c2h.display()),
        }
    }
}

/// What a command does with a card, whichever bus it is on.
pub trait OnBus {
    /// The result.
    type Output;

    /// Runs on the card behind `bus`, driven as `how` says.
    fn run<B: Mmio + 'static>(self, bus: Arc<B>, how: CardUse) -> Result<Self::Output, Failure>;
}

/// What a daemon is asked for: so many bytes of its card's memories, `None` for all that a client may have.
fn share_of(socket: &Path, ddr: Option<u64>, hbm: Option<u64>) -> ClientOptions {
    let whole = |bytes: Option<u64>, to: u64| bytes.map_or(0, |bytes| bytes.next_multiple_of(to));
    ClientOptions { ddr: whole(ddr, 2 << 20), hbm: whole(hbm, 4 << 20), ..ClientOptions::new(socket) }
}

/// The error of opening a card. A channel that the card does not have is a usage error.
pub fn cannot_open(error: &SoftError) -> Failure {
    match error {
        SoftError::NoChannel { .. } => Failure::usage(error.to_string()).hint("--mm-channel auto uses all channels"),
        _ => Failure::because("cannot open the card", error),
    }
}

/// The error of making the software card with this much memory of both kinds.
pub fn no_soft_card(error: &SoftError, ddr: u64, hbm: u64) -> Failure {
    let failure = cannot_open(error);
    if !Failure::is_out_of_memory(error) {
        return failure;
    }
    failure.hint(format!(
        "the card reserves address space for all of its memory (ulimit -v): make it smaller with --card-ddr and \
         --card-hbm, now {} and {}",
        binary(ddr),
        binary(hbm)
    ))
}

/// A software host with so much synthetic memory that it never runs out; it costs nothing until it is pinned.
pub fn large_host() -> HostConfig {
    HostConfig { memory: 16 << 40, ..HostConfig::default() }
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
    use super::*;

    #[test]
    fn names_are_parsed_and_printed() {
        for text in ["soft", "daemon:/tmp/a:b", "vfio:0000:01:00.0", "vfio-user:/tmp/a:b", "file:/dev/shm/memory"] {
            assert_eq!(Device::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Device::parse("daemon"), Ok(Device::Daemon(SOCKET.into())));
        assert_eq!(Device::parse("vfio:01:00.0").unwrap().to_string(), "vfio:0000:01:00.0");
        for bad in
            ["", "gpu0", "soft:", "daemon:", "daemons", "vfio", "vfio:", "vfio:1", "vfio-user", "vfio-user:", "file:"]
        {
            assert!(Device::parse(bad).is_err(), "{bad}");
        }
        assert!(Device::parse_card("file:/x").is_err() && Device::parse_card("soft").is_ok());
    }
}
