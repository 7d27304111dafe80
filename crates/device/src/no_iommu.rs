//! The registrar of devices that reach host memory without an IOMMU of ours: mapping only gives a registration its
//! name, and calls the device's driver where it has one.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{AnonHeap, BufferRef, Error, Heap, Mapping, PageKind, Pinned, Registrar, Undo};

/// Registers memory for a device whose bytes are moved by this processor or by the kernel: nothing is pinned, unless a
/// [driver](NoIommu::calling) does that.
///
/// IOVAs are only names. No two registrations ever have the same, so that a queue can tell them apart.
#[derive(Clone)]
pub struct NoIommu(Arc<Names>);

/// The names that are in use.
struct Names {
    state: Mutex<State>,
    register: Option<Box<Register>>,
    heap: Option<Arc<dyn Heap>>,
}

/// Registers a range of a buffer with a driver; dropping the result undoes that.
type Register = dyn Fn(&BufferRef, Range<usize>) -> Result<Box<dyn Any + Send>, Error> + Send + Sync;

struct State {
    iovas: RangeCache<Iova>,
    next: u64,
    /// Live registrations, each with the value that the driver keeps for it.
    live: BTreeMap<Iova, Option<Box<dyn Any + Send>>>,
}

/// As many addresses as user space has.
const SPACE: u64 = 1 << 56;

impl NoIommu {
    /// A registrar of its own: registrations of another one are not known here.
    pub fn new() -> Self {
        Self::with(None, None)
    }

    /// The same for a device that moves the memory of a heap faster than other memory.
    pub fn preferring(heap: Arc<dyn Heap>) -> Self {
        Self::with(None, Some(heap))
    }

    /// The same for a device whose driver registers host memory. `register` is called with each range that is mapped;
    /// its result is dropped when the registration ends, which is when no operation uses it any more.
    pub fn calling(
        register: impl Fn(&BufferRef, Range<usize>) -> Result<Box<dyn Any + Send>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self::with(Some(Box::new(register)), None)
    }

    fn with(register: Option<Box<Register>>, heap: Option<Arc<dyn Heap>>) -> Self {
        let space = Span::new(Iova::new(0), SPACE).expect("a constant span");
        let iovas = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
        let state = State { iovas, next: 0, live: BTreeMap::new() };
        Self(Arc::new(Names { state: Mutex::new(state), register, heap }))
    }

    fn owner(&self) -> Arc<dyn Undo> {
        self.0.clone()
    }
}

impl Default for NoIommu {
    fn default() -> Self {
        Self::new()
    }
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Undo for Names {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        // The driver is called without the lock.
        drop(self.lock().live.remove(&lease.span().first()));
        self.lock().iovas.free(lease);
        true
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl Registrar for NoIommu {
    /// Pins nothing.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        let whole = |n: usize| n.is_multiple_of(PageSize::SIZE_4K.bytes() as usize) || n == buffer.len();
        if range.start >= range.end || range.end > buffer.len() || !whole(range.start) || !whole(range.end) {
            return Err(Error::BadRange { range, len: buffer.len() });
        }
        Ok(Pinned::new(buffer.clone(), range, None, self.owner()))
    }

    /// One buffer at a time.
    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        let [pinned] = &mut list[..] else { return Err(Error::WholeBuffers) };
        if !pinned.is_from(&self.0) {
            return Err(Error::ForeignPin);
        }
        let len = (pinned.range().len() as u64).next_multiple_of(PageSize::SIZE_4K.bytes());
        pinned.admit(access);
        let register = self.0.register.as_ref();
        let held = register.map(|register| register(pinned.reference(), pinned.range())).transpose()?;
        let mut state = self.0.lock();
        let first = Iova::new(state.next);
        let span = Span::new(first, len).filter(|_| len > 0).ok_or(Error::BadLength(pinned.range().len()))?;
        let lease = state.iovas.reserve(span)?;
        state.next += len; // no overflow: the span lies in a space of 2^56
        state.live.insert(first, held);
        drop(state);
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        let other = || -> Arc<dyn Heap> { Arc::new(best.map_or_else(AnonHeap::new, AnonHeap::starting_at)) };
        self.0.heap.clone().unwrap_or_else(other)
    }
}

impl std::fmt::Debug for NoIommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NoIommu({} registered)", self.0.lock().live.len())
    }
}

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
        let registrar = NoIommu::calling(move |_, range| match range.len() {
            4096 => Err(Error::BadLength(4096)),
            _ => Ok(Box::new(gives.clone())),
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
