//! A bounded cache of registrations.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::Access;
use dmalane_dma::{BufferRef, BufferSlice, Error, Registrar};
use thiserror::Error as Derive;

use crate::{
    Abilities, CacheHint, Completion, DeviceAddr, Direction, OpError, Operation, Queue, QueueAddr, Refusal, Refused,
    Registered,
};

/// The kernel's default limit of locked memory.
const USUAL_MEMLOCK: u64 = 8 << 20;
const PAGE: usize = 4096;

/// How much may be registered at one time.
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
    /// More than may be registered in all. [`Registry::copy`] copies in fragments.
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

/// Why [`Registry::copy`] did not move all bytes.
#[derive(Debug, Derive)]
#[non_exhaustive]
pub enum CopyError {
    /// A fragment could not be registered.
    #[error(transparent)]
    Register(#[from] RegistryError),
    /// The queue refused a fragment.
    #[error("{0}")]
    Refused(Refusal),
    /// A fragment failed.
    #[error("{error}, after {bytes} bytes")]
    Failed {
        /// How.
        error: OpError,
        /// Bytes that are known to be done, counted from the front.
        bytes: u64,
    },
    /// The queue has other operations in flight, or does not end operations in order.
    #[error("other operations are in flight, or may end out of order")]
    NotAlone,
    /// Nothing ended in time. The queue still owns a part of the memory.
    #[error("nothing ended within {0:?}")]
    TimedOut(Duration),
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

    /// How much may be registered.
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
        let len = buffer.len();
        if range.is_empty() || range.end > len {
            return Err(RegistryError::BadRange { range, len });
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

    /// Deregisters everything that is not busy, and says how many registrations are left.
    pub fn clear(&mut self) -> usize {
        let idle: Vec<u64> = self.entries.iter().filter(|(_, e)| !e.via.is_busy()).map(|(id, _)| *id).collect();
        idle.into_iter().for_each(|id| self.remove(id));
        self.entries.len()
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

    /// The longest fragment of which two can be registered at one time: whole 2 MiB where that is possible, else whole
    /// pages.
    pub fn fragment(&self) -> usize {
        let half = usize::try_from(self.limits.bytes / 2).unwrap_or(usize::MAX);
        let unit = if half >= 2 << 20 { 2 << 20 } else { PAGE };
        (half / unit * unit).max(PAGE)
    }

    /// Copies a slice that may be larger than all that can be registered at one time: fragment by fragment, the next
    /// one being registered while the one before is copied. The queue must be [`ORDERED`](crate::Abilities::ORDERED)
    /// with nothing in flight. `timeout` is for each fragment.
    ///
    /// # Errors
    /// [`CopyError`], with the slice, unless the queue still has some of it.
    pub fn copy(
        &mut self,
        queue: &mut dyn Queue<Addr = DeviceAddr>,
        direction: Direction,
        slice: BufferSlice,
        at: DeviceAddr,
        cache: CacheHint,
        timeout: Duration,
    ) -> Result<BufferSlice, (Option<BufferSlice>, CopyError)> {
        if queue.in_flight() > 0 || !queue.abilities().contains(Abilities::ORDERED) {
            return Err((Some(slice), CopyError::NotAlone));
        }
        if slice.is_empty() {
            return Err((Some(slice), CopyError::Refused(Refusal::Empty)));
        }
        let access = direction.host_access();
        let longest = self.fragment().min(usize::try_from(queue.limits().max_len).unwrap_or(usize::MAX));
        // The fragments that are done, joined; and the rest that was not submitted.
        let (mut front, mut rest): (Option<BufferSlice>, Option<BufferSlice>) = (None, Some(slice));
        let (mut begun, mut bytes, mut failed) = (0u64, 0, None);
        let mut done: Vec<Completion> = Vec::new();
        loop {
            while failed.is_none()
                && queue.in_flight() < queue.limits().capacity.min(2)
                && let Some(slice) = rest.take().filter(|slice| !slice.is_empty())
            {
                // To the next multiple in the buffer, so that a second copy finds the same ranges.
                let len = (longest - slice.offset() % longest).min(slice.len());
                let range = slice.offset()..slice.offset() + len;
                let via = match self.get(&slice.reference(), range, access) {
                    Ok(via) => via,
                    Err(RegistryError::Busy { .. }) if queue.in_flight() > 0 => {
                        rest = Some(slice); // the fragment in flight holds what would be evicted
                        break;
                    }
                    Err(e) => {
                        failed = Some(CopyError::Register(e));
                        rest = Some(slice);
                        break;
                    }
                };
                let (front_slice, after) = slice.split_at(len).expect("no longer than the slice");
                // The queue refuses an address past the top.
                let to = at.advance(begun).unwrap_or(at);
                match queue.submit(Operation::copy(direction, (front_slice, via), to).hint(cache)) {
                    Ok(_ticket) => {
                        begun += len as u64;
                        rest = Some(after);
                    }
                    Err(Refused { operation, reason }) => {
                        rest = operation.into_slice().and_then(|slice| slice.join(after).ok());
                        failed = Some(CopyError::Refused(reason));
                    }
                }
            }
            if queue.in_flight() == 0 {
                break;
            }
            if queue.wait(&mut done, timeout) == 0 {
                return Err((None, CopyError::TimedOut(timeout)));
            }
            // In the order of their submission: `copy` asks for an ordered queue.
            for Completion { operation, result, bytes: moved, .. } in done.drain(..) {
                if failed.is_none() {
                    bytes += moved;
                }
                if let Err(error) = result
                    && failed.is_none()
                {
                    failed = Some(CopyError::Failed { error, bytes });
                }
                front = match (front.take(), operation.into_slice()) {
                    (Some(front), Some(slice)) => front.join(slice).ok(),
                    (front, slice) => front.or(slice),
                };
            }
        }
        let whole = match (front, rest) {
            (Some(front), Some(rest)) => front.join(rest).ok(),
            (front, rest) => front.or(rest),
        };
        match (whole, failed) {
            (Some(whole), None) => Ok(whole),
            (whole, failed) => Err((whole, failed.unwrap_or(CopyError::NotAlone))),
        }
    }
}

impl<B: Registrar> std::fmt::Debug for Registry<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("limits", &self.limits).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
