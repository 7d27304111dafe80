//! The port that allocates buffers.

use std::sync::Arc;

use super::{HeapCapabilities, Reserved};
use crate::{CpuBuf, Error, HeapStats};

/// A source of buffers.
pub trait Heap: Send + Sync {
    /// A zeroed buffer of `len` bytes, rounded up to the kernel's pages. All pages are present when this returns.
    ///
    /// # Errors
    /// [`Error::BadLength`] for 0 bytes or when rounding up overflows; [`Error::Allocate`] when the last page kind of
    /// the fallback chain fails too.
    fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
        self.reserve(len)?.into_cpu()
    }

    /// A buffer whose pages are not present yet. Its ranges are populated one by one, while earlier ranges are already
    /// in use. `len` is rounded up to the kernel's pages, or, from 4 MiB on, to those of the heap.
    ///
    /// # Errors
    /// As [`Heap::allocate`]. There is no fallback later: when pages run out,
    /// [`Absent::populate`](crate::Absent::populate) fails.
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
