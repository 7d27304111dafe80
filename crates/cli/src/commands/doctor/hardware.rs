//! Checks of what other devices and other programs need.

use dmalane::{error_chain, vfio};

use super::check::{Check, Subject};
use crate::probe::{NodeState, Probe};

/// Names that are listed; the rest is only counted.
const SHOWN: usize = 8;

pub fn dma_heaps(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("dma_heap", "buffers that other drivers import as dma-bufs");
    let names = probe.names("/dev/dma_heap");
    if names.is_empty() {
        return subject.missing("no /dev/dma_heap", kernel_option("CONFIG_DMABUF_HEAPS"));
    }
    let closed = names.iter().find(|n| probe.node(format!("/dev/dma_heap/{n}")) == NodeState::Closed);
    match closed {
        Some(name) => subject.missing(
            format!("{}; {name} is closed to this user", list(&names)),
            open_up(&format!("/dev/dma_heap/{name}")),
        ),
        None => subject.ok(list(&names)),
    }
}

pub fn udmabuf(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("udmabuf", "turns our memfd buffers into dma-bufs for other drivers");
    node(probe, subject, "/dev/udmabuf", kernel_option("CONFIG_UDMABUF"))
}

pub fn vfio(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices(
        "vfio",
        "drives a PCI device from user space: by iommufd and the device's own file, else by container and group \
        (type 1)",
    );
    let backends = vfio::backends(probe.place("/"));
    if backends.is_empty() {
        let path = "/dev/vfio/vfio";
        return match probe.node(path) {
            NodeState::Open => {
                let iommufd = vfio::check_iommufd(probe.place("/"));
                let iommufd =
                    iommufd.map_or_else(|why| format!("no iommufd: {}", error_chain(&why)), |()| "iommufd".to_owned());
                subject.ok(format!("{path} and {iommufd}; no device is bound to vfio-pci"))
            }
            _ => node(probe, subject, path, load(probe, "vfio-pci")),
        };
    }
    let lines: Vec<_> = backends.iter().map(how).collect();
    let found = format!("bound to vfio-pci: {}", list(&lines));
    // The fix is that of the last backend of the first device that no backend opens.
    let last = backends.iter().find(|s| s.selected.is_none()).and_then(|s| s.unavailable.last());
    match last {
        Some((_, error)) => subject.missing(found, fix(probe, error)),
        None => subject.ok(found),
    }
}

/// Which backend opens a device, and why not a preferred one.
fn how(status: &vfio::BackendStatus) -> String {
    let mut text = match &status.selected {
        Some((backend, file)) => format!("{} by {backend} ({})", status.bdf, file.display()),
        None => format!("{} by no backend", status.bdf),
    };
    // A reason that applies to both backends is printed once.
    let mut said = String::new();
    for (backend, error) in &status.unavailable {
        let why = error_chain(error);
        if why != said {
            text += &format!(", not by {backend}: {why}");
            said = why;
        }
    }
    text
}

fn fix(probe: &Probe, error: &vfio::Error) -> String {
    match error {
        vfio::Error::NoModule { module, .. } => load(probe, module),
        vfio::Error::NotBuilt { option, .. } => kernel_option(option),
        vfio::Error::NoPermission { path } => open_up(&path.to_string_lossy()),
        vfio::Error::NoDeviceFile(_) => kernel_option("CONFIG_VFIO_DEVICE_CDEV"),
        vfio::Error::NoIommu(_) | vfio::Error::NoProtection(_) => switch_iommu_on(probe),
        _ => "dmalane bar-map -d vfio:0000:01:00.0    # with the device's name, says more".to_owned(),
    }
}

fn node(probe: &Probe, subject: Subject, path: &str, make: String) -> Check {
    match probe.node(path) {
        NodeState::Open => subject.ok(path),
        NodeState::Closed => subject.missing(format!("{path} is closed to this user"), open_up(path)),
        NodeState::Missing => subject.missing(format!("no {path}"), make),
    }
}

pub fn iommu_groups(probe: &Probe) -> Check {
    let subject =
        Subject::for_real_devices("iommu_groups", "without an IOMMU no PCI device can be given to a program safely");
    match probe.names("/sys/kernel/iommu_groups").len() {
        0 => subject.missing("none: no IOMMU, or it is switched off", switch_iommu_on(probe)),
        1 => subject.ok("1 group"),
        groups => subject.ok(format!("{groups} groups")),
    }
}

