//! Regions of memory mapped from the kernel.
//!
//! Invariant of [`Region`]: `ptr..ptr + len` is a mapping, or a fragment of one, that this value owns exclusively: no
//! other value unmaps or accesses it. It is readable and writable until the value is dropped; where it is `read_only`,
//! a write ends the process (SIGSEGV). Established by [`Region::anonymous`], [`Region::memfd`],
//! [`Region::memfd_ranges`], [`Region::import`], [`Region::dma_buf`] and [`Region::import_sealed`], and by the
//! contracts of [`DriverMemory`] for [`Region::of_driver`] and of [`RawMemory::new`], where others access it too;
//! [`Region::cut`] passes it on to disjoint fragments, which keep a reference to their mapping. A drop unmaps a whole
//! mapping, drops a fragment's reference to it, or moves either into a new value for the pool that is the region's
//! home.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::{self, Advice, MapFlags, ProtFlags, UserfaultfdFlags};

use crate::first_touch::FIRST_TOUCH;
use crate::{Error, PageBacking, PageKind, VolatileSlice};

pub(crate) const HUGE: usize = 2 << 20;

/// Bytes of the kernel's own pages, of which every length here is a multiple: 4 KiB on x86-64, up to 64 KiB elsewhere.
pub(crate) fn page() -> usize {
    rustix::param::page_size().max(4096)
}

/// Of linux/magic.h: what memfds of ordinary pages lie on.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A mapping of memory.
pub(crate) struct Region {
    ptr: NonNull<u8>,
    len: usize,
    /// Bytes of the pages that the kernel gives and takes: more than [`page`] for reserved huge pages.
    page: usize,
    /// Whether the kernel was asked for transparent huge pages.
    transparent: bool,
    fd: Option<OwnedFd>,
    /// Set permanently once `fd` was exported: another process may have the memory mapped.
    exported: AtomicBool,
    /// Sealed memory that is mapped to be read alone: nobody can change it.
    read_only: bool,
    /// Held by the thread that writes to `fd`: the kernel lets one do so at a time.
    writing: Mutex<()>,
    /// The pool that gets the memory on drop; `None` to unmap it.
    home: Option<Home>,
    /// The mapping that contains this fragment: unmapped with its last fragment, and accessed only through fragments.
    slab: Option<Arc<Region>>,
    /// The owner of memory that is a driver's or a guest's: it has the memory back instead of an unmap.
    driver: Option<Box<dyn Any + Send + Sync>>,
}

/// Memory that a driver has allocated and mapped into this process, for as long as the value exists.
///
/// # Safety
/// From [`DriverMemory::span`] to its end the memory is mapped, readable, writable and initialised until the value is
/// dropped; the span begins at a page, is a multiple of 4 KiB long, and is always the same. Nobody accesses it but who
/// has the buffer that is made of it, and devices through registrations of that.
// SAFETY: implementations promise what is said above.
pub unsafe trait DriverMemory: Any + Send + Sync {
    /// The first byte, and how many there are.
    fn span(&self) -> (NonNull<u8>, NonZeroUsize);
}

/// What regions return to when they are dropped.
pub(crate) trait Recycle: Send + Sync {
    /// Keeps a region for the next buffer, or frees it. `present`: all its pages are.
    fn recycle(&self, region: Region, backing: PageBacking, present: bool);
}

/// Where a region goes when it is dropped.
pub(crate) struct Home {
    shelf: Weak<dyn Recycle>,
    backing: PageBacking,
    /// Bytes whose pages are not known to be present.
    absent: AtomicUsize,
}

impl Home {
    pub(crate) fn new(shelf: Weak<dyn Recycle>, backing: PageBacking, absent: usize) -> Self {
        Self { shelf, backing, absent: AtomicUsize::new(absent) }
    }

    pub(crate) fn now_present(&self, bytes: usize) {
        self.absent.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn welcome(self, region: Region) {
        if let Some(shelf) = self.shelf.upgrade() {
            shelf.recycle(region, self.backing, self.absent.into_inner() == 0);
        }
    }
}

/// Memory that exists, a guest's or a mapping of a file, for [`SharedBuf::from_memory`](crate::SharedBuf::from_memory).
pub struct RawMemory(pub(crate) Region);

impl RawMemory {
    /// Memory that `owner` keeps mapped. Others may use it at the same time.
    ///
    /// # Errors
    /// [`Error::NotPages`] unless it is whole pages of the kernel.
    ///
    /// # Safety
    /// `ptr..ptr + len` stays mapped, readable, writable and initialised until `owner` is dropped. Nobody uses a Rust
    /// reference into it until then.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Result<Self, Error> {
        let at = ptr.addr().get();
        if len == 0 || !(at | len).is_multiple_of(page()) {
            return Err(Error::NotPages { at, len, page: page() });
        }
        // Exported from the start: no slice is ever made of it.
        let region = Region::owned(ptr, len, owner);
        region.exported.store(true, Ordering::Relaxed);
        Ok(Self(region))
    }
}

