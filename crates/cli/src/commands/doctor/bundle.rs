//! The text that `doctor --bundle` writes: facts about a machine for a report, without what identifies it.
//!
//! Every line passes [`Secrets`] last, whatever it is made of.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use dmalane::pci;
use rustix::fs::OFlags;

use super::secrets::Secrets;
use super::slash;
use crate::layout::plain;
use crate::probe::{NodeState, Probe};

/// The contents, as the command says.
pub const CONTENTS: &str = "versions, the checks of doctor, relevant kernel options, modules with their parameters, \
                            limits, device nodes with their permissions, PCI functions, log lines of relevant drivers";
/// Not in it.
pub const LEFT_OUT: &str = "environment, host and user names, names below home directories, serial numbers, UUIDs, \
                            MAC and IP addresses, log lines of programs and of other drivers";

/// Drivers whose modules, parameters and log lines are of interest, by the beginnings of their names.
const DRIVERS: [&str; 16] = [
    "slash", "qdma", "libqdma", "xdma", "vfio", "iommu", "dmar", "amd-vi", "arm-smmu", "udmabuf", "dma_heap", "nvidia",
    "amdgpu", "i915", "xe", "hugetlb",
];
/// The same, where the whole name must be equal.
const WHOLE: [&str; 2] = ["xe", "i915"];
/// Kernel options of interest, by their beginnings.
const OPTIONS: [&str; 13] = [
    "CONFIG_VFIO",
    "CONFIG_IOMMU",
    "CONFIG_IO_URING",
    "CONFIG_DMABUF",
    "CONFIG_UDMABUF",
    "CONFIG_HUGETLB",
    "CONFIG_TRANSPARENT_HUGEPAGE",
    "CONFIG_ARCH_SUPPORTS_P",
    "CONFIG_INTEL_IOMMU",
    "CONFIG_AMD_IOMMU",
    "CONFIG_ARM_SMMU",
    "CONFIG_PCI_P2PDMA",
    "CONFIG_DMA_SHARED_BUFFER",
];
/// Parameters of the kernel's command line of interest, by their beginnings.
const PARAMETERS: [&str; 12] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "arm-smmu",
    "hugepages",
    "hugepagesz",
    "default_hugepagesz",
    "transparent_hugepage",
    "vfio",
    "pci=",
    "pcie",
    "slash.",
];
/// Device nodes of interest, by the beginnings of their names in `/dev`.
const NODES: [&str; 10] =
    ["slash", "qdma", "xdma", "udmabuf", "iommu", "vfio", "dma_heap", "nvidia", "kfd", "hugepages"];
/// Files of a PCI function that are printed.
const LINK: [&str; 6] =
    ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node", "enable"];
/// The most lines of the kernel's log, from its end.
const LOG_LINES: usize = 2000;
/// The most bytes of the kernel's log.
const LOG_BYTES: usize = 16 << 20;

/// The bundle of this machine. `checks` is the report of the checks, `configuration` the options that are set.
pub fn text(probe: &Probe, checks: &str, configuration: &[String], secrets: &Secrets) -> String {
    let sections = [
        ("contents", vec![format!("here: {CONTENTS}"), format!("left out: {LEFT_OUT}")]),
        ("versions", versions(probe)),
        ("checks", lines(checks)),
        ("configuration of dmalane", configuration.to_vec()),
        ("kernel options", kernel_options(probe)),
        ("kernel command line, in part", command_line(probe)),
        ("modules", modules(probe)),
        ("limits", lines(&probe.text("/proc/self/limits").unwrap_or_default())),
        ("memory", memory(probe)),
        ("device nodes", nodes(probe)),
        ("PCI functions", functions(probe)),
        ("kernel log, in part", log(probe)),
    ];
    let mut text = String::from("dmalane doctor --bundle, version 1\n");
    for (name, lines) in sections {
        text += &format!("\n== {name}\n");
        if lines.is_empty() {
            text += "(nothing)\n";
        }
        for line in lines {
            text += &secrets.hide(&plain(&line));
            text.push('\n');
        }
    }
    text
}

