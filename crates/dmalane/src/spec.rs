//! The name of a device: `KIND` or `KIND:REST`.

use std::error::Error as StdError;
use std::fmt;
use std::str::FromStr;

use dmalane_daemon::ClientOptions;
use dmalane_vfio::Bdf;
use thiserror::Error;

use crate::registry::{DeviceKind, KINDS, daemon_options};

/// A device by name, as after `-d`.
///
/// ```
/// use dmalane::DeviceSpec;
/// let spec: DeviceSpec = "ram:64MiB".parse()?;
/// assert_eq!((spec.kind().name, spec.rest(), &*spec.to_string()), ("ram", "64MiB", "ram:64MiB"));
/// # Ok::<(), dmalane::BadDeviceSpec>(())
/// ```
#[derive(Clone)]
pub struct DeviceSpec {
    kind: &'static DeviceKind,
    rest: String,
}

impl DeviceSpec {
    /// The kind of device.
    pub fn kind(&self) -> &'static DeviceKind {
        self.kind
    }

    /// The text after `KIND:`; empty when there is none.
    pub fn rest(&self) -> &str {
        &self.rest
    }

    /// The PCI address of a `vfio:BDF`; `None` for other kinds.
    pub fn bdf(&self) -> Option<Bdf> {
        self.rest.parse().ok().filter(|_| self.kind.name == "vfio")
    }

    /// How a client connects to the daemon of a `daemon[:SOCKET]`; `None` for other kinds.
    pub fn daemon(&self) -> Option<ClientOptions> {
        daemon_options(&self.rest).ok().filter(|_| self.kind.name == "daemon")
    }
}

/// A text that names no device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BadDeviceSpec {
    /// No kind has this name.
    #[error("{text:?} is not a device; there are {}", syntaxes())]
    Kind {
        /// The text.
        text: String,
    },
    /// The text after the kind is invalid.
    #[error("{text:?} is not {syntax}: {source}")]
    Rest {
        /// The text.
        text: String,
        /// How devices of this kind are named.
        syntax: &'static str,
        /// The reason: an error of the crate that drives such devices, or a text.
        source: Box<dyn StdError + Send + Sync>,
    },
}

/// How all kinds of devices are named.
fn syntaxes() -> String {
    KINDS.iter().map(|kind| kind.syntax).collect::<Vec<_>>().join(", ")
}

impl FromStr for DeviceSpec {
    type Err = BadDeviceSpec;

    fn from_str(text: &str) -> Result<Self, BadDeviceSpec> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let kind = KINDS.iter().find(|kind| kind.name == name);
        let kind = kind.ok_or_else(|| BadDeviceSpec::Kind { text: text.to_owned() })?;
        let checked = match (kind.check)(rest) {
            Ok(()) if text.ends_with(':') && rest.is_empty() => Err("nothing follows the colon".into()),
            checked => checked,
        };
        match checked {
            Ok(()) => Ok(Self { kind, rest: rest.to_owned() }),
            Err(source) => Err(BadDeviceSpec::Rest { text: text.to_owned(), syntax: kind.syntax, source }),
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name)?;
        if self.rest.is_empty() { Ok(()) } else { write!(f, ":{}", self.rest) }
    }
}

impl fmt::Debug for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSpec({self})")
    }
}

impl PartialEq for DeviceSpec {
    fn eq(&self, other: &Self) -> bool {
        (self.kind.name, &self.rest) == (other.kind.name, &other.rest)
    }
}

impl Eq for DeviceSpec {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let names = [
            "soft",
            "daemon",
            "daemon:/tmp/a:b",
            "vfio:0000:01:00.0",
            "vfio:01:00.0",
            "vfio-user:/tmp/a:b",
            "file:/dev/shm/x",
            "file:a,c2h=b",
            "ram:1.5GiB",
            "vulkan:0",
            "vulkan:Tesla: 1",
            "cuda:1,vmm",
            "cuda:GPU-2918fc3f",
            "slash:0",
            "vrtd",
            "vrtd:/tmp/a:b#1",
        ];
        for text in names {
            assert_eq!(text.parse::<DeviceSpec>().unwrap().to_string(), text);
        }
        for kind in KINDS {
            assert!(names.iter().any(|name| name.split(':').next() == Some(kind.name)), "no name of {}", kind.name);
        }
        let spec = |text: &str| text.parse::<DeviceSpec>().unwrap();
        assert_eq!(spec("vfio:01:00.0").bdf().unwrap().to_string(), "0000:01:00.0");
        assert_eq!(spec("daemon:/tmp/a").daemon().unwrap().path, std::path::Path::new("/tmp/a"));
        assert!(spec("daemon").bdf().is_none() && spec("vfio:01:00.0").daemon().is_none());
        assert_ne!("ram:1".parse::<DeviceSpec>().unwrap(), "ram:2".parse().unwrap());
    }

    #[test]
    fn what_is_wrong_names_the_syntax() {
        for (bad, why) in [
            ("", "there are soft, daemon[:SOCKET"),
            ("daemons", "ram:SIZE"),
            ("soft:1", "nothing follows"),
            ("daemon:", "daemon[:SOCKET[,server-uid=UID]]: nothing follows the colon"),
            ("vfio:", "vfio:BDF"),
            ("vfio:1", "vfio:BDF"),
            ("vfio-user", "vfio-user:SOCKET: a socket is missing"),
            ("file", "file:PATH[,c2h=PATH]"),
            ("ram", "ram:SIZE"),
            ("ram:0", "at least 1 byte"),
            ("ram:1M", "could mean"),
            ("cuda", "cuda:NUMBER|UUID[,vmm][,lib=PATH]: "),
            ("cuda:x", "neither the number of a GPU nor its UUID"),
            ("vulkan", "vulkan:NUMBER|NAME|UUID[,flat][,channels=N]: the number, name or UUID of a GPU is missing"),
            ("slash", "slash:N: "),
            ("slash:x", "slash:N: "),
            ("vrtd:/x#y", "vrtd[:SOCKET][#N]: "),
        ] {
            let error = bad.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
