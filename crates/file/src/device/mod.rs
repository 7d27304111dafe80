//! Files that are read and written at device addresses, as a device with queues.
//!
//! The character devices of DMA drivers (QDMA, XDMA) are such files, and so are block devices, files of `/dev/shm` and
//! memfds. A [`FileDevice`] opens one, or one for each direction; its [`queue`](FileDevice::queue)s copy in both
//! directions.
//!
//! Some drivers do asynchronous calls wrong without an error ([`probe`] names how). So a file device uses `pread` and
//! `pwrite` on threads unless io_uring was [asked for](FileDeviceOptions::probe_at): a character device is then probed,
//! regular files and disks are not written. [`FileDevice::how`] gives its I/O backend and the reasons.

mod backend;
mod probe;
mod queue;
mod workers;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use dmalane_addr::{CardAddr, Span};
use dmalane_device::{
    AddressSpace, BackingFiles, Device, DeviceInfo, DeviceMemory, FlatSpace, MemoryDriver, NoIommu, Region, contents,
};
use dmalane_dma::Registrar;
use dmalane_queue::DeviceQueue;
use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;
use thiserror::Error;

pub use backend::IoBackend;
pub use probe::ProbeError;
pub use queue::FileDeviceQueue;

use crate::cut::Align;
use crate::{Fallback, source};
use backend::Mover;
use probe::Count;

/// Which files a device consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDevicePaths {
    /// The file that is written.
    pub h2c: PathBuf,
    /// The file that is read.
    pub c2h: PathBuf,
}

impl FileDevicePaths {
    /// One file for both directions.
    pub fn same(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { h2c: path.clone(), c2h: path }
    }
}

/// How a file device is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileDeviceOptions {
    /// Tries io_uring. On a character device a probe writes 16 KiB here and reads them back: a multiple of 4 KiB, at
    /// least 16 KiB. The bytes there, and at 0, are restored. Regular files and disks are not probed, because the
    /// faults that it looks for are those of drivers, and their contents are somebody's. `None`: `pread` and `pwrite`.
    pub probe_at: Option<u64>,
    /// The best backend that is tried.
    pub best: IoBackend,
    /// Use this backend without a probe. For devices that are known to work.
    pub trust: Option<IoBackend>,
    /// Bypass the page cache. Then addresses, lengths and memory are multiples of [`FileDevice::alignment`].
    pub direct: bool,
    /// Operations, and requests to the kernel, in flight on a queue. Clamped to 1..=4096.
    pub depth: usize,
    /// Threads of a queue that uses `pread` and `pwrite`. Clamped to 1..=64.
    pub threads: usize,
    /// Bytes of a request at most; a longer operation is cut. Clamped to 64 KiB..=1 GiB and rounded up to a power of
    /// two.
    pub block: usize,
    /// Memory may be allocated where a regular file or a block device holds data, which is then overwritten. Without it
    /// such an allocation fails with [`HoldsData`]; operations on addresses that were not allocated are not checked. A
    /// character device is never asked.
    pub overwrite: bool,
}

/// The file of a file device holds data where memory was to be allocated.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{} holds data there, which would be overwritten", path.display())]
pub struct HoldsData {
    /// The file.
    pub path: PathBuf,
}

/// Lets memory be allocated only where the file holds no data.
struct Protected {
    file: File,
    path: PathBuf,
    /// Ranges that were allocated before, and so hold nobody else's data: the end of each by its start.
    given: BTreeMap<u64, u64>,
}

impl MemoryDriver for Protected {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let (first, end) = (range.first().bits(), range.last().bits() + 1);
        // The gaps between ranges that were given before; none of them overlap.
        let mut at = first;
        let before = self.given.range(..first).next_back().filter(|(_, until)| **until > first);
        let inside: Vec<(u64, u64)> =
            before.into_iter().chain(self.given.range(first..end)).map(|(a, b)| (*a, *b)).collect();
        for (given, until) in inside.iter().copied().chain([(end, end)]) {
            if given > at && contents::holds_data(&self.file, at, given - at)? {
                return Err(Box::new(HoldsData { path: self.path.clone() }));
            }
            at = at.max(until);
        }
        for (given, _) in &inside {
            self.given.remove(given);
        }
        let start = inside.first().map_or(first, |(given, _)| first.min(*given));
        let stop = inside.last().map_or(end, |(_, until)| end.max(*until));
        self.given.insert(start, stop);
        Ok(())
    }

    fn free(&mut self, _range: Span<CardAddr>) {}
}

