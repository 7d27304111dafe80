//! Files as devices: the conformance suite over every kind of file, and what goes wrong.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dmalane_addr::{Access, CardAddr, DeviceVa, FileOffset};
use dmalane_device::Device as _;
use dmalane_dma::{AnonHeap, BufferSlice, Heap, error_chain, quarantined_bytes};
use dmalane_file::{FileDevice, FileDeviceError, FileDeviceOptions, FileDevicePaths, FileDeviceQueue};
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Direction, HostSlice, OpError, Operation, Queue, Refusal,
    Registered, conformance,
};
use tempfile::NamedTempFile;

/// Not a multiple of any block.
const LEN: u64 = (1 << 20) + 777;
const DISK: &str = env!("CARGO_TARGET_TMPDIR");
const LONG: Duration = Duration::from_secs(60);

fn paths(path: &Path) -> FileDevicePaths {
    FileDevicePaths { h2c: path.to_owned(), c2h: path.to_owned() }
}

/// A device, and the file behind it.
struct Fixture {
    device: FileDevice,
    file: File,
    len: u64,
    align: usize,
    /// Buffers are registered.
    registers: bool,
}

impl Fixture {
    fn new(path: &Path, len: u64, options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
        let device = FileDevice::open(paths(path), options)?;
        // The kernel shows a block device that is taken exclusively to those who do not ask for that.
        let file = File::options().read(true).write(true).open(path).unwrap();
        Ok(Self { align: device.alignment(), device, file, len, registers: true })
    }

    fn buffer(&mut self, len: usize) -> (BufferSlice, Registered) {
        let buf = AnonHeap::new().allocate(len).unwrap().share();
        let via = Registered::new(&*self.device.registrar(), &buf, Access::RW).unwrap();
        (buf.into_slice().split_off_front(len).unwrap(), via)
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn copy(&mut self, direction: Direction, bytes: &[u8], at: u64) -> Operation {
        let (mut part, via) = self.buffer(bytes.len());
        part.write(0, bytes).unwrap();
        Operation::copy(direction, (part, via), DeviceAddr::Card(CardAddr::new(at)))
    }
}

impl conformance::Fixture for Fixture {
    type Queue = FileDeviceQueue;

    fn queue(&mut self) -> FileDeviceQueue {
        self.device.queue().unwrap()
    }

    fn target_len(&self) -> u64 {
        self.len
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(offset))
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let host = self.buffer(len);
        if self.registers { host.into() } else { host.0.into() }
    }

    fn peek(&mut self) -> Vec<u8> {
        self.read(0, self.len as usize)
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.file.write_all_at(bytes, 0).unwrap();
    }

    fn align(&self) -> usize {
        self.align
    }
}

fn drain(queue: &mut FileDeviceQueue) -> Vec<Completion> {
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        assert!(queue.wait(&mut ended, LONG) > 0, "it ends");
    }
    ended
}

fn options() -> FileDeviceOptions {
    FileDeviceOptions { depth: 16, block: 64 << 10, ..FileDeviceOptions::default() }
}

/// The suite over a file, with registrations and without.
fn suites(path: &Path, len: u64, direct: bool) {
    let mut fixture = match Fixture::new(path, len, FileDeviceOptions { direct, ..options() }) {
        Ok(fixture) => fixture,
        Err(e @ FileDeviceError::NoDirect { .. }) => return println!("SKIPPED: {e}"),
        Err(e) => panic!("{e}"),
    };
    for registers in [true, false] {
        fixture.registers = registers;
        conformance::suite(&mut fixture);
    }
    assert_eq!(quarantined_bytes(), 0);
}

