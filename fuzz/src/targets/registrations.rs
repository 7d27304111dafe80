//! The cache of registrations in random order: what it gives covers what was asked for, and nothing stays pinned.

use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{AnonHeap, Heap, SharedBuf};
use dmalane_queue::{Registered, Registry, RegistryError, RegistryLimits};
use dmalane_sim::{HostConfig, SoftHost};

const PAGE: u64 = 4096;
const CALLS: usize = 200;

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let input = &mut FuzzInput::new(data);
    let config = HostConfig { memory: 64 << 20, fragmentation: 0.5, seed: 1 };
    let host: Arc<SoftHost> = Arc::new(SoftHost::new(config).expect("a host"));
    let limits = RegistryLimits { bytes: u64::from(input.u8() % 64) * PAGE, entries: usize::from(input.u8() % 8) };
    let mut registry = Registry::new(host.clone(), limits);
    let make = |pages: usize| AnonHeap::new().allocate(pages * 4096).expect("memory").share();
    let mut buffers: [SharedBuf; 4] = [1, 3, 16, 40].map(make);
    let mut held: Vec<(Registered, usize, std::ops::Range<usize>)> = Vec::new();
    for _ in 0..CALLS {
        if input.is_empty() {
            break;
        }
        let (kind, which) = (input.u8(), usize::from(input.u8()) % buffers.len());
        let memory = buffers[which].reference();
        match kind % 8 {
            0..=4 => {
                let start = usize::from(input.u16());
                let range = start..start.saturating_add(usize::from(input.u16()) << (kind & 3));
                let access = [Access::READ, Access::RW][usize::from(kind >> 3) % 2];
                let before = registry.stats();
                match registry.get(&memory, range.clone(), access) {
                    Ok(via) => {
                        assert!(via.mapping().access().contains(access), "{access} was asked for");
                        let pinned = via.mapping().pinned();
                        assert!(pinned.reference().same_memory(&memory));
                        let covered = pinned.range();
                        assert!(covered.start <= range.start && range.end <= covered.end, "{covered:?} for {range:?}");
                        if kind & 0x80 != 0 {
                            held.push((via, which, covered));
                        }
                    }
                    Err(RegistryError::BadRange { .. }) => assert!(range.is_empty() || range.end > memory.len()),
                    Err(RegistryError::TooMuch { wanted, limit }) => assert!(wanted > limit && limit == limits.bytes),
                    Err(RegistryError::Busy { .. }) => assert!(!held.is_empty(), "nothing keeps it busy"),
                    Err(e) => panic!("{e}"),
                }
                assert!(registry.stats().hits + registry.stats().misses >= before.hits + before.misses);
            }
            5 if !held.is_empty() => drop(held.swap_remove(usize::from(input.u8()) % held.len())),
            6 => match registry.forget(&memory) {
                Ok(_) => assert!(held.iter().all(|(_, of, _)| *of != which), "one in use was forgotten"),
                Err(_) => assert!(held.iter().any(|(_, of, _)| *of == which), "none is in use"),
            },
            // Another buffer in its place; what is registered of the old one keeps it.
            7 => buffers[which] = make([1, 3, 16, 40][which]),
            _ => {}
        }
        if kind % 8 == 7 {
            held.retain(|(_, of, _)| *of != which);
        }
        let stats = registry.stats();
        assert!(stats.bytes <= limits.bytes && stats.entries <= limits.entries.max(1), "{stats:?}, {limits:?}");
        assert!(stats.bytes_peak >= stats.bytes);
        assert_eq!(host.stats().pinned_frames * PAGE, stats.bytes, "what is pinned is what it counts");
    }
    drop(registry);
    held.clear();
    assert_eq!(host.stats().pinned_frames, 0, "pinned for nobody");
}
