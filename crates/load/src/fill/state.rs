//! The state that workers share: memory that is not taken yet, fragments that have arrived, and whether to go on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, FileOffset};
use dmalane_dma::{Absent, BufferSlice, Error, PageKind, Registrar, Reserved, SharedBuf};
use dmalane_queue::Registered;

use super::hash::{Hasher, Hashes};
use super::landing::{Busy, Full, Landed, Landing, Place};
use super::memory::{FillCached, Memory, Staging};
use super::sink::{DeviceSink, Failed};
use super::worker::POLL_INTERVAL;
use super::{BadJob, Event, Extent, FillError, FillOptions, Job, QueueFailure, Sink, Watch, locked};
use crate::clock::{Clocks, Stage};

pub(super) struct State<'a, 'w> {
    pub options: &'a FillOptions,
    deadline: Option<Instant>,
    /// A worker takes memory while fewer bytes than this have memory and wait to be read.
    pub chunk: usize,
    block: usize,
    lens: &'a [u64],
    /// For each buffer its extents, in the order of their destinations.
    plan: Vec<Vec<(usize, Extent)>>,
    total: u64,
    supply: Mutex<Supply<'a>>,
    /// The memory stays; else it is that of slots.
    stays: bool,
    register: Option<(&'a dyn Registrar, Access)>,
    cached: Option<&'a dyn FillCached>,
    /// Where reads go, if not to the memory itself.
    landing: Option<Landing>,
    /// Chunks that have landed.
    full: Mutex<VecDeque<Full>>,
    /// For each buffer the registrations of its chunks.
    mappings: Mutex<Vec<BTreeMap<usize, Registered>>>,
    /// Buffers whose memory is new, and so zero.
    fresh: Vec<bool>,
    /// Reads whose memory was taken and whose bytes were not sent on yet.
    ahead: AtomicUsize,
    progress: Mutex<Progress>,
    /// There is a thread that hashes: [`State::hash_in_background`].
    pub aside: bool,
    /// It leaves hashing to workers that have nothing else to do, unless more than this waits. 0: it hashes everything.
    behind: usize,
    /// Reads are copies out of the page cache into memory that stays, and not the disk's work.
    pub copies: bool,
    /// There is something to hash and the device has room for it, or nothing will come any more.
    hashable: Condvar,
    /// A fragment was hashed and handed on.
    handed_on: Condvar,
    device: Option<DeviceSink<'a>>,
    watch: Mutex<&'a mut Watch<'w>>,
    stop: AtomicBool,
}

/// Memory that is still to be taken.
struct Supply<'a> {
    pages: Pages<'a>,
    /// The first buffer of which anything is left.
    buffer: usize,
    /// The extent with which its next chunk begins.
    extent: usize,
    /// No chunk was taken, and there will be several.
    first: bool,
}

enum Pages<'a> {
    Buffers(Vec<Reserved>),
    /// The next byte of the buffer goes to the next slot.
    Staging(&'a mut Staging, usize),
}

struct Progress {
    buffers: Vec<Arrived>,
    /// Buffers whose next bytes to be hashed are there, and nobody hashes them.
    ready: BTreeSet<usize>,
    /// Nothing will have to be hashed any more.
    nothing_comes: bool,
    /// Bytes of each extent that have not arrived, or that the sink is not done with.
    missing: Vec<u64>,
    done: u64,
    /// Bytes that have arrived and that the device does not have yet.
    away: u64,
    /// Fragments that were hashed and handed on.
    handed_on: u64,
    /// The failure that lies first, and where.
    failed: Option<((usize, usize), FillError)>,
    first_read: Option<Instant>,
}

/// The fragments of a buffer that are there.
struct Arrived {
    /// By offset. While a fragment is being hashed or is with the sink, it is not here.
    fragments: BTreeMap<usize, Fragment>,
    len: usize,
    hash: Option<Box<Hasher>>,
    /// Bytes hashed.
    hashed: usize,
}

/// Consecutive bytes of a buffer, and the memory that they are in.
pub(super) struct Fragment {
    pub tag: Tag,
    pub slice: BufferSlice,
}

/// Identifies the bytes of a fragment.
#[derive(Clone)]
pub(super) struct Tag {
    pub buffer: usize,
    /// From where on in the buffer.
    pub offset: usize,
    /// The extent that they are of, if any.
    pub extent: Option<usize>,
    /// The slot that the memory goes back to, of staging memory.
    slot: usize,
    /// The registration of the memory.
    pub via: Option<Registered>,
    /// The chunk that the bytes are still to be copied to.
    landed: Option<Arc<Landed>>,
}

