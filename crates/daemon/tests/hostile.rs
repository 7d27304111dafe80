//! A hostile client: only that client gets errors, and the data of others stays intact.
//!
//! It builds its messages itself from the format's description, without the client of this crate.

mod daemon;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::{Daemon, memfd_mappings, one, open_files, settles_at};
use dmalane_addr::Access;
use dmalane_card::Card;
use dmalane_daemon::wire::{
    ClientRequest, Code, FAILED, FailedAnswer, FunctionFiles, MAX_MESSAGE, MapSegment, MessageHeader, VERSION, failed,
};
use dmalane_daemon::{Client, ClientLimits, Config, can_watch_memory, status};
use dmalane_dma::{Heap, MemfdHeap, PageKind, SharedBuf, error_chain};
use dmalane_queue::conformance::Random;
use dmalane_queue::{DeviceAddr, Direction, Operation, Queue, Registered};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketType,
};
use zerocopy::FromBytes;

const LONG: Duration = Duration::from_secs(60);

/// A connection without the client library.
struct Raw {
    socket: OwnedFd,
    seqno: u64,
}

struct Reply {
    opcode: u32,
    seqno: u64,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Reply {
    fn code(&self) -> Option<Code> {
        let failed = FailedAnswer::ref_from_prefix(&self.body).ok().filter(|_| self.opcode == FAILED)?;
        Code::from_number(failed.0.code.get())
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.body[at..at + 8].try_into().unwrap())
    }
}

impl Raw {
    fn new(path: &Path) -> Self {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self { socket, seqno: 0 }
    }

