//! The ways to a device, best first, and why the best was not taken.

use std::fmt;
use std::path::{Path, PathBuf};

use super::sysfs::Sysfs;
use crate::{Bdf, Error};

/// How the kernel is asked for an address space, and for the devices in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum Backend {
    /// iommufd, and the device's own file `/dev/vfio/devices/vfioN`: Linux 6.6 and later, where it was built with both.
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

/// A device that vfio-pci has, and how it would be opened.
#[derive(Debug)]
pub struct Standing {
    /// The device.
    pub bdf: Bdf,
    /// The way that [`Container::new`](super::Container::new) takes, and the file that it opens; `None` when none leads to the device.
    pub way: Option<(Backend, PathBuf)>,
    /// The ways before that, best first, and what each lacks.
    pub passed_over: Vec<(Backend, Error)>,
}

/// How every device that vfio-pci has would be opened, without opening any: what is missing, or closed to this process. `root` is where the
/// machine's files are, `/`.
pub fn standings(root: &Path) -> Vec<Standing> {
    let sysfs = Sysfs::new(root);
    sysfs.bound().into_iter().map(|bdf| standing(&sysfs, bdf)).collect()
}

/// Why this machine has no iommufd, where it has none: [`Error::NoModule`], [`Error::NotBuilt`], [`Error::NoPermission`].
pub fn no_iommufd(root: &Path) -> Option<Error> {
    Sysfs::new(root).iommufd().err()
}

fn standing(sysfs: &Sysfs, bdf: Bdf) -> Standing {
    let mut passed_over = Vec::new();
    // Asked for each way, since an error cannot be had twice.
    let ways = [Backend::Iommufd, Backend::Type1].map(|way| {
        let file = sysfs.group(bdf).and_then(|group| match way {
            Backend::Iommufd => sysfs.by_iommufd(bdf),
            Backend::Type1 => sysfs.by_type1(group),
        });
        (way, file)
    });
    for (way, file) in ways {
        match file {
            Ok(file) => return Standing { bdf, way: Some((way, file)), passed_over },
            Err(error) => passed_over.push((way, error)),
        }
    }
    Standing { bdf, way: None, passed_over }
}

/// Which of two errors says more, when no way leads to a device: that of type 1, unless the kernel does not have that at all.
pub(super) fn telling(iommufd: Error, type1: Error) -> Error {
    let absent = |e: &Error| matches!(e, Error::NoModule { .. } | Error::NotBuilt { .. } | Error::NoType1);
    if absent(&type1) && !absent(&iommufd) { iommufd } else { type1 }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine with one device of group 15, that vfio-pci has.
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
    fn every_rung_and_why_it_was_passed_over() {
        let root = machine();
        let file = |path: &str| fs::write(root.path().join(path), "").unwrap();
        let look = || {
            let mut all = standings(root.path());
            assert_eq!(all.len(), 1, "new_id is no device");
            all.remove(0)
        };
        let why = |standing: &Standing, n: usize| standing.passed_over[n].1.to_string();
        let none = look();
        assert!(none.way.is_none() && none.passed_over.len() == 2, "{none:?}");
        assert!(why(&none, 0).contains("/dev/iommu is missing: iommufd is not loaded (modprobe iommufd)"));
        assert!(why(&none, 1).contains("/dev/vfio/vfio is missing: vfio is not loaded"));

        // The kernel's configuration knows better.
        fs::create_dir_all(root.path().join("boot")).unwrap();
        fs::write(
            root.path().join("boot/config-7.2.13"),
            "# CONFIG_IOMMUFD is not set\nCONFIG_VFIO_CONTAINER=y\nCONFIG_IOMMUFD_X=y\n",
        )
        .unwrap();
        let none = look();
        assert!(
            why(&none, 0).ends_with("built without CONFIG_IOMMUFD (/boot/config-7.2.13 says so)"),
            "{}",
            why(&none, 0)
        );
        assert!(matches!(none.passed_over[1].1, Error::NoModule { module: "vfio", .. }));

        file("dev/vfio/vfio");
        assert!(why(&look(), 1).contains("/dev/vfio/15 is missing"));
        file("dev/vfio/15");
        let group = look();
        assert_eq!(group.way, Some((Backend::Type1, "/dev/vfio/15".into())));
        assert_eq!(group.passed_over.len(), 1);

        file("dev/iommu");
        assert!(matches!(look().passed_over[0].1, Error::NoDeviceFile(_)));
        fs::create_dir_all(root.path().join("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3")).unwrap();
        assert!(matches!(look().passed_over[0].1, Error::NoDeviceFile(_)), "no file for it");
        file("dev/vfio/devices/vfio3");
        let best = look();
        assert_eq!(best.way, Some((Backend::Iommufd, "/dev/vfio/devices/vfio3".into())));
        assert!(best.passed_over.is_empty());

        let members = root.path().join("sys/kernel/iommu_groups/15");
        fs::create_dir_all(&members).unwrap();
        fs::write(members.join("name"), "vfio-noiommu\n").unwrap();
        let none = look();
        assert!(none.way.is_none() && matches!(none.passed_over[0].1, Error::NoProtection(_)), "{none:?}");
    }

    #[test]
    fn files_of_others() {
        if rustix::process::getuid().is_root() {
            return println!("SKIPPED: root may open every file");
        }
        use std::os::unix::fs::PermissionsExt;
        let root = machine();
        for path in ["dev/iommu", "dev/vfio/vfio", "dev/vfio/15"] {
            fs::write(root.path().join(path), "").unwrap();
        }
        fs::set_permissions(root.path().join("dev/iommu"), fs::Permissions::from_mode(0o000)).unwrap();
        let standing = standings(root.path()).remove(0);
        assert!(matches!(&standing.passed_over[0].1, Error::NoPermission { path } if path.ends_with("iommu")));
        assert_eq!(standing.way, Some((Backend::Type1, "/dev/vfio/15".into())));
    }

    #[test]
    fn the_error_that_says_more() {
        let closed = || Error::NoPermission { path: "/dev/iommu".into() };
        let absent = || Error::NoModule { path: "/dev/vfio/vfio".into(), module: "vfio" };
        let busy = || Error::Busy { path: "/dev/vfio/15".into() };
        assert!(matches!(telling(closed(), absent()), Error::NoPermission { .. }));
        assert!(matches!(telling(absent(), absent()), Error::NoModule { .. }));
        assert!(matches!(telling(closed(), busy()), Error::Busy { .. }));
    }
}