impl Fragment {
    /// Splits off the first `len` bytes; `None`, without any change, when there are fewer.
    pub fn split_off_front(&mut self, len: usize) -> Option<Self> {
        let slice = self.slice.split_off_front(len)?;
        let tag = self.tag.clone();
        self.tag.offset += len;
        Some(Self { tag, slice })
    }

    fn end(&self) -> usize {
        self.tag.offset + self.slice.len()
    }
}

/// A fragment to be read.
pub(super) struct Read {
    pub source: usize,
    pub at: FileOffset,
    pub fragment: Fragment,
}

/// The answer of [`State::claim`].
pub(super) enum Claimed {
    /// The reads into a new chunk.
    Reads(Vec<Read>),
    /// There will be memory when the sink has given some back, or when bytes that were read ahead are sent on.
    Later,
    /// Everything was taken, or the job failed.
    Nothing,
}

enum Taken {
    /// Memory that is not present, and where reads into it land.
    Absent(Absent, Option<Place>),
    Slot(Fragment),
}

/// A job that is done.
pub(crate) struct Done {
    /// The buffers; none of staging memory.
    pub whole: Vec<SharedBuf>,
    pub hashes: Vec<Hashes>,
    pub mappings: Vec<Vec<Registered>>,
    pub first_read: Option<Instant>,
    pub recycled: bool,
    pub clocks: Clocks,
}

/// Mappings of a job, at most (one more for each buffer): a kernel takes 65535 in all (`dma_entry_limit` of
/// `vfio_iommu_type1`). Chunks are longer where there would be more.
const MAPPINGS: u64 = 1 << 14;

impl<'a, 'w> State<'a, 'w> {
    pub fn new(
        start: Instant,
        memory: Memory<'a>,
        sink: Sink<'a>,
        job: &'a Job,
        (workers, sources): (usize, usize),
        options: &'a FillOptions,
        watch: &'a mut Watch<'w>,
    ) -> Result<Self, FillError> {
        let plan = job.by_buffer(sources)?;
        if let Sink::Device { targets, .. } = &sink
            && targets.buffers() != job.buffers.len()
        {
            return Err(BadJob::Destinations { buffers: job.buffers.len(), there: targets.buffers() }.into());
        }
        let pages = |bytes: u64| usize::try_from(bytes.clamp(1, 1 << 40)).unwrap_or(1 << 30).next_multiple_of(4096);
        let mut chunk = pages(options.chunk);
        let (mut register, mut cached, mut landing) = (None, None, None);
        let copies = matches!(&memory, Memory::Buffers(stays) if !stays.direct);
        let pages_of_job = match memory {
            // A slot is free at once, so there is no point in taking one before there is room to read into it.
            Memory::Staging(staging) => {
                chunk = 1;
                Pages::Staging(staging, 0)
            }
            Memory::Buffers(stays) => {
                (register, cached) = (stays.register, stays.cached);
                if let Some((registrar, _)) = register {
                    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
                    // Memory that could never be pinned is refused before any of it is read.
                    if let Some(limit) = registrar.pin_limit().filter(|limit| wanted > *limit) {
                        let source = Error::PinLimit { wanted, pinned: 0, limit };
                        return Err(FillError::Map { buffer: 0, offset: 0, source });
                    }
                    let least = wanted.div_ceil(MAPPINGS).checked_next_power_of_two().unwrap_or(u64::MAX);
                    chunk = chunk.max(pages(least));
                }
                let mut reserved = Vec::new();
                for (buffer, len) in job.buffers.iter().enumerate() {
                    // A buffer has at least a page.
                    let len = usize::try_from(*len).map_err(|_| BadJob::TooLarge(*len))?.max(1);
                    let memory = |source| FillError::Memory { buffer, source };
                    reserved.push(stays.heap.reserve(len).map_err(memory)?);
                }
                enough(&reserved, 0)?;
                let all = usize::try_from(job.bytes()).unwrap_or(usize::MAX);
                let room = |more: usize| enough(&reserved, more.min(all)).is_ok();
                landing = stays.direct.then(|| Landing::new(&reserved, chunk, room)).flatten();
                Pages::Buffers(reserved)
            }
        };
        let arrived = |(buffer, len): (usize, &u64)| Arrived {
            fragments: BTreeMap::new(),
            len: *len as usize,
            hash: Hasher::new(options, buffer).map(Box::new),
            hashed: 0,
        };
        let fresh = match &pages_of_job {
            Pages::Buffers(reserved) => reserved.iter().map(Reserved::is_fresh).collect(),
            Pages::Staging(..) => vec![false; job.buffers.len()],
        };
        let (first, stays) = (options.chunk < job.bytes(), matches!(&pages_of_job, Pages::Buffers(_)));
        // The bytes that are hashed at once.
        let piece = match &pages_of_job {
            Pages::Staging(staging, _) => staging.slot(),
            Pages::Buffers(_) => pages(options.block).min(chunk) as u64,
        };
        let busy = workers + if let Sink::Device { processors, .. } = &sink { *processors } else { 0 };
        let worth = || job.bytes() >= ASIDE_FROM && piece >= ASIDE_PIECE;
        let spare = || std::thread::available_parallelism().is_ok_and(|n| n.get() > busy);
        let aside = Hasher::is_wanted(options) && options.hash_thread.unwrap_or_else(|| worth() && spare());
        // Only a worker that waits for the disk has time to hash: several copy, and SHA-256 takes longer than the disk.
        // A device waits for what is hashed.
        let sha256 = options.hash_regions.as_ref().is_some_and(|regions| regions.sha256);
        let waits = workers == 1 && !copies && !sha256 && matches!(sink, Sink::Memory);
        let behind = if waits && options.hash_thread.is_none() { BEHIND } else { 0 };
        let device = DeviceSink::new(sink, options, start);
        let state = Self {
            options,
            deadline: options.time_limit.and_then(|limit| start.checked_add(limit)),
            chunk,
            block: pages(options.block),
            lens: &job.buffers,
            plan,
            total: job.bytes(),
            supply: Mutex::new(Supply { pages: pages_of_job, buffer: 0, extent: 0, first }),
            stays,
            register,
            cached,
            landing,
            full: Mutex::default(),
            mappings: Mutex::new(vec![BTreeMap::new(); job.buffers.len()]),
            fresh,
            ahead: AtomicUsize::new(0),
            progress: Mutex::new(Progress {
                buffers: job.buffers.iter().enumerate().map(arrived).collect(),
                ready: BTreeSet::new(),
                nothing_comes: false,
                handed_on: 0,
                missing: job.extents.iter().map(|e| e.len).collect(),
                done: 0,
                away: 0,
                failed: None,
                first_read: None,
            }),
            aside,
            behind,
            copies,
            hashable: Condvar::new(),
            handed_on: Condvar::new(),
            device,
            watch: Mutex::new(watch),
            stop: AtomicBool::new(false),
        };
        for (extent, e) in job.extents.iter().enumerate() {
            if e.len == 0 {
                state.tell(Event::Complete { extent });
            }
        }
        Ok(state)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        locked(&self.progress)
    }

