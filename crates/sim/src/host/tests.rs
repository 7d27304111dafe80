//! The software host against a plain copy of the memory.

use super::*;
use dmalane_dma::{AnonHeap, CopyHint, Heap, SharedBuf};
use dmalane_iopt::X86_64_4Level;
use proptest::prelude::*;

fn host<F: Format>(fragmentation: f64) -> SoftHost<F> {
    SoftHost::new(HostConfig { fragmentation, ..HostConfig::default() }).unwrap()
}

fn buffer(len: usize) -> SharedBuf {
    let mut buf = AnonHeap::new().allocate(len).unwrap();
    for (i, b) in buf.iter_mut().enumerate() {
        *b = (i ^ (i >> 8) ^ (i >> 16)) as u8;
    }
    buf.share()
}

fn reaches_what_is_mapped_and_nothing_else<F: Format>() {
    for fragmentation in [0.0, 0.5, 1.0] {
        let host = host::<F>(fragmentation);
        let (buf, other) = (buffer(5 << 20), buffer(1 << 20));
        let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        let readonly = host.map(host.pin(&other.reference()).unwrap(), Access::READ).unwrap();
        let mut port = host.port();
        let mut got = vec![0; buf.len()];
        port.hold().read_bytes(mapping.span().first(), &mut got).unwrap();
        let mut want = vec![0; buf.len()];
        buf.as_volatile_slice().read(&mut want);
        assert!(got == want);

        // one byte past the end: what came before was copied, the fault says where
        let mut more = vec![0; buf.len() + 1];
        let fault = port.hold().read_bytes(mapping.span().first(), &mut more).unwrap_err();
        assert_eq!(fault.done, buf.len() as u64);
        assert_eq!(fault.at.bits(), mapping.span().last().bits() + 1);
        assert_eq!(fault.reason, FaultReason::NotMapped);
        assert!(more[..buf.len()] == want);

        // a read-only mapping cannot be written, and stays as it was
        let fault = port.hold().write_bytes(readonly.span().first(), &[0xff; 10]).unwrap_err();
        assert_eq!((fault.reason, fault.done), (FaultReason::NotPermitted, 0));
        let fault = port.hold().write_word(readonly.span().first(), 0).unwrap_err();
        assert_eq!(fault.reason, FaultReason::NotPermitted);
        assert_eq!(
            other.as_volatile_slice().load_u64(8).unwrap().to_le_bytes(),
            std::array::from_fn(|i| (i + 8) as u8)
        );

        // the top of the space, and words across a boundary
        let fault = port.hold().read_bytes(Iova::new(u64::MAX - 1), &mut [0; 4]).unwrap_err();
        assert_eq!(fault.reason, FaultReason::NotMapped);
        let fault = port.hold().write_word(mapping.span().first() + 4, 0).unwrap_err();
        assert_eq!(fault.reason, FaultReason::Misaligned);

        // a stale IOTLB does not outlive the mapping
        let iova = mapping.span().first();
        port.hold().read_bytes(iova, &mut [0; 1]).unwrap();
        drop(mapping);
        assert!(port.hold().read_bytes(iova, &mut [0; 1]).is_err());
        drop(readonly);
        let stats = host.stats();
        assert_eq!((stats.pinned_frames, stats.tables), (0, 1), "nothing leaks");
        assert!(stats.leaves.iter().all(|(_, n)| *n == 0));
        assert_eq!(stats.faults, 5, "not the word that is not aligned");
        let (frames, iovas) = (lock(&host.0.frames).free_frames(), lock(&host.0.iovas).free_bytes());
        drop(host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap());
        assert_eq!((lock(&host.0.frames).free_frames(), lock(&host.0.iovas).free_bytes()), (frames, iovas));
    }
}

#[test]
fn arm64() {
    reaches_what_is_mapped_and_nothing_else::<Arm64S1_4k>();
}

#[test]
fn x86_64() {
    reaches_what_is_mapped_and_nothing_else::<X86_64_4Level>();
}

