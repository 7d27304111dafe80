//! The server: takes connections, answers requests, and cleans up after who has gone.
//!
//! One thread answers, one message of each client after the other, so that nobody who sends many is served more; a second one, the worker, moves
//! bytes. A connection is closed only when the card has let go of what was its client's: for a client, the end of the connection says the same as a
//! status of 0.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use zerocopy::IntoBytes;

use crate::config::{BadConfig, Budget, Config};
use crate::connection::{Answer, Connection, Handled, Peer, Released, ServerState};
use crate::deferred_close::DeferredClose;
use crate::socket::{self, Received};
use crate::wire::{ANSWER, Code, MAX_MESSAGE, MAX_ROWS, Request, TotalsAnswer, failed, message};
use crate::worker::RunQueue;

/// So many refusals are told one by one in so long a time; of more only the number is told.
const REFUSALS: u32 = 8;
const WHILE: Duration = Duration::from_secs(10);
/// Connections beyond those of clients, for who runs the daemon to ask what goes on.
const SPARE: usize = 4;
/// How long the end waits for descriptors of clients to be closed.
const CLOSING: Duration = Duration::from_secs(1);
/// How often a queue that is to stop is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// Why a daemon cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A setting that cannot be.
    #[error(transparent)]
    Config(#[from] BadConfig),
    /// The socket could not be made.
    #[error("cannot listen at {}: {source}", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another daemon listens there.
    #[error("another process is listening at {}", .0.display())]
    InUse(PathBuf),
    /// A socket that was handed over is of another kind.
    #[error(
        "the socket that was handed over is not a listening Unix socket of type SEQPACKET (ListenSequentialPacket= in a unit)"
    )]
    WrongSocket,
    /// The kernel refused what the server cannot do without.
    #[error("cannot serve: {0}")]
    Io(#[from] io::Error),
    /// The worker has died: a defect.
    #[error("the worker has died")]
    WorkerDied,
}

/// A socket to listen at.
#[derive(Debug)]
pub struct Listener {
    /// There until the end.
    socket: Option<OwnedFd>,
    /// To be removed in the end.
    path: Option<PathBuf>,
}

impl Listener {
    /// Makes a socket at `path` that users may open as `mode` says (0o660: owner and group). What is left of a daemon that died is replaced.
    ///
    /// # Errors
    /// [`ServeError::Listen`], [`ServeError::InUse`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, ServeError> {
        let failed = |e: Errno| ServeError::Listen { path: path.to_owned(), source: e.into() };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let make = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = make().map_err(failed)?;
        let mode = Mode::from_bits_truncate(mode & 0o777);
        // Before it has a name, so that there is no moment at which more is allowed.
        rustix::fs::fchmod(&socket, mode).map_err(failed)?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                // Connecting to a file that is no socket is refused too.
                let there = rustix::fs::lstat(path).map_err(failed)?;
                if FileType::from_raw_mode(there.st_mode) != FileType::Socket {
                    return Err(failed(Errno::EXIST));
                }
                // Without waiting: one whose backlog is full is there all the same.
                let probe = make().map_err(failed)?;
                rustix::io::ioctl_fionbio(&probe, true).map_err(failed)?;
                match rustix::net::connect(probe, &address) {
                    Err(Errno::CONNREFUSED) => {}
                    Ok(()) | Err(Errno::AGAIN) => return Err(ServeError::InUse(path.to_owned())),
                    Err(e) => return Err(failed(e)),
                }
                rustix::fs::unlink(path).map_err(failed)?;
                rustix::net::bind(&socket, &address).map_err(failed)?;
            }
            other => other.map_err(failed)?,
        }
        // What the umask took away.
        rustix::fs::chmod(path, mode).map_err(failed)?;
        rustix::net::listen(&socket, 64).map_err(failed)?;
        Ok(Self { socket: Some(socket), path: Some(path.to_owned()) })
    }

    /// A socket that somebody else made and listens at (socket activation).
    ///
    /// # Errors
    /// [`ServeError::WrongSocket`].
    pub fn from_socket(socket: OwnedFd) -> Result<Self, ServeError> {
        use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
        let right = socket_type(&socket) == Ok(SocketType::SEQPACKET)
            && socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && socket_acceptconn(&socket) == Ok(true);
        if right { Ok(Self { socket: Some(socket), path: None }) } else { Err(ServeError::WrongSocket) }
    }
}

