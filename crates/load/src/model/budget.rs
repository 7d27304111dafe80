//! A limit of memory that readers share, and what they have taken of it.

use std::process;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use dmalane_dma::lock;

use crate::error::Error;

/// How often a reader that waits for memory looks whether it was cancelled.
const EVERY: Duration = Duration::from_millis(40);

/// A limit of memory, and how much of it is in use.
pub(super) struct Budget {
    limit: u64,
    /// The process that reads within it.
    process: u32,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Bytes that a reader waits for, and for which tensor.
    waiting: Option<(u64, String)>,
}

/// Bytes of a limit, given back when dropped.
pub(super) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        // In a child of `fork` nobody reads within it, and the thread that has the lock may not exist.
        if process::id() != self.budget.process {
            return;
        }
        lock(&self.budget.state).used -= self.bytes;
        self.budget.freed.notify_all();
    }
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, process: process::id(), state: Mutex::default(), freed: Condvar::new() })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        lock(&self.state).used
    }

    /// Bytes that a reader waits for, and for which tensor.
    pub fn waiting(&self) -> Option<(u64, String)> {
        lock(&self.state).waiting.clone()
    }

    pub fn refuse(&self, tensor: Option<&str>, wanted: u64) -> Error {
        self.refusal(tensor, wanted, self.used())
    }

    fn refusal(&self, tensor: Option<&str>, wanted: u64, used: u64) -> Error {
        Error::Limit { tensor: tensor.map(str::to_owned), wanted, used, limit: self.limit }
    }

    /// Whether this number of bytes can be had now.
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        let used = self.used();
        if used.saturating_add(bytes) > self.limit { Err(self.refusal(None, bytes, used)) } else { Ok(()) }
    }

    /// Takes bytes now, for this tensor.
    pub fn take(self: &Arc<Self>, tensor: Option<&str>, bytes: u64) -> Result<Charge, Error> {
        let mut state = lock(&self.state);
        match state.used.checked_add(bytes).filter(|used| *used <= self.limit) {
            Some(used) => {
                state.used = used;
                Ok(Charge { budget: self.clone(), bytes })
            }
            None => Err(self.refusal(tensor, bytes, state.used)),
        }
    }

    /// Takes bytes as soon as they are free; `None` when `cancelled` says so first.
    pub fn wait(
        self: &Arc<Self>,
        tensor: &str,
        bytes: u64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Charge>, Error> {
        if bytes > self.limit {
            return Err(self.refuse(Some(tensor), bytes));
        }
        let mut state = lock(&self.state);
        loop {
            // First of all: memory that has just come back is for others then.
            if cancelled() {
                state.waiting = None;
                return Ok(None);
            }
            if state.used.saturating_add(bytes) <= self.limit {
                break;
            }
            state.waiting.get_or_insert_with(|| (bytes, tensor.to_owned()));
            state = self.freed.wait_timeout(state, EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
        (state.waiting, state.used) = (None, state.used + bytes);
        Ok(Some(Charge { budget: self.clone(), bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_add_up_and_come_back() {
        let budget = Budget::new(100);
        let first = budget.take(None, 60).unwrap();
        assert!(matches!(budget.take(Some("a"), 41), Err(Error::Limit { wanted: 41, used: 60, limit: 100, .. })));
        assert!(budget.check(u64::MAX).is_err() && budget.check(40).is_ok());
        let second = budget.take(None, 40).unwrap();
        drop(first);
        assert_eq!(budget.used(), 40);
        drop(second);
        assert_eq!((budget.used(), budget.waiting()), (0, None));
    }

    #[test]
    fn a_reader_waits_until_memory_comes_back() {
        let budget = Budget::new(100);
        let first = budget.take(None, 60).unwrap();
        assert!(budget.wait("a", 101, &|| false).is_err(), "it could never be had");
        assert!(budget.wait("a", 50, &|| true).unwrap().is_none());
        let (mine, never) = (budget.clone(), || false);
        let waiting = std::thread::spawn(move || mine.wait("a", 50, &never).unwrap().is_some());
        while budget.waiting().is_none() {
            std::thread::yield_now();
        }
        drop(first);
        assert!(waiting.join().unwrap());
        assert_eq!((budget.used(), budget.waiting()), (0, None));
    }
}
