//! The scatter-gather table: segments in a list that grows.

use alloc::vec::Vec;

use crate::{Address, Segment, SgError};

#[derive(Clone, Copy, Debug)]
struct Entry<A> {
    /// Offset of the segment's first byte in the buffer.
    start: u64,
    addr: A,
}

/// A buffer as a list of segments, merged while it is built.
///
/// Segments that continue each other in memory become one, so a table has as many segments as the buffer has
/// discontinuities. An [`SgIndex`](crate::SgIndex) of it finds bytes by their offset.
///
/// ```
/// use dmalane_addr::{PhysAddr, SgTable};
/// let mut sg = SgTable::new();
/// sg.push(PhysAddr::new(0x1000), 0x1000).unwrap();
/// sg.push(PhysAddr::new(0x2000), 0x1000).unwrap(); // continues the first
/// sg.push(PhysAddr::new(0x9000), 0x1000).unwrap();
/// assert_eq!(sg.segments().count(), 2);
/// assert_eq!(sg.segments().next().unwrap().len, 0x2000);
/// ```
#[derive(Clone, Debug)]
pub struct SgTable<A> {
    entries: Vec<Entry<A>>,
    len: u64,
}

impl<A> Default for SgTable<A> {
    fn default() -> Self {
        Self { entries: Vec::new(), len: 0 }
    }
}

impl<A: Address> SgTable<A> {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `len` bytes at `addr`; bytes that continue the last segment extend it. Returns `None`, and changes
    /// nothing, when the run would wrap around the address space or the table's length would exceed 64 bits. A
    /// `len` of 0 changes nothing.
    #[must_use = "None says that nothing was appended"]
    pub fn push(&mut self, addr: A, len: u64) -> Option<()> {
        self.append(addr, len, false).ok()
    }

    /// [`push`](Self::push), which may also fail for want of memory and then changes nothing.
    pub(super) fn try_push(&mut self, addr: A, len: u64) -> Result<(), SgError<A>> {
        self.append(addr, len, true)
    }

    #[inline]
    fn append(&mut self, addr: A, len: u64, may_fail: bool) -> Result<(), SgError<A>> {
        if len == 0 {
            return Ok(());
        }
        addr.checked_add(len - 1).ok_or(SgError::Wraps { addr, len })?;
        let total = self.len.checked_add(len).ok_or(SgError::TooLong)?;
        let continues = self.entries.last().is_some_and(|e| e.addr.checked_add(self.len - e.start) == Some(addr));
        if !continues {
            if may_fail {
                self.entries.try_reserve(1).map_err(|_| SgError::NoMemory { segments: self.entries.len() })?;
            }
            self.entries.push(Entry { start: self.len, addr });
        }
        self.len = total;
        Ok(())
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when the table holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of segments.
    pub fn segment_count(&self) -> usize {
        self.entries.len()
    }

    /// All segments in order.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment<A>> + Clone {
        (0..self.entries.len()).map(|i| self.segment(i))
    }

    /// Where in the buffer a segment starts.
    pub(super) fn start_of(&self, index: usize) -> u64 {
        self.entries[index].start
    }

    /// The offset behind a segment.
    pub(super) fn end_of(&self, index: usize) -> u64 {
        self.entries.get(index + 1).map_or(self.len, |e| e.start)
    }

    pub(super) fn segment(&self, index: usize) -> Segment<A> {
        let e = &self.entries[index];
        Segment { addr: e.addr, len: self.end_of(index) - e.start }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PhysAddr;

    #[test]
    fn refuses_what_wraps() {
        let mut sg = SgTable::new();
        assert_eq!(sg.push(PhysAddr::new(u64::MAX - 1), 3), None);
        assert_eq!(sg.push(PhysAddr::new(u64::MAX - 1), 2), Some(()));
        assert_eq!(sg.push(PhysAddr::new(0), u64::MAX), None, "the length would exceed 64 bits");
        assert_eq!((sg.len(), sg.segment_count()), (2, 1));
        assert_eq!(sg.push(PhysAddr::new(0), 4), Some(()));
        assert_eq!(sg.segment_count(), 2, "address 0 does not continue the top of the space");
    }

    #[test]
    fn empty() {
        let sg = SgTable::<PhysAddr>::new();
        assert!(sg.is_empty() && sg.segments().next().is_none());
    }
}
