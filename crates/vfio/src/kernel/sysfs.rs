//! What sysfs says of a device, before VFIO is asked.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Bdf, Error};

const DRIVER: &str = "vfio-pci";

/// The file systems of the kernel, below a root that tests replace.
pub(super) struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    pub(super) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn device(&self, bdf: Bdf) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(bdf.to_string())
    }

    /// The IOMMU group of a device that vfio-pci has.
    pub(super) fn group(&self, bdf: Bdf) -> Result<u32, Error> {
        let device = self.device(bdf);
        if !device.exists() {
            return Err(Error::NoDevice(bdf));
        }
        let module = self.root.join("sys/bus/pci/drivers").join(DRIVER);
        if !module.exists() {
            return Err(Error::NoModule { path: module, module: DRIVER });
        }
        let group = target(&device.join("iommu_group")).and_then(|name| name.parse().ok());
        let group = group.ok_or(Error::NoIommu(bdf))?;
        match target(&device.join("driver")) {
            Some(driver) if driver == DRIVER => Ok(group),
            driver => Err(Error::NotBound { bdf, driver }),
        }
    }

    /// The devices of a group that drivers of the kernel have, each with its driver.
    pub(super) fn others(&self, group: u32) -> Vec<(String, String)> {
        let devices = self.root.join(format!("sys/kernel/iommu_groups/{group}/devices"));
        let names = fs::read_dir(&devices).into_iter().flatten().filter_map(|e| e.ok()?.file_name().into_string().ok());
        let mut others: Vec<_> = names
            .filter_map(|name| {
                let driver = target(&self.root.join("sys/bus/pci/devices").join(&name).join("driver"))?;
                (driver != DRIVER && driver != "pcieport").then_some((name, driver))
            })
            .collect();
        others.sort();
        others
    }
}

/// The last part of where a link points.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn each_rung_has_its_error() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::new(root.path());
        let bdf: Bdf = "0000:01:00.0".parse().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:01:00.0");
        let says = |wanted: &str| {
            let error = sysfs.group(bdf).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        says("no PCI device 0000:01:00.0");
        fs::create_dir_all(&device).unwrap();
        says("modprobe vfio-pci");
        fs::create_dir_all(root.path().join("sys/bus/pci/drivers/vfio-pci")).unwrap();
        says("intel_iommu=on");
        symlink("../../../kernel/iommu_groups/15", device.join("iommu_group")).unwrap();
        says("bound to no driver");
        symlink("../../../bus/pci/drivers/nvme", device.join("driver")).unwrap();
        says(
            "bound to nvme, not to vfio-pci (echo vfio-pci > /sys/bus/pci/devices/0000:01:00.0/driver_override; echo 0000:01:00.0 >",
        );
        let members = root.path().join("sys/kernel/iommu_groups/15/devices");
        fs::create_dir_all(&members).unwrap();
        symlink(&device, members.join("0000:01:00.0")).unwrap();
        assert_eq!(sysfs.others(15), [("0000:01:00.0".to_owned(), "nvme".to_owned())]);
        fs::remove_file(device.join("driver")).unwrap();
        symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
        assert_eq!(sysfs.group(bdf).unwrap(), 15);
        assert!(sysfs.others(15).is_empty() && sysfs.others(16).is_empty());
    }
}