// SAFETY: the region is plain memory owned by this value (see the invariant above), not tied to a thread; access goes
// through `&mut self` (slices) or through `VolatileSlice`, whose accesses are made for sharing.
unsafe impl Send for Region {}
// SAFETY: `&Region` gives only `VolatileSlice`s, whose accesses are made for sharing between threads and devices;
// slices come from `Exclusive` alone, which owns its region.
unsafe impl Sync for Region {}

impl Region {
    /// Memory without a file or an owner, in ordinary pages.
    fn bare(ptr: NonNull<u8>, len: usize) -> Self {
        Self {
            ptr,
            len,
            page: page(),
            transparent: false,
            fd: None,
            exported: AtomicBool::new(false),
            read_only: false,
            writing: Mutex::new(()),
            home: None,
            slab: None,
            driver: None,
        }
    }

    /// A mapping that was just made, with the file behind it. Core files are without it: it holds data of users and of
    /// other processes.
    ///
    /// # Safety
    /// `base..base + len` is a mapping that is readable, writable and nobody else's, of the file from its first byte if
    /// there is one. Who else can write to its pages than the holders of this region and of what it exports is a reason
    /// to set `exported` at once.
    unsafe fn whole(base: *mut u8, len: usize, fd: Option<OwnedFd>) -> io::Result<Self> {
        let mut region = Self::bare(NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, len);
        region.fd = fd;
        // A kernel that refuses only dumps more.
        let _ = region.advise(0, len, Advice::LinuxDontDump);
        Ok(region)
    }

    /// Has the kernel give a child of `fork` zeroes in place of anonymous memory.
    pub(crate) fn wipe_on_fork(&self) -> io::Result<()> {
        // SAFETY: the range is this region's own, and it changes nothing in this process.
        Ok(unsafe { mm::madvise(self.ptr.as_ptr().cast(), self.len, Advice::LinuxWipeOnFork) }?)
    }

    /// Private anonymous memory. `len` is a multiple of the page size of `pages` (checked by the heap, and by the
    /// kernel for hugetlb).
    pub(crate) fn anonymous(len: NonZeroUsize, pages: PageKind) -> io::Result<Self> {
        Self::anonymous_with(len, pages, MapFlags::empty())
    }

    /// The same in transparent huge pages, of which the kernel promises none.
    pub(crate) fn sparse(len: NonZeroUsize) -> io::Result<Self> {
        Self::anonymous_with(len, PageKind::Transparent, MapFlags::NORESERVE)
    }

