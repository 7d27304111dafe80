//! Which ranges of device addresses are mapped, and what for.

use std::collections::BTreeMap;

use dmalane_addr::{CardAddr, DeviceVa};
use dmalane_queue::{DeviceAddr, OpError, QueueAddr};

use crate::Error;

/// Ranges of device addresses that may be used, by their first; no two overlap.
pub(super) type Mapped = BTreeMap<u64, Range>;

/// A range of device addresses and its mapping.
pub(super) struct Range {
    pub(super) len: u64,
    /// The memory that was allocated here; `None` where memory is bound that was allocated elsewhere, or is lent.
    pub(super) handle: Option<u64>,
    /// Memory that another library or another process has allocated.
    pub(super) lent: bool,
    pub(super) writable: bool,
    /// It was to be unmapped, and streams did not say that they had ended: nothing may use it any more.
    pub(super) closed: bool,
}

pub(super) fn overlaps(mapped: &Mapped, at: u64, len: u64) -> bool {
    let last = at.saturating_add(len);
    mapped.range(..last).next_back().is_some_and(|(first, range)| first + range.len > at)
}

/// The handle of memory that was allocated here as one page.
pub(super) fn page_at(mapped: &Mapped, at: u64, page: u64) -> Result<u64, Error> {
    let range = mapped.get(&at).filter(|range| range.len == page && !range.closed);
    range.and_then(|range| range.handle).ok_or(Error::NotAllocated(at))
}

/// Checks that a range may be used: memory by its own address, or what is bound. The error is the first address that
/// may not.
pub(super) fn check(mapped: &Mapped, at: DeviceAddr, len: u64, write: bool) -> Result<(), u64> {
    let (mut next, bound) = (at.bits(), matches!(at, DeviceAddr::Va(_)));
    let end = next.checked_add(len).ok_or(next)?;
    let is_bound = |range: &Range| range.handle.is_none() && !range.lent;
    let may = |range: &Range| is_bound(range) == bound && (range.writable || !write) && !range.closed;
    while next < end {
        let found = mapped.range(..=next).next_back();
        let found = found.filter(|(first, range)| next - **first < range.len && may(range));
        let (first, range) = found.ok_or(next)?;
        next = first + range.len; // no overflow: the driver maps no range past the top
    }
    Ok(())
}

/// The same for an operation.
pub(super) fn check_use(mapped: &Mapped, at: DeviceAddr, len: u64, write: bool) -> Result<(), OpError> {
    check(mapped, at, len, write).map_err(|bad| match at {
        DeviceAddr::Card(_) => OpError::NoCardMemory(CardAddr::new(bad)),
        DeviceAddr::Va(_) => OpError::MmuFault(DeviceVa::new(bad)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_of_the_kind_of_address() {
        let range = |handle, writable, closed| Range { len: 4096, handle, lent: false, writable, closed };
        let mapped = Mapped::from([
            (0x1000, range(Some(1), true, false)),
            (0x2000, range(Some(2), false, false)),
            (0x3000, range(Some(3), true, true)),
            (0x5000, range(None, false, false)),
        ]);
        let memory = |at, len, write| check_use(&mapped, DeviceAddr::Card(CardAddr::new(at)), len, write);
        let no_memory = |at| Err(OpError::NoCardMemory(CardAddr::new(at)));
        assert_eq!(memory(0x1800, 0x1800, false), Ok(()));
        assert_eq!(memory(0x1000, 0x2001, false), no_memory(0x3000), "closed");
        assert_eq!(memory(0x1000, 0x1001, true), no_memory(0x2000), "read-only");
        assert_eq!(memory(0xfff, 1, false), no_memory(0xfff));
        assert_eq!(memory(0x5000, 1, false), no_memory(0x5000), "bound");
        let bound = |at, len, write| check_use(&mapped, DeviceAddr::Va(DeviceVa::new(at)), len, write);
        let fault = |at| Err(OpError::MmuFault(DeviceVa::new(at)));
        assert_eq!(bound(0x5000, 0x1000, false), Ok(()));
        assert_eq!(bound(0x5800, 0x1000, false), fault(0x6000));
        assert_eq!(bound(0x5000, 1, true), fault(0x5000), "read-only");
        assert_eq!(bound(0x1000, 1, false), fault(0x1000), "memory");
        assert_eq!(page_at(&mapped, 0x1000, 4096), Ok(1));
        for (at, page) in [(0x1800, 4096), (0x1000, 8192), (0x3000, 4096), (0x5000, 4096)] {
            assert_eq!(page_at(&mapped, at, page), Err(Error::NotAllocated(at)));
        }
    }
}
