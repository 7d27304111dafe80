//! What the lanes share: memory that is not taken yet, what has arrived, and whether to go on.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{Absent, BufferSlice, Heap, PageKind, Reserved};
use twox_hash::XxHash3_64;

use super::lane::NAP;
use super::onward::{Back, Outlet};
use super::{BadJob, Event, Extent, FillError, FillOptions, FilledBuf, Job, Onward, Watch};
use crate::clock::{Clocks, Stage};

pub(super) struct State<'a, 'w, 'o> {
    pub options: &'a FillOptions,
    pub gather: usize,
    pub block: usize,
    /// For each buffer its extents, in the order of their destinations.
    plan: Vec<Vec<(usize, Extent)>>,
    total: u64,
    fresh: Vec<bool>,
    memory: Mutex<Memory>,
    progress: Mutex<Progress>,
    outlet: Option<Outlet<'o>>,
    watch: Mutex<&'a mut Watch<'w>>,
    stop: AtomicBool,
}

/// What is still to be taken.
struct Memory {
    reserved: Vec<Reserved>,
    /// The first buffer of which anything is left.
    next: usize,
    /// The extent with which its next gather begins.
    extent: usize,
    first: bool,
}

struct Progress {
    buffers: Vec<Arrived>,
    /// Bytes of each extent that have not arrived, or are not on the device where there is one.
    missing: Vec<u64>,
    done: u64,
    /// Bytes that the outlet has.
    away: u64,
    /// The failure that lies first, and where.
    failed: Option<((usize, usize), FillError)>,
    first_read: Option<Instant>,
}

/// What of a buffer is there.
struct Arrived {
    /// By offset, each with the extent that it is of, if any. While one is being hashed or is on its way to the device,
    /// it is not here.
    parts: BTreeMap<usize, (BufferSlice, Option<usize>)>,
    len: usize,
    hash: Option<XxHash3_64>,
    /// How far it is hashed.
    hashed: usize,
}

/// A gather that a lane has taken.
pub(super) struct Claim {
    pub buffer: usize,
    /// The extents that may have bytes in it, as a range of the plan's.
    extents: std::ops::Range<usize>,
    pub memory: Absent,
}

/// A piece of a gather: what goes where.
pub(super) struct Piece {
    pub buffer: usize,
    pub extent: usize,
    pub source: usize,
    pub at: FileOffset,
    pub part: BufferSlice,
}

/// A job that is done.
pub(super) struct Done {
    pub buffers: Vec<FilledBuf>,
    pub first_read: Option<Instant>,
    pub recycled: bool,
}

