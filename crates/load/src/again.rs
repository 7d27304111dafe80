//! A file read again from front to back, ahead of the comparison.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use dmalane_addr::{FileOffset, PageSize};
use dmalane_dma::{BufferSlice, VolatileSlice};
use dmalane_queue::{Completion, OpError, Operation, Queue, Refusal, Refused, StopReason, Ticket};

use crate::clock::Clocks;
use crate::container::Model;
use crate::error::Error;
use crate::fill::{Staging, broken};

/// Staging memory to read into, at most.
const AHEAD: u64 = 16 << 20;

/// Reads the tensors of a file in the order of their bytes, into slots of the staging buffers.
pub(crate) struct Reread<'a, S> {
    queue: &'a mut S,
    path: &'a Path,
    model: &'a Model,
    /// Ranges that are still to be read, the next one last.
    ranges: Vec<(u64, u64)>,
    /// Blocks in the order of the file, in flight or read.
    blocks: VecDeque<Block>,
    /// Slots that are free.
    free: Vec<(usize, BufferSlice)>,
    timeout: Duration,
}

struct Block {
    at: u64,
    slot: usize,
    len: usize,
    /// The bytes that are left of the slot.
    rest: BufferSlice,
    state: State,
}

enum State {
    Flying(Ticket),
    Read(BufferSlice),
}

impl<'a, S: Queue<Addr = FileOffset>> Reread<'a, S> {
    /// Takes slots of `staging` to read the tensors of `model` into.
    pub fn new(
        queue: &'a mut S,
        path: &'a Path,
        model: &'a Model,
        staging: &mut Staging,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let (mut ranges, mut wanted): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        for tensor in model.tensors.iter().filter(|tensor| tensor.len > 0) {
            // Whole pages, so that direct I/O finds every read aligned.
            let start = tensor.at.bits() & !(PageSize::SIZE_4K.bytes() - 1);
            let end = tensor.at.bits() + tensor.len;
            let end = PageSize::SIZE_4K.round_up(end).map_or(end, |end| end.min(model.len));
            wanted += tensor.len;
            match ranges.last_mut() {
                Some((_, last)) if start <= *last => *last = end.max(*last),
                _ => ranges.push((start, end)),
            }
        }
        ranges.reverse();
        let (mut free, mut have, mut clocks) = (Vec::new(), 0, Clocks::default());
        while have < wanted.min(AHEAD) {
            let Some((slot, slice, _)) = staging.take(u64::MAX, &mut clocks)? else { break };
            have += slice.len() as u64;
            free.push((slot, slice));
        }
        Ok(Self { queue, path, model, ranges, blocks: VecDeque::new(), free, timeout })
    }

    /// Starts as many reads as there are slots.
    fn submit(&mut self) -> Result<(), Error> {
        while !self.free.is_empty()
            && let Some((start, end)) = self.ranges.pop()
        {
            let Some((slot, mut rest)) = self.free.pop() else { break };
            let len = rest.len().min(usize::try_from(end - start).unwrap_or(usize::MAX));
            let Some(front) = rest.split_off_front(len) else { break };
            match self.queue.submit(Operation::read(front, FileOffset::new(start))) {
                Ok(ticket) => {
                    self.blocks.push_back(Block { at: start, slot, len, rest, state: State::Flying(ticket) });
                    if start + (len as u64) < end {
                        self.ranges.push((start + len as u64, end));
                    }
                }
                Err(Refused { operation, reason }) => {
                    let slice = operation.into_slice().and_then(|front| front.join(rest).ok());
                    self.free.extend(slice.map(|slice| (slot, slice)));
                    self.ranges.push((start, end));
                    return match reason {
                        Refusal::Full => Ok(()),
                        other => Err(self.failed(start, other.into())),
                    };
                }
            }
        }
        self.queue.flush();
        Ok(())
    }