    fn greeted(path: &Path) -> Self {
        let mut raw = Self::new(path);
        assert_eq!(raw.ask(&ClientRequest::Hello { min: 0, max: 9 }, &[]).code(), None);
        raw
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), rustix::io::Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
    }

    /// `None` at the end of the connection.
    fn receive(&self) -> Option<Reply> {
        let mut buffer = [0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags);
        let n = got.map_or(0, |got| got.bytes);
        let rights = control.drain().filter_map(|m| match m {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds = rights.flatten().collect();
        let (header, body) = MessageHeader::ref_from_prefix(&buffer[..n]).ok()?;
        assert_eq!(header.size.get() as usize, n);
        Some(Reply { opcode: header.opcode.get(), seqno: header.seqno.get(), body: body.to_vec(), fds })
    }

    fn ask(&mut self, request: &ClientRequest<'_>, fds: &[BorrowedFd<'_>]) -> Reply {
        self.seqno += 1;
        self.send(&request.encode(self.seqno), fds).unwrap();
        let said = self.receive().expect("an answer");
        assert_eq!(said.seqno, self.seqno);
        assert!(said.opcode == FAILED || said.opcode == request.opcode() | 1 << 31);
        said
    }

    /// Opens a function with new files for its queues.
    fn open(&mut self, ddr: u64, hbm: u64, queues: u32) -> (Reply, FunctionFiles) {
        let files = FunctionFiles::new().unwrap();
        (self.ask(&ClientRequest::Open { ddr, hbm, queues }, &files.fds()), files)
    }

    fn map(&mut self, access: u32, segments: &[MapSegment], fds: &[BorrowedFd<'_>]) -> Reply {
        self.ask(&ClientRequest::Map { access, segments }, fds)
    }

    /// Maps a whole memfd for the card.
    fn map_all(&mut self, buf: &SharedBuf, access: u32) -> u64 {
        let said = self.map(access, &[segment(0, 0, buf.len() as u64)], &[buf.export().unwrap()]);
        assert_eq!(said.code(), None);
        said.word(0)
    }

    fn write(&mut self, offset: u64, value: u32) {
        assert_eq!(self.ask(&ClientRequest::Write { bar: 0, offset, value }, &[]).code(), None);
    }

    fn read(&mut self, offset: u64) -> u32 {
        self.ask(&ClientRequest::Read { bar: 0, offset }, &[]).word(0) as u32
    }
}

fn segment(fd: u32, offset: u64, len: u64) -> MapSegment {
    MapSegment { fd: fd.into(), reserved: 0.into(), offset: offset.into(), len: len.into() }
}

fn memfd(len: usize) -> SharedBuf {
    MemfdHeap::starting_at(PageKind::Base).allocate(len).unwrap().share()
}

/// Another client, with known bytes on the card and in its memory.
struct Bystander {
    client: Client,
    card: Card<Client>,
    bytes: Vec<u8>,
    buf: Option<SharedBuf>,
    via: Registered,
    path: std::path::PathBuf,
}

impl Bystander {
    fn new(daemon: &Daemon) -> Self {
        let client = daemon.connect();
        let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
        let bytes = Random(99).bytes(256 << 10);
        let buf = client.buffer(bytes.len()).unwrap();
        buf.as_volatile_slice().write(&bytes);
        let via = Registered::new(&client, &buf, Access::RW).unwrap();
        let mut this = Self { client, card, bytes, buf: Some(buf), via, path: daemon.path.clone() };
        this.run(&[Direction::FromHost]);
        this
    }

    fn run(&mut self, directions: &[Direction]) {
        let mut queue = self.card.queue(0).unwrap();
        for (memory, &direction) in directions.iter().cycle().take(2 * directions.len()).enumerate() {
            let layout = self.card.layout();
            let at = if memory < directions.len() { layout.ddr.first() } else { layout.hbm.first() };
            let part = self.buf.take().unwrap().into_slice();
            let operation = Operation::copy(direction, (part, self.via.clone()), DeviceAddr::Card(at));
            let _ticket = queue.submit(operation).unwrap();
            let mut ended = Vec::new();
            while ended.is_empty() {
                queue.wait(&mut ended, LONG);
            }
            let end = ended.remove(0);
            assert_eq!(end.result, Ok(()));
            self.buf = end.operation.into_slice().unwrap().into_whole().ok();
        }
    }

    /// Checks that both memories of the card and the buffer still contain the bytes written.
    fn check(&mut self) {
        let mut got = vec![0; self.bytes.len()];
        self.buf.as_ref().unwrap().as_volatile_slice().read(&mut got);
        assert!(got == self.bytes, "the buffer");
        for _ in 0..2 {
            self.buf.as_ref().unwrap().as_volatile_slice().fill(0x55);
            self.run(&[Direction::ToHost]);
            self.buf.as_ref().unwrap().as_volatile_slice().read(&mut got);
            assert!(got == self.bytes, "the card");
        }
        let report = dmalane_daemon::status(&dmalane_daemon::ClientOptions::new(&self.path)).unwrap();
        let row = report.clients.iter().find(|c| c.client == self.client.number()).unwrap();
        assert_eq!(row.errors, 0, "errors are counted for the client that causes them");
    }
}

fn end(daemon: Daemon, bystander: Bystander, before: (usize, usize)) {
    drop(bystander);
    daemon.wait_until_empty();
    settles_at(before);
    daemon.end_empty();
}

#[test]
fn malformed_messages() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut random = Random(11);
    // Random bytes, before and after the hello message; and messages with random bytes in them.
    for round in 0..40u64 {
        let mut raw = if round % 2 == 0 { Raw::new(&daemon.path) } else { Raw::greeted(&daemon.path) };
        for i in 0..50u64 {
            let mut bytes = match i % 3 {
                0 => {
                    let len = random.below(4096) as usize + 1;
                    random.bytes(len)
                }
                1 => ClientRequest::Map { access: 3, segments: &[segment(0, 0, 4096); 5] }.encode(i),
                _ => ClientRequest::Write { bar: 0, offset: random.below(0x1300), value: random.below(4) as u32 }
                    .encode(i),
            };
            if i % 3 > 0 && random.below(2) == 0 {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.below(256) as u8;
            }
            let buf = memfd(4096);
            let fds = [buf.export().unwrap(), raw.socket.as_fd()];
            let fds = &fds[..random.below(3) as usize];
            match raw.send(&bytes, fds) {
                // Since Linux 6.16 descriptors are taken after the greeting only.
                Err(rustix::io::Errno::PERM) if round % 2 == 0 && !fds.is_empty() => raw.send(&bytes, &[]).unwrap(),
                sent => sent.unwrap(),
            }
            assert!(raw.receive().is_some(), "an answer to each");
        }
        if round % 2 == 1 {
            let said = raw.open(2 << 20, 4 << 20, 1).0;
            assert!(matches!(said.code(), None | Some(Code::Busy)), "the connection continues: {:?}", said.code());
        }
    }
    // A message that is too long, one with too many descriptors, and one with a wrong size in its header.
    let mut raw = Raw::greeted(&daemon.path);
    raw.send(&[1; 5000], &[]).unwrap();
    assert_eq!(raw.receive().unwrap().code(), Some(Code::Malformed));
    let buf = memfd(4096);
    let message = ClientRequest::Map { access: 3, segments: &[segment(0, 0, 4096)] }.encode(1);
    raw.send(&message, &vec![buf.export().unwrap(); 100]).unwrap();
    assert_eq!(raw.receive().unwrap().code(), Some(Code::Malformed));
    let mut message = ClientRequest::Unmap { iova: 0 }.encode(1);
    message[0] = 0xff;
    raw.send(&message, &[]).unwrap();
    assert_eq!(raw.receive().unwrap().code(), Some(Code::Malformed));
    let mut hello = ClientRequest::Hello { min: 1, max: VERSION }.encode(1);
    hello[16] = b'X';
    raw.send(&hello, &[]).unwrap();
    assert_eq!(raw.receive().unwrap().code(), Some(Code::Malformed));
    assert_eq!(raw.ask(&ClientRequest::Hello { min: VERSION + 1, max: 99 }, &[]).code(), Some(Code::Version));
    // An empty message ends the connection.
    raw.send(&[], &[]).unwrap();
    assert!(raw.receive().is_none());
    bystander.check();
    drop((raw, buf));
    end(daemon, bystander, before);
}

