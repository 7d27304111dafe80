//! The stub of the driver in a guest of scripts/vm: io_uring commands, direct I/O into the driver's buffers, closing
//! and unloading while transfers are in flight. Each test is skipped where the stub is not loaded.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_device::conformance::suite;
use dmalane_dma::quarantined_bytes;
use dmalane_dma::{BufferSlice, Heap, error_chain};
use dmalane_queue::{DeviceAddr, OpError, Operation, Registered, StopReason, drain, run};
use dmalane_slash::{DDR, HBM, Node, SlashDevice, SlashOptions};
use rustix::fs::{Mode, OFlags};

const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
const STUB: &str = "/sys/module/slash_stub/parameters";

/// True, with the reason printed, where the stub is not loaded.
fn skipped() -> bool {
    let skipped = !Path::new(STUB).exists();
    if skipped {
        println!("SKIPPED: the module slash_stub is not loaded (scripts/vm run)");
    }
    skipped
}

fn number(parameter: &str) -> i64 {
    fs::read_to_string(Path::new(STUB).join(parameter)).unwrap().trim().parse().unwrap()
}

fn set(parameter: &str, value: &str) {
    fs::write(Path::new(STUB).join(parameter), value).unwrap();
}

fn open() -> SlashDevice {
    SlashDevice::open(Node(0), SlashOptions::default()).unwrap()
}

/// Waits until the driver has nothing any more: io_uring closes files after the process's own close.
fn assert_nothing_left() {
    for _ in 0..500 {
        if (number("buffers"), number("pairs")) == (0, 0) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("{} buffers and {} queue pairs are left", number("buffers"), number("pairs"));
}

fn card(at: u64) -> DeviceAddr {
    DeviceAddr::Card(CardAddr::new(at))
}

/// A registered buffer of these bytes.
fn host(device: &SlashDevice, bytes: &[u8]) -> (BufferSlice, Registered) {
    let registrar = device.registrar();
    let mut buf = registrar.heap(None).allocate(bytes.len()).unwrap();
    buf[..bytes.len()].copy_from_slice(bytes);
    let buf = buf.share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    (buf.into_slice().split_at(bytes.len()).unwrap().0, via)
}

fn noise(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8 ^ seed).collect()
}

#[test]
fn the_stub_takes_the_suite_of_devices() {
    if skipped() {
        return;
    }
    let (calls, commands) = (number("ioctls"), number("commands"));
    suite(|| Box::new(open()));
    let (calls, commands) = (number("ioctls") - calls, number("commands") - commands);
    println!("{calls} ioctls, {commands} io_uring commands");
    // A kernel from 6.18 on has another completion of commands, with which neither SLASH nor the stub is built.
    let notes = open().info().notes.join("\n");
    match notes.contains("4 io_uring commands in flight") {
        true => assert!(commands > 10 && calls == 0, "{notes}"),
        false => assert!(calls > 10 && commands == 0, "{notes}"),
    }
    assert_nothing_left();
}

#[test]
fn a_file_is_read_directly_into_a_buffer_of_the_driver() {
    if skipped() {
        return;
    }
    let path = ["/dev/vda", "/dev/sda"].into_iter().find(|disk| Path::new(disk).exists());
    let Some(path) = path else { return println!("SKIPPED: no disk") };
    let disk = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()).unwrap();
    let cached = File::open(path).unwrap();
    let mut device = open();
    let mut queue = device.take_queues().remove(0);
    let mut expected = vec![0; MIB];
    cached.read_exact_at(&mut expected, 0).unwrap();
    let registrar = device.registrar();
    let mut buf = registrar.heap(None).allocate(MIB).unwrap();
    let read = rustix::io::pread(&disk, &mut buf[..MIB], 0);
    assert_eq!(read, Ok(MIB), "the kernel takes the driver's pages for direct I/O");
    let buf = buf.share();
    let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
    run(&mut *queue, Operation::write((buf.into_slice(), via), card(DDR.0)), LONG).unwrap();
    let back = run(&mut *queue, Operation::read(host(&device, &noise(9, MIB)), card(DDR.0)), LONG).unwrap();
    let mut there = vec![0; MIB];
    back.into_slice().unwrap().read(0, &mut there).unwrap();
    assert!(there == expected, "from the disk over the card");
}

#[test]
fn closing_in_flight_frees_nothing_early_and_leaves_nothing() {
    if skipped() {
        return;
    }
    set("delay_ms", "200");
    for queue_first in [false, true] {
        let mut device = open();
        let mut queues = device.take_queues();
        for (i, queue) in queues.iter_mut().enumerate() {
            for n in 0..6 {
                let at = HBM.0 + ((i * 8 + n) * 2 * MIB) as u64;
                let _ticket = queue.submit(Operation::write(host(&device, &vec![n as u8; MIB]), card(at))).unwrap();
            }
            queue.flush();
        }
        assert!(number("buffers") >= 12);
        match queue_first {
            true => drop((queues, device)),
            false => drop((device, queues)),
        }
    }
    set("delay_ms", "0");
    assert_nothing_left();
    assert_eq!(quarantined_bytes(), 0);
}

#[test]
fn a_transfer_that_hangs_is_stopped_and_the_queue_works_again() {
    if skipped() {
        return;
    }
    let mut device = open();
    let mut queue = device.take_queues().remove(0);
    set("hang", "1");
    for n in 0..4 {
        let operation = Operation::write(host(&device, &noise(n, MIB)), card(DDR.0 + u64::from(n) * 8 * MIB as u64));
        let _ticket = queue.submit(operation).unwrap();
    }
    let mut done = Vec::new();
    assert_eq!(queue.wait(&mut done, Duration::from_millis(300)), 0);
    queue.stop(StopReason::Timeout(Duration::from_millis(300)));
    done.append(&mut drain(&mut *queue, LONG));
    set("hang", "0");
    assert_eq!(done.len(), 4);
    assert!(done.iter().all(|c| matches!(c.result, Err(OpError::Stopped(StopReason::Timeout(_))))), "{done:?}");
    drop(done);
    for _ in 0..500 {
        if queue.restart() {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    let bytes = noise(7, MIB + 5);
    run(&mut *queue, Operation::write(host(&device, &bytes), card(DDR.0 + 3)), LONG).unwrap();
    let back = run(&mut *queue, Operation::read(host(&device, &vec![0; bytes.len()]), card(DDR.0 + 3)), LONG).unwrap();
    let mut there = vec![0; bytes.len()];
    back.into_slice().unwrap().read(0, &mut there).unwrap();
    assert!(there == bytes);
    drop((queue, device));
    assert_nothing_left();
}

#[test]
fn the_module_stays_while_it_is_used_and_goes_afterwards() {
    if skipped() {
        return;
    }
    let rmmod = || Command::new("rmmod").arg("slash_stub").output().unwrap();
    let device = open();
    let registrar = device.registrar();
    let buffer = registrar.heap(None).allocate(4096).unwrap();
    assert!(!rmmod().status.success(), "the node, the queue pairs and the buffers are open");
    drop((device, registrar));
    assert!(!rmmod().status.success(), "a buffer is mapped");
    drop(buffer);
    assert_nothing_left();
    let removed = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(20));
        rmmod().status.success()
    });
    assert!(removed, "nothing uses it any more");
    let error = error_chain(&SlashDevice::open(Node(0), SlashOptions::default()).unwrap_err());
    assert!(error.contains("modprobe slash"), "{error}");
    let loaded = Command::new("insmod").arg("/modules/slash_stub.ko").status().unwrap();
    assert!(loaded.success());
    drop(open());
}
