//! A device that VFIO gave us: its regions, its configuration space, its reset.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use vfio_bindings::bindings::vfio as abi;

use super::{BarMap, Container, Placement, sys};
use crate::interrupts::event;
use crate::{Bdf, Error};

/// Where the command register of PCI is, and its bits: the device answers at its BARs; it may access memory.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;

/// An open device. Clones are handles to the same one; the last that is dropped gives it back to the kernel, which resets it.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

pub(super) struct Inner {
    fd: OwnedFd,
    bdf: Bdf,
    flags: u32,
    regions: Vec<Region>,
    /// Counts the kernel's requests to have the device back.
    wanted: OnceLock<[OwnedFd; 1]>,
    /// Kept as long as the device: its address space, and its group where it has one.
    container: Container,
}

/// A region of a device: 0 to 5 are BARs, 6 is the expansion ROM, 7 the configuration space.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its number.
    pub index: u32,
    /// Bytes; 0 for one that the device does not have.
    pub len: u64,
    /// It may be read.
    pub readable: bool,
    /// It may be written.
    pub writable: bool,
    /// What of it can be mapped, in bytes from its start. The rest goes through the kernel.
    pub mappable: Vec<Range<u64>>,
    /// Where it lies in the device's file.
    offset: u64,
}

impl Device {
    pub(super) fn new(fd: OwnedFd, bdf: Bdf, container: Container) -> Result<Self, Error> {
        let asked = |what: &str| Error::kernel(format!("cannot ask {bdf} about {what}"));
        let (flags, regions, kinds) = sys::device_info(fd.as_fd()).map_err(asked("itself"))?;
        let regions = (0..regions.min(64)).map(|index| match sys::region_info(fd.as_fd(), index) {
            Ok(info) => Ok(region(index, info)),
            // The VGA region, of a device that has none.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(Region::absent(index)),
            Err(e) => Err(asked("its regions")(e)),
        });
        let regions = regions.collect::<Result<_, _>>()?;
        let this = Self(Arc::new(Inner { fd, bdf, flags, regions, wanted: OnceLock::new(), container }));
        if kinds > abi::VFIO_PCI_REQ_IRQ_INDEX && this.interrupts_of(abi::VFIO_PCI_REQ_IRQ_INDEX)? == 1 {
            let events = [event().map_err(Error::kernel("cannot make an eventfd"))?];
            this.set_interrupts(abi::VFIO_PCI_REQ_IRQ_INDEX, &events)?;
            let _ = this.0.wanted.set(events);
        }
        Ok(this)
    }

    /// A further handle to a device that is open.
    pub(super) fn again(inner: Arc<Inner>) -> Self {
        Self(inner)
    }

    pub(super) fn weak(&self) -> Weak<Inner> {
        Arc::downgrade(&self.0)
    }

    /// Its name.
    pub fn bdf(&self) -> Bdf {
        self.0.bdf
    }

    /// The address space that it is in.
    pub fn container(&self) -> &Container {
        &self.0.container
    }

    /// Its regions, by number.
    pub fn regions(&self) -> &[Region] {
        &self.0.regions
    }