fn lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn begins(name: &str, with: &[&str]) -> bool {
    with.iter().any(|begin| name.starts_with(begin))
}

/// True for a driver of interest.
fn is_relevant(driver: &str) -> bool {
    let driver = driver.to_ascii_lowercase();
    DRIVERS.iter().any(|name| match WHOLE.contains(name) {
        true => driver == *name,
        false => driver.starts_with(name),
    })
}

fn versions(probe: &Probe) -> Vec<String> {
    let kernel = probe.text("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
    let mut all = vec![
        format!("dmalane {}", env!("CARGO_PKG_VERSION")),
        format!("kernel {kernel}, {}", std::env::consts::ARCH),
        format!("pages of {} bytes", rustix::param::page_size()),
    ];
    let release = probe.text("/etc/os-release").unwrap_or_default();
    all.extend(release.lines().filter(|l| begins(l, &["ID=", "VERSION_ID="])).map(|l| format!("os-release {l}")));
    let processor = probe.field("/proc/cpuinfo", "model name");
    all.extend(processor.map(|name| format!("processor {name}")));
    all
}

fn kernel_options(probe: &Probe) -> Vec<String> {
    let release = probe.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let config = probe.text(format!("/boot/config-{release}")).unwrap_or_default();
    config.lines().filter(|line| begins(line, &OPTIONS)).map(str::to_owned).collect()
}

fn command_line(probe: &Probe) -> Vec<String> {
    let words = probe.text("/proc/cmdline").unwrap_or_default();
    words.split_whitespace().filter(|word| begins(word, &PARAMETERS)).map(str::to_owned).collect()
}

/// Modules of interest with their versions and parameters; those of other drivers are only named.
fn modules(probe: &Probe) -> Vec<String> {
    let mut all = Vec::new();
    for name in probe.names("/sys/module").into_iter().filter(|name| is_relevant(name)) {
        let folder = format!("/sys/module/{name}");
        let version = probe.text(format!("{folder}/version")).unwrap_or_else(|| "-".to_owned());
        all.push(format!("{name} version {version}"));
        for parameter in probe.names(format!("{folder}/parameters")) {
            if let Some(value) = probe.text(format!("{folder}/parameters/{parameter}")) {
                all.push(format!("  {parameter}={}", value.lines().next().unwrap_or_default()));
            }
        }
    }
    all
}

fn memory(probe: &Probe) -> Vec<String> {
    let info = probe.text("/proc/meminfo").unwrap_or_default();
    let wanted = ["MemTotal", "MemAvailable", "Huge", "Mlocked", "Shmem", "AnonHuge"];
    info.lines().filter(|line| begins(line, &wanted)).map(str::to_owned).collect()
}

fn nodes(probe: &Probe) -> Vec<String> {
    let mut all = Vec::new();
    for name in probe.names("/dev").into_iter().filter(|name| begins(name, &NODES)) {
        node(probe, &format!("/dev/{name}"), 2, &mut all);
    }
    for name in probe.names("/dev/dri") {
        node(probe, &format!("/dev/dri/{name}"), 0, &mut all);
    }
    node(probe, slash::VRTD, 0, &mut all);
    all
}

/// One node, or what lies in a directory, so many directories deep.
fn node(probe: &Probe, path: &str, depth: usize, all: &mut Vec<String>) {
    let Ok(meta) = fs::symlink_metadata(probe.place(path)) else { return };
    let kind = meta.file_type();
    if kind.is_dir() {
        if depth > 0 {
            probe.names(path).iter().for_each(|name| node(probe, &format!("{path}/{name}"), depth - 1, all));
        }
        return;
    }
    let what = match () {
        () if kind.is_char_device() => format!("char {}", numbers(meta.rdev())),
        () if kind.is_block_device() => format!("block {}", numbers(meta.rdev())),
        () if kind.is_socket() => "socket".to_owned(),
        () if kind.is_symlink() => "link".to_owned(),
        () => "file".to_owned(),
    };
    let mine = if probe.node(path) == NodeState::Open { "open to this user" } else { "closed to this user" };
    all.push(format!("{path} {what} mode {:04o} uid {} gid {}, {mine}", meta.mode() & 0o7777, meta.uid(), meta.gid()));
}

fn numbers(device: u64) -> String {
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// Functions of cards, GPUs and accelerators, and those that are bound to a driver of interest.
fn relevant_functions(probe: &Probe) -> Vec<pci::PciFunction> {
    let all = pci::devices(&probe.place("/")).into_iter();
    all.filter(|d| d.computes() || begins(&d.id, &["10ee:", "4c44:"]) || d.driver.as_deref().is_some_and(is_relevant))
        .collect()
}

fn functions(probe: &Probe) -> Vec<String> {
    let mut all = Vec::new();
    for function in relevant_functions(probe) {
        let (driver, group) = (function.driver.as_deref(), function.iommu_group.as_deref());
        all.push(format!(
            "{} {} class {:06x} driver {} IOMMU group {}",
            function.bdf,
            function.id,
            function.class,
            driver.unwrap_or("none"),
            group.unwrap_or("none")
        ));
        let folder = format!("/sys/bus/pci/devices/{}", function.bdf);
        let link = LINK.iter().filter_map(|name| Some(format!("{name} {}", probe.text(format!("{folder}/{name}"))?)));
        let link: Vec<_> = link.collect();
        all.extend((!link.is_empty()).then(|| format!("  {}", link.join(", "))));
        // A line for each BAR: first address, last address, flags. The addresses tell nothing but the sizes.
        let bars = probe.text(format!("{folder}/resource")).unwrap_or_default();
        for (bar, line) in bars.lines().take(6).enumerate() {
            let mut words = line.split_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
            if let (Some(Ok(first)), Some(Ok(last)), Some(Ok(flags))) = (words.next(), words.next(), words.next())
                && last > first
            {
                all.push(format!("  BAR {bar}: {} bytes, flags {flags:#x}", (last - first).saturating_add(1)));
            }
        }
    }
    all
}

/// The last lines of the kernel's log that drivers of interest wrote; or why it cannot be read.
fn log(probe: &Probe) -> Vec<String> {
    let records = match records(&probe.place("/dev/kmsg")) {
        Ok(records) => records,
        Err(e) => return vec![format!("cannot be read ({e}); as root: sudo dmesg | grep -iE 'slash|qdma|vfio|iommu'")],
    };
    let cards: Vec<String> = relevant_functions(probe).into_iter().map(|function| function.bdf).collect();
    let lines = records.lines().filter_map(|record| log_line(record, &cards));
    let mut lines: Vec<_> = lines.collect();
    lines.drain(..lines.len().saturating_sub(LOG_LINES));
    lines
}

/// The records of `/dev/kmsg`, a line each. A read returns one, and there is no end.
fn records(path: &Path) -> std::io::Result<String> {
    let mut file = fs::OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let (mut bytes, mut record) = (Vec::new(), vec![0; 8192]);
    while bytes.len() < LOG_BYTES {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&record[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            // Records that were overwritten meanwhile.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A record as a line, if the kernel wrote it (facility 0, not a program) and a driver of interest in it, or a driver
/// of the bus about one of these functions. A record is `priority,sequence,microseconds,flags[,more];message`.
fn log_line(record: &str, cards: &[String]) -> Option<String> {
    let (head, message) = record.split_once(';')?;
    let mut head = head.split(',');
    let (priority, time): (u32, u64) = (head.next()?.parse().ok()?, head.nth(1)?.parse().ok()?);
    if priority >> 3 != 0 {
        return None;
    }
    let first = message.split(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c))).next()?;
    let of_card = || begins(first, &["pci"]) && cards.iter().any(|bdf| message.contains(bdf.as_str()));
    (is_relevant(first) || of_card()).then(|| format!("[{}.{:06}] {message}", time / 1_000_000, time % 1_000_000))
}
