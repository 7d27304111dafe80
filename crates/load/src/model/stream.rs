//! Tensors in the order of their bytes, read ahead within a limit of memory.

use std::collections::{HashSet, VecDeque};
use std::ops::{ControlFlow, Range};
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dmalane_dma::lock;

use super::block::{Block, HostTensor};
use super::budget::Waiter;
use super::plan::Plan;
use super::reader::Reader;
use crate::error::Error;

/// Bytes that are read together, at most, except for a larger tensor.
const BATCH: u64 = 32 << 20;
/// How long memory may take to come back before waiting for it is given up.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Tensors that were read together.
struct Batch {
    file: usize,
    plan: Plan,
    block: Arc<Block>,
}

/// Tensors in the order of their bytes. A thread reads ahead; it ends with this object.
///
/// As an iterator it waits for each tensor. A tensor counts against the model's memory limit until it is dropped: when
/// the next one waits for memory that does not come back within half a second, that is an error.
pub struct TensorStream {
    reader: Arc<Reader>,
    waiter: Arc<Waiter>,
    batches: Mutex<Receiver<Result<Batch, Error>>>,
    ready: VecDeque<HostTensor>,
    /// Since when the reader has been waiting for memory.
    stuck: Option<Instant>,
    thread: Option<JoinHandle<()>>,
}

/// What a stream has to give.
pub enum Next {
    /// The next tensor.
    Tensor(HostTensor),
    /// There are no more.
    End,
    /// The next tensor is being read.
    Pending,
    /// Said once: the reader waits for memory, and only dropping tensors can help.
    NeedsMemory,
}

impl Drop for TensorStream {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl TensorStream {
    /// Reads all tensors, or those of these names.
    pub(super) fn new(reader: Arc<Reader>, names: Option<HashSet<String>>) -> Result<Self, Error> {
        // One batch is in use, one waits, one is being read.
        let (sender, batches) = sync_channel(1);
        let waiter = Arc::new(Waiter::default());
        let (model, own) = (reader.clone(), waiter.clone());
        let work = move || produce(&model, names.as_ref(), &own, &sender);
        let thread = Builder::new().spawn(work).map_err(|source| {
            let path = reader.files.first().map_or(PathBuf::new(), |file| file.path().to_owned());
            Error::File { path, what: "start a thread that reads it", source }
        })?;
        let batches = Mutex::new(batches);
        Ok(Self { reader, waiter, batches, ready: VecDeque::new(), stuck: None, thread: Some(thread) })
    }

    /// Ends it: a read that nobody waits for must not take the memory that comes back.
    pub fn cancel(&self) {
        self.waiter.cancel();
    }

    /// Waits up to `wait` for the next tensor.
    ///
    /// # Errors
    /// [`Error`], also where memory does not come back.
    pub fn next_within(&mut self, wait: Duration) -> Result<Next, Error> {
        self.reader.check_open()?;
        if let Some(tensor) = self.ready.pop_front() {
            return Ok(Next::Tensor(tensor));
        }
        let received = lock(&self.batches).recv_timeout(wait);
        let Batch { file, plan, block } = match received {
            Ok(batch) => batch?,
            // The reader has ended. After a panic there may be more tensors.
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
                return ended.map(|()| Next::End).map_err(|panic| resume_unwind(panic));
            }
            Err(RecvTimeoutError::Timeout) => return self.waiting(),
        };
        self.stuck = None;
        let tensors = &self.reader.files[file].contents().tensors[plan.tensors.clone()];
        for (tensor, place) in tensors.iter().zip(&plan.places) {
            self.ready.push_back(HostTensor::new(tensor, tensor.dims(), block.clone(), *place, tensor.len));
        }
        Ok(self.ready.pop_front().map_or(Next::Pending, Next::Tensor))
    }

    /// The reader waits for memory, and the caller for the reader: only the caller or other threads can help.
    fn waiting(&mut self) -> Result<Next, Error> {
        match (self.waiter.wanted(), self.stuck) {
            (None, _) => self.stuck = None,
            (Some(_), None) => {
                self.stuck = Some(Instant::now());
                return Ok(Next::NeedsMemory);
            }
            (Some((bytes, tensor)), Some(since)) if since.elapsed() > TIMEOUT => {
                self.cancel();
                return Err(self.reader.budget.refuse(Some(&tensor), bytes));
            }
            _ => {}
        }
        Ok(Next::Pending)
    }
}

impl Iterator for TensorStream {
    type Item = Result<HostTensor, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(TIMEOUT / 10) {
                Ok(Next::Tensor(tensor)) => return Some(Ok(tensor)),
                Ok(Next::End) => return None,
                Ok(Next::Pending | Next::NeedsMemory) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Reads batch after batch, until the end, a failure, or until nobody listens.
fn produce(reader: &Reader, names: Option<&HashSet<String>>, waiter: &Waiter, to: &SyncSender<Result<Batch, Error>>) {
    let most = (reader.budget.limit() / 8).clamp(64 << 10, BATCH);
    for (file, source) in reader.files.iter().enumerate() {
        let tensors = &source.contents().tensors;
        let wanted = |n: &usize| names.is_none_or(|names| names.contains(&tensors[*n].name));
        let mut first = 0;
        while let Some(start) = (first..tensors.len()).find(wanted) {
            let (mut end, mut bytes) = (start + 1, tensors[start].len);
            while end < tensors.len()
                && wanted(&end)
                && source.are_alike(start, end)
                && bytes.saturating_add(tensors[end].len) <= most
            {
                bytes += tensors[end].len;
                end += 1;
            }
            let batch = read(reader, file, start..end, waiter);
            let Some(batch) = batch.transpose() else { return };
            let failed = batch.is_err();
            if to.send(batch).is_err() || failed {
                return;
            }
            first = end;
        }
    }
}

/// Reads some tensors of a file; `None` when cancelled.
fn read(reader: &Reader, file: usize, tensors: Range<usize>, waiter: &Waiter) -> Result<Option<Batch>, Error> {
    let first = &reader.files[file].contents().tensors[tensors.start].name;
    let plan = reader.plan(file, tensors, None)?;
    let Some(charge) = reader.budget.wait(first, plan.memory(), waiter)? else { return Ok(None) };
    let mut watch = |_| if waiter.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let (block, plan) = reader.read_one(file, plan, charge, &mut watch)?;
    Ok(Some(Batch { file, plan, block }))
}
