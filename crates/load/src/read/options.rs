//! Settings of a read.

use dmalane_file::Mode;

use crate::fill::FillOptions;

/// The order of allocating and reading, to compare by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Scheme {
    /// Reads are in flight into one chunk while the next is being allocated.
    #[default]
    Overlap,
    /// Allocate all of it, then read: T = T(allocation) + T(I/O).
    Sequential,
    /// Allocate all of it, then one `pread` after the other.
    Plain,
}

/// Settings of a read. The default is good for files of any size.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// Past the page cache or through it; [`Mode::Auto`] chooses for each block by what is cached and gives its reason.
    pub mode: Mode,
    /// Order of allocation and reading.
    pub scheme: Scheme,
    /// Reads in flight, where there is a ring.
    pub depth: usize,
    /// Workers that allocate and read, each a thread; by default one for direct reads, which the disk does, and as many
    /// as there are processors, 4 at most, where 32 MiB or more are copied out of the page cache.
    pub threads: Option<usize>,
    /// Refuse to allocate more bytes of memory than this.
    pub limit: Option<u64>,
    /// Chunks, blocks, hashes and times. Regions are hashed, as a [manifest](crate::Manifest::expect) has them,
    /// in [`Read`](crate::Read) alone. Short files and streams have no timeline.
    pub fill: FillOptions,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            scheme: Scheme::Overlap,
            depth: 16,
            threads: None,
            limit: None,
            fill: FillOptions::default(),
        }
    }
}