    /// Vendor and device number.
    ///
    /// # Errors
    /// [`Error::Region`], [`Error::Kernel`].
    pub fn id(&self) -> Result<(u16, u16), Error> {
        let mut bytes = [0; 4];
        self.read_region(abi::VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut bytes)?;
        Ok((u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]])))
    }

    /// Reads a region through the kernel, which any region can be.
    ///
    /// # Errors
    /// [`Error::Region`] when the bytes do not lie within; [`Error::Kernel`].
    pub fn read_region(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let at = self.place(region, offset, into.len())?;
        let whole = into.len();
        match rustix::io::pread(&self.0.fd, into, at) {
            Ok(n) if n == whole => Ok(()),
            Ok(_) => Err(self.region_error(region, "was read only in part")),
            Err(e) => Err(Error::kernel(format!("cannot read region {region} of {}", self.bdf()))(e.into())),
        }
    }

    /// Writes a region through the kernel.
    ///
    /// # Errors
    /// As [`Device::read_region`].
    pub fn write_region(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), Error> {
        let at = self.place(region, offset, from.len())?;
        match rustix::io::pwrite(&self.0.fd, from, at) {
            Ok(n) if n == from.len() => Ok(()),
            Ok(_) => Err(self.region_error(region, "was written only in part")),
            Err(e) => Err(Error::kernel(format!("cannot write region {region} of {}", self.bdf()))(e.into())),
        }
    }

    /// Where bytes of a region are in the device's file.
    fn place(&self, region: u32, offset: u64, len: usize) -> Result<u64, Error> {
        let found = self.0.regions.get(region as usize).filter(|r| r.len > 0);
        let found = found.ok_or_else(|| self.region_error(region, "does not exist"))?;
        let end = offset.checked_add(len as u64).filter(|end| *end <= found.len);
        end.ok_or_else(|| self.region_error(region, "is not that long"))?;
        Ok(found.offset + offset)
    }

    pub(super) fn region_error(&self, region: u32, what: &'static str) -> Error {
        Error::Region { bdf: self.bdf(), region, what }
    }

    /// Lets the device access memory, or takes that away: without, it sends neither DMA nor message-signalled interrupts. Also makes
    /// it answer at its BARs.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn set_bus_master(&self, on: bool) -> Result<(), Error> {
        let mut bytes = [0; 2];
        self.read_region(abi::VFIO_PCI_CONFIG_REGION_INDEX, COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | COMMAND_MEMORY;
        let command = if on { command | COMMAND_MASTER } else { command & !COMMAND_MASTER };
        self.write_region(abi::VFIO_PCI_CONFIG_REGION_INDEX, COMMAND, &command.to_le_bytes())
    }

    /// Resets the device. What it was doing is over; its registers are as after power-on, its configuration space and its interrupts as
    /// they were.
    ///
    /// # Errors
    /// [`Error::NoReset`] when it cannot be reset without others; [`Error::Kernel`].
    pub fn reset(&self) -> Result<(), Error> {
        if self.0.flags & abi::VFIO_DEVICE_FLAGS_RESET == 0 {
            return Err(Error::NoReset(self.bdf()));
        }
        sys::reset(self.0.fd.as_fd()).map_err(Error::kernel(format!("cannot reset {}", self.bdf())))
    }

    /// Maps a BAR at an address that lets the kernel use large pages (see [`Placement`]). `None`: the whole BAR, where all of it can
    /// be mapped.
    ///
    /// # Errors
    /// [`Error::Region`] when there is no such BAR, or not all of the range can be mapped; [`Error::Kernel`].
    pub fn map_bar(&self, region: u32, range: Option<Range<u64>>, placement: Placement) -> Result<BarMap, Error> {
        let found = self.0.regions.get(region as usize).filter(|r| r.len > 0);
        let found = found.ok_or_else(|| self.region_error(region, "does not exist"))?;
        let range = range.unwrap_or(0..found.len);
        if range.is_empty() || !found.mappable.iter().any(|r| r.start <= range.start && range.end <= r.end) {
            return Err(self.region_error(
                region,
                match found.mappable.is_empty() {
                    true => "cannot be mapped, only read and written through the kernel",
                    false => "cannot be mapped as a whole (the interrupt table lies in it): name a range",
                },
            ));
        }
        BarMap::new(self.clone(), region, range, found.offset, placement)
    }

    /// Waits until the kernel wants the device back, because somebody unbinds it or takes it out of the machine; who does that waits
    /// until the device is dropped. True when it does.
    pub fn wanted_back(&self, timeout: Duration) -> bool {
        let Some([event]) = self.0.wanted.get() else {
            std::thread::sleep(timeout);
            return false;
        };
        let mut poll = [PollFd::new(event, PollFlags::IN)];
        let timeout = timeout.try_into().ok();
        matches!(rustix::event::poll(&mut poll, timeout.as_ref()), Ok(1..))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }

    pub(super) fn interrupts_of(&self, kind: u32) -> Result<u32, Error> {
        match sys::irq_count(self.0.fd.as_fd(), kind) {
            Ok(count) => Ok(count),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(0),
            Err(e) => Err(Error::kernel(format!("cannot ask {} about its interrupts", self.bdf()))(e)),
        }
    }

    pub(super) fn set_interrupts(&self, kind: u32, events: &[OwnedFd]) -> Result<(), Error> {
        let asked = Error::kernel(format!("cannot set the interrupts of {}", self.bdf()));
        sys::set_irqs(self.0.fd.as_fd(), kind, events).map_err(asked)
    }
}

impl Region {
    fn absent(index: u32) -> Self {
        Self { index, len: 0, readable: false, writable: false, mappable: Vec::new(), offset: 0 }
    }
}

fn region(index: u32, info: sys::RegionInfo) -> Region {
    let can_map = info.flags & abi::VFIO_REGION_INFO_FLAG_MMAP != 0;
    let areas = match info.sparse {
        Some(areas) => areas,
        None => vec![(0, info.size)],
    };
    let within = |(start, len): (u64, u64)| {
        let end = start.checked_add(len).filter(|end| *end <= info.size)?;
        (len > 0).then_some(start..end)
    };
    Region {
        index,
        len: info.size,
        readable: info.flags & abi::VFIO_REGION_INFO_FLAG_READ != 0,
        writable: info.flags & abi::VFIO_REGION_INFO_FLAG_WRITE != 0,
        mappable: if can_map { areas.into_iter().filter_map(within).collect() } else { Vec::new() },
        offset: info.offset,
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("bdf", &self.bdf())
            .field("regions", &self.0.regions.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_maps_what_the_kernel_says() {
        let info = |flags, sparse| sys::RegionInfo { flags, size: 0x4000, offset: 1 << 40, sparse };
        assert_eq!(region(0, info(abi::VFIO_REGION_INFO_FLAG_MMAP | 3, None)).mappable.first(), Some(&(0..0x4000)));
        assert!(region(0, info(3, None)).mappable.is_empty());
        let areas = vec![(0, 0x1000), (0x2000, 0x2000), (0x3000, 0x2000), (u64::MAX, 2), (5, 0)];
        assert_eq!(region(0, info(abi::VFIO_REGION_INFO_FLAG_MMAP, Some(areas))).mappable, [0..0x1000, 0x2000..0x4000]);
    }
}
