//! Settings of a read.

use dmalane_file::Mode;

use crate::fill::FillOptions;

/// Settings of a read. The default is good for files of any size.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// Past the page cache or through it; [`Mode::Auto`] chooses for each block by what is cached and gives its reason.
    pub mode: Mode,
    /// Workers that allocate and read, each a thread. By default one for direct reads, which the disk does; where 32
    /// MiB or more are copied out of the page cache, as many as make the bytes come faster, found by measuring, but no
    /// more than there are processors, or 32.
    pub threads: Option<usize>,
    /// Refuse to allocate more bytes of memory than this.
    pub limit: Option<u64>,
    /// Chunks, blocks, hashes and times. Regions are hashed in [`Read`](crate::Read) alone, which takes those of its
    /// manifest instead. Short files and streams have no timeline.
    pub fill: FillOptions,
}
