//! A bounded cache of registrations.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_dma::{BufferRef, Error, Registrar};
use thiserror::Error as Derive;

use crate::Registered;

/// The kernel's default limit of locked memory.
const USUAL_MEMLOCK: u64 = 8 << 20;
const PAGE: usize = 4096;

/// Limits of what is registered at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegistryLimits {
    /// Bytes, rounded to pages.
    pub bytes: u64,
    /// Registrations.
    pub entries: usize,
}

/// Counters of a [`Registry`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegistryStats {
    /// Registrations found.
    pub hits: u64,
    /// Registrations made.
    pub misses: u64,
    /// Registrations undone to make room.
    pub evictions: u64,
    /// Requests that failed because every registration that could have made room was busy.
    pub busy: u64,
    /// Bytes registered now, and at most so far.
    pub bytes: u64,
    /// See there.
    pub bytes_peak: u64,
    /// Registrations now.
    pub entries: usize,
}

/// Why a range was not registered or deregistered.
#[derive(Debug, Derive)]
#[non_exhaustive]
pub enum RegistryError {
    /// More than may be registered in all.
    #[error(
        "{wanted} bytes are more than may be registered at one time ({limit}): register fragments, or raise the limit \
         (ulimit -l, LimitMEMLOCK=)"
    )]
    TooMuch {
        /// Bytes asked for.
        wanted: u64,
        /// [`RegistryLimits::bytes`].
        limit: u64,
    },
    /// Operations in flight, or clones of registrations, hold what would have to be evicted.
    #[error("{bytes} bytes of registrations are busy")]
    Busy {
        /// How many.
        bytes: u64,
    },
    /// The range is empty or does not lie within the memory.
    #[error("bytes {}..{} are no range of a buffer of {len} bytes", range.start, range.end)]
    BadRange {
        /// The range asked for.
        range: Range<usize>,
        /// Bytes of the buffer.
        len: usize,
    },
    /// The bus refused.
    #[error(transparent)]
    Bus(#[from] Error),
}

/// Registers ranges of memory, keeps them registered, and undoes the one not used for longest when there is no more
/// room.
///
/// It holds a reference to the memory of each registration: memory stays allocated until it is evicted or
/// [forgotten](Registry::forget).
pub struct Registry<B: Registrar> {
    bus: Arc<B>,
    limits: RegistryLimits,
    entries: HashMap<u64, Entry>,
    /// Entries of each memory, by [`BufferRef::id`].
    by_memory: HashMap<usize, Vec<u64>>,
    /// When an entry was used last, and which.
    by_age: BTreeMap<u64, u64>,
    clock: u64,
    stats: RegistryStats,
}

struct Entry {
    via: Registered,
    memory: usize,
    range: Range<usize>,
    used: u64,
}

impl RegistryLimits {
    /// For a bus: seven eighths of what it allows to be pinned, since rings are pinned too; where it knows no limit, as
    /// much as half a million pages.
    pub fn for_bus(bus: &(impl Registrar + ?Sized)) -> Self {
        let bytes = bus.pin_limit().map_or(2 << 30, |limit| limit / 8 * 7) / PAGE as u64 * PAGE as u64;
        Self { bytes, entries: 1024 }
    }
}

impl Default for RegistryLimits {
    /// A limit that leaves room for some rings under the usual RLIMIT_MEMLOCK of 8 MiB.
    fn default() -> Self {
        Self { bytes: USUAL_MEMLOCK / 8 * 7, entries: 1024 }
    }
}

impl<B: Registrar> Registry<B> {
    /// An empty one.
    pub fn new(bus: Arc<B>, limits: RegistryLimits) -> Self {
        Self {
            bus,
            limits,
            entries: HashMap::new(),
            by_memory: HashMap::new(),
            by_age: BTreeMap::new(),
            clock: 0,
            stats: RegistryStats::default(),
        }
    }

    /// The limits.
    pub fn limits(&self) -> RegistryLimits {
        self.limits
    }