#[test]
fn requests_that_must_be_refused() {
    let limits = ClientLimits { buffers: 16, bytes: 8 << 20, ..ClientLimits::default() };
    let daemon = Daemon::start(Config { limits, ..Config::default() });
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut raw = Raw::new(&daemon.path);
    assert_eq!(raw.ask(&ClientRequest::Unmap { iova: 0 }, &[]).code(), Some(Code::NotPermitted), "no hello message");
    assert_eq!(raw.ask(&ClientRequest::Status { first: 0 }, &[]).code(), Some(Code::NotPermitted));
    drop(raw);
    let mut raw = Raw::greeted(&daemon.path);
    let page = segment(0, 0, 4096);
    let buf = memfd(16 << 10);
    let fd = buf.export().unwrap();
    assert_eq!(raw.map(3, &[page], &[fd]).code(), Some(Code::NotPermitted), "no function");
    assert_eq!(raw.ask(&ClientRequest::Read { bar: 0, offset: 0 }, &[]).code(), Some(Code::NotPermitted));
    assert_eq!(raw.open(0, 0, 17).0.code(), Some(Code::Quota));
    assert_eq!(raw.ask(&ClientRequest::Open { ddr: 0, hbm: 0, queues: 0 }, &[fd]).code(), Some(Code::BadDescriptor));
    let open = ClientRequest::Open { ddr: 0, hbm: 0, queues: 1 };
    let (files, page_buf) = (FunctionFiles::new().unwrap(), memfd(4096));
    let [registers, kick, call] = files.fds();
    let short = page_buf.export().unwrap();
    let bad =
        [&[][..], &[registers, kick], &[registers, kick, call, call], &[kick, registers, call], &[short, kick, call]];
    for bad in bad {
        assert_eq!(raw.ask(&open, bad).code(), Some(Code::BadDescriptor), "{bad:?}");
    }
    if can_watch_memory() {
        // The daemon makes no pages of it.
        let untouched = SharedBuf::sparse("untouched", files.page.len()).unwrap();
        let said = raw.ask(&open, &[untouched.export().unwrap(), kick, call]);
        assert_eq!(said.code(), Some(Code::BadDescriptor));
    }
    // Regular files cannot be waited for.
    assert_eq!(raw.ask(&open, &[registers, registers, call]).code(), Some(Code::BadDescriptor));
    drop((files, page_buf));
    assert_eq!(raw.open(0, 0, 0).0.code(), None);
    assert_eq!(raw.open(0, 0, 0).0.code(), Some(Code::Busy));
    // Wrong sizes and offsets.
    for (offset, len) in [
        (0, 0),
        (1, 4096),
        (0, 4097),
        (2048, 4096),
        (0, 6144),
        (0, 20 << 10),
        (16 << 10, 4096),
        (u64::MAX - 4095, 4096),
        (4096, u64::MAX),
    ] {
        let said = raw.map(3, &[segment(0, offset, len)], &[fd]);
        assert_eq!(said.code(), Some(Code::Malformed), "{offset} {len}");
    }
    assert_eq!(raw.map(3, &[page, segment(1, 0, 4096)], &[fd]).code(), Some(Code::BadDescriptor));
    assert_eq!(raw.map(3, &[page], &[]).code(), Some(Code::BadDescriptor));
    let large = memfd(1 << 20);
    let whole = segment(0, 0, 1 << 20);
    let said = raw.map(3, &[whole; 9], &[large.export().unwrap()]);
    assert_eq!(said.code(), Some(Code::Quota), "more than 8 MiB, of one buffer");
    drop(large);
    for access in [0, 4, 7, 8, u32::MAX] {
        assert_eq!(raw.map(access, &[page], &[fd]).code(), Some(Code::Malformed));
    }
    // Files of the wrong kind.
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    let growing = rustix::fs::memfd_create("grow", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&growing, SealFlags::SHRINK).unwrap();
    let huge = rustix::fs::memfd_create("huge", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB).unwrap();
    rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let readonly = std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd))).unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let wrong = [
        unsealed.as_fd(),
        growing.as_fd(),
        huge.as_fd(),
        readonly.as_fd(),
        event.as_fd(),
        file.as_fd(),
        null.as_fd(),
        raw.socket.as_fd().try_clone_to_owned().unwrap().as_fd(),
    ]
    .map(|fd| fd.try_clone_to_owned().unwrap());
    for (i, fd) in wrong.iter().enumerate() {
        let said = raw.map(3, &[page], &[fd.as_fd()]);
        assert_eq!(said.code(), Some(Code::BadDescriptor), "file {i}");
        // In a list with a valid file nothing is kept either. (The read-only descriptor refers to that same file.)
        if i == 3 {
            continue;
        }
        let said = raw.map(3, &[page, segment(1, 0, 4096)], &[buf.export().unwrap(), fd.as_fd()]);
        assert_eq!(said.code(), Some(Code::BadDescriptor), "file {i}");
    }
    let row = |daemon: &Daemon| daemon.status().clients.into_iter().find(|c| c.errors > 10).unwrap();
    assert_eq!(
        (row(&daemon).buffers, row(&daemon).mappings, row(&daemon).bytes),
        (0, 0, 0),
        "a refusal leaves nothing behind"
    );
    // Objects that do not exist.
    assert_eq!(raw.ask(&ClientRequest::Unmap { iova: 0x10_0000 }, &[]).code(), Some(Code::NoSuchThing));
    for (bar, offset) in [(0, 0x7c), (0, 3), (1, 0), (2, u64::MAX), (0, u64::MAX - 3), (0, 0x1200)] {
        assert_eq!(
            raw.ask(&ClientRequest::Read { bar, offset }, &[]).code(),
            Some(Code::NoSuchThing),
            "{bar} {offset:#x}"
        );
        assert_eq!(raw.ask(&ClientRequest::Write { bar, offset, value: 1 }, &[]).code(), Some(Code::NoSuchThing));
        let bytes = ClientRequest::WriteBytes { bar, offset, bytes: &[1; 64] };
        assert_eq!(raw.ask(&bytes, &[]).code(), Some(Code::NoSuchThing));
    }
    // The memory cannot be shrunk while the card uses it: it is sealed.
    let iova = raw.map_all(&buf, 3);
    assert_eq!(rustix::fs::ftruncate(buf.export().unwrap(), 4096), Err(rustix::io::Errno::PERM));
    assert_eq!(raw.ask(&ClientRequest::Unmap { iova }, &[]).code(), None);
    assert_eq!(raw.ask(&ClientRequest::Unmap { iova }, &[]).code(), Some(Code::NoSuchThing));
    // Too many buffers, mappings and bytes.
    let mut kept = Vec::new();
    let refused = loop {
        let small = memfd(4096);
        match raw.map(1, &[page], &[small.export().unwrap()]).code() {
            None => kept.push(small),
            Some(code) => break code,
        }
    };
    assert_eq!((refused, kept.len()), (Code::Quota, 16));
    let fd = kept[0].export().unwrap();
    let mut mappings = 0;
    let refused = loop {
        match raw.map(1, &[page], &[fd]).code() {
            None => mappings += 1,
            Some(code) => break code,
        }
    };
    assert_eq!((refused, mappings), (Code::Quota, 16 * 16 - 16));
    raw = Raw::greeted(&daemon.path);
    assert_eq!(raw.open(0, 0, 0).0.code(), None);
    let large = memfd(9 << 20);
    assert_eq!(raw.map(1, &[page], &[large.export().unwrap()]).code(), Some(Code::Quota), "the whole memfd counts");
    let parts = [5, 4, 3].map(|mib| memfd(mib << 20));
    let mapped = parts.each_ref().map(|part| raw.map(1, &[page], &[part.export().unwrap()]).code());
    assert_eq!(mapped, [None, Some(Code::Quota), None], "5 and 3 MiB are all that is allowed");
    bystander.check();
    drop((raw, kept, large, parts, buf, unsealed, growing, huge, readonly, event, file, null, wrong));
    end(daemon, bystander, before);
}

