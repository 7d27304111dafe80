//! Owned slices of a shared buffer, and what else reaches its bytes.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::memory::Memory;
use crate::{BufferRef, DriverMemory, Error, VolatileSlice};

/// An owned slice of a [`SharedBuf`](crate::SharedBuf), disjoint from every other slice but its
/// [duplicates](BufferSlice::duplicate).
///
/// An operation in flight owns its slice, so no other code accesses those bytes until the operation returns it.
pub struct BufferSlice {
    memory: Arc<Memory>,
    offset: usize,
    len: usize,
}

impl BufferSlice {
    /// The whole of a memory that has no other slice.
    pub(crate) fn whole(memory: Arc<Memory>) -> Self {
        let len = memory.region.len();
        Self { memory, offset: 0, len }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The memory, when there is no other reference to it.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Memory> {
        Arc::get_mut(&mut self.memory)
    }

    /// Splits off the first `len` bytes; `None`, without any change, when there are fewer.
    pub fn split_off_front(&mut self, len: usize) -> Option<BufferSlice> {
        let rest = self.len.checked_sub(len)?;
        let front = BufferSlice { memory: self.memory.clone(), offset: self.offset, len };
        (self.offset, self.len) = (self.offset + len, rest);
        Some(front)
    }

    pub(crate) fn into_memory(self) -> Arc<Memory> {
        self.memory
    }

    /// True for a slice of the whole buffer.
    pub(crate) fn is_whole(&self) -> bool {
        self.offset == 0 && self.len == self.memory.region.len()
    }

    /// As [`BufferRef::driver`].
    pub fn driver<M: DriverMemory>(&self) -> Option<&M> {
        self.memory.region.driver()?.downcast_ref()
    }

    /// Offset of the slice in its buffer, in bytes.
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes; may be 0.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a slice of 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A reference to the memory of the whole buffer.
    pub fn reference(&self) -> BufferRef {
        BufferRef(self.memory.clone())
    }

    /// The bytes, for reading and writing.
    #[inline]
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.memory.region.as_volatile_slice().sub(self.offset, self.len).expect("a slice lies within its buffer")
    }

    /// Runs `f` with the bytes as a plain slice. They cannot change meanwhile: `&mut self` excludes volatile slices of
    /// them, and no device gets write access to the buffer while `f` runs. `f` must not map the buffer for writing,
    /// which would deadlock; it cannot export it ([`Error::Borrowed`](crate::Error::Borrowed)).
    ///
    /// `None`, without calling `f`, while a mapping lets a device write the buffer, and once the buffer was exported or
    /// a slice of it duplicated.
    pub fn with_bytes<T>(&mut self, f: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let this = &*self;
        this.memory.while_unwritten(|| {
            let view = this.as_volatile_slice();
            // SAFETY: mapped, and initialised by the kernel (`Region`). Nobody writes it while borrowed: other slices
            // are disjoint (`split_at`, `split_off_front` and `join` are the only ways to change a slice, and
            // `while_unwritten` refuses a buffer with duplicates), views of this slice borrow it and so cannot exist
            // beside `&mut self`, an operation of the kernel or a device in flight owns its slice, and devices that
            // could write without one need a mapping with that right, which `while_unwritten` has just ruled out and
            // keeps out. Nor does another process: `while_unwritten` refuses an exported buffer, and none becomes
            // exported meanwhile: `SharedBuf::export` takes a `SharedBuf`, which does not exist beside a slice of it,
            // and `BufferRef::export` refuses memory of which `while_unwritten` has counted a borrow;
            // `BufferRef::lend_file` and `BufferRef::device_view` are unsafe, and what they lend lets nobody write
            // without an admission that `while_unwritten` has ruled out. Memory to be read alone, which it also admits,
            // is of a file that is sealed against writing (`Region::import_sealed`), and mapped so.
            f(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len()) })
        })
    }

    /// Copies bytes out, from `offset` within the slice; `None`, without any copy, when the range is not within it.
    #[must_use = "None says that nothing was read"]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        self.as_volatile_slice().sub(offset, into.len())?.read(into);
        Some(())
    }

    /// Copies bytes in, at `offset` within the slice; `None`, without any copy, when they do not fit.
    #[must_use = "None says that nothing was written"]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Option<()> {
        self.as_volatile_slice().sub(offset, from.len())?.write(from);
        Some(())
    }

    /// Splits into the first `len` bytes and the rest.
    ///
    /// # Errors
    /// Returns the slice when it has fewer than `len` bytes.
    pub fn split_at(self, len: usize) -> Result<(BufferSlice, BufferSlice), BufferSlice> {
        if len > self.len {
            return Err(self);
        }
        let rest = BufferSlice { memory: self.memory.clone(), offset: self.offset + len, len: self.len - len };
        Ok((BufferSlice { len, ..self }, rest))
    }

    /// Another slice of the same bytes, or of a range of them: for operations that only read them, of which several may
    /// be in flight. Whoever writes one of the two meanwhile reads unspecified bytes from the other. The buffer lends
    /// no bytes from then on ([`BufferSlice::with_bytes`]).
    ///
    /// # Errors
    /// [`Error::Borrowed`](crate::Error::Borrowed) while it lends some; [`Error::BadRange`](crate::Error::BadRange) for
    /// bytes that the slice does not have.
    pub fn duplicate(&self, range: Range<usize>) -> Result<BufferSlice, Error> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::BadRange { range, len: self.len, page: 1 });
        }
        self.memory.admit_duplicates()?;
        Ok(BufferSlice { memory: self.memory.clone(), offset: self.offset + range.start, len: range.len() })
    }

    /// Joins two adjacent slices of one buffer, this one first.
    ///
    /// # Errors
    /// Returns both when `next` does not start where this slice ends.
    pub fn join(self, next: BufferSlice) -> Result<BufferSlice, (BufferSlice, BufferSlice)> {
        if !Arc::ptr_eq(&self.memory, &next.memory) || self.offset + self.len != next.offset {
            return Err((self, next));
        }
        Ok(BufferSlice { len: self.len + next.len, ..self })
    }
}

