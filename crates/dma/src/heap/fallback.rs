//! The heaps that fall back from one kind of pages to the next: anonymous memory, and memory behind a memfd.

use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use super::dma_heap::has_udmabuf;
use super::{Heap, HeapCapabilities, Reserved};
use crate::account::{Account, Counters};
use crate::sys::{Exclusive, HUGE, Region, page};
use crate::{CpuBuf, Error, HeapStats, NoPages, PageBacking, PageKind};

/// Reservations of at least this many bytes may be rounded up to whole huge pages: at most 50 % more.
const ROUND_FROM: usize = 4 << 20;

impl PageKind {
    /// Bytes of a reserved huge page; `None` for kinds where the kernel may use 4 KiB pages instead.
    pub(crate) fn reserved_bytes(self) -> Option<usize> {
        match self {
            Self::Hugetlb1G => Some(1 << 30),
            Self::Hugetlb2M => Some(HUGE),
            Self::Transparent | Self::Base => None,
        }
    }
}

const SWITCHES: &str = "/sys/kernel/mm/transparent_hugepage";

/// Memory of the kernel, private or behind a file descriptor: [`AnonHeap`] and [`MemfdHeap`]. It tries page kinds from
/// the best one down to 4 KiB pages.
pub struct PageHeap<const SHARED: bool> {
    best: PageKind,
    /// Buffers have a multiple of these bytes.
    multiple: usize,
    counters: Arc<Counters>,
}

/// Private anonymous memory: the fastest target for direct I/O. It cannot be shared with another process.
pub type AnonHeap = PageHeap<false>;

/// Memory behind a file descriptor, sealed against shrinking: other processes and drivers can map it.
pub type MemfdHeap = PageHeap<true>;

impl<const SHARED: bool> PageHeap<SHARED> {
    const KIND: &'static str = if SHARED { "memfd memory" } else { "anonymous memory" };

    /// A heap that tries hugetlb pages, then transparent huge pages, then 4 KiB pages.
    pub fn new() -> Self {
        Self::starting_at(PageKind::Hugetlb2M)
    }

    /// A heap whose fallback chain starts at `best`.
    pub fn starting_at(best: PageKind) -> Self {
        Self { best, multiple: page(), counters: Arc::default() }
    }

    /// Buffers are multiples of `bytes`, a power of two, if that is more than a page of the kernel.
    #[must_use]
    pub fn in_multiples_of(self, bytes: usize) -> Self {
        Self { multiple: bytes.max(page()), ..self }
    }

    /// Maps memory with the best page kind that works. `populate`: a kind counts as failed when its pages cannot be
    /// made present.
    fn map_best(&self, len: usize, populate: bool) -> Result<(Region, PageBacking), Error> {
        let base =
            len.checked_next_multiple_of(self.multiple).and_then(NonZeroUsize::new).ok_or(Error::BadLength(len))?;
        let mut passed_over = Vec::new();
        let huge_kinds = [PageKind::Hugetlb1G, PageKind::Hugetlb2M, PageKind::Transparent];
        for candidate in huge_kinds.into_iter().skip_while(|candidate| *candidate != self.best) {
            // Rounding a small buffer up to a huge page would waste most of it.
            if len < HUGE / 2 {
                passed_over.push((candidate, NoPages::SmallBuffer));
                continue;
            }
            let mut bytes = base;
            if let Some(page) = candidate.reserved_bytes() {
                // Do not allocate much more than requested, so that the caller's limits hold.
                let round = if populate || page > HUGE || base.get() < ROUND_FROM {
                    None
                } else {
                    base.get().checked_next_multiple_of(page)
                };
                match round.or(Some(base.get()).filter(|n| n.is_multiple_of(page))).and_then(NonZeroUsize::new) {
                    Some(whole) => bytes = whole,
                    None => {
                        passed_over.push((candidate, NoPages::NotWhole { page }));
                        continue;
                    }
                }
            }
            let mapped = transparent_allowed(candidate, SHARED).and_then(|()| {
                Self::attempt(bytes, candidate, populate).map_err(|e| refusal(candidate, bytes.get(), &e))
            });
            match mapped {
                Ok(region) => return Ok((region, PageBacking { kind: candidate, passed_over })),
                Err(why) => passed_over.push((candidate, why)),
            }
        }
        let region = Self::attempt(base, PageKind::Base, populate).map_err(|source| Error::Allocate {
            len,
            kind: Self::KIND,
            source,
        })?;
        Ok((region, PageBacking { kind: PageKind::Base, passed_over }))
    }

