//! The software card in another process's place: every message goes over a socket, every byte through the client's
//! mappings.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane::addr::{Access, CardAddr};
use dmalane::card::{Card, CardQueue, regs};
use dmalane::dma::{AnonHeap, Heap, MemfdHeap, Mmio, PageKind};
use dmalane::queue::conformance::{Fixture, suite};
use dmalane::queue::{DeviceAddr, HostSlice, OpError, Operation, Queue, Registered, RunError, StopReason, drain, run};
use dmalane::sim::{CardConfig, Workers};
use dmalane::vfio_user::UserBus;
use dmalane::{CARD_PCI_ID, CardServer, CardServerError, error_chain};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(30);
const CONFIG: CardConfig = CardConfig { ddr: 16 * MIB, hbm: 8 * MIB, channels: 2, workers: Workers::PerChannel };

/// A server for several clients, one after the other.
struct Server {
    _dir: tempfile::TempDir,
    path: PathBuf,
    server: Option<std::thread::JoinHandle<Vec<bool>>>,
}

impl Server {
    fn new(clients: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("card");
        let server = CardServer::bind(&path, CONFIG).unwrap();
        let serve = move |_| server.accept().unwrap().serve().unwrap().is_ok();
        let server = std::thread::spawn(move || (0..clients).map(serve).collect());
        Self { _dir: dir, path, server: Some(server) }
    }

    fn connect(&self) -> Arc<UserBus> {
        Arc::new(UserBus::connect(&self.path, &[]).unwrap())
    }

    /// Whether each client was served without an error.
    fn end(mut self) -> Vec<bool> {
        self.server.take().unwrap().join().unwrap()
    }
}

fn heap() -> MemfdHeap {
    MemfdHeap::starting_at(PageKind::Base)
}

struct Under {
    bus: Arc<UserBus>,
    card: Card<UserBus>,
    at: u64,
    heap: Box<dyn Heap>,
}

impl Fixture for Under {
    type Queue = CardQueue<UserBus>;

    fn queue(&mut self) -> Self::Queue {
        self.card.queue(1).unwrap()
    }

    fn target_len(&self) -> u64 {
        MIB
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(self.at + offset))
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let buf = self.heap.allocate(len).unwrap().share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).unwrap();
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; MIB as usize];
        self.bus.read_region(2, self.at, &mut bytes).unwrap();
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.bus.write_bytes(2, self.at, bytes).unwrap();
    }

    fn rounds(&self) -> u64 {
        20
    }
}

/// On memory that the card maps, and on memory that it reads and writes by messages, rings included.
fn suite_on(heap: Box<dyn Heap>) {
    let server = Server::new(1);
    let bus = server.connect();
    let card = Card::open_with_rings(bus.clone(), &*heap, 16).unwrap();
    // The end of HBM, so that one byte more is one too many.
    let at = card.layout().hbm.last().bits() + 1 - MIB;
    let mut fixture = Under { bus: bus.clone(), card, at, heap };
    suite(&mut fixture);
    drop(fixture);
    assert_eq!(bus.mapped_bytes(), 0, "rings and buffers are unmapped");
    drop(bus);
    assert_eq!(server.end(), [true]);
}

#[test]
fn the_suite_that_every_queue_takes() {
    suite_on(Box::new(heap()));
}

#[test]
fn the_suite_on_memory_without_a_descriptor() {
    suite_on(Box::new(AnonHeap::new()));
}

