//! Tests on a real kernel with the devices of a guest; `scripts/vm` runs them and provides the devices.
//! `DMALANE_VFIO_BACKEND` selects the backend (type1 by default).

#[allow(dead_code)] // its `main`
#[path = "../examples/edu.rs"]
mod driver;
mod edu;
mod page_tables;
#[allow(dead_code)] // its `main`
#[path = "../examples/peer.rs"]
mod peer;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, Iova, PageSize, Span};
use dmalane_dma::{
    self as dma, AnonHeap, DmaHeap, Heap, InterruptEvents, Mapping, MemfdHeap, Mmio, PageKind, Registrar, SharedBuf,
};
use dmalane_queue::conformance::{Fixture, suite};
use dmalane_queue::{DeviceAddr, Direction, HostSlice, OpError, Operation, Queue, Registered, run};
use dmalane_vfio::{Backend, BarAlignment, Bdf, BusOptions, Error, Irq, RegionError, VfioBus, VfioContainer, backends};
use edu::{Edu, EduQueue, FaultLog};

const LONG: Duration = Duration::from_secs(30);

/// The addresses of interrupts, to which memory cannot be mapped: fixed on x86, chosen by Linux on Arm.
const INTERRUPTS: (u64, u64) =
    if cfg!(target_arch = "aarch64") { (0x0800_0000, 0x080f_ffff) } else { (0xfee0_0000, 0xfeef_ffff) };

/// Bytes of the running kernel's pages, which IOMMUs use even if they also have smaller ones.
fn page() -> usize {
    rustix::param::page_size()
}

fn page_size() -> PageSize {
    PageSize::new(page() as u64).unwrap()
}

/// Memory that the kernel does not pin by its address: a mapping of a dma-buf, from the kernel's heap or else of a
/// memfd.
fn unpinnable(len: usize) -> SharedBuf {
    match DmaHeap::open("system") {
        Ok(heap) => heap.allocate(len).unwrap().share(),
        Err(e) => {
            println!("{e}");
            let memfd = MemfdHeap::starting_at(PageKind::Base).allocate(len).unwrap().share();
            SharedBuf::import_dma_buf(dma::export_dma_buf(&memfd.reference()).unwrap()).unwrap()
        }
    }
}

/// The backend under test.
fn backend() -> Backend {
    match std::env::var("DMALANE_VFIO_BACKEND").as_deref() {
        Ok("iommufd") => Backend::Iommufd,
        Ok("type1") | Err(_) => Backend::Type1,
        Ok(other) => panic!("DMALANE_VFIO_BACKEND={other}"),
    }
}

fn container() -> VfioContainer {
    VfioContainer::with_backend(backend())
}

/// Unmaps everything, and returns how many bytes the kernel still had mapped, whatever the container's own count is.
fn left_behind(container: &VfioContainer) -> u64 {
    container.iova_ranges().into_iter().map(|range| container.revoke(range).unwrap()).sum()
}

/// The functions with this vendor and device number, in order.
fn functions(id: &str) -> Vec<Bdf> {
    let mut found: Vec<Bdf> = fs::read_dir("/sys/bus/pci/devices")
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let number = |file| fs::read_to_string(path.join(file)).unwrap().trim().trim_start_matches("0x").to_owned();
            (format!("{}:{}", number("vendor"), number("device")) == id)
                .then(|| path.file_name().unwrap().to_str().unwrap().parse().unwrap())
        })
        .collect();
    found.sort();
    found
}

/// The `edu` on the root bus, and the one behind a bridge, which can be reset.
fn edus() -> [Bdf; 2] {
    functions("1234:11e8").try_into().expect("two edu devices")
}

/// A BAR of 1 GiB that is backed by a file of the host.
const FILE_BAR: (&str, u32) = ("1af4:1110", 2);
/// A BAR of 32 GiB without memory behind it.
const LARGE_BAR: (&str, u32) = ("1b36:0005", 2);

fn edu(bdf: Bdf) -> Edu {
    edu_in(&container(), bdf)
}

fn edu_in(container: &VfioContainer, bdf: Bdf) -> Edu {
    Edu::open(Arc::new(VfioBus::new(container.open(&bdf).unwrap()).unwrap()))
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}

fn map(bus: &VfioBus, buf: &SharedBuf, access: Access) -> Mapping {
    bus.map(bus.pin(&buf.reference()).unwrap(), access).unwrap()
}

/// The error of this crate inside one of `dma`.
fn cause(error: dma::Error) -> Error {
    match error {
        dma::Error::Backend(error) => *error.downcast().expect("an error of this crate"),
        other => panic!("{other}"),
    }
}

