//! The kinds of devices that can be opened by name, one entry each.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_cuda::{CudaDevice, Gpu, GpuName};
use dmalane_daemon::{Client, ClientOptions, SOCKET};
use dmalane_device::{Counters, Device, IommuCounters, RamDevice};
use dmalane_file::{FileDevice, FileDeviceOptions, FileDevicePaths};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use dmalane_slash::{Node, SlashDevice, VRTD_SOCKET, VrtdName};
use dmalane_vfio::Bdf;
use dmalane_vulkan::{VulkanDevice, VulkanOptions};

use crate::pci::{self, PciFunction};
use crate::size::Size;
use crate::{CARD_PCI_ID, OpenOptions, connect_pci_card, open_pci_card};

/// A kind of device: an entry of [`KINDS`].
pub struct DeviceKind {
    /// The first word of its names.
    pub name: &'static str,
    /// How one is named ("ram:SIZE").
    pub syntax: &'static str,
    /// A description for people.
    pub about: &'static str,
    /// The [options](OpenOptions) that it has, besides those of every device.
    pub options: &'static [&'static str],
    /// True when its memory has plain addresses anyway, so that [`OpenOptions::flat`] is accepted and changes nothing.
    pub always_flat: bool,
    /// The process that has the device, which must be able to map the memory that is transferred; `None` for this
    /// process and the kernel.
    pub served_by: Option<&'static str>,
    /// True where a driver of this machine must have found it; what is missing then is what `dmalane doctor` says.
    pub needs_driver: bool,
    /// Hint: which option or device name gives this much memory in a group of regions, in words of the command
    /// line; `None` where there is none.
    pub more: fn(&str, u64) -> Option<String>,
    /// Checks what follows `KIND:`, empty when nothing does.
    pub check: fn(&str) -> Checked,
    /// The devices of this kind on the machine whose `/` is given; none where they cannot be found without being named.
    pub list: fn(&Path) -> Vec<Listed>,
    /// Opens one that has passed `check`.
    pub open: fn(&str, &OpenOptions) -> Opened,
}

type Checked = Result<(), Box<dyn Error + Send + Sync>>;
type Opened = Result<Box<dyn Device>, Box<dyn Error + Send + Sync>>;

/// Every kind of device.
#[rustfmt::skip] // one line for what it is, one for what it does
pub const KINDS: &[DeviceKind] = &[
    DeviceKind { name: "soft", syntax: "soft", about: "the software card: a device model inside this process",
        options: SOFT, always_flat: false, served_by: None, needs_driver: false, more: own,
        check: nothing, list: list_soft, open: soft },
    DeviceKind { name: "daemon", syntax: "daemon[:SOCKET[,server-uid=UID]]", about: "a function of a dmalaned's card",
        options: DAEMON, always_flat: false, served_by: Some("the daemon"), needs_driver: false, more: granted,
        check: daemon_socket, list: list_daemon, open: daemon },
    DeviceKind { name: "vfio", syntax: "vfio:BDF", about: "a dmalane card (PCI ID 4c44:0001) bound to vfio-pci",
        options: CARD, always_flat: false, served_by: None, needs_driver: true, more: fixed,
        check: parse::<Bdf>, list: list_vfio, open: vfio },
    DeviceKind { name: "vfio-user", syntax: "vfio-user:SOCKET", about: "a card that a process serves over a socket",
        options: CARD, always_flat: false, served_by: Some("the process that serves it"), needs_driver: false,
        more: fixed, check: socket, list: none, open: vfio_user },
    DeviceKind { name: "file", syntax: "file:PATH[,c2h=PATH]",
        about: "a file, block device or DMA driver's node as device memory",
        options: &["file", "overwrite"], always_flat: true, served_by: None, needs_driver: false, more: longer,
        check: parse::<FileDevicePaths>, list: none, open: file },
    DeviceKind { name: "ram", syntax: "ram:SIZE", about: "plain memory of this process",
        options: &[], always_flat: true, served_by: None, needs_driver: false, more: named,
        check: size, list: none, open: ram },
    DeviceKind { name: "vulkan", syntax: "vulkan:NUMBER|NAME|UUID[,flat][,channels=N]",
        about: "a GPU, through its Vulkan driver",
        options: &["flat", "vulkan"], always_flat: false, served_by: None, needs_driver: true, more: fixed,
        check: gpu, list: list_vulkan, open: vulkan },
    DeviceKind { name: "cuda", syntax: "cuda:NUMBER|UUID[,vmm][,lib=PATH]",
        about: "an NVIDIA GPU, through the CUDA driver",
        options: &[], always_flat: true, served_by: None, needs_driver: true, more: fixed,
        check: parse::<GpuName>, list: list_cuda, open: cuda },
    DeviceKind { name: "slash", syntax: "slash:N", about: "an AMD V80 of the driver SLASH (/dev/slash_qdma_ctlN)",
        options: &["slash"], always_flat: true, served_by: None, needs_driver: true, more: fixed,
        check: parse::<Node>, list: list_slash, open: slash },
    DeviceKind { name: "vrtd", syntax: "vrtd[:SOCKET][#N]", about: "an AMD V80 that SLASH's daemon vrtd lends",
        options: &["slash"], always_flat: true, served_by: None, needs_driver: true, more: fixed,
        check: parse::<VrtdName>, list: list_vrtd, open: vrtd },
];

