//! Shareable memory filled from the page cache, by writing it instead of touching it.

use std::fs::File;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use dmalane_addr::FileOffset;
use dmalane_dma::{Absent, BufferSlice, FileMapping};
use dmalane_file::residency;
use dmalane_load::fill::FillCached;

/// Writes what is cached to the memfd: pages that are touched instead are zeroed first. The kernel lets one process or
/// thread write a file at a time, so one worker does, while the others touch their chunks and read into them.
pub(super) struct FromCache<'a> {
    /// For each source its file and what the job needs of it, if it could be mapped. Mapped once: mapping and unmapping
    /// wait for workers that populate.
    pub files: Vec<Option<(&'a File, FileMapping)>>,
    /// For each source how many bytes were written.
    pub written: Vec<AtomicU64>,
    pub writing: Mutex<()>,
}

impl FillCached for FromCache<'_> {
    fn fill(&self, absent: Absent, source: usize, at: FileOffset, len: usize) -> Result<BufferSlice, Absent> {
        let Some((file, mapping)) = &self.files[source] else { return Err(absent) };
        let Ok(_one) = self.writing.try_lock() else { return Err(absent) };
        if !residency(file, at.bits(), len as u64).is_ok_and(|cached| cached.cached >= cached.bytes) {
            return Err(absent);
        }
        let slice = absent.copy_from_file(mapping, at.bits(), len).map_err(|(absent, _)| absent)?;
        self.written[source].fetch_add(len as u64, Ordering::Relaxed);
        Ok(slice)
    }
}
