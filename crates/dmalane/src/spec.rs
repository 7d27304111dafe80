//! The name of a device: `KIND` or `KIND:WHAT`, then `,option` or `,option=value`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use dmalane_load::nearest;

use crate::devices::{AnySpec, BadDeviceSpec, DeviceKind, KINDS, OpenResult, Spec};
use crate::open_options::OpenOptions;

/// A device by name, as after `-d`: parsed, and ready to be opened.
///
/// ```
/// use dmalane::DeviceSpec;
/// use dmalane::devices::soft::SoftSpec;
///
/// let spec: DeviceSpec = "soft,ddr=1GiB".parse()?;
/// assert_eq!((spec.kind().name, &*spec.to_string()), ("soft", "soft,ddr=1GiB"));
/// assert_eq!(spec.get::<SoftSpec>().unwrap().config.ddr, 1 << 30);
/// # Ok::<(), dmalane::BadDeviceSpec>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceSpec {
    name: String,
    kind: &'static DeviceKind,
    spec: AnySpec,
}

impl DeviceSpec {
    /// A device with options that its name does not have.
    pub fn new<S: Spec>(name: impl Into<String>, spec: S) -> Self {
        Self { name: name.into(), kind: const { &DeviceKind::of::<S>() }, spec: Arc::new(spec) }
    }

    /// The kind of device.
    pub fn kind(&self) -> &'static DeviceKind {
        self.kind
    }

    /// The parsed name; `None` for another kind.
    pub fn get<S: Spec>(&self) -> Option<&S> {
        self.spec.downcast_ref()
    }

    pub(crate) fn open(&self, options: &OpenOptions) -> OpenResult {
        (self.kind.open)(&self.spec, options)
    }
}

impl FromStr for DeviceSpec {
    type Err = BadDeviceSpec;

    fn from_str(text: &str) -> Result<Self, BadDeviceSpec> {
        let name = text.split([':', ',']).next().unwrap_or_default();
        let kind = KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| BadDeviceSpec::Kind {
            text: text.to_owned(),
            kinds: KINDS.iter().map(|kind| kind.syntax).collect::<Vec<_>>().join(", "),
            nearest: nearest(name, KINDS.iter().map(|kind| kind.name)),
        })?;
        let spec = (kind.parse)(text).map_err(|mut e| {
            if let BadDeviceSpec::NoOption { option, others, .. } = &mut e {
                let has = |kind: &&DeviceKind| kind.options().iter().any(|other| other.key == option);
                let names: Vec<_> = KINDS.iter().filter(has).map(|kind| kind.name).collect();
                if !names.is_empty() {
                    *others =
                        format!(", which {} {}", names.join(" and "), if names.len() == 1 { "has" } else { "have" });
                }
            }
            e
        })?;
        Ok(Self { name: text.to_owned(), kind, spec })
    }
}

impl fmt::Display for DeviceSpec {
    /// Formats the name as it was given.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::daemon::DaemonSpec;
    use crate::devices::vfio::VfioSpec;

    /// Names of every kind, with every option.
    const NAMES: &[&str] = &[
        "soft",
        "soft,ddr=1GiB,hbm=4MiB,channels=3,fragmentation=0.25,ring=16,flat",
        "daemon",
        "daemon:/tmp/a:b",
        "daemon:/tmp/a,b,ddr=1GiB,hbm=4MiB,server-uid=5,ring=16",
        "daemon,flat",
        "vfio:0000:01:00.0",
        "vfio:0000:01:00.0,ring=16",
        "vfio-user:/tmp/a:b",
        "vfio-user:/tmp/a,server-uid=0,flat",
        "file:/dev/shm/x",
        "file:a,c2h=b,c,direct",
        "qdma:01000-MM-0",
        "ram:1536MiB",
        "vulkan:0",
        "vulkan:Tesla: 1, two,flat,channels=2",
        "cuda:1,vmm",
        "cuda:GPU-2918fc3f,vmm,lib=/a,b",
        "cuda:MIG-2918fc3f",
        "slash:0",
        "slash:1,ring=11",
        "vrtd:/tmp/a:b#1,ring=0",
    ];

