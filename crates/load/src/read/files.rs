//! Whole jobs over files, by the engine.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use dmalane_addr::Access;
use dmalane_dma::{FileMapping, Heap, PageKind, Registrar};
use dmalane_file::{Fallback, How, Mode, Moved};
use dmalane_queue::DeviceAddr;

use super::cached::FromCache;
use super::plan::{Plan, plan};
use super::source::Source;
use super::{ReadError, ReadFiles, ReadMethod, ReadOptions, Scheme};
use crate::device::OpenDevice;
use crate::fill::{BufferMemory, Event, FillCached, FillError, FillOptions, Job, Sink, Watch, fill};
use crate::open_file::OpenFile;

/// Reads files into buffers of a heap, one buffer per file by default.
///
/// Reading starts as soon as the first chunk is allocated: T(first chunk) + max(T(rest of the allocation), T(I/O)).
///
/// ```
/// use dmalane_device::RamDevice;
/// use dmalane_dma::AnonHeap;
/// use dmalane_load::{OpenDevice, Read};
/// use dmalane_queue::DeviceAddr;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bin");
/// std::fs::write(&path, vec![7; 5_000_000])?;
/// let read = Read::files([&path]).checksum(true).into_memory(&AnonHeap::new())?;
/// println!("{:x?}; {}", read.filled.buffers[0].checksum(), read.filled.report);
///
/// // Into memory, and from there to a device:
/// let mut device = OpenDevice::new(Box::new(RamDevice::new(8 << 20)?), Default::default())?;
/// let places = [DeviceAddr::Card(device.memory_mut().reserve(5_000_000)?.first())];
/// let read = Read::files([&path]).copy_to_device(&mut device, &places).into_memory(&AnonHeap::new())?;
/// assert!(read.filled.mappings[0].len() >= 3, "registered chunk by chunk");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Read<'a> {
    sources: Result<Vec<OpenFile>, ReadError>,
    job: Option<Job>,
    options: ReadOptions,
    register: Option<(&'a dyn Registrar, Access)>,
    device: Option<Onto<'a>>,
    watch: Box<Watch<'a>>,
}

impl<'a> Read<'a> {
    /// Files by name. They are opened here; errors are returned by [`Read::into_memory`].
    pub fn files<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self { sources: paths.into_iter().map(|path| Ok(OpenFile::open(path)?)).collect(), ..Self::sources(Vec::new()) }
    }

    /// Files that are open already.
    pub fn sources(sources: Vec<OpenFile>) -> Self {
        Self {
            sources: Ok(sources),
            job: None,
            options: ReadOptions::default(),
            register: None,
            device: None,
            watch: Box::new(|_| ControlFlow::Continue(())),
        }
    }

    /// Sets all options.
    pub fn options(mut self, options: ReadOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the bytes of a chunk, [`FillOptions::chunk`].
    pub fn chunk(mut self, bytes: u64) -> Self {
        self.options.fill.chunk = bytes;
        self
    }

    /// Sets whether buffers are hashed, [`FillOptions::checksum`].
    pub fn checksum(mut self, checksum: bool) -> Self {
        self.options.fill.checksum = checksum;
        self
    }

    /// Reads these extents into these buffers, instead of each file as a whole into a buffer of its own. Sources of the
    /// job are files in the order given.
    pub fn job(mut self, job: Job) -> Self {
        self.job = Some(job);
        self
    }

    /// Calls `watch` with every event; it may stop the job.
    pub fn watch(mut self, watch: impl FnMut(Event) -> ControlFlow<()> + Send + 'a) -> Self {
        self.watch = Box::new(watch);
        self
    }

    /// Pins and maps every chunk as soon as its memory is present: one call of `registrar` for each step, while reads
    /// into the chunks before it are in flight.
    ///
    /// The device sees a chunk from the moment of [`Event::Allocated`], and may
    /// use the bytes of an extent from the moment that it is complete. With an access that lets the device write,
    /// checksums are of what it has left there.
    pub fn mapped(mut self, registrar: &'a dyn Registrar, access: Access) -> Self {
        self.register = Some((registrar, access));
        self
    }

    /// Copies the buffers to a device as well, the first byte of each to the place with its number: the transfer of a
    /// fragment begins as soon as its bytes have arrived, or were hashed with checksums on, while later bytes are being
    /// read or allocated. Bytes that no extent names go there as zeroes. Every chunk is mapped for the device, which
    /// may only read it; this replaces [`Read::mapped`].
    ///
    /// The device's queue has nothing in flight. An extent is complete when the device has all of it.
    pub fn copy_to_device(mut self, device: &'a mut OpenDevice, places: &'a [DeviceAddr]) -> Self {
        self.device = Some((device, places));
        self
    }

    /// Reads into buffers of `heap`, and returns when everything has arrived, on the device too.
    ///
    /// # Errors
    /// [`ReadError`]. [`FillError::Map`] where the registrar refuses; [`FillError::Transfer`] or
    /// [`FillError::Refused`] where the device fails, or ends nothing for half a minute: then its queue is stopped.
    /// Reads and transfers in flight have ended by then, and nothing is left mapped or pinned; a transfer that the
    /// device does not let go of stays in flight, and keeps its memory and its mapping.
    pub fn into_memory(self, heap: &dyn Heap) -> Result<ReadFiles, ReadError> {
        let sources = self.sources?;
        let job = match self.job {
            Some(job) => job,
            None => Job::whole(&sources.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>()?),
        };
        let memory = BufferMemory { register: self.register, ..BufferMemory::of(heap) };
        let Self { mut watch, options, .. } = self;
        read(memory, self.device, &sources, &job, &options, &mut *watch, true)
    }
}

