//! Faults from a real kernel: a file system that delays, shortens, fails, shrinks and grows on command.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use dmalane::dma::{AnonHeap, Heap, PageKind};
use dmalane::file::{Error, Fallback, Mode};
use dmalane::load::Error as LoadError;
use dmalane::load::fill::{FillError, FillOptions};
use dmalane::queue::OpError;
use dmalane::{AllocRead, ReadOptions, alloc_and_read};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};

const SIZE: u64 = 2_500_001;
const O_DIRECT: i32 = 0o40000;

/// The behaviour of the file system with the file.
#[derive(Clone, Default)]
struct Orders {
    /// Bytes past `SIZE`.
    size: i64,
    /// Reads return no more than this.
    short: Option<u32>,
    /// Reads that touch this byte fail.
    fail: Option<(u64, i32)>,
    /// The next reads fail with this, and then no more.
    fail_next: Option<(u32, i32)>,
    /// Time that each read takes.
    delay: Duration,
    /// Opening with `O_DIRECT` is refused.
    no_direct: bool,
    /// Where a read must begin for the size to change, and by how many bytes.
    resize: Option<(u64, i64)>,
    /// The kernel keeps nothing of the file.
    uncached: bool,
}

struct Faulty(Arc<Mutex<Orders>>);

fn byte(i: u64) -> u8 {
    (i ^ i >> 8 ^ i >> 16) as u8
}

