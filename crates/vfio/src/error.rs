//! What can go wrong with a device of the kernel's.

use std::io;
use std::path::PathBuf;

use dmalane_addr::{Iova, PageSize, RangeError, Span};
use thiserror::Error;

use crate::Bdf;

/// An error of a container, a device or its bus. The message says what helps, where something does.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such PCI function.
    #[error("there is no PCI device {0} (lspci -D lists them)")]
    NoDevice(Bdf),
    /// A kernel module is not loaded, or the kernel was built without it.
    #[error("{} is missing: {module} is not loaded (modprobe {module})", path.display())]
    NoModule {
        /// What is missing.
        path: PathBuf,
        /// The module that makes it.
        module: &'static str,
    },
    /// The kernel was built without something: no module can be loaded for it.
    #[error("{} is missing: this kernel was built without {option} ({config} says so)", path.display())]
    NotBuilt {
        /// What is missing.
        path: PathBuf,
        /// The option of the kernel's configuration.
        option: &'static str,
        /// The file that says so.
        config: String,
    },
    /// The device has no file of its own, by which iommufd would take it.
    #[error(
        "{0} has no file below /dev/vfio/devices: the kernel has iommufd, but not this way to a device (CONFIG_VFIO_DEVICE_CDEV, Linux 6.6)"
    )]
    NoDeviceFile(Bdf),
    /// The device is given away without an IOMMU: it could write all memory of the machine.
    #[error(
        "{0} is in VFIO's no-IOMMU mode, in which nothing keeps the device from any memory: switch the IOMMU on instead \
         (firmware: VT-d or AMD-Vi; kernel: intel_iommu=on; without enable_unsafe_noiommu_mode of module vfio)"
    )]
    NoProtection(Bdf),
    /// The device is bound to another driver, or to none.
    #[error(
        "{bdf} is bound to {}, not to vfio-pci (echo vfio-pci > /sys/bus/pci/devices/{bdf}/driver_override{}; \
         echo {bdf} > /sys/bus/pci/drivers_probe)",
        driver.as_deref().unwrap_or("no driver"),
        if driver.is_some() { format!("; echo {bdf} > /sys/bus/pci/devices/{bdf}/driver/unbind") } else { String::new() }
    )]
    NotBound {
        /// The device.
        bdf: Bdf,
        /// The driver that has it.
        driver: Option<String>,
    },
    /// The device is behind no IOMMU.
    #[error(
        "{0} is in no IOMMU group: the machine has no IOMMU or it is off (firmware: VT-d or AMD-Vi; kernel: intel_iommu=on)"
    )]
    NoIommu(Bdf),
    /// This process may not open a file of VFIO.
    #[error("no permission to open {0} (as root: chown USER {0}, or a udev rule for SUBSYSTEM==\"vfio\")", path.display())]
    NoPermission {
        /// The file.
        path: PathBuf,
    },
    /// Another process, or another container of this one, has the group or the device.
    #[error("{} is in use: a device, or an IOMMU group, can be opened once", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// Devices of the same IOMMU group are with drivers of the kernel.
    #[error(
        "IOMMU group {group} cannot be used while drivers of the kernel have some of its devices: {}",
        list(others)
    )]
    NotViable {
        /// The group.
        group: u32,
        /// Devices of it that are not with vfio-pci, each with its driver.
        others: Vec<(String, String)>,
    },
    /// This kernel's VFIO has no IOMMU of type 1.
    #[error("the kernel's VFIO has no type 1 IOMMU (modprobe vfio_iommu_type1)")]
    NoType1,
    /// The IOMMU cannot remap interrupts, so a device could forge them.
    #[error(
        "the kernel refuses the IOMMU of group {group}: {source} (without interrupt remapping it wants \
         allow_unsafe_interrupts=1 of module vfio_iommu_type1)"
    )]
    Attach {
        /// The group.
        group: u32,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel does not let iommufd have the device.
    #[error(
        "the kernel refuses {bdf} to iommufd: {source} (without interrupt remapping it wants allow_unsafe_interrupts=1 of module iommufd)"
    )]
    AttachDevice {
        /// The device.
        bdf: Bdf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Device memory that iommufd cannot be given: it takes dma-bufs alone, and the kernel makes none of this BAR.
    #[error(
        "{bdf} does not give its BARs as dma-bufs ({source}; Linux 7 with CONFIG_VFIO_PCI_DMABUF does), and iommufd takes them no other way: \
         open both devices by type1 (--way type1)"
    )]
    NoDmaBuf {
        /// The device.
        bdf: Bdf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An address or length to map is not whole pages of the IOMMU.
    #[error("cannot map {len} bytes at {va:#x} to {iova}: all three must be multiples of {page}")]
    Unaligned {
        /// Where the memory is in this process.
        va: usize,
        /// Bytes.
        len: u64,
        /// Where it was to appear.
        iova: Iova,
        /// The smallest page of the IOMMU.
        page: PageSize,
    },
    /// The IOMMU does not have all of these addresses: interrupts are there, or it is not wide enough.
    #[error("{span} does not lie in what the IOMMU can map: {}", spans(ranges))]
    OutsideIova {
        /// What was asked for.
        span: Span<Iova>,
        /// What there is.
        ranges: Vec<Span<Iova>>,
    },
    /// Part of the span is mapped already.
    #[error("part of {0} is mapped already")]
    Overlap(Span<Iova>),
    /// There is no memory at an address of this process, not all of it, or it may not be written; or it is memory of a kind that the
    /// kernel does not pin, such as a dma-buf's mapping.
    #[error(
        "{len} bytes at {va:#x} cannot be pinned{}: not mapped, or a mapping of a dma-buf",
        if *writable { " for writing: read-only memory" } else { "" }
    )]
    NotMemory {
        /// Where, in this process.
        va: usize,
        /// Bytes.
        len: u64,
        /// The device was to write it.
        writable: bool,
    },
    /// As many mappings as a container may have.
    #[error(
        "the container has no room for one more mapping (dma_entry_limit of module vfio_iommu_type1, 65535 unless raised): map larger pieces"
    )]
    TooMany,
    /// More memory would be pinned than this process may lock.
    #[error(
        "cannot pin {wanted} bytes: {left} are left of what may be locked (ulimit -l; raise it in /etc/security/limits.conf or LimitMEMLOCK=)"
    )]
    Memlock {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that may still be locked.
        left: u64,
    },
    /// A span cuts a mapping in two; only whole ones can be unmapped.
    #[error("{0} is not whole mappings: one can only be unmapped as it was made")]
    PartialUnmap(Span<Iova>),
    /// No range of IOVAs is free.
    #[error(transparent)]
    Iova(#[from] RangeError<Iova>),
    /// The device has no such region, it has no memory, or the kernel does not let it be mapped.
    #[error("region {region} of {bdf} {what}")]
    Region {
        /// The device.
        bdf: Bdf,
        /// Which region: 0 to 5 are BARs.
        region: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A device that cannot be reset by itself.
    #[error("{0} cannot be reset alone: it has no function-level reset, and other devices are on its bus")]
    NoReset(Bdf),
    /// A device without message-signalled interrupts.
    #[error("{0} has neither MSI nor MSI-X")]
    NoInterrupts(Bdf),
    /// The device is not what a driver drives.
    #[error("{bdf} is not {wanted}: {found}")]
    WrongDevice {
        /// The device.
        bdf: Bdf,
        /// What the driver drives.
        wanted: &'static str,
        /// What was found.
        found: String,
    },
    /// The device that a process serves is not what a driver drives.
    #[error("the device behind {} is not {wanted}: {found}", path.display())]
    WrongServed {
        /// The socket.
        path: PathBuf,
        /// What the driver drives.
        wanted: &'static str,
        /// What was found.
        found: String,
    },
    /// Memory that cannot be lent to the process of a device: it is not a memfd's.
    #[error("the memory cannot be lent to the device's process: it is not from a memfd (MemfdHeap; --heap memfd)")]
    NotLendable,
    /// Everything else that the kernel, or a device's process, refused.
    #[error("{what}: {source}")]
    Kernel {
        /// What was asked.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn kernel(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Kernel { what, source }
    }
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Iova(error) => Self::Iova(error),
            error => Self::Bus(Box::new(error)),
        }
    }
}

fn list(others: &[(String, String)]) -> String {
    others.iter().map(|(bdf, driver)| format!("{bdf} ({driver})")).collect::<Vec<_>>().join(", ")
}

fn spans(spans: &[Span<Iova>]) -> String {
    spans.iter().map(Span::to_string).collect::<Vec<_>>().join(", ")
}
