//! Requirements on buffers, and what of them a heap lacks.

use std::fmt;

use crate::PageKind;

/// Uses for which the buffers of a heap are suitable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HeapCapabilities {
    /// Another process can map them, by a file descriptor.
    pub shareable: bool,
    /// Drivers can import them, as a dma-buf.
    pub dma_buf: bool,
    /// The best page kind.
    pub best_pages: PageKind,
}

impl fmt::Display for HeapCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {}", self.best_pages)?;
        for (can, what) in [(self.shareable, "shareable"), (self.dma_buf, "dma-buf")] {
            write!(f, "{}{what}", if can { ", " } else { ", no " })?;
        }
        Ok(())
    }
}

/// Requirements on a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Another process can map it.
    pub shareable: bool,
    /// A driver can import it as a dma-buf.
    pub dma_buf: bool,
    /// First page kind of the fallback chain; `None` for reserved 2 MiB pages.
    pub pages: Option<PageKind>,
}

impl Needs {
    /// The first requirement that a heap does not meet, as the reason against it; `None` when it meets all.
    pub(super) fn missing(&self, has: &HeapCapabilities) -> Option<&'static str> {
        // What can be shared is a memfd, which udmabuf wraps, or a dma-buf already.
        let no_dma_buf = if has.shareable { "there is no /dev/udmabuf for it" } else { "cannot become a dma-buf" };
        match () {
            () if self.shareable && !has.shareable => Some("cannot be shared with another process"),
            () if self.dma_buf && !has.dma_buf => Some(no_dma_buf),
            () => None,
        }
    }
}
