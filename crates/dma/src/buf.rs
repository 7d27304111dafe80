//! Buffers: memory that only the CPU uses, and memory that devices share.

use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::account::Account;
use crate::memory::Memory;
use crate::sys::{Exclusive, RawMemory, Region};
use crate::{BufferRef, BufferSlice, Error, PageBacking, PageKind, VolatileSlice};

/// Memory that only the CPU of this process accesses: plain slices, no device address. Zeroed when new.
pub struct CpuBuf {
    memory: Exclusive,
    backing: PageBacking,
    account: Account,
}

impl CpuBuf {
    pub(crate) fn new(memory: Exclusive, backing: PageBacking, account: Account) -> Self {
        Self { memory, backing, account }
    }

    /// The kind of pages behind the buffer, with the reasons why no better kind was used.
    pub fn backing(&self) -> &PageBacking {
        &self.backing
    }

    /// Takes the memory out of its heap's accounting.
    pub(crate) fn into_region(self) -> (Region, PageBacking) {
        (self.memory.into_region(), self.backing)
    }

    /// Makes the memory reachable for devices. From now on it is accessed through volatile slices only.
    pub fn share(self) -> SharedBuf {
        let (region, backing, account) = (self.memory.into_region(), self.backing, self.account);
        SharedBuf { slice: BufferSlice::whole(Arc::new(Memory::new(region, backing, account))) }
    }
}

impl Deref for CpuBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.bytes()
    }
}

impl DerefMut for CpuBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

debug_as!(CpuBuf, |it| "CpuBuf({} bytes, {})", it.memory.len(), it.backing.kind);

/// A whole buffer that devices may access. Its owner has exclusive use of all its bytes.
#[derive(Debug)]
pub struct SharedBuf {
    pub(crate) slice: BufferSlice,
}

impl SharedBuf {
    /// Memory of ordinary pages that no heap counts.
    fn outside_heaps(region: Region) -> Self {
        let memory = Memory::new(region, PageBacking::base(), Account::none());
        Self { slice: BufferSlice::whole(Arc::new(memory)) }
    }

    /// Zeroed memory behind a sealed memfd whose pages are *not* present yet, for sparsely used ranges. `len` is
    /// rounded up to whole pages. Touching a page when the system is out of memory is fatal (SIGBUS): call
    /// [`SharedBuf::populate`] first.
    ///
    /// # Errors
    /// [`Error::BadLength`] for 0 bytes or when rounding up overflows; [`Error::Allocate`].
    pub fn sparse(name: &str, len: usize) -> Result<Self, Error> {
        let size = len
            .checked_next_multiple_of(crate::sys::page())
            .and_then(NonZeroUsize::new)
            .ok_or(Error::BadLength(len))?;
        let region = Region::memfd(name, size, PageKind::Base).map_err(|source| Error::Allocate {
            len,
            kind: "sparse memfd memory",
            source,
        })?;
        Ok(Self::outside_heaps(region))
    }

    /// Memory as that of [`SharedBuf::sparse`] that no other process can map: in huge pages where the kernel has them.
    ///
    /// # Errors
    /// As there.
    pub fn sparse_private(len: usize) -> Result<Self, Error> {
        let page = crate::sys::page();
        let size = len.checked_next_multiple_of(page).and_then(NonZeroUsize::new).ok_or(Error::BadLength(len))?;
        let failed = |source| Error::Allocate { len, kind: "sparse memory", source };
        Ok(Self::outside_heaps(Region::sparse(size).map_err(failed)?))
    }

