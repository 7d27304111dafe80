//! Events for the daemon's log, and how many of them are logged.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Refusals of a user that are logged one by one within [`LOG_WINDOW`]; further ones are only counted.
const MAX_LOGGED_REFUSALS: u32 = 8;
const LOG_WINDOW: Duration = Duration::from_secs(10);
/// Clients of a user that come and go are logged one by one so often within [`LOG_WINDOW`].
const MAX_LOGGED_CLIENTS: u32 = 64;
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
    /// This many further connections of a user, or of several, were refused without a log entry each.
    RefusedMore(u64, Option<u32>),
    /// This many further clients of a user, or of several, connected or disconnected without a log entry each.
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
    Quarantined {
        /// Number of the client.
        client: u64,
        /// Resources that stay allocated.
        resources: ClientResources,
    },
    /// A connection could not be accepted for lack of descriptors or memory; the daemon will try again.
    AcceptFailed(Errno),
}

impl fmt::Display for ServerEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { client, pid, uid } => write!(f, "client {client}: process {pid} of user {uid}"),
            Self::Refused { pid, uid, why } => write!(f, "refused process {pid} of user {uid}: {why}"),
            Self::RefusedMore(n, user) => write!(f, "refused {n} more connections{} within {LOG_WINDOW:?}", Of(*user)),
            Self::More(n, user) => {
                write!(f, "{n} more clients{} connected or disconnected within {LOG_WINDOW:?}", Of(*user))
            }
            Self::Disconnected { client, why, released, after } => {
                let ClientResources { buffers, bytes, mappings, card } = released;
                write!(
                    f,
                    "client {client}: {why}; stopped after {after:?}, released {buffers} buffers ({bytes} bytes), \
                     {mappings} mappings, {card} bytes of card memory"
                )
            }
            Self::Quarantined { client, resources } => write!(
                f,
                "client {client}: its queues have not stopped; still allocated: {} buffers ({} bytes), {} bytes of \
                 card memory",
                resources.buffers, resources.bytes, resources.card
            ),
            Self::AcceptFailed(e) => write!(f, "cannot accept a connection now: {e}"),
        }
    }
}

/// Whose: of a user, or of those beyond [`MAX_LOGGED_USERS`].
struct Of(Option<u32>);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(user) => write!(f, " of user {user}"),
            None => write!(f, " of other users"),
        }
    }
}

/// The daemon's log.
pub(crate) struct Log {
    sink: Box<dyn FnMut(&ServerEvent) + Send>,
    refusals: LogLimits,
    comings: LogLimits,
    /// Of errors of `accept`, which are no user's.
    accept_failures: LogLimits,
}

impl Log {
    pub(crate) fn new(sink: impl FnMut(&ServerEvent) + Send + 'static) -> Self {
        let (refusals, comings, accept_failures) = Default::default();
        Self { sink: Box::new(sink), refusals, comings, accept_failures }
    }

    /// Logs an event.
    pub(crate) fn always(&mut self, event: &ServerEvent) {
        (self.sink)(event);
    }

    /// Logs that a client of a user has come or gone, or counts it.
    pub(crate) fn client(&mut self, user: u32, event: &ServerEvent) {
        if self.comings.should_log(user, Instant::now(), MAX_LOGGED_CLIENTS) {
            (self.sink)(event);
        }
    }

    /// The same, for a user who was refused.
    pub(crate) fn refused(&mut self, user: u32, event: &ServerEvent) {
        if self.refusals.should_log(user, Instant::now(), MAX_LOGGED_REFUSALS) {
            (self.sink)(event);
        }
    }

    pub(crate) fn accept_failed(&mut self, error: Errno) {
        if self.accept_failures.should_log(0, Instant::now(), MAX_LOGGED_REFUSALS) {
            (self.sink)(&ServerEvent::AcceptFailed(error));
        }
    }

    /// Logs how many events were only counted.
    pub(crate) fn catch_up(&mut self) {
        let now = Instant::now();
        for (count, user) in self.refusals.suppressed(now) {
            (self.sink)(&ServerEvent::RefusedMore(count, user));
        }
        for (count, user) in self.comings.suppressed(now) {
            (self.sink)(&ServerEvent::More(count, user));
        }
        self.accept_failures.suppressed(now);
    }
}

