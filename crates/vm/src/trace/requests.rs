//! What the lines of a trace ask for: the one way from a line to requests.

use std::io::{self, BufRead};
use std::prelude::v1::*;

use dmalane_addr::{DeviceVa, Span};

use super::buffers::Buffers;
use super::{Line, Lines, TraceOperation, TraceRefusal};
use crate::{BindRequest, Error};

/// The requests of a trace, line after line, with their buffer objects: whoever replays it, into page tables or a
/// device, refuses the same lines.
#[derive(Debug, Default)]
pub struct Requests {
    bos: Buffers,
}

/// What a line asks for.
#[derive(Debug)]
pub struct Asked {
    /// The operation; `None` for a line that is none.
    pub op: Option<&'static str>,
    /// What to do, or why the line is refused.
    pub what: Result<Ask, RefusedLine>,
}

/// What is to be done for a line.
#[derive(Debug)]
pub enum Ask {
    /// Nothing: a buffer object was made, or it was destroyed.
    Nothing,
    /// [`Vm::merge`](crate::Vm::merge) of this span.
    Merge(Span<DeviceVa>),
    /// A single request.
    Single(BindRequest),
    /// Requests to be carried out all or none.
    Batch {
        /// The requests.
        requests: Vec<BindRequest>,
        /// True for those of the driver itself.
        reserved: bool,
    },
}

/// Why a line is refused whatever the VM holds.
#[derive(Debug)]
pub struct RefusedLine {
    /// Why.
    pub refusal: TraceRefusal,
    /// Which operation of a batch is refused, from 0; `None` when it is not one of a batch.
    pub index: Option<usize>,
    /// The requests in front of it, which the VM may refuse first, and whether they are the driver's.
    pub before: (Vec<BindRequest>, bool),
}

impl From<(Option<usize>, TraceRefusal)> for RefusedLine {
    fn from((index, refusal): (Option<usize>, TraceRefusal)) -> Self {
        Self { refusal, index, before: (Vec::new(), false) }
    }
}

impl Requests {
    /// What the lines ask for, each with the line's number; blank lines are left out.
    ///
    /// An error of reading ends it.
    pub fn of<R: BufRead>(mut self, mut lines: Lines<R>) -> impl Iterator<Item = io::Result<(u64, Asked)>> {
        let mut ended = false;
        core::iter::from_fn(move || {
            while !ended {
                match lines.next() {
                    Ok(Some(line)) => {
                        if let Some(asked) = self.line(line) {
                            return Some(Ok((lines.number(), asked)));
                        }
                    }
                    Ok(None) => ended = true,
                    Err(e) => {
                        ended = true;
                        return Some(Err(e));
                    }
                }
            }
            None
        })
    }

    /// What a line asks for; `None` for one that is blank.
    pub fn line(&mut self, line: Line<'_>) -> Option<Asked> {
        if matches!(line, Line::Bytes(bytes) if bytes.trim_ascii().is_empty()) {
            return None;
        }
        Some(match TraceOperation::parse(line) {
            Ok(operation) => self.operation(&operation),
            Err(refused) => Asked { op: None, what: Err(refused.into()) },
        })
    }

    /// What an operation asks for.
    pub fn operation(&mut self, operation: &TraceOperation) -> Asked {
        Asked { op: Some(operation.name()), what: self.ask(operation) }
    }

    fn ask(&mut self, operation: &TraceOperation) -> Result<Ask, RefusedLine> {
        let whole = |refusal| RefusedLine::from((None, refusal));
        match operation {
            TraceOperation::Bo { id, segments, more } => {
                self.bos.add(*id, segments, *more).map(|()| Ask::Nothing).map_err(whole)
            }
            TraceOperation::Destroy { id } => self.bos.destroy(*id).map(|()| Ask::Nothing).map_err(whole),
            TraceOperation::Merge { va, len } => span(*va, *len).map(Ask::Merge).map_err(whole),
            TraceOperation::Batch(operations) | TraceOperation::Reserved(operations) => {
                let reserved = matches!(operation, TraceOperation::Reserved(_));
                let mut requests = Vec::with_capacity(operations.len());
                for (i, operation) in operations.iter().enumerate() {
                    match self.request(operation) {
                        Ok(request) => requests.push(request),
                        Err(refusal) => {
                            return Err(RefusedLine { refusal, index: Some(i), before: (requests, reserved) });
                        }
                    }
                }
                Ok(Ask::Batch { requests, reserved })
            }
            single => self.request(single).map(Ask::Single).map_err(whole),
        }
    }

    fn request(&self, operation: &TraceOperation) -> Result<BindRequest, TraceRefusal> {
        let find = |bo: u64| self.bos.get(bo).cloned();
        let request = match *operation {
            TraceOperation::Bind { va, bo, offset, len, access } => {
                BindRequest::Bind { va, bo: find(bo)?, offset, len, access }
            }
            TraceOperation::Repeat { va, bo, offset, page, len, access } => {
                BindRequest::Repeat { va, bo: find(bo)?, offset, page, len, access }
            }
            TraceOperation::Null { va, len } => BindRequest::Null { va, len },
            TraceOperation::Unbind { va, len } => BindRequest::Unbind(span(va, len)?),
            TraceOperation::UnbindBo { bo } => BindRequest::UnbindBo(find(bo)?),
            TraceOperation::Prefetch { va, len } => BindRequest::Prefetch(span(va, len)?),
            TraceOperation::Bo { .. }
            | TraceOperation::Destroy { .. }
            | TraceOperation::Merge { .. }
            | TraceOperation::Batch(_)
            | TraceOperation::Reserved(_) => {
                return Err(TraceRefusal::NotInBatch { op: operation.name() });
            }
        };
        if let BindRequest::Bind { va, len, .. } | BindRequest::Repeat { va, len, .. } | BindRequest::Null { va, len } =
            request
        {
            span(va, len)?;
        }
        Ok(request)
    }
}

fn span(va: DeviceVa, len: u64) -> Result<Span<DeviceVa>, TraceRefusal> {
    match Span::new(va, len) {
        Some(span) => Ok(span),
        None if len == 0 => Err(Error::Empty { va }.into()),
        None => Err(Error::Wraps { va, len }.into()),
    }
}
