//! Which ranges of device addresses are mapped, and what for.

use std::collections::BTreeMap;

use dmalane_addr::CardAddr;
use dmalane_queue::{DeviceAddr, OpError};

/// Ranges of device addresses that may be used, by their first; no two overlap.
pub(super) type Mapped = BTreeMap<u64, Range>;

/// A range of device addresses and its mapping.
pub(super) struct Range {
    pub(super) len: u64,
    /// The memory.
    pub(super) handle: u64,
    /// It was to be unmapped, and streams did not say that they had ended: nothing may use it any more.
    pub(super) closed: bool,
}

pub(super) fn overlaps(mapped: &Mapped, at: u64, len: u64) -> bool {
    let last = at.saturating_add(len);
    mapped.range(..last).next_back().is_some_and(|(first, range)| first + range.len > at)
}

/// Checks that a range may be used; the error is the first address that may not.
pub(super) fn check(mapped: &Mapped, at: u64, len: u64) -> Result<(), u64> {
    let end = at.checked_add(len).ok_or(at)?;
    let mut next = at;
    while next < end {
        let found = mapped.range(..=next).next_back();
        let found = found.filter(|(first, range)| next - **first < range.len && !range.closed);
        let (first, range) = found.ok_or(next)?;
        next = first + range.len; // no overflow: the driver maps no range past the top
    }
    Ok(())
}

/// The same for an operation.
pub(super) fn check_use(mapped: &Mapped, at: u64, len: u64) -> Result<(), OpError> {
    check(mapped, at, len).map_err(|bad| OpError::NoCardMemory(CardAddr::new(bad)))
}

/// The number of an address of memory. Nothing is bound at others.
pub(super) fn pointer(at: DeviceAddr) -> Result<u64, OpError> {
    match at {
        DeviceAddr::Card(at) => Ok(at.bits()),
        DeviceAddr::Va(at) => Err(OpError::MmuFault(at)),
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::DeviceVa;

    use super::*;

    #[test]
    fn faults_are_of_the_kind_of_address() {
        let range = |closed| Range { len: 4096, handle: 0, closed };
        let mapped = Mapped::from([(0x1000, range(false)), (0x2000, range(false)), (0x3000, range(true))]);
        assert_eq!(check_use(&mapped, 0x1800, 0x1800), Ok(()));
        assert_eq!(check_use(&mapped, 0x1000, 0x2001), Err(OpError::NoCardMemory(CardAddr::new(0x3000))), "closed");
        assert_eq!(check_use(&mapped, 0xfff, 1), Err(OpError::NoCardMemory(CardAddr::new(0xfff))));
        assert_eq!(pointer(DeviceAddr::Card(CardAddr::new(0x1000))), Ok(0x1000));
        assert_eq!(pointer(DeviceAddr::Va(DeviceVa::new(0x1000))), Err(OpError::MmuFault(DeviceVa::new(0x1000))));
    }
}
