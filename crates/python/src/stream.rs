//! Tensors in the order of their bytes, read ahead within a limit of memory.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::failure::Failure;
use crate::interrupt::Progress;
use crate::memory::{Block, Tensor};
use crate::open::{Inner, Plan, plan, shape_of};

/// Bytes that are read together, at most, except for a larger tensor.
const BATCH: u64 = 32 << 20;
/// How often a waiting thread looks for signals.
const EVERY: Duration = Duration::from_millis(40);
/// How long memory may take to come back before waiting for it is given up.
const TIMEOUT: Duration = Duration::from_millis(500);

/// A limit of memory, and how much of it is in use.
pub(crate) struct Budget {
    limit: u64,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Bytes that a reader waits for.
    waiting: Option<u64>,
}

/// Bytes of a limit, given back when dropped.
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.state().used -= self.bytes;
        self.budget.freed.notify_all();
    }
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), freed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in use, and the limit.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.state().used, self.limit)
    }

    fn refuse(&self, bytes: u64, used: u64) -> Failure {
        let message = match bytes > self.limit {
            true => format!("{bytes} bytes are more than the memory limit of {}: read it in slices", self.limit),
            false => format!(
                "{bytes} bytes are wanted, but {used} of the memory limit of {} are in use: release tensors, or \
                 raise it",
                self.limit
            ),
        };
        Failure::limit(bytes, self.limit, message).number("used", used)
    }

    /// Whether so many bytes can be had now.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), Failure> {
        let used = self.state().used;
        if used.saturating_add(bytes) > self.limit { Err(self.refuse(bytes, used)) } else { Ok(()) }
    }

    /// Takes bytes now.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Result<Charge, Failure> {
        let mut state = self.state();
        match state.used.checked_add(bytes).filter(|used| *used <= self.limit) {
            Some(used) => {
                state.used = used;
                Ok(Charge { budget: self.clone(), bytes })
            }
            None => Err(self.refuse(bytes, state.used)),
        }
    }

    /// Takes bytes as soon as there are so many; `None` when `progress` was cancelled.
    fn wait(self: &Arc<Self>, bytes: u64, progress: &Progress) -> Result<Option<Charge>, Failure> {
        if bytes > self.limit {
            return Err(self.refuse(bytes, self.state().used));
        }
        let mut state = self.state();
        loop {
            // First of all: memory that has just come back is for others then.
            if progress.is_cancelled() {
                state.waiting = None;
                return Ok(None);
            }
            if state.used.saturating_add(bytes) <= self.limit {
                break;
            }
            state.waiting = Some(bytes);
            state = self.freed.wait_timeout(state, EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
        (state.waiting, state.used) = (None, state.used + bytes);
        Ok(Some(Charge { budget: self.clone(), bytes }))
    }
}

/// Tensors that were read together.
struct Batch {
    file: usize,
    tensors: Range<usize>,
    plan: Plan,
    block: Arc<Block>,
}

/// Tensors in the order of their bytes. A thread reads ahead; it ends with this object.
#[pyclass(module = "dmalane")]
pub(crate) struct Stream {
    inner: Arc<Inner>,
    progress: Arc<Progress>,
    batches: Mutex<Receiver<Result<Batch, Failure>>>,
    ready: VecDeque<Tensor>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.progress.cancel();
    }
}

impl Stream {
    /// Reads all tensors, or those of these names.
    pub(crate) fn new(inner: Arc<Inner>, names: Option<HashSet<String>>) -> Self {
        // One batch is in use, one waits, one is being read.
        let (sender, batches) = sync_channel(1);
        let progress = Arc::new(Progress::default());
        let (model, watched) = (inner.clone(), progress.clone());
        thread::spawn(move || produce(&model, names.as_ref(), &watched, &sender));
        Self { inner, progress, batches: Mutex::new(batches), ready: VecDeque::new() }
    }

    /// Waits for the next batch; `None` at the end.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Option<Result<Batch, Failure>>> {
        let mut stuck: Option<Instant> = None;
        loop {
            let received =
                py.detach(|| self.batches.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(EVERY));
            match received {
                Ok(batch) => return Ok(Some(batch)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            py.check_signals()?;
            let (waiting, used) = {
                let state = self.inner.budget.state();
                (state.waiting, state.used)
            };
            // The reader waits for memory, and this thread for the reader: only garbage or other threads can help.
            match (waiting, stuck) {
                (None, _) => stuck = None,
                (Some(_), None) => {
                    py.import("gc")?.call_method0("collect")?;
                    stuck = Some(Instant::now());
                }
                (Some(bytes), Some(since)) if since.elapsed() > TIMEOUT => {
                    return Err(self.inner.budget.refuse(bytes, used).into());
                }
                _ => {}
            }
        }
    }
}

#[pymethods]
impl Stream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Tensor>> {
        self.inner.open()?;
        while self.ready.is_empty() {
            let batch = match self.next_batch(py) {
                Ok(Some(batch)) => batch?,
                Ok(None) => return Ok(None),
                Err(error) => {
                    // A read that nobody waits for must not take the memory that comes back.
                    self.progress.cancel();
                    return Err(error);
                }
            };
            let Batch { file, tensors, plan, block } = batch;
            for (tensor, place) in self.inner.files[file].model.tensors[tensors].iter().zip(&plan.places) {
                self.ready.push_back(Tensor::new(tensor, shape_of(tensor), block.clone(), *place, tensor.len));
            }
        }
        Ok(self.ready.pop_front())
    }
}

/// Reads batch after batch, until the end, a failure, or until nobody listens.
fn produce(
    inner: &Inner,
    names: Option<&HashSet<String>>,
    progress: &Progress,
    to: &SyncSender<Result<Batch, Failure>>,
) {
    let most = (inner.budget.used().1 / 8).clamp(64 << 10, BATCH);
    for (file, source) in inner.files.iter().enumerate() {
        let tensors = &source.model.tensors;
        let wanted = |n: &usize| names.is_none_or(|names| names.contains(&tensors[*n].name));
        let mut first = 0;
        while let Some(start) = (first..tensors.len()).find(wanted) {
            let (mut end, mut bytes) = (start + 1, tensors[start].len);
            while end < tensors.len() && wanted(&end) && bytes.saturating_add(tensors[end].len) <= most {
                bytes += tensors[end].len;
                end += 1;
            }
            let batch = read(inner, file, start..end, progress);
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
fn read(inner: &Inner, file: usize, tensors: Range<usize>, progress: &Progress) -> Result<Option<Batch>, Failure> {
    let plans = [(file, plan(&inner.files[file], tensors.clone(), None)?)];
    let Some(charge) = inner.budget.wait(plans[0].1.memory(), progress)? else { return Ok(None) };
    let block = inner
        .read(&plans, vec![charge], progress)?
        .pop()
        .ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
    let [(_, plan)] = plans;
    Ok(Some(Batch { file, tensors, plan, block }))
}
