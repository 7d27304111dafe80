//! PCI devices as sysfs shows them.

use crate::probe::Probe;

const DEVICES: &str = "/sys/bus/pci/devices";

/// One function of a PCI device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PciDevice {
    /// Domain, bus, device and function.
    pub bdf: String,
    /// Vendor and device number: `10de:2204`.
    pub id: String,
    /// Class, subclass and programming interface in 24 bits.
    pub class: u32,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// The IOMMU group that it is in.
    pub iommu_group: Option<String>,
}

impl PciDevice {
    /// A display controller or a processing accelerator.
    pub fn computes(&self) -> bool {
        matches!(self.class >> 16, 0x03 | 0x12)
    }
}

/// All PCI devices, sorted. One whose files make no sense is left out.
pub fn devices(probe: &Probe) -> Vec<PciDevice> {
    probe.names(DEVICES).into_iter().filter_map(|bdf| device(probe, bdf)).collect()
}

fn device(probe: &Probe, bdf: String) -> Option<PciDevice> {
    let file = |name: &str| probe.text(format!("{DEVICES}/{bdf}/{name}"));
    let hex = |name: &str| u32::from_str_radix(file(name)?.strip_prefix("0x")?, 16).ok();
    let (vendor, model, class) = (hex("vendor")?, hex("device")?, hex("class")?);
    Some(PciDevice {
        id: format!("{vendor:04x}:{model:04x}"),
        class,
        driver: probe.link(format!("{DEVICES}/{bdf}/driver")),
        iommu_group: probe.link(format!("{DEVICES}/{bdf}/iommu_group")),
        bdf,
    })
}
