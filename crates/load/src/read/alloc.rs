//! One range of an open file into one new buffer.

use std::fs::File;
use std::ops::{Bound, ControlFlow, RangeBounds};

use crate::fill::{Extent, Job};
use dmalane_addr::FileOffset;
use dmalane_dma::Heap;

use super::job::{ReadTo, read};
use super::method::{AllocRead, ReadFiles};
use super::options::ReadOptions;
use super::short;
use crate::error::Error;
use crate::open_file::{OpenFile, name};

/// Allocates a buffer and reads a range of an open file into it, at once: T(first chunk) + max(T(rest of the
/// allocation), T(I/O)).
///
/// The flags of the open file stay as they are. Small files take a fast path: no thread, no ring; a
/// [`Pool`](dmalane_dma::Pool) gives them memory that is present already.
///
/// ```
/// use dmalane_dma::MemfdHeap;
/// use dmalane_load::{ReadOptions, alloc_and_read};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bin");
/// # std::fs::write(&path, b"weights")?;
/// let file = std::fs::File::open(&path)?;
/// let read = alloc_and_read(&MemfdHeap::new(), &file, .., &ReadOptions::default())?;
/// println!("{}; {:?}", read.method, read.report.wall);
/// let mut bytes = [0; 7];
/// read.buffer.as_volatile_slice().read(&mut bytes);
/// let memfd = read.buffer.shared().export();    // the same pages for another process or driver
/// # assert!(&bytes == b"weights" && memfd.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error`].
pub fn alloc_and_read(
    heap: &dyn Heap,
    file: &File,
    range: impl RangeBounds<u64>,
    options: &ReadOptions,
) -> Result<AllocRead, Error> {
    let start = match range.start_bound() {
        Bound::Included(n) => *n,
        Bound::Excluded(n) => n.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(n) => Some(n.saturating_add(1)),
        Bound::Excluded(n) => Some(*n),
        Bound::Unbounded => None,
    };
    if let Some(read) = short::try_short(heap, file, start, end, options)? {
        return Ok(read);
    }
    let path = name(file);
    let open = |source| Error::File { path: path.clone(), what: "open it", source };
    let again = file.try_clone().map_err(open)?;
    let source = OpenFile::new(path, again);
    let len = match end {
        Some(end) => end.saturating_sub(start),
        None => source.size()?.saturating_sub(start),
    };
    let extent = Extent { source: 0, at: FileOffset::new(start), len, buffer: 0, to: 0 };
    let (job, whole) = (Job { buffers: vec![len], extents: vec![extent] }, end.is_none());
    let ReadFiles { mut filled, mut methods } =
        read(ReadTo::Heap(heap), &[source], &job, options, &mut |_| ControlFlow::Continue(()), whole)?;
    match (filled.buffers.pop(), methods.pop()) {
        (Some(buffer), Some(method)) => Ok(AllocRead { buffer, method, report: filled.report }),
        _ => unreachable!("one buffer of one source was asked for"),
    }
}
