//! Tests on a real kernel with the devices of a guest; `scripts/vm` runs them and provides the devices.
//! `DMALANE_VFIO_BACKEND` selects the backend (type1 by default).

mod bars;
mod copies;
#[allow(dead_code)] // its `main`
#[path = "../examples/edu.rs"]
mod driver;
mod edu;
mod measure;
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
use rustix::event::{PollFd, PollFlags};

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
    assert!(matches!(map_at(page() as u64), Err(Error::Iova(_))), "taken");
    assert!(matches!(map_at(INTERRUPTS.0), Err(Error::Iova(_))), "the addresses of interrupts");
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
    drop(mapping);
    drop(map_at(0).unwrap());
}

/// As a VMM does it: the eventfds are those that it hands to KVM.
#[test]
fn interrupts_and_the_wish_to_have_the_device_back_signal_eventfds() {
    let bdf = edus()[0];
    let container = container();
    let device = container.open(&bdf).unwrap();
    let bus = VfioBus::with_options(device.clone(), BusOptions::passive()).unwrap();
    device.set_bus_master(true).unwrap();
    assert!(device.irq_count(Irq::Msi).unwrap() >= 1 && device.irq_count(Irq::Msix).unwrap() == 0);
    let events = InterruptEvents::new(1).unwrap();
    device.set_irqs(Irq::Msi, 0, &[Some(events.events()[0].as_fd())]).unwrap();
    assert!(!events.wait(Duration::from_millis(1)), "none yet");
    // Of the line of legacy PCI the kernel would pass on the first one only: it masks the line until it is told.
    for round in 0..2 {
        edu::interrupt(&bus, 1 << round).unwrap();
        assert!(events.wait(Duration::from_secs(10)), "interrupt {round}");
        edu::acknowledge(&bus).unwrap();
    }
    for disabled in [&[None][..], &[]] {
        device.set_irqs(Irq::Msi, 0, disabled).unwrap();
        edu::interrupt(&bus, 1).unwrap();
        assert!(!events.wait(Duration::from_millis(1)), "disabled");
        edu::acknowledge(&bus).unwrap();
    }
    assert!(matches!(device.set_irqs(Irq::Msix, 0, &[None]), Err(Error::Kernel { .. })), "the device has none");

    let event = device.release_event().unwrap();
    let is_wanted_back = |patience: Duration| {
        let mut polls = [PollFd::new(&event, PollFlags::IN)];
        rustix::event::poll(&mut polls, Some(&patience.try_into().unwrap())).unwrap() == 1
    };
    assert!(!is_wanted_back(Duration::from_millis(1)), "not yet");
    let unbinder =
        std::thread::spawn(move || fs::write("/sys/bus/pci/drivers/vfio-pci/unbind", bdf.to_string()).unwrap());
    assert!(is_wanted_back(LONG));
    drop((bus, device, container));
    unbinder.join().unwrap();
    fs::write("/sys/bus/pci/drivers_probe", bdf.to_string()).unwrap();
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
