//! The server: accepts connections, each of which a thread of its own serves, and ends them when the daemon ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use crate::account::Charge;
use crate::config::Config;
use crate::connection::Connection;
use crate::error::ServerError;
use crate::listener::Listener;
use crate::log::{Log, ServerEvent};
use crate::peer::Peer;
use crate::serving::Serving;
use crate::socket;
use crate::state::{ServerState, lock};
use crate::thread::{take_time, yield_to_worker};
use crate::wire::{Code, Totals, failed};
use crate::worker::RunQueue;

/// Connections beyond the limit, reserved for status requests of the operator.
const OPERATOR_CONNECTIONS: usize = 4;
/// Time that shutdown waits beyond the time in which queues have to stop.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// An unpaid connection blocks `accept` for this many times its cost, so that such connections do not take much of the
/// processors' time. It was refused, or its user owes more than is remembered.
const UNPAID_REST: u32 = 3;
/// The longest that an unpaid connection blocks `accept`: another process may have had the processor.
const MAX_REST: Duration = Duration::from_millis(1);
/// How often the log and the worker are looked after.
const INTERVAL: Duration = Duration::from_millis(500);
/// How often shutdown looks whether clients are gone.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Refused connections that are being closed, on threads of their own; beyond that, none is accepted.
const MAX_CLOSES: usize = 256;
/// Bytes of the stack of a client's thread.
const STACK: usize = 1 << 20;

/// A daemon.
pub struct Server {
    pub(crate) state: Arc<ServerState>,
    next: u64,
    /// A reference for each refused connection that is being closed.
    closes: Arc<()>,
    worker: Option<JoinHandle<()>>,
}

impl Server {
    /// A daemon with a software card, and its worker.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::Io`].
    pub fn new(config: Config, log: impl FnMut(&ServerEvent) + Send + 'static) -> Result<Self, ServerError> {
        config.check()?;
        let run_queue = Arc::new(RunQueue::new()?);
        let (run, spin) = (run_queue.clone(), config.spin);
        let state = Arc::new(ServerState::new(config, Log::new(log), run_queue)?);
        let worker = thread::Builder::new().name("dmalaned-worker".to_owned()).spawn(move || run.run(spin))?;
        Ok(Self { state, next: 1, closes: Arc::default(), worker: Some(worker) })
    }

    /// Serves until `stop` becomes readable or its other end is closed. Then closes each client's connection once the
    /// client's queues have stopped. The calling thread's nice value becomes 10, as that of all threads but the worker.
    ///
    /// # Errors
    /// [`ServerError::Io`], [`ServerError::WorkerDied`].
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> Result<Totals, ServerError> {
        yield_to_worker();
        let result = self.serve(&listener, stop);
        // No new connections, and no more changes of clients' memory. Pending connections may carry descriptors.
        if let Some(socket) = listener.close() {
            self.close_apart(socket);
        }
        self.state.shut_down();
        let begun = Instant::now();
        while (self.state.has_clients() || Arc::strong_count(&self.closes) > 1)
            && self.worker_lives()
            && begun.elapsed() < self.state.config.stop_timeout + CLOSE_TIMEOUT
        {
            thread::sleep(POLL_INTERVAL);
        }
        let totals = *lock(&self.state.totals);
        result.map(|()| totals)
    }

    fn worker_lives(&self) -> bool {
        self.worker.as_ref().is_some_and(|w| !w.is_finished())
    }

