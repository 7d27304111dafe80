//! An operation in flight: cut into requests to the kernel, and put together again.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;

use dmalane_dma::BufferSlice;
use dmalane_queue::{Completion, HostSlice, OpError, Operation, QueueAddr, Refusal, Ticket, Work};

use crate::ring::{Ask, Request};

/// A copy that is cut into requests, or a fence, which needs none.
pub(crate) struct Op<A> {
    pub ticket: Ticket,
    /// Its host memory is what was not cut off yet.
    operation: Operation<A>,
    /// The end of its bytes in the file.
    pub end: u64,
    /// The memory that was cut off, in order, with the bytes that are done; `None` while a request has it.
    fragments: Vec<Option<(BufferSlice, usize)>>,
    /// Bytes that are not known to be done.
    left: u64,
    /// Requests that were not given back.
    pub out: usize,
    /// The first request was made, or the fence was passed.
    pub begun: bool,
    /// The failure that lies first in the file, and where.
    pub failed: Option<(u64, OpError)>,
}

/// Refuses an operation past the top of what files can have: the kernel counts offsets with a sign.
pub(crate) fn check_end<A: QueueAddr>(operation: &Operation<A>) -> Result<(), Refusal> {
    let Work::Copy { host, at, .. } = &operation.work else { return Ok(()) };
    let end = at.bits().checked_add(host.slice.len() as u64).filter(|end| *end <= i64::MAX as u64);
    end.map(|_| ()).ok_or(Refusal::PastTheTop)
}

/// The place of an operation in a list, which is in the order of submission.
pub(crate) fn find<A>(ops: &VecDeque<Op<A>>, number: u64) -> Option<usize> {
    ops.binary_search_by_key(&number, |op| op.ticket.number()).ok()
}

impl<A: QueueAddr> Op<A> {
    /// An operation that was checked, by [`check_end`] too.
    pub fn new(ticket: Ticket, operation: Operation<A>) -> Self {
        let left = operation.bytes();
        let end = if let Work::Copy { at, .. } = &operation.work { at.bits() + left } else { 0 };
        Self { ticket, operation, end, fragments: Vec::new(), left, out: 0, begun: false, failed: None }
    }

    pub fn operation(&self) -> &Operation<A> {
        &self.operation
    }

    /// The memory that was not cut off yet, and its place in the file; `None` when there is none, or when the operation
    /// has failed.
    pub fn rest(&self) -> Option<(&BufferSlice, u64)> {
        let rest = &self.operation.hosts().first()?.slice;
        (!rest.is_empty() && self.failed.is_none()).then(|| (rest, self.end - rest.len() as u64))
    }

    /// Cuts off the next `len` bytes of the rest: a request for them.
    pub fn cut(&mut self, len: usize, ask: Ask, file: Arc<File>, direct: bool) -> Option<Request> {
        let (_, at) = self.rest()?;
        let Work::Copy { host, .. } = &mut self.operation.work else { return None };
        let slice = host.slice.split_off_front(len)?;
        self.begun = true;
        self.out += 1;
        self.fragments.push(None);
        let index = self.fragments.len() - 1;
        Some(Request { ask, queue: 0, op: self.ticket.number(), index, direct, file, slice, at, done: 0 })
    }

    /// Takes a request back that is done, has failed, or will not be made any more.
    pub fn give_back(&mut self, request: Request, failed: Option<OpError>) {
        let at = request.next();
        self.left -= request.done as u64;
        self.out -= 1;
        self.fragments[request.index] = Some((request.slice, request.done));
        if let Some(error) = failed
            && self.failed.as_ref().is_none_or(|(first, _)| at < *first)
        {
            self.failed = Some((at, error));
        }
    }

    /// True when all is done, or when it has failed and no request is out.
    pub fn has_ended(&self) -> bool {
        self.begun && self.out == 0 && (self.left == 0 || self.failed.is_some())
    }

    /// The completion, once no request is out; `otherwise` is its result unless it has failed.
    pub fn into_completion(self, otherwise: Result<(), OpError>) -> Completion<A> {
        let mut bytes = 0;
        for (slice, done) in self.fragments.iter().flatten() {
            bytes += *done as u64;
            if *done < slice.len() {
                break;
            }
        }
        let result = self.failed.as_ref().map_or(otherwise, |(_, error)| Err(error.clone()));
        Completion { ticket: self.ticket, operation: self.into_operation(), result, bytes }
    }

    /// The operation as it was submitted, once no request is out.
    pub fn into_operation(self) -> Operation<A> {
        let work = match self.operation.work {
            Work::Copy { direction, host: HostSlice { slice: rest, via }, at } => {
                let slices = self.fragments.into_iter().flatten().map(|(slice, _)| slice).chain([rest]);
                let slice = slices.reduce(|a, b| a.join(b).expect("fragments in order")).expect("there is the rest");
                Work::Copy { direction, host: HostSlice { slice, via }, at }
            }
            work => work,
        };
        Operation { work, ..self.operation }
    }
}
