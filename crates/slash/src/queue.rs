//! A queue pair as a queue. Where the driver's call blocks, a thread makes it.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use dmalane_device::NoIommu;
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, QueueState, Refused,
    StopReason, Ticket, Waiting, wait_with,
};

use crate::Error;
use crate::card::Pair;
use crate::kernel::Calls;
use crate::worker::{MAX_LEN, Planner, Shared, Worker};

/// Operations in flight, at most.
const CAPACITY: usize = 256;
/// Time that a drop waits for the driver, which gives up on a transfer after 10 s.
const TIMEOUT: Duration = Duration::from_secs(15);
const CAPABILITIES: Capabilities = Capabilities::FROM_HOST
    .union(Capabilities::TO_HOST)
    .union(Capabilities::FENCE)
    .union(Capabilities::STOP)
    .union(Capabilities::ORDERED);

/// The longest sleep without looking at a call that is stuck.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A queue of a card. Operations are done in order; those that touch on both sides become one transfer.
pub(crate) struct SlashQueue {
    shared: Arc<Shared>,
    pair: Arc<Pair>,
    registrar: NoIommu,
    /// Submitted and not flushed.
    waiting: Waiting,
    state: QueueState,
    /// Makes the calls here, where none blocks, until one has failed.
    worker: Option<Worker>,
    /// Gives the worker to the thread, and why it has failed, if it has.
    hand: mpsc::Sender<(Worker, Option<Error>)>,
    thread: Option<thread::JoinHandle<()>>,
    /// Stops the queue pair after a timeout.
    stopper: Option<thread::JoinHandle<()>>,
}

impl SlashQueue {
    pub(crate) fn new(
        number: usize,
        pair: Pair,
        calls: Box<dyn Calls>,
        plans: Planner,
        pages: Vec<Vec<dmalane_dma::BufferSlice>>,
        registrar: NoIommu,
    ) -> Result<Self, Error> {
        let (shared, pair) = (Arc::new(Shared::new()), Arc::new(pair));
        let blocks = calls.depth() == 1;
        let worker = Worker::new(shared.clone(), pair.clone(), plans, calls, pages);
        let named = thread::Builder::new().name(format!("dmalane-slash-{number}"));
        let (hand, worker_comes) = mpsc::channel::<(Worker, Option<Error>)>();
        let work = move || {
            let Ok((worker, failed)) = worker_comes.recv() else { return };
            let worker = match failed {
                Some(why) => worker.fail(why),
                None => Some(worker),
            };
            worker.into_iter().for_each(Worker::run);
        };
        // It is there from the start, so that a failure later finds one.
        let thread = Some(named.spawn(work).map_err(Error::Thread)?);
        let (waiting, state) = (Waiting::new(), QueueState::default());
        let worker = Some(worker);
        let mut this = Self { shared, pair, registrar, waiting, state, worker, hand, thread, stopper: None };
        if blocks {
            this.hand_over(None);
        }
        Ok(this)
    }

    /// Leaves the calls to the thread. After a failure it stops the queue pair, which blocks.
    fn hand_over(&mut self, failed: Option<Error>) {
        if let Some(worker) = self.worker.take()
            && let Err(mpsc::SendError(worker)) = self.hand.send((worker, failed))
        {
            std::mem::forget(worker); // the thread has panicked, and the card may use the buffers
        }
    }

    /// Begins what was submitted, and where there is no thread collects what ends within the time.
    fn drive(&mut self, timeout: Option<Duration>) {
        if let Some(worker) = &mut self.worker {
            let went = match timeout {
                None => worker.begin(),
                Some(timeout) => worker.advance(timeout),
            };
            if let Err(why) = went {
                self.hand_over(Some(why));
            }
        }
    }
}

impl Queue for SlashQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: CAPACITY, max_len: MAX_LEN, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn in_flight(&self) -> usize {
        self.state.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let (limits, registrar) = (self.limits(), &self.registrar);
        let registered = |operation: &Operation| operation.check_registered(registrar);
        self.state.submit(operation, CAPABILITIES, limits, registered, &mut self.waiting)
    }

    fn flush(&mut self) {
        if !self.waiting.is_empty() && self.state.is_running() {
            let mut state = self.shared.lock();
            state.todo.append(&mut self.waiting);
            match self.worker {
                Some(_) => {
                    drop(state);
                    self.drive(None);
                }
                None => self.shared.tell(state),
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        self.flush();
        self.drive(Some(Duration::ZERO));
        let mut shared = self.shared.lock();
        let mut ended = std::mem::take(&mut shared.ended);
        let halted = shared.halted.clone();
        if let Some(reason) = &halted
            && (shared.busy == 0 || shared.stuck)
        {
            // Nothing was begun with these, and what was submitted before them has ended, or never will.
            for (ticket, operation) in std::mem::take(&mut shared.todo).into_iter().chain(self.waiting.drain(..)) {
                let result = Err(OpError::Stopped(reason.clone()));
                ended.push_back(Completion { ticket, operation, result, bytes: 0 });
            }
        }
        drop(shared);
        if let Some(reason) = halted {
            self.state.stop(reason);
        }
        for completion in ended {
            self.state.ended();
            done.push(completion);
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| {
            let interval = left.min(POLL_INTERVAL);
            if this.worker.is_some() {
                this.drive(Some(interval));
            } else if this.shared.lock().stuck {
                thread::sleep(interval);
            } else {
                this.shared.wait(interval);
            }
        })
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    /// Stops, with what was not begun given back at the next poll.
    fn stop(&mut self, reason: StopReason) {
        if self.state.stop(reason.clone()) {
            if matches!(reason, StopReason::Timeout(_)) {
                // The driver waits without a limit for all parts of a call but the last. Stopping the queue pair ends
                // them, but may block itself.
                let pair = self.pair.clone();
                self.stopper = Some(thread::spawn(move || drop(pair.stop())));
            }
            self.shared.lock().halted.get_or_insert(reason);
        }
    }

    fn restart(&mut self) -> bool {
        let stopping = self.stopper.as_ref().is_some_and(|thread| !thread.is_finished());
        if self.state.is_running() || self.in_flight() > 0 || stopping || self.pair.start().is_err() {
            return false;
        }
        self.shared.lock().halted = None;
        self.state.restart()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        match self.state.cancel(ticket, &mut self.waiting) {
            Cancelled::TooLate => self.state.cancel(ticket, &mut self.shared.lock().todo),
            taken_back_or_unknown => taken_back_or_unknown,
        }
    }
}

impl Drop for SlashQueue {
    fn drop(&mut self) {
        self.waiting.clear();
        match self.worker.as_ref().map(Worker::is_busy) {
            Some(true) => self.hand_over(None),
            // The thread gets none, and ends.
            Some(false) => drop((self.worker.take(), std::mem::replace(&mut self.hand, mpsc::channel().0))),
            None => {}
        }
        // A thread that is stuck in a call goes on by itself, with the memory of the call.
        if self.shared.quit(TIMEOUT)
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

dmalane_dma::debug_as!(SlashQueue, |it| "SlashQueue({} in flight)", it.in_flight());
