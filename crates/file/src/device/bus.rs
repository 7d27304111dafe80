//! Registrations of a file device: the kernel reaches host memory by itself, so a mapping only names a registration.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{BufferRef, Error, HostBus, Mapping, Pinned, Undo};

/// Makes registrations for the queues of one [`FileDevice`](super::FileDevice).
///
/// Their IOVAs mean nothing to a device; no two registrations ever have the same, so that a queue can tell them apart. There are no
/// registers.
#[derive(Clone)]
pub struct FileDeviceBus(Arc<Names>);

/// The names that are in use.
struct Names {
    state: Mutex<State>,
    /// Grows whenever a name is given up.
    given_up: AtomicU64,
}

struct State {
    iovas: RangeCache<Iova>,
    next: u64,
    live: BTreeSet<Iova>,
}

/// As many addresses as user space has.
const SPACE: u64 = 1 << 56;

impl FileDeviceBus {
    pub(crate) fn new() -> Self {
        let space = Span::new(Iova::new(0), SPACE).expect("a constant span");
        let iovas = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K));
        let state = State { iovas, next: 0, live: BTreeSet::new() };
        Self(Arc::new(Names { state: Mutex::new(state), given_up: AtomicU64::new(0) }))
    }

    /// Changes when a registration was undone.
    pub(crate) fn given_up(&self) -> u64 {
        self.0.given_up.load(Ordering::Acquire)
    }

    /// True while the registration that begins there is one.
    pub(crate) fn is_live(&self, iova: Iova) -> bool {
        self.0.lock().live.contains(&iova)
    }

    fn owner(&self) -> Arc<dyn Undo> {
        self.0.clone()
    }
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Undo for Names {
    fn unmap(&self, lease: Lease<Iova>) {
        let mut state = self.lock();
        state.live.remove(&lease.span().first());
        state.iovas.free(lease);
        drop(state);
        self.given_up.fetch_add(1, Ordering::Release);
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl HostBus for FileDeviceBus {
    /// Pins nothing: the kernel pins the pages of each request, or those of fixed buffers.
    fn pin(&self, share: &BufferRef) -> Result<Pinned, Error> {
        Ok(Pinned::new(share.clone(), None, self.owner()))
    }

    fn pin_range(&self, share: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        let whole = |n: usize| n.is_multiple_of(PageSize::SIZE_4K.bytes() as usize) || n == share.len();
        if range.start >= range.end || range.end > share.len() || !whole(range.start) || !whole(range.end) {
            return Err(Error::BadRange { range, len: share.len() });
        }
        Ok(Pinned::of_range(share.clone(), range, None, self.owner()))
    }

    fn map(&self, pinned: Pinned, access: Access) -> Result<Mapping, Error> {
        if !pinned.is_from(&self.0) {
            return Err(Error::ForeignPin);
        }
        let len = (pinned.range().len() as u64).next_multiple_of(PageSize::SIZE_4K.bytes());
        let mut state = self.0.lock();
        let first = Iova::new(state.next);
        let span = Span::new(first, len).filter(|_| len > 0).ok_or(Error::BadLength(pinned.range().len()))?;
        let lease = state.iovas.reserve(span)?;
        state.next += len; // no overflow: the span lies in a space of 2^56
        state.live.insert(first);
        drop(state);
        Ok(Mapping::new(pinned, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    fn read32(&self, bar: u8, offset: u64) -> Result<u32, Error> {
        Err(Error::NoRegister { bar, offset, bytes: 4 })
    }

    fn write32(&self, bar: u8, offset: u64, _: u32) -> Result<(), Error> {
        Err(Error::NoRegister { bar, offset, bytes: 4 })
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        Err(Error::NoRegister { bar, offset, bytes: bytes.len() as u64 })
    }

    /// There are no interrupts.
    fn wait(&self, timeout: Duration) -> bool {
        std::thread::sleep(timeout.min(Duration::from_millis(1)));
        false
    }
}

impl std::fmt::Debug for FileDeviceBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileDeviceBus({} registered)", self.0.lock().live.len())
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{AnonHeap, Heap, HostConfig, SoftHost};
    use dmalane_queue::Registered;

    use super::*;

    #[test]
    fn names_are_never_given_twice() {
        let bus = FileDeviceBus::new();
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        let mut seen = BTreeSet::new();
        for _ in 0..10 {
            let before = bus.given_up();
            let registered = Registered::new(&bus, &buf, Access::RW).unwrap();
            let first = registered.mapping().span().first();
            assert!(bus.is_live(first) && bus.owns(registered.mapping()) && seen.insert(first));
            drop(registered);
            assert!(!bus.is_live(first) && bus.given_up() == before + 1);
        }
        assert!(buf.share().holds(&buf.into_part()), "no registration holds the memory");
    }

    #[test]
    fn what_is_not_whole_pages_or_of_another_bus_is_refused() {
        let bus = FileDeviceBus::new();
        let buf = AnonHeap::new().allocate(8192).unwrap().share();
        for range in [0..0, 1..4096, 0..4097, 4096..12288] {
            assert!(matches!(bus.pin_range(&buf.share(), range), Err(Error::BadRange { .. })));
        }
        let half = Registered::of_range(&bus, &buf.share(), 4096..8192, Access::READ).unwrap();
        assert_eq!(half.mapping().span().len(), 4096);
        let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
        assert!(bus.map(host.pin(&buf.share()).unwrap(), Access::RW).is_err());
        assert!(!FileDeviceBus::new().owns(half.mapping()));
        assert!(bus.read32(0, 0).is_err() && bus.write32(0, 0, 1).is_err() && bus.write_bytes(2, 0, &[1]).is_err());
    }
}