fn release() -> (u32, u32) {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split('.').map(|n| n.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// As a VMM does it: memory at the addresses of its guest, from 0 on, and the rest left to the guest.
#[test]
fn a_guests_memory_lies_at_its_addresses() {
    let container = container();
    let device = container.open(&edus()[0]).unwrap();
    let buf = AnonHeap::starting_at(PageKind::Base).allocate(4 * page()).unwrap().share();
    let map_at = |at| container.map_at(Iova::new(at), container.pin(&buf.reference()).unwrap(), Access::RW);
    let mapping = map_at(0).unwrap();
    assert_eq!(mapping.span(), Span::new(Iova::new(0), 4 * page() as u64).unwrap());
    assert!(container.owns(&mapping) && container.mapped_bytes() == 4 * page() as u64);
    assert!(matches!(map_at(page() as u64), Err(dma::Error::Iova(_))), "taken");
    assert!(matches!(map_at(INTERRUPTS.0), Err(dma::Error::Iova(_))), "the addresses of interrupts");
    let bus = VfioBus::with_options(device.clone(), BusOptions::passive()).unwrap();
    let is_master = || {
        let mut command = [0; 2];
        device.read_region(7, 4, &mut command).unwrap();
        command[0] & 4 != 0
    };
    assert!(!is_master() && bus.interrupts().0 == 0);
    device.set_bus_master(true).unwrap();
    drop(bus);
    assert!(is_master(), "the guest's, not the bus's");
    // Interrupts go to the eventfds that a VMM hands to KVM.
    let events = InterruptEvents::new(1).unwrap();
    assert!(device.irq_count(Irq::Msi).unwrap() >= 1 && device.irq_count(Irq::Msix).unwrap() == 0);
    device.set_irqs(Irq::Msi, 0, &[Some(events.events()[0].as_fd())]).unwrap();
    device.set_irqs(Irq::Msi, 0, &[None]).unwrap();
    device.set_irqs(Irq::Msi, 0, &[]).unwrap();
    assert!(matches!(device.set_irqs(Irq::Msix, 0, &[None]), Err(Error::Kernel { .. })), "the device has none");
    let wanted_back = device.release_event().unwrap();
    assert!(rustix::fs::fstat(&wanted_back).is_ok() && rustix::fs::fstat(device.as_fd()).is_ok());
    drop(mapping);
    drop(map_at(0).unwrap());
}

#[test]
fn devices_open_and_describe_themselves() {
    for bdf in edus() {
        let device = container().open(&bdf).unwrap();
        assert_eq!(device.id().unwrap(), (0x1234, 0x11e8));
        let regions = device.regions();
        assert_eq!((regions[0].len, regions[0].mappable.len()), (1 << 20, 1), "{regions:?}");
        assert_eq!(regions[1].len, 0);
        assert!(matches!(
            device.map_bar(1, None, BarAlignment::LargestPage),
            Err(Error::Region { region: 1, reason: RegionError::Missing, .. })
        ));
        assert!(matches!(
            device.map_bar(99, None, BarAlignment::LargestPage),
            Err(Error::Region { region: 99, reason: RegionError::Missing, .. })
        ));
        let outside = device.map_bar(0, Some(0..2 << 20), BarAlignment::LargestPage);
        assert!(matches!(outside, Err(Error::Region { reason: RegionError::OutOfRange, .. })));
        assert!(device.read_region(7, 1 << 20, &mut [0; 4]).is_err());
    }
    let bus = edu(edus()[0]).bus().clone();
    assert_eq!(bus.interrupts(), (1, false), "MSI");
    for (bar, offset) in [(0, 2), (0, 1 << 20), (0, u64::MAX), (1, 0), (6, 0), (255, 0)] {
        assert!(matches!(bus.read32(bar, offset), Err(dma::Error::NoRegister { .. })), "{bar} {offset:#x}");
        assert!(bus.write32(bar, offset, 0).is_err());
    }
}

#[test]
fn iova_ranges_exclude_the_interrupts() {
    let container = container();
    assert!(container.iova_ranges().is_empty());
    let _edu = edu_in(&container, edus()[0]);
    let ranges = container.iova_ranges();
    println!("{ranges:?}");
    assert_eq!(container.page_size(), page_size());
    let window = Span::inclusive(Iova::new(INTERRUPTS.0), Iova::new(INTERRUPTS.1)).unwrap();
    assert!(ranges.len() >= 2 && ranges.iter().all(|r| r.intersect(&window).is_none()));
    assert!(ranges.iter().any(|r| r.last().bits() >= (1 << 39) - 1));
}

/// Copies from one address to another, and compares the destination and its surroundings with the expected bytes.
fn verify_dma(edu: &Edu, buf: &SharedBuf, seams: &[usize]) {
    let mapping = map(edu.bus(), buf, Access::RW);
    let len = buf.len();
    let mut channel = edu.queue();
    let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
    for (round, &seam) in seams.iter().enumerate() {
        // From before the seam to after it, to a distant address.
        let (from, n) = (seam.saturating_sub(777).min(len - 2048), 2048 - round % 7);
        let to = (seam + len / 2 + 4097 * round) % (len - 4096);
        let around = 1 << 16;
        let window = to.saturating_sub(around)..(to + n + around).min(len);
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().fill(0xee);
        let bytes = pattern(round as u64 + 1, n);
        buf.as_volatile_slice().sub(from, n).unwrap().write(&bytes);
        let mut expected = vec![0; window.len()];
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().read(&mut expected);
        expected[to - window.start..][..n].copy_from_slice(&bytes);
        edu.copy(Direction::FromHost, at(from), CardAddr::new(1), n as u64).unwrap();
        edu.copy(Direction::ToHost, at(to), CardAddr::new(1), n as u64).unwrap();
        let mut got = vec![0; window.len()];
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().read(&mut got);
        assert!(got == expected, "{n} bytes from {from:#x} to {to:#x} of {len:#x}");
    }
    assert_eq!(channel.poll(&mut Vec::new()), 0);
}

fn check_dma(heap: &dyn Heap, kind: PageKind, len: usize, page: usize) {
    let buf = heap.allocate(len).unwrap();
    assert_eq!(buf.backing().kind, kind, "{:?}", buf.backing().passed_over);
    let seams: Vec<usize> = (0..8).map(|i| (i * page) % len).chain([1000, len]).collect();
    verify_dma(&edu(edus()[0]), &buf.share(), &seams);
}

#[test]
fn dma_over_pages_of_the_kernel() {
    check_dma(&AnonHeap::starting_at(PageKind::Base), PageKind::Base, 1 << 20, page());
    check_dma(&MemfdHeap::starting_at(PageKind::Base), PageKind::Base, 1 << 20, page());
}

/// iommufd maps memory with a file by that file, unless it is told not to.
#[test]
fn dma_over_memory_that_is_mapped_by_its_address() {
    let container = container();
    container.map_by_address();
    let edu = edu_in(&container, edus()[0]);
    let buf = MemfdHeap::starting_at(PageKind::Base).allocate(1 << 20).unwrap().share();
    verify_dma(&edu, &buf, &[0, 1000, page(), 1 << 20]);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}

#[test]
fn dma_over_pages_of_2m() {
    check_dma(&AnonHeap::starting_at(PageKind::Hugetlb2M), PageKind::Hugetlb2M, 16 << 20, 2 << 20);
    check_dma(&MemfdHeap::starting_at(PageKind::Hugetlb2M), PageKind::Hugetlb2M, 16 << 20, 2 << 20);
    if page() == 4096 {
        check_dma(&AnonHeap::starting_at(PageKind::Transparent), PageKind::Transparent, 16 << 20, 2 << 20);
    }
}

#[test]
fn dma_over_a_page_of_1g() {
    check_dma(&AnonHeap::starting_at(PageKind::Hugetlb1G), PageKind::Hugetlb1G, 1 << 30, 100 << 20);
    check_dma(&MemfdHeap::starting_at(PageKind::Hugetlb1G), PageKind::Hugetlb1G, 1 << 30, 100 << 20);
}

/// Checks every byte of one page: only the copied bytes changed.
#[test]
fn a_page_of_1g_byte_by_byte() {
    const CHUNK: usize = 1 << 20;
    const LEN: usize = 1 << 30;
    let mut expected = pattern(5, CHUNK);
    let heap = MemfdHeap::starting_at(PageKind::Hugetlb1G);
    let edu = edu(edus()[0]);
    let container = edu.bus().device().container().clone();
    let mut buf = heap.allocate(LEN).unwrap();
    assert_eq!((buf.backing().kind, buf.len()), (PageKind::Hugetlb1G, LEN), "{:?}", buf.backing().passed_over);
    // The first bytes of each MiB are its number.
    let number = |bytes: &mut [u8], i: usize| bytes[..8].copy_from_slice(&i.to_le_bytes());
    for (i, chunk) in buf.chunks_mut(CHUNK).enumerate() {
        number(&mut expected, i);
        chunk.copy_from_slice(&expected);
    }
    let buf = buf.share();
    let mapping = map(edu.bus(), &buf, Access::RW);
    let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
    // From one end to the other, from there to the middle, and from the middle to the front.
    let copies = [(3, LEN - 2048, 2048), (LEN - 2048, LEN / 2 - 1001, 2003), (LEN / 2 + 4096, 0, 1)];
    for (from, to, len) in copies {
        edu.copy(Direction::FromHost, at(from), CardAddr::new(1), len as u64).unwrap();
        edu.copy(Direction::ToHost, at(to), CardAddr::new(1), len as u64).unwrap();
    }
    drop(mapping);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps()), (0, 0));
    let buf = buf.into_cpu().unwrap();
    // The offset of a byte before the copies.
    let origin = |at: usize| {
        let mut place = at;
        for (from, to, len) in copies.into_iter().rev() {
            if (to..to + len).contains(&place) {
                place = from + (place - to);
            }
        }
        place
    };
    for (i, chunk) in buf.chunks(CHUNK).enumerate() {
        number(&mut expected, i);
        let first = i * CHUNK;
        let mut wanted = expected.clone();
        for at in copies.into_iter().flat_map(|(_, to, len)| to.max(first)..(to + len).min(first + CHUNK)) {
            let place = origin(at);
            wanted[at - first] = match place % CHUNK {
                k @ 0..8 => (place / CHUNK).to_le_bytes()[k],
                k => expected[k],
            };
        }
        let wrong = || chunk.iter().zip(&wanted).position(|(got, wanted)| got != wanted).map(|k| first + k);
        assert!(*chunk == wanted[..], "at {:#x?}", wrong());
    }
}

