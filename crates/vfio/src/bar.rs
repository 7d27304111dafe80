//! A BAR mapped into this process, aligned so that the kernel can use large pages.
//!
//! The kernel maps device memory with one entry for a whole 2 MiB or 1 GiB where address and offset agree modulo that
//! size, and later walks the mapping entry by entry: mapping a BAR of 32 GiB for another device takes 8 million steps
//! at 4 KiB and 32 at 1 GiB (`vfio: Improve DMA mapping performance for huge pfnmaps`, Linux 6.15). But `mmap` returns
//! an address that is aligned to a few pages only (measured on 7.2: 4 KiB to 64 KiB). So this module chooses the
//! address: it reserves more than needed and maps the BAR at an aligned address inside.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use dmalane_addr::{PageSize, PageSizes};
use rustix::io::Errno;

use crate::error::RegionError;
use crate::{Error, PciDevice, page_sizes, sys};

/// The alignment of a mapped BAR's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BarAlignment {
    /// Aligned to the largest page of the running kernel that fits into the range.
    LargestPage,
    /// Aligned to exactly this page size and no more, to measure its cost.
    Exactly(PageSize),
    /// Wherever the kernel maps it.
    Any,
}

/// A BAR, or part of one, mapped into this process. The device may change it at any time. Keeps the device open.
pub struct BarMap {
    memory: sys::BarMemory,
    device: PciDevice,
    region: u32,
    range: Range<u64>,
    /// The same range as a dma-buf, created on first use.
    dma_buf: OnceLock<OwnedFd>,
}

impl PciDevice {
    /// Maps a BAR into this process. With [`BarAlignment::LargestPage`] the kernel can use large pages. `range: None`
    /// maps the whole BAR.
    ///
    /// # Errors
    /// [`Error::Region`] when the BAR does not exist, or not all of the range can be mapped; [`Error::Kernel`].
    pub fn map_bar(&self, region: u32, range: Option<Range<u64>>, alignment: BarAlignment) -> Result<BarMap, Error> {
        let found = self.regions().get(region as usize).filter(|r| r.len > 0);
        let found = found.ok_or_else(|| self.region_error(region, RegionError::Missing))?;
        let range = range.unwrap_or(0..found.len);
        let reason = match () {
            () if range.is_empty() || range.end > found.len => RegionError::OutOfRange,
            () if found.mappable.iter().any(|r| r.start <= range.start && range.end <= r.end) => {
                return BarMap::new(self.clone(), region, range, found.offset, alignment);
            }
            () if found.mappable.is_empty() => RegionError::NotMappable,
            () => RegionError::PartlyMappable,
        };
        Err(self.region_error(region, reason))
    }
}

impl BarMap {
    pub(crate) fn new(
        device: PciDevice,
        region: u32,
        range: Range<u64>,
        file_offset: u64,
        alignment: BarAlignment,
    ) -> Result<Self, Error> {
        let len = range.end - range.start;
        let too_long = || device.region_error(region, RegionError::TooLong);
        let size = usize::try_from(len).map_err(|_| too_long())?;
        let align = match alignment {
            // The physical address of a BAR is a multiple of its length, so offsets are congruent to physical
            // addresses.
            BarAlignment::LargestPage => Some((largest_page(page_sizes(), &range), range.start)),
            BarAlignment::Exactly(page) => {
                let twice = PageSize::from_log2(page.log2() + 1).ok_or_else(too_long)?;
                Some((twice, range.start ^ page.bytes()))
            }
            BarAlignment::Any => None,
        };
        if let BarAlignment::Exactly(page) = alignment
            && page.bytes() < sys::base_page()
        {
            return Err(device.region_error(region, RegionError::AlignmentBelowPage));
        }
        let memory = sys::BarMemory::map(device.as_fd(), file_offset + range.start, size, align);
        let memory = memory.map_err(Error::kernel(format_args!("map region {region} of {}", device.bdf())))?;
        Ok(Self { memory, device, region, range, dma_buf: OnceLock::new() })
    }

