//! Reserved memory that is populated range by range.

use std::io;
use std::sync::Arc;

use crate::account::Account;
use crate::memory::Memory;
use crate::sys::{FileMapping, Region, page};
use crate::{BufferSlice, CopyHint, CpuBuf, Error, PageBacking, PageKind, SharedBuf, VolatileSlice};

/// A buffer whose pages are not present yet: [`Reserved::next`] takes ranges off its front, and a range becomes a
/// [`BufferSlice`] when it is populated.
#[derive(Debug)]
pub struct Reserved {
    rest: BufferSlice,
    len: usize,
    kind: &'static str,
    fresh: bool,
    present: bool,
}

impl Reserved {
    pub(crate) fn new(region: Region, backing: PageBacking, account: Account, kind: &'static str) -> Self {
        let len = region.len();
        let memory = Memory::new(region, backing, account);
        Self { rest: BufferSlice::whole(Arc::new(memory)), len, kind, fresh: true, present: false }
    }

    /// New memory whose pages are all present.
    pub(crate) fn present(region: Region, backing: PageBacking, account: Account) -> Self {
        Self { present: true, ..Self::new(region, backing, account, "present memory") }
    }

    /// Memory that was in use before: its pages are present and keep their old contents.
    pub(crate) fn recycled(region: Region, backing: PageBacking, account: Account) -> Self {
        Self { fresh: false, ..Self::present(region, backing, account) }
    }

    /// The memory, while no range was taken.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Memory> {
        self.rest.memory_mut()
    }

    /// Bytes of the whole buffer.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes not taken yet.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The kind of pages behind the buffer, with the reasons why no better kind was used.
    pub fn backing(&self) -> &PageBacking {
        &self.rest.memory().backing
    }

    /// True when the pages are new and therefore zero; false for recycled memory, which is present already and keeps
    /// old contents of this process.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// True when all pages are present already: recycled memory, and that of heaps which allocate at once, such as a
    /// dma-buf heap or a driver. It needs no more of the machine's memory.
    pub fn is_present(&self) -> bool {
        self.present
    }

    /// True for memory of ordinary pages behind a descriptor: faster to fill by direct reads into huge pages and
    /// [`Absent::copy_from`] there than by direct reads, whose requests list pages. New pages need not be zeroed then.
    pub fn is_better_copied_to(&self) -> bool {
        self.backing().kind == PageKind::Base && self.rest.memory().region.has_file()
    }

    /// Takes the next `len` bytes, or all that are left; `None` when none are left.
    pub fn next(&mut self, len: usize) -> Option<Absent> {
        let len = len.min(self.rest.len());
        if len == 0 {
            return None;
        }
        let slice = self.rest.split_off_front(len)?;
        Some(Absent { slice, kind: self.kind, present: self.present })
    }

    /// Populates the whole buffer.
    ///
    /// # Errors
    /// [`Error::Allocate`] when the kernel has no more pages, and when ranges were taken before.
    pub fn populate(mut self) -> Result<SharedBuf, Error> {
        let (len, kind) = (self.len, self.kind);
        let whole = self.next(len).map(Absent::populate).transpose()?.and_then(|slice| slice.into_whole().ok());
        whole.ok_or_else(|| Error::Allocate { len, kind, source: io::Error::other("a part was already taken") })
    }

    /// The whole buffer, populated and zeroed.
    pub(crate) fn into_cpu(self) -> Result<CpuBuf, Error> {
        let (len, kind, fresh) = (self.len, self.kind, self.fresh);
        let buf = self.populate()?;
        if !fresh {
            buf.as_volatile_slice().fill(0);
        }
        let taken = |_| Error::Allocate { len, kind, source: io::Error::other("a new buffer is already referenced") };
        buf.into_cpu().map_err(taken)
    }
}

/// A range of a [`Reserved`] buffer that is not populated yet.
#[derive(Debug)]
pub struct Absent {
    slice: BufferSlice,
    kind: &'static str,
    present: bool,
}

impl Absent {
    /// Offset of the range in its buffer, in bytes.
    pub fn offset(&self) -> usize {
        self.slice.offset()
    }

    /// Bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Fills the range with `len` bytes of a mapped file from file offset `at` on, and the rest of the last page with
    /// zeroes. Memory behind a memfd of ordinary pages is made with these contents by the kernel, which then need not
    /// zero its pages first; this process has not touched them. Private memory is populated and read into at once,
    /// while it is in the processor's cache; memory that is present (recycled) is read into as it is. Only worth it for
    /// bytes that are in the page cache.
    ///
    /// # Errors
    /// The range, to be populated and read into instead, with the reason: `Unsupported` for other memory, and where
    /// `len` does not end in the range's last page; `UnexpectedEof` for a regular file that ends before; `WouldBlock`
    /// while another thread fills a range, on systems that let one do so at a time; the kernel's.
    pub fn copy_from_file(self, file: &FileMapping, at: u64, len: usize) -> Result<BufferSlice, (Self, io::Error)> {
        let present = self.present;
        self.made_by(len, |region, offset| match present {
            true => region.read_from_file(offset, len, file, at),
            false => region.write_from_file(offset, len, file, at),
        })
    }

    /// Fills the range as [`Absent::copy_from_file`] does, with bytes of other memory.
    ///
    /// # Errors
    /// As [`Absent::copy_from_file`].
    pub fn copy_from(self, from: VolatileSlice<'_>) -> Result<BufferSlice, (Self, io::Error)> {
        let present = self.present;
        self.made_by(from.len(), |region, offset| {
            match region.as_volatile_slice().sub(offset, from.len()).filter(|_| present) {
                Some(there) => {
                    there.copy_from(from, CopyHint::Keep);
                    Ok(())
                }
                None => region.write_from_view(offset, from),
            }
        })
    }

    fn made_by(
        self,
        len: usize,
        write: impl FnOnce(&Region, usize) -> io::Result<()>,
    ) -> Result<BufferSlice, (Self, io::Error)> {
        let memory = self.slice.memory();
        let whole_pages =
            self.offset().is_multiple_of(page()) && len.checked_next_multiple_of(page()) == Some(self.len());
        let huge_file = memory.region.has_file() && memory.backing.kind != PageKind::Base;
        if (huge_file && !self.present) || !whole_pages {
            return Err((self, io::ErrorKind::Unsupported.into()));
        }
        match write(&memory.region, self.offset()) {
            Ok(()) => {
                // Pages that were made now have zeroes there.
                let (end, left) = (self.offset() + len, self.len() - len);
                if self.present
                    && let Some(rest) = memory.region.as_volatile_slice().sub(end, left)
                {
                    rest.fill(0);
                }
                Ok(self.now_present())
            }
            Err(e) => Err((self, e)),
        }
    }

    /// Makes the pages present, so that touching them cannot fail. A range that is not page-aligned shares its first
    /// and last page with its neighbours.
    ///
    /// # Errors
    /// [`Error::Allocate`] when the kernel has no more pages.
    pub fn populate(self) -> Result<BufferSlice, Error> {
        if !self.present {
            let (region, len, kind) = (&self.slice.memory().region, self.len(), self.kind);
            region.populate(self.offset(), len).map_err(|source| Error::Allocate { len, kind, source })?;
        }
        Ok(self.now_present())
    }

    fn now_present(self) -> BufferSlice {
        let Self { slice, present, .. } = self;
        if let Some(home) = slice.memory().region.home().filter(|_| !present) {
            home.now_present(slice.len());
        }
        slice
    }
}
