//! A card as a device.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use dmalane_device::{AddressSpace, Device, DeviceInfo, DeviceMemory, FlatSpace, NoIommu, Region};
use dmalane_dma::{Heap as _, Registrar};
use dmalane_queue::DeviceQueue;

use crate::Error;
use crate::abi::{self, MAX_RANGES};
use crate::buffers::{heap, page, registrar};
use crate::card::Card;
use crate::kernel::{Handle, Kernel, Request};
use crate::queue::SlashQueue;
use crate::regions::regions;
use crate::sys::{DEPTH, Linux};
use crate::vrtd::{Daemon, Grants, Reach, VrtdName};
use crate::worker::Planner;

/// The number of a card: N of `/dev/slash_qdma_ctlN`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Node(pub u32);

impl Node {
    /// The driver's node on the machine whose `/` is given.
    pub fn path(self, root: &Path) -> PathBuf {
        root.join(format!("dev/slash_qdma_ctl{}", self.0))
    }

    /// The PCI address of the card's DMA function, as the driver names it in `/sys/class/slash`.
    pub fn pci(self, root: &Path) -> Option<String> {
        let devname = format!("DEVNAME=slash_qdma_ctl{}", self.0);
        let entries = root.join("sys/class/slash").read_dir().into_iter().flatten().flatten();
        entries.into_iter().find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pci = name.strip_prefix("slash_qdma_ctl_")?.to_owned();
            let uevent = std::fs::read_to_string(entry.path().join("uevent")).ok()?;
            uevent.lines().any(|line| line == devname).then_some(pci)
        })
    }
}

impl FromStr for Node {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|_| digits).map(Self).ok_or_else(|| Error::Name(text.to_owned()))
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The cards of the machine whose `/` is given, in order. None is opened.
pub fn nodes(root: &Path) -> Vec<Node> {
    let entries = root.join("dev").read_dir().into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("slash_qdma_ctl").and_then(|n| n.parse().ok());
    let mut nodes: Vec<Node> = entries.filter_map(|e| number(e.file_name().to_str()?)).collect();
    nodes.sort();
    nodes
}

/// How a card is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlashOptions {
    /// The size of the descriptor rings, as a number from 0 to 15 of the driver's table (0: 2049 descriptors, 15:
    /// 16385).
    pub ring: u32,
}

impl Default for SlashOptions {
    /// The largest rings, which SLASH's daemon uses too.
    fn default() -> Self {
        Self { ring: abi::RING_SIZES - 1 }
    }
}

/// A V80 that the driver SLASH drives.
pub struct SlashDevice {
    // Queues end before the node is closed.
    queues: Vec<Box<DeviceQueue>>,
    notes: Vec<String>,
    regions: [Region; 3],
    registrar: NoIommu,
    space: FlatSpace,
    /// The card's memory that the queues may use.
    reach: Arc<Reach>,
    /// Who lends the card, if it is lent.
    daemon: Option<Arc<Daemon>>,
}

impl SlashDevice {
    /// Opens a card of this machine.
    ///
    /// # Errors
    /// [`Error`]: no such node, no permission, an unknown version of the driver, a call that failed.
    pub fn open(node: Node, options: SlashOptions) -> Result<Self, Error> {
        let path = node.path(Path::new("/"));
        let of = |source: io::Error| Error::Open { path: path.clone(), source };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(of)?;
        Self::with(Arc::new(Linux), Handle::new(file.into()), options)
    }

    /// The same over a node that is open, and another implementation of the driver's calls.
    ///
    /// # Errors
    /// As [`SlashDevice::open`].
    pub fn with(kernel: Arc<dyn Kernel>, node: Handle, options: SlashOptions) -> Result<Self, Error> {
        Self::through(Card::new(kernel, Arc::new(node)), None, options)
    }

    /// Opens a card that SLASH's daemon vrtd lends. Its memory is granted when it is allocated, and only granted memory
    /// can be used.
    ///
    /// # Errors
    /// [`Error`]: no such socket or card, no permission, an unknown version, a request that failed.
    pub fn open_via_vrtd(name: &VrtdName, options: SlashOptions) -> Result<Self, Error> {
        Self::through_daemon(Daemon::connect(name)?, options)
    }

    /// The same over a socket that is connected to the daemon, and other calls on the files that it sends.
    ///
    /// # Errors
    /// As [`SlashDevice::open_via_vrtd`].
    #[cfg(feature = "model")]
    pub fn from_vrtd_socket(
        socket: std::os::fd::OwnedFd,
        card: u32,
        files: Arc<dyn Kernel>,
        options: SlashOptions,
    ) -> Result<Self, Error> {
        let of = |e: rustix::io::Errno| Error::Vrtd { socket: PathBuf::new(), source: e.into() };
        Self::through_daemon(Daemon::over(socket, card, files).map_err(of)?, options)
    }

    fn through_daemon(daemon: Daemon, options: SlashOptions) -> Result<Self, Error> {
        let daemon = Arc::new(daemon);
        Self::through(Card::new(daemon.clone(), daemon.socket.clone()), Some(daemon), options)
    }

