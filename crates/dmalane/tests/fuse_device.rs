//! Files as devices over a real kernel: a file system that answers as drivers do that are wrong.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use dmalane::addr::{Access, Address, CardAddr, FileOffset};
use dmalane::device::Device as _;
use dmalane::dma::{AnonHeap, Heap, quarantined_bytes};
use dmalane::file::{FileDevice, FileDeviceError, FileDeviceOptions, FileDevicePaths, FileDeviceQueue};
use dmalane::queue::{
    Cancelled, Completion, DeviceAddr, Direction, OpError, Operation, Queue, Refusal, Registered, StallWatch,
};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};

const LEN: usize = 2 << 20;
const LONG: Duration = Duration::from_secs(60);

/// The fault of the device, if a request touches this place.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    None,
    /// Done, but the count says less.
    CountsLess,
    /// Done, but the count says more.
    CountsMore,
    /// Not done, and answered with 0.
    ErrorAsZero,
    /// Most bytes at once.
    Short(usize),
    /// This error at this byte.
    Fails(i32, u64),
    /// No answer at this byte until told.
    Stuck(u64),
}

struct Device {
    memory: Mutex<(Vec<u8>, Fault)>,
    told: Condvar,
}

struct Driver(Arc<Device>);

impl Driver {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let directory = ino == INodeNo::ROOT;
        FileAttr {
            ino,
            size: if directory { 0 } else { LEN as u64 },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if directory { FileType::Directory } else { FileType::RegularFile },
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        }
    }

    /// Where a request of `len` bytes goes and how many of them are done; an error; or `None` for none of them.
    fn ask(&self, offset: u64, len: usize) -> Result<(usize, usize), i32> {
        let touches = |at: u64| (offset..offset + len as u64).contains(&at);
        let mut state = self.0.memory.lock().unwrap();
        while let Fault::Stuck(at) = state.1
            && touches(at)
        {
            state = self.0.told.wait(state).unwrap();
        }
        let n = len.min(LEN - offset as usize);
        match state.1 {
            Fault::Fails(errno, at) if touches(at) => Err(errno),
            Fault::ErrorAsZero => Ok((offset as usize, 0)),
            Fault::Short(most) => Ok((offset as usize, n.min(most))),
            _ => Ok((offset as usize, n)),
        }
    }
}

