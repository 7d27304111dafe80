//! The software card: a device model inside this process.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use dmalane_card::{CardDevice, CardUse};
use dmalane_device::{Counters, IommuCounters};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

use super::card;
use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::{SpecOption, bytes, number};
use crate::open_options::OpenOptions;
use crate::size::{Size, binary};

/// Bytes of DDR, by default.
pub const DDR: u64 = 64 << 30;
/// Bytes of HBM, by default.
pub const HBM: u64 = 32 << 30;
/// Most bytes of either.
pub const MOST: u64 = 256 << 30;
/// Bytes of the synthetic physical memory of its host. None of it costs anything until it is pinned.
pub const HOST_MEMORY: u64 = 16 << 40;

/// The software card, `soft`.
#[derive(Clone, PartialEq, Debug)]
pub struct SoftSpec {
    /// The card.
    pub config: CardConfig,
    /// Its host.
    pub host: HostConfig,
    /// How it is driven; its name is set when it is opened.
    pub card: CardUse,
}

impl Default for SoftSpec {
    fn default() -> Self {
        let config = CardConfig { ddr: DDR, hbm: HBM, ..CardConfig::default() };
        let host = HostConfig { memory: HOST_MEMORY, ..HostConfig::default() };
        Self { config, host, card: CardUse::default() }
    }
}

/// The size of a memory of the card, rounded up to a multiple of `unit`.
pub(super) fn memory(text: &str, unit: u64) -> Result<u64, String> {
    match bytes(text)? {
        bytes if bytes <= MOST => Ok(bytes.next_multiple_of(unit)),
        _ => Err(format!("a memory of the card has at most {}", Size::new(MOST))),
    }
}

impl Spec for SoftSpec {
    const NAME: &'static str = "soft";
    const SYNTAX: &'static str = "soft";
    const ABOUT: &'static str = "the software card: a device model inside this process";
    const ABILITIES: &'static [Ability] = &[Ability::Card];

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        match what {
            "" => Ok(Self::default()),
            _ => Err("nothing follows it but options, as in soft,ddr=1GiB".into()),
        }
    }

    fn options() -> Vec<SpecOption<Self>> {
        let own = [
            SpecOption::valued(
                "ddr",
                "SIZE",
                "DDR, at most 256GiB, rounded up to 2MiB [64GiB]",
                |spec: &mut Self, text| memory(text, 2 << 20).map(|it| spec.config.ddr = it),
            ),
            SpecOption::valued(
                "hbm",
                "SIZE",
                "HBM in two halves, at most 256GiB, rounded up to 4MiB [32GiB]",
                |spec: &mut Self, text| memory(text, 4 << 20).map(|it| spec.config.hbm = it),
            ),
            SpecOption::valued("channels", "N", "DMA channels, 1 to 16 [2]", |spec: &mut Self, text| {
                number(text, 1..=16).map(|it| spec.config.channels = it)
            }),
            SpecOption::valued(
                "fragmentation",
                "F",
                "fragmentation of its host's physical memory, 0 to 1 [0.5]",
                |spec: &mut Self, text| number(text, 0.0..=1.0).map(|it| spec.host.fragmentation = it),
            ),
        ];
        own.into_iter().chain(card::options(|spec: &mut Self| &mut spec.card)).collect()
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let host: SoftHost = SoftHost::new(self.host)?;
        let bus = Arc::new(SoftBus::new(host, CardConfig { workers: Workers::One, ..self.config })?);
        // Apparent differences between its channels only reflect which of them its thread came to first.
        let used = card::used(&self.card, "software card".to_owned(), false, options);
        let threads = "one thread for the card, helped by those that poll".to_owned();
        let how = CardUse { threads: Some(threads), helped: true, ..used };
        Ok(Box::new(CardDevice::open(bus.clone(), how)?.counted(move || counters(&bus))))
    }

    fn list(_: &Path) -> Vec<Listed> {
        vec![Listed {
            name: "soft".to_owned(),
            supported: true,
            about: "the software card: a device model inside this process, no hardware needed".to_owned(),
            facts: vec![
                ("memory", Some(format!("ddr {}, hbm {} (allocated as they fill)", binary(DDR), binary(HBM)))),
                ("channels", Some(CardConfig::default().channels.to_string())),
            ],
        }]
    }
}

/// The counters of a software card and its host.
fn counters(bus: &SoftBus) -> Counters {
    let (host, (ddr, hbm)) = (bus.host().stats(), bus.memory().touched());
    let iommu = IommuCounters { leaves: host.leaves, tables: host.tables, faults: host.faults };
    Counters { iommu: Some(iommu), touched: Some(ddr + hbm) }
}
