//! The daemon: it starts the process that accepts connections, and writes the log.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::config::Config;
use crate::error::ServerError;
use crate::fork::fork_first;
use crate::gate::{CLOSE_TIMEOUT, Gate};
use crate::guard::Guard;
use crate::listener::Listener;
use crate::log::{Log, ServerEvent};
use crate::socket;
use crate::state::ServerState;

/// How often the daemon looks after its log, and whether its process is there.
const INTERVAL: Duration = Duration::from_millis(500);

/// A daemon.
///
/// Clients are served by processes of their own, which a process forks that [`Server::new`] forks. A program that has
/// locks of its own should call it before it starts threads.
pub struct Server {
    state: ServerState,
    log: Log,
    /// The end of a socket pair, whose other one all processes of the daemon have.
    processes: OwnedFd,
    /// The process that forks the others.
    forker: Pid,
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
            log.warn(format!(
                "userfaultfd is not allowed here ({why}): clients that give back pages of mapped memory make this \
                 control group pay for new ones; allow it in the seccomp profile (Linux 5.11 or later)"
            ));
        }
        let state = ServerState::new(config)?;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (processes, theirs) = pair.map_err(std::io::Error::from)?;
        let forker = fork_first(theirs, |daemon| Gate::new(&state, daemon).run()).map_err(std::io::Error::from)?;
        Ok(Self { state, log, processes, forker })
    }

    /// Serves until `stop` becomes readable or its other end is closed. Then closes each client's connection once the
    /// client's queues have stopped.
    ///
    /// # Errors
    /// [`ServerError::Io`], [`ServerError::ForkerDied`].
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        let Listener { socket, file } = listener;
        let handed = dmalane_dma::send_with_fds(&self.processes, &[0], &[socket.as_fd()], SendFlags::empty());
        handed.map_err(std::io::Error::from)?;
        drop(socket);
        while !self.look(Some(stop)) {
            if !matches!(waitpid(Some(self.forker), WaitOptions::NOHANG), Ok(None)) {
                return Err(ServerError::ForkerDied);
            }
        }
        drop(file);
        let _ = rustix::net::send(&self.processes, &[0], SendFlags::NOSIGNAL);
        let end = Instant::now() + self.state.config.stop_timeout + 2 * CLOSE_TIMEOUT;
        // All processes have ended when nobody has their end of the pair.
        while Instant::now() < end && !self.look(None) {}
        Ok(())
    }

    /// Waits for notes and logs them; true when it is time to stop, or, without that, when all processes have ended.
    fn look(&mut self, stop: Option<BorrowedFd<'_>>) -> bool {
        let [_, stopped] = socket::readable([Some(self.processes.as_fd()), stop], Some(INTERVAL));
        let now = Instant::now();
        self.log.catch_up(now);
        let are_there = self.log.hear(&self.processes, now);
        stopped || (stop.is_none() && !are_there)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its children end with it.
        let _ = kill_process(self.forker, Signal::KILL);
        let _ = waitpid(Some(self.forker), WaitOptions::empty());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::{Arc, Mutex};
    use std::thread;

    use dmalane_card::Card;
    use dmalane_dma::{MemfdHeap, error_chain};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::SocketAddrUnix;
    use zerocopy::FromZeros;

    use super::*;
    use crate::gate::OPERATOR_CONNECTIONS;
    use crate::table::Table;
    use crate::wire::{ClientRequest, ClientStatus};
    use crate::{Client, ClientOptions, status};

    /// Whoever serves a client has a low priority: on a busy machine it may not run for many seconds.
    const LONG: Duration = Duration::from_secs(180);

    fn options(path: &std::path::Path) -> ClientOptions {
        ClientOptions { timeout: LONG, ..ClientOptions::new(path) }
    }

    #[test]
    fn a_daemon_whose_forker_was_killed_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(Config::default(), |_| {}).unwrap();
        let forker = server.forker;
        let (_stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()));
        let client = Client::connect(options(&path)).unwrap();
        rustix::process::kill_process(forker, rustix::process::Signal::KILL).unwrap();
        assert!(matches!(daemon.join().unwrap(), Err(ServerError::ForkerDied)));
        // Its children end with it.
        let start = Instant::now();
        while client.gone().is_none() {
            assert!(start.elapsed() < LONG);
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
                socket::pass_rights(&listener.socket, true);
            }
            let server = Server::new(Config { clients: 1, ..Config::default() }, |_| {}).unwrap();
            let (stop, stopped) = UnixStream::pair().unwrap();
            let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
            let answered = |socket: &OwnedFd| {
                let timeout = Timespec { tv_sec: LONG.as_secs().cast_signed(), tv_nsec: 0 };
                poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) == Ok(1)
            };
            assert!(answered(refused), "it is told why");
            socket::send(&served[0], &ClientRequest::Hello { min: 0, max: 9 }.encode(1), &[], false).unwrap();
            assert!(answered(&served[0]), "the daemon goes on");
            // Also when what was refused is being closed.
            thread::sleep(Duration::from_millis(200));
            // The place of the one that left may have come free since: the first of two takes it and is not told.
            let next = [connect(0), connect(1)];
            assert!(answered(&next[1]), "the next one is told, too");
            drop((peer, stop));
            daemon.join().unwrap();
        }
    }

    /// Whether turns are given.
    fn pause(table: &Table, paused: bool) {
        table.locked(|turns| turns.paused = paused.into());
    }

    #[test]
    fn who_owes_is_not_served_beside_others_until_that_is_paid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(Config::default(), |_| {}).unwrap();
        let (table, me) = (server.state.table.clone(), rustix::process::geteuid().as_raw());
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let client = Client::connect(options(&path)).unwrap();
        let ask = || drop(status(&options(&path)).unwrap());
        pause(&table, true);
        table.charge(0, Duration::from_millis(10));
        // Who is alone is served: nobody has a loss.
        ask();
        let other = ClientStatus { client: u64::MAX, ..ClientStatus::new_zeroed() };
        let seat = table.sit(me + 1, other).unwrap();
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
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(Config { clients: 1, ..Config::default() }, |_| {}).unwrap();
        let forker = server.forker.as_raw_nonzero();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let accepted: Vec<OwnedFd> = (0..=OPERATOR_CONNECTIONS).map(|_| connect(&path)).collect();
        // Nanoseconds on a processor.
        let worked = || {
            let stat = std::fs::read_to_string(format!("/proc/{forker}/schedstat")).unwrap();
            Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
        };
        let (start, before, refused) = (Instant::now(), worked(), AtomicUsize::new(0));
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while start.elapsed() < Duration::from_secs(1) {
                        drop(connect(&path));
                        refused.fetch_add(1, Relaxed);
                    }
                });
            }
        });
        let (took, worked) = (start.elapsed(), worked() - before);
        drop((stop, accepted));
        daemon.join().unwrap();
        let refused = refused.into_inner();
        assert!(refused > 10, "{refused}");
        // Half of it and more where none are paused.
        assert!(worked < took * 9 / 20, "{worked:?} of {took:?} for {refused} refusals");
    }

    fn connect(path: &std::path::Path) -> OwnedFd {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        socket
    }

    #[test]
    fn who_connects_and_leaves_has_its_places_again_when_it_has_paid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(Config { clients: 4, ..Config::default() }, |_| {}).unwrap();
        let (table, me) = (server.state.table.clone(), rustix::process::geteuid().as_raw());
        // Otherwise debts are paid at once.
        pause(&table, true);
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let until = |what: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !what() {
                assert!(start.elapsed() < LONG);
                thread::sleep(Duration::from_millis(1));
            }
        };
        let first = connect(&path);
        until(&|| table.seats().count() == 1);
        // Each connection costs a millisecond, which is too much for the second one beside another user.
        let other = ClientStatus { client: u64::MAX, ..ClientStatus::new_zeroed() };
        let seat = table.sit(me + 1, other).unwrap();
        let mine = || table.seats().filter(|(_, seat)| seat.user() == me).count();
        drop(connect(&path));
        until(&|| mine() == 2);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(mine(), 2, "it has left, and counts");
        pause(&table, false);
        until(&|| mine() == 1);
        table.stand(seat);
        drop((first, stop));
        daemon.join().unwrap();
    }

    /// Closing may take any time: some of a user's processes may end beside its clients, but not many.
    #[test]
    fn processes_that_end_for_long_count_as_clients() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(Config { clients: 4, ..Config::default() }, |_| {}).unwrap();
        let (table, me) = (server.state.table.clone(), rustix::process::geteuid().as_raw());
        let end = |number| {
            let seat = table.sit(me, ClientStatus { client: number, ..ClientStatus::new_zeroed() }).unwrap();
            table.release(seat);
            seat
        };
        // Three clients are a user's limit, and eight may be ending.
        let ending: Vec<usize> = (1 << 40..(1 << 40) + 11).map(end).collect();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let refused = error_chain(&Client::connect(options(&path)).unwrap_err());
        assert!(refused.contains("--user-share"), "{refused}");
        table.stand(ending[0]);
        let start = Instant::now();
        // The connection that was refused goes on to count until it is seen to have ended.
        while Client::connect(options(&path)).is_err() {
            assert!(start.elapsed() < LONG);
            // Each connection takes a process, which may not end soon either.
            thread::sleep(Duration::from_millis(200));
        }
        drop(stop);
        daemon.join().unwrap();
    }

    #[test]
    fn clients_whose_queues_do_not_stop_keep_their_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let config = Config { stop_timeout: Duration::from_millis(50), ..Config::default() };
        let limits = config.limits;
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = events.clone();
        let server = Server::new(config, move |event| log.lock().unwrap().push(event.text.clone())).unwrap();
        let table = server.state.table.clone();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        let now = || status(&options(&path)).unwrap();
        let until = |what: &str, right: &dyn Fn(&crate::DaemonStatus) -> bool| {
            let start = Instant::now();
            while !right(&now()) {
                assert!(start.elapsed() < LONG, "{what}: {:?}", now());
                thread::sleep(Duration::from_millis(1));
            }
        };
        let client = Client::connect(options(&path)).unwrap();
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
        assert_eq!(held.ddr.0, limits.ddr);
        // The queues stop later.
        pause(&table, false);
        until("released", &|r| r.clients.len() == 1 && r.ddr.0 == 0);
        drop(stop);
        daemon.join().unwrap();
        let all = format!("{} bytes of card memory", limits.ddr + limits.hbm);
        for said in ["still allocated: 4 buffers", "released 4 buffers"] {
            let named = |event: &String| event.contains(said) && event.contains(&all);
            assert!(events.lock().unwrap().iter().any(named), "{said}: {:?}", events.lock().unwrap());
        }
        drop((queue, card, client));
    }
}