#[test]
fn memfds_with_more_seals_than_needed() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut ringed = Ringed::new(&daemon.path);
    let sealed = |seals: SealFlags| {
        let fd = rustix::fs::memfd_create("dmalane-sealed", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        rustix::io::pwrite(&fd, &[0x5a; 8192], 0).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let all = [segment(0, 0, 8192)];
    // Sealed against shrinking and against further seals: this is all that the daemon requires.
    let good = sealed(SealFlags::SHRINK | SealFlags::SEAL);
    let said = ringed.raw.map(3, &all, &[good.as_fd()]);
    assert_eq!(said.code(), None);
    // The daemon makes no pages: they would be on its account, and stay while the client has the descriptor.
    let empty = rustix::fs::memfd_create("dmalane-empty", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&empty, 8192).unwrap();
    rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
    let hole = ringed.raw.map(3, &all, &[empty.as_fd()]);
    if can_watch_memory() {
        assert_eq!((hole.code(), rustix::fs::fstat(&empty).unwrap().st_blocks), (Some(Code::Failed), 0));
        assert!(String::from_utf8_lossy(&hole.body).contains("touch it first"));
    }
    drop((hole, empty));
    // The card writes through it.
    start(&mut ringed.raw, &ringed.iovas);
    for (i, word) in [2, said.word(0), 0, 8192].into_iter().enumerate() {
        ringed.ring.as_volatile_slice().store_u64(8 * i, word).unwrap();
    }
    ringed.doorbell(1);
    let begun = Instant::now();
    while ringed.raw.read(0x1024) != 1 {
        assert!(begun.elapsed() < LONG);
    }
    // A queue that runs is not started again: its doorbell, which would go back, stays.
    ringed.raw.write(0x1000, 1);
    assert_eq!(ringed.page.as_volatile_slice().load_u32(0), Some(1));
    let mut bytes = [1; 8192];
    rustix::io::pread(&good, &mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|b| *b == 0), "card memory is zeros at first");
    assert_eq!(ringed.raw.ask(&ClientRequest::Unmap { iova: said.word(0) }, &[]).code(), None);
    // The first can no longer be sealed against shrinking, and the others cannot be mapped for writing.
    for seals in [SealFlags::SEAL, SealFlags::SHRINK | SealFlags::WRITE, SealFlags::SHRINK | SealFlags::FUTURE_WRITE] {
        let bad = sealed(seals);
        for access in [1, 3] {
            let said = ringed.raw.map(access, &all, &[bad.as_fd()]);
            assert_eq!(said.code(), Some(Code::BadDescriptor), "{seals:?}");
        }
    }
    ringed.untouched();
    bystander.check();
    drop((ringed, said, good));
    end(daemon, bystander, before);
}