#[test]
fn it_is_a_pci_device() {
    let server = Server::new(1);
    let bus = server.connect();
    let mut config = [0; 256];
    bus.read_region(7, 0, &mut config).unwrap();
    assert_eq!(
        (config[0], config[1], config[2]),
        (CARD_PCI_ID.0 as u8, (CARD_PCI_ID.0 >> 8) as u8, CARD_PCI_ID.1 as u8)
    );
    let msix = usize::from(config[0x34]);
    assert_eq!((config[msix], config[msix + 2], config[msix + 4] & 7), (0x11, 1, 4), "two interrupts, table in BAR 4");
    assert_eq!((bus.region_len(2), bus.region_len(1), bus.id().unwrap()), (32 * MIB, 0, CARD_PCI_ID));
    // The card's memory is mapped, all but the bytes that are none; those do not answer.
    assert_eq!(bus.mapped_areas(2), [0..16 * MIB, 16 * MIB..24 * MIB]);
    assert!(bus.mapped_areas(0).is_empty());
    assert!(bus.write_bytes(2, 24 * MIB, &[0; 4]).is_err() && bus.read_region(2, 24 * MIB - 4, &mut [0; 8]).is_err());
    // Advanced features, by which a kernel resets the function.
    let features = usize::from(config[msix + 1]);
    assert_eq!(config[features..features + 6], [0x13, 0, 6, 3, 0, 0]);
    // The BARs have sizes that a VMM finds by writing ones; what is not there reads zero, and what is fixed stays.
    let config_after = |at: u64, bytes: [u8; 4]| {
        bus.write_region(7, at, &bytes).unwrap();
        let mut read = [0; 4];
        bus.read_region(7, at, &mut read).unwrap();
        u32::from_le_bytes(read)
    };
    let sizes = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x30].map(|at| config_after(at, [0xff; 4]));
    assert_eq!(sizes, [0xffff_0000, 0, 0xfe00_000c, 0xffff_ffff, 0xffff_f000, 0, 0]);
    assert_eq!(config_after(0, [0; 4]), u32::from(CARD_PCI_ID.1) << 16 | u32::from(CARD_PCI_ID.0));
    assert_eq!(config_after(4, [0x47, 0xff, 0xff, 0xff]), 0x0010_0146, "command and status");
    assert_eq!(config_after(4, [6, 0, 0, 0]), 0x0010_0006);
    assert_eq!(config_after(8, [0xff; 4]), 0x1200_0000);
    // Registers that are not there, and places past the end.
    assert!(bus.read32(0, 0x8000).is_err() && bus.read32(0, 1 << 20).is_err() && bus.read32(1, 0).is_err());
    assert!(
        bus.write_bytes(2, bus.region_len(2) - 4, &[0; 8]).is_err() && bus.read_region(99, 0, &mut config).is_err()
    );
    bus.reset().unwrap();
    // Its state is not saved.
    let mut state = Vec::new();
    for refused in [bus.save(&mut state), bus.restore(&state[..]), bus.resume()] {
        assert!(error_chain(&refused.unwrap_err()).contains("refuses Feature: Operation not supported"));
    }
    drop(bus);
    assert_eq!(server.end(), [true]);
}

