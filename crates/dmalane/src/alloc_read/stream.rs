//! A pipe or socket, read to an end that nobody knows beforehand.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{BufferSlice, CopyHint, Error, Heap, SharedBuf};
use dmalane_file::{How, Moved, StreamQueue};
use dmalane_load::fill::{FillError, FillReport, FilledBuf};
use dmalane_queue::{Completion, OpError, Operation, Queue};
use twox_hash::XxHash3_64;

use super::{AllocRead, ReadError, ReadMethod, ReadOptions, ReadSource};

/// Bytes of a buffer on the way. Small ones, since the last is used in part.
const CHUNK: usize = 4 << 20;
const NAP: Duration = Duration::from_millis(50);

/// Reads what comes into chunks, and when it has ended, into one buffer as large as it was; chunks are freed as they
/// are copied.
pub(super) fn to_end(
    heap: &dyn Heap,
    source: ReadSource,
    skip: u64,
    options: &ReadOptions,
) -> Result<AllocRead, ReadError> {
    let start = Instant::now();
    let deadline = options.timeout.and_then(|timeout| start.checked_add(timeout));
    let mut channel = StreamQueue::new(source.file, 1);
    let (mut chunks, mut len) = (VecDeque::new(), 0);
    loop {
        let part = allocate(heap, CHUNK)?.into_part();
        let (part, n, ended) =
            next(&mut channel, part, skip + len as u64, deadline).map_err(|stopped| match stopped {
                Stopped::Late => ReadError::Fill(FillError::Deadline { done: len as u64, of: len as u64 }),
                Stopped::Failed(error) => ReadError::Read { path: source.path.clone(), error },
            })?;
        len += n;
        chunks.push_back((part, n));
        if let Some(limit) = options.limit.filter(|limit| len as u64 > *limit) {
            return Err(ReadError::Limit { wanted: len as u64, limit });
        }
        if let Some(room) = dmalane_dma::room().filter(|room| room.bytes < CHUNK as u64 * 2) {
            let (wanted, left, limited_by) = (len as u64, room.bytes, room.limited_by);
            return Err(ReadError::Fill(FillError::NoRoom { wanted, left, limited_by }));
        }
        if ended {
            break;
        }
    }
    let mut hash = options.checksum.then(|| XxHash3_64::with_seed(0));
    let memory = |source| ReadError::Fill(FillError::Memory { buffer: 0, source });
    let mut reserved = heap.reserve(len.max(1)).map_err(memory)?;
    let (fresh, backing) = (reserved.is_fresh(), reserved.backing().clone());
    let mut whole: Option<BufferSlice> = None;
    while let Some(absent) = reserved.next(CHUNK) {
        let to = absent.populate().map_err(memory)?;
        let from = chunks.pop_front();
        let n = from.as_ref().map_or(0, |(_, n)| *n).min(to.len());
        if let Some(view) = from.as_ref().and_then(|(part, _)| part.view().sub(0, n)) {
            to.view().copy_from(view, CopyHint::Keep);
            if let Some(hash) = &mut hash {
                view.for_each_block(|block| hash.write(block));
            }
        }
        if !fresh && let Some(rest) = to.view().sub(n, to.len() - n) {
            rest.fill(0);
        }
        whole = match whole {
            None => Some(to),
            Some(front) => front.join(to).ok(),
        };
    }
    let filled = whole.and_then(|part| part.into_whole().ok());
    let buffer = filled.and_then(|buf| FilledBuf::new(buf, len, hash.map(|h| h.finish())));
    let buffer = buffer.ok_or(ReadError::Fill(FillError::Memory { buffer: 0, source: Error::BadLength(len) }))?;
    let report = FillReport {
        bytes: len as u64,
        wall: start.elapsed(),
        first_chunk: Duration::ZERO,
        stages: Vec::new(),
        workers: 1,
        backing: Some(backing),
        recycled: !fresh,
    };
    let way = ReadMethod {
        how: How { direct: false, uring: false, reasons: Vec::new() },
        reason: "a pipe, socket or character device: plain reads to its end, then one copy".to_owned(),
        moved: Moved { direct: 0, buffered: channel.position() },
        cached: None,
    };
    Ok(AllocRead { buffer, way, report })
}

fn allocate(heap: &dyn Heap, len: usize) -> Result<SharedBuf, ReadError> {
    let memory = |source| ReadError::Fill(FillError::Memory { buffer: 0, source });
    heap.reserve(len).map_err(memory)?.populate().map_err(memory)
}

enum Stopped {
    Late,
    Failed(OpError),
}

/// Fills a part as far as bytes come; says how far, and whether that was the end.
fn next(
    channel: &mut StreamQueue,
    part: BufferSlice,
    at: u64,
    deadline: Option<Instant>,
) -> Result<(BufferSlice, usize, bool), Stopped> {
    let full = part.len();
    let read = Operation::read(part, FileOffset::new(at));
    let _only = channel.submit(read).map_err(|refused| Stopped::Failed(refused.reason.into()))?;
    let mut done = Vec::new();
    while channel.wait(&mut done, NAP) == 0 {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Stopped::Late);
        }
    }
    let Completion { operation, result, .. } = done.pop().ok_or(Stopped::Late)?;
    let part = operation.into_slice().ok_or(Stopped::Late)?;
    match result {
        Ok(()) => Ok((part, full, false)),
        Err(OpError::EndOfFile { at: end, .. }) => {
            let n = usize::try_from(end.bits().saturating_sub(at)).unwrap_or(full).min(full);
            Ok((part, n, true))
        }
        Err(error) => Err(Stopped::Failed(error)),
    }
}
