//! Requests of a VM, written as a trace.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::prelude::v1::*;
use std::sync::Arc;

use super::{MAX_BATCH, TraceHeader, TraceOperation};
use crate::{BindRequest, Bo};

/// Segments on a line of a buffer object, at most: no line may be longer than [`MAX_LINE`](super::MAX_LINE).
const SEGMENTS_PER_LINE: usize = 1 << 14;

/// Writes requests as lines of a trace, and each buffer object before it is first used: under its id, or under another
/// when a buffer object with that id was written before.
#[derive(Debug)]
pub struct Recorder<W> {
    out: W,
    /// The buffer objects that were written and their ids in the trace, by address. Held, so that no later one can have
    /// the address.
    written: BTreeMap<usize, (Arc<Bo>, u64)>,
    taken: BTreeSet<u64>,
}

impl<W: Write> Recorder<W> {
    /// Writes the first line.
    ///
    /// # Errors
    /// When writing fails.
    pub fn new(mut out: W, header: &TraceHeader) -> io::Result<Self> {
        writeln!(out, "{}", header.line()?)?;
        Ok(Self { out, written: BTreeMap::new(), taken: BTreeSet::new() })
    }

    /// Writes a batch that was committed; one of a single request without the word batch.
    ///
    /// # Errors
    /// When writing fails, or for more than [`MAX_BATCH`] requests.
    pub fn record(&mut self, requests: &[BindRequest]) -> io::Result<()> {
        if requests.len() > MAX_BATCH {
            let what = format!("a batch of {} requests; a trace has at most {MAX_BATCH}", requests.len());
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let mut operations = Vec::with_capacity(requests.len());
        for request in requests {
            operations.push(match request {
                BindRequest::Bind { va, bo, offset, len, access } => {
                    let bo = self.bo(bo)?;
                    TraceOperation::Bind { va: *va, bo, offset: *offset, len: *len, access: *access }
                }
                BindRequest::Repeat { va, bo, offset, page, len, access } => {
                    let bo = self.bo(bo)?;
                    TraceOperation::Repeat { va: *va, bo, offset: *offset, page: *page, len: *len, access: *access }
                }
                BindRequest::Null { va, len } => TraceOperation::Null { va: *va, len: *len },
                BindRequest::Unbind(span) => TraceOperation::Unbind { va: span.first(), len: span.len() },
                BindRequest::UnbindBo(bo) => TraceOperation::UnbindBo { bo: self.bo(bo)? },
                BindRequest::Prefetch(span) => TraceOperation::Prefetch { va: span.first(), len: span.len() },
            });
        }
        match <[TraceOperation; 1]>::try_from(operations) {
            Ok([single]) => writeln!(self.out, "{}", single.line()),
            Err(operations) => writeln!(self.out, "{}", TraceOperation::Batch(operations).line()),
        }
    }

    /// The id of a buffer object in the trace.
    fn bo(&mut self, bo: &Arc<Bo>) -> io::Result<u64> {
        let pointer = Arc::as_ptr(bo).addr();
        if let Some((_, id)) = self.written.get(&pointer) {
            return Ok(*id);
        }
        let id = if self.taken.contains(&bo.id()) { self.free_id() } else { bo.id() };
        let segments: Vec<_> = bo.sg().segments().collect();
        let mut rest = segments.as_slice();
        loop {
            let (head, tail) = rest.split_at(rest.len().min(SEGMENTS_PER_LINE));
            let line = TraceOperation::Bo { id, segments: head.to_vec(), more: !tail.is_empty() };
            writeln!(self.out, "{}", line.line())?;
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        self.taken.insert(id);
        self.written.insert(pointer, (bo.clone(), id));
        Ok(id)
    }

    /// An id for a buffer object whose own is taken: from the top, where nobody begins to count.
    fn free_id(&self) -> u64 {
        let mut id = u64::MAX;
        for taken in self.taken.iter().rev() {
            if *taken < id {
                break;
            }
            id -= 1; // there are fewer than 2^64 of them
        }
        id
    }

    /// Ends the trace and gives back what it was written to, flushed.
    ///
    /// # Errors
    /// When flushing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.flush()?;
        Ok(self.out)
    }
}