impl Default for FileDeviceOptions {
    /// No probe, through the page cache, 64 operations, four threads, requests of 4 MiB; data are not overwritten.
    fn default() -> Self {
        let (best, trust) = (IoBackend::Fixed, None);
        Self { probe_at: None, best, trust, direct: false, depth: 64, threads: 4, block: 4 << 20, overwrite: false }
    }
}

/// The I/O backend of a file device, and why not a better one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDeviceHow {
    /// The backend.
    pub backend: IoBackend,
    /// Bypasses the page cache.
    pub direct: bool,
    /// A probe has found that it works.
    pub probed: bool,
    /// Why not a better one; empty when it is the best.
    pub reasons: Vec<BackendReason>,
    count: Count,
}

/// Why a file device has its backend, and not a better one.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BackendReason {
    /// [`FileDeviceOptions::trust`] names it.
    #[error("trusted without a probe")]
    Trusted,
    /// [`FileDeviceOptions::probe_at`] names no address.
    #[error("io_uring was not tried: that needs an offset (file:PATH,probe-at=OFFSET, FileDeviceOptions::probe_at)")]
    NotProbed,
    /// A better one is not available, or failed its probe.
    #[error("not {backend}: {error}")]
    Unfit {
        /// The better one.
        backend: IoBackend,
        /// The finding of its probe.
        error: ProbeError,
    },
    /// The kernel refused a better one.
    #[error(transparent)]
    Fallback(#[from] Fallback),
}

impl fmt::Display for FileDeviceHow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.backend)?;
        f.write_str(if self.direct { ", direct I/O" } else { "" })?;
        f.write_str(if self.probed { ", probed" } else { "" })?;
        f.write_str(if self.count == Count::Requests { ", completions count requests" } else { "" })?;
        for (i, reason) in self.reasons.iter().enumerate() {
            write!(f, "{}{reason}", if i == 0 { " (" } else { "; " })?;
        }
        f.write_str(if self.reasons.is_empty() { "" } else { ")" })
    }
}

/// Why a file is not used as a device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileDeviceError {
    /// It cannot be opened for what it is to do.
    #[error("cannot open {} for {what}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// "reading", "writing", "reading and writing".
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It cannot be read and written at addresses.
    #[error("{} is a {kind}, which has no addresses", path.display())]
    NoAddresses {
        /// The file.
        path: PathBuf,
        /// The kind of file.
        kind: &'static str,
    },
    /// A block device that a file system or something else uses.
    #[error("{} is in use (mounted, or part of another device)", .0.display())]
    InUse(PathBuf),
    /// [`FileDeviceOptions::direct`] is not possible.
    #[error("no direct I/O on {}: {source}", path.display())]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Fallback,
    },
    /// [`FileDeviceOptions::probe_at`] is not usable.
    #[error("cannot probe at {at:#x}: {source}")]
    ProbeAt {
        /// The address.
        at: u64,
        /// The reason.
        source: BadProbeAddress,
    },
    /// A probe did not read back what was written by synchronous calls.
    #[error("{} does not keep what is written to it: {source}", path.display())]
    NotMemory {
        /// The file.
        path: PathBuf,
        /// The observation of the probe.
        source: ProbeError,
    },
    /// A probe of io_uring has changed the device, and what was there could not be written back.
    #[error("the probe of io_uring has left {} changed: {source}", path.display())]
    ProbeDamage {
        /// The file.
        path: PathBuf,
        /// The observation of the probe, with the addresses.
        source: ProbeError,
    },
    /// The backend of [`FileDeviceOptions::trust`] is not available.
    #[error("no {backend}: {source}")]
    NoBackend {
        /// Which.
        backend: IoBackend,
        /// Why not.
        source: Fallback,
    },
    /// No queue could be made.
    #[error(transparent)]
    NoQueue(Fallback),
}

