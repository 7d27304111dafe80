//! Opening the files of a device.

use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use dmalane_device::NoIommu;
use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::{FileDeviceError, FileDeviceOptions, FileDevicePaths};
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
    pub(super) registrar: NoIommu,
}

impl Opened {
    /// Opens the files.
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
        Ok(Self { h2c, c2h, paths, len, align, options, registrar: NoIommu::new() })
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

/// Bytes of a file or block device; `None` for character devices.
fn len(file: &File, path: &Path) -> Result<Option<u64>, FileDeviceError> {
    let failed = |source| FileDeviceError::Open { path: path.to_owned(), what: "its length", source };
    let sized = |len| match len {
        0..4096 => Err(FileDeviceError::TooSmall { path: path.to_owned(), len }),
        len => Ok(Some(len)),
    };
    let meta = file.metadata().map_err(failed)?;
    if meta.is_file() {
        return sized(meta.len());
    }
    if meta.file_type().is_block_device() {
        // The position belongs to this descriptor, and nothing here reads by it.
        let end = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|e| failed(e.into()))?;
        return sized(end);
    }
    if meta.file_type().is_char_device() && file.is_terminal() {
        return Err(FileDeviceError::NoAddresses { path: path.to_owned(), kind: "terminal" });
    }
    Ok(None)
}
