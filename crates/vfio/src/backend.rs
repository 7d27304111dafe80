//! The kernel interfaces that open a device, in order of preference, and why a preferred one is unavailable.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::sysfs::Sysfs;
use crate::{Bdf, Error};

/// The kernel interface that provides an address space and opens the devices in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum Backend {
    /// iommufd with the device's own file `/dev/vfio/devices/vfioN`: Linux 6.6 and later, if built with both.
    Iommufd,
    /// A container of VFIO with an IOMMU of type 1, and the file `/dev/vfio/N` of the device's IOMMU group.
    Type1,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Iommufd => "iommufd",
            Self::Type1 => "type1",
        })
    }
}

/// A device that is bound to vfio-pci, and the backend that would open it.
#[derive(Debug)]
#[non_exhaustive]
pub struct BackendStatus {
    /// The device.
    pub bdf: Bdf,
    /// The backend that [`VfioContainer::new`](crate::VfioContainer::new) selects, and the file that it opens; `None`
    /// when no backend can open the device.
    pub selected: Option<(Backend, PathBuf)>,
    /// The preferred backends that cannot open the device, best first, and why.
    pub unavailable: Vec<(Backend, Error)>,
}

/// The backend that would open each device that is bound to vfio-pci, and what is missing or not permitted for the
/// others. Opens no device. `root` is the root of the machine's files, `/`.
pub fn backends(root: impl AsRef<Path>) -> Vec<BackendStatus> {
    let sysfs = Sysfs::new(root.as_ref());
    sysfs.bound().into_iter().map(|bdf| status(&sysfs, bdf)).collect()
}

/// Checks that this machine has an iommufd that this process may open. `root` is the root of the machine's files, `/`.
///
/// # Errors
/// [`Error::NoModule`], [`Error::NotBuilt`], [`Error::NoPermission`].
pub fn check_iommufd(root: impl AsRef<Path>) -> Result<(), Error> {
    Sysfs::new(root.as_ref()).iommufd()
}

fn status(sysfs: &Sysfs, bdf: Bdf) -> BackendStatus {
    let mut unavailable = Vec::new();
    for backend in [Backend::Iommufd, Backend::Type1] {
        // `Error` cannot be cloned, so the group is looked up for each backend.
        let file = sysfs.group(bdf).and_then(|group| match backend {
            Backend::Iommufd => sysfs.device_file(bdf),
            Backend::Type1 => sysfs.group_file(group),
        });
        match file {
            Ok(file) => return BackendStatus { bdf, selected: Some((backend, file)), unavailable },
            Err(error) => unavailable.push((backend, error)),
        }
    }
    BackendStatus { bdf, selected: None, unavailable }
}