impl Listener {
    /// Ends it: its socket, for who closes it, and no file any more.
    fn close(mut self) -> Option<OwnedFd> {
        self.unlink();
        self.socket.take()
    }

    fn unlink(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = rustix::fs::unlink(path);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// What a daemon has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Clients that have come and opened a function.
    pub served: u64,
    /// Those of them that have gone, and everything of theirs was released.
    pub released: u64,
    /// Connections refused.
    pub refused: u64,
    /// Requests answered.
    pub requests: u64,
    /// Requests refused.
    pub errors: u64,
    /// Clients whose queues did not confirm in time that they stopped.
    pub quarantined: u64,
}

/// Something that a daemon tells its log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A client has come.
    Came {
        /// Its number.
        client: u64,
        /// Its process.
        pid: u32,
        /// Its user.
        uid: u32,
    },
    /// A connection was refused.
    Refused {
        /// The process.
        pid: u32,
        /// The user.
        uid: u32,
        /// Why.
        why: &'static str,
    },
    /// So many more connections were refused than were told of one by one.
    RefusedMore(u64),
    /// A client has gone, and everything of its was released.
    Gone {
        /// Its number.
        client: u64,
        /// Why the connection ended.
        why: &'static str,
        /// What was released.
        released: Released,
        /// How long its queues took to stop.
        after: Duration,
    },
    /// A client has gone, and its queues have not stopped: what it had is kept.
    Quarantined {
        /// Its number.
        client: u64,
        /// What is kept.
        kept: Released,
    },
    /// A connection could not be taken for want of descriptors or memory; it will be tried again.
    Short(Errno),
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Came { client, pid, uid } => write!(f, "client {client}: process {pid} of user {uid}"),
            Self::Refused { pid, uid, why } => write!(f, "refused process {pid} of user {uid}: {why}"),
            Self::RefusedMore(n) => write!(f, "refused {n} more connections within {WHILE:?}"),
            Self::Gone { client, why, released, after } => {
                let Released { buffers, bytes, mappings, card } = released;
                write!(
                    f,
                    "client {client}: {why}; stopped after {after:?}, released {buffers} buffers ({bytes} bytes), {mappings} mappings, \
                     {card} bytes of card memory"
                )
            }
            Self::Quarantined { client, kept } => write!(
                f,
                "client {client}: its queues do not stop; kept for good: {} buffers ({} bytes), {} bytes of card memory",
                kept.buffers, kept.bytes, kept.card
            ),
            Self::Short(e) => write!(f, "cannot take a connection now: {e}"),
        }
    }
}

/// What keeps somebody who knocks without end from filling the log.
#[derive(Default)]
struct Refusals {
    since: Option<Instant>,
    told: u32,
    untold: u64,
}

impl Refusals {
    /// Whether this one is to be told.
    fn tell(&mut self, now: Instant) -> bool {
        self.since.get_or_insert(now);
        let tell = self.told < REFUSALS;
        if tell {
            self.told += 1
        } else {
            self.untold += 1
        }
        tell
    }

    /// How many were not told, once their time is over.
    fn untold(&mut self, now: Instant) -> Option<u64> {
        self.since.filter(|since| now.duration_since(*since) >= WHILE)?;
        Some(std::mem::take(self).untold).filter(|n| *n > 0)
    }
}

struct Entry {
    socket: OwnedFd,
    connection: Connection,
    /// It has opened a function: what only asks is not counted.
    counted: bool,
    since: Instant,
}

/// A client that has gone, until the card has let go of what it had.
struct Closing {
    connection: Entry,
    why: &'static str,
    since: Instant,
    quarantined: bool,
}

