//! A VFIO device as the bus of its driver.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::Duration;

use crate::{BarAlignment, BarMap, Bdf, Error, Irq, PciDevice, RegionError};
use dmalane_addr::Access;
use dmalane_dma::{self as dma, BufferRef, InterruptEvents, Mapping, Mmio, Pinned, Registrar};

/// The number of BARs of a PCI function.
const BARS: u32 = 6;

/// The changes that a [`VfioBus`] makes to its device, and takes back when it is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BusOptions {
    /// Interrupts to enable at most; with 0 the device's are left alone, and [`Mmio::wait`] only waits.
    pub interrupts: u32,
    /// Let the device access memory. Otherwise that is for [`PciDevice::set_bus_master`], or a guest.
    pub bus_master: bool,
}

impl Default for BusOptions {
    /// One interrupt for each channel of a device, up to 32, and access to memory.
    fn default() -> Self {
        Self { interrupts: 32, bus_master: true }
    }
}

impl BusOptions {
    /// No interrupts, and no access to memory: only registers, and memory that is mapped.
    pub fn passive() -> Self {
        Self { interrupts: 0, bus_master: false }
    }
}

/// A device as its driver sees it: registers in mapped BARs, memory mapped through the kernel's IOMMU driver,
/// interrupts as eventfds.
///
/// The device may access mapped memory until the bus is dropped.
pub struct VfioBus {
    device: PciDevice,
    /// The mapped areas of each BAR.
    bars: [OnceLock<Vec<BarMap>>; BARS as usize],
    /// MSI-X or MSI.
    irq: Irq,
    interrupts: InterruptEvents,
    bus_master: bool,
}

impl VfioBus {
    /// Enables message-signalled interrupts (MSI-X if the device has them, else MSI) and lets the device access memory.
    ///
    /// # Errors
    /// [`Error::NoInterrupts`]; [`Error::Kernel`].
    pub fn new(device: PciDevice) -> Result<Self, Error> {
        Self::with_options(device, BusOptions::default())
    }

    /// As [`VfioBus::new`], with less than that.
    ///
    /// # Errors
    /// As there.
    pub fn with_options(device: PciDevice, options: BusOptions) -> Result<Self, Error> {
        let (mut irq, mut count) = (Irq::Msix, 0);
        if options.interrupts > 0 {
            count = device.irq_count(irq)?;
            if count == 0 {
                irq = Irq::Msi;
                count = device.irq_count(irq)?;
            }
            if count == 0 {
                return Err(Error::NoInterrupts(device.bdf()));
            }
        }
        let count = count.min(options.interrupts);
        let interrupts = InterruptEvents::new(count).map_err(Error::kernel("create an eventfd"))?;
        let events: Vec<_> = interrupts.events().iter().map(|event| Some(event.as_fd())).collect();
        if count > 0 {
            device.set_irqs(irq, 0, &events)?;
        }
        let this = Self { device, bars: Default::default(), irq, interrupts, bus_master: options.bus_master };
        if options.bus_master {
            this.device.set_bus_master(true)?;
        }
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &PciDevice {
        &self.device
    }

    /// The address of the PCI function.
    pub fn bdf(&self) -> Bdf {
        self.device.bdf()
    }

    /// The number of enabled interrupts, and whether they are MSI-X.
    pub fn interrupts(&self) -> (usize, bool) {
        (self.interrupts.events().len(), self.irq == Irq::Msix)
    }

    /// The areas of a BAR, mapped on first use. The rest is read and written through the kernel.
    fn areas(&self, bar: u8) -> &[BarMap] {
        let Some(slot) = self.bars.get(usize::from(bar)) else { return &[] };
        slot.get_or_init(|| {
            let region = self.device.regions().get(usize::from(bar));
            let areas = region.map_or(&[][..], |region| &region.mappable).iter();
            let map =
                |range: &Range<u64>| self.device.map_bar(bar.into(), Some(range.clone()), BarAlignment::LargestPage);
            areas.filter_map(|range| map(range).ok()).collect()
        })
    }

    /// The area that contains all of these bytes, and their offset in it.
    fn area(&self, bar: u8, offset: u64, len: u64) -> Option<(&BarMap, u64)> {
        let end = offset.checked_add(len)?;
        let has = |area: &&BarMap| area.range().start <= offset && end <= area.range().end;
        self.areas(bar).iter().find(has).map(|area| (area, offset - area.range().start))
    }

    /// Accesses a register in a mapped area, or else through the kernel, by words that are aligned to `align`.
    fn register<T>(
        &self,
        (bar, offset, bytes, align): (u8, u64, usize, u64),
        mapped: impl FnOnce(&BarMap, u64) -> Result<T, Error>,
        through_kernel: impl FnOnce(&PciDevice) -> Result<T, Error>,
    ) -> Result<T, dma::Error> {
        let no_register = dma::Error::NoRegister { bar, offset, bytes: bytes as u64 };
        if u32::from(bar) >= BARS || !offset.is_multiple_of(align) {
            return Err(no_register);
        }
        let result = match self.area(bar, offset, bytes as u64) {
            Some((area, at)) => mapped(area, at),
            None => through_kernel(&self.device),
        };
        result.map_err(|error| match error {
            Error::Region { reason: RegionError::Disabled, .. } => error.into(),
            _ => no_register,
        })
    }
}

/// Through the [`VfioContainer`](crate::VfioContainer) of the device.
impl Registrar for VfioBus {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, dma::Error> {
        self.device.container().pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        self.device.container().map_list(pinned, access)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.device.container().owns(mapping)
    }
}

impl Mmio for VfioBus {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, dma::Error> {
        let through_kernel = |device: &PciDevice| {
            let mut bytes = [0; 4];
            device.read_region(bar.into(), offset, &mut bytes).map(|()| u32::from_le_bytes(bytes))
        };
        self.register((bar, offset, 4, 4), BarMap::load_u32, through_kernel)
    }

