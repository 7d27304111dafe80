//! A card as a PCI device, named on the command line.

use std::fmt;
use std::path::PathBuf;

use dmalane::PciCardError;
use dmalane::vfio::{BadBdf, Bdf};

use crate::failure::Failure;

/// Which card.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PciCard {
    /// This function, bound to vfio-pci: `vfio:BDF`.
    Vfio(Bdf),
    /// The one that a process serves at this socket: `vfio-user:SOCKET`.
    VfioUser(PathBuf),
}

impl PciCard {
    /// Reads its name; `None` when the text names another kind of device.
    pub fn parse(text: &str) -> Option<Result<Self, String>> {
        if let Some(socket) = text.strip_prefix("vfio-user:") {
            let bad = "no socket is named\nhint: vfio-user:SOCKET, as of `dmalane card serve --vfio-user SOCKET`";
            return Some(if socket.is_empty() { Err(bad.to_owned()) } else { Ok(Self::VfioUser(socket.into())) });
        }
        let bdf = text.strip_prefix("vfio:")?.parse();
        Some(bdf.map(Self::Vfio).map_err(|e: BadBdf| e.to_string()))
    }

    /// Says what kept it from being opened.
    pub fn refused(&self, error: &PciCardError) -> Failure {
        let failure = Failure::because(format!("cannot use {self}"), error);
        match (self, error) {
            (Self::VfioUser(_), PciCardError::VfioUser(_)) => {
                failure.hint("dmalane card serve --vfio-user SOCKET serves one, to one client at a time")
            }
            (Self::Vfio(_), PciCardError::NotACard { .. }) => {
                failure.hint("`dmalane devices` lists what is bound to vfio-pci")
            }
            _ => failure,
        }
    }
}

impl fmt::Display for PciCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vfio(bdf) => write!(f, "vfio:{bdf}"),
            Self::VfioUser(socket) => write!(f, "vfio-user:{}", socket.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for text in ["vfio:0000:01:00.0", "vfio-user:/tmp/a:b"] {
            assert_eq!(PciCard::parse(text).unwrap().unwrap().to_string(), text);
        }
        assert_eq!(PciCard::parse("vfio:01:00.0").unwrap().unwrap().to_string(), "vfio:0000:01:00.0");
        for bad in ["vfio:", "vfio:1", "vfio-user:"] {
            assert!(PciCard::parse(bad).unwrap().is_err(), "{bad}");
        }
        assert!(PciCard::parse("soft").is_none() && PciCard::parse("vfio").is_none());
    }
}
