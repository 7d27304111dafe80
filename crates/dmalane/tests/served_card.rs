//! The served card in a guest, driven through VFIO and an emulated IOMMU; run by `scripts/vm vfio-user`, which says
//! what devices there are.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dmalane::addr::{Access, CardAddr};
use dmalane::card::{Card, CardQueue};
use dmalane::dma::{AnonHeap, Heap, SharedBuf};
use dmalane::queue::conformance::{Fixture, suite};
use dmalane::queue::{Completion, DeviceAddr, Direction, HostSlice, OpError, Operation, Queue, Registered, Work, run};
use dmalane::vfio::{BarAlignment, BarMap, Bdf, Error, VfioBus, VfioContainer};
use dmalane::{CARD_PCI_ID, PciCardError, error_chain, open_pci_card};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);
/// The program, and the real model file; scripts/vm puts them there.
const PROGRAM: &str = "/tests/dmalane";
const MODEL: &str = "/model.safetensors";

/// The function with this vendor and device number.
fn function(id: (u16, u16)) -> Bdf {
    let names = fs::read_dir("/sys/bus/pci/devices").unwrap().map(|entry| entry.unwrap().path());
    let number = |path: &Path, file| {
        let text = fs::read_to_string(path.join(file)).unwrap();
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap()
    };
    let mut found = names.filter(|path| (number(path, "vendor"), number(path, "device")) == id);
    found.next().expect("scripts/vm has this device").file_name().unwrap().to_str().unwrap().parse().unwrap()
}

fn card() -> (Arc<VfioBus>, Card<VfioBus>) {
    let bus = Arc::new(open_pci_card(&function(CARD_PCI_ID)).unwrap());
    let card = Card::open(bus.clone(), &AnonHeap::new()).unwrap();
    (bus, card)
}

fn transfer(bus: &VfioBus, buf: SharedBuf, direction: Direction, at: u64) -> Operation {
    let via = Registered::new(bus, &buf, Access::RW).unwrap();
    Operation::copy(direction, (buf.into_slice(), via), DeviceAddr::Card(CardAddr::new(at)))
}

fn filled(byte: u8, len: usize) -> SharedBuf {
    let buf = AnonHeap::new().allocate(len).unwrap().share();
    buf.as_volatile_slice().fill(byte);
    buf
}

struct Under {
    bus: Arc<VfioBus>,
    card: Card<VfioBus>,
    /// The target: card memory, as the guest has it mapped through BAR 2.
    window: BarMap,
    at: u64,
}

impl Fixture for Under {
    type Queue = CardQueue<VfioBus>;

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
        let buf = AnonHeap::new().allocate(len).unwrap().share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).unwrap();
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; MIB as usize];
        self.window.read(0, &mut bytes).unwrap();
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.window.write(0, bytes).unwrap();
    }

    fn rounds(&self) -> u64 {
        5
    }
}

#[test]
fn the_suite_that_every_queue_takes() {
    let (bus, card) = card();
    // The end of HBM, so that one byte more is one too many.
    let at = card.layout().hbm.last().bits() + 1 - MIB;
    let window = bus.device().map_bar(2, Some(at..at + MIB), BarAlignment::LargestPage).unwrap();
    let mut fixture = Under { bus: bus.clone(), card, window, at };
    suite(&mut fixture);
    drop(fixture);
    let container = bus.device().container();
    assert_eq!((container.mapped_bytes(), container.failed_unmaps()), (0, 0), "rings and buffers are unmapped");
}

