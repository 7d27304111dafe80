//! How far a job is: bytes that have arrived, were hashed and handed on, and the first failure.

use std::time::Instant;

use super::error::{Failed, FillError};
use super::job::Job;
use super::options::FillOptions;
use super::order::Order;

/// How far a job is. All of it is behind one lock.
pub(super) struct Progress {
    pub order: Order,
    /// Bytes of each extent that have not arrived, or that the sink is not done with.
    missing: Vec<u64>,
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes that have arrived and that the device does not have yet.
    pub undelivered: u64,
    /// Fragments that were hashed and handed on.
    pub handed_on: u64,
    /// Nothing will have to be hashed any more.
    pub nothing_comes: bool,
    /// The failure that lies first.
    failed: Option<Failed>,
    pub first_read: Option<Instant>,
}

impl Progress {
    pub fn new(job: &Job, options: &FillOptions) -> Self {
        Self {
            order: Order::new(&job.buffers, options),
            missing: job.extents.iter().map(|e| e.len).collect(),
            done: 0,
            undelivered: 0,
            handed_on: 0,
            nothing_comes: false,
            failed: None,
            first_read: None,
        }
    }

    /// Counts bytes of an extent; true when they were the last.
    pub fn have(&mut self, extent: usize, len: u64) -> bool {
        self.missing[extent] -= len;
        self.missing[extent] == 0
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