/// The card accesses pages that the client has given back to the kernel: new ones would be on the daemon's account.
#[test]
fn a_page_that_is_given_back_ends_the_connection_that_used_it() {
    if !can_watch_memory() {
        println!("SKIPPED: userfaultfd is not allowed here");
        return;
    }
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    for (op, card) in [(1, "from"), (2, "to")] {
        let mut ringed = Ringed::new(&daemon.path);
        let data = memfd(1 << 20);
        let iova = ringed.raw.map_all(&data, 3);
        let fd = data.export().unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(fd, flags, 64 << 10, 128 << 10).unwrap();
        let there = rustix::fs::fstat(fd).unwrap().st_blocks;
        start(&mut ringed.raw, &ringed.iovas);
        for (i, word) in [op, iova, 0, 1 << 20].into_iter().enumerate() {
            ringed.ring.as_volatile_slice().store_u64(8 * i, word).unwrap();
        }
        ringed.doorbell(1);
        assert!(ringed.raw.receive().is_none(), "the connection ends: {card} the host");
        assert_eq!(rustix::fs::fstat(fd).unwrap().st_blocks, there, "no page was made");
        bystander.check();
    }
    end(daemon, bystander, before);
}

/// The same, where the client's process is likely to have the lock of the table when it ends: it answers many statuses.
#[test]
fn processes_that_end_at_any_time_leave_a_daemon_that_serves() {
    if !can_watch_memory() {
        println!("SKIPPED: userfaultfd is not allowed here");
        return;
    }
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..30 {
                    let mut ringed = Ringed::new(&daemon.path);
                    start(&mut ringed.raw, &ringed.iovas);
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(ringed.ring.export().unwrap(), flags, 0, 4096).unwrap();
                    for seqno in 0..20 {
                        let _ = ringed.raw.send(&ClientRequest::Status { first: 0 }.encode(seqno), &[]);
                    }
                    ringed.doorbell(1);
                    while ringed.raw.receive().is_some() {}
                }
            });
        }
        for _ in 0..5 {
            bystander.check();
        }
    });
    end(daemon, bystander, before);
}

#[test]
fn a_place_is_free_once_the_end_of_its_connection_was_seen() {
    let daemon = Daemon::start(Config { clients: 1, ..Config::default() });
    for round in 0..50 {
        let mut raw = Raw::greeted(&daemon.path);
        assert_eq!(raw.open(2 << 20, 4 << 20, 1).0.code(), None, "{round}");
        rustix::net::shutdown(&raw.socket, rustix::net::Shutdown::Write).unwrap();
        assert!(raw.receive().is_none());
    }
    daemon.end_empty();
}