#[test]
fn an_interrupt_ends_a_wait() {
    let edu = edu(edus()[0]);
    let buf = AnonHeap::new().allocate(page()).unwrap().share();
    let mapping = map(edu.bus(), &buf, Access::RW);
    assert!(!edu.bus().wait(Duration::from_millis(1)), "none yet");
    for _ in 0..3 {
        // `copy` would wait for the interrupt itself.
        edu::start(edu.bus(), Direction::FromHost, mapping.span().first(), CardAddr::new(0), 64).unwrap();
        assert!(edu.bus().wait(Duration::from_secs(10)), "at its end");
        edu::acknowledge(edu.bus()).unwrap();
        assert!(!edu.bus().wait(Duration::from_millis(1)), "only one");
    }
}

/// A new registration, and a transfer of its first 1024 bytes.
fn transfer(bus: &VfioBus, buf: SharedBuf, direction: Direction) -> (Registered, Operation) {
    let registered = Registered::new(bus, &buf, Access::RW).unwrap();
    let part = buf.into_slice().split_at(1024).unwrap().0;
    let copy = Operation::copy(direction, (part, registered.clone()), DeviceAddr::Card(CardAddr::new(0)));
    (registered, copy)
}

#[test]
fn dma_after_unmap_is_stopped_and_reported_while_others_run() {
    let container = container();
    let [bad, good] = edus().map(|bdf| edu_in(&container, bdf));
    let allocate = || AnonHeap::new().allocate(page()).unwrap().share();
    let before = container.mappings_left().unwrap();
    let mut log = FaultLog::open().unwrap();
    // Revoked while the registration still exists.
    let buf = allocate();
    buf.as_volatile_slice().fill(0x11);
    let (registered, write) = transfer(bad.bus(), buf, Direction::ToHost);
    let span = registered.mapping().span();
    assert_eq!(container.revoke(span).unwrap(), page() as u64);
    let mut channel = bad.queue().with_faults(FaultLog::open().unwrap(), bad.bus().bdf());
    let _ticket = channel.submit(write).unwrap();
    channel.poll(&mut Vec::new());
    // The other device works in the meantime.
    let (_registered, other) = transfer(good.bus(), allocate(), Direction::FromHost);
    run(&mut good.queue(), other, LONG).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        channel.wait(&mut done, LONG);
    }
    match &done[0].result {
        Err(OpError::Fault(fault)) => {
            assert_eq!((fault.at, fault.wanted), (span.first(), Access::WRITE));
            println!("{fault}");
        }
        other => panic!("{other:?}"),
    }
    let mut bytes = vec![0; 1024];
    done.remove(0).operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0x11), "nothing was written");
    drop((done, registered, channel));
    // Unmapped by dropping the mapping. An SMMU reports each word of a copy, and the kernel prints ten reports in five
    // seconds.
    let pause = || std::thread::sleep(Duration::from_secs(6));
    pause();
    let buf = allocate();
    let mapping = map(bad.bus(), &buf, Access::RW);
    let at = mapping.span().first();
    bad.copy(Direction::FromHost, at, CardAddr::new(0), 64).unwrap();
    drop(mapping);
    bad.copy(Direction::FromHost, at, CardAddr::new(0), 64).unwrap();
    pause();
    // Mapped for reading only.
    let mapping = map(bad.bus(), &buf, Access::READ);
    buf.as_volatile_slice().fill(0x22);
    bad.copy(Direction::ToHost, mapping.span().first(), CardAddr::new(0), 64).unwrap();
    buf.as_volatile_slice().sub(0, 64).unwrap().read(&mut bytes[..64]);
    assert!(bytes[..64].iter().all(|b| *b == 0x22));
    let mut seen = log.take();
    seen.dedup_by_key(|f| (f.bdf, f.at.align_down(page_size()), f.write));
    seen.iter().for_each(|f| println!("{}", f.line));
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert!(seen.iter().all(|f| f.bdf == bad.bus().bdf()));
    assert_eq!(seen.iter().map(|f| f.write).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(seen[1].at, at);
    drop((mapping, _registered));
    assert_eq!(
        (container.mappings_left().unwrap(), container.mapped_bytes(), container.failed_unmaps()),
        (before, 0, 0)
    );
}

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
fn the_kernels_numbers_become_errors_by_cause() {
    let container = container();
    let edu = edu_in(&container, edus()[0]);
    let bus = edu.bus();
    let buf = AnonHeap::starting_at(PageKind::Base).allocate(4 * page()).unwrap().share();
    let p = page() as u64;
    let before = container.mappings_left().unwrap();
    let says = |error: Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    // Only whole mappings can be unmapped; where nothing is mapped, unmapping does nothing.
    let mapping = map(bus, &buf, Access::RW);
    let half = mapping.span().sub(0, 2 * p).unwrap();
    assert!(matches!(container.revoke(half), Err(Error::PartialUnmap(span)) if span == half));
    assert_eq!(container.revoke(mapping.span()).unwrap(), 4 * p);
    assert_eq!(container.revoke(mapping.span()).unwrap(), 0);
    drop(mapping);
    // The kernel does not pin a mapping of a dma-buf by its address.
    let dma_buf = unpinnable(1 << 20);
    let error = cause(bus.map(bus.pin(&dma_buf.reference()).unwrap(), Access::RW).unwrap_err());
    assert!(matches!(error, Error::NotMemory { writable: true, .. }), "{error}");
    says(error, "a mapping of a dma-buf");
    // Pins of another bus, no access, an empty list, a range that is not whole pages.
    let other = edu_in(&self::container(), edus()[1]);
    let foreign = other.bus().pin(&buf.reference()).unwrap();
    assert!(matches!(bus.map(foreign, Access::RW), Err(dma::Error::ForeignPin)));
    assert!(matches!(bus.map(bus.pin(&buf.reference()).unwrap(), Access::EXEC), Err(dma::Error::NoAccess(_))));
    assert!(matches!(bus.map_list(Vec::new(), Access::RW), Err(dma::Error::WholeBuffers)));
    assert!(matches!(bus.pin_range(&buf.reference(), 5..page()), Err(dma::Error::BadRange { .. })));
    assert_eq!((container.mappings_left().unwrap(), container.mapped_bytes()), (before, 0), "nothing stays mapped");
    assert_eq!(left_behind(&container), 0, "not even in the kernel");
    assert!(buf.into_cpu().is_ok(), "no reference is left");
}

