//! A client's connection from its first message to its end, in a process of its own.
//!
//! A client can make a request long: the kernel may wait for other users of its files, and closing a descriptor of a
//! FUSE file or of a TCP socket that lingers may take minutes. That holds up this process alone. A user pays for its
//! requests with its share of the card, and while it owes, its requests wait beside other users.
//!
//! A connection is closed only after the card has stopped accessing the client's memory: to a client, the end of the
//! connection means the same as a status of 0. A panic keeps that order too: mappings are dropped before the socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::account::Charge;
use crate::connection::Connection;
use crate::function::PROCESS_BYTES;
use crate::log::{Ending, tell};
use crate::socket::{self, Received, readable};
use crate::state::{Peer, ServerState};
use crate::wire::{ClientStatus, Code, Denied, MAX_MESSAGE, failed};
use crate::worker::{Worker, take_time};

/// How often a process looks whether its queues have stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A client's process.
pub(crate) struct Serving<'s> {
    state: &'s ServerState,
    connection: Connection,
    /// The end of a socket pair with the daemon.
    daemon: BorrowedFd<'s>,
    worker: Worker,
    since: Instant,
    _charge: Option<Charge>,
}

impl<'s> Serving<'s> {
    /// The client of a seat, with its number. With a reason, it may request the status alone.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(
        state: &'s ServerState,
        (seat, id, peer, status_only): (usize, u64, Peer, Option<&'static str>),
        socket: OwnedFd,
        daemon: BorrowedFd<'s>,
    ) -> std::io::Result<Self> {
        let _charge = match state.accounts.memory.charge(seat, PROCESS_BYTES) {
            Err(Denied(code, text)) if !peer.admin => {
                let _ = socket::send(&socket, &failed(0, code, &text), &[], false);
                return Err(Errno::NOMEM.into());
            }
            charge => charge.ok(),
        };
        let mut connection = Connection::new(seat, id, peer, socket)?;
        connection.status_only = status_only;
        // Before this thread lowers its priority, which threads inherit and nobody can raise.
        let worker = Worker::start(connection.alarm.clone(), state.table.clone(), seat)?;
        Ok(Self { state, connection, daemon, worker, since: Instant::now(), _charge })
    }

    /// Serves the client until its end, and releases its resources.
    pub(crate) fn run(mut self) -> Ending {
        // Lower the priority of this thread (nice 10) below the worker's, whose time is what users share.
        // `dmalane.slice` weighs ten times as much as `user.slice`: at full priority, a user could have this thread
        // take processors from other users' processes. It may always get less.
        let _ = rustix::process::setpriority_process(None, 10);
        let mut why = Ending::ShutDown;
        // Also for who has left: a user does not have processes started faster than it pays for them.
        if self.state.table.begin(self.connection.seat, || self.is_over(false)) {
            self.state.table.settle(self.connection.seat, take_time());
            self.since = Instant::now();
            let mut buffer = [0; MAX_MESSAGE];
            why = loop {
                if let Err(why) = self.wait().and_then(|()| self.request(&mut buffer)) {
                    break why;
                }
            };
        }
        self.end();
        why
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// Why the connection ends.
    fn wait(&self) -> Result<(), Ending> {
        let limit = self.connection.alarm.function.get().is_none().then_some(self.state.config.open_timeout);
        loop {
            let after = self.since.elapsed();
            let longest = limit.map(|limit| limit.saturating_sub(after));
            let [is_ready, ends] = readable([Some(self.connection.socket.as_fd()), Some(self.daemon)], longest);
            if ends {
                return Err(Ending::ShutDown);
            }
            // What the client has sent in time is answered, but repeated status requests keep no connection open.
            if is_ready && limit.is_none_or(|limit| after <= 2 * limit) {
                return Ok(());
            }
            if limit.is_some_and(|limit| after >= limit) {
                return Err(Ending::NotOpened);
            }
        }
    }

    /// The daemon ends, or, if that counts, the client has closed the connection.
    fn is_over(&self, or_client: bool) -> bool {
        let daemon = PollFd::from_borrowed_fd(self.daemon, PollFlags::IN);
        // Without flags, only the end of a connection is reported.
        let client = PollFd::new(&self.connection.socket, PollFlags::empty());
        let mut fds = [daemon, client];
        poll(&mut fds[..1 + usize::from(or_client)], Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Handles one message.
    ///
    /// # Errors
    /// Why the connection ends.
    fn request(&mut self, buffer: &mut [u8; MAX_MESSAGE]) -> Result<(), Ending> {
        let (state, seat) = (self.state, self.connection.seat);
        if !state.table.begin(seat, || self.is_over(true)) {
            return Err(Ending::Disconnected);
        }
        let handled = self.handle(buffer);
        state.table.settle(seat, take_time());
        handled
    }

    /// The same, once it may.
    fn handle(&mut self, buffer: &mut [u8; MAX_MESSAGE]) -> Result<(), Ending> {
        let state = self.state;
        let mut fds = Vec::new();
        let answer = match socket::receive(&self.connection.socket, buffer, &mut fds) {
            Ok(Received::Message(n)) => self.connection.handle(state, &buffer[..n], &mut fds),
            Ok(Received::TooMuch) => {
                let why = "a message has at most 4096 bytes and 64 descriptors, and the daemon must be able to open \
                           them (RLIMIT_NOFILE)";
                self.connection.refuse(0, Code::Malformed, why)
            }
            Ok(Received::Nothing) => return Ok(()),
            Ok(Received::End) => return Err(Ending::Disconnected),
            Err(_) => return Err(Ending::Failed),
        };
        // Closing the descriptors that are left may take any time.
        self.answer(&answer)
    }

    /// Sends the answer to a request.
    fn answer(&self, answer: &[u8]) -> Result<(), Ending> {
        let queues = self.state.table.seat(self.connection.seat).row().queues;
        let row = self.show(false);
        if queues < row.queues {
            let ClientStatus { client, pid, uid, .. } = row;
            let text = format!("client {client}: process {pid} of user {uid}");
            tell(self.daemon, Some(self.connection.peer.user), &text);
        }
        match socket::send(&self.connection.socket, answer, &[], false) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Err(Ending::Unread),
            Err(_) => Err(Ending::Disconnected),
        }
    }

    /// Shows the state of the client as of now.
    fn show(&self, closing: bool) -> ClientStatus {
        let mut row = ClientStatus { closing: closing.into(), ..self.connection.row() };
        if let Some(function) = self.connection.alarm.function.get() {
            function.count_into(&mut row);
        }
        self.state.table.show(self.connection.seat, row);
        row
    }

    /// Stops the client's queues, and releases its resources once they have stopped.
    fn end(self) {
        let seat = self.connection.seat;
        let row = self.show(true);
        let since = Instant::now();
        if let Some(function) = self.connection.alarm.function.get() {
            function.stop();
            self.connection.alarm.wake();
            let mut late = false;
            while !function.has_stopped() {
                if !late && since.elapsed() > self.state.config.stop_timeout {
                    late = true;
                    let (client, has) = (row.client, row.resources());
                    let text = format!("client {client}: its queues have not stopped; still allocated: {has}");
                    tell(self.daemon, None, &text);
                }
                thread::sleep(POLL_INTERVAL);
            }
        }
        let Self { state: ServerState { table, .. }, connection, worker, .. } = self;
        drop(worker);
        let socket = connection.release();
        table.charge(seat, take_time());
        // Its place is free before the client sees the end.
        table.release(seat);
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        // Messages that are left unread may carry descriptors, whose close may take any time.
    }
}
