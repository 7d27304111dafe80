//! An open file in, a filled buffer out: read while the buffer is still being allocated.

mod choose;
mod mapped;
mod short;
mod source;
mod stream;

use std::fs::File;
use std::ops::{Bound, ControlFlow, RangeBounds};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::Heap;
use dmalane_file::{How, Mode, Moved, Residency};
use dmalane_load::fill::{
    Extent, FillError, FillOptions, FillReport, Filled, FilledBuf, Job, Sink, Stays, Watch, fill,
};
use thiserror::Error;

use choose::{Choice, choose};
pub use mapped::{MappedRead, read_mapped, read_to_device};
use source::{Source, size};

/// The order of allocating and reading, to compare by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Scheme {
    /// Reads are in flight into the memory that is there while the next of it is being allocated.
    #[default]
    Overlap,
    /// Allocate all of it, then read: T = T(allocation) + T(I/O).
    Sequential,
    /// Allocate all of it, then one `pread` after the other.
    Plain,
}

/// How to allocate and read. The default is good for files of any size.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// Past the page cache or through it; [`Mode::Auto`] chooses for each file and says why.
    pub mode: Mode,
    /// Which order.
    pub scheme: Scheme,
    /// Bytes allocated together before reading into them starts.
    pub gather: u64,
    /// Reads in flight, where there is a ring.
    pub depth: usize,
    /// Bytes per read.
    pub block: usize,
    /// Lanes that allocate and read, each a thread; by default one for direct reads, which the disk does, and as many
    /// as there are processors, 4 at most, for copies out of the page cache.
    pub threads: Option<usize>,
    /// Hash each buffer (XXH3-64) while its bytes are in the processor's cache.
    pub checksum: bool,
    /// Give up after this time.
    pub timeout: Option<Duration>,
    /// Refuse what needs more bytes of memory than this.
    pub limit: Option<u64>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            scheme: Scheme::Overlap,
            gather: 2 << 20,
            depth: 16,
            block: 2 << 20,
            threads: None,
            checksum: false,
            timeout: None,
            limit: None,
        }
    }
}

/// A file to read from.
#[derive(Debug)]
pub struct ReadSource {
    /// The file, open for reading: a regular file or a block device.
    pub file: File,
    /// What to call it in messages.
    pub path: PathBuf,
}

impl ReadSource {
    /// Opens a file by name.
    ///
    /// # Errors
    /// [`ReadError::Open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        let path = path.as_ref().to_owned();
        match File::open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(source) => Err(ReadError::Open { path, source }),
        }
    }

    /// Bytes in it now.
    ///
    /// # Errors
    /// [`ReadError::Open`] when the kernel does not say; pipes and sockets have no size.
    pub fn size(&self) -> Result<u64, ReadError> {
        size(&self.file).map_err(|source| ReadError::Open { path: self.path.clone(), source })
    }
}

/// How a file was read.
#[derive(Clone, Debug)]
pub struct ReadMethod {
    /// How the kernel was asked, and why not better.
    pub how: How,
    /// Why it was read directly or through the page cache.
    pub reason: String,
    /// Bytes by either way.
    pub moved: Moved,
    /// What was cached before, where that was asked for.
    pub cached: Option<Residency>,
}

impl std::fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.how, self.reason)
    }
}

/// A buffer with what a file holds.
#[derive(Debug)]
pub struct AllocRead {
    /// The buffer.
    pub buffer: FilledBuf,
    /// How the file was read.
    pub way: ReadMethod,
    /// How long what took.
    pub report: FillReport,
}