    fn attempt(len: NonZeroUsize, kind: PageKind, populate: bool) -> io::Result<Region> {
        let region = if SHARED { Region::memfd("dmalane", len, kind) } else { Region::anonymous(len, kind) }?;
        if populate {
            region.populate(0, region.len())?;
        }
        Ok(region)
    }
}

/// Why a page kind was not used, and which file makes it available.
fn refusal(kind: PageKind, bytes: usize, error: &io::Error) -> NoPages {
    let error = error.to_string();
    let (page, file) = match kind {
        PageKind::Hugetlb2M => (HUGE, "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
        PageKind::Hugetlb1G => (1 << 30, "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"),
        PageKind::Transparent | PageKind::Base => return NoPages::Kernel(error),
    };
    NoPages::NotReserved { pages: bytes / page, file: file.into(), error }
}

/// Checks that transparent huge pages are enabled: anonymous memory and shared memory have separate settings.
fn transparent_allowed(kind: PageKind, shared: bool) -> Result<(), NoPages> {
    if kind != PageKind::Transparent {
        return Ok(());
    }
    let size = std::fs::read_to_string(Path::new(SWITCHES).join("hpage_pmd_size"));
    if let Some(page) = size.ok().and_then(|text| text.trim().parse::<usize>().ok()).filter(|page| *page > HUGE) {
        return Err(NoPages::TooLarge { page });
    }
    let (switch, enable) = if shared { ("shmem_enabled", "advise") } else { ("enabled", "madvise") };
    let file = Path::new(SWITCHES).join(switch);
    match std::fs::read_to_string(&file) {
        Ok(text) if text.contains("[never]") || text.contains("[deny]") => Err(NoPages::SwitchedOff { file, enable }),
        _ => Ok(()),
    }
}

impl MemfdHeap {
    /// A heap whose memory another process can import ([`SharedBuf::import`](crate::SharedBuf::import)): its fallback
    /// chain starts at `best`, but at transparent huge pages at most.
    pub fn importable(best: Option<PageKind>) -> Self {
        Self::starting_at(if best == Some(PageKind::Base) { PageKind::Base } else { PageKind::Transparent })
    }
}

impl<const SHARED: bool> Default for PageHeap<SHARED> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const SHARED: bool> Heap for PageHeap<SHARED> {
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
        let (region, backing) = self.map_best(len, true)?;
        let exported = || io::Error::other("a new region was already exported");
        let refused = |_| Error::Allocate { len, kind: Self::KIND, source: exported() };
        let account = Account::open(&self.counters, region.len());
        Ok(CpuBuf::new(Exclusive::new(region).map_err(refused)?, backing, account))
    }

    fn reserve(&self, len: usize) -> Result<Reserved, Error> {
        let (region, backing) = self.map_best(len, false)?;
        let account = Account::open(&self.counters, region.len());
        Ok(Reserved::new(region, backing, account, Self::KIND))
    }

    fn capabilities(&self) -> HeapCapabilities {
        HeapCapabilities { shareable: SHARED, dma_buf: SHARED && has_udmabuf(), best_pages: self.best }
    }

    fn stats(&self) -> HeapStats {
        self.counters.stats()
    }

    fn name(&self) -> &'static str {
        if SHARED { "memfd" } else { "anonymous" }
    }
}
