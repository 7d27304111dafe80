//! Reads at every alignment, ends of files, and files that cannot be read.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, BufferSlice, Heap, error_chain};
use dmalane_file::{Error, Fallback, FileHandle, FileOptions, FileQueue, Io, Mode, Moved};
use dmalane_queue::{Capabilities, OpError, Operation, Queue, Refusal, RunError, conformance::host_bytes, drain, run};
use proptest::prelude::*;
use tempfile::{NamedTempFile, TempDir};

const LONG: Duration = Duration::from_secs(30);
const DISK: &str = env!("CARGO_TARGET_TMPDIR");

fn file(data: &[u8]) -> NamedTempFile {
    let file = NamedTempFile::new_in(DISK).unwrap();
    std::fs::write(file.path(), data).unwrap();
    file
}

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn part(len: usize) -> BufferSlice {
    AnonHeap::new().allocate(len).unwrap().share().into_slice().split_at(len).unwrap().0
}

fn to_host(part: BufferSlice, at: u64) -> Operation<FileOffset> {
    Operation::read(part, FileOffset::new(at))
}

fn bytes(part: &BufferSlice) -> Vec<u8> {
    let mut bytes = vec![0; part.len()];
    part.read(0, &mut bytes).unwrap();
    bytes
}

/// The slow version: what the file holds from `at` on, and where it ended if it did.
fn naive(path: &Path, at: usize, len: usize) -> (Vec<u8>, Option<OpError>) {
    let all = std::fs::read(path).unwrap();
    let there = all.get(at..all.len().min(at + len)).unwrap_or_default().to_vec();
    let (end, size) = ((at + len) as u64, all.len() as u64);
    let early = OpError::EndOfFile { at: FileOffset::new(size), missing: end.saturating_sub(size) };
    (there, (end > size).then_some(early))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]
    #[test]
    fn reads_what_the_standard_library_reads(
        size in prop_oneof![0usize..6000, 190_000usize..300_000],
        at in prop_oneof![0usize..6000, 0usize..310_000],
        len in prop_oneof![1usize..6000, 1usize..300_000],
        offset in 0usize..5000,
        congruent: bool, buffered: bool, pread: bool,
        depth in 1usize..5,
    ) {
        let file = file(&noise(size));
        let (mode, io) = (if buffered { Mode::Buffered } else { Mode::Auto }, if pread { Io::Pread } else { Io::Auto });
        let mut channel = FileQueue::open(file.path(), FileOptions { mode, io, depth, block: 1 }).unwrap();
        let align = channel.alignment();
        let offset = if congruent { offset / align * align + at % align } else { offset };
        let mut whole = part(offset + len + 100);
        whole.write(0, &vec![0xee; offset + len + 100]).unwrap();
        let (head, rest) = whole.split_at(offset).unwrap();
        let (middle, tail) = rest.split_at(len).unwrap();
        let (middle, error) = match run(&mut channel, to_host(middle, at as u64), LONG) {
            Ok(read) => (read.into_slice().unwrap(), None),
            Err(RunError { operation: Some(read), error }) => (read.into_slice().unwrap(), Some(error)),
            Err(e) => panic!("{e}"),
        };
        let (expected, early) = naive(file.path(), at, len);
        prop_assert_eq!(&error, &early);
        prop_assert!(early.is_some() || bytes(&middle) == expected, "the bytes");
        prop_assert!(bytes(&head).iter().chain(&bytes(&tail)).all(|b| *b == 0xee), "its neighbours are left alone");
        let Moved { direct, buffered } = channel.moved();
        if error.is_none() {
            prop_assert_eq!(direct + buffered, len as u64);
            if congruent && channel.how().direct {
                prop_assert!(buffered < 2 * align as u64, "{} of {} bytes were not read directly", buffered, len);
            }
        }
    }
}

fn ways() -> impl Iterator<Item = FileOptions> {
    [Mode::Auto, Mode::Buffered].into_iter().flat_map(|mode| {
        [Io::Auto, Io::Pread].into_iter().map(move |io| FileOptions { mode, io, depth: 4, block: 64 << 10 })
    })
}