    fn failed(&self, at: u64, source: OpError) -> Error {
        let at = FileOffset::new(at);
        let tensor = self.model.tensor_at(at).map(|tensor| tensor.name.clone());
        Error::Read { path: self.path.to_owned(), at, tensor, source }
    }

    fn lost(&self, at: u64) -> Error {
        self.failed(at, broken("it did not return all of its memory"))
    }

    /// Takes what has been read.
    fn settle(&mut self, done: &mut Vec<Completion<FileOffset>>) -> Result<(), Error> {
        let mut failed = Ok(());
        for Completion { ticket, operation, result, .. } in done.drain(..) {
            let flying = |block: &&mut Block| matches!(block.state, State::Flying(t) if t == ticket);
            if let (Some(block), Some(slice)) = (self.blocks.iter_mut().find(flying), operation.into_slice()) {
                block.state = State::Read(slice);
                let at = block.at;
                failed = failed.and(result.map_err(|source| self.failed(at, source)));
            }
        }
        failed
    }

    /// Gives up the blocks that end at or before `at`.
    fn pass(&mut self, at: u64) {
        while self.blocks.front().is_some_and(|block| block.at + block.len as u64 <= at) {
            match self.blocks.pop_front() {
                Some(Block { slot, rest, state: State::Read(front), .. }) => {
                    self.free.extend(front.join(rest).ok().map(|slice| (slot, slice)));
                }
                Some(flying) => return self.blocks.push_front(flying),
                None => return,
            }
        }
    }

    /// The first byte of `view` that differs from the file at `from`. Must be called with ascending ranges of tensors.
    pub fn first_difference(&mut self, from: u64, view: VolatileSlice<'_>) -> Result<Option<u64>, Error> {
        let mut done = 0;
        while done < view.len() {
            let at = from + done as u64;
            let (piece_at, bytes) = self.wait_for(at)?;
            let skip = (at - piece_at) as usize;
            let len = (bytes.len() - skip).min(view.len() - done);
            let (mine, theirs) = (view.sub(done, len), bytes.sub(skip, len));
            let differs = mine.zip(theirs).and_then(|(mine, theirs)| mine.first_difference(theirs));
            if let Some(n) = differs {
                return Ok(Some((done + n) as u64));
            }
            done += len;
        }
        Ok(None)
    }

    /// The block with the byte at `at`.
    fn wait_for(&mut self, at: u64) -> Result<(u64, VolatileSlice<'_>), Error> {
        let (mut done, mut deadline) = (Vec::new(), Instant::now() + self.timeout);
        loop {
            self.pass(at);
            self.submit()?;
            let front = self.blocks.front();
            if front.is_none_or(|block| block.at > at) {
                return Err(self.lost(at));
            }
            if front.is_some_and(|block| matches!(block.state, State::Read(_))) {
                break;
            }
            if self.queue.wait(&mut done, deadline.saturating_duration_since(Instant::now())) > 0 {
                deadline = Instant::now() + self.timeout;
            } else if Instant::now() >= deadline {
                return Err(self.failed(at, OpError::Stopped(StopReason::Timeout(self.timeout))));
            }
            self.settle(&mut done)?;
        }
        match self.blocks.front() {
            Some(Block { at, state: State::Read(slice), .. }) => Ok((*at, slice.as_volatile_slice())),
            _ => Err(self.lost(at)),
        }
    }

    /// Waits for reads in flight, and gives the slots back. A slot that is still in flight is lost.
    pub fn finish(mut self, staging: &mut Staging) {
        let (mut done, deadline) = (Vec::new(), Instant::now() + self.timeout);
        while self.blocks.iter().any(|block| matches!(block.state, State::Flying(_))) && Instant::now() < deadline {
            self.queue.wait(&mut done, deadline.saturating_duration_since(Instant::now()));
            // The first failure was returned.
            let _ = self.settle(&mut done);
        }
        self.pass(u64::MAX);
        if !self.blocks.is_empty() {
            return staging.clear();
        }
        self.free.into_iter().for_each(|(slot, slice)| staging.put_back(slot, slice));
    }
}