    /// Whether to give up, checking the deadline.
    pub fn stopped(&self) -> bool {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let (done, away) = {
                let progress = self.progress();
                (progress.done, progress.away)
            };
            if done < self.total || away > 0 {
                self.fail((usize::MAX, 0), FillError::Deadline { done, of: Some(self.total) });
            }
        }
        self.stop.load(Ordering::Relaxed)
    }

    /// Notes a failure at a place of a buffer, and stops the job.
    pub fn fail(&self, place: (usize, usize), error: FillError) {
        let mut progress = self.progress();
        if progress.failed.as_ref().is_none_or(|(first, _)| place < *first) {
            progress.failed = Some((place, error));
        }
        self.stop.store(true, Ordering::Relaxed);
    }

    fn tell(&self, event: Event) {
        self.tell_to(&mut **locked(&self.watch), event);
    }

    fn tell_to(&self, watch: &mut Watch<'_>, event: Event) {
        if watch(event) == ControlFlow::Break(()) {
            let done = self.progress().done;
            self.fail((usize::MAX, 0), FillError::Cancelled { done, of: self.total });
        }
    }

    /// Takes the next chunk, makes it present and cuts it into reads. `capacity` is the number of reads that a queue of
    /// the worker takes.
    pub fn claim(&self, capacity: usize, clocks: &mut Clocks) -> Claimed {
        match self.take(capacity, clocks) {
            Ok(claimed) => claimed,
            Err((place, error)) => {
                self.fail(place, error);
                Claimed::Nothing
            }
        }
    }

    fn take(&self, capacity: usize, clocks: &mut Clocks) -> Result<Claimed, Failed> {
        let mut supply = locked(&self.supply);
        let Supply { pages, buffer: next, extent, first } = &mut *supply;
        let (buffer, taken, end) = loop {
            let buffer = *next;
            let Some(len) = self.lens.get(buffer) else { return Ok(Claimed::Nothing) };
            let taken = match pages {
                Pages::Buffers(reserved) => {
                    let reserved = reserved.get_mut(buffer);
                    let copied = reserved.as_ref().is_some_and(|r| r.left() > 0 && r.is_better_copied_to());
                    let place = match self.landing.as_ref().filter(|_| copied).map_or(Ok(None), Landing::take) {
                        Ok(place) => place,
                        Err(Busy) => return Ok(Claimed::Later),
                    };
                    // The first chunk is a single block, so that reading can begin.
                    let len = if std::mem::take(first) { self.block.min(self.chunk) } else { self.chunk };
                    let absent = reserved.and_then(|reserved| reserved.next(len));
                    absent.map(|absent| (absent.offset() + absent.len(), Taken::Absent(absent, place)))
                }
                Pages::Staging(_, at) if *at as u64 >= *len => {
                    *at = 0;
                    None
                }
                // As many reads may wait for their turn as are in flight. Reading further ahead would only push them
                // out of the processor's cache.
                Pages::Staging(..) if self.ahead.load(Ordering::Relaxed) >= 2 * capacity => return Ok(Claimed::Later),
                Pages::Staging(staging, at) => {
                    let taken = staging.take(*len - *at as u64, clocks);
                    let failed = |source| ((buffer, *at), FillError::Memory { buffer, source });
                    let Some((slot, slice, via)) = taken.map_err(failed)? else { return Ok(Claimed::Later) };
                    let tag = Tag { buffer, offset: *at, extent: None, slot, via: Some(via), landed: None };
                    *at += slice.len();
                    Some((*at, Taken::Slot(Fragment { tag, slice })))
                }
            };
            match taken {
                Some((end, taken)) => break (buffer, taken, end),
                None => (*next, *extent) = (buffer + 1, 0),
            }
        };
        let begin = *extent;
        let more = self.plan[buffer][begin..].partition_point(|(_, e)| e.to < end as u64);
        // The last extent may go on in the next chunk.
        *extent = (begin + more).saturating_sub(1).max(begin);
        drop(supply);
        let extents = &self.plan[buffer][begin..begin + more];
        let rest = match taken {
            Taken::Slot(fragment) => fragment,
            Taken::Absent(absent, place) => {
                let offset = absent.offset();
                let failed = |error| ((buffer, offset), error);
                let memory = |source| failed(FillError::Memory { buffer, source });
                let unused = |place| self.landing.as_ref().zip(place).map_or((), |(l, place)| l.give_back(place));
                let absent = match self.fill_cached(absent, buffer, extents, clocks) {
                    Err(absent) => absent,
                    Ok((slice, extent, len)) => {
                        unused(place);
                        let rest = self.register(buffer, slice, clocks).map_err(failed)?;
                        self.filled(rest, extent, len);
                        return Ok(Claimed::Reads(Vec::new()));
                    }
                };
                let landed = match (&self.landing, place) {
                    // Bytes that nobody reads are zero as soon as they are present.
                    (Some(landing), Some(place)) if !extents.is_empty() => {
                        clocks.time(Stage::Allocate, || landing.begin(place, absent))
                    }
                    (_, place) => {
                        unused(place);
                        Err(absent)
                    }
                };
                match landed {
                    Ok((slice, landed)) => {
                        let tag = Tag { buffer, offset, extent: None, slot: 0, via: None, landed: Some(landed) };
                        Fragment { tag, slice }
                    }
                    Err(absent) => {
                        let slice = clocks.time(Stage::Allocate, || absent.populate()).map_err(memory)?;
                        clocks.bytes(Stage::Allocate, (end - offset) as u64);
                        self.register(buffer, slice, clocks).map_err(failed)?
                    }
                }
            }
        };
        Ok(Claimed::Reads(self.cut(rest, extents)))
    }

    /// Fills a chunk that is all of one extent from what is cached, and returns it with the extent and how many bytes
    /// of it that was; or returns the chunk as it was.
    fn fill_cached(
        &self,
        absent: Absent,
        buffer: usize,
        extents: &[(usize, Extent)],
        clocks: &mut Clocks,
    ) -> Result<(BufferSlice, usize, usize), Absent> {
        let (Some(cached), [(extent, e)]) = (self.cached, extents) else { return Err(absent) };
        let offset = absent.offset();
        let len = absent.len().min(self.lens[buffer] as usize - offset);
        if e.to > offset as u64 || e.to + e.len < (offset + len) as u64 {
            return Err(absent);
        }
        let at = FileOffset::new(e.at.bits() + (offset as u64 - e.to));
        let begin = Instant::now();
        let slice = clocks.time(Stage::Read, || cached.fill(absent, e.source, at, len))?;
        self.progress().first_read.get_or_insert(begin);
        clocks.bytes(Stage::Read, len as u64);
        Ok((slice, *extent, len))
    }

    /// Takes a chunk of which the first `len` bytes are those of an extent.
    fn filled(&self, mut rest: Fragment, extent: usize, len: usize) {
        let end = rest.end();
        if let Some(mut front) = rest.split_off_front(len) {
            front.tag.extent = Some(extent);
            self.ahead.fetch_add(1, Ordering::Relaxed);
            self.arrived(front);
        }
        self.pass_over(&mut rest, end);
    }

    /// Cuts a chunk into reads. Bytes that nobody reads have arrived already.
    fn cut(&self, mut rest: Fragment, extents: &[(usize, Extent)]) -> Vec<Read> {
        let end = rest.end();
        let mut reads = Vec::new();
        for (extent, e) in extents {
            // Both fit: a job's buffers are no larger than the address space.
            let (to, until) = (e.to as usize, (e.to + e.len) as usize);
            if until <= rest.tag.offset {
                continue; // ended in the chunk before
            }
            self.pass_over(&mut rest, to);
            while rest.tag.offset < until.min(end) {
                let at = FileOffset::new(e.at.bits() + (rest.tag.offset - to) as u64);
                // Reads end where blocks of the buffer end, so that they stay aligned as they are.
                let len = (until.min(end) - rest.tag.offset).min(self.block - rest.tag.offset % self.block);
                let Some(mut fragment) = rest.split_off_front(len) else { break };
                fragment.tag.extent = Some(*extent);
                reads.push(Read { source: e.source, at, fragment });
            }
        }
        self.pass_over(&mut rest, end);
        self.ahead.fetch_add(reads.len(), Ordering::Relaxed);
        reads
    }

    /// Registers a chunk that is present.
    fn register(&self, buffer: usize, slice: BufferSlice, clocks: &mut Clocks) -> Result<Fragment, FillError> {
        let (offset, len, reference) = (slice.offset(), slice.len(), slice.reference());
        let mut via = None;
        if let Some((registrar, access)) = self.register {
            let map = |source| FillError::Map { buffer, offset: offset as u64, source };
            let range = offset..offset + len;
            let pinned = clocks.time(Stage::Register, || registrar.pin_range(&reference, range)).map_err(map)?;
            let mapping = clocks.time(Stage::Map, || registrar.map_list(vec![pinned], access)).map_err(map)?;
            clocks.bytes(Stage::Register, len as u64);
            clocks.bytes(Stage::Map, len as u64);
            let registered = Registered::from_mapping(mapping);
            locked(&self.mappings)[buffer].insert(offset, registered.clone());
            via = Some(registered);
        }
        self.tell(Event::Allocated { buffer, offset: offset as u64, len: len as u64, reference });
        Ok(Fragment { tag: Tag { buffer, offset, extent: None, slot: 0, via, landed: None }, slice })
    }

    /// The bytes before `to` belong to no extent: they are zero.
    fn pass_over(&self, rest: &mut Fragment, to: usize) {
        let len = to.saturating_sub(rest.tag.offset);
        if len > 0
            && let Some(gap) = rest.split_off_front(len)
        {
            let landed = gap.tag.landed.is_some();
            if landed || !self.fresh[gap.tag.buffer] {
                gap.slice.as_volatile_slice().fill(0);
            }
            if landed { self.landed(gap) } else { self.settle(gap) }
        }
    }

    /// A read begins; the first one is noted.
    pub fn reading(&self) {
        self.progress().first_read.get_or_insert_with(Instant::now);
    }

    /// Takes a fragment in its landing place.
    fn landed(&self, mut fragment: Fragment) {
        if let Some(full) = fragment.tag.landed.take().and_then(|landed| landed.add(fragment)) {
            locked(&self.full).push_back(full);
        }
    }

    /// Copies a chunk that has landed to where it belongs; false where there is none. Only one: its landing place is
    /// read into again while the next one is copied.
    pub fn copy(&self, clocks: &mut Clocks) -> bool {
        let (Some(landing), Some(mut full)) = (&self.landing, locked(&self.full).pop_front()) else { return false };
        let (buffer, offset, len) = (full.buffer, full.absent.offset(), full.absent.len());
        let tags = std::mem::take(&mut full.tags);
        let copied = clocks.time(Stage::Allocate, || landing.copy(full));
        clocks.bytes(Stage::Allocate, len as u64);
        let copied = copied.map_err(|source| FillError::Memory { buffer, source });
        let mut rest = match copied.and_then(|slice| self.register(buffer, slice, clocks)) {
            Ok(rest) => rest,
            Err(error) => {
                self.fail((buffer, offset), error);
                return true;
            }
        };
        for (extent, len) in tags {
            let Some(mut front) = rest.split_off_front(len) else { break };
            front.tag.extent = extent;
            if extent.is_some() { self.arrived(front) } else { self.settle(front) }
        }
        true
    }

    /// Takes a fragment that was read.
    pub fn arrived(&self, fragment: Fragment) {
        if fragment.tag.landed.is_some() {
            return self.landed(fragment);
        }
        let Tag { buffer, offset, extent, .. } = fragment.tag;
        let len = fragment.slice.len() as u64;
        // Held from here on, so that workers tell events in the order in which they count bytes.
        let mut watch = locked(&self.watch);
        let complete = {
            let mut progress = self.progress();
            progress.done += len;
            extent.filter(|extent| self.device.is_none() && progress.have(*extent, len))
        };
        self.tell_to(&mut **watch, Event::Arrived { buffer, offset: offset as u64, len });
        if let Some(extent) = complete {
            self.tell_to(&mut **watch, Event::Complete { extent });
        }
        drop(watch);
        self.settle(fragment);
    }

    /// Bytes of a fragment that go to the device: those behind the end of the buffer do not.
    fn to_device(&self, fragment: &Fragment) -> usize {
        let left = (self.lens[fragment.tag.buffer] as usize).saturating_sub(fragment.tag.offset);
        if self.device.is_some() { left.min(fragment.slice.len()) } else { 0 }
    }

    /// Takes a fragment whose bytes are final. It is hashed first, if checksums are on, when its turn comes.
    fn settle(&self, fragment: Fragment) {
        let mut progress = self.progress();
        progress.away += self.to_device(&fragment) as u64;
        if !Hasher::is_wanted(self.options) {
            drop(progress);
            return self.send(fragment);
        }
        let Tag { buffer, offset, .. } = fragment.tag;
        progress.buffers[buffer].fragments.insert(offset, fragment);
        progress.make_ready(buffer);
        if self.aside && progress.is_behind(self.behind) {
            self.hashable.notify_one();
        }
    }

    /// Hashes what workers do not get to, until nothing comes any more or the job is stopped.
    pub fn hash_in_background(&self, mut clocks: Clocks) -> Clocks {
        let _stop = StopOnPanic(&self.stop);
        let mut overdue = false;
        while !self.stop.load(Ordering::Relaxed) {
            let progress = self.progress();
            let wanted = progress.is_behind(self.behind) || progress.nothing_comes || overdue;
            if wanted && !progress.ready.is_empty() && !self.device_is_full() {
                drop(progress);
                self.hash(&mut clocks);
                overdue = false;
                continue;
            }
            if progress.nothing_comes {
                break;
            }
            // A device may have room again although nothing of this job has ended, and workers may be long at a read.
            let waited = self.hashable.wait_timeout(progress, POLL_INTERVAL);
            overdue = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        }
        clocks
    }

    /// Hashes in a worker that has just copied something, which is in its cache, or that has nothing else to do. True
    /// when there was something.
    pub fn hash_in_worker(&self, is_idle: bool, clocks: &mut Clocks) -> bool {
        (!self.aside || is_idle && self.behind > 0) && self.hash(clocks)
    }

    /// Notes that nothing will have to be hashed any more.
    pub fn nothing_comes(&self) {
        self.progress().nothing_comes = true;
        self.hashable.notify_one();
    }

    /// Fragments that were hashed and handed on until now, for [`State::pause`].
    pub fn handed_on(&self) -> u64 {
        if self.aside { self.progress().handed_on } else { 0 }
    }

    /// Waits a little for another thread: until it has handed on a fragment more than `seen`, if it hashes.
    pub fn pause(&self, seen: u64) {
        if !self.aside {
            return std::thread::sleep(PAUSE);
        }
        let progress = self.progress();
        if progress.handed_on == seen {
            drop(self.handed_on.wait_timeout(progress, PAUSE));
        }
    }

    /// The timeout of a worker's wait for the disk; short where blocks hashed meanwhile must go to the device.
    pub fn disk_timeout(&self) -> Duration {
        if self.aside && self.device.is_some() { PAUSE } else { POLL_INTERVAL }
    }

    fn device_is_full(&self) -> bool {
        self.device.as_ref().is_some_and(DeviceSink::is_full)
    }

    /// Hashes the fragments whose turn it is and sends them on: with a device only one, so that it is transferred while
    /// it is in the processor's cache, and none while the device has no room. True when there was one.
    fn hash(&self, clocks: &mut Clocks) -> bool {
        let mut any = false;
        while !self.device_is_full() {
            let mut progress = self.progress();
            let Some(buffer) = progress.ready.pop_first() else { break };
            let arrived = &mut progress.buffers[buffer];
            let (at, len) = (arrived.hashed, arrived.len);
            let (Some(mut hash), Some(mut fragment)) = (arrived.hash.take(), arrived.fragments.remove(&at)) else {
                break;
            };
            drop(progress);
            let n = fragment.slice.len().min(len - at);
            clocks.time(Stage::Checksum, || {
                if fragment.slice.with_bytes(|bytes| hash.write(&bytes[..n])).is_none() {
                    // A device may write to it.
                    let view = fragment.slice.as_volatile_slice().sub(0, n);
                    view.into_iter().for_each(|view| view.for_each_block(|block| hash.write(block)));
                }
            });
            clocks.bytes(Stage::Checksum, n as u64);
            let mut progress = self.progress();
            let arrived = &mut progress.buffers[buffer];
            (arrived.hashed, arrived.hash) = (fragment.end(), Some(hash));
            progress.make_ready(buffer);
            drop(progress);
            self.send(fragment);
            any = true;
            if self.device.is_some() {
                if self.aside {
                    self.progress().handed_on += 1;
                    self.handed_on.notify_all();
                }
                break;
            }
        }
        any
    }

    /// Hands a fragment to the sink.
    fn send(&self, mut fragment: Fragment) {
        if fragment.tag.extent.is_some() {
            self.ahead.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(device) = &self.device
            && let n @ 1.. = self.to_device(&fragment)
            && let Some(front) = fragment.split_off_front(n)
        {
            device.take(front);
        }
        if !fragment.slice.is_empty() {
            self.keep(fragment);
        }
    }

    /// Puts a fragment back to where its memory came from.
    fn keep(&self, fragment: Fragment) {
        if !self.stays
            && let Pages::Staging(staging, _) = &mut locked(&self.supply).pages
        {
            return staging.put_back(fragment.tag.slot, fragment.slice);
        }
        let Tag { buffer, offset, .. } = fragment.tag;
        self.progress().buffers[buffer].fragments.insert(offset, fragment);
    }

    /// Drives the device, if there is one: see [`DeviceSink::drive`]. True when anything came back.
    pub fn drive(&self, timeout: Duration) -> bool {
        let Some(device) = &self.device else { return false };
        let (mut back, was_full) = (Vec::new(), device.is_full());
        if let Err((place, error)) = device.drive(&mut back, timeout) {
            self.fail(place, error);
        }
        if self.aside && was_full && !device.is_full() {
            // Under the lock, so that it is not between looking and waiting.
            let _progress = self.progress();
            self.hashable.notify_one();
        }
        let any = !back.is_empty();
        for (fragment, moved) in back {
            let Tag { buffer, offset, extent, .. } = fragment.tag;
            let len = fragment.slice.len() as u64;
            let mut watch = locked(&self.watch);
            let mut progress = self.progress();
            let complete = extent.filter(|extent| progress.have(*extent, len));
            progress.away -= len;
            drop(progress);
            self.keep(fragment);
            if moved {
                self.tell_to(&mut **watch, Event::OnDevice { buffer, offset: offset as u64, len });
            }
            if let Some(extent) = complete {
                self.tell_to(&mut **watch, Event::Complete { extent });
            }
        }
        any
    }

    /// Drives the device, and hashes for it, until it has everything that has arrived or the job is stopped.
    pub fn drain(&self, mut clocks: Clocks) -> Clocks {
        while self.device.is_some() && !self.stopped() {
            let seen = self.handed_on();
            if self.progress().away == 0 {
                break;
            }
            let hashed = self.hash_in_worker(false, &mut clocks);
            if !self.drive(if hashed { Duration::ZERO } else { POLL_INTERVAL }) && !hashed {
                self.pause(seen);
            }
        }
        clocks
    }

    /// Rejoins everything when the device has let go of it, or returns the failure.
    pub fn finish(mut self, mut clocks: Clocks) -> Result<Done, FillError> {
        if let Some(device) = self.device.take() {
            device.quiesce();
            clocks.add(device.into_clocks());
        }
        drop(self.supply);
        let progress = self.progress.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, error)) = progress.failed {
            return Err(error);
        }
        let (mut whole, mut hashes) = (Vec::new(), Vec::new());
        for arrived in progress.buffers {
            hashes.push(arrived.hash.map_or_else(Hashes::default, |hash| hash.finish()));
            if !self.stays {
                continue;
            }
            let slices = arrived.fragments.into_values().map(|fragment| Some(fragment.slice));
            let joined = slices.reduce(|a, b| a?.join(b?).ok()).flatten();
            // Every chunk was taken, and every fragment of it has arrived.
            let Some(buf) = joined.and_then(|slice| slice.into_whole().ok()) else {
                return Err(FillError::Queue { source_index: 0, source: QueueFailure::Lost });
            };
            whole.push(buf);
        }
        let mappings = self.mappings.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Done {
            whole,
            hashes,
            mappings: mappings.into_iter().map(|of_buffer| of_buffer.into_values().collect()).collect(),
            first_read: progress.first_read,
            recycled: self.stays && self.fresh.contains(&false),
            clocks,
        })
    }
}

