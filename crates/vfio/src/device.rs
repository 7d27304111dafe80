//! An open VFIO device: regions, configuration space, reset.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, RwLockReadGuard, Weak};

use rustix::event::{EventfdFlags, eventfd};
use vfio_bindings::bindings::vfio as abi;

use crate::error::RegionError;
use crate::gate::{COMMAND, COMMAND_MEMORY, Gate, STANDARD};
use crate::{Bdf, Error, VfioContainer, sys};

const CONFIG: u32 = abi::VFIO_PCI_CONFIG_REGION_INDEX;
/// The bit of the command register that lets the device access memory.
const COMMAND_MASTER: u16 = 1 << 2;

/// An open device. Clones share it. When the last one is dropped, the device goes back to the kernel, which resets it.
#[derive(Clone)]
pub struct PciDevice(Arc<Inner>);

pub(crate) struct Inner {
    fd: OwnedFd,
    bdf: Bdf,
    flags: u32,
    regions: Vec<PciRegion>,
    gate: Gate,
    /// Keeps the address space open, and the group if there is one.
    container: VfioContainer,
}

/// A region of a device: 0 to 5 are BARs, 6 is the expansion ROM, 7 the configuration space.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PciRegion {
    /// Number of the region.
    pub index: u32,
    /// Bytes; 0 if the device does not have the region.
    pub len: u64,
    /// The ranges that can be mapped, in bytes from the start of the region. The rest is accessed through the kernel.
    pub mappable: Vec<Range<u64>>,
    /// Offset in the device's file.
    pub(crate) offset: u64,
}

impl PciDevice {
    pub(crate) fn new(fd: OwnedFd, bdf: Bdf, container: VfioContainer) -> Result<Self, Error> {
        let (flags, regions) = sys::device_info(fd.as_fd()).map_err(Error::kernel(format_args!("query {bdf}")))?;
        let regions = (0..regions.min(64)).map(|index| match sys::region_info(fd.as_fd(), index) {
            Ok(info) => Ok(region(index, info)),
            // The VGA region of a device without one.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(PciRegion::absent(index)),
            Err(e) => Err(Error::kernel(format_args!("query the regions of {bdf}"))(e)),
        });
        let regions: Vec<_> = regions.collect::<Result<_, _>>()?;
        Self::with_regions(fd, bdf, flags, regions, container)
    }

    fn with_regions(
        fd: OwnedFd,
        bdf: Bdf,
        flags: u32,
        regions: Vec<PciRegion>,
        container: VfioContainer,
    ) -> Result<Self, Error> {
        let mut space = [0; STANDARD];
        let config = regions.get(CONFIG as usize).filter(|config| config.len > 0);
        let missing = Error::Region { bdf, region: CONFIG, reason: RegionError::Missing };
        // Bits that a short read leaves 0 count as disabled.
        rustix::io::pread(&fd, &mut space, config.ok_or(missing)?.offset)
            .map_err(|e| Error::kernel(format_args!("read region {CONFIG} of {bdf}"))(e.into()))?;
        Ok(Self(Arc::new(Inner { fd, bdf, flags, regions, gate: Gate::new(&space), container })))
    }

    /// A file in place of a device: its configuration space, and BAR 0 behind it, of which some areas (offset, length)
    /// can be mapped, or all of it.
    #[cfg(test)]
    pub(crate) fn of_file(file: OwnedFd, bar: Range<u64>, areas: Option<Vec<(u64, u64)>>) -> Result<Self, Error> {
        let info = |index, flags, size, offset, sparse| region(index, sys::RegionInfo { flags, size, offset, sparse });
        let mut regions: Vec<_> = (0..=CONFIG).map(PciRegion::absent).collect();
        regions[0] = info(0, 7, bar.end - bar.start, bar.start, areas);
        regions[CONFIG as usize] = info(CONFIG, 3, 256, 0, None);
        Self::with_regions(file, "0000:01:00.0".parse().unwrap(), 0, regions, VfioContainer::new())
    }

    /// Another handle to an open device.
    pub(crate) fn from_open(inner: Arc<Inner>) -> Self {
        Self(inner)
    }

    pub(crate) fn weak(&self) -> Weak<Inner> {
        Arc::downgrade(&self.0)
    }

    /// The address of the PCI function.
    pub fn bdf(&self) -> Bdf {
        self.0.bdf
    }

    /// The container of the device.
    pub fn container(&self) -> &VfioContainer {
        &self.0.container
    }

    /// The regions, by number.
    pub fn regions(&self) -> &[PciRegion] {
        &self.0.regions
    }

