//! An open file: the descriptor that reads through the page cache, and the one that reads past it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use rustix::fs::{AtFlags, OFlags, StatxFlags};

use crate::cut::Align;
use crate::error::errno;
use crate::handle::{FileHandle, open_again};
use crate::{Error, Fallback, Mode};

/// For file systems that do direct I/O and do not say how: a multiple of every block size that they use.
const UNSAID: Align = Align { memory: 4096, offset: 4096 };

pub(crate) struct Source {
    pub handle: FileHandle,
    /// The alignment that direct I/O demands, if it is to be had.
    pub direct: Option<Align>,
    /// The descriptor reads without waiting, which io_uring takes literally; its owner may share the flag, so it stays.
    pub nonblocking: bool,
}

/// The descriptors of a source while reads of it are in flight.
#[derive(Clone)]
pub(crate) struct Held {
    pub buffered: Arc<File>,
    pub direct: Option<Arc<File>>,
}

impl Source {
    /// Opens a file by name. Never waits for the other end of a FIFO.
    pub fn open(path: &Path, mode: Mode) -> Result<(Self, Option<Fallback>), Error> {
        let failed = |source| Error::Open { path: path.into(), source };
        Self::new(FileHandle::open(path).map_err(failed)?, mode, false)
    }

    /// Takes a file that somebody else has opened. It is opened again where its flags would have to be others; where
    /// that is refused (a file that this user may not open), it is read as it is.
    pub fn adopt(handle: FileHandle, mode: Mode) -> Result<(Self, Option<Fallback>), Error> {
        let failed = |source| Error::Open { path: handle.path().into(), source };
        if handle.is_named() {
            return Self::new(handle, mode, false);
        }
        let file = handle.file().map_err(failed)?;
        let given = rustix::fs::fcntl_getfl(&file).map_err(|e| failed(e.into()))?;
        if !given.intersects(OFlags::DIRECT | OFlags::NONBLOCK | OFlags::WRONLY) {
            return Self::new(handle, mode, false);
        }
        check(&file, handle.path())?;
        match open_again(&file, handle.path(), OFlags::RDONLY | OFlags::CLOEXEC) {
            Ok(again) => Self::new(FileHandle::new(again, handle.path()), mode, false),
            Err(_) if given.contains(OFlags::DIRECT) => Err(Error::OnlyDirect { path: handle.path().into() }),
            Err(_) => Self::new(handle, mode, given.contains(OFlags::NONBLOCK)),
        }
    }

    /// Prepares an open file, and says why not for direct I/O where that was to be had.
    fn new(handle: FileHandle, mode: Mode, nonblocking: bool) -> Result<(Self, Option<Fallback>), Error> {
        let mut source = Self { handle, direct: None, nonblocking };
        let path = || source.handle.path().to_owned();
        if !source.handle.is_named() || mode != Mode::Buffered {
            let file = source.handle.file().map_err(|source| Error::Open { path: path(), source })?;
            check(&file, source.handle.path())?;
        }
        if mode == Mode::Buffered {
            return Ok((source, None));
        }
        match reopen(&source.handle) {
            Ok(align) => {
                source.direct = Some(align);
                Ok((source, None))
            }
            Err(why) if mode == Mode::Direct => Err(Error::NoDirect { path: path(), source: why }),
            Err(why) => Ok((source, Some(why))),
        }
    }

    /// Its descriptors, opened again where they were closed.
    pub fn hold(&self) -> io::Result<Held> {
        let direct = self.direct.map(|_| self.handle.direct()).transpose()?;
        Ok(Held { buffered: self.handle.file()?, direct })
    }

    /// Where the file ends at this moment, or `at` when that is earlier or the end is unknown (block devices).
    pub fn end_before(&self, at: u64) -> FileOffset {
        let end = self.handle.metadata().ok().filter(|m| m.is_file()).map_or(at, |m| m.len());
        FileOffset::new(end.min(at))
    }
}

/// Refuses what has no offsets.
fn check(file: &File, path: &Path) -> Result<(), Error> {
    let path = path.to_owned();
    let kind = match file.metadata() {
        Ok(meta) => meta.file_type(),
        Err(source) => return Err(Error::Open { path, source }),
    };
    let other = match kind {
        k if k.is_file() || k.is_block_device() => None,
        k if k.is_dir() => Some("directory"),
        k if k.is_fifo() => Some("FIFO"),
        k if k.is_socket() => Some("socket"),
        k if k.is_char_device() => Some("character device"),
        _ => Some("special file"),
    };
    match other {
        Some(kind) => Err(Error::NotAFile { path, kind }),
        None => Ok(()),
    }
}

/// Opens the same file again for direct I/O.
fn reopen(handle: &FileHandle) -> Result<Align, Fallback> {
    let refused = |e: io::Error| Fallback::DirectOpen(errno(&e));
    let file = handle.file().map_err(refused)?;
    if let Some(name) = memory_file_system(&file) {
        // tmpfs accepts O_DIRECT since Linux 6.6 and then copies from the page cache all the same.
        return Err(Fallback::InMemory(name));
    }
    let align = alignment(&file)?;
    handle.direct().map_err(refused)?;
    Ok(align)
}

fn memory_file_system(file: &File) -> Option<&'static str> {
    // The name of a block device is a file of devtmpfs.
    file.metadata().ok().filter(|meta| meta.is_file())?;
    match rustix::fs::fstatfs(file).ok()?.f_type as u32 {
        0x0102_1994 => Some("tmpfs"),
        0x8584_58f6 => Some("ramfs"),
        0x9584_58f6 => Some("hugetlbfs"),
        _ => None,
    }
}

/// True for a file on a FUSE file system.
pub(crate) fn is_fuse(file: &FileHandle) -> bool {
    file.file().and_then(|file| Ok(rustix::fs::fstatfs(file)?)).is_ok_and(|s| s.f_type as u32 == 0x6573_5546)
}

/// The answer of statx, or a safe guess where it has none.
pub(crate) fn alignment(file: impl AsFd) -> Result<Align, Fallback> {
    let stat = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => stat,
        _ => return Ok(UNSAID),
    };
    supported(stat.stx_dio_mem_align, stat.stx_dio_offset_align)
}

fn supported(memory: u32, offset: u32) -> Result<Align, Fallback> {
    match (memory, offset) {
        (0, _) | (_, 0) => Err(Fallback::NoDirect),
        // 64 KiB is the smallest block, which must be a multiple of both.
        _ if memory.is_power_of_two() && offset.is_power_of_two() && memory.max(offset) <= 64 << 10 => {
            Ok(Align { memory: memory as usize, offset: offset as usize })
        }
        _ => Err(Fallback::Alignment { memory, offset }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_alignments_are_refused_with_a_reason() {
        assert_eq!(supported(4, 512), Ok(Align { memory: 4, offset: 512 }));
        for (memory, offset) in [(0, 0), (0, 512), (512, 0), (3, 512), (512, 768), (512, 1 << 20)] {
            assert!(supported(memory, offset).unwrap_err().to_string().contains("direct I/O"));
        }
    }
}
