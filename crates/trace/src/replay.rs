//! Operations of a trace, applied to a VM.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmalane_addr::{Address, CardAddr, DeviceVa, Segment, SgIndex, SgTable, Span};
use dmalane_vm::{AnyVm, Bo, Committed, Error, PlanError, Request};

use crate::{Line, Operation, Refusal};

/// Buffer objects at once, at most.
pub const MAX_BOS: usize = 1 << 16;
/// Segments of all buffer objects that were made, at most.
pub const MAX_SEGMENTS: usize = 1 << 22;

/// A VM and the buffer objects of a trace.
pub struct Replay {
    vm: Box<dyn AnyVm + Send>,
    bos: BTreeMap<u64, Arc<Bo>>,
    /// Buffer objects that more lines will add to.
    unfinished: BTreeMap<u64, SgTable<CardAddr>>,
    /// Segments that were made. Not lowered by `destroy`: a binding may keep them.
    segments: usize,
}

/// What became of a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The operation; `None` for a line that is none.
    pub op: Option<&'static str>,
    /// What was done, or why not; then the VM is as it was.
    pub result: Result<Done, Refusal>,
    /// Which operation of a batch was refused, from 0, where it can be told.
    pub index: Option<usize>,
}

impl Outcome {
    /// `ok`, or the name of the refusal.
    pub fn name(&self) -> &'static str {
        self.result.as_ref().map_or_else(Refusal::name, |_| "ok")
    }
}

/// What an operation did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// Bytes that were bound before, those that it bound anew included.
    pub unmapped_bytes: u64,
}

impl Replay {
    /// Replays into this VM.
    pub fn new(vm: Box<dyn AnyVm + Send>) -> Self {
        Self { vm, bos: BTreeMap::new(), unfinished: BTreeMap::new(), segments: 0 }
    }

    /// The VM.
    pub fn vm(&self) -> &dyn AnyVm {
        &*self.vm
    }

    /// Applies a line; `None` for one that is blank.
    pub fn step(&mut self, line: Line<'_>) -> Option<Outcome> {
        if matches!(line, Line::Bytes(bytes) if bytes.trim_ascii().is_empty()) {
            return None;
        }
        Some(match Operation::parse(line) {
            Ok(operation) => self.apply(&operation),
            Err((index, refusal)) => Outcome { op: None, result: Err(refusal), index },
        })
    }

    /// Applies an operation.
    pub fn apply(&mut self, operation: &Operation) -> Outcome {
        let (index, result) = match self.run(operation) {
            Ok(done) => (None, Ok(done)),
            Err((index, refusal)) => (index, Err(refusal)),
        };
        Outcome { op: Some(operation.name()), result, index }
    }

    fn run(&mut self, operation: &Operation) -> Result<Done, (Option<usize>, Refusal)> {
        let whole = |refusal| (None, refusal);
        match operation {
            Operation::Bo { id, segments, more } => self.bo(*id, segments, *more).map_err(whole),
            Operation::Destroy { id } => {
                let gone = self.unfinished.remove(id).is_some() || self.bos.remove(id).is_some();
                if gone { Ok(Done::default()) } else { Err(whole(Refusal::NoBo { bo: *id })) }
            }
            Operation::Batch(operations) => {
                let requests = operations.iter().enumerate();
                let requests = requests.map(|(i, o)| self.request(o).map_err(|refusal| (Some(i), refusal)));
                let requests = requests.collect::<Result<_, _>>()?;
                self.commit(requests, true)
            }
            single => {
                let request = self.request(single).map_err(whole)?;
                self.commit(vec![request], false)
            }
        }
    }

    fn bo(&mut self, id: u64, segments: &[Segment<CardAddr>], more: bool) -> Result<Done, Refusal> {
        if self.bos.contains_key(&id) {
            return Err(Refusal::DuplicateBo { bo: id });
        }
        if !self.unfinished.contains_key(&id) && self.bos.len() + self.unfinished.len() >= MAX_BOS {
            return Err(Refusal::TooManyBos);
        }
        if segments.len() > MAX_SEGMENTS - self.segments {
            return Err(Refusal::TooManySegments);
        }
        // All of the line is checked before any of it is kept.
        let mut len = self.unfinished.get(&id).map_or(0, SgTable::len);
        for (index, s) in segments.iter().enumerate() {
            let bad = || Refusal::BadSegment { bo: id, index, pa: s.addr.bits(), len: s.len };
            let last = s.len.checked_sub(1).and_then(|last| s.addr.checked_add(last));
            len = len.checked_add(s.len).filter(|_| last.is_some()).ok_or_else(bad)?;
        }
        self.segments += segments.len();
        let mut sg = self.unfinished.remove(&id).unwrap_or_default();
        for s in segments {
            sg.push(s.addr, s.len).expect("checked above");
        }
        if more {
            self.unfinished.insert(id, sg);
        } else {
            let index = SgIndex::from_table(&sg).map_err(|source| Refusal::NoMemory { bo: id, source })?;
            self.bos.insert(id, Arc::new(Bo::new(id, index)));
        }
        Ok(Done::default())
    }

    fn request(&self, operation: &Operation) -> Result<Request, Refusal> {
        let find = |bo: u64| self.bos.get(&bo).cloned().ok_or(Refusal::NoBo { bo });
        let span = |va: DeviceVa, len: u64| match Span::new(va, len) {
            Some(span) => Ok(span),
            None if len == 0 => Err(Error::Empty { va }),
            None => Err(Error::Wraps { va, len }),
        };
        Ok(match *operation {
            Operation::Bind { va, bo, offset, len, access } => Request::Bind { va, bo: find(bo)?, offset, len, access },
            Operation::Repeat { va, bo, offset, page, len, access } => {
                Request::Repeat { va, bo: find(bo)?, offset, page, len, access }
            }
            Operation::Null { va, len } => Request::Null { va, len },
            Operation::Unbind { va, len } => Request::Unbind(span(va, len)?),
            Operation::UnbindBo { bo } => Request::UnbindBo(find(bo)?),
            Operation::Prefetch { va, len } => Request::Prefetch(span(va, len)?),
            Operation::Bo { .. } | Operation::Destroy { .. } | Operation::Batch(_) => {
                return Err(Refusal::NotInBatch { op: operation.name() });
            }
        })
    }

    fn commit(&mut self, requests: Vec<Request>, batch: bool) -> Result<Done, (Option<usize>, Refusal)> {
        let committed = self.vm.apply(requests).map_err(|PlanError { index, error }| {
            // Memory is missing for the whole, not for the operation that was looked at last.
            let of_all = matches!(error, Error::NoTables { .. } | Error::NoMemory { .. });
            ((batch && !of_all).then_some(index), error.into())
        })?;
        let done = Done { unmapped_bytes: Committed::unmapped_bytes(&committed) };
        // No device walks these tables.
        self.vm.invalidated(committed);
        Ok(done)
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