#[test]
fn each_client_gets_an_empty_card_and_leaves_nothing() {
    let server = Server::new(2);
    let first = server.connect();
    first.write_bytes(2, 0, b"secret!!").unwrap();
    // Gone in mid-transfer, with its memory mapped.
    let card = Card::open(first.clone(), &heap()).unwrap();
    let buf = heap().allocate(8 << 20).unwrap().share();
    let via = Registered::new(&*first, &buf, Access::RW).unwrap();
    let at = DeviceAddr::Card(CardAddr::new(0));
    run(&mut card.queue(0).unwrap(), Operation::write((buf.into_slice(), via.clone()), at), LONG).unwrap();
    drop((card, via, first));
    let second = server.connect();
    let mut bytes = [1; 8];
    second.read_region(2, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
    drop(second);
    assert_eq!(server.end(), [true, true]);
}

#[test]
fn a_dma_to_what_is_not_mapped_is_a_fault() {
    let server = Server::new(1);
    let bus = server.connect();
    let card = Card::open(bus.clone(), &heap()).unwrap();
    let buf = heap().allocate(4096).unwrap().share();
    // Mapped for reading; the card is to write it.
    let via = Registered::new(&*bus, &buf, Access::READ).unwrap();
    let (at, via) = (DeviceAddr::Card(CardAddr::new(0)), via);
    let mut channel = card.queue(0).unwrap();
    let refused = run(&mut channel, Operation::read((buf.into_slice(), via), at), LONG);
    assert!(error_chain(&refused.unwrap_err()).contains("does not permit"));
    drop((channel, card, bus));
    assert_eq!(server.end(), [true]);
}

/// Memory decoding and bus mastering, as of a card in a slot.
#[test]
fn the_command_register_is_obeyed() {
    let server = Server::new(1);
    let bus = server.connect();
    let card = Card::open(bus.clone(), &heap()).unwrap();
    let at = DeviceAddr::Card(CardAddr::new(0));
    let write = |byte: u8| {
        let buf = heap().allocate(4096).unwrap().share();
        buf.as_volatile_slice().fill(byte);
        let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
        Operation::write((buf.into_slice(), via), at)
    };
    let there = || {
        let mut bytes = [0; 4096];
        bus.read_region(2, 0, &mut bytes).map(|()| bytes)
    };
    run(&mut card.queue(0).unwrap(), write(1), LONG).unwrap();

    // Without memory decoding: no BAR answers, mapped or not, and the card goes on with what it has.
    bus.write_region(7, 4, &[4, 0]).unwrap();
    assert!(bus.read32(0, regs::ID).is_err() && bus.write32(0, regs::CONTROL, 0).is_err());
    assert!(there().is_err() && bus.write_bytes(2, 0, &[9]).is_err() && bus.mapped_areas(2).is_empty());
    assert!(bus.read_region(4, 0, &mut [0; 4]).is_err() && bus.write_region(4, 0, &[0; 4]).is_err());
    let mut command = [0; 2];
    bus.read_region(7, 4, &mut command).unwrap();
    assert_eq!(command, [4, 0]);
    bus.write_region(7, 4, &[6]).unwrap();
    assert_eq!((bus.read32(0, regs::ID).unwrap(), there().unwrap()), (regs::ID_VALUE, [1; 4096]));

    // Without bus mastering: no byte of host memory, not even of the ring.
    bus.write_region(7, 4, &[2]).unwrap();
    let mut channel = card.queue(0).unwrap();
    let refused = error_chain(&run(&mut channel, write(2), LONG).unwrap_err());
    assert!(refused.contains("the descriptor ring is not readable"), "{refused}");
    assert_eq!(there().unwrap(), [1; 4096]);
    drop(channel);
    bus.write_region(7, 4, &[6]).unwrap();
    run(&mut card.queue(0).unwrap(), write(3), LONG).unwrap();
    assert_eq!(there().unwrap(), [3; 4096]);
    drop((card, bus));
    assert_eq!(server.end(), [true]);
}

#[test]
fn a_client_that_talks_nonsense_ends_its_own_connection_only() {
    let message = |id: u16, command: u16, body: &[u8]| {
        let len = (16 + body.len()) as u32;
        [&id.to_le_bytes()[..], &command.to_le_bytes(), &len.to_le_bytes(), &[0; 8], body].concat()
    };
    let hello = message(0, 1, &[&0u16.to_le_bytes()[..], &1u16.to_le_bytes(), b"{}\0"].concat());
    let nonsense: Vec<Vec<u8>> = vec![
        vec![0; 3],
        message(0, 4, &[0; 16]),                              // no greeting
        message(0, 1, &7u32.to_le_bytes()),                   // a version of the future
        [hello.clone(), vec![0xff; 16]].concat(),             // a length of 4 GiB
        [hello.clone(), message(1, 9, &[0xff; 16])].concat(), // a read of 4 GiB
        [hello.clone(), message(1, 77, &[]), message(2, 9, &[])].concat(),
        [hello.clone(), message(1, 2, &[0xff; 32])].concat(), // a mapping of everything, without a descriptor
        [hello.clone(), message(1, 3, &[0xff; 24])].concat(),
        [hello.clone(), message(1, 8, &[0xff; 20])].concat(),
        [hello, message(1, 10, &[0; 16]), message(2, 13, &[])].concat(),
    ];
    let server = Server::new(nonsense.len() + 1);
    for bytes in &nonsense {
        let mut stream = UnixStream::connect(&server.path).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Until the server has closed it.
        std::io::copy(&mut stream, &mut std::io::sink()).ok();
    }
    assert!(server.connect().read32(0, 0).is_ok(), "the next client is served");
    let served = server.end();
    assert_eq!((served[..4].iter().any(|ok| *ok), served[4..].iter().all(|ok| *ok)), (false, true), "{served:?}");
}

/// A server that ends while a client's transfer is on its way: the client is told, soon, and has its memory back.
#[test]
fn a_server_that_goes_away_is_an_error_and_no_hang() {
    let server = Server::new(1);
    let ours = UnixStream::connect(&server.path).unwrap();
    let cut = ours.try_clone().unwrap();
    let bus = Arc::new(UserBus::over(ours).unwrap());
    let card = Card::open(bus.clone(), &heap()).unwrap();
    let mut channel = card.queue(0).unwrap();
    let buf = heap().allocate(1 << 20).unwrap().share();
    let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
    let (at, via) = (DeviceAddr::Card(CardAddr::new(0)), via);
    cut.shutdown(std::net::Shutdown::Both).unwrap();
    let began = Instant::now();
    let error = run(&mut channel, Operation::write((buf.into_slice(), via), at), LONG);
    let RunError { operation, error } = error.unwrap_err();
    let OpError::Stopped(StopReason::Lost(why)) = error else { panic!("{error}") };
    assert!(error_chain(&*why).contains("does not answer") && operation.is_some(), "{why}");
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    let error = error_chain(&bus.read32(0, 0).unwrap_err());
    assert!(error.contains("the device's process does not answer"), "{error}");
    let error = error_chain(&Card::open(bus.clone(), &heap()).unwrap_err());
    assert!(error.contains("does not answer"), "{error}");
    assert!(!channel.restart());
    drop(channel);
    assert_eq!(card.quarantined(), 0);
    drop((card, bus));
    server.end();
}

#[test]
fn a_reset_in_mid_transfer() {
    let server = Server::new(1);
    let bus = server.connect();
    let card = Card::open(bus.clone(), &heap()).unwrap();
    let mut channel = card.queue(0).unwrap();
    let fill = |byte: u8, len: usize| {
        let buf = heap().allocate(len).unwrap().share();
        buf.as_volatile_slice().fill(byte);
        let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
        let (at, via) = (DeviceAddr::Card(CardAddr::new(0)), via);
        Operation::write((buf.into_slice(), via), at)
    };
    let mut all = 0;
    for round in 0..20 {
        // So much that the reset comes in its middle.
        let tickets: Vec<_> = (0..4).map(|_| channel.submit(fill(round, 8 << 20)).unwrap()).collect();
        let mut done = Vec::new();
        channel.poll(&mut done);
        match round % 2 {
            0 => bus.reset().unwrap(),
            // As a guest's kernel does it.
            _ => bus.write_region(7, 0x54, &[1]).unwrap(),
        }
        // After the answer the card touches nothing; what had not ended is told so.
        done.extend(drain(&mut channel, LONG));
        assert_eq!(done.len(), tickets.len());
        let stopped = done.iter().filter(|c| matches!(c.result, Err(OpError::Stopped(_)))).count();
        assert!(done.iter().filter(|c| c.result.is_ok()).count() + stopped == 4, "round {round}: {:?}", done[0].result);
        all += stopped;
        drop((done, channel));
        channel = card.queue(0).unwrap();
        run(&mut channel, fill(0xc0 | round, 1 << 20), LONG).unwrap();
        let mut there = vec![0; 1 << 20];
        bus.read_region(2, 0, &mut there).unwrap();
        assert!(there.iter().all(|byte| *byte == 0xc0 | round), "the card works again");
    }
    println!("{all} of 80 transfers were stopped by a reset");
    assert!(all > 0, "no reset came in the middle of anything");
    drop((channel, card));
    assert_eq!(bus.mapped_bytes(), 0);
    drop(bus);
    assert_eq!(server.end(), [true]);
}

/// Registers, configuration space and interrupt table filled with noise, among it what makes channels run on rings of
/// noise.
#[test]
fn noise_in_every_region_ends_nothing() {
    let server = Server::new(1);
    let bus = server.connect();
    let buf = heap().allocate(MIB as usize).unwrap().share();
    let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
    let ring = via.mapping().span().first().bits();
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 24) % below
    };
    let (mut written, mut ran, mut resets) = (0, 0, 0);
    for round in 0..8000 {
        if round % 500 == 0 {
            let noise: Vec<u8> = (0..MIB).map(|_| random(256) as u8).collect();
            buf.as_volatile_slice().write(&noise);
        }
        let (region, len) = [(0, 0x2000), (0, 0x200), (4, 4096), (7, 256), (2, 32 * MIB)][random(5) as usize];
        let at = random(len / 4) * 4;
        let value = match random(5) {
            0 => random(1 << 32) as u32,
            1 => (ring + random(200) * 4096) as u32,
            2 => (ring >> 32) as u32,
            _ => random(8) as u32,
        };
        written += u32::from(bus.write_region(region, at, &value.to_le_bytes()).is_ok());
        let mut bytes = vec![0; random(16) as usize];
        let _ = bus.read_region(region, at, &mut bytes);
        match random(400) {
            0 => resets += u32::from(bus.reset().is_ok()),
            1 => resets += u32::from(bus.write_region(7, 0x54, &[1]).is_ok()),
            // Channel 0 on a ring of noise, with a doorbell: what a run of chance seldom finds.
            2..40 => {
                bus.write_region(7, 4, &[6]).unwrap();
                let channel = regs::CHANNEL_BASE;
                for (register, value) in [
                    (regs::CH_CONTROL, 0),
                    (regs::CH_RING, ring as u32),
                    (regs::CH_RING + 4, (ring >> 32) as u32),
                    (regs::CH_COMPLETIONS, ring as u32 + 0x8_0000),
                    (regs::CH_COMPLETIONS + 4, (ring >> 32) as u32),
                    (regs::CH_RING_LOG2, 6),
                    (regs::CH_INTERRUPT, 1),
                    (regs::CH_CONTROL, 1),
                    (regs::CH_DOORBELL, value),
                ] {
                    bus.write32(0, channel + register, value).unwrap();
                }
                ran += 1;
            }
            _ => {}
        }
    }
    assert!(written > 4000 && ran > 100 && resets > 5, "{written} {ran} {resets}");
    bus.write_region(7, 4, &[6]).unwrap();
    bus.reset().unwrap();
    let card = Card::open(bus.clone(), &heap()).unwrap();
    let at = DeviceAddr::Card(CardAddr::new(0));
    run(&mut card.queue(0).unwrap(), Operation::write((buf.into_slice(), via.clone()), at), LONG).unwrap();
    drop((card, via, bus));
    assert_eq!(server.end(), [true]);
}

#[test]
fn a_path_that_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("card");
    let bind = || CardServer::bind(&path, CONFIG);
    let first = bind().unwrap();
    assert!(matches!(bind(), Err(CardServerError::Listen { .. })), "somebody listens");
    let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600, "ours alone");
    drop(first);
    assert!(!path.exists());
    // Left behind by one that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    drop(bind().unwrap());
    std::fs::write(&path, "a file").unwrap();
    assert!(bind().is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    let none = CardServer::bind(&dir.path().join("x"), CardConfig { channels: 0, ..CONFIG });
    assert!(matches!(none, Err(CardServerError::Card(_))));
}

#[test]
fn the_socket_of_another_server_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("card");
    let first = CardServer::bind(&path, CONFIG).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = CardServer::bind(&path, CONFIG).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}
