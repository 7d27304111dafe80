//! The server: accepts connections, each of which a process of its own serves, and ends them when the daemon ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, socketpair};
use zerocopy::FromZeros;

use crate::config::Config;
use crate::error::ServerError;
use crate::fork::{Forker, end_at_missing_pages};
use crate::guard::Guard;
use crate::listener::Listener;
use crate::log::{ClientResources, Log, ServerEvent};
use crate::peer::Peer;
use crate::serving::{NOT_STOPPED, OPENED, REFUSALS, RELEASED, Serving};
use crate::socket;
use crate::state::ServerState;
use crate::table::{Ending, Table};
use crate::thread::{take_time, yield_to_worker};
use crate::wire::{ClientStatus, Totals, failed};

/// Connections beyond the limit, reserved for status requests of the operator.
pub(crate) const OPERATOR_CONNECTIONS: usize = 4;
/// Time that shutdown waits beyond the time in which queues have to stop.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// An unpaid connection blocks `accept` for this many times its cost, so that such connections do not take much of the
/// processors' time. It was refused.
const UNPAID_REST: u32 = 3;
/// The longest that an unpaid connection blocks `accept`: another process may have had the processor.
const MAX_REST: Duration = Duration::from_millis(1);
/// Processes of a user that may be ending without counting as clients: what they close may take any time.
const MAX_ENDING: usize = 8;
/// A connection costs its user this beside the time that is measured: a process starts and ends.
const PROCESS_TIME: Duration = Duration::from_millis(1);
/// How often the daemon looks whether users have paid, while connections wait for that.
const PAY_INTERVAL: Duration = Duration::from_millis(2);
/// How often the log is looked after.
const INTERVAL: Duration = Duration::from_millis(500);
/// Refused connections that are being closed, on threads of their own; beyond that, none is accepted.
const MAX_CLOSES: usize = 256;
/// Bytes of the stack of a thread that closes a socket.
const STACK: usize = 64 << 10;

/// A daemon.
///
/// Clients are served by processes of their own, which a process forks that [`Server::new`] forks. A program that has
/// locks of its own should call it before it starts threads.
pub struct Server {
    table: Arc<Table>,
    config: Config,
    forker: Forker,
    log: Log,
    clients: Vec<Client>,
    next: u64,
    /// A reference for each refused connection that is being closed.
    closes: Arc<()>,
}

/// A client, as the daemon knows it.
struct Client {
    id: u64,
    seat: usize,
    peer: Peer,
    /// The end of a socket pair with the client's process.
    control: OwnedFd,
    /// Its socket, and the other end of `control`, until its process is started.
    waiting: Option<[OwnedFd; 2]>,
    /// It has opened a function.
    served: bool,
    /// Its resources are released, and it counts no more: its process ends.
    released: bool,
}

impl Server {
    /// A daemon with a software card.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::Io`].
    pub fn new(config: Config, log: impl FnMut(&ServerEvent) + Send + 'static) -> Result<Self, ServerError> {
        config.check()?;
        let mut log = Log::new(log);
        if let Err(why) = Guard::new() {
            log.always(&ServerEvent::Unguarded(why));
        }
        let state = ServerState::new(config.clone())?;
        let table = state.table.clone();
        let serve = move |seat, socket, control| {
            end_at_missing_pages(&state.table, seat);
            if let Ok(serving) = Serving::new(&state, seat, socket, control) {
                serving.run();
            }
        };
        let forker = Forker::start(serve)?;
        Ok(Self { table, config, forker, log, clients: Vec::new(), next: 1, closes: Arc::default() })
    }