/// Why there is no filled buffer. Nothing is left in flight or allocated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be opened, or cannot be asked about.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file cannot be read in the way that was asked for.
    #[error(transparent)]
    Channel(#[from] dmalane_file::Error),
    /// The file is shorter than the range.
    #[error("{} ends at {size}, before the end of the range at {end}", path.display())]
    PastEnd {
        /// The file.
        path: PathBuf,
        /// Where the range ends.
        end: u64,
        /// Where the file ends.
        size: u64,
    },
    /// The buffers would be larger than [`ReadOptions::limit`].
    #[error("{wanted} bytes are more than the limit of {limit}")]
    Limit {
        /// Bytes of the buffers.
        wanted: u64,
        /// The limit.
        limit: u64,
    },
    /// The whole file was asked for, and it grew or shrank meanwhile.
    #[error("{} changed while it was read: it had {before} bytes and now has {now}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes before.
        before: u64,
        /// Bytes after.
        now: u64,
    },
    /// A read of this file failed.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// With the offset.
        error: dmalane_queue::OpError,
    },
    /// A gather could not be pinned or mapped for the device.
    #[error("buffer {buffer} from {offset} on: {source}")]
    Map {
        /// Which buffer.
        buffer: usize,
        /// Where in it the gather starts.
        offset: u64,
        /// What the bus said.
        source: dmalane_dma::Error,
    },
    /// Anything else that stopped the job.
    #[error(transparent)]
    Fill(FillError),
}

/// Every heap can do it.
pub trait AllocAndRead: Heap {
    /// Allocates a buffer and reads a range of an open file into it, at once: T(first gather) + max(T(rest of the
    /// allocation), T(I/O)). Pipes and sockets are read from where they are, by plain reads; of them `..` means all
    /// that comes.
    ///
    /// The flags of the open file stay as they are. Small files take a short path: no thread, no ring; a
    /// [`Pool`](dmalane_dma::Pool) gives them memory that is present already.
    ///
    /// ```
    /// use dmalane::dma::MemfdHeap;
    /// use dmalane::{AllocAndRead, ReadOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.bin");
    /// std::fs::write(&path, b"weights")?;
    /// let file = std::fs::File::open(&path)?;
    /// let read = MemfdHeap::new().alloc_and_read(&file, .., &ReadOptions::default())?;
    /// println!("{}; {}", read.way, read.report);
    /// let mut bytes = [0; 7];
    /// read.buffer.view().read(&mut bytes);
    /// assert_eq!(&bytes, b"weights");
    /// // The same pages for another process or driver:
    /// let memfd = read.buffer.shared().export().unwrap();
    /// # let _ = memfd;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ReadError`].
    fn alloc_and_read(
        &self,
        file: &File,
        range: impl RangeBounds<u64>,
        options: &ReadOptions,
    ) -> Result<AllocRead, ReadError>
    where
        Self: Sized,
    {
        one(self, file, (range.start_bound().cloned(), range.end_bound().cloned()), options)
    }
}

impl<H: Heap> AllocAndRead for H {}