/// Limits the log entries of a kind, for each user: nobody hides what others do.
#[derive(Default)]
struct LogLimits(HashMap<Option<u32>, LogLimit>);

impl LogLimits {
    /// True when this entry of a user should be logged.
    fn should_log(&mut self, user: u32, now: Instant, most: u32) -> bool {
        let own = self.0.contains_key(&Some(user)) || self.0.len() < MAX_LOGGED_USERS;
        self.0.entry(own.then_some(user)).or_default().should_log(now, most)
    }

    /// The numbers of entries that were not logged, of users whose windows have ended.
    fn suppressed(&mut self, now: Instant) -> Vec<(u64, Option<u32>)> {
        let mut counts = Vec::new();
        self.0.retain(|user, limit| {
            counts.extend(limit.suppressed(now).map(|count| (count, *user)));
            limit.since.is_some()
        });
        counts
    }
}

/// Limits the log entries of a kind, so that peers that come and go do not flood the log.
#[derive(Default)]
struct LogLimit {
    since: Option<Instant>,
    logged: u32,
    suppressed: u64,
}

impl LogLimit {
    /// True when this entry should be logged: one of the first `most` of the window.
    fn should_log(&mut self, now: Instant, most: u32) -> bool {
        self.since.get_or_insert(now);
        let log = self.logged < most;
        if log {
            self.logged += 1
        } else {
            self.suppressed += 1
        }
        log
    }

    /// The number of entries that were not logged, once the window has ended.
    fn suppressed(&mut self, now: Instant) -> Option<u64> {
        self.since.filter(|since| now.duration_since(*since) >= LOG_WINDOW)?;
        Some(std::mem::take(self).suppressed).filter(|n| *n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_hides_what_others_do() {
        let (mut limits, start) = (LogLimits::default(), Instant::now());
        let mut logged = |user, times| (0..times).filter(|_| limits.should_log(user, start, 8)).count();
        assert_eq!([(7, 100), (8, 8), (7, 1)].map(|(user, times)| logged(user, times)), [8, 8, 0]);
        // Users beyond a number share a limit.
        let more: usize = (100..100 + 2 * MAX_LOGGED_USERS as u32).map(|user| logged(user, 1)).sum();
        assert_eq!(more, MAX_LOGGED_USERS - 2 + 8);
        let mut suppressed = limits.suppressed(start + LOG_WINDOW);
        suppressed.sort();
        assert_eq!(suppressed, [(MAX_LOGGED_USERS as u64 - 6, None), (93, Some(7))]);
        assert!(limits.0.is_empty() && limits.suppressed(start + 2 * LOG_WINDOW).is_empty());
        let texts = [ServerEvent::More(3, Some(7)), ServerEvent::RefusedMore(4, None)].map(|event| event.to_string());
        assert_eq!(texts[0], "3 more clients of user 7 connected or disconnected within 10s");
        assert_eq!(texts[1], "refused 4 more connections of other users within 10s");
    }

    #[test]
    fn repeated_refusals_do_not_flood_the_log() {
        let mut refusals = LogLimit::default();
        let start = Instant::now();
        let logged =
            (0..1000).filter(|i| refusals.should_log(start + Duration::from_millis(*i), MAX_LOGGED_REFUSALS)).count();
        assert_eq!(logged, MAX_LOGGED_REFUSALS as usize);
        assert_eq!(refusals.suppressed(start + LOG_WINDOW / 2), None);
        assert_eq!(refusals.suppressed(start + LOG_WINDOW), Some(1000 - u64::from(MAX_LOGGED_REFUSALS)));
        assert_eq!(refusals.suppressed(start + LOG_WINDOW), None);
        assert!(refusals.should_log(start + LOG_WINDOW, MAX_LOGGED_REFUSALS), "a new window");
        assert_eq!(refusals.suppressed(start + 2 * LOG_WINDOW), None, "none were suppressed");
    }
}