/// A daemon.
pub struct Server {
    state: ServerState,
    connections: BTreeMap<u64, Entry>,
    closing: Vec<Closing>,
    next: u64,
    totals: Totals,
    refusals: Refusals,
    started: Instant,
    worker: Option<JoinHandle<()>>,
    log: Box<dyn FnMut(&Event) + Send>,
}

impl Server {
    /// A daemon with a software card, and its worker.
    ///
    /// # Errors
    /// [`ServeError::Config`], [`ServeError::Io`].
    pub fn new(config: Config, log: impl FnMut(&Event) + Send + 'static) -> Result<Self, ServeError> {
        config.check()?;
        let run_queue = Arc::new(RunQueue::new()?);
        let budget = Arc::new(Budget::new(&config));
        let (run, spin) = (run_queue.clone(), config.spin);
        let worker = thread::Builder::new().name("dmalaned-worker".to_owned()).spawn(move || run.run(spin))?;
        Ok(Self {
            state: ServerState { config, budget, run_queue, deferred_close: DeferredClose::default() },
            connections: BTreeMap::new(),
            closing: Vec::new(),
            next: 1,
            totals: Totals::default(),
            refusals: Refusals::default(),
            started: Instant::now(),
            worker: Some(worker),
            log: Box::new(log),
        })
    }

