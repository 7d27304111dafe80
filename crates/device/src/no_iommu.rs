//! The registrar of devices that reach host memory without an IOMMU of ours: mapping only gives a registration its
//! name, and calls the device's driver where it has one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{AnonHeap, BufferRef, Error, Heap, Mapping, PageKind, Pinned, Registrar, Undo, lock};

/// Registers memory for a device whose bytes are moved by this processor, by the kernel or by the device's driver.
/// Nothing is pinned, unless the driver does that when it is [called](NoIommu::calling).
///
/// IOVAs are only names. No two registrations ever have the same, so that a queue can tell them apart.
pub struct NoIommu<T = ()>(Arc<Names<T>>);

/// The names that are in use.
struct Names<T> {
    state: Mutex<State<T>>,
    register: Box<Register<T>>,
    /// The heap of the driver.
    heap: Option<Arc<dyn Heap>>,
}

/// Registers a range of a buffer with a driver; dropping the result undoes that.
type Register<T> = dyn Fn(&BufferRef, Range<usize>) -> Result<T, Error> + Send + Sync;

struct State<T> {
    iovas: RangeCache<Iova>,
    next: u64,
    /// Live ranges by their first name: bytes, and what the driver keeps for them.
    live: BTreeMap<Iova, (u64, T)>,
}

/// As many addresses as user space has.
const SPACE: u64 = 1 << 56;

impl NoIommu {
    /// A registrar of its own: registrations of another one are not known here. It calls no driver.
    pub fn new() -> Self {
        Self::calling(None, |_, _| Ok(()))
    }
}

impl<T: Send + 'static> NoIommu<T> {
    /// The same for a device whose driver registers host memory. `register` is called with each range that is mapped;
    /// its result is dropped when the registration ends, which is when no operation uses it any more. `heap` is that of
    /// a driver which reaches no other memory, or is faster with its own.
    pub fn calling(
        heap: Option<Arc<dyn Heap>>,
        register: impl Fn(&BufferRef, Range<usize>) -> Result<T, Error> + Send + Sync + 'static,
    ) -> Self {
        let space = Span::new(Iova::new(0), SPACE).expect("a constant span");
        let iovas = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
        let state = Mutex::new(State { iovas, next: 0, live: BTreeMap::new() });
        Self(Arc::new(Names { state, register: Box::new(register), heap }))
    }

    fn owner(&self) -> Arc<dyn Undo> {
        self.0.clone()
    }

    /// Calls `each` with what was registered behind a range of names, in their order: the value, and which bytes of its
    /// range are meant. False when a part of it is not registered; `each` was called for what lies before that.
    pub fn resolve(&self, names: Span<Iova>, mut each: impl FnMut(&T, Range<u64>)) -> bool {
        let (state, mut at, mut left) = (lock(&self.0.state), names.first().bits(), names.len());
        while left > 0 {
            let Some((first, (len, held))) = state.live.range(..=Iova::new(at)).next_back() else { return false };
            let within = at - first.bits();
            let here = left.min(len.saturating_sub(within));
            if here == 0 {
                return false;
            }
            each(held, within..within + here);
            (at, left) = (at + here, left - here);
        }
        true
    }
}

impl<T> Clone for NoIommu<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl Default for NoIommu {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Names<T> {
    /// Takes out what is registered first in a range.
    fn take(&self, names: Span<Iova>) -> Option<T> {
        let mut state = lock(&self.state);
        let first = *state.live.range(names.first()..=names.last()).next()?.0;
        state.live.remove(&first).map(|(_, held)| held)
    }
}

impl<T: Send> Undo for Names<T> {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        // The driver is called without the lock.
        while let Some(held) = self.take(lease.span()) {
            drop(held);
        }
        lock(&self.state).iovas.free(lease);
        true
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl<T: Send + 'static> Registrar for NoIommu<T> {
    /// Pins nothing.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        let whole = |n: usize| n.is_multiple_of(PageSize::SIZE_4K.bytes() as usize) || n == buffer.len();
        if range.start >= range.end || range.end > buffer.len() || !whole(range.start) || !whole(range.end) {
            return Err(Error::BadRange { range, len: buffer.len(), page: PageSize::SIZE_4K.bytes() as usize });
        }
        Ok(Pinned::new(buffer.clone(), range, None, self.owner()))
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        // Before the driver can write: nobody may hold the bytes as a plain slice.
        let bytes = Pinned::admit_all(&mut list, &self.0, access)?;
        let register = |pinned: &Pinned| (self.0.register)(pinned.reference(), pinned.range());
        let held = list.iter().map(register).collect::<Result<Vec<T>, _>>()?;
        let mut state = lock(&self.0.state);
        let mut at = Iova::new(state.next);
        let len = bytes.checked_next_multiple_of(PageSize::SIZE_4K.bytes());
        let span = len.and_then(|len| Span::new(at, len)).ok_or(Error::BadLength(bytes as usize))?;
        let lease = state.iovas.reserve(span)?;
        state.next += span.len(); // no overflow: the span lies in a space of 2^56
        for (pinned, held) in list.iter().zip(held) {
            let len = pinned.range().len() as u64;
            state.live.insert(at, (len, held));
            at = at + len;
        }
        drop(state);
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        let any = || Arc::new(best.map_or_else(AnonHeap::new, AnonHeap::starting_at));
        self.0.heap.clone().unwrap_or_else(|| any())
    }
}

