//! A card that vrtd lends: its memory, and a daemon that lies.

use std::sync::{Arc, Mutex};

use dmalane_addr::{Access, CardAddr, SgTable};
use dmalane_device::conformance::suite;
use dmalane_device::{Device, MemoryError, Placement};
use dmalane_dma::error_chain;
use dmalane_queue::{DeviceAddr, OpError, Operation, Registered, RunError, run};
use dmalane_slash::model::{DriverModel, Version, Vrtd};
use dmalane_slash::{DDR, Error, HBM, SlashDevice, SlashOptions, VrtdName};

use crate::suites::LONG;

const MIB: u64 = 1 << 20;
const REGION: u64 = 512 * MIB;

fn daemon() -> (DriverModel, Vrtd) {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let vrtd = Vrtd::new(&model).unwrap();
    (model, vrtd)
}

fn open(model: &DriverModel, vrtd: &Vrtd) -> Result<SlashDevice, Error> {
    SlashDevice::from_vrtd_socket(vrtd.connect().unwrap(), 0, model.kernel(), SlashOptions::default())
}

#[test]
fn a_lent_card_takes_the_suite_of_devices() {
    let (model, vrtd) = daemon();
    suite(|| Box::new(open(&model, &vrtd).unwrap()));
    assert_eq!((model.violations(), model.pairs(), model.counts().buffers.0), (Vec::new(), 0, 0));
    assert!(vrtd.lent().is_empty(), "all memory was given back");
}

/// The one range of a buffer.
fn range(table: &SgTable<CardAddr>) -> (u64, u64) {
    let all: Vec<_> = table.segments().map(|s| (s.addr.bits(), s.len)).collect();
    assert_eq!(all.len(), 1);
    all[0]
}

#[test]
fn memory_comes_in_pieces_where_there_is_some() {
    let (model, vrtd) = daemon();
    let device = open(&model, &vrtd).unwrap();
    let mut memory = device.memory();
    let border = HBM.0 + HBM.1 / 2;
    // Longer than a block can be.
    let ddr = memory.allocate(3 * REGION + 1, &Placement::DDR).unwrap();
    assert_eq!(range(&ddr).0, DDR.0);
    assert_eq!(vrtd.lent().iter().map(|l| l.1).sum::<u64>(), 3 * REGION + 64 * MIB);
    let hbm = memory.allocate(2 * REGION, &Placement::HBM).unwrap();
    assert_eq!(range(&hbm), (border - REGION, 2 * REGION), "half on either side");
    memory.free(hbm.segments()).unwrap();
    // Others have the regions at the border, and half of each region of the second half.
    vrtd.occupy(border - 64 * MIB, 128 * MIB);
    (0..32).for_each(|i| vrtd.occupy(border + i * REGION + REGION / 2, REGION / 2));
    let (at, len) = range(&memory.allocate(100 * MIB, &Placement::HBM).unwrap());
    assert!(at + len <= border - 64 * MIB || at >= border + 64 * MIB, "{at:#x}");
    let (at, _) = range(&memory.allocate(200 * MIB, &"hbm1".parse().unwrap()).unwrap());
    assert!(at > border && (at - border) % REGION + 200 * MIB <= REGION / 2, "a smaller block");
    let none = memory.allocate(300 * MIB, &"hbm1".parse().unwrap()).unwrap_err();
    assert!(matches!(none, MemoryError::Full { .. }), "{none}");
    // Another client gets what is left, and neither has what is the other's.
    let second = open(&model, &vrtd).unwrap();
    let mut theirs = second.memory();
    let (at, _) = range(&theirs.allocate(64 * MIB, &Placement::DDR).unwrap());
    assert!(at >= DDR.0 + 3 * REGION + 64 * MIB);
    // One that is gone leaves nothing.
    let before = vrtd.lent().len();
    assert!(before > 4);
    drop((memory, device));
    assert_eq!(vrtd.lent().len(), 1);
}