#[test]
fn a_tmpfs_file_says_why_it_is_not_read_directly() {
    let Ok(file) = NamedTempFile::new_in("/dev/shm") else { return eprintln!("skipped: no /dev/shm") };
    std::fs::write(file.path(), noise(100_000)).unwrap();
    let mut channel = FileQueue::open(file.path(), FileOptions::default()).unwrap();
    let how = channel.how();
    assert!(!how.direct && how.reasons == [Fallback::InMemory("tmpfs")], "{how}");
    assert!(how.to_string().starts_with("buffered I/O, io_uring (tmpfs keeps"), "{how}");
    assert_eq!(channel.alignment(), 1);
    let read = run(&mut channel, to_host(part(90_000), 7), LONG).unwrap();
    assert!(host_bytes(&read) == noise(100_000)[7..90_007]);
    let demanded = FileQueue::open(file.path(), FileOptions { mode: Mode::Direct, ..FileOptions::default() });
    let message = error_chain(&demanded.unwrap_err());
    assert!(message.contains("no direct I/O on /dev/shm/") && message.contains("tmpfs"), "{message}");
}

#[test]
fn one_byte_and_none() {
    for options in ways() {
        let one = file(b"x");
        let mut channel = FileQueue::open(one.path(), options).unwrap();
        let read = run(&mut channel, to_host(part(1), 0), LONG).unwrap();
        assert_eq!(host_bytes(&read), b"x");
        let empty = file(b"");
        for (path, size) in [(one.path(), 1), (empty.path(), 0)] {
            let mut channel = FileQueue::open(path, options).unwrap();
            let e = run(&mut channel, to_host(part(8192), 0), LONG).unwrap_err();
            let RunError { operation: Some(read), error: OpError::EndOfFile { at, missing } } = e else {
                panic!("{e}")
            };
            assert_eq!((at.bits(), missing, read.bytes()), (size, 8192 - size, 8192));
        }
    }
}

#[test]
fn a_file_truncated_while_it_is_read_ends_where_it_was_cut() {
    for options in ways() {
        for end in [300_007, 262_144, 1, 0] {
            let file = file(&noise(1 << 20));
            let mut channel = FileQueue::open(file.path(), options).unwrap();
            let mut done = Vec::new();
            // Submitted: one to read before the cut, one that has to notice it.
            let _first = channel.submit(to_host(part(65_536), 0)).unwrap();
            while done.is_empty() {
                channel.wait(&mut done, LONG);
            }
            let _second = channel.submit(to_host(part(1 << 20), 0)).unwrap();
            file.as_file().set_len(end).unwrap();
            done.extend(drain(&mut channel, LONG));
            assert_eq!(done[0].result, Ok(()));
            let missing = (1 << 20) - end;
            assert_eq!(done[1].result, Err(OpError::EndOfFile { at: FileOffset::new(end), missing }), "{options:?}");
            assert_eq!(done[1].operation.bytes(), 1 << 20, "the whole part comes back");
        }
    }
}

#[test]
fn a_file_truncated_between_the_reads_of_one_operation() {
    let file = file(&noise(1 << 20));
    let options = FileOptions { io: Io::Pread, block: 64 << 10, ..FileOptions::default() };
    let mut channel = FileQueue::open(file.path(), options).unwrap();
    let _ticket = channel.submit(to_host(part(1 << 20), 0)).unwrap();
    let mut done = Vec::new();
    for _ in 0..4 {
        assert_eq!(channel.poll(&mut done), 0);
    }
    let end = (4 << 16) + 99;
    file.as_file().set_len(end).unwrap();
    let done = drain(&mut channel, LONG);
    let missing = (1 << 20) - end;
    assert_eq!(done[0].result, Err(OpError::EndOfFile { at: FileOffset::new(end), missing }));
}

