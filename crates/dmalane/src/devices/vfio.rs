//! A dmalane card that is bound to vfio-pci.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_vfio::Bdf;

use super::card;
use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::SpecOption;
use crate::card_server::CARD_PCI_ID;
use crate::open_options::OpenOptions;
use crate::pci::{self, PciFunction};
use crate::pci_card::open_pci_card;

/// A card of this machine, `vfio:BDF`.
#[derive(Clone, PartialEq, Debug)]
pub struct VfioSpec {
    /// Its address.
    pub bdf: Bdf,
    /// How it is driven; its name is set when it is opened.
    pub card: CardUse,
}

impl Spec for VfioSpec {
    const NAME: &'static str = "vfio";
    const SYNTAX: &'static str = "vfio:BDF";
    const ABOUT: &'static str = "a dmalane card (PCI ID 4c44:0001) bound to vfio-pci";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::NeedsDriver];

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(Self { bdf: what.parse()?, card: CardUse::default() })
    }

    fn options() -> Vec<SpecOption<Self>> {
        card::options(|spec: &mut Self| &mut spec.card).into()
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let how = card::used(&self.card, format!("the card vfio:{}", self.bdf), true, options);
        Ok(Box::new(CardDevice::open(Arc::new(open_pci_card(&self.bdf)?), how)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let (vendor, device) = CARD_PCI_ID;
        let card = format!("{vendor:04x}:{device:04x}");
        let listed = |d: PciFunction| Listed {
            name: format!("vfio:{}", d.bdf),
            supported: d.id == card,
            about: match d.id == card {
                true => "a card bound to vfio-pci".to_owned(),
                false => {
                    "a PCI device bound to vfio-pci, but not a dmalane card; `dmalane bar-map` maps its BARs".to_owned()
                }
            },
            facts: vec![("pci_id", Some(d.id)), ("iommu_group", d.iommu_group)],
        };
        pci::devices(root).into_iter().filter(|d| d.driver.as_deref() == Some("vfio-pci")).map(listed).collect()
    }
}