impl BufferRef {
    /// True when `slice` is a slice of this memory.
    #[inline]
    pub fn holds(&self, slice: &BufferSlice) -> bool {
        Arc::ptr_eq(&slice.memory, &self.0)
    }

    /// The memfd or dma-buf behind the memory, from its first byte on, for kernel interfaces that map files for
    /// devices; `None` for anonymous memory. Unlike [`BufferRef::export`] this does not mark
    /// the buffer as exported, so it can become a [`CpuBuf`](crate::CpuBuf) again and return to its pool.
    ///
    /// # Safety
    /// The descriptor, or a copy of it, must not outlive the reference, go to another process, be mapped, or be
    /// written. Who lets a device write by it holds a [`Pinned`](crate::Pinned) of the memory that has admitted that
    /// ([`Pinned::admit`](crate::Pinned::admit)) for as long as the device can.
    pub unsafe fn lend_file(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.0.region.lend_file() }
    }

    /// The bytes as a device reaches them, for a software IOMMU.
    ///
    /// # Safety
    /// Who writes through it holds a [`Pinned`](crate::Pinned) of the memory that has admitted that
    /// ([`Pinned::admit`](crate::Pinned::admit)), from before the write begins until it has ended.
    #[inline]
    pub unsafe fn device_view(&self) -> VolatileSlice<'_> {
        self.as_volatile_slice()
    }
}