    /// Exports the range as a dma-buf, which other kernel drivers can import. The kernel revokes it when the device is
    /// reset or closed.
    ///
    /// # Errors
    /// [`Error::NoDmaBuf`] where the kernel exports none; [`Error::Region`] when the range is not whole pages;
    /// [`Error::Kernel`].
    pub fn dma_buf(&self) -> Result<BorrowedFd<'_>, Error> {
        if let Some(fd) = self.dma_buf.get() {
            return Ok(fd.as_fd());
        }
        if !(self.range.start | self.range.end).is_multiple_of(sys::base_page()) {
            return Err(self.error(RegionError::NotWholePages));
        }
        let bdf = self.device.bdf();
        let made = sys::dma_buf(self.device.as_fd(), self.region, self.range.start, self.len());
        let made = made.map_err(|source| match Errno::from_io_error(&source) {
            // Not supported by this kernel, by this VFIO driver, or without peer-to-peer DMA in the kernel.
            Some(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => Error::NoDmaBuf { bdf, source },
            _ => Error::kernel(format_args!("export region {} of {bdf} as a dma-buf", self.region))(source),
        })?;
        // If another thread was faster, this one is closed.
        Ok(self.dma_buf.get_or_init(|| made).as_fd())
    }

    /// The device.
    pub fn device(&self) -> &PciDevice {
        &self.device
    }

    /// The number of the region.
    pub fn region(&self) -> u32 {
        self.region
    }

    /// The mapped range of the region.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Address in this process. The kernel answers an access to it with SIGBUS while the device does not respond; the
    /// methods of this type return an error then.
    pub fn address(&self) -> usize {
        self.memory.address()
    }

    /// The largest power of two modulo which the address and the offset in the BAR are congruent: the upper limit of
    /// the page size.
    pub fn alignment(&self) -> PageSize {
        let difference = self.memory.address() as u64 ^ self.range.start;
        PageSize::from_log2(difference.trailing_zeros().min(63) as u8).unwrap_or(PageSize::SIZE_4K)
    }

    /// Reads a word of 32 bits in one access.
    ///
    /// # Errors
    /// [`Error::Region`] when the word is out of range or unaligned, or the device does not respond: its memory is
    /// disabled, or it is in a low-power state. A device that was removed reads as ones.
    pub fn load_u32(&self, offset: u64) -> Result<u32, Error> {
        self.access(RegionError::NoWord, offset, |memory, at| memory.read(|m| m.load_u32(at)))
    }

    /// Reads a word of 64 bits in one access.
    ///
    /// # Errors
    /// As [`BarMap::load_u32`].
    pub fn load_u64(&self, offset: u64) -> Result<u64, Error> {
        self.access(RegionError::NoWord, offset, |memory, at| memory.read(|m| m.load_u64(at)))
    }

    /// Writes a word of 32 bits in one access, after all earlier writes of this thread.
    ///
    /// # Errors
    /// As [`BarMap::load_u32`].
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<(), Error> {
        self.access(RegionError::NoWord, offset, |memory, at| memory.write(|m| m.store_u32(at, value)))
    }

    /// Writes a word of 64 bits in one access, after all earlier writes of this thread.
    ///
    /// # Errors
    /// As [`BarMap::load_u32`].
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<(), Error> {
        self.access(RegionError::NoWord, offset, |memory, at| memory.write(|m| m.store_u64(at, value)))
    }

    /// Reads bytes, in the widest aligned accesses of 8, 4, 2 and 1 bytes: an aligned register in one.
    ///
    /// # Errors
    /// [`Error::Region`], and nothing is read, when the range is out of bounds or the device does not respond.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.access(RegionError::OutOfRange, offset, |memory, at| memory.read(|m| m.read_words(at, into)))
    }

    /// Writes bytes in order, in accesses as [`BarMap::read`].
    ///
    /// # Errors
    /// [`Error::Region`], and nothing is written, when the range is out of bounds or the device does not respond.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.access(RegionError::OutOfRange, offset, |memory, at| memory.write(|m| m.write_words(at, from)))
    }

    /// Accesses the memory at an offset while the device responds. `None` is an error with this reason.
    fn access<T>(
        &self,
        reason: RegionError,
        offset: u64,
        access: impl FnOnce(&sys::BarMemory, usize) -> Option<T>,
    ) -> Result<T, Error> {
        let _gate = self.device.responding(self.region)?;
        let at = usize::try_from(offset).ok();
        at.and_then(|at| access(&self.memory, at)).ok_or_else(|| self.error(reason))
    }

    pub(crate) fn error(&self, reason: RegionError) -> Error {
        self.device.region_error(self.region, reason)
    }
}