#[test]
fn it_is_a_pci_device_with_large_mappable_memory() {
    let (bus, card) = card();
    assert_eq!(bus.interrupts(), (2, true), "MSI-X, one for each channel");
    let regions = bus.device().regions();
    let memory = &regions[2];
    println!("BAR 2: {} bytes, mappable {:x?}; {:?}", memory.len, memory.mappable, card.layout());
    let layout = card.layout();
    assert!(memory.len >= 64 << 30 && memory.len > layout.hbm.last().bits(), "large, and holds both memories");
    assert!(regions[1].len == 0 && regions[0].len >= 0x2000);
    // The card copies bytes that the processor writes through the BAR, and the other way round; untouched memory is
    // zeros.
    let ddr = layout.ddr.last().bits() + 1;
    for at in [ddr / 2 - MIB, ddr - MIB, layout.hbm_half.bits() - MIB] {
        let window = bus.device().map_bar(2, Some(at..at + MIB), BarAlignment::LargestPage).unwrap();
        let mut bytes = vec![1; 4096];
        window.read(MIB - 4096, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "{at:#x}");
        window.write(0, b"through the BAR").unwrap();
        let back = transfer(&bus, filled(0, 4096), Direction::ToHost, at);
        let back = run(&mut card.queue(0).unwrap(), back, LONG).unwrap();
        let mut got = [0; 15];
        back.into_slice().unwrap().as_volatile_slice().sub(0, 15).unwrap().read(&mut got);
        assert_eq!(&got, b"through the BAR");
        run(&mut card.queue(0).unwrap(), transfer(&bus, filled(0xa5, 4096), Direction::FromHost, at), LONG).unwrap();
        window.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0xa5), "{at:#x}");
    }
}

#[test]
fn reset_in_mid_transfer() {
    let (bus, card) = card();
    let (mut stopped, container) = (0, bus.device().container().clone());
    for round in 0..5 {
        let mut queue = card.queue(0).unwrap();
        // The card is faster than the guest: it has something to do first, for as long as the reset takes to come.
        let busy = (0..64).map(|_| Operation::fill(DeviceAddr::Card(CardAddr::new(0)), 64 << 20, round.into()));
        let copies = (0..3).map(|_| transfer(&bus, filled(round, 4 << 20), Direction::FromHost, 0));
        let operations: Vec<Operation> = busy.chain(copies).collect();
        let began = Instant::now();
        for operation in operations {
            let _ticket = queue.submit(operation).unwrap();
        }
        queue.flush();
        bus.device().reset().unwrap();
        // The kernel gives the configuration back as it was; the command register with it.
        bus.device().set_bus_master(true).unwrap();
        let mut done = Vec::new();
        while queue.in_flight() > 0 && began.elapsed() < LONG {
            queue.wait(&mut done, Duration::from_millis(100));
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert_eq!(done.len(), 67);
        assert!(done.iter().all(|e| matches!(e.result, Ok(()) | Err(OpError::Stopped(_)))), "{:?}", done[0].result);
        let is_stopped = |e: &&Completion| matches!((&e.operation.work, &e.result), (Work::Copy { .. }, Err(_)));
        stopped += done.iter().filter(is_stopped).count();
        drop((done, queue));
        let again = transfer(&bus, filled(0xc0 | round, 4096), Direction::FromHost, 0);
        run(&mut card.queue(0).unwrap(), again, LONG).unwrap();
        let window = bus.device().map_bar(2, Some(0..4096), BarAlignment::LargestPage).unwrap();
        let mut there = [0; 4096];
        window.read(0, &mut there).unwrap();
        assert_eq!(there, [0xc0 | round; 4096]);
    }
    println!("{stopped} of 15 transfers were stopped by the reset");
    assert!(stopped > 0, "no reset came in mid-transfer");
    drop(card);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps()), (0, 0));
}

#[test]
fn a_card_that_is_unbound_while_open_works_until_it_is_given_back() {
    let (bus, card) = card();
    let bdf = bus.bdf();
    let gone = Arc::new(AtomicBool::new(false));
    let unbound = gone.clone();
    let unbinder = std::thread::spawn(move || {
        fs::write("/sys/bus/pci/drivers/vfio-pci/unbind", bdf.to_string()).unwrap();
        unbound.store(true, Ordering::SeqCst);
    });
    std::thread::sleep(Duration::from_secs(1));
    assert!(!gone.load(Ordering::SeqCst), "the kernel waits");
    // Until it is given back, it works.
    run(&mut card.queue(0).unwrap(), transfer(&bus, filled(1, 4096), Direction::FromHost, 0), LONG).unwrap();
    drop((card, bus));
    unbinder.join().unwrap();
    assert!(matches!(open_pci_card(&bdf), Err(PciCardError::Vfio(Error::NotBound { driver: None, .. }))));
    let refused = load(&["-d", &format!("vfio:{bdf}"), "--sample", "1MiB"]);
    says(&refused, 1, &["is bound to no driver, not to vfio-pci", "driver_override"]);
    fs::write("/sys/bus/pci/drivers_probe", bdf.to_string()).unwrap();
    open_pci_card(&bdf).unwrap();
}