impl Progress {
    /// Counts bytes of an extent; true when they were the last.
    fn have(&mut self, extent: usize, len: u64) -> bool {
        self.missing[extent] -= len;
        self.missing[extent] == 0
    }

    /// Notes that the next bytes of a buffer can be hashed, if they can.
    fn make_ready(&mut self, buffer: usize) {
        let Arrived { fragments, len, hash, hashed } = &self.buffers[buffer];
        if hash.is_some() && hashed < len && fragments.contains_key(hashed) {
            self.ready.insert(buffer);
        }
    }

    /// Whether more bytes of a buffer than `behind` can be hashed.
    fn is_behind(&self, behind: usize) -> bool {
        self.ready.iter().any(|buffer| {
            let Arrived { fragments, hashed, .. } = &self.buffers[*buffer];
            let mut end = *hashed;
            let next = fragments.range(end..).map(|(offset, fragment)| (*offset, fragment.end()));
            next.take_while(|(offset, to)| *offset == std::mem::replace(&mut end, *to))
                .any(|(_, to)| to - hashed > behind)
        })
    }
}

/// Stops the job when the thread that holds it panics: others wait for what it does.
struct StopOnPanic<'s>(&'s AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// The longest that a worker with nothing to do waits for another thread.
const PAUSE: Duration = Duration::from_millis(1);

