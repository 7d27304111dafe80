//! A client's connection from its first message to its end, on a thread of its own.
//!
//! A client can make a request long: the kernel finds pages for it, and closing a descriptor of a FUSE file or of a
//! TCP socket that lingers may take minutes. That holds up the client's own thread. The clients of a user take turns,
//! at short requests and at long ones apart, so a user with many connections has as much of the processors as one with
//! few, and pays for it with its share of the worker.
//!
//! A connection is closed only after the card has stopped accessing the client's memory: to a client, the end of the
//! connection means the same as a status of 0.

use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::account::Charge;
use crate::config::Config;
use crate::connection::{Answer, Connection, Handled};
use crate::function::Function;
use crate::log::ServerEvent;
use crate::socket::{self, Received};
use crate::state::{Client, ServerState, lock};
use crate::thread::{take_time, yield_to_worker};
use crate::wire::{Code, MAX_MESSAGE};

/// How often a thread that waits looks whether it may go on: until its user has paid, or a queue has stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A thread that serves a client.
pub(crate) struct Serving {
    state: Arc<ServerState>,
    client: Arc<Client>,
    connection: Connection,
    since: Instant,
    /// For the socket; `None` for an administrator beyond the limit.
    charge: Option<Charge>,
    /// The client has opened a function and is counted in the totals.
    counted: bool,
}

impl Serving {
    pub(crate) fn new(
        state: Arc<ServerState>,
        client: Arc<Client>,
        connection: Connection,
        charge: Option<Charge>,
    ) -> Self {
        Self { state, client, connection, since: Instant::now(), charge, counted: false }
    }

    /// Serves the client until its end, and releases its resources.
    pub(crate) fn run(mut self) {
        yield_to_worker();
        let served = catch_unwind(AssertUnwindSafe(|| {
            let mut buffer = [0; MAX_MESSAGE];
            loop {
                if let Err(why) = self.wait().and_then(|()| self.request(&mut buffer)) {
                    break why;
                }
            }
        }));
        // Whatever happens, the connection ends only when the card has stopped.
        self.end(served.unwrap_or("a bug in the daemon"));
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// Why the connection ends.
    fn wait(&self) -> Result<(), &'static str> {
        let Config { hello_timeout, open_timeout, .. } = self.state.config;
        loop {
            let function = self.connection.function.as_ref();
            let limit = match function {
                Some(_) => None,
                None if self.connection.greeted => Some(open_timeout),
                None => Some(hello_timeout.min(open_timeout)),
            };
            let after = self.since.elapsed();
            let longest = limit.map(|limit| timespec(limit.saturating_sub(after)));
            let mut fds = [&self.connection.socket, &self.state.stop].map(|fd| PollFd::new(fd, PollFlags::IN));
            let _ = poll(&mut fds, longest.as_ref());
            if !fds[1].revents().is_empty() {
                return Err("the daemon is shutting down");
            }
            // What the client has sent in time is answered, but repeated status requests keep no connection open.
            let is_ready = !fds[0].revents().is_empty();
            if is_ready
                && limit.is_none_or(|limit| after <= limit.saturating_mul(if self.connection.greeted { 2 } else { 1 }))
            {
                return Ok(());
            }
            if limit.is_some_and(|limit| after >= limit) {
                return Err("the client did not open a function in time");
            }
        }
    }