#[test]
fn leaves_follow_the_fragmentation() {
    let buf = buffer(8 << 20);
    let leaves = |f| {
        let host = host::<Arm64S1_4k>(f);
        let _mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        host.stats().leaves.into_iter().filter(|(_, n)| *n > 0).collect::<Vec<_>>()
    };
    assert_eq!(leaves(0.0), [(PageSize::SIZE_2M, 4)]);
    assert_eq!(leaves(1.0), [(PageSize::SIZE_4K, 2048)]);
}

/// Behind a short buffer, and from the second page of a buffer on.
#[test]
fn iovas_are_congruent_with_what_they_map() {
    let host = host::<Arm64S1_4k>(0.0);
    let (short, long) = (buffer(4096), buffer(4 << 20));
    let leaves = || host.stats().leaves.into_iter().filter(|(_, n)| *n > 0).collect::<Vec<_>>();
    let list = vec![host.pin(&short.reference()).unwrap(), host.pin(&long.reference()).unwrap()];
    let mapping = host.map_list(list, Access::RW).unwrap();
    assert_eq!(leaves(), [(PageSize::SIZE_4K, 1), (PageSize::SIZE_2M, 2)]);
    drop(mapping);
    // One segment that starts a page before a multiple of 2 MiB.
    let filler = host.pin_range(&long.reference(), 0..(2 << 20) - 4096).unwrap();
    let head = host.pin(&short.reference()).unwrap();
    let rest = host.pin(&long.reference()).unwrap();
    let first = |pinned: &Pinned| pinned.pages().unwrap().segments().next().unwrap().addr.bits();
    assert_eq!(first(&head) + 4096, first(&rest), "the frames of this test continue each other");
    let mapping = host.map_list(vec![head, rest], Access::RW).unwrap();
    assert_eq!((mapping.span().first().bits() + 4096) % (2 << 20), 0);
    assert_eq!(leaves(), [(PageSize::SIZE_4K, 1), (PageSize::SIZE_2M, 2)]);
    drop(filler);
}

/// A BAR of 32 GiB at its own alignment, from its second page on and from its second 2 MiB on.
#[test]
fn a_range_of_a_bar_has_large_leaves() {
    const BAR: u64 = 32 << 30;
    for (skip, expected) in [
        (4096, [(PageSize::SIZE_4K, 511), (PageSize::SIZE_2M, 511), (PageSize::SIZE_1G, 31)].as_slice()),
        (2 << 20, &[(PageSize::SIZE_2M, 511), (PageSize::SIZE_1G, 31)]),
    ] {
        let host = host::<X86_64_4Level>(0.0);
        let range = Segment { addr: PhysAddr::new(BAR + skip), len: BAR - skip };
        let lease = host.0.allocate(range.len, [range].into_iter()).unwrap();
        host.0.write().table.map_sg(lease.span().first(), [range], Access::RW).unwrap();
        let leaves = host.stats().leaves.into_iter().filter(|(_, n)| *n > 0).collect::<Vec<_>>();
        assert_eq!(leaves, expected, "from {skip:#x} on");
    }
}

#[test]
fn refusals() {
    let host = host::<Arm64S1_4k>(0.0);
    let buf = buffer(4096);
    let pinned = host.pin(&buf.reference()).unwrap();
    assert!(matches!(host.map(pinned, Access::EXEC), Err(Error::NoAccess(_))));
    let elsewhere = self::host::<Arm64S1_4k>(0.0).pin(&buf.reference()).unwrap();
    assert!(matches!(host.map(elsewhere, Access::RW), Err(Error::ForeignPin)));
    let small: SoftHost = SoftHost::new(HostConfig { memory: 0, ..HostConfig::default() }).unwrap();
    assert!(matches!(small.pin(&buf.reference()), Err(Error::OutOfFrames { .. })));
    assert_eq!(host.stats().pinned_frames, 0);
}

#[test]
fn page_table_walks_are_counted() {
    let host = host::<Arm64S1_4k>(1.0);
    let buf = buffer(4 << 20);
    let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
    let mut port = host.port();
    let iova = mapping.span().first();
    let mut read = |at: u64| {
        let mut held = port.hold();
        let before = held.entries_read();
        let into = SharedBuf::sparse("test", 4096).unwrap();
        held.read(iova + at, into.as_volatile_slice().sub(0, 8).unwrap(), CopyHint::Keep).unwrap();
        held.entries_read() - before
    };
    assert_eq!((read(0), read(8)), (4, 0), "a walk through four levels, then none");
    assert_eq!(read(64 << 10), 4 + 512, "the second miss in a window walks the whole window");
    assert_eq!(read(128 << 10), 0);
}

