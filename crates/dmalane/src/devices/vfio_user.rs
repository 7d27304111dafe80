//! A card that another process serves over a vfio-user socket.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_dma::trusted_users;

use super::card;
use super::kind::{Ability, OpenResult, Spec};
use super::option::{SERVER_UID, SpecOption, uid};
use crate::open_options::OpenOptions;
use crate::pci_card::connect_pci_card;

/// A served card, `vfio-user:SOCKET`.
#[derive(Clone, PartialEq, Debug)]
pub struct VfioUserSpec {
    /// The socket of the process that serves it.
    pub socket: PathBuf,
    /// A user that may have the socket besides root and this process's.
    pub server_uid: Option<u32>,
    /// How it is driven; its name is set when it is opened.
    pub card: CardUse,
}

impl Spec for VfioUserSpec {
    const NAME: &'static str = "vfio-user";
    const SYNTAX: &'static str = "vfio-user:SOCKET";
    const ABOUT: &'static str = "a card that a process serves over a socket";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::ServedBy("the process that serves it")];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        match what {
            "" => Err("a socket is missing".into()),
            _ => Ok(Self { socket: what.into(), server_uid: None, card: CardUse::default() }),
        }
    }

    fn options() -> Vec<SpecOption<Self>> {
        let own = [SpecOption::valued("server-uid", "UID", SERVER_UID, |spec: &mut Self, text| {
            uid(text).map(|it| spec.server_uid = Some(it))
        })];
        own.into_iter().chain(card::options(|spec: &mut Self| &mut spec.card)).collect()
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let trusted: Vec<u32> = trusted_users().into_iter().chain(self.server_uid).collect();
        let bus = connect_pci_card(&self.socket, &trusted)?;
        let used = card::used(&self.card, format!("the card vfio-user:{}", self.socket.display()), true, options);
        Ok(Box::new(CardDevice::open(Arc::new(bus), CardUse { processors: 1, ..used })?))
    }
}