impl Filesystem for Driver {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("device") => reply.entry(&Duration::ZERO, &self.attr(INodeNo(2)), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Every request reaches the device as it was made, as with a character device.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.ask(offset, size as usize) {
            Err(errno) => reply.error(Errno::from_i32(errno)),
            Ok((at, n)) => {
                let less = if self.0.memory.lock().unwrap().1 == Fault::CountsLess { n / 3 } else { 0 };
                let bytes = self.0.memory.lock().unwrap().0[at..at + n - less].to_vec();
                reply.data(&bytes);
            }
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.ask(offset, data.len()) {
            Err(errno) => reply.error(Errno::from_i32(errno)),
            Ok((at, n)) => {
                let mut state = self.0.memory.lock().unwrap();
                state.0[at..at + n].copy_from_slice(&data[..n]);
                reply.written(match state.1 {
                    Fault::CountsLess => n - n / 3,
                    Fault::CountsMore => n + 1,
                    _ => n,
                } as u32);
            }
        }
    }
}

struct Mounted {
    device: Arc<Device>,
    folder: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

impl Mounted {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let device = Arc::new(Device { memory: Mutex::new((Vec::new(), Fault::None)), told: Condvar::new() });
        let mut config = Config::default();
        // A request that hangs does not keep the others from being answered.
        config.n_threads = Some(4);
        match fuser::spawn_mount(Driver(device.clone()), folder.path(), &config) {
            Ok(session) => Some(Self { device, folder, session: Some(session) }),
            Err(e) => {
                println!("SKIPPED: no FUSE here: {e}");
                None
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("device")
    }

    fn order(&self, fault: Fault) {
        self.device.memory.lock().unwrap().1 = fault;
        self.device.told.notify_all();
    }

    fn fresh(&self) -> Vec<u8> {
        let bytes: Vec<u8> = (0..LEN).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect();
        *self.device.memory.lock().unwrap() = (bytes.clone(), Fault::None);
        self.device.told.notify_all();
        bytes
    }

    fn open(&self, options: FileDeviceOptions) -> Result<FileDevice, FileDeviceError> {
        FileDevice::open(FileDevicePaths { h2c: self.path(), c2h: self.path() }, options)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.order(Fault::None);
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
    }
}

fn copy(node: &FileDevice, heap: &AnonHeap, direction: Direction, bytes: &[u8], at: u64) -> Operation {
    let buf = heap.allocate(bytes.len()).unwrap().share();
    let via = Registered::new(&*node.registrar(), &buf, Access::RW).unwrap();
    let mut part = buf.into_slice().split_off_front(bytes.len()).unwrap();
    part.write(0, bytes).unwrap();
    Operation::copy(direction, (part, via), DeviceAddr::Card(CardAddr::new(at)))
}

fn host_bytes(end: Completion) -> Vec<u8> {
    let part = end.operation.into_slice().unwrap();
    let mut bytes = vec![0; part.len()];
    part.read(0, &mut bytes).unwrap();
    bytes
}

fn drain(queue: &mut FileDeviceQueue) -> Vec<Completion> {
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        assert!(queue.wait(&mut ended, LONG) > 0, "it ends");
    }
    ended
}

fn one(queue: &mut FileDeviceQueue, operation: Operation) -> Completion {
    let _ticket = queue.submit(operation).unwrap();
    drain(queue).remove(0)
}

/// One test, since the orders are to one device.
#[test]
fn what_a_driver_can_do_to_a_node() {
    let Some(fs) = Mounted::new() else { return };
    let heap = AnonHeap::new();
    let small = FileDeviceOptions { block: 64 << 10, ..FileDeviceOptions::default() };
    let node = fs.open(small).unwrap();
    let data: Vec<u8> = (0..300_001).map(|i| (i * 7 + (i >> 10)) as u8).collect();
    let place = 77_777u64;
    let there = place as usize..place as usize + data.len();

    // Short counts, right or wrong, cost time and nothing else.
    for fault in [Fault::None, Fault::Short(5000), Fault::CountsLess] {
        let mut expected = fs.fresh();
        let mut queue = node.queue().unwrap();
        fs.order(fault);
        let end = one(&mut queue, copy(&node, &heap, Direction::FromHost, &data, place));
        assert_eq!((end.result, end.bytes), (Ok(()), data.len() as u64), "{fault:?}");
        expected[there.clone()].copy_from_slice(&data);
        assert!(fs.device.memory.lock().unwrap().0 == expected, "{fault:?}");
        let end = one(&mut queue, copy(&node, &heap, Direction::ToHost, &vec![0; data.len()], place));
        assert_eq!(end.result, Ok(()), "{fault:?}");
        assert!(host_bytes(end) == data, "{fault:?}");
    }
    // A count of more than was asked for is never taken for bytes, and 0 never for success.
    fs.fresh();
    let mut queue = node.queue().unwrap();
    fs.order(Fault::CountsMore);
    let end = one(&mut queue, copy(&node, &heap, Direction::FromHost, &data, place));
    let wrong = matches!(end.result, Err(OpError::Io { .. } | OpError::BadCount { .. }));
    assert!(wrong && end.bytes == 0, "{:?}", end.result);
    fs.order(Fault::ErrorAsZero);
    for direction in [Direction::FromHost, Direction::ToHost] {
        let end = one(&mut queue, copy(&node, &heap, direction, &data, place));
        let early = OpError::EndOfFile { at: FileOffset::new(place), missing: data.len() as u64 };
        assert_eq!((end.result, end.bytes), (Err(early), 0));
    }
    // An error has the offset of the request that it came from, and does not harm the next operation.
    for (errno, direction) in [(5, Direction::FromHost), (5, Direction::ToHost), (28, Direction::FromHost)] {
        fs.order(Fault::Fails(errno, place + 200_000));
        let end = one(&mut queue, copy(&node, &heap, direction, &data, place));
        let Err(OpError::Io { at, errno: got }) = end.result else { panic!("{:?}", end.result) };
        let done = at.offset_from(FileOffset::new(place)).unwrap();
        assert!(got == errno && done == end.bytes && (200_000 - (64 << 10)..=200_000).contains(&done), "{at} {done}");
        fs.order(Fault::None);
        assert_eq!(one(&mut queue, copy(&node, &heap, direction, &data, place)).result, Ok(()));
    }

    drop((queue, end));
    assert_eq!((heap.stats().live, quarantined_bytes()), (0, 0));

    stuck(&fs, &node, &heap, &data);
}

/// A request that never comes back: a time-out stops the queue and keeps that request's memory and no other.
fn stuck(fs: &Mounted, node: &FileDevice, heap: &AnonHeap, data: &[u8]) {
    const BAD: u64 = 1 << 20;
    fs.fresh();
    fs.order(Fault::Stuck(BAD));
    let mut queue = node.queue().unwrap();
    // A read: the kernel lets one write to a file of FUSE wait for the other.
    let hangs = queue.submit(copy(node, heap, Direction::ToHost, &data[..4096], BAD)).unwrap();
    let good = queue.submit(copy(node, heap, Direction::FromHost, data, 0)).unwrap();
    let waits = queue.submit(copy(node, heap, Direction::FromHost, data, BAD - 8)).unwrap();
    let fence = queue.submit(Operation::fence()).unwrap();
    let mut ended = Vec::new();
    let start = Instant::now();
    let mut watch = StallWatch::default();
    while queue.in_flight() > 1 {
        assert!(start.elapsed() < LONG);
        match queue.wait(&mut ended, Duration::from_millis(50)) {
            0 => watch.lost(Duration::from_millis(300)).into_iter().for_each(|why| queue.stop(why)),
            _ => watch.moved(),
        }
    }
    let result = |ticket| ended.iter().find(|e| e.ticket == ticket).map(|e| e.result.clone());
    assert_eq!(result(good), Some(Ok(())), "it was done");
    for ticket in [waits, fence] {
        assert!(matches!(result(ticket), Some(Err(OpError::Stopped(_)))), "{:?}", result(ticket));
    }
    assert_eq!(result(hangs), None, "the kernel still has it");
    assert!(matches!(queue.cancel(hangs), Cancelled::TooLate));
    assert!(!queue.restart(), "not while something is in flight");
    let refused = queue.submit(Operation::fence()).unwrap_err().reason;
    assert!(matches!(refused, Refusal::Stopped(_)));
    // It comes back after all: then it has ended, and the queue can be used again.
    fs.order(Fault::None);
    ended.clear();
    while queue.in_flight() > 0 {
        assert!(queue.wait(&mut ended, LONG) > 0);
    }
    assert_eq!((ended[0].ticket, &ended[0].result, ended[0].bytes), (hangs, &Ok(()), 4096));
    assert!(queue.restart());
    assert_eq!(one(&mut queue, copy(node, heap, Direction::FromHost, data, BAD)).result, Ok(()));
    ended.clear();
    assert_eq!(heap.stats().live, 0);

    // Dropped while it hangs: the memory is leaked, even when the call comes back later.
    fs.order(Fault::Stuck(BAD));
    let _ticket = queue.submit(copy(node, heap, Direction::ToHost, &[0; 8192], BAD - 4096)).unwrap();
    let _ticket = queue.submit(copy(node, heap, Direction::ToHost, &[0; 8192], 0)).unwrap();
    queue.flush();
    while queue.poll(&mut ended) == 0 && start.elapsed() < Duration::from_millis(500) {}
    drop(queue);
    ended.clear();
    assert_eq!((quarantined_bytes(), heap.stats().live), (8192, 8192));
    fs.order(Fault::None);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((quarantined_bytes(), heap.stats().live), (8192, 8192), "quarantined, though the call came back");
}
