//! A BAR mapped by the page size that the kernel can map it with.
//!
//! The kernel maps device memory with one entry for a whole 2 MiB or 1 GiB where address and offset agree modulo that size, and
//! later steps over the mapping entry by entry: to map a BAR of 32 GiB for another device takes 8 million steps at 4 KiB and 32 at
//! 1 GiB (`vfio: Improve DMA mapping performance for huge pfnmaps`, Linux 6.15). But `mmap` returns an address that is aligned to a few pages only
//! (as measured on 7.2: 4 KiB to 64 KiB). So the address is chosen here: more is reserved than needed, and the BAR put where it is aligned.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use dmalane_addr::{PageSize, PageSizes};
use rustix::io::Errno;

use super::{Device, page_sizes, sys};
use crate::Error;

/// At which address a BAR is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// Aligned to the largest page of the running kernel that fits into the range.
    Best,
    /// Aligned to this and to no more, for measuring what that costs.
    Exactly(PageSize),
    /// Where the kernel likes.
    Anywhere,
}

/// A BAR, or part of one, mapped into this process: device memory, in the device's own state at any time. Keeps the device open.
pub struct BarMap {
    memory: sys::BarMemory,
    device: Device,
    region: u32,
    range: Range<u64>,
    /// The same piece for other drivers of the kernel, once it was asked for.
    dma_buf: OnceLock<OwnedFd>,
}

impl BarMap {
    pub(super) fn new(
        device: Device,
        region: u32,
        range: Range<u64>,
        file_offset: u64,
        placement: Placement,
    ) -> Result<Self, Error> {
        let len = range.end - range.start;
        let too_long = || device.region_error(region, "is longer than the address space");
        let size = usize::try_from(len).map_err(|_| too_long())?;
        let align = match placement {
            // A BAR lies at a multiple of its length, so offsets in it and physical addresses agree.
            Placement::Best => Some((best(page_sizes(), &range), range.start)),
            Placement::Exactly(page) => {
                let twice = PageSize::from_log2(page.log2() + 1).ok_or_else(too_long)?;
                Some((twice, range.start ^ page.bytes()))
            }
            Placement::Anywhere => None,
        };
        let memory = sys::BarMemory::map(device.fd(), file_offset + range.start, size, align);
        let memory = memory.map_err(Error::kernel(format!("cannot map region {region} of {}", device.bdf())))?;
        Ok(Self { memory, device, region, range, dma_buf: OnceLock::new() })
    }

    /// This piece of the BAR as a dma-buf, which other drivers of the kernel can import. The kernel takes it from all who have it when the device is
    /// reset or closed.
    ///
    /// # Errors
    /// [`Error::NoDmaBuf`] where the kernel makes none; [`Error::Region`] when the piece is not whole pages; [`Error::Kernel`].
    pub fn dma_buf(&self) -> Result<BorrowedFd<'_>, Error> {
        if let Some(fd) = self.dma_buf.get() {
            return Ok(fd.as_fd());
        }
        if !(self.range.start | self.range.end).is_multiple_of(sys::base_page()) {
            return Err(self.error("can be a dma-buf in whole pages only"));
        }
        let bdf = self.device.bdf();
        let made = sys::dma_buf(self.device.fd(), self.region, self.range.start, self.len());
        let made = made.map_err(|source| match Errno::from_io_error(&source) {
            // Not of this kernel; not of this driver of VFIO; not without peer to peer in the kernel.
            Some(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => Error::NoDmaBuf { bdf, source },
            _ => Error::Kernel { what: format!("cannot make region {} of {bdf} a dma-buf", self.region), source },
        })?;
        // Another thread may have been quicker; then this one is closed.
        Ok(self.dma_buf.get_or_init(|| made).as_fd())
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Which region.
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Which bytes of it.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Where it is in this process.
    pub fn address(&self) -> usize {
        self.memory.address()
    }

    /// The largest power of two modulo which address and place in the BAR agree: no page of the mapping can be larger.
    pub fn alignment(&self) -> PageSize {
        let apart = self.memory.address() as u64 ^ self.range.start;
        PageSize::from_log2(apart.trailing_zeros().min(63) as u8).unwrap_or(PageSize::SIZE_4K)
    }

    /// Reads a word; `None` when it does not lie within, or not at a multiple of its size.
    pub fn load_u32(&self, offset: u64) -> Option<u32> {
        self.memory.load(usize::try_from(offset).ok()?)
    }

    /// Reads a word of 64 bits, in one access.
    pub fn load_u64(&self, offset: u64) -> Option<u64> {
        self.memory.load(usize::try_from(offset).ok()?)
    }

    /// Writes a word, behind everything that this thread wrote before.
    pub fn store_u32(&self, offset: u64, value: u32) -> Option<()> {
        self.memory.store(usize::try_from(offset).ok()?, value)
    }

    /// Writes a word of 64 bits, in one access.
    pub fn store_u64(&self, offset: u64, value: u64) -> Option<()> {
        self.memory.store(usize::try_from(offset).ok()?, value)
    }

    /// Reads bytes, aligned words of 64 bits in one access each; `None`, and nothing read, when they do not lie within.
    #[must_use = "None says that nothing was read"]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Option<()> {
        let at = self.place(offset, into.len())?;
        let mut done = 0;
        while done < into.len() {
            let n = match into.len() - done {
                8.. if (at + done).is_multiple_of(8) => {
                    into[done..done + 8].copy_from_slice(&self.memory.load::<u64>(at + done)?.to_ne_bytes());
                    8
                }
                _ => {
                    into[done] = self.memory.load(at + done)?;
                    1
                }
            };
            done += n;
        }
        Some(())
    }

