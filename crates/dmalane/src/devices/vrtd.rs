//! An AMD V80 that SLASH's daemon vrtd lends.

use std::error::Error;
use std::path::Path;

use dmalane_dma::error_chain;
use dmalane_slash::{SlashDevice, SlashOptions, VRTD_SOCKET, VrtdName};

use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::SpecOption;
use super::slash::ring;
use crate::open_options::OpenOptions;

/// A card of a vrtd, `vrtd[:SOCKET][#N]`.
#[derive(Clone, PartialEq, Debug)]
pub struct VrtdSpec {
    /// The socket and the number of the card.
    pub card: VrtdName,
    /// How it is opened.
    pub options: SlashOptions,
}

impl Spec for VrtdSpec {
    const NAME: &'static str = "vrtd";
    const SYNTAX: &'static str = "vrtd[:SOCKET][#N]";
    const ABOUT: &'static str = "an AMD V80 that SLASH's daemon vrtd lends";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::NeedsDriver];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(Self { card: what.parse()?, options: SlashOptions::default() })
    }

    fn options() -> Vec<SpecOption<Self>> {
        vec![ring(|spec: &mut Self| &mut spec.options)]
    }

    fn open(&self, _: &OpenOptions) -> OpenResult {
        Ok(Box::new(SlashDevice::open_via_vrtd(&self.card, self.options)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let socket = root.join(VRTD_SOCKET.trim_start_matches('/'));
        if !socket.exists() {
            return Vec::new();
        }
        let listed = |name: String, about, pci: Result<String, ()>| Listed {
            name,
            supported: pci.is_ok(),
            about,
            facts: vec![("pci", pci.ok())],
        };
        match dmalane_slash::vrtd_cards(&socket) {
            Ok(cards) => {
                let about =
                    |name| format!("{name}, an AMD V80 through vrtd; available memory depends on other clients");
                let name = |number| format!("vrtd:{VRTD_SOCKET}#{number}");
                let cards = cards.into_iter().enumerate();
                cards.map(|(number, card)| listed(name(number), about(card.name), Ok(card.pci))).collect()
            }
            Err(e) => vec![listed(format!("vrtd:{VRTD_SOCKET}"), error_chain(&e), Err(()))],
        }
    }
}