    /// Handles one message in its turn.
    ///
    /// # Errors
    /// Why the connection ends.
    fn request(&mut self, buffer: &mut [u8; MAX_MESSAGE]) -> Result<(), &'static str> {
        let (state, client) = (self.state.clone(), self.client.clone());
        let user = client.peer.user;
        let mut turn = lock(&client.user.short);
        let descriptors = &state.accounts.descriptors;
        while descriptors.is_over(user) || (state.run_queue.owes(user) && !state.is_alone(user)) {
            if state.is_over(&self.connection.socket) {
                return Err("the connection ended while its user owed");
            }
            thread::sleep(POLL_INTERVAL);
        }
        take_time();
        let mut fds = Vec::new();
        let received = socket::receive(&self.connection.socket, buffer, &mut fds);
        // Descriptors count until they are closed, or are a buffer's.
        let mut carried = Some(Charge::forced(descriptors, user, fds.len() as u64));
        let handled = match received {
            Ok(Received::Message(n)) => {
                if !fds.is_empty() || self.connection.is_long(&buffer[..n]) {
                    state.run_queue.charge(user, take_time());
                    drop(turn);
                    turn = lock(&client.user.long);
                }
                self.connection.received = carried.take();
                self.connection.deadline = Some(Instant::now() + state.config.map_timeout);
                let handled = self.connection.handle(&state, &buffer[..n], &mut fds);
                carried = self.connection.received.take();
                Ok(handled)
            }
            Ok(Received::TooMuch) => {
                let why = "a message has at most 4096 bytes and 64 descriptors, and the daemon must be able to open \
                           them (RLIMIT_NOFILE)";
                Ok(self.connection.refuse(0, Code::Malformed, why))
            }
            Ok(Received::Nothing) => return Ok(()),
            Ok(Received::End) => Err("the client disconnected"),
            Err(_) => Err("the connection failed"),
        };
        let answered = handled.and_then(|handled| self.answer(handled));
        state.run_queue.charge(user, take_time());
        drop(turn);
        if !fds.is_empty() {
            drop((fds, carried));
            state.run_queue.charge(user, take_time());
        }
        answered
    }

    /// Sends the answer to a request.
    fn answer(&mut self, handled: Handled) -> Result<(), &'static str> {
        let Self { state, client, connection, .. } = self;
        let peer = client.peer;
        client.show(connection.row(), connection.function.as_ref());
        let comes = !self.counted && connection.function.is_some();
        self.counted |= comes;
        {
            let mut totals = lock(&state.totals);
            totals.requests += 1;
            totals.errors += u64::from(matches!(handled, Handled::Refused(_)));
            totals.served += u64::from(comes);
        }
        if comes {
            let event = ServerEvent::Connected { client: connection.id, pid: peer.pid, uid: peer.uid };
            lock(&state.log).of(peer.user, &event, Instant::now());
        }
        let answer = match handled {
            Handled::Answer(answer) | Handled::Refused(answer) => answer,
            Handled::Status { seqno, first } => Answer { bytes: state.status(seqno, first, peer), fds: Vec::new() },
        };
        let fds: Vec<BorrowedFd<'_>> = answer.fds.iter().map(AsFd::as_fd).collect();
        match socket::send(&connection.socket, &answer.bytes, &fds, false) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Err("the client does not read its answers"),
            Err(_) => Err("the client disconnected"),
        }
    }

    /// Stops the client's queues, and releases its resources once they have stopped.
    fn end(self, why: &'static str) {
        let Self { state, client, mut connection, charge, counted, .. } = self;
        let (id, user) = (connection.id, client.peer.user);
        client.is_closing();
        let since = Instant::now();
        if let Some(function) = &connection.function {
            function.stop();
            state.run_queue.wake();
        }
        let mut late = false;
        let has_stopped = |connection: &Connection| connection.function.as_ref().is_none_or(|f| f.has_stopped());
        while !has_stopped(&connection) && !state.worker_ended.load(Ordering::SeqCst) {
            if !late && since.elapsed() > state.config.stop_timeout {
                late = true;
                lock(&state.log).always(&ServerEvent::NotStopped { client: id, resources: connection.resources() });
            }
            thread::sleep(POLL_INTERVAL);
        }
        let after = since.elapsed();
        let released = connection.resources();
        let turn = lock(&client.user.long);
        let function = connection.function.take();
        if let Some(function) = &function {
            state.run_queue.remove(function);
        }
        // Mappings and buffers before the function, which must not end with the worker's reference to it.
        connection.release();
        let card = function.map(Function::release);
        state.run_queue.charge(user, take_time());
        drop(turn);
        // What a client that connects at once may need: its memory, that of its socket, and its place.
        drop((card, charge));
        if counted {
            lock(&state.totals).released += 1;
            let event = ServerEvent::Disconnected { client: id, why, released, after };
            lock(&state.log).of(user, &event, Instant::now());
        }
        state.remove(id);
        let _ = rustix::net::shutdown(&connection.socket, Shutdown::Both);
        // Messages that are left unread may carry descriptors, whose close may take any time.
        drop(connection);
        state.run_queue.charge(user, take_time());
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use dmalane_addr::Access;
    use dmalane_card::regs;
    use dmalane_dma::{Mmio, Registrar};

    use super::*;
    use crate::{ClientOptions, Listener, Server, Totals};

    /// A daemon at a path, which ends when the second value is dropped.
    fn daemon(config: Config) -> (tempfile::TempDir, UnixStream, Arc<ServerState>, thread::JoinHandle<Totals>) {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket"), 0o600).unwrap();
        let server = Server::new(config, |_| {}).unwrap();
        let (state, (stop, stopped)) = (server.state.clone(), UnixStream::pair().unwrap());
        let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        (folder, stop, state, daemon)
    }

    #[test]
    fn a_long_request_holds_up_only_long_ones_of_its_user_and_has_its_time_from_its_turn_on() {
        // Far more than the request takes once it has its turn, also where that waits for a processor.
        let map_timeout = Duration::from_secs(1);
        let (folder, stop, state, daemon) = daemon(Config { map_timeout, ..Config::default() });
        let connect = || crate::Client::connect(ClientOptions::new(folder.path().join("socket"))).unwrap();
        let (one, other) = (connect(), connect());
        let user = lock(&state.clients).values().next().unwrap().user.clone();
        let long = lock(&user.long);
        thread::scope(|s| {
            let mapping = s.spawn(|| {
                let buf = one.buffer(4096).unwrap();
                one.map(one.pin(&buf.reference()).unwrap(), Access::RW).map(drop)
            });
            thread::sleep(map_timeout + map_timeout / 4);
            assert!(!mapping.is_finished(), "one at a time");
            assert!(other.read32(regs::BAR_REGISTERS, regs::CONTROL).is_ok());
            assert_eq!(crate::status(&ClientOptions::new(folder.path().join("socket"))).unwrap().clients.len(), 3);
            drop(long);
            assert!(mapping.join().unwrap().is_ok());
        });
        drop((one, other, stop));
        let totals = daemon.join().unwrap();
        assert_eq!((totals.served, totals.released), (2, 2));
    }
}
