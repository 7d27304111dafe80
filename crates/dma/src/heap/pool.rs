//! A heap that caches dropped buffers for reuse.
//!
//! Small buffers are cut out of huge pages. A buffer of 512 KiB in 4 KiB pages is a scatter list of 128 entries for a
//! disk, and reading into it takes about three times as long as into one contiguous range
//! (`docs/bench/alloc-read.md`); a huge page for each would waste most of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};

use super::{Heap, HeapCapabilities, Reserved};
use crate::account::{Account, Counters};
use crate::sys::{HUGE, Home, Recycle, Region, page};
use crate::{Error, HeapStats, PageBacking, PageKind, lock, process_id};

/// Smallest buffer that is cut out of a huge page. Smaller reads go through the page cache.
const SLAB_FROM: usize = 64 << 10;
/// Largest buffer that is cut out of a huge page: two must fit.
const SLAB_UP_TO: usize = HUGE / 2;

/// A heap over another one that caches dropped buffers instead of returning them to the kernel: the next buffer of
/// about the same size has its pages already.
///
/// A buffer returns to the pool when its last reference is dropped. An exported buffer does not, since another process
/// may still have it mapped. Buffers that outlive their pool are freed. A child of `fork` does without the cache where
/// a thread of its parent was using it.
#[derive(Clone)]
pub struct Pool(Arc<Shelf>);

/// Counters of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes of cached buffers.
    pub cached: usize,
    /// Number of cached buffers.
    pub cached_buffers: usize,
    /// Requests that were met from the cache.
    pub hits: usize,
    /// Requests that went to the heap below. One of 64 KiB to 1 MiB takes a huge page from there and caches the rest.
    pub misses: usize,
    /// Buffers returned to the kernel: because of the limit, by trimming, or because not all pages were present.
    pub freed: usize,
}

struct Shelf {
    heap: Box<dyn Heap>,
    limit: usize,
    /// The process that made it.
    process: u32,
    counters: Arc<Counters>,
    cached: Mutex<Cached>,
}

#[derive(Default)]
struct Cached {
    /// Oldest first.
    buffers: VecDeque<(Region, PageBacking)>,
    stats: PoolStats,
}

impl Pool {
    /// A pool that caches at most `limit` bytes of buffers from `heap`.
    pub fn new(heap: impl Heap + 'static, limit: usize) -> Self {
        let (process, counters, cached) = (process_id(), Arc::default(), Mutex::default());
        Self(Arc::new(Shelf { heap: Box::new(heap), limit, process, counters, cached }))
    }

    /// Counters since the pool was created.
    pub fn pool_stats(&self) -> PoolStats {
        lock(&self.0.cached).stats
    }

    /// Returns the least recently used buffers to the kernel until at most `bytes` are cached.
    pub fn trim(&self, bytes: usize) {
        let freed = lock(&self.0.cached).shrink(bytes);
        drop(freed); // unmaps, without the lock
    }
}

