//! The requests of a trace, applied to a VM.

use std::io::{self, BufRead};
use std::prelude::v1::*;
use std::time::{Duration, Instant};

use dmalane_addr::{DeviceVa, Span};

use super::buffers::Buffers;
use super::{Line, Lines, TraceOperation, TraceRefusal};
use crate::{AnyVm, BindRequest, Committed, Error, PlanError};

/// A VM that does what the lines of a trace ask for.
pub struct Replay {
    vm: Box<dyn AnyVm + Send>,
    bos: Buffers,
    times: Times,
}

/// Why an operation is refused, and which one of a batch, from 0.
type Refused = (Option<usize>, TraceRefusal);

/// Time of the operations that were not refused: plan and commit; not reading the line.
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

/// Where the time of requests counts.
fn timed(requests: &[BindRequest]) -> fn(&mut Times) -> &mut Timed {
    use BindRequest::{Bind, Null, Repeat, Unbind, UnbindBo};
    if requests.iter().all(|r| matches!(r, Bind { .. } | Repeat { .. } | Null { .. })) {
        |times| if times.first_bind.operations == 0 { &mut times.first_bind } else { &mut times.other_binds }
    } else if requests.iter().all(|r| matches!(r, Unbind(_) | UnbindBo(_))) {
        |times| &mut times.unbinds
    } else {
        |times| &mut times.others
    }
}

impl Timed {
    fn add(&mut self, operations: usize, took: Duration) {
        self.operations += operations as u64;
        self.took += took;
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

    /// Does what each line asks for, and gives its number and the result; blank lines are left out.
    ///
    /// An error of reading ends it.
    pub fn lines<R: BufRead>(&mut self, mut lines: Lines<R>) -> impl Iterator<Item = io::Result<(u64, Outcome)>> {
        let mut ended = false;
        core::iter::from_fn(move || {
            while !ended {
                match lines.next() {
                    Ok(Some(line)) => {
                        if let Some(outcome) = self.step(line) {
                            return Some(Ok((lines.number(), outcome)));
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

    /// Does what a line asks for; `None` for one that is blank.
    pub fn step(&mut self, line: Line<'_>) -> Option<Outcome> {
        if matches!(line, Line::Bytes(bytes) if bytes.trim_ascii().is_empty()) {
            return None;
        }
        Some(match TraceOperation::parse(line) {
            Ok(operation) => self.apply(&operation),
            Err((index, refusal)) => Outcome { op: None, result: Err(refusal), index },
        })
    }

    /// Does what an operation asks for.
    pub fn apply(&mut self, operation: &TraceOperation) -> Outcome {
        let (index, result) = match self.run(operation) {
            Ok(done) => (None, Ok(done)),
            Err((index, refusal)) => (index, Err(refusal)),
        };
        Outcome { op: Some(operation.name()), result, index }
    }

    fn run(&mut self, operation: &TraceOperation) -> Result<Done, Refused> {
        let whole = |refusal| (None, refusal);
        let start = Instant::now();
        match operation {
            TraceOperation::Bo { id, segments, more } => self.bos.add(*id, segments, *more).map_err(whole)?,
            TraceOperation::Destroy { id } => self.bos.destroy(*id).map_err(whole)?,
            TraceOperation::Merge { va, len } => {
                let span = span(*va, *len).map_err(whole)?;
                self.vm.merge(span, &mut |_| ()).map_err(|error| whole(error.into()))?;
            }
            TraceOperation::Batch(operations) | TraceOperation::Reserved(operations) => {
                let reserved = matches!(operation, TraceOperation::Reserved(_));
                let mut requests = Vec::with_capacity(operations.len());
                for (i, operation) in operations.iter().enumerate() {
                    match self.request(operation) {
                        Ok(request) => requests.push(request),
                        Err(refusal) => return Err(self.first_fault(requests, reserved, (Some(i), refusal))),
                    }
                }
                return self.commit(requests, reserved);
            }
            single => {
                let request = self.request(single).map_err(whole)?;
                return self.commit(vec![request], false).map_err(|(_, refusal)| whole(refusal));
            }
        }
        self.times.others.add(1, start.elapsed());
        Ok(Done::default())
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

    /// The first request that the VM refuses, in front of one that is wrong in itself; else that one.
    fn first_fault(&mut self, requests: Vec<BindRequest>, reserved: bool, refused: Refused) -> Refused {
        match self.vm.check(requests, reserved) {
            // Memory that is missing is missing for all, of which one is wrong anyway.
            Err(PlanError { index, error }) if !is_of_all(&error) => (Some(index), error.into()),
            _ => refused,
        }
    }

    fn commit(&mut self, requests: Vec<BindRequest>, reserved: bool) -> Result<Done, Refused> {
        let (timed, operations, start) = (timed(&requests), requests.len(), Instant::now());
        let committed = self.vm.apply(requests, reserved);
        let committed =
            committed.map_err(|PlanError { index, error }| ((!is_of_all(&error)).then_some(index), error.into()))?;
        let done = Done { unmapped_bytes: Committed::unmapped_bytes(&committed) };
        // No device walks these tables.
        self.vm.invalidated(committed);
        timed(&mut self.times).add(operations, start.elapsed());
        Ok(done)
    }
}

fn span(va: DeviceVa, len: u64) -> Result<Span<DeviceVa>, TraceRefusal> {
    match Span::new(va, len) {
        Some(span) => Ok(span),
        None if len == 0 => Err(Error::Empty { va }.into()),
        None => Err(Error::Wraps { va, len }.into()),
    }
}

/// True when memory is missing: for the whole batch, not for the request that was checked last.
fn is_of_all(error: &Error) -> bool {
    matches!(error, Error::NoTables { .. } | Error::NoMemory { .. })
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay").field("format", &self.vm.format()).finish_non_exhaustive()
    }
}
