//! Heaps allocate buffers.

mod dma_heap;
mod driver;
mod fallback;
mod needs;
mod pool;
mod reserved;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use dma_heap::{DmaHeap, export_dma_buf, export_dma_buf_range};
pub use driver::DriverHeap;
pub use fallback::{AnonHeap, MemfdHeap};
pub use needs::{HeapCapabilities, Needs, Picked, Unsuitable, pick};
pub(crate) use pool::Home;
pub use pool::{Pool, PoolStats};
pub use reserved::{Absent, Reserved};
use thiserror::Error;

use crate::{CpuBuf, Error};

/// The pages behind a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum PageKind {
    /// Reserved 1 GiB pages (hugetlbfs).
    #[cfg_attr(feature = "clap", value(name = "1g"))]
    Hugetlb1G,
    /// Reserved 2 MiB pages (hugetlbfs).
    #[cfg_attr(feature = "clap", value(name = "2m"))]
    Hugetlb2M,
    /// Transparent huge pages: 2 MiB where the kernel has them to give, 4 KiB elsewhere.
    #[cfg_attr(feature = "clap", value(name = "thp"))]
    Transparent,
    /// 4 KiB pages.
    #[cfg_attr(feature = "clap", value(name = "4k"))]
    Base,
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hugetlb1G => "hugetlb 1 GiB",
            Self::Hugetlb2M => "hugetlb 2 MiB",
            Self::Transparent => "transparent huge pages",
            Self::Base => "4 KiB pages",
        })
    }
}

/// The page kind of a buffer, with the reasons why no better kind was used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageBacking {
    /// The kind of pages.
    pub kind: PageKind,
    /// Why each better kind was not used, best first.
    pub passed_over: Vec<(PageKind, NoPages)>,
}

/// Why pages of a kind were not used for a buffer.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum NoPages {
    /// The buffer is so small that a huge page would be mostly unused.
    #[error("smaller than half a huge page")]
    SmallBuffer,
    /// The buffer's length is not a multiple of such a page, and rounding it up would allocate far more than requested.
    #[error("not a whole number of {} MiB pages", page >> 20)]
    NotWhole {
        /// Bytes of a page.
        page: usize,
    },
    /// The kernel's transparent huge pages are larger than the alignment of buffers.
    #[error("huge pages of this kernel are {} MiB, but buffers are aligned to 2 MiB", page >> 20)]
    TooLarge {
        /// Bytes of a page.
        page: usize,
    },
    /// Transparent huge pages are switched off.
    #[error("switched off; echo {enable} | sudo tee {}", file.display())]
    SwitchedOff {
        /// The file that switches them.
        file: PathBuf,
        /// The word that enables them.
        enable: &'static str,
    },
    /// The kernel has fewer reserved huge pages left than the buffer needs.
    #[error("{error}; the buffer takes {pages} free ones of those that {} reserves", file.display())]
    NotReserved {
        /// Pages that the buffer needs.
        pages: usize,
        /// The file that reserves them.
        file: PathBuf,
        /// The kernel's answer, in its words.
        error: String,
    },
    /// The kernel refused them, in its words.
    #[error("{0}")]
    Kernel(String),
}

/// Allocation counters of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapStats {
    /// Bytes in live buffers.
    pub live: usize,
    /// Maximum of `live`.
    pub peak: usize,
    /// Buffers allocated since the heap was created.
    pub buffers: usize,
}

/// A source of buffers.
pub trait Heap: Send + Sync {
    /// A zeroed buffer of `len` bytes, rounded up to the kernel's pages. All pages are present when this returns.
    ///
    /// # Errors
    /// [`Error::BadLength`] for 0 bytes or when rounding up overflows; [`Error::Allocate`] when the last page kind of
    /// the fallback chain fails too.
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error>;

    /// A buffer whose pages are not present yet. Its ranges are populated one by one, while earlier ranges are already
    /// in use. `len` is rounded up to the kernel's pages, or, from 4 MiB on, to those of the heap.
    ///
    /// # Errors
    /// As [`Heap::allocate`]. There is no fallback later: when pages run out, [`Absent::populate`] fails.
    fn reserve(&self, len: usize) -> Result<Reserved, Error>;

    /// Uses for which this heap's buffers are suitable.
    fn capabilities(&self) -> HeapCapabilities;

    /// Allocation counters.
    fn stats(&self) -> HeapStats;

    /// The heap's name.
    fn name(&self) -> &'static str;
}

macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<H: Heap + ?Sized> Heap for $pointer {
            fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
                (**self).allocate(len)
            }

            fn reserve(&self, len: usize) -> Result<Reserved, Error> {
                (**self).reserve(len)
            }

            fn capabilities(&self) -> HeapCapabilities {
                (**self).capabilities()
            }

            fn stats(&self) -> HeapStats {
                (**self).stats()
            }

            fn name(&self) -> &'static str {
                (**self).name()
            }
        }
    )*};
}

pointers!(&H, Arc<H>);

#[derive(Default)]
pub(crate) struct Counters {
    live: AtomicUsize,
    peak: AtomicUsize,
    buffers: AtomicUsize,
}

impl Counters {
    pub(crate) fn stats(&self) -> HeapStats {
        HeapStats {
            live: self.live.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
            buffers: self.buffers.load(Ordering::Relaxed),
        }
    }
}

/// Counts a buffer's bytes as live until dropped.
pub(crate) struct Account {
    counters: Arc<Counters>,
    bytes: usize,
}

impl Account {
    /// For memory outside of heaps.
    pub(crate) fn none() -> Self {
        Self { counters: Arc::default(), bytes: 0 }
    }

    pub(crate) fn open(counters: &Arc<Counters>, bytes: usize) -> Self {
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

#[cfg(test)]
mod tests;