/// Runs `dmalane load`.
fn load(words: &[&str]) -> Output {
    Command::new(PROGRAM).arg("load").args(words).output().unwrap()
}

/// Prints what a command said, and looks for these words in it.
fn says(output: &Output, status: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert_eq!(output.status.code(), Some(status));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in it");
    }
}

/// The card by its name on the command line.
fn name() -> String {
    format!("vfio:{}", function(CARD_PCI_ID))
}

#[test]
fn the_real_file_is_loaded_and_verified() {
    if !Path::new(MODEL).exists() {
        return println!("SKIPPED: scripts/vm has no model file");
    }
    let began = Instant::now();
    says(
        &load(&["-d", &name(), MODEL, "--verify", "-v"]),
        0,
        &["Verified 104 tensors", "read back through the card's MMU"],
    );
    println!("{:?} in all", began.elapsed());
}

#[test]
fn a_sample_goes_to_each_memory_and_comes_back() {
    for placement in ["ddr", "hbm-half", "hbm"] {
        let words = ["-d", &name(), "--sample", "24MiB", "--placement", placement, "--verify", "--chunk", "4MiB"];
        says(&load(&words), 0, &["verified"]);
    }
}

#[test]
fn it_is_validated() {
    let words = ["validate", "-d", &name(), "-j", "2", "--buffer-size", "1MiB", "--iterations", "2"];
    says(&Command::new(PROGRAM).args(words).output().unwrap(), 0, &["HBM", "DDR"]);
}

#[test]
fn what_is_no_card_is_refused_with_what_helps() {
    // QEMU's edu, which is bound to vfio-pci too.
    let edu = function((0x1234, 0x11e8));
    says(&load(&["-d", &format!("vfio:{edu}"), "--sample", "1MiB"]), 1, &["is not a dmalane card", "1234:11e8"]);
    says(&load(&["-d", "vfio:0000:00:1f.0", "--sample", "1MiB"]), 1, &["not to vfio-pci", "drivers_probe"]);
    says(&load(&["-d", "vfio:0000:42:00.0", "--sample", "1MiB"]), 1, &["there is no PCI device 0000:42:00.0"]);
    says(&load(&["-d", "vfio:nonsense", "--sample", "1MiB"]), 2, &["vfio:"]);
    // Somebody has it.
    let held = VfioContainer::new().open(&function(CARD_PCI_ID)).unwrap();
    says(&load(&["-d", &name(), "--sample", "1MiB"]), 1, &["is in use"]);
    drop(held);
    use std::os::unix::process::CommandExt;
    let other = Command::new(PROGRAM).args(["load", "-d", &name(), "--sample", "1MiB"]).uid(1000).gid(1000).output();
    says(&other.unwrap(), 1, &["no permission to open /dev/vfio", "chown"]);
}

/// Ends the card's process: nothing can come after it. scripts/vm kills it when it reads the line.
mod last {
    use super::*;

    /// QEMU 11.1 itself ends when it must map memory for a device whose process is gone, or when that dies under a
    /// message. So here all is mapped before, and for a while no register is touched; `crates/cli/tests/it/card.rs`
    /// kills the card in the midst of a load.
    #[test]
    fn a_card_whose_process_is_killed_is_an_error_and_no_hang() {
        let (bus, card) = card();
        let mut channel = card.queue(0).unwrap();
        run(&mut channel, transfer(&bus, filled(1, 4096), Direction::FromHost, 0), LONG).unwrap();
        let next = transfer(&bus, filled(2, 4096), Direction::FromHost, 0);
        // Not by a macro: the harness would keep it.
        std::io::stderr().write_all(b"\nVM kill card\n").unwrap();
        std::thread::sleep(Duration::from_secs(5));
        let began = Instant::now();
        let error = error_chain(&run(&mut channel, next, LONG).unwrap_err());
        println!("after {:?}: {error}", began.elapsed());
        assert!(error.contains("read as ones"), "{error}");
        drop(channel);
        assert_eq!(card.quarantined(), 1, "memory that it may still write to is not freed");
        println!("given up after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(15));
    }
}