/// Fewer bytes than this are hashed sooner than a thread has started.
const ASIDE_FROM: u64 = 32 << 20;

/// Pieces of fewer bytes than this are hashed sooner than they are handed to another thread and back.
const ASIDE_PIECE: u64 = 256 << 10;

/// Bytes that workers may leave unhashed: more than what waits for a read that ends late, mostly.
const BEHIND: usize = 32 << 20;

/// Less than this is not worth asking the kernel about.
const WORTH_ASKING: usize = 32 << 20;

/// Bytes of the reservations that the kernel has yet to find memory for: none for what is present, nor for huge pages
/// once reserved.
fn to_come(reserved: &[Reserved]) -> usize {
    let is_there =
        |r: &Reserved| matches!(r.backing().kind, PageKind::Hugetlb2M | PageKind::Hugetlb1G) || r.is_present();
    reserved.iter().filter(|r| !is_there(r)).fold(0, |sum, r| sum.saturating_add(r.len()))
}

/// Makes sure that there is memory for the reservations and `more` bytes: where the kernel overcommits, a reservation
/// promises nothing, and a cgroup that runs full has somebody killed.
fn enough(reserved: &[Reserved], more: usize) -> Result<(), FillError> {
    let wanted = to_come(reserved).saturating_add(more);
    if wanted < WORTH_ASKING {
        return Ok(());
    }
    match dmalane_dma::room() {
        Some(room) if room.bytes < wanted as u64 => {
            Err(FillError::NoRoom { wanted: wanted as u64, left: room.bytes, limited_by: room.limited_by })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{AnonHeap, Heap, Pool};

    use super::*;

    #[test]
    fn memory_that_is_present_is_not_asked_for_again() {
        let base = AnonHeap::starting_at(PageKind::Base);
        let pool = Pool::new(AnonHeap::starting_at(PageKind::Base), 1 << 20);
        drop(pool.allocate(64 << 10).unwrap());
        let reserved = [base.reserve(8 << 10).unwrap(), pool.reserve(64 << 10).unwrap()];
        assert_eq!((reserved[1].is_present(), to_come(&reserved)), (true, 8 << 10));
    }
}
