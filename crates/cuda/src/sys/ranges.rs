//! Which ranges of device addresses are mapped, and what for.

use std::collections::BTreeMap;

use dmalane_addr::{CardAddr, DeviceVa};
use dmalane_queue::{DeviceAddr, OpError};

/// Ranges of device addresses that may be used, by their first; no two overlap.
pub(super) type Mapped = BTreeMap<u64, Range>;

/// A range of device addresses and its mapping.
pub(super) struct Range {
    pub(super) len: u64,
    pub(super) kind: RangeKind,
    pub(super) writable: bool,
    /// The memory, in chunks of `chunk` bytes; empty where the range does not own it.
    pub(super) handles: Vec<u64>,
    pub(super) chunk: u64,
    /// It was to be unmapped, and streams did not say that they had ended: nothing may use it any more.
    pub(super) closed: bool,
}

/// Purpose of a range of device addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RangeKind {
    /// Memory that was allocated.
    Memory,
    /// Memory that is seen at another address, too.
    Bound,
}

/// The handle of the chunk of memory that begins at `at` and ends before `end`, and its length.
pub(super) fn chunk_at(mapped: &Mapped, at: u64, end: u64) -> Option<(u64, u64)> {
    let (first, range) = mapped.range(..=at).next_back()?;
    let offset = at - first;
    let whole = offset < range.len && offset.is_multiple_of(range.chunk.max(1)) && end - at >= range.chunk;
    let handle = range.handles.get(usize::try_from(offset / range.chunk.max(1)).ok()?)?;
    whole.then_some((*handle, range.chunk))
}

/// The kind of an address, and its number.
pub(super) fn kind(at: DeviceAddr) -> (RangeKind, u64) {
    match at {
        DeviceAddr::Card(at) => (RangeKind::Memory, at.bits()),
        DeviceAddr::Va(at) => (RangeKind::Bound, at.bits()),
    }
}

/// Makes two ranges of one that is bound across `at`. Each of its pages was mapped by a call of its own, so each can be
/// unmapped alone.
pub(super) fn cut(mapped: &mut Mapped, at: u64) {
    let Some((first, range)) = mapped.range_mut(..at).next_back() else { return };
    let before = at - first;
    if range.kind != RangeKind::Bound || before >= range.len {
        return;
    }
    let (len, kind) = (range.len - before, RangeKind::Bound);
    let behind = Range { len, kind, writable: range.writable, handles: Vec::new(), chunk: 0, closed: range.closed };
    range.len = before;
    mapped.insert(at, behind);
}

pub(super) fn overlaps(mapped: &Mapped, at: u64, len: u64) -> bool {
    let last = at.saturating_add(len);
    mapped.range(..last).next_back().is_some_and(|(first, range)| first + range.len > at)
}

pub(super) fn check(mapped: &Mapped, at: u64, len: u64, kind: RangeKind, write: bool) -> Result<(), u64> {
    let end = at.checked_add(len).ok_or(at)?;
    let mut next = at;
    while next < end {
        let found = mapped.range(..=next).next_back().filter(|(first, range)| {
            next - **first < range.len && range.kind == kind && !range.closed && (range.writable || !write)
        });
        let (first, range) = found.ok_or(next)?;
        next = first + range.len; // no overflow: the driver maps no range past the top
    }
    Ok(())
}

/// The same for an operation: an address that it may not use is a fault of the memory or of the MMU.
pub(super) fn check_use(mapped: &Mapped, at: u64, len: u64, kind: RangeKind, write: bool) -> Result<(), OpError> {
    check(mapped, at, len, kind, write).map_err(|bad| match kind {
        RangeKind::Memory => OpError::NoCardMemory(CardAddr::new(bad)),
        RangeKind::Bound => OpError::MmuFault(DeviceVa::new(bad)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_of_the_kind_of_address() {
        let range = |kind| Range { len: 4096, kind, writable: false, handles: Vec::new(), chunk: 0, closed: false };
        let mapped = Mapped::from([(0x1000, range(RangeKind::Memory)), (0x4000, range(RangeKind::Bound))]);
        assert_eq!(check_use(&mapped, 0x1000, 4096, RangeKind::Memory, false), Ok(()));
        assert_eq!(check_use(&mapped, 0x4000, 4096, RangeKind::Bound, false), Ok(()));
        let memory = |at, len, write| check_use(&mapped, at, len, RangeKind::Memory, write);
        assert_eq!(memory(0x1000, 4097, false), Err(OpError::NoCardMemory(CardAddr::new(0x2000))));
        assert_eq!(memory(0x1000, 1, true), Err(OpError::NoCardMemory(CardAddr::new(0x1000))), "read-only");
        let bound = |at, write| check_use(&mapped, at, 4096, RangeKind::Bound, write);
        assert_eq!(bound(0x4800, false), Err(OpError::MmuFault(DeviceVa::new(0x5000))));
        assert_eq!(bound(0x4000, true), Err(OpError::MmuFault(DeviceVa::new(0x4000))));
        assert_eq!(bound(0x1000, false), Err(OpError::MmuFault(DeviceVa::new(0x1000))), "of another kind");
    }
}
