//! Heaps: where buffers come from.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys::{Exclusive, HUGE, Pages, Region};
use crate::{CpuBuf, Error};

/// The pages behind a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PageKind {
    /// Reserved 2 MiB pages (hugetlbfs).
    Hugetlb2M,
    /// Transparent huge pages: 2 MiB where the kernel has them to give, 4 KiB elsewhere.
    Transparent,
    /// 4 KiB pages.
    Base,
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hugetlb2M => "hugetlb 2 MiB",
            Self::Transparent => "transparent huge pages",
            Self::Base => "4 KiB pages",
        })
    }
}

impl From<PageKind> for Pages {
    fn from(kind: PageKind) -> Self {
        match kind {
            PageKind::Hugetlb2M => Pages::Hugetlb2M,
            PageKind::Transparent => Pages::Transparent,
            PageKind::Base => Pages::Base,
        }
    }
}

/// Where on the ladder of page kinds a buffer ended up, and why not higher.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rung {
    /// The kind of pages.
    pub kind: PageKind,
    /// Why each better kind was not used, best first.
    pub passed_over: Vec<(PageKind, String)>,
}

/// What a heap has handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapStats {
    /// Bytes in live buffers.
    pub live: usize,
    /// The most that `live` has been.
    pub peak: usize,
    /// Buffers handed out since the heap was made.
    pub buffers: usize,
}

/// A source of buffers.
pub trait Heap: Send + Sync {
    /// A zeroed buffer of `len` bytes, rounded up to 4 KiB. All pages are present when this returns.
    ///
    /// # Errors
    /// [`Error::BadLength`] for 0 bytes or when rounding up overflows; [`Error::Allocate`] when the last rung of the
    /// ladder fails too.
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error>;

    /// What was handed out so far.
    fn stats(&self) -> HeapStats;

    /// The heap's name.
    fn name(&self) -> &'static str;
}

#[derive(Default)]
struct Counters {
    live: AtomicUsize,
    peak: AtomicUsize,
    buffers: AtomicUsize,
}

/// Counts a buffer's bytes as live until dropped.
pub(crate) struct Account {
    counters: Arc<Counters>,
    bytes: usize,
}

impl Account {
    /// For memory that no heap counts.
    pub(crate) fn none() -> Self {
        Self { counters: Arc::default(), bytes: 0 }
    }

    fn open(counters: &Arc<Counters>, bytes: usize) -> Self {
        let live = counters.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        counters.peak.fetch_max(live, Ordering::Relaxed);
        counters.buffers.fetch_add(1, Ordering::Relaxed);
        Self { counters: counters.clone(), bytes }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.counters.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The rungs of the ladder from the best kind down to 4 KiB pages.
struct Ladder {
    best: PageKind,
    counters: Arc<Counters>,
}

impl Ladder {
    fn new(best: PageKind) -> Self {
        Self { best, counters: Arc::default() }
    }

    fn allocate(
        &self,
        len: usize,
        kind: &'static str,
        map: impl Fn(NonZeroUsize, Pages) -> io::Result<Region>,
    ) -> Result<CpuBuf, Error> {
        let base = len.checked_next_multiple_of(4096).and_then(NonZeroUsize::new).ok_or(Error::BadLength(len))?;
        let mut passed_over = Vec::new();
        for rung in [PageKind::Hugetlb2M, PageKind::Transparent] {
            if rung == PageKind::Hugetlb2M && self.best != PageKind::Hugetlb2M || self.best == PageKind::Base {
                continue;
            }
            // Rounding a small buffer up to a huge page would waste most of it.
            if len < HUGE / 2 {
                passed_over.push((rung, "smaller than half a huge page".to_owned()));
                continue;
            }
            // Nobody gets more memory than was asked for: limits of the caller must hold.
            if rung == PageKind::Hugetlb2M && !base.get().is_multiple_of(HUGE) {
                passed_over.push((rung, "not a whole number of 2 MiB pages".to_owned()));
                continue;
            }
            match transparent_allowed(rung).and_then(|()| self.attempt(base, rung, &map)) {
                Ok(memory) => return Ok(self.finish(memory, Rung { kind: rung, passed_over })),
                Err(e) if rung == PageKind::Hugetlb2M => {
                    let pages = base.get() / HUGE;
                    passed_over.push((
                        rung,
                        format!("{e}; reserve {pages} with: echo {pages} | sudo tee /proc/sys/vm/nr_hugepages"),
                    ));
                }
                Err(e) => passed_over.push((rung, e.to_string())),
            }
        }
        let memory =
            self.attempt(base, PageKind::Base, &map).map_err(|source| Error::Allocate { len, kind, source })?;
        Ok(self.finish(memory, Rung { kind: PageKind::Base, passed_over }))
    }

    fn attempt(
        &self,
        len: NonZeroUsize,
        kind: PageKind,
        map: &impl Fn(NonZeroUsize, Pages) -> io::Result<Region>,
    ) -> io::Result<Exclusive> {
        let region = map(len, kind.into())?;
        region.populate(0, region.len())?;
        Exclusive::new(region).map_err(|_| io::Error::other("a new region was already exported"))
    }

    fn finish(&self, memory: Exclusive, rung: Rung) -> CpuBuf {
        let account = Account::open(&self.counters, memory.len());
        CpuBuf::new(memory, rung, account)
    }

    fn stats(&self) -> HeapStats {
        HeapStats {
            live: self.counters.live.load(Ordering::Relaxed),
            peak: self.counters.peak.load(Ordering::Relaxed),
            buffers: self.counters.buffers.load(Ordering::Relaxed),
        }
    }
}

fn transparent_allowed(rung: PageKind) -> io::Result<()> {
    const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    match std::fs::read_to_string(SWITCH) {
        Ok(text) if rung == PageKind::Transparent && text.contains("[never]") => {
            Err(io::Error::other(format!("switched off; echo madvise | sudo tee {SWITCH}")))
        }
        _ => Ok(()),
    }
}

/// Private anonymous memory: the fastest target for direct I/O. Cannot be handed to another process.
pub struct AnonHeap(Ladder);

impl AnonHeap {
    /// A heap that starts at the top of the ladder: hugetlb, then transparent huge pages, then 4 KiB.
    pub fn new() -> Self {
        Self::starting_at(PageKind::Hugetlb2M)
    }

    /// A heap whose ladder starts at `best`.
    pub fn starting_at(best: PageKind) -> Self {
        Self(Ladder::new(best))
    }
}

impl Default for AnonHeap {
    fn default() -> Self {
        Self::new()
    }
}

impl Heap for AnonHeap {
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
        self.0.allocate(len, "anonymous memory", Region::anonymous)
    }

    fn stats(&self) -> HeapStats {
        self.0.stats()
    }

    fn name(&self) -> &'static str {
        "anonymous"
    }
}