fn file_in(dir: &str, len: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in(dir).unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

fn memfd(len: u64) -> (OwnedFd, PathBuf) {
    use std::os::fd::AsRawFd;
    let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    (fd, path)
}

#[test]
fn a_file_on_disk_takes_the_suite() {
    let file = file_in(DISK, LEN);
    suites(file.path(), LEN, false);
    assert_eq!(file.as_file().metadata().unwrap().len(), LEN, "it did not grow");
}

#[test]
fn direct_io_takes_the_suite_in_whole_blocks() {
    let file = file_in(DISK, 1 << 20);
    suites(file.path(), 1 << 20, true);
}

#[test]
fn a_memfd_takes_the_suite() {
    let (_fd, path) = memfd(LEN);
    suites(&path, LEN, false);
}

#[test]
fn shared_memory_takes_the_suite() {
    match Path::new("/dev/shm").exists() {
        true => suites(file_in("/dev/shm", LEN).path(), LEN, false),
        false => println!("SKIPPED: no /dev/shm"),
    }
}

/// A loop device over a file, while it lives.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Result<Self, String> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().map_err(|e| e.to_string())?;
        match made.status.success() {
            true => Ok(Self(String::from_utf8_lossy(&made.stdout).trim().into())),
            false => Err(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_block_device_takes_the_suite_buffered_and_direct() {
    let len = 2 << 20;
    let file = file_in(DISK, len);
    let device = match Loop::new(file.path()) {
        Ok(device) => device,
        Err(e) => return println!("SKIPPED: no loop device: {e}"),
    };
    suites(&device.0, len, false);
    suites(&device.0, len, true);
    let first = FileDevice::open(paths(&device.0), FileDeviceOptions::default()).unwrap();
    assert_eq!(first.regions()[0].span.len(), len);
    let second = FileDevice::open(paths(&device.0), FileDeviceOptions::default());
    assert!(matches!(second, Err(FileDeviceError::InUse(_))), "{second:?}");
    drop(first);
}

#[test]
fn what_has_no_addresses_or_cannot_be_written_is_refused() {
    let dir = tempfile::tempdir_in(DISK).unwrap();
    let error = |path: &Path| error_chain(&FileDevice::open(paths(path), FileDeviceOptions::default()).unwrap_err());
    assert!(error(dir.path()).ends_with("is a directory, which has no addresses"));
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(error(&fifo).ends_with("is a FIFO, which has no addresses"), "and nobody waits for its other end");
    let missing = error(&dir.path().join("missing"));
    assert!(missing.contains("cannot open") && missing.contains("No such file"), "{missing}");
    // Read only for everybody, root too.
    let fd = rustix::fs::memfd_create("sealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, LEN).unwrap();
    rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::WRITE).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let refused = FileDevice::open(paths(Path::new(&path)), FileDeviceOptions::default());
    match refused {
        // A kernel that opens it for writing fails the writes.
        Ok(device) => {
            let mut queue = device.queue().unwrap();
            let buf = AnonHeap::new().allocate(4096).unwrap().share();
            let via = Registered::new(&*device.registrar(), &buf, Access::RW).unwrap();
            let at = DeviceAddr::Card(CardAddr::new(8192));
            let _ticket = queue.submit(Operation::copy(Direction::FromHost, (buf.into_slice(), via), at)).unwrap();
            let end = drain(&mut queue).remove(0);
            assert_eq!(end.result, Err(OpError::Io { at: FileOffset::new(8192), errno: 1 }));
        }
        Err(e) => assert!(matches!(e, FileDeviceError::Open { .. }), "{e}"),
    }
}

#[test]
fn two_files_are_a_device_too() {
    let (up, down) = (file_in(DISK, 1 << 20), file_in(DISK, 1 << 19));
    let both = FileDevicePaths { h2c: up.path().into(), c2h: down.path().into() };
    let device = FileDevice::open(both, FileDeviceOptions::default()).unwrap();
    assert_eq!(device.regions()[0].span.len(), 1 << 19, "what both have");
}

#[test]
fn operations_on_the_same_bytes_wait_for_each_other() {
    let (_fd, path) = memfd(LEN);
    let mut fixture = Fixture::new(&path, LEN, options()).unwrap();
    let mut queue = fixture.device.queue().unwrap();
    for round in 0..50u8 {
        // Written twice, read, written again: each sees what was before it.
        let [a, b, c] = [1, 2, 3].map(|n| vec![round.wrapping_mul(3).wrapping_add(n); 200_000]);
        let first = fixture.copy(Direction::FromHost, &a, 1000);
        let second = fixture.copy(Direction::FromHost, &b, 1000);
        let read = fixture.copy(Direction::ToHost, &a, 1000);
        let third = fixture.copy(Direction::FromHost, &c, 1000);
        for operation in [first, second, Operation::fence(), read, third] {
            let _ticket = queue.submit(operation).unwrap();
        }
        let ended = drain(&mut queue);
        assert!(ended.iter().all(|e| e.result == Ok(())) && ended.len() == 5);
        assert!(conformance::host_bytes(&ended[3].operation) == b);
        assert!(fixture.read(1000, 200_000) == c);
    }
}

#[test]
fn what_a_device_cannot_do_is_refused_or_fails() {
    let (_fd, path) = memfd(LEN);
    let mut fixture = Fixture::new(&path, LEN, options()).unwrap();
    let mut queue = fixture.device.queue().unwrap();
    let at = DeviceAddr::Card(CardAddr::new(0));
    for (operation, capability) in [
        (Operation::fill(at, 8, 1), Capabilities::FILL),
        (Operation::within(at, at, 8), Capabilities::WITHIN),
        (Operation::gather(Direction::ToHost, vec![], vec![]), Capabilities::GATHER),
    ] {
        assert_eq!(queue.submit(operation).unwrap_err().reason, Refusal::Unsupported(capability));
    }
    // A registration of another device.
    let other = Fixture::new(&path, LEN, options()).unwrap().copy(Direction::ToHost, &[0; 9], 0);
    assert_eq!(queue.submit(other).unwrap_err().reason, Refusal::NotRegistered);
    // Only to be read by the device.
    let buf = AnonHeap::new().allocate(4096).unwrap().share();
    let via = Registered::new(&*fixture.device.registrar(), &buf, Access::READ).unwrap();
    let down = Operation::copy(Direction::ToHost, (buf.into_slice(), via), at);
    assert_eq!(queue.submit(down).unwrap_err().reason, Refusal::NotPermitted);
    let top = fixture.copy(Direction::ToHost, &[0; 16], i64::MAX as u64 - 15);
    assert_eq!(queue.submit(top).unwrap_err().reason, Refusal::PastTheTop);
    // The end of the device, with its offset; and addresses that only an MMU knows.
    let past = fixture.copy(Direction::FromHost, &[1; 100], LEN - 60);
    let (part, via) = fixture.buffer(8);
    let virtually = Operation::copy(Direction::ToHost, (part, via), DeviceAddr::Va(DeviceVa::new(0)));
    for operation in [past, virtually] {
        let _ticket = queue.submit(operation).unwrap();
    }
    let ended = drain(&mut queue);
    let end = OpError::EndOfFile { at: FileOffset::new(LEN), missing: 40 };
    assert_eq!((&ended[0].result, ended[0].bytes), (&Err(end), 0));
    assert!(matches!(ended[1].result, Err(OpError::MmuFault(_))));
    assert!(fixture.read(0, LEN as usize).iter().all(|b| *b == 0));
    // Truncated behind its back: the end where it is now, and what was read until there.
    rustix::fs::ftruncate(&fixture.file, 500_000).unwrap();
    let read = fixture.copy(Direction::ToHost, &vec![9; 300_000], 400_000);
    let _ticket = queue.submit(read).unwrap();
    let end = drain(&mut queue).remove(0);
    assert_eq!(end.result, Err(OpError::EndOfFile { at: FileOffset::new(500_000), missing: 200_000 }));
    assert_eq!(end.bytes, 100_000);
}

#[test]
fn misaligned_direct_io_is_refused() {
    let file = file_in(DISK, 1 << 20);
    let mut fixture = match Fixture::new(file.path(), 1 << 20, FileDeviceOptions { direct: true, ..options() }) {
        Ok(fixture) => fixture,
        Err(e) => return println!("SKIPPED: {e}"),
    };
    let mut queue = fixture.device.queue().unwrap();
    let align = fixture.align as u64;
    for operation in [fixture.copy(Direction::ToHost, &[0; 4096], 1), fixture.copy(Direction::ToHost, &[0; 4095], 0)] {
        assert_eq!(queue.submit(operation).unwrap_err().reason, Refusal::Misaligned { align });
    }
}

#[test]
fn what_has_not_begun_is_taken_back() {
    let (_fd, path) = memfd(LEN);
    let mut fixture = Fixture::new(&path, LEN, options()).unwrap();
    let mut queue = fixture.device.queue().unwrap();
    let operations = [1u8, 2, 3].map(|n| fixture.copy(Direction::FromHost, &vec![n; 50_000], 0));
    let tickets = operations.map(|operation| queue.submit(operation).unwrap());
    let Cancelled::Removed(back) = queue.cancel(tickets[1]) else { panic!("it had not begun") };
    assert_eq!(conformance::host_bytes(&back), vec![2; 50_000]);
    assert!(matches!(queue.cancel(tickets[1]), Cancelled::Unknown));
    queue.flush();
    assert!(matches!(queue.cancel(tickets[0]), Cancelled::TooLate | Cancelled::Unknown));
    let ended = drain(&mut queue);
    assert_eq!(ended.iter().map(|e| e.ticket).collect::<Vec<_>>(), [tickets[0], tickets[2]]);
    assert_eq!(fixture.read(0, 50_000), vec![3; 50_000]);
}