    #[test]
    fn names_are_read_and_written() {
        for text in NAMES {
            let spec: DeviceSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), *text);
            assert_eq!(text.split([':', ',']).next(), Some(spec.kind().name));
        }
    }

    #[test]
    fn every_option_of_every_kind_is_in_a_name_above() {
        for kind in KINDS {
            let options = kind.options();
            assert!(options.iter().all(|option| !option.about.is_empty()));
            for option in options {
                let own = NAMES.iter().filter(|name| name.split([':', ',']).next() == Some(kind.name));
                let has = |name: &&str| name.contains(&format!(",{}", option.key));
                let shared = ["ring", "flat"].contains(&option.key);
                assert!(shared || own.clone().any(has), "{}: {option}", kind.name);
            }
        }
    }

    #[test]
    fn a_name_is_parsed_into_the_type_of_its_kind() {
        let spec: DeviceSpec = "vfio:01:00.0".parse().unwrap();
        assert_eq!(spec.get::<VfioSpec>().unwrap().bdf.to_string(), "0000:01:00.0");
        assert!(spec.get::<DaemonSpec>().is_none());
        let spec: DeviceSpec = "daemon:/tmp/a,ddr=1,server-uid=7".parse().unwrap();
        let client = spec.get::<DaemonSpec>().unwrap().client.clone();
        assert_eq!((client.path.to_str(), client.ddr, client.hbm), (Some("/tmp/a"), 2 << 20, 0));
        assert!(client.server_uids.contains(&7) && client.server_uids.contains(&0));
    }

    #[test]
    fn what_is_wrong_is_said_with_what_is_right() {
        for (bad, why) in [
            ("", "there are soft, daemon[:SOCKET]"),
            (
                "daemons",
                "ram:SIZE, vulkan:NUMBER|NAME|UUID, cuda:NUMBER|UUID, slash:N, vrtd[:SOCKET][#N]; did you mean daemon?",
            ),
            ("vulcan:0", "did you mean vulkan?"),
            ("soft:1", "soft: nothing follows it but options, as in soft,ddr=1GiB"),
            ("soft:ddr=1GiB", "soft: nothing follows it but options"),
            ("daemon:", "daemon[:SOCKET]: nothing follows the colon"),
            ("daemon:,flat", "daemon[:SOCKET]: nothing follows the colon"),
            ("daemon:/x,server-uid=me", "the option server-uid=UID of daemon: not the number of a user"),
            ("vfio:", "vfio:BDF"),
            ("vfio:1", "vfio:BDF"),
            ("vfio-user", "vfio-user:SOCKET: a socket is missing"),
            (
                "vfio-user:/x,ddr=1GiB",
                "vfio-user has no option \"ddr\", which soft and daemon have; its options: server-uid",
            ),
            ("file", "file:PATH: a path is missing"),
            ("file:x,dirct", "file has no option \"dirct\"; its options: c2h=PATH, direct; did you mean direct?"),
            ("file:x,c2h=", "the option c2h=PATH of file: a value is missing"),
            ("qdma", "qdma:NAME: a queue is missing"),
            ("qdma:01000-ST-0", "a streaming queue has no addresses"),
            ("ram", "ram:SIZE"),
            ("ram:0", "at least 1 byte"),
            ("ram:1M", "could mean"),
            ("ram:1MiB,ddr=1GiB", "ram has no option \"ddr\", which soft and daemon have; its options: none"),
            ("ram:1MiB,fragmentation=1", "which soft has;"),
            ("soft,ddr=0", "the option ddr=SIZE of soft: the size must be at least 1 byte"),
            ("soft,ddr=257GiB", "a memory of the card has at most 256GiB"),
            ("soft,ddr", "a value is missing"),
            ("soft,dddr=1GiB", "did you mean ddr?"),
            ("soft,channels=17", "not a number from 1 to 16"),
            ("soft,fragmentation=1.1", "not a number from 0 to 1"),
            ("soft,fragmentation=NaN", "not a number from 0 to 1"),
            ("soft,ring=3", "not a power of two from 2 to 65536"),
            ("soft,flat=1", "it has no value"),
            ("soft,ring=2,ring=2", "it is given twice"),
            ("cuda", "cuda:NUMBER|UUID: "),
            ("cuda:x", "neither the number of a GPU nor its UUID"),
            (
                "cuda:0,flat",
                "cuda has no option \"flat\", which soft and daemon and vfio and vfio-user and vulkan have",
            ),
            ("vulkan", "vulkan:NUMBER|NAME|UUID: the number, name or UUID of a GPU is missing"),
            ("slash", "slash:N: "),
            ("slash:x", "slash:N: "),
            ("slash:0,ring=16", "the option ring=INDEX of slash: not a number from 0 to 15"),
            ("vrtd:/x#y", "vrtd[:SOCKET][#N]: "),
        ] {
            let error = crate::error_chain(&bad.parse::<DeviceSpec>().unwrap_err());
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
