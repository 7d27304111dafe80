//! Events for the daemon's log, and how many of them are logged.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Events of a user that are logged one by one within [`LOG_WINDOW`]; further ones are only counted.
const MAX_LOGGED: u32 = 64;
const LOG_WINDOW: Duration = Duration::from_secs(10);
/// Users with limits of their own; further ones share one, so that a user of many numbers does not flood the log.
const MAX_LOGGED_USERS: usize = 64;

/// Resources of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClientResources {
    /// Buffers.
    pub buffers: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Mappings.
    pub mappings: usize,
    /// Card memory in bytes.
    pub card: u64,
}

/// An event for the daemon's log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A client has connected and opened a function.
    Connected {
        /// Number of the client.
        client: u64,
        /// Process of the client.
        pid: u32,
        /// User of the client.
        uid: u32,
    },
    /// A connection was refused.
    Refused {
        /// Process that connected.
        pid: u32,
        /// User that connected.
        uid: u32,
        /// Reason.
        why: &'static str,
    },
    /// This many further clients of a user, or of several, came, went or were refused without a log entry each.
    More(u64, Option<u32>),
    /// A client has disconnected, and its resources were released.
    Disconnected {
        /// Number of the client.
        client: u64,
        /// Why the connection ended.
        why: &'static str,
        /// Released resources.
        released: ClientResources,
        /// Time that its queues took to stop.
        after: Duration,
    },
    /// A client has disconnected, but its queues have not stopped; its resources stay allocated until they do.
    NotStopped {
        /// Number of the client.
        client: u64,
        /// Resources that stay allocated.
        resources: ClientResources,
    },
    /// The kernel does not let the daemon watch clients' memory: a client that gives pages back makes the kernel charge
    /// new ones to the daemon's control group.
    Unguarded(Errno),
    /// A connection could not be accepted for lack of descriptors or memory; the daemon will try again.
    AcceptFailed(Errno),
}

impl fmt::Display for ServerEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { client, pid, uid } => write!(f, "client {client}: process {pid} of user {uid}"),
            Self::Refused { pid, uid, why } => write!(f, "refused process {pid} of user {uid}: {why}"),
            Self::More(n, user) => {
                let whose = user.map_or("other users".to_owned(), |user| format!("user {user}"));
                write!(f, "{n} more clients of {whose} connected, disconnected or were refused within {LOG_WINDOW:?}")
            }
            Self::Disconnected { client, why, released, after } => {
                let ClientResources { buffers, bytes, mappings, card } = released;
                write!(
                    f,
                    "client {client}: {why}; stopped after {after:?}, released {buffers} buffers ({bytes} bytes), \
                     {mappings} mappings, {card} bytes of card memory"
                )
            }
            Self::NotStopped { client, resources } => write!(
                f,
                "client {client}: its queues have not stopped; still allocated: {} buffers ({} bytes), {} bytes of \
                 card memory",
                resources.buffers, resources.bytes, resources.card
            ),
            Self::Unguarded(e) => write!(
                f,
                "userfaultfd is not allowed here ({e}): clients that give back pages of mapped memory make this \
                 control group pay for new ones; allow it in the seccomp profile (Linux 5.11 or later)"
            ),
            Self::AcceptFailed(e) => write!(f, "cannot accept a connection now: {e}"),
        }
    }
}

/// The daemon's log. It limits the entries of each user, so that peers that come and go do not flood it, and nobody
/// hides what others do.
pub(crate) struct Log {
    sink: Box<dyn FnMut(&ServerEvent) + Send>,
    users: HashMap<Option<u32>, Window>,
}

/// The entries of a user since a time: those that were logged, and those that were counted.
struct Window(Instant, u32, u64);

impl Log {
    pub(crate) fn new(sink: impl FnMut(&ServerEvent) + Send + 'static) -> Self {
        Self { sink: Box::new(sink), users: HashMap::new() }
    }

    /// Logs an event that no user causes often.
    pub(crate) fn always(&mut self, event: &ServerEvent) {
        (self.sink)(event);
    }

    /// Logs an event of a user, or counts it.
    pub(crate) fn of(&mut self, user: u32, event: &ServerEvent, now: Instant) {
        let own = self.users.contains_key(&Some(user)) || self.users.len() < MAX_LOGGED_USERS;
        let Window(_, logged, counted) = self.users.entry(own.then_some(user)).or_insert(Window(now, 0, 0));
        if *logged < MAX_LOGGED {
            *logged += 1;
            (self.sink)(event);
        } else {
            *counted += 1;
        }
    }

    /// Logs how many events were only counted, of users whose windows have ended.
    pub(crate) fn catch_up(&mut self, now: Instant) {
        let Self { sink, users } = self;
        users.retain(|user, Window(since, _, counted)| {
            let ended = now.saturating_duration_since(*since) >= LOG_WINDOW;
            if ended && *counted > 0 {
                sink(&ServerEvent::More(*counted, *user));
            }
            !ended
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn nobody_floods_the_log_or_hides_what_others_do() {
        let (entries, start) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
        let sink = entries.clone();
        let mut log = Log::new(move |event| sink.lock().unwrap().push(event.to_string()));
        let taken = || std::mem::take(&mut *entries.lock().unwrap());
        let refused = |uid| ServerEvent::Refused { pid: 1, uid, why: "no" };
        let mut logged = |user, times| {
            (0..times).for_each(|_| log.of(user, &refused(user), start));
            taken().len()
        };
        assert_eq!([(7, 100), (8, 64), (7, 1)].map(|(user, times)| logged(user, times)), [64, 64, 0]);
        // Users beyond a number share a limit.
        let more: usize = (100..100 + 4 * MAX_LOGGED_USERS as u32).map(|user| logged(user, 1)).sum();
        assert_eq!(more, MAX_LOGGED_USERS - 2 + MAX_LOGGED as usize);
        log.catch_up(start + LOG_WINDOW / 2);
        assert!(taken().is_empty());
        log.catch_up(start + LOG_WINDOW);
        let mut counted = taken();
        counted.sort();
        let within = "connected, disconnected or were refused within 10s";
        let others = 4 * MAX_LOGGED_USERS - (MAX_LOGGED_USERS - 2) - MAX_LOGGED as usize;
        let text = |n: usize, whose| format!("{n} more clients of {whose} {within}");
        assert_eq!(counted, [text(others, "other users"), text(37, "user 7")]);
        // A new window.
        log.of(7, &refused(7), start + LOG_WINDOW);
        assert_eq!(taken().len(), 1);
    }
}