/// Memory behind a file descriptor, sealed against shrinking: other processes and drivers can map it.
pub struct MemfdHeap(Ladder);

impl MemfdHeap {
    /// A heap that starts at the top of the ladder: hugetlb, then transparent huge pages, then 4 KiB.
    pub fn new() -> Self {
        Self::starting_at(PageKind::Hugetlb2M)
    }

    /// A heap whose ladder starts at `best`.
    pub fn starting_at(best: PageKind) -> Self {
        Self(Ladder::new(best))
    }
}

impl Default for MemfdHeap {
    fn default() -> Self {
        Self::new()
    }
}

impl Heap for MemfdHeap {
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
        self.0.allocate(len, "memfd memory", |len, pages| Region::memfd("dmalane", len, pages))
    }

    fn stats(&self) -> HeapStats {
        self.0.stats()
    }

    fn name(&self) -> &'static str {
        "memfd"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every heap takes these tests; a new heap joins with one line below.
    fn conformance(heap: &dyn Heap, best: PageKind) {
        assert!(matches!(heap.allocate(0), Err(Error::BadLength(0))));
        assert!(matches!(heap.allocate(usize::MAX), Err(Error::BadLength(_))));
        assert!(heap.allocate(1 << 60).is_err(), "more than the address space");
        assert_eq!(heap.stats(), HeapStats::default(), "a refused buffer is not counted");
        for len in [1, 4096, 4097, (1 << 20) - 1, 1 << 20, (2 << 20) + 1, 5 << 20] {
            let mut buf = heap.allocate(len).unwrap();
            assert_eq!(buf.len(), len.next_multiple_of(4096));
            assert!(buf.iter().all(|b| *b == 0), "zeroed");
            buf.fill(0xa5);
            let size = buf.len();
            assert_eq!(heap.stats().live, size);
            let shared = buf.share();
            assert_eq!((shared.len(), heap.stats().live), (size, size), "sharing moves no memory");
            let buf = shared.into_cpu().unwrap();
            assert!(buf.iter().all(|b| *b == 0xa5));
            // Every better kind than the one that was had comes with its reason, best first.
            let better: Vec<_> = buf.rung().passed_over.iter().map(|(kind, _)| *kind).collect();
            let ladder = [PageKind::Hugetlb2M, PageKind::Transparent, PageKind::Base];
            let top = ladder.iter().position(|k| *k == best).unwrap();
            let had = ladder.iter().position(|k| *k == buf.rung().kind).unwrap();
            assert_eq!(better, ladder[top..had]);
            assert!(buf.rung().passed_over.iter().all(|(_, why)| !why.is_empty()));
            if len < HUGE / 2 {
                assert_eq!(buf.rung().kind, PageKind::Base);
            }
        }
        let (a, b) = (heap.allocate(4096).unwrap(), heap.allocate(4096).unwrap());
        drop((a, b));
        let stats = heap.stats();
        assert_eq!((stats.live, stats.buffers), (0, 9));
        assert!(stats.peak >= 5 << 20);
    }

    macro_rules! conformance {
        ($($name:ident: $heap:ident from $best:ident;)*) => {$(
            #[test]
            fn $name() {
                conformance(&$heap::starting_at(PageKind::$best), PageKind::$best);
            }
        )*};
    }

    conformance! {
        anonymous: AnonHeap from Hugetlb2M;
        anonymous_transparent: AnonHeap from Transparent;
        anonymous_base: AnonHeap from Base;
        memfd: MemfdHeap from Hugetlb2M;
        memfd_transparent: MemfdHeap from Transparent;
        memfd_base: MemfdHeap from Base;
    }
}
