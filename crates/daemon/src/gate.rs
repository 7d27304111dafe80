//! The process that accepts or refuses connections, and forks a process for each that it accepts.
//!
//! It has one thread, since it forks, and nothing that a peer does can hold it up: it reads nothing that a peer sends,
//! and whoever closes a peer's socket, with messages that were never read and their descriptors, is another process.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dmalane_dma::receive_with_fds;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, SocketFlags};
use rustix::process::{Pid, WaitOptions, wait};
use zerocopy::FromZeros;

use crate::config::Config;
use crate::fork::{end_at_missing_pages, fork_apart};
use crate::log::{Ending, tell};
use crate::serving::Serving;
use crate::socket::{self, readable};
use crate::state::{Peer, ServerState};
use crate::table::Seat;
use crate::wire::{ClientStatus, Code, failed};

/// Connections beyond the limit, reserved for status requests of administrators.
pub(crate) const OPERATOR_CONNECTIONS: usize = 4;
/// Time that an end waits beyond the time in which queues have to stop.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// A refused connection, which nobody pays for, blocks `accept` for this many times its cost, so that such connections
/// take little of the processors' time.
const UNPAID_REST: u32 = 7;
/// The longest that a refused connection blocks `accept`: another process may have had the processor.
const MAX_REST: Duration = Duration::from_millis(1);
/// Processes of a user that may be ending without counting as clients: what they close may take any time.
const MAX_ENDING: usize = 8;
/// A connection costs its user this: a process starts and ends.
const PROCESS_TIME: Duration = Duration::from_millis(1);
/// Refused connections that one process closes; and how many such processes there are, beyond which nobody connects.
const CLOSED_AT_ONCE: usize = 64;
const MAX_CLOSING: usize = 64;
/// How long refused connections wait for others to be closed with.
const CLOSE_INTERVAL: Duration = Duration::from_millis(50);
/// How long nothing is accepted where that fails for lack of descriptors, memory or processes.
const FAILED_REST: Duration = Duration::from_millis(250);
/// Raised for processes of clients, so that the kernel ends one of them and not the daemon when memory runs out.
const OOM_SCORE_ADJ: &str = "500";

/// The process's state.
pub(crate) struct Gate<'s> {
    state: &'s ServerState,
    /// The end of a socket pair with the daemon. All processes have it: for notes, and to see when the daemon ends.
    daemon: OwnedFd,
    listener: Option<OwnedFd>,
    /// The number of the last client.
    last: u64,
    /// Children: the seat of clients', `None` for those that close.
    children: HashMap<Pid, Option<usize>>,
    /// Refused connections, to be closed.
    refused: Vec<OwnedFd>,
}

impl<'s> Gate<'s> {
    pub(crate) fn new(state: &'s ServerState, daemon: OwnedFd) -> Self {
        Self { state, daemon, listener: None, last: 0, children: HashMap::new(), refused: Vec::new() }
    }

    /// Accepts connections until the daemon says that it ends, and then waits until all clients have ended. If the
    /// daemon is gone, it returns at once, and the kernel ends the children.
    pub(crate) fn run(mut self) {
        // The daemon's only message but the last.
        let Ok(got) = receive_with_fds(&self.daemon, &mut [0], RecvFlags::empty()) else { return };
        self.listener = got.fds.into_iter().next();
        let mut child = SigSet::empty();
        child.add(Signal::SIGCHLD);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let Some((_, ended)) = child.thread_block().ok().zip(SignalFd::with_flags(&child, flags).ok()) else { return };
        let mut rest = None;
        while self.listener.is_some() {
            let now = Instant::now();
            rest = rest.filter(|until| now < *until);
            let closing = self.children.values().filter(|client| client.is_none()).count();
            let can_accept = rest.is_none() && closing < MAX_CLOSING;
            let wait = rest.map_or(CLOSE_INTERVAL, |until| until - now);
            let is_idle = rest.is_none() && self.refused.is_empty();
            let [ends, connected] = self.wait(&ended, can_accept, (!is_idle).then_some(wait));
            if ends {
                self.end(&ended);
                return;
            }
            if self.refused.len() >= CLOSED_AT_ONCE || (!connected && rest.is_none()) {
                self.close_refused();
            }
            if connected {
                let began = Instant::now();
                let resting = match self.accept() {
                    Ok(true) => continue,
                    Ok(false) => (UNPAID_REST * began.elapsed()).min(MAX_REST),
                    Err(e) => {
                        tell(&self.daemon, None, &format!("cannot accept a connection now: {e}"));
                        FAILED_REST
                    }
                };
                rest = Some(Instant::now() + resting);
            }
        }
    }