dmalane_dma::debug_as!(NoIommu<T>, [T], |it| "NoIommu({} registered)", lock(&it.0.state).live.len());

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dmalane_dma::{AnonHeap, Heap};
    use dmalane_queue::Registered;

    use super::*;

    #[test]
    fn names_are_never_given_twice() {
        let registrar = NoIommu::new();
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        let mut seen = BTreeSet::new();
        for _ in 0..10 {
            let registered = Registered::new(&registrar, &buf, Access::RW).unwrap();
            let first = registered.mapping().span().first();
            assert!(registrar.owns(registered.mapping()) && seen.insert(first));
        }
    }

    #[test]
    fn a_driver_holds_what_is_registered_and_its_refusal_registers_nothing() {
        let held = Arc::new(());
        let gives = held.clone();
        let registrar = NoIommu::calling(None, move |_, range| match range.len() {
            4096 => Err(Error::BadLength(4096)),
            _ => Ok(gives.clone()),
        });
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        assert!(Registered::of_range(&registrar, &buf.reference(), 0..4096, Access::RW).is_err());
        let before = Arc::strong_count(&held);
        let registered = Registered::new(&registrar, &buf, Access::RW).unwrap();
        assert_eq!(Arc::strong_count(&held), before + 1);
        drop(registered);
        assert_eq!(Arc::strong_count(&held), before);
        assert!(buf.into_slice().with_bytes(|_| ()).is_some(), "the refused one lets no device write");
    }

    #[test]
    fn a_list_has_names_in_a_row_behind_which_each_range_is_found() {
        let registrar = NoIommu::calling(None, |buffer, range| Ok((buffer.len(), range.start)));
        let bufs = [8192, 12288].map(|len| AnonHeap::new().allocate(len).unwrap().share());
        let pinned =
            [(0, 4096..8192), (1, 0..12288)].map(|(i, range)| registrar.pin_range(&bufs[i].reference(), range));
        let mapping = registrar.map_list(pinned.into_iter().collect::<Result<_, _>>().unwrap(), Access::RW).unwrap();
        let span = mapping.span();
        let behind = |span| {
            let mut found = Vec::new();
            let all = registrar.resolve(span, |held, bytes| found.push((*held, bytes)));
            (all, found)
        };
        let (first, second) = ((8192, 4096), (12288, 0));
        assert_eq!(behind(span), (true, vec![(first, 0..4096), (second, 0..12288)]));
        assert_eq!(behind(span.sub(4000, 200).unwrap()), (true, vec![(first, 4000..4096), (second, 0..104)]));
        let beyond = Span::new(span.first(), span.len() + 1).unwrap();
        assert!(!behind(beyond).0, "nothing is registered there");
        drop(mapping);
        assert_eq!(behind(span), (false, vec![]));
    }

    #[test]
    fn ranges_of_no_whole_pages_and_pins_of_others_are_refused() {
        let registrar = NoIommu::new();
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        for range in [0..0, 1..4096, 0..4097, 4096..12288] {
            assert!(matches!(registrar.pin_range(&buf.reference(), range), Err(Error::BadRange { .. })));
        }
        let half = Registered::of_range(&registrar, &buf.reference(), 4096..8192, Access::READ).unwrap();
        assert_eq!(half.mapping().span().len(), 4096);
        let other = NoIommu::new();
        assert!(registrar.map(other.pin(&buf.reference()).unwrap(), Access::RW).is_err());
        assert!(!other.owns(half.mapping()));
    }
}
