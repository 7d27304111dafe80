//! Jobs: ranges of files, and the buffers that they are read into.

use dmalane_addr::FileOffset;
use thiserror::Error;

/// Consecutive bytes of a source, and their place in a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Which source.
    pub source: usize,
    /// Offset in it of the first byte.
    pub at: FileOffset,
    /// Bytes; an extent of none is complete from the start.
    pub len: u64,
    /// Which buffer.
    pub buffer: usize,
    /// Offset in it of the first byte.
    pub to: u64,
}

/// Buffers and the extents that are read into them. Bytes of a buffer that no extent names are zero.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Job {
    /// Bytes of each buffer. They are filled in this order.
    pub buffers: Vec<u64>,
    /// Extents, in any order; those of a buffer must not overlap.
    pub extents: Vec<Extent>,
}

/// Contradiction within a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BadJob {
    /// An extent names a source that does not exist.
    #[error("extent {extent} is of source {named}, and there are {there}")]
    NoSuchSource {
        /// Which extent.
        extent: usize,
        /// The source.
        named: usize,
        /// Number of sources.
        there: usize,
    },
    /// An extent does not lie within its buffer, or within a file that the kernel can read.
    #[error("extent {extent} does not lie within its buffer and the valid file offsets")]
    OutOfBounds {
        /// Which extent.
        extent: usize,
    },
    /// Two extents have the same destination.
    #[error("extents {first} and {second} overlap in their buffer")]
    Overlap {
        /// The one that starts first.
        first: usize,
        /// The other one.
        second: usize,
    },
    /// The number of places on the device is not that of the buffers.
    #[error("{buffers} buffers are to go to {there} places on the device")]
    Destinations {
        /// Number of buffers.
        buffers: usize,
        /// Number of destinations.
        there: usize,
    },
    /// A buffer is larger than the address space.
    #[error("a buffer of {0} bytes does not fit the address space")]
    TooLarge(u64),
}

impl Job {
    /// A buffer for each source, with its first `lens[i]` bytes.
    pub fn whole(lens: &[u64]) -> Self {
        let extent =
            |(i, len): (usize, &u64)| Extent { source: i, at: FileOffset::new(0), len: *len, buffer: i, to: 0 };
        Self { buffers: lens.to_vec(), extents: lens.iter().enumerate().map(extent).collect() }
    }

    /// Bytes that are read.
    pub fn bytes(&self) -> u64 {
        self.extents.iter().fold(0, |sum, e| sum.saturating_add(e.len))
    }

    /// For each buffer its extents that are not empty, in the order of their destinations.
    pub(super) fn by_buffer(&self, sources: usize) -> Result<Vec<Vec<(usize, Extent)>>, BadJob> {
        if let Some(len) = self.buffers.iter().find(|len| isize::try_from(**len).is_err()) {
            return Err(BadJob::TooLarge(*len));
        }
        let mut sorted: Vec<Vec<(usize, Extent)>> = vec![Vec::new(); self.buffers.len()];
        for (extent, e) in self.extents.iter().enumerate() {
            if e.source >= sources {
                return Err(BadJob::NoSuchSource { extent, named: e.source, there: sources });
            }
            let inside =
                self.buffers.get(e.buffer).is_some_and(|len| e.to.checked_add(e.len).is_some_and(|end| end <= *len));
            // The kernel counts file offsets with a sign.
            let readable = e.at.bits().checked_add(e.len).is_some_and(|end| end <= i64::MAX as u64);
            if !inside || !readable {
                return Err(BadJob::OutOfBounds { extent });
            }
            if e.len > 0 {
                sorted[e.buffer].push((extent, *e));
            }
        }
        for extents in &mut sorted {
            extents.sort_by_key(|(_, e)| e.to);
            for pair in extents.windows(2) {
                if let [(first, a), (second, b)] = pair
                    && a.to + a.len > b.to
                {
                    return Err(BadJob::Overlap { first: *first, second: *second });
                }
            }
        }
        Ok(sorted)
    }
}