    /// Counters.
    pub fn stats(&self) -> RegistryStats {
        RegistryStats { entries: self.entries.len(), ..self.stats }
    }

    /// A registration that covers these bytes and permits this access: one that is there, or a new one of the whole
    /// pages around them.
    ///
    /// # Errors
    /// [`RegistryError`]; nothing new stays registered, though others may have been evicted.
    pub fn get(
        &mut self,
        buffer: &BufferRef,
        range: Range<usize>,
        access: Access,
    ) -> Result<Registered, RegistryError> {
        let len = buffer.len();
        if range.is_empty() || range.end > len {
            return Err(RegistryError::BadRange { range, len });
        }
        let memory = buffer.id();
        self.clock += 1;
        let covers = |e: &Entry| {
            e.range.start <= range.start && range.end <= e.range.end && e.via.mapping().access().contains(access)
        };
        let ids = self.by_memory.get(&memory).map_or(&[][..], Vec::as_slice);
        if let Some(id) = ids.iter().find(|id| self.entries.get(id).is_some_and(covers))
            && let Some(entry) = self.entries.get_mut(id)
        {
            self.by_age.remove(&entry.used);
            entry.used = self.clock;
            self.by_age.insert(self.clock, *id);
            self.stats.hits += 1;
            return Ok(entry.via.clone());
        }
        // Buffers are whole pages, so the end does not run past the buffer's.
        let range = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE);
        let wanted = range.len() as u64;
        let limit = self.limits.bytes;
        if wanted > limit {
            return Err(RegistryError::TooMuch { wanted, limit });
        }
        while self.stats.bytes + wanted > limit || self.entries.len() >= self.limits.entries.max(1) {
            self.evict()?;
        }
        let via = loop {
            match Registered::of_range(&*self.bus, buffer, range.clone(), access) {
                Ok(via) => break via,
                // Somebody else has pinned much: a limit of one's own may not be enough.
                Err(Error::PinLimit { .. }) if !self.entries.is_empty() => self.evict()?,
                Err(e) => return Err(e.into()),
            }
        };
        self.stats.misses += 1;
        self.stats.bytes += wanted;
        self.stats.bytes_peak = self.stats.bytes_peak.max(self.stats.bytes);
        let (id, used) = (self.clock, self.clock);
        self.entries.insert(id, Entry { via: via.clone(), memory, range, used });
        self.by_memory.entry(memory).or_default().push(id);
        self.by_age.insert(used, id);
        Ok(via)
    }

    /// Deregisters all of a memory now, so that it can be freed, and says how many registrations that were.
    ///
    /// # Errors
    /// [`RegistryError::Busy`] while an operation in flight uses one of them; then all of them stay.
    pub fn forget(&mut self, buffer: &BufferRef) -> Result<usize, RegistryError> {
        let ids = self.by_memory.get(&buffer.id()).cloned().unwrap_or_default();
        let busy = ids.iter().filter_map(|id| self.entries.get(id)).filter(|e| e.via.is_busy());
        let bytes: u64 = busy.map(|e| e.range.len() as u64).sum();
        if bytes > 0 {
            return Err(RegistryError::Busy { bytes });
        }
        ids.iter().for_each(|id| self.remove(*id));
        Ok(ids.len())
    }

    /// Undoes the idle registration that was not used for longest.
    fn evict(&mut self) -> Result<(), RegistryError> {
        let mut by_age = self.by_age.values();
        match by_age.find(|id| self.entries.get(id).is_some_and(|e| !e.via.is_busy())).copied() {
            Some(id) => {
                self.remove(id);
                self.stats.evictions += 1;
                Ok(())
            }
            None => {
                self.stats.busy += 1;
                Err(RegistryError::Busy { bytes: self.stats.bytes })
            }
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.by_age.remove(&entry.used);
        if let Some(ids) = self.by_memory.get_mut(&entry.memory) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_memory.remove(&entry.memory);
            }
        }
        self.stats.bytes -= entry.range.len() as u64;
    }
}

impl<B: Registrar> std::fmt::Debug for Registry<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("limits", &self.limits).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
