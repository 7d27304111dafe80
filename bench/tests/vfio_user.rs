//! The served card and the client of vfio-user against other projects: Cloud Hypervisor's client and server, and the
//! search for BARs of virtio-drivers.
//!
//! `unsafe`: the port of virtio-drivers to configuration space has one such function, which nothing here calls.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use dmalane::addr::{Access, CardAddr, Iova};
use dmalane::card::{Descriptor, Task, regs};
use dmalane::dma::{Heap, MemfdHeap, Mmio, PageKind, Registrar};
use dmalane::queue::{DeviceAddr, Direction};
use dmalane::sim::{CardConfig, Workers};
use dmalane::vfio_user::UserBus;
use dmalane::{CARD_PCI_ID, CardServer};
use vfio_user::{Client, DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion};
use virtio_drivers::transport::pci::bus::{BarInfo, ConfigurationAccess, DeviceFunction, MemoryBarType, PciRoot};

const MIB: u64 = 1 << 20;
const CONFIG: u32 = 7;

/// Serves a card of 24 MiB to the client of a test.
fn with_card(test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("card");
    let config = CardConfig { ddr: 16 * MIB, hbm: 8 * MIB, channels: 2, workers: Workers::PerChannel };
    let server = CardServer::bind(&socket, config).unwrap();
    let served = thread::spawn(move || server.accept().unwrap().serve().unwrap());
    test(&socket);
    served.join().unwrap().unwrap();
}

/// A VMM's way to a device's configuration space: the messages of Cloud Hypervisor's client.
struct Space(RefCell<Client>);

