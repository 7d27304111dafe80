//! Closes descriptors that came from clients, on separate threads.
//!
//! Closing a descriptor can block for any time: a TCP socket may linger, and a FUSE file system may delay its answer.
//! Closing a socket also closes the descriptors in messages that were not received. Therefore one thread for each
//! user closes that user's descriptors.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::account::Account;
use crate::pool::{take_time, yield_to_worker};
use crate::worker::RunQueue;

/// Most descriptors of one user that wait to be closed; then none are received from that user.
const USER_LIMIT: usize = 256;
/// Most descriptors that wait in all; then no connection is accepted.
const TOTAL_LIMIT: usize = 1024;

#[derive(Default)]
struct User {
    /// Descriptors to close; the first is `None` while it is being closed.
    left: VecDeque<Option<OwnedFd>>,
    /// True while a thread closes them.
    served: bool,
}

struct Users {
    users: Mutex<HashMap<u32, User>>,
    empty: Condvar,
    /// Charged for the processor time: a descriptor may be the last of a large file.
    run_queue: Arc<RunQueue>,
    /// Descriptors count as their user's until they are closed.
    descriptors: Arc<Account>,
}

/// Descriptors that are still to be closed, by user.
#[derive(Clone)]
pub(crate) struct DeferredClose(Arc<Users>);

impl DeferredClose {
    pub(crate) fn new(run_queue: Arc<RunQueue>, descriptors: Arc<Account>) -> Self {
        Self(Arc::new(Users { users: Mutex::default(), empty: Condvar::new(), run_queue, descriptors }))
    }

    /// Queues descriptors that came from this user, or over a connection of this user.
    pub(crate) fn put(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        let mut users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fds = fds.into_iter().map(Some).peekable();
        if fds.peek().is_none() {
            return;
        }
        let user = users.entry(uid).or_default();
        let before = user.left.len();
        user.left.extend(fds);
        self.0.descriptors.force(uid, (user.left.len() - before) as u64);
        if !user.served {
            let shared = self.0.clone();
            let name = "dmalaned-closes".to_owned();
            // When no thread can be started, the next call tries again.
            let close = move || {
                yield_to_worker();
                shared.close(uid);
            };
            user.served = thread::Builder::new().name(name).spawn(close).is_ok();
        }
    }

    /// True while nothing should be received from this user.
    pub(crate) fn is_full_of(&self, uid: u32) -> bool {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.get(&uid).is_some_and(|user| user.left.len() >= USER_LIMIT)
    }

    /// True while descriptors of this user wait.
    pub(crate) fn has_of(&self, uid: u32) -> bool {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.contains_key(&uid)
    }

    /// True while no connection should be accepted.
    pub(crate) fn is_full(&self) -> bool {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.values().map(|user| user.left.len()).sum::<usize>() >= TOTAL_LIMIT
    }

    /// Waits until all descriptors are closed, for at most `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.empty.wait_timeout_while(users, timeout, |users| !users.is_empty()));
    }
}

impl Users {
    /// Closes a user's descriptors until there are none.
    fn close(&self, uid: u32) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = users.get_mut(&uid).and_then(|user| user.left.front_mut()) {
            let first = first.take();
            drop(users);
            drop(first);
            self.descriptors.give(uid, 1);
            self.run_queue.charge(uid, take_time());
            users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(user) = users.get_mut(&uid) {
                user.left.pop_front();
            }
        }
        users.remove(&uid);
        if users.is_empty() {
            self.empty.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_accepted_where_few_descriptors_wait() {
        let descriptors = Arc::new(Account::new(10, 10));
        let waiting = DeferredClose::new(Arc::new(RunQueue::new().unwrap()), descriptors.clone());
        assert!(!waiting.is_full() && !waiting.is_full_of(0) && !waiting.has_of(0));
        // They count until they are closed.
        let (read, write) = rustix::pipe::pipe().unwrap();
        waiting.put(0, [read, write]);
        waiting.wait(Duration::from_secs(60));
        assert_eq!(descriptors.in_use(), 0);
    }
}