#[test]
fn refusals() {
    let file = file(&noise(5000));
    let mut channel = FileQueue::open(file.path(), FileOptions::default()).unwrap();
    let alignment = channel.alignment();
    for (at, len) in [(u64::MAX, 1), (i64::MAX as u64, 1), (u64::MAX - 10, 4096)] {
        assert_eq!(channel.submit(to_host(part(len), at)).unwrap_err().reason, Refusal::PastTheTop);
    }
    let e = run(&mut channel, to_host(part(4096), i64::MAX as u64 - 4096), LONG).unwrap_err();
    assert!(matches!(e.error, OpError::EndOfFile { .. }), "{e}");
    let write = Operation::write(part(1), FileOffset::new(0));
    assert_eq!(channel.submit(write).unwrap_err().reason, Refusal::Unsupported(Capabilities::FROM_HOST));
    assert_eq!(channel.alignment(), alignment, "a place past every file says nothing about direct I/O");
}

#[test]
fn what_is_not_a_file_is_named() {
    let dir = TempDir::new_in(DISK).unwrap();
    let open = |path: &Path| FileQueue::open(path, FileOptions::default()).unwrap_err();
    assert!(matches!(open(dir.path()), Error::NotAFile { kind: "directory", .. }));
    assert!(matches!(open(Path::new("/dev/null")), Error::NotAFile { kind: "character device", .. }));
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(matches!(open(&fifo), Error::NotAFile { kind: "FIFO", .. }), "and does not wait for a writer");
    assert!(FileHandle::open(&fifo).is_ok(), "nor does this");
    let missing = dir.path().join("missing");
    let e = open(&missing);
    assert!(
        matches!(&e, Error::Open { path, source } if *path == missing && source.kind() == std::io::ErrorKind::NotFound)
    );
    assert!(error_chain(&e).contains("missing") && error_chain(&e).contains("No such file"), "{e}");
}

/// Runs `f` in a thread that is nobody in particular; says so and does not when it cannot become that.
fn as_nobody(f: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                let nobody = rustix::process::Uid::from_raw(65534);
                if let Err(e) = rustix::thread::set_thread_res_uid(nobody, nobody, nobody) {
                    return eprintln!("skipped: cannot become nobody: {e}");
                }
            }
            f();
        });
    });
}