    /// Memory as that of [`SharedBuf::sparse`] for some ranges of one memfd: one buffer for each range, and the sealed
    /// memfd that contains them at these offsets, for other processes to map. Only the ranges take address space here.
    /// The buffers have no descriptor of their own ([`SharedBuf::export`]).
    ///
    /// # Errors
    /// [`Error::BadLength`] for a range that is empty, or not aligned to 4 KiB; [`Error::Allocate`].
    pub fn sparse_ranges(name: &str, ranges: &[Range<u64>]) -> Result<(Vec<Self>, OwnedFd), Error> {
        if let Some(bad) = ranges.iter().find(|p| p.is_empty() || (p.start | p.end) & 0xfff != 0) {
            return Err(Error::BadLength(usize::try_from(bad.end.saturating_sub(bad.start)).unwrap_or(usize::MAX)));
        }
        let (regions, fd) = Region::memfd_ranges(name, ranges).map_err(|source| {
            let len = ranges.iter().fold(0u64, |sum, p| sum.saturating_add(p.end - p.start));
            Error::Allocate { len: usize::try_from(len).unwrap_or(usize::MAX), kind: "sparse memfd memory", source }
        })?;
        let buffer = |region| Self::outside_heaps(region);
        Ok((regions.into_iter().map(buffer).collect(), fd))
    }

    /// Maps a whole memfd that another process created. The other process may change the bytes at any time.
    ///
    /// # Errors
    /// [`Error::Import`] unless the file is a memfd of ordinary pages, sealed against shrinking, with a length that is
    /// a multiple of 4 KiB: otherwise the other process could make an access fail with SIGBUS.
    pub fn import(fd: OwnedFd) -> Result<Self, Error> {
        Self::import_up_to(fd, u64::MAX)
    }

    /// As [`SharedBuf::import`], for a memfd of at most `most` bytes. A sparse memfd takes no memory, but mapping it
    /// takes address space of this process.
    ///
    /// # Errors
    /// As [`SharedBuf::import`]; [`Error::Import`] of kind `OutOfMemory` for a longer memfd, which is not mapped.
    pub fn import_up_to(fd: OwnedFd, most: u64) -> Result<Self, Error> {
        let region = Region::import(fd, most).map_err(Error::Import)?;
        Ok(Self::outside_heaps(region))
    }

    /// Maps a whole memfd whose bytes nobody can change any more, privately: what is written to this buffer is a copy
    /// of its own. To pin it for a device copies it, too.
    ///
    /// # Errors
    /// [`Error::Import`] unless the file is a memfd of ordinary pages, sealed against shrinking and writing, with a
    /// length that is a multiple of 4 KiB.
    pub fn import_sealed(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let region = Region::import_sealed(fd, false).map_err(Error::Import)?;
        Ok(Self::outside_heaps(region))
    }

    /// As [`SharedBuf::import_sealed`], to be read alone: pinned for a device, it is still the same memory for all who
    /// have it. A write to it ends this process (SIGSEGV), and no device is admitted to write.
    ///
    /// # Errors
    /// As there.
    pub fn import_read_only(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let region = Region::import_sealed(fd, true).map_err(Error::Import)?;
        Ok(Self::outside_heaps(region))
    }

    /// Unmaps a memfd, for [`SharedBuf::import_sealed`]: from now on nobody can change its bytes.
    ///
    /// # Errors
    /// `ResourceBusy` while a reference to the buffer exists, another process has it mapped for writing, or a driver
    /// pins it; `Unsupported` for memory without a descriptor, and where the kernel cannot seal it.
    pub fn seal(self) -> std::io::Result<OwnedFd> {
        let memory = Arc::try_unwrap(self.slice.into_memory()).map_err(|_| std::io::ErrorKind::ResourceBusy)?;
        memory.region.seal()
    }

    /// Memory that exists, as it is: not zeroed, and never a [`CpuBuf`] or lent, since others may use it. Its owner is
    /// dropped with the last reference.
    pub fn from_memory(memory: RawMemory) -> Self {
        Self::outside_heaps(memory.0)
    }

    /// Maps a whole dma-buf of a driver or kernel heap. Devices may write it at any time; the CPU accesses it within
    /// [`SharedBuf::cpu_access`].
    ///
    /// # Errors
    /// [`Error::Import`] for a file that is not a dma-buf, or whose exporter does not allow mapping.
    pub fn import_dma_buf(fd: OwnedFd) -> Result<Self, Error> {
        let region = Region::import_dma_buf(fd).map_err(Error::Import)?;
        Ok(Self::outside_heaps(region))
    }