/// An address that a probe cannot use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BadProbeAddress {
    /// A probe there would overlap address 0.
    #[error("it must be at least 16 KiB, so that a write that goes to address 0 instead shows")]
    TooLow,
    /// It is not at the beginning of a page.
    #[error("it must be a multiple of 4 KiB")]
    Misaligned,
    /// The device, of so many bytes, ends before the probe does.
    #[error("the device ends at {0:#x}, and 16 KiB are needed")]
    PastEnd(u64),
    /// No file has such an address.
    #[error("it is past the top of what a file can have")]
    PastTop,
}

/// A device that is a file, or two: one region of memory, no MMU, and a queue.
pub struct FileDevice {
    opened: Arc<Opened>,
    regions: Vec<Region>,
    queue: Option<FileDeviceQueue>,
    space: FlatSpace,
}

struct Opened {
    h2c: Arc<File>,
    c2h: Arc<File>,
    paths: FileDevicePaths,
    len: Option<u64>,
    align: Option<Align>,
    options: FileDeviceOptions,
    /// As chosen when it was opened.
    how: FileDeviceHow,
    /// As its queues found since; `None` while that is the same.
    used: Mutex<Option<FileDeviceHow>>,
    registrar: NoIommu,
}

impl FileDevice {
    /// Opens the files, and probes them if the options say where.
    ///
    /// A block device is opened exclusively, so that a mounted one is not overwritten. The length of a file is its
    /// length now: nothing is written past it.
    ///
    /// # Errors
    /// [`FileDeviceError`].
    pub fn open(paths: FileDevicePaths, options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
        let options = FileDeviceOptions {
            depth: options.depth.clamp(1, 4096),
            threads: options.threads.clamp(1, 64),
            block: options.block.clamp(64 << 10, 1 << 30).next_power_of_two(),
            ..options
        };
        let (h2c, c2h) = if paths.h2c == paths.c2h {
            let file = Arc::new(open(&paths.h2c, OFlags::RDWR, options.direct)?);
            (file.clone(), file)
        } else {
            let h2c = open(&paths.h2c, OFlags::WRONLY, options.direct)?;
            (Arc::new(h2c), Arc::new(open(&paths.c2h, OFlags::RDONLY, options.direct)?))
        };
        let len = match (len(&h2c, &paths.h2c)?, len(&c2h, &paths.c2h)?) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let align = match options.direct {
            false => None,
            true => {
                let of = |file: &File, path: &Path| {
                    source::alignment(file)
                        .map_err(|source| FileDeviceError::NoDirect { path: path.to_owned(), source })
                };
                let (a, b) = (of(&h2c, &paths.h2c)?, of(&c2h, &paths.c2h)?);
                Some(Align { memory: a.memory.max(b.memory), offset: a.offset.max(b.offset) })
            }
        };
        let how = FileDeviceHow {
            backend: IoBackend::Workers,
            direct: options.direct,
            probed: false,
            reasons: Vec::new(),
            count: Count::Bytes,
        };
        let (used, registrar) = (Mutex::default(), NoIommu::new());
        let mut this = Opened { h2c, c2h, paths, len, align, options, how, used, registrar };
        this.choose_backend()?;
        let opened = Arc::new(this);
        let queue = Some(opened.clone().queue()?);
        // A character device does not say how long it is: as long as a file can be.
        let len = opened.len.unwrap_or(i64::MAX as u64) & !0xfff;
        let span = Span::new(CardAddr::new(0), len);
        let regions = span.map(|span| Region::new("device", span)).into_iter().collect();
        Ok(Self { opened, regions, queue, space: FlatSpace::new() })
    }

    /// For a file that is open: it is opened again, so that the position and flags of `file` stay as they are.
    ///
    /// # Errors
    /// As [`FileDevice::open`].
    pub fn from_file(file: &File, options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
        Self::open(FileDevicePaths::same(format!("/proc/self/fd/{}", file.as_raw_fd())), options)
    }

    /// The files.
    pub fn paths(&self) -> &FileDevicePaths {
        &self.opened.paths
    }

    /// Addresses, lengths and host memory are multiples of this: 1 unless [`FileDeviceOptions::direct`].
    pub fn alignment(&self) -> usize {
        self.opened.align.map_or(1, |a| a.memory.max(a.offset))
    }