#[test]
fn several_buffers_are_one_range() {
    let edu = edu(edus()[0]);
    let heap = AnonHeap::starting_at(PageKind::Base);
    let bufs: Vec<_> = (1..4).map(|n| heap.allocate(n * page()).unwrap().share()).collect();
    let registered = Registered::of_list(&**edu.bus(), &bufs.iter().collect::<Vec<_>>(), Access::RW).unwrap();
    let span = registered.mapping().span();
    assert_eq!(span.len(), 6 * page() as u64);
    // Across the seam of the first two.
    let bytes = pattern(3, 2000);
    bufs[0].as_volatile_slice().sub(page() - 1000, 1000).unwrap().write(&bytes[..1000]);
    bufs[1].as_volatile_slice().sub(0, 1000).unwrap().write(&bytes[1000..]);
    let at = |offset: usize| span.first().checked_add(offset as u64).unwrap();
    edu.copy(Direction::FromHost, at(page() - 1000), CardAddr::new(0), 2000).unwrap();
    edu.copy(Direction::ToHost, at(5 * page()), CardAddr::new(0), 2000).unwrap();
    let mut got = vec![0; 2000];
    bufs[2].as_volatile_slice().sub(2 * page(), 2000).unwrap().read(&mut got);
    assert!(got == bytes);
    // When one buffer cannot be mapped, the others are unmapped again.
    let dma_buf = unpinnable(page());
    let container = edu.bus().device().container();
    let before = container.mappings_left().unwrap();
    assert!(Registered::of_list(&**edu.bus(), &[&bufs[0], &bufs[1], &dma_buf], Access::RW).is_err());
    assert_eq!((container.mappings_left().unwrap(), container.mapped_bytes()), (before, 6 * page() as u64));
}