impl Shelf {
    /// The cache; in a child of `fork` only where no thread of the parent had its lock, which nobody would release.
    fn usable(&self) -> Option<MutexGuard<'_, Cached>> {
        if process_id() == self.process {
            return Some(lock(&self.cached));
        }
        match self.cached.try_lock() {
            Ok(cached) => Some(cached),
            Err(TryLockError::Poisoned(cached)) => Some(cached.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the best-fitting cached buffer, at most an eighth larger than `len`; the most recently used among equals.
    fn take(&self, len: usize) -> Option<(Region, PageBacking)> {
        let mut cached = self.usable()?;
        let most = len.saturating_add(len / 8);
        let fits = cached.buffers.iter().enumerate().filter(|(_, (region, _))| (len..=most).contains(&region.len()));
        let best = fits.rev().min_by_key(|(_, (region, _))| region.len()).map(|(i, _)| i);
        let found = best.and_then(|i| cached.buffers.remove(i));
        match &found {
            Some((region, _)) => {
                cached.stats.cached -= region.len();
                cached.stats.cached_buffers -= 1;
                cached.stats.hits += 1;
            }
            None => cached.stats.misses += 1,
        }
        found
    }

    /// A new buffer of `len` bytes from a huge page, whose remaining fragments are cached; `None` where not possible.
    fn slab(&self, len: usize) -> Option<(Region, PageBacking)> {
        let below = self.heap.capabilities();
        // A buffer with a descriptor is shared as a whole, so it cannot be split.
        if !(SLAB_FROM..=SLAB_UP_TO).contains(&len) || self.limit < HUGE || below.shareable {
            return None;
        }
        if below.best_pages == PageKind::Base {
            return None;
        }
        let huge = self.heap.allocate(HUGE).ok()?;
        if !matches!(huge.backing().kind, PageKind::Transparent | PageKind::Hugetlb2M) {
            return None;
        }
        let (region, backing) = huge.into_region();
        let mut fragments = region.cut(len).ok()?.into_iter();
        let first = fragments.next()?;
        let Some(mut cached) = self.usable() else { return Some((first, backing)) };
        // Leave room in the cache for the first fragment when it returns.
        let mut freed = Vec::new();
        for fragment in fragments {
            freed.append(&mut cached.insert(fragment, backing.clone(), self.limit - len));
        }
        drop(cached);
        drop(freed);
        Some((first, backing))
    }
}

impl Cached {
    /// Caches a buffer of at most `limit` bytes; returns the buffers to free for it.
    fn insert(&mut self, region: Region, backing: PageBacking, limit: usize) -> Vec<(Region, PageBacking)> {
        let freed = self.shrink(limit.saturating_sub(region.len()));
        self.stats.cached += region.len();
        self.stats.cached_buffers += 1;
        self.buffers.push_back((region, backing));
        freed
    }

    fn shrink(&mut self, to: usize) -> Vec<(Region, PageBacking)> {
        let mut freed = Vec::new();
        while self.stats.cached > to
            && let Some((region, backing)) = self.buffers.pop_front()
        {
            self.stats.cached -= region.len();
            self.stats.cached_buffers -= 1;
            self.stats.freed += 1;
            freed.push((region, backing));
        }
        freed
    }
}

impl Recycle for Shelf {
    fn recycle(&self, region: Region, backing: PageBacking, present: bool) {
        let Some(mut cached) = self.usable() else { return };
        if !present || region.len() > self.limit {
            cached.stats.freed += 1;
            drop(cached); // unmaps, without the lock
            return;
        }
        let freed = cached.insert(region, backing, self.limit);
        drop(cached);
        drop(freed);
    }
}

impl Heap for Pool {
    /// A cached buffer that is at most an eighth too large, else a new one. New buffers of 64 KiB to 1 MiB are cut out
    /// of a huge page where the heap below has private huge pages.
    fn reserve(&self, len: usize) -> Result<Reserved, Error> {
        let base = len.checked_next_multiple_of(page()).filter(|n| *n > 0).ok_or(Error::BadLength(len))?;
        let home = |backing: &PageBacking, absent| {
            let shelf: Weak<Shelf> = Arc::downgrade(&self.0);
            Home::new(shelf, backing.clone(), absent)
        };
        if let Some((mut region, backing)) = self.0.take(base) {
            region.set_home(Some(home(&backing, 0)));
            let account = Account::open(&self.0.counters, region.len());
            return Ok(Reserved::recycled(region, backing, account));
        }
        if let Some((mut region, backing)) = self.0.slab(base) {
            region.set_home(Some(home(&backing, 0)));
            let account = Account::open(&self.0.counters, region.len());
            return Ok(Reserved::present(region, backing, account));
        }
        let mut reserved = match self.0.heap.reserve(len) {
            Ok(reserved) => reserved,
            Err(e) => {
                // Free the cached memory and try again.
                let freed = self.0.usable().map_or(Vec::new(), |mut cached| cached.shrink(0));
                if freed.is_empty() {
                    return Err(e);
                }
                drop(freed);
                self.0.heap.reserve(len)?
            }
        };
        let (len, home) = (reserved.len(), home(reserved.backing(), reserved.len()));
        if let Some(memory) = reserved.memory_mut() {
            memory.region.set_home(Some(home));
            memory.account = Account::open(&self.0.counters, len);
        }
        Ok(reserved)
    }

    fn capabilities(&self) -> HeapCapabilities {
        self.0.heap.capabilities()
    }

    fn stats(&self) -> HeapStats {
        self.0.counters.stats()
    }

    fn name(&self) -> &'static str {
        "pool"
    }
}
