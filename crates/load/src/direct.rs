//! Writing a new file past the page cache, in large aligned blocks.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use dmalane_dma::{AnonHeap, CpuBuf, Heap};
use rustix::fs::OFlags;

/// Bytes written at a time; a multiple of every block size.
const BLOCK: usize = 4 << 20;
/// The largest alignment of offsets and lengths that direct I/O asks for.
const ALIGN: usize = 4096;

/// Writes an empty file from its start on: past the page cache where the file system takes that, and else through it.
/// Call [`DirectWriter::finish`]: what is left in its buffer is not written otherwise.
pub(crate) struct DirectWriter<'a> {
    file: &'a File,
    buf: CpuBuf,
    filled: usize,
    at: u64,
    direct: bool,
}

impl<'a> DirectWriter<'a> {
    /// A writer of an empty file.
    ///
    /// # Errors
    /// There is no memory for its buffer.
    pub(crate) fn new(file: &'a File) -> io::Result<Self> {
        let buf = AnonHeap::new().allocate(BLOCK).map_err(io::Error::other)?;
        let mut writer = Self { file, buf, filled: 0, at: 0, direct: false };
        writer.direct = writer.set_direct(true).is_ok();
        Ok(writer)
    }

    fn set_direct(&self, direct: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(self.file)?;
        flags.set(OFlags::DIRECT, direct);
        Ok(rustix::fs::fcntl_setfl(self.file, flags)?)
    }

    /// Writes the first `len` bytes of the buffer.
    fn put(&mut self, len: usize) -> io::Result<()> {
        match self.file.write_all_at(&self.buf[..len], self.at) {
            // The file system took the flag, and does not mean it.
            Err(error) if self.direct && error.kind() == io::ErrorKind::InvalidInput => {
                self.direct = false;
                self.set_direct(false)?;
                self.file.write_all_at(&self.buf[..len], self.at)?;
            }
            other => other?,
        }
        self.at += len as u64;
        Ok(())
    }

    /// Writes the rest, through the page cache where it is no whole block. Returns whether the file was written past
    /// the cache.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn finish(mut self) -> io::Result<bool> {
        let (direct, filled) = (self.direct, self.filled);
        let whole = filled - filled % ALIGN;
        if whole > 0 {
            self.put(whole)?;
        }
        if self.direct {
            self.set_direct(false)?;
        }
        self.file.write_all_at(&self.buf[whole..filled], self.at)?;
        Ok(direct && self.direct)
    }
}

impl Write for DirectWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(BLOCK - self.filled);
        self.buf[self.filled..self.filled + n].copy_from_slice(&bytes[..n]);
        self.filled += n;
        if self.filled == BLOCK {
            self.put(BLOCK)?;
            self.filled = 0;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        // A part of a block is written at the end.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_arrives_whole() {
        let folder = tempfile::tempdir().unwrap();
        for len in [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4096, 2 * BLOCK + 5000] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let path = folder.path().join("file");
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            let mut writer = DirectWriter::new(&file).unwrap();
            for part in bytes.chunks(1_000_003) {
                writer.write_all(part).unwrap();
            }
            writer.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{len} bytes");
            assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT));
        }
    }
}