/// The more specific of two errors when no backend opens a device: that of type 1, unless the kernel does not have type
/// 1 at all.
pub(crate) fn more_specific(iommufd: Error, type1: Error) -> Error {
    let absent = |e: &Error| matches!(e, Error::NoModule { .. } | Error::NotBuilt { .. } | Error::NoType1);
    if absent(&type1) && !absent(&iommufd) { iommufd } else { type1 }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// The files of a machine with one device, of group 15, that is bound to vfio-pci.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:01:00.0");
        let driver = root.path().join("sys/bus/pci/drivers/vfio-pci");
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(&driver).unwrap();
        symlink("../../../kernel/iommu_groups/15", device.join("iommu_group")).unwrap();
        symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
        symlink("../../devices/0000:01:00.0", driver.join("0000:01:00.0")).unwrap();
        fs::write(driver.join("new_id"), "").unwrap();
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        fs::write(root.path().join("proc/sys/kernel/osrelease"), "7.2.13\n").unwrap();
        fs::create_dir_all(root.path().join("dev/vfio/devices")).unwrap();
        root
    }

    #[test]
    fn each_backend_and_why_it_is_unavailable() {
        let root = machine();
        let file = |path: &str| fs::write(root.path().join(path), "").unwrap();
        let look = || {
            let mut all = backends(root.path());
            assert_eq!(all.len(), 1, "new_id is no device");
            all.remove(0)
        };
        let why = |status: &BackendStatus, n: usize| status.unavailable[n].1.to_string();
        let none = look();
        assert!(none.selected.is_none() && none.unavailable.len() == 2, "{none:?}");
        assert!(why(&none, 0).contains("/dev/iommu is missing: iommufd is not loaded (modprobe iommufd)"));
        assert!(why(&none, 1).contains("/dev/vfio/vfio is missing: vfio is not loaded"));

        // The kernel's configuration tells a missing module from a missing option.
        fs::create_dir_all(root.path().join("boot")).unwrap();
        fs::write(
            root.path().join("boot/config-7.2.13"),
            "# CONFIG_IOMMUFD is not set\nCONFIG_VFIO_CONTAINER=y\nCONFIG_IOMMUFD_X=y\n",
        )
        .unwrap();
        let none = look();
        assert!(
            why(&none, 0).ends_with("built without CONFIG_IOMMUFD (according to /boot/config-7.2.13)"),
            "{}",
            why(&none, 0)
        );
        assert!(matches!(none.unavailable[1].1, Error::NoModule { module: "vfio", .. }));

        file("dev/vfio/vfio");
        assert!(why(&look(), 1).contains("/dev/vfio/15 is missing"));
        file("dev/vfio/15");
        let group = look();
        assert_eq!(group.selected, Some((Backend::Type1, "/dev/vfio/15".into())));
        assert_eq!(group.unavailable.len(), 1);

        file("dev/iommu");
        assert!(matches!(look().unavailable[0].1, Error::NoDeviceFile(_)));
        fs::create_dir_all(root.path().join("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3")).unwrap();
        assert!(matches!(look().unavailable[0].1, Error::NoDeviceFile(_)), "sysfs names a file that does not exist");
        file("dev/vfio/devices/vfio3");
        let best = look();
        assert_eq!(best.selected, Some((Backend::Iommufd, "/dev/vfio/devices/vfio3".into())));
        assert!(best.unavailable.is_empty());
        assert!(check_iommufd(root.path()).is_ok() && check_iommufd(root.path().join("sys")).is_err());
        assert_eq!([Backend::Iommufd, Backend::Type1].map(|backend| backend.to_string()), ["iommufd", "type1"]);

        let members = root.path().join("sys/kernel/iommu_groups/15");
        fs::create_dir_all(&members).unwrap();
        fs::write(members.join("name"), "vfio-noiommu\n").unwrap();
        let none = look();
        assert!(none.selected.is_none() && matches!(none.unavailable[0].1, Error::NoProtection(_)), "{none:?}");
    }

    #[test]
    fn files_without_permission() {
        if rustix::process::getuid().is_root() {
            return as_nobody("backend::tests::files_without_permission");
        }
        use std::os::unix::fs::PermissionsExt;
        let root = machine();
        for path in ["dev/iommu", "dev/vfio/vfio", "dev/vfio/15"] {
            fs::write(root.path().join(path), "").unwrap();
        }
        fs::set_permissions(root.path().join("dev/iommu"), fs::Permissions::from_mode(0o000)).unwrap();
        let status = backends(root.path()).remove(0);
        assert!(matches!(&status.unavailable[0].1, Error::NoPermission { path } if path.ends_with("iommu")));
        assert!(matches!(check_iommufd(root.path()), Err(Error::NoPermission { .. })));
        assert_eq!(status.selected, Some((Backend::Type1, "/dev/vfio/15".into())));
    }

    /// Runs a test of this program as an ordinary user: root may open every file.
    fn as_nobody(test: &str) {
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).current_dir("/").env_remove("TMPDIR").uid(65534).gid(65534);
        match command.output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success() && text.contains("1 passed"), "{text}");
            }
            Err(e) => println!("SKIPPED: an ordinary user cannot run this program: {e}"),
        }
    }

    #[test]
    fn the_more_specific_error() {
        let closed = || Error::NoPermission { path: "/dev/iommu".into() };
        let absent = || Error::NoModule { path: "/dev/vfio/vfio".into(), module: "vfio" };
        let busy = || Error::Busy { path: "/dev/vfio/15".into() };
        assert!(matches!(more_specific(closed(), absent()), Error::NoPermission { .. }));
        assert!(matches!(more_specific(absent(), absent()), Error::NoModule { .. }));
        assert!(matches!(more_specific(closed(), busy()), Error::Busy { .. }));
    }
}
