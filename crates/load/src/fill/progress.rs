//! How far a job is: bytes that have arrived and were hashed, and the first failure.

use super::error::{Failed, FillError};
use super::job::Job;
use super::options::FillOptions;
use super::order::Order;

/// How far a job is. All of it is behind one lock.
pub(super) struct Progress {
    pub order: Order,
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes that have arrived and that the device does not have yet.
    pub undelivered: u64,
    /// Nothing will have to be hashed any more.
    pub nothing_comes: bool,
    /// The failure that lies first.
    failed: Option<Failed>,
}

impl Progress {
    pub fn new(job: &Job, options: &FillOptions, lanes: Option<u64>) -> Self {
        Self {
            order: Order::new(&job.buffers, options, lanes),
            done: 0,
            undelivered: 0,
            nothing_comes: false,
            failed: None,
        }
    }

    /// Notes a failure, unless one was noted that lies before it.
    pub fn fail(&mut self, (place, error): Failed) {
        if self.failed.as_ref().is_none_or(|(first, _)| place < *first) {
            self.failed = Some((place, error));
        }
    }

    /// The fragments; or the failure.
    pub fn into_order(self) -> Result<Order, FillError> {
        match self.failed {
            Some((_, error)) => Err(error),
            None => Ok(self.order),
        }
    }
}
