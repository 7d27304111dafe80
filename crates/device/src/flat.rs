//! The address space of a device without an MMU.

use std::collections::BTreeMap;

use dmalane_addr::{CardAddr, DeviceVa, SgTable, Span};
use dmalane_queue::DeviceAddr;
use dmalane_vm::BindRequest;

use crate::{AddressSpace, AddressSpaceKind, SpaceError, without_tables};

/// Virtual addresses that are card addresses: a buffer is seen where it lies, and binding only checks that.
#[derive(Debug, Default)]
pub struct FlatSpace {
    /// The reserved ranges: first and last address.
    reserved: BTreeMap<DeviceVa, DeviceVa>,
}

impl FlatSpace {
    /// A space in which nothing is reserved.
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses a span that does not lie in one range that is reserved.
    fn check(&self, span: &Span<DeviceVa>) -> Result<(), SpaceError> {
        let range = self.reserved.range(..=span.first()).next_back();
        range.filter(|(_, last)| span.last() <= **last).map(drop).ok_or(SpaceError::NotReserved(*span))
    }
}

impl AddressSpace for FlatSpace {
    fn kind(&self) -> AddressSpaceKind {
        AddressSpaceKind::Flat
    }

    fn reserve(&mut self, memory: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError> {
        let mut segments = memory.segments();
        let (Some(only), None) = (segments.next(), segments.next()) else {
            return Err(SpaceError::Fragmented(memory.segment_count() as u64));
        };
        let va = DeviceVa::new(only.addr.bits());
        let too_short = SpaceError::TooShort { len, has: only.len };
        let span = Span::new(va, len).filter(|_| len <= only.len).ok_or(too_short)?;
        self.reserved.insert(span.first(), span.last());
        Ok(span)
    }

    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError> {
        match self.reserved.get(&range.first()) {
            Some(last) if *last == range.last() => {
                self.reserved.remove(&range.first());
                Ok(())
            }
            _ => Err(SpaceError::NotReserved(range)),
        }
    }

    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError> {
        requests.iter().try_for_each(without_tables)?;
        requests.iter().try_for_each(|request| match request {
            BindRequest::Bind { va, bo, offset, len, .. } => {
                let span = Span::new(*va, *len).ok_or(SpaceError::Elsewhere(*va))?;
                self.check(&span)?;
                let end = offset.checked_add(*len);
                let mut runs = end.and_then(|end| bo.sg().runs(*offset..end)).into_iter().flatten();
                match (runs.next(), runs.next()) {
                    (Some(run), None) if run.addr.bits() == va.bits() && run.len == *len => Ok(()),
                    _ => Err(SpaceError::Elsewhere(*va)),
                }
            }
            BindRequest::Unbind(span) | BindRequest::Prefetch(span) => self.check(span),
            // Of a buffer object nothing is bound elsewhere.
            _ => Ok(()),
        })
    }

    fn at(&self, va: DeviceVa) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(va.bits()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dmalane_addr::{Access, SgIndex};
    use dmalane_vm::Bo;

    use super::*;

    #[test]
    fn a_buffer_is_seen_where_it_lies_and_nowhere_else() {
        let mut space = FlatSpace::new();
        let mut memory = SgTable::new();
        assert!(matches!(space.reserve(&memory, 4096), Err(SpaceError::Fragmented(0))));
        memory.push(CardAddr::new(0x10_000), 0x4000).unwrap();
        assert!(matches!(space.reserve(&memory, 0x4001), Err(SpaceError::TooShort { has: 0x4000, .. })));
        let range = space.reserve(&memory, 0x4000).unwrap();
        assert_eq!((range.first().bits(), range.len()), (0x10_000, 0x4000));
        assert_eq!(space.at(range.first()), DeviceAddr::Card(CardAddr::new(0x10_000)));
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&memory).unwrap()));
        let request = |va, offset, len| {
            let va = DeviceVa::new(va);
            BindRequest::Bind { va, bo: bo.clone(), offset, len, access: Access::READ }
        };
        let mut bind = |va, offset, len| space.apply(&[request(va, offset, len)]);
        bind(0x11_000, 0x1000, 0x3000).unwrap();
        assert!(matches!(bind(0x11_000, 0, 0x1000), Err(SpaceError::Elsewhere(_))));
        assert!(matches!(bind(0x11_000, 0x1000, 0x3001), Err(SpaceError::NotReserved(_))));
        assert!(matches!(bind(0x11_000, u64::MAX, 0x1000), Err(SpaceError::Elsewhere(_))));
        assert!(matches!(bind(u64::MAX, 0, 2), Err(SpaceError::Elsewhere(_))));
        let half = range.sub(0, 0x2000).unwrap();
        space.apply(&[BindRequest::Unbind(half), BindRequest::Prefetch(range)]).unwrap();
        let null = BindRequest::Null { va: range.first(), len: 0x1000 };
        assert!(matches!(space.apply(&[BindRequest::Unbind(half), null]), Err(SpaceError::NoTables)));
        assert!(matches!(space.release(half), Err(SpaceError::NotReserved(_))), "only as a whole");
        space.release(range).unwrap();
        assert!(matches!(space.release(range), Err(SpaceError::NotReserved(_))));
        memory.push(CardAddr::new(0x20_000), 0x1000).unwrap();
        assert!(matches!(space.reserve(&memory, 4096), Err(SpaceError::Fragmented(2))));
    }
}