impl ConfigurationAccess for &Space {
    fn read_word(&self, _: DeviceFunction, register: u8) -> u32 {
        let mut bytes = [0; 4];
        self.0.borrow_mut().region_read(CONFIG, register.into(), &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn write_word(&mut self, _: DeviceFunction, register: u8, data: u32) {
        self.0.borrow_mut().region_write(CONFIG, register.into(), &data.to_le_bytes()).unwrap();
    }

    // SAFETY: a copy of a reference, whose accesses a `RefCell` serialises.
    unsafe fn unsafe_clone(&self) -> Self {
        self
    }
}

#[test]
fn bars_are_found_by_their_size() {
    with_card(|socket| {
        let space = Space(RefCell::new(Client::new(socket).unwrap()));
        let mut root = PciRoot::new(&space);
        let function = DeviceFunction { bus: 0, device: 0, function: 0 };
        let (_, found) = root.enumerate_bus(0).next().expect("a device");
        assert_eq!((found.vendor_id, found.device_id), CARD_PCI_ID);
        assert_eq!(root.capabilities(function).map(|capability| capability.id).collect::<Vec<_>>(), [0x11, 0x13]);
        let mut bar = |index| root.bar_info(function, index).unwrap();
        let memory =
            |width, prefetchable, size| Some(BarInfo::Memory { address_type: width, prefetchable, address: 0, size });
        assert_eq!(bar(0), memory(MemoryBarType::Width32, false, 64 << 10));
        assert_eq!(bar(2), memory(MemoryBarType::Width64, true, 32 * MIB));
        assert_eq!(bar(4), memory(MemoryBarType::Width32, false, 4096));
        assert_eq!([bar(1), bar(5)], [None, None]);
        // As long as the regions; and a BAR that was placed says so, and keeps its size.
        let len = |index| space.0.borrow().region(index).unwrap().size;
        assert_eq!([0, 1, 2, 4, 5].map(len), [64 << 10, 0, 32 * MIB, 4096, 0]);
        root.set_bar_32(function, 0, 0xfe00_0000);
        root.set_bar_64(function, 2, 0x40_0000_0000);
        let mut bar = |index| root.bar_info(function, index).unwrap().unwrap().memory_address_size();
        assert_eq!((bar(0), bar(2)), (Some((0xfe00_0000, 64 << 10)), Some((0x40_0000_0000, 32 * MIB))));
    });
}

#[test]
fn cloud_hypervisors_client_drives_the_card() {
    with_card(|socket| {
        let mut client = Client::new(socket).unwrap();
        let areas = &client.region(2).unwrap().sparse_areas;
        let areas: Vec<_> = areas.iter().map(|area| (area.offset, area.size)).collect();
        assert_eq!(areas, [(0, 16 * MIB), (16 * MIB, 8 * MIB)]);
        assert_eq!(client.get_irq_info(2).unwrap().count, 2);
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        client.set_irqs(2, 1 << 2 | 1 << 5, 0, 1, &[event.as_raw_fd()]).unwrap();
        // A ring, its completions and the bytes to move, in one file.
        let memory = MemfdHeap::starting_at(PageKind::Base).allocate(16 << 10).unwrap().share();
        let bytes = memory.as_volatile_slice();
        const AT: u64 = 0x10_0000;
        client.dma_map(0, AT, 16 << 10, memory.export().unwrap().as_raw_fd()).unwrap();
        client.region_write(CONFIG, 4, &[6, 0]).unwrap();
        bytes.sub(0x2000, 4096).unwrap().fill(0xa5);
        let copy = |direction, host| Task::Copy {
            direction,
            host: Iova::new(AT + host),
            card: DeviceAddr::Card(CardAddr::new(MIB)),
            len: 4096,
        };
        for (slot, task) in [copy(Direction::FromHost, 0x2000), copy(Direction::ToHost, 0x3000)].into_iter().enumerate()
        {
            let descriptor: Vec<u8> =
                Descriptor::from(task).encode().iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.write_words(32 * slot, &descriptor).unwrap();
        }
        for (register, value) in [
            (regs::CH_RING, AT as u32),
            (regs::CH_COMPLETIONS, AT as u32 + 0x1000),
            (regs::CH_RING_LOG2, 4),
            (regs::CH_INTERRUPT, 1),
            (regs::CH_CONTROL, 1),
        ] {
            client.region_write(0, regs::channel(0, register), &u32::to_le_bytes(value)).unwrap();
        }
        let read = |client: &mut Client, register| {
            let mut word = [0; 4];
            client.region_read(0, regs::channel(0, register), &mut word).unwrap();
            u32::from_le_bytes(word)
        };
        while read(&mut client, regs::CH_STATUS) != regs::STATUS_RUNNING {}
        client.region_write(0, regs::channel(0, regs::CH_DOORBELL), &2_u32.to_le_bytes()).unwrap();
        assert_eq!(rustix::io::read(&event, &mut [0; 8]), Ok(8), "an interrupt");
        while read(&mut client, regs::CH_HEAD) != 2 {}
        let mut back = [0; 4096];
        bytes.sub(0x3000, 4096).unwrap().read(&mut back);
        assert_eq!(back, [0xa5; 4096]);
        client.region_read(2, MIB, &mut back).unwrap();
        assert_eq!(back, [0xa5; 4096]);
        client.reset().unwrap();
        assert_eq!(read(&mut client, regs::CH_STATUS), 0);
        client.dma_unmap(AT, 16 << 10).unwrap();
        client.shutdown().unwrap();
    });
}

/// A device of Cloud Hypervisor's server: bytes, and what it was told.
#[derive(Default)]
struct Backend(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    bar: Vec<u8>,
    config: Vec<u8>,
    maps: Vec<(DmaMapFlags, u64, u64, u64, Option<File>)>,
    unmaps: Vec<(u64, u64)>,
    events: Vec<File>,
    resets: u32,
}

impl Backend {
    fn region(&self, region: u32, with: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        with(if region == CONFIG { &mut state.config } else { &mut state.bar });
        Ok(())
    }
}

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.region(region, |bytes| data.copy_from_slice(&bytes[offset as usize..][..data.len()]))
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.region(region, |bytes| bytes[offset as usize..][..data.len()].copy_from_slice(data))
    }

