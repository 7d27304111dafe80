//! Shareable memory filled from the page cache, by copying to it instead of touching it.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fill::FillCached;
use dmalane_addr::FileOffset;
use dmalane_dma::{Absent, BufferSlice, FileMapping};
use dmalane_file::residency;

/// The kernel's count of cached pages is in these.
const PAGE: u64 = 4096;

/// Copies what is cached to the memfd: pages that are touched instead are zeroed first.
pub(super) struct FromCache {
    /// For each source its file and what the job needs of it, if it could be mapped. Mapped once: mapping and unmapping
    /// wait for workers that populate.
    pub files: Vec<Option<(Arc<File>, FileMapping)>>,
    /// For each source how many bytes were copied.
    pub copied: Vec<AtomicU64>,
}

impl FillCached for FromCache {
    fn fill(&self, absent: Absent, source: usize, at: FileOffset, len: usize) -> Result<BufferSlice, Absent> {
        let Some((file, mapping)) = &self.files[source] else { return Err(absent) };
        // Whole pages are counted, so whole pages are asked about.
        let first = at.bits() & !(PAGE - 1);
        let pages = (at.bits() + len as u64).next_multiple_of(PAGE) - first;
        if !residency(file, first, pages).is_ok_and(|cached| cached.cached >= pages) {
            return Err(absent);
        }
        let slice = absent.copy_from_file(mapping, at.bits(), len).map_err(|(absent, _)| absent)?;
        self.copied[source].fetch_add(len as u64, Ordering::Relaxed);
        Ok(slice)
    }
}
