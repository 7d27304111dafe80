//! Memory that is set aside, and becomes present piece by piece.

use std::sync::Arc;

use super::{Account, PageBacking};
use crate::buf::Memory;
use crate::sys::Region;
use crate::{BufferSlice, Error, SharedBuf};

/// A buffer of which no byte can be touched yet: [`Reserved::next`] takes pieces off its front, and a piece becomes a
/// [`BufferSlice`] when its pages are present.
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

    /// New memory that the kernel has allocated as a whole.
    pub(crate) fn present(region: Region, backing: PageBacking, account: Account) -> Self {
        Self { present: true, ..Self::new(region, backing, account, "present memory") }
    }

    /// Memory that was in use before: its pages are present, and hold what they held.
    pub(crate) fn recycled(region: Region, backing: PageBacking, account: Account) -> Self {
        Self { fresh: false, ..Self::present(region, backing, account) }
    }

    /// The memory, while no piece of it is out.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Memory> {
        self.rest.memory_mut()
    }

    /// Bytes of the whole buffer.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that were not taken yet.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The kind of pages behind the buffer, and why no better kind.
    pub fn backing(&self) -> &PageBacking {
        &self.rest.memory().backing
    }

    /// True when the pages are new and therefore zero; false for recycled memory, which is present already and holds
    /// whatever this process had in it.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Takes the next `len` bytes, or as many as are left; `None` when nothing is.
    pub fn next(&mut self, len: usize) -> Option<Absent> {
        let len = len.min(self.rest.len());
        if len == 0 {
            return None;
        }
        let part = self.rest.split_off_front(len)?;
        Some(Absent { part, kind: self.kind, present: self.present })
    }

    /// All of it at once.
    ///
    /// # Errors
    /// [`Error::Allocate`] when the kernel has no more pages, and when pieces were taken before.
    pub fn populate(mut self) -> Result<SharedBuf, Error> {
        let (len, kind) = (self.len, self.kind);
        let whole = self.next(len).map(Absent::populate).transpose()?.and_then(|part| part.into_whole().ok());
        whole.ok_or_else(|| Error::Allocate { len, kind, source: std::io::Error::other("taken in part before") })
    }
}

/// A piece of a [`Reserved`] buffer, without pages.
#[derive(Debug)]
pub struct Absent {
    part: BufferSlice,
    kind: &'static str,
    present: bool,
}

impl Absent {
    /// Where the piece starts in its buffer, in bytes.
    pub fn offset(&self) -> usize {
        self.part.offset()
    }

    /// Bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.part.len()
    }

    /// Makes the pages present: touching them cannot fail from then on. The piece shares its first and last 4 KiB page
    /// (or huge page) with its neighbours if it was not cut at one.
    ///
    /// # Errors
    /// [`Error::Allocate`] when the kernel has no more pages.
    pub fn populate(self) -> Result<BufferSlice, Error> {
        let Self { part, kind, present } = self;
        if !present {
            let memory = part.memory();
            let len = part.len();
            memory.region.populate(part.offset(), len).map_err(|source| Error::Allocate { len, kind, source })?;
            if let Some(home) = memory.region.home() {
                home.now_present(len);
            }
        }
        Ok(part)
    }
}
