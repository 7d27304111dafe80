//! The physical pages behind virtual memory, from `/proc/PID/pagemap`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use dmalane_addr::{PhysAddr, SgTable};

use crate::SharedBuf;

/// Entries read at a time.
const BATCH: usize = 8192;

/// Bytes of the page that an entry describes.
fn page() -> u64 {
    crate::sys::page() as u64
}

/// An entry of a pagemap (Linux, `Documentation/admin-guide/mm/pagemap.rst`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PageEntry(u64);

impl PageEntry {
    /// True when the page is in memory.
    fn is_present(self) -> bool {
        self.0 >> 63 & 1 == 1
    }

    /// The page's physical address; `None` when it is not in memory, or the process lacks `CAP_SYS_ADMIN`.
    fn frame(self) -> Option<PhysAddr> {
        let frame = self.0 & ((1 << 55) - 1);
        (self.is_present() && frame != 0).then(|| PhysAddr::new(frame * page()))
    }
}

/// The pagemap of a process.
struct Pagemap(File);

impl Pagemap {
    /// Opens the pagemap of this process.
    ///
    /// # Errors
    /// The kernel's, where `/proc` is not mounted.
    fn own() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Calls `each` for every page (4 KiB, on x86-64) of a range of virtual addresses, widened to whole pages, in
    /// order.
    ///
    /// # Errors
    /// The kernel's.
    fn scan(&self, start: u64, len: u64, mut each: impl FnMut(PageEntry)) -> io::Result<()> {
        let end = start.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?.div_ceil(page());
        let mut page = start / page();
        let mut buffer = vec![0u8; BATCH * 8];
        while page < end {
            let n = usize::try_from(end - page).unwrap_or(BATCH).min(BATCH);
            let read = self.0.read_at(&mut buffer[..n * 8], page * 8)?;
            if read < 8 {
                return Err(io::ErrorKind::UnexpectedEof.into()); // past the end of the address space
            }
            for entry in buffer[..read].as_chunks::<8>().0 {
                each(PageEntry(u64::from_ne_bytes(*entry)));
            }
            page += (read / 8) as u64;
        }
        Ok(())
    }
}

/// The physical runs of a buffer, for a device without an IOMMU. The kernel may move pages, so pin the buffer first.
///
/// # Errors
/// `PermissionDenied` when the process lacks `CAP_SYS_ADMIN`; `NotFound` when a page is not in memory.
pub fn physical_runs(buf: &SharedBuf) -> io::Result<SgTable<PhysAddr>> {
    let start = buf.as_volatile_slice().as_ptr().addr() as u64;
    let mut table = SgTable::new();
    let mut trouble = None;
    Pagemap::own()?.scan(start, buf.len() as u64, |entry| match entry.frame() {
        Some(frame) => {
            let pushed = table.push(frame, page());
            debug_assert!(pushed.is_some(), "a frame lies below 2^67");
        }
        None if entry.is_present() => trouble = Some(io::ErrorKind::PermissionDenied),
        None => trouble = trouble.or(Some(io::ErrorKind::NotFound)),
    })?;
    trouble.map_or(Ok(table), |kind| Err(kind.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnonHeap, Heap, PageKind};

    #[test]
    fn an_entry_says_where_its_page_is() {
        let of = |bits| (PageEntry(bits).is_present(), PageEntry(bits).frame());
        assert_eq!(of(0), (false, None));
        assert_eq!(of(1 << 63), (true, None), "without CAP_SYS_ADMIN");
        assert_eq!(of(1 << 63 | 1 << 61 | 1 << 55 | 5), (true, Some(PhysAddr::new(5 * page()))));
        assert_eq!(of(1 << 62 | 5), (false, None));
    }

    #[test]
    fn finds_the_physical_runs_of_a_buffer() {
        let buf = AnonHeap::starting_at(PageKind::Transparent).allocate(4 << 20).unwrap().share();
        match physical_runs(&buf) {
            Ok(runs) => {
                assert_eq!(runs.segments().map(|s| s.len).sum::<u64>(), 4 << 20);
                assert!((1..=(4 << 20) / page() as usize).contains(&runs.segment_count()));
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return println!("SKIPPED: /proc/self/pagemap shows no frames to this process");
            }
            Err(e) => panic!("{e}"),
        }
        let sparse = SharedBuf::sparse("test", 1 << 20).unwrap();
        assert_eq!(physical_runs(&sparse).unwrap_err().kind(), io::ErrorKind::NotFound);
        sparse.populate(0, page() as usize).unwrap();
        let mut present = Vec::new();
        let start = sparse.as_volatile_slice().as_ptr().addr() as u64;
        Pagemap::own().unwrap().scan(start + 1, 2 * page(), |page| present.push(page.is_present())).unwrap();
        assert_eq!(present, [true, false, false], "widened to whole pages");
        assert!(Pagemap::own().unwrap().scan(u64::MAX - 5, 4096, |_| ()).is_err());
    }
}