    fn dma_map(&mut self, flags: DmaMapFlags, offset: u64, at: u64, len: u64, fd: Option<File>) -> io::Result<()> {
        self.0.lock().unwrap().maps.push((flags, offset, at, len, fd));
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, at: u64, len: u64) -> io::Result<()> {
        self.0.lock().unwrap().unmaps.push((at, len));
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.0.lock().unwrap().resets += 1;
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        assert_eq!((start as usize, count as usize), (state.events.len(), fds.len()));
        state.events.extend(fds);
        Ok(())
    }
}

#[test]
fn our_client_drives_a_device_of_cloud_hypervisors_server() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("device");
    let region = |index, size| {
        let mut info = ServerRegion { region_info: Default::default(), sparse_areas: Vec::new(), mmap_fd: None };
        (info.region_info.argsz, info.region_info.index, info.region_info.size) = (32, index, size);
        info.region_info.flags = 3;
        info
    };
    let lens = [4096, 0, 0, 0, 0, 0, 0, 256, 0];
    let regions = lens.into_iter().zip(0..).map(|(len, index)| region(index, len)).collect();
    let irqs = (0..5).map(|index| IrqInfo { index, flags: 1, count: if index == 2 { 3 } else { 0 } }).collect();
    let server = Server::new(&socket, true, irqs, regions).unwrap();
    let state = Arc::new(Mutex::new(State { bar: vec![0; 4096], config: vec![0; 256], ..State::default() }));
    let mut backend = Backend(state.clone());
    let (ended, end) = mpsc::channel();
    thread::spawn(move || ended.send(server.run(&mut backend).is_ok()));
    let bus = UserBus::connect(&socket, &[]).unwrap();
    assert_eq!((bus.region_len(0), bus.region_len(1), bus.region_len(7)), (4096, 0, 256));
    let bytes: Vec<u8> = (0..4096).map(|i| i as u8).collect();
    bus.write_bytes(0, 0, &bytes).unwrap();
    bus.write32(0, 8, 0x1234_5678).unwrap();
    let mut back = vec![0; 4096];
    bus.read_bytes(0, 0, &mut back).unwrap();
    assert_eq!(
        (&back[..8], &back[8..12], &back[12..]),
        (&bytes[..8], &0x1234_5678_u32.to_le_bytes()[..], &bytes[12..])
    );
    // Memory that is sent, a part of a buffer, and a list.
    let heap = bus.heap(Some(PageKind::Base));
    let bufs = [8192, 4096].map(|len| heap.allocate(len).unwrap().share());
    let part = bus.map(bus.pin_range(&bufs[0].reference(), 4096..8192).unwrap(), Access::READ).unwrap();
    let list = bufs.iter().map(|buf| bus.pin(&buf.reference()).unwrap()).collect();
    let list = bus.map_list(list, Access::RW).unwrap();
    let (at, both) = (part.span().first().bits(), list.span().first().bits());
    drop((part, list));
    bus.reset().unwrap();
    {
        let state = state.lock().unwrap();
        let maps: Vec<_> = state.maps.iter().map(|map| (map.0.bits(), map.1, map.2, map.3, map.4.is_some())).collect();
        assert_eq!(maps, [(1, 4096, at, 4096, true), (3, 0, both, 8192, true), (3, 0, both + 8192, 4096, true)]);
        let mut unmaps = state.unmaps.clone();
        unmaps.sort();
        let mut wanted = vec![(at, 4096), (both, 8192), (both + 8192, 4096)];
        wanted.sort();
        assert_eq!((unmaps, state.resets, state.events.len()), (wanted, 1, 3));
        assert_eq!(state.config[4..6], [6, 0], "memory decoding and bus mastering");
        // An interrupt reaches the driver.
        rustix::io::write(&state.events[2], &1_u64.to_ne_bytes()).unwrap();
    }
    assert!(bus.wait(std::time::Duration::from_secs(30)));
    drop(bus);
    let _ended = end.recv_timeout(std::time::Duration::from_secs(30)).expect("the server ends");
}