    /// The I/O backend, and the reasons for it: what was chosen when it was opened, or what its queues use since the
    /// kernel has refused that.
    pub fn how(&self) -> FileDeviceHow {
        let used = self.opened.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.as_ref().unwrap_or(&self.opened.how).clone()
    }

    /// A queue. There can be any number of them; only within one queue do operations wait for others on the same
    /// addresses.
    ///
    /// # Errors
    /// [`FileDeviceError::NoQueue`] when the kernel refuses threads or rings.
    pub fn queue(&self) -> Result<FileDeviceQueue, FileDeviceError> {
        self.opened.clone().queue()
    }
}

impl Device for FileDevice {
    fn info(&self) -> DeviceInfo {
        let FileDevicePaths { h2c, c2h } = &self.opened.paths;
        let name = match h2c == c2h {
            true => format!("file:{}", h2c.display()),
            false => format!("file:{},c2h={}", h2c.display(), c2h.display()),
        };
        DeviceInfo { name, notes: vec![format!("by {}", self.how())], processors: 1, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn memory(&self) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.regions);
        if self.opened.options.overwrite {
            return memory;
        }
        match contents::reopen(&self.opened.h2c) {
            Ok(Some(file)) => {
                memory.driven_by(Protected { file, path: self.opened.paths.h2c.clone(), given: BTreeMap::new() })
            }
            // A character device, or a file that may only be written: nobody can say what it holds.
            _ => memory,
        }
    }

    /// Registers memory for fixed buffers of io_uring; queues also take memory without a registration.
    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.opened.registrar.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        self.queue.take().map(|queue| Box::new(queue) as Box<DeviceQueue>).into_iter().collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut self.space
    }

    fn backing_files(&self) -> Option<BackingFiles> {
        Some(BackingFiles { written: self.opened.h2c.clone(), read: self.opened.c2h.clone() })
    }
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileDevice({}: {})", self.opened.paths.h2c.display(), self.opened.how)
    }
}

impl Opened {
    fn queue(self: Arc<Self>) -> Result<FileDeviceQueue, FileDeviceError> {
        let FileDeviceOptions { depth, threads, .. } = self.options;
        let mover = Mover::new(self.how.backend, depth, threads).map_err(FileDeviceError::NoQueue)?;
        Ok(FileDeviceQueue::new(self, mover))
    }

    /// Chooses the backend: the best that the probe finds to work.
    fn choose_backend(&mut self) -> Result<(), FileDeviceError> {
        let FileDeviceOptions { probe_at, best, trust, depth, .. } = self.options;
        if let Some(backend) = trust {
            Mover::new(backend, depth, 1).map_err(|source| FileDeviceError::NoBackend { backend, source })?;
            self.how.backend = backend;
            self.how.reasons.push(BackendReason::Trusted);
            return Ok(());
        }
        let Some(at) = probe_at else {
            self.how.reasons.push(BackendReason::NotProbed);
            return Ok(());
        };
        let fuse = source::is_fuse(&self.h2c) || source::is_fuse(&self.c2h);
        let tried = IoBackend::ALL.into_iter().filter(|backend| *backend <= best && *backend != IoBackend::Workers);
        let ring = |backend| match fuse {
            true => Err(ProbeError::from(Fallback::Fuse)),
            false => Mover::new(backend, depth, 1).map_err(ProbeError::from),
        };
        if ![&self.h2c, &self.c2h].iter().any(|file| is_char_device(file)) {
            for backend in tried {
                match ring(backend) {
                    Ok(_) => {
                        self.how.backend = backend;
                        break;
                    }
                    Err(error) => self.how.reasons.push(BackendReason::Unfit { backend, error }),
                }
            }
            return Ok(());
        }
        self.check_probe_at(at)?;
        let target = probe::Target { h2c: &self.h2c, c2h: &self.c2h, at };
        let no_memory = |source| FileDeviceError::NotMemory { path: self.paths.h2c.clone(), source };
        let no_queue = FileDeviceError::NoQueue;
        let mut safe = Mover::new(IoBackend::Workers, depth, 1).map_err(no_queue)?;
        let mut plain = Mover::new(IoBackend::Workers, depth, 2).map_err(no_queue)?;
        probe::probe(&target, &mut safe, &mut plain).map_err(no_memory)?;
        self.how.probed = true;
        for backend in tried {
            match ring(backend).and_then(|mut mover| probe::probe(&target, &mut safe, &mut mover)) {
                Ok(count) => {
                    (self.how.backend, self.how.count) = (backend, count);
                    return Ok(());
                }
                // The previous contents are lost, or about to be.
                Err(error @ (ProbeError::Hangs { .. } | ProbeError::NotRestored { .. })) => {
                    return Err(FileDeviceError::ProbeDamage { path: self.paths.h2c.clone(), source: error });
                }
                Err(error) => self.how.reasons.push(BackendReason::Unfit { backend, error }),
            }
        }
        Ok(())
    }