    fn through(card: Card, daemon: Option<Arc<Daemon>>, options: SlashOptions) -> Result<Self, Error> {
        if options.ring >= abi::RING_SIZES {
            return Err(Error::Ring(options.ring));
        }
        let card = Arc::new(card);
        let (size, pci) = card.info()?;
        let regions = regions();
        let reach = Arc::new(match daemon {
            Some(_) => Reach::default(),
            None => Reach::of(regions.iter().map(|r| r.span)),
        });
        let mut pairs = vec![card.pair(1, options.ring)?];
        let buffers = Arc::new(pairs[0].buffers());
        let registrar = registrar(&buffers);
        // The pages of both queues: of the first buffer, which also says how the channels should be used.
        let of = |e: dmalane_dma::Error| match e {
            dmalane_dma::Error::Allocate { source, .. } => {
                source.downcast().unwrap_or_else(|e| Error::call(Request::BufferCreate, e))
            }
            other => Error::call(Request::BufferCreate, io::Error::other(other)),
        };
        let mut pages =
            Some(heap(&buffers).allocate(2 * DEPTH * MAX_RANGES * page()).map_err(of)?.share().into_slice());
        let mut next_page = || match pages.take()?.split_at(page()) {
            Ok((page, rest)) => {
                pages = Some(rest);
                Some(page)
            }
            Err(_) => None,
        };
        match buffers.hint() {
            abi::HINT_V80 => pairs.push(card.pair(2, options.ring)?),
            abi::HINT_SINGLE => {}
            hint => return Err(Error::Version { found: format!("BUF_CREATE has the unknown hint {hint}") }),
        }
        let mut queues: Vec<Box<DeviceQueue>> = Vec::new();
        let mut waits = String::new();
        for (number, pair) in pairs.into_iter().enumerate() {
            let pages = (0..DEPTH).map(|_| (0..MAX_RANGES).filter_map(|_| next_page()).collect()).collect();
            let plans = Planner { buffers: buffers.clone(), reach: reach.clone() };
            let calls = pair.calls();
            waits = match calls.depth() {
                1 => "a thread each waits in TRANSFER".to_owned(),
                more => format!("each with {more} io_uring commands in flight"),
            };
            let queue = SlashQueue::new(number, pair, calls, plans, pages, registrar.clone())?;
            queues.push(Box::new(queue));
        }
        let mut notes = vec![
            format!(
                "{}, INFO of {} bytes, rings of size {}",
                pci.map_or("PCI address unknown".to_owned(), |pci| format!("PCI {pci}")),
                size,
                options.ring
            ),
            "host memory: buffers of the driver, into which files are read directly".to_owned(),
            format!("{} queue pairs, each on a memory channel of its own; {waits}", queues.len()),
        ];
        if daemon.is_some() {
            notes.push("lent by vrtd, which grants memory in blocks of 64 MiB to 512 MiB".to_owned());
        }
        Ok(Self { queues, notes, regions, registrar, space: FlatSpace::new(), reach, daemon })
    }
}

impl Device for SlashDevice {
    fn info(&self) -> DeviceInfo {
        let name = "AMD V80 (SLASH)".to_owned();
        DeviceInfo { name, notes: self.notes.clone(), polled: false, concurrent: true, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn memory(&self) -> DeviceMemory {
        match &self.daemon {
            None => DeviceMemory::new(&self.regions).contiguous(),
            Some(daemon) => {
                let grants = Grants { daemon: daemon.clone(), reach: self.reach.clone() };
                DeviceMemory::granted(&self.regions, grants)
            }
        }
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.registrar.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        std::mem::take(&mut self.queues)
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut self.space
    }
}

dmalane_dma::debug_as!(SlashDevice, |it| "SlashDevice({:?})", it.notes);

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_dma::error_chain;

    #[test]
    fn cards_are_found_by_their_nodes() {
        let root = tempfile::tempdir().unwrap();
        assert!(nodes(root.path()).is_empty());
        let dev = root.path().join("dev");
        let class = root.path().join("sys/class/slash/slash_qdma_ctl_0000:61:00.1");
        std::fs::create_dir_all(&dev).unwrap();
        std::fs::create_dir_all(&class).unwrap();
        for name in ["slash_qdma_ctl10", "slash_qdma_ctl2", "slash_ctl0", "slash_qdma_ctlx", "slash_qdma_ctl"] {
            std::fs::write(dev.join(name), "").unwrap();
        }
        assert_eq!(nodes(root.path()), [Node(2), Node(10)]);
        std::fs::write(class.join("uevent"), "MAJOR=240\nMINOR=4\nDEVNAME=slash_qdma_ctl2\n").unwrap();
        assert_eq!((Node(2).pci(root.path()).as_deref(), Node(1).pci(root.path())), (Some("0000:61:00.1"), None));
    }

    #[test]
    fn a_card_is_named_by_a_number() {
        assert_eq!("12".parse::<Node>().unwrap(), Node(12));
        for wrong in ["", "-1", "+1", "x", "/dev/slash_qdma_ctl0", "4294967296", "0,ring=1"] {
            assert!(wrong.parse::<Node>().is_err(), "{wrong}");
        }
        let missing = error_chain(&SlashDevice::open(Node(4_000_000), SlashOptions::default()).unwrap_err());
        assert!(missing.contains("modprobe slash"), "{missing}");
    }
}
