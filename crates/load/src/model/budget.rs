//! A limit of memory that readers share, and what they have taken of it.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
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
    used: Mutex<u64>,
    freed: Condvar,
}

/// A reader that may wait for memory, as others see it.
#[derive(Default)]
pub(super) struct Waiter {
    cancelled: AtomicBool,
    /// Bytes that it waits for, and for which tensor.
    wanted: Mutex<Option<(u64, String)>>,
}

impl Waiter {
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub fn wanted(&self) -> Option<(u64, String)> {
        lock(&self.wanted).clone()
    }
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
        *lock(&self.budget.used) -= self.bytes;
        self.budget.freed.notify_all();
    }
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, process: process::id(), used: Mutex::default(), freed: Condvar::new() })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        *lock(&self.used)
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
        let mut used = lock(&self.used);
        match used.checked_add(bytes).filter(|sum| *sum <= self.limit) {
            Some(sum) => {
                *used = sum;
                Ok(Charge { budget: self.clone(), bytes })
            }
            None => Err(self.refusal(tensor, bytes, *used)),
        }
    }

    /// Takes bytes as soon as they are free; `None` when the reader is cancelled first.
    pub fn wait(self: &Arc<Self>, tensor: &str, bytes: u64, waiter: &Waiter) -> Result<Option<Charge>, Error> {
        if bytes > self.limit {
            return Err(self.refuse(Some(tensor), bytes));
        }
        let mut used = lock(&self.used);
        // First of all whether it is cancelled: memory that has just come back is for others then.
        while !waiter.is_cancelled() && used.saturating_add(bytes) > self.limit {
            lock(&waiter.wanted).get_or_insert_with(|| (bytes, tensor.to_owned()));
            used = self.freed.wait_timeout(used, EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
        *lock(&waiter.wanted) = None;
        if waiter.is_cancelled() {
            return Ok(None);
        }
        *used += bytes;
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
        assert_eq!(budget.used(), 0);
    }

    /// Of two, each knows what it waits for.
    #[test]
    fn readers_wait_until_memory_comes_back() {
        let budget = Budget::new(100);
        let first = budget.take(None, 60).unwrap();
        let cancelled = Waiter::default();
        assert!(budget.wait("a", 101, &cancelled).is_err(), "it could never be had");
        cancelled.cancel();
        assert!(budget.wait("a", 40, &cancelled).unwrap().is_none());
        let waiters = [("a", 50), ("b", 45)].map(|of| (of, Arc::new(Waiter::default())));
        let waiting = waiters.clone().map(|((tensor, bytes), waiter)| {
            let budget = budget.clone();
            std::thread::spawn(move || budget.wait(tensor, bytes, &waiter).unwrap().is_some())
        });
        for ((tensor, bytes), waiter) in &waiters {
            while waiter.wanted().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(waiter.wanted(), Some((*bytes, (*tensor).to_owned())));
        }
        drop(first);
        assert!(waiting.into_iter().all(|thread| thread.join().unwrap()));
        assert_eq!((budget.used(), waiters.map(|(_, waiter)| waiter.wanted())), (0, [None, None]));
    }
}
