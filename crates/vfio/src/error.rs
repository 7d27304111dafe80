//! Errors of PCI devices behind the kernel's VFIO.

use std::fmt;
use std::io;
use std::path::PathBuf;

use dmalane_addr::{Iova, RangeError, Span};
use thiserror::Error;

use crate::Bdf;

/// An error of a container, a device or its bus. The message names a fix where there is one; the kernel's error is the
/// source.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The PCI function does not exist.
    #[error("there is no PCI device {0} (lspci -D lists them)")]
    NoDevice(Bdf),
    /// A kernel module is not loaded, or the kernel was built without it.
    #[error("{} is missing: {module} is not loaded (modprobe {module})", path.display())]
    NoModule {
        /// The missing file.
        path: PathBuf,
        /// The module that creates it.
        module: &'static str,
    },
    /// The kernel was built without an option, so no module can be loaded for it.
    #[error("{} is missing: this kernel was built without {option} (according to {config})", path.display())]
    NotBuilt {
        /// The missing file.
        path: PathBuf,
        /// The option of the kernel's configuration.
        option: &'static str,
        /// The file with the kernel's configuration.
        config: String,
    },
    /// The device has no file of its own, which iommufd needs.
    #[error(
        "{0} has no file below /dev/vfio/devices: the kernel has iommufd, but not device files \
         (CONFIG_VFIO_DEVICE_CDEV, Linux 6.6)"
    )]
    NoDeviceFile(Bdf),
    /// The device is in VFIO's no-IOMMU mode: it could write all memory of the machine.
    #[error(
        "{0} is in VFIO's no-IOMMU mode, in which the device can access all memory: enable the IOMMU instead \
         (firmware: VT-d or AMD-Vi; kernel: intel_iommu=on; without enable_unsafe_noiommu_mode of module vfio)"
    )]
    NoProtection(Bdf),
    /// The device is bound to another driver, or to none.
    #[error(
        "{bdf} is bound to {}, not to vfio-pci (echo vfio-pci > /sys/bus/pci/devices/{bdf}/driver_override{}; \
         echo {bdf} > /sys/bus/pci/drivers_probe)",
        driver.as_deref().unwrap_or("no driver"),
        driver.as_ref().map_or(String::new(), |_| format!("; echo {bdf} > /sys/bus/pci/devices/{bdf}/driver/unbind"))
    )]
    NotBound {
        /// The device.
        bdf: Bdf,
        /// The driver that is bound to it.
        driver: Option<String>,
    },
    /// The device is behind no IOMMU.
    #[error(
        "{0} is in no IOMMU group: the machine has no IOMMU or it is off \
         (firmware: VT-d or AMD-Vi; kernel: intel_iommu=on)"
    )]
    NoIommu(Bdf),
    /// This process may not open a file of VFIO.
    #[error(
        "no permission to open {0} (as root: chown USER {0}, or a udev rule for SUBSYSTEM==\"vfio\")",
        path.display()
    )]
    NoPermission {
        /// The file.
        path: PathBuf,
    },
    /// Another process, or another container of this process, has opened the group or the device.
    #[error("{} is in use: a device, or an IOMMU group, can be opened once", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// Kernel drivers are bound to other devices of the same IOMMU group.
    #[error("IOMMU group {group} cannot be used while kernel drivers use some of its devices: {}", list(others))]
    NotViable {
        /// The group.
        group: u32,
        /// The devices that are not bound to vfio-pci, each with its driver.
        others: Vec<(String, String)>,
    },
    /// The kernel's VFIO has no IOMMU of type 1.
    #[error("the kernel's VFIO has no type 1 IOMMU (modprobe vfio_iommu_type1)")]
    NoType1,
    /// The container has no IOMMU yet: the first device that is opened brings it.
    #[error("nothing can be mapped before a device is opened through this container")]
    Unopened,
    /// The kernel refuses the IOMMU of a group or a device; without interrupt remapping a device could forge
    /// interrupts.
    #[error(
        "the kernel refuses {what} (without interrupt remapping it requires allow_unsafe_interrupts=1 of \
         module {module})"
    )]
    Attach {
        /// The attempt.
        what: String,
        /// The module that has the setting.
        module: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// iommufd maps device memory as dma-bufs only, and the kernel does not export this BAR as one.
    #[error(
        "the kernel does not export the BARs of {bdf} as dma-bufs (Linux 7 with CONFIG_VFIO_PCI_DMABUF does), and \
         iommufd maps them no other way: open both devices by container and group (type1)"
    )]
    NoDmaBuf {
        /// The device.
        bdf: Bdf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel cannot pin memory: it is not mapped in this process, it is read-only, or it is of a kind that the
    /// kernel does not pin, such as a mapping of a dma-buf.
    #[error(
        "{len} bytes at {va:#x} cannot be pinned{}: not mapped, or a mapping of a dma-buf",
        if *writable { " for writing: read-only memory" } else { "" }
    )]
    NotMemory {
        /// Address in this process.
        va: usize,
        /// Bytes.
        len: u64,
        /// The device should be able to write it.
        writable: bool,
    },
    /// The container has the maximum number of mappings.
    #[error(
        "the container is at its limit of mappings (dma_entry_limit of module vfio_iommu_type1, 65535 unless raised): \
         map larger buffers"
    )]
    TooMany,
    /// The mapping would pin more memory than this process may lock.
    #[error(
        "cannot pin {wanted} bytes: {left} are left of the limit on locked memory \
         (ulimit -l; raise it in /etc/security/limits.conf or LimitMEMLOCK=)"
    )]
    Memlock {
        /// Bytes requested.
        wanted: u64,
        /// Bytes that may still be locked.
        left: u64,
    },
    /// A span covers a mapping only in part; mappings are unmapped whole.
    #[error("{0} covers a mapping only in part: mappings can only be unmapped whole")]
    PartialUnmap(Span<Iova>),
    /// No range of IOVAs is free.
    #[error(transparent)]
    Iova(#[from] RangeError<Iova>),
    /// Memory that no registrar would map: pinned by another container, or with no access.
    #[error(transparent)]
    Refused(#[from] dmalane_dma::Error),
    /// An access to a region of a device, or a mapping of it, is not possible.
    #[error("region {region} of {bdf} {reason}")]
    Region {
        /// The device.
        bdf: Bdf,
        /// Which region: 0 to 5 are BARs.
        region: u32,
        /// Why not.
        reason: RegionError,
    },
    /// The device cannot be reset without others.
    #[error("{0} cannot be reset alone: it has no function-level reset, and other devices are on its bus")]
    NoReset(Bdf),
    /// The device has no message-signalled interrupts.
    #[error("{0} has neither MSI nor MSI-X")]
    NoInterrupts(Bdf),
    /// The kernel refused an operation for a reason without a variant of its own.
    #[error("cannot {what}")]
    Kernel {
        /// The operation.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Why a region of a device cannot be accessed or mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The device has no such region.
    #[error("does not exist")]
    Missing,
    /// The range is empty, or ends after the region or its mapping.
    #[error("does not contain the requested range")]
    OutOfRange,
    /// The word is out of range, or its offset is not a multiple of its size.
    #[error("has no aligned word at the requested offset")]
    NoWord,
    /// The kernel read fewer bytes than requested.
    #[error("was read only in part")]
    ShortRead,
    /// The kernel wrote fewer bytes than requested.
    #[error("was written only in part")]
    ShortWrite,
    /// The kernel maps no part of it into processes.
    #[error("cannot be mapped, only read and written through the kernel")]
    NotMappable,
    /// The kernel maps parts of the region, but not all of the requested range.
    #[error("cannot be mapped as a whole (it holds the interrupt table): name a range")]
    PartlyMappable,
    /// The region, with its alignment, is longer than the address space.
    #[error("is longer than the address space")]
    TooLong,
    /// The requested alignment is smaller than the pages of the running kernel.
    #[error("cannot be aligned to less than a page of the running kernel")]
    AlignmentBelowPage,
    /// The range to map for devices, or to export as a dma-buf, is not whole pages.
    #[error("can only be mapped for devices, or exported as a dma-buf, in whole pages")]
    NotWholePages,
    /// The device's memory is disabled in its command register, or the device is in a low-power state.
    #[error("does not respond: the memory of its device is disabled")]
    Disabled,
}

impl Error {
    /// Wraps an error of the kernel with the operation that it refused, for `map_err`.
    pub(crate) fn kernel(operation: impl fmt::Display) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Kernel { what: operation.to_string(), source }
    }
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Iova(error) => Self::Iova(error),
            Error::Refused(error) => error,
            error => Self::Backend(Box::new(error)),
        }
    }
}