    /// Refuses an address that the probe cannot use.
    fn check_probe_at(&self, at: u64) -> Result<(), FileDeviceError> {
        let len = probe::LEN as u64;
        let source = match at.checked_add(len) {
            _ if at < len => BadProbeAddress::TooLow,
            _ if !at.is_multiple_of(4096) => BadProbeAddress::Misaligned,
            Some(end) if self.len.is_none_or(|len| end <= len) && end <= i64::MAX as u64 => return Ok(()),
            _ => self.len.map_or(BadProbeAddress::PastTop, BadProbeAddress::PastEnd),
        };
        Err(FileDeviceError::ProbeAt { at, source })
    }
}

fn open(path: &Path, access: OFlags, direct: bool) -> Result<File, FileDeviceError> {
    let what = match access {
        OFlags::RDONLY => "reading",
        OFlags::WRONLY => "writing",
        _ => "reading and writing",
    };
    let failed = |e: Errno| FileDeviceError::Open { path: path.to_owned(), what, source: e.into() };
    // The type first: opening a FIFO or some devices blocks or has side effects.
    let kind = rustix::fs::stat(path).map_err(failed)?;
    let kind = rustix::fs::FileType::from_raw_mode(kind.st_mode);
    let mut flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
    flags.set(OFlags::DIRECT, direct);
    use rustix::fs::FileType as Kind;
    let other = match kind {
        Kind::RegularFile | Kind::CharacterDevice => None,
        // Exclusively: refused where the device is mounted. Reading does no harm.
        Kind::BlockDevice => {
            flags.set(OFlags::EXCL, access != OFlags::RDONLY);
            None
        }
        Kind::Directory => Some("directory"),
        Kind::Fifo => Some("FIFO"),
        Kind::Socket => Some("socket"),
        _ => Some("special file"),
    };
    if let Some(kind) = other {
        return Err(FileDeviceError::NoAddresses { path: path.to_owned(), kind });
    }
    match rustix::fs::open(path, flags, Permissions::empty()) {
        Ok(fd) => Ok(fd.into()),
        Err(Errno::BUSY) if kind == Kind::BlockDevice => Err(FileDeviceError::InUse(path.to_owned())),
        Err(e @ Errno::INVAL) if direct => {
            Err(FileDeviceError::NoDirect { path: path.to_owned(), source: Fallback::DirectOpen(e.raw_os_error()) })
        }
        Err(e) => Err(failed(e)),
    }
}

fn is_char_device(file: &File) -> bool {
    file.metadata().is_ok_and(|meta| meta.file_type().is_char_device())
}

/// Bytes of a file or block device; `None` for character devices.
fn len(file: &File, path: &Path) -> Result<Option<u64>, FileDeviceError> {
    let failed = |source| FileDeviceError::Open { path: path.to_owned(), what: "its length", source };
    let meta = file.metadata().map_err(failed)?;
    if meta.is_file() {
        return Ok(Some(meta.len()));
    }
    if meta.file_type().is_block_device() {
        // The position belongs to this descriptor, and nothing here reads by it.
        let end = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|e| failed(e.into()))?;
        return Ok(Some(end));
    }
    if meta.file_type().is_char_device() && file.is_terminal() {
        return Err(FileDeviceError::NoAddresses { path: path.to_owned(), kind: "terminal" });
    }
    Ok(None)
}
