//! BARs: mapped by their own page size, disabled, lent to other devices.

use super::*;

#[test]
fn peer_to_peer_reaches_the_file_behind_the_bar() {
    let container = container();
    let edu = edu_in(&container, edus()[0]);
    let device = container.open(&functions(FILE_BAR.0)[0]).unwrap();
    device.set_bus_master(true).unwrap();
    let bar = Arc::new(device.map_bar(FILE_BAR.1, None, BarAlignment::LargestPage).unwrap());
    assert_eq!((bar.len(), bar.alignment() >= PageSize::SIZE_1G), (1 << 30, true), "{bar:?}");
    let before = container.mappings_left().unwrap();
    let mut peer = container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap();
    println!("{peer:?}");
    assert_eq!((peer.is_mapped(), peer.bar().region()), (true, FILE_BAR.1));
    let span = peer.span();
    peer.renew().unwrap();
    assert_eq!((peer.span(), container.mapped_bytes()), (span, 1 << 30), "nothing to renew");
    assert_eq!(peer.method(), if backend() == Backend::Iommufd { "dma-buf" } else { "type1" });
    let buf = AnonHeap::new().allocate(page()).unwrap().share();
    let host = map(edu.bus(), &buf, Access::RW);
    for (round, offset) in [0u64, 4097, (512 << 20) - 100, (1 << 30) - 2000].into_iter().enumerate() {
        let bytes = pattern(round as u64 + 40, 2000);
        buf.as_volatile_slice().sub(0, 2000).unwrap().write(&bytes);
        let there = peer.span().first().checked_add(offset).unwrap();
        edu.copy(Direction::FromHost, host.span().first(), CardAddr::new(0), 2000).unwrap();
        edu.copy(Direction::ToHost, there, CardAddr::new(0), 2000).unwrap();
        let mut got = vec![0; 2000];
        bar.read(offset, &mut got).unwrap();
        assert!(got == bytes, "by the processor, at {offset:#x}");
        // And in the other direction, from bytes that the processor wrote.
        let back: Vec<u8> = bytes.iter().map(|b| !b).collect();
        bar.write(offset, &back).unwrap();
        edu.copy(Direction::FromHost, there, CardAddr::new(1), 2000).unwrap();
        edu.copy(Direction::ToHost, host.span().first(), CardAddr::new(1), 2000).unwrap();
        buf.as_volatile_slice().sub(0, 2000).unwrap().read(&mut got);
        assert!(got == back, "by the device, at {offset:#x}");
        let hex: String = back.iter().map(|b| format!("{b:02x}")).collect();
        println!("VM check bar {offset} {hex} peer_to_peer_bytes_at_{offset}_in_the_file");
    }
    drop((peer, host));
    assert_eq!(container.mappings_left().unwrap(), before, "unmapped on drop");
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
    assert!(container.map_peer(&bar, 0..bar.len() + 1, Access::RW).is_err());
    #[allow(clippy::reversed_empty_ranges)]
    let backward = 5..4;
    assert!(container.map_peer(&bar, backward, Access::RW).is_err());
    // While its device does not respond.
    device.write_region(7, 4, &[0, 0]).unwrap();
    match container.map_peer(&bar, 0..bar.len(), Access::RW) {
        Err(Error::Region { region, reason: RegionError::Disabled, .. }) => assert_eq!(region, FILE_BAR.1),
        other => panic!("{other:?}"),
    }
    device.set_bus_master(true).unwrap();
    assert_eq!(container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap().span(), span, "its addresses are free");
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}

#[test]
fn a_bar_is_mapped_by_its_own_page_size() {
    let container = container();
    let _edu = edu_in(&container, edus()[0]);
    let device = container.open(&functions(FILE_BAR.0)[0]).unwrap();
    // The guest's clock counts instructions, so these times are the same in every run.
    let cost = |alignment| {
        let bar = Arc::new(device.map_bar(FILE_BAR.1, None, alignment).unwrap());
        let times = (0..2).map(|_| container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap().map_time());
        (bar.alignment(), times.min().unwrap())
    };
    let (best, plain) = (cost(BarAlignment::LargestPage), cost(BarAlignment::Exactly(page_size())));
    println!("1 GiB, {}: aligned to {} {:?}, to {} {:?}", backend(), best.0, best.1, plain.0, plain.1);
    assert!(best.0 >= PageSize::SIZE_1G && plain.0 == page_size());
    let half = PageSize::new(page() as u64 / 2).unwrap();
    let refused = device.map_bar(FILE_BAR.1, None, BarAlignment::Exactly(half)).unwrap_err();
    assert!(matches!(refused, Error::Region { reason: RegionError::AlignmentBelowPage, .. }), "{refused}");
    if backend() == Backend::Iommufd {
        // A dma-buf is physical: the address in this process has no effect.
        assert!(plain.1 < best.1 * 2 && best.1 < Duration::from_millis(5), "{:?} against {:?}", plain.1, best.1);
    }
    // From the second page on: congruent, so all but the first pages are large ones.
    let bar = Arc::new(device.map_bar(FILE_BAR.1, None, BarAlignment::LargestPage).unwrap());
    let part = container.map_peer(&bar, page() as u64..bar.len(), Access::RW).unwrap();
    println!("and from the second page on: {:?}", part.map_time());
    assert_eq!(part.span().first().bits() % (512 << 20), page() as u64);
    if backend() == Backend::Iommufd {
        return;
    }
    if release() >= (6, 15) {
        assert!(plain.1 > best.1 * 500, "{:?} against {:?}", plain.1, best.1);
        assert!(plain.1 > part.map_time() * 20, "{:?} against {:?}", plain.1, part.map_time());
    } else {
        // The kernel maps 4 KiB at a time whatever the alignment: no faster, but no slower either than at the address
        // of `mmap`.
        let anywhere = cost(BarAlignment::Any);
        println!("and aligned to {} by mmap: {:?}", anywhere.0, anywhere.1);
        assert!(best.1 <= plain.1 && best.1 <= anywhere.1 * 101 / 100, "{plain:?}, {anywhere:?} against {best:?}");
    }
}