    fn anonymous_with(len: NonZeroUsize, pages: PageKind, more: MapFlags) -> io::Result<Self> {
        let len = len.get();
        let flags = match pages {
            PageKind::Hugetlb1G => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_1GB,
            PageKind::Hugetlb2M => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            PageKind::Transparent | PageKind::Base => MapFlags::PRIVATE,
        };
        // A transparent huge page needs 2 MiB alignment, which mmap does not guarantee: map more and unmap the ends.
        let slack = if pages == PageKind::Transparent { HUGE } else { 0 };
        let total = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), total, ProtFlags::READ | ProtFlags::WRITE, flags | more) }?;
        let base = base.cast::<u8>();
        let head = if slack == 0 { 0 } else { base.addr().next_multiple_of(HUGE) - base.addr() };
        let start = base.wrapping_add(head);
        // Both cuts are whole pages of the kernel's: `head` because mmap returns page-aligned addresses, `len` by
        // contract.
        let tail = slack - head;
        if head > 0 {
            // SAFETY: `base..base + head` is the front of the mapping made above, and nothing refers to it.
            unsafe { mm::munmap(base.cast(), head) }?;
        }
        if tail > 0 {
            // SAFETY: `start + len..start + len + tail` is the end of the mapping made above (head + len + tail =
            // total).
            unsafe { mm::munmap(start.wrapping_add(len).cast(), tail) }?;
        }
        // SAFETY: what is left of the mapping made above, which is private.
        let mut region = unsafe { Self::whole(start, len, None)? };
        match pages {
            PageKind::Hugetlb1G => region.page = 1 << 30,
            PageKind::Hugetlb2M => region.page = HUGE,
            PageKind::Transparent => {
                region.advise(0, len, Advice::LinuxHugepage)?;
                region.transparent = true;
            }
            PageKind::Base => {}
        }
        Ok(region)
    }

    /// A memfd of `len` bytes, sealed against shrinking and growing, mapped shared: so no other process can make an
    /// access run past the end of the file (SIGBUS). Punching holes is not sealed; a hole in ordinary pages reads as
    /// zeroes.
    pub(crate) fn memfd(name: &str, len: NonZeroUsize, pages: PageKind) -> io::Result<Self> {
        let len = len.get();
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        match pages {
            PageKind::Hugetlb1G => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            PageKind::Hugetlb2M => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            PageKind::Transparent | PageKind::Base => {}
        }
        // SAFETY: a new memfd that nobody else has, of this length, which is sealed.
        let mut region = unsafe { Self::shared(sealed_memfd(name, flags, len as u64)?, len, false)? };
        // Kernels without huge pages for shared memory refuse; then the memory has 4 KiB pages.
        region.transparent = pages == PageKind::Transparent && region.advise(0, len, Advice::LinuxHugepage).is_ok();
        Ok(region)
    }

    /// Maps ranges of one memfd of 4 KiB pages, each shared as a region of its own, and returns them with the memfd,
    /// which is sealed against shrinking and growing. The regions have no descriptor, since that would contain the
    /// whole file, and count as exported from the start, since the memfd is returned.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty or not aligned to 4 KiB; the kernel's error.
    pub(crate) fn memfd_ranges(name: &str, ranges: &[std::ops::Range<u64>]) -> io::Result<(Vec<Self>, OwnedFd)> {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let fd = sealed_memfd(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING, end)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let map = |range: &std::ops::Range<u64>| {
            let len = range.end.checked_sub(range.start).and_then(|len| usize::try_from(len).ok()).unwrap_or(0);
            if len == 0 || (range.start | range.end) & 0xfff != 0 {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            // SAFETY: no address is asked for, so no existing mapping is replaced.
            let base = unsafe { mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &fd, range.start) }?;
            // SAFETY: the mapping made above; it is said to be exported below.
            let region = unsafe { Self::whole(base.cast(), len, None)? };
            region.exported.store(true, Ordering::Relaxed);
            Ok(region)
        };
        let mapped = ranges.iter().map(map).collect::<io::Result<_>>()?;
        Ok((mapped, fd))
    }

    /// Maps a whole memfd of another process, shared. It counts as exported from the start.
    ///
    /// Refused unless accesses cannot fail later: the memfd must be sealed against shrinking and have ordinary pages (a
    /// hole punched into reserved huge pages might not be filled again).
    ///
    /// # Errors
    /// `InvalidInput` for a file that is no such memfd, with what is wrong with it; `OutOfMemory` for one of more than
    /// `most` bytes; the kernel's error.
    pub(crate) fn import(fd: OwnedFd, most: u64) -> io::Result<Self> {
        let len = Self::check_memfd(fd.as_fd(), SealFlags::SHRINK)?;
        if len as u64 > most {
            let why = format!("the memfd has {len} bytes, but at most {most} are allowed");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
        }
        // SAFETY: the file cannot shrink, checked above, and counts as exported.
        unsafe { Self::shared(fd, len, true) }
    }

    /// Maps a whole memfd that nobody can change any more: privately, so that what is written here stays here, or
    /// `read_only`.
    ///
    /// # Errors
    /// As [`Region::import`], also for a memfd that is not sealed against writing.
    pub(crate) fn import_sealed(fd: BorrowedFd<'_>, read_only: bool) -> io::Result<Self> {
        let len = Self::check_memfd(fd, SealFlags::SHRINK | SealFlags::WRITE)?;
        // Before Linux 6.7, who could write to it if it were not sealed cannot map it for reading alone.
        let again = read_only.then(|| {
            rustix::fs::open(
                format!("/proc/self/fd/{}", fd.as_raw_fd()),
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )
        });
        let fd = again.as_ref().and_then(|again| again.as_ref().ok()).map_or(fd, AsFd::as_fd);
        let (access, flags) = match read_only {
            true => (ProtFlags::READ, MapFlags::SHARED),
            false => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE),
        };
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base = unsafe { mm::mmap(ptr::null_mut(), len, access, flags, fd, 0) }?;
        // SAFETY: the mapping made above, of a file that cannot shrink (checked above). It is private or cannot be
        // written, and nobody writes to the file. The region has no descriptor: what is written to it is not in the
        // file, and nothing may be written to a file that is sealed.
        let mut region = unsafe { Self::whole(base.cast(), len, None)? };
        // It is never plain memory of this process, as what is exported.
        (region.read_only, region.exported) = (read_only, AtomicBool::new(read_only));
        Ok(region)
    }

    /// The bytes of a memfd of ordinary pages that has these seals.
    fn check_memfd(fd: BorrowedFd<'_>, wanted: SealFlags) -> io::Result<usize> {
        let refuse = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| refuse("the file is not a memfd"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(refuse("the memfd is not sealed against shrinking (F_SEAL_SHRINK)"));
        }
        if !seals.contains(wanted) {
            return Err(refuse("the memfd is not sealed against writing (F_SEAL_WRITE)"));
        }
        if rustix::fs::fstatfs(fd)?.f_type as u64 != TMPFS_MAGIC {
            return Err(refuse(
                "the memfd has reserved huge pages, which cannot be shared: create it without MFD_HUGETLB",
            ));
        }
        match usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0) {
            len if len == 0 || !len.is_multiple_of(4096) => {
                Err(refuse("the length of the memfd is not a multiple of 4 KiB"))
            }
            len => Ok(len),
        }
    }

    /// Unmaps a memfd, whose bytes nobody can change from then on: it is sealed against writing and further seals.
    ///
    /// # Errors
    /// `Unsupported` for other memory; `ResourceBusy` where somebody else has it mapped for writing, or a driver pins
    /// it.
    pub(crate) fn seal(mut self) -> io::Result<OwnedFd> {
        let fd = self.fd.take().ok_or(io::ErrorKind::Unsupported)?;
        // No pool gets memory that is somebody's for ever.
        self.home = None;
        drop(self);
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Maps the first `len` bytes of a file, shared.
    ///
    /// # Safety
    /// The file has `len` bytes and cannot shrink. If it is not `exported`, nobody else has it.
    unsafe fn shared(fd: OwnedFd, len: usize, exported: bool) -> io::Result<Self> {
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let base =
            unsafe { mm::mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) }?;
        // SAFETY: the mapping made above, from the file's first byte; others have the file only if it is exported.
        let region = unsafe { Self::whole(base.cast(), len, Some(fd))? };
        region.exported.store(exported, Ordering::Relaxed);
        Ok(region)
    }

    /// Takes memory of a driver.
    pub(crate) fn of_driver(memory: impl DriverMemory) -> Self {
        let (ptr, len) = memory.span();
        Self::owned(ptr, len.get(), memory)
    }

    fn owned(ptr: NonNull<u8>, len: usize, owner: impl Any + Send + Sync) -> Self {
        let mut region = Self::bare(ptr, len);
        region.driver = Some(Box::new(owner));
        region
    }

    /// The owner of memory that somebody else has mapped, or of which this is a fragment: the kernel takes no advice
    /// about it.
    pub(crate) fn driver(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.slab.as_ref().map_or(self.driver.as_deref(), |slab| slab.driver())
    }

    /// A dma-buf of `len` bytes from a heap of the kernel (`/dev/dma_heap/NAME`), mapped shared. Its size cannot
    /// change.
    pub(crate) fn dma_buf(heap: BorrowedFd<'_>, len: NonZeroUsize) -> io::Result<Self> {
        let len = len.get();
        let fd = allocate_dma_buf(heap, len)?;
        // SAFETY: a new dma-buf that nobody else has; dma-bufs have one length for ever.
        unsafe { Self::shared(fd, len, false) }
    }

    /// Maps a whole imported dma-buf, shared. It counts as exported from the start.
    ///
    /// # Errors
    /// `InvalidInput` for a file that is not a dma-buf; the kernel's error, such as that of an exporter whose memory
    /// the CPU cannot access.
    pub(crate) fn import_dma_buf(fd: OwnedFd) -> io::Result<Self> {
        let refuse = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
        // Only dma-bufs accept this request, and an empty access has no effect.
        sync_dma_buf(fd.as_fd(), true, false).map_err(|_| refuse("the file is not a dma-buf"))?;
        sync_dma_buf(fd.as_fd(), false, false)?;
        let len = usize::try_from(rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))?).unwrap_or(0);
        if len == 0 || !len.is_multiple_of(4096) {
            return Err(refuse("the length of the dma-buf is not a multiple of 4 KiB"));
        }
        // SAFETY: dma-bufs have one length for ever, this one `len` bytes, and it counts as exported.
        unsafe { Self::shared(fd, len, true) }
    }

    /// Begins or ends a CPU access to a dma-buf. `Unsupported` for other memory.
    pub(crate) fn sync(&self, begin: bool, writes: bool) -> io::Result<()> {
        let fd = self.fd.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        sync_dma_buf(fd.as_fd(), begin, writes).map_err(|e| match e.raw_os_error() {
            Some(libc::ENOTTY) => io::ErrorKind::Unsupported.into(),
            _ => e,
        })
    }

    /// Splits the region into fragments of `len` bytes, which must be whole pages, and a shorter one for the rest.
    ///
    /// # Errors
    /// Returns the region when `len` is not a positive multiple of the page size, or when the region has a descriptor
    /// (which contains all of it) or a home.
    pub(crate) fn cut(self, len: usize) -> Result<Vec<Self>, Self> {
        if self.fd.is_some() || self.home.is_some() || len == 0 || !len.is_multiple_of(page()) {
            return Err(self);
        }
        let (start, whole, page) = (self.ptr, self.len, self.page);
        let slab = Arc::new(self);
        let fragment = |at: usize| {
            // Within the mapping: `at` is less than its length, so the address is no more null than its start.
            let at_address = NonNull::new(start.as_ptr().wrapping_add(at)).unwrap_or(start);
            let mut fragment = Self::bare(at_address, len.min(whole - at));
            (fragment.page, fragment.slab) = (page, Some(slab.clone()));
            fragment
        };
        Ok((0..whole).step_by(len).map(fragment).collect())
    }

    /// Sets the pool that gets the memory on drop.
    pub(crate) fn set_home(&mut self, home: Option<Home>) {
        self.home = home;
    }

    pub(crate) fn home(&self) -> Option<&Home> {
        self.home.as_ref()
    }

    /// Faults in the pages of a range, so that a later access cannot fail for lack of memory.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len).ok_or(io::ErrorKind::InvalidInput)?;
        if self.driver().is_some() {
            return Ok(());
        }
        let start = offset & !(page() - 1);
        if self.read_only {
            // Its pages are the file's. A kernel before 5.14 finds them when they are used.
            let _ = self.advise(start, end - start, Advice::LinuxPopulateRead);
            return Ok(());
        }
        if !self.transparent {
            return self.make_present(start, end);
        }
        FIRST_TOUCH.make(end - start, |small| {
            if !small {
                return self.make_present(start, end);
            }
            // Where the kernel refuses, pages are huge. It may join them later.
            let _ = self.advise(start, end - start, Advice::LinuxNoHugepage);
            let made = self.make_present(start, end);
            let _ = self.advise(start, end - start, Advice::LinuxHugepage);
            made
        })
    }

    fn make_present(&self, start: usize, end: usize) -> io::Result<()> {
        match self.advise(start, end - start, Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know the advice: touch each page instead.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                let view = self.as_volatile_slice();
                for page in (start..end).step_by(4096) {
                    view.touch(page);
                }
                Ok(())
            }
            other => other,
        }
    }

    /// Fills a range, none of whose pages is present, with bytes of a mapped file: see [`Region::write_absent`]. Memory
    /// without a descriptor is populated and read into.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is not within this memory or the mapping; `UnexpectedEof` where the file ends
    /// before; as [`Region::write_absent`].
    pub(crate) fn write_from_file(&self, offset: usize, len: usize, file: &FileMapping, at: u64) -> io::Result<()> {
        if self.fd.is_none() {
            self.populate(offset, len)?;
            return self.read_from_file(offset, len, file, at);
        }
        let skip = at.checked_sub(file.start).and_then(|skip| usize::try_from(skip).ok());
        let skip = skip.filter(|skip| within(*skip, len, file.len)).ok_or(io::ErrorKind::InvalidInput)?;
        let first = skip & !(page() - 1);
        // SAFETY: the range lies in this mapping (checked above), and the advice changes no contents.
        let ready = unsafe {
            mm::madvise(file.ptr.as_ptr().wrapping_add(first).cast(), skip - first + len, Advice::LinuxPopulateRead)
        };
        // Kernels before 5.14 do not know the advice, which only saves faults.
        ready.or_else(|e| if e == Errno::INVAL { Ok(()) } else { Err(e) })?;
        // SAFETY: `len` bytes from `skip` on lie in the mapping (checked above), which lives through the call.
        unsafe { self.write_absent(offset, len, file.ptr.as_ptr().wrapping_add(skip)) }?;
        // Behind the end of a file, the mapping of its last page reads as zero.
        match file.file.as_ref().map(rustix::fs::fstat).transpose()? {
            Some(stat) if u64::try_from(stat.st_size).unwrap_or(0) < at + len as u64 => {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            _ => Ok(()),
        }
    }

    /// Reads from a mapped file into a range that is present and that nobody else has.
    ///
    /// # Errors
    /// `Unsupported` for a file that is not regular; else as [`Region::write_from_file`].
    pub(crate) fn read_from_file(&self, offset: usize, len: usize, file: &FileMapping, at: u64) -> io::Result<()> {
        let file = file.file.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        if !within(offset, len, self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let end =
            at.checked_add(len as u64).and_then(|end| i64::try_from(end).ok()).ok_or(io::ErrorKind::InvalidInput)?;
        transfer(0, len, |done| {
            let to = self.ptr.as_ptr().wrapping_add(offset + done);
            let left = len - done;
            // SAFETY: the range lies in this region (checked above), and no reference into it is in use: only
            // `Exclusive` makes them, which owns its region, and this one is borrowed.
            unsafe { libc::pread64(file.as_raw_fd(), to.cast(), left, end - left as i64) }
        })
    }

    /// Fills a range, none of whose pages is present, with the bytes of a view of the same length: see
    /// [`Region::write_absent`].
    ///
    /// # Errors
    /// As [`Region::write_absent`].
    pub(crate) fn write_from_view(&self, offset: usize, from: VolatileSlice<'_>) -> io::Result<()> {
        // SAFETY: the view's bytes are mapped, and stay so while it is borrowed.
        unsafe { self.write_absent(offset, from.len(), from.as_ptr()) }
    }

    /// Fills a range of a memfd of ordinary pages, none of which is present, with the `len` bytes at `from`. The kernel
    /// does not zero the pages first: it makes them with these contents, by `userfaultfd`, for several threads at a
    /// time, or, where that is not allowed (the seccomp profiles of containers), by `pwrite`, for one. The rest of
    /// the last page is zero.
    ///
    /// # Errors
    /// `Unsupported` for memory without a descriptor, or one that cannot be written (hugetlbfs, a dma-buf);
    /// `InvalidInput` for a range that is not within this memory; `WouldBlock` where another thread writes it and there
    /// is no `userfaultfd`; the kernel's. Some of it may have been written.
    ///
    /// # Safety
    /// `len` bytes are mapped at `from` throughout the call; they may be bytes of a file that has ended.
    unsafe fn write_absent(&self, offset: usize, len: usize, from: *const u8) -> io::Result<()> {
        let fd = self.fd.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        if len == 0 || !within(offset, len, self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: whole pages of this region (checked above), and as many bytes as the caller promises.
        let done = unsafe { self.copy_absent(offset, len - len % page(), from) };
        let _alone = match self.writing.try_lock() {
            // The rest of a chunk is written soon, unless a page in its middle was there already.
            alone if done == 0 && len >= page() => Some(alone.map_err(|_| io::ErrorKind::WouldBlock)?),
            _ => None,
        };
        let written = transfer(done, len, |done| {
            let rest = from.wrapping_add(done);
            // SAFETY: the kernel reads bytes that the caller vouches for; bytes that cannot be had are an error of the
            // call. It writes to the file of a region that begins with the file (others have no descriptor), so at the
            // range's own offset; sealing keeps the file as long as it is.
            unsafe { libc::pwrite64(fd.as_raw_fd(), rest.cast(), len - done, (offset + done) as libc::off64_t) }
        });
        written.map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL) => io::ErrorKind::Unsupported.into(),
            _ => e,
        })
    }

    /// Makes whole pages with the contents at `from` as far as the kernel does it, and returns the number of bytes.
    ///
    /// The range is registered with a `userfaultfd` only during the call: while it is, a thread that touched a missing
    /// page of it would wait for ever. So it is taken back explicitly: a process that another thread forks meanwhile
    /// has the descriptor too, until it runs its program. After a refusal the kernel is not asked again.
    ///
    /// # Safety
    /// As [`Region::write_absent`]; the range is within this region, and its offset and length are whole pages.
    unsafe fn copy_absent(&self, offset: usize, len: usize, from: *const u8) -> usize {
        // Of linux/userfaultfd.h; the structures are words.
        const USER_MODE_ONLY: u32 = 1;
        const VERSION: u64 = 0xaa;
        const API: Opcode = opcode::read_write::<[u64; 3]>(0xaa, 0x3f);
        const REGISTER: Opcode = opcode::read_write::<[u64; 4]>(0xaa, 0);
        const UNREGISTER: Opcode = opcode::read::<[u64; 2]>(0xaa, 1);
        const COPY: Opcode = opcode::read_write::<[u64; 5]>(0xaa, 3);
        const MISSING: u64 = 1;
        const WAKE_NOBODY: u64 = 1;
        static REFUSED: AtomicBool = AtomicBool::new(false);
        if len == 0 || REFUSED.load(Ordering::Relaxed) {
            return 0;
        }
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: the descriptor is used in this function alone, as is said below.
        let faults = match unsafe { mm::userfaultfd(flags) } {
            Ok(faults) => faults,
            Err(why) => {
                // No such call or flag (before Linux 5.11), or not for this process: that does not change.
                REFUSED.store(matches!(why, Errno::NOSYS | Errno::INVAL | Errno::PERM), Ordering::Relaxed);
                return 0;
            }
        };
        let to = self.ptr.as_ptr().wrapping_add(offset).addr() as u64;
        let mut register = [to, len as u64, MISSING, 0];
        // SAFETY: as many words as the number of the request says, which name no memory.
        let begun = unsafe { ioctl(&faults, Updater::<API, _>::new(&mut [VERSION, 0, 0])) };
        // SAFETY: as many words again. They name whole pages of this region (checked by the caller), which the caller's
        // `Absent` owns, so that nothing refers to them.
        if begun.and_then(|()| unsafe { ioctl(&faults, Updater::<REGISTER, _>::new(&mut register)) }).is_err() {
            return 0;
        }
        let from = from.expose_provenance() as u64;
        let mut done = 0;
        while done < len {
            // The last word: how many bytes were copied, or a negative error number.
            let mut copy = [to + done as u64, from + done as u64, (len - done) as u64, WAKE_NOBODY, 0];
            // SAFETY: as above; and the bytes at `from`, for which the caller vouches.
            let all = unsafe { ioctl(&faults, Updater::<COPY, _>::new(&mut copy)) }.is_ok();
            match copy[4].cast_signed() {
                n if n > 0 => done += n as usize,
                _ if all => break,
                // A page table has gone meanwhile.
                n if n == -i64::from(libc::EAGAIN) => {}
                _ => break,
            }
        }
        // SAFETY: as above; the request takes the first two words.
        let _ = unsafe { ioctl(&faults, Updater::<UNREGISTER, _>::new(&mut register)) };
        done
    }

    /// Advises the kernel about a range, which the caller has checked to lie within.
    fn advise(&self, offset: usize, len: usize, advice: Advice) -> io::Result<()> {
        debug_assert!(offset + len <= self.len);
        // SAFETY: none of the advices used here discards contents or takes access away, so even a range outside this
        // region could harm nobody.
        Ok(unsafe { mm::madvise(self.ptr.as_ptr().wrapping_add(offset).cast(), len, advice) }?)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The memfd behind the region. From then on the region counts as exported.
    pub(crate) fn export(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd.as_ref()?;
        self.exported.store(true, Ordering::Relaxed);
        Some(fd.as_fd())
    }

    /// True for memory behind a descriptor.
    pub(crate) fn has_file(&self) -> bool {
        self.fd.is_some()
    }

    /// The file behind the region, which does not count as exported by that.
    ///
    /// # Safety
    /// As [`BufferRef::lend_file`](crate::BufferRef::lend_file).
    pub(crate) unsafe fn lend_file(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The memory as a volatile slice, which others may change at any time.
    #[inline]
    pub(crate) fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        // SAFETY: the range is mapped readable and writable for as long as `self` lives (invariant of `Region`; a write
        // to memory that is to be read alone ends the process, and changes nothing), and the view borrows `self`. No
        // reference into it is in use: only `Exclusive` makes slices, and it does not give access to its region.
        unsafe { VolatileSlice::from_raw(self.ptr, self.len) }
    }
}

