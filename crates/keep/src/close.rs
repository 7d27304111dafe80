//! Descriptors of clients are closed by threads of their own: to close one may take any time.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// Descriptors that are closed for one user, in the order in which they came.
struct Line {
    to: Sender<Vec<OwnedFd>>,
    /// Descriptors that are not closed yet.
    waiting: Arc<AtomicUsize>,
}

/// A thread for each user.
#[derive(Default)]
pub(crate) struct Closers(HashMap<u32, Line>);

impl Closers {
    /// Has descriptors closed that a user has sent, or the socket to it.
    pub(crate) fn close(&mut self, user: u32, fds: Vec<OwnedFd>) {
        if fds.is_empty() {
            return;
        }
        let line = self.0.entry(user).or_insert_with(|| {
            let ((to, from), waiting) = (channel::<Vec<OwnedFd>>(), Arc::new(AtomicUsize::new(0)));
            let left = waiting.clone();
            // Without a thread they are closed where the sender finds nobody.
            let _ = thread::Builder::new().name("dmalane-close".to_owned()).spawn(move || {
                for fds in from {
                    for fd in fds {
                        drop(fd);
                        left.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            });
            Line { to, waiting }
        });
        let count = fds.len();
        line.waiting.fetch_add(count, Ordering::Relaxed);
        if line.to.send(fds).is_err() {
            line.waiting.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Descriptors of a user that are not closed yet.
    pub(crate) fn waiting(&self, user: u32) -> usize {
        self.0.get(&user).map_or(0, |line| line.waiting.load(Ordering::Relaxed))
    }
}
