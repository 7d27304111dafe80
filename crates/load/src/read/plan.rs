//! The method for each file, with its reason: direct or buffered, in a ring or not, by how many workers.

use crate::fill::Job;

use dmalane_file::{Fallback, FileOptions, Io, Mode, Residency, residency};

use super::options::ReadOptions;
use crate::choose::Choice;
use crate::error::Error;
use crate::open_file::OpenFile;

/// At most this many bytes take the fast path: a ring costs as much as copying half a megabyte, a thread as much as a
/// megabyte.
pub(super) const SHORT: u64 = 1 << 20;

/// The method for a file.
pub(super) struct Plan {
    pub options: FileOptions,
    /// Bytes that a processor copies.
    pub copied: u64,
    pub reason: String,
    pub cached: Option<Residency>,
    /// Bytes of the file now, where it has a size.
    pub size: Option<u64>,
    /// Where the first of the job's extents of it begins; more than `end` if there is none.
    pub first: u64,
    /// Where the last one ends.
    pub end: u64,
}

/// What a job reads of a source.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// Where the first of its extents begins; more than `end` if there is none.
    first: u64,
    /// Where the last one ends.
    end: u64,
    bytes: u64,
}

impl Span {
    /// Those of the sources of a job.
    pub fn of(job: &Job, sources: usize) -> Vec<Self> {
        let mut spans = vec![Self { first: u64::MAX, end: 0, bytes: 0 }; sources];
        for e in job.extents.iter().filter(|e| e.len > 0) {
            // Another source than there is refuses the job later.
            let Some(span) = spans.get_mut(e.source) else { continue };
            span.first = span.first.min(e.at.bits());
            span.end = span.end.max(e.at.bits().saturating_add(e.len));
            span.bytes = span.bytes.saturating_add(e.len);
        }
        spans
    }
}

/// Plans for a source of a job, which may be its only one. `copied_to` says that direct reads land elsewhere and are
/// copied to the buffers.
pub(super) fn plan(
    source: &OpenFile,
    Span { first, end, bytes }: Span,
    options: &ReadOptions,
    copied_to: bool,
    alone: bool,
) -> Result<Plan, Error> {
    let kind = source.handle.metadata().map_err(|e| source.error("open it", e))?.file_type();
    let block = usize::try_from(options.fill.block).unwrap_or(usize::MAX);
    let most = options.fill.depth.unwrap_or(FileOptions::default().depth);
    let of_queue = |mode, io, depth| FileOptions { mode, io, depth, block };
    let size = source.size()?;
    if end > size && kind.is_file() {
        return Err(Error::PastEnd { path: source.path.clone(), end, size });
    }
    let Choice { mode, fallback, mut cached } = Choice::new(&*source.file()?, options.mode, first..end, bytes);
    let few = matches!(fallback, Some(Fallback::Few(_)));
    let mut reason = match (options.mode, fallback, cached) {
        (Mode::Direct, ..) => "direct I/O was asked for".to_owned(),
        (Mode::Buffered, ..) => "buffered I/O was asked for".to_owned(),
        (Mode::Auto, Some(why), _) => why.to_string(),
        (Mode::Auto, None, Some(cached)) => format!("{cached}: read past it"),
        (Mode::Auto, None, None) => "the kernel does not say what is cached: read past it".to_owned(),
    };
    if options.mode == Mode::Buffered && bytes > 0 {
        // Cached pages are copied to memfds.
        cached = residency(&*source.file()?, first, end - first).ok();
    }
    // Of several files that are not cached, as many are read at a time as make it faster.
    let short = bytes <= SHORT && (alone || cached.is_some_and(|cached| cached.cached >= bytes));
    if short {
        reason += "; fast path";
    }
    let buffered = mode == Mode::Buffered;
    let io = if short || buffered && !few { Io::Pread } else { Io::Auto };
    let depth = if io == Io::Pread { 1 } else { most };
    // The cached bytes of the span, of which the job may want less.
    let copied = if buffered || copied_to { bytes } else { cached.map_or(0, |cached| cached.cached.min(bytes)) };
    let size = kind.is_file().then_some(size);
    Ok(Plan { options: of_queue(mode, io, depth), copied, reason, cached, size, first, end })
}