    /// Runs `f` with access to a dma-buf, for reading or also for writing (`writes`). The exporter synchronises caches
    /// and waits for devices that are still writing.
    ///
    /// # Errors
    /// `Unsupported`, without calling `f`, for memory that is not a dma-buf; the exporter's error.
    pub fn cpu_access<T>(&self, writes: bool, f: impl FnOnce(VolatileSlice<'_>) -> T) -> std::io::Result<T> {
        /// Ends the access, also when `f` panics.
        struct Access<'a>(&'a Region, bool);
        impl Drop for Access<'_> {
            fn drop(&mut self) {
                // Ending an access that has begun does not fail.
                let _ = self.0.sync(false, self.1);
            }
        }
        let region = &self.slice.memory().region;
        region.sync(true, writes)?;
        let _access = Access(region, writes);
        Ok(f(self.as_volatile_slice()))
    }

    /// Makes the pages of a range present, so that touching them cannot fail. The range is widened to whole 4 KiB
    /// pages.
    ///
    /// # Errors
    /// The kernel's error when there is no memory; `InvalidInput` when the range does not lie within the buffer.
    pub fn populate(&self, offset: usize, len: usize) -> std::io::Result<()> {
        self.slice.memory().region.populate(offset, len)
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// A reference to the memory, for pinning and mapping.
    pub fn reference(&self) -> BufferRef {
        self.slice.reference()
    }

    /// The kind of pages behind the buffer.
    pub fn backing(&self) -> &PageBacking {
        &self.slice.memory().backing
    }

    /// The whole buffer as a slice, which can be split and passed to operations.
    pub fn into_slice(self) -> BufferSlice {
        self.slice
    }

    /// The bytes, for reading and writing.
    #[inline]
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.slice.as_volatile_slice()
    }

    /// The descriptor behind the buffer (a memfd sealed against shrinking, or a dma-buf), for another process or driver
    /// to map; `None` for anonymous memory. After this call the buffer can no longer become a [`CpuBuf`].
    pub fn export(&self) -> Option<BorrowedFd<'_>> {
        self.slice.memory().region.export()
    }

    /// Turns the buffer back into memory that only the CPU accesses.
    ///
    /// # Errors
    /// Returns the buffer while a mapping, registration or other reference exists, and always once it was exported.
    pub fn into_cpu(self) -> Result<CpuBuf, SharedBuf> {
        let Memory { region, backing, account, .. } = Arc::try_unwrap(self.slice.into_memory())
            .map_err(|memory| SharedBuf { slice: BufferSlice::whole(memory) })?;
        match Exclusive::new(region) {
            Ok(memory) => Ok(CpuBuf { memory, backing, account }),
            Err(region) => {
                Err(SharedBuf { slice: BufferSlice::whole(Arc::new(Memory::new(region, backing, account))) })
            }
        }
    }
}

