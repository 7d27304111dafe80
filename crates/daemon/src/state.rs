//! The view that each process of a daemon has of all clients: configuration, accounts, the table that they share, and
//! who is at the other end of a socket.

use std::os::fd::AsFd;
use std::sync::Arc;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::account::Accounts;
use crate::config::Config;
use crate::table::{Table, now};
use crate::wire::{ClientStatus, MAX_ROWS, StatusAnswer};

/// The daemon as one of its processes knows it.
pub(crate) struct ServerState {
    pub config: Config,
    pub table: Arc<Table>,
    pub accounts: Accounts,
    /// In nanoseconds, as [`now`].
    started: u64,
}

impl ServerState {
    pub(crate) fn new(config: Config) -> std::io::Result<Self> {
        let table = Arc::new(Table::new()?);
        Ok(Self { accounts: Accounts::new(&config, &table), config, table, started: now() })
    }

    /// The body of the answer to a status request of this peer. Who is no administrator sees the clients of its own
    /// user.
    pub(crate) fn status(&self, first: u64, peer: Peer) -> Vec<u8> {
        let is_shown = |row: &ClientStatus| peer.admin || self.config.user_of(row.uid) == peer.user;
        let rows = self.table.seats().map(|(_, seat)| seat.row());
        let mut page: Vec<ClientStatus> = rows.filter(|row| row.client >= first.max(1) && is_shown(row)).collect();
        // Others see what their own user has and does.
        let user = (!peer.admin).then_some(peer.user);
        let Accounts { ddr, hbm, .. } = &self.accounts;
        page.sort_unstable_by_key(|row| row.client);
        let more = page.len() > MAX_ROWS;
        page.truncate(MAX_ROWS);
        let answer = StatusAnswer {
            uptime: (now() - self.started) / 1_000_000_000,
            ddr: [ddr.in_use(user), ddr.limits.0],
            hbm: [hbm.in_use(user), hbm.limits.0],
            more: more.into(),
        };
        [answer.as_bytes(), page.as_bytes()].concat()
    }
}

/// A client, as the kernel knew it when it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    pub pid: u32,
    pub uid: u32,
    /// The user who is charged: the owner of a subordinate user, or `uid`.
    pub user: u32,
    /// Root, or the daemon's own user: sees all clients in the status.
    pub admin: bool,
}

impl Peer {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd, config: &Config) -> Result<Self, Errno> {
        // Not rustix's version: it rejects process 0, which the kernel reports for a process in another namespace.
        let credentials = getsockopt(&socket, PeerCredentials).map_err(|e| Errno::from_raw_os_error(e as i32))?;
        let uid = credentials.uid();
        Ok(Self {
            pid: u32::try_from(credentials.pid()).unwrap_or(0),
            uid,
            user: config.user_of(uid),
            admin: uid == 0 || uid == rustix::process::geteuid().as_raw(),
        })
    }
}
