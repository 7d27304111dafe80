//! A client's connection from its first message to its end, in a process of its own.
//!
//! A client can make a request long: the kernel may wait for other users of its files, and closing a descriptor of a
//! FUSE file or of a TCP socket that lingers may take minutes. That holds up this process alone. A user pays for its
//! requests with its share of the card, and while it owes, its requests wait beside other users.
//!
//! A connection is closed only after the card has stopped accessing the client's memory: to a client, the end of the
//! connection means the same as a status of 0.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use crate::connection::{Answer, Connection, Handled};
use crate::peer::Peer;
use crate::socket::{self, Received};
use crate::state::ServerState;
use crate::table::{Ending, timespec};
use crate::thread::{take_time, yield_to_worker};
use crate::wire::{Code, MAX_MESSAGE};
use crate::worker::Worker;

/// How often a process looks whether its queues have stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Messages of a client's process to the daemon: the client has opened a function; its queues have not stopped; its
/// resources are released.
pub(crate) const OPENED: u8 = b'o';
pub(crate) const NOT_STOPPED: u8 = b's';
pub(crate) const RELEASED: u8 = b'r';

/// Why a client may request the status alone. Its number in the table is one more, where 0 is none.
pub(crate) const REFUSALS: [(Code, &str); 3] = [
    (Code::NotPermitted, "this user may not use the daemon (--allow-uid, --allow-gid)"),
    (Code::Quota, "the daemon has reached its limit of clients (--clients)"),
    (Code::Quota, "this user has reached the limit of clients (--user-clients)"),
];

/// A client's process.
pub(crate) struct Serving<'s> {
    state: &'s ServerState,
    connection: Connection,
    /// The end of a socket pair with the daemon.
    control: OwnedFd,
    worker: Worker,
    since: Instant,
    /// The client has opened a function.
    opened: bool,
}

impl<'s> Serving<'s> {
    /// The client of a seat.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(state: &'s ServerState, seat: usize, socket: OwnedFd, control: OwnedFd) -> std::io::Result<Self> {
        let peer = Peer::of(&socket, &state.config)?;
        let (id, refusal) = {
            let state = state.table.lock();
            (state.seats[seat].row.client, state.seats[seat].refusal as usize)
        };
        let mut connection = Connection::new(seat, id, peer, socket)?;
        connection.status_only = REFUSALS.get(refusal.wrapping_sub(1)).copied();
        // Before this thread lowers its priority, which threads inherit and nobody can raise.
        let worker = Worker::start(connection.alarm.clone(), state.table.clone(), seat, state.config.spin)?;
        Ok(Self { state, connection, control, worker, since: Instant::now(), opened: false })
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
        self.end(served.unwrap_or(Ending::Bug));
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// Why the connection ends.
    fn wait(&self) -> Result<(), Ending> {
        let (hello, open) = (self.state.config.hello_timeout, self.state.config.open_timeout);
        loop {
            let limit = match self.connection.function {
                Some(_) => None,
                None if self.connection.greeted => Some(open),
                None => Some(hello.min(open)),
            };
            let after = self.since.elapsed();
            let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            let longest = limit.map(|limit| timespec(nanoseconds(limit.saturating_sub(after))));
            let mut fds = [&self.connection.socket, &self.control].map(|fd| PollFd::new(fd, PollFlags::IN));
            let _ = poll(&mut fds, longest.as_ref());
            if !fds[1].revents().is_empty() {
                return Err(Ending::ShutDown);
            }
            // What the client has sent in time is answered, but repeated status requests keep no connection open.
            let is_ready = !fds[0].revents().is_empty();
            if is_ready
                && limit.is_none_or(|limit| after <= limit.saturating_mul(if self.connection.greeted { 2 } else { 1 }))
            {
                return Ok(());
            }
            if limit.is_some_and(|limit| after >= limit) {
                return Err(Ending::NotOpened);
            }
        }
    }

    /// The client has closed the connection, or the daemon shuts down.
    fn is_over(&self) -> bool {
        // Without flags, only the end of a connection is reported.
        let fds = [PollFd::new(&self.connection.socket, PollFlags::empty()), PollFd::new(&self.control, PollFlags::IN)];
        poll(&mut { fds }, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Handles one message.
    ///
    /// # Errors
    /// Why the connection ends.
    fn request(&mut self, buffer: &mut [u8; MAX_MESSAGE]) -> Result<(), Ending> {
        let (state, seat) = (self.state, self.connection.seat);
        if !state.table.wait_until_paid(seat, || self.is_over()) {
            return Err(Ending::Disconnected);
        }
        let mut fds = Vec::new();
        let handled = match socket::receive(&self.connection.socket, buffer, &mut fds) {
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
        let answered = self.answer(handled);
        // This may take any time.
        drop(fds);
        state.table.charge(seat, take_time());
        answered
    }

    /// Sends the answer to a request.
    fn answer(&mut self, handled: Handled) -> Result<(), Ending> {
        if let (false, Some(function)) = (self.opened, &self.connection.function) {
            self.opened = true;
            self.worker.serve(function.clone());
            self.tell(OPENED);
        }
        self.show(|totals| {
            totals.requests += 1;
            totals.errors += u64::from(matches!(handled, Handled::Refused(_)));
        });
        let Self { state, connection, .. } = self;
        let answer = match handled {
            Handled::Answer(answer) | Handled::Refused(answer) => answer,
            Handled::Status { seqno, first } => {
                Answer { bytes: state.status(seqno, first, connection.peer), fds: Vec::new() }
            }
        };
        let fds: Vec<BorrowedFd<'_>> = answer.fds.iter().map(AsFd::as_fd).collect();
        match socket::send(&connection.socket, &answer.bytes, &fds, false) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Err(Ending::Unread),
            Err(_) => Err(Ending::Disconnected),
        }
    }

    /// Shows the state of the client as of now, and counts.
    fn show(&self, count: impl FnOnce(&mut crate::wire::Totals)) {
        let connection = &self.connection;
        let mut state = self.state.table.lock();
        let row = &mut state.seats[connection.seat].row;
        *row = connection.row();
        if let Some(function) = &connection.function {
            function.count_into(row);
        }
        count(&mut state.totals);
    }

    /// Tells the daemon.
    fn tell(&self, what: u8) {
        let _ = rustix::net::send(&self.control, &[what], SendFlags::NOSIGNAL);
    }

    /// Stops the client's queues, and releases its resources once they have stopped.
    fn end(self, why: Ending) {
        let (table, seat) = (&self.state.table, self.connection.seat);
        self.show(|_| {});
        table.lock().seats[seat].row.closing = 1;
        let since = Instant::now();
        if let Some(function) = &self.connection.function {
            function.stop();
            self.connection.alarm.wake();
            let mut late = false;
            while !function.has_stopped() {
                if !late && since.elapsed() > self.state.config.stop_timeout {
                    late = true;
                    self.tell(NOT_STOPPED);
                }
                thread::sleep(POLL_INTERVAL);
            }
        }
        let Self { state, mut connection, control, worker, .. } = self;
        drop(worker);
        {
            let mut state = state.table.lock();
            state.seats[seat].why = why as u32;
            state.seats[seat].stopped_after = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
        connection.release();
        connection.function = None;
        state.table.charge(seat, take_time());
        // Its place is free before the client sees the end.
        let _ = rustix::net::send(&control, &[RELEASED], SendFlags::NOSIGNAL);
        let _ = rustix::net::shutdown(&connection.socket, Shutdown::Both);
        // Messages that are left unread may carry descriptors, whose close may take any time.
    }
}