/// Behind the first page of one buffer lies the second page of another: at the same distances from their beginnings as
/// if they were one.
#[test]
fn a_buffer_does_not_go_on_in_the_next() {
    let host = host::<Arm64S1_4k>(0.0);
    let bufs = [1u8, 2].map(|byte| {
        let mut buf = AnonHeap::new().allocate(8192).unwrap();
        buf.fill(byte);
        buf.share()
    });
    let pin = |buf: &SharedBuf, range| host.pin_range(&buf.reference(), range).unwrap();
    let mapping = host.map_list(vec![pin(&bufs[0], 0..4096), pin(&bufs[1], 4096..8192)], Access::RW).unwrap();
    let mut port = host.port();
    // The first time page by page, and later from what the IOTLB has.
    for _ in 0..4 {
        let mut got = [0; 8192];
        port.hold().read_bytes(mapping.span().first(), &mut got).unwrap();
        assert_eq!(got, *[[1; 4096], [2; 4096]].as_flattened());
    }
}

#[test]
fn what_was_read_last_is_still_only_read() {
    let host = host::<Arm64S1_4k>(0.0);
    let buf = buffer(8192);
    let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::READ).unwrap();
    let (mut port, at) = (host.port(), mapping.span().first());
    let mut held = port.hold();
    for _ in 0..3 {
        held.read_bytes(at, &mut [0; 8]).unwrap();
        assert_eq!(held.write_bytes(at, &[0xff; 8]).unwrap_err().reason, FaultReason::NotPermitted);
    }
    drop(held);
    assert_eq!(buf.as_volatile_slice().load_u64(0).unwrap().to_le_bytes(), std::array::from_fn(|i| i as u8));
}

#[test]
fn unmapping_waits_for_copies_under_way() {
    let host = host::<Arm64S1_4k>(0.5);
    let buf = buffer(4 << 20);
    std::thread::scope(|s| {
        for round in 0..20u8 {
            let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
            let iova = mapping.span().first();
            let mut port = host.port();
            let writer = s.spawn(move || while port.hold().write_bytes(iova, &vec![round; 4 << 20]).is_ok() {});
            std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 50));
            drop(mapping);
            // From here on nothing of this round may land.
            buf.as_volatile_slice().fill(0xee);
            writer.join().unwrap();
            let mut bytes = vec![0; buf.len()];
            buf.as_volatile_slice().read(&mut bytes);
            assert!(bytes.iter().all(|b| *b == 0xee));
        }
    });
}

#[test]
fn pins_whole_pages_of_the_buffer() {
    let host = host::<Arm64S1_4k>(0.5);
    let large = buffer(2 << 20);
    host.pin_range(&large.reference(), 0..512 << 10).unwrap();
    for range in [0..4095, 1..4096, 0..0, 2 << 20..(2 << 20) + 4096] {
        assert!(matches!(host.pin_range(&large.reference(), range), Err(Error::BadRange { .. })));
    }
    assert_eq!(host.stats().pinned_frames, 0);
}

