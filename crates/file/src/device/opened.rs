//! Opening the files of a device, and the choice between threads and io_uring.

use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmalane_device::NoIommu;
use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::backend::Mover;
use super::probe::{self, Count, ProbeError};
use super::{FileDeviceError, FileDeviceOptions, FileDevicePaths};
use crate::cut::Align;
use crate::{Fallback, How, source};

/// The files of a device, open, and how they are used.
pub(super) struct Opened {
    pub(super) h2c: Arc<File>,
    pub(super) c2h: Arc<File>,
    pub(super) paths: FileDevicePaths,
    pub(super) len: Option<u64>,
    pub(super) align: Option<Align>,
    pub(super) options: FileDeviceOptions,
    /// As chosen when it was opened, until a queue falls back to threads.
    pub(super) how: Mutex<How>,
    /// The unit in which a ring's completions count.
    pub(super) count: Count,
    pub(super) registrar: NoIommu,
}

impl Opened {
    /// Opens the files, and probes them if the options say where.
    pub(super) fn new(paths: FileDevicePaths, options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
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
        let how = Mutex::new(How { direct: options.direct, ..How::plain() });
        let (count, registrar) = (Count::Bytes, NoIommu::new());
        let mut this = Self { h2c, c2h, paths, len, align, options, how, count, registrar };
        let tried = this.try_ring()?;
        let how = this.how.get_mut().unwrap_or_else(PoisonError::into_inner);
        match tried {
            Ok(count) => (how.uring, this.count) = (true, count),
            Err(why) => how.reasons.push(why),
        }
        Ok(this)
    }

    /// How this device is used now.
    pub(super) fn how(&self) -> MutexGuard<'_, How> {
        self.how.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The unit in which a ring's completions count, or why requests are not made through a ring.
    fn try_ring(&self) -> Result<Result<Count, Fallback>, FileDeviceError> {
        let FileDeviceOptions { probe_at, depth, .. } = self.options;
        let Some(at) = probe_at else { return Ok(Err(Fallback::NotProbed)) };
        let ring = match source::is_fuse(&self.h2c) || source::is_fuse(&self.c2h) {
            true => Err(Fallback::Fuse),
            false => Mover::ring(depth),
        };
        if ![&self.h2c, &self.c2h].iter().any(|file| is_char_device(file)) {
            return Ok(ring.map(|_| Count::Bytes));
        }
        self.check_probe_at(at)?;
        let target = probe::Target { h2c: &self.h2c, c2h: &self.c2h, at };
        let path = || self.paths.h2c.clone();
        let threads = |threads| Mover::workers(depth, threads).map_err(FileDeviceError::NoQueue);
        let (mut safe, mut plain) = (threads(1)?, threads(2)?);
        probe::probe(&target, &mut safe, &mut plain).map_err(|error| {
            let (ProbeError::Unfit(why) | ProbeError::Damage(why)) = error;
            FileDeviceError::NotMemory { path: path(), why }
        })?;
        let mut ring = match ring {
            Ok(ring) => ring,
            Err(why) => return Ok(Err(why)),
        };
        match probe::probe(&target, &mut safe, &mut ring) {
            Ok(count) => Ok(Ok(count)),
            Err(ProbeError::Unfit(why)) => Ok(Err(Fallback::Probe(why))),
            // The previous contents are lost, or about to be.
            Err(ProbeError::Damage(why)) => Err(FileDeviceError::ProbeDamage { path: path(), why }),
        }
    }

    /// Refuses an address that the probe cannot use.
    fn check_probe_at(&self, at: u64) -> Result<(), FileDeviceError> {
        let len = probe::LEN as u64;
        let why = match at.checked_add(len) {
            // A probe there would overlap address 0.
            _ if at < len => {
                "it must be at least 16 KiB, so that a write that goes to address 0 instead shows".to_owned()
            }
            _ if !at.is_multiple_of(4096) => "it must be a multiple of 4 KiB".to_owned(),
            Some(end) if self.len.is_none_or(|len| end <= len) && end <= i64::MAX as u64 => return Ok(()),
            _ => match self.len {
                Some(end) => format!("the device ends at {end:#x}, and 16 KiB are needed"),
                None => "it is past the top of what a file can have".to_owned(),
            },
        };
        Err(FileDeviceError::ProbeAt { at, why })
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