#[test]
fn more_mappings_than_the_kernel_takes() {
    // A container keeps the limit of when it was made. The default takes half a minute to reach.
    const LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let limited = backend() == Backend::Type1;
    let usual = limited.then(|| fs::read(LIMIT).unwrap());
    usual.iter().for_each(|_| fs::write(LIMIT, "5000").unwrap());
    let container = container();
    let edu = edu_in(&container, edus()[0]);
    usual.iter().for_each(|usual| fs::write(LIMIT, usual).unwrap());
    let buf = AnonHeap::starting_at(PageKind::Base).allocate(page()).unwrap().share();
    let mut mappings = Vec::new();
    let Some(left) = container.mappings_left().unwrap() else {
        assert_eq!(backend(), Backend::Iommufd);
        let map = |_| edu.bus().map(edu.bus().pin(&buf.reference()).unwrap(), Access::READ).unwrap();
        mappings.extend((0..70_000).map(map));
        println!("{} mappings without a limit", mappings.len());
        drop(mappings);
        assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
        return;
    };
    assert_eq!(left, 5000);
    let error = loop {
        match edu.bus().map(edu.bus().pin(&buf.reference()).unwrap(), Access::READ) {
            Ok(mapping) => mappings.push(mapping),
            Err(e) => break cause(e),
        }
    };
    assert!(matches!(error, Error::TooMany), "{error}");
    assert_eq!((mappings.len() as u32, container.mappings_left().unwrap()), (left, Some(0)));
    println!("{left} mappings, then: {error}");
    drop(mappings);
    assert_eq!((container.mappings_left().unwrap(), container.mapped_bytes()), (Some(left), 0));
}

#[test]
fn a_device_is_opened_once_and_only_with_vfio_pci() {
    let [first, second] = edus();
    let container = container();
    let device = container.open(&first).unwrap();
    match self::container().open(&first) {
        Err(Error::Busy { path }) => assert!(path.starts_with("/dev/vfio")),
        other => panic!("{other:?}"),
    }
    // Twice in the same container, and together with another device.
    let again = container.open(&first).unwrap();
    let beside = container.open(&second).unwrap();
    drop((device, again, beside));
    assert!(matches!(container.open(&"00:1e.7".parse().unwrap()), Err(Error::NoDevice(_))));
    // A device that is bound to another driver: the bridge, or the console of this test.
    let others = fs::read_dir("/sys/bus/pci/devices").unwrap().map(|entry| entry.unwrap().path());
    let not_ours = |path: &std::path::PathBuf| {
        let driver = fs::read_link(path.join("driver")).unwrap_or_default();
        path.join("iommu_group").exists() && !driver.ends_with("vfio-pci")
    };
    let bound = others.filter(not_ours).min().expect("a device of another driver");
    let bound: Bdf = bound.file_name().unwrap().to_str().unwrap().parse().unwrap();
    match container.open(&bound) {
        Err(Error::NotBound { bdf, .. }) => assert_eq!(bdf, bound),
        other => panic!("{other:?}"),
    }
    let testdev = container.open(&functions(LARGE_BAR.0)[0]).unwrap();
    assert!(matches!(VfioBus::new(testdev), Err(Error::NoInterrupts(_))));
    let shmem = Arc::new(container.open(&functions(FILE_BAR.0)[0]).unwrap());
    drop(shmem);
}

/// Behind a bridge to conventional PCI, whose devices share a group: one is bound to vfio-pci, one to a kernel driver.
#[test]
fn a_group_that_a_kernel_driver_uses_is_refused() {
    let shared = *functions(LARGE_BAR.0).last().unwrap();
    let beside = functions("1af4:1005").pop().expect("a device beside it");
    let group = |bdf: Bdf| fs::read_link(format!("/sys/bus/pci/devices/{bdf}/iommu_group")).unwrap();
    assert_eq!(group(shared), group(beside));
    let driver = format!("/sys/bus/pci/devices/{beside}/driver");
    let Ok(name) = fs::read_link(&driver) else {
        return println!("SKIPPED: this kernel has no driver for {beside}");
    };
    let name = name.file_name().unwrap().to_str().unwrap().to_owned();
    match container().open(&shared) {
        Err(e @ Error::NotViable { .. }) => {
            println!("{e}");
            assert!(e.to_string().contains(&format!("{beside} ({name})")), "{e}");
        }
        other => panic!("{other:?}"),
    }
    fs::write(format!("{driver}/unbind"), beside.to_string()).unwrap();
    assert_eq!(container().open(&shared).unwrap().id().unwrap(), (0x1b36, 0x0005));
}

