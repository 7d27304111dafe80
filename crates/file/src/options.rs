//! How a file is to be read, and how it is being read.

use std::fmt;

use crate::Fallback;

/// Whether reads go past the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// Direct I/O where the file system allows it.
    #[default]
    Auto,
    /// Direct I/O, or an error. Unaligned heads and tails are still read through the page cache.
    Direct,
    /// Through the page cache: the better choice for a file that is in it already.
    Buffered,
}

/// How the kernel is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Io {
    /// io_uring where the kernel allows it, else `pread` on threads, of which there are as many as reads in flight.
    /// The caller's thread copies what is in the page cache.
    #[default]
    Auto,
    /// io_uring, or an error when the queue is opened.
    Uring,
    /// One `pread` after the other, made by [`Queue::poll`](dmalane_queue::Queue::poll): no thread, nothing in
    /// flight between calls.
    Pread,
}

/// How a file is to be read. The default is good for large files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileOptions {
    /// Whether reads go past the page cache.
    pub mode: Mode,
    /// How the kernel is asked.
    pub io: Io,
    /// The most operations, and the most kernel reads, in flight at once. Brought into 1..=4096.
    pub depth: usize,
    /// Bytes per kernel read, at most: a longer operation is cut into several. Brought into 64 KiB..=1 GiB and rounded
    /// up to a power of two.
    pub block: usize,
}

impl Default for FileOptions {
    /// Up to 64 reads of 2 MiB in flight: enough for sources of 8 GB/s and 16 ms. A load has fewer where those are as
    /// fast.
    fn default() -> Self {
        Self { mode: Mode::Auto, io: Io::Auto, depth: 64, block: 2 << 20 }
    }
}

impl FileOptions {
    /// For a mode: with [`Mode::Buffered`] one read in flight, so that what the kernel has just copied out of the page
    /// cache is used while it is in the processor's cache.
    pub fn for_mode(mode: Mode) -> Self {
        let depth = if mode == Mode::Buffered { 1 } else { Self::default().depth };
        Self { mode, depth, ..Self::default() }
    }

    pub(crate) fn normal(self) -> Self {
        let block = self.block.clamp(64 << 10, 1 << 30).next_power_of_two();
        Self { depth: self.depth.clamp(1, 4096), block, ..self }
    }
}

/// How a file is being read, and why not better.
///
/// io_uring is asked for at the first operation and direct I/O may be refused as late as at a read, so this can change
/// while the queue is used. The default: buffered reads by `pread`, as they were meant to be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct How {
    /// Aligned reads go past the page cache.
    pub direct: bool,
    /// Reads go through io_uring.
    pub uring: bool,
    /// Else the threads that read, besides the caller's.
    pub threads: usize,
    /// Why each thing that was asked for was not had; empty when all was well.
    pub reasons: Vec<Fallback>,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.direct { "direct I/O" } else { "buffered I/O" };
        write!(f, "{cache}, ")?;
        match self.threads {
            _ if self.uring => write!(f, "io_uring")?,
            0 => write!(f, "pread")?,
            1 => write!(f, "pread on a thread")?,
            n => write!(f, "pread on {n} threads")?,
        }
        let reasons: Vec<_> = self.reasons.iter().map(ToString::to_string).collect();
        if reasons.is_empty() { Ok(()) } else { write!(f, " ({})", reasons.join("; ")) }
    }
}