impl<'a, 'w, 'o> State<'a, 'w, 'o> {
    pub fn new(
        heap: &dyn Heap,
        job: &Job,
        sources: usize,
        onward: Option<Onward<'o>>,
        options: &'a FillOptions,
        watch: &'a mut Watch<'w>,
    ) -> Result<Self, FillError> {
        let plan = job.by_buffer(sources)?;
        if let Some(there) = onward.as_ref().map(|o| o.to.len()).filter(|n| *n != job.buffers.len()) {
            return Err(BadJob::Destinations { buffers: job.buffers.len(), there }.into());
        }
        let mut reserved = Vec::new();
        for (buffer, len) in job.buffers.iter().enumerate() {
            // A buffer has at least a page.
            let len = usize::try_from(*len).map_err(|_| BadJob::TooLarge(*len))?.max(1);
            reserved.push(heap.reserve(len).map_err(|source| FillError::Memory { buffer, source })?);
        }
        enough(&reserved)?;
        let pages = |bytes: u64| usize::try_from(bytes.clamp(1, 1 << 40)).unwrap_or(1 << 30).next_multiple_of(4096);
        let arrived = |len: &u64| Arrived {
            parts: BTreeMap::new(),
            len: *len as usize,
            hash: options.checksum.then(|| XxHash3_64::with_seed(0)),
            hashed: 0,
        };
        let state = Self {
            options,
            gather: pages(options.gather),
            block: pages(options.block),
            plan,
            total: job.bytes(),
            fresh: reserved.iter().map(Reserved::is_fresh).collect(),
            memory: Mutex::new(Memory { reserved, next: 0, extent: 0, first: options.gather < job.bytes() }),
            progress: Mutex::new(Progress {
                buffers: job.buffers.iter().map(arrived).collect(),
                missing: job.extents.iter().map(|e| e.len).collect(),
                done: 0,
                away: 0,
                failed: None,
                first_read: None,
            }),
            outlet: onward.map(|onward| Outlet::new(onward, options.patience)),
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
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to give up, now that it may be too late.
    pub fn stopped(&self) -> bool {
        if self.options.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let (done, away) = {
                let progress = self.progress();
                (progress.done, progress.away)
            };
            if done < self.total || away > 0 {
                self.fail((usize::MAX, 0), FillError::Deadline { done, of: self.total });
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

    fn watch(&self) -> MutexGuard<'_, &'a mut Watch<'w>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) {
        self.tell_to(&mut **self.watch(), event);
    }

    fn tell_to(&self, watch: &mut Watch<'_>, event: Event) {
        if watch(event) == ControlFlow::Break(()) {
            let done = self.progress().done;
            self.fail((usize::MAX, 0), FillError::Cancelled { done, of: self.total });
        }
    }

    /// Takes the next gather; `None` when all are taken. The first is a single block, so that reading can begin.
    pub fn claim(&self) -> Option<Claim> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Memory { reserved, next, extent, first } = &mut *memory;
        loop {
            let buffer = *next;
            let len = if std::mem::take(first) { self.block.min(self.gather) } else { self.gather };
            let Some(absent) = reserved.get_mut(buffer)?.next(len) else {
                (*next, *extent) = (buffer + 1, 0);
                continue;
            };
            let plan = &self.plan[buffer];
            let end = (absent.offset() + absent.len()) as u64;
            let begin = *extent;
            let more = plan[begin..].partition_point(|(_, e)| e.to < end);
            // The last extent may go on in the next gather.
            *extent = (begin + more).saturating_sub(1).max(begin);
            return Some(Claim { buffer, extents: begin..begin + more, memory: absent });
        }
    }

    /// Makes a gather present and cuts it into pieces. What nobody reads into has arrived already.
    pub fn allocate(&self, claim: Claim, clocks: &mut Clocks) -> Option<Vec<Piece>> {
        let Claim { buffer, extents, memory } = claim;
        let (offset, len) = (memory.offset(), memory.len());
        let part = match clocks.time(Stage::Allocate, || memory.populate()) {
            Ok(part) => part,
            Err(source) => {
                self.fail((buffer, offset), FillError::Memory { buffer, source });
                return None;
            }
        };
        clocks.bytes(Stage::Allocate, len as u64);
        self.tell(Event::Allocated { buffer, offset: offset as u64, len: len as u64, reference: part.reference() });
        let mut rest = part;
        let mut pieces = Vec::new();
        for (extent, e) in &self.plan[buffer][extents] {
            let end = rest.offset() + rest.len();
            // Both fit: a job's buffers are no larger than the address space.
            let (to, until) = (e.to as usize, (e.to + e.len) as usize);
            if until <= rest.offset() {
                continue; // ended in the gather before
            }
            self.pass_over(buffer, &mut rest, to, clocks);
            while rest.offset() < until.min(end) {
                let at = e.at.bits() + (rest.offset() - to) as u64;
                // Pieces end where blocks of the buffer end, so that they stay aligned as they are.
                let len = (until.min(end) - rest.offset()).min(self.block - rest.offset() % self.block);
                let Some(part) = rest.split_off_front(len) else { break };
                pieces.push(Piece { buffer, extent: *extent, source: e.source, at: FileOffset::new(at), part });
            }
        }
        let end = rest.offset() + rest.len();
        self.pass_over(buffer, &mut rest, end, clocks);
        Some(pieces)
    }

    /// The bytes before `to` are nobody's: they are zero.
    fn pass_over(&self, buffer: usize, rest: &mut BufferSlice, to: usize, clocks: &mut Clocks) {
        let len = to.saturating_sub(rest.offset());
        if len > 0
            && let Some(gap) = rest.split_off_front(len)
        {
            if !self.fresh[buffer] {
                gap.view().fill(0);
            }
            self.present(buffer, gap, None, clocks);
        }
    }

    /// A read begins; the first one is noted.
    pub fn reading(&self) {
        self.progress().first_read.get_or_insert_with(Instant::now);
    }

    /// Takes a piece that was read.
    pub fn arrived(&self, piece: Piece, clocks: &mut Clocks) {
        let Piece { buffer, extent, part, .. } = piece;
        let (offset, len) = (part.offset() as u64, part.len() as u64);
        // Held from here on, so that what a lane counts and what it tells come in the same order.
        let mut watch = self.watch();
        let complete = {
            let mut progress = self.progress();
            progress.done += len;
            self.outlet.is_none() && progress.have(extent, len)
        };
        self.tell_to(&mut **watch, Event::Arrived { buffer, offset, len });
        if complete {
            self.tell_to(&mut **watch, Event::Complete { extent });
        }
        drop(watch);
        self.present(buffer, part, Some(extent), clocks);
    }

    /// Takes a part whose bytes are what they shall be. It is hashed first if it shall be, when its turn comes.
    fn present(&self, buffer: usize, part: BufferSlice, extent: Option<usize>, clocks: &mut Clocks) {
        if self.options.checksum {
            self.progress().buffers[buffer].parts.insert(part.offset(), (part, extent));
            self.hash(buffer, clocks);
        } else {
            self.send(buffer, part, extent);
        }
    }

    /// Hashes what follows what was hashed already, as far as it is there, and sends it on. Without the lock: whoever
    /// holds the next part hashes it.
    fn hash(&self, buffer: usize, clocks: &mut Clocks) {
        loop {
            let mut progress = self.progress();
            let arrived = &mut progress.buffers[buffer];
            let (at, len) = (arrived.hashed, arrived.len);
            if at >= len || arrived.hash.is_none() || !arrived.parts.contains_key(&at) {
                return;
            }
            let (Some(mut hash), Some((mut part, extent))) = (arrived.hash.take(), arrived.parts.remove(&at)) else {
                return;
            };
            drop(progress);
            let n = part.len().min(len - at);
            clocks.time(Stage::Checksum, || {
                if part.with_bytes(|bytes| hash.write(&bytes[..n])).is_none() {
                    // The watcher let a device write to it.
                    part.view().sub(0, n).into_iter().for_each(|view| view.for_each_block(|block| hash.write(block)));
                }
            });
            clocks.bytes(Stage::Checksum, n as u64);
            let mut progress = self.progress();
            let arrived = &mut progress.buffers[buffer];
            arrived.hashed = at + part.len();
            arrived.hash = Some(hash);
            drop(progress);
            self.send(buffer, part, extent);
        }
    }

    /// Lets a part go on to the device, if there is one, and keeps it otherwise.
    fn send(&self, buffer: usize, mut part: BufferSlice, extent: Option<usize>) {
        let mut progress = self.progress();
        let arrived = &mut progress.buffers[buffer];
        if let Some(outlet) = &self.outlet
            // What lies behind the end of what was asked for concerns nobody.
            && let n @ 1.. = arrived.len.saturating_sub(part.offset()).min(part.len())
            && let Some(front) = part.split_off_front(n)
        {
            outlet.take(Back { buffer, extent, part: front });
            progress.away += n as u64;
        }
        if !part.is_empty() {
            progress.buffers[buffer].parts.insert(part.offset(), (part, extent));
        }
    }

    /// Drives the device, if there is one: see [`Outlet::drive`]. True when it had anything.
    pub fn drive(&self, timeout: Duration) -> bool {
        let Some(outlet) = &self.outlet else { return false };
        let mut back = Vec::new();
        if let Err((place, error)) = outlet.drive(&mut back, timeout) {
            self.fail(place, error);
        }
        let any = !back.is_empty();
        for Back { buffer, extent, part } in back {
            let (offset, len) = (part.offset() as u64, part.len() as u64);
            let mut watch = self.watch();
            let mut progress = self.progress();
            let complete = extent.filter(|extent| progress.have(*extent, len));
            progress.away -= len;
            progress.buffers[buffer].parts.insert(part.offset(), (part, extent));
            drop(progress);
            self.tell_to(&mut **watch, Event::OnDevice { buffer, offset, len });
            if let Some(extent) = complete {
                self.tell_to(&mut **watch, Event::Complete { extent });
            }
        }
        any
    }

    /// Waits for the device, then rejoins everything, or says what failed.
    pub fn finish(mut self, clocks: &mut Clocks) -> Result<Done, FillError> {
        while self.outlet.is_some() && !self.stopped() && self.progress().away > 0 {
            self.drive(NAP);
        }
        if let Some(outlet) = self.outlet.take() {
            outlet.quiesce();
            clocks.add(outlet.into_clocks());
        }
        drop(self.memory);
        let progress = self.progress.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, error)) = progress.failed {
            return Err(error);
        }
        let mut buffers = Vec::new();
        for (buffer, arrived) in progress.buffers.into_iter().enumerate() {
            let parts = arrived.parts.into_values().map(|(part, _)| Some(part));
            let whole = parts.reduce(|a, b| a?.join(b?).ok()).flatten();
            // Every gather was taken, and every piece of it has arrived.
            let Some(buf) = whole.and_then(|part| part.into_whole().ok()) else {
                let reason = format!("buffer {buffer} did not come back whole");
                return Err(FillError::Channel { source_index: 0, reason });
            };
            let checksum = arrived.hash.map(|hash| hash.finish());
            buffers.push(FilledBuf { buf, len: arrived.len, checksum });
        }
        Ok(Done { buffers, first_read: progress.first_read, recycled: self.fresh.contains(&false) })
    }
}

impl Progress {
    /// Counts bytes of an extent as there; true when they were the last.
    fn have(&mut self, extent: usize, len: u64) -> bool {
        self.missing[extent] -= len;
        self.missing[extent] == 0
    }
}

/// Less than this is not worth asking the kernel about.
const WORTH_ASKING: usize = 32 << 20;

/// Makes sure that there is memory for what was reserved: where the kernel overcommits, a reservation promises nothing,
/// and a cgroup that runs full has somebody killed. Recycled memory is there, and so are huge pages once reserved.
fn enough(reserved: &[Reserved]) -> Result<(), FillError> {
    let promised =
        |r: &Reserved| matches!(r.backing().kind, PageKind::Hugetlb2M | PageKind::Hugetlb1G) || !r.is_fresh();
    let wanted = reserved.iter().filter(|r| !promised(r)).fold(0usize, |sum, r| sum.saturating_add(r.len()));
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