impl BufferSlice {
    /// Turns a slice of the whole buffer back into the buffer.
    ///
    /// # Errors
    /// Returns the slice when it is not the whole buffer.
    pub fn into_whole(self) -> Result<SharedBuf, BufferSlice> {
        if self.is_whole() { Ok(SharedBuf { slice: self }) } else { Err(self) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, SealFlags};

    use crate::{AnonHeap, Error, Heap, MemfdHeap, PageKind, SharedBuf};

    #[test]
    fn sealed_memory_is_mapped_by_others_and_changed_by_nobody() {
        let buf = MemfdHeap::importable(None).allocate(8192).unwrap().share();
        buf.as_volatile_slice().write(&[7; 8192]);
        let held = buf.reference();
        assert_eq!(buf.seal().unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
        drop(held);
        let buf = MemfdHeap::importable(None).allocate(8192).unwrap().share();
        buf.as_volatile_slice().write(&[7; 8192]);
        let fd = buf.export().unwrap().try_clone_to_owned().unwrap();
        let other = SharedBuf::import(fd.try_clone().unwrap()).unwrap();
        assert!(SharedBuf::import_sealed(fd.as_fd()).is_err(), "others may write to it");
        assert!(buf.seal().is_err(), "somebody may write to it");
        drop(other);
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).unwrap();
        let [a, b] = [0, 1].map(|_| SharedBuf::import_sealed(fd.as_fd()).unwrap());
        a.as_volatile_slice().sub(0, 4).unwrap().write(&[9; 4]);
        let mut bytes = [0; 8192];
        b.as_volatile_slice().read(&mut bytes);
        assert_eq!(bytes, [7; 8192], "a copy was written to");
        assert!(a.export().is_none(), "its file has other bytes");
        assert!(rustix::io::pwrite(&fd, b"x", 0).is_err() && rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(SharedBuf::import(fd).is_err(), "not to be written to");
        let anonymous = AnonHeap::new().allocate(4096).unwrap().share();
        assert_eq!(anonymous.seal().unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    }

    #[test]
    fn parts_rejoin_only_with_their_neighbour() {
        let heap = AnonHeap::new();
        let (a, b) = heap.allocate(8192).unwrap().share().into_slice().split_at(4096).unwrap();
        let (c, d) = heap.allocate(8192).unwrap().share().into_slice().split_at(4096).unwrap();
        let (a, d) = a.join(d).unwrap_err();
        let (b, a) = b.join(a).unwrap_err();
        let a = a.into_whole().unwrap_err();
        let a = a.split_at(4097).unwrap_err();
        assert!(a.join(b).unwrap().into_whole().is_ok());
        assert!(c.join(d).unwrap().into_whole().is_ok());
    }

    #[test]
    fn a_reference_keeps_the_memory_from_the_cpu() {
        let shared = AnonHeap::new().allocate(4096).unwrap().share();
        let reference = shared.reference();
        let shared = shared.into_cpu().unwrap_err();
        drop(reference);
        let mut cpu = shared.into_cpu().unwrap();
        cpu[0] = 1;
    }

    #[test]
    fn an_exported_buffer_stays_shared() {
        let heap = MemfdHeap::new();
        let shared = heap.allocate(4096).unwrap().share();
        assert!(shared.export().is_some());
        let shared = shared.into_cpu().unwrap_err();
        assert_eq!(heap.stats().live, 4096, "it still is the heap's");
        drop(shared);
        assert_eq!(heap.stats().live, 0);
        assert!(AnonHeap::new().allocate(4096).unwrap().share().export().is_none());
    }

    #[test]
    fn memory_of_another_process_must_stay_there() {
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(8192).unwrap().share();
        buf.as_volatile_slice().write(b"theirs");
        let descriptor = || buf.export().unwrap().try_clone_to_owned().unwrap();
        let imported = SharedBuf::import(descriptor()).unwrap();
        let mut bytes = [0; 6];
        imported.as_volatile_slice().read(&mut bytes);
        assert_eq!((&bytes, imported.len()), (b"theirs", 8192));
        imported.as_volatile_slice().write(b"ours!!");
        buf.as_volatile_slice().read(&mut bytes);
        assert_eq!(&bytes, b"ours!!");
        assert!(rustix::fs::ftruncate(descriptor(), 4096).is_err(), "sealed");
        assert!(imported.into_cpu().is_err(), "the other process has it too");
        // Descriptors that are refused.
        let memfd = |flags| rustix::fs::memfd_create("test", flags).unwrap();
        let why = |fd: OwnedFd| crate::error_chain(&SharedBuf::import(fd).map(drop).unwrap_err());
        let open = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert!(why(open).contains("F_SEAL_SHRINK"));
        for len in [0, 5000] {
            let odd = memfd(MemfdFlags::ALLOW_SEALING);
            rustix::fs::ftruncate(&odd, len).unwrap();
            rustix::fs::fcntl_add_seals(&odd, SealFlags::SHRINK).unwrap();
            assert!(why(odd).contains("4 KiB"));
        }
        let huge = memfd(MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB);
        rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        assert!(why(huge).contains("huge"));
        assert!(why(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()).contains("not a memfd"));
        assert!(why(std::fs::File::open("/proc/self/exe").unwrap().into()).contains("not a memfd"));
        let written = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::ftruncate(&written, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&written, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
        assert!(matches!(SharedBuf::import(written), Err(Error::Import(_))));
    }

    #[test]
    fn memory_for_devices_is_not_dumped() {
        let (buffers, _fd) = SharedBuf::sparse_ranges("dumped", &[0..0x1000, 0x2000..0x3000]).unwrap();
        let made = crate::MemfdHeap::new().allocate(4096).unwrap().share();
        let imported = SharedBuf::import(made.export().unwrap().try_clone_to_owned().unwrap()).unwrap();
        let anonymous = crate::AnonHeap::new().allocate(4096).unwrap().share();
        // Neighbours in the address space may be one area with it.
        let flags_at = |at: usize| {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut inside = false;
            for line in maps.lines() {
                let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
                let ends = range.and_then(|(start, end)| {
                    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
                });
                inside = ends.map_or(inside, |(start, end)| (start..end).contains(&at));
                if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                    return flags.to_owned();
                }
            }
            panic!("{at:#x} is not mapped")
        };
        for buf in [&buffers[0], &made, &imported, &anonymous] {
            let flags = flags_at(buf.as_volatile_slice().as_ptr().addr());
            assert!(flags.contains(" dd"), "{flags}");
        }
    }

    #[test]
    fn buffers_of_one_memory_lie_where_the_memfd_has_them() {
        let (buffers, fd) = SharedBuf::sparse_ranges("test", &[0x1000..0x3000, 1 << 38..(1 << 38) + 0x1000]).unwrap();
        assert_eq!(buffers.iter().map(SharedBuf::len).collect::<Vec<_>>(), [0x2000, 0x1000]);
        buffers[0].as_volatile_slice().write(b"first");
        buffers[1].as_volatile_slice().write(b"second");
        let mut bytes = [0; 6];
        for (at, wanted) in [(0x1000, b"first\0"), (1 << 38, b"second"), (0x3000, &[0; 6])] {
            assert_eq!(rustix::io::pread(&fd, &mut bytes, at).unwrap(), 6);
            assert_eq!(&bytes, wanted, "at {at:#x}");
        }
        assert!(rustix::fs::ftruncate(&fd, 0x1000).is_err() && rustix::fs::ftruncate(&fd, 1 << 39).is_err(), "sealed");
        // The memfd contains all ranges, so a single buffer has no descriptor, and it counts as exported.
        assert!(buffers.iter().all(|buffer| buffer.export().is_none()));
        assert!(buffers.into_iter().all(|buffer| buffer.into_cpu().is_err()));
        for bad in [0..0, 0x800..0x1000, 0..0x1001] {
            assert!(matches!(SharedBuf::sparse_ranges("test", &[0..0x1000, bad]), Err(Error::BadLength(_))));
        }
    }

    #[test]
    fn sparse_memory_is_larger_than_the_machine() {
        for sparse in [|len| SharedBuf::sparse("test", len), SharedBuf::sparse_private] {
            far_bytes(&sparse(64 << 40).unwrap());
            assert!(matches!(sparse(0), Err(Error::BadLength(0))));
            assert!(matches!(sparse(usize::MAX), Err(Error::BadLength(_))));
        }
    }

    fn far_bytes(buf: &SharedBuf) {
        let far = (63 << 40) + 5;
        buf.populate(far, 10).unwrap();
        buf.as_volatile_slice().sub(far, 10).unwrap().write(b"far offset");
        let mut got = [0; 10];
        buf.as_volatile_slice().sub(far, 10).unwrap().read(&mut got);
        assert_eq!(&got, b"far offset");
        for (offset, len) in [(64 << 40, 1), (usize::MAX, 2), (1, usize::MAX)] {
            assert_eq!(buf.populate(offset, len).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}
