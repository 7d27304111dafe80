//! PCI devices as sysfs shows them.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// One function of a PCI device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PciFunction {
    /// Domain, bus, device and function.
    pub bdf: String,
    /// Vendor and device number: `10de:2204`.
    pub id: String,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// The IOMMU group that it is in.
    pub iommu_group: Option<String>,
}

/// The most that is read of a file: more than any of these has.
const LIMIT: u64 = 4096;

/// All PCI devices of the machine whose `/` is at `root`, sorted. Those whose files make no sense are left out.
pub fn devices(root: &Path) -> Vec<PciFunction> {
    let folder = root.join("sys/bus/pci/devices");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut devices: Vec<_> = entries.filter_map(|entry| device(&entry.path())).collect();
    devices.sort_by(|a, b| a.bdf.cmp(&b.bdf));
    devices
}

fn device(folder: &Path) -> Option<PciFunction> {
    let hex = |name: &str| u32::from_str_radix(text(&folder.join(name))?.trim().strip_prefix("0x")?, 16).ok();
    let (vendor, model) = (hex("vendor")?, hex("device")?);
    let link = |name: &str| last(&fs::read_link(folder.join(name)).ok()?);
    Some(PciFunction {
        bdf: last(folder)?,
        id: format!("{vendor:04x}:{model:04x}"),
        driver: link("driver"),
        iommu_group: link("iommu_group"),
    })
}

fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(LIMIT).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The last part of a path, unless it has characters that a terminal would not print as they are.
fn last(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    name.chars().all(|c| c.is_ascii_graphic()).then(|| name.to_owned())
}
