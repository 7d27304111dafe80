//! The cache of registrations, and what it may serve.

use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_queue::{Registered, Registry, RegistryError, RegistryLimits};

use crate::fakes::{Bus, pages};

const PAGE: u64 = 4096;
const MANY: u64 = 1 << 40;

fn registry(bytes: u64, entries: usize) -> (Registry<Bus>, Arc<Bus>) {
    let bus = Arc::new(Bus::new(MANY, false));
    (Registry::new(bus.clone(), RegistryLimits { bytes, entries }), bus)
}

#[test]
fn a_registration_serves_only_what_it_permits_and_covers() {
    let (mut registry, _) = registry(64 * PAGE, 16);
    let (memory, other) = (pages(8).reference(), pages(8).reference());
    let mut get = |memory, range, access: Access| {
        let before = registry.stats();
        let via = registry.get(memory, range, access).unwrap();
        assert!(via.mapping().access().contains(access), "{access} was asked for");
        let now = registry.stats();
        assert_eq!((now.hits + now.misses) - (before.hits + before.misses), 1);
        now.hits > before.hits
    };
    assert!(!get(&memory, 4096..8192, Access::READ));
    assert!(get(&memory, 4096..8192, Access::READ), "the same");
    assert!(get(&memory, 5000..5001, Access::READ), "a part");
    assert!(!get(&memory, 4096..8192, Access::WRITE), "a read-only registration serves no writes");
    assert!(!get(&memory, 4096..8192, Access::RW), "nor is one for writing enough for both");
    assert!(get(&memory, 4096..8192, Access::WRITE));
    assert!(!get(&memory, 4095..8192, Access::READ), "it begins before");
    assert!(!get(&memory, 4096..8193, Access::READ), "it ends behind");
    assert!(!get(&other, 4096..8192, Access::READ), "of another memory");
}

#[test]
fn ranges_are_whole_pages_and_within() {
    let (mut registry, bus) = registry(4 * PAGE, 16);
    let memory = pages(8).reference();
    let first = registry.get(&memory, 4097..8190, Access::READ).unwrap();
    assert_eq!(first.mapping().pinned().range(), 4096..8192);
    let via = registry.get(&memory, 4095..8193, Access::READ).unwrap();
    assert_eq!(via.mapping().pinned().range(), 0..12288);
    assert_eq!((registry.stats().bytes, bus.pinned()), (4 * PAGE, 4 * PAGE));
    for bad in [5..5, 0..8 * 4096 + 1, 8 * 4096..8 * 4096 + 1] {
        let e = registry.get(&memory, bad.clone(), Access::READ).unwrap_err();
        assert!(matches!(e, RegistryError::BadRange { range, len: 32768 } if range == bad));
    }
    assert!(
        registry.get(&memory, 7 * 4096..8 * 4096, Access::READ).is_err_and(|e| matches!(e, RegistryError::Busy { .. }))
    );
    drop((first, via));
    registry.get(&memory, 7 * 4096..8 * 4096, Access::READ).unwrap();
    let e = registry.get(&memory, 0..5 * 4096, Access::READ).unwrap_err();
    assert!(matches!(e, RegistryError::TooMuch { wanted, limit } if (wanted, limit) == (5 * PAGE, 4 * PAGE)));
    // Exactly the limit fits.
    assert_eq!(registry.get(&memory, 0..4 * 4096, Access::READ).unwrap().mapping().span().len(), 4 * PAGE);
    assert_eq!(registry.limits(), RegistryLimits { bytes: 4 * PAGE, entries: 16 });
}

#[test]
fn the_one_not_used_for_longest_makes_room() {
    for (bytes, entries) in [(3 * PAGE, 16), (16 * PAGE, 3)] {
        let (mut registry, bus) = registry(bytes, entries);
        let buffers = [(); 4].map(|()| pages(1).reference());
        for memory in &buffers[..3] {
            registry.get(memory, 0..4096, Access::READ).unwrap();
        }
        assert_eq!(registry.stats().evictions, 0, "three fit");
        registry.get(&buffers[0], 0..4096, Access::READ).unwrap();
        registry.get(&buffers[3], 0..4096, Access::READ).unwrap(); // in place of the second
        let stats = registry.stats();
        assert_eq!((stats.evictions, stats.entries, stats.bytes), (1, 3, 3 * PAGE));
        assert_eq!((stats.bytes_peak, bus.pinned()), (3 * PAGE, 3 * PAGE));
        for (i, hit) in [(0, true), (2, true), (3, true), (1, false)] {
            let before = registry.stats().hits;
            registry.get(&buffers[i], 0..4096, Access::READ).unwrap();
            assert_eq!(registry.stats().hits > before, hit, "buffer {i}");
        }
    }
}

