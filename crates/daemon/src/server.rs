//! The server: accepts connections, answers requests, and releases the resources of disconnected clients.
//!
//! One thread, the control thread, receives requests, one message of each user in turn, and answers those that take
//! microseconds. A pool of threads does what a client can make long (see `pool.rs`). The worker copies data. A
//! connection is closed only after the card has stopped accessing the client's memory: to a client, the end of the
//! connection means the same as a status of 0.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use zerocopy::IntoBytes;

use crate::account::{Account, Charge};
use crate::config::{Budget, Config};
use crate::connection::{Answer, ClientResources, Connection, Handled, ServerState};
use crate::deferred_close::DeferredClose;
use crate::error::ServerError;
use crate::function::{Function, MemoryCharge};
use crate::listener::Listener;
use crate::log::{LogLimits, MAX_LOGGED_CLIENTS, MAX_LOGGED_REFUSALS, ServerEvent};
use crate::peer::Peer;
use crate::pool::{Pool, take_time, yield_to_worker};
use crate::socket::{self, Received, SendTimes};
use crate::wire::{ANSWER, ClientRequest, Code, MAX_MESSAGE, MAX_ROWS, RowAnswer, TotalsAnswer, failed, message};
use crate::worker::RunQueue;

/// Connections beyond the limit, reserved for status requests of the operator.
const OPERATOR_CONNECTIONS: usize = 4;
/// Timeout of shutdown for the descriptors of clients to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time of the control thread that a user may take at once, twice.
const BURST: Duration = Duration::from_millis(20);
/// Requests of a user in the pool. Further ones wait in their sockets: each may have 64 descriptors.
const MAX_IN_POOL: usize = 4;
/// An unpaid connection blocks `accept` for this many times its cost, so that such connections do not take much of the
/// processors' time. It was refused, or its user owes more than is remembered.
const UNPAID_REST: u32 = 3;
/// The longest that an unpaid connection blocks `accept`: another process may have had the processor.
const MAX_REST: Duration = Duration::from_millis(1);
/// Why a client is disconnected whose sockets have thousands of waiters.
const SLOW_TO_WAKE: &str = "it takes too long to wake the client: too many wait at its sockets";
/// Interval of the checks whether a queue has stopped.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Counters of a daemon since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Clients that have opened a function.
    pub served: u64,
    /// Clients among them that have disconnected and whose resources were released.
    pub released: u64,
    /// Connections refused.
    pub refused: u64,
    /// Requests answered.
    pub requests: u64,
    /// Requests refused.
    pub errors: u64,
    /// Disconnected clients whose queues did not stop in time.
    pub quarantined: u64,
}

struct Entry {
    socket: OwnedFd,
    peer: Peer,
    /// `None` while the pool has it.
    connection: Option<Box<Connection>>,
    /// The row of the status while the pool has the connection.
    row: RowAnswer,
    abort: Arc<AtomicBool>,
    /// The connection may have carried descriptors.
    carries: bool,
    /// The connection has opened a function and is counted in the totals.
    counted: bool,
    since: Instant,
    /// For the socket; `None` for an administrator beyond the limit.
    _charge: Option<Charge>,
    /// Of the answers.
    send_times: SendTimes,
    /// Why the connection is to be closed when the pool returns it.
    ended: Option<&'static str>,
}

/// How a connection is polled.
#[derive(Clone, Copy, PartialEq)]
enum Interest {
    /// For requests.
    Requests,
    /// For its end alone.
    End,
}

/// A disconnected client, until the card has stopped accessing its memory.
struct Closing {
    entry: Entry,
    why: &'static str,
    since: Instant,
    quarantined: bool,
    /// The resources that are being released, once the queues have stopped, and the time that they took.
    releasing: Option<(ClientResources, Duration)>,
}

/// A result of the pool.
enum Done {
    /// The request of a client was handled.
    Handled(Box<Connection>, Handled),
    /// A disconnected client's resources were released, but for its share of the card.
    Released(u64, Option<MemoryCharge>),
}

/// Which clients' messages are next: one of each user at a time. While several users are connected, a user has at most
/// half of the control thread's time.
#[derive(Default)]
struct Turns {
    /// The client of each user that had a turn in the last round.
    last: HashMap<u32, u64>,
    /// When the time that a user took will have been a half of the time since.
    even: HashMap<u32, Instant>,
}

impl Turns {
    /// One client of each user, of those that have a message: the next one after the last.
    fn choose(&mut self, ready: impl Iterator<Item = (u32, u64)>) -> Vec<(u32, u64)> {
        let mut chosen: HashMap<u32, u64> = HashMap::new();
        for (user, client) in ready {
            let last = self.last.get(&user).copied().unwrap_or(0);
            let rank = |client: u64| (client <= last, client);
            let best = chosen.entry(user).or_insert(client);
            *best = std::cmp::min_by_key(*best, client, |client| rank(*client));
        }
        self.last.clone_from(&chosen);
        chosen.into_iter().collect()
    }