    fn read_bytes(&self, bar: u8, offset: u64, into: &mut [u8]) -> Result<(), dma::Error> {
        let (len, into) = (into.len(), std::cell::Cell::new(into));
        let mapped = |area: &BarMap, at| area.read(at, into.take());
        let through_kernel = |device: &PciDevice| device.read_region(bar.into(), offset, into.take());
        self.register((bar, offset, len, 1), mapped, through_kernel)
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), dma::Error> {
        let mapped = |area: &BarMap, at| area.store_u32(at, value);
        let through_kernel = |device: &PciDevice| device.write_region(bar.into(), offset, &value.to_le_bytes());
        self.register((bar, offset, 4, 4), mapped, through_kernel)
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), dma::Error> {
        let mapped = |area: &BarMap, at| area.write(at, bytes);
        let through_kernel = |device: &PciDevice| device.write_region(bar.into(), offset, bytes);
        self.register((bar, offset, bytes.len(), 1), mapped, through_kernel)
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.interrupts.wait(timeout)
    }
}

impl Drop for VfioBus {
    fn drop(&mut self) {
        // DMA ends first, then interrupts. A device that was removed fails both calls and does neither.
        if self.bus_master {
            let _ = self.device.set_bus_master(false);
        }
        if !self.interrupts.events().is_empty() {
            let _ = self.device.set_irqs(self.irq, 0, &[]);
        }
    }
}

dmalane_dma::debug_as!(VfioBus, |it| "VfioBus {{ device: {:?}, interrupts: {:?}, .. }}", it.device, it.interrupts().0);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use dmalane_dma::{AnonHeap, Heap};

    use super::*;

    const PAGE: u64 = 64 << 10;

