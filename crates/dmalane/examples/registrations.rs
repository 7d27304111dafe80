//! Registers host memory once and submits it twice, within a limit of locked memory.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use dmalane::addr::Access;
use dmalane::card::Card;
use dmalane::dma::{AnonHeap, Heap};
use dmalane::queue::{DeviceAddr, Operation, Registry, RegistryLimits, run};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};

fn main() -> Result<(), Box<dyn Error>> {
    let heap = AnonHeap::new();
    let host: SoftHost = SoftHost::new(HostConfig::default())?;
    let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, CardConfig::default())?);
    let card = Card::open(bus.clone(), &heap)?;
    let mut queue = card.queue(0)?;
    let at = DeviceAddr::Card(card.layout().ddr.first());

    // Room for two of three buffers: the least recently used one is deregistered, never one in use.
    let mut registry = Registry::new(bus, RegistryLimits { bytes: 128 << 10, entries: 16 });
    let mut buffers = Vec::new();
    for _ in 0..3 {
        let buffer = heap.allocate(64 << 10)?.share();
        buffers.push((buffer.reference(), Some(buffer.into_slice())));
    }
    for which in [0, 1, 0, 2, 1] {
        let (memory, slice) = &mut buffers[which];
        let via = registry.get(memory, 0..memory.len(), Access::RW)?;
        for _ in 0..2 {
            let host = (slice.take().ok_or("a buffer in flight")?, via.clone());
            *slice = run(&mut queue, Operation::write(host, at), Duration::from_secs(10))?.into_slice();
        }
    }
    let stats = registry.stats();
    println!("{} registered, {} found, {} evicted", stats.misses, stats.hits, stats.evictions);
    assert!(stats.bytes_peak <= 128 << 10);
    Ok(())
}