/// A device, and the place on it for each buffer.
type Onto<'a> = (&'a mut OpenDevice, &'a [DeviceAddr]);

/// Reads as `job` says. With `unchanged`, files that are read to their end may not change their size meanwhile.
pub(super) fn read<'a>(
    memory: BufferMemory<'_>,
    onto: Option<Onto<'_>>,
    sources: &'a [OpenFile],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
    unchanged: bool,
) -> Result<ReadFiles, ReadError> {
    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    if let Some(limit) = options.limit.filter(|limit| wanted > *limit) {
        return Err(ReadError::Limit { wanted, limit });
    }
    let capabilities = memory.heap.capabilities();
    let writable = capabilities.shareable;
    // As `Reserved::is_better_copied_to` says when there is a reservation.
    let copied_to = writable && capabilities.best_pages == PageKind::Base;
    let plans = sources.iter().enumerate().map(|(i, source)| plan(source, i, job, options, copied_to));
    let plans = plans.collect::<Result<Vec<Plan>, ReadError>>()?;
    let count = options.threads.unwrap_or_else(|| plans.iter().map(|plan| plan.workers).max().unwrap_or(1));
    let mut workers = Vec::new();
    for _ in 0..count.clamp(1, 64) {
        let open = |(source, plan): (&OpenFile, &Plan)| Source::open(source, plan);
        workers.push(sources.iter().zip(&plans).map(open).collect::<Result<Vec<Source>, ReadError>>()?);
    }
    let one_chunk;
    let fill_options = match options.scheme {
        Scheme::Overlap => &options.fill,
        Scheme::Sequential | Scheme::Plain => {
            one_chunk = FillOptions { chunk: u64::MAX, ..options.fill.clone() };
            &one_chunk
        }
    };
    // Memory that is shareable is made with its contents. Of a file that is cached in part, each cached chunk is read
    // as soon as it is populated; all of a cached file is, by its queue.
    let from_cache_first = options.scheme == Scheme::Overlap && options.mode != Mode::Direct;
    let map = |(source, plan): (&'a OpenFile, &Plan)| {
        let some = from_cache_first && plan.cached.is_some_and(|cached| cached.cached > 0);
        let some = some && (writable || plan.options.mode == Mode::Auto);
        let mapping = some.then(|| FileMapping::new(source.file.as_fd(), plan.first..plan.end).ok()).flatten();
        mapping.map(|mapping| (&source.file, mapping))
    };
    let from_cache = FromCache {
        files: sources.iter().zip(&plans).map(map).collect(),
        copied: sources.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let direct = plans.iter().any(|plan| plan.options.mode != Mode::Buffered);
    let memory = BufferMemory { cached: from_cache_first.then_some(&from_cache as &dyn FillCached), direct, ..memory };
    let mut queues: Vec<Vec<_>> = workers.iter_mut().map(|of| of.iter_mut().map(Source::queue).collect()).collect();
    let filled = match onto {
        None => fill(memory, Sink::Memory, job, &mut queues, fill_options, watch),
        Some((device, places)) => device.fill(memory, places, job, &mut queues, fill_options, watch),
    };
    let filled = filled.map_err(|e| named(e, sources))?;
    for (source, plan) in sources.iter().zip(&plans).filter(|_| unchanged) {
        if let Some(before) = plan.size.filter(|size| plan.end == *size) {
            let now = source.size()?;
            if now != before {
                return Err(ReadError::Changed { path: source.path.clone(), before, now });
            }
        }
    }
    let method = |(i, plan): (usize, Plan)| {
        let copied = from_cache.copied[i].load(Ordering::Relaxed);
        let mut moved = Moved { direct: 0, buffered: copied };
        // The worker that moved most; all are alike unless something was refused to one of them.
        let all = |m: Moved| m.direct + m.buffered;
        let most = workers.iter().max_by_key(|of| all(of[i].moved())).map(|of| &of[i]);
        for queue in workers.iter().map(|of| of[i].moved()) {
            (moved.direct, moved.buffered) = (moved.direct + queue.direct, moved.buffered + queue.buffered);
        }
        let mut how = most.map_or_else(How::plain, Source::how);
        if copied > 0 && writable {
            how.reasons.push(Fallback::ToMemfd(copied));
        }
        ReadMethod { how, reason: plan.reason, moved, cached: plan.cached }
    };
    Ok(ReadFiles { filled, methods: plans.into_iter().enumerate().map(method).collect() })
}

/// An error of the engine with the name of the file that it is about.
fn named(error: FillError, sources: &[OpenFile]) -> ReadError {
    match error {
        FillError::Read { source_index, error, .. } if source_index < sources.len() => {
            ReadError::Read { path: sources[source_index].path.clone(), error }
        }
        other => ReadError::Fill(other),
    }
}