    /// A file in place of a device, the second page of whose BAR cannot be mapped.
    #[test]
    fn registers_in_mapped_areas_and_between_them() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * PAGE).unwrap();
        let areas = vec![(0, PAGE), (2 * PAGE, PAGE)];
        let device = PciDevice::of_file(file.try_clone().unwrap().into(), PAGE..4 * PAGE, Some(areas)).unwrap();
        device.set_bus_master(true).unwrap();
        let (irq, interrupts) = (Irq::Msix, InterruptEvents::new(2).unwrap());
        let bus = VfioBus { device: device.clone(), bars: Default::default(), irq, interrupts, bus_master: true };
        assert_eq!((bus.bdf(), bus.interrupts()), (device.bdf(), (2, true)));
        assert!(format!("{bus:?}").starts_with("VfioBus { device: PciDevice"));
        let on_file = |offset: u64, len: usize| {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, PAGE + offset).unwrap();
            bytes
        };
        for (offset, is_mapped) in
            [(0, true), (PAGE - 4, true), (PAGE, false), (2 * PAGE - 4, false), (3 * PAGE - 4, true)]
        {
            assert_eq!(bus.area(0, offset, 4).is_some(), is_mapped, "{offset:#x}");
            bus.write32(0, offset, 0x0403_0201).unwrap();
            assert_eq!(on_file(offset, 4), [1, 2, 3, 4], "{offset:#x}");
            assert_eq!(bus.read32(0, offset).unwrap(), 0x0403_0201);
            bus.write_bytes(0, offset + 1, &[7, 8]).unwrap();
            assert_eq!(on_file(offset, 4), [1, 7, 8, 4], "{offset:#x}");
            let mut bytes = [0; 3];
            bus.read_bytes(0, offset + 1, &mut bytes).unwrap();
            assert_eq!(bytes, [7, 8, 4]);
        }
        bus.write64(0, 8, 0x0807_0605_0403_0201).unwrap();
        assert_eq!(bus.read64(0, 8).unwrap(), 0x0807_0605_0403_0201);
        assert!(bus.read64(0, 3 * PAGE - 4).is_err() && bus.read64(6, 0).is_err());
        // Across the end of an area, so through the kernel.
        bus.write_bytes(0, PAGE - 3, &[1; 6]).unwrap();
        assert_eq!(on_file(PAGE - 4, 8), [1, 1, 1, 1, 1, 1, 1, 4]);
        for (bar, offset) in [(0, 3 * PAGE), (0, 2), (0, u64::MAX - 3), (1, 0), (6, 0)] {
            let refused = bus.write32(bar, offset, 0);
            assert!(matches!(refused, Err(dma::Error::NoRegister { bytes: 4, .. })), "{bar} {offset:#x}: {refused:?}");
            assert!(bus.read32(bar, offset).is_err());
        }
        assert!(!bus.wait(Duration::from_millis(1)));
        rustix::io::write(&bus.interrupts.events()[0], &1u64.to_ne_bytes()).unwrap();
        assert!(bus.wait(Duration::ZERO));
        device.write_region(7, 4, &[0, 0]).unwrap();
        assert!(matches!(bus.read32(0, 0), Err(dma::Error::Backend(_))), "disabled");
        bus.device().set_bus_master(true).unwrap();
        drop(bus);
        let mut command = [0; 2];
        file.read_exact_at(&mut command, 4).unwrap();
        assert_eq!(command, [2, 0], "no DMA behind the bus");
    }

    #[test]
    fn a_device_without_a_container_maps_nothing() {
        let file = tempfile::tempfile().unwrap();
        let device = PciDevice::of_file(file.into(), PAGE..2 * PAGE, None).unwrap();
        let bus = VfioBus::with_options(device, BusOptions::passive()).unwrap();
        assert!(!bus.wait(Duration::ZERO) && bus.interrupts().0 == 0);
        let buf = AnonHeap::new().allocate(PAGE as usize).unwrap().share();
        let pinned = bus.pin(&buf.reference()).unwrap();
        let refused = bus.map(pinned, Access::READ).unwrap_err();
        assert!(dma::error_chain(&refused).contains("before a device is opened"), "{refused}");
        assert!(bus.pin_range(&buf.reference(), 1..4096).is_err(), "not whole pages");
        assert!(buf.into_cpu().is_ok(), "no reference is left");
    }
}