fn list(others: &[(String, String)]) -> String {
    others.iter().map(|(bdf, driver)| format!("{bdf} ({driver})")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each error of a chain says something that those before it did not.
    #[test]
    fn causes_are_printed_once() {
        let source = || io::Error::other("why");
        let bdf: Bdf = "0000:01:00.0".parse().unwrap();
        let span = Span::new(Iova::new(0), 4096).unwrap();
        for error in [
            Error::Kernel { what: "open".into(), source: source() },
            Error::Attach { what: "to attach".into(), module: "iommufd", source: source() },
            Error::NoDmaBuf { bdf, source: source() },
            RangeError::NotFree(span).into(),
        ] {
            let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |&e| e.source());
            let texts: Vec<String> = chain.map(ToString::to_string).collect();
            assert!(texts.windows(2).all(|two| !two[0].contains(&two[1])), "{texts:?}");
            assert_eq!(texts.len(), if matches!(error, Error::Iova(_)) { 1 } else { 2 });
        }
    }

    #[test]
    fn messages_name_what_they_are_about() {
        let error = Error::kernel(format_args!("open {}", "/dev/vfio/15"))(io::Error::other("why"));
        assert_eq!(error.to_string(), "cannot open /dev/vfio/15");
        let others =
            vec![("0000:00:1f.2".to_owned(), "ahci".to_owned()), ("0000:00:1f.3".to_owned(), "i801".to_owned())];
        let error = Error::NotViable { group: 15, others };
        assert!(
            error.to_string().ends_with("some of its devices: 0000:00:1f.2 (ahci), 0000:00:1f.3 (i801)"),
            "{error}"
        );
    }
}
