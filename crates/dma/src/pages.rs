//! Kinds of pages, and why a buffer did not get better ones.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

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
#[non_exhaustive]
pub struct PageBacking {
    /// The kind of pages.
    pub kind: PageKind,
    /// Why each better kind was not used, best first.
    pub passed_over: Vec<(PageKind, NoPages)>,
}

impl PageBacking {
    /// Ordinary pages, where no better kind is tried.
    pub(crate) fn base() -> Self {
        Self { kind: PageKind::Base, passed_over: Vec::new() }
    }
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