    /// Vendor and device number.
    ///
    /// # Errors
    /// [`Error::Region`], [`Error::Kernel`].
    pub fn id(&self) -> Result<(u16, u16), Error> {
        let mut bytes = [0; 4];
        self.read_region(CONFIG, 0, &mut bytes)?;
        Ok((u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]])))
    }

    /// Reads part of a region through the kernel, whether it is mappable or not.
    ///
    /// # Errors
    /// [`Error::Region`] when the range is out of bounds, or the BAR is disabled; [`Error::Kernel`].
    pub fn read_region(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let _gate = self.responding(region)?;
        self.read_unguarded(region, offset, into)
    }

    fn read_unguarded(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let at = self.file_offset(region, offset, into.len())?;
        let whole = into.len();
        match rustix::io::pread(&self.0.fd, into, at) {
            Ok(n) if n == whole => Ok(()),
            Ok(_) => Err(self.region_error(region, RegionError::ShortRead)),
            Err(e) => Err(Error::kernel(format_args!("read region {region} of {}", self.bdf()))(e.into())),
        }
    }

    /// Writes part of a region through the kernel. A write to the configuration space waits for accesses to mapped
    /// BARs, which it may disable.
    ///
    /// # Errors
    /// As [`PciDevice::read_region`].
    pub fn write_region(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), Error> {
        if region == CONFIG {
            let resets = self.0.gate.resets(offset, from);
            return self.change(resets, || self.write_unguarded(region, offset, from));
        }
        let _gate = self.responding(region)?;
        self.write_unguarded(region, offset, from)
    }

    /// Makes a change after which the device may not respond, and records whether it does. `resets`: the change resets
    /// the device.
    fn change(&self, resets: bool, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let mut gate = self.0.gate.write();
        let changed = change();
        if resets {
            self.0.gate.revoke();
        }
        let (mut command, mut power) = ([0; 2], [0]);
        let read = self.read_unguarded(CONFIG, COMMAND, &mut command).and_then(|()| match self.0.gate.power() {
            Some(at) => self.read_unguarded(CONFIG, at, &mut power).map(|()| Some(power[0])),
            None => Ok(None),
        });
        match read {
            Ok(power) => self.0.gate.update(&mut gate, u16::from_le_bytes(command), power),
            // Not known, so not accessed.
            Err(_) => self.0.gate.update(&mut gate, 0, None),
        }
        changed
    }

    /// The gate, while the device responds at this region: the configuration space always does.
    pub(crate) fn responding(&self, region: u32) -> Result<RwLockReadGuard<'_, bool>, Error> {
        let gate = self.0.gate.read();
        let responds = *gate || region >= CONFIG;
        if responds { Ok(gate) } else { Err(self.region_error(region, RegionError::Disabled)) }
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.0.gate
    }

    fn write_unguarded(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), Error> {
        let at = self.file_offset(region, offset, from.len())?;
        match rustix::io::pwrite(&self.0.fd, from, at) {
            Ok(n) if n == from.len() => Ok(()),
            Ok(_) => Err(self.region_error(region, RegionError::ShortWrite)),
            Err(e) => Err(Error::kernel(format_args!("write region {region} of {}", self.bdf()))(e.into())),
        }
    }

    /// The offset in the device's file of a range of a region.
    fn file_offset(&self, region: u32, offset: u64, len: usize) -> Result<u64, Error> {
        let found = self.0.regions.get(region as usize).filter(|r| r.len > 0);
        let found = found.ok_or_else(|| self.region_error(region, RegionError::Missing))?;
        let end = offset.checked_add(len as u64).filter(|end| *end <= found.len);
        end.ok_or_else(|| self.region_error(region, RegionError::OutOfRange))?;
        Ok(found.offset + offset)
    }

    pub(crate) fn region_error(&self, region: u32, reason: RegionError) -> Error {
        Error::Region { bdf: self.bdf(), region, reason }
    }

    /// Enables or disables bus mastering: when disabled, the device does neither DMA nor message-signalled interrupts.
    /// Also makes the device respond at its BARs.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn set_bus_master(&self, on: bool) -> Result<(), Error> {
        let mut bytes = [0; 2];
        self.read_region(CONFIG, COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | COMMAND_MEMORY;
        let command = if on { command | COMMAND_MASTER } else { command & !COMMAND_MASTER };
        self.write_region(CONFIG, COMMAND, &command.to_le_bytes())
    }

    /// Resets the device: it stops, and its registers are as after power-on. Its configuration space and its interrupts
    /// are restored. Waits for accesses to mapped BARs; ends mappings of them by iommufd
    /// ([`PeerMapping::is_mapped`](crate::PeerMapping::is_mapped)).
    ///
    /// # Errors
    /// [`Error::NoReset`] when it cannot be reset without other devices; [`Error::Kernel`].
    pub fn reset(&self) -> Result<(), Error> {
        if self.0.flags & abi::VFIO_DEVICE_FLAGS_RESET == 0 {
            return Err(Error::NoReset(self.bdf()));
        }
        let reset = || sys::reset(self.0.fd.as_fd()).map_err(Error::kernel(format_args!("reset {}", self.bdf())));
        self.change(true, reset)
    }

    /// The number of interrupts of a kind; 0 where the device, or the kernel, has none.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn irq_count(&self, irq: Irq) -> Result<u32, Error> {
        match sys::irq_count(self.as_fd(), irq as u32) {
            Ok(count) => Ok(count),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(0),
            Err(e) => Err(Error::kernel(format_args!("query the interrupts of {}", self.bdf()))(e)),
        }
    }

    /// Has the kernel signal these eventfds on the interrupts of a kind, from number `first` on; `None` disables one.
    /// An empty list disables all of the kind. The kernel holds the eventfds; a VMM hands the same ones to KVM.
    ///
    /// # Errors
    /// [`Error::Kernel`], such as for more interrupts than [`PciDevice::irq_count`].
    pub fn set_irqs(&self, irq: Irq, first: u32, events: &[Option<BorrowedFd<'_>>]) -> Result<(), Error> {
        let result = sys::set_irqs(self.as_fd(), irq as u32, first, events);
        result.map_err(Error::kernel(format_args!("set the interrupts of {}", self.bdf())))
    }

    /// An eventfd that the kernel signals when somebody wants the device back: its driver is to be unbound, or it is
    /// to be removed, and that waits until this process has closed it. A later call replaces it.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn release_event(&self) -> Result<OwnedFd, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::kernel("create an eventfd")(e.into()))?;
        self.set_irqs(Irq::Request, 0, &[Some(event.as_fd())])?;
        Ok(event)
    }
}