impl Faulty {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let size = SIZE.saturating_add_signed(self.0.lock().unwrap().size);
        let directory = ino == INodeNo::ROOT;
        FileAttr {
            ino,
            size: if directory { 0 } else { size },
            blocks: size / 512,
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
}

impl Filesystem for Faulty {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("f") => reply.entry(&Duration::ZERO, &self.attr(INodeNo(2)), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let orders = self.0.lock().unwrap();
        if orders.no_direct && flags.0 & O_DIRECT != 0 {
            return reply.error(Errno::EINVAL);
        }
        let flags = if orders.uncached { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
        reply.opened(FileHandle(0), flags);
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
        let mut orders = self.0.lock().unwrap();
        if let Some((left, errno)) = &mut orders.fail_next
            && *left > 0
        {
            *left -= 1;
            return reply.error(Errno::from_i32(*errno));
        }
        if let Some((_, by)) = orders.resize.take_if(|(at, _)| offset + u64::from(size) >= *at) {
            orders.size = by;
        }
        let end =
            SIZE.saturating_add_signed(orders.size).min(offset + u64::from(orders.short.map_or(size, |n| n.min(size))));
        let (fail, delay) = (orders.fail, orders.delay);
        drop(orders);
        std::thread::sleep(delay);
        if let Some((_, errno)) = fail.filter(|(at, _)| (offset..end).contains(at)) {
            return reply.error(Errno::from_i32(errno));
        }
        reply.data(&(offset..end.max(offset)).map(byte).collect::<Vec<u8>>());
    }
}

struct Mounted {
    orders: Arc<Mutex<Orders>>,
    folder: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

impl Mounted {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let orders = Arc::default();
        match fuser::spawn_mount(Faulty(Arc::clone(&orders)), folder.path(), &Config::default()) {
            Ok(session) => Some(Self { orders, folder, session: Some(session) }),
            Err(e) => {
                println!("SKIPPED: no FUSE here: {e}");
                None
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("f")
    }

    /// Reads the file under these orders; nothing of it may stay when that fails.
    fn read(&self, orders: Orders, options: &ReadOptions) -> Result<AllocRead, LoadError> {
        let cached = !orders.uncached;
        *self.orders.lock().unwrap() = Orders::default();
        let file = File::open(self.path()).unwrap();
        // The kernel forgets pages that the last test cached.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        drop(file);
        *self.orders.lock().unwrap() = orders;
        let heap = AnonHeap::starting_at(PageKind::Base);
        let file = File::open(self.path()).unwrap();
        let result = alloc_and_read(&heap, &file, .., options);
        if result.is_err() {
            assert_eq!(heap.stats().live, 0, "cached {cached}: something is held by a failed read");
        }
        result
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
    }
}

fn ways() -> impl Iterator<Item = ReadOptions> {
    let fill =
        FillOptions { chunk: 512 << 10, block: 128 << 10, depth: Some(4), checksum: true, ..FillOptions::default() };
    let small = ReadOptions { fill, ..ReadOptions::default() };
    [(Mode::Auto, 1), (Mode::Buffered, 1), (Mode::Buffered, 2), (Mode::Direct, 1)]
        .into_iter()
        .map(move |(mode, threads)| ReadOptions { mode, threads: Some(threads), ..small.clone() })
}

fn whole(read: &AllocRead) {
    let mut at = 0;
    assert_eq!(read.buffer.len() as u64, SIZE);
    read.buffer.as_volatile_slice().for_each_block(|block| {
        let wrong = block.iter().enumerate().find(|(i, b)| **b != byte(at + *i as u64));
        assert_eq!(wrong, None, "after {at}: {}", read.method);
        at += block.len() as u64;
    });
}

/// One test, since the orders are to one file.
#[test]
fn what_a_file_system_can_do_to_a_reader() {
    let Some(fs) = Mounted::new() else { return };
    let order = Orders::default;
    for options in ways() {
        let mode = options.mode;
        // Slow and short, but right.
        whole(&fs.read(order(), &options).unwrap());
        for short in [5000, 100_000] {
            let read = fs.read(Orders { uncached: true, short: Some(short), ..order() }, &options).unwrap();
            whole(&read);
            assert!(!read.method.how.uring, "{}", read.method);
        }
        whole(&fs.read(Orders { uncached: true, delay: Duration::from_millis(1), ..order() }, &options).unwrap());
        // Told to come again.
        for errno in [4, 11] {
            let again = Orders { uncached: true, fail_next: Some((3, errno)), ..order() };
            whole(&fs.read(again, &options).unwrap());
        }

        // A bad place on the disk, or the disk gone.
        for (place, errno) in [(0, 5), (1_500_000, 5), (SIZE - 1, 6), (2_123_456, 19)] {
            for uncached in [true, false] {
                let read = fs.read(Orders { fail: Some((place, errno)), uncached, ..order() }, &options);
                let Err(LoadError::Read { path, source: OpError::Io { at, errno: got }, .. }) = read else {
                    panic!("{mode:?} {place}: {read:?}")
                };
                assert_eq!(path, fs.path());
                // Through the page cache the kernel makes EIO of every failure.
                assert!(got == errno || got == 5 && !uncached, "{errno}: {got}");
                assert!(at.bits() <= place && place - at.bits() < 2 << 20, "{at} for {place}");
            }
        }
        // Shrunk while it is read: no silent zeroes.
        for uncached in [true, false] {
            let read = fs.read(Orders { resize: Some((1_000_000, -500_000)), uncached, ..order() }, &options);
            let Err(LoadError::Read { source: OpError::EndOfFile { at, missing }, .. }) = read else {
                panic!("{mode:?}: {read:?}")
            };
            assert!(at.bits() == SIZE - 500_000 && missing > 0, "{at}");
        }
        // Grown while it is read: the bytes are old and new.
        let read = fs.read(Orders { resize: Some((1_000_000, 77)), uncached: true, ..order() }, &options);
        let Err(LoadError::Changed { before, now, .. }) = read else { panic!("{mode:?}: {read:?}") };
        assert_eq!((before, now), (SIZE, SIZE + 77));
        // Too slow.
        let mut late = options.clone();
        late.fill.time_limit = Some(Duration::from_millis(100));
        let start = Instant::now();
        let read = fs.read(Orders { uncached: true, delay: Duration::from_millis(30), ..order() }, &late);
        let Err(LoadError::Fill(FillError::Deadline { done, of: SIZE })) = read else { panic!("{mode:?}: {read:?}") };
        assert!(done < SIZE && start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        // No direct I/O: another way, or a refusal where it was demanded.
        let read = fs.read(Orders { no_direct: true, ..order() }, &options);
        match (mode, read) {
            (Mode::Direct, Err(LoadError::Open(Error::NoDirect { source, .. }))) => {
                assert!(matches!(source, Fallback::DirectOpen(_)), "{source}");
            }
            (Mode::Direct, read) => panic!("{read:?}"),
            (_, read) => {
                let read = read.unwrap();
                whole(&read);
                assert!(!read.method.how.direct && read.method.moved.direct == 0, "{}", read.method);
            }
        }
    }
    assert_eq!(dmalane::dma::quarantined_bytes(), 0);
}
