//! What a file held before it was measured, holes included, and how it is put back.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use crate::ValidateError;

/// Bytes that are put back when this is dropped.
pub(crate) struct Kept {
    file: File,
    pieces: Vec<(u64, Piece)>,
    done: bool,
}

enum Piece {
    Bytes(Vec<u8>),
    Hole(u64),
}

impl Kept {
    /// Reads what a regular file or a block device holds there; `None` for anything else.
    ///
    /// It opens `written` once more, through the page cache, whatever that was opened for: so direct I/O's alignment is
    /// no matter here, and what is only written to can be kept. `beside` is memory that is going to be needed as well.
    pub fn read(written: &File, offset: u64, len: u64, beside: u64) -> Result<Option<Self>, ValidateError> {
        let kind = written.metadata().map_err(ValidateError::Keep)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(None);
        }
        let again = format!("/proc/self/fd/{}", written.as_raw_fd());
        let file = File::options().read(true).write(true).open(again).map_err(ValidateError::Keep)?;
        let extents = extents(&file, offset, offset.saturating_add(len));
        let bytes: u64 = extents.iter().filter(|e| e.2).map(|e| e.1).sum();
        let none = || ValidateError::NoRoom(bytes);
        if dmalane_dma::room().is_some_and(|room| bytes > 0 && bytes.saturating_add(beside) > room.bytes) {
            return Err(none());
        }
        let mut pieces = Vec::new();
        for (at, len, data) in extents {
            if !data {
                pieces.push((at, Piece::Hole(len)));
                continue;
            }
            let (mut bytes, len) = (Vec::new(), usize::try_from(len).map_err(|_| none())?);
            bytes.try_reserve_exact(len).map_err(|_| none())?;
            bytes.resize(len, 0);
            file.read_exact_at(&mut bytes, at).map_err(ValidateError::Keep)?;
            pieces.push((at, Piece::Bytes(bytes)));
        }
        Ok(Some(Self { file, pieces, done: false }))
    }

    /// Puts everything back now, on the disk too, and says whether that worked.
    pub fn put_back(mut self) -> Result<(), ValidateError> {
        self.write().map_err(ValidateError::PutBack)
    }

    /// Leaves the device as it is: a call on one that hangs would hang as well.
    pub fn give_up(mut self) {
        self.done = true;
    }

    fn write(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.done, true) {
            return Ok(());
        }
        for (at, piece) in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => self.file.write_all_at(bytes, *at)?,
                Piece::Hole(len) => self.clear(*at, *len)?,
            }
        }
        self.file.sync_data()
    }

    /// Makes a hole, or zeros where the file system has none.
    fn clear(&self, at: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, flags, at, len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; len.min(1 << 20) as usize];
        for done in (0..len).step_by(1 << 20) {
            self.file.write_all_at(&zeros[..(len - done).min(1 << 20) as usize], at + done)?;
        }
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // On the way out of a panic; everything else says whether it worked.
        let _ = self.write();
    }
}

/// What lies from `at` to `end`, in order: where, bytes, and false for a hole. What does not tell has no holes.
fn extents(file: &File, mut at: u64, end: u64) -> Vec<(u64, u64, bool)> {
    let mut extents = Vec::new();
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.clamp(at, end),
            Err(rustix::io::Errno::NXIO) => end,
            Err(_) => at,
        };
        if data > at {
            extents.push((at, data - at, false));
        }
        if data < end {
            let hole = seek(file, SeekFrom::Hole(data)).ok().filter(|hole| *hole > data).unwrap_or(end).min(end);
            extents.push((data, hole - data, true));
            at = hole;
        } else {
            at = end;
        }
    }
    extents
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn bytes_and_holes_come_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        file.as_file().write_all_at(&[7; 100_000], 1 << 20).unwrap();
        file.as_file().sync_all().unwrap();
        let (before, blocks) = (std::fs::read(file.path()).unwrap(), file.as_file().metadata().unwrap().blocks());
        for early in [false, true] {
            // Opened for writing only, as one of two files is.
            let written = File::options().write(true).open(file.path()).unwrap();
            let kept = Kept::read(&written, 4096, (4 << 20) - 4096, 0).unwrap().unwrap();
            assert!(matches!(Kept::read(&written, 0, 4096, u64::MAX), Ok(Some(_))), "a hole needs no room");
            let refused = Kept::read(&written, 1 << 20, 4096, u64::MAX);
            assert!(matches!(refused, Err(ValidateError::NoRoom(4096))) || dmalane_dma::room().is_none());
            written.write_all_at(&vec![9; (4 << 20) - 4096], 4096).unwrap();
            if early {
                drop(kept)
            } else {
                kept.put_back().unwrap()
            }
            assert!(std::fs::read(file.path()).unwrap() == before);
            if blocks < 8192 {
                assert!(file.as_file().metadata().unwrap().blocks() < 8192, "what was a hole is one again");
            }
        }
        assert!(Kept::read(&File::open("/dev/null").unwrap(), 0, 4096, 0).unwrap().is_none());
        let kept = Kept::read(file.as_file(), 0, 4096, 0).unwrap().unwrap();
        file.as_file().write_all_at(&[1], 0).unwrap();
        kept.give_up();
        assert_eq!(std::fs::read(file.path()).unwrap()[0], 1);
    }
}
