//! The view that each process of a daemon has of all clients: configuration, accounts, and the table that they share.

use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::account::Accounts;
use crate::config::Config;
use crate::peer::Peer;
use crate::table::{Table, now};
use crate::turns::SEATS;
use crate::wire::{ANSWER, ClientRequest, ClientStatus, MAX_ROWS, StatusAnswer, Totals, message};

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

    /// The answer to a status request of this peer. Who is no administrator sees the clients of its own user.
    pub(crate) fn status(&self, seqno: u64, first: u64, peer: Peer) -> Vec<u8> {
        // Nothing is asked of the kernel under the lock.
        let mut page: Vec<ClientStatus> = Vec::with_capacity(SEATS);
        let state = self.table.lock();
        let is_shown = |seat: &crate::table::Seat| seat.user == peer.user || peer.admin;
        let shown = state.clients().map(|(_, seat)| seat).filter(|seat| is_shown(seat) && seat.row.client >= first);
        page.extend(shown.map(|seat| seat.row));
        // Others see what their own user has and does.
        let user = (!peer.admin).then_some(peer.user);
        let Accounts { ddr, hbm, .. } = &self.accounts;
        let (in_ddr, in_hbm) = (ddr.in_use(&state, user), hbm.in_use(&state, user));
        let totals = if peer.admin { state.totals } else { Totals::default() };
        drop(state);
        page.sort_unstable_by_key(|row| row.client);
        let more = page.len() > MAX_ROWS;
        page.truncate(MAX_ROWS);
        let answer = StatusAnswer {
            uptime: (now() - self.started) / 1_000_000_000,
            totals,
            ddr: [in_ddr, ddr.total()],
            hbm: [in_hbm, hbm.total()],
            more: more.into(),
        };
        let body = [answer.as_bytes(), page.as_bytes()].concat();
        message(ClientRequest::Status { first }.opcode() | ANSWER, seqno, &body)
    }
}
