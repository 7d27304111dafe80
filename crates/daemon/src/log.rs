//! The daemon's log: what its processes tell it, and how much of that is logged.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags};

/// Events of a user that are logged one by one within [`LOG_WINDOW`]; further ones are only counted.
const MAX_LOGGED: u64 = 64;
const LOG_WINDOW: Duration = Duration::from_secs(10);
/// Users with limits of their own; further ones share one, so that a user of many numbers does not flood the log.
const MAX_LOGGED_USERS: usize = 64;
/// Most bytes of a message for the log.
const MAX_NOTE: usize = 512;

/// An event for the daemon's log: a client or a peer that has come, gone or was refused, or a warning.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ServerEvent {
    /// Something is wrong with the daemon or its machine: to be logged in any case.
    pub is_warning: bool,
    /// The event in words, for the log.
    pub text: String,
}

/// Why a client's process ends: its exit status.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It has not said so.
    Killed,
    Disconnected,
    Failed,
    NotOpened,
    Unread,
    ShutDown,
    MissingPage,
    Bug,
}

impl Ending {
    /// The text for the log of an exit status.
    pub(crate) fn text(status: i32) -> &'static str {
        const TEXTS: [&str; Ending::Bug as usize + 1] = [
            "its process was killed",
            "the client disconnected",
            "the connection failed",
            "the client did not open a function in time",
            "the client does not read its answers",
            "the daemon is shutting down",
            "a page of mapped memory was gone when the card accessed it",
            "a bug in the daemon",
        ];
        TEXTS.get(status as usize).unwrap_or(&TEXTS[Self::Bug as usize])
    }
}

/// Tells the daemon, from another process, what a user has caused, or a warning. It is lost when the daemon does not
/// read: nobody waits for the log.
pub(crate) fn tell(daemon: impl AsFd, user: Option<u32>, text: &str) {
    let user = user.map_or(u64::MAX, u64::from).to_ne_bytes();
    let note = [&user, text.as_bytes()].concat();
    let _ = rustix::net::send(daemon, &note[..note.len().min(MAX_NOTE)], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// The daemon's log. It limits the entries of each user, so that peers that come and go do not flood it, and nobody
/// hides what others do.
pub(crate) struct Log {
    sink: Box<dyn FnMut(&ServerEvent) + Send>,
    users: HashMap<Option<u32>, Window>,
}

/// The number of a user's entries since a time.
struct Window(Instant, u64);

impl Log {
    pub(crate) fn new(sink: impl FnMut(&ServerEvent) + Send + 'static) -> Self {
        Self { sink: Box::new(sink), users: HashMap::new() }
    }

    /// Logs what another process tells, if it does: false when there are no others.
    pub(crate) fn hear(&mut self, processes: impl AsFd, now: Instant) -> bool {
        let mut note = [0; MAX_NOTE];
        while let Ok((n, _)) = rustix::net::recv(&processes, &mut note, RecvFlags::DONTWAIT) {
            let Some((user, text)) = note[..n].split_first_chunk::<8>() else { return false };
            let text = String::from_utf8_lossy(text).into_owned();
            match u32::try_from(u64::from_ne_bytes(*user)) {
                Ok(user) => self.of(user, text, now),
                Err(_) => self.warn(text),
            }
        }
        true
    }

    /// Logs what no user causes often.
    pub(crate) fn warn(&mut self, text: String) {
        (self.sink)(&ServerEvent { is_warning: true, text });
    }

    /// Logs an event of a user, or counts it.
    fn of(&mut self, user: u32, text: String, now: Instant) {
        let own = self.users.contains_key(&Some(user)) || self.users.len() < MAX_LOGGED_USERS;
        let Window(_, count) = self.users.entry(own.then_some(user)).or_insert(Window(now, 0));
        *count += 1;
        if *count <= MAX_LOGGED {
            (self.sink)(&ServerEvent { is_warning: false, text });
        }
    }

    /// Logs how many events were only counted, of users whose windows have ended.
    pub(crate) fn catch_up(&mut self, now: Instant) {
        let Self { sink, users } = self;
        users.retain(|user, Window(since, count)| {
            let ended = now.saturating_duration_since(*since) >= LOG_WINDOW;
            let counted = count.saturating_sub(MAX_LOGGED);
            if ended && counted > 0 {
                let whose = user.map_or("other users".to_owned(), |user| format!("user {user}"));
                let text = format!(
                    "{counted} more clients of {whose} connected, disconnected or were refused within {LOG_WINDOW:?}"
                );
                sink(&ServerEvent { is_warning: false, text });
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
        let mut log = Log::new(move |event| {
            assert_eq!(event.is_warning, event.text == "a warning");
            sink.lock().unwrap().push(event.text.clone());
        });
        let taken = || std::mem::take(&mut *entries.lock().unwrap());
        let mut logged = |user, times| {
            (0..times).for_each(|_| log.of(user, "no".to_owned(), start));
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
        // Warnings are always logged, and known for what they are.
        log.warn("a warning".to_owned());
        assert_eq!(taken(), ["a warning"]);
        // A new window.
        log.of(7, "no".to_owned(), start + LOG_WINDOW);
        assert_eq!(taken().len(), 1);
    }
}
