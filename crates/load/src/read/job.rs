//! A read: the method for each file, its workers, and the engine.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dmalane_dma::{FileMapping, Heap, PageKind};
use dmalane_file::{Fallback, FileQueue, How, Mode, Moved, SharedReads};

use super::cached::FromCache;
use super::method::{ReadFiles, ReadMethod};
use super::options::ReadOptions;
use super::plan::{Plan, Span, plan};
use crate::choose::workers;
use crate::device::OpenDevice;
use crate::engine::describe;
use crate::error::Error;
use crate::fill::{BufferMemory, FillCached, FillError, Job, Sink, Targets, Watch, Workers, run};
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;

/// Files whose cached bytes are copied without their queues, at most: the others' are copied by them.
const MAPPED: usize = 16;

/// Where the bytes go.
pub(crate) enum ReadTo<'a> {
    /// Into buffers of this heap.
    Heap(&'a dyn Heap),
    /// Those that have targets onto a device, through its staging buffers of at most this length.
    Device(&'a mut OpenDevice, &'a dyn Targets, u64),
}

/// Reads as `job` says. With `unchanged`, files that are read to their end may not change their size meanwhile.
pub(crate) fn read(
    to: ReadTo<'_>,
    sources: &[OpenFile],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
    unchanged: bool,
) -> Result<ReadFiles, Error> {
    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    if let Some(limit) = options.limit.filter(|limit| wanted > *limit) {
        return Err(Error::Limit { tensor: None, wanted, used: 0, limit });
    }
    let capabilities = match &to {
        ReadTo::Heap(heap) => Some(heap.capabilities()),
        ReadTo::Device(..) => None,
    };
    let writable = capabilities.is_some_and(|of_heap| of_heap.shareable);
    // As `Reserved::is_better_copied_to` says when there is a reservation.
    let copied_to = capabilities.is_some_and(|of_heap| of_heap.shareable && of_heap.best_pages == PageKind::Base);
    let spans = sources.iter().zip(Span::of(job, sources.len())).collect();
    let alone = sources.len() == 1;
    let plans = in_parallel(spans, |(source, span)| plan(source, span, options, copied_to, alone))?;
    let copied = plans.iter().fold(0u64, |sum, plan| sum.saturating_add(plan.copied));
    let count = options.threads.unwrap_or(workers(copied));
    let mut workers = Vec::new();
    for _ in 0..count.clamp(1, 64) {
        let reads = SharedReads::default();
        let open = |(source, plan): (&OpenFile, &Plan)| -> Result<FileQueue, Error> {
            let queue = FileQueue::of_handle(source.handle.clone(), plan.options)?.sharing(&reads);
            Ok(if plan.options.mode == Mode::Auto { queue.from_cache_where_cached() } else { queue })
        };
        workers.push(in_parallel(sources.iter().zip(&plans).collect(), open)?);
    }
    // Memory that is shareable is made with its contents. Of a file that is cached in part, each cached chunk is read
    // as soon as it is populated; all of a cached file is, by its queue.
    let from_cache_first = options.mode != Mode::Direct && capabilities.is_some();
    // Each of them takes two descriptors.
    let mut left = MAPPED;
    let map = |(source, plan): (&OpenFile, &Plan)| {
        let some = left > 0 && from_cache_first && plan.cached.is_some_and(|cached| cached.cached > 0);
        let some = some && (writable || plan.options.mode == Mode::Auto);
        let file = some.then(|| source.file().ok()).flatten()?;
        let mapping = FileMapping::new(file.as_fd(), plan.first..plan.end).ok()?;
        left -= 1;
        Some((file, mapping))
    };
    let from_cache = FromCache {
        files: sources.iter().zip(&plans).map(map).collect(),
        copied: sources.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let direct = plans.iter().any(|plan| plan.options.mode != Mode::Buffered);
    let mut queues: Vec<Vec<_>> = workers.iter_mut().map(|of| of.iter_mut().collect()).collect();
    let late = sources.iter().all(OpenFile::is_late);
    let queues = Workers { queues: &mut queues, all: options.threads.is_some(), late };
    let filled = match to {
        ReadTo::Heap(heap) => {
            let cached = from_cache_first.then_some(&from_cache as &dyn FillCached);
            let (start, sink) = (Instant::now(), Sink::Memory(BufferMemory { heap, cached, direct }));
            run(start, sink, job, queues, &options.fill, watch).map(|done| done.filled(start, job))
        }
        ReadTo::Device(device, targets, limit) => {
            device.fill_staged((targets, limit), sources, job, queues, &options.fill, watch)
        }
    };
    let filled = filled.map_err(|error| match error {
        FillError::Read { .. } => describe(error, |i| (sources[i].path.clone(), None)),
        // A buffer is no file.
        other => Error::Fill(other),
    })?;
    for (source, plan) in sources.iter().zip(&plans).filter(|_| unchanged) {
        plan.size.filter(|size| plan.end == *size).map_or(Ok(()), |before| source.check_size(before))?;
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
        let mut how = most.map_or_else(How::default, |queue| queue.how().clone());
        if copied > 0 && writable {
            how.reasons.push(Fallback::ToMemfd(copied));
        }
        ReadMethod { how, reason: plan.reason, moved, cached: plan.cached }
    };
    Ok(ReadFiles { filled, methods: plans.into_iter().enumerate().map(method).collect() })
}
