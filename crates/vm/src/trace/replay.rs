//! Operations of a trace, applied to a VM.

use std::prelude::v1::*;
use std::time::{Duration, Instant};

use dmalane_addr::{DeviceVa, Span};

use super::buffers::Buffers;
use super::{Line, TraceOperation, TraceRefusal};
use crate::{AnyVm, BindRequest, Committed, Error, PlanError};

/// A VM and the buffer objects of a trace.
pub struct Replay {
    vm: Box<dyn AnyVm + Send>,
    bos: Buffers,
    times: Times,
}

/// Time of the operations that were not refused: looking the buffers up, plan and commit; not reading the line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Times {
    /// The first line that binds.
    pub first_bind: Timed,
    /// The other lines that only bind, the operations of batches each.
    pub other_binds: Timed,
    /// The lines that only unbind.
    pub unbinds: Timed,
    /// All others, such as batches of both.
    pub others: Timed,
}

/// Some operations, and how long they took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timed {
    /// Operations; those of a batch count each.
    pub operations: u64,
    /// Time of all of them together.
    pub took: Duration,
}

impl Times {
    fn add(&mut self, operation: &TraceOperation, took: Duration) {
        use TraceOperation::{Batch, Bind, Null, Repeat, Reserved, Unbind, UnbindBo};
        let each = match operation {
            Batch(all) | Reserved(all) => all,
            single => std::slice::from_ref(single),
        };
        let timed = if each.iter().all(|op| matches!(op, Bind { .. } | Repeat { .. } | Null { .. })) {
            if self.first_bind.operations == 0 { &mut self.first_bind } else { &mut self.other_binds }
        } else if each.iter().all(|op| matches!(op, Unbind { .. } | UnbindBo { .. })) {
            &mut self.unbinds
        } else {
            &mut self.others
        };
        timed.operations += each.len() as u64;
        timed.took += took;
    }
}

/// Result of a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The operation; `None` for a line that is none.
    pub op: Option<&'static str>,
    /// Result of the operation; after a refusal the VM is as it was.
    pub result: Result<Done, TraceRefusal>,
    /// Index of the refused operation in its batch, from 0, where it is known.
    pub index: Option<usize>,
}

impl Outcome {
    /// `ok`, or the name of the refusal.
    pub fn name(&self) -> &'static str {
        self.result.as_ref().map_or_else(TraceRefusal::name, |_| "ok")
    }
}

/// Effect of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// Bytes that were bound before, those that it bound anew included.
    pub unmapped_bytes: u64,
}

impl Replay {
    /// Replays into this VM.
    pub fn new(vm: Box<dyn AnyVm + Send>) -> Self {
        Self { vm, bos: Buffers::default(), times: Times::default() }
    }

    /// The VM.
    pub fn vm(&self) -> &dyn AnyVm {
        &*self.vm
    }

    /// Times of the operations so far.
    pub fn times(&self) -> &Times {
        &self.times
    }

    /// Applies a line; `None` for one that is blank.
    pub fn step(&mut self, line: Line<'_>) -> Option<Outcome> {
        if matches!(line, Line::Bytes(bytes) if bytes.trim_ascii().is_empty()) {
            return None;
        }
        Some(match TraceOperation::parse(line) {
            Ok(operation) => self.apply(&operation),
            Err((index, refusal)) => Outcome { op: None, result: Err(refusal), index },
        })
    }

    /// Applies an operation.
    pub fn apply(&mut self, operation: &TraceOperation) -> Outcome {
        let start = Instant::now();
        let (index, result) = match self.run(operation) {
            Ok(done) => {
                self.times.add(operation, start.elapsed());
                (None, Ok(done))
            }
            Err((index, refusal)) => (index, Err(refusal)),
        };
        Outcome { op: Some(operation.name()), result, index }
    }

    fn run(&mut self, operation: &TraceOperation) -> Result<Done, (Option<usize>, TraceRefusal)> {
        let whole = |refusal| (None, refusal);
        match operation {
            TraceOperation::Bo { id, segments, more } => {
                self.bos.add(*id, segments, *more).map(|()| Done::default()).map_err(whole)
            }
            TraceOperation::Destroy { id } => self.bos.destroy(*id).map(|()| Done::default()).map_err(whole),
            TraceOperation::Merge { va, len } => {
                let merged = span(*va, *len).and_then(|span| self.vm.merge(span, &mut |_| ()));
                merged.map(|_| Done::default()).map_err(|error| whole(error.into()))
            }
            TraceOperation::Batch(operations) | TraceOperation::Reserved(operations) => {
                let kind = if matches!(operation, TraceOperation::Batch(_)) { Kind::Batch } else { Kind::Reserved };
                let mut requests = Vec::with_capacity(operations.len());
                for (i, operation) in operations.iter().enumerate() {
                    match self.request(operation) {
                        Ok(request) => requests.push(request),
                        Err(refusal) => return Err(self.first_fault(requests, kind).unwrap_or((Some(i), refusal))),
                    }
                }
                self.commit(requests, kind)
            }
            single => {
                let request = self.request(single).map_err(whole)?;
                self.commit(vec![request], Kind::Single)
            }
        }
    }

    /// Finds the first request that the VM refuses, in front of one that is wrong in itself.
    fn first_fault(&mut self, requests: Vec<BindRequest>, kind: Kind) -> Option<(Option<usize>, TraceRefusal)> {
        let PlanError { index, error } = self.vm.check(requests, kind == Kind::Reserved).err()?;
        // Memory that is missing is missing for all, of which one is wrong anyway.
        let of_all = matches!(error, Error::NoTables { .. } | Error::NoMemory { .. });
        (!of_all).then(|| (Some(index), error.into()))
    }

    fn request(&self, operation: &TraceOperation) -> Result<BindRequest, TraceRefusal> {
        let find = |bo: u64| self.bos.get(bo).cloned();
        Ok(match *operation {
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
        })
    }

    fn commit(&mut self, requests: Vec<BindRequest>, kind: Kind) -> Result<Done, (Option<usize>, TraceRefusal)> {
        let committed = self.vm.apply(requests, kind == Kind::Reserved);
        let committed = committed.map_err(|PlanError { index, error }| {
            // Memory is missing for the whole, not for the operation that was checked last.
            let of_all = matches!(error, Error::NoTables { .. } | Error::NoMemory { .. });
            ((kind != Kind::Single && !of_all).then_some(index), error.into())
        })?;
        let done = Done { unmapped_bytes: Committed::unmapped_bytes(&committed) };
        // No device walks these tables.
        self.vm.invalidated(committed);
        Ok(done)
    }
}

/// How requests are applied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Single,
    Batch,
    /// Those of the driver.
    Reserved,
}

fn span(va: DeviceVa, len: u64) -> Result<Span<DeviceVa>, Error> {
    match Span::new(va, len) {
        Some(span) => Ok(span),
        None if len == 0 => Err(Error::Empty { va }),
        None => Err(Error::Wraps { va, len }),
    }
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay")
            .field("format", &self.vm.format())
            .field("bos", &self.bos.len())
            .finish_non_exhaustive()
    }
}