    /// Serves until `stop` becomes readable or its other end is closed. Then closes each client's connection once the
    /// client's queues have stopped. The calling thread's nice value becomes 10, as that of all threads but those that
    /// move bytes.
    ///
    /// # Errors
    /// [`ServerError::Io`], [`ServerError::ForkerDied`].
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> Result<Totals, ServerError> {
        yield_to_worker();
        let result = self.serve(&listener, stop);
        // No new connections, and no more changes of clients' memory. Pending connections may carry descriptors.
        if let Some(socket) = listener.close() {
            self.close_apart(socket);
        }
        for client in std::mem::take(&mut self.clients) {
            match client.waiting {
                Some([socket, _]) => self.close_apart(socket),
                None => self.clients.push(client),
            }
        }
        for client in &self.clients {
            let _ = rustix::net::shutdown(&client.control, Shutdown::Write);
        }
        let end = Instant::now() + self.config.stop_timeout + CLOSE_TIMEOUT;
        while (!self.clients.is_empty() || Arc::strong_count(&self.closes) > 1) && Instant::now() < end {
            let wait = if self.clients.is_empty() { Duration::from_millis(1) } else { INTERVAL };
            self.look_at_clients(&[], wait)?;
        }
        let totals = self.table.lock().totals;
        result.map(|()| totals)
    }

    fn serve(&mut self, listener: &Listener, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        let listener = listener.socket.as_ref().expect("a listener that is not closed");
        // No connection is accepted before this time.
        let mut rest: Option<Instant> = None;
        loop {
            let now = Instant::now();
            rest = rest.filter(|until| now < *until);
            let can_accept = rest.is_none() && Arc::strong_count(&self.closes) <= MAX_CLOSES;
            let paying = self.clients.iter().any(|client| client.waiting.is_some());
            let wait = rest.map_or(if paying { PAY_INTERVAL } else { INTERVAL }, |until| until - now);
            let watched = [(stop, true), (listener.as_fd(), can_accept)];
            let [stopped, connected] = self.look_at_clients(&watched, wait)?[..] else { unreachable!("two") };
            if stopped {
                return Ok(());
            }
            if self.forker.is_gone() {
                return Err(ServerError::ForkerDied);
            }
            self.log.catch_up(now);
            self.start_processes();
            if !connected || !can_accept {
                continue;
            }
            let began = Instant::now();
            match self.accept(listener) {
                Ok(true) => {}
                Ok(false) => rest = Some(Instant::now() + (UNPAID_REST * began.elapsed()).min(MAX_REST)),
                Err(e) => {
                    self.log.always(&ServerEvent::AcceptFailed(e));
                    rest = Some(Instant::now() + INTERVAL / 2);
                }
            }
        }
    }

    /// Waits until one of these descriptors is ready, a client's process says something, or the time is over. Returns
    /// which descriptors are ready, of those that are wanted.
    fn look_at_clients(
        &mut self,
        watched: &[(BorrowedFd<'_>, bool)],
        wait: Duration,
    ) -> Result<Vec<bool>, ServerError> {
        let flags = |wanted: bool| if wanted { PollFlags::IN } else { PollFlags::empty() };
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(fd, wanted)| PollFd::from_borrowed_fd(*fd, flags(*wanted))).collect();
        fds.extend(self.clients.iter().map(|client| PollFd::new(&client.control, PollFlags::IN)));
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(io::Error::from(e).into()),
        }
        let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut heard = ready.split_off(watched.len()).into_iter();
        let mut clients = std::mem::take(&mut self.clients);
        clients.retain_mut(|client| !heard.next().is_some_and(|heard| heard) || self.hear(client));
        self.clients = clients;
        Ok(ready)
    }