/// One command: at most, it adds an option to the kernel's command line, which changes nothing until the next start.
fn switch_iommu_on(probe: &Probe) -> String {
    // Firmware has a table where there is one, on or off.
    let has_one = ["DMAR", "IVRS"].iter().any(|of| probe.place(format!("/sys/firmware/acpi/tables/{of}")).exists());
    let flags = probe.field("/proc/cpuinfo", "flags").unwrap_or_default();
    if !has_one && flags.split(' ').any(|flag| flag == "hypervisor") {
        return "lscpu | grep -i hypervisor    # its host gives this virtual machine an IOMMU: QEMU by -device \
                intel-iommu,intremap=on"
            .to_owned();
    }
    if probe.field("/proc/cpuinfo", "vendor_id").as_deref() != Some("GenuineIntel") {
        return "sudo dmesg | grep -iE 'iommu|smmu|amd-vi'    # and switch it on in the firmware".to_owned();
    }
    let after = "from the next start on, with VT-d on in the firmware";
    match probe.place("/usr/sbin/grubby").exists() {
        true => format!("sudo grubby --update-kernel=ALL --args=intel_iommu=on    # {after}"),
        false => format!(
            "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX intel_iommu=on\"' | sudo tee \
             /etc/default/grub.d/iommu.cfg    # then sudo update-grub; {after}"
        ),
    }
}

/// The GPUs that `-d vulkan:N` opens; drivers belong to the machine that runs.
pub fn vulkan(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("vulkan", "GPUs of every vendor as devices: -d vulkan:NUMBER");
    if probe.place("/") != std::path::Path::new("/") {
        return subject.note("not looked for");
    }
    let gpus = match dmalane::vulkan::gpus() {
        Ok(gpus) => gpus,
        Err(e) => return subject.missing(error_chain(&e), "sudo apt install libvulkan1 mesa-vulkan-drivers"),
    };
    let about = |gpu: &dmalane::vulkan::GpuInfo| {
        let missing = gpu.missing().map_or(String::new(), |what| format!(": {what}"));
        format!("vulkan:{} {gpu}{missing}", gpu.index)
    };
    let found = list(&gpus.iter().map(about).collect::<Vec<_>>());
    match gpus.iter().any(|gpu| gpu.missing().is_none()) {
        true => subject.ok(found),
        false => subject.missing(found, "sudo apt install mesa-vulkan-drivers    # or the vendor's newer driver"),
    }
}

/// The GPUs that `-d cuda:N` opens; the driver belongs to the machine that runs.
pub fn cuda(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("cuda", "NVIDIA GPUs as devices: -d cuda:NUMBER");
    if probe.place("/") != std::path::Path::new("/") {
        return subject.note("not looked for");
    }
    let gpus = match dmalane::cuda::gpus(None) {
        Ok(gpus) => gpus,
        Err(e) => {
            let fix = e.fix().map_or("nvidia-smi".to_owned(), |fix| format!("nvidia-smi    # {fix}"));
            return subject.missing(error_chain(&e), fix);
        }
    };
    let about = |gpu: &dmalane::cuda::Gpu| format!("cuda:{} {} ({})", gpu.number, gpu.name, gpu.uuid);
    subject.ok(list(&gpus.iter().map(about).collect::<Vec<_>>()))
}

pub fn list(names: &[String]) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

pub fn open_up(path: &str) -> String {
    format!("sudo setfacl -m u:$USER:rw {path}")
}

/// The command that loads a module, unless the running kernel's list, which a container may lack, has none.
pub fn load(probe: &Probe, module: &str) -> String {
    let release = probe.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let modules = probe.text(format!("/lib/modules/{release}/modules.dep"));
    match modules.is_none_or(|text| text.split(['/', '.']).any(|word| word == module)) {
        true => format!("sudo modprobe {module}"),
        false => {
            format!("modinfo {module}    # not there for this kernel: boot one that has it, or install the driver")
        }
    }
}

/// Not a module: the kernel has it built in, or has it not.
pub fn kernel_option(option: &str) -> String {
    format!("zgrep {option} /proc/config.gz /boot/config-$(uname -r)    # boot a kernel that has it built in")
}