    fn serve(&mut self, listener: &Listener, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        let listener = listener.socket.as_ref().expect("a listener that is not closed");
        // No connection is accepted before this time.
        let mut rest: Option<Instant> = None;
        loop {
            let now = Instant::now();
            rest = rest.filter(|until| now < *until);
            let can_accept = rest.is_none() && Arc::strong_count(&self.closes) <= MAX_CLOSES;
            let wait = rest.map_or(INTERVAL, |until| until - now);
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            let wanted = if can_accept { PollFlags::IN } else { PollFlags::empty() };
            let mut fds =
                [PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::from_borrowed_fd(listener.as_fd(), wanted)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(io::Error::from(e).into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
            if !self.worker_lives() {
                return Err(ServerError::WorkerDied);
            }
            lock(&self.state.log).catch_up(now);
            if fds[1].revents().is_empty() || !can_accept {
                continue;
            }
            let began = Instant::now();
            match self.accept(listener) {
                Ok(true) => {}
                Ok(false) => rest = Some(Instant::now() + (UNPAID_REST * began.elapsed()).min(MAX_REST)),
                Err(e) => {
                    lock(&self.state.log).always(&ServerEvent::AcceptFailed(e));
                    rest = Some(Instant::now() + INTERVAL / 2);
                }
            }
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
        let state = self.state.clone();
        let peer = match Peer::of(&socket, &state.config) {
            Ok(peer) => peer,
            // Of this peer alone: others are accepted.
            Err(_) => {
                self.disconnect(socket);
                return Ok(false);
            }
        };
        let Peer { pid, uid, user, allowed, admin } = peer;
        let (connected, of_the_user) = state.connections(user);
        let charge = Charge::new(&state.accounts.descriptors, user, 1);
        let status_only = if !allowed {
            Some((Code::NotPermitted, "this user may not use the daemon (--allow-uid, --allow-gid)"))
        } else if connected >= state.config.clients {
            Some((Code::Quota, "the daemon has reached its limit of clients (--clients)"))
        } else if of_the_user >= state.config.clients_per_user() {
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
            && !(admin && connected < state.config.clients + OPERATOR_CONNECTIONS)
        {
            lock(&state.totals).refused += 1;
            lock(&state.log).of(user, &ServerEvent::Refused { pid, uid, why }, began);
            let _ = socket::send(&socket, &failed(0, code, why), &[], false);
            self.disconnect(socket);
            return Ok(false);
        }
        let id = self.next;
        self.next += 1;
        let mut connection = Connection::new(id, peer, socket);
        connection.status_only = status_only;
        let client = state.add(id, peer, connection.row());
        let serving = Serving::new(state.clone(), client, connection, charge.ok());
        let thread = thread::Builder::new().name("dmalaned-client".to_owned()).stack_size(STACK);
        if let Err(e) = thread.spawn(move || serving.run()) {
            // The connection has been dropped with the closure.
            state.remove(id);
            return Err(Errno::from_io_error(&e).unwrap_or(Errno::AGAIN));
        }
        let owed = state.run_queue.owes(user);
        state.run_queue.charge(user, take_time());
        Ok(!owed)
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

impl Drop for Server {
    fn drop(&mut self) {
        self.state.run_queue.quit();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        self.state.worker_ended.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    use dmalane_addr::Access;
    use dmalane_card::Card;
    use dmalane_dma::{Heap, MemfdHeap};
    use dmalane_queue::Registered;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use zerocopy::FromZeros;

    use super::*;
    use crate::wire::{ClientRequest, ClientStatus, MAX_MESSAGE};
    use crate::{Client, ClientOptions, status};

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
            thread::sleep(POLL_INTERVAL);
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
        let descriptors = server.state.accounts.descriptors.clone();
        let until = |count| {
            let start = Instant::now();
            while descriptors.in_use(None) != count {
                let now = descriptors.in_use(None);
                assert!(start.elapsed() < Duration::from_secs(60), "{now} instead of {count}");
                thread::sleep(POLL_INTERVAL);
            }
        };
        until(1); // the socket
        let answered = || {
            let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&timeout)), Ok(1));
            socket::receive(&client, &mut [0; MAX_MESSAGE], &mut Vec::new()).unwrap();
        };
        socket::send(&client, &ClientRequest::Hello { min: 1, max: 9 }.encode(1), &[], false).unwrap();
        answered();
        let (lingering, peer) = lingering();
        let status = ClientRequest::Status { first: 0 }.encode(2);
        // The last reference, whose close blocks, is the daemon's: it receives nothing before ours is closed.
        let user = lock(&server.state.clients).values().next().unwrap().user.clone();
        let turn = lock(&user.short);
        socket::send(&client, &status, &[lingering.as_fd()], false).unwrap();
        drop(lingering);
        drop(turn);
        until(2);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(descriptors.in_use(None), 2);
        drop(peer);
        until(1);
        answered();
        drop(client);
        until(0);
    }

    #[test]
    fn who_has_all_descriptors_is_told_so_and_served_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config { descriptors: Some(64), ..Config::default() }, |_| {}).unwrap();
        let (descriptors, me) = (server.state.accounts.descriptors.clone(), rustix::process::geteuid().as_raw());
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        // A quarter is the daemon's own, and of the rest a quarter is for other users.
        let all = Charge::new(&descriptors, me, 36).unwrap();
        // The administrator may look, and nothing else.
        let error = Client::connect(ClientOptions::new(&path)).err().unwrap().to_string();
        assert!(error.contains("limit of descriptors (LimitNOFILE="), "{error}");
        status(&ClientOptions::new(&path)).unwrap();
        drop(all);
        drop(Client::connect(ClientOptions::new(&path)).unwrap());
        drop(stop);
        daemon.join().unwrap();
    }

    #[test]
    fn who_is_over_a_limit_or_owes_is_not_served_until_that_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(Config { descriptors: Some(64), ..Config::default() }, |_| {}).unwrap();
        let (state, me) = (server.state.clone(), rustix::process::geteuid().as_raw());
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let client = Client::connect(ClientOptions::new(&path)).unwrap();
        let buf = MemfdHeap::new().allocate(4096).unwrap().share();
        let map = || drop(Registered::new(&client, &buf, Access::READ).unwrap());
        let ask = || drop(status(&ClientOptions::new(&path)).unwrap());
        let waits_until = |request: &(dyn Fn() + Sync), end: &dyn Fn(), what: &str| {
            thread::scope(|scope| {
                let request = scope.spawn(request);
                thread::sleep(Duration::from_millis(100));
                let served = request.is_finished();
                end();
                request.join().unwrap();
                assert!(!served, "{what}");
            });
        };
        let over = Mutex::new(Some(Charge::forced(&state.accounts.descriptors, me, 64)));
        waits_until(&map, &|| drop(lock(&over).take()), "too many descriptors");
        // Who owes and is alone is served: nobody has a loss.
        let queue = &state.run_queue;
        queue.paused.store(true, Ordering::SeqCst);
        queue.wake();
        while !queue.parked.load(Ordering::SeqCst) {
            thread::sleep(POLL_INTERVAL);
        }
        queue.charge(me, Duration::from_millis(10));
        ask();
        let other = Peer { pid: 1, uid: me + 1, user: me + 1, allowed: true, admin: false };
        state.add(u64::MAX, other, ClientStatus::new_zeroed());
        waits_until(&ask, &|| queue.paused.store(false, Ordering::SeqCst), "a debt beside another user");
        state.remove(u64::MAX);
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
            thread::sleep(POLL_INTERVAL);
        }
        let mut connected = Vec::new();
        let mut accept = |server: &mut Server| {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            connected.push(socket);
            server.accept(listener)
        };
        assert_eq!(accept(&mut server), Ok(true));
        let me = rustix::process::geteuid().as_raw();
        server.state.run_queue.charge(me, Duration::from_millis(10));
        assert_eq!(accept(&mut server), Ok(false));
        assert_eq!(server.state.connections(me), (2, 2), "it is accepted all the same");
        assert_eq!(lock(&server.state.totals).refused, 0);
        server.state.run_queue.paused.store(false, Ordering::SeqCst);
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
        let run_queue = server.state.run_queue.clone();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let now = || status(&ClientOptions::new(&path)).unwrap();
        let until = |what: &str, right: &dyn Fn(&crate::DaemonStatus) -> bool| {
            let start = Instant::now();
            while !right(&now()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{what}: {:?}", now());
                thread::sleep(POLL_INTERVAL);
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
            thread::sleep(POLL_INTERVAL);
        }
        client.abandon();
        let is_logged = |said: &str| events.lock().unwrap().iter().any(|event: &String| event.contains(said));
        until("not stopped", &|_| is_logged("its queues have not stopped"));
        let held = now();
        let row = held.clients.iter().find(|c| c.client == number).unwrap();
        assert!(row.closing == 1 && row.buffers == 4 && row.ddr == limits.ddr, "{row:?}");
        assert_eq!((held.ddr.0, held.totals.released), (limits.ddr, 0));
        // The queues stop later.
        run_queue.paused.store(false, Ordering::SeqCst);
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
