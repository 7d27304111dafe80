//! The view that each process of a daemon has of all clients: configuration, accounts, and the table that they share.

use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::account::Accounts;
use crate::config::Config;
use crate::peer::Peer;
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
        let (in_ddr, in_hbm) = (ddr.in_use(user), hbm.in_use(user));
        page.sort_unstable_by_key(|row| row.client);
        let more = page.len() > MAX_ROWS;
        page.truncate(MAX_ROWS);
        let answer = StatusAnswer {
            uptime: (now() - self.started) / 1_000_000_000,
            ddr: [in_ddr, ddr.total()],
            hbm: [in_hbm, hbm.total()],
            more: more.into(),
        };
        [answer.as_bytes(), page.as_bytes()].concat()
    }
}