#[test]
fn idle_connections_time_out() {
    // Long enough for clients that greet and open at once, also where they have to wait for a processor.
    let open_timeout = Duration::from_secs(2);
    let daemon = Daemon::start(Config { open_timeout, ..Config::default() });
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    // Before they connect, so that each has at least its time.
    let begun = Instant::now();
    let (silent, mut asking) = (Raw::new(&daemon.path), Raw::greeted(&daemon.path));
    // Status requests do not keep a connection open.
    let ended_after = loop {
        match asking.send(&ClientRequest::Status { first: 0 }.encode(1), &[]) {
            Ok(()) if asking.receive().is_some() => std::thread::sleep(Duration::from_millis(20)),
            _ => break begun.elapsed(),
        }
        assert!(begun.elapsed() < LONG);
    };
    assert!(ended_after >= open_timeout, "{ended_after:?}");
    assert!(silent.receive().is_none());
    // Nor those without a pause: the next one is there before the last one is answered.
    let begun = Instant::now();
    let flood = Raw::greeted(&daemon.path);
    let ask = || flood.send(&ClientRequest::Status { first: 0 }.encode(1), &[]).is_ok();
    let asked = (0..64).all(|_| ask());
    while asked && flood.receive().is_some() && ask() {
        assert!(begun.elapsed() < LONG);
    }
    assert!(begun.elapsed() >= open_timeout);
    let mut late = Raw::greeted(&daemon.path);
    assert_eq!(late.open(2 << 20, 4 << 20, 1).0.code(), None);
    std::thread::sleep(3 * open_timeout / 2);
    assert_eq!(late.read(0), dmalane_card::regs::ID_VALUE, "a client with a function stays");
    bystander.check();
    asking.seqno = 0;
    drop((silent, asking, flood, late));
    end(daemon, bystander, before);
}

#[test]
fn a_client_that_does_not_read_answers_is_disconnected() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let unread = Raw::greeted(&daemon.path);
    let start = Instant::now();
    while start.elapsed() < LONG {
        match unread.send(&ClientRequest::Status { first: 0 }.encode(1), &[]) {
            Ok(()) => {}
            Err(e) => {
                assert!(matches!(e, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET), "{e}");
                break;
            }
        }
    }
    assert!(start.elapsed() < LONG);
    bystander.check();
    drop(unread);
    end(daemon, bystander, before);
}

#[test]
fn a_client_and_a_daemon_of_different_versions_say_which() {
    let daemon = Daemon::start(Config::default());
    let said = Raw::new(&daemon.path).ask(&ClientRequest::Hello { min: 1, max: 2 }, &[]);
    assert_eq!(said.code(), Some(Code::Version));
    let text = String::from_utf8_lossy(&said.body);
    assert!(text.contains(&format!("the client speaks versions 1 to 2, the daemon {VERSION}")), "{text}");
    daemon.end_empty();

    // A daemon of version 2, and this client.
    let _one = one();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let old = std::thread::spawn(move || {
        let peer = Raw { socket: rustix::net::accept(&listener).unwrap(), seqno: 0 };
        let asked = peer.receive().unwrap();
        let versions = [16, 20].map(|at| u32::from_le_bytes(asked.body[at..at + 4].try_into().unwrap()));
        let text = format!("the client speaks versions {} to {}, the daemon 2", versions[0], versions[1]);
        peer.send(&failed(asked.seqno, Code::Version, &text), &[]).unwrap();
    });
    let error = error_chain(&status(&dmalane_daemon::ClientOptions::new(&path)).unwrap_err());
    assert!(error.contains(&format!("the client speaks versions {VERSION} to {VERSION}, the daemon 2")), "{error}");
    old.join().unwrap();
}

/// A function opened without the client library: its rings, with mapped and unmapped memory.
struct Ringed {
    raw: Raw,
    page: SharedBuf,
    call: OwnedFd,
    ring: SharedBuf,
    completions: SharedBuf,
    /// Memory that random descriptors may change.
    _mapped: SharedBuf,
    readonly: SharedBuf,
    unmapped: SharedBuf,
    iovas: [u64; 4],
}

const LOG2: u32 = 6;

impl Ringed {
    fn new(path: &Path) -> Self {
        let mut raw = Raw::greeted(path);
        let (said, files) = raw.open(64 << 20, 64 << 20, 1);
        assert_eq!((said.code(), said.fds.len()), (None, 0));
        let FunctionFiles { page, kick: call, .. } = files;
        let [ring, completions, mapped, readonly, unmapped] = [4096, 4096, 64 << 10, 64 << 10, 64 << 10].map(memfd);
        unmapped.as_volatile_slice().fill(0x77);
        readonly.as_volatile_slice().fill(0x78);
        let iovas = [(&ring, 1), (&completions, 3), (&mapped, 3), (&readonly, 1)].map(|(b, a)| raw.map_all(b, a));
        Self { raw, page, call, ring, completions, _mapped: mapped, readonly, unmapped, iovas }
    }

