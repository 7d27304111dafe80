//! State that the daemon's threads share: its accounts, its clients as the status shows them, and its users' turns.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use zerocopy::IntoBytes;

use crate::account::Accounts;
use crate::config::Config;
use crate::function::Function;
use crate::log::Log;
use crate::peer::Peer;
use crate::wire::{ANSWER, ClientRequest, ClientStatus, MAX_ROWS, StatusAnswer, Totals, message};
use crate::worker::RunQueue;

/// State that all threads share.
pub(crate) struct ServerState {
    pub config: Config,
    pub accounts: Accounts,
    pub run_queue: Arc<RunQueue>,
    pub log: Mutex<Log>,
    pub totals: Mutex<Totals>,
    /// All connections, by number, until the client's resources are released.
    pub(crate) clients: Mutex<BTreeMap<u64, Arc<Client>>>,
    started: Instant,
    /// Eventfd: readable once the daemon shuts down.
    pub stop: OwnedFd,
    /// The worker has ended: nothing accesses clients' memory.
    pub worker_ended: AtomicBool,
}

/// A client as other threads know it.
pub(crate) struct Client {
    pub peer: Peer,
    pub user: Arc<User>,
    shown: Mutex<Shown>,
}

/// A client as the status shows it.
struct Shown {
    /// As of the last request.
    row: ClientStatus,
    function: Weak<Function>,
}

/// The turns of a user's clients.
#[derive(Default)]
pub(crate) struct User {
    pub short: Mutex<()>,
    pub long: Mutex<()>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are consistent after every statement, so a panic of another holder does no harm.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerState {
    pub(crate) fn new(config: Config, log: Log, run_queue: Arc<RunQueue>) -> std::io::Result<Self> {
        Ok(Self {
            accounts: Accounts::new(&config),
            config,
            run_queue,
            log: Mutex::new(log),
            totals: Mutex::default(),
            clients: Mutex::default(),
            started: Instant::now(),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            worker_ended: AtomicBool::new(false),
        })
    }

    /// Adds a connection, whose row of the status this is.
    pub(crate) fn add(&self, id: u64, peer: Peer, row: ClientStatus) -> Arc<Client> {
        let mut clients = lock(&self.clients);
        let others = clients.values().find(|client| client.peer.user == peer.user);
        let user = others.map_or_else(Arc::default, |client| client.user.clone());
        let shown = Shown { row, function: Weak::new() };
        let client = Arc::new(Client { peer, user, shown: Mutex::new(shown) });
        clients.insert(id, client.clone());
        client
    }

    /// Forgets a connection: its place is free.
    pub(crate) fn remove(&self, id: u64) {
        lock(&self.clients).remove(&id);
    }

    /// Connections in all, and of this user, with those that are being closed.
    pub(crate) fn connections(&self, user: u32) -> (usize, usize) {
        let clients = lock(&self.clients);
        (clients.len(), clients.values().filter(|client| client.peer.user == user).count())
    }

    /// All connections are of this user.
    pub(crate) fn is_alone(&self, user: u32) -> bool {
        lock(&self.clients).values().all(|client| client.peer.user == user)
    }

    /// Ends all connections.
    pub(crate) fn shut_down(&self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// There are clients whose resources are not released.
    pub(crate) fn has_clients(&self) -> bool {
        !lock(&self.clients).is_empty()
    }

    /// The peer has closed the connection, or the daemon shuts down.
    pub(crate) fn is_over(&self, socket: &OwnedFd) -> bool {
        // Without flags, only the end of a connection is reported.
        let fds = [PollFd::new(socket, PollFlags::empty()), PollFd::new(&self.stop, PollFlags::IN)];
        poll(&mut { fds }, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// The answer to a status request of this peer. Who is no administrator sees the clients of its own user.
    pub(crate) fn status(&self, seqno: u64, first: u64, peer: Peer) -> Vec<u8> {
        let is_shown = |client: &Arc<Client>| client.peer.user == peer.user || peer.admin;
        let mut shown: Vec<Arc<Client>> = {
            let clients = lock(&self.clients);
            let shown = clients.range(first..).map(|(_, client)| client).filter(|client| is_shown(client));
            shown.take(MAX_ROWS + 1).cloned().collect()
        };
        let more = shown.len() > MAX_ROWS;
        shown.truncate(MAX_ROWS);
        let page: Vec<ClientStatus> = shown.iter().map(|client| lock(&client.shown).row()).collect();
        // Others see what their own user has and does.
        let user = (!peer.admin).then_some(peer.user);
        let Accounts { ddr, hbm, .. } = &self.accounts;
        let answer = StatusAnswer {
            uptime: self.started.elapsed().as_secs(),
            totals: if peer.admin { *lock(&self.totals) } else { Totals::default() },
            ddr: [ddr.in_use(user), ddr.total()],
            hbm: [hbm.in_use(user), hbm.total()],
            more: more.into(),
        };
        let body = [answer.as_bytes(), page.as_bytes()].concat();
        message(ClientRequest::Status { first }.opcode() | ANSWER, seqno, &body)
    }
}

impl Client {
    /// The client has disconnected, and its resources are being released.
    pub(crate) fn is_closing(&self) {
        lock(&self.shown).row.closing = 1;
    }

    /// Shows the state of a client as of now.
    pub(crate) fn show(&self, row: ClientStatus, function: Option<&Arc<Function>>) {
        let mut shown = lock(&self.shown);
        shown.row = row;
        shown.function = function.map(Arc::downgrade).unwrap_or_default();
    }
}

impl Shown {
    fn row(&self) -> ClientStatus {
        let mut row = self.row;
        if let Some(function) = self.function.upgrade() {
            function.count_into(&mut row);
        }
        row
    }
}
