//! `ram:SIZE`: plain memory as a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_dma::{CopyHint, Error, Registrar, SharedBuf, VolatileSlice};
use dmalane_queue::{CacheHint, Capabilities, DeviceAddr, DeviceQueue, Direction, Limits, OpError, Operation, Work};

use crate::{AddressSpace, Counters, Device, DeviceInfo, FlatSpace, NoIommu, PolledQueue, Region};

/// Plain memory: one region, no MMU, one queue that copies on the caller's thread.
pub struct RamDevice {
    region: [Region; 1],
    ram: Arc<Ram>,
    registrar: NoIommu,
    queue: Option<Box<DeviceQueue>>,
    space: FlatSpace,
}

/// The memory, which becomes present as it is used.
struct Ram {
    buf: SharedBuf,
    /// Which blocks are present.
    present: Vec<AtomicBool>,
}

/// Bytes that become present at a time.
const BLOCK: usize = 2 << 20;

impl RamDevice {
    /// A device with `bytes` bytes of memory, rounded up to 4 KiB; they read as zeroes.
    ///
    /// # Errors
    /// [`Error`] when the system does not have them, or for 0.
    pub fn new(bytes: u64) -> Result<Self, Error> {
        let len = PageSize::SIZE_4K.round_up(bytes).unwrap_or(u64::MAX);
        let buf = SharedBuf::sparse_private(usize::try_from(len).unwrap_or(usize::MAX))?;
        let span = Span::new(CardAddr::new(0), len).ok_or(Error::BadLength(0))?;
        let present = (0..buf.len().div_ceil(BLOCK)).map(|_| AtomicBool::new(false)).collect();
        let ram = Arc::new(Ram { present, buf });
        let limits = Limits { capacity: 64, max_len: 1 << 30, max_parts: usize::MAX };
        let capabilities = Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::WITHIN;
        let queue = PolledQueue::new(capabilities, limits, {
            let ram = ram.clone();
            move |operation| ram.execute(operation)
        });
        let (registrar, space) = (NoIommu::new(), FlatSpace::new());
        Ok(Self { region: [Region::new("ram", span)], ram, registrar, queue: Some(Box::new(queue)), space })
    }
}

impl Device for RamDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { name: "plain memory".to_owned(), polled: true, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.region
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.registrar.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        self.queue.take().into_iter().collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut self.space
    }

    fn counters(&self) -> Counters {
        let blocks = self.ram.present.iter().filter(|present| present.load(Ordering::Relaxed)).count();
        Counters { touched: Some((blocks * BLOCK).min(self.ram.buf.len()) as u64), ..Counters::default() }
    }
}

impl Ram {
    fn execute(&self, operation: &Operation) -> Result<(), OpError> {
        let hint = if operation.cache == CacheHint::Cold { CopyHint::Stream } else { CopyHint::Keep };
        match &operation.work {
            Work::Copy { direction, host, at } => {
                let (here, there) = (host.slice.as_volatile_slice(), self.view(*at, host.slice.len() as u64)?);
                match direction {
                    Direction::FromHost => there.copy_from(here, hint),
                    Direction::ToHost => here.copy_from(there, hint),
                }
            }
            Work::Within { from, to, len } => {
                self.view(*to, *len)?.copy_from(self.view(*from, *len)?, hint);
            }
            _ => return Err(OpError::Device { status: u32::MAX }),
        }
        Ok(())
    }

    /// The bytes of a range, present.
    fn view(&self, at: DeviceAddr, len: u64) -> Result<VolatileSlice<'_>, OpError> {
        let card = match at {
            DeviceAddr::Card(card) => card,
            DeviceAddr::Va(va) => return Err(OpError::MmuFault(va)),
        };
        let (Ok(first), Ok(len)) = (usize::try_from(card.bits()), usize::try_from(len)) else {
            return Err(OpError::NoCardMemory(card));
        };
        let view = self.buf.as_volatile_slice().sub(first, len).ok_or(OpError::NoCardMemory(card))?;
        for block in first / BLOCK..(first + len).div_ceil(BLOCK) {
            let present = &self.present[block];
            // Only the queue sets it, on the thread that polls.
            if !present.load(Ordering::Relaxed) {
                let bytes = BLOCK.min(self.buf.len() - block * BLOCK);
                self.buf.populate(block * BLOCK, bytes).map_err(|_| OpError::NoCardMemory(card))?;
                present.store(true, Ordering::Relaxed);
            }
        }
        Ok(view)
    }
}

dmalane_dma::debug_as!(RamDevice, |it| "RamDevice({})", it.region[0].span);

#[cfg(all(test, feature = "conformance"))]
mod tests {
    use super::*;

    #[test]
    fn conforms() {
        crate::conformance::suite(|| Box::new(RamDevice::new(10 << 20).unwrap()));
    }

    #[test]
    fn sizes_that_cannot_be_had_are_refused() {
        assert_eq!(RamDevice::new(1).unwrap().regions()[0].span.len(), 4096);
        for bytes in [0, u64::MAX, 1 << 63] {
            assert!(RamDevice::new(bytes).is_err(), "{bytes}");
        }
    }
}
