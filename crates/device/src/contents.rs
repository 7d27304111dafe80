//! Data in a file that serves as device memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};

use rustix::fs::{SeekFrom, seek};

/// Part of a file: data, or a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileExtent {
    /// Where it begins, in bytes.
    pub at: u64,
    /// Bytes; at least one.
    pub len: u64,
    /// False for a hole, which reads as zeroes.
    pub data: bool,
}

impl FileExtent {
    /// The extent, cut into blocks of at most `block` bytes: where each begins, and its bytes.
    pub fn blocks(self, block: usize) -> impl Iterator<Item = (u64, usize)> {
        let Self { at, len, .. } = self;
        (0..len).step_by(block).map(move |done| (at + done, (len - done).min(block as u64) as usize))
    }
}

/// Opens a regular file or a block device again, for reading and writing through the page cache, whatever `file` was
/// opened for; `None` for anything else, whose contents cannot be kept.
///
/// # Errors
/// The kernel's.
pub fn reopen(file: &File) -> io::Result<Option<File>> {
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(None);
    }
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).map(Some)
}

/// The extents of a file from `at` to `end`, in order. A file that does not tell has no holes.
pub fn extents(file: &File, mut at: u64, end: u64) -> Vec<FileExtent> {
    let mut extents = Vec::new();
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.clamp(at, end),
            Err(rustix::io::Errno::NXIO) => end,
            Err(_) => at,
        };
        if data > at {
            extents.push(FileExtent { at, len: data - at, data: false });
        }
        if data < end {
            let hole = seek(file, SeekFrom::Hole(data)).ok().filter(|hole| *hole > data).unwrap_or(end).min(end);
            extents.push(FileExtent { at: data, len: hole - data, data: true });
            at = hole;
        } else {
            at = end;
        }
    }
    extents
}

/// Whether there is anything but zeroes in `len` bytes of a file from `at` on.
///
/// # Errors
/// The kernel's.
pub fn holds_data(file: &File, at: u64, len: u64) -> io::Result<bool> {
    const BLOCK: usize = 1 << 20;
    let mut block = vec![0; BLOCK];
    for extent in extents(file, at, at.saturating_add(len)).into_iter().filter(|e| e.data) {
        for (at, n) in extent.blocks(BLOCK) {
            let bytes = &mut block[..n];
            file.read_exact_at(bytes, at)?;
            if bytes.iter().any(|b| *b != 0) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