    /// Waits for the daemon's end, a connection where it `can_accept` one, the end of a child, or some time. Returns
    /// whether the first two are there.
    fn wait(&mut self, ended: &SignalFd, can_accept: bool, time: Option<Duration>) -> [bool; 2] {
        let listener = self.listener.as_ref().filter(|_| can_accept).map(AsFd::as_fd);
        let [ends, connected, _] = readable([Some(self.daemon.as_fd()), listener, Some(ended.as_fd())], time);
        while let Ok(Some(_)) = ended.read_signal() {}
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let Some(Some(seat)) = self.children.remove(&pid) {
                let (row, user) = (self.state.table.seat(seat).row(), self.state.table.seat(seat).user());
                let why = status.exit_status().unwrap_or(Ending::Killed as i32);
                if row.queues > 0 || why == Ending::Killed as i32 {
                    let (client, why, had) = (row.client, Ending::text(why), row.resources());
                    tell(&self.daemon, Some(user), &format!("client {client}: {why}; released {had}"));
                }
                self.state.table.stand(seat);
            }
        }
        [ends, connected]
    }

    /// Waits until all clients have ended, if the daemon ends in good order.
    fn end(&mut self, ended: &SignalFd) {
        // Nobody takes the daemon's last message: all processes see it.
        if !rustix::net::recv(&self.daemon, &mut [0], RecvFlags::PEEK).is_ok_and(|(n, _)| n > 0) {
            return;
        }
        // Connections that were not accepted may carry descriptors.
        self.refused.extend(self.listener.take());
        self.close_refused();
        let end = Instant::now() + self.state.config.stop_timeout + CLOSE_TIMEOUT;
        while !self.children.is_empty() && Instant::now() < end {
            // The daemon's message is there all the time.
            std::thread::sleep(Duration::from_millis(1));
            self.wait(ended, false, Some(Duration::ZERO));
        }
    }

    /// Accepts or refuses a connection. False when nobody pays for that.
    fn accept(&mut self) -> Result<bool, Errno> {
        let Self { state, listener, .. } = self;
        let (table, Config { clients, .. }) = (&state.table, &state.config);
        let socket = match rustix::net::accept_with(listener.as_ref().ok_or(Errno::AGAIN)?, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            // The peer has already disconnected.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => return Ok(true),
            Err(e) => return Err(e),
        };
        let Ok(peer) = Peer::of(&socket, &state.config) else {
            // Of this peer alone: others are accepted.
            self.refuse(socket);
            return Ok(false);
        };
        let Peer { pid, uid, user, admin } = peer;
        // Who has seen the end of a connection has its place again.
        let of = |released, own: bool| {
            let counts = |seat: &&Seat| seat.is_released() == released && (!own || seat.user() == user);
            table.seats().map(|(_, seat)| seat).filter(counts).count()
        };
        let (connected, of_the_user) = (of(false, false), of(false, true) + of(true, true).saturating_sub(MAX_ENDING));
        let refusal = match () {
            () if connected >= *clients => Some("the daemon has reached its limit of clients (--clients)"),
            () if of_the_user < state.config.clients_per_user() => None,
            () => Some("this user has reached the limit of clients (--user-share)"),
        };
        let row = ClientStatus { client: self.last + 1, pid, uid, ..ClientStatus::new_zeroed() };
        if let Some(why) = refusal
            // An administrator may always request the status.
            && !(admin && connected < clients + OPERATOR_CONNECTIONS)
        {
            tell(&self.daemon, Some(user), &format!("refused process {pid} of user {uid}: {why}"));
            let _ = socket::send(&socket, &failed(0, Code::Quota, why), &[], false);
            self.refuse(socket);
            return Ok(false);
        }
        let Some(seat) = table.sit(user, row) else {
            self.refuse(socket);
            return Err(Errno::AGAIN);
        };
        self.last += 1;
        table.charge(seat, PROCESS_TIME);
        // The client's process is not to close them.
        self.close_refused();
        let serve = |gate: &mut Self, sockets: Vec<OwnedFd>| {
            gate.listener = None;
            let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ);
            end_at_missing_pages();
            let socket = sockets.into_iter().next().expect("one");
            match Serving::new(gate.state, (seat, row.client, peer, refusal), socket, gate.daemon.as_fd()) {
                Ok(serving) => serving.run(),
                Err(_) => Ending::Failed,
            }
        };
        self.fork(vec![socket], Some(seat), serve).map(|()| true)
    }

    /// Ends a connection, with messages left unread, which may carry descriptors (before Linux 6.16, and where the
    /// daemon has inherited the listening socket): closing it may take any time.
    fn refuse(&mut self, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        self.refused.push(socket);
    }

    /// Has another process close what is refused; this one tries again if there can be none.
    fn close_refused(&mut self) {
        let refused = std::mem::take(&mut self.refused);
        if !refused.is_empty() {
            let _ = self.fork(refused, None, |_, _| Ending::Disconnected);
        }
    }

    /// Forks a process with these sockets, for the client of a seat, or to close them.
    fn fork(
        &mut self,
        sockets: Vec<OwnedFd>,
        client: Option<usize>,
        run: impl FnOnce(&mut Self, Vec<OwnedFd>) -> Ending,
    ) -> Result<(), Errno> {
        match fork_apart(sockets, |sockets| run(self, sockets)) {
            Ok(pid) => {
                self.children.insert(pid, client);
                Ok(())
            }
            Err((e, sockets)) => {
                self.refused.extend(sockets);
                if let Some(seat) = client {
                    self.state.table.stand(seat);
                }
                Err(e)
            }
        }
    }
}
