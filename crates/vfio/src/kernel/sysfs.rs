//! What the file systems of the kernel say of a device, before VFIO is asked: which way leads to it, and why the other does not.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

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
        let name = fs::read_to_string(self.root.join(format!("sys/kernel/iommu_groups/{group}/name")));
        if name.is_ok_and(|name| name.trim() == "vfio-noiommu") {
            return Err(Error::NoProtection(bdf));
        }
        match target(&device.join("driver")) {
            Some(driver) if driver == DRIVER => Ok(group),
            driver => Err(Error::NotBound { bdf, driver }),
        }
    }

    /// The file by which iommufd takes a device: that of the device itself.
    pub(super) fn by_iommufd(&self, bdf: Bdf) -> Result<PathBuf, Error> {
        let iommu = Path::new("/dev/iommu");
        if !self.place(iommu).exists() {
            return Err(self.missing(iommu, "iommufd", "CONFIG_IOMMUFD"));
        }
        self.permitted(iommu)?;
        let entries = fs::read_dir(self.device(bdf).join("vfio-dev")).into_iter().flatten();
        let name = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).find(|name| name.starts_with("vfio"));
        let file = Path::new("/dev/vfio/devices").join(name.ok_or(Error::NoDeviceFile(bdf))?);
        if !self.place(&file).exists() {
            return Err(Error::NoDeviceFile(bdf));
        }
        self.permitted(&file)?;
        Ok(file)
    }

    /// The file by which type 1 takes a device: that of its group.
    pub(super) fn by_type1(&self, group: u32) -> Result<PathBuf, Error> {
        let container = Path::new("/dev/vfio/vfio");
        if !self.place(container).exists() {
            return Err(self.missing(container, "vfio", "CONFIG_VFIO_CONTAINER"));
        }
        self.permitted(container)?;
        let file = PathBuf::from(format!("/dev/vfio/{group}"));
        if !self.place(&file).exists() {
            return Err(self.missing(&file, "vfio-pci", "CONFIG_VFIO_GROUP"));
        }
        self.permitted(&file)?;
        Ok(file)
    }

    /// Every function that vfio-pci has, in order.
    pub(super) fn bound(&self) -> Vec<Bdf> {
        let driver = self.root.join("sys/bus/pci/drivers").join(DRIVER);
        let names = fs::read_dir(driver).into_iter().flatten();
        let mut bound: Vec<Bdf> = names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        bound.sort();
        bound
    }

    /// Where a path of the machine is below the root.
    fn place(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn permitted(&self, path: &Path) -> Result<(), Error> {
        let may = access(self.place(path), Access::READ_OK | Access::WRITE_OK);
        may.map_err(|_| Error::NoPermission { path: path.to_owned() })
    }

    /// Why a file is not there: its module is not loaded, or there is none.
    fn missing(&self, path: &Path, module: &'static str, option: &'static str) -> Error {
        let release = fs::read_to_string(self.root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        let config = format!("/boot/config-{}", release.trim());
        let text = fs::read_to_string(self.place(Path::new(&config)));
        let has = |text: &str| text.lines().any(|l| l.strip_prefix(option).is_some_and(|rest| rest.starts_with('=')));
        match text {
            Ok(text) if !has(&text) => Error::NotBuilt { path: path.to_owned(), option, config },
            _ => Error::NoModule { path: path.to_owned(), module },
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
        fs::write(members.parent().unwrap().join("name"), "vfio-noiommu\n").unwrap();
        says("no-IOMMU mode");
    }
}