/// The largest page size of which at least one whole page is within the range.
fn largest_page(sizes: PageSizes, range: &Range<u64>) -> PageSize {
    let within = sizes.largest_within(range.start, range.end - range.start);
    within.or(sizes.smallest()).unwrap_or(PageSize::SIZE_4K)
}

impl std::fmt::Debug for BarMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BarMap({} region {} {:#x?} at {:#x})", self.device.bdf(), self.region, self.range, self.address())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;

    /// While the BAR is disabled its file ends before it, so that an access ends this process, as with the kernel's.
    #[test]
    fn a_disabled_bar_is_an_error() {
        const START: u64 = 64 << 10;
        const LEN: u64 = 64 << 10;
        let file = tempfile::tempfile().unwrap();
        file.set_len(START + LEN).unwrap();
        let device = PciDevice::of_file(file.try_clone().unwrap().into(), START..START + LEN, None).unwrap();
        let bar = device.map_bar(0, None, BarAlignment::Any).unwrap();
        let is_disabled =
            |result: &Result<(), Error>| matches!(result, Err(Error::Region { reason: RegionError::Disabled, .. }));
        assert!(is_disabled(&bar.load_u32(0).map(drop)), "the register is 0 at first");
        device.set_bus_master(true).unwrap();
        bar.store_u32(0, 7).unwrap();
        assert_eq!(bar.load_u32(0).unwrap(), 7);
        assert!(matches!(bar.load_u32(2), Err(Error::Region { reason: RegionError::NoWord, .. })));
        assert!(matches!(bar.read(LEN - 1, &mut [0; 2]), Err(Error::Region { reason: RegionError::OutOfRange, .. })));

        let disable = || {
            device.write_region(7, 4, &[0, 0]).unwrap();
            file.set_len(START).unwrap();
        };
        let enable = || {
            file.set_len(START + LEN).unwrap();
            device.write_region(7, 4, &[2]).unwrap();
        };
        disable();
        assert!(is_disabled(&bar.load_u32(0).map(drop)) && is_disabled(&bar.load_u64(0).map(drop)));
        assert!(is_disabled(&bar.store_u32(0, 1)) && is_disabled(&bar.store_u64(0, 1)));
        assert!(is_disabled(&bar.read(0, &mut [0; 9])) && is_disabled(&bar.write(0, &[0; 9])));
        assert!(
            is_disabled(&device.read_region(0, 0, &mut [0; 4])) && is_disabled(&device.write_region(0, 0, &[0; 4]))
        );
        enable();
        assert_eq!(bar.load_u32(0).unwrap(), 0);

        // One processor may run the two threads in turn for whole seconds, so each waits for the other now and then.
        let (stop, answered, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            let reader = s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let count = match bar.read(0, &mut [0; 256]) {
                        Ok(()) => &answered,
                        result if is_disabled(&result) => &refused,
                        Err(e) => panic!("{e}"),
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            let another = |count: &AtomicU64| {
                let before = count.load(Ordering::Relaxed);
                while count.load(Ordering::Relaxed) == before && !reader.is_finished() {
                    std::thread::yield_now();
                }
            };
            for round in 0..2000 {
                disable();
                if round % 100 == 0 {
                    another(&refused);
                }
                enable();
                if round % 100 == 0 {
                    another(&answered);
                }
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap();
        });
    }

    #[test]
    fn words_and_bytes_arrive_where_they_belong() {
        const START: u64 = 64 << 10;
        const LEN: u64 = 192 << 10;
        let file = tempfile::tempfile().unwrap();
        file.set_len(START + LEN).unwrap();
        let device = PciDevice::of_file(file.try_clone().unwrap().into(), START..START + LEN, None).unwrap();
        device.set_bus_master(true).unwrap();
        // From the BAR's second 64 KiB on.
        let first = 64 << 10;
        let bar = device.map_bar(0, Some(first..LEN), BarAlignment::LargestPage).unwrap();
        assert_eq!((bar.region(), bar.range(), bar.len()), (0, first..LEN, LEN - first));
        assert_eq!(bar.device().bdf(), device.bdf());
        assert!(bar.alignment().bytes() >= sys::base_page());
        assert_eq!((bar.address() as u64 ^ first) & (bar.alignment().bytes() - 1), 0);
        assert!(format!("{bar:?}").starts_with("BarMap(0000:01:00.0 region 0 "));
        let on_file = |at: u64, len: usize| {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, START + first + at).unwrap();
            bytes
        };
        bar.store_u32(4, 0x0403_0201).unwrap();
        bar.store_u64(8, 0x0c0b_0a09_0807_0605).unwrap();
        assert_eq!(on_file(4, 12), (1..=12).collect::<Vec<u8>>());
        assert_eq!((bar.load_u32(8).unwrap(), bar.load_u64(8).unwrap()), (0x0807_0605, 0x0c0b_0a09_0807_0605));
        // By words where they are aligned, whatever the bytes before and after.
        for (at, len) in [(0, 0), (1, 1), (3, 30), (8, 16), (12, 12), (4094, 5), (LEN - first - 7, 7)] {
            let bytes: Vec<u8> = (0..len).map(|i| (at as usize + i * 7) as u8).collect();
            bar.write(at, &bytes).unwrap();
            assert_eq!(on_file(at, len), bytes, "{at} {len}");
            let mut read = vec![0; len];
            bar.read(at, &mut read).unwrap();
            assert_eq!(read, bytes, "{at} {len}");
        }
        // A register that changes is read and written in one access.
        let whole = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
        [16, 28, 34].iter().for_each(|at| bar.write(*at, &[0; 8]).unwrap());
        std::thread::scope(|s| {
            let writer = s.spawn(|| {
                for i in 0..300_000_u32 {
                    let bytes = [i as u8; 8];
                    bar.write(16, &bytes).unwrap();
                    bar.write(28, &bytes[..4]).unwrap();
                    bar.write(34, &bytes[..2]).unwrap();
                }
            });
            while !writer.is_finished() {
                for (at, len) in [(16, 8), (16, 4), (28, 4), (34, 2)] {
                    let mut bytes = [0; 8];
                    bar.read(at, &mut bytes[..len]).unwrap();
                    assert!(whole(&bytes[..len]), "{len} bytes at {at}: {bytes:?}");
                }
            }
        });
        let reason = |result: Result<(), Error>| match result {
            Err(Error::Region { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        for offset in [u64::MAX, LEN - first - 3] {
            assert_eq!(reason(bar.write(offset, &[0; 4])), RegionError::OutOfRange);
            assert_eq!(reason(bar.store_u64(offset, 0)), RegionError::NoWord);
        }
    }

    #[test]
    fn a_mapping_that_cannot_be_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let device = |start: u64| PciDevice::of_file(file.try_clone().unwrap().into(), start..1 << 20, None).unwrap();
        let aligned = device(64 << 10);
        let refused =
            |log2: u8| match aligned.map_bar(0, None, BarAlignment::Exactly(PageSize::from_log2(log2).unwrap())) {
                Err(Error::Region { reason, .. }) => reason,
                other => panic!("{other:?}"),
            };
        assert_eq!(refused(63), RegionError::TooLong);
        assert_eq!(refused(8), RegionError::AlignmentBelowPage);
        // The offset in the file is not a multiple of a page.
        for alignment in [BarAlignment::Any, BarAlignment::LargestPage] {
            let error = device(100).map_bar(0, None, alignment).unwrap_err();
            assert!(error.to_string().starts_with("cannot map region 0 of 0000:01:00.0"), "{error}");
        }
        // A file is no device, so it exports no dma-buf.
        let whole = aligned.map_bar(0, None, BarAlignment::Any).unwrap();
        assert!(matches!(whole.dma_buf(), Err(Error::NoDmaBuf { .. })));
        let part = aligned.map_bar(0, Some(0..100), BarAlignment::Any).unwrap();
        assert!(matches!(part.dma_buf(), Err(Error::Region { reason: RegionError::NotWholePages, .. })));
    }

    #[test]
    fn the_largest_page_within_a_range() {
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
            assert_eq!(largest_page(sizes, &range), page, "{range:#x?}");
        }
        assert_eq!(largest_page(PageSizes::from_bits(1 << 14 | 1 << 25), &(0..64 << 20)).log2(), 25, "16 KiB pages");
    }
}