#[test]
fn only_granted_memory_can_be_used() {
    let (model, vrtd) = daemon();
    let mut device = open(&model, &vrtd).unwrap();
    let (mut memory, registrar) = (device.memory(), device.registrar());
    let mut queue = device.take_queues().remove(0);
    let mut write = |at: u64| {
        let buf = registrar.heap(None).allocate(8192).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        let operation = Operation::write((buf.into_slice(), via), DeviceAddr::Card(CardAddr::new(at)));
        match run(&mut *queue, operation, LONG) {
            Ok(_) => Ok(()),
            Err(RunError { error: OpError::NoCardMemory(at), .. }) => Err(at.bits()),
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(write(DDR.0), Err(DDR.0), "nothing is granted yet");
    let buffer = memory.allocate(REGION + 64 * MIB, &Placement::DDR).unwrap();
    let (at, len) = range(&buffer);
    write(at).unwrap();
    write(at + REGION - 4096).unwrap();
    assert_eq!(write(at + len - 4096), Err(at + len), "the second page is not granted");
    memory.free(buffer.segments()).unwrap();
    assert_eq!(write(at), Err(at), "it was given back");
}

#[test]
fn denials_name_the_permission() {
    for (permission, says) in
        [("query", "its role needs `query-devices = yes`"), ("qdma", "its role needs `qdma = yes` (/etc/vrt/vrtd.conf")]
    {
        let (model, vrtd) = daemon();
        vrtd.deny(permission);
        let error = error_chain(&open(&model, &vrtd).unwrap_err());
        assert!(error.contains(says), "{error}");
    }
    let (model, vrtd) = daemon();
    vrtd.deny("buffer");
    let error = error_chain(&open(&model, &vrtd).unwrap().memory().allocate(1, &Placement::DDR).unwrap_err());
    assert!(error.contains("cannot allocate") && error.contains("its role needs `buffer = yes`"), "{error}");
    let other = SlashDevice::from_vrtd_socket(vrtd.connect().unwrap(), 7, model.kernel(), SlashOptions::default());
    assert!(error_chain(&other.unwrap_err()).contains("no such card"));
}

/// Changes of an answer.
type Change = fn(&mut Vec<u8>);

fn set(message: &mut [u8], at: usize, value: u64) {
    message[at..at + 8].copy_from_slice(&value.to_ne_bytes());
}

#[test]
fn answers_that_cannot_be_are_errors() {
    let changes: [(&str, Change); 9] = [
        ("empty", |m| m.clear()),
        ("half a header", |m| m.truncate(5)),
        ("shorter than it says", |m| m.truncate(m.len() - 1)),
        ("longer than it says", |m| m.push(0)),
        ("too long", |m| m.resize(6000, 0)),
        ("another number", |m| m[4] ^= 1),
        ("another code", |m| m[2] = 77),
        ("an unknown request", |m| m[2] = 3),
        ("an empty body", |m| {
            m.truncate(8);
            m[..2].fill(0);
        }),
    ];
    for opcode in [4, 5, 6, 7] {
        for (what, change) in changes {
            let (model, vrtd) = daemon();
            vrtd.tamper(move |asked, message, _| {
                if asked == opcode {
                    change(message)
                }
            });
            let error = error_chain(&open(&model, &vrtd).expect_err(what));
            assert!(error.contains("vrtd"), "{what} to {opcode}: {error}");
            assert_eq!(model.counts().buffers.0, 0);
        }
    }
    // Files where none belong, none where one does, and too many.
    for opcode in [4, 5, 6, 7, 10] {
        for files in [0, 1, 2, 6] {
            let (model, vrtd) = daemon();
            vrtd.tamper(move |asked, _, sent| {
                if asked == opcode {
                    let (file, _) = std::os::unix::net::UnixStream::pair().unwrap();
                    sent.clear();
                    sent.extend((0..files).map(|_| file.try_clone().unwrap().into()));
                }
            });
            let opened = open(&model, &vrtd);
            if files == usize::from(matches!(opcode, 7 | 10)) {
                assert!(opened.is_ok() == (opcode != 7), "another file is no queue pair");
            } else if opcode == 10 {
                assert!(opened.unwrap().memory().allocate(1, &Placement::DDR).is_err());
            } else {
                assert!(error_chain(&opened.unwrap_err()).contains("vrtd"));
            }
        }
    }
}

#[test]
fn memory_that_cannot_be_is_refused() {
    let changes: [(&str, Change); 8] = [
        ("elsewhere", |m| set(m, 16, 0x1000)),
        ("in another memory", |m| set(m, 16, HBM.0)),
        ("behind the end", |m| set(m, 16, DDR.0 + DDR.1 - 4096)),
        ("wraps", |m| set(m, 16, u64::MAX - 4095)),
        ("not a page", |m| set(m, 16, DDR.0 + 1)),
        ("nothing", |m| set(m, 8, 0)),
        ("less than was asked for", |m| set(m, 8, 4096)),
        ("all", |m| set(m, 8, u64::MAX)),
    ];
    for (what, change) in changes {
        let (model, vrtd) = daemon();
        vrtd.tamper(move |asked, message, _| {
            if asked == 10 {
                change(message)
            }
        });
        let mut device = open(&model, &vrtd).unwrap();
        let error = device.memory().allocate(MIB, &Placement::DDR).unwrap_err();
        assert!(error_chain(&error).contains("BUFFER_OPEN answered with"), "{what}: {error}");
        drop(device.take_queues());
    }
    // The same block twice, while the first is in use.
    let (model, vrtd) = daemon();
    let first = Arc::new(Mutex::new(None));
    vrtd.tamper(move |asked, message, _| {
        if asked == 10 {
            let kept = first.lock().unwrap().get_or_insert_with(|| message[8..].to_vec()).clone();
            message.truncate(8);
            message.extend(kept);
        }
    });
    let device = open(&model, &vrtd).unwrap();
    let mut memory = device.memory();
    let _buffer = memory.allocate(64 * MIB, &Placement::DDR).unwrap();
    for memory in [&mut memory, &mut device.memory()] {
        let error = error_chain(&memory.allocate(64 * MIB, &Placement::DDR).unwrap_err());
        assert!(error.contains("not memory of ddr that is free"), "{error}");
    }
}

#[test]
fn after_an_answer_that_cannot_be_the_connection_is_not_used() {
    let (model, vrtd) = daemon();
    let device = open(&model, &vrtd).unwrap();
    vrtd.tamper(|_, message, _| message[4] ^= 1);
    assert!(device.memory().allocate(1, &Placement::DDR).is_err());
    vrtd.tamper(|_, _, _| {});
    let error = error_chain(&device.memory().allocate(1, &Placement::DDR).unwrap_err());
    assert!(error.contains("has failed before"), "{error}");
}

#[test]
fn names_have_a_socket_and_a_number() {
    let parsed = |text: &str| text.parse::<VrtdName>().map(|n| n.to_string());
    assert_eq!(parsed("").unwrap(), "/run/vrtd.sock#0");
    assert_eq!(parsed("#3").unwrap(), "/run/vrtd.sock#3");
    assert_eq!(parsed("/tmp/v#1.sock#2").unwrap(), "/tmp/v#1.sock#2");
    for wrong in ["#", "#x", "/s#-1", "/s#+1", "/s#4294967296"] {
        assert!(parsed(wrong).is_err(), "{wrong}");
    }
    let name: VrtdName = "/nowhere/vrtd.sock".parse().unwrap();
    let error = error_chain(&SlashDevice::open_via_vrtd(&name, SlashOptions::default()).unwrap_err());
    assert!(error.contains("systemctl enable --now vrtd.socket"), "{error}");
}
