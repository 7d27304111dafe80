//! Closing what a client could have made, where nobody waits for it.
//!
//! Closing a descriptor may block for as long as its maker likes: a TCP socket lingers, a file system in user space answers when it
//! wants to. And closing a socket closes what was sent to it and not received. So each user's descriptors are closed by a thread of their own.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// From so many descriptors of one user on, no more are received from that user.
const OF_ONE: usize = 256;
/// From so many in all on, no connection is taken.
const OF_ALL: usize = 1024;

#[derive(Default)]
struct User {
    /// The one that is being closed is the first.
    left: VecDeque<Option<OwnedFd>>,
    /// A thread closes them.
    served: bool,
}

#[derive(Default)]
struct Users {
    users: Mutex<HashMap<u32, User>>,
    empty: Condvar,
}

/// What is still to be closed.
#[derive(Clone, Default)]
pub(crate) struct DeferredClose(Arc<Users>);

impl DeferredClose {
    /// Has descriptors closed that came from this user, or over a connection of its.
    pub(crate) fn put(&self, uid: u32, fds: impl IntoIterator<Item = OwnedFd>) {
        let mut users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fds = fds.into_iter().map(Some).peekable();
        if fds.peek().is_none() {
            return;
        }
        let user = users.entry(uid).or_default();
        user.left.extend(fds);
        if !user.served {
            let shared = self.0.clone();
            let name = "dmalaned-closes".to_owned();
            // Without a thread they stay until the next ones come.
            user.served = thread::Builder::new().name(name).spawn(move || shared.close(uid)).is_ok();
        }
    }

    /// Nothing more should be received from this user.
    pub(crate) fn is_full_of(&self, uid: u32) -> bool {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.get(&uid).is_some_and(|user| user.left.len() >= OF_ONE)
    }

    /// No connection should be taken.
    pub(crate) fn is_full(&self) -> bool {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.values().map(|user| user.left.len()).sum::<usize>() >= OF_ALL
    }

    /// Waits until all are closed, at most so long.
    pub(crate) fn wait(&self, patience: Duration) {
        let users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.empty.wait_timeout_while(users, patience, |users| !users.is_empty()));
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