    fn doorbell(&self, value: u32) {
        self.page.as_volatile_slice().swap_u32(0, value).unwrap();
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    fn untouched(&self) {
        let all = |buf: &SharedBuf, byte: u8| {
            let mut bytes = vec![0; buf.len()];
            buf.as_volatile_slice().read(&mut bytes);
            bytes.iter().all(|b| *b == byte)
        };
        assert!(all(&self.unmapped, 0x77), "memory that is not mapped");
        assert!(all(&self.readonly, 0x78), "memory that is mapped for reading");
    }
}

/// Stops the queue and starts it with the two rings.
fn start(raw: &mut Raw, iovas: &[u64; 4]) {
    raw.write(0x1000, 0);
    while raw.read(0x1004) != 0 {}
    raw.write(0x100c, LOG2);
    for (register, iova) in [(0x1010, iovas[0]), (0x1018, iovas[1])] {
        raw.write(register, iova as u32);
        raw.write(register + 4, (iova >> 32) as u32);
    }
    raw.write(0x1000, 1);
    while raw.read(0x1004) == 0 {}
}

/// A descriptor: random bits, or plausible fields.
fn descriptor(random: &mut Random, iovas: &[u64; 4]) -> [u64; 4] {
    let noise = |random: &mut Random| random.below(u64::MAX);
    if random.below(4) == 0 {
        return std::array::from_fn(|_| noise(random));
    }
    let near = match random.below(5) {
        0 => noise(random),
        i => iovas[i as usize - 1] + random.below(70 << 10),
    };
    let far = match random.below(4) {
        0 => noise(random),
        1 => random.below(65 << 20),
        2 => (1 << 38) + random.below(65 << 20),
        _ => 0x5555_0000 + random.below(1 << 20),
    };
    let (opcode, flags) = (random.below(9), random.below(8));
    let len = if random.below(8) == 0 { random.below(1 << 32) } else { random.below(8192) };
    [opcode | flags << 8 | random.below(1 << 32) << 32, near, far, len]
}

#[test]
fn random_descriptors() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut ringed = Ringed::new(&daemon.path);
    let mut random = Random(21);
    let (mut halts, mut completed, mut round, begun) = (0, 0u64, 0, Instant::now());
    // More rounds where the worker seldom has a processor within the time of one.
    while round < 300 || completed <= 1000 || halts == 0 {
        assert!(begun.elapsed() < 5 * LONG, "{completed} descriptors completed, {halts} halts");
        start(&mut ringed.raw, &ringed.iovas);
        for slot in 0..1usize << LOG2 {
            for (i, word) in descriptor(&mut random, &ringed.iovas).into_iter().enumerate() {
                ringed.ring.as_volatile_slice().store_u64(32 * slot + 8 * i, word).unwrap();
            }
        }
        ringed.doorbell(if random.below(8) == 0 { random.below(1 << 32) as u32 } else { 1 << LOG2 });
        let deadline = Instant::now() + Duration::from_millis(20);
        // Until the queue halts, all is done, or the time is over: a copy of 1 GiB within the card is slow.
        while Instant::now() < deadline {
            let (status, head) = (ringed.raw.read(0x1004), ringed.raw.read(0x1024));
            if status != 1 || head == 1 << LOG2 {
                break;
            }
        }
        halts += u32::from(ringed.raw.read(0x1004) == 2);
        completed += u64::from(ringed.raw.read(0x1024));
        ringed.untouched();
        if round % 32 == 0 {
            let rows = daemon.status().clients;
            assert!(rows.iter().all(|c| c.in_flight <= 1 << LOG2), "whatever the doorbell says: {rows:?}");
        }
        // Overwrite the words of the page that the daemon writes.
        if round % 3 == 0 {
            for at in [64, 128, 4096, 4100, 256, 320] {
                ringed.page.as_volatile_slice().store_u32(at, random.below(1 << 32) as u32).unwrap();
            }
        }
        round += 1;
    }
    println!("{completed} descriptors completed, {halts} halts in {round} rounds");
    bystander.check();
    ringed.untouched();
    drop(ringed);
    end(daemon, bystander, before);
}

#[test]
fn a_ring_that_faults_counts_no_bytes() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut ringed = Ringed::new(&daemon.path);
    // An address beyond 4 GiB, whose upper half the card shows next to its counts of bytes.
    let unmapped = 0x12_3456_7000;
    start(&mut ringed.raw, &[unmapped, ringed.iovas[1], 0, 0]);
    ringed.doorbell(1);
    let begun = Instant::now();
    while ringed.raw.read(0x1004) != 2 {
        assert!(begun.elapsed() < LONG);
    }
    assert_eq!([0x1030, 0x1034].map(|register| ringed.raw.read(register)), [0x3456_7000, 0x12]);
    let rows = daemon.status().clients;
    let moved = rows.iter().filter(|c| c.client != bystander.client.number()).map(|c| c.moved());
    assert_eq!(moved.max(), Some(0));
    let faults = |bystanders: bool| {
        let of = rows.iter().filter(|c| (c.client == bystander.client.number()) == bystanders);
        of.map(|c| c.faults).sum::<u64>()
    };
    assert!(faults(false) > 0 && faults(true) == 0, "{rows:?}");
    bystander.check();
    drop(ringed);
    end(daemon, bystander, before);
}