    /// Hears what a client's process says; false when it has ended.
    fn hear(&mut self, client: &mut Client) -> bool {
        let mut byte = [0];
        match rustix::net::recv(&client.control, &mut byte, RecvFlags::DONTWAIT) {
            Ok((1, _)) if byte[0] == OPENED => {
                let Peer { pid, uid, user, .. } = client.peer;
                client.served = true;
                self.table.lock().totals.served += 1;
                let event = ServerEvent::Connected { client: client.id, pid, uid };
                self.log.of(user, &event, Instant::now());
                true
            }
            Ok((1, _)) if byte[0] == NOT_STOPPED => {
                let resources = resources(&self.table.lock().seats[client.seat].row);
                self.log.always(&ServerEvent::NotStopped { client: client.id, resources });
                true
            }
            Ok((1, _)) if byte[0] == RELEASED => {
                self.released(client);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            _ => {
                self.released(client);
                self.table.stand(client.seat);
                false
            }
        }
    }

    /// Logs, once, that a client's resources are released.
    fn released(&mut self, client: &mut Client) {
        if std::mem::replace(&mut client.released, true) {
            return;
        }
        let (row, why, after) = {
            let mut state = self.table.lock();
            state.totals.released += u64::from(client.served);
            let seat = &state.seats[client.seat];
            (seat.row, seat.why, Duration::from_nanos(seat.stopped_after))
        };
        let missed = self.table.missed(client.seat).load(Ordering::SeqCst) == 1;
        let text =
            if missed { "a page of mapped memory was gone when the card accessed it" } else { Ending::text(why) };
        if client.served || why == 0 {
            let event = ServerEvent::Disconnected { client: client.id, why: text, released: resources(&row), after };
            self.log.of(client.peer.user, &event, Instant::now());
        }
    }

    /// Accepts or refuses a connection. False when nobody pays for that.
    fn accept(&mut self, listener: &OwnedFd) -> Result<bool, Errno> {
        take_time();
        let began = Instant::now();
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            // The peer has already disconnected.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => return Ok(true),
            Err(e) => return Err(e),
        };
        let Ok(peer) = Peer::of(&socket, &self.config) else {
            // Of this peer alone: others are accepted.
            self.disconnect(socket);
            return Ok(false);
        };
        let Peer { pid, uid, user, allowed, admin } = peer;
        // Who has seen the end of a connection has its place again.
        let _ = self.look_at_clients(&[], Duration::ZERO);
        let of = |released, own: bool| {
            let counts = |client: &&Client| client.released == released && (!own || client.peer.user == user);
            self.clients.iter().filter(counts).count()
        };
        let (connected, of_the_user) = (of(false, false), of(false, true) + of(true, true).saturating_sub(MAX_ENDING));
        let too_many = [connected >= self.config.clients, of_the_user >= self.config.clients_per_user()];
        let refusal = [!allowed, too_many[0], too_many[1]].into_iter().position(|refused| refused);
        if let Some(refusal) = refusal
            // An administrator may always request the status.
            && !(admin && connected < self.config.clients + OPERATOR_CONNECTIONS)
        {
            let (code, why) = REFUSALS[refusal];
            self.table.lock().totals.refused += 1;
            self.log.of(user, &ServerEvent::Refused { pid, uid, why }, began);
            let _ = socket::send(&socket, &failed(0, code, why), &[], false);
            self.disconnect(socket);
            return Ok(false);
        }
        let id = self.next;
        let row = ClientStatus { client: id, pid, uid, ..ClientStatus::new_zeroed() };
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let seat = self.table.sit(user, row, refusal.map_or(0, |refusal| refusal as u32 + 1)).ok_or(Errno::AGAIN);
        let (control, theirs, seat) = match (pair, seat) {
            (Ok((control, theirs)), Ok(seat)) => (control, theirs, seat),
            (pair, seat) => {
                self.close_apart(socket);
                if let Ok(seat) = seat {
                    self.table.stand(seat);
                }
                return Err(pair.err().unwrap_or(Errno::AGAIN));
            }
        };
        self.next += 1;
        let waiting = Some([socket, theirs]);
        self.clients.push(Client { id, seat, peer, control, waiting, served: false, released: false });
        self.table.charge(seat, take_time());
        self.start_processes();
        Ok(true)
    }