/// The device's file, for requests of VFIO that this crate does not make. A reset, or one that disables a BAR, is for
/// [`PciDevice::reset`] and [`PciDevice::write_region`]: accesses to mapped BARs would end in SIGBUS.
impl AsFd for PciDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// A kind of interrupts, by its number in VFIO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[non_exhaustive]
pub enum Irq {
    /// The line of legacy PCI.
    Intx = abi::VFIO_PCI_INTX_IRQ_INDEX,
    /// Message-signalled interrupts.
    Msi = abi::VFIO_PCI_MSI_IRQ_INDEX,
    /// The extended kind, with a table in a BAR.
    Msix = abi::VFIO_PCI_MSIX_IRQ_INDEX,
    /// The kernel reports an error of the device.
    Error = abi::VFIO_PCI_ERR_IRQ_INDEX,
    /// The kernel wants the device back ([`PciDevice::release_event`]).
    Request = abi::VFIO_PCI_REQ_IRQ_INDEX,
}

impl PciRegion {
    fn absent(index: u32) -> Self {
        Self { index, len: 0, mappable: Vec::new(), offset: 0 }
    }
}

fn region(index: u32, info: sys::RegionInfo) -> PciRegion {
    let can_map = info.flags & abi::VFIO_REGION_INFO_FLAG_MMAP != 0;
    let areas = match info.sparse {
        Some(areas) => areas,
        None => vec![(0, info.size)],
    };
    let within = |(start, len): (u64, u64)| {
        let end = start.checked_add(len).filter(|end| *end <= info.size)?;
        (len > 0).then_some(start..end)
    };
    PciRegion {
        index,
        len: info.size,
        mappable: if can_map { areas.into_iter().filter_map(within).collect() } else { Vec::new() },
        offset: info.offset,
    }
}

