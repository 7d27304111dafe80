//! The requests of a trace, applied to a VM.

use std::prelude::v1::*;
use std::time::{Duration, Instant};

use super::{Ask, Asked, RefusedLine, TraceRefusal};
use crate::{AnyVm, BindRequest, Committed, Error, PlanError};

/// A VM that does what the lines of a trace ask for.
pub struct Replay {
    vm: Box<dyn AnyVm + Send>,
    times: Times,
}

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

/// Which of the [`Times`] counts an operation.
#[derive(Clone, Copy, PartialEq)]
enum Class {
    Binds,
    Unbinds,
    Others,
}

impl Times {
    fn class(ask: &Ask) -> (Class, usize) {
        let each = match ask {
            Ask::Batch { requests, .. } => requests,
            Ask::Single(single) => std::slice::from_ref(single),
            Ask::Nothing | Ask::Merge(_) => return (Class::Others, 1),
        };
        use BindRequest::{Bind, Null, Repeat, Unbind, UnbindBo};
        let class = if each.iter().all(|r| matches!(r, Bind { .. } | Repeat { .. } | Null { .. })) {
            Class::Binds
        } else if each.iter().all(|r| matches!(r, Unbind(_) | UnbindBo(_))) {
            Class::Unbinds
        } else {
            Class::Others
        };
        (class, each.len())
    }

    fn add(&mut self, (class, operations): (Class, usize), took: Duration) {
        let timed = match class {
            Class::Binds if self.first_bind.operations == 0 => &mut self.first_bind,
            Class::Binds => &mut self.other_binds,
            Class::Unbinds => &mut self.unbinds,
            Class::Others => &mut self.others,
        };
        timed.operations += operations as u64;
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
        Self { vm, times: Times::default() }
    }

    /// The VM.
    pub fn vm(&self) -> &dyn AnyVm {
        &*self.vm
    }

    /// Times of the operations so far.
    pub fn times(&self) -> &Times {
        &self.times
    }

    /// Does what a line asks for.
    pub fn apply(&mut self, asked: Asked) -> Outcome {
        let start = Instant::now();
        let Asked { op, what } = asked;
        let class = what.as_ref().ok().map(Times::class);
        let (index, result) = match what.map_err(|refused| self.first_fault(refused)).and_then(|ask| self.run(ask)) {
            Ok(done) => {
                if let Some(class) = class {
                    self.times.add(class, start.elapsed());
                }
                (None, Ok(done))
            }
            Err((index, refusal)) => (index, Err(refusal)),
        };
        Outcome { op, result, index }
    }

    fn run(&mut self, ask: Ask) -> Result<Done, (Option<usize>, TraceRefusal)> {
        match ask {
            Ask::Nothing => Ok(Done::default()),
            Ask::Merge(span) => {
                let merged = self.vm.merge(span, &mut |_| ());
                merged.map(|_| Done::default()).map_err(|error| (None, error.into()))
            }
            Ask::Single(request) => self.commit(vec![request], false).map_err(|(_, refusal)| (None, refusal)),
            Ask::Batch { requests, reserved } => self.commit(requests, reserved),
        }
    }

    /// The first request that the VM refuses, in front of one that is wrong in itself; else that one.
    fn first_fault(&mut self, refused: RefusedLine) -> (Option<usize>, TraceRefusal) {
        let RefusedLine { refusal, index, before: (requests, reserved) } = refused;
        match self.vm.check(requests, reserved) {
            // Memory that is missing is missing for all, of which one is wrong anyway.
            Err(PlanError { index, error }) if !is_of_all(&error) => (Some(index), error.into()),
            _ => (index, refusal),
        }
    }

    fn commit(&mut self, requests: Vec<BindRequest>, reserved: bool) -> Result<Done, (Option<usize>, TraceRefusal)> {
        let committed = self.vm.apply(requests, reserved);
        let committed =
            committed.map_err(|PlanError { index, error }| ((!is_of_all(&error)).then_some(index), error.into()))?;
        let done = Done { unmapped_bytes: Committed::unmapped_bytes(&committed) };
        // No device walks these tables.
        self.vm.invalidated(committed);
        Ok(done)
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