fn one(
    heap: &dyn Heap,
    file: &File,
    range: (Bound<u64>, Bound<u64>),
    options: &ReadOptions,
) -> Result<AllocRead, ReadError> {
    let start = match range.0 {
        Bound::Included(n) => n,
        Bound::Excluded(n) => n.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.1 {
        Bound::Included(n) => Some(n.saturating_add(1)),
        Bound::Excluded(n) => Some(n),
        Bound::Unbounded => None,
    };
    if let Some(read) = short::try_short(heap, file, start, end, options)? {
        return Ok(read);
    }
    let path = source::name(file);
    let open = |source| ReadError::Open { path: path.clone(), source };
    let kind = file.metadata().map_err(open)?.file_type();
    let source = ReadSource { file: file.try_clone().map_err(open)?, path };
    if !kind.is_file() && !kind.is_block_device() && !kind.is_dir() && end.is_none() {
        return stream::to_end(heap, source, start, options);
    }
    let len = match end {
        Some(end) => end.saturating_sub(start),
        None => source.size()?.saturating_sub(start),
    };
    let extent = Extent { source: 0, at: FileOffset::new(start), len, buffer: 0, to: 0 };
    let job = Job { buffers: vec![len], extents: vec![extent] };
    let whole = end.is_none();
    let sources = [source];
    let (filled, mut ways) =
        all(heap.into(), Sink::Memory, &sources, &job, options, &mut |_| ControlFlow::Continue(()), whole)?;
    let Filled { mut buffers, report, .. } = filled;
    match (buffers.pop(), ways.pop()) {
        (Some(buffer), Some(way)) => Ok(AllocRead { buffer, way, report }),
        _ => unreachable!("one buffer of one source was asked for"),
    }
}

/// Reads many files, or pieces of them, into many buffers, as `job` says; its sources are `sources`. Tells how each was
/// read.
///
/// # Errors
/// [`ReadError`]. A source that is read to its present end, by an extent, and has changed its size meanwhile is
/// [`ReadError::Changed`].
pub fn read_all(
    heap: &dyn Heap,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<(Filled, Vec<ReadMethod>), ReadError> {
    all(heap.into(), Sink::Memory, sources, job, options, watch, true)
}

fn all(
    memory: Stays<'_>,
    sink: Sink<'_>,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
    unchanged: bool,
) -> Result<(Filled, Vec<ReadMethod>), ReadError> {
    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    if let Some(limit) = options.limit.filter(|limit| wanted > *limit) {
        return Err(ReadError::Limit { wanted, limit });
    }
    let choices = sources
        .iter()
        .enumerate()
        .map(|(i, source)| choose(source, i, job, options))
        .collect::<Result<Vec<Choice>, ReadError>>()?;
    let count = options.threads.unwrap_or_else(|| choices.iter().map(|c| c.lanes).max().unwrap_or(1));
    let mut lanes = Vec::new();
    for _ in 0..count.clamp(1, 64) {
        let open = |(source, choice): (&ReadSource, &Choice)| Source::open(source, choice);
        lanes.push(sources.iter().zip(&choices).map(open).collect::<Result<Vec<Source>, ReadError>>()?);
    }
    let fill_options = FillOptions {
        chunk: match options.scheme {
            Scheme::Overlap => options.gather,
            Scheme::Sequential | Scheme::Plain => u64::MAX,
        },
        block: options.block as u64,
        checksum: options.checksum,
        deadline: options.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
        ..FillOptions::default()
    };
    let filled = fill(memory, sink, job, &mut lanes, &fill_options, watch).map_err(|e| named(e, sources))?;
    for (source, choice) in sources.iter().zip(&choices).filter(|_| unchanged) {
        if let Some(before) = choice.size.filter(|size| choice.end == *size) {
            let now = source.size()?;
            if now != before {
                return Err(ReadError::Changed { path: source.path.clone(), before, now });
            }
        }
    }
    let mut ways = Vec::new();
    for (i, choice) in choices.into_iter().enumerate() {
        let mut channels = lanes.iter().map(|lane| &lane[i]);
        let how =
            channels.next().map(Source::how).unwrap_or_else(|| How { direct: false, uring: false, reasons: vec![] });
        let moved = lanes.iter().map(|lane| lane[i].moved()).fold(Moved::default(), |sum, m| Moved {
            direct: sum.direct + m.direct,
            buffered: sum.buffered + m.buffered,
        });
        ways.push(ReadMethod { how, reason: choice.reason, moved, cached: choice.cached });
    }
    Ok((filled, ways))
}

/// An error of the pipeline with the name of the file that it is about.
fn named(error: FillError, sources: &[ReadSource]) -> ReadError {
    match error {
        FillError::Read { source_index, error, at } => match sources.get(source_index) {
            Some(source) => ReadError::Read { path: source.path.clone(), error },
            None => ReadError::Fill(FillError::Read { source_index, error, at }),
        },
        FillError::Map { buffer, offset, source } => ReadError::Map { buffer, offset, source },
        other => ReadError::Fill(other),
    }
}
