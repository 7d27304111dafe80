//! The link model beside what is known of it.

mod explanations;
mod limits;
mod optimum;
mod policy;
mod slow;
mod v80;
mod validated;

use std::sync::Arc;

use dmalane::card::{CardDevice, CardUse};
use dmalane::device::Device;
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};

/// A software card with 64 MiB of each memory and two channels.
fn card() -> Box<dyn Device> {
    let config = CardConfig { ddr: 64 << 20, hbm: 64 << 20, ..CardConfig::default() };
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, config).unwrap());
    Box::new(CardDevice::open(bus, CardUse { flat: true, ..CardUse::default() }).unwrap())
}