/// The kernel answers an access to a mapped BAR with SIGBUS while its memory is disabled.
#[test]
fn a_disabled_bar_is_an_error_and_no_signal() {
    let container = container();
    let device = container.open(&edus()[1]).unwrap();
    device.set_bus_master(true).unwrap();
    let bar = device.map_bar(0, None, BarAlignment::LargestPage).unwrap();
    let is_disabled = |error: &Error| matches!(error, Error::Region { region: 0, reason: RegionError::Disabled, .. });
    let id = bar.load_u32(0).unwrap();
    assert_eq!(id & 0xff, 0xed, "the identification of edu");
    device.write_region(7, 4, &[0, 0]).unwrap();
    assert!(is_disabled(&bar.load_u32(0).unwrap_err()) && is_disabled(&bar.store_u32(4, 1).unwrap_err()));
    assert!(is_disabled(&device.read_region(0, 0, &mut [0; 4]).unwrap_err()));
    // Another handle to the device knows it too.
    let again = container.open(&edus()[1]).unwrap();
    assert!(is_disabled(&again.map_bar(0, None, BarAlignment::Any).unwrap().load_u32(0).unwrap_err()));
    again.set_bus_master(true).unwrap();
    assert_eq!(bar.load_u32(0).unwrap(), id);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match bar.load_u32(0) {
                    Ok(found) => assert!(found == id || found == u32::MAX, "{found:#x}"),
                    Err(error) => assert!(is_disabled(&error), "{error}"),
                }
            }
        });
        for round in 0..20 {
            match round % 4 {
                0 => device.reset().unwrap(),
                _ => device.write_region(7, 4, &[0, 0]).unwrap(),
            }
            std::thread::yield_now();
            device.set_bus_master(false).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(bar.load_u32(0).unwrap(), id);
}

#[test]
fn a_dma_buf_of_a_bar_ends_with_a_reset() {
    let container = container();
    let device = container.open(&edus()[1]).unwrap();
    let bar = Arc::new(device.map_bar(0, None, BarAlignment::LargestPage).unwrap());
    let dma_buf = match bar.dma_buf() {
        Ok(fd) => fd,
        // Debian's kernels have none.
        Err(e @ Error::NoDmaBuf { .. }) => {
            assert!(backend() == Backend::Type1 && e.to_string().contains("CONFIG_VFIO_PCI_DMABUF"), "{e}");
            return println!("say: {e}");
        }
        Err(e) => panic!("{e}"),
    };
    assert_eq!(rustix::fs::seek(dma_buf, rustix::fs::SeekFrom::End(0)).unwrap(), 1 << 20);
    if backend() == Backend::Type1 {
        return;
    }
    let mut peer = container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap();
    assert!(peer.is_mapped() && container.mapped_bytes() == 1 << 20);
    let span = peer.span();
    device.reset().unwrap();
    assert!(!peer.is_mapped() && container.mapped_bytes() == 0);
    peer.renew().unwrap();
    assert!(peer.is_mapped() && (peer.span(), container.mapped_bytes()) == (span, 1 << 20));
    device.write_region(7, 4, &[0, 0]).unwrap();
    assert!(!peer.is_mapped() && container.mapped_bytes() == 0);
    assert!(matches!(peer.renew(), Err(Error::Region { reason: RegionError::Disabled, .. })));
    device.set_bus_master(true).unwrap();
    peer.renew().unwrap();
    assert!(peer.is_mapped());
    drop(peer);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
    // Disable the device's memory, and enable it again.
    device.write_region(7, 4, &[0, 0]).unwrap();
    match container.map_peer(&bar, 0..bar.len(), Access::RW) {
        Err(Error::Region { region: 0, reason: RegionError::Disabled, .. }) => {}
        other => panic!("{other:?}"),
    }
    device.set_bus_master(true).unwrap();
    drop(container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap());
    assert!(matches!(
        device.map_bar(0, Some(0..100), BarAlignment::LargestPage).unwrap().dma_buf(),
        Err(Error::Region { reason: RegionError::NotWholePages, .. })
    ));
}