#[test]
fn reset_in_mid_transfer() {
    let [fixed, movable] = edus();
    assert!(matches!(edu(fixed).bus().device().reset(), Err(Error::NoReset(_))), "its bus has others");
    let container = container();
    let edu = edu_in(&container, movable);
    let before = container.mappings_left().unwrap();
    let buf = AnonHeap::new().allocate(page()).unwrap().share();
    let (registered, write) = transfer(edu.bus(), buf, Direction::ToHost);
    let mut channel = edu.queue();
    let _ticket = channel.submit(write).unwrap();
    channel.poll(&mut Vec::new());
    let began = Instant::now();
    edu.bus().device().reset().unwrap();
    // The operation ends, or the channel stops within its timeout; then the device works again.
    let mut done = Vec::new();
    channel.wait(&mut done, Duration::from_secs(3));
    println!("after {:?}: {:?}", began.elapsed(), done.first().map(|c| &c.result));
    assert!(
        done.len() == 1 || channel.halted().is_some(),
        "{} in flight, and the channel is not stopped",
        channel.in_flight()
    );
    drop(channel);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    drop((done, registered));
    edu.bus().device().set_bus_master(true).unwrap();
    let (registered, read) =
        transfer(edu.bus(), AnonHeap::new().allocate(page()).unwrap().share(), Direction::FromHost);
    run(&mut edu.queue(), read, LONG).unwrap();
    drop(registered);
    assert_eq!(
        (container.mappings_left().unwrap(), container.mapped_bytes(), container.failed_unmaps()),
        (before, 0, 0)
    );
}

#[test]
fn unbinding_an_open_device_waits_for_its_release() {
    let bdf = edus()[1];
    let container = container();
    let edu = edu_in(&container, bdf);
    let before = container.mappings_left().unwrap();
    let buf = AnonHeap::new().allocate(page()).unwrap().share();
    let mapping = map(edu.bus(), &buf, Access::RW);
    assert_eq!(container.mappings_left().unwrap(), before.map(|n| n - 1));
    let began = Instant::now();
    let gone = Arc::new(AtomicBool::new(false));
    let unbound = gone.clone();
    let unbinder = std::thread::spawn(move || {
        fs::write("/sys/bus/pci/drivers/vfio-pci/unbind", bdf.to_string()).unwrap();
        unbound.store(true, Ordering::SeqCst);
    });
    std::thread::sleep(Duration::from_secs(1));
    assert!(!gone.load(Ordering::SeqCst), "the kernel waits");
    edu.copy(Direction::FromHost, mapping.span().first(), CardAddr::new(0), 64).unwrap();
    drop(mapping);
    assert_eq!(
        (container.mappings_left().unwrap(), container.mapped_bytes(), container.failed_unmaps()),
        (before, 0, 0)
    );
    drop(edu);
    unbinder.join().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(gone.load(Ordering::SeqCst));
    assert!(matches!(container.open(&bdf), Err(Error::NotBound { driver: None, .. })));
    // The fix that the message names.
    fs::write("/sys/bus/pci/drivers_probe", bdf.to_string()).unwrap();
    drop(container);
    edu_in(&self::container(), bdf);
}

/// Runs one of the tests of `child` as an ordinary user.
fn as_user(test: &str) {
    let here = std::env::current_exe().unwrap();
    let output = Command::new(here)
        .args(["--exact", test, "--show-output", "--test-threads=1"])
        .uid(1000)
        .gid(1000)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    text.lines().filter(|l| l.starts_with("say: ")).for_each(|l| println!("{l}"));
    assert!(output.status.success() && text.contains("1 passed"), "{}", text.replace("test ", "child "));
}

/// The files that root has to give to a user of the device.
fn files(bdf: Bdf) -> Vec<String> {
    let device = format!("/sys/bus/pci/devices/{bdf}");
    match backend() {
        Backend::Iommufd => {
            let name = fs::read_dir(format!("{device}/vfio-dev")).unwrap().next().unwrap().unwrap().file_name();
            vec!["/dev/iommu".into(), format!("/dev/vfio/devices/{}", name.to_str().unwrap())]
        }
        _ => {
            let link = fs::read_link(format!("{device}/iommu_group")).unwrap();
            vec![format!("/dev/vfio/{}", link.file_name().unwrap().to_str().unwrap())]
        }
    }
}

fn give_to(user: u32, bdf: Bdf) {
    files(bdf).iter().for_each(|file| std::os::unix::fs::chown(file, Some(user), Some(user)).unwrap());
}

#[test]
fn without_permission_on_its_file() {
    as_user("child::no_permission");
}

#[test]
fn more_than_may_be_locked() {
    give_to(1000, edus()[0]);
    as_user("child::memlock");
    give_to(0, edus()[0]);
}

/// A model file of `len` bytes of tensor.
fn model(len: usize) -> Vec<u8> {
    let header = format!("{{\"weight\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[0,{len}]}}}}");
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &pattern(11, len)].concat()
}

/// `dmalane read` fills memory and becomes another program, which maps what it inherits for a device: the device reads
/// the model. VFIO refuses dma-bufs of the system's memory, so those are compared by the processor.
#[test]
fn a_device_reads_a_model_out_of_memory_that_dmalane_exported() {
    let program = Path::new("/tests/dmalane");
    if !program.exists() {
        return println!("SKIPPED: no program dmalane in this guest");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, model(100_000)).unwrap();
    for (options, kind) in
        [(["--pages", "4k"].as_slice(), "memfd"), (&["--dma-buf"], "dma-buf"), (&["--heap", "dma-heap"], "dma-buf")]
    {
        let output = Command::new(program)
            .arg("read")
            .arg(&path)
            .args(options)
            .args(["--export", "fd", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "child::a_model_that_was_exported", "--show-output", "--test-threads=1"])
            .env("MODEL", &path)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if ["this machine has no such memory", "no dma-buf heap on this machine"].iter().any(|no| text.contains(no)) {
            println!("SKIPPED: {options:?}: {text}");
            continue;
        }
        text.lines().filter(|l| l.starts_with("say: ")).for_each(|l| println!("{l}"));
        let done = output.status.success() && text.contains("1 passed") && text.contains(&format!("say: {kind}"));
        assert!(done, "{options:?}: {}", text.replace("test ", "child "));
    }
}

/// Run by others: as an ordinary user, or in place of `dmalane read`.
mod child {
    use super::*;

