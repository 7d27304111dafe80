//! The memory of a buffer, and counted references to it.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::account::Account;
use crate::sys::{DriverMemory, Region};
use crate::{Error, PageBacking, VolatileSlice, lock};

/// The memory of a buffer that devices may reach.
pub(crate) struct Memory {
    pub(crate) region: Region,
    pub(crate) backing: PageBacking,
    pub(crate) account: Account,
    uses: Mutex<Uses>,
    /// Signalled when the last borrow ends.
    returned: Condvar,
}

/// Uses of a memory that exclude each other.
#[derive(Default)]
struct Uses {
    /// Mappings that let a device write.
    writers: usize,
    /// Slices of its bytes that are lent.
    borrows: usize,
    /// Slices were duplicated, so that one may be written while another is read.
    duplicated: bool,
}

impl Memory {
    pub(crate) fn new(region: Region, backing: PageBacking, account: Account) -> Self {
        Self { region, backing, account, uses: Mutex::default(), returned: Condvar::new() }
    }

    /// Lends no bytes from now on.
    ///
    /// # Errors
    /// [`Error::Borrowed`] while bytes are lent.
    pub(crate) fn admit_duplicates(&self) -> Result<(), Error> {
        let mut uses = lock(&self.uses);
        if uses.borrows > 0 {
            return Err(Error::Borrowed);
        }
        uses.duplicated = true;
        Ok(())
    }

    /// Runs `f` while no mapping lets a device write; `None` when one does, or when the memory was exported or has
    /// duplicates. Memory to be read alone never changes.
    pub(crate) fn while_unwritten<T>(&self, f: impl FnOnce() -> T) -> Option<T> {
        /// Ends the borrow, also when `f` panics.
        struct Borrow<'a>(&'a Memory);
        impl Drop for Borrow<'_> {
            fn drop(&mut self) {
                let mut uses = lock(&self.0.uses);
                uses.borrows -= 1;
                if uses.borrows == 0 {
                    self.0.returned.notify_all();
                }
            }
        }
        if self.region.is_read_only() {
            return Some(f());
        }
        let mut uses = lock(&self.uses);
        if uses.writers > 0 || uses.duplicated || self.region.is_exported() {
            return None;
        }
        uses.borrows += 1;
        drop(uses);
        let _borrow = Borrow(self);
        Some(f())
    }
}

/// A counted reference to a buffer's memory. It keeps the memory alive but gives no access to its bytes.
#[derive(Clone)]
pub struct BufferRef(pub(crate) Arc<Memory>);

impl BufferRef {
    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.0.region.len()
    }

    /// True when both refer to the same memory.
    pub fn same_memory(&self, other: &BufferRef) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that identifies the memory while a reference to it exists.
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The virtual address of the memory in this process, for kernel interfaces that pin by address.
    pub fn address(&self) -> usize {
        self.as_volatile_slice().as_ptr().addr()
    }

    /// The memory of a [`DriverHeap`](crate::DriverHeap) that this is, or lies in.
    pub fn driver<M: DriverMemory>(&self) -> Option<&M> {
        self.0.region.driver()?.downcast_ref()
    }

    /// True for memory that can only be read ([`SharedBuf::import_read_only`](crate::SharedBuf::import_read_only)).
    pub fn is_read_only(&self) -> bool {
        self.0.region.is_read_only()
    }

    /// The kind of pages behind the memory.
    pub fn backing(&self) -> &PageBacking {
        &self.0.backing
    }

    /// For registrars: asks the kernel for the pages of a range now, as [`crate::SharedBuf::populate`].
    ///
    /// # Errors
    /// As there.
    pub fn populate(&self, range: &Range<usize>) -> std::io::Result<()> {
        self.0.region.populate(range.start, range.len())
    }

    /// For registrars: checks that a range to pin is whole pages of this memory, of `page` bytes.
    ///
    /// # Errors
    /// [`Error::BadRange`].
    pub fn check_pages(&self, range: &Range<usize>, page: usize) -> Result<(), Error> {
        let len = self.len();
        if range.is_empty() || range.end > len || !(range.start | range.end).is_multiple_of(page) {
            return Err(Error::BadRange { range: range.clone(), len, page });
        }
        Ok(())
    }

    /// As [`SharedBuf::export`](crate::SharedBuf::export), for code that registers memory without owning the buffer.
    ///
    /// # Errors
    /// [`Error::NoDescriptor`] for anonymous memory; [`Error::Borrowed`] while
    /// [`BufferSlice::with_bytes`](crate::BufferSlice::with_bytes) lends bytes of it.
    pub fn export(&self) -> Result<BorrowedFd<'_>, Error> {
        // Under this lock no thread borrows the bytes, and none will once the memory counts as exported.
        let uses = lock(&self.0.uses);
        if uses.borrows > 0 {
            return Err(Error::Borrowed);
        }
        self.0.region.export().ok_or(Error::NoDescriptor)
    }

    /// True when this is the only reference: no buffer, slice or mapping of the memory exists.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Counts a mapping through which a device may write. Called before the device can write.
    pub(crate) fn admit_writer(&self) {
        let returned = &self.0.returned;
        let mut uses =
            returned.wait_while(lock(&self.0.uses), |uses| uses.borrows > 0).unwrap_or_else(PoisonError::into_inner);
        uses.writers += 1;
    }

    /// Counts one such mapping less. Called after the device can no longer write.
    pub(crate) fn retire_writer(&self) {
        lock(&self.0.uses).writers -= 1;
    }

    /// For registrars that access memory in a device's place: reads bytes from `offset` on, as
    /// [`VolatileSlice::read_words`].
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        self.as_volatile_slice().read_words(offset, into)
    }

    /// As [`BufferRef::read`], writes. Waits while bytes of the memory are lent, as a mapping does that lets a device
    /// write.
    #[must_use = "None says that nothing was written"]
    pub fn write(&self, offset: usize, from: &[u8]) -> Option<()> {
        self.admit_writer();
        let written = self.as_volatile_slice().write_words(offset, from);
        self.retire_writer();
        written
    }

    #[inline]
    pub(crate) fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.0.region.as_volatile_slice()
    }
}

debug_as!(BufferRef, |it| "BufferRef({} bytes)", it.len());