/// Bytes of DDR of the software card, unless it is asked for otherwise.
pub const CARD_DDR: u64 = 64 << 30;
/// Bytes of HBM of the software card, unless it is asked for otherwise.
pub const CARD_HBM: u64 = 32 << 30;
/// Most bytes of either memory of the software card.
pub const CARD_MOST: u64 = 256 << 30;

const CARD: &[&str] = &["ring", "flat", "va-bits"];
const DAEMON: &[&str] = &["ring", "flat", "va-bits", "card-ddr", "card-hbm"];
const SOFT: &[&str] =
    &["ring", "flat", "va-bits", "card-ddr", "card-hbm", "channels", "workers", "host-memory", "fragmentation", "seed"];

/// A device that was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Listed {
    /// Its name, as [`DeviceSpec`](crate::DeviceSpec) reads it.
    pub name: String,
    /// The word for its kind in JSON.
    pub kind: &'static str,
    /// True when it can be opened.
    pub supported: bool,
    /// A description, or the reason why it cannot be opened.
    pub about: String,
    /// Its memories with their sizes, as far as that is known without opening it.
    pub memories: Vec<(&'static str, u64)>,
    /// Its channels, as far as that is known without opening it.
    pub channels: Option<u32>,
    /// Other facts by name; `None` where there is no value.
    pub facts: Vec<(&'static str, Option<String>)>,
}

fn nothing(rest: &str) -> Checked {
    if rest.is_empty() { Ok(()) } else { Err("nothing follows it".into()) }
}

fn parse<T: std::str::FromStr<Err: Error + Send + Sync + 'static>>(rest: &str) -> Checked {
    rest.parse::<T>().map(drop).map_err(Into::into)
}

fn socket(rest: &str) -> Checked {
    if rest.is_empty() { Err("a socket is missing".into()) } else { Ok(()) }
}

fn gpu(rest: &str) -> Checked {
    if rest.is_empty() { Err("the number, name or UUID of a GPU is missing".into()) } else { Ok(()) }
}

fn size(rest: &str) -> Checked {
    crate::size::nonzero(rest).map(drop).map_err(Into::into)
}

fn none(_: &Path) -> Vec<Listed> {
    Vec::new()
}

fn fixed(_: &str, _: u64) -> Option<String> {
    None
}

fn own(group: &str, bytes: u64) -> Option<String> {
    let option = format!("card-{group}");
    let can = SOFT.contains(&&*option) && bytes <= CARD_MOST;
    can.then(|| format!("--{option} {}", Size::about(bytes)))
}

fn granted(group: &str, bytes: u64) -> Option<String> {
    let option = own(group, bytes)?;
    Some(format!("{option} of a daemon that gives a client as much (dmalaned --client-{group})"))
}

fn longer(_: &str, bytes: u64) -> Option<String> {
    Some(format!("a file of {}", exact_if_small(bytes)))
}

fn named(_: &str, bytes: u64) -> Option<String> {
    Some(format!("ram:{}", exact_if_small(bytes)))
}

fn exact_if_small(bytes: u64) -> Size {
    if bytes < 1 << 20 { Size::new(bytes) } else { Size::about(bytes) }
}

