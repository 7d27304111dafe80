//! The state of a device in sysfs and /dev, read before VFIO opens it: which backend can open it, and why another
//! cannot.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::{Bdf, Error};

const DRIVER: &str = "vfio-pci";

/// The kernel's file systems, below a root directory that tests replace.
pub(crate) struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn device(&self, bdf: Bdf) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(bdf.to_string())
    }

    /// The IOMMU group of a device that is bound to vfio-pci.
    pub(crate) fn group(&self, bdf: Bdf) -> Result<u32, Error> {
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

    /// Checks that iommufd exists and that this process may open it.
    pub(crate) fn iommufd(&self) -> Result<(), Error> {
        let iommu = Path::new("/dev/iommu");
        if !self.path(iommu).exists() {
            return Err(self.missing(iommu, "iommufd", "CONFIG_IOMMUFD"));
        }
        self.check_access(iommu)
    }

    /// The device's own file, which iommufd uses.
    pub(crate) fn device_file(&self, bdf: Bdf) -> Result<PathBuf, Error> {
        self.iommufd()?;
        let entries = fs::read_dir(self.device(bdf).join("vfio-dev")).into_iter().flatten();
        let name = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).find(|name| name.starts_with("vfio"));
        let file = Path::new("/dev/vfio/devices").join(name.ok_or(Error::NoDeviceFile(bdf))?);
        if !self.path(&file).exists() {
            return Err(Error::NoDeviceFile(bdf));
        }
        self.check_access(&file)?;
        Ok(file)
    }

    /// The file of an IOMMU group, which type 1 uses.
    pub(crate) fn group_file(&self, group: u32) -> Result<PathBuf, Error> {
        let container = Path::new("/dev/vfio/vfio");
        if !self.path(container).exists() {
            return Err(self.missing(container, "vfio", "CONFIG_VFIO_CONTAINER"));
        }
        self.check_access(container)?;
        let file = PathBuf::from(format!("/dev/vfio/{group}"));
        if !self.path(&file).exists() {
            return Err(self.missing(&file, "vfio-pci", "CONFIG_VFIO_GROUP"));
        }
        self.check_access(&file)?;
        Ok(file)
    }

    /// Every function that is bound to vfio-pci, sorted.
    pub(crate) fn bound(&self) -> Vec<Bdf> {
        let driver = self.root.join("sys/bus/pci/drivers").join(DRIVER);
        let names = fs::read_dir(driver).into_iter().flatten();
        let mut bound: Vec<Bdf> = names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        bound.sort();
        bound
    }

    /// An absolute path of the machine, below the root.
    fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn check_access(&self, path: &Path) -> Result<(), Error> {
        let access = accessat(CWD, self.path(path), Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS);
        access.map_err(|_| Error::NoPermission { path: path.to_owned() })
    }

    /// Why a file does not exist: its module is not loaded, or the kernel was built without it.
    fn missing(&self, path: &Path, module: &'static str, option: &'static str) -> Error {
        let release = fs::read_to_string(self.root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        let config = format!("/boot/config-{}", release.trim());
        let text = fs::read_to_string(self.path(Path::new(&config)));
        let has = |text: &str| text.lines().any(|l| l.strip_prefix(option).is_some_and(|rest| rest.starts_with('=')));
        match text {
            Ok(text) if !has(&text) => Error::NotBuilt { path: path.to_owned(), option, config },
            _ => Error::NoModule { path: path.to_owned(), module },
        }
    }

    /// The devices of a group that are bound to kernel drivers, each with its driver.
    pub(crate) fn others(&self, group: u32) -> Vec<(String, String)> {
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

/// The last component of a link's target.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn each_missing_condition_has_its_error() {
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
            "bound to nvme, not to vfio-pci (echo vfio-pci > /sys/bus/pci/devices/0000:01:00.0/driver_override; \
             echo 0000:01:00.0 >",
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
