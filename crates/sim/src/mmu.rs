//! The card's MMU: device virtual addresses to card addresses.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use dmalane_addr::{Access, Address, CardAddr, DeviceVa};
use dmalane_iopt::{Format, Walked, walk};

use crate::memory::CardMemory;

/// The MMU's registers. A copy by a translation locks this for reading; invalidation takes it for writing, so
/// that when it returns no copy by an old translation is under way.
pub(crate) struct Mmu<F> {
    /// The root table that the next write to the control register activates.
    root: AtomicU64,
    state: RwLock<State>,
    /// The state has a root: a lock for reading would wait behind a write, which waits for steps under way.
    on: AtomicBool,
    format: PhantomData<fn() -> F>,
}

/// The MMU as it is while nobody changes it.
pub(crate) struct State {
    root: Option<u64>,
    /// Counts invalidations; a TLB filled under another value is stale.
    epoch: u64,
}

/// Translations that stay valid until this is dropped.
pub(crate) type Held<'a> = RwLockReadGuard<'a, State>;

impl<F: Format> Mmu<F> {
    pub(crate) fn new() -> Self {
        Self {
            root: AtomicU64::new(0),
            state: RwLock::new(State { root: None, epoch: 0 }),
            on: AtomicBool::new(false),
            format: PhantomData,
        }
    }

    /// The root register.
    pub(crate) fn root(&self) -> &AtomicU64 {
        &self.root
    }

    /// The state, to be changed, once the steps under way are done.
    fn change(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the control register.
    pub(crate) fn control(&self, enable: bool) {
        let mut state = self.change();
        state.root = enable.then(|| self.root.load(Ordering::Relaxed));
        state.epoch = state.epoch.wrapping_add(1);
        self.on.store(enable, Ordering::SeqCst);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// Forgets all translations.
    pub(crate) fn invalidate(&self) {
        let mut state = self.change();
        state.epoch = state.epoch.wrapping_add(1);
    }

    /// Keeps translations valid until the result is dropped.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where `at` leads, and how many bytes from there on are contiguous, at most `len` (which is at least 1).
    ///
    /// # Errors
    /// The first address that has no translation for this access: `at`.
    pub(crate) fn translate(
        &self,
        state: &State,
        tlb: &mut Tlb,
        memory: &CardMemory,
        at: DeviceVa,
        len: u64,
        wanted: Access,
    ) -> Result<(CardAddr, u64), DeviceVa> {
        let root = state.root.ok_or(at)?;
        tlb.check_epoch(state.epoch);
        let mut one = |at: DeviceVa| -> Option<(u64, u64)> {
            let entry = match tlb.find(at) {
                Some(entry) => entry,
                None => {
                    let found = walk::<F>(root, at.bits(), |entry| {
                        tlb.entries_read += 1;
                        memory.load(CardAddr::new(entry))
                    });
                    tlb.insert(at, found.ok()?)
                }
            };
            let within = at.bits() - entry.at;
            entry.access.contains(wanted).then_some((entry.to.checked_add(within)?, entry.len - within))
        };
        let (to, mut have) = one(at).ok_or(at)?;
        // Small pages that lie next to each other are one copy.
        while have < len
            && let Some(next) = at.checked_add(have)
            && let Some((more, n)) = one(next)
            && to.checked_add(have) == Some(more)
        {
            have = have.saturating_add(n);
        }
        Ok((CardAddr::new(to), have.min(len)))
    }
}

#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    to: u64,
    len: u64,
    access: Access,
}

const ENTRIES: usize = 64;

/// A channel's cache of translations: direct-mapped by 4 KiB page, each entry a whole leaf.
pub(crate) struct Tlb {
    entries: [Option<Entry>; ENTRIES],
    epoch: u64,
    /// Page-table entries that were read to fill this.
    pub(crate) entries_read: u64,
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self { entries: [None; ENTRIES], epoch: 0, entries_read: 0 }
    }

    fn check_epoch(&mut self, epoch: u64) {
        if self.epoch != epoch {
            (self.entries, self.epoch) = ([None; ENTRIES], epoch);
        }
    }

    fn find(&self, at: DeviceVa) -> Option<Entry> {
        self.entries[index(at)].filter(|e| at.bits().wrapping_sub(e.at) < e.len)
    }

    fn insert(&mut self, at: DeviceVa, found: Walked) -> Entry {
        let within = at.bits() & (found.size.bytes() - 1);
        // A leaf's output address is a multiple of its size in every format, so this does not go below zero.
        let to = found.to.saturating_sub(within);
        let entry = Entry { at: at.bits() - within, to, len: found.size.bytes(), access: found.access };
        self.entries[index(at)] = Some(entry);
        entry
    }
}

fn index(at: DeviceVa) -> usize {
    (at.bits() >> 12) as usize % ENTRIES
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use dmalane_iopt::X86_64_4Level;

    use super::*;

    /// A lock for reading waits behind one who waits to write, and so for the step under way.
    #[test]
    fn the_control_register_is_read_while_a_write_of_it_waits() {
        let mmu = Mmu::<X86_64_4Level>::new();
        let (says, said) = channel();
        std::thread::scope(|s| {
            let step = mmu.hold();
            s.spawn(|| mmu.control(true));
            while mmu.state.try_read().is_ok() {
                std::thread::yield_now();
            }
            s.spawn(|| says.send(mmu.is_on()));
            let read = said.recv_timeout(Duration::from_secs(60));
            drop(step);
            assert_eq!(read, Ok(false));
        });
        assert!(mmu.is_on());
        mmu.control(false);
        assert!(!mmu.is_on());
    }
}