    /// Starts processes for clients whose users owe nothing, and forgets those that have gone.
    fn start_processes(&mut self) {
        if self.clients.iter().all(|client| client.waiting.is_none()) {
            return;
        }
        let now = Timespec::default();
        for mut client in std::mem::take(&mut self.clients) {
            if let Some([socket, theirs]) = client.waiting.take() {
                // Without flags, only the end of the connection is reported.
                let gone = poll(&mut [PollFd::new(&socket, PollFlags::empty())], Some(&now)).is_ok_and(|n| n > 0);
                if gone {
                    self.table.stand(client.seat);
                    self.close_apart(socket);
                    continue;
                }
                if self.table.owes(client.seat) {
                    client.waiting = Some([socket, theirs]);
                } else {
                    self.table.charge(client.seat, PROCESS_TIME);
                    if let Err(e) = self.forker.fork(client.seat, &socket, &theirs) {
                        // Its end of the pair is closed, as if its process had ended.
                        self.log.of(client.peer.user, &ServerEvent::AcceptFailed(e), Instant::now());
                        self.close_apart(socket);
                    } else {
                        drop((socket, theirs));
                        // It begins when this process has no more to close.
                        let _ = rustix::net::send(&client.control, &[0], SendFlags::NOSIGNAL);
                    }
                }
            }
            self.clients.push(client);
        }
    }

    /// Ends a connection, with messages left unread, which may carry descriptors (before Linux 6.16, and where the
    /// daemon has inherited the listening socket): closing it may take any time.
    fn disconnect(&self, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        self.close_apart(socket);
    }

    /// Closes a socket on a thread of its own.
    fn close_apart(&self, socket: OwnedFd) {
        let counted = self.closes.clone();
        let close = move || {
            yield_to_worker();
            drop((socket, counted));
        };
        // Where no thread can be started, this one closes it.
        let _ = thread::Builder::new().name("dmalaned-close".to_owned()).stack_size(STACK).spawn(close);
    }
}