dmalane_dma::debug_as!(PciDevice, |it| "PciDevice {{ bdf: {:?}, regions: {:?}, .. }}", it.bdf(), it.0.regions.len());

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn mappable_ranges_are_within_the_region() {
        let info = |flags, sparse| sys::RegionInfo { flags, size: 0x4000, offset: 1 << 40, sparse };
        assert_eq!(region(0, info(abi::VFIO_REGION_INFO_FLAG_MMAP | 3, None)).mappable.first(), Some(&(0..0x4000)));
        assert!(region(0, info(3, None)).mappable.is_empty());
        let areas = vec![(0, 0x1000), (0x2000, 0x2000), (0x3000, 0x2000), (u64::MAX, 2), (5, 0)];
        assert_eq!(region(0, info(abi::VFIO_REGION_INFO_FLAG_MMAP, Some(areas))).mappable, [0..0x1000, 0x2000..0x4000]);
    }

    const BAR: Range<u64> = 4096..8192;

    fn device(file: File) -> PciDevice {
        PciDevice::of_file(file.into(), BAR, None).unwrap()
    }

    fn reason<T>(result: Result<T, Error>) -> RegionError {
        match result {
            Err(Error::Region { reason, .. }) => reason,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("no error"),
        }
    }

    fn operation<T>(result: Result<T, Error>) -> String {
        match result {
            Err(Error::Kernel { what, .. }) => what,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("no error"),
        }
    }

    #[test]
    fn accesses_are_within_their_region() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[0x34, 0x12, 0xe8, 0x11, 2, 0], 0).unwrap();
        file.set_len(BAR.end - 96).unwrap();
        let device = device(file.try_clone().unwrap());
        assert_eq!(device.id().unwrap(), (0x1234, 0x11e8));
        for (region, offset, why) in [
            (3, 0, RegionError::Missing),
            (99, 0, RegionError::Missing),
            (CONFIG, 255, RegionError::OutOfRange),
            (CONFIG, u64::MAX, RegionError::OutOfRange),
            (0, 4096, RegionError::OutOfRange),
        ] {
            assert_eq!(reason(device.read_region(region, offset, &mut [0; 2])), why, "{region} {offset:#x}");
            assert_eq!(reason(device.write_region(region, offset, &[0; 2])), why, "{region} {offset:#x}");
        }
        device.write_region(0, 8, &[1, 2, 3]).unwrap();
        let mut bytes = [0; 4];
        device.read_region(0, 7, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 1, 2, 3]);
        // The file ends within the region.
        assert_eq!(reason(device.read_region(0, 3998, &mut bytes)), RegionError::ShortRead);
        let any = crate::BarAlignment::Any;
        #[allow(clippy::reversed_empty_ranges)]
        let backward = 2..1;
        assert_eq!(reason(device.map_bar(1, None, any)), RegionError::Missing);
        assert_eq!(reason(device.map_bar(0, Some(backward), any)), RegionError::OutOfRange);
        assert_eq!(reason(device.map_bar(0, Some(0..4097), any)), RegionError::OutOfRange);
        assert_eq!(reason(device.map_bar(CONFIG, None, any)), RegionError::NotMappable);
        let parts = PciDevice::of_file(file.into(), BAR, Some(vec![(0, 1024)])).unwrap();
        assert_eq!(reason(parts.map_bar(0, None, any)), RegionError::PartlyMappable);
        assert!(parts.map_bar(0, Some(0..1024), any).is_ok());
    }

    #[test]
    fn a_device_in_a_low_power_state_is_not_accessed() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BAR.end).unwrap();
        // Memory decoding on, and one capability, at 0x40: power management, whose state is in byte 4.
        for (at, byte) in [(4, 2), (6, 0x10), (0x34, 0x40), (0x40, 1)] {
            file.write_all_at(&[byte], at).unwrap();
        }
        let device = device(file);
        device.read_region(0, 0, &mut [0]).unwrap();
        device.write_region(CONFIG, 0x44, &[3]).unwrap();
        assert_eq!(reason(device.read_region(0, 0, &mut [0])), RegionError::Disabled);
        assert_eq!(reason(device.write_region(0, 0, &[0])), RegionError::Disabled);
        device.write_region(CONFIG, 0x44, &[0]).unwrap();
        device.read_region(0, 0, &mut [0]).unwrap();
    }

    #[test]
    fn what_a_device_refuses_is_an_error() {
        let ours: Bdf = "0000:01:00.0".parse().unwrap();
        let open = |path: &str| File::options().read(true).write(true).open(path).unwrap();
        // Reads as zeros, and takes nothing.
        let full = device(open("/dev/full"));
        assert_eq!(operation(full.write_region(CONFIG, 64, &[0])), "write region 7 of 0000:01:00.0");
        assert_eq!(operation(full.set_bus_master(true)), "write region 7 of 0000:01:00.0");
        // Takes everything, and has nothing to read: whether the device responds is not known.
        let null = device(open("/dev/null"));
        null.write_region(CONFIG, COMMAND, &[2, 0]).unwrap();
        assert_eq!(reason(null.read_region(0, 0, &mut [0])), RegionError::Disabled);
        assert_eq!(reason(null.set_bus_master(true)), RegionError::ShortRead);
        // Not for reading, so no device.
        let deaf = File::options().write(true).open("/dev/null").unwrap();
        assert_eq!(operation(PciDevice::of_file(deaf.into(), BAR, None)), "read region 7 of 0000:01:00.0");
        // Requests of VFIO, to a file of another kind.
        assert!(matches!(null.reset(), Err(Error::NoReset(bdf)) if bdf == ours));
        assert_eq!(operation(null.set_irqs(Irq::Msi, 0, &[])), "set the interrupts of 0000:01:00.0");
        assert_eq!(operation(null.release_event()), "set the interrupts of 0000:01:00.0");
        assert_eq!(operation(crate::VfioBus::new(null.clone())), "query the interrupts of 0000:01:00.0");
        assert!(format!("{null:?}").starts_with("PciDevice { bdf: 0000:01:00.0, regions: 8"));
        let null = open("/dev/null");
        let device = PciDevice::new(null.into(), ours, VfioContainer::new());
        assert_eq!(operation(device), "query 0000:01:00.0");
    }
}