/// How a card called `name` is driven.
fn used(name: &str, concurrent: bool, options: &OpenOptions) -> CardUse {
    CardUse {
        name: name.to_owned(),
        concurrent,
        threads: None,
        processors: 0,
        ring: options.ring,
        flat: options.flat,
        va_bits: options.va_bits,
    }
}

fn soft(_: &str, options: &OpenOptions) -> Opened {
    let (card, host) = soft_config(options);
    let host: SoftHost = SoftHost::new(host)?;
    let bus = Arc::new(SoftBus::new(host, card)?);
    // Unless each channel has a thread, apparent differences between channels only reflect polling order.
    let workers = card.workers;
    let used = used("software card", workers == Workers::PerChannel, options);
    let (threads, processors) = match workers {
        Workers::Inline => ("the card works in the threads that poll", 0),
        Workers::One => ("one thread for the card", 1),
        Workers::PerChannel => ("a thread for each channel of the card", card.channels as usize),
    };
    let how = CardUse { threads: Some(threads.to_owned()), processors, ..used };
    Ok(Box::new(CardDevice::open(bus.clone(), how)?.counted(move || soft_counters(&bus))))
}

/// The software card and its host as the options say; sizes are rounded up to what a card can have.
fn soft_config(options: &OpenOptions) -> (CardConfig, HostConfig) {
    let (card, host) = (CardConfig::default(), HostConfig::default());
    let whole = |bytes: Option<u64>, default, to: u64| bytes.unwrap_or(default).div_ceil(to).saturating_mul(to);
    let card = CardConfig {
        ddr: whole(options.card_ddr, CARD_DDR, 2 << 20),
        hbm: whole(options.card_hbm, CARD_HBM, 4 << 20),
        channels: options.channels.unwrap_or(card.channels),
        workers: options.workers.unwrap_or(card.workers),
    };
    let host = HostConfig {
        memory: options.host_memory.unwrap_or(host.memory),
        fragmentation: options.fragmentation.unwrap_or(host.fragmentation),
        seed: options.seed.unwrap_or(host.seed),
    };
    (card, host)
}

/// The counters of a software card and its host.
pub(crate) fn soft_counters(bus: &SoftBus) -> Counters {
    let (host, (ddr, hbm)) = (bus.host().stats(), bus.memory().touched());
    let iommu = IommuCounters {
        leaves: host.leaves,
        tables: host.tables,
        hits: host.iotlb_hits,
        misses: host.iotlb_misses,
        faults: host.faults,
    };
    Counters { iommu: Some(iommu), touched: Some(ddr + hbm) }
}

fn list_soft(_: &Path) -> Vec<Listed> {
    vec![Listed {
        name: "soft".to_owned(),
        kind: "soft_card",
        supported: true,
        about: "the software card: a device model inside this process, no hardware needed".to_owned(),
        memories: vec![("ddr", CARD_DDR), ("hbm", CARD_HBM)],
        channels: Some(CardConfig::default().channels),
        facts: Vec::new(),
    }]
}

fn daemon_socket(rest: &str) -> Checked {
    daemon_options(rest).map(drop).map_err(Into::into)
}

/// The connection to a daemon that `SOCKET[,server-uid=UID]` names; the default socket if it is empty.
///
/// # Errors
/// The user is no number.
pub(crate) fn daemon_options(rest: &str) -> Result<ClientOptions, String> {
    let (path, server) = match rest.rsplit_once(",server-uid=") {
        Some((path, uid)) => {
            (path, Some(uid.parse::<u32>().map_err(|_| format!("{uid:?} is not the number of a user"))?))
        }
        None => (rest, None),
    };
    let mut options = ClientOptions::new(if path.is_empty() { SOCKET } else { path });
    options.server_uids.extend(server);
    Ok(options)
}

fn daemon(rest: &str, options: &OpenOptions) -> Opened {
    let whole = |bytes: Option<u64>, to: u64| bytes.map_or(0, |bytes| bytes.div_ceil(to).saturating_mul(to));
    let (ddr, hbm) = (whole(options.card_ddr, 2 << 20), whole(options.card_hbm, 4 << 20));
    let wanted = ClientOptions { ddr, hbm, ..daemon_options(rest)? };
    let name = format!("the card daemon:{}", wanted.path.display());
    let client = Client::connect(wanted)?;
    Ok(Box::new(CardDevice::open(Arc::new(client), CardUse { processors: 1, ..used(&name, false, options) })?))
}