#[test]
fn a_file_that_may_not_be_read() {
    let file = file(&noise(100_000));
    let perms = std::os::unix::fs::PermissionsExt::from_mode(0o0);
    let opened = File::open(file.path()).unwrap();
    let direct = FileQueue::open(file.path(), FileOptions::default()).unwrap().how().direct;
    let with = |flags: rustix::fs::OFlags| {
        use std::os::unix::fs::OpenOptionsExt;
        File::options().read(true).custom_flags(flags.bits() as i32).open(file.path())
    };
    let nonblocking = with(rustix::fs::OFlags::NONBLOCK).unwrap();
    let unaligned = with(rustix::fs::OFlags::DIRECT);
    std::fs::set_permissions(file.path(), perms).unwrap();
    as_nobody(|| {
        let e = FileQueue::open(file.path(), FileOptions::default()).unwrap_err();
        assert!(
            matches!(&e, Error::Open { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied),
            "{e}"
        );
        // Opened by somebody who may, it can be read, but not be opened once more for direct I/O.
        let mut channel = FileQueue::of_handle(FileHandle::new(opened, "lent"), FileOptions::default()).unwrap();
        assert_eq!(channel.path(), Path::new("lent"));
        let reasons = &channel.how().reasons;
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(!direct || reasons[0].to_string().contains("refused at open: Permission denied"), "{reasons:?}");
        let read = run(&mut channel, to_host(part(99_000), 1), LONG).unwrap();
        assert!(host_bytes(&read) == noise(100_000)[1..99_001]);
        // io_uring takes a non-blocking descriptor literally, so it is left alone.
        let mut channel = FileQueue::of_handle(FileHandle::new(nonblocking, "lent"), FileOptions::default()).unwrap();
        assert!(!channel.how().uring && channel.how().reasons.contains(&Fallback::NonBlocking));
        let read = run(&mut channel, to_host(part(99_000), 1), LONG).unwrap();
        assert!(host_bytes(&read) == noise(100_000)[1..99_001]);
        if let Ok(unaligned) = unaligned {
            let e = FileQueue::of_handle(FileHandle::new(unaligned, "lent"), FileOptions::default()).unwrap_err();
            assert!(matches!(e, Error::OnlyDirect { .. }), "{e}");
        }
    });
}

#[test]
fn the_descriptor_of_someone_else_stays_as_it_was() {
    use rustix::fs::{OFlags, fcntl_getfl};
    use std::os::unix::fs::OpenOptionsExt;
    let data = noise(100_000);
    let file = file(&data);
    for flags in [OFlags::empty(), OFlags::NONBLOCK, OFlags::DIRECT | OFlags::NONBLOCK | OFlags::NOATIME] {
        for mode in [Mode::Auto, Mode::Buffered] {
            let lent = File::options().read(true).custom_flags(flags.bits() as i32).open(file.path());
            let Ok(mut lent) = lent else {
                println!("SKIPPED: the file system refuses {flags:?}");
                continue;
            };
            std::io::Seek::seek(&mut lent, std::io::SeekFrom::Start(5)).unwrap();
            let before = fcntl_getfl(&lent).unwrap();
            let copy = lent.try_clone().unwrap();
            let mut channel =
                FileQueue::of_handle(FileHandle::new(copy, "lent"), FileOptions { mode, ..FileOptions::default() })
                    .unwrap();
            let read = run(&mut channel, to_host(part(99_000), 1), LONG).unwrap();
            assert!(host_bytes(&read) == data[1..99_001]);
            assert_eq!(fcntl_getfl(&lent).unwrap(), before, "{mode:?}");
            drop(channel);
            assert_eq!(fcntl_getfl(&lent).unwrap(), before, "{mode:?}");
            assert_eq!(std::io::Seek::stream_position(&mut lent).unwrap(), 5);
        }
    }
}

#[test]
fn an_opened_file_is_the_one_that_is_read() {
    let file = file(&noise(100_000));
    let mut channel =
        FileQueue::of_handle(FileHandle::new(File::open(file.path()).unwrap(), file.path()), FileOptions::default())
            .unwrap();
    let other = TempDir::new_in(DISK).unwrap();
    std::fs::write(other.path().join("impostor"), vec![0; 100_000]).unwrap();
    std::fs::rename(other.path().join("impostor"), file.path()).unwrap();
    let read = run(&mut channel, to_host(part(100_000), 0), LONG).unwrap();
    assert!(host_bytes(&read) == noise(100_000));
}

#[test]
fn a_channel_may_be_dropped_or_moved_while_it_reads() {
    let data = noise(16 << 20);
    let file = file(&data);
    // Fewer under slow tools, as in the suites.
    let rounds = std::env::var("DMALANE_ROUNDS").map_or(20, |n| n.parse::<u64>().unwrap()).min(20);
    for mode in [Mode::Auto, Mode::Buffered] {
        let heap = AnonHeap::new();
        for round in 0..rounds {
            let mut channel =
                FileQueue::open(file.path(), FileOptions { mode, depth: 8, ..FileOptions::default() }).unwrap();
            for i in 0..8 {
                let part = heap.allocate(2 << 20).unwrap().share().into_slice();
                let _ticket = channel.submit(to_host(part, i * (2 << 20))).unwrap();
            }
            let mut done = Vec::new();
            channel.poll(&mut done);
            if round % 2 == 0 {
                done.clear();
                drop(channel);
                assert_eq!(heap.stats().live, 0, "waited for, and freed");
                continue;
            }
            // The thread that issued the reads exits; another one collects them.
            let (mut channel, mut done) = std::thread::spawn(move || {
                channel.poll(&mut done);
                (channel, done)
            })
            .join()
            .unwrap();
            done.extend(drain(&mut channel, LONG));
            assert_eq!(done.len(), 8);
            done.sort_by_key(|c| c.ticket);
            for (i, c) in done.into_iter().enumerate() {
                assert_eq!(c.result, Ok(()));
                let at = i * (2 << 20);
                assert!(host_bytes(&c.operation) == data[at..at + (2 << 20)]);
            }
        }
        assert_eq!(dmalane_dma::quarantined_bytes(), 0);
    }
}
