//! Jobs: ranges of files, and the buffers that they are read into.

use dmalane_addr::FileOffset;

use super::error::FillError;

/// Consecutive bytes of a source, and their place in a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Which source.
    pub source: usize,
    /// Offset in it of the first byte.
    pub at: FileOffset,
    /// Bytes.
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
    pub(super) fn by_buffer(&self, sources: usize) -> Result<Vec<Vec<Extent>>, FillError> {
        if let Some(len) = self.buffers.iter().find(|len| isize::try_from(**len).is_err()) {
            return Err(FillError::too_large(*len));
        }
        let mut sorted: Vec<Vec<Extent>> = vec![Vec::new(); self.buffers.len()];
        for (extent, e) in self.extents.iter().enumerate() {
            if e.source >= sources {
                let text = format!("extent {extent} is of source {}, and there are {sources}", e.source);
                return Err(FillError::Job(text));
            }
            let inside =
                self.buffers.get(e.buffer).is_some_and(|len| e.to.checked_add(e.len).is_some_and(|end| end <= *len));
            // The kernel counts file offsets with a sign.
            let readable = e.at.bits().checked_add(e.len).is_some_and(|end| end <= i64::MAX as u64);
            if !inside || !readable {
                let text = format!("extent {extent} does not lie within its buffer and the valid file offsets");
                return Err(FillError::Job(text));
            }
            if e.len > 0 {
                sorted[e.buffer].push(*e);
            }
        }
        for extents in &mut sorted {
            extents.sort_by_key(|e| e.to);
            let overlaps = extents.windows(2).find(|pair| pair[0].to + pair[0].len > pair[1].to);
            if let Some([_, Extent { buffer, to, .. }]) = overlaps {
                return Err(FillError::Job(format!("extents overlap at byte {to} of buffer {buffer}")));
            }
        }
        Ok(sorted)
    }
}