#[test]
fn descriptors_that_change_while_they_are_read() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let mut bystander = Bystander::new(&daemon);
    let mut ringed = Ringed::new(&daemon.path);
    let going = AtomicBool::new(true);
    std::thread::scope(|s| {
        let (ring, completions, page, going) = (&ringed.ring, &ringed.completions, &ringed.page, &going);
        let iovas = ringed.iovas;
        s.spawn(move || {
            let mut random = Random(31);
            while going.load(Ordering::Relaxed) {
                let slot = random.below(1 << LOG2) as usize;
                for (i, word) in descriptor(&mut random, &iovas).into_iter().enumerate() {
                    ring.as_volatile_slice().store_u64(32 * slot + 8 * i, word).unwrap();
                }
                completions.as_volatile_slice().store_u64(16 * slot + 8, random.below(u64::MAX)).unwrap();
                if random.below(64) == 0 {
                    page.as_volatile_slice()
                        .store_u32([64, 128, 4096][random.below(3) as usize], random.below(3) as u32)
                        .unwrap();
                }
            }
        });
        let mut random = Random(32);
        let (mut completed, mut rounds, begun) = (0, 0, Instant::now());
        while (rounds < 100 || completed <= 100) && begun.elapsed() < 5 * LONG {
            start(&mut ringed.raw, &iovas);
            for n in 1..=20u32 {
                ringed.page.as_volatile_slice().swap_u32(0, n * 3).unwrap();
                let _ = rustix::io::write(&ringed.call, &1u64.to_ne_bytes());
                std::thread::sleep(Duration::from_micros(random.below(100)));
            }
            completed += u64::from(ringed.raw.read(0x1024));
            rounds += 1;
        }
        going.store(false, Ordering::Relaxed);
        assert!(completed > 100, "{completed}");
    });
    ringed.untouched();
    bystander.check();
    drop(ringed);
    end(daemon, bystander, before);
}

/// A TCP socket whose `close` blocks for `linger`, since its peer reads nothing.
fn lingering(listener: &std::net::TcpListener, linger: Duration) -> (std::net::TcpStream, std::net::TcpStream) {
    use std::io::Write;
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&socket, Some(linger)).unwrap();
    (socket, other)
}

#[test]
fn a_blocking_close_does_not_delay_other_clients() {
    let daemon = Daemon::start(Config::default());
    let before = (open_files(), memfd_mappings());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let timed = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed()
    };
    let (socket, _other) = lingering(&listener, Duration::from_secs(1));
    let mut socket = Some(socket);
    assert!(timed(&mut || drop(socket.take())) > Duration::from_millis(900), "close blocks");
    let mut bystander = Bystander::new(&daemon);
    let buf = memfd(4096);
    let linger = Duration::from_secs(600);
    let map = ClientRequest::Map { access: 3, segments: &[segment(0, 0, 4096)] }.encode(1);
    let mut others = Vec::new();
    let began = Instant::now();
    for case in 0..6 {
        let mut raw = if case == 0 { Raw::new(&daemon.path) } else { Raw::greeted(&daemon.path) };
        if case == 1 {
            assert_eq!(raw.open(0, 0, 1).0.code(), None);
        }
        let (socket, other) = lingering(&listener, linger);
        others.push(other);
        // With a refused request, a malformed one, too many descriptors, a message that is never read, an empty one.
        let (bytes, mut fds) = match case {
            0 => (ClientRequest::Status { first: 0 }.encode(1), vec![]),
            1 => (map.clone(), vec![buf.export().unwrap()]),
            2 => (b"nonsense".to_vec(), vec![]),
            3 => (map.clone(), vec![buf.export().unwrap(); 99]),
            4 => {
                raw.send(&map, &[]).unwrap();
                raw.send(&[], &[]).unwrap();
                (map.clone(), vec![])
            }
            _ => (vec![], vec![]),
        };
        fds.push(socket.as_fd());
        let sent = raw.send(&bytes, &fds);
        // If the daemon has already closed its descriptor, this is the last one, and its close blocks.
        std::thread::spawn(move || drop(socket));
        assert!(sent.is_ok() || case == 4 || (case == 0 && sent == Err(rustix::io::Errno::PERM)));
        if case < 4 && sent.is_ok() {
            let code = if case < 2 { Code::BadDescriptor } else { Code::Malformed };
            assert_eq!(raw.receive().unwrap().code(), Some(code), "case {case}");
        }
        drop(raw);
        let took = timed(&mut || bystander.check());
        assert!(took < linger / 10, "case {case}: another client waited for {took:?}");
    }
    assert!(began.elapsed() < linger, "the first descriptor was still being closed");
    // Closing the peers ends the linger.
    drop((others, listener, _other, buf));
    end(daemon, bystander, before);
}