    /// Writes bytes, aligned words of 64 bits whole and in their order; `None`, and nothing written, when they do not lie within.
    #[must_use = "None says that nothing was written"]
    pub fn write(&self, offset: u64, from: &[u8]) -> Option<()> {
        let at = self.place(offset, from.len())?;
        let mut done = 0;
        while done < from.len() {
            let (at, rest) = (at + done, &from[done..]);
            done += match rest {
                [a, b, c, d, e, f, g, h, ..] if at.is_multiple_of(8) => {
                    self.memory.store(at, u64::from_ne_bytes([*a, *b, *c, *d, *e, *f, *g, *h]))?;
                    8
                }
                [a, b, c, d, ..] if at.is_multiple_of(4) => {
                    self.memory.store(at, u32::from_ne_bytes([*a, *b, *c, *d]))?;
                    4
                }
                _ => {
                    self.memory.store(at, rest[0])?;
                    1
                }
            };
        }
        Some(())
    }

    fn place(&self, offset: u64, len: usize) -> Option<usize> {
        let at = usize::try_from(offset).ok()?;
        at.checked_add(len).filter(|end| *end <= self.memory.len())?;
        Some(at)
    }

    pub(super) fn error(&self, what: &'static str) -> Error {
        self.device.region_error(self.region, what)
    }
}

/// The largest page of which at least one lies whole within the range.
fn best(sizes: PageSizes, range: &Range<u64>) -> PageSize {
    let holds_one = |page: &PageSize| {
        let first = page.round_up(range.start);
        first.and_then(|first| first.checked_add(page.bytes())).is_some_and(|end| end <= range.end)
    };
    sizes.iter().rev().find(holds_one).or(sizes.smallest()).unwrap_or(PageSize::SIZE_4K)
}

impl std::fmt::Debug for BarMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BarMap({} region {} {:#x?} at {:#x})", self.device.bdf(), self.region, self.range, self.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_page_that_lies_within() {
        let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
        let gib = 1 << 30;
        for (range, page) in [
            (0..32 * gib, PageSize::SIZE_1G),
            (0..gib, PageSize::SIZE_1G),
            (0..gib - 1, PageSize::SIZE_2M),
            (4096..gib + 4096, PageSize::SIZE_2M),
            (4096..2 * gib, PageSize::SIZE_1G),
            (0..1 << 20, PageSize::SIZE_4K),
            (0..256, PageSize::SIZE_4K),
            (u64::MAX - 4095..u64::MAX, PageSize::SIZE_4K),
        ] {
            assert_eq!(best(sizes, &range), page, "{range:#x?}");
        }
        assert_eq!(best(PageSizes::from_bits(1 << 14 | 1 << 25), &(0..64 << 20)).log2(), 25, "16 KiB pages");
    }
}