    /// Charges a user for the time of a message.
    fn charge(&mut self, user: u32, now: Instant, took: Duration) {
        self.even.retain(|_, even| *even > now);
        *self.even.entry(user).or_insert(now) += 2 * took;
    }

    /// Until when a user has to wait.
    fn waits(&self, user: u32, now: Instant) -> Option<Instant> {
        self.even.get(&user)?.checked_sub(BURST).filter(|until| *until > now)
    }
}

/// A daemon.
pub struct Server {
    state: Arc<ServerState>,
    pool: Pool<Done>,
    connections: BTreeMap<u64, Entry>,
    closing: BTreeMap<u64, Closing>,
    next: u64,
    totals: Totals,
    refusals: LogLimits,
    comings: LogLimits,
    /// Of errors of `accept`, which are no user's.
    accept_failures: LogLimits,
    started: Instant,
    /// Peers that wait to be accepted can send descriptors only after their greeting (Linux 6.16).
    rights_off: bool,
    turns: Turns,
    worker: Option<JoinHandle<()>>,
    log: Box<dyn FnMut(&ServerEvent) + Send>,
}

impl Server {
    /// A daemon with a software card, and its worker.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::Io`].
    pub fn new(config: Config, log: impl FnMut(&ServerEvent) + Send + 'static) -> Result<Self, ServerError> {
        config.check()?;
        let run_queue = Arc::new(RunQueue::new()?);
        let budget = Arc::new(Budget::new(&config));
        let (all, user) = config.memory_limits();
        let account = Arc::new(Account::new(all, user));
        let descriptors = Arc::new(Account::of_descriptors(config.descriptor_limits()));
        let (run, spin) = (run_queue.clone(), config.spin);
        let charged = run_queue.clone();
        let worker = thread::Builder::new().name("dmalaned-worker".to_owned()).spawn(move || run.run(spin))?;
        let pool = Pool::new(move |user, took| charged.charge(user, took))?;
        Ok(Self {
            state: Arc::new(ServerState {
                config,
                budget,
                account,
                deferred_close: DeferredClose::new(run_queue.clone(), descriptors.clone()),
                descriptors,
                run_queue,
                pause: pool.pause(),
            }),
            pool,
            connections: BTreeMap::new(),
            closing: BTreeMap::new(),
            next: 1,
            totals: Totals::default(),
            refusals: LogLimits::default(),
            comings: LogLimits::default(),
            accept_failures: LogLimits::default(),
            started: Instant::now(),
            rights_off: false,
            turns: Turns::default(),
            worker: Some(worker),
            log: Box::new(log),
        })
    }

