//! A pipe or socket, read to an end that nobody knows beforehand.

use std::collections::VecDeque;
use std::fs::File;
use std::hash::Hasher;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::fill::{FillError, FillReport, FilledBuf, broken};
use dmalane_addr::FileOffset;
use dmalane_dma::{BufferSlice, CopyHint, Heap, Reserved};
use dmalane_file::{How, Moved, StreamQueue};
use dmalane_queue::{OpError, Operation, RunError, StopReason, run};
use twox_hash::XxHash3_64;

use super::method::{AllocRead, ReadMethod};
use super::options::ReadOptions;
use crate::error::Error;

/// Bytes of an intermediate buffer: few, since the last one is used in part.
const CHUNK: usize = 4 << 20;

/// Reads what comes into chunks, and when it has ended, into one buffer as large as it was; chunks are freed as they
/// are copied.
pub(super) fn to_end(
    heap: &dyn Heap,
    (path, file): (PathBuf, File),
    skip: u64,
    options: &ReadOptions,
) -> Result<AllocRead, Error> {
    let start = Instant::now();
    let memory = |source| Error::Fill(FillError::Memory { buffer: 0, source });
    let deadline = options.fill.time_limit.and_then(|limit| start.checked_add(limit));
    let late = |done: usize| Error::Fill(FillError::Deadline { done: done as u64, of: None });
    let mut queue = StreamQueue::new(file, 1);
    let (mut chunks, mut len) = (VecDeque::new(), 0);
    loop {
        let at = skip + len as u64;
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        // A source that never makes the queue wait (/dev/zero) never makes it time out.
        if left.is_zero() {
            return Err(late(len));
        }
        let chunk = heap.reserve(CHUNK).and_then(Reserved::populate).map_err(memory)?.into_slice();
        let failed = |source| Error::Read { path: path.clone(), at: FileOffset::new(at), tensor: None, source };
        let (operation, n, ended) = match run(&mut queue, Operation::read(chunk, FileOffset::new(at)), left) {
            Ok(operation) => (operation, CHUNK, false),
            Err(RunError { operation: Some(operation), error: OpError::EndOfFile { at: end, .. } }) => {
                let n = usize::try_from(end.bits().saturating_sub(at)).unwrap_or(CHUNK).min(CHUNK);
                (operation, n, true)
            }
            Err(RunError { error: OpError::Stopped(StopReason::Timeout(_)), .. }) => return Err(late(len)),
            Err(RunError { error, .. }) => return Err(failed(error)),
        };
        let slice = operation.into_slice().ok_or_else(|| failed(broken("a buffer is lost")))?;
        len += n;
        chunks.push_back((slice, n));
        if let Some(limit) = options.limit.filter(|limit| len as u64 > *limit) {
            return Err(Error::Limit { wanted: len as u64, used: 0, limit });
        }
        if let Some(room) = dmalane_dma::room().filter(|room| room.bytes < CHUNK as u64 * 2) {
            let (wanted, left, limited_by) = (len as u64, room.bytes, room.limited_by);
            return Err(Error::Fill(FillError::NoRoom { what: "the buffers", wanted, left, limited_by }));
        }
        if ended {
            break;
        }
    }
    let mut hash = options.fill.checksum.then(|| XxHash3_64::with_seed(0));
    let mut reserved = heap.reserve(len.max(1)).map_err(memory)?;
    let (fresh, backing) = (reserved.is_fresh(), reserved.backing().clone());
    let mut whole: Option<BufferSlice> = None;
    while let Some(absent) = reserved.next(CHUNK) {
        let to = absent.populate().map_err(memory)?;
        let from = chunks.pop_front();
        let n = from.as_ref().map_or(0, |(_, n)| *n).min(to.len());
        if let Some(view) = from.as_ref().and_then(|(slice, _)| slice.as_volatile_slice().sub(0, n)) {
            to.as_volatile_slice().copy_from(view, CopyHint::Keep);
            if let Some(hash) = &mut hash {
                view.for_each_block(|block| hash.write(block));
            }
        }
        if !fresh && let Some(rest) = to.as_volatile_slice().sub(n, to.len() - n) {
            rest.fill(0);
        }
        whole = match whole {
            None => Some(to),
            Some(front) => front.join(to).ok(),
        };
    }
    let filled = whole.and_then(|slice| slice.into_whole().ok());
    let buffer = filled.and_then(|buf| FilledBuf::new(buf, len, hash.map(|h| h.finish())));
    let buffer = buffer.ok_or_else(|| memory(dmalane_dma::Error::BadLength(len)))?;
    let report = FillReport {
        bytes: len as u64,
        wall: start.elapsed(),
        workers: 1,
        backing: Some(backing),
        recycled: !fresh,
        ..FillReport::default()
    };
    let method = ReadMethod {
        how: How::plain(),
        reason: "a pipe, socket or character device: plain reads to its end, then one copy".to_owned(),
        moved: Moved { direct: 0, buffered: queue.position() },
        cached: None,
    };
    Ok(AllocRead { buffer, method, report })
}
