//! The physical pages behind virtual memory, from `/proc/PID/pagemap`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use dmalane_addr::{PhysAddr, SgTable};

use crate::SharedBuf;
use crate::sys::page;

/// Entries read at a time.
const BATCH: usize = 8192;

/// The physical runs of a buffer, for a device without an IOMMU. The kernel may move pages, so pin the buffer first.
///
/// # Errors
/// `PermissionDenied` when the process lacks `CAP_SYS_ADMIN`; `NotFound` when a page is not in memory; the kernel's,
/// where `/proc` is not mounted.
pub fn physical_runs(buf: &SharedBuf) -> io::Result<SgTable<PhysAddr>> {
    let (file, page) = (File::open("/proc/self/pagemap")?, page() as u64);
    let start = buf.as_volatile_slice().as_ptr().addr() as u64;
    let (mut next, end) = (start / page, (start + buf.len() as u64).div_ceil(page));
    let (mut table, mut batch) = (SgTable::new(), vec![0u8; BATCH * 8]);
    while next < end {
        let pages = (end - next).min(BATCH as u64);
        let entries = &mut batch[..pages as usize * 8];
        file.read_exact_at(entries, next * 8)?;
        for entry in entries.as_chunks::<8>().0 {
            let pushed = table.push(PhysAddr::new(frame(u64::from_ne_bytes(*entry))? * page), page);
            debug_assert!(pushed.is_some(), "a frame lies below 2^67");
        }
        next += pages;
    }
    Ok(table)
}

/// The number of the frame in an entry (Linux, `Documentation/admin-guide/mm/pagemap.rst`).
fn frame(entry: u64) -> Result<u64, io::ErrorKind> {
    match (entry >> 63, entry & ((1 << 55) - 1)) {
        (0, _) => Err(io::ErrorKind::NotFound),
        (_, 0) => Err(io::ErrorKind::PermissionDenied),
        (_, frame) => Ok(frame),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnonHeap, Heap, PageKind};

    #[test]
    fn an_entry_says_where_its_page_is() {
        assert_eq!(frame(0), Err(io::ErrorKind::NotFound));
        assert_eq!(frame(1 << 63), Err(io::ErrorKind::PermissionDenied), "without CAP_SYS_ADMIN");
        assert_eq!(frame(1 << 63 | 1 << 61 | 1 << 55 | 5), Ok(5));
        assert_eq!(frame(1 << 62 | 5), Err(io::ErrorKind::NotFound), "swapped out");
    }

    #[test]
    fn finds_the_physical_runs_of_a_buffer() {
        let buf = AnonHeap::starting_at(PageKind::Transparent).allocate(4 << 20).unwrap().share();
        match physical_runs(&buf) {
            Ok(runs) => {
                assert_eq!(runs.segments().map(|s| s.len).sum::<u64>(), 4 << 20);
                assert!((1..=(4 << 20) / page()).contains(&runs.segment_count()));
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return println!("SKIPPED: /proc/self/pagemap shows no frames to this process");
            }
            Err(e) => panic!("{e}"),
        }
        let sparse = SharedBuf::sparse("test", 1 << 20).unwrap();
        assert_eq!(physical_runs(&sparse).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
