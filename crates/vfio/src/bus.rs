//! A VFIO device as the bus of its driver.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::time::Duration;

use dmalane_addr::Access;
use dmalane_dma::{self as dma, BufferRef, InterruptEvents, Mapping, Mmio, Pinned, Registrar};
use vfio_bindings::bindings::vfio as abi;

use crate::{BarAlignment, BarMap, Bdf, Error, PciDevice, RegionError, VfioOperation};

/// The number of BARs of a PCI function.
const BARS: u32 = 6;
/// Maximum number of interrupts: one for each channel of a device.
const VECTORS: u32 = 32;

/// A device as its driver sees it: registers in mapped BARs, memory mapped through the kernel's IOMMU driver,
/// interrupts as eventfds.
///
/// The device may access mapped memory until the bus is dropped.
pub struct VfioBus {
    device: PciDevice,
    /// The mapped areas of each BAR.
    bars: [OnceLock<Vec<BarMap>>; BARS as usize],
    /// The interrupts' index in VFIO: MSI-X or MSI.
    kind: u32,
    interrupts: InterruptEvents,
}

impl VfioBus {
    /// Enables message-signalled interrupts (MSI-X if the device has them, else MSI) and lets the device access memory.
    ///
    /// # Errors
    /// [`Error::NoInterrupts`]; [`Error::Kernel`].
    pub fn new(device: PciDevice) -> Result<Self, Error> {
        let mut kind = abi::VFIO_PCI_MSIX_IRQ_INDEX;
        let mut count = device.interrupt_count(kind)?;
        if count == 0 {
            kind = abi::VFIO_PCI_MSI_IRQ_INDEX;
            count = device.interrupt_count(kind)?;
        }
        if count == 0 {
            return Err(Error::NoInterrupts(device.bdf()));
        }
        let interrupts =
            InterruptEvents::new(count.min(VECTORS)).map_err(Error::kernel(VfioOperation::CreateEventFd))?;
        device.set_interrupts(kind, interrupts.events())?;
        let this = Self { device, bars: Default::default(), kind, interrupts };
        this.device.set_bus_master(true)?;
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
        (self.interrupts.events().len(), self.kind == abi::VFIO_PCI_MSIX_IRQ_INDEX)
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

impl Registrar for VfioBus {
    /// Only records the buffer: the kernel pins memory when it is mapped.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, dma::Error> {
        let page = self.device.container().page_sizes().smallest().map_or(4096, |page| page.bytes() as usize);
        buffer.check_pages(&range, page)?;
        Ok(Pinned::new(buffer.clone(), range, None, self.device.container().0.clone()))
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        self.device.container().map_list(pinned, access)
    }

    /// The bytes that are mapped plus those that may still be locked; no limit for a process with `CAP_IPC_LOCK`.
    fn pin_limit(&self) -> Option<u64> {
        const CAP_IPC_LOCK: u32 = 14;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("CapEff:")?.trim(), 16).ok());
        match effective.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1) {
            true => None,
            false => dma::memlock_left().map(|left| left.saturating_add(self.device.container().mapped_bytes())),
        }
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.device.container().0)
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

    /// Does not reset eventfds that [`Mmio::event`] has lent: their borrowers read them.
    fn wait(&self, timeout: Duration) -> bool {
        self.interrupts.wait(timeout)
    }

    /// The eventfd of the channel's interrupt; channels past the last interrupt share it.
    fn event(&self, channel: usize) -> Option<BorrowedFd<'_>> {
        self.interrupts.lend(channel)
    }
}

impl Drop for VfioBus {
    fn drop(&mut self) {
        // DMA ends first, then interrupts. A device that was removed fails both calls and does neither.
        let _ = self.device.set_bus_master(false);
        let _ = self.device.set_interrupts(self.kind, &[]);
    }
}

impl std::fmt::Debug for VfioBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioBus")
            .field("device", &self.device)
            .field("interrupts", &self.interrupts().0)
            .finish_non_exhaustive()
    }
}