    /// Serves until `stop` becomes readable or its other end is closed. Then closes each client's connection once the
    /// client's queues have stopped. The calling thread's nice value becomes 10, as that of all threads but the worker.
    ///
    /// # Errors
    /// [`ServerError::Io`], [`ServerError::WorkerDied`].
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> Result<Totals, ServerError> {
        yield_to_worker();
        self.rights_off = listener.rights_off;
        let result = self.serve(&listener, stop);
        // No new connections, and no more changes of clients' memory. Pending connections may carry descriptors.
        self.state.deferred_close.put(u32::MAX, listener.close());
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.close(id, "the daemon is shutting down");
        }
        while (self.closing.values().any(|c| !c.quarantined) || !self.connections.is_empty()) && self.worker_lives() {
            thread::sleep(STOP_POLL_INTERVAL);
            self.collect();
            self.release();
        }
        self.state.deferred_close.wait(CLOSE_TIMEOUT);
        result.map(|()| self.totals)
    }

    fn worker_lives(&self) -> bool {
        self.worker.as_ref().is_some_and(|w| !w.is_finished())
    }

    fn serve(&mut self, listener: &Listener, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        let listener = listener.socket.as_ref().expect("a listener that is not closed");
        let mut buffer = [0; MAX_MESSAGE];
        // No connection is accepted before this time.
        let mut accept_retry: Option<Instant> = None;
        loop {
            accept_retry = accept_retry.filter(|until| Instant::now() < *until);
            let deferred_close = &self.state.deferred_close;
            // Where sockets may carry descriptors from the start, closing one may block.
            let can_accept = accept_retry.is_none() && (self.rights_off || !deferred_close.is_full());
            let now = Instant::now();
            let first = self.connections.values().next().map(|c| c.peer.user);
            let alone = self.connections.values().all(|c| Some(c.peer.user) == first);
            let waits = |user: u32| self.turns.waits(user, now).filter(|_| !alone);
            let run_queue = &self.state.run_queue;
            let mut in_pool: HashMap<u32, usize> = HashMap::new();
            for entry in self.connections.values().filter(|c| c.connection.is_none()) {
                *in_pool.entry(entry.peer.user).or_default() += 1;
            }
            let has_too_many = |user| {
                let over = self.state.descriptors.is_over(user, deferred_close.has_of(user));
                over || deferred_close.is_full_of(user)
            };
            // Of a busy connection, and of users with too many descriptors to close or messages, or whose share of the
            // worker does not pay for what this thread and the pool do for them, only the end is noticed.
            let interest = |c: &Entry| match c.ended {
                Some(_) => None,
                None if c.connection.is_none() || has_too_many(c.peer.user) => Some(Interest::End),
                None if in_pool.get(&c.peer.user).is_some_and(|n| *n >= MAX_IN_POOL) => Some(Interest::End),
                None if waits(c.peer.user).is_some() => Some(Interest::End),
                None if !alone && run_queue.owes(c.peer.user) => Some(Interest::End),
                None => Some(Interest::Requests),
            };
            let clients: Vec<(u64, Interest)> =
                self.connections.iter().filter_map(|(id, c)| Some((*id, interest(c)?))).collect();
            let full = !can_accept || self.connections.values().any(|c| has_too_many(c.peer.user));
            let (stopped, incoming, ready) = {
                let sockets = clients.iter().map(|(id, interest)| {
                    let flags = if *interest == Interest::End { PollFlags::empty() } else { PollFlags::IN };
                    PollFd::from_borrowed_fd(self.connections[id].socket.as_fd(), flags)
                });
                let listening = can_accept.then_some(listener.as_fd());
                let always = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
                let mut fds: Vec<PollFd<'_>> = [always(stop), always(self.pool.wake()), always(run_queue.paid())]
                    .into_iter()
                    .chain(sockets)
                    .chain(listening.map(always))
                    .collect();
                let wait = if self.closing.values().any(|c| !c.quarantined && c.releasing.is_none()) {
                    STOP_POLL_INTERVAL
                } else if full {
                    Duration::from_millis(20)
                } else {
                    Duration::from_millis(500)
                };
                let paused = self.connections.values().filter_map(|c| waits(c.peer.user)).min();
                let soonest = paused.into_iter().chain(accept_retry).min();
                let wait = soonest.map_or(wait, |until| wait.min(until.saturating_duration_since(now)));
                let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
                match poll(&mut fds, Some(&timeout)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(io::Error::from(e).into()),
                }
                let answers = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
                let ready: Vec<(u64, Interest)> =
                    (3..).zip(clients).filter(|(i, _)| answers(*i)).map(|(_, c)| c).collect();
                (answers(0), listening.is_some() && answers(fds.len() - 1), ready)
            };
            if stopped {
                return Ok(());
            }
            self.state.run_queue.take_paid();
            if !self.worker_lives() {
                return Err(ServerError::WorkerDied);
            }
            for (count, user) in self.refusals.suppressed(Instant::now()) {
                (self.log)(&ServerEvent::RefusedMore(count, user));
            }
            for (count, user) in self.comings.suppressed(Instant::now()) {
                (self.log)(&ServerEvent::More(count, user));
            }
            self.accept_failures.suppressed(Instant::now());
            self.expire(&ready);
            let (asking, ended): (Vec<_>, Vec<_>) =
                ready.into_iter().partition(|(_, interest)| *interest == Interest::Requests);
            for (id, _) in ended {
                if let Some(user) = self.connections.get(&id).map(|entry| entry.peer.user) {
                    self.charged(user, |server| server.close(id, "the client disconnected"));
                }
            }
            let user = |id: u64| Some((self.connections.get(&id)?.peer.user, id));
            for (user, id) in self.turns.choose(asking.into_iter().filter_map(|(id, _)| user(id))) {
                self.charged(user, |server| server.receive(id, &mut buffer));
            }
            self.collect();
            let began = Instant::now();
            let accepted = if incoming { self.accept(listener) } else { Ok(true) };
            match accepted {
                Ok(true) => {}
                Ok(false) => {
                    let now = Instant::now();
                    accept_retry = Some(now + (UNPAID_REST * (now - began)).min(MAX_REST));
                }
                Err(e) => {
                    if self.accept_failures.should_log(0, Instant::now(), MAX_LOGGED_REFUSALS) {
                        (self.log)(&ServerEvent::AcceptFailed(e));
                    }
                    accept_retry = Some(Instant::now() + Duration::from_millis(100));
                }
            }
            self.release();
        }
    }

    /// Does something for a user, who pays for the time that it takes.
    fn charged<T>(&mut self, user: u32, work: impl FnOnce(&mut Self) -> T) -> T {
        let began = Instant::now();
        take_time();
        let result = work(self);
        self.state.run_queue.charge(user, take_time());
        let now = Instant::now();
        self.turns.charge(user, now, now - began);
        result
    }

    /// Accepts or refuses a connection. False when nobody pays for that.
    fn accept(&mut self, listener: &OwnedFd) -> Result<bool, Errno> {
        take_time();
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            // The peer has already disconnected.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => return Ok(true),
            Err(e) => return Err(e),
        };
        // Of a peer that connected to an inherited socket before this daemon began, closing it may block. After the
        // first that connected later, there are no more of those.
        let carries = socket::passes_rights(&socket);
        self.rights_off |= !carries;
        let peer = match Peer::of(&socket, &self.state.config) {
            Ok(peer) => peer,
            // Of this peer alone: others are accepted.
            Err(_) => {
                self.disconnect(u32::MAX, socket, carries);
                return Ok(false);
            }
        };
        let Peer { pid, uid, user, allowed, admin } = peer;
        let connected = self.connections.len() + self.closing.len();
        let charge = Charge::new(&self.state.descriptors, user, 1);
        let status_only = if !allowed {
            Some((Code::NotPermitted, "this user may not use the daemon (--allow-uid, --allow-gid)"))
        } else if connected >= self.state.config.clients {
            Some((Code::Quota, "the daemon has reached its limit of clients (--clients)"))
        } else if self.connections_of_user(user) >= self.state.config.clients_per_user() {
            Some((Code::Quota, "this user has reached the limit of clients (--user-clients)"))
        } else if charge.is_err() {
            Some((
                Code::Quota,
                "the daemon or this user has reached the limit of descriptors (LimitNOFILE= of the unit)",
            ))
        } else {
            None
        };
        if let Some((code, why)) = status_only
            // An administrator may always request the status.
            && !(admin && connected < self.state.config.clients + OPERATOR_CONNECTIONS)
        {
            self.totals.refused += 1;
            if self.refusals.should_log(user, Instant::now(), MAX_LOGGED_REFUSALS) {
                (self.log)(&ServerEvent::Refused { pid, uid, why });
            }
            let _ = socket::send(&socket, &failed(0, code, why), &[], false);
            self.disconnect(user, socket, carries);
            return Ok(false);
        }
        let id = self.next;
        self.next += 1;
        let mut connection = Connection::new(id, peer);
        connection.status_only = status_only;
        let entry = Entry {
            socket,
            peer,
            row: connection.row(false),
            abort: connection.abort.clone(),
            connection: Some(Box::new(connection)),
            carries,
            counted: false,
            since: Instant::now(),
            _charge: charge.ok(),
            send_times: SendTimes::default(),
            ended: None,
        };
        self.connections.insert(id, entry);
        let owed = self.state.run_queue.owes(user);
        self.state.run_queue.charge(user, take_time());
        Ok(!owed)
    }

    /// Connections of a user, including those that are being closed.
    fn connections_of_user(&self, user: u32) -> usize {
        let closing = self.closing.values().map(|c| &c.entry);
        self.connections.values().chain(closing).filter(|c| c.peer.user == user).count()
    }

    /// Ends a connection, with messages left unread, which may carry descriptors.
    fn disconnect(&self, user: u32, socket: OwnedFd, carries: bool) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        if carries {
            self.state.deferred_close.put(user, [socket]);
        }
    }

    /// Closes connections that take too long to wake, and those that have not sent a hello message or opened a function
    /// in time. Those in `ready` have unread
    /// messages and get twice the time, but no more: repeated status requests must not keep a connection open.
    fn expire(&mut self, ready: &[(u64, Interest)]) {
        let Config { hello_timeout, open_timeout, .. } = self.state.config;
        let late = |c: &Entry| {
            let after = c.since.elapsed();
            c.connection.as_ref().is_some_and(|c| {
                c.function.is_none() && (after > open_timeout || (!c.greeted && after > hello_timeout))
            })
        };
        let slow =
            |c: &Entry| c.connection.as_ref().and_then(|c| c.function.as_ref()).is_some_and(|f| f.calls_take_long());
        let slow: Vec<u64> = self.connections.iter().filter(|(_, c)| slow(c)).map(|(id, _)| *id).collect();
        for id in slow {
            self.close(id, SLOW_TO_WAKE);
        }
        let late: Vec<u64> = {
            let quiet = |id: u64| ready.iter().all(|(r, _)| *r != id);
            let too_late = |c: &Entry| c.since.elapsed() > open_timeout.saturating_mul(2);
            let expired = |(id, c): &(&u64, &Entry)| late(c) && (quiet(**id) || too_late(c));
            self.connections.iter().filter(expired).map(|(id, _)| *id).collect()
        };
        for id in late {
            self.close(id, "the client did not open a function in time");
        }
    }

    /// Receives one message, and answers it or gives it to the pool.
    fn receive(&mut self, id: u64, buffer: &mut [u8; MAX_MESSAGE]) {
        let Some(entry) = self.connections.get_mut(&id) else { return };
        let Some(connection) = &mut entry.connection else { return };
        let mut fds = Vec::new();
        let received = socket::receive(&entry.socket, buffer, &mut fds);
        if !matches!(received, Ok(Received::Message(_))) {
            self.state.deferred_close.put(entry.peer.user, std::mem::take(&mut fds));
        }
        let handled = match received {
            Ok(Received::Message(n)) => {
                // The last descriptor of a memfd frees its memory, which takes time.
                let none = fds.is_empty();
                match none.then(|| connection.handle_at_once(&self.state, &buffer[..n])).flatten() {
                    Some(handled) => handled,
                    None => {
                        let (state, bytes) = (self.state.clone(), buffer[..n].to_vec());
                        let Some(mut connection) = entry.connection.take() else { return };
                        entry.row = connection.row(false);
                        let received = Charge::forced(&self.state.descriptors, entry.peer.user, fds.len() as u64);
                        connection.received = Some(received);
                        return self.pool.put(entry.peer.user, move || {
                            // From now on: the time that the jobs of others took does not count.
                            connection.deadline = Some(Instant::now() + state.config.map_timeout);
                            let handled = connection.handle(&state, &bytes, fds);
                            connection.received = None;
                            Done::Handled(connection, handled)
                        });
                    }
                }
            }
            Ok(Received::TooMuch) => {
                let why = "a message has at most 4096 bytes and 64 descriptors, and the daemon must be able to open \
                           them (RLIMIT_NOFILE)";
                connection.refuse(0, Code::Malformed, why)
            }
            Ok(Received::Nothing) => return,
            Ok(Received::End) => return self.close(id, "the client disconnected"),
            Err(_) => return self.close(id, "the connection failed"),
        };
        if !entry.carries && connection.greeted {
            entry.carries = true;
            socket::pass_rights(&entry.socket, true);
        }
        self.answer(id, handled);
    }

    /// Takes back what the pool has done.
    fn collect(&mut self) {
        for done in self.pool.take() {
            match done {
                Done::Handled(connection, handled) => {
                    let id = connection.id;
                    let Some(entry) = self.connections.get_mut(&id) else { continue };
                    entry.connection = Some(connection);
                    let user = entry.peer.user;
                    // Sending and closing wake who polls the client's end, which may be many.
                    self.charged(user, |server| {
                        server.answer(id, handled);
                        if let Some(why) = server.connections.get(&id).and_then(|entry| entry.ended) {
                            server.close(id, why);
                        }
                    });
                }
                Done::Released(id, share) => {
                    drop(share);
                    let Some(user) = self.closing.get(&id).map(|c| c.entry.peer.user) else { continue };
                    self.charged(user, |server| server.released(id));
                }
            }
        }
    }

    /// Ends the connection of a client whose resources were released: the socket is closed last.
    fn released(&mut self, id: u64) {
        let Some(Closing { entry, why, releasing, .. }) = self.closing.remove(&id) else { return };
        self.disconnect(entry.peer.user, entry.socket, entry.carries);
        if entry.counted {
            self.totals.released += 1;
            let (released, after) = releasing.unwrap_or_default();
            if self.comings.should_log(entry.peer.user, Instant::now(), MAX_LOGGED_CLIENTS) {
                (self.log)(&ServerEvent::Disconnected { client: id, why, released, after });
            }
        }
    }

    /// Sends the answer to a request.
    fn answer(&mut self, id: u64, handled: Handled) {
        let Some(entry) = self.connections.get_mut(&id) else { return };
        self.totals.requests += 1;
        if !entry.counted && entry.connection.as_ref().is_some_and(|c| c.function.is_some()) {
            entry.counted = true;
            self.totals.served += 1;
            let event = ServerEvent::Connected { client: id, pid: entry.peer.pid, uid: entry.peer.uid };
            if self.comings.should_log(entry.peer.user, Instant::now(), MAX_LOGGED_CLIENTS) {
                (self.log)(&event);
            }
        }
        let answer = match handled {
            Handled::Answer(answer) => answer,
            Handled::Refused(answer) => {
                self.totals.errors += 1;
                answer
            }
            Handled::Status { seqno, first } => {
                let peer = entry.peer;
                self.status(seqno, first, peer)
            }
        };
        let Some(Entry { socket, send_times, .. }) = self.connections.get(&id) else { return };
        let fds: Vec<BorrowedFd<'_>> = answer.fds.iter().map(AsFd::as_fd).collect();
        match send_times.measure(|| socket::send(socket, &answer.bytes, &fds, false)) {
            Ok(()) if send_times.are_too_long() => self.close(id, SLOW_TO_WAKE),
            Ok(()) => {}
            Err(Errno::AGAIN) => self.close(id, "the client does not read its answers"),
            Err(_) => self.close(id, "the client disconnected"),
        }
    }

    /// The answer to a status request of this peer. Who is no administrator sees the clients of its own user.
    fn status(&self, seqno: u64, first: u64, peer: Peer) -> Answer {
        let shown = |entry: &Entry| entry.peer.user == peer.user || peer.admin;
        let row = |entry: &Entry, closing| {
            let mut row = entry.connection.as_ref().map_or(entry.row, |connection| connection.row(closing));
            row.closing = u32::from(closing).into();
            row
        };
        let connections = self.connections.iter().map(|(id, entry)| (*id, entry, entry.ended.is_some()));
        let closing = self.closing.iter().map(|(id, c)| (*id, &c.entry, true));
        let mut rows: Vec<(u64, &Entry, bool)> =
            connections.chain(closing).filter(|(id, entry, _)| *id >= first && shown(entry)).collect();
        rows.sort_by_key(|(id, ..)| *id);
        let more = rows.len() > MAX_ROWS;
        rows.truncate(MAX_ROWS);
        let config = &self.state.config;
        // Others see what their own user has and does.
        let (ddr, hbm) = self.state.budget.in_use((!peer.admin).then_some(peer.user));
        let sum = if peer.admin { self.totals } else { Totals::default() };
        let clients = self.connections.values().filter(|c| shown(c)).count();
        let quarantined = self.closing.values().filter(|c| c.quarantined && shown(&c.entry)).count();
        let totals = TotalsAnswer {
            uptime: self.started.elapsed().as_secs().into(),
            clients: (clients as u32).into(),
            quarantined: (quarantined as u32).into(),
            served: sum.served.into(),
            released: sum.released.into(),
            refused: sum.refused.into(),
            requests: sum.requests.into(),
            errors: sum.errors.into(),
            ddr: ddr.into(),
            hbm: hbm.into(),
            ddr_total: config.ddr.into(),
            hbm_total: config.hbm.into(),
            rows: (rows.len() as u32).into(),
            more: u32::from(more).into(),
        };
        let mut body = totals.as_bytes().to_vec();
        for (_, entry, closing) in rows {
            body.extend_from_slice(row(entry, closing).as_bytes());
        }
        Answer { bytes: message(ClientRequest::Status { first }.opcode() | ANSWER, seqno, &body), fds: Vec::new() }
    }

    /// Stops a client's queues, and releases its resources once they have stopped.
    fn close(&mut self, id: u64, why: &'static str) {
        let Some(mut entry) = self.connections.remove(&id) else { return };
        let Some(connection) = &entry.connection else {
            // The pool has it, and returns it soon.
            entry.abort.store(true, Ordering::Relaxed);
            entry.ended.get_or_insert(why);
            self.connections.insert(id, entry);
            return;
        };
        if let Some(function) = &connection.function {
            function.stop();
            self.state.run_queue.wake();
        }
        let closing = Closing { entry, why, since: Instant::now(), quarantined: false, releasing: None };
        self.closing.insert(id, closing);
        self.release();
    }

    /// Has the pool release the resources of disconnected clients whose queues have stopped.
    fn release(&mut self) {
        let mut empty = Vec::new();
        for (id, closing) in &mut self.closing {
            let Some(connection) = &closing.entry.connection else { continue };
            let after = closing.since.elapsed();
            if connection.function.as_ref().is_none_or(|f| f.has_stopped()) {
                closing.quarantined = false;
                closing.releasing = Some((connection.resources(), after));
                closing.entry.row = connection.row(true);
                let Some(mut connection) = closing.entry.connection.take() else { continue };
                let function = connection.function.take();
                if let Some(function) = &function {
                    self.state.run_queue.remove(function);
                }
                let id = *id;
                if function.is_none() && closing.releasing.is_some_and(|(resources, _)| resources == Default::default())
                {
                    empty.push(id);
                    continue;
                }
                self.pool.put(closing.entry.peer.user, move || {
                    // Mappings and buffers before the function, which must not end with the worker's reference to it.
                    drop(connection);
                    Done::Released(id, function.and_then(Function::release))
                });
            } else if !closing.quarantined && after > self.state.config.stop_timeout {
                closing.quarantined = true;
                self.totals.quarantined += 1;
                (self.log)(&ServerEvent::Quarantined { client: *id, resources: connection.resources() });
            }
        }
        for id in empty {
            self.released(id);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.run_queue.quit();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        // Quarantined resources end with the process: without the worker nothing accesses them.
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    use dmalane_card::Card;
    use dmalane_dma::{Heap, MemfdHeap, PageKind};
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

    use super::*;
    use crate::wire::MapSegment;
    use crate::{Client, ClientOptions, status};

    #[test]
    fn users_take_turns_and_get_half_of_the_time_at_most() {
        let mut turns = Turns::default();
        // Of user 7 three clients have messages, of user 8 one.
        let ready = [(7, 1), (7, 2), (8, 3), (7, 4)];
        let mut served: Vec<(u32, u64)> = (0..4).flat_map(|_| turns.choose(ready.into_iter())).collect();
        served.sort();
        assert_eq!(served, [(7, 1), (7, 1), (7, 2), (7, 4), (8, 3), (8, 3), (8, 3), (8, 3)]);
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        turns.charge(7, start, BURST / 2);
        assert_eq!((turns.waits(7, start), turns.waits(8, start)), (None, None));
        turns.charge(7, start, Duration::from_millis(5));
        assert_eq!((turns.waits(7, start), turns.waits(8, start)), (Some(later(10)), None));
        assert_eq!(turns.waits(7, later(10)), None);
        // Time without messages is no credit for more.
        turns.charge(7, later(1000), BURST);
        assert_eq!(turns.waits(7, later(1000)), Some(later(1000) + BURST));
    }

    #[test]
    fn a_daemon_whose_worker_has_ended_ends() {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket"), 0o600).unwrap();
        let server = Server::new(Config::default(), |_| {}).unwrap();
        server.state.run_queue.quit();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()));
        let start = Instant::now();
        while !daemon.is_finished() && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(STOP_POLL_INTERVAL);
        }
        drop(stop);
        assert!(matches!(daemon.join().unwrap(), Err(ServerError::WorkerDied)));
    }

    /// A TCP socket whose close takes minutes: its peer, which is the second, reads nothing.
    fn lingering() -> (TcpStream, TcpListener) {
        let peer = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).unwrap();
        (socket, peer)
    }

    /// Before Linux 6.16, and while nobody serves an inherited socket, a socket takes descriptors with any message.
    #[test]
    fn descriptors_before_the_greeting_do_not_block_the_daemon() {
        for inherited in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let address = SocketAddrUnix::new(&path).unwrap();
            let make = || rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            let listening = make();
            rustix::net::bind(&listening, &address).unwrap();
            rustix::net::listen(&listening, 64).unwrap();
            let connect = |_| {
                let socket = make();
                rustix::net::connect(&socket, &address).unwrap();
                socket
            };
            // The first leaves before its greeting. The others are more than the limit: the last one is refused.
            let leaving = connect(0);
            let clients: Vec<OwnedFd> = (0..=OPERATOR_CONNECTIONS + 1).map(connect).collect();
            let (refused, served) = clients.split_last().unwrap();
            let (socket, peer) = lingering();
            for client in [refused, &leaving, &leaving] {
                socket::send(client, b"never read", &[socket.as_fd()], false).unwrap();
            }
            drop((leaving, socket));
            let listener = Listener::from_socket(listening).unwrap();
            if !inherited {
                socket::pass_rights(listener.socket.as_ref().unwrap(), true);
            }
            let server = Server::new(Config { clients: 1, ..Config::default() }, |_| {}).unwrap();
            let (stop, stopped) = UnixStream::pair().unwrap();
            let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
            let answered = |socket: &OwnedFd| {
                let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
                poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) == Ok(1)
            };
            assert!(answered(refused), "it is told why");
            socket::send(&served[0], &ClientRequest::Hello { min: 0, max: 9 }.encode(1), &[], false).unwrap();
            assert!(answered(&served[0]), "the daemon goes on");
            drop((peer, stop));
            assert!(daemon.join().unwrap().refused >= 1);
        }
    }

    #[test]
    fn descriptors_count_until_they_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let mut server = Server::new(Config { descriptors: Some(64), ..Config::default() }, |_| {}).unwrap();
        let client = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&client, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        server.accept(listener.socket.as_ref().unwrap()).unwrap();
        let user = server.connections[&1].peer.user;
        let counted = |server: &Server| server.state.descriptors.in_use();
        assert_eq!(counted(&server), 1, "the socket");
        let mut buffer = [0; MAX_MESSAGE];
        socket::send(&client, &ClientRequest::Hello { min: 1, max: 9 }.encode(1), &[], false).unwrap();
        server.receive(1, &mut buffer);
        let (lingering, peer) = lingering();
        let status = ClientRequest::Status { first: 0 }.encode(2);
        socket::send(&client, &status, &[lingering.as_fd()], false).unwrap();
        // The daemon has the last reference, whose close blocks.
        drop(lingering);
        server.receive(1, &mut buffer);
        while server.connections[&1].connection.is_none() {
            server.collect();
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20));
        assert_eq!(counted(&server), 2);
        let until = |server: &Server, count| {
            let start = Instant::now();
            while counted(server) != count {
                assert!(start.elapsed() < Duration::from_secs(60), "{} instead of {count}", counted(server));
                thread::sleep(STOP_POLL_INTERVAL);
            }
        };
        drop(peer);
        until(&server, 1);
        // Many at once count beyond the limit of a user, who is not heard then.
        server.state.descriptors.force(user, 40);
        assert!(server.state.descriptors.is_over(user, false));
        server.state.descriptors.give(user, 40);
        server.close(1, "the test is over");
        until(&server, 0);
    }

    #[test]
    fn refusals_take_a_part_of_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config { clients: 1, ..Config::default() }, |_| {}).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || {
            let before = crate::pool::thread_time();
            let totals = server.run(listener, stopped.as_fd()).unwrap();
            (totals, crate::pool::thread_time() - before)
        });
        let address = SocketAddrUnix::new(&path).unwrap();
        let connect = || {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::connect(&socket, &address).unwrap();
            socket
        };
        let accepted: Vec<OwnedFd> = (0..=OPERATOR_CONNECTIONS).map(|_| connect()).collect();
        let start = Instant::now();
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while start.elapsed() < Duration::from_secs(1) {
                        drop(connect());
                    }
                });
            }
        });
        let took = start.elapsed();
        drop((stop, accepted));
        let (totals, worked) = daemon.join().unwrap();
        assert!(totals.refused > 10, "{totals:?}");
        // Half of it and more where none are paused. The loop's own time comes to the quarter.
        assert!(worked < took * 9 / 20, "{worked:?} of {took:?} for {} refusals", totals.refused);
    }

    #[test]
    fn after_a_user_who_owes_was_accepted_others_wait_as_after_a_refusal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let listener = listener.socket.as_ref().unwrap();
        let mut server = Server::new(Config { clients: 2, ..Config::default() }, |_| {}).unwrap();
        // Otherwise debts are paid at once.
        server.state.run_queue.paused.store(true, Ordering::SeqCst);
        server.state.run_queue.wake();
        while !server.state.run_queue.parked.load(Ordering::SeqCst) {
            thread::sleep(STOP_POLL_INTERVAL);
        }
        let mut connected = Vec::new();
        let mut accept = |server: &mut Server| {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            connected.push(socket);
            server.accept(listener)
        };
        assert_eq!(accept(&mut server), Ok(true));
        server.state.run_queue.charge(server.connections[&1].peer.user, Duration::from_millis(10));
        assert_eq!(accept(&mut server), Ok(false));
        assert_eq!((server.connections.len(), server.totals.refused), (2, 0), "it is accepted all the same");
        server.state.run_queue.paused.store(false, Ordering::SeqCst);
    }

    #[test]
    fn the_time_of_a_request_begins_when_a_thread_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        // Far more than the request takes once a thread has it, also where that waits for a processor.
        let map_timeout = Duration::from_secs(1);
        let config = Config { map_timeout, ..Config::default() };
        let mut server = Server::new(config, |_| {}).unwrap();
        server.rights_off = listener.rights_off;
        let client = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&client, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        server.accept(listener.socket.as_ref().unwrap()).unwrap();
        let mut buffer = [0; MAX_MESSAGE];
        let mut send = |server: &mut Server, request: ClientRequest<'_>, fds: &[BorrowedFd<'_>]| {
            socket::send(&client, &request.encode(1), fds, false).unwrap();
            server.receive(1, &mut buffer);
        };
        let answered = |server: &mut Server| {
            while server.connections[&1].connection.is_none() {
                server.collect();
                thread::yield_now();
            }
        };
        send(&mut server, ClientRequest::Hello { min: 1, max: 9 }, &[]);
        send(&mut server, ClientRequest::Open { ddr: 2 << 20, hbm: 4 << 20, queues: 1 }, &[]);
        answered(&mut server);
        // All threads of the pool are held for longer than a request may take.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for user in 0..8 {
            let wait = wait.clone();
            server.pool.put(1_000_000 + user, move || {
                let _ = wait.lock().unwrap().recv();
                Done::Released(u64::MAX, None)
            });
        }
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(4096).unwrap().share();
        let segment = MapSegment { fd: 0.into(), reserved: 0.into(), offset: 0.into(), len: 4096.into() };
        send(&mut server, ClientRequest::Map { access: 3, segments: &[segment] }, &[buf.export().unwrap()]);
        thread::sleep(map_timeout + map_timeout / 4);
        drop(go);
        answered(&mut server);
        assert_eq!((server.totals.requests, server.totals.errors), (3, 0));
    }

    #[test]
    fn clients_whose_queues_do_not_stop_are_quarantined() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let config = Config { stop_timeout: Duration::from_millis(50), ..Config::default() };
        let limits = config.limits;
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = events.clone();
        let server = Server::new(config, move |event| log.lock().unwrap().push(event.to_string())).unwrap();
        let run_queue = server.state.run_queue.clone();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let until = |what: &str, right: &dyn Fn(&crate::DaemonStatus) -> bool| {
            let start = Instant::now();
            while !right(&status(&path).unwrap()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{what}: {:?}", status(&path));
                thread::sleep(STOP_POLL_INTERVAL);
            }
        };
        let client = Client::connect(ClientOptions::new(&path)).unwrap();
        let number = client.number();
        let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
        let queue = card.queue(0).unwrap();
        // The worker is paused, and the client disconnects abruptly: dropping the queue would wait for the worker.
        run_queue.paused.store(true, Ordering::SeqCst);
        run_queue.wake();
        while !run_queue.parked.load(Ordering::SeqCst) {
            thread::sleep(STOP_POLL_INTERVAL);
        }
        client.abandon();
        until("quarantined", &|r| r.quarantined == 1);
        let held = status(&path).unwrap();
        let row = held.clients.iter().find(|c| c.client == number).unwrap();
        assert!(row.closing && row.buffers == 4 && row.ddr == limits.ddr, "{row:?}");
        assert_eq!((held.ddr.0, held.totals.released, held.totals.quarantined), (limits.ddr, 0, 1));
        // The queues stop later.
        run_queue.paused.store(false, Ordering::SeqCst);
        until("released", &|r| r.quarantined == 0 && r.ddr.0 == 0);
        drop(stop);
        let totals = daemon.join().unwrap();
        assert_eq!((totals.served, totals.released, totals.quarantined), (1, 1, 1));
        let all = format!("{} bytes of card memory", limits.ddr + limits.hbm);
        for said in ["still allocated: 4 buffers", "released 4 buffers"] {
            let named = |event: &String| event.contains(said) && event.contains(&all);
            assert!(events.lock().unwrap().iter().any(named), "{said}: {:?}", events.lock().unwrap());
        }
        drop((queue, card, client));
    }
}