    #[test]
    fn a_model_that_was_exported() {
        use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
        let variable = |name| std::env::var(name).unwrap();
        let (kind, expected) = (variable("DMALANE_KIND"), fs::read(variable("MODEL")).unwrap());
        assert_eq!(variable("DMALANE_SIZE"), expected.len().to_string());
        let me = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let fd = pidfd_getfd(me, variable("DMALANE_FD").parse().unwrap(), PidfdGetfdFlags::empty()).unwrap();
        let device = edu(edus()[0]);
        if kind == "dma-buf" {
            let memory = SharedBuf::import_dma_buf(fd).unwrap();
            let refused =
                device.bus().pin(&memory.reference()).and_then(|pinned| device.bus().map(pinned, Access::READ));
            let mut got = vec![0; expected.len()];
            memory.cpu_access(false, |view| view.sub(0, got.len()).unwrap().read(&mut got)).unwrap();
            assert!(got == expected);
            return println!("say: dma-buf, which VFIO refuses: {}", refused.unwrap_err());
        }
        let memory = SharedBuf::import(fd).unwrap();
        let landed = AnonHeap::starting_at(PageKind::Base).allocate(page()).unwrap().share();
        let (from, to) = (map(device.bus(), &memory, Access::READ), map(device.bus(), &landed, Access::RW));
        let mut got = Vec::new();
        // Through the device's own memory, which two of the longest copies fit into.
        let step = device.memory().div_ceil(2) as usize;
        for (i, bytes) in expected.chunks(step).enumerate() {
            let at = from.span().first().checked_add((i * step) as u64).unwrap();
            let (card, len) = (CardAddr::new(0), bytes.len() as u64);
            device.copy(Direction::FromHost, at, card, len).unwrap();
            device.copy(Direction::ToHost, to.span().first(), card, len).unwrap();
            let mut read = vec![0; bytes.len()];
            landed.as_volatile_slice().sub(0, read.len()).unwrap().read(&mut read);
            got.extend(read);
        }
        assert!(got == expected, "the device read something else");
        println!("say: memfd: {} bytes of the model read by a device", got.len());
    }

    #[test]
    fn no_permission() {
        match container().open(&edus()[0]) {
            Err(Error::NoPermission { path }) => assert_eq!(path, Path::new(&files(edus()[0])[0])),
            other => panic!("{other:?}"),
        }
        println!("say: {}", container().open(&edus()[0]).unwrap_err());
    }

    #[test]
    fn memlock() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = 1 << 20;
        setrlimit(Resource::Memlock, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
        let edu = edu(edus()[0]);
        let bus = edu.bus();
        let map = |len: usize| {
            let buf = AnonHeap::starting_at(PageKind::Base).allocate(len).unwrap().share();
            bus.map(bus.pin(&buf.reference()).unwrap(), Access::RW)
        };
        let before = bus.device().container().mappings_left().unwrap();
        let some = map(512 << 10).unwrap();
        let error = cause(map(1 << 20).unwrap_err());
        assert!(matches!(error, Error::Memlock { wanted: 0x10_0000, left } if left <= 512 << 10), "{error}");
        println!("say: {error}");
        drop(some);
        drop(map(1 << 20).unwrap());
        assert_eq!(bus.device().container().mappings_left().unwrap(), before);
    }
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

/// An `edu` in the conformance suite.
struct EduFixture {
    edu: Edu,
    heap: AnonHeap,
    /// To access the device's memory without the channel.
    spare: SharedBuf,
    window: Mapping,
}

impl EduFixture {
    fn fragments(&self, len: usize, direction: Direction, mut each: impl FnMut(&SharedBuf, usize, usize)) {
        for start in (0..len).step_by(2048) {
            let n = (len - start).min(2048);
            if direction == Direction::FromHost {
                each(&self.spare, start, n);
            }
            let card = CardAddr::new(start as u64);
            self.edu.copy(direction, self.window.span().first(), card, n as u64).unwrap();
            if direction == Direction::ToHost {
                each(&self.spare, start, n);
            }
        }
    }
}

impl Fixture for EduFixture {
    type Queue = EduQueue;

    fn queue(&mut self) -> EduQueue {
        self.edu.queue()
    }

    fn target_len(&self) -> u64 {
        self.edu.memory()
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(offset))
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let buf = self.heap.allocate(len).unwrap().share();
        let via = Registered::new(&**self.edu.bus(), &buf, Access::RW).unwrap();
        // Exactly `len` bytes: an operation has at most 2048.
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.edu.memory() as usize];
        self.fragments(bytes.len(), Direction::ToHost, |spare, start, n| {
            spare.as_volatile_slice().sub(0, n).unwrap().read(&mut bytes[start..start + n]);
        });
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.fragments(bytes.len(), Direction::FromHost, |spare, start, n| {
            spare.as_volatile_slice().sub(0, n).unwrap().write(&bytes[start..start + n]);
        });
    }

    fn rounds(&self) -> u64 {
        10
    }
}

#[test]
fn conformance() {
    let edu = edu(edus()[0]);
    let heap = AnonHeap::new();
    let spare = heap.allocate(page()).unwrap().share();
    let window = map(edu.bus(), &spare, Access::RW);
    let container = edu.bus().device().container().clone();
    let mut fixture = EduFixture { edu, heap, spare, window };
    suite(&mut fixture);
    drop(fixture);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}

#[test]
fn the_examples_run() {
    let ([edu, _], file_bar) = (edus(), functions(FILE_BAR.0)[0]);
    let container = container();
    driver::drive(&container, &edu).unwrap();
    peer::share(&container, &file_bar, FILE_BAR.1, &edu).unwrap();
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}

