//! The method for each file, with its reason: direct or buffered, in a ring or not, by how many workers.

use dmalane_file::{FileOptions, Io, Mode, Residency, residency};
use dmalane_load::fill::Job;

use super::{ReadError, ReadOptions, ReadSource, Scheme, is_stream, size};

/// At most this many bytes take the fast path: a ring costs as much as copying half a megabyte, a thread as much as a
/// megabyte.
pub(super) const SHORT: u64 = 1 << 20;
/// Less than this the kernel fetches in one go, through the page cache too: there is nothing to be gained by going past
/// it.
pub(super) const DIRECT_FROM: u64 = 64 << 10;
/// From this share of cached bytes on, copying what is cached and reading the rest through the cache is faster than
/// reading everything from the disk.
pub(crate) const MOSTLY: f64 = 7.0 / 8.0;
/// Below this, starting a thread costs more than it saves.
const WORKERS_FROM: u64 = 32 << 20;
/// More workers than this do not help: they share the memory.
const WORKERS: usize = 4;

/// Workers that copy so many bytes out of the page cache.
pub(crate) fn workers(copied: u64) -> usize {
    match copied >= WORKERS_FROM {
        true => std::thread::available_parallelism().map_or(1, |n| n.get()).min(WORKERS),
        false => 1,
    }
}

/// The method for a file.
pub(super) struct Choice {
    pub options: FileOptions,
    /// Pipes and sockets have no offsets.
    pub stream: bool,
    pub workers: usize,
    pub reason: String,
    pub cached: Option<Residency>,
    /// Bytes of the file now, where it has a size.
    pub size: Option<u64>,
    /// Where the first of the job's extents of it begins; more than `end` if there is none.
    pub first: u64,
    /// Where the last one ends.
    pub end: u64,
}

/// Chooses for a source of a job.
pub(super) fn choose(source: &ReadSource, index: usize, job: &Job, options: &ReadOptions) -> Result<Choice, ReadError> {
    let open = |e| ReadError::Open { path: source.path.clone(), source: e };
    let kind = source.file.metadata().map_err(open)?.file_type();
    let extents = job.extents.iter().filter(|e| e.source == index && e.len > 0);
    let (mut first, mut end, mut bytes) = (u64::MAX, 0, 0u64);
    for e in extents {
        (first, end) = (first.min(e.at.bits()), end.max(e.at.bits().saturating_add(e.len)));
        bytes = bytes.saturating_add(e.len);
    }
    let of_queue = |mode, io, depth| FileOptions { mode, io, depth, block: options.block };
    if is_stream(&kind) {
        let reason = "a pipe, socket or character device: plain reads in order".to_owned();
        let options = of_queue(Mode::Buffered, Io::Pread, options.depth);
        return Ok(Choice { options, stream: true, workers: 1, reason, cached: None, size: None, first, end });
    }
    let size = size(&source.file).map_err(open)?;
    if end > size && kind.is_file() {
        return Err(ReadError::PastEnd { path: source.path.clone(), end, size });
    }
    let short = bytes <= SHORT || options.scheme == Scheme::Plain;
    let cached = match options.mode {
        // The share that is cached decides; of no bytes there is none. Cached pages are copied to memfds.
        Mode::Auto | Mode::Buffered if bytes > 0 => residency(&source.file, first, end - first).ok(),
        _ => None,
    };
    let (mode, reason) = match (options.mode, cached) {
        (Mode::Direct, _) => (Mode::Direct, "direct I/O was asked for".to_owned()),
        (Mode::Buffered, _) => (Mode::Buffered, "buffered I/O was asked for".to_owned()),
        (Mode::Auto, Some(cached)) if cached.share() >= MOSTLY => {
            (Mode::Buffered, format!("{cached}: copied from there"))
        }
        (Mode::Auto, _) if bytes < DIRECT_FROM => {
            (Mode::Buffered, format!("{bytes} bytes are too few for direct I/O to pay"))
        }
        (Mode::Auto, Some(cached)) if cached.cached > 0 => {
            (Mode::Auto, format!("{cached}: copied from there, the rest read past it"))
        }
        (Mode::Auto, Some(cached)) => (Mode::Auto, format!("{cached}: read past it")),
        (Mode::Auto, None) => (Mode::Auto, "the kernel does not say what is cached: read past it".to_owned()),
    };
    let buffered = mode == Mode::Buffered;
    let io = if short || buffered { Io::Pread } else { Io::Auto };
    let depth = if io == Io::Pread { 1 } else { options.depth };
    // The cached bytes of the span, of which the job may want less.
    let copied = if buffered { bytes } else { cached.map_or(0, |cached| cached.cached.min(bytes)) };
    let workers = if short { 1 } else { workers(copied) };
    let reason = if short && options.scheme != Scheme::Plain { format!("{reason}; fast path") } else { reason };
    let size = kind.is_file().then_some(size);
    Ok(Choice { options: of_queue(mode, io, depth), stream: false, workers, reason, cached, size, first, end })
}