fn list_daemon(root: &Path) -> Vec<Listed> {
    let socket = root.join(SOCKET.trim_start_matches('/'));
    if !socket.exists() {
        return Vec::new();
    }
    // A file may be there without a daemon: one that was killed leaves its socket.
    let answer = dmalane_daemon::status(&socket);
    vec![Listed {
        name: format!("daemon:{SOCKET}"),
        kind: "daemon",
        supported: answer.is_ok(),
        about: match answer {
            Ok(_) => "a function of a dmalaned's card; `dmalaned status` shows its clients".to_owned(),
            Err(e) => format!("the daemon cannot be used: {e}"),
        },
        memories: Vec::new(),
        channels: None,
        facts: Vec::new(),
    }]
}

fn vfio(rest: &str, options: &OpenOptions) -> Opened {
    let bdf: Bdf = rest.parse()?;
    let how = used(&format!("the card vfio:{bdf}"), true, options);
    Ok(Box::new(CardDevice::open(Arc::new(open_pci_card(&bdf)?), how)?))
}

fn list_vfio(root: &Path) -> Vec<Listed> {
    let (vendor, device) = CARD_PCI_ID;
    let card = format!("{vendor:04x}:{device:04x}");
    let listed = |d: PciFunction| Listed {
        name: format!("vfio:{}", d.bdf),
        kind: "vfio_pci",
        supported: d.id == card,
        about: match d.id == card {
            true => "a card bound to vfio-pci".to_owned(),
            false => {
                "a PCI device bound to vfio-pci, but not a dmalane card; `dmalane bar-map` maps its BARs".to_owned()
            }
        },
        memories: Vec::new(),
        channels: None,
        facts: vec![("pci_id", Some(d.id)), ("iommu_group", d.iommu_group)],
    };
    pci::devices(root).into_iter().filter(|d| d.driver.as_deref() == Some("vfio-pci")).map(listed).collect()
}

fn vfio_user(rest: &str, options: &OpenOptions) -> Opened {
    let how = CardUse { processors: 1, ..used(&format!("the card vfio-user:{rest}"), true, options) };
    Ok(Box::new(CardDevice::open(Arc::new(connect_pci_card(Path::new(rest))?), how)?))
}

fn file(rest: &str, options: &OpenOptions) -> Opened {
    let file = options.file.unwrap_or_default();
    let overwrite = file.overwrite || options.overwrite;
    Ok(Box::new(FileDevice::open(rest.parse()?, FileDeviceOptions { overwrite, ..file })?))
}

fn ram(rest: &str, _: &OpenOptions) -> Opened {
    Ok(Box::new(RamDevice::new(rest.parse::<Size>()?.bytes())?))
}

fn vulkan(rest: &str, options: &OpenOptions) -> Opened {
    let wanted = options.vulkan.clone().unwrap_or_default();
    let wanted = VulkanOptions { sparse: wanted.sparse && !options.flat, ..wanted };
    Ok(Box::new(VulkanDevice::open(rest, &wanted)?))
}

fn list_vulkan(root: &Path) -> Vec<Listed> {
    // Drivers belong to the machine that runs.
    if root != Path::new("/") {
        return Vec::new();
    }
    let gpus = dmalane_vulkan::gpus().unwrap_or_default();
    let listed = |gpu: dmalane_vulkan::GpuInfo| {
        // Opened, because only then is known in which pages it binds.
        let opened = VulkanDevice::open(&gpu.index.to_string(), &VulkanOptions::default());
        let heap = |h: &dmalane_vulkan::MemoryHeap| {
            format!("{} of {}", crate::size::binary(h.bytes), if h.device_local { "its own" } else { "the host" })
        };
        let pages = opened.as_ref().ok().and_then(VulkanDevice::sparse_pages).map(|size| format!("{size} pages"));
        let limits = format!(
            "{} an allocation, {} a buffer, {}",
            crate::size::binary(gpu.max_allocation),
            crate::size::binary(gpu.max_buffer),
            match gpu.max_allocations {
                u32::MAX => "any number of allocations".to_owned(),
                most => format!("{most} allocations"),
            }
        );
        Listed {
            name: format!("vulkan:{}", gpu.index),
            kind: "vulkan",
            supported: opened.is_ok(),
            about: match &opened {
                Ok(_) => gpu.to_string(),
                Err(e) => e.to_string(),
            },
            memories: Vec::new(),
            channels: None,
            facts: vec![
                ("uuid", Some(gpu.uuid())),
                ("host_import", gpu.host_import.map(|align| format!("at multiples of {align} bytes"))),
                (
                    "dma_buf",
                    Some(
                        match (gpu.dma_buf_import, gpu.dma_buf_export) {
                            (true, true) => "yes",
                            (true, false) => "import",
                            (false, true) => "export",
                            (false, false) => "no",
                        }
                        .to_owned(),
                    ),
                ),
                ("sparse_binding", pages),
                ("queues", Some(gpu.queues())),
                ("memory", Some(gpu.heaps.iter().map(heap).collect::<Vec<_>>().join(" and "))),
                ("limits", Some(limits)),
            ],
        }
    };
    gpus.into_iter().map(listed).collect()
}