/// A file that is mapped for [`Absent::copy_from_file`](crate::Absent::copy_from_file). Only the kernel reads the
/// mapping: where the file ends early or cannot be read, a copy fails and nobody gets a signal.
#[derive(Debug)]
pub struct FileMapping {
    ptr: NonNull<u8>,
    len: usize,
    /// File offset of the first byte, a whole page.
    start: u64,
    /// To ask where it ends; only of a regular file.
    file: Option<OwnedFd>,
}

// SAFETY: an address range of this process, tied to no thread, that this value alone unmaps and nobody dereferences.
unsafe impl Send for FileMapping {}
// SAFETY: as above; `&FileMapping` only passes addresses to the kernel.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps a range of a file. The file may end before the range does; copies from beyond its end then fail.
    ///
    /// # Errors
    /// `InvalidInput` for an empty range or one that does not fit the address space; the kernel's, for a file that
    /// cannot be mapped or read.
    pub fn new(file: BorrowedFd<'_>, range: std::ops::Range<u64>) -> io::Result<Self> {
        let start = range.start & !(page() as u64 - 1);
        let len = range.end.checked_sub(start).filter(|_| !range.is_empty()).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or(io::ErrorKind::InvalidInput)?;
        let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
        let own = (kind == rustix::fs::FileType::RegularFile).then(|| file.try_clone_to_owned()).transpose()?;
        // SAFETY: no address is asked for, so no existing mapping is replaced; nothing is ever read through this one.
        let base = unsafe { mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, start) }?;
        Ok(Self { ptr: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len, start, file: own })
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and nobody has its address.
        let _ = unsafe { mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// Stands for a driver's memory in tests.
#[cfg(test)]
// SAFETY: the span is this region's mapping, which nobody else accesses (invariant of `Region`), as long as it exists;
// mappings are whole pages.
unsafe impl DriverMemory for Region {
    fn span(&self) -> (NonNull<u8>, NonZeroUsize) {
        (self.ptr, NonZeroUsize::new(self.len).expect("a mapping is not empty"))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(home) = self.home.take_if(|_| !*self.exported.get_mut()) {
            // The mapping moves on, and this value does not unmap it.
            let mut moved = Region::bare(self.ptr, self.len);
            (moved.page, moved.fd) = (self.page, self.fd.take());
            (moved.slab, moved.driver) = (self.slab.take(), self.driver.take());
            return home.welcome(moved);
        }
        if self.driver().is_some() {
            // Every view borrows the region, and every fragment holds a reference to it, so none is left.
            return drop(self.driver.take());
        }
        if self.slab.is_some() {
            // The last fragment unmaps the mapping. Before, this frees the memory of a fragment of whole pages. Of
            // reserved huge pages, Linux 5.18 to 6.0 would free all that the range touches, with bytes of neighbours.
            if self.ptr.addr().get().is_multiple_of(self.page) && self.len.is_multiple_of(self.page) {
                // SAFETY: the range belongs to this fragment alone and is whole pages (checked above, and see `cut`),
                // so the kernel does not round it into a neighbour; every view borrows the region, so none exists that
                // could see the bytes change.
                let _ = unsafe { mm::madvise(self.ptr.as_ptr().cast(), self.len, Advice::LinuxDontNeed) };
            }
            return;
        }
        // SAFETY: the range is this region's own mapping, not a fragment of another; every view borrows the region, and
        // every fragment holds a reference to it, so none is left.
        let unmapped = unsafe { mm::munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

/// A region without any other access path, which therefore may be borrowed as a slice.
///
/// It owns its region, so no volatile slice, device or other process can access the memory while it exists.
pub(crate) struct Exclusive(Region);

impl Exclusive {
    /// Ends the sharing of a region. Owning it by value proves that no volatile slice exists (they borrow it) and no
    /// mapping (they hold a reference to it).
    ///
    /// # Errors
    /// Returns the region when its descriptor was exported, since another process may have it mapped.
    pub(crate) fn new(region: Region) -> Result<Self, Region> {
        if region.exported.load(Ordering::Relaxed) { Err(region) } else { Ok(Self(region)) }
    }

    pub(crate) fn into_region(self) -> Region {
        self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped and readable (invariant of `Region`), initialised (the kernel gives zeroed pages), and not
        // written by anyone else while borrowed: `Exclusive` owns the region, and `Exclusive::new` refuses an exported
        // one.
        unsafe { std::slice::from_raw_parts(self.0.ptr.as_ptr(), self.0.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr.as_ptr(), self.0.len) }
    }
}

/// Of linux/dma-heap.h.
#[repr(C)]
struct DmaHeapAllocation {
    len: u64,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

/// Of linux/udmabuf.h.
#[repr(C)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// A memfd of `len` bytes, sealed against shrinking and growing.
fn sealed_memfd(name: &str, flags: MemfdFlags, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// Calls `step`, a system call that transfers bytes, with how many are done, until it is `len`.
fn transfer(mut done: usize, len: usize, step: impl Fn(usize) -> isize) -> io::Result<()> {
    while done < len {
        match usize::try_from(step(done)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// True for `len` bytes from `start` on that lie within `all` bytes.
fn within(start: usize, len: usize, all: usize) -> bool {
    start.checked_add(len).is_some_and(|end| end <= all)
}

fn allocate_dma_buf(heap: BorrowedFd<'_>, len: usize) -> io::Result<OwnedFd> {
    const ALLOCATE: Opcode = opcode::read_write::<DmaHeapAllocation>(b'H', 0);
    let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    let mut allocation = DmaHeapAllocation { len: len as u64, fd: 0, fd_flags: flags, heap_flags: 0 };
    // SAFETY: the request number carries the size of the structure, which is what the kernel reads and writes. Another
    // kind of file refuses it.
    unsafe { ioctl(heap, Updater::<ALLOCATE, _>::new(&mut allocation)) }?;
    // SAFETY: the kernel has just opened this descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(allocation.fd as i32) })
}

/// `DMA_BUF_IOCTL_SYNC` of linux/dma-buf.h.
fn sync_dma_buf(dma_buf: BorrowedFd<'_>, begin: bool, writes: bool) -> io::Result<()> {
    const SYNC: Opcode = opcode::write::<u64>(b'b', 0);
    const READ: u64 = 1;
    const WRITE: u64 = 2;
    const END: u64 = 4;
    let flags = READ | if writes { WRITE } else { 0 } | if begin { 0 } else { END };
    loop {
        // SAFETY: the kernel reads one word, which lives through the call. Another kind of file refuses the request.
        match unsafe { ioctl(dma_buf, Setter::<SYNC, u64>::new(flags)) } {
            // The exporter was interrupted while it waited for a device.
            Err(Errno::AGAIN | Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// Wraps a range of pages of a memfd as a dma-buf.
pub(crate) fn udmabuf_create(
    device: BorrowedFd<'_>,
    memfd: BorrowedFd<'_>,
    offset: u64,
    size: u64,
) -> io::Result<OwnedFd> {
    const CREATE: Opcode = opcode::write::<UdmabufCreate>(b'u', 0x42);
    const CLOEXEC: u32 = 1;
    let create = UdmabufCreate { memfd: memfd.as_raw_fd() as u32, flags: CLOEXEC, offset, size };
    // SAFETY: as above; the kernel only reads the structure.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), CREATE as libc::Ioctl, &raw const create) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_of_huge_pages_leave_their_neighbours_alone() {
        let len = NonZeroUsize::new(2 * HUGE).unwrap();
        // What two fragments have, when the first one was dropped.
        let dropped = |page: usize, fragment: usize| {
            let mut region = Region::anonymous(len, PageKind::Transparent).unwrap();
            region.page = page;
            region.as_volatile_slice().fill(7);
            let start = region.ptr;
            let mut fragments = region.cut(fragment).ok().unwrap().into_iter();
            drop(fragments.next());
            // SAFETY: within the mapping, which the other fragments keep; nobody writes there.
            let bytes = [0, fragment].map(|at| unsafe { start.as_ptr().wrapping_add(at).read_volatile() });
            drop(fragments);
            bytes
        };
        assert_eq!(dropped(super::page(), HUGE / 2), [0, 7]);
        assert_eq!(dropped(HUGE, HUGE / 2), [7, 7], "a part of a page stays");
        assert_eq!(dropped(HUGE, HUGE), [0, 7]);
    }

    #[test]
    fn memory_of_a_guest_stays_as_it_is() {
        let guest = Region::anonymous(NonZeroUsize::new(4 * page()).unwrap(), PageKind::Base).unwrap();
        guest.as_volatile_slice().write(b"theirs");
        let (ptr, held) = (guest.ptr, Arc::new(()));
        for (skip, len) in [(0, 0), (8, page()), (0, page() + 8)] {
            // SAFETY: of the region, which lives on, and nobody has a reference into it.
            let refused = unsafe { RawMemory::new(ptr.byte_add(skip), len, ()) };
            let at = ptr.addr().get() + skip;
            let expected = format!("memory at {at:#x} of {len} bytes is not whole pages of {} bytes", page());
            assert_eq!(refused.err().unwrap().to_string(), expected);
        }
        // SAFETY: as above; the owner is the region.
        let memory = unsafe { RawMemory::new(ptr, 4 * page(), (guest, held.clone())) }.unwrap();
        let buf = crate::SharedBuf::from_memory(memory);
        let mut bytes = [0; 6];
        buf.as_volatile_slice().read(&mut bytes);
        assert_eq!((&bytes, buf.len()), (b"theirs", 4 * page()));
        buf.populate(page(), page()).unwrap();
        let buf = buf.into_cpu().unwrap_err();
        let mut slice = buf.into_slice();
        assert!(slice.with_bytes(|_| ()).is_none(), "others write to it");
        assert_eq!(Arc::strong_count(&held), 2);
        drop(slice);
        assert_eq!(Arc::strong_count(&held), 1, "given back");
    }
}
