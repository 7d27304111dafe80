//! Keeps host memory registered for many transfers, within a limit of locked memory.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use dmalane::addr::Access;
use dmalane::card::Card;
use dmalane::dma::{self, AnonHeap, BufferRef, Heap, Registrar};
use dmalane::queue::{DeviceAddr, Operation, Registered, run};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};

/// Registrations of whole buffers, the one used last at the end.
struct Cache<B> {
    bus: Arc<B>,
    /// Bytes that may be registered at one time.
    limit: usize,
    kept: Vec<(BufferRef, Registered)>,
    /// Registrations made so far.
    made: usize,
}

impl<B: Registrar> Cache<B> {
    fn get(&mut self, buffer: &BufferRef) -> Result<Registered, dma::Error> {
        if let Some(at) = self.kept.iter().position(|(kept, _)| kept.same_memory(buffer)) {
            self.kept[at..].rotate_left(1);
        } else {
            // Those that no operation uses make room, the one not used for longest first.
            let bytes = |kept: &[(BufferRef, Registered)]| kept.iter().map(|(buffer, _)| buffer.len()).sum::<usize>();
            while bytes(&self.kept) + buffer.len() > self.limit
                && let Some(idle) = self.kept.iter().position(|(_, via)| !via.is_busy())
            {
                drop(self.kept.remove(idle));
            }
            let via = Registered::of_range(&*self.bus, buffer, 0..buffer.len(), Access::RW)?;
            self.kept.push((buffer.clone(), via));
            self.made += 1;
        }
        Ok(self.kept[self.kept.len() - 1].1.clone())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let heap = AnonHeap::new();
    let host: SoftHost = SoftHost::new(HostConfig::default())?;
    let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, CardConfig::default())?);
    let card = Card::open(bus.clone(), &heap)?;
    let mut queue = card.queue(0)?;
    let at = DeviceAddr::Card(card.layout().ddr.first());

    // Room for two of three buffers.
    let rings = bus.host().stats().pinned_frames;
    let mut cache = Cache { bus: bus.clone(), limit: 128 << 10, kept: Vec::new(), made: 0 };
    let mut buffers = Vec::new();
    for _ in 0..3 {
        let buffer = heap.allocate(64 << 10)?.share();
        buffers.push((buffer.reference(), Some(buffer.into_slice())));
    }
    for which in [0, 1, 0, 2, 1] {
        let (memory, slice) = &mut buffers[which];
        let via = cache.get(memory)?;
        for _ in 0..2 {
            let host = (slice.take().ok_or("a buffer in flight")?, via.clone());
            *slice = run(&mut queue, Operation::write(host, at), Duration::from_secs(10))?.into_slice();
        }
        assert!(bus.host().stats().pinned_frames - rings <= (128 << 10) / 4096);
    }
    println!("{} registrations for 5 uses of 3 buffers", cache.made);
    assert_eq!(cache.made, 4);
    Ok(())
}