fn cuda(rest: &str, _: &OpenOptions) -> Opened {
    Ok(Box::new(CudaDevice::open(&rest.parse()?)?))
}

fn list_cuda(root: &Path) -> Vec<Listed> {
    // The driver belongs to the machine that runs.
    if root != Path::new("/") {
        return Vec::new();
    }
    let can = |can: bool| Some(if can { "yes" } else { "no" }.to_owned());
    let listed = |gpu: Gpu| Listed {
        name: format!("cuda:{}", gpu.number),
        kind: "cuda",
        supported: true,
        about: format!("{}, CUDA {}.{}", gpu.name, gpu.driver.0, gpu.driver.1),
        memories: Vec::new(),
        channels: None,
        facts: vec![
            ("uuid", Some(gpu.uuid)),
            ("pci", Some(gpu.pci)),
            ("memory", Some(crate::size::binary(gpu.memory))),
            ("host_register", can(gpu.host_register)),
            ("virtual_memory", can(gpu.virtual_memory)),
            ("dma_buf", can(gpu.dma_buf)),
            ("copy_engines", Some(gpu.copy_engines.to_string())),
        ],
    };
    // `dmalane doctor` says why there are none.
    dmalane_cuda::gpus(None).unwrap_or_default().into_iter().map(listed).collect()
}

fn slash(rest: &str, options: &OpenOptions) -> Opened {
    Ok(Box::new(SlashDevice::open(rest.parse()?, options.slash.unwrap_or_default())?))
}

fn list_slash(root: &Path) -> Vec<Listed> {
    let listed = |node: Node| {
        let access = rustix::fs::access(node.path(root), rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK);
        Listed {
            name: format!("slash:{node}"),
            kind: "slash",
            supported: access.is_ok(),
            about: match access {
                Ok(()) => "an AMD V80 of the driver SLASH: ddr 32 GiB, hbm 32 GiB, 2 channels".to_owned(),
                Err(e) => format!("an AMD V80 of the driver SLASH, whose node cannot be used: {e}"),
            },
            memories: Vec::new(),
            channels: None,
            facts: vec![("pci", node.pci(root))],
        }
    };
    dmalane_slash::nodes(root).into_iter().map(listed).collect()
}

fn vrtd(rest: &str, options: &OpenOptions) -> Opened {
    Ok(Box::new(SlashDevice::open_via_vrtd(&rest.parse()?, options.slash.unwrap_or_default())?))
}

fn list_vrtd(root: &Path) -> Vec<Listed> {
    let socket = root.join(VRTD_SOCKET.trim_start_matches('/'));
    if !socket.exists() {
        return Vec::new();
    }
    let listed = |name: String, about, pci: Result<String, ()>| Listed {
        name,
        kind: "vrtd",
        supported: pci.is_ok(),
        about,
        memories: Vec::new(),
        channels: None,
        facts: vec![("pci", pci.ok())],
    };
    match dmalane_slash::vrtd_cards(&socket) {
        Ok(cards) => {
            let cards = cards.into_iter().enumerate();
            let about = |name| format!("{name}, an AMD V80 through vrtd; available memory depends on other clients");
            cards.map(|(n, card)| listed(format!("vrtd:{VRTD_SOCKET}#{n}"), about(card.name), Ok(card.pci))).collect()
        }
        Err(e) => vec![listed(format!("vrtd:{VRTD_SOCKET}"), e.to_string(), Err(()))],
    }
}