    /// Serves until `stop` becomes readable or its other end is closed. Then every client's connection is ended, once its queues have stopped.
    ///
    /// # Errors
    /// [`ServeError::Io`], [`ServeError::WorkerDied`].
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> Result<Totals, ServeError> {
        let result = self.serve(&listener, stop);
        // Nobody new, and nobody's memory changes any more. Who was not taken yet may have sent descriptors.
        self.state.deferred_close.put(u32::MAX, listener.close());
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.close(id, "the daemon ends", true);
        }
        while self.closing.iter().any(|c| !c.quarantined) && self.worker_lives() {
            thread::sleep(LOOK);
            self.release();
        }
        self.state.deferred_close.wait(CLOSING);
        result.map(|()| self.totals)
    }

    fn worker_lives(&self) -> bool {
        self.worker.as_ref().is_some_and(|w| !w.is_finished())
    }

    fn serve(&mut self, listener: &Listener, stop: BorrowedFd<'_>) -> Result<(), ServeError> {
        let listener = listener.socket.as_ref().expect("a listener that is not closed");
        let mut buffer = [0; MAX_MESSAGE];
        // Until then no connection is taken.
        let mut short: Option<Instant> = None;
        loop {
            short = short.filter(|until| Instant::now() < *until);
            // From whom nothing may be received, only the end is seen.
            let deferred_close = &self.state.deferred_close;
            let clients: Vec<(u64, bool)> = self
                .connections
                .iter()
                .map(|(id, c)| (*id, deferred_close.is_full_of(c.connection.peer.uid)))
                .collect();
            let full = deferred_close.is_full() || clients.iter().any(|(_, full)| *full);
            let (stopped, knocks, ready) = {
                let sockets =
                    self.connections.values().map(|c| c.socket.as_fd()).zip(&clients).map(|(fd, (_, full))| {
                        PollFd::from_borrowed_fd(fd, if *full { PollFlags::empty() } else { PollFlags::IN })
                    });
                let listening = (short.is_none() && !deferred_close.is_full()).then_some(listener.as_fd());
                let always = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
                let mut fds: Vec<PollFd<'_>> =
                    std::iter::once(always(stop)).chain(sockets).chain(listening.map(always)).collect();
                let wait = if self.closing.iter().any(|c| !c.quarantined) {
                    LOOK
                } else if short.is_some() || full {
                    Duration::from_millis(20)
                } else {
                    Duration::from_millis(500)
                };
                let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
                match poll(&mut fds, Some(&timeout)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(io::Error::from(e).into()),
                }
                let answers = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
                let ready: Vec<(u64, bool)> = (1..).zip(clients).filter(|(i, _)| answers(*i)).map(|(_, c)| c).collect();
                (answers(0), listening.is_some() && answers(fds.len() - 1), ready)
            };
            if stopped {
                return Ok(());
            }
            if !self.worker_lives() {
                return Err(ServeError::WorkerDied);
            }
            if let Some(untold) = self.refusals.untold(Instant::now()) {
                (self.log)(&Event::RefusedMore(untold));
            }
            self.expire(&ready);
            for (id, full) in ready {
                match full {
                    true => self.close(id, "the client has gone", false),
                    false => self.receive(id, &mut buffer),
                }
            }
            if knocks && let Err(e) = self.accept(listener) {
                (self.log)(&Event::Short(e));
                short = Some(Instant::now() + Duration::from_millis(100));
            }
            self.release();
        }
    }

    fn accept(&mut self, listener: &OwnedFd) -> Result<(), Errno> {
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            // Gone again.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(e) => return Err(e),
        };
        // Not rustix's: it knows no process 0, which is what the kernel says of one in another namespace.
        let credentials = match getsockopt(&socket, PeerCredentials) {
            Ok(credentials) => credentials,
            Err(e) => {
                self.state.deferred_close.put(u32::MAX, [socket]);
                return Err(Errno::from_raw_os_error(e as i32));
            }
        };
        let (uid, gid) = (credentials.uid(), credentials.gid());
        let peer = Peer { pid: u32::try_from(credentials.pid()).unwrap_or(0), uid, gid };
        let there = self.connections.len() + self.closing.len();
        let barred = if !self.state.config.admits(uid, gid) {
            Some((Code::NotPermitted, "this user may not use the daemon (--allow-uid, --allow-gid)"))
        } else if there >= self.state.config.clients {
            Some((Code::Quota, "the daemon has as many clients as it takes (--clients)"))
        } else if self.of_user(uid) >= self.state.config.of_one_user() {
            Some((Code::Quota, "this user has as many clients as one may have (--user-clients)"))
        } else {
            None
        };
        // Who runs the daemon may always ask for its status.
        let operator = uid == 0 || uid == rustix::process::geteuid().as_raw();
        if let Some((code, why)) = barred
            && !(operator && there < self.state.config.clients + SPARE)
        {
            self.totals.refused += 1;
            if self.refusals.tell(Instant::now()) {
                (self.log)(&Event::Refused { pid: peer.pid, uid, why });
            }
            let _ = socket::send(&socket, &failed(0, code, why), &[], false);
            self.dispose(uid, socket);
            return Ok(());
        }
        let id = self.next;
        self.next += 1;
        let mut connection = Connection::new(id, peer);
        connection.barred = barred;
        self.connections.insert(id, Entry { socket, connection, counted: false, since: Instant::now() });
        Ok(())
    }

    /// Connections of a user, with those that are being closed.
    fn of_user(&self, uid: u32) -> usize {
        let closing = self.closing.iter().map(|c| &c.connection);
        self.connections.values().chain(closing).filter(|c| c.connection.peer.uid == uid).count()
    }

    /// Ends a connection, whatever lies unread in it.
    fn dispose(&self, uid: u32, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        self.state.deferred_close.put(uid, [socket]);
    }

    /// Ends the connections that take a client's place and do not become one. What the `ready` have said has not been looked at yet: they get
    /// twice as long, and no longer, or one could stay by asking for the status without end.
    fn expire(&mut self, ready: &[(u64, bool)]) {
        let Config { greeting, opening, .. } = self.state.config;
        let late = |c: &Entry| {
            let after = c.since.elapsed();
            c.connection.function.is_none() && (after > opening || (!c.connection.greeted && after > greeting))
        };
        let late: Vec<u64> = {
            let quiet = |id: u64| ready.iter().all(|(r, _)| *r != id);
            let too_late = |c: &Entry| c.since.elapsed() > opening.saturating_mul(2);
            let expired = |(id, c): &(&u64, &Entry)| late(c) && (quiet(**id) || too_late(c));
            self.connections.iter().filter(expired).map(|(id, _)| *id).collect()
        };
        for id in late {
            self.close(id, "the client has not opened a function in time", false);
        }
    }

    /// Takes and answers one message.
    fn receive(&mut self, id: u64, buffer: &mut [u8; MAX_MESSAGE]) {
        let Some(Entry { socket, connection, counted, .. }) = self.connections.get_mut(&id) else { return };
        let mut fds = Vec::new();
        let received = socket::receive(&*socket, buffer, &mut fds);
        if !matches!(received, Ok(Received::Message(_))) {
            self.state.deferred_close.put(connection.peer.uid, std::mem::take(&mut fds));
        }
        let handled = match received {
            Ok(Received::Message(n)) => connection.handle(&self.state, &buffer[..n], fds),
            Ok(Received::TooMuch) => {
                let why = "a message has at most 4096 bytes and 64 descriptors, and the daemon must be able to have these (RLIMIT_NOFILE)";
                connection.refuse(0, Code::Malformed, why)
            }
            Ok(Received::Nothing) => return,
            Ok(Received::End) => return self.close(id, "the client has gone", false),
            Err(_) => return self.close(id, "the connection broke", false),
        };
        self.totals.requests += 1;
        if !*counted && connection.function.is_some() {
            *counted = true;
            self.totals.served += 1;
            (self.log)(&Event::Came { client: id, pid: connection.peer.pid, uid: connection.peer.uid });
        }
        let answer = match handled {
            Handled::Answer(answer) => answer,
            Handled::Refused(answer) => {
                self.totals.errors += 1;
                answer
            }
            Handled::Status { seqno, first } => self.status(seqno, first),
        };
        let Some(Entry { socket, .. }) = self.connections.get(&id) else { return };
        let fds: Vec<BorrowedFd<'_>> = answer.fds.iter().map(AsFd::as_fd).collect();
        match socket::send(socket, &answer.bytes, &fds, false) {
            Ok(()) => {}
            Err(Errno::AGAIN) => self.close(id, "the client does not read its answers", false),
            Err(_) => self.close(id, "the client has gone", false),
        }
    }

    fn status(&self, seqno: u64, first: u64) -> Answer {
        let connections = self.connections.values().map(|c| (&c.connection, false));
        let mut rows: Vec<(&Connection, bool)> =
            connections.chain(self.closing.iter().map(|c| (&c.connection.connection, true))).collect();
        rows.retain(|(connection, _)| connection.id >= first);
        rows.sort_by_key(|(connection, _)| connection.id);
        let more = rows.len() > MAX_ROWS;
        rows.truncate(MAX_ROWS);
        let (config, left) = (&self.state.config, self.state.budget.left());
        let totals = TotalsAnswer {
            uptime: self.started.elapsed().as_secs().into(),
            clients: (self.connections.len() as u32).into(),
            quarantined: (self.closing.iter().filter(|c| c.quarantined).count() as u32).into(),
            served: self.totals.served.into(),
            released: self.totals.released.into(),
            refused: self.totals.refused.into(),
            requests: self.totals.requests.into(),
            errors: self.totals.errors.into(),
            ddr: (config.ddr - left.0).into(),
            hbm: (config.hbm - left.1).into(),
            ddr_total: config.ddr.into(),
            hbm_total: config.hbm.into(),
            rows: (rows.len() as u32).into(),
            more: u32::from(more).into(),
        };
        let mut body = totals.as_bytes().to_vec();
        for (connection, closing) in rows {
            body.extend_from_slice(connection.row(closing).as_bytes());
        }
        Answer { bytes: message(Request::Status { first }.opcode() | ANSWER, seqno, &body), fds: Vec::new() }
    }

    /// Begins to let go of a client.
    fn close(&mut self, id: u64, why: &'static str, keep: bool) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        if keep {
            connection.connection.leave_memory();
        }
        if let Some(function) = &connection.connection.function {
            function.stop();
            self.state.run_queue.nudge();
        }
        self.closing.push(Closing { connection, why, since: Instant::now(), quarantined: false });
        self.release();
    }

    /// Lets go of the clients whose queues have stopped.
    fn release(&mut self) {
        let mut waiting = Vec::new();
        for mut closing in std::mem::take(&mut self.closing) {
            let connection = &mut closing.connection.connection;
            let stopped = connection.function.as_ref().is_none_or(|f| f.has_stopped());
            let after = closing.since.elapsed();
            if stopped {
                let released = connection.holds();
                if let Some(function) = connection.function.take() {
                    self.state.run_queue.remove(&function);
                }
                // Mappings, buffers, and the connection last.
                let Entry { socket, connection, counted, .. } = closing.connection;
                let (client, uid) = (connection.id, connection.peer.uid);
                drop(connection);
                self.dispose(uid, socket);
                if counted {
                    self.totals.released += 1;
                    (self.log)(&Event::Gone { client, why: closing.why, released, after });
                }
                continue;
            }
            if !closing.quarantined && after > self.state.config.patience {
                closing.quarantined = true;
                self.totals.quarantined += 1;
                (self.log)(&Event::Quarantined { client: connection.id, kept: connection.holds() });
            }
            waiting.push(closing);
        }
        self.closing.append(&mut waiting);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.run_queue.quit();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        // What is quarantined goes with the process: nothing moves bytes any more.
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    use dmalane_card::Card;
    use dmalane_dma::MemfdHeap;

    use super::*;
    use crate::{Client, Options, report};

    #[test]
    fn what_does_not_stop_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let config = Config { patience: Duration::from_millis(50), ..Config::default() };
        let limits = config.limits;
        let server = Server::new(config, |_| {}).unwrap();
        let run_queue = server.state.run_queue.clone();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let until = |what: &str, right: &dyn Fn(&crate::Report) -> bool| {
            let start = Instant::now();
            while !right(&report(&path).unwrap()) {
                assert!(start.elapsed() < Duration::from_secs(20), "{what}: {:?}", report(&path));
                thread::sleep(LOOK);
            }
        };
        let client = Client::connect(Options::new(&path)).unwrap();
        let number = client.number();
        let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
        let queue = card.queue(0).unwrap();
        // The card stands still, and the client goes without a word: a queue that is dropped would wait for it.
        run_queue.paused.store(true, Ordering::SeqCst);
        client.abandon();
        until("kept", &|r| r.quarantined == 1);
        let kept = report(&path).unwrap();
        let row = kept.clients.iter().find(|c| c.client == number).unwrap();
        assert!(row.closing && row.buffers == 4 && row.ddr == limits.ddr, "{row:?}");
        assert_eq!((kept.ddr.0, kept.totals.released, kept.totals.quarantined), (limits.ddr, 0, 1));
        // It stops after all.
        run_queue.paused.store(false, Ordering::SeqCst);
        until("released", &|r| r.quarantined == 0 && r.ddr.0 == 0);
        drop(stop);
        let totals = daemon.join().unwrap();
        assert_eq!((totals.served, totals.released, totals.quarantined), (1, 1, 1));
        drop((queue, card, client));
    }

    #[test]
    fn who_knocks_without_end_does_not_fill_the_log() {
        let mut refusals = Refusals::default();
        let start = Instant::now();
        let told = (0..1000).filter(|i| refusals.tell(start + Duration::from_millis(*i))).count();
        assert_eq!(told, REFUSALS as usize);
        assert_eq!(refusals.untold(start + WHILE / 2), None);
        assert_eq!(refusals.untold(start + WHILE), Some(1000 - u64::from(REFUSALS)));
        assert_eq!(refusals.untold(start + WHILE), None);
        assert!(refusals.tell(start + WHILE), "and again");
        assert_eq!(refusals.untold(start + 2 * WHILE), None, "there were no more");
    }

    #[test]
    fn a_socket_belongs_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::bind(&path, 0o640).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o640);
        assert!(matches!(Listener::bind(&path, 0o600), Err(ServeError::InUse(_))));
        drop(first);
        assert!(!path.exists());
        // What one leaves that was killed is replaced; what is no socket is not.
        let left = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&left, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(left);
        drop(Listener::bind(&path, 0o600).unwrap());
        std::fs::write(&path, b"precious").unwrap();
        assert!(Listener::bind(&path, 0o600).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let wrong = UnixStream::pair().unwrap().0;
        assert!(matches!(Listener::from_socket(wrong.into()), Err(ServeError::WrongSocket)));
    }
}
