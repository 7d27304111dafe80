//! Opening the files of a device, and the choice of its I/O backend.

use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use dmalane_device::NoIommu;
use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::backend::Mover;
use super::probe::{self, Count};
use super::{
    BackendReason, BadProbeAddress, FileDeviceError, FileDeviceHow, FileDeviceOptions, FileDevicePaths, IoBackend,
    ProbeError,
};
use crate::cut::Align;
use crate::{Fallback, source};

/// The files of a device, open, and how they are used.
pub(super) struct Opened {
    pub(super) h2c: Arc<File>,
    pub(super) c2h: Arc<File>,
    pub(super) paths: FileDevicePaths,
    pub(super) len: Option<u64>,
    pub(super) align: Option<Align>,
    pub(super) options: FileDeviceOptions,
    /// As chosen when it was opened.
    pub(super) how: FileDeviceHow,
    /// As its queues found since; `None` while that is the same.
    pub(super) used: Mutex<Option<FileDeviceHow>>,
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
        let how = FileDeviceHow {
            backend: IoBackend::Workers,
            direct: options.direct,
            probed: false,
            reasons: Vec::new(),
            count: Count::Bytes,
        };
        let (used, registrar) = (Mutex::default(), NoIommu::new());
        let mut this = Self { h2c, c2h, paths, len, align, options, how, used, registrar };
        this.choose_backend()?;
        Ok(this)
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