#[test]
fn what_is_in_use_stays() {
    let (mut registry, bus) = registry(2 * PAGE, 16);
    let (first, second) = (pages(1).reference(), pages(1).reference());
    let held = registry.get(&first, 0..4096, Access::READ).unwrap();
    registry.get(&second, 0..4096, Access::READ).unwrap();
    // Held, and so passed over, though it is older.
    registry.get(&pages(1).reference(), 0..4096, Access::READ).unwrap();
    assert_eq!((registry.stats().evictions, registry.stats().busy), (1, 0));
    assert!(matches!(registry.forget(&first), Err(RegistryError::Busy { bytes: PAGE })));
    let two = pages(2).reference();
    assert!(matches!(registry.get(&two, 0..8192, Access::READ), Err(RegistryError::Busy { bytes: PAGE })));
    assert_eq!(registry.stats().busy, 1);
    drop(held);
    registry.get(&two, 0..8192, Access::READ).unwrap();
    assert_eq!((registry.stats().bytes, bus.pinned()), (2 * PAGE, 2 * PAGE));
}

#[test]
fn what_is_forgotten_is_unmapped_and_nothing_else() {
    let (mut registry, bus) = registry(64 * PAGE, 16);
    let (memory, other) = (pages(4).reference(), pages(1).reference());
    registry.get(&memory, 0..4096, Access::READ).unwrap();
    registry.get(&memory, 4096..8192, Access::READ).unwrap();
    registry.get(&other, 0..4096, Access::READ).unwrap();
    assert_eq!(registry.forget(&memory).unwrap(), 2);
    assert_eq!((registry.stats().entries, registry.stats().bytes, bus.pinned()), (1, PAGE, PAGE));
    assert_eq!(registry.forget(&memory).unwrap(), 0);
    let before = registry.stats().hits;
    registry.get(&other, 0..4096, Access::READ).unwrap();
    assert_eq!(registry.stats().hits, before + 1, "of the other it still knows");
    drop(registry);
    assert_eq!(bus.pinned(), 0);
}

#[test]
fn an_eviction_leaves_the_other_ranges_of_a_memory() {
    let (mut registry, _) = registry(64 * PAGE, 2);
    let memory = pages(2).reference();
    registry.get(&memory, 0..4096, Access::READ).unwrap();
    registry.get(&memory, 4096..8192, Access::READ).unwrap();
    registry.get(&pages(1).reference(), 0..4096, Access::READ).unwrap();
    registry.get(&memory, 4096..8192, Access::READ).unwrap();
    assert_eq!((registry.stats().evictions, registry.stats().hits), (1, 1));
    assert!(format!("{registry:?}").starts_with("Registry { limits: RegistryLimits { bytes: 262144, entries: 2 }"));
}

#[test]
fn a_full_bus_gets_room_as_long_as_there_is_any() {
    let bus = Arc::new(Bus::new(3 * PAGE, true));
    let mut registry = Registry::new(bus.clone(), RegistryLimits { bytes: 64 * PAGE, entries: 16 });
    let others = Registered::new(&*bus, &pages(1), Access::READ).unwrap();
    for _ in 0..5 {
        registry.get(&pages(1).reference(), 0..4096, Access::READ).unwrap();
    }
    assert_eq!((registry.stats().evictions, registry.stats().entries), (3, 2));
    let e = registry.get(&pages(3).reference(), 0..12288, Access::READ).unwrap_err();
    assert!(matches!(e, RegistryError::Bus(dmalane_dma::Error::PinLimit { .. })), "{e}");
    assert_eq!(registry.stats().entries, 0, "it tried all");
    drop(others);
    registry.get(&pages(3).reference(), 0..12288, Access::READ).unwrap();
}

#[test]
fn limits_follow_the_bus() {
    let told = RegistryLimits::for_bus(&Bus::new(64 << 20, true));
    assert_eq!((told.bytes, told.entries), (56 << 20, 1024));
    assert_eq!(RegistryLimits::for_bus(&Bus::new(1 << 20, false)).bytes, 2 << 30);
    assert_eq!(RegistryLimits::for_bus(&Bus::new(8192, true)).bytes, 4096, "whole pages");
    assert_eq!(RegistryLimits::default().bytes, 7 << 20);
}

#[test]
fn a_registration_knows_whether_it_is_used() {
    let bus = Bus::new(MANY, false);
    let (one, two) = (pages(1), pages(2));
    let via = Registered::of_list(&bus, &[&one], Access::RW).unwrap();
    assert!(!via.is_busy());
    let clone = via.clone();
    assert!(via.is_busy());
    let via = via.deregister().unwrap_err();
    drop(clone);
    let (part, rest) = one.into_slice().split_at(100).unwrap();
    assert_eq!(via.iova_of(&part), via.mapping().span().sub(0, 100));
    assert_eq!(via.iova_of(&rest), via.mapping().span().sub(100, 3996));
    assert_eq!(via.iova_of(&two.into_slice()), None);
    via.deregister().unwrap();
    assert_eq!(bus.pinned(), 0);
}
