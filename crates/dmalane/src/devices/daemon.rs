//! A function of the card that a dmalaned shares.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_daemon::{Client, ClientOptions, SOCKET};
use dmalane_dma::error_chain;

use super::card;
use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::{SERVER_UID, SpecOption, uid};
use super::soft::memory;
use crate::open_options::OpenOptions;

/// A function of a daemon's card, `daemon[:SOCKET]`.
#[derive(Clone, PartialEq, Debug)]
pub struct DaemonSpec {
    /// The connection to the daemon.
    pub client: ClientOptions,
    /// How it is driven; its name is set when it is opened.
    pub card: CardUse,
}

impl Spec for DaemonSpec {
    const NAME: &'static str = "daemon";
    const SYNTAX: &'static str = "daemon[:SOCKET]";
    const ABOUT: &'static str = "a function of a dmalaned's card";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::ServedBy("the daemon")];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let socket = if what.is_empty() { SOCKET } else { what };
        Ok(Self { client: ClientOptions::new(socket), card: CardUse::default() })
    }

    fn options() -> Vec<SpecOption<Self>> {
        let own = [
            SpecOption::valued(
                "ddr",
                "SIZE",
                "DDR to ask for, rounded up to 2MiB [the most that the daemon gives a client]",
                |spec: &mut Self, text| memory(text, 2 << 20).map(|it| spec.client.ddr = it),
            ),
            SpecOption::valued(
                "hbm",
                "SIZE",
                "HBM to ask for, rounded up to 4MiB [the most that the daemon gives a client]",
                |spec: &mut Self, text| memory(text, 4 << 20).map(|it| spec.client.hbm = it),
            ),
            SpecOption::valued("server-uid", "UID", SERVER_UID, |spec: &mut Self, text| {
                uid(text).map(|it| spec.client.server_uids.push(it))
            }),
        ];
        own.into_iter().chain(card::options(|spec: &mut Self| &mut spec.card)).collect()
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let client = Client::connect(self.client.clone())?;
        let used = card::used(&self.card, format!("the card daemon:{}", self.client.path.display()), false, options);
        Ok(Box::new(CardDevice::open(Arc::new(client), CardUse { processors: 1, ..used })?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let socket = root.join(SOCKET.trim_start_matches('/'));
        if !socket.exists() {
            return Vec::new();
        }
        // A file may be there without a daemon: one that was killed leaves its socket.
        let answer = dmalane_daemon::status(&ClientOptions::new(&socket));
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