/// Many small buffers and lists in one window of the IOTLB, mapped and unmapped all the time.
#[test]
fn the_iotlb_never_mixes_buffers_up() {
    for fragmentation in [0.0, 0.7, 1.0] {
        let host = host::<Arm64S1_4k>(fragmentation);
        let mut port = host.port();
        let mut seed = 9u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        let mut mapped: Vec<(Mapping, Vec<u8>, Vec<SharedBuf>)> = Vec::new();
        for round in 0..3000u64 {
            if mapped.len() < 40 || below(20) == 0 {
                // One buffer, or several as one; each page has a byte of its own.
                let count = below(3) + 1;
                let bufs: Vec<SharedBuf> = (0..count).map(|_| buffer(((below(9) + 1) << 12) as usize)).collect();
                let mut model = Vec::new();
                for buf in &bufs {
                    let byte = (round + model.len() as u64) as u8;
                    buf.as_volatile_slice().fill(byte);
                    model.extend(std::iter::repeat_n(byte, buf.len()));
                }
                let pinned = bufs.iter().map(|buf| host.pin(&buf.reference()).unwrap()).collect();
                mapped.push((host.map_list(pinned, Access::RW).unwrap(), model, bufs));
            }
            if mapped.len() > 60 {
                let gone = mapped.swap_remove(below(60) as usize).0.span();
                assert!(port.hold().read_bytes(gone.first(), &mut [0]).is_err(), "unmapped");
            }
            let which = below(mapped.len() as u64) as usize;
            let (mapping, model, _) = &mut mapped[which];
            let at = below(model.len() as u64) as usize;
            let len = (below(9000) as usize).min(model.len() - at);
            let iova = mapping.span().first() + at as u64;
            let mut got = vec![0; len];
            port.hold().read_bytes(iova, &mut got).unwrap();
            assert!(got == model[at..at + len], "round {round}");
            if below(2) == 0 {
                let bytes: Vec<u8> = (0..len).map(|i| (i as u64 ^ round) as u8).collect();
                port.hold().write_bytes(iova, &bytes).unwrap();
                model[at..at + len].copy_from_slice(&bytes);
            }
        }
        for (_, model, bufs) in &mapped {
            let mut got = vec![0; model.len()];
            let mut rest = &mut got[..];
            for buf in bufs {
                let (these, after) = rest.split_at_mut(buf.len());
                buf.as_volatile_slice().read(these);
                rest = after;
            }
            assert!(got == *model);
        }
        drop(mapped);
        assert_eq!(host.stats().pinned_frames, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_accesses_agree_with_a_plain_copy(
        fragmentation in prop_oneof![Just(0.0), Just(1.0), 0.0..1.0f64],
        ops in prop::collection::vec((any::<bool>(), 0usize..(3 << 20), 0usize..100_000, any::<u8>()), 1..40),
    ) {
        let host = host::<Arm64S1_4k>(fragmentation);
        let buf = buffer(3 << 20);
        let mut model = vec![0; buf.len()];
        buf.as_volatile_slice().read(&mut model);
        let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        let mut port = host.port();
        for (write, at, len, byte) in ops {
            let len = len.min(buf.len() - at);
            let iova = mapping.span().first() + at as u64;
            if write {
                port.hold().write_bytes(iova, &vec![byte; len]).unwrap();
                model[at..at + len].fill(byte);
            } else {
                let mut got = vec![0; len];
                port.hold().read_bytes(iova, &mut got).unwrap();
                prop_assert!(got == model[at..at + len]);
            }
        }
        let mut got = vec![0; buf.len()];
        buf.as_volatile_slice().read(&mut got);
        prop_assert!(got == model);
    }
}

#[test]
fn translations_that_are_being_changed_are_not_waited_for() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let buf = AnonHeap::new().allocate(4096).unwrap().share();
    let mapping = host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
    let mut port = host.port();
    let mut word = [1; 4];
    port.try_hold().unwrap().read_bytes(mapping.span().first(), &mut word).unwrap();
    assert_eq!(word, [0; 4]);
    let changing = host.0.write();
    assert!(port.try_hold().is_none());
    drop(changing);
    // Another device is no reason.
    let mut other = host.port();
    let held = other.hold();
    assert!(port.try_hold().is_some());
    drop(held);
}

#[test]
fn only_a_mapping_that_lets_the_device_write_keeps_bytes_from_the_processor() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let buf = AnonHeap::new().allocate(4096).unwrap().share();
    let reference = buf.reference();
    let mut part = buf.into_slice();
    let _reader = host.map(host.pin(&reference).unwrap(), Access::READ).unwrap();
    assert!(part.with_bytes(|_| ()).is_some());
    let writer = host.map(host.pin(&reference).unwrap(), Access::RW).unwrap();
    assert!(part.with_bytes(|_| ()).is_none());
    drop(writer);
    // A pin that could not be mapped leaves nothing behind.
    assert!(host.map(host.pin(&reference).unwrap(), Access::EXEC).is_err());
    assert!(part.with_bytes(|_| ()).is_some());
}
