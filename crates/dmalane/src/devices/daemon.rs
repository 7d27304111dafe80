//! A function of the card that a dmalaned shares.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_daemon::{Client, ClientOptions, SOCKET};
use dmalane_dma::error_chain;

use super::card::CardOptions;
use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::{SERVER_UID, SpecOption, uid};
use super::soft::memory;
use crate::open_options::OpenOptions;

/// A function of a daemon's card, `daemon[:SOCKET]`.
#[derive(Clone, PartialEq, Debug)]
pub struct DaemonSpec {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// A user that may have the socket besides root and this process's.
    pub server_uid: Option<u32>,
    /// Bytes of DDR, rounded up to 2 MiB; `None` for what the daemon gives a client.
    pub ddr: Option<u64>,
    /// Bytes of HBM, rounded up to 4 MiB; `None` for what the daemon gives a client.
    pub hbm: Option<u64>,
    /// How it is driven.
    pub card: CardOptions,
}

impl DaemonSpec {
    /// The connection to the daemon.
    pub fn client(&self) -> ClientOptions {
        let whole = |bytes: Option<u64>, to: u64| bytes.map_or(0, |bytes| bytes.div_ceil(to).saturating_mul(to));
        let mut options = ClientOptions::new(&self.socket);
        options.server_uids.extend(self.server_uid);
        (options.ddr, options.hbm) = (whole(self.ddr, 2 << 20), whole(self.hbm, 4 << 20));
        options
    }
}

impl Spec for DaemonSpec {
    const NAME: &'static str = "daemon";
    const SYNTAX: &'static str = "daemon[:SOCKET]";
    const ABOUT: &'static str = "a function of a dmalaned's card";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::ServedBy("the daemon")];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let socket = if what.is_empty() { SOCKET } else { what }.into();
        Ok(Self { socket, server_uid: None, ddr: None, hbm: None, card: CardOptions::default() })
    }

    fn options() -> Vec<SpecOption<Self>> {
        let own = [
            SpecOption::valued(
                "ddr",
                "SIZE",
                "DDR to ask for, rounded up to 2MiB [the most that the daemon gives a client]",
                |spec: &mut Self, text| memory(text).map(|it| spec.ddr = Some(it)),
            ),
            SpecOption::valued(
                "hbm",
                "SIZE",
                "HBM to ask for, rounded up to 4MiB [the most that the daemon gives a client]",
                |spec: &mut Self, text| memory(text).map(|it| spec.hbm = Some(it)),
            ),
            SpecOption::valued("server-uid", "UID", SERVER_UID, |spec: &mut Self, text| {
                uid(text).map(|it| spec.server_uid = Some(it))
            }),
        ];
        own.into_iter().chain(CardOptions::options(|spec: &mut Self| &mut spec.card)).collect()
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let client = Client::connect(self.client())?;
        let used = self.card.used(format!("the card daemon:{}", self.socket.display()), false, options);
        Ok(Box::new(CardDevice::open(Arc::new(client), CardUse { processors: 1, ..used })?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let socket = root.join(SOCKET.trim_start_matches('/'));
        if !socket.exists() {
            return Vec::new();
        }
        // A file may be there without a daemon: one that was killed leaves its socket.
        let answer = dmalane_daemon::status(&dmalane_daemon::ClientOptions::new(&socket));
        vec![Listed {
            name: format!("daemon:{SOCKET}"),
            supported: answer.is_ok(),
            about: match answer {
                Ok(_) => "a function of a dmalaned's card; `dmalaned status` shows its clients".to_owned(),
                Err(e) => format!("the daemon cannot be used: {}", error_chain(&e)),
            },
            facts: Vec::new(),
        }]
    }
}