/// The resources of a client, as its row shows them.
pub(crate) fn resources(row: &ClientStatus) -> ClientResources {
    ClientResources {
        buffers: row.buffers as usize,
        bytes: row.bytes,
        mappings: row.mappings as usize,
        card: row.ddr + row.hbm,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    use dmalane_card::Card;
    use dmalane_dma::MemfdHeap;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use zerocopy::FromZeros;

    use super::*;
    use crate::wire::{ClientRequest, ClientStatus};
    use crate::{Client, ClientOptions, status};

    #[test]
    fn a_daemon_whose_forker_was_killed_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config::default(), |_| {}).unwrap();
        let forker = server.forker.pid();
        let (_stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()));
        let client = Client::connect(ClientOptions::new(&path)).unwrap();
        rustix::process::kill_process(forker, rustix::process::Signal::KILL).unwrap();
        assert!(matches!(daemon.join().unwrap(), Err(ServerError::ForkerDied)));
        // Its children end with it.
        let start = Instant::now();
        while client.gone().is_none() {
            assert!(start.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(1));
        }
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

    /// Whether turns are given.
    fn pause(table: &Table, paused: bool) {
        table.lock().turns.paused = paused.into();
    }

    #[test]
    fn who_owes_is_not_served_beside_others_until_that_is_paid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config::default(), |_| {}).unwrap();
        let (table, me) = (server.table.clone(), rustix::process::geteuid().as_raw());
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let client = Client::connect(ClientOptions::new(&path)).unwrap();
        let ask = || drop(status(&ClientOptions::new(&path)).unwrap());
        pause(&table, true);
        table.charge(0, Duration::from_millis(10));
        // Who is alone is served: nobody has a loss.
        ask();
        let other = ClientStatus { client: u64::MAX, ..ClientStatus::new_zeroed() };
        let seat = table.sit(me + 1, other, 0).unwrap();
        thread::scope(|scope| {
            let asked = scope.spawn(ask);
            thread::sleep(Duration::from_millis(100));
            assert!(!asked.is_finished());
            pause(&table, false);
            asked.join().unwrap();
        });
        table.stand(seat);
        drop((client, stop));
        daemon.join().unwrap();
    }

    #[test]
    fn refusals_take_a_part_of_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config { clients: 1, ..Config::default() }, |_| {}).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || {
            let before = crate::thread::thread_time();
            let totals = server.run(listener, stopped.as_fd()).unwrap();
            (totals, crate::thread::thread_time() - before)
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
    fn a_user_who_owes_has_no_process_started_until_that_is_paid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let listener = listener.socket.as_ref().unwrap();
        let mut server = Server::new(Config { clients: 2, ..Config::default() }, |_| {}).unwrap();
        // Otherwise debts are paid at once.
        pause(&server.table, true);
        let mut connected = Vec::new();
        let mut accept = |server: &mut Server| {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            connected.push(socket);
            server.accept(listener)
        };
        let waiting = |server: &Server| server.clients.iter().filter(|client| client.waiting.is_some()).count();
        assert_eq!(accept(&mut server), Ok(true));
        assert_eq!(waiting(&server), 0);
        server.table.charge(0, Duration::from_millis(10));
        // Beside another user.
        let other = ClientStatus { client: u64::MAX, ..ClientStatus::new_zeroed() };
        server.table.sit(rustix::process::geteuid().as_raw() + 1, other, 0).unwrap();
        assert_eq!(accept(&mut server), Ok(true));
        assert_eq!((server.clients.len(), waiting(&server)), (2, 1), "it counts");
        server.start_processes();
        assert_eq!(waiting(&server), 1);
        pause(&server.table, false);
        server.start_processes();
        assert_eq!(waiting(&server), 0);
        assert_eq!(server.table.lock().totals.refused, 0);
    }

    #[test]
    fn clients_whose_queues_do_not_stop_keep_their_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let config = Config { stop_timeout: Duration::from_millis(50), ..Config::default() };
        let limits = config.limits;
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = events.clone();
        let server = Server::new(config, move |event| log.lock().unwrap().push(event.to_string())).unwrap();
        let table = server.table.clone();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let now = || status(&ClientOptions::new(&path)).unwrap();
        let until = |what: &str, right: &dyn Fn(&crate::DaemonStatus) -> bool| {
            let start = Instant::now();
            while !right(&now()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{what}: {:?}", now());
                thread::sleep(Duration::from_millis(1));
            }
        };
        let client = Client::connect(ClientOptions::new(&path)).unwrap();
        let number = client.number();
        let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
        let queue = card.queue(0).unwrap();
        // The worker gets no turn, and the client disconnects abruptly: dropping the queue would wait for the worker.
        pause(&table, true);
        client.abandon();
        let is_logged = |said: &str| events.lock().unwrap().iter().any(|event: &String| event.contains(said));
        until("not stopped", &|_| is_logged("its queues have not stopped"));
        let held = now();
        let row = held.clients.iter().find(|c| c.client == number).unwrap();
        assert!(row.closing == 1 && row.buffers == 4 && row.ddr == limits.ddr, "{row:?}");
        assert_eq!((held.ddr.0, held.totals.released), (limits.ddr, 0));
        // The queues stop later.
        pause(&table, false);
        until("released", &|r| r.clients.len() == 1 && r.ddr.0 == 0);
        drop(stop);
        let totals = daemon.join().unwrap();
        assert_eq!((totals.served, totals.released), (1, 1));
        let all = format!("{} bytes of card memory", limits.ddr + limits.hbm);
        for said in ["still allocated: 4 buffers", "released 4 buffers"] {
            let named = |event: &String| event.contains(said) && event.contains(&all);
            assert!(events.lock().unwrap().iter().any(named), "{said}: {:?}", events.lock().unwrap());
        }
        drop((queue, card, client));
    }
}
