//! An open file: the descriptor that reads through the page cache, and the one that reads past it.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dmalane_addr::FileOffset;
use rustix::fs::{Advice, AtFlags, Mode as Permissions, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::cut::Align;
use crate::{Error, Fallback, Mode};

/// For file systems that do direct I/O and do not say how: a multiple of every block size that they use.
const UNSAID: Align = Align { memory: 4096, offset: 4096 };

pub(crate) struct Source {
    pub path: PathBuf,
    pub buffered: Arc<File>,
    pub direct: Option<(Arc<File>, Align)>,
    /// The descriptor reads without waiting, which io_uring takes literally; its owner may share the flag, so it stays.
    pub nonblocking: bool,
    /// The buffered descriptor's open file is nobody else's, so it may be advised.
    own: bool,
}

impl Source {
    /// Opens a file by name. Never waits for the other end of a FIFO.
    pub fn open(path: &Path, mode: Mode) -> Result<(Self, Option<Fallback>), Error> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let failed = |e: Errno| Error::Open { path: path.into(), source: e.into() };
        let file: File = rustix::fs::open(path, flags, Permissions::empty()).map_err(failed)?.into();
        Self::check(&file, path)?;
        // NONBLOCK would make io_uring give up where it should wait.
        rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(failed)?;
        Self::new(file, path.into(), mode, true, false)
    }

    /// Takes a file that somebody else has opened. It is opened again where its flags or its advice would have to be
    /// others; where that is refused (a file that this user may not open), it is read as it is.
    pub fn adopt(file: File, path: PathBuf, mode: Mode) -> Result<(Self, Option<Fallback>), Error> {
        Self::check(&file, &path)?;
        let given = rustix::fs::fcntl_getfl(&file).map_err(|e| Error::Open { path: path.clone(), source: e.into() })?;
        if mode == Mode::Buffered && !given.intersects(OFlags::DIRECT | OFlags::NONBLOCK | OFlags::WRONLY) {
            return Self::new(file, path, mode, false, false);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        match open_again(&file, &path, flags) {
            Ok(again) => Self::new(again, path, mode, true, false),
            Err(_) if given.contains(OFlags::DIRECT) => Err(Error::OnlyDirect { path }),
            Err(_) => Self::new(file, path, mode, false, given.contains(OFlags::NONBLOCK)),
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

    /// Prepares an open file, and says why not for direct I/O where that was to be had.
    fn new(
        file: File,
        path: PathBuf,
        mode: Mode,
        own: bool,
        nonblocking: bool,
    ) -> Result<(Self, Option<Fallback>), Error> {
        let mut source = Self { path, buffered: Arc::new(file), direct: None, nonblocking, own };
        if mode == Mode::Buffered {
            return Ok((source, None));
        }
        match reopen(&source.buffered, &source.path) {
            Ok((file, align)) => {
                // Heads and tails alone are read through the cache: reading ahead of them would be wasted.
                source.advise(Advice::Random);
                source.direct = Some((Arc::new(file), align));
                Ok((source, None))
            }
            Err(why) if mode == Mode::Direct => Err(Error::NoDirect { path: source.path.clone(), source: why }),
            Err(why) => Ok((source, Some(why))),
        }
    }

    /// Gives direct I/O up.
    pub fn forget_direct(&mut self) {
        self.direct = None;
        self.advise(Advice::Normal);
    }

    /// Where the file ends at this moment, or `at` when that is earlier or the end is unknown (block devices).
    pub fn end_before(&self, at: u64) -> FileOffset {
        let end = self.buffered.metadata().ok().filter(|m| m.is_file()).map_or(at, |m| m.len());
        FileOffset::new(end.min(at))
    }

    fn advise(&self, advice: Advice) {
        if self.own {
            // Only advice: without it the reads are as right, if slower.
            let _ = rustix::fs::fadvise(&self.buffered, 0, None, advice);
        }
    }
}

/// Opens the same file again, whatever has its path by now; where no `/proc` is mounted, by its path, if that is still
/// the file.
fn open_again(file: &File, path: &Path, flags: OFlags) -> io::Result<File> {
    let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::open(descriptor, flags, Permissions::empty()) {
        Err(Errno::NOENT) => {}
        other => return Ok(File::from(other?)),
    }
    let was = file.metadata()?;
    let same = |is: Metadata| match (is.dev(), is.ino()) == (was.dev(), was.ino()) {
        true => Ok(()),
        false => Err(Errno::NOENT),
    };
    // Before it is opened, too: another file might be a FIFO.
    same(std::fs::metadata(path)?)?;
    let again = File::from(rustix::fs::open(path, flags, Permissions::empty())?);
    same(again.metadata()?)?;
    Ok(again)
}

/// Opens the same file again for direct I/O.
fn reopen(file: &File, path: &Path) -> Result<(File, Align), Fallback> {
    if let Some(name) = memory_file_system(file) {
        // tmpfs accepts O_DIRECT since Linux 6.6 and then copies from the page cache all the same.
        return Err(Fallback::InMemory(name));
    }
    let align = alignment(file)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    let again = open_again(file, path, flags);
    let refused = |e: io::Error| Fallback::DirectOpen(e.raw_os_error().unwrap_or(0));
    Ok((again.map_err(refused)?, align))
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
pub(crate) fn is_fuse(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| s.f_type as u32 == 0x6573_5546)
}

/// The answer of statx, or a safe guess where it has none.
pub(crate) fn alignment(file: impl AsFd) -> Result<Align, Fallback> {
    let stat = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => stat,
        _ => return Ok(UNSAID),
    };
    check(stat.stx_dio_mem_align, stat.stx_dio_offset_align)
}

fn check(memory: u32, offset: u32) -> Result<Align, Fallback> {
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
        assert_eq!(check(4, 512), Ok(Align { memory: 4, offset: 512 }));
        for (memory, offset) in [(0, 0), (0, 512), (512, 0), (3, 512), (512, 768), (512, 1 << 20)] {
            assert!(check(memory, offset).unwrap_err().to_string().contains("direct I/O"));
        }
    }
}