debug_as!(BufferSlice, |it| "BufferSlice({}..{})", it.offset, it.offset + it.len);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use dmalane_addr::{Access, Iova, Lease, PhysAddr, SgTable};

    use crate::{AnonHeap, BufferRef, Error, Heap, MemfdHeap, Pinned, SharedBuf, Undo};

    /// A registrar that pins and maps nothing.
    struct Nothing;

    impl Undo for Nothing {
        fn unmap(&self, _: Lease<Iova>) -> bool {
            true
        }

        fn unpin(&self, _: &SgTable<PhysAddr>) {}
    }

    /// The pin that a device with this access holds.
    fn admitted(reference: &BufferRef, access: Access) -> Pinned {
        let mut pinned = Pinned::new(reference.clone(), 0..reference.len(), None, Arc::new(Nothing));
        pinned.admit(access);
        pinned
    }

    #[test]
    fn memory_to_be_read_alone_lends_its_bytes_and_admits_no_writer() {
        let buf = MemfdHeap::importable(None).allocate(8192).unwrap().share();
        buf.as_volatile_slice().write(&[7; 8192]);
        let fd = buf.seal().unwrap();
        let read_only = SharedBuf::import_read_only(fd.as_fd()).unwrap();
        assert!(read_only.reference().is_read_only() && read_only.export().is_none());
        assert!(!SharedBuf::import_sealed(fd.as_fd()).unwrap().reference().is_read_only());
        read_only.populate(0, 8192).unwrap();
        let mut slice = read_only.into_slice();
        let _other = slice.duplicate(0..4096).unwrap();
        assert_eq!(slice.with_bytes(<[u8]>::to_vec), Some(vec![7; 8192]), "nobody can write to it");
        assert!(SharedBuf::import_read_only(fd.as_fd()).unwrap().into_cpu().is_err());
        let owner = Arc::new(Nothing);
        let admit = |access| {
            let mut list = [Pinned::new(slice.reference(), 0..8192, None, owner.clone())];
            Pinned::admit_all(&mut list, &owner, access)
        };
        assert_eq!(admit(Access::READ).unwrap(), 8192);
        assert!(matches!(admit(Access::RW), Err(Error::NoAccess(_))));
    }

    #[test]
    fn bytes_are_copied_within_a_slice_only() {
        let (first, mut second) = AnonHeap::new().allocate(4096).unwrap().share().into_slice().split_at(4000).unwrap();
        assert_eq!(second.write(90, b"within"), Some(()));
        let mut bytes = [0; 6];
        assert_eq!((second.read(90, &mut bytes), &bytes), (Some(()), b"within"));
        assert_eq!((second.read(91, &mut bytes), second.write(91, b"beyond")), (None, None));
        let whole = first.join(second).unwrap();
        assert_eq!((whole.read(4090, &mut bytes), &bytes), (Some(()), b"within"));
        let (empty, rest) = whole.split_at(0).unwrap();
        assert_eq!((empty.is_empty(), rest.is_empty()), (true, false));
        let (all, nothing) = rest.split_at(4096).unwrap();
        assert_eq!((all.len(), nothing.len()), (4096, 0));
    }

    #[test]
    fn bytes_are_borrowed_only_while_no_device_can_write() {
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        let reference = buf.reference();
        let (mut slice, _rest) = buf.into_slice().split_at(4096).unwrap();
        slice.write(5, b"x").unwrap();
        assert_eq!(slice.with_bytes(|b| (b.len(), b[5])), Some((4096, b'x')));
        let reader = admitted(&reference, Access::READ);
        assert!(slice.with_bytes(|_| ()).is_some());
        let writer = admitted(&reference, Access::RW);
        assert!(slice.with_bytes(|_| ()).is_none());
        drop(writer);
        assert!(slice.with_bytes(|_| ()).is_some());
        drop(reader);
        let buf = MemfdHeap::new().allocate(4096).unwrap().share();
        assert!(buf.export().is_some());
        assert!(buf.into_slice().with_bytes(|_| ()).is_none());
    }

    #[test]
    fn duplicates_have_the_same_bytes_and_end_borrowing() {
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        let (mut slice, mut other) = buf.into_slice().split_at(4096).unwrap();
        let borrowed = slice.with_bytes(|_| other.duplicate(0..1).unwrap_err());
        assert!(matches!(borrowed, Some(Error::Borrowed)));
        assert!(matches!(other.duplicate(4095..4097), Err(Error::BadRange { .. })));
        let mut duplicate = other.duplicate(90..100).unwrap();
        other.write(90, b"ten bytes!").unwrap();
        let mut bytes = [0; 10];
        duplicate.read(0, &mut bytes).unwrap();
        assert_eq!((&bytes, duplicate.offset(), duplicate.len()), (b"ten bytes!", 4096 + 90, 10));
        assert!([&mut slice, &mut other, &mut duplicate].iter_mut().all(|slice| slice.with_bytes(|_| ()).is_none()));
    }

    #[test]
    fn what_is_borrowed_is_not_exported() {
        let buf = MemfdHeap::new().allocate(8192).unwrap().share();
        let reference = buf.reference();
        let (mut slice, mut other) = buf.into_slice().split_at(4096).unwrap();
        slice
            .with_bytes(|_| {
                assert!(matches!(reference.export(), Err(Error::Borrowed)));
                // Two borrows of one memory: the first to end does not end the other.
                other.with_bytes(|_| ()).unwrap();
                assert!(matches!(reference.export(), Err(Error::Borrowed)));
            })
            .unwrap();
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| slice.with_bytes(|_| panic!("inside"))));
        assert!(panicked.is_err());
        assert!(reference.export().is_ok(), "a borrow that panicked has ended");
        assert!(slice.with_bytes(|_| ()).is_none(), "an exported buffer is not borrowed");
        let anonymous = AnonHeap::new().allocate(4096).unwrap().share().reference();
        assert!(matches!(anonymous.export(), Err(Error::NoDescriptor)));
    }

    #[test]
    fn write_access_waits_while_bytes_are_borrowed() {
        let buf = AnonHeap::new().allocate(4096).unwrap().share();
        let reference = buf.reference();
        let mut slice = buf.into_slice();
        std::thread::scope(|s| {
            slice
                .with_bytes(|_| {
                    let mapper = s.spawn(|| admitted(&reference, Access::RW));
                    std::thread::sleep(std::time::Duration::from_millis(30));
                    assert!(!mapper.is_finished(), "waits until the borrow ends");
                })
                .unwrap();
        });
        assert!(slice.with_bytes(|_| ()).is_some(), "the device has been and gone");
    }
}