#[test]
fn a_container_selects_the_preferred_backend() {
    let bdf = edus()[0];
    let all = backends("/");
    assert!(all.len() >= 2, "{all:?}");
    let here = all.iter().find(|status| status.bdf == bdf).unwrap();
    println!("{here:?}");
    let container = VfioContainer::new();
    assert_eq!(container.backend(), None);
    let device = container.open(&bdf).unwrap();
    let (selected, file) = here.selected.as_ref().unwrap();
    assert_eq!(container.backend(), Some(*selected), "doctor and the container agree");
    assert!(file.exists());
    match selected {
        Backend::Iommufd => assert!(container.iommufd_error().is_none() && here.unavailable.is_empty()),
        _ => {
            let why = container.iommufd_error().unwrap().to_string();
            assert_eq!(why, here.unavailable[0].1.to_string());
            println!("say: {why}");
        }
    }
    // The other backend can open the same device, but not at the same time.
    match VfioContainer::with_backend(Backend::Type1).open(&bdf) {
        Err(Error::Busy { .. }) => {}
        other => panic!("{other:?}"),
    }
    drop((device, container));
    edu_in(&VfioContainer::with_backend(Backend::Type1), bdf);
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

/// The cost of mapping host memory: `scripts/vm dma-map` prints the table.
mod measure {
    use super::*;

    const LEN: usize = 1 << 30;
    const ROUNDS: usize = 3;
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    /// Maps and unmaps, and prints a row of the table. The device accesses the memory while it is mapped.
    fn row(backend: Backend, by_address: bool, memory: &str, buf: &SharedBuf) {
        let container = VfioContainer::with_backend(backend);
        let edu = edu_in(&container, edus()[0]);
        let call = match (backend, by_address || buf.export().is_none()) {
            (Backend::Type1, _) => "VFIO_IOMMU_MAP_DMA",
            (_, true) => "IOMMU_IOAS_MAP",
            (_, false) => "IOMMU_IOAS_MAP_FILE",
        };
        if by_address {
            container.map_by_address();
        }
        let times: Vec<(u128, u128)> = (0..ROUNDS)
            .map(|round| {
                let pinned = edu.bus().pin(&buf.reference()).unwrap();
                let began = Instant::now();
                let mapping = edu.bus().map(pinned, Access::RW).unwrap();
                let map = began.elapsed();
                let bytes = pattern(round as u64 + 1, 2000);
                buf.as_volatile_slice().sub(LEN - 2000, 2000).unwrap().write(&bytes);
                let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
                edu.copy(Direction::FromHost, at(LEN - 2000), CardAddr::new(0), 2000).unwrap();
                edu.copy(Direction::ToHost, at(LEN / 2 + 5), CardAddr::new(0), 2000).unwrap();
                let mut got = vec![0; 2000];
                buf.as_volatile_slice().sub(LEN / 2 + 5, 2000).unwrap().read(&mut got);
                assert!(got == bytes, "{backend} {memory}");
                let began = Instant::now();
                drop(mapping);
                (map.as_nanos(), began.elapsed().as_nanos())
            })
            .collect();
        assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
        let (first, map) = (times[0].0, times.iter().map(|t| t.0).min().unwrap());
        let unmap = times.iter().map(|t| t.1).min().unwrap();
        let (major, minor) = release();
        let times = format!(r#""first_ns":{first},"map_ns":{map},"unmap_ns":{unmap}"#);
        println!(r#"ROW {{"kernel":"{major}.{minor}","memory":"{memory}","call":"{call}",{times}}}"#);
    }

    #[test]
    fn mapping_of_host_memory() {
        type Make = fn() -> Box<dyn Heap>;
        let kinds: [(&str, PageKind, Make); 4] = [
            ("4 KiB, anonymous", PageKind::Base, || Box::new(AnonHeap::starting_at(PageKind::Base))),
            ("4 KiB, memfd", PageKind::Base, || Box::new(MemfdHeap::starting_at(PageKind::Base))),
            ("2 MiB, memfd", PageKind::Hugetlb2M, || Box::new(MemfdHeap::starting_at(PageKind::Hugetlb2M))),
            ("1 GiB, memfd", PageKind::Hugetlb1G, || Box::new(MemfdHeap::starting_at(PageKind::Hugetlb1G))),
        ];
        for (memory, kind, make) in kinds {
            let before = fs::read_to_string(POOL).unwrap();
            if kind == PageKind::Hugetlb2M {
                fs::write(POOL, (LEN >> 21).to_string()).unwrap();
            }
            let buf = make().allocate(LEN).unwrap();
            assert_eq!(buf.backing().kind, kind, "{:?}", buf.backing().passed_over);
            let buf = buf.share();
            row(Backend::Type1, false, memory, &buf);
            row(Backend::Iommufd, true, memory, &buf);
            if buf.export().is_some() {
                row(Backend::Iommufd, false, memory, &buf);
            }
            drop(buf);
            fs::write(POOL, before.trim()).unwrap();
        }
    }
}

/// With all modules but `vfio_iommu_type1`.
mod untyped {
    use super::*;

    #[test]
    fn without_type_1_the_error_names_its_module() {
        let began = Instant::now();
        match VfioContainer::new().open(&edus()[0]) {
            Err(e @ Error::NoType1) => {
                println!("{e}");
                assert!(e.to_string().contains("modprobe vfio_iommu_type1"));
            }
            other => panic!("{other:?}"),
        }
        assert!(began.elapsed() < Duration::from_secs(1));
    }
}

/// Before any module is loaded.
mod bare {
    use super::*;

    #[test]
    fn without_modules_the_error_names_them() {
        match VfioContainer::new().open(&edus()[0]) {
            Err(e @ Error::NoModule { module: "vfio-pci", .. }) => assert!(e.to_string().contains("modprobe vfio-pci")),
            other => panic!("{other:?}"),
        }
    }
}
